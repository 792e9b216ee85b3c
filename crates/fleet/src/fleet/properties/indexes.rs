//! The private indexes of a fleet, compared with a full derivation from the facts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::*;

/// Compares every private index with the facts.
/// [`State`](crate::testing::invariants::State) covers the public ones.
pub(super) fn check_indexes(fleet: &Fleet) {
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
    let waiting = fleet.queue.iter().filter_map(|(_, entry)| entry.merchant.clone());
    let dials = fleet.outbound.iter().map(|(_, facts)| facts.merchant.clone());
    for id in live.chain(waiting).chain(dials) {
        *merchant_calls.entry(id).or_default() += 1;
    }
    assert_eq!(merchant_calls, fleet.merchant_calls);
    for (name, pod) in &fleet.pods {
        let distinct: BTreeSet<&CallSid> = pod.calls.iter().collect();
        assert_eq!(distinct.len(), pod.calls.len(), "{name} lists a call twice");
        let pinned = pod.facts.pin.as_ref().and_then(|step| fleet.tiers.resolve(step));
        if let Some(pool) = pod.pool.as_ref().filter(|_| pod.calls.is_empty()) {
            assert!(
                fleet.tiers.defines(pool) || pinned.as_ref() == Some(pool),
                "I11: {name} is idle in {pool}, which is not in the table"
            );
        }
    }
    fleet.pools.iter().for_each(|(pool, index)| check_counts(fleet, pool, index));
}

fn check_counts(fleet: &Fleet, pool: &Pool, index: &PoolIndex) {
    let members: Vec<&Pod> =
        fleet.pods.values().filter(|pod| pod.pool.as_ref() == Some(pool)).collect();
    let indexed = index.choices().into_iter().flat_map(BTreeMap::values);
    let available: BTreeSet<&PodName> = indexed.clone().collect();
    assert_eq!(indexed.count(), available.len(), "I11: a pod is indexed twice in {pool}");
    for (pods, at_risk) in index.choices().into_iter().zip([false, true]) {
        let is_misplaced = |name: &&PodName| fleet.pods[*name].facts.at_risk != at_risk;
        assert_eq!(pods.values().find(is_misplaced), None, "I11: the wrong index of {pool}");
    }
    assert!(
        available.iter().all(|name| fleet.pods[*name].pool.as_ref() == Some(pool)),
        "I11: {pool}"
    );
    for (pods, levels) in index.choices().into_iter().zip(&index.levels) {
        let mut expected: BTreeMap<usize, usize> = BTreeMap::new();
        pods.keys().for_each(|(calls, _)| *expected.entry(*calls).or_default() += 1);
        assert_eq!(*levels, expected);
    }
    assert_eq!(index.assigned, members.len());
    assert_eq!(index.calls, members.iter().map(|pod| pod.calls.len()).sum::<usize>());
    assert_eq!(index.leaving, members.iter().filter(|pod| pod.is_leaving()).count());
    let staying = || members.iter().filter(|pod| !pod.is_leaving());
    assert_eq!(index.unready, staying().filter(|pod| !pod.facts.ready).count());
    let is_quarantined = |pod: &&&Pod| pod.facts.ready && pod.quarantined_until.is_some();
    assert_eq!(index.quarantined, staying().filter(is_quarantined).count());
}
