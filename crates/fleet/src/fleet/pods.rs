//! Pods come, change, move and go; so do tiers and merchants. These are the
//! writes of a leader, and carry its epoch.

use super::{Cause, Change, EndedCall, Fleet, Pod, PodFacts, PodWriter, WriteRefused};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// A change of what people have set.
#[derive(Debug)]
pub struct Edit<'a, T: ?Sized> {
    /// What it replaces, as far as its author knows.
    pub instead_of: Option<&'a T>,
    /// Who it is, if that is known.
    pub by: &'a str,
}

impl<T: ?Sized> Edit<'_, T> {
    /// Whatever is there, and whoever asks.
    pub const ANY: Self = Self { instead_of: None, by: "" };
}

/// It is no longer what the author of a change believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("somebody else has changed it meanwhile: look again")]
pub struct Changed;

/// What an observation changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// The pod was not known before, or under this name only as another one.
    pub joined: bool,
    /// Calls that ended because the agent that had them is gone.
    pub ended: Vec<EndedCall>,
    pub pool: Option<Pool>,
}

/// When a pod is to be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// It is no more, and its calls are over.
    Now,
    /// It leaves, and stays for as long as it has calls.
    WhenIdle,
}

/// What became of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    Gone {
        ended: Vec<EndedCall>,
    },
    /// The pod has calls, and was to go only without.
    Busy,
    /// No such pod, or another one under its name: nothing was removed.
    NotThere,
}

/// Why a pod stays where it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MoveRefused {
    #[error(transparent)]
    Write(#[from] WriteRefused),
    #[error("no such pod")]
    NotThere,
    #[error("the pod is busy, draining, not ready, or pinned by a label")]
    NotIdle,
    #[error("no such pool")]
    UnknownPool,
}

impl Fleet {
    /// Takes note of a pod as it is now. Another UID, or a restarted agent,
    /// means that the calls on it are over.
    pub fn observe_pod(
        &mut self,
        name: &PodName,
        facts: &PodFacts,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Observed, WriteRefused> {
        self.fence(writer)?;
        let (mut observed, mut seatless) = (Observed::default(), Vec::new());
        let known = self.pods.get(name);
        let replaced = known.is_some_and(|pod| pod.facts.uid != facts.uid);
        let restarted = known.is_some_and(|pod| pod.facts.restarts < facts.restarts);
        observed.joined = known.is_none() || replaced;
        if replaced || restarted {
            (observed.ended, seatless) = self.end_calls_of(name, now);
            self.absolve(name);
        }
        if replaced && self.pods.get(name).is_some_and(|pod| pod.draining_until.is_some()) {
            self.record(Change::Draining { pod: name.clone(), until: None });
        }
        let mut facts = facts.clone();
        if let Some(pod) = self.pods.get(name).filter(|_| !replaced) {
            // A status may come without a count; that is no news.
            facts.restarts = facts.restarts.max(pod.facts.restarts);
        }
        if self.pods.get(name).is_none_or(|pod| pod.facts != facts) {
            self.record(Change::Pod { pod: name.clone(), facts });
        }
        self.settle(name);
        self.reseat(seatless);
        observed.pool = self.pods.get(name).and_then(|pod| pod.tier.clone());
        Ok(observed)
    }

    /// Ends the calls of a pod. Those that were handed it and have not come for it
    /// yet have their places back, and are the second part of the answer.
    fn end_calls_of(&mut self, name: &PodName, now: Millis) -> (Vec<EndedCall>, Vec<CallSid>) {
        let mut calls = self.pods.get(name).map(|pod| pod.calls.clone()).unwrap_or_default();
        calls.sort();
        let (mut over, mut seatless) = (Vec::new(), Vec::new());
        for call in calls {
            if self.requeue(&call, now) {
                seatless.push(call);
            } else {
                over.extend(self.end(&call, Cause::PodGone, now));
            }
        }
        (over, seatless)
    }

    /// Forgets a pod that has left, with its calls.
    pub fn remove_pod(
        &mut self,
        name: &PodName,
        uid: &str,
        departure: Departure,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Removed, WriteRefused> {
        self.fence(writer)?;
        match self.pods.get(name).filter(|pod| pod.facts.uid == uid) {
            None => return Ok(Removed::NotThere),
            Some(pod) if departure == Departure::WhenIdle && !pod.calls.is_empty() => {
                return Ok(Removed::Busy);
            }
            Some(_) => {}
        }
        let (ended, seatless) = self.end_calls_of(name, now);
        self.record(Change::Gone { pod: name.clone() });
        self.reseat(seatless);
        Ok(Removed::Gone { ended })
    }

    /// Moves an idle pod to another pool of the table.
    pub fn move_pod(
        &mut self,
        name: &PodName,
        uid: &str,
        to: &Pool,
        writer: PodWriter<'_>,
    ) -> Result<(), MoveRefused> {
        self.fence(writer)?;
        if !self.tiers.wants(to) {
            return Err(MoveRefused::UnknownPool);
        }
        let pod =
            self.pods.get(name).filter(|pod| pod.facts.uid == uid).ok_or(MoveRefused::NotThere)?;
        if !self.is_movable(pod) {
            return Err(MoveRefused::NotIdle);
        }
        if pod.tier.as_ref() != Some(to) {
            self.record(Change::Home { pod: name.clone(), pool: to.clone() });
            self.serve(name);
        }
        Ok(())
    }

    /// Puts another tier table in force. Pods whose pool is gone get a new one,
    /// busy ones when their calls end.
    pub fn apply_tiers(&mut self, tiers: &Tiers, edit: Edit<'_, Tiers>) -> Result<(), Changed> {
        if *tiers != self.tiers {
            if edit.instead_of.is_some_and(|known| *known != self.tiers) {
                return Err(Changed);
            }
            self.record(Change::Tiers { tiers: tiers.clone(), by: edit.by.into() });
            let mut names: Vec<PodName> = self.pods.keys().cloned().collect();
            names.sort();
            names.iter().for_each(|name| self.settle(name));
        }
        Ok(())
    }

    /// Writes a merchant's document, or takes it away. No document is an empty one.
    pub fn set_merchant(
        &mut self,
        id: &MerchantId,
        document: Option<&str>,
        edit: Edit<'_, str>,
    ) -> Result<(), Changed> {
        let present = self.merchant(id);
        if present != document {
            let present = present.unwrap_or_default();
            if edit.instead_of.is_some_and(|known| known != present) {
                return Err(Changed);
            }
            let (document, by) = (document.map(str::to_owned), edit.by.into());
            self.record(Change::Merchant { id: id.clone(), document, by });
        }
        Ok(())
    }

    /// A merchant's document, if it has one.
    pub fn merchant(&self, id: &MerchantId) -> Option<&str> {
        self.merchants.get(id).map(|merchant| merchant.document.as_str())
    }

    /// Idle, in service, and not where a label wants it.
    fn is_movable(&self, pod: &Pod) -> bool {
        pod.calls.is_empty() && pod.is_serving() && self.pinned(pod).is_none()
    }
}
