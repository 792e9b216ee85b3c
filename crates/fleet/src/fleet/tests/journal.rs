//! What is written down, and what is read from it.

use super::*;

#[test]
fn a_line_says_only_what_is_not_usual() {
    let written = |change: &Change| {
        let line = serde_json::to_string(change).unwrap();
        assert_eq!(serde_json::from_str::<Change>(&line).unwrap(), *change, "{line}");
        line
    };
    let seen = |facts| Change::Pod { pod: name("p1"), facts };
    assert_eq!(
        written(&seen(ready())),
        r#"{"is":"pod","pod":"p1","uid":"u1","address":"a:1","ready":true}"#
    );
    let odd = PodFacts { terminating: true, restarts: 2, pin: Some(name("merchant:m")), ..ready() };
    assert_eq!(
        written(&seen(odd)),
        r#"{"is":"pod","pod":"p1","uid":"u1","address":"a:1","ready":true,"terminating":true,"restarts":2,"pin":"merchant:m"}"#
    );
    assert_eq!(
        written(&Change::Ended { call: name("c1"), at: 7, cause: Cause::Agent }),
        r#"{"is":"ended","call":"c1","at":7}"#
    );
    assert_eq!(
        written(&Change::Ended { call: name("c1"), at: 7, cause: Cause::Lease }),
        r#"{"is":"ended","call":"c1","at":7,"cause":"lease"}"#
    );
    assert_eq!(
        written(&Change::Home { pod: name("p1"), pool: name("merchant:m") }),
        r#"{"is":"home","pod":"p1","pool":"merchant:m"}"#
    );
}

#[test]
fn a_compacted_journal_tells_the_whole_story() {
    let mut fleet = Fleet::new(table(r#"{"gold": 3}"#), NOW + 1_000);
    for pod in ["p1", "p2", "p3"] {
        see(&mut fleet, pod, ready());
    }
    leads(&mut fleet, Some(4)).unwrap();
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 9}"#), Edit::ANY).unwrap();
    give_on(&mut fleet, &ask_returning("broken"), "p1");
    end(&mut fleet, "broken", Cause::Unconfirmed, NOW);
    give_on(&mut fleet, &ask_for("m", "live"), "p2");
    fleet.drain(&name("p1"), 500, NOW).unwrap();
    give_on(&mut fleet, &ask("other"), "p3");
    fleet.allocate(&ask_patient("waiting"), NOW).unwrap_err();

    let mut read = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| read.replay(change));
    assert_eq!(read.trusting_until, NOW + 1_000);
    assert_eq!(leads(&mut read, None), Ok(4));
    assert_eq!(read.tiers(), fleet.tiers());
    assert_eq!(read.merchant(&name("m")), Some(r#"{"max_calls": 9}"#));
    assert_eq!(read.pods(), fleet.pods());
    assert_eq!(read.status(), fleet.status());
    assert_eq!(read.call(&name("live")), fleet.call(&name("live")));
    assert_eq!(read.find(&name("waiting")), fleet.find(&name("waiting")));
    assert!(read.ended.contains(&name("broken")) && read.ends.contains(&name("broken")));
    assert_eq!(read.pods[&name::<PodName>("p1")].failures, 1);
    assert_eq!(read.merchant_calls, [(name("m"), 1)].into());
}

#[test]
fn a_pod_without_blame_has_no_line_about_its_health() {
    let fleet = fleet(r#"{"gold": 1}"#, 2);
    let blame = |change: &Change| matches!(change, Change::Health { .. });
    assert!(!fleet.facts().iter().any(blame));
}

#[test]
fn changes_are_kept_only_if_somebody_writes_them() {
    let mut fleet = Fleet::new(table(r#"{"gold": 1}"#), 0);
    see(&mut fleet, "p1", ready());
    assert_eq!(fleet.take_changes(), []);
    fleet.keep_changes();
    fleet.set_merchant(&name("m"), Some("{}"), Edit::ANY).unwrap();
    let document = Some("{}".to_string());
    assert_eq!(
        fleet.take_changes(),
        [Change::Merchant { id: name("m"), document, by: String::new() }]
    );
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn a_line_about_a_pod_that_has_gone_changes_nothing() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("c1"));
    let changes = fleet.take_changes();
    end(&mut fleet, "c1", Cause::Agent, NOW);
    fleet.remove_pod(&name("p1"), "u1", Departure::Now, WRITER, NOW).unwrap();
    changes.into_iter().for_each(|change| fleet.replay(change));
    fleet.replay(Change::Draining { pod: name("p1"), until: Some(NOW) });
    assert_eq!((fleet.active_calls(), fleet.pods()), (0, vec![]));
    assert!(fleet.drains.is_empty() && fleet.leases.is_empty());
}

#[test]
fn a_restart_does_not_bring_back_the_list_of_another_origin() {
    let mut fleet = Fleet::new(table(r#"{"gold": 1}"#), 0);
    fleet.keep_changes();
    let list = |digest: &str| Claimant::List { digest: digest.into(), is_new: false };
    let claim = |origin, by, force| Claim { origin, by, force };
    fleet.claim_pods(&claim(PodOrigin::List, list("d1"), false), NOW).unwrap();
    let leader = Claimant::Leader { epoch: None };
    fleet.claim_pods(&claim(PodOrigin::Simulated, leader, true), NOW).unwrap();
    let mut restarted = Fleet::new(table(r#"{"gold": 1}"#), 0);
    fleet.take_changes().into_iter().for_each(|change| restarted.replay(change));
    for fleet in [&mut fleet, &mut restarted] {
        let other = claim(PodOrigin::Simulated, list("d2"), false);
        assert!(fleet.claim_pods(&other, NOW).is_ok(), "the list before is in force");
    }
}
