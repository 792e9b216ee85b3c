//! Allocate and release.

use super::*;
use crate::merchant::Limit;

const TWO_TIERS: &str = r#"{"tiers": {"gold": {"target": 2}, "basic": {"type": "shared",
    "target": 2, "max_concurrent": 2}}, "default_chain": ["gold", "basic"]}"#;

fn skipped_steps(fleet: &mut Fleet, request: &Allocate) -> Vec<(String, SkipReason)> {
    let skipped = fleet.allocate(request, NOW).unwrap_err().tried;
    skipped.into_iter().map(|it| (it.step.to_string(), it.reason)).collect()
}

#[test]
fn pods_fill_the_targets_of_the_table() {
    let fleet = fleet(TWO_TIERS, 5);
    let pools: Vec<_> = fleet.pods().into_iter().map(|pod| pod.pool.unwrap().to_string()).collect();
    assert_eq!(pools, ["pool:gold", "pool:gold", "pool:basic", "pool:basic", "pool:basic"]);
}

#[test]
fn a_label_selects_the_pool_of_a_pod() {
    let mut fleet = fleet(TWO_TIERS, 0);
    let pinned = PodFacts { pin: Some(name("basic")), ..ready() };
    assert_eq!(observe(&mut fleet, "p1", pinned).pool, Some(name("basic")));
    let unknown = PodFacts { pin: Some(name("nowhere")), ..ready() };
    assert_eq!(observe(&mut fleet, "p2", unknown).pool, Some(name("gold")));
}

#[test]
fn a_pod_gets_its_pool_when_it_is_first_in_service() {
    let mut fleet = fleet(TWO_TIERS, 0);
    assert_eq!(observe(&mut fleet, "p1", PodFacts { ready: false, ..ready() }).pool, None);
    assert_eq!(observe(&mut fleet, "p1", ready()).pool, Some(name("gold")));
    assert_eq!(
        observe(&mut fleet, "p1", PodFacts { ready: false, ..ready() }).pool,
        Some(name("gold"))
    );
}

#[test]
fn a_repeated_allocate_returns_the_same_pod() {
    let mut fleet = fleet(TWO_TIERS, 2);
    let first = fleet.allocate(&plain_request("c1"), NOW).unwrap();
    let again = fleet.allocate(&plain_request("c1"), NOW).unwrap();
    assert_eq!((first.was_existing, again.was_existing), (false, true));
    assert_eq!((first.pod, fleet.active_calls()), (again.pod, 1));
    allocate(&mut fleet, &plain_request("c2"));
    assert_eq!(fleet.active_calls(), 2);
}

#[test]
fn a_repeated_provisional_allocate_extends_the_lease() {
    let mut fleet = fleet(TWO_TIERS, 1);
    allocate(&mut fleet, &provisional_request("c1"));
    fleet.allocate(&provisional_request("c1"), NOW + 1_000).unwrap();
    assert_eq!(fleet.call(&name("c1")).unwrap().lease_until, NOW + 1_000 + LEASE_TTL);
    // A repeat without the provisional flag does not extend it.
    fleet.allocate(&plain_request("c1"), NOW + 2_000).unwrap();
    assert_eq!(fleet.call(&name("c1")).unwrap().lease_until, NOW + 1_000 + LEASE_TTL);
}

#[test]
fn a_refusal_reports_the_reason_of_each_skipped_step() {
    let mut fleet =
        fleet(r#"{"tiers": {"gold": 1, "tin": 1}, "default_chain": ["gold", "tin"]}"#, 0);
    let document = r#"{"pool": "acme", "fallback": ["nowhere", "gold", "tin"]}"#;
    fleet.set_merchant(&name("m"), Some(document), Edit::ANY).unwrap();
    let reasons = |fleet: &mut Fleet| {
        let skipped = skipped_steps(fleet, &merchant_request("m", "new"));
        skipped.into_iter().map(|(_, reason)| reason).collect::<Vec<_>>()
    };
    use SkipReason::{AllDraining, AtCapacity, Empty, Unknown};
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, Empty, Empty]);
    observe(&mut fleet, "p1", ready());
    observe(&mut fleet, "p2", ready());
    allocate_on(&mut fleet, &plain_request("c1"), "p1");
    allocate_on(&mut fleet, &plain_request("c2"), "p2");
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AtCapacity, AtCapacity]);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    observe(&mut fleet, "p2", PodFacts { ready: false, ..ready() });
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AllDraining, Empty]);
    // A busy pod beside a draining one: the pool is at capacity, not draining.
    let pinned = PodFacts { pin: Some(name("gold")), ..ready() };
    observe(&mut fleet, "p3", pinned);
    allocate_on(&mut fleet, &plain_request("c3"), "p3");
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AtCapacity, Empty]);
    let skipped = skipped_steps(&mut fleet, &merchant_request("m", "new"));
    assert_eq!(skipped[0].0, "merchant:acme");
}

#[test]
fn a_malformed_document_is_reported_and_the_default_chain_is_used() {
    let mut fleet = fleet(TWO_TIERS, 1);
    fleet.set_merchant(&name("m"), Some("not a document"), Edit::ANY).unwrap();
    let given = fleet.allocate(&merchant_request("m", "c1"), NOW).unwrap();
    assert!(given.malformed_merchant.is_some() && given.tried.is_empty());
    let refused = fleet.allocate(&merchant_request("m", "c2"), NOW).unwrap_err();
    assert!(refused.malformed_merchant.is_some());
    assert_eq!(refused.tried.len(), 2);
}

#[test]
fn a_preferred_pod_is_drawn_only_among_equivalent_pods() {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 3, "max_concurrent": 2}}"#, 3);
    allocate_on(&mut fleet, &plain_request("c1"), "p2");
    fleet.prefer([(name("c2"), name("p2"))].into());
    assert_eq!(allocate(&mut fleet, &plain_request("c2")), "p1");
    allocate_on(&mut fleet, &plain_request("c3"), "p3");
    // All have one call now.
    allocate_on(&mut fleet, &plain_request("c4"), "p2");
    let last = Allocate { previous: Some(previous_pod("p3", 1)), ..plain_request("c5") };
    fleet.prefer([(name("c5"), name("p3"))].into());
    assert_eq!(allocate(&mut fleet, &last), "p1");
}

#[test]
fn a_release_ends_only_the_named_pod_attempt() {
    let mut fleet = fleet(TWO_TIERS, 2);
    allocate(&mut fleet, &returning_request("c1"));
    let release =
        |pod_attempt| Release { pod_attempt: Some(pod_attempt), ..Release::new(name("c1"), None) };
    assert_eq!(fleet.release(&release(2), NOW), Err(NotReleased::NotFound));
    let released = fleet.release(&release(1), NOW + 70).unwrap();
    assert_eq!((released.pod, released.lasted), (name("p1"), 70));
    assert_eq!(fleet.release(&release(1), NOW), Err(NotReleased::NotFound));
}

#[test]
fn a_release_returns_the_current_pool_of_the_pod() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    drain_refuses_new_calls(&mut fleet);
    fleet.apply_tiers(&table(r#"{"tin": 1}"#), Edit::ANY).unwrap();
    let released = fleet.release(&Release::new(name("c1"), Some(name("p1"))), NOW).unwrap();
    assert_eq!((released.source_pool, released.pool), (name("gold"), name("tin")));
    assert!(released.was_draining);
    fleet.undrain(&name("p1")).unwrap();
    allocate(&mut fleet, &plain_request("c2"));
    assert!(!fleet.release(&Release::new(name("c2"), None), NOW).unwrap().was_draining);
}

fn drain_refuses_new_calls(fleet: &mut Fleet) {
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    assert_eq!(refusal_reason(fleet, &plain_request("c2"), NOW), RefusalReason::NoPods);
}

#[test]
fn reason_and_cause_names_match_their_json() {
    use SkipReason::{AllDraining, AtCapacity, Empty, Unknown};
    for reason in [Empty, AllDraining, AtCapacity, Unknown] {
        assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
    }
    use EndCause::{Abandoned, Agent, Broken, Lease, PodGone, Provider, Stream, Unconfirmed};
    for cause in [Agent, Provider, Stream, Broken, Lease, Unconfirmed, PodGone, Abandoned] {
        assert_eq!(serde_json::to_value(cause).unwrap(), cause.as_str());
    }
}

#[test]
fn refusal_reasons_have_stable_names() {
    let names = [
        (RefusalReason::NoPods, "no_pods"),
        (RefusalReason::Limit(Limit::MaxCalls), "max_calls"),
        (RefusalReason::Limit(Limit::MaxRate), "max_rate"),
        (RefusalReason::QueueFull, "queue_full"),
        (RefusalReason::HoldExpired { waited: 1 }, "time_over"),
        (RefusalReason::Waiting { is_new: true, until: 1 }, "waiting"),
        (RefusalReason::CallEnded, "over"),
        (RefusalReason::Unsettled, "unsettled"),
        (RefusalReason::RetriesExhausted, "spent"),
    ];
    for (reason, name) in names {
        assert_eq!(reason.as_str(), name);
    }
}
