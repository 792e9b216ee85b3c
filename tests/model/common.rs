//! What both models need of a fleet.

use fleet::{Change, Claim, Claimant, Fleet, PodOrigin, PodWriter};

/// A leader of a term; without one it writes with whatever epoch is in force, as one that
/// nothing fences would.
pub(crate) fn writer(fleet: &mut Fleet, epoch: Option<u64>) -> PodWriter<'static> {
    let origin = &PodOrigin::List;
    let ask = Claim { origin: origin.clone(), by: Claimant::Leader { epoch: None }, force: false };
    let current = || fleet.claim_pods(&ask, 0).expect("the pods have one origin");
    PodWriter { origin, epoch: epoch.unwrap_or_else(current) }
}

/// The leader of a new term makes itself known.
pub(crate) fn begin_term(fleet: &mut Fleet, epoch: u64) -> bool {
    let by = Claimant::Leader { epoch: Some(epoch) };
    fleet.claim_pods(&Claim { origin: PodOrigin::List, by, force: false }, 0).is_ok()
}

/// The facts of a fleet and their text, in an order that is always the same; the fleet gives
/// them in none.
pub(crate) fn facts_in_order(fleet: &Fleet) -> Vec<(String, Change)> {
    let rank = |change: &Change| match change {
        Change::Pod { .. } => 1,
        Change::Home { .. } | Change::Draining { .. } | Change::Health { .. } => 2,
        Change::Call { .. } => 3,
        _ => 0,
    };
    let text = |change: &Change| serde_json::to_string(change).expect("a change is JSON");
    let mut facts: Vec<(String, Change)> =
        fleet.facts().into_iter().map(|change| (text(&change), change)).collect();
    facts.sort_by(|(a, one), (b, other)| (rank(one), a).cmp(&(rank(other), b)));
    facts
}
