//! Allocate requests, checked against the oracle.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::{
    oracle::{Oracle, Waiter, free_slots},
    outbound,
};
use crate::tiers::{Strategy as Fill, TierKind};

pub(super) fn allocate(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Allocate) {
    let call = &request.call;
    let before = Choices { packed: fullest_with_free_slot(fleet), safe: with_safe_pod(fleet) };
    let ends_attempt = ends_live_attempt(fleet, oracle, request);
    // A pod that has not failed keeps the call in the same step, in service or not.
    let kept = ends_attempt.filter(|ends| *ends && has_gateway(fleet, call));
    let kept = kept.and_then(|_| oracle.calls.get(call).cloned());
    let lost_service = oracle.lost_service(call, fleet);
    let outcome = fleet.allocate(request, now);
    let is_refused = matches!(outcome, Err(Refusal { reason: RefusalReason::Replayed, .. }));
    assert_eq!(is_refused, oracle.is_replay(request, now), "replays are refused: {request:?}");
    if is_refused {
        return;
    }
    if lost_service {
        oracle.requeue(call);
    }
    // A waiting call whose pools no longer exist is handled as a new call.
    let is_stranded =
        |waiter: &Waiter| waiter.pools.iter().all(|pool| fleet.tiers.kind(pool).is_none());
    if oracle.waiting.get(call).is_some_and(is_stranded) {
        oracle.waiting.remove(call);
    }
    let was_handed =
        oracle.handed.contains_key(call) || lost_service && oracle.waiting.contains_key(call);
    match ends_attempt {
        // The gateway is asked how the stream ended.
        Some(false) => drop(oracle.end_stream(call, EndCause::Stream)),
        Some(true) => drop(oracle.remove(call)),
        None => {}
    }
    let effect = match &outcome {
        Ok(got) => &got.reservation,
        Err(refusal) => &refusal.reservation,
    };
    oracle.outbound.check_use(request, effect.as_ref(), now);
    match &outcome {
        Ok(got) => {
            if lost_service {
                // Another pod was handed off in the same operation.
                oracle.observe_handoffs(fleet, now);
            }
            assert_eq!(got.waited.is_some(), was_handed, "only a hand-off reports a waiting time");
            if !got.was_existing && got.waited.is_none() {
                check_choice(fleet, request, got, &before);
            }
            check_allocated(fleet, oracle, now, request, got, kept.as_ref());
        }
        Err(refusal) => check_refused(fleet, oracle, request, refusal),
    }
    oracle.record_signed_request(request, &outcome, now);
}

/// Whether the stream of a live call comes, or is to come, through a gateway.
fn has_gateway(fleet: &Fleet, call: &CallSid) -> bool {
    fleet.calls.get(call).is_some_and(|call| call.stream.is_some() || call.expects_stream)
}

/// Whether the request ends the live pod attempt; `None` if it reports another one, or nothing.
fn ends_live_attempt(fleet: &Fleet, oracle: &Oracle, request: &Allocate) -> Option<bool> {
    let (previous, live) = (request.previous.as_ref()?, fleet.call(&request.call)?);
    let has_gateway = has_gateway(fleet, &request.call);
    let is_live_attempt =
        (has_gateway || previous.pod == live.pod) && previous.pod_attempt == live.pod_attempt;
    if !is_live_attempt || oracle.handed.contains_key(&request.call) {
        return None;
    }
    match live.stream {
        // A released call stays over.
        Some(stream) if stream.ending.is_some_and(EndCause::is_final) => None,
        Some(_) => Some(previous.is_settled),
        None => Some(previous.is_settled || has_gateway),
    }
}

/// Pack selects the fullest pod with a free slot, a pod at risk is the last choice of its pool, and
/// a reconnect gets its previous pod last.
fn check_choice(fleet: &Fleet, request: &Allocate, got: &Allocation, before: &Choices) {
    let Some(previous) = &request.previous else {
        if let Some(TierKind::Shared { strategy: Fill::Pack, .. }) = fleet.tiers.kind(&got.pool) {
            let calls = fleet.pods[&got.pod].calls.len() - 1;
            assert_eq!(Some(calls), before.packed.get(&got.pool).copied());
        }
        let is_at_risk = fleet.pods[&got.pod].facts.at_risk;
        assert!(!is_at_risk || !before.safe.contains(&got.pool), "{} is at risk", got.pod);
        return;
    };
    if previous.pod == got.pod {
        let full = got.tried.iter().filter(|skipped| skipped.reason != SkipReason::Held);
        for pool in full.filter_map(|skipped| fleet.tiers.resolve(&skipped.step)) {
            assert_eq!(
                free_slots(fleet, &pool),
                0,
                "previous pod {} allocated although {pool} has a free slot",
                previous.pod
            );
        }
    }
}

fn check_allocated(
    fleet: &Fleet,
    oracle: &mut Oracle,
    now: Millis,
    request: &Allocate,
    got: &Allocation,
    kept: Option<&PodName>,
) {
    let (call, until) = (&request.call, now + request.lease_ttl);
    if got.waited.is_some() {
        oracle.handed.remove(call);
        assert_eq!(oracle.calls.get(call), Some(&got.pod), "not the pod of the hand-off");
        oracle.leases.insert(call.clone(), until);
    } else if let Some(before) = oracle.calls.get(call) {
        let is_same = got.was_existing && got.pod == *before;
        assert!(is_same, "I2: {call} has {before} and was given {}", got.pod);
        // The repeated answer opens a new stream, which gets the full connect timeout.
        if request.provisional && oracle.provisional.contains(call) {
            oracle.leases.insert(call.clone(), until);
        }
        return;
    } else {
        assert!(!got.was_existing, "an ended call is reported as existing");
        if kept == Some(&got.pod) {
            let cap = fleet.tiers.kind(&got.pool).expect("the pool exists").cap();
            assert!(oracle.calls_on(&got.pod) < cap as usize, "I1, I3: kept beyond the cap");
        } else {
            oracle.check_allocation(&got.pod, &got.pool, fleet, now);
        }
        oracle.insert(call.clone(), got.pod.clone(), until);
    }
    if request.provisional {
        oracle.provisional.insert(call.clone());
    }
}

fn check_refused(fleet: &Fleet, oracle: &mut Oracle, request: &Allocate, refusal: &Refusal) {
    let call = &request.call;
    let is_expected = match refusal.reason {
        RefusalReason::Unsettled => true,
        RefusalReason::CallEnded => oracle.streams.contains_key(call),
        _ => false,
    };
    assert!(is_expected || !oracle.calls.contains_key(call), "I7");
    let pools = refusal.tried.iter().filter_map(|skipped| fleet.tiers.resolve(&skipped.step));
    for pool in pools.filter(|_| refusal.reason == RefusalReason::NoPods && request.hold.is_some())
    {
        let is_dialed = refusal.reservation.as_ref().is_some_and(|it| it.merchant().is_some());
        let held = if is_dialed { 0 } else { outbound::held_in(fleet, &pool) };
        assert!(free_slots(fleet, &pool) <= held, "refused although {pool} has a free slot");
    }
    match refusal.reason {
        RefusalReason::Waiting { is_new: true, .. } => oracle.enqueue(call.clone(), fleet),
        RefusalReason::HoldExpired { .. } => drop(oracle.waiting.remove(call)),
        _ => {}
    }
}

/// The pods to choose from before a request.
struct Choices {
    packed: BTreeMap<Pool, usize>,
    /// Pools with a free slot on a pod that is not at risk.
    safe: BTreeSet<Pool>,
}

/// The pools with a free slot on a pod that is not at risk.
fn with_safe_pod(fleet: &Fleet) -> BTreeSet<Pool> {
    let is_safe = |pod: &&Pod| {
        let kind = pod.pool.as_ref().and_then(|pool| fleet.tiers.kind(pool));
        let has_slot = kind.is_some_and(|kind| pod.calls.len() < kind.cap() as usize);
        pod.is_serving() && !pod.facts.at_risk && has_slot
    };
    fleet.pods.values().filter(is_safe).filter_map(|pod| pod.pool.clone()).collect()
}

/// The number of calls of the fullest pod with a free slot, by shared pool.
fn fullest_with_free_slot(fleet: &Fleet) -> BTreeMap<Pool, usize> {
    let fullest = |pool: &Pool, index: &PoolIndex| match fleet.tiers.kind(pool) {
        Some(TierKind::Shared { max_concurrent, .. }) => {
            let has_slot = |calls: &usize| *calls < max_concurrent as usize;
            let fullest = |pods: &BTreeMap<(usize, u64), PodName>| {
                pods.keys().map(|(calls, _)| *calls).filter(has_slot).max()
            };
            index.choices().into_iter().find_map(fullest)
        }
        _ => None,
    };
    let all = fleet.pools.iter();
    all.filter_map(|(pool, index)| Some((pool.clone(), fullest(pool, index)?))).collect()
}
