//! Writes of pods, tiers and merchants. Writes of pods are fenced by origin and epoch; writes of
//! tiers and merchants use optimistic concurrency.

use super::{Change, EndCause, EndedCall, Fleet, Pod, PodFacts, PodWriter, WriteRefused};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// Terms of a write to a tier table or a merchant's document.
#[derive(Debug)]
pub struct Edit<'a, T: ?Sized> {
    /// The value that the write replaces; `None` replaces any value.
    pub expected: Option<&'a T>,
    /// The author, for the event log; empty if unknown.
    pub by: &'a str,
}

impl<T: ?Sized> Edit<'_, T> {
    /// Replaces any value, without an author.
    pub const ANY: Self = Self { expected: None, by: "" };
}

/// The current value is not the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("changed by another request in the meantime: read it again, then retry")]
pub struct Conflict;

/// The result of an observation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// The pod is new: its name was unknown or had a different UID.
    pub joined: bool,
    /// Calls that ended because the pod was replaced or restarted.
    pub ended: Vec<EndedCall>,
    pub pool: Option<Pool>,
}

/// When a pod is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovalMode {
    /// At once; its calls end.
    Immediate,
    /// Only if it has no calls.
    WhenIdle,
}

/// The result of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    Gone {
        ended: Vec<EndedCall>,
    },
    /// The pod has calls, and the mode is [`RemovalMode::WhenIdle`].
    Busy,
    /// No pod has this name and UID.
    NotFound,
}

/// The reason why a pod was not moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MoveRefused {
    #[error(transparent)]
    Write(#[from] WriteRefused),
    #[error("no such pod")]
    NotFound,
    #[error("the pod is busy, draining, not ready, or pinned by a label")]
    NotIdle,
    #[error("no such pool")]
    UnknownPool,
}

impl Fleet {
    /// Records the current facts about a pod. A different UID or a restarted container ends the
    /// calls of the pod.
    pub fn observe_pod(
        &mut self,
        name: &PodName,
        facts: &PodFacts,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Observed, WriteRefused> {
        self.fence(writer)?;
        let (mut observed, mut requeued) = (Observed::default(), Vec::new());
        let known = self.pods.get(name);
        let replaced = known.is_some_and(|pod| pod.facts.uid != facts.uid);
        let restarted = known.is_some_and(|pod| pod.facts.restarts < facts.restarts);
        observed.joined = known.is_none() || replaced;
        if replaced || restarted {
            (observed.ended, requeued) = self.end_calls_of(name, now);
            self.reset_health(name);
        }
        if replaced && self.pods.get(name).is_some_and(|pod| pod.draining_until.is_some()) {
            self.record(Change::Draining { pod: name.clone(), until: None, surplus: false });
        }
        let mut facts = facts.clone();
        if let Some(pod) = self.pods.get(name).filter(|_| !replaced) {
            // A status without a restart count must not reset the count.
            facts.restarts = facts.restarts.max(pod.facts.restarts);
        }
        if self.pods.get(name).is_none_or(|pod| pod.facts != facts) {
            self.record(Change::Pod { pod: name.clone(), facts });
        }
        self.reassign_and_hand_off(name);
        self.hand_off_requeued(requeued);
        observed.pool = self.pods.get(name).and_then(|pod| pod.pool.clone());
        Ok(observed)
    }

    /// Ends the calls of a pod. Returns the ended calls, and the handed-off calls that were
    /// requeued instead.
    fn end_calls_of(&mut self, name: &PodName, now: Millis) -> (Vec<EndedCall>, Vec<CallSid>) {
        let calls = self.pods.get(name).map(|pod| pod.calls.clone()).unwrap_or_default();
        let (mut ended, mut requeued) = (Vec::new(), Vec::new());
        for call in calls {
            if self.requeue(&call, now) {
                requeued.push(call);
            } else {
                ended.extend(self.end(&call, EndCause::PodGone, now));
            }
        }
        (ended, requeued)
    }

    /// Removes a pod and ends its calls.
    pub fn remove_pod(
        &mut self,
        name: &PodName,
        uid: &str,
        mode: RemovalMode,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Removed, WriteRefused> {
        self.fence(writer)?;
        match self.pods.get(name).filter(|pod| pod.facts.uid == uid) {
            None => return Ok(Removed::NotFound),
            Some(pod) if mode == RemovalMode::WhenIdle && !pod.calls.is_empty() => {
                return Ok(Removed::Busy);
            }
            Some(_) => {}
        }
        let (ended, requeued) = self.end_calls_of(name, now);
        self.record(Change::Gone { pod: name.clone() });
        self.hand_off_requeued(requeued);
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
        if !self.tiers.defines(to) {
            return Err(MoveRefused::UnknownPool);
        }
        let pod =
            self.pods.get(name).filter(|pod| pod.facts.uid == uid).ok_or(MoveRefused::NotFound)?;
        if !self.is_movable(pod) {
            return Err(MoveRefused::NotIdle);
        }
        if pod.pool.as_ref() != Some(to) {
            self.record(Change::PoolAssigned { pod: name.clone(), pool: to.clone() });
            self.hand_off_free_slots(name);
        }
        Ok(())
    }

    /// Replaces the tier table. Pods whose pool no longer exists get a new one; busy pods when
    /// their calls end.
    pub fn apply_tiers(&mut self, tiers: &Tiers, edit: Edit<'_, Tiers>) -> Result<(), Conflict> {
        if *tiers != self.tiers {
            if edit.expected.is_some_and(|known| *known != self.tiers) {
                return Err(Conflict);
            }
            self.record(Change::Tiers { tiers: tiers.clone(), by: edit.by.into() });
            let mut names: Vec<PodName> = self.pods.keys().cloned().collect();
            names.sort();
            names.iter().for_each(|name| self.reassign_and_hand_off(name));
        }
        Ok(())
    }

    /// Writes or deletes a merchant's document. For the expected value, no document equals an
    /// empty one.
    pub fn set_merchant(
        &mut self,
        id: &MerchantId,
        document: Option<&str>,
        edit: Edit<'_, str>,
    ) -> Result<(), Conflict> {
        let present = self.merchant(id);
        if present != document {
            let present = present.unwrap_or_default();
            if edit.expected.is_some_and(|known| known != present) {
                return Err(Conflict);
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

    /// Whether the pod is idle, in service and not pinned by a label.
    fn is_movable(&self, pod: &Pod) -> bool {
        pod.calls.is_empty() && pod.is_serving() && self.pinned(pod).is_none()
    }
}
