//! The journal: serialization, replay and compaction.

use super::*;

#[test]
fn journal_entries_omit_default_values() {
    let written = |change: &Change| {
        let line = serde_json::to_string(change).unwrap();
        assert_eq!(serde_json::from_str::<Change>(&line).unwrap(), *change, "{line}");
        line
    };
    let observed = |facts| Change::Pod { pod: name("p1"), facts };
    assert_eq!(
        written(&observed(ready())),
        r#"{"is":"pod","pod":"p1","uid":"u1","address":"a:1","ready":true}"#
    );
    let unusual =
        PodFacts { terminating: true, restarts: 2, pin: Some(name("merchant:m")), ..ready() };
    assert_eq!(
        written(&observed(unusual)),
        r#"{"is":"pod","pod":"p1","uid":"u1","address":"a:1","ready":true,"terminating":true,"restarts":2,"pin":"merchant:m"}"#
    );
    assert_eq!(
        written(&Change::Ended { call: name("c1"), at: 7, cause: EndCause::Agent }),
        r#"{"is":"ended","call":"c1","at":7}"#
    );
    assert_eq!(
        written(&Change::Ended { call: name("c1"), at: 7, cause: EndCause::Lease }),
        r#"{"is":"ended","call":"c1","at":7,"cause":"lease"}"#
    );
    assert_eq!(
        written(&Change::PoolAssigned { pod: name("p1"), pool: name("merchant:m") }),
        r#"{"is":"home","pod":"p1","pool":"merchant:m"}"#
    );
}

#[test]
fn serialized_names_are_stable() {
    for line in [
        r#"{"is":"home","pod":"p1","pool":"pool:gold"}"#,
        r#"{"is":"call","call":"c1","pod":"p1","pool":"pool:gold","at":1,"until":2,"attempts":2}"#,
        r#"{"is":"call","call":"c1","pod":"p1","pool":"pool:gold","at":1,"until":2,"place":{"priority":0,"ticket":1,"pools":["pool:gold"],"since":1,"until":2,"poll_by":3,"tried":[{"step":"gold","reason":"at_capacity"}],"attempts":1}}"#,
        r#"{"is":"fetched","call":"c1","at":1,"until":2,"provisional":true}"#,
        r#"{"is":"spared","call":"c1","until":2}"#,
        r#"{"is":"remembered","call":"c1","end":{"pod":"p1","cause":"stream","attempts":1,"lasted":5,"merchant":null,"at":1}}"#,
        r#"{"is":"forgotten","call":"c1"}"#,
        r#"{"is":"seen","fingerprint":"0123456789abcdef","at":1,"until":2}"#,
        r#"{"is":"waits","call":"c1","place":{"priority":0,"ticket":1,"pools":["pool:gold"],"since":1,"until":2,"poll_by":3,"tried":[],"attempts":0}}"#,
        r#"{"is":"polled","call":"c1","poll_by":3}"#,
        r#"{"is":"left","call":"c1"}"#,
        r#"{"is":"told","at":1,"event":{"kind":"fetched","call":"c1"}}"#,
        r#"{"is":"told","at":1,"event":{"kind":"handed","call":"c1","pod":"p1"}}"#,
        r#"{"is":"told","at":1,"event":{"kind":"left","call":"c1"}}"#,
    ] {
        let change: Change = serde_json::from_str(line).unwrap();
        assert_eq!(serde_json::to_string(&change).unwrap(), line);
    }
}

#[test]
fn a_compacted_journal_rebuilds_the_whole_state() {
    let mut fleet = Fleet::new(table(r#"{"gold": 3}"#), NOW + 1_000);
    for pod in ["p1", "p2", "p3"] {
        observe(&mut fleet, pod, ready());
    }
    claim_as_leader(&mut fleet, Some(4)).unwrap();
    fleet.set_merchant(&name("m"), Some(r#"{"max_calls": 9}"#), Edit::ANY).unwrap();
    allocate_on(&mut fleet, &returning_request("broken"), "p1");
    end(&mut fleet, "broken", EndCause::Unconfirmed, NOW);
    allocate_on(&mut fleet, &merchant_request("m", "live"), "p2");
    fleet.drain(&name("p1"), 500, NOW).unwrap();
    allocate_on(&mut fleet, &plain_request("other"), "p3");
    fleet.allocate(&waiting_request("waiting"), NOW).unwrap_err();

    let mut replayed = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| replayed.apply(change));
    assert_eq!(replayed.trusting_until, NOW + 1_000);
    assert_eq!(claim_as_leader(&mut replayed, None), Ok(4));
    assert_eq!(replayed.tiers(), fleet.tiers());
    assert_eq!(replayed.merchant(&name("m")), Some(r#"{"max_calls": 9}"#));
    assert_eq!(replayed.pods(), fleet.pods());
    assert_eq!(replayed.status(), fleet.status());
    assert_eq!(replayed.call(&name("live")), fleet.call(&name("live")));
    assert_eq!(replayed.find(&name("waiting")), fleet.find(&name("waiting")));
    assert!(
        replayed.recently_ended.contains(&name("broken"))
            && replayed.history.contains(&name("broken"))
    );
    assert_eq!(replayed.pods[&name::<PodName>("p1")].failures, 1);
    assert_eq!(replayed.merchant_calls, [(name("m"), 1)].into());
}

#[test]
fn compaction_omits_the_health_of_healthy_pods() {
    let fleet = fleet(r#"{"gold": 1}"#, 2);
    let is_health = |change: &Change| matches!(change, Change::Health { .. });
    assert!(!fleet.facts().iter().any(is_health));
}

#[test]
fn changes_are_collected_only_after_enable_change_log() {
    let mut fleet = Fleet::new(table(r#"{"gold": 1}"#), 0);
    observe(&mut fleet, "p1", ready());
    assert_eq!(fleet.take_changes(), []);
    fleet.enable_change_log();
    fleet.set_merchant(&name("m"), Some("{}"), Edit::ANY).unwrap();
    let document = Some("{}".to_string());
    assert_eq!(
        fleet.take_changes(),
        [Change::Merchant { id: name("m"), document, by: String::new() }]
    );
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn changes_of_a_removed_pod_have_no_effect() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    let changes = fleet.take_changes();
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    changes.into_iter().for_each(|change| fleet.apply(change));
    fleet.apply(Change::Draining { pod: name("p1"), until: Some(NOW), surplus: false });
    assert_eq!((fleet.active_calls(), fleet.pods()), (0, vec![]));
    assert!(fleet.drains.is_empty() && fleet.leases.is_empty());
}

#[test]
fn a_restart_does_not_restore_the_list_of_another_origin() {
    let mut fleet = Fleet::new(table(r#"{"gold": 1}"#), 0);
    fleet.enable_change_log();
    let list = |digest: &str| Claimant::List { digest: digest.into(), is_new: false };
    let claim = |origin, by, force| Claim { origin, by, force };
    fleet.claim_pods(&claim(PodOrigin::List, list("d1"), false), NOW).unwrap();
    let leader = Claimant::Leader { epoch: None };
    fleet.claim_pods(&claim(PodOrigin::Simulated, leader, true), NOW).unwrap();
    let mut restarted = Fleet::new(table(r#"{"gold": 1}"#), 0);
    fleet.take_changes().into_iter().for_each(|change| restarted.apply(change));
    for fleet in [&mut fleet, &mut restarted] {
        let other = claim(PodOrigin::Simulated, list("d2"), false);
        assert!(fleet.claim_pods(&other, NOW).is_ok(), "the previous list is still in force");
    }
}
