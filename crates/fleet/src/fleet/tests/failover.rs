//! Failover of streams, and the return of calls whose gateway or pod is lost.

use super::{
    streams::{
        GATEWAY_LEASE, attach_request, attached_fleet, connected_request, detach_request, failures,
        stream_id, stream_of, stream_request,
    },
    *,
};

/// A failover of stream 1 to stream `next`.
fn failover_request(call: &str, stream: u8, next: u8, cause: EndCause) -> Failover {
    Failover {
        call: name(call),
        stream: stream_id(stream),
        next: stream_id(next),
        gateway: name("g1"),
        gateway_lease: GATEWAY_LEASE,
        cause,
        failure: PodFailure::default(),
        max_retries: 2,
        lease_ttl: 10 * LEASE_TTL,
    }
}

/// A request after the stream of a call has ended.
fn return_request(call: &str, pod: &str, pod_attempt: u32, is_settled: bool) -> Allocate {
    let previous = PreviousPod { is_settled, ..previous_pod(pod, pod_attempt) };
    Allocate { previous: Some(previous), ..stream_request(call) }
}

#[test]
fn a_failover_moves_the_stream_to_another_pod() {
    let mut fleet = attached_fleet(2);
    let request = failover_request("c1", 1, 2, EndCause::PodLost);
    let attached = fleet.failover(&request, NOW + 10).unwrap();
    assert_eq!((attached.pod.to_string(), attached.ordinal), ("p2".into(), 2));
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.pod, call.pod_attempt), (name("p2"), 1));
    let stream = call.stream.unwrap();
    assert_eq!((stream.stream, stream.since, stream.ending), (stream_id(2), NOW, None));
    assert_eq!(failures(&fleet, "p1"), 1);
    allocate_on(&mut fleet, &stream_request("c2"), "p1");
    // A repeat, because the reply was lost.
    let again = fleet.failover(&request, NOW + 20).unwrap();
    assert_eq!(again, attached);
    assert_eq!(failures(&fleet, "p2"), 0);
    assert_eq!(
        fleet.failover(&failover_request("c1", 1, 3, EndCause::PodLost), NOW),
        Err(FailoverRefused::NotFound)
    );
    let released = fleet.detach(&detach_request("c1", 2, EndCause::Agent), NOW + 50).unwrap();
    assert_eq!((released.pod, released.lasted), (name("p2"), 50));
}

#[test]
fn a_pod_that_was_never_reached_uses_no_retry() {
    let mut fleet = attached_fleet(3);
    fleet.prefer(HashMap::new());
    for (stream, expected) in [(1, "p2"), (2, "p3"), (3, "p1"), (4, "p2")] {
        let request = failover_request("c1", stream, stream + 1, EndCause::Unreachable);
        let attached = fleet.failover(&Failover { max_retries: 0, ..request }, NOW).unwrap();
        assert_eq!((attached.pod, attached.ordinal), (name(expected), 1));
    }
    assert_eq!(["p1", "p2", "p3"].map(|pod| failures(&fleet, pod)), [2, 1, 1]);
}

#[test]
fn a_call_that_has_lost_too_many_pods_ends() {
    let mut fleet = attached_fleet(4);
    for stream in [1, 2] {
        let request = failover_request("c1", stream, stream + 1, EndCause::PodLost);
        fleet.failover(&request, NOW).unwrap();
    }
    let last = failover_request("c1", 3, 4, EndCause::PodLost);
    assert_eq!(fleet.failover(&last, NOW), Err(FailoverRefused::RetriesExhausted));
    assert_eq!((fleet.active_calls(), fleet.gateways()[0].calls.len()), (0, 0));
    // The document of the call still names its first pod attempt.
    let reason = refusal_reason(&mut fleet, &return_request("c1", "p1", 1, true), NOW);
    assert_eq!(reason, RefusalReason::RetriesExhausted);
}

#[test]
fn the_same_pod_is_used_again_only_if_no_other_is_free() {
    let mut fleet = attached_fleet(1);
    let request = failover_request("c1", 1, 2, EndCause::PodLost);
    assert_eq!(fleet.failover(&request, NOW).unwrap().pod, name("p1"));
    assert_eq!(stream_of(&fleet, "c1").unwrap().stream, stream_id(2));
    fleet.drain(&name("p1"), LEASE_TTL, NOW).unwrap();
    let request = failover_request("c1", 2, 3, EndCause::Unreachable);
    assert_eq!(fleet.failover(&request, NOW), Err(FailoverRefused::NoPods));
    assert_eq!(fleet.history.get(&name("c1"), NOW).unwrap().cause, EndCause::Unreachable);
}

#[test]
fn a_stream_without_a_free_pod_may_wait_for_one() {
    let mut fleet = attached_fleet(2);
    allocate_on(&mut fleet, &plain_request("c2"), "p2");
    fleet.drain(&name("p1"), LEASE_TTL, NOW).unwrap();
    let request = failover_request("c1", 1, 2, EndCause::PodLost);
    assert_eq!(fleet.failover(&request, NOW), Err(FailoverRefused::NoPods));
    let hold = waiting_request("c1").hold;
    let wait = Allocate { hold, ..return_request("c1", "p1", 1, true) };
    let reason = refusal_reason(&mut fleet, &wait, NOW);
    assert!(matches!(reason, RefusalReason::Waiting { is_new: true, .. }), "{reason:?}");
    end(&mut fleet, "c2", EndCause::Agent, NOW);
    let allocation = fleet.allocate(&wait, NOW).unwrap();
    assert_eq!((allocation.pod, allocation.pod_attempt), (name("p2"), 2));
    let attach = Attach { pod_attempt: 2, ..attach_request("c1", 2) };
    assert_eq!(fleet.attach(&attach, NOW).unwrap().ordinal, 2);
}

#[test]
fn a_released_call_does_not_fail_over() {
    let mut fleet = attached_fleet(2);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    let request = failover_request("c1", 1, 2, EndCause::PodLost);
    assert_eq!(fleet.failover(&request, NOW), Err(FailoverRefused::Ending));
    assert_eq!(pod_of(&fleet, "c1"), Some("p1".into()));
}

#[test]
fn a_call_returns_to_its_pod_if_its_gateway_is_lost() {
    let mut fleet = attached_fleet(2);
    fleet.failover(&failover_request("c1", 1, 2, EndCause::PodLost), NOW).unwrap();
    assert_eq!(pod_of(&fleet, "c1"), Some("p2".into()));
    // The gateway is asked how the stream ended, and does not answer.
    let ask = return_request("c1", "p1", 1, false);
    assert_eq!(refusal_reason(&mut fleet, &ask, NOW), RefusalReason::Unsettled);
    assert_eq!(fleet.take_ending(), [name("g1")]);
    let heartbeat = fleet.heartbeat(&name("g1"), GATEWAY_LEASE, &[], NOW);
    assert_eq!(heartbeat.ending, [(name("c1"), EndCause::Stream)]);
    assert_eq!(refusal_reason(&mut fleet, &ask, NOW), RefusalReason::Unsettled);
    assert!(fleet.take_ending().is_empty(), "the gateway is asked once");
    let returned = fleet.allocate(&return_request("c1", "p1", 1, true), NOW).unwrap();
    assert_eq!((returned.pod, returned.pod_attempt), (name("p2"), 3));
    assert_eq!(failures(&fleet, "p2"), 0);
    assert!(fleet.call(&name("c1")).unwrap().provisional);
    // The stream of the lost gateway cannot end the call any more.
    let detached = fleet.detach(&detach_request("c1", 2, EndCause::Agent), NOW);
    assert_eq!(detached, Err(NotReleased::NotFound));
}

#[test]
fn a_call_that_its_gateway_ended_does_not_return() {
    for (cause, expected) in [
        (EndCause::Agent, Err(RefusalReason::CallEnded)),
        (EndCause::Provider, Err(RefusalReason::CallEnded)),
        (EndCause::Gateway, Ok(name("p1"))),
        (EndCause::PodLost, Ok(name("p2"))),
    ] {
        let mut fleet = attached_fleet(2);
        let ask = return_request("c1", "p1", 1, false);
        assert_eq!(refusal_reason(&mut fleet, &ask, NOW), RefusalReason::Unsettled);
        fleet.detach(&detach_request("c1", 1, cause), NOW).unwrap();
        let outcome = fleet.allocate(&ask, NOW);
        let outcome: Result<PodName, RefusalReason> =
            outcome.map(|it| it.pod).map_err(|refusal| refusal.reason);
        assert_eq!(outcome, expected, "{cause:?}");
    }
}

#[test]
fn a_released_call_does_not_return_while_its_agent_finishes() {
    let mut fleet = attached_fleet(2);
    let ask = return_request("c1", "p1", 1, false);
    assert_eq!(refusal_reason(&mut fleet, &ask, NOW), RefusalReason::Unsettled);
    end(&mut fleet, "c1", EndCause::Provider, NOW);
    assert_eq!(stream_of(&fleet, "c1").unwrap().ending, Some(EndCause::Provider));
    assert_eq!(refusal_reason(&mut fleet, &ask, NOW), RefusalReason::CallEnded);
}

#[test]
fn a_call_without_a_stream_keeps_its_pod_when_it_returns() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate_on(&mut fleet, &stream_request("c1"), "p2");
    fleet.drain(&name("p2"), LEASE_TTL, NOW).unwrap();
    let returned = fleet.allocate(&return_request("c1", "p2", 1, false), NOW).unwrap();
    assert_eq!((returned.pod, returned.pod_attempt), (name("p2"), 2), "it serves the call");
    assert_eq!(failures(&fleet, "p2"), 0);
    let last = return_request("c1", "p2", 2, true);
    fleet.allocate(&last, NOW).unwrap();
    let reason = refusal_reason(&mut fleet, &return_request("c1", "p2", 3, true), NOW);
    assert_eq!(reason, RefusalReason::RetriesExhausted);
}

/// A fleet whose call `c1` is connected to `p1` by a gateway that was cut off, while `p1` was given
/// to `c2` at `NOW`.
fn conflicting_fleet(request: &Allocate) -> Fleet {
    let mut fleet = attached_fleet(2);
    fleet.detach(&detach_request("c1", 1, EndCause::Gateway), NOW).unwrap();
    allocate_on(&mut fleet, request, "p1");
    fleet
}

#[test]
fn the_later_stream_leaves_an_exclusive_pod() {
    let mut fleet = conflicting_fleet(&stream_request("c2"));
    let other = Attach { gateway: name("g2"), ..attach_request("c2", 7) };
    fleet.attach(&other, NOW).unwrap();
    // Attached at the same time: the stream that comes back moves.
    let mut again = connected_request("c1", "p1");
    assert_eq!(fleet.attach(&again, NOW), Err(AttachRefused::NoPods));
    again.connected.as_mut().unwrap().age = 5_000;
    again.connected.as_mut().unwrap().failovers = 1;
    let attached = fleet.attach(&again, NOW).unwrap();
    assert_eq!((attached.displaced, attached.ordinal), (vec![name("c2")], 2));
    assert_eq!(stream_of(&fleet, "c1").unwrap().since, NOW - 5_000);
    assert_eq!(fleet.take_ending(), [name("g2")]);
    let order = fleet.heartbeat(&name("g2"), GATEWAY_LEASE, &[], NOW).ending;
    assert_eq!(order, [(name("c2"), EndCause::Displaced)]);
    let moved =
        Failover { gateway: name("g2"), ..failover_request("c2", 7, 8, EndCause::Displaced) };
    assert_eq!(fleet.failover(&moved, NOW).unwrap().pod, name("p2"));
    assert_eq!(failures(&fleet, "p1"), 0);
    assert_eq!(stream_of(&fleet, "c2").unwrap().ending, None);
    assert!(fleet.pods[&name::<PodName>("p1")].calls.iter().eq([&name::<CallSid>("c1")]));
}

#[test]
fn a_call_without_a_stream_leaves_the_pod_of_a_stream_that_comes_back() {
    let mut again = connected_request("c1", "p1");
    again.connected.as_mut().unwrap().age = 1;
    let mut fleet = conflicting_fleet(&stream_request("c2"));
    assert_eq!(fleet.attach(&again, NOW).unwrap().displaced, [name("c2")]);
    assert_eq!(pod_of(&fleet, "c2"), None);
    assert_eq!(fleet.attach(&attach_request("c2", 5), NOW).unwrap().pod, name("p2"));
    // A call that is not relayed by a gateway cannot move.
    let mut fleet = conflicting_fleet(&plain_request("c2"));
    assert_eq!(fleet.attach(&again, NOW), Err(AttachRefused::NoPods));
}
