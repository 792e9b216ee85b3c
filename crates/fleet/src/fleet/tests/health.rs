//! Pod health and quarantine.

use super::*;

const MINUTE: Millis = 60_000;

fn gold(pods: usize) -> Fleet {
    fleet(r#"{"gold": 1}"#, pods)
}

/// Runs a call on this pod that ends with this cause.
fn run_call(fleet: &mut Fleet, pod: &str, cause: EndCause, lasted: Millis) {
    allocate_on(fleet, &returning_request("c"), pod);
    end(fleet, "c", cause, NOW + lasted);
}

/// Runs a call on this pod whose stream breaks after `lasted`.
fn break_after(fleet: &mut Fleet, pod: &str, lasted: Millis) {
    allocate_on(fleet, &returning_request("c"), pod);
    let last = PreviousPod { max_retries: 0, ..previous_pod(pod, 1) };
    let request = Allocate { previous: Some(last), ..returning_request("c") };
    assert_eq!(refusal_reason(fleet, &request, NOW + lasted), RefusalReason::RetriesExhausted);
}

fn failures(fleet: &Fleet, pod: &str) -> u32 {
    fleet.pods[&name::<PodName>(pod)].failures
}

fn quarantined_until(fleet: &Fleet, pod: &str) -> Option<Millis> {
    fleet.pod(&name(pod)).unwrap().quarantined_until
}

fn fail_thrice(fleet: &mut Fleet, pod: &str) {
    for _ in 0..3 {
        run_call(fleet, pod, EndCause::Unconfirmed, 0);
    }
}

#[test]
fn three_consecutive_failures_quarantine_a_pod() {
    let mut fleet = gold(5);
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (2, None));
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 7);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 7 + MINUTE));
    let status = &fleet.status().pools[0];
    assert_eq!((status.quarantined, status.available), (1, 4));
}

#[test]
fn a_success_resets_the_failure_count() {
    let mut fleet = gold(5);
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
    run_call(&mut fleet, "p1", EndCause::Agent, 0);
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (1, None));
}

#[test]
fn the_end_cause_determines_success_or_failure() {
    let failures_after = |cause, lasted| {
        let mut fleet = gold(1);
        run_call(&mut fleet, "p1", EndCause::Unconfirmed, 0);
        run_call(&mut fleet, "p1", cause, lasted);
        failures(&fleet, "p1")
    };
    assert_eq!(failures_after(EndCause::Unconfirmed, 90_000), 2);
    assert_eq!(failures_after(EndCause::Agent, 0), 0);
    // An early hang-up is no success: the agent may have been silent.
    assert_eq!(failures_after(EndCause::Provider, 9_999), 1);
    assert_eq!(failures_after(EndCause::Provider, 10_000), 0);
    assert_eq!(failures_after(EndCause::Operator, 10_000), 1);
    assert_eq!(failures_after(EndCause::Stream, 0), 1);
    assert_eq!(failures_after(EndCause::Lease, 0), 1);
}

#[test]
fn an_early_broken_stream_counts_as_a_failure() {
    let mut fleet = gold(1);
    break_after(&mut fleet, "p1", 10_000);
    assert_eq!(failures(&fleet, "p1"), 0);
    break_after(&mut fleet, "p1", 9_999);
    assert_eq!(failures(&fleet, "p1"), 1);
    // A late break is no success either.
    break_after(&mut fleet, "p1", 10_000);
    assert_eq!(failures(&fleet, "p1"), 1);
}

#[test]
fn a_broken_stream_counts_as_a_failure_once() {
    let mut fleet = gold(1);
    run_call(&mut fleet, "p1", EndCause::Stream, 0);
    assert_eq!(failures(&fleet, "p1"), 0);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let again = Allocate { previous: Some(previous_pod("p1", 1)), ..returning_request("c") };
    for _ in 0..2 {
        assert_eq!(refusal_reason(&mut fleet, &again, NOW), RefusalReason::NoPods);
        assert_eq!(failures(&fleet, "p1"), 1);
    }
    // An expired lease is not a broken stream.
    fleet.undrain(&name("p1")).unwrap();
    run_call(&mut fleet, "p1", EndCause::Lease, 0);
    fleet.allocate(&again, NOW).unwrap();
    assert_eq!(failures(&fleet, "p1"), 0);
}

#[test]
fn at_most_one_pod_in_five_is_quarantined() {
    let mut small = gold(4);
    fail_thrice(&mut small, "p1");
    assert_eq!((failures(&small, "p1"), quarantined_until(&small, "p1")), (3, None));
    let mut large = gold(10);
    for pod in ["p1", "p2", "p3"] {
        fail_thrice(&mut large, pod);
    }
    assert_eq!(large.status().pools[0].quarantined, 2);
    assert_eq!(quarantined_until(&large, "p3"), None);
}

#[test]
fn further_failures_do_not_extend_a_quarantine() {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 5, "max_concurrent": 4}}"#, 5);
    for pod in ["p2", "p3", "p4", "p5"] {
        fleet.drain(&name(pod), 1_000, NOW).unwrap();
    }
    for call in ["c1", "c2", "c3", "c4"] {
        assert_eq!(allocate(&mut fleet, &plain_request(call)), "p1");
    }
    for (later, call) in (0..).zip(["c1", "c2", "c3", "c4"]) {
        end(&mut fleet, call, EndCause::Unconfirmed, NOW + later);
    }
    assert_eq!(failures(&fleet, "p1"), 4);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 2 + MINUTE));
}

#[test]
fn a_quarantine_expires() {
    let mut fleet = gold(5);
    fail_thrice(&mut fleet, "p1");
    assert_eq!(fleet.sweep(9, NOW + MINUTE - 1), Swept::default());
    let swept = fleet.sweep(9, NOW + MINUTE);
    assert_eq!((swept.restored.clone(), swept.max_count()), (vec![name("p1")], 1));
    // One more failure quarantines the pod again.
    run_call(&mut fleet, "p1", EndCause::Unconfirmed, MINUTE);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 2 * MINUTE));
}

#[test]
fn undrain_restart_and_removal_end_a_quarantine() {
    let mut fleet = gold(5);
    allocate_on(&mut fleet, &plain_request("good"), "p1");
    end(&mut fleet, "good", EndCause::Agent, NOW);
    fail_thrice(&mut fleet, "p1");
    let undrained = fleet.undrain(&name("p1")).unwrap();
    assert!(undrained.was_quarantined && !undrained.was_draining);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (0, None));
    assert!(!fleet.undrain(&name("p1")).unwrap().was_quarantined);

    fail_thrice(&mut fleet, "p1");
    observe(&mut fleet, "p1", PodFacts { restarts: 1, ..ready() });
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (0, None));
    assert!(fleet.quarantines.is_empty());

    fail_thrice(&mut fleet, "p1");
    fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    assert!(fleet.quarantines.is_empty());
}

#[test]
fn a_success_of_a_healthy_pod_is_not_journaled() {
    let mut fleet = gold(1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.take_changes();
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    let ended = Change::Ended { call: name("c1"), at: NOW, cause: EndCause::Agent };
    assert_eq!(fleet.take_changes(), [ended]);
}

#[test]
fn a_quarantined_pod_provides_no_capacity() {
    let mut fleet = gold(5);
    fail_thrice(&mut fleet, "p1");
    for (call, pod) in [("c2", "p2"), ("c3", "p3"), ("c4", "p4"), ("c5", "p5")] {
        allocate_on(&mut fleet, &plain_request(call), pod);
    }
    let refused = fleet.allocate(&plain_request("c6"), NOW).unwrap_err();
    assert_eq!(refused.tried[0].reason, SkipReason::AtCapacity);
    for pod in ["p2", "p3", "p4", "p5"] {
        fleet.remove_pod(&name(pod), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    }
    let refused = fleet.allocate(&plain_request("c6"), NOW).unwrap_err();
    assert_eq!(refused.tried[0].reason, SkipReason::Empty);
}
