//! Moves of pods between pools: rebalancing, and the preview for a new tier table.

use std::collections::{HashMap, VecDeque};

use super::PodStatus;
use crate::{
    assignment::{self, PoolCounts},
    names::{PodName, Pool},
    tiers::Tiers,
};

/// A pod that would change its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    pub pod: PodName,
    pub from: Option<Pool>,
    /// `None` if no tier takes the pod.
    pub to: Option<Pool>,
    /// The pod moves when its calls have ended.
    pub is_busy: bool,
}

/// Idle pods to move, with their new pools, to bring the chain tiers closer to their targets.
pub fn rebalance<'a>(tiers: &Tiers, pods: &'a [PodStatus]) -> Vec<(&'a PodStatus, Pool)> {
    rebalance_from(tiers, pods, |pod| pod.pool.as_ref())
}

/// Rebalances with the pools that `pool_of` returns instead of the current ones.
fn rebalance_from<'a, 'b>(
    tiers: &Tiers,
    pods: &'a [PodStatus],
    pool_of: impl Fn(&'a PodStatus) -> Option<&'b Pool>,
) -> Vec<(&'a PodStatus, Pool)> {
    let is_movable = |pod: &PodStatus| {
        let is_pinned = pod.facts.pin.as_ref().is_some_and(|pin| tiers.resolve(pin).is_some());
        pod.calls.is_empty() && pod.is_serving() && !is_pinned
    };
    let mut members: HashMap<&Pool, (usize, VecDeque<&PodStatus>)> = HashMap::new();
    for pod in pods {
        let Some(pool) = pool_of(pod) else { continue };
        let (assigned, movable) = members.entry(pool).or_default();
        *assigned += 1;
        movable.extend(is_movable(pod).then_some(pod));
    }
    let counts = |pool: Pool| {
        let (assigned, movable) = members.get(&pool).map_or((0, 0), |it| (it.0, it.1.len()));
        PoolCounts { pool, assigned, movable }
    };
    let pools: Vec<PoolCounts> = tiers.chain_pools().map(counts).collect();
    let mut moved = Vec::new();
    for shift in assignment::rebalance(tiers, &pools) {
        let from = members.get_mut(&shift.from).map(|it| &mut it.1);
        let taken = from.into_iter().flat_map(|movable| {
            let count = shift.pods.min(movable.len());
            movable.drain(..count)
        });
        moved.extend(taken.map(|pod| (pod, shift.to.clone())));
    }
    moved
}

/// The moves that a new tier table would cause, by pod name: pods whose pool no longer exists or
/// whose label names another, then rebalancing.
pub fn moves(tiers: &Tiers, pods: &[PodStatus]) -> Vec<Move> {
    let pinned = |pod: &PodStatus| pod.facts.pin.as_ref().and_then(|pin| tiers.resolve(pin));
    let stays = |pod: &PodStatus| match (pinned(pod), &pod.pool) {
        (Some(pin), Some(pool)) => pin == *pool,
        (None, Some(pool)) => tiers.defines(pool),
        (_, None) => false,
    };
    let mut new_pools: HashMap<&PodName, Option<Pool>> = HashMap::new();
    let mut assigned: HashMap<Pool, usize> = HashMap::new();
    for pod in pods.iter().filter(|pod| stays(pod)) {
        *assigned.entry(pod.pool.clone().expect("a staying pod has a pool")).or_default() += 1;
        new_pools.insert(&pod.name, pod.pool.clone());
    }
    for pod in pods.iter().filter(|pod| !stays(pod)) {
        let count = |pool: &Pool| assigned.get(pool).copied().unwrap_or(0);
        let new_pool = pinned(pod).or_else(|| assignment::default_pool(tiers, count));
        if let Some(pool) = &new_pool {
            *assigned.entry(pool.clone()).or_default() += 1;
        }
        new_pools.insert(&pod.name, new_pool);
    }
    let rebalanced = rebalance_from(tiers, pods, |pod| new_pools[&pod.name].as_ref());
    new_pools.extend(rebalanced.into_iter().map(|(pod, pool)| (&pod.name, Some(pool))));
    let moved = |pod: &PodStatus| {
        let to = new_pools[&pod.name].clone();
        (to != pod.pool).then(|| Move {
            pod: pod.name.clone(),
            from: pod.pool.clone(),
            to,
            is_busy: !pod.calls.is_empty(),
        })
    };
    pods.iter().filter_map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::{Allocate, Edit, Fleet, PodFacts, PodOrigin, PodWriter},
        tiers::DocumentSource,
    };

    fn table(text: &str) -> Tiers {
        Tiers::parse(text, DocumentSource::Settings).unwrap().0
    }

    const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

    #[test]
    fn the_preview_matches_the_applied_table() {
        let mut fleet = Fleet::new(table(r#"{"gold": 2, "silver": 2, "basic": 2}"#), 0);
        for number in 0..6 {
            let facts = PodFacts {
                uid: "u".into(),
                address: "h:1".into(),
                ready: true,
                terminating: false,
                at_risk: false,
                restarts: 0,
                pin: None,
            };
            let name = format!("p{number}").parse().unwrap();
            fleet.observe_pod(&name, &facts, WRITER, 0).unwrap();
        }
        let busy = Allocate::new("CA1".parse().unwrap(), None, 1_000);
        let busy = fleet.allocate(&busy, 0).unwrap().pod;
        let next = table(r#"{"platinum": 1, "bronze": 5}"#);
        let preview = moves(&next, &fleet.pods());
        let is_busy: Vec<_> = preview.iter().filter(|it| it.is_busy).map(|it| &it.pod).collect();
        assert_eq!(is_busy, [&busy], "a busy pod is marked");
        fleet.apply_tiers(&next, Edit::ANY).unwrap();
        fleet.release(&crate::fleet::Release::new("CA1".parse().unwrap(), None), 1).unwrap();
        for (pod, to) in rebalance(&next, &fleet.pods()) {
            fleet.move_pod(&pod.name, &pod.facts.uid, &to, WRITER).unwrap();
        }
        let count = |pool: &str, pods: &[(PodName, Option<Pool>)]| {
            let pool: Pool = pool.parse().unwrap();
            pods.iter().filter(|(_, at)| at.as_ref() == Some(&pool)).count()
        };
        let now: Vec<_> = fleet.pods().into_iter().map(|pod| (pod.name, pod.pool)).collect();
        let predicted: Vec<_> = now
            .iter()
            .map(|(name, pool)| {
                let moved = preview.iter().find(|it| it.pod == *name);
                (name.clone(), moved.map_or(pool.clone(), |it| it.to.clone()))
            })
            .collect();
        for pool in ["pool:platinum", "pool:bronze"] {
            assert_eq!(count(pool, &predicted), count(pool, &now), "{pool}");
        }
    }
}
