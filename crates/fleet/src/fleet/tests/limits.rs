//! How much a merchant may have.

use super::*;
use crate::merchant::Limit;

fn limited(document: &str) -> Fleet {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 50}}"#, 1);
    fleet.set_merchant(&name("m"), Some(document), Edit::ANY).unwrap();
    fleet
}

fn asks(fleet: &mut Fleet, call: &str, now: Millis) -> Option<Why> {
    fleet.allocate(&ask_for("m", call), now).err().map(|refusal| refusal.why)
}

const TOO_MANY: Option<Why> = Some(Why::Limit(Limit::MaxCalls));
const TOO_FAST: Option<Why> = Some(Why::Limit(Limit::MaxRate));

#[test]
fn a_merchant_has_so_many_calls_at_the_same_time() {
    let mut fleet = limited(r#"{"max_calls": 2}"#);
    assert_eq!([asks(&mut fleet, "c1", NOW), asks(&mut fleet, "c2", NOW)], [None, None]);
    assert_eq!(asks(&mut fleet, "c3", NOW), TOO_MANY);
    assert_eq!(asks(&mut fleet, "c2", NOW), None, "it has a pod");
    assert!(fleet.allocate(&ask_for("other", "c4"), NOW).is_ok());
    end(&mut fleet, "c1", Cause::Agent, NOW);
    assert_eq!(asks(&mut fleet, "c3", NOW), None);
    assert_eq!(asks(&mut limited(r#"{"max_calls": 0}"#), "c1", NOW), TOO_MANY);
}

#[test]
fn calls_that_wait_count_too_and_nobody_waits_for_a_limit() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 2}"#), Edit::ANY).unwrap();
    let patient = |call| Allocate { merchant: Some(name("m")), ..ask_patient(call) };
    assert!(fleet.allocate(&patient("c1"), NOW).is_ok());
    assert!(matches!(why(&mut fleet, &patient("c2"), NOW), Why::Waiting { .. }));
    assert_eq!(why(&mut fleet, &patient("c3"), NOW), Why::Limit(Limit::MaxCalls));
    // The pod of the first is handed to the second: still two, then one.
    end(&mut fleet, "c1", Cause::Agent, NOW);
    fleet.allocate(&patient("c2"), NOW).unwrap();
    assert!(matches!(why(&mut fleet, &patient("c3"), NOW), Why::Waiting { .. }));
    assert_eq!(why(&mut fleet, &patient("c4"), NOW), Why::Limit(Limit::MaxCalls));
    fleet.release(&Release::new(name("c3"), None), NOW).unwrap_err();
    assert!(matches!(why(&mut fleet, &patient("c4"), NOW), Why::Waiting { .. }));
}

#[test]
fn calls_of_the_future_are_none_of_this_second() {
    let mut fleet = limited(r#"{"max_rate": 2}"#);
    assert_eq!([asks(&mut fleet, "c1", NOW), asks(&mut fleet, "c2", NOW)], [None, None]);
    let then = NOW - 500_000;
    assert_eq!([asks(&mut fleet, "c3", then), asks(&mut fleet, "c4", then)], [None, None]);
    assert_eq!(asks(&mut fleet, "c5", then), TOO_FAST);
}

#[test]
fn a_merchant_has_so_many_new_calls_within_any_second() {
    let mut fleet = limited(r#"{"max_rate": 2}"#);
    assert_eq!(asks(&mut fleet, "c1", NOW), None);
    assert_eq!(asks(&mut fleet, "c2", NOW + 600), None);
    assert_eq!(asks(&mut fleet, "c3", NOW + 999), TOO_FAST);
    assert_eq!(asks(&mut fleet, "c3", NOW + 1_000), None);
    assert_eq!(asks(&mut fleet, "c4", NOW + 1_599), TOO_FAST);
    assert_eq!(asks(&mut fleet, "c4", NOW + 1_600), None);
    assert_eq!(asks(&mut fleet, "c5", NOW + 9_000), None);
    assert_eq!(asks(&mut fleet, "c6", NOW + 9_000), None);
    assert_eq!(asks(&mut fleet, "c7", NOW + 9_000), TOO_FAST);
    assert_eq!(asks(&mut limited(r#"{"max_rate": 0}"#), "c1", NOW), TOO_FAST);
}

#[test]
fn a_call_that_begins_to_wait_is_one_of_its_second() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 2}"#), Edit::ANY).unwrap();
    let patient = |call| Allocate { merchant: Some(name("m")), ..ask_patient(call) };
    fleet.allocate(&patient("c1"), NOW).unwrap();
    assert!(matches!(why(&mut fleet, &patient("c2"), NOW), Why::Waiting { .. }));
    assert_eq!(why(&mut fleet, &patient("c3"), NOW), Why::Limit(Limit::MaxRate));
}

#[test]
fn a_call_that_had_a_pod_is_not_a_new_one() {
    let mut fleet = limited(r#"{"max_rate": 1, "max_calls": 2}"#);
    let first = Allocate { returns: true, ..ask_for("m", "c1") };
    fleet.allocate(&first, NOW).unwrap();
    let again = Allocate { after: Some(after("p1", 1)), ..first };
    assert!(fleet.allocate(&again, NOW + 500).is_ok(), "limits are for new calls");
    assert_eq!(asks(&mut fleet, "c2", NOW + 1_000), None, "a rescue does not count");
    // One of which nothing is known is new, whatever it says.
    let unknown = Allocate { after: Some(after("p1", 1)), ..ask_for("m", "c3") };
    assert_eq!(why(&mut fleet, &unknown, NOW + 5_000), Why::Limit(Limit::MaxCalls));
}

#[test]
fn a_rescue_that_waits_does_not_count_against_the_rate() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 1}"#), Edit::ANY).unwrap();
    let first = Allocate { returns: true, merchant: Some(name("m")), ..ask_patient("c1") };
    fleet.allocate(&first, NOW).unwrap();
    give(&mut fleet, &ask("c2"));
    fleet.drain(&name("p1"), LEASE, NOW).unwrap();
    let again = Allocate { after: Some(after("p1", 1)), ..first };
    assert!(matches!(why(&mut fleet, &again, NOW + 500), Why::Waiting { is_new: true, .. }));
    let next = Allocate { merchant: Some(name("m")), ..ask_patient("c3") };
    assert!(matches!(why(&mut fleet, &next, NOW + 1_000), Why::Waiting { .. }));
}

#[test]
fn another_document_is_in_force_at_once() {
    let mut fleet = limited(r#"{"max_calls": 0}"#);
    assert_eq!(fleet.merchant(&name("m")), Some(r#"{"max_calls": 0}"#));
    assert_eq!(asks(&mut fleet, "c1", NOW), TOO_MANY);
    fleet.set_merchant(&name("m"), None, Edit::ANY).unwrap();
    assert_eq!(fleet.merchant(&name("m")), None);
    assert_eq!(asks(&mut fleet, "c1", NOW), None);
    fleet.take_changes();
    fleet.set_merchant(&name("m"), None, Edit::ANY).unwrap();
    assert_eq!(fleet.take_changes(), []);
}
