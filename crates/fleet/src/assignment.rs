//! Pool assignment for new pods, and rebalancing between pools.

use crate::{
    names::Pool,
    tiers::{TierKind, Tiers},
};

/// The pool for a pod without one: a merchant pool below its target, else the first tier of
/// the default chain below its target, else the last tier of the chain. Tiers with a workload take
/// the pods of that workload only.
pub fn default_pool(tiers: &Tiers, assigned: impl Fn(&Pool) -> usize) -> Option<Pool> {
    let below = |pool: &Pool| assigned(pool) < tiers.target(pool) as usize;
    let dedicated = tiers.iter().filter(|(_, tier)| tier.kind == TierKind::Dedicated);
    dedicated
        .filter_map(|(name, _)| tiers.pool(name))
        .find(below)
        .or_else(|| tiers.chain_pools().find(below))
        .or_else(|| last_pool(tiers))
}

/// The last tier of the chain that takes any pod.
fn last_pool(tiers: &Tiers) -> Option<Pool> {
    tiers.chain_pools().rfind(|pool| tiers.workload(pool).is_none())
}

/// The pods of one pool, as input to [`rebalance`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolCounts {
    pub pool: Pool,
    pub assigned: usize,
    /// Pods that may move: idle, in service, not pinned by a label.
    pub movable: usize,
}

/// A number of pods to move from one pool to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodShift {
    pub from: Pool,
    pub to: Pool,
    pub pods: usize,
}

/// Moves that bring the tiers of the default chain closer to their targets. Tiers below target,
/// in chain order, take idle pods from tiers above target, last of the chain first. The pods that a
/// tier with a workload has from before go to the last tier if none is below target.
pub(crate) fn rebalance(tiers: &Tiers, pools: &[PoolCounts]) -> Vec<PodShift> {
    let counts = |pool: &Pool| pools.iter().find(|counts| counts.pool == *pool);
    let mut surpluses: Vec<(Pool, usize)> = tiers
        .chain_pools()
        .rev()
        .filter_map(|pool| {
            let counts = counts(&pool)?;
            let surplus = counts.assigned.saturating_sub(tiers.target(&pool) as usize);
            Some((pool, surplus.min(counts.movable)))
        })
        .collect();
    let mut shifts = Vec::new();
    for to in tiers.chain_pools() {
        let assigned = counts(&to).map_or(0, |counts| counts.assigned);
        let mut missing = (tiers.target(&to) as usize).saturating_sub(assigned);
        for (from, surplus) in &mut surpluses {
            let pods = missing.min(*surplus);
            if pods > 0 {
                shifts.push(PodShift { from: from.clone(), to: to.clone(), pods });
                *surplus -= pods;
                missing -= pods;
            }
        }
    }
    let former = surpluses.into_iter().filter(|(from, _)| tiers.workload(from).is_some());
    for (from, pods) in former.filter(|(_, pods)| *pods > 0) {
        shifts.extend(last_pool(tiers).map(|to| PodShift { from, to, pods }));
    }
    shifts
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::tiers::DocumentSource;

    fn tiers(text: &str) -> Tiers {
        Tiers::parse(text, DocumentSource::Settings).unwrap().0
    }

    #[test]
    fn new_pods_fill_merchant_pools_then_chain_tiers_then_the_last_tier() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1},
                "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
        );
        let mut assigned: HashMap<Pool, usize> = HashMap::new();
        let mut given = Vec::new();
        for _ in 0..5 {
            let pool =
                default_pool(&tiers, |pool| assigned.get(pool).copied().unwrap_or(0)).unwrap();
            *assigned.entry(pool.clone()).or_default() += 1;
            given.push(pool.to_string());
        }
        assert_eq!(given, ["merchant:acme", "pool:gold", "pool:basic", "pool:basic", "pool:basic"]);
    }

    #[test]
    fn a_tier_with_a_workload_takes_no_other_pods() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 5, "workload": "deployment/gold"}, "iron": {},
                "zinc": {"target": 5, "workload": "deployment/zinc"}}, "default_chain": ["gold", "iron", "zinc"]}"#,
        );
        let iron: Pool = "iron".parse().unwrap();
        assert_eq!(default_pool(&tiers, |_| 0), Some(iron.clone()));
        let counts = |pool: &str, pods| PoolCounts {
            pool: pool.parse().unwrap(),
            assigned: pods,
            movable: pods,
        };
        assert!(rebalance(&tiers, &[counts("iron", 5)]).is_empty());
    }

    #[test]
    fn rebalancing_moves_each_pod_once() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 5}, "iron": {"target": 1}, "zinc": {}, "tin": {}},
                "default_chain": ["gold", "iron", "zinc", "tin"]}"#,
        );
        let counts = |pool: &str, pods| PoolCounts {
            pool: pool.parse().unwrap(),
            assigned: pods,
            movable: pods,
        };
        let shown: Vec<_> = rebalance(&tiers, &[counts("zinc", 5), counts("tin", 2)])
            .iter()
            .map(|shift| format!("{} from {} to {}", shift.pods, shift.from, shift.to))
            .collect();
        assert_eq!(
            shown,
            [
                "2 from pool:tin to pool:gold",
                "3 from pool:zinc to pool:gold",
                "1 from pool:zinc to pool:iron"
            ]
        );
    }

    #[test]
    fn a_tier_with_a_workload_loses_the_idle_pods_that_it_had_before() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"workload": "deployment/new"}, "iron": {"target": 2}, "zinc": {}},
                "default_chain": ["gold", "iron", "zinc"]}"#,
        );
        let counts = |pool: &str, assigned, movable| PoolCounts {
            pool: pool.parse().unwrap(),
            assigned,
            movable,
        };
        let shown: Vec<_> = rebalance(&tiers, &[counts("gold", 9, 5), counts("iron", 1, 1)])
            .iter()
            .map(|shift| format!("{} from {} to {}", shift.pods, shift.from, shift.to))
            .collect();
        assert_eq!(shown, ["1 from pool:gold to pool:iron", "4 from pool:gold to pool:zinc"]);
    }

    #[test]
    fn pods_move_only_while_one_tier_is_above_and_another_below_target() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 3}, "iron": {"target": 1}, "zinc": {"target": 1}}, "default_chain": ["gold", "iron", "zinc"]}"#,
        );
        let counts = |pool: &str, assigned, movable| PoolCounts {
            pool: pool.parse().unwrap(),
            assigned,
            movable,
        };
        let shifts =
            rebalance(&tiers, &[counts("gold", 0, 0), counts("iron", 2, 2), counts("zinc", 3, 1)]);
        let shown: Vec<_> =
            shifts.iter().map(|s| (s.from.to_string(), s.to.to_string(), s.pods)).collect();
        let expected = |from: &str| (from.to_string(), "pool:gold".to_string(), 1);
        assert_eq!(shown, [expected("pool:zinc"), expected("pool:iron")]);
        assert!(
            rebalance(&tiers, &[counts("gold", 0, 0), counts("iron", 1, 1), counts("zinc", 1, 1)])
                .is_empty()
        );
        assert!(
            rebalance(&tiers, &[counts("gold", 3, 3), counts("iron", 9, 9), counts("zinc", 1, 1)])
                .is_empty()
        );
    }
}
