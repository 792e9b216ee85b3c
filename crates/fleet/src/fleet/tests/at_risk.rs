//! Pods that the cluster is about to disrupt.

use super::*;

const TIERS: &str = r#"{"gold": {"target": 3}, "basic": {"type": "shared", "max_concurrent": 2}}"#;

fn at_risk() -> PodFacts {
    PodFacts { at_risk: true, ..ready() }
}

fn pods_of_calls(fleet: &mut Fleet, calls: &[&str]) -> Vec<String> {
    let mut pod = |call: &&str| allocate(fleet, &plain_request(call));
    calls.iter().map(&mut pod).collect()
}

#[test]
fn a_pod_at_risk_is_the_last_choice_of_its_pool() {
    let mut fleet = fleet(TIERS, 3);
    observe(&mut fleet, "p1", at_risk());
    let status = fleet.status();
    let gold = status.pools.iter().find(|pool| pool.pool == name("pool:gold")).unwrap();
    assert_eq!((gold.available, gold.free_slots), (3, 3), "it still serves");
    let mut pods = pods_of_calls(&mut fleet, &["CA1", "CA2"]);
    pods.sort();
    assert_eq!(pods, ["p2", "p3"]);
    assert_eq!(pods_of_calls(&mut fleet, &["CA3"]), ["p1"], "before the next tier of the chain");
}

#[test]
fn a_pod_at_risk_keeps_its_call_and_serves_normally_afterwards() {
    let mut fleet = fleet(TIERS, 2);
    let first = pods_of_calls(&mut fleet, &["CA1"]).remove(0);
    observe(&mut fleet, &first, at_risk());
    assert_eq!(pods_of_calls(&mut fleet, &["CA1"])[0], first);
    assert_eq!(fleet.at_risk(&name("pool:gold")), [], "a busy exclusive pod takes no call");
    fleet.release(&Release::new(name("CA1"), None), NOW).unwrap();
    assert_eq!(fleet.at_risk(&name("pool:gold")), [(name(&first), 0)]);
    observe(&mut fleet, &first, ready());
    assert_eq!(fleet.at_risk(&name("pool:gold")), []);
    assert_eq!(fleet.available(&name("pool:gold")).len(), 2);
}

#[test]
fn shared_pods_at_risk_are_chosen_by_load_among_themselves() {
    let tiers = r#"{"basic": {"type": "shared", "max_concurrent": 2, "strategy": "pack"}}"#;
    let mut fleet = fleet(tiers, 3);
    let full = pods_of_calls(&mut fleet, &["CA1"]).remove(0);
    for pod in ["p1", "p2", "p3"] {
        observe(&mut fleet, pod, at_risk());
    }
    let safe = if full == "p1" { "p2" } else { "p1" };
    assert_eq!(pods_of_calls(&mut fleet, &["CA2"]), [full], "pack takes the fullest");
    observe(&mut fleet, safe, ready());
    assert_eq!(pods_of_calls(&mut fleet, &["CA3", "CA4"]), [safe, safe]);
}
