//! Leaders of the model write pods under the epoch of their term.

use fleet::{Claim, Claimant, Fleet, PodOrigin, PodWriter};

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
