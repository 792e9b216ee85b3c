//! An allocation, and what the witness expects of its answer.

use std::collections::BTreeMap;

use super::super::*;
use super::witness::{Waiter, Witness, room};
use crate::tiers::{Kind, Strategy as Fill};

pub(super) fn allocate(fleet: &mut Fleet, witness: &mut Witness, now: Millis, request: &Allocate) {
    let call = &request.call;
    let packed = fullest_with_room(fleet);
    let ends = ends_its_attempt(fleet, witness, request);
    let has_lost_service = witness.lost_service(call, fleet);
    let outcome = fleet.allocate(request, now);
    let is_refused = matches!(outcome, Err(Refusal { why: Why::Replayed, .. }));
    assert_eq!(is_refused, witness.is_replay(request, now), "replays are refused: {request:?}");
    if is_refused {
        return;
    }
    if has_lost_service {
        witness.requeue(call);
    }
    // A call whose pools are no more begins again.
    let is_stranded =
        |waiter: &Waiter| waiter.pools.iter().all(|pool| fleet.tiers.kind(pool).is_none());
    if witness.waiting.get(call).is_some_and(is_stranded) {
        witness.waiting.remove(call);
    }
    let was_handed =
        witness.handed.contains_key(call) || has_lost_service && witness.waiting.contains_key(call);
    if ends {
        witness.forget(call);
    }
    match &outcome {
        Ok(got) => {
            if has_lost_service {
                // It was handed another pod in the same step.
                witness.hear(fleet, now);
            }
            assert_eq!(got.waited.is_some(), was_handed, "it came for its pod");
            if !got.was_existing && got.waited.is_none() {
                is_the_best(fleet, request, got, &packed);
            }
            given(fleet, witness, now, request, got);
        }
        Err(refusal) => refused(fleet, witness, request, refusal),
    }
    witness.signs(request, &outcome, now);
}

/// Whether the request reports the end of the attempt that is live.
fn ends_its_attempt(fleet: &Fleet, witness: &Witness, request: &Allocate) -> bool {
    let (Some(after), Some(live)) = (&request.after, fleet.call(&request.call)) else {
        return false;
    };
    let is_that = after.pod == live.pod && after.attempt == live.attempt;
    is_that && after.is_final && !witness.handed.contains_key(&request.call)
}

/// A pod that packs is the fullest with room; a pod that a call has left is the last resort.
fn is_the_best(
    fleet: &Fleet,
    request: &Allocate,
    got: &Allocation,
    packed: &BTreeMap<Pool, usize>,
) {
    let Some(after) = &request.after else {
        if let Some(Kind::Shared { strategy: Fill::Pack, .. }) = fleet.tiers.kind(&got.pool) {
            let calls = fleet.pods[&got.pod].calls.len() - 1;
            assert_eq!(Some(calls), packed.get(&got.pool).copied());
        }
        return;
    };
    if after.pod == got.pod {
        for pool in got.tried.iter().filter_map(|tried| fleet.tiers.resolve(&tried.step)) {
            assert_eq!(room(fleet, &pool), 0, "back to {}, with room in {pool}", after.pod);
        }
    }
}

fn given(fleet: &Fleet, witness: &mut Witness, now: Millis, request: &Allocate, got: &Allocation) {
    let (call, until) = (&request.call, now + request.lease_ttl);
    if got.waited.is_some() {
        witness.handed.remove(call);
        assert_eq!(witness.calls.get(call), Some(&got.pod), "it was handed another pod");
        witness.leases.insert(call.clone(), until);
    } else if let Some(before) = witness.calls.get(call) {
        let is_same = got.was_existing && got.pod == *before;
        assert!(is_same, "I2: {call} has {before} and was given {}", got.pod);
        // A new document has gone out: its stream has its whole time.
        if request.provisional && witness.provisional.contains(call) {
            witness.leases.insert(call.clone(), until);
        }
        return;
    } else {
        assert!(!got.was_existing, "an ended call came back");
        witness.check(&got.pod, &got.pool, fleet, now);
        witness.begin(call.clone(), got.pod.clone(), until);
    }
    if request.provisional {
        witness.provisional.insert(call.clone());
    }
}

fn refused(fleet: &Fleet, witness: &mut Witness, request: &Allocate, refusal: &Refusal) {
    let call = &request.call;
    assert!(refusal.why == Why::Unsettled || !witness.calls.contains_key(call), "I7");
    let pools = refusal.tried.iter().filter_map(|tried| fleet.tiers.resolve(&tried.step));
    for pool in pools.filter(|_| refusal.why == Why::NoPods && request.hold.is_some()) {
        assert_eq!(room(fleet, &pool), 0, "refused although {pool} has room");
    }
    match refusal.why {
        Why::Waiting { is_new: true, .. } => witness.waits(call.clone(), fleet),
        Why::TimeOver { .. } => drop(witness.waiting.remove(call)),
        _ => {}
    }
}

/// The calls of the fullest pod with room, by shared pool.
fn fullest_with_room(fleet: &Fleet) -> BTreeMap<Pool, usize> {
    let fullest = |pool: &Pool, view: &PoolView| match fleet.tiers.kind(pool) {
        Some(Kind::Shared { max_concurrent, .. }) => view
            .open
            .keys()
            .map(|(calls, _)| *calls)
            .filter(|calls| *calls < max_concurrent as usize)
            .max(),
        _ => None,
    };
    let all = fleet.pools.iter();
    all.filter_map(|(pool, view)| Some((pool.clone(), fullest(pool, view)?))).collect()
}
