//! How pods fare, and which are given no calls for that.

use super::*;

const MINUTE: Millis = 60_000;

fn gold(pods: usize) -> Fleet {
    fleet(r#"{"gold": 1}"#, pods)
}

/// A call on this pod that ends so.
fn fare(fleet: &mut Fleet, pod: &str, cause: Cause, lasted: Millis) {
    give_on(fleet, &ask_returning("c"), pod);
    end(fleet, "c", cause, NOW + lasted);
}

/// A call on this pod whose stream breaks after so long.
fn break_after(fleet: &mut Fleet, pod: &str, lasted: Millis) {
    give_on(fleet, &ask_returning("c"), pod);
    let last = After { retries: 0, ..after(pod, 1) };
    let request = Allocate { after: Some(last), ..ask_returning("c") };
    assert_eq!(why(fleet, &request, NOW + lasted), Why::Spent);
}

fn failures(fleet: &Fleet, pod: &str) -> u32 {
    fleet.pods[&name::<PodName>(pod)].failures
}

fn quarantined_until(fleet: &Fleet, pod: &str) -> Option<Millis> {
    fleet.pod(&name(pod)).unwrap().quarantined_until
}

fn fail_thrice(fleet: &mut Fleet, pod: &str) {
    for _ in 0..3 {
        fare(fleet, pod, Cause::Unconfirmed, 0);
    }
}

#[test]
fn three_bad_calls_in_a_row_put_a_pod_into_quarantine() {
    let mut fleet = gold(5);
    fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
    fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (2, None));
    fare(&mut fleet, "p1", Cause::Unconfirmed, 7);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 7 + MINUTE));
    let status = &fleet.status().pools[0];
    assert_eq!((status.quarantined, status.available), (1, 4));
}

#[test]
fn a_good_call_ends_the_row() {
    let mut fleet = gold(5);
    fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
    fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
    fare(&mut fleet, "p1", Cause::Agent, 0);
    fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (1, None));
}

#[test]
fn what_an_end_says_of_the_pod() {
    let failures_after = |cause, lasted| {
        let mut fleet = gold(1);
        fare(&mut fleet, "p1", Cause::Unconfirmed, 0);
        fare(&mut fleet, "p1", cause, lasted);
        failures(&fleet, "p1")
    };
    assert_eq!(failures_after(Cause::Unconfirmed, 90_000), 2);
    assert_eq!(failures_after(Cause::Agent, 0), 0);
    // A caller who hangs up at once may have heard nothing.
    assert_eq!(failures_after(Cause::Provider, 9_999), 1);
    assert_eq!(failures_after(Cause::Provider, 10_000), 0);
    assert_eq!(failures_after(Cause::Operator, 10_000), 1);
    assert_eq!(failures_after(Cause::Stream, 0), 1);
    assert_eq!(failures_after(Cause::Lease, 0), 1);
}

#[test]
fn a_stream_that_breaks_soon_is_held_against_its_pod() {
    let mut fleet = gold(1);
    break_after(&mut fleet, "p1", 10_000);
    assert_eq!(failures(&fleet, "p1"), 0);
    break_after(&mut fleet, "p1", 9_999);
    assert_eq!(failures(&fleet, "p1"), 1);
    // A long call that breaks is no praise either.
    break_after(&mut fleet, "p1", 10_000);
    assert_eq!(failures(&fleet, "p1"), 1);
}

#[test]
fn a_broken_stream_is_held_against_its_pod_once() {
    let mut fleet = gold(1);
    fare(&mut fleet, "p1", Cause::Stream, 0);
    assert_eq!(failures(&fleet, "p1"), 0);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    let again = Allocate { after: Some(after("p1", 1)), ..ask_returning("c") };
    for _ in 0..2 {
        assert_eq!(why(&mut fleet, &again, NOW), Why::NoPods);
        assert_eq!(failures(&fleet, "p1"), 1);
    }
    // One that its lease ended is not known to have broken.
    fleet.undrain(&name("p1")).unwrap();
    fare(&mut fleet, "p1", Cause::Lease, 0);
    fleet.allocate(&again, NOW).unwrap();
    assert_eq!(failures(&fleet, "p1"), 0);
}

#[test]
fn at_most_one_pod_in_five_is_in_quarantine() {
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
fn more_bad_calls_do_not_make_a_quarantine_longer() {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 5, "max_concurrent": 4}}"#, 5);
    for pod in ["p2", "p3", "p4", "p5"] {
        fleet.drain(&name(pod), 1_000, NOW).unwrap();
    }
    for call in ["c1", "c2", "c3", "c4"] {
        assert_eq!(give(&mut fleet, &ask(call)), "p1");
    }
    for (later, call) in (0..).zip(["c1", "c2", "c3", "c4"]) {
        end(&mut fleet, call, Cause::Unconfirmed, NOW + later);
    }
    assert_eq!(failures(&fleet, "p1"), 4);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 2 + MINUTE));
}

#[test]
fn a_quarantine_ends_when_its_time_is_over() {
    let mut fleet = gold(5);
    fail_thrice(&mut fleet, "p1");
    assert_eq!(fleet.sweep(9, NOW + MINUTE - 1), Swept::default());
    let swept = fleet.sweep(9, NOW + MINUTE);
    assert_eq!((swept.restored.clone(), swept.most()), (vec![name("p1")], 1));
    // One more bad call, and it is back there.
    fare(&mut fleet, "p1", Cause::Unconfirmed, MINUTE);
    assert_eq!(quarantined_until(&fleet, "p1"), Some(NOW + 2 * MINUTE));
}

#[test]
fn a_good_call_an_operator_or_another_pod_ends_a_quarantine() {
    let mut fleet = gold(5);
    give_on(&mut fleet, &ask("good"), "p1");
    end(&mut fleet, "good", Cause::Agent, NOW);
    fail_thrice(&mut fleet, "p1");
    let undrained = fleet.undrain(&name("p1")).unwrap();
    assert!(undrained.was_quarantined && !undrained.was_draining);
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (0, None));
    assert!(!fleet.undrain(&name("p1")).unwrap().was_quarantined);

    fail_thrice(&mut fleet, "p1");
    see(&mut fleet, "p1", PodFacts { restarts: 1, ..ready() });
    assert_eq!((failures(&fleet, "p1"), quarantined_until(&fleet, "p1")), (0, None));
    assert!(fleet.quarantines.is_empty());

    fail_thrice(&mut fleet, "p1");
    fleet.remove_pod(&name("p1"), "u1", Departure::Now, WRITER, NOW).unwrap();
    assert!(fleet.quarantines.is_empty());
}

#[test]
fn a_good_call_of_a_pod_without_blame_is_not_written_down() {
    let mut fleet = gold(1);
    give(&mut fleet, &ask("c1"));
    fleet.take_changes();
    end(&mut fleet, "c1", Cause::Agent, NOW);
    let ended = Change::Ended { call: name("c1"), at: NOW, cause: Cause::Agent };
    assert_eq!(fleet.take_changes(), [ended]);
}

#[test]
fn a_pod_in_quarantine_gives_its_pool_no_room() {
    let mut fleet = gold(5);
    fail_thrice(&mut fleet, "p1");
    for (call, pod) in [("c2", "p2"), ("c3", "p3"), ("c4", "p4"), ("c5", "p5")] {
        give_on(&mut fleet, &ask(call), pod);
    }
    let refused = fleet.allocate(&ask("c6"), NOW).unwrap_err();
    assert_eq!(refused.tried[0].reason, Reason::AtCapacity);
    for pod in ["p2", "p3", "p4", "p5"] {
        fleet.remove_pod(&name(pod), "u1", Departure::Now, WRITER, NOW).unwrap();
    }
    let refused = fleet.allocate(&ask("c6"), NOW).unwrap_err();
    assert_eq!(refused.tried[0].reason, Reason::Empty);
}
