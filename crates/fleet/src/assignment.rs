//! Which pool a pod is given, and which pods move between pools.

use crate::{
    names::Pool,
    tiers::{Kind, Tiers},
};

/// The pool for a pod that has none: a merchant pool below its target, else the
/// first tier of the default chain below its target, else the last of the chain.
pub(crate) fn home(tiers: &Tiers, assigned: impl Fn(&Pool) -> usize) -> Option<Pool> {
    let below = |pool: &Pool| assigned(pool) < tiers.target(pool) as usize;
    let dedicated = tiers.iter().filter(|(_, tier)| tier.kind == Kind::Dedicated);
    dedicated
        .filter_map(|(name, _)| tiers.pool(name))
        .find(below)
        .or_else(|| tiers.chain_pools().find(below))
        .or_else(|| tiers.chain_pools().next_back())
}

/// How a pool stands, as far as rebalancing cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stock {
    pub pool: Pool,
    pub assigned: usize,
    /// Pods that may leave: idle, in service, not pinned by a label.
    pub movable: usize,
}

/// So many pods should go from one pool to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shift {
    pub from: Pool,
    pub to: Pool,
    pub pods: usize,
}

/// What brings the chain tiers closer to their targets: those below, in the
/// order of the chain, take idle pods from those above, last of the chain first.
pub(crate) fn rebalance(tiers: &Tiers, stocks: &[Stock]) -> Vec<Shift> {
    let stock = |pool: &Pool| stocks.iter().find(|stock| stock.pool == *pool);
    let mut spare: Vec<(Pool, usize)> = tiers
        .chain_pools()
        .rev()
        .filter_map(|pool| {
            let stock = stock(&pool)?;
            let surplus = stock.assigned.saturating_sub(tiers.target(&pool) as usize);
            Some((pool, surplus.min(stock.movable)))
        })
        .collect();
    let mut shifts = Vec::new();
    for to in tiers.chain_pools() {
        let assigned = stock(&to).map_or(0, |stock| stock.assigned);
        let mut missing = (tiers.target(&to) as usize).saturating_sub(assigned);
        for (from, surplus) in &mut spare {
            let pods = missing.min(*surplus);
            if pods > 0 {
                shifts.push(Shift { from: from.clone(), to: to.clone(), pods });
                *surplus -= pods;
                missing -= pods;
            }
        }
    }
    shifts
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::tiers::Origin;

    fn tiers(text: &str) -> Tiers {
        Tiers::parse(text, Origin::Settings).unwrap().0
    }

    #[test]
    fn new_pods_fill_merchant_pools_then_the_chain_then_its_end() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1},
                "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
        );
        let mut assigned: HashMap<Pool, usize> = HashMap::new();
        let mut given = Vec::new();
        for _ in 0..5 {
            let pool = home(&tiers, |pool| assigned.get(pool).copied().unwrap_or(0)).unwrap();
            *assigned.entry(pool.clone()).or_default() += 1;
            given.push(pool.to_string());
        }
        assert_eq!(given, ["merchant:acme", "pool:gold", "pool:basic", "pool:basic", "pool:basic"]);
    }

    #[test]
    fn a_pod_is_moved_once() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 5}, "iron": {"target": 1}, "zinc": {}, "tin": {}},
                "default_chain": ["gold", "iron", "zinc", "tin"]}"#,
        );
        let stock =
            |pool: &str, pods| Stock { pool: pool.parse().unwrap(), assigned: pods, movable: pods };
        let shown: Vec<_> = rebalance(&tiers, &[stock("zinc", 5), stock("tin", 2)])
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
    fn pods_move_only_while_one_tier_is_above_and_another_below_target() {
        let tiers = tiers(
            r#"{"tiers": {"gold": {"target": 3}, "iron": {"target": 1}, "zinc": {"target": 1}}, "default_chain": ["gold", "iron", "zinc"]}"#,
        );
        let stock = |pool: &str, assigned, movable| Stock {
            pool: pool.parse().unwrap(),
            assigned,
            movable,
        };
        let shifts =
            rebalance(&tiers, &[stock("gold", 0, 0), stock("iron", 2, 2), stock("zinc", 3, 1)]);
        let shown: Vec<_> =
            shifts.iter().map(|s| (s.from.to_string(), s.to.to_string(), s.pods)).collect();
        let expected = |from: &str| (from.to_string(), "pool:gold".to_string(), 1);
        assert_eq!(shown, [expected("pool:zinc"), expected("pool:iron")]);
        assert!(
            rebalance(&tiers, &[stock("gold", 0, 0), stock("iron", 1, 1), stock("zinc", 1, 1)])
                .is_empty()
        );
        assert!(
            rebalance(&tiers, &[stock("gold", 3, 3), stock("iron", 9, 9), stock("zinc", 1, 1)])
                .is_empty()
        );
    }
}
