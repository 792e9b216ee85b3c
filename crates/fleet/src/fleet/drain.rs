//! Draining: a pod takes no new calls, and keeps those it has.

use super::{Change, Fleet};
use crate::{
    Millis,
    names::{PodName, Pool},
};

/// No pod of that name is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such pod")]
pub struct UnknownPod;

/// A pod is draining.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    pub active_calls: usize,
    pub until: Millis,
}

/// A pod is no longer draining.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undrained {
    pub was_draining: bool,
    pub was_quarantined: bool,
    /// It takes no calls all the same: it is on its way out.
    pub is_terminating: bool,
    pub pool: Option<Pool>,
}

impl Fleet {
    /// Takes a pod out of its pool for `ttl`. A mark that lasts longer stays:
    /// whoever set it was promised that time.
    pub fn drain(
        &mut self,
        name: &PodName,
        ttl: Millis,
        now: Millis,
    ) -> Result<Drained, UnknownPod> {
        let pod = self.pods.get(name).ok_or(UnknownPod)?;
        let drained = Drained {
            active_calls: pod.calls.len(),
            until: pod.draining_until.unwrap_or(0).max(now + ttl),
        };
        self.record(Change::Draining { pod: name.clone(), until: Some(drained.until) });
        Ok(drained)
    }

    /// Ends a drain or a quarantine before its time. A terminating pod stays out.
    pub fn undrain(&mut self, name: &PodName) -> Result<Undrained, UnknownPod> {
        let pod = self.pods.get(name).ok_or(UnknownPod)?;
        let (was_draining, is_terminating) = (pod.draining_until.is_some(), pod.facts.terminating);
        let was_quarantined = pod.quarantined_until.is_some();
        if was_draining {
            self.record(Change::Draining { pod: name.clone(), until: None });
        }
        self.absolve(name);
        self.settle(name);
        let pool = self.pods.get(name).and_then(|pod| pod.tier.clone());
        Ok(Undrained { was_draining, was_quarantined, is_terminating, pool })
    }

    /// Pods that lost their last call while they were leaving, went, or serve again since the
    /// last time: the answers of waiting drains.
    pub fn take_drained(&mut self) -> Vec<PodName> {
        std::mem::take(&mut self.drained)
    }
}
