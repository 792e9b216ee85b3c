//! Moves of pods between pools: the rebalancing, and what another tier table would move.

use std::collections::{HashMap, VecDeque};

use super::PodStatus;
use crate::{
    assignment::{self, Stock},
    names::{PodName, Pool},
    tiers::Tiers,
};

/// A pod that would change its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    pub pod: PodName,
    pub from: Option<Pool>,
    /// Nowhere, if no tier takes it.
    pub to: Option<Pool>,
    /// It would move when its calls are over.
    pub is_busy: bool,
}

/// Idle pods and the pools that they should move to, so that the tiers of the chain come
/// closer to their targets.
pub fn rebalance<'a>(tiers: &Tiers, pods: &'a [PodStatus]) -> Vec<(&'a PodStatus, Pool)> {
    rebalance_from(tiers, pods, |pod| pod.pool.as_ref())
}

/// The same for pods that are in other pools than they say.
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
    let stock = |pool: Pool| {
        let (assigned, movable) = members.get(&pool).map_or((0, 0), |it| (it.0, it.1.len()));
        Stock { pool, assigned, movable }
    };
    let stocks: Vec<Stock> = tiers.chain_pools().map(stock).collect();
    let mut moved = Vec::new();
    for shift in assignment::rebalance(tiers, &stocks) {
        let from = members.get_mut(&shift.from).map(|it| &mut it.1);
        let taken = from.into_iter().flat_map(|movable| {
            let count = shift.pods.min(movable.len());
            movable.drain(..count)
        });
        moved.extend(taken.map(|pod| (pod, shift.to.clone())));
    }
    moved
}

/// What putting a table in force would move, pods by name: those whose pool is no more or
/// whose label asks for another, then those that bring tiers closer to their targets.
pub fn moves(tiers: &Tiers, pods: &[PodStatus]) -> Vec<Move> {
    let pinned = |pod: &PodStatus| pod.facts.pin.as_ref().and_then(|pin| tiers.resolve(pin));
    let stays = |pod: &PodStatus| match (pinned(pod), &pod.pool) {
        (Some(pin), Some(pool)) => pin == *pool,
        (None, Some(pool)) => tiers.wants(pool),
        (_, None) => false,
    };
    let mut homes: HashMap<&PodName, Option<Pool>> = HashMap::new();
    let mut assigned: HashMap<Pool, usize> = HashMap::new();
    for pod in pods.iter().filter(|pod| stays(pod)) {
        *assigned.entry(pod.pool.clone().expect("it stays somewhere")).or_default() += 1;
        homes.insert(&pod.name, pod.pool.clone());
    }
    for pod in pods.iter().filter(|pod| !stays(pod)) {
        let count = |pool: &Pool| assigned.get(pool).copied().unwrap_or(0);
        let home = pinned(pod).or_else(|| assignment::home(tiers, count));
        if let Some(pool) = &home {
            *assigned.entry(pool.clone()).or_default() += 1;
        }
        homes.insert(&pod.name, home);
    }
    let shifted = rebalance_from(tiers, pods, |pod| homes[&pod.name].as_ref());
    homes.extend(shifted.into_iter().map(|(pod, pool)| (&pod.name, Some(pool))));
    let moved = |pod: &PodStatus| {
        let to = homes[&pod.name].clone();
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
        tiers::Origin,
    };

    fn table(text: &str) -> Tiers {
        Tiers::parse(text, Origin::Settings).unwrap().0
    }

    const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

    #[test]
    fn what_is_foretold_happens() {
        let mut fleet = Fleet::new(table(r#"{"gold": 2, "silver": 2, "basic": 2}"#), 0);
        for number in 0..6 {
            let facts = PodFacts {
                uid: "u".into(),
                address: "h:1".into(),
                ready: true,
                terminating: false,
                restarts: 0,
                pin: None,
            };
            let name = format!("p{number}").parse().unwrap();
            fleet.observe_pod(&name, &facts, WRITER, 0).unwrap();
        }
        let busy = Allocate::new("CA1".parse().unwrap(), None, 1_000);
        let busy = fleet.allocate(&busy, 0).unwrap().pod;
        let next = table(r#"{"platinum": 1, "bronze": 5}"#);
        let foretold = moves(&next, &fleet.pods());
        let is_busy: Vec<_> = foretold.iter().filter(|it| it.is_busy).map(|it| &it.pod).collect();
        assert_eq!(is_busy, [&busy], "a busy pod is named as such");
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
        let told: Vec<_> = now
            .iter()
            .map(|(name, pool)| {
                let moved = foretold.iter().find(|it| it.pod == *name);
                (name.clone(), moved.map_or(pool.clone(), |it| it.to.clone()))
            })
            .collect();
        for pool in ["pool:platinum", "pool:bronze"] {
            assert_eq!(count(pool, &told), count(pool, &now), "{pool}");
        }
    }
}
