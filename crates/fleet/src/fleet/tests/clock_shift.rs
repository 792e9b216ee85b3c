//! Clock steps.

use super::*;
use crate::merchant::Limit;

const HOUR: i64 = 3_600_000;

/// A fleet with one instance of every fact that contains a time.
fn fleet_with_times() -> Fleet {
    let mut fleet = fleet(r#"{"gold": 5}"#, 5);
    fleet.apply(Change::Began { trusting_until: NOW + 9_000 });
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 1}"#), Edit::ANY).unwrap();
    for _ in 0..3 {
        allocate_on(&mut fleet, &provisional_request("broken"), "p1");
        end(&mut fleet, "broken", EndCause::Unconfirmed, NOW);
    }
    let p1 = name("p1");
    let quarantined_until = Some(NOW + 7_000);
    fleet.record(Change::Health { pod: p1, failures: 3, quarantined_until });
    fleet.drain(&name("p2"), 8_000, NOW).unwrap();
    allocate_on(&mut fleet, &merchant_request("m", "live"), "p3");
    allocate_on(&mut fleet, &plain_request("done"), "p4");
    allocate_on(&mut fleet, &plain_request("busy"), "p5");
    fleet.allocate(&waiting_request("handed"), NOW).unwrap_err();
    end(&mut fleet, "done", EndCause::Agent, NOW);
    fleet.allocate(&waiting_request("waiting"), NOW).unwrap_err();
    fleet
}

fn sorted_facts(fleet: &Fleet) -> Vec<String> {
    let mut facts: Vec<String> =
        fleet.facts().iter().map(|change| serde_json::to_string(change).unwrap()).collect();
    facts.sort();
    facts
}

#[test]
fn a_clock_step_preserves_the_remaining_time_of_all_deadlines() {
    for by in [HOUR, -(NOW as i64) / 2] {
        let mut fleet = fleet_with_times();
        fleet.shift(by);
        let at = |ms: Millis| (NOW + ms).saturating_add_signed(by);
        assert_eq!(fleet.trusting_until, at(9_000));
        assert!(fleet.history.get(&name("broken"), at(3_600_000)).is_some());
        assert!(fleet.history.get(&name("broken"), at(3_600_001)).is_none());
        let limit = RefusalReason::Limit(Limit::MaxRate);
        assert_eq!(refusal_reason(&mut fleet, &merchant_request("m", "next"), at(999)), limit);

        assert_eq!(fleet.sweep(9, at(2_999)), Swept::default());
        let swept = fleet.sweep(9, at(3_000));
        assert_eq!(swept.abandoned, [AbandonedCall { call: name("waiting"), waited: 3_000 }]);
        let ended: Vec<_> = swept.expired.iter().map(|it| (it.call.as_str(), it.lasted)).collect();
        assert_eq!(ended, [("handed", 3_000)]);
        assert_eq!(fleet.sweep(9, at(6_999)), Swept::default());
        assert_eq!(fleet.sweep(9, at(7_000)).restored, [name("p1")]);
        assert_eq!(fleet.sweep(9, at(7_999)), Swept::default());
        assert_eq!(fleet.sweep(9, at(8_000)).undrained, [name("p2")]);
        assert_eq!(fleet.sweep(9, at(LEASE_TTL - 1)), Swept::default());
        let swept = fleet.sweep(9, at(LEASE_TTL));
        assert!(swept.expired.iter().all(|it| it.lasted == LEASE_TTL), "{swept:?}");
        assert_eq!(swept.expired.len(), 2);
    }
}

#[test]
fn a_clock_step_and_its_reverse_change_nothing() {
    let mut fleet = fleet_with_times();
    let before = sorted_facts(&fleet);
    fleet.shift(HOUR);
    assert_ne!(sorted_facts(&fleet), before);
    fleet.shift(-HOUR);
    assert_eq!(sorted_facts(&fleet), before);
}

#[test]
fn a_clock_step_is_journaled() {
    let mut fleet = fleet_with_times();
    let mut replayed = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| replayed.apply(change));
    fleet.take_changes();
    fleet.shift(-HOUR / 5);
    let changes = fleet.take_changes();
    assert_eq!(serde_json::to_string(&changes).unwrap(), r#"[{"is":"shifted","by":-720000}]"#);
    changes.into_iter().for_each(|change| replayed.apply(change));
    assert_eq!(sorted_facts(&replayed), sorted_facts(&fleet));
}

#[test]
fn a_clock_step_below_zero_does_not_overflow() {
    let mut fleet = fleet_with_times();
    fleet.shift(-HOUR * 1_000_000);
    assert_eq!(fleet.sweep(9, 0).expired.len(), 3, "expired leases stay expired");
    fleet.shift(HOUR * 1_000_000);
}
