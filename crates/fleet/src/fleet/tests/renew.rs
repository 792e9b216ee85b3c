//! Renewal, re-registration and confirmation.

use super::*;

fn renew(calls: &[&str], pod: Option<&str>) -> Renew {
    let calls = calls.iter().map(|call| name(call)).collect();
    Renew { calls, pod: pod.map(name), lease_ttl: LEASE_TTL }
}

fn confirm(call: &str, pod: &str, pod_attempt: Option<u32>) -> Confirm {
    Confirm { call: name(call), pod: name(pod), pod_attempt, lease_ttl: LEASE_TTL }
}

/// A fleet within its re-registration window.
fn fleet_in_window(tiers: &str) -> Fleet {
    let mut fleet = Fleet::new(table(tiers), NOW + 1_000);
    observe(&mut fleet, "p1", ready());
    fleet
}

fn lease_of(fleet: &Fleet, call: &str) -> Option<Millis> {
    fleet.call(&name(call)).map(|call| call.lease_until)
}

#[test]
fn a_renewal_extends_leases() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate(&mut fleet, &plain_request("c1"));
    allocate(&mut fleet, &plain_request("c2"));
    let renewed = fleet.renew(&renew(&["c1", "c2", "c3"], Some("p1")), NOW + 10);
    assert_eq!(renewed.until, NOW + 10 + LEASE_TTL);
    assert_eq!((renewed.unknown, renewed.registered), (vec![name("c2"), name("c3")], vec![]));
    assert_eq!(lease_of(&fleet, "c1"), Some(NOW + 10 + LEASE_TTL));
    assert_eq!(lease_of(&fleet, "c2"), Some(NOW + LEASE_TTL));
    assert_eq!(fleet.renew(&renew(&["c2"], None), NOW + 20).unknown, []);
    assert_eq!(lease_of(&fleet, "c2"), Some(NOW + 20 + LEASE_TTL));
}

#[test]
fn a_lease_expires_without_renewal() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate(&mut fleet, &plain_request("c1"));
    allocate(&mut fleet, &provisional_request("c2"));
    assert_eq!(fleet.sweep(9, NOW + LEASE_TTL - 1), Swept::default());
    let swept = fleet.sweep(9, NOW + LEASE_TTL);
    let causes: Vec<_> = swept.expired.iter().map(|ended| (ended.cause, ended.lasted)).collect();
    assert_eq!(causes, [(EndCause::Lease, LEASE_TTL), (EndCause::Unconfirmed, LEASE_TTL)]);
    assert_eq!((swept.max_count(), fleet.active_calls()), (2, 0));
}

#[test]
fn renewals_reregister_unknown_calls_within_the_window() {
    let mut fleet =
        fleet_in_window(r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#);
    let lost = renew(&["c1", "c2", "c3"], Some("p1"));
    let renewed = fleet.renew(&lost, NOW + 999);
    assert_eq!(renewed.registered, [name("c1"), name("c2")]);
    assert_eq!(renewed.unknown, [name("c3")], "the pod has no free slot");
    assert_eq!(lease_of(&fleet, "c1"), Some(NOW + 999 + LEASE_TTL));
    assert_eq!(fleet.renew(&renew(&["c4"], None), NOW).unknown, [name("c4")]);
    assert_eq!(fleet.renew(&renew(&["c5"], Some("p9")), NOW).retry, [name("c5")]);
    // An ended call is not re-registered.
    end(&mut fleet, "c1", EndCause::Agent, NOW + 999);
    assert_eq!(fleet.renew(&renew(&["c1"], Some("p1")), NOW + 999).unknown, [name("c1")]);
    assert_eq!(fleet.renew(&renew(&["c3"], Some("p1")), NOW + 1_000).unknown, [name("c3")]);
    assert_eq!(fleet.renew(&renew(&["c3"], Some("p1")), NOW + 999).registered, [name("c3")]);
}

#[test]
fn ends_after_the_window_are_not_remembered() {
    let mut fleet = fleet_in_window(r#"{"gold": 1}"#);
    allocate(&mut fleet, &plain_request("c1"));
    end(&mut fleet, "c1", EndCause::Agent, NOW + 1_000);
    assert!(!fleet.recently_ended.contains(&name("c1")));
}

#[test]
fn a_reregistered_call_assigns_its_pod_a_pool() {
    let mut fleet = fleet_in_window(r#"{"gold": 1, "tin": 1}"#);
    observe(&mut fleet, "p2", PodFacts { ready: false, ..ready() });
    assert_eq!(fleet.renew(&renew(&["c1"], Some("p2")), NOW).registered, [name("c1")]);
    assert_eq!(fleet.pod(&name("p2")).unwrap().pool, Some(name("tin")));
    assert_eq!(fleet.renew(&renew(&["c2"], Some("p2")), NOW).unknown, [name("c2")]);
}

#[test]
fn the_last_ten_thousand_ended_calls_are_remembered() {
    let call = |number: usize| name::<CallSid>(&format!("c{number}"));
    let mut ended = RecentlyEnded::default();
    (0..10_000).for_each(|number| ended.insert(call(number)));
    ended.insert(call(9_999));
    assert!(ended.contains(&call(0)));
    ended.insert(call(10_000));
    assert!(!ended.contains(&call(0)) && ended.contains(&call(1)));
    ended.insert(call(10_001));
    assert!(!ended.contains(&call(1)) && ended.contains(&call(10_001)));
}

#[test]
fn a_started_stream_confirms_a_provisional_call() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate(&mut fleet, &Allocate { may_return: true, ..provisional_request("c1") });
    let now = NOW + 10;
    assert_eq!(fleet.confirm(&confirm("c1", "p2", None), now), Confirmed::Unknown);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", Some(2)), now), Confirmed::Unknown);
    assert!(fleet.call(&name("c1")).unwrap().provisional);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", Some(1)), now), Confirmed::Live);
    assert!(!fleet.call(&name("c1")).unwrap().provisional);
    assert_eq!(lease_of(&fleet, "c1"), Some(now + LEASE_TTL));
    // A repeat does not extend the lease: the agent renews it.
    assert_eq!(fleet.confirm(&confirm("c1", "p1", None), now + 10), Confirmed::Live);
    assert_eq!(lease_of(&fleet, "c1"), Some(now + LEASE_TTL));
}

#[test]
fn a_late_confirmation_reallocates_the_pod() {
    let late = NOW + LEASE_TTL;
    let confirm_late = |request: Confirm, prepare: fn(&mut Fleet)| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        let first = merchant_request("m", "c1");
        allocate(&mut fleet, &Allocate { provisional: true, may_return: true, ..first });
        fleet.sweep(9, late);
        prepare(&mut fleet);
        let confirmed = fleet.confirm(&request, late);
        (confirmed, fleet)
    };
    let (confirmed, mut fleet) = confirm_late(confirm("c1", "p1", Some(1)), |_| ());
    assert_eq!(confirmed, Confirmed::Reallocated { pool: name("gold") });
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.pod_attempt, call.provisional, call.merchant), (1, false, Some(name("m"))));
    assert_eq!(call.lease_until, late + LEASE_TTL);
    end(&mut fleet, "c1", EndCause::Abandoned, late);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", None), late), Confirmed::Unknown, "only once");

    let is_unknown = |request, prepare| confirm_late(request, prepare).0 == Confirmed::Unknown;
    assert!(!is_unknown(confirm("c1", "p1", None), |_| ()));
    assert!(is_unknown(confirm("c1", "p2", None), |_| ()));
    assert!(is_unknown(confirm("c1", "p1", Some(2)), |_| ()));
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| allocate_on(
        fleet,
        &plain_request("c2"),
        "p1"
    )));
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| {
        fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    }));
    // The end of the stream is reported before its start.
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| {
        let over = Release { cause: EndCause::Stream, ..Release::new(name("c1"), None) };
        fleet.release(&over, NOW + LEASE_TTL).unwrap_err();
    }));
}

#[test]
fn a_late_confirmation_removes_the_call_from_the_queue() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &provisional_request("c1"));
    fleet.sweep(9, NOW + LEASE_TTL);
    fleet.drain(&name("p1"), 10, NOW).unwrap();
    fleet
        .set_merchant(&name("m"), Some(r#"{"pool": "m", "dedicated_only": true}"#), Edit::ANY)
        .unwrap();
    let request = Allocate { merchant: Some(name("m")), ..waiting_request("c1") };
    fleet.allocate(&request, NOW + LEASE_TTL).unwrap_err();
    fleet.undrain(&name("p1")).unwrap();
    let confirmed = fleet.confirm(&confirm("c1", "p1", None), NOW + LEASE_TTL);
    assert_eq!(confirmed, Confirmed::Reallocated { pool: name("gold") });
    assert_eq!((fleet.status().waiting, fleet.active_calls()), (0, 1));
}

#[test]
fn extend_pending_extends_provisional_handed_off_and_waiting_calls() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    allocate(&mut fleet, &plain_request("confirmed"));
    allocate(&mut fleet, &provisional_request("provisional"));
    allocate(&mut fleet, &plain_request("busy"));
    for call in ["handed", "waiting"] {
        fleet.allocate(&waiting_request(call), NOW).unwrap_err();
    }
    end(&mut fleet, "busy", EndCause::Agent, NOW);
    fleet.take_changes();
    // All have that much time left already.
    fleet.extend_pending(3_000, NOW);
    assert_eq!(fleet.take_changes(), []);
    fleet.extend_pending(2 * LEASE_TTL, NOW + 7);
    let until = NOW + 7 + 2 * LEASE_TTL;
    assert_eq!(lease_of(&fleet, "confirmed"), Some(NOW + LEASE_TTL));
    assert_eq!(lease_of(&fleet, "provisional"), Some(until));
    assert_eq!(lease_of(&fleet, "handed"), Some(until));
    assert!(fleet.call(&name("handed")).unwrap().is_handed);
    assert!(fleet.call(&name("provisional")).unwrap().provisional);
    let found = fleet.find(&name("waiting"));
    assert!(matches!(found, Some(CallLookup::Waiting(it)) if it.poll_by == until));
}
