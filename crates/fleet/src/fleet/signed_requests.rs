//! Signed requests that were answered: each is good for one call. A repeat is answered from the
//! call that it began; when that has ended, the request is a replay.

use std::collections::{BTreeSet, HashMap};

use super::{Allocate, Allocation, Change, Fleet, Refusal, Why, clock_shift::shift_deadlines};
use crate::{Millis, names::Fingerprint};

/// The signature with which a call asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    pub fingerprint: Fingerprint,
    /// How long it is remembered.
    pub window: Millis,
}

/// Fingerprints, and until when they are remembered.
#[derive(Debug, Default)]
pub(super) struct Seen {
    until: HashMap<Fingerprint, Millis>,
    order: BTreeSet<(Millis, Fingerprint)>,
}

impl Seen {
    /// Remembers a fingerprint, and forgets those whose time is over.
    pub(super) fn insert(&mut self, fingerprint: Fingerprint, at: Millis, until: Millis) {
        if let Some(before) = self.until.insert(fingerprint.clone(), until) {
            self.order.remove(&(before, fingerprint.clone()));
        }
        self.order.insert((until, fingerprint));
        while let Some((until, _)) = self.order.first()
            && *until < at
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.until.remove(&oldest);
        }
    }

    fn contains(&self, fingerprint: &Fingerprint, now: Millis) -> bool {
        self.until.get(fingerprint).is_some_and(|until| now <= *until)
    }

    pub(super) fn shift(&mut self, by: i64) {
        let shift = |until: &mut Millis| *until = until.saturating_add_signed(by);
        self.until.values_mut().for_each(shift);
        shift_deadlines(&mut self.order, by);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Fingerprint, Millis)> {
        self.until.iter().map(|(fingerprint, until)| (fingerprint, *until))
    }
}

impl Fleet {
    /// Whether a signed request was answered before, and what it began is over.
    pub(super) fn is_replay(&self, request: &Allocate, now: Millis) -> bool {
        let is_live =
            self.calls.contains_key(&request.call) || self.queue.get(&request.call).is_some();
        let is_seen = |signed: &Signed| self.seen.contains(&signed.fingerprint, now);
        !is_live && request.signed.as_ref().is_some_and(is_seen)
    }

    /// Remembers a signed request that is not to be answered again with a pod. One that was
    /// refused for want of pods may come again: it has begun nothing.
    pub(super) fn note_seen(
        &mut self,
        request: &Allocate,
        outcome: &Result<Allocation, Refusal>,
        now: Millis,
    ) {
        let Some(Signed { fingerprint, window }) = &request.signed else { return };
        let is_spent = match outcome {
            Ok(_) => true,
            Err(refusal) => {
                matches!(refusal.why, Why::Waiting { .. } | Why::Over | Why::Spent)
            }
        };
        if is_spent {
            let (fingerprint, until) = (fingerprint.clone(), now + window);
            self.record(Change::Seen { fingerprint, at: now, until });
        }
    }
}
