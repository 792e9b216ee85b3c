//! Helpers of both models.

use fleet::{Change, Claim, Claimant, Fleet, PodOrigin, PodWriter};

/// The writer of an epoch. Without an epoch it uses the current one, as if there were no fencing.
pub(crate) fn writer(fleet: &mut Fleet, epoch: Option<u64>) -> PodWriter<'static> {
    let origin = &PodOrigin::List;
    let claim =
        Claim { origin: origin.clone(), by: Claimant::Leader { epoch: None }, force: false };
    let current = || fleet.claim_pods(&claim, 0).expect("all claims have the same origin");
    PodWriter { origin, epoch: epoch.unwrap_or_else(current) }
}

/// A new leader claims the pods. Returns whether the store accepted its epoch.
pub(crate) fn claim_epoch(fleet: &mut Fleet, epoch: u64) -> bool {
    let by = Claimant::Leader { epoch: Some(epoch) };
    fleet.claim_pods(&Claim { origin: PodOrigin::List, by, force: false }, 0).is_ok()
}

/// The facts of a fleet and their JSON, in a deterministic order.
pub(crate) fn sorted_facts(fleet: &Fleet) -> Vec<(String, Change)> {
    let rank = |change: &Change| match change {
        Change::Pod { .. } => 1,
        Change::PoolAssigned { .. } | Change::Draining { .. } | Change::Health { .. } => 2,
        Change::Call { .. } => 3,
        _ => 0,
    };
    let text = |change: &Change| serde_json::to_string(change).expect("changes serialize to JSON");
    let mut facts: Vec<(String, Change)> =
        fleet.facts().into_iter().map(|change| (text(&change), change)).collect();
    facts.sort_by(|(a, one), (b, other)| (rank(one), a).cmp(&(rank(other), b)));
    facts
}
