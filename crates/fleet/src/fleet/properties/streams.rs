//! Media streams and gateways, checked against the oracle: I12, I13, I14.

use super::super::*;
use super::oracle::{Oracle, Stream};
use crate::{rules::SWEEP_GAP, testing::operations::GATEWAY_LEASE};

pub(super) fn attach(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Attach) {
    let call = &request.call;
    let live = fleet.call(call);
    let before = oracle.streams.get(call).cloned();
    let outcome = fleet.attach(request, now);
    let Ok(got) = outcome else {
        return check_refused(oracle, request, live, &outcome.unwrap_err());
    };
    let is_same = |known: &Stream| known.stream == request.stream;
    assert!(before.as_ref().is_none_or(is_same), "I12: a second stream of {call} is attached");
    let pod = fleet.call(call).map(|call| call.pod);
    assert_eq!(pod.as_ref(), Some(&got.pod), "I14: not the pod of {call}");
    assert_eq!(got.address, oracle.pods[&got.pod].address, "I14: the address of another pod");
    assert_eq!(live.is_none(), got.is_reallocated);
    let until = now + request.lease_ttl;
    if let Some(live) = live {
        assert_eq!(live.pod, got.pod, "I2: {call} has two pods");
        assert_eq!(live.pod_attempt, request.pod_attempt, "a stream of another attempt");
    } else {
        oracle.displace(&got.displaced);
        check_reallocated(fleet, oracle, now, request, &got);
        oracle.waiting.remove(call);
        oracle.insert(call.clone(), got.pod, until);
    }
    oracle.gateways.insert(request.gateway.clone(), now + request.gateway_lease);
    if before.is_none() {
        oracle.confirm(call, until);
        let (gateway, stream) = (request.gateway.clone(), request.stream.clone());
        oracle.streams.insert(call.clone(), Stream { gateway, stream, ending: None });
    }
}

/// A connected pod serves the call already; any other must be able to take a call.
fn check_reallocated(
    fleet: &Fleet,
    oracle: &Oracle,
    now: Millis,
    request: &Attach,
    got: &Attached,
) {
    if request.connected.as_ref().is_some_and(|connected| connected.pod == got.pod) {
        let cap = fleet.tiers.kind(&got.pool).map_or(1, |kind| kind.cap()) as usize;
        let leaving = got.displaced.iter().filter(|call| oracle.calls.contains_key(*call)).count();
        let others = oracle.calls_on(&got.pod) - leaving;
        assert!(others < cap, "I1, I3: attached beyond the cap");
        assert!(got.displaced.is_empty() || cap == 1, "only an exclusive pod is given back");
    } else {
        assert!(oracle.ended.contains(&request.call), "an unknown call got a pod");
        oracle.check_allocation(&got.pod, &got.pool, fleet, now);
    }
}

fn check_refused(
    oracle: &Oracle,
    request: &Attach,
    live: Option<CallStatus>,
    refused: &AttachRefused,
) {
    let is_accepted = live.as_ref().is_some_and(|live| !live.is_handed);
    match refused {
        AttachRefused::NotFound | AttachRefused::NoPods => assert!(!is_accepted, "I7"),
        AttachRefused::OtherAttempt => {
            assert!(live.is_none_or(|live| live.pod_attempt != request.pod_attempt), "I7");
        }
        AttachRefused::UnknownPod => {
            let connected = request.connected.as_ref().expect("the stream is connected");
            assert!(!is_accepted && !oracle.pods.contains_key(&connected.pod), "I7");
        }
        AttachRefused::AlreadyAttached => {
            let known = oracle.streams.get(&request.call);
            assert!(known.is_some_and(|known| known.stream != request.stream), "I12");
        }
    }
}

pub(super) fn detach(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Detach) {
    let known = oracle.streams.get(&request.call);
    let is_attached = known.is_some_and(|known| known.stream == request.stream);
    match fleet.detach(request, now) {
        Ok(released) => {
            assert!(is_attached && !released.is_ending, "I6: detached another stream");
            assert_eq!(Some(released.pod), oracle.remove(&request.call), "I6");
        }
        Err(refused) => {
            assert!(!is_attached && refused == NotReleased::NotFound, "I6: a detach was lost");
        }
    }
}

pub(super) fn failover(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Failover) {
    let call = &request.call;
    let (before, known) = (fleet.call(call), oracle.streams.get(call).cloned());
    match fleet.failover(request, now) {
        Ok(got) => {
            let (before, known) = (before.unwrap(), known.expect("I12: the stream is attached"));
            oracle.gateways.insert(request.gateway.clone(), now + request.gateway_lease);
            assert_eq!(fleet.call(call).unwrap().pod, got.pod, "I14: not the pod of {call}");
            if known.stream == request.next {
                return assert_eq!(before.pod, got.pod, "a repeat changes nothing");
            }
            assert_eq!(known.stream, request.stream, "I12: another stream moved");
            assert!(known.ending.is_none_or(|cause| cause == EndCause::Displaced), "I6");
            if got.pod != before.pod {
                oracle.check_allocation(&got.pod, &got.pool, fleet, now);
            }
            oracle.calls.insert(call.clone(), got.pod);
            oracle.leases.insert(call.clone(), now + request.lease_ttl);
            let (gateway, stream) = (request.gateway.clone(), request.next.clone());
            oracle.streams.insert(call.clone(), Stream { gateway, stream, ending: None });
        }
        Err(FailoverRefused::NotFound) => {
            let is_attached = known.is_some_and(|known| {
                known.stream == request.stream || known.stream == request.next
            });
            assert!(!is_attached, "I6: a failover was lost");
        }
        Err(FailoverRefused::Ending) => assert!(known.unwrap().ending.is_some(), "I7"),
        Err(refused) => {
            let is_lost = request.cause != EndCause::Unreachable;
            assert!(refused == FailoverRefused::NoPods || is_lost, "nothing is counted");
            assert_eq!(known.map(|known| known.stream).as_ref(), Some(&request.stream), "I6");
            oracle.remove(call);
        }
    }
}

pub(super) fn heartbeat(
    fleet: &mut Fleet,
    oracle: &mut Oracle,
    now: Millis,
    gateway: &GatewayId,
    relayed: &[CallSid],
) {
    let heartbeat = fleet.heartbeat(gateway, GATEWAY_LEASE, relayed, now);
    oracle.gateways.insert(gateway.clone(), now + GATEWAY_LEASE);
    let own = || oracle.streams.iter().filter(|(_, stream)| stream.gateway == *gateway);
    let ending = own().filter(|(_, stream)| stream.ending.is_some());
    let ending = ending.filter_map(|(call, stream)| Some((call.clone(), stream.ending?)));
    assert_eq!(heartbeat.ending, ending.collect::<Vec<_>>());
    assert_eq!(heartbeat.calls, own().count());
    let is_unknown = |call: &&CallSid| own().all(|(own, _)| own != *call);
    assert_eq!(heartbeat.unknown, relayed.iter().filter(is_unknown).cloned().collect::<Vec<_>>());
}

/// Runs a sweep. Call leases end at their deadline; so do the leases of gateways, except after a
/// gap without sweeps.
pub(super) fn sweep(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, limit: usize) -> Swept {
    let due = oracle.leases.values().filter(|until| **until <= now).count();
    let has_gap = oracle.swept_at.is_none_or(|at| now > at + SWEEP_GAP.min(GATEWAY_LEASE * 2 / 3));
    oracle.swept_at = Some(now);
    let swept = fleet.sweep(limit, now);
    let (by_lease, by_gateway) = swept.expired.split_at(due.min(limit));
    for ended in by_lease {
        assert!(oracle.leases[&ended.call] <= now, "I7: a lease ended early");
    }
    oracle.end(by_lease);
    if has_gap {
        let leases = oracle.gateways.values_mut();
        leases.for_each(|until| *until = now + GATEWAY_LEASE);
    }
    let is_expired = |stream: &Stream| oracle.gateways[&stream.gateway] <= now;
    let due = oracle.streams.values().filter(|stream| is_expired(stream)).count();
    assert_eq!(by_gateway.len(), due.min(limit), "gateways end at their deadline");
    for ended in by_gateway {
        let stream = &oracle.streams[&ended.call];
        assert!(is_expired(stream), "I7: the lease of a gateway ended early");
        let released = stream.ending.filter(|cause| cause.is_final());
        assert_eq!(ended.cause, released.unwrap_or(EndCause::Gateway));
    }
    oracle.end(by_gateway);
    let streams = &oracle.streams;
    let has_streams = |id: &GatewayId| streams.values().any(|stream| stream.gateway == *id);
    oracle.gateways.retain(|id, until| *until > now || has_streams(id));
    swept
}
