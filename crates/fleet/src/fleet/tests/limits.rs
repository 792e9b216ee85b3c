//! Merchant limits.

use super::*;
use crate::merchant::Limit;

fn limited(document: &str) -> Fleet {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 50}}"#, 1);
    fleet.set_merchant(&name("m"), Some(document), Edit::ANY).unwrap();
    fleet
}

fn refusal(fleet: &mut Fleet, call: &str, now: Millis) -> Option<RefusalReason> {
    fleet.allocate(&merchant_request("m", call), now).err().map(|it| it.reason)
}

const MAX_CALLS: Option<RefusalReason> = Some(RefusalReason::Limit(Limit::MaxCalls));
const MAX_RATE: Option<RefusalReason> = Some(RefusalReason::Limit(Limit::MaxRate));

#[test]
fn max_calls_limits_concurrent_calls() {
    let mut fleet = limited(r#"{"max_calls": 2}"#);
    assert_eq!([refusal(&mut fleet, "c1", NOW), refusal(&mut fleet, "c2", NOW)], [None, None]);
    assert_eq!(refusal(&mut fleet, "c3", NOW), MAX_CALLS);
    assert_eq!(refusal(&mut fleet, "c2", NOW), None, "a live call is not limited");
    assert!(fleet.allocate(&merchant_request("other", "c4"), NOW).is_ok());
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(refusal(&mut fleet, "c3", NOW), None);
    assert_eq!(refusal(&mut limited(r#"{"max_calls": 0}"#), "c1", NOW), MAX_CALLS);
}

#[test]
fn waiting_calls_count_and_limited_calls_do_not_wait() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 2}"#), Edit::ANY).unwrap();
    let waiting = |call| Allocate { merchant: Some(name("m")), ..waiting_request(call) };
    assert!(fleet.allocate(&waiting("c1"), NOW).is_ok());
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting("c2"), NOW),
        RefusalReason::Waiting { .. }
    ));
    assert_eq!(
        refusal_reason(&mut fleet, &waiting("c3"), NOW),
        RefusalReason::Limit(Limit::MaxCalls)
    );
    // The pod is handed off to c2: one live call, so c3 may wait.
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    fleet.allocate(&waiting("c2"), NOW).unwrap();
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting("c3"), NOW),
        RefusalReason::Waiting { .. }
    ));
    assert_eq!(
        refusal_reason(&mut fleet, &waiting("c4"), NOW),
        RefusalReason::Limit(Limit::MaxCalls)
    );
    fleet.release(&Release::new(name("c3"), None), NOW).unwrap_err();
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting("c4"), NOW),
        RefusalReason::Waiting { .. }
    ));
}

#[test]
fn admissions_after_a_clock_step_backwards_do_not_count() {
    let mut fleet = limited(r#"{"max_rate": 2}"#);
    assert_eq!([refusal(&mut fleet, "c1", NOW), refusal(&mut fleet, "c2", NOW)], [None, None]);
    let then = NOW - 500_000;
    assert_eq!([refusal(&mut fleet, "c3", then), refusal(&mut fleet, "c4", then)], [None, None]);
    assert_eq!(refusal(&mut fleet, "c5", then), MAX_RATE);
}

#[test]
fn max_rate_limits_new_calls_within_any_second() {
    let mut fleet = limited(r#"{"max_rate": 2}"#);
    assert_eq!(refusal(&mut fleet, "c1", NOW), None);
    assert_eq!(refusal(&mut fleet, "c2", NOW + 600), None);
    assert_eq!(refusal(&mut fleet, "c3", NOW + 999), MAX_RATE);
    assert_eq!(refusal(&mut fleet, "c3", NOW + 1_000), None);
    assert_eq!(refusal(&mut fleet, "c4", NOW + 1_599), MAX_RATE);
    assert_eq!(refusal(&mut fleet, "c4", NOW + 1_600), None);
    assert_eq!(refusal(&mut fleet, "c5", NOW + 9_000), None);
    assert_eq!(refusal(&mut fleet, "c6", NOW + 9_000), None);
    assert_eq!(refusal(&mut fleet, "c7", NOW + 9_000), MAX_RATE);
    assert_eq!(refusal(&mut limited(r#"{"max_rate": 0}"#), "c1", NOW), MAX_RATE);
}

#[test]
fn a_call_that_joins_the_queue_counts_against_the_rate() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 2}"#), Edit::ANY).unwrap();
    let waiting = |call| Allocate { merchant: Some(name("m")), ..waiting_request(call) };
    fleet.allocate(&waiting("c1"), NOW).unwrap();
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting("c2"), NOW),
        RefusalReason::Waiting { .. }
    ));
    assert_eq!(
        refusal_reason(&mut fleet, &waiting("c3"), NOW),
        RefusalReason::Limit(Limit::MaxRate)
    );
}

#[test]
fn a_reconnect_is_not_limited() {
    let mut fleet = limited(r#"{"max_rate": 1, "max_calls": 2}"#);
    let first = Allocate { may_return: true, ..merchant_request("m", "c1") };
    fleet.allocate(&first, NOW).unwrap();
    let again = Allocate { previous: Some(previous_pod("p1", 1)), ..first };
    assert!(fleet.allocate(&again, NOW + 500).is_ok(), "limits apply to new calls");
    assert_eq!(refusal(&mut fleet, "c2", NOW + 1_000), None, "a reconnect does not count");
    // A call without history is new, even if it reports a previous pod.
    let unknown = Allocate { previous: Some(previous_pod("p1", 1)), ..merchant_request("m", "c3") };
    assert_eq!(
        refusal_reason(&mut fleet, &unknown, NOW + 5_000),
        RefusalReason::Limit(Limit::MaxCalls)
    );
}

#[test]
fn a_waiting_reconnect_does_not_count_against_the_rate() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 1}"#), Edit::ANY).unwrap();
    let first = Allocate { may_return: true, merchant: Some(name("m")), ..waiting_request("c1") };
    fleet.allocate(&first, NOW).unwrap();
    allocate(&mut fleet, &plain_request("c2"));
    fleet.drain(&name("p1"), LEASE_TTL, NOW).unwrap();
    let again = Allocate { previous: Some(previous_pod("p1", 1)), ..first };
    assert!(matches!(
        refusal_reason(&mut fleet, &again, NOW + 500),
        RefusalReason::Waiting { is_new: true, .. }
    ));
    let next = Allocate { merchant: Some(name("m")), ..waiting_request("c3") };
    assert!(matches!(
        refusal_reason(&mut fleet, &next, NOW + 1_000),
        RefusalReason::Waiting { .. }
    ));
}

#[test]
fn a_new_document_takes_effect_at_once() {
    let mut fleet = limited(r#"{"max_calls": 0}"#);
    assert_eq!(fleet.merchant(&name("m")), Some(r#"{"max_calls": 0}"#));
    assert_eq!(refusal(&mut fleet, "c1", NOW), MAX_CALLS);
    fleet.set_merchant(&name("m"), None, Edit::ANY).unwrap();
    assert_eq!(fleet.merchant(&name("m")), None);
    assert_eq!(refusal(&mut fleet, "c1", NOW), None);
    fleet.take_changes();
    fleet.set_merchant(&name("m"), None, Edit::ANY).unwrap();
    assert_eq!(fleet.take_changes(), []);
}
