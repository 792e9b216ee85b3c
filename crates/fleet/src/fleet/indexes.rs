//! Indexes derived from the facts: the pods and counts of each pool.

use std::collections::BTreeMap;

use super::{Fleet, Pod};
use crate::{
    names::{PodName, Pool},
    tiers::TierKind,
    workload,
};

/// Bits of the sequence number in the position of a pod of an ordered pool; its ordinal precedes
/// them.
const SEQUENCE_BITS: u32 = 34;
/// The rank of a pod without an ordinal in an ordered pool: after all others.
const NO_ORDINAL: u32 = (1 << (64 - SEQUENCE_BITS)) - 1;

/// The state in which a pool counts a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServiceState {
    /// In service and in the availability index, with its live calls as the score.
    Available,
    /// As available, but the last choice: in the index of pods at risk.
    AtRisk,
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
    /// The pool is ordered by ordinals.
    is_ordered: bool,
    /// Orders pods with the same number of calls: the longest unchanged first, in an ordered pool
    /// the lowest ordinal first.
    position: u64,
}

impl IndexedPod {
    /// The index that the pod is available in, in the order of choice.
    fn choice(&self) -> Option<usize> {
        match self.state {
            ServiceState::Available => Some(0),
            ServiceState::AtRisk => Some(1),
            _ => None,
        }
    }
}

/// The indexes of one pool.
#[derive(Debug, Default)]
pub(super) struct PoolIndex {
    /// Available pods, by live calls, then by position.
    pub(super) available: BTreeMap<(usize, u64), PodName>,
    /// Available pods that the cluster is about to disrupt, in the same order.
    pub(super) at_risk: BTreeMap<(usize, u64), PodName>,
    /// The numbers of pods in both indexes, by live calls.
    pub(super) levels: [BTreeMap<usize, usize>; 2],
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
        if let Some(choice) = indexed.choice() {
            *self.levels[choice].entry(indexed.calls).or_default() += 1;
        }
        match indexed.state {
            ServiceState::Available => {
                drop(self.available.insert((indexed.calls, indexed.position), name.clone()))
            }
            ServiceState::AtRisk => {
                drop(self.at_risk.insert((indexed.calls, indexed.position), name.clone()))
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
        if let Some(levels) = indexed.choice().map(|choice| &mut self.levels[choice])
            && let Some(pods) = levels.get_mut(&indexed.calls)
        {
            *pods -= 1;
            if *pods == 0 {
                levels.remove(&indexed.calls);
            }
        }
        match indexed.state {
            ServiceState::Available => {
                drop(self.available.remove(&(indexed.calls, indexed.position)))
            }
            ServiceState::AtRisk => drop(self.at_risk.remove(&(indexed.calls, indexed.position))),
            ServiceState::Busy => {}
            ServiceState::Leaving => self.leaving -= 1,
            ServiceState::Unready => self.unready -= 1,
            ServiceState::Quarantined => self.quarantined -= 1,
        }
    }

    /// The indexes of pods that can take a call, in the order of choice.
    pub(super) fn choices(&self) -> [&BTreeMap<(usize, u64), PodName>; 2] {
        [&self.available, &self.at_risk]
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
            Some(TierKind::Exclusive | TierKind::Dedicated) if !self.calls.is_empty() => {
                ServiceState::Busy
            }
            None => ServiceState::Busy,
            Some(_) if self.facts.at_risk => ServiceState::AtRisk,
            Some(_) => ServiceState::Available,
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
            (pool, state, pod.calls.len(), self.tiers.prefers_low_ordinals(pool))
        });
        let current = pod
            .indexed
            .as_ref()
            .map(|indexed| (&indexed.pool, indexed.state, indexed.calls, indexed.is_ordered));
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
        if let Some((pool, state, calls, is_ordered)) = expected {
            self.sequence += 1;
            let position = match is_ordered {
                true => position_by_ordinal(name, self.sequence),
                false => self.sequence,
            };
            let indexed = IndexedPod { pool: pool.clone(), state, calls, is_ordered, position };
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

/// The rank of a pod in an ordered pool: its ordinal.
fn rank(name: &PodName) -> u32 {
    workload::ordinal(name.as_str()).map_or(NO_ORDINAL, |ordinal| ordinal.min(NO_ORDINAL))
}

/// The position of a pod in an ordered pool. The sequence number makes it unique: pods of other
/// workloads may have the same ordinal.
fn position_by_ordinal(name: &PodName, sequence: u64) -> u64 {
    (u64::from(rank(name)) << SEQUENCE_BITS) | (sequence & ((1 << SEQUENCE_BITS) - 1))
}

/// Whether `drawn` may be the lowest ordinal of a sample of the available pods, which may
/// contain `avoid`.
pub(super) fn is_lowest_of_sample(
    index: &PoolIndex,
    drawn: &PodName,
    avoid: Option<&PodName>,
) -> bool {
    let sample = index.available.len().min(crate::rules::ORDINAL_SAMPLE);
    let may_be_sampled =
        |pod: &&PodName| *pod != drawn && (Some(*pod) == avoid || rank(pod) >= rank(drawn));
    index.available.values().filter(may_be_sampled).count() + 1 >= sample
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(ordinal: u32) -> PodName {
        format!("agent-{ordinal}").parse().unwrap()
    }

    fn index(pods: u32) -> PoolIndex {
        let mut index = PoolIndex::default();
        for ordinal in 0..pods {
            let position = position_by_ordinal(&name(ordinal), u64::from(1_000 - ordinal));
            index.available.insert((0, position), name(ordinal));
        }
        index
    }

    #[test]
    fn an_ordered_pool_lists_the_lowest_ordinal_first() {
        let first: Vec<_> = index(12).available.into_values().take(3).collect();
        assert_eq!(first, [name(0), name(1), name(2)]);
        let other: PodName = "agent".parse().unwrap();
        assert!(position_by_ordinal(&other, 1) > position_by_ordinal(&name(999_999_999), 5));
    }

    #[test]
    fn the_lowest_of_a_sample_has_enough_higher_ordinals() {
        let may_draw = |index: &PoolIndex, ordinal, avoid: Option<u32>| {
            is_lowest_of_sample(index, &name(ordinal), avoid.map(name).as_ref())
        };
        let (few, many) = (index(16), index(20));
        assert!(may_draw(&few, 0, None) && !may_draw(&few, 1, None));
        assert!(may_draw(&few, 1, Some(0)), "the sample contains the avoided pod");
        assert!(may_draw(&many, 4, None) && !may_draw(&many, 5, None));
        assert!(may_draw(&many, 5, Some(0)) && !may_draw(&many, 6, Some(0)));
    }
}
