//! Indexes derived from the facts: the pods and counts of each pool.

use std::collections::BTreeMap;

use super::{Fleet, Pod};
use crate::{
    names::{PodName, Pool},
    tiers::TierKind,
};

/// The state in which a pool counts a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServiceState {
    /// In service and in the availability index, with its live calls as the score.
    Available,
    /// In service but not available: an exclusive pod with a call, or any pod of a tier that is
    /// not in the table.
    Busy,
    Leaving,
    Unready,
    Quarantined,
}

/// The entry of a pod in the indexes of its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IndexedPod {
    pub(super) pool: Pool,
    state: ServiceState,
    pub(super) calls: usize,
    /// Orders pods with the same number of calls: the longest unchanged first.
    sequence: u64,
}

/// The indexes of one pool.
#[derive(Debug, Default)]
pub(super) struct PoolIndex {
    /// Available pods, by live calls, then by sequence number.
    pub(super) available: BTreeMap<(usize, u64), PodName>,
    pub(super) assigned: usize,
    pub(super) leaving: usize,
    pub(super) unready: usize,
    pub(super) quarantined: usize,
    pub(super) calls: usize,
}

impl PoolIndex {
    fn insert(&mut self, indexed: &IndexedPod, name: &PodName) {
        self.assigned += 1;
        self.calls += indexed.calls;
        match indexed.state {
            ServiceState::Available => {
                drop(self.available.insert((indexed.calls, indexed.sequence), name.clone()))
            }
            ServiceState::Busy => {}
            ServiceState::Leaving => self.leaving += 1,
            ServiceState::Unready => self.unready += 1,
            ServiceState::Quarantined => self.quarantined += 1,
        }
    }

    pub(super) fn remove(&mut self, indexed: &IndexedPod) {
        self.assigned -= 1;
        self.calls -= indexed.calls;
        match indexed.state {
            ServiceState::Available => {
                drop(self.available.remove(&(indexed.calls, indexed.sequence)))
            }
            ServiceState::Busy => {}
            ServiceState::Leaving => self.leaving -= 1,
            ServiceState::Unready => self.unready -= 1,
            ServiceState::Quarantined => self.quarantined -= 1,
        }
    }

    pub(super) fn in_service(&self) -> usize {
        self.assigned - self.leaving - self.unready - self.quarantined
    }
}

impl Pod {
    /// Whether the pod is draining or terminating.
    pub(super) fn is_leaving(&self) -> bool {
        self.draining_until.is_some() || self.facts.terminating
    }

    /// Whether the pod is in service: it takes calls while it has a free slot.
    pub(super) fn is_serving(&self) -> bool {
        self.facts.ready && !self.is_leaving() && self.quarantined_until.is_none()
    }

    fn service_state(&self, kind: Option<TierKind>) -> ServiceState {
        match kind {
            _ if self.is_leaving() => ServiceState::Leaving,
            _ if !self.facts.ready => ServiceState::Unready,
            _ if self.quarantined_until.is_some() => ServiceState::Quarantined,
            Some(TierKind::Shared { .. }) => ServiceState::Available,
            Some(TierKind::Exclusive | TierKind::Dedicated) if self.calls.is_empty() => {
                ServiceState::Available
            }
            _ => ServiceState::Busy,
        }
    }
}

impl Fleet {
    /// Derives the indexes of a pod from its facts. Returns whether they differed.
    pub(super) fn place(&mut self, name: &PodName) -> bool {
        let Some(pod) = self.pods.get_mut(name) else {
            return false;
        };
        let expected = pod.pool.as_ref().map(|pool| {
            let state = pod.service_state(self.tiers.kind(pool));
            (pool, state, pod.calls.len())
        });
        let current =
            pod.indexed.as_ref().map(|indexed| (&indexed.pool, indexed.state, indexed.calls));
        if expected == current {
            return false;
        }
        if let Some(before) = pod.indexed.take()
            && let Some(index) = self.pools.get_mut(&before.pool)
        {
            index.remove(&before);
        }
        if pod.is_leaving() && pod.calls.is_empty() {
            self.drained.push(name.clone());
        }
        if let Some((pool, state, calls)) = expected {
            self.sequence += 1;
            let indexed = IndexedPod { pool: pool.clone(), state, calls, sequence: self.sequence };
            if !self.pools.contains_key(pool) {
                self.pools.insert(pool.clone(), PoolIndex::default());
            }
            let index = self.pools.get_mut(pool).expect("inserted above");
            index.insert(&indexed, name);
            pod.indexed = Some(indexed);
        }
        true
    }
}
