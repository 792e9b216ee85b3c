//! Read models of pools, pods and calls.

use super::*;

const SHARED: &str = r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared",
    "target": 4, "max_concurrent": 3}, "acme": {"target": 0}},
    "default_chain": ["gold", "basic"]}"#;

#[test]
fn a_status_counts_pods_and_calls_by_pool() {
    let mut fleet = fleet(SHARED, 6);
    allocate_on(&mut fleet, &plain_request("c1"), "p1");
    allocate_on(&mut fleet, &plain_request("c2"), "p2");
    allocate_on(&mut fleet, &plain_request("c3"), "p3");
    fleet.drain(&name("p3"), 1_000, NOW).unwrap();
    observe(&mut fleet, "p4", PodFacts { ready: false, ..ready() });
    let status = fleet.status();
    assert_eq!((status.active_calls, status.waiting), (3, 0));
    let shown: Vec<_> = status
        .pools
        .iter()
        .map(|it| {
            let counts = [it.assigned, it.available, it.draining, it.not_ready];
            (it.pool.to_string(), it.target, counts, it.active_calls, it.free_slots)
        })
        .collect();
    assert_eq!(
        shown,
        [
            // p2, p5 and p6 are available; p2 has a call.
            ("pool:basic".to_string(), 4, [5, 3, 1, 1], 2, 8),
            ("pool:gold".to_string(), 1, [1, 0, 0, 0], 1, 0),
            ("merchant:acme".to_string(), 0, [0, 0, 0, 0], 0, 0),
        ]
    );
    let available = fleet.available(&name("basic"));
    assert_eq!(available, [(name("p2"), 1), (name("p5"), 0), (name("p6"), 0)]);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(fleet.status().pools[1].free_slots, 1);
}

#[test]
fn a_removed_tier_is_listed_while_it_has_busy_pods() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.apply_tiers(&table(r#"{"tin": 1}"#), Edit::ANY).unwrap();
    let pools = |fleet: &Fleet| {
        let pools = fleet.status().pools;
        pools.iter().map(|it| (it.pool.to_string(), it.kind.is_some())).collect::<Vec<_>>()
    };
    assert_eq!(pools(&fleet), [("pool:gold".into(), false), ("pool:tin".into(), true)]);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(pools(&fleet), [("pool:tin".into(), true)]);
}

#[test]
fn a_pod_lists_its_calls_by_descending_deadline() {
    let mut fleet = fleet(SHARED, 2);
    observe(&mut fleet, "p1", PodFacts { ready: false, ..ready() });
    for (call, lease_ttl) in [("c1", 10), ("c2", 30), ("c3", 20)] {
        allocate_on(&mut fleet, &Allocate { lease_ttl, ..plain_request(call) }, "p2");
    }
    let pod = fleet.pod(&name("p2")).unwrap();
    let calls: Vec<_> =
        pod.calls.iter().map(|it| (it.call.to_string(), it.lease_until - NOW)).collect();
    assert_eq!(calls, [("c2".into(), 30), ("c3".into(), 20), ("c1".to_string(), 10)]);
    assert_eq!(fleet.pod(&name("p9")), None);
    let names: Vec<_> = fleet.pods().into_iter().map(|pod| pod.name.to_string()).collect();
    assert_eq!(names, ["p1", "p2"]);
}

#[test]
fn a_draining_or_terminating_pod_is_leaving() {
    let mut fleet = fleet(SHARED, 3);
    fleet.drain(&name("p1"), 10, NOW).unwrap();
    observe(&mut fleet, "p2", PodFacts { terminating: true, ..ready() });
    let leaving: Vec<_> = fleet.pods().iter().map(PodStatus::is_leaving).collect();
    assert_eq!(leaving, [true, true, false]);
}

#[test]
fn an_audit_repairs_indexes_that_differ_from_the_facts() {
    let mut fleet = fleet(SHARED, 2);
    let mut names = fleet.pod_names();
    names.sort();
    assert_eq!(names, [name("p1"), name("p2")]);
    assert_eq!(fleet.audit(&names), Audited { pods: 2, repaired: 0 });
    fleet.pods.get_mut("p1").unwrap().facts.ready = false;
    assert_eq!(fleet.audit(&names), Audited { pods: 2, repaired: 1 });
    assert_eq!(fleet.available(&name("gold")), []);
    assert_eq!(fleet.audit(&[name("p9")]), Audited { pods: 1, repaired: 0 });
}
