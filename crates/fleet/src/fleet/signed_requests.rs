//! Replay protection: a signed request may begin one call. A repeat returns the state of that
//! call; after the call has ended, the request is a replay and is refused.

use std::collections::{BTreeSet, HashMap};

use super::{
    Allocate, Allocation, Change, Fleet, Refusal, RefusalReason, clock_shift::shift_deadlines,
};
use crate::{Millis, names::Fingerprint};

/// The signature of an allocate request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedRequest {
    pub fingerprint: Fingerprint,
    /// How long replays are detected.
    pub window: Millis,
}

/// Fingerprints of answered requests, with their expiry.
#[derive(Debug, Default)]
pub(super) struct SeenRequests {
    until: HashMap<Fingerprint, Millis>,
    order: BTreeSet<(Millis, Fingerprint)>,
}

impl SeenRequests {
    /// Inserts a fingerprint and removes expired ones.
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
    /// Whether a signed request was answered before and its call is over.
    pub(super) fn is_replay(&self, request: &Allocate, now: Millis) -> bool {
        let is_live =
            self.calls.contains_key(&request.call) || self.queue.get(&request.call).is_some();
        let is_seen =
            |signed: &SignedRequest| self.seen_requests.contains(&signed.fingerprint, now);
        !is_live && request.signed.as_ref().is_some_and(is_seen)
    }

    /// Records a signed request that must not get another pod. A request refused for lack of pods
    /// is not recorded: it began no call and may be repeated.
    pub(super) fn record_signed_request(
        &mut self,
        request: &Allocate,
        outcome: &Result<Allocation, Refusal>,
        now: Millis,
    ) {
        let Some(SignedRequest { fingerprint, window }) = &request.signed else { return };
        let is_used = match outcome {
            Ok(_) => true,
            Err(refusal) => {
                matches!(
                    refusal.reason,
                    RefusalReason::Waiting { .. }
                        | RefusalReason::CallEnded
                        | RefusalReason::RetriesExhausted
                )
            }
        };
        if is_used {
            let (fingerprint, until) = (fingerprint.clone(), now + window);
            self.record(Change::RequestSeen { fingerprint, at: now, until });
        }
    }
}
