//! Calls that go on.

use super::*;

fn renew(calls: &[&str], pod: Option<&str>) -> Renew {
    let calls = calls.iter().map(|call| name(call)).collect();
    Renew { calls, pod: pod.map(name), lease_ttl: LEASE }
}

fn confirm(call: &str, pod: &str, attempt: Option<u32>) -> Confirm {
    Confirm { call: name(call), pod: name(pod), attempt, lease_ttl: LEASE }
}

/// A fleet that has just begun, and believes pods.
fn trusting(tiers: &str) -> Fleet {
    let mut fleet = Fleet::new(table(tiers), NOW + 1_000);
    see(&mut fleet, "p1", ready());
    fleet
}

fn lease_of(fleet: &Fleet, call: &str) -> Option<Millis> {
    fleet.call(&name(call)).map(|call| call.lease_until)
}

#[test]
fn a_renewal_extends_leases() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    give(&mut fleet, &ask("c1"));
    give(&mut fleet, &ask("c2"));
    let renewed = fleet.renew(&renew(&["c1", "c2", "c3"], Some("p1")), NOW + 10);
    assert_eq!(renewed.until, NOW + 10 + LEASE);
    assert_eq!((renewed.unknown, renewed.adopted), (vec![name("c2"), name("c3")], vec![]));
    assert_eq!(lease_of(&fleet, "c1"), Some(NOW + 10 + LEASE));
    assert_eq!(lease_of(&fleet, "c2"), Some(NOW + LEASE));
    assert_eq!(fleet.renew(&renew(&["c2"], None), NOW + 20).unknown, []);
    assert_eq!(lease_of(&fleet, "c2"), Some(NOW + 20 + LEASE));
}

#[test]
fn a_lease_ends_when_nobody_renews_it() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    give(&mut fleet, &ask("c1"));
    give(&mut fleet, &ask_provisional("c2"));
    assert_eq!(fleet.sweep(9, NOW + LEASE - 1), Swept::default());
    let swept = fleet.sweep(9, NOW + LEASE);
    let causes: Vec<_> = swept.expired.iter().map(|ended| (ended.cause, ended.lasted)).collect();
    assert_eq!(causes, [(Cause::Lease, LEASE), (Cause::Unconfirmed, LEASE)]);
    assert_eq!((swept.most(), fleet.active_calls()), (2, 0));
}

#[test]
fn for_a_while_a_pods_word_is_enough() {
    let mut fleet = trusting(r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#);
    let lost = renew(&["c1", "c2", "c3"], Some("p1"));
    let renewed = fleet.renew(&lost, NOW + 999);
    assert_eq!(renewed.adopted, [name("c1"), name("c2")]);
    assert_eq!(renewed.unknown, [name("c3")], "there is no room for it");
    assert_eq!(lease_of(&fleet, "c1"), Some(NOW + 999 + LEASE));
    assert_eq!(fleet.renew(&renew(&["c4"], None), NOW).unknown, [name("c4")]);
    assert_eq!(fleet.renew(&renew(&["c5"], Some("p9")), NOW).later, [name("c5")]);
    // An ended call does not come back.
    end(&mut fleet, "c1", Cause::Agent, NOW + 999);
    assert_eq!(fleet.renew(&renew(&["c1"], Some("p1")), NOW + 999).unknown, [name("c1")]);
    assert_eq!(fleet.renew(&renew(&["c3"], Some("p1")), NOW + 1_000).unknown, [name("c3")]);
    assert_eq!(fleet.renew(&renew(&["c3"], Some("p1")), NOW + 999).adopted, [name("c3")]);
}

#[test]
fn calls_that_end_later_are_not_kept_in_mind() {
    let mut fleet = trusting(r#"{"gold": 1}"#);
    give(&mut fleet, &ask("c1"));
    end(&mut fleet, "c1", Cause::Agent, NOW + 1_000);
    assert!(!fleet.ended.contains(&name("c1")));
}

#[test]
fn a_pod_without_a_pool_gets_one_with_its_call() {
    let mut fleet = trusting(r#"{"gold": 1, "tin": 1}"#);
    see(&mut fleet, "p2", PodFacts { ready: false, ..ready() });
    assert_eq!(fleet.renew(&renew(&["c1"], Some("p2")), NOW).adopted, [name("c1")]);
    assert_eq!(fleet.pod(&name("p2")).unwrap().pool, Some(name("tin")));
    assert_eq!(fleet.renew(&renew(&["c2"], Some("p2")), NOW).unknown, [name("c2")]);
}

#[test]
fn the_last_ten_thousand_ends_are_kept_in_mind() {
    let call = |number: usize| name::<CallSid>(&format!("c{number}"));
    let mut ended = Ended::default();
    (0..10_000).for_each(|number| ended.insert(call(number)));
    ended.insert(call(9_999));
    assert!(ended.contains(&call(0)));
    ended.insert(call(10_000));
    assert!(!ended.contains(&call(0)) && ended.contains(&call(1)));
    ended.insert(call(10_001));
    assert!(!ended.contains(&call(1)) && ended.contains(&call(10_001)));
}

#[test]
fn a_stream_that_starts_makes_a_call_sure_of_its_pod() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    give(&mut fleet, &Allocate { returns: true, ..ask_provisional("c1") });
    let now = NOW + 10;
    assert_eq!(fleet.confirm(&confirm("c1", "p2", None), now), Confirmed::Unknown);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", Some(2)), now), Confirmed::Unknown);
    assert!(fleet.call(&name("c1")).unwrap().provisional);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", Some(1)), now), Confirmed::Sure);
    assert!(!fleet.call(&name("c1")).unwrap().provisional);
    assert_eq!(lease_of(&fleet, "c1"), Some(now + LEASE));
    // From then on its agent renews it.
    assert_eq!(fleet.confirm(&confirm("c1", "p1", None), now + 10), Confirmed::Sure);
    assert_eq!(lease_of(&fleet, "c1"), Some(now + LEASE));
}

#[test]
fn a_stream_that_starts_late_takes_its_pod_again() {
    let late = NOW + LEASE;
    let told = |request: Confirm, prepare: fn(&mut Fleet)| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        let request_of = ask_for("m", "c1");
        give(&mut fleet, &Allocate { provisional: true, returns: true, ..request_of });
        fleet.sweep(9, late);
        prepare(&mut fleet);
        let told = fleet.confirm(&request, late);
        (told, fleet)
    };
    let (confirmed, mut fleet) = told(confirm("c1", "p1", Some(1)), |_| ());
    assert_eq!(confirmed, Confirmed::Retaken { pool: name("gold") });
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.attempt, call.provisional, call.merchant), (1, false, Some(name("m"))));
    assert_eq!(call.lease_until, late + LEASE);
    end(&mut fleet, "c1", Cause::Abandoned, late);
    assert_eq!(fleet.confirm(&confirm("c1", "p1", None), late), Confirmed::Unknown, "once");

    let is_unknown = |request, prepare| told(request, prepare).0 == Confirmed::Unknown;
    assert!(!is_unknown(confirm("c1", "p1", None), |_| ()));
    assert!(is_unknown(confirm("c1", "p2", None), |_| ()));
    assert!(is_unknown(confirm("c1", "p1", Some(2)), |_| ()));
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| give_on(fleet, &ask("c2"), "p1")));
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| {
        fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    }));
    // The stream is over before it is said to have started.
    assert!(is_unknown(confirm("c1", "p1", None), |fleet| {
        let over = Release { cause: Cause::Stream, ..Release::new(name("c1"), None) };
        fleet.release(&over, NOW + LEASE).unwrap_err();
    }));
}

#[test]
fn a_call_that_waits_again_leaves_its_place_for_its_late_stream() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask_provisional("c1"));
    fleet.sweep(9, NOW + LEASE);
    fleet.drain(&name("p1"), 10, NOW).unwrap();
    fleet
        .set_merchant(&name("m"), Some(r#"{"pool": "m", "dedicated_only": true}"#), Edit::ANY)
        .unwrap();
    let request = Allocate { merchant: Some(name("m")), ..ask_patient("c1") };
    fleet.allocate(&request, NOW + LEASE).unwrap_err();
    fleet.undrain(&name("p1")).unwrap();
    let told = fleet.confirm(&confirm("c1", "p1", None), NOW + LEASE);
    assert_eq!(told, Confirmed::Retaken { pool: name("gold") });
    assert_eq!((fleet.status().waiting, fleet.active_calls()), (0, 1));
}

#[test]
fn an_outage_costs_nobody_who_could_not_ask() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    give(&mut fleet, &ask("sure"));
    give(&mut fleet, &ask_provisional("provisional"));
    give(&mut fleet, &ask("busy"));
    for call in ["handed", "waiting"] {
        fleet.allocate(&ask_patient(call), NOW).unwrap_err();
    }
    end(&mut fleet, "busy", Cause::Agent, NOW);
    fleet.take_changes();
    // All have that much time already.
    fleet.spare(3_000, NOW);
    assert_eq!(fleet.take_changes(), []);
    fleet.spare(2 * LEASE, NOW + 7);
    let until = NOW + 7 + 2 * LEASE;
    assert_eq!(lease_of(&fleet, "sure"), Some(NOW + LEASE));
    assert_eq!(lease_of(&fleet, "provisional"), Some(until));
    assert_eq!(lease_of(&fleet, "handed"), Some(until));
    assert!(fleet.call(&name("handed")).unwrap().is_handed);
    assert!(fleet.call(&name("provisional")).unwrap().provisional);
    let found = fleet.find(&name("waiting"));
    assert!(matches!(found, Some(Found::Waiting(it)) if it.poll_by == until));
}
