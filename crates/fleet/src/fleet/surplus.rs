//! Surplus pods: the scaler takes them out of service before the workload may remove them, and
//! returns them if demand rises.

use super::{Change, Event, EventKind, Fleet, PodWriter, WriteRefused};
use crate::{
    Millis,
    names::{PodName, Pool},
};

/// The result of a change by the scaler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surplus {
    /// The pod is out of service, with this number of live calls.
    Drained { active_calls: usize },
    /// The pod is in service again, unless another fact keeps it out.
    Returned,
    /// A request drained the pod, or it is not drained: the scaler leaves it alone.
    NotOurs,
    /// No pod has this name and UID.
    NotFound,
}

impl Fleet {
    /// Takes a surplus pod out of service for `ttl`, or returns it (`None`). A pod that a request
    /// drains is left alone: the scaler must not end that drain.
    pub fn set_surplus(
        &mut self,
        name: &PodName,
        uid: &str,
        ttl: Option<Millis>,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Surplus, WriteRefused> {
        self.fence(writer)?;
        let Some(pod) = self.pods.get(name).filter(|pod| pod.facts.uid == uid) else {
            return Ok(Surplus::NotFound);
        };
        if pod.is_surplus != pod.draining_until.is_some() || ttl.is_none() && !pod.is_surplus {
            return Ok(Surplus::NotOurs);
        }
        let active_calls = pod.calls.len();
        let until = ttl.map(|ttl| pod.draining_until.unwrap_or(0).max(now + ttl));
        self.record(Change::Draining { pod: name.clone(), until, surplus: until.is_some() });
        if until.is_some() {
            return Ok(Surplus::Drained { active_calls });
        }
        self.reassign_and_hand_off(name);
        Ok(Surplus::Returned)
    }

    /// Appends a change of the number of pods of a workload to the event log.
    pub fn record_scaling(
        &mut self,
        pool: &Pool,
        detail: &str,
        writer: PodWriter<'_>,
    ) -> Result<(), WriteRefused> {
        self.fence(writer)?;
        self.record_event(|_| Some(Event::of_pool(EventKind::Scaled, pool).with_detail(detail)));
        Ok(())
    }
}
