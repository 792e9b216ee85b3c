//! The private indexes of a fleet, derived again the slow way.

use std::collections::{BTreeSet, HashMap};

use super::super::*;

/// Every index, derived from the facts alone. [`State`](crate::testing::invariants::State) has
/// the views that callers see.
pub(super) fn indexes_follow_from_facts(fleet: &Fleet) {
    let leases: BTreeSet<_> =
        fleet.calls.iter().map(|(sid, call)| (call.until, sid.clone())).collect();
    assert_eq!(leases, fleet.leases);
    let drains: BTreeSet<_> = fleet
        .pods
        .iter()
        .filter_map(|(name, pod)| Some((pod.draining_until?, name.clone())))
        .collect();
    assert_eq!(drains, fleet.drains);
    let quarantines: BTreeSet<_> = fleet
        .pods
        .iter()
        .filter_map(|(name, pod)| Some((pod.quarantined_until?, name.clone())))
        .collect();
    assert_eq!(quarantines, fleet.quarantines);
    let mut merchant_calls: HashMap<MerchantId, usize> = HashMap::new();
    let live = fleet.calls.values().filter_map(|call| call.merchant.clone());
    for id in live.chain(fleet.queue.iter().filter_map(|(_, place)| place.merchant.clone())) {
        *merchant_calls.entry(id).or_default() += 1;
    }
    assert_eq!(merchant_calls, fleet.merchant_calls);
    for (name, pod) in &fleet.pods {
        let distinct: BTreeSet<&CallSid> = pod.calls.iter().collect();
        assert_eq!(distinct.len(), pod.calls.len(), "{name} has a call twice");
        let pinned = pod.facts.pin.as_ref().and_then(|step| fleet.tiers.resolve(step));
        if let Some(tier) = pod.tier.as_ref().filter(|_| pod.calls.is_empty()) {
            assert!(
                fleet.tiers.wants(tier) || pinned.as_ref() == Some(tier),
                "I11: {name} idles in {tier}, which is no more"
            );
        }
    }
    fleet.pools.iter().for_each(|(pool, view)| counts_are_right(fleet, pool, view));
}

fn counts_are_right(fleet: &Fleet, pool: &Pool, view: &PoolView) {
    let members: Vec<&Pod> =
        fleet.pods.values().filter(|pod| pod.tier.as_ref() == Some(pool)).collect();
    let open: BTreeSet<&PodName> = view.open.values().collect();
    assert_eq!(view.open.len(), open.len(), "I11: a pod stands twice in {pool}");
    assert!(open.iter().all(|name| fleet.pods[*name].tier.as_ref() == Some(pool)), "I11: {pool}");
    assert_eq!(view.assigned, members.len());
    assert_eq!(view.calls, members.iter().map(|pod| pod.calls.len()).sum::<usize>());
    assert_eq!(view.leaving, members.iter().filter(|pod| pod.is_leaving()).count());
    let staying = || members.iter().filter(|pod| !pod.is_leaving());
    assert_eq!(view.unready, staying().filter(|pod| !pod.facts.ready).count());
    let is_quarantined = |pod: &&&Pod| pod.facts.ready && pod.quarantined_until.is_some();
    assert_eq!(view.quarantined, staying().filter(is_quarantined).count());
}
