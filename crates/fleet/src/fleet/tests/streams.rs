//! Media streams: attach, detach and ending calls.

use super::*;
use crate::names::StreamId;

pub(super) const GATEWAY_LEASE: Millis = 30_000;

/// A request of a call whose stream comes through a gateway.
pub(super) fn stream_request(call: &str) -> Allocate {
    Allocate { expects_stream: true, may_return: true, ..provisional_request(call) }
}

pub(super) fn stream_id(number: u8) -> StreamId {
    name(&format!("{number:016x}"))
}

/// An attach of the first pod attempt by gateway `g1`.
pub(super) fn attach_request(call: &str, stream: u8) -> Attach {
    Attach {
        call: name(call),
        pod_attempt: 1,
        gateway: name("g1"),
        gateway_lease: GATEWAY_LEASE,
        stream: stream_id(stream),
        lease_ttl: 10 * LEASE_TTL,
        connected: None,
    }
}

/// A repeated attach of a stream that is connected to a pod.
pub(super) fn connected_request(call: &str, pod: &str) -> Attach {
    let connected = ConnectedStream { pod: name(pod), age: 0, failovers: 0, merchant: None };
    Attach { connected: Some(connected), ..attach_request(call, 1) }
}

pub(super) fn detach_request(call: &str, stream: u8, cause: EndCause) -> Detach {
    Detach { call: name(call), stream: stream_id(stream), cause, failure: PodFailure::default() }
}

/// A fleet with this number of pods and an attached call `c1` on `p1`.
pub(super) fn attached_fleet(pods: usize) -> Fleet {
    let mut fleet = fleet(&format!(r#"{{"gold": {pods}}}"#), pods);
    allocate_on(&mut fleet, &stream_request("c1"), "p1");
    fleet.attach(&attach_request("c1", 1), NOW).unwrap();
    fleet
}

pub(super) fn stream_of(fleet: &Fleet, call: &str) -> Option<AttachedStream> {
    fleet.call(&name(call)).and_then(|call| call.stream)
}

pub(super) fn failures(fleet: &Fleet, pod: &str) -> u32 {
    fleet.pods[&name::<PodName>(pod)].failures
}

#[test]
fn an_attach_confirms_a_provisional_call() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let request = Allocate { merchant: Some(name("m")), ..stream_request("c1") };
    allocate_on(&mut fleet, &request, "p2");
    assert!(fleet.call(&name("c1")).unwrap().provisional);
    let attached = fleet.attach(&attach_request("c1", 1), NOW + 5).unwrap();
    let expected = Attached {
        pod: name("p2"),
        address: "a:1".into(),
        pool: name("gold"),
        merchant: Some(name("m")),
        is_reallocated: false,
        ordinal: 1,
        displaced: Vec::new(),
    };
    assert_eq!(attached, expected);
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.provisional, call.lease_until), (false, NOW + 5 + 10 * LEASE_TTL));
    let stream =
        AttachedStream { gateway: name("g1"), stream: stream_id(1), since: NOW + 5, ending: None };
    assert_eq!(call.stream, Some(stream));
    let lease = |gateway: GatewayStatus| (gateway.until, gateway.lease, gateway.calls);
    let expected = (NOW + 5 + GATEWAY_LEASE, GATEWAY_LEASE, vec![(name("c1"), false)]);
    assert_eq!(fleet.gateways().into_iter().map(lease).collect::<Vec<_>>(), [expected]);
}

#[test]
fn a_call_without_a_connect_timeout_is_attached_too() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    let request = Attach { pod_attempt: 0, ..attach_request("c1", 1) };
    assert_eq!(fleet.attach(&request, NOW).unwrap().pod, name("p1"));
}

#[test]
fn a_second_stream_of_a_call_is_refused() {
    let mut fleet = attached_fleet(2);
    let before = stream_of(&fleet, "c1");
    let other = Attach { gateway: name("g2"), ..attach_request("c1", 2) };
    for request in [attach_request("c1", 2), other] {
        assert_eq!(fleet.attach(&request, NOW + 1), Err(AttachRefused::AlreadyAttached));
    }
    assert_eq!(stream_of(&fleet, "c1"), before);
    assert_eq!(fleet.gateways().len(), 1);
    end(&mut fleet, "c1", EndCause::Operator, NOW);
    assert_eq!(
        fleet.attach(&attach_request("c1", 2), NOW + 1),
        Err(AttachRefused::AlreadyAttached),
        "the pod still serves the first stream"
    );
}

#[test]
fn a_repeated_attach_of_a_stream_changes_nothing_but_the_lease_of_its_gateway() {
    let mut fleet = attached_fleet(2);
    let before = fleet.call(&name("c1"));
    let again = fleet.attach(&attach_request("c1", 1), NOW + 7).unwrap();
    assert_eq!((again.pod, again.is_reallocated), (name("p1"), false));
    assert_eq!(fleet.call(&name("c1")), before);
    assert_eq!(fleet.gateways()[0].until, NOW + 7 + GATEWAY_LEASE);
}

#[test]
fn a_stream_of_another_pod_attempt_is_refused() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &stream_request("c1"));
    let other = Attach { pod_attempt: 2, ..attach_request("c1", 1) };
    assert_eq!(fleet.attach(&other, NOW), Err(AttachRefused::OtherAttempt));
    fleet.sweep(9, NOW + LEASE_TTL);
    assert_eq!(fleet.attach(&other, NOW + LEASE_TTL), Err(AttachRefused::OtherAttempt));
    assert_eq!(fleet.gateways(), []);
}

#[test]
fn unknown_waiting_and_handed_off_calls_are_not_attached() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let request = Attach { pod_attempt: 0, ..attach_request("handed", 1) };
    assert_eq!(fleet.attach(&request, NOW), Err(AttachRefused::NotFound));
    allocate(&mut fleet, &plain_request("busy"));
    fleet.allocate(&waiting_request("handed"), NOW).unwrap_err();
    assert_eq!(fleet.attach(&request, NOW), Err(AttachRefused::NotFound));
    end(&mut fleet, "busy", EndCause::Agent, NOW);
    assert!(fleet.call(&name("handed")).unwrap().is_handed);
    assert_eq!(fleet.attach(&request, NOW), Err(AttachRefused::NotFound));
    allocate(&mut fleet, &waiting_request("handed"));
    assert_eq!(fleet.attach(&request, NOW).unwrap().pod, name("p1"));
}

#[test]
fn a_stream_that_never_comes_is_no_failure_of_the_pod() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &stream_request("c1"));
    let swept = fleet.sweep(9, NOW + LEASE_TTL);
    assert_eq!(swept.expired[0].cause, EndCause::Unattached);
    assert_eq!((failures(&fleet, "p1"), fleet.active_calls()), (0, 0));
    // A stream status callback belongs to other calls.
    let confirm =
        Confirm { call: name("c1"), pod: name("p1"), pod_attempt: None, lease_ttl: LEASE_TTL };
    assert_eq!(fleet.confirm(&confirm, NOW + LEASE_TTL), Confirmed::Unknown);
}

#[test]
fn a_late_stream_gets_the_same_pod_or_another_one() {
    let late = NOW + LEASE_TTL;
    let attach_late = |prepare: fn(&mut Fleet)| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        let request = Allocate { merchant: Some(name("m")), ..stream_request("c1") };
        allocate_on(&mut fleet, &request, "p1");
        fleet.sweep(9, late);
        prepare(&mut fleet);
        let attached = fleet.attach(&attach_request("c1", 1), late);
        (attached.map(|it| (it.pod.to_string(), it.is_reallocated, it.merchant)), fleet)
    };
    let (attached, mut fleet) = attach_late(|_| ());
    assert_eq!(attached, Ok(("p1".into(), true, Some(name("m")))));
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.pod_attempt, call.allocated_at), (1, late));
    assert_eq!(call.lease_until, late + 10 * LEASE_TTL);
    fleet.detach(&detach_request("c1", 1, EndCause::Abandoned), late).unwrap();
    let again = fleet.attach(&attach_request("c1", 1), late);
    assert_eq!(again, Err(AttachRefused::NotFound), "only once");

    let pod_of = |prepare| attach_late(prepare).0.map(|(pod, ..)| pod);
    let occupy_p1 = |fleet: &mut Fleet| allocate_on(fleet, &plain_request("c2"), "p1");
    assert_eq!(pod_of(occupy_p1), Ok("p2".into()));
    let drain_p1 = |fleet: &mut Fleet| _ = fleet.drain(&name("p1"), LEASE_TTL, NOW).unwrap();
    assert_eq!(pod_of(drain_p1), Ok("p2".into()));
    let occupy_all = |fleet: &mut Fleet| {
        for call in ["c2", "c3"] {
            allocate(fleet, &plain_request(call));
        }
    };
    assert_eq!(pod_of(occupy_all), Err(AttachRefused::NoPods));
    // The limits of the merchant do not apply: the call was admitted before.
    let limit = |fleet: &mut Fleet| {
        fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 0}"#), Edit::ANY).unwrap();
        allocate_on(fleet, &plain_request("c2"), "p1");
    };
    assert_eq!(pod_of(limit), Ok("p2".into()));
    // The end of the call or of its stream was reported meanwhile.
    for cause in [EndCause::Provider, EndCause::Stream] {
        let mut fleet = attach_late(|_| ()).1;
        fleet.detach(&detach_request("c1", 1, EndCause::Unattached), late).unwrap();
        let over = Release { cause, ..Release::new(name("c1"), None) };
        assert_eq!(fleet.release(&over, late), Err(NotReleased::NotFound));
        let refused = fleet.attach(&attach_request("c1", 1), late);
        assert_eq!(refused, Err(AttachRefused::NotFound), "{cause:?}");
    }
}

#[test]
fn a_late_stream_removes_its_call_from_the_queue() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &stream_request("c1"));
    let late = NOW + LEASE_TTL;
    fleet.sweep(9, late);
    fleet.drain(&name("p1"), 10, late).unwrap();
    let document = r#"{"pool": "m", "dedicated_only": true}"#;
    fleet.set_merchant(&name("m"), Some(document), Edit::ANY).unwrap();
    let request = Allocate { merchant: Some(name("m")), ..waiting_request("c1") };
    fleet.allocate(&request, late).unwrap_err();
    fleet.undrain(&name("p1")).unwrap();
    assert_eq!(fleet.attach(&attach_request("c1", 1), late).unwrap().pod, name("p1"));
    assert_eq!((fleet.status().waiting, fleet.active_calls()), (0, 1));
}

#[test]
fn a_released_call_keeps_its_pod_until_its_stream_is_detached() {
    let mut fleet = attached_fleet(1);
    fleet.allocate(&waiting_request("waiting"), NOW).unwrap_err();
    let release = Release { cause: EndCause::Operator, ..Release::new(name("c1"), None) };
    let released = fleet.release(&release, NOW + 20).unwrap();
    let expected = Released {
        pod: name("p1"),
        source_pool: name("gold"),
        pool: name("gold"),
        was_draining: false,
        lasted: 20,
        is_ending: true,
    };
    assert_eq!(released, expected);
    assert_eq!(fleet.take_ending(), [name("g1")]);
    assert_eq!(stream_of(&fleet, "c1").unwrap().ending, Some(EndCause::Operator));
    assert!(fleet.take_handoffs().is_empty(), "the pod serves the stream");
    // A repeat changes nothing: the first cause stays.
    let again = fleet.release(&Release::new(name("c1"), None), NOW + 20).unwrap();
    assert!(again.is_ending && fleet.take_ending().is_empty());
    let heartbeat = fleet.heartbeat(&name("g1"), GATEWAY_LEASE, &[], NOW + 30);
    assert_eq!((heartbeat.ending, heartbeat.calls), (vec![(name("c1"), EndCause::Operator)], 1));

    let released = fleet.detach(&detach_request("c1", 1, EndCause::PodLost), NOW + 40).unwrap();
    assert_eq!(released, Released { lasted: 40, is_ending: false, ..expected });
    assert_eq!(fleet.history.get(&name("c1"), NOW).unwrap().cause, EndCause::Operator);
    assert_eq!(failures(&fleet, "p1"), 0, "the call was over before its pod was lost");
    assert_eq!(fleet.take_handoffs(), [name("waiting")]);
    let heartbeat = fleet.heartbeat(&name("g1"), GATEWAY_LEASE, &[], NOW + 50);
    assert_eq!(heartbeat, Heartbeat::default());
}

#[test]
fn a_release_of_another_pod_or_attempt_does_not_end_a_stream() {
    let mut fleet = attached_fleet(2);
    let other_pod = Release::new(name("c1"), Some(name("p2")));
    let other_attempt = Release { pod_attempt: Some(2), ..Release::new(name("c1"), None) };
    for release in [other_pod, other_attempt] {
        assert_eq!(fleet.release(&release, NOW), Err(NotReleased::NotFound));
    }
    assert_eq!(stream_of(&fleet, "c1").unwrap().ending, None);
}

#[test]
fn a_detach_of_another_stream_changes_nothing() {
    let mut fleet = attached_fleet(1);
    fleet.take_changes();
    for (call, stream) in [("c1", 2), ("c2", 1)] {
        let detach = detach_request(call, stream, EndCause::Agent);
        assert_eq!(fleet.detach(&detach, NOW), Err(NotReleased::NotFound));
    }
    assert_eq!(fleet.take_changes(), []);
    let detach = detach_request("c1", 1, EndCause::Agent);
    assert!(fleet.detach(&detach, NOW).is_ok());
    assert_eq!(fleet.detach(&detach, NOW), Err(NotReleased::NotFound), "a repeat");
}

#[test]
fn a_detach_counts_for_the_health_of_the_pod() {
    for (cause, expected) in [
        (EndCause::Unreachable, 2),
        (EndCause::PodLost, 2),
        (EndCause::Gateway, 1),
        (EndCause::Provider, 1),
        (EndCause::Agent, 0),
    ] {
        let mut fleet = attached_fleet(1);
        let quarantined_until = None;
        fleet.record(Change::Health { pod: name("p1"), failures: 1, quarantined_until });
        fleet.detach(&detach_request("c1", 1, cause), NOW + 50).unwrap();
        assert_eq!(failures(&fleet, "p1"), expected, "{cause:?}");
    }
}

#[test]
fn a_connected_stream_registers_an_unknown_call() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.apply(Change::Began { trusting_until: NOW + 100 });
    fleet.drain(&name("p1"), LEASE_TTL, NOW).unwrap();
    let mut request = connected_request("c1", "p1");
    request.connected.as_mut().unwrap().merchant = Some(name("m1"));
    let unknown_pod = fleet.attach(&connected_request("c1", "p9"), NOW);
    assert_eq!(unknown_pod, Err(AttachRefused::UnknownPod), "it may be observed soon");
    assert_eq!(fleet.attach(&attach_request("c1", 1), NOW), Err(AttachRefused::NotFound));
    // A failover of Redis may lose writes long after the re-registration window.
    let attached = fleet.attach(&request, NOW + 200).unwrap();
    assert_eq!((attached.pod, attached.is_reallocated), (name("p1"), true));
    assert_eq!(attached.merchant, Some(name("m1")));
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.pod_attempt, call.stream.unwrap().gateway), (1, name("g1")));
    let second = fleet.attach(&connected_request("c2", "p1"), NOW + 200);
    assert_eq!(second, Err(AttachRefused::NoPods), "the pod is busy");
}

#[test]
fn a_connected_stream_does_not_revive_a_call_that_has_ended() {
    for (trusting_until, cause) in [
        (NOW + 100, EndCause::Abandoned),
        (0, EndCause::Agent),
        (0, EndCause::Operator),
        (0, EndCause::PodGone),
    ] {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        fleet.apply(Change::Began { trusting_until });
        // A call of the JSON API may not return.
        allocate_on(&mut fleet, &Allocate { may_return: false, ..stream_request("c1") }, "p1");
        let request = Attach { pod_attempt: 0, ..connected_request("c1", "p1") };
        fleet.attach(&request, NOW).unwrap();
        fleet.detach(&detach_request("c1", 1, cause), NOW).unwrap();
        assert_eq!(fleet.attach(&request, NOW), Err(AttachRefused::NotFound), "{cause:?}");
    }
}

#[test]
fn a_heartbeat_returns_reported_calls_that_the_store_does_not_know() {
    let mut fleet = attached_fleet(2);
    allocate_on(&mut fleet, &stream_request("c2"), "p2");
    let reported = [name("c1"), name("c2"), name("c3")];
    let mut unknown =
        |gateway: &str| fleet.heartbeat(&name(gateway), GATEWAY_LEASE, &reported, NOW).unknown;
    assert_eq!(unknown("g1"), [name("c2"), name("c3")], "c2 has no stream yet");
    assert_eq!(unknown("g2"), reported);
}

#[test]
fn a_repeated_request_extends_an_unattached_call() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &stream_request("c1"));
    fleet.allocate(&stream_request("c1"), NOW + 9).unwrap();
    assert_eq!(fleet.call(&name("c1")).unwrap().lease_until, NOW + 9 + LEASE_TTL);
}

#[test]
fn a_journal_rebuilds_streams_and_gateways() {
    let mut fleet = attached_fleet(2);
    allocate_on(&mut fleet, &stream_request("c2"), "p2");
    let other = Attach { gateway: name("g2"), ..attach_request("c2", 2) };
    fleet.attach(&other, NOW + 3).unwrap();
    end(&mut fleet, "c2", EndCause::Agent, NOW + 4);
    assert_eq!(fleet.media_secret("first"), "first");
    assert_eq!(fleet.media_secret("second"), "first");
    let rebuild = |changes: Vec<Change>| {
        let mut rebuilt = Fleet::new(table(r#"{"x": 1}"#), 0);
        for change in changes {
            let line = serde_json::to_string(&change).unwrap();
            rebuilt.apply(serde_json::from_str(&line).unwrap());
        }
        rebuilt
    };
    for change in fleet.facts() {
        assert!(!serde_json::to_string(&change).unwrap().contains("null"), "{change:?}");
    }
    let mut rebuilt = rebuild(fleet.facts());
    assert_eq!(rebuilt.gateways(), fleet.gateways());
    for call in ["c1", "c2"] {
        assert_eq!(rebuilt.call(&name(call)), fleet.call(&name(call)));
    }
    assert_eq!(rebuilt.media_secret("third"), "first");
    assert!(rebuilt.detach(&detach_request("c1", 1, EndCause::Agent), NOW).is_ok());
}

#[test]
fn an_unattached_call_is_one_after_a_restart() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &stream_request("c1"));
    let mut rebuilt = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| rebuilt.apply(change));
    assert_eq!(rebuilt.sweep(9, NOW + LEASE_TTL).expired[0].cause, EndCause::Unattached);
}

#[test]
fn end_causes_round_trip_through_text() {
    for cause in ["unattached", "gateway", "unreachable", "pod_lost", "pod_gone", "agent"] {
        assert_eq!(cause.parse::<EndCause>().unwrap().as_str(), cause);
        let json = serde_json::to_string(&cause.parse::<EndCause>().unwrap()).unwrap();
        assert_eq!(json, format!("\"{cause}\""));
    }
    assert!("".parse::<EndCause>().is_err());
}
