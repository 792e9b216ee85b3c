//! Draining: a pod takes no new calls and keeps its live calls.

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
    /// The pod is being deleted, so it still takes no calls.
    pub is_terminating: bool,
    pub pool: Option<Pool>,
}

impl Fleet {
    /// Drains a pod for `ttl`. Never shortens a drain: an earlier request may rely on its deadline.
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
        self.record(Change::Draining {
            pod: name.clone(),
            until: Some(drained.until),
            surplus: false,
        });
        Ok(drained)
    }

    /// Ends a drain and a quarantine early. A terminating pod stays out of service.
    pub fn undrain(&mut self, name: &PodName) -> Result<Undrained, UnknownPod> {
        let pod = self.pods.get(name).ok_or(UnknownPod)?;
        let (was_draining, is_terminating) = (pod.draining_until.is_some(), pod.facts.terminating);
        let was_quarantined = pod.quarantined_until.is_some();
        if was_draining {
            self.record(Change::Draining { pod: name.clone(), until: None, surplus: false });
        }
        self.reset_health(name);
        self.reassign_and_hand_off(name);
        let pool = self.pods.get(name).and_then(|pod| pod.pool.clone());
        Ok(Undrained { was_draining, was_quarantined, is_terminating, pool })
    }

    /// Pods whose drain may have completed since the last call: a leaving pod without calls, a
    /// removed pod, or an undrained pod. Drain requests wait for them.
    pub fn take_drained(&mut self) -> Vec<PodName> {
        std::mem::take(&mut self.drained)
    }
}
