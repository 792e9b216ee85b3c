//! Steps of the clock.

use super::*;
use crate::merchant::Limit;

const HOUR: i64 = 3_600_000;

/// A fleet with one of everything that has a time.
fn fleet_with_times() -> Fleet {
    let mut fleet = fleet(r#"{"gold": 5}"#, 5);
    fleet.replay(Change::Began { trusting_until: NOW + 9_000 });
    fleet.set_merchant(&name("m"), Some(r#"{"max_rate": 1}"#), Edit::ANY).unwrap();
    for _ in 0..3 {
        give_on(&mut fleet, &ask_provisional("broken"), "p1");
        end(&mut fleet, "broken", Cause::Unconfirmed, NOW);
    }
    let p1 = name("p1");
    let quarantined_until = Some(NOW + 7_000);
    fleet.record(Change::Health { pod: p1, failures: 3, quarantined_until });
    fleet.drain(&name("p2"), 8_000, NOW).unwrap();
    give_on(&mut fleet, &ask_for("m", "live"), "p3");
    give_on(&mut fleet, &ask("done"), "p4");
    give_on(&mut fleet, &ask("busy"), "p5");
    fleet.allocate(&ask_patient("handed"), NOW).unwrap_err();
    end(&mut fleet, "done", Cause::Agent, NOW);
    fleet.allocate(&ask_patient("waiting"), NOW).unwrap_err();
    fleet
}

fn rows(fleet: &Fleet) -> Vec<String> {
    let mut rows: Vec<String> =
        fleet.facts().iter().map(|change| serde_json::to_string(change).unwrap()).collect();
    rows.sort();
    rows
}

#[test]
fn a_step_of_the_clock_leaves_everything_the_time_it_had() {
    for by in [HOUR, -(NOW as i64) / 2] {
        let mut fleet = fleet_with_times();
        fleet.shift(by);
        let at = |ms: Millis| (NOW + ms).saturating_add_signed(by);
        assert_eq!(fleet.trusting_until, at(9_000));
        assert!(fleet.ends.get(&name("broken"), at(3_599_999)).is_some());
        assert!(fleet.ends.get(&name("broken"), at(3_600_000)).is_none());
        let limit = Why::Limit(Limit::MaxRate);
        assert_eq!(why(&mut fleet, &ask_for("m", "next"), at(999)), limit);

        assert_eq!(fleet.sweep(9, at(2_999)), Swept::default());
        let swept = fleet.sweep(9, at(3_000));
        assert_eq!(swept.abandoned, [Abandoned { call: name("waiting"), waited: 3_000 }]);
        let ended: Vec<_> = swept.expired.iter().map(|it| (it.call.as_str(), it.lasted)).collect();
        assert_eq!(ended, [("handed", 3_000)]);
        assert_eq!(fleet.sweep(9, at(6_999)), Swept::default());
        assert_eq!(fleet.sweep(9, at(7_000)).restored, [name("p1")]);
        assert_eq!(fleet.sweep(9, at(7_999)), Swept::default());
        assert_eq!(fleet.sweep(9, at(8_000)).undrained, [name("p2")]);
        assert_eq!(fleet.sweep(9, at(LEASE - 1)), Swept::default());
        let swept = fleet.sweep(9, at(LEASE));
        assert!(swept.expired.iter().all(|it| it.lasted == LEASE), "{swept:?}");
        assert_eq!(swept.expired.len(), 2);
    }
}

#[test]
fn a_step_back_and_forth_changes_nothing() {
    let mut fleet = fleet_with_times();
    let before = rows(&fleet);
    fleet.shift(HOUR);
    assert_ne!(rows(&fleet), before);
    fleet.shift(-HOUR);
    assert_eq!(rows(&fleet), before);
}

#[test]
fn a_step_of_the_clock_is_in_the_journal() {
    let mut fleet = fleet_with_times();
    let mut read = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| read.replay(change));
    fleet.take_changes();
    fleet.shift(-HOUR / 5);
    let changes = fleet.take_changes();
    assert_eq!(serde_json::to_string(&changes).unwrap(), r#"[{"is":"shifted","by":-720000}]"#);
    changes.into_iter().for_each(|change| read.replay(change));
    assert_eq!(rows(&read), rows(&fleet));
}

#[test]
fn a_clock_set_to_its_beginning_ends_in_no_overflow() {
    let mut fleet = fleet_with_times();
    fleet.shift(-HOUR * 1_000_000);
    assert_eq!(fleet.sweep(9, 0).expired.len(), 3, "what is over stays over");
    fleet.shift(HOUR * 1_000_000);
}
