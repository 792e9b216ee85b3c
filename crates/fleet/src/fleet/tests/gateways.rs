//! The leases of media gateways, and gateways that were cut off from the store.

use super::{
    streams::{
        GATEWAY_LEASE, attach_request, attached_fleet, connected_request, failures, stream_of,
        stream_request,
    },
    *,
};
use crate::rules::SWEEP_GAP;

const SECOND: Millis = 1_000;

/// Sweeps every second in this range. Returns the calls that ended, with their causes.
fn sweep_between(fleet: &mut Fleet, from: Millis, to: Millis) -> Vec<(String, EndCause)> {
    let mut ended = Vec::new();
    for now in (from..=to).step_by(SECOND as usize) {
        let swept = fleet.sweep(100, now);
        ended.extend(swept.expired.iter().map(|it| (it.call.to_string(), it.cause)));
    }
    ended
}

#[test]
fn the_calls_of_an_expired_gateway_end_without_a_failure_of_their_pods() {
    let mut fleet = attached_fleet(3);
    allocate_on(&mut fleet, &stream_request("c2"), "p2");
    allocate_on(&mut fleet, &stream_request("c3"), "p3");
    fleet.attach(&attach_request("c2", 2), NOW).unwrap();
    let other = Attach { gateway: name("g2"), ..attach_request("c3", 3) };
    fleet.attach(&other, NOW + 5 * SECOND).unwrap();
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(sweep_between(&mut fleet, NOW, NOW + GATEWAY_LEASE - SECOND), []);
    fleet.heartbeat(&name("g2"), GATEWAY_LEASE, &[], NOW + GATEWAY_LEASE - SECOND);
    let ended = sweep_between(&mut fleet, NOW + GATEWAY_LEASE, NOW + GATEWAY_LEASE + 6 * SECOND);
    // Calls that were not released end first.
    assert_eq!(ended, [("c2".into(), EndCause::Gateway), ("c1".into(), EndCause::Agent)]);
    assert_eq!(["p1", "p2"].map(|pod| failures(&fleet, pod)), [0, 0]);
    let gateways = fleet.gateways();
    assert_eq!((gateways.len(), &gateways[0].gateway), (1, &name("g2")));
    assert_eq!(pod_of(&fleet, "c3"), Some("p3".into()));
}

#[test]
fn a_sweep_ends_a_limited_number_of_calls_of_gateways() {
    let mut fleet = fleet(r#"{"gold": 5}"#, 5);
    // The lease of g2 ends first.
    for (number, gateway) in [(1, "g1"), (2, "g1"), (3, "g2"), (4, "g2"), (5, "g1")] {
        let call = format!("c{number}");
        allocate(&mut fleet, &stream_request(&call));
        let gateway = name(gateway);
        let since = NOW + u64::from(number == 5);
        fleet.attach(&Attach { gateway, ..attach_request(&call, number) }, since).unwrap();
    }
    sweep_between(&mut fleet, NOW, NOW + GATEWAY_LEASE - SECOND);
    let mut ended = |limit| {
        let swept = fleet.sweep(limit, NOW + GATEWAY_LEASE + 1).expired;
        let calls: Vec<String> = swept.iter().map(|it| it.call.to_string()).collect();
        (calls.join(" "), fleet.gateways().len())
    };
    assert_eq!(ended(1), ("c3".into(), 2));
    assert_eq!(ended(2), ("c4 c1".into(), 1));
    assert_eq!(ended(2), ("c2 c5".into(), 0));
    assert_eq!(ended(2), (String::new(), 0));
}

#[test]
fn no_call_of_a_gateway_ends_within_its_lease_after_a_gap_without_sweeps() {
    let mut fleet = attached_fleet(1);
    let last = NOW + GATEWAY_LEASE - 2 * SECOND;
    sweep_between(&mut fleet, NOW, last);
    // The store is away, and no heartbeat arrives.
    let back = last + SWEEP_GAP + 1;
    let end = back + GATEWAY_LEASE;
    assert_eq!(sweep_between(&mut fleet, back, end - 1), []);
    assert_eq!(sweep_between(&mut fleet, end, end), [("c1".into(), EndCause::Gateway)]);
}

#[test]
fn a_short_lease_survives_a_gap_in_which_it_would_end() {
    const LEASE: Millis = 5 * SECOND;
    let mut fleet = attached_fleet(1);
    fleet.heartbeat(&name("g1"), LEASE, &[], NOW);
    sweep_between(&mut fleet, NOW, NOW + SECOND);
    let back = NOW + 7 * SECOND;
    assert!(back - NOW < SWEEP_GAP);
    assert_eq!(sweep_between(&mut fleet, back, back + LEASE - 1), []);
    // Sweeps that are a second or two apart are no gap.
    let end = back + LEASE;
    assert_eq!(sweep_between(&mut fleet, end, end), [("c1".into(), EndCause::Gateway)]);
}

#[test]
fn a_short_pause_of_the_sweeps_does_not_extend_the_lease_of_a_gateway() {
    let mut fleet = attached_fleet(1);
    let last = NOW + GATEWAY_LEASE - 2 * SECOND;
    sweep_between(&mut fleet, NOW, last);
    let now = last + SWEEP_GAP;
    assert_eq!(sweep_between(&mut fleet, now, now), [("c1".into(), EndCause::Gateway)]);
}

#[test]
fn the_first_sweep_after_a_restart_extends_the_leases_of_gateways() {
    let fleet = attached_fleet(1);
    let mut restarted = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| restarted.apply(change));
    let back = NOW + 2 * GATEWAY_LEASE;
    assert_eq!(sweep_between(&mut restarted, back, back + GATEWAY_LEASE - 1), []);
    assert_eq!(sweep_between(&mut restarted, back + GATEWAY_LEASE, back + GATEWAY_LEASE).len(), 1);
}

#[test]
fn the_lease_of_an_attached_call_ends_with_the_cause_of_its_release() {
    for released in [false, true] {
        let mut fleet = attached_fleet(1);
        if released {
            end(&mut fleet, "c1", EndCause::Provider, NOW);
        }
        let expected = if released { EndCause::Provider } else { EndCause::Lease };
        let swept = fleet.sweep(9, NOW + 10 * LEASE_TTL);
        assert_eq!(swept.expired[0].cause, expected);
        assert!(fleet.gateways()[0].calls.is_empty());
    }
}

#[test]
fn a_gateway_that_was_cut_off_gets_its_calls_back() {
    let mut fleet = attached_fleet(2);
    let back = NOW + GATEWAY_LEASE;
    sweep_between(&mut fleet, NOW, back);
    let attach = |fleet: &mut Fleet, request: &Attach| {
        fleet.attach(request, back).map(|it| (it.pod.to_string(), it.is_reallocated))
    };
    // Only the stream that is connected to the same pod proves that the call goes on.
    for request in [attach_request("c1", 1), connected_request("c1", "p2")] {
        assert_eq!(attach(&mut fleet, &request), Err(AttachRefused::NotFound));
    }
    // The pod has another call meanwhile.
    allocate_on(&mut fleet, &plain_request("other"), "p1");
    let connected = connected_request("c1", "p1");
    assert_eq!(attach(&mut fleet, &connected), Err(AttachRefused::NoPods));
    end(&mut fleet, "other", EndCause::Agent, back);
    // A drained pod takes no new calls, but keeps those that it serves.
    fleet.drain(&name("p1"), LEASE_TTL, back).unwrap();
    assert_eq!(attach(&mut fleet, &connected), Ok(("p1".into(), true)));
    assert_eq!(fleet.call(&name("c1")).unwrap().pod_attempt, 1);
}

#[test]
fn a_gateway_gets_back_calls_that_may_not_return_or_whose_lease_ended() {
    for is_lease_over in [false, true] {
        let mut fleet = fleet(r#"{"gold": 1}"#, 1);
        allocate(&mut fleet, &plain_request("c1"));
        let connected = Attach { pod_attempt: 0, ..connected_request("c1", "p1") };
        fleet.attach(&Attach { connected: None, ..connected.clone() }, NOW).unwrap();
        let back = if is_lease_over {
            NOW + 10 * LEASE_TTL
        } else {
            sweep_between(&mut fleet, NOW, NOW + GATEWAY_LEASE - SECOND);
            NOW + GATEWAY_LEASE
        };
        assert_eq!(sweep_between(&mut fleet, back, back).len(), 1);
        assert!(fleet.attach(&connected, back).unwrap().is_reallocated, "{is_lease_over}");
    }
    // The lease of a call without a stream is no reason to record its end.
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.sweep(9, NOW + LEASE_TTL);
    assert!(!fleet.history.contains(&name("c1")));
}

#[test]
fn a_removed_pod_leaves_no_call_at_a_gateway() {
    let mut fleet = attached_fleet(1);
    fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    assert_eq!(fleet.heartbeat(&name("g1"), GATEWAY_LEASE, &[], NOW), Heartbeat::default());
}

#[test]
fn a_clock_step_preserves_the_remaining_lease_of_a_gateway() {
    for by in [3_600_000, -(NOW as i64) / 2] {
        let mut fleet = attached_fleet(1);
        fleet.sweep(9, NOW);
        fleet.shift(by);
        let now = NOW.saturating_add_signed(by);
        assert_eq!(stream_of(&fleet, "c1").unwrap().since, now);
        assert_eq!(sweep_between(&mut fleet, now, now + GATEWAY_LEASE - 1), [], "{by}");
        let ended = sweep_between(&mut fleet, now + GATEWAY_LEASE, now + GATEWAY_LEASE);
        assert_eq!(ended, [("c1".into(), EndCause::Gateway)], "{by}");
    }
}
