//! Who is given which pod, and how a call ends.

use super::*;
use crate::merchant::Limit;

const TWO_TIERS: &str = r#"{"tiers": {"gold": {"target": 2}, "basic": {"type": "shared",
    "target": 2, "max_concurrent": 2}}, "default_chain": ["gold", "basic"]}"#;

fn tried(fleet: &mut Fleet, request: &Allocate) -> Vec<(String, Reason)> {
    let tried = fleet.allocate(request, NOW).unwrap_err().tried;
    tried.into_iter().map(|tried| (tried.step.to_string(), tried.reason)).collect()
}

#[test]
fn pods_fill_the_targets_of_the_table() {
    let fleet = fleet(TWO_TIERS, 5);
    let pools: Vec<_> = fleet.pods().into_iter().map(|pod| pod.pool.unwrap().to_string()).collect();
    assert_eq!(pools, ["pool:gold", "pool:gold", "pool:basic", "pool:basic", "pool:basic"]);
}

#[test]
fn a_label_decides_where_a_pod_is() {
    let mut fleet = fleet(TWO_TIERS, 0);
    let pinned = PodFacts { pin: Some(name("basic")), ..ready() };
    assert_eq!(see(&mut fleet, "p1", pinned).pool, Some(name("basic")));
    let lost = PodFacts { pin: Some(name("nowhere")), ..ready() };
    assert_eq!(see(&mut fleet, "p2", lost).pool, Some(name("gold")));
}

#[test]
fn a_pod_gets_its_pool_when_it_is_first_in_service() {
    let mut fleet = fleet(TWO_TIERS, 0);
    assert_eq!(see(&mut fleet, "p1", PodFacts { ready: false, ..ready() }).pool, None);
    assert_eq!(see(&mut fleet, "p1", ready()).pool, Some(name("gold")));
    assert_eq!(
        see(&mut fleet, "p1", PodFacts { ready: false, ..ready() }).pool,
        Some(name("gold"))
    );
}

#[test]
fn a_call_that_asks_again_hears_the_same() {
    let mut fleet = fleet(TWO_TIERS, 2);
    let first = fleet.allocate(&ask("c1"), NOW).unwrap();
    let again = fleet.allocate(&ask("c1"), NOW).unwrap();
    assert_eq!((first.was_existing, again.was_existing), (false, true));
    assert_eq!((first.pod, fleet.active_calls()), (again.pod, 1));
    give(&mut fleet, &ask("c2"));
    assert_eq!(fleet.active_calls(), 2);
}

#[test]
fn a_provisional_call_that_asks_again_has_its_whole_time() {
    let mut fleet = fleet(TWO_TIERS, 1);
    give(&mut fleet, &ask_provisional("c1"));
    fleet.allocate(&ask_provisional("c1"), NOW + 1_000).unwrap();
    assert_eq!(fleet.call(&name("c1")).unwrap().lease_until, NOW + 1_000 + LEASE);
    // One that does not ask for a stream promises none.
    fleet.allocate(&ask("c1"), NOW + 2_000).unwrap();
    assert_eq!(fleet.call(&name("c1")).unwrap().lease_until, NOW + 1_000 + LEASE);
}

#[test]
fn a_refusal_says_why_each_step_gave_nothing() {
    let mut fleet =
        fleet(r#"{"tiers": {"gold": 1, "tin": 1}, "default_chain": ["gold", "tin"]}"#, 0);
    let document = r#"{"pool": "acme", "fallback": ["nowhere", "gold", "tin"]}"#;
    fleet.set_merchant(&name("m"), Some(document), Edit::ANY).unwrap();
    let reasons = |fleet: &mut Fleet| {
        let tried = tried(fleet, &ask_for("m", "new"));
        tried.into_iter().map(|(_, reason)| reason).collect::<Vec<_>>()
    };
    use Reason::{AllDraining, AtCapacity, Empty, Unknown};
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, Empty, Empty]);
    see(&mut fleet, "p1", ready());
    see(&mut fleet, "p2", ready());
    give_on(&mut fleet, &ask("c1"), "p1");
    give_on(&mut fleet, &ask("c2"), "p2");
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AtCapacity, AtCapacity]);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    see(&mut fleet, "p2", PodFacts { ready: false, ..ready() });
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AllDraining, Empty]);
    // A busy pod beside one that leaves: the pool is full, not on its way out.
    let pinned = PodFacts { pin: Some(name("gold")), ..ready() };
    see(&mut fleet, "p3", pinned);
    give_on(&mut fleet, &ask("c3"), "p3");
    assert_eq!(reasons(&mut fleet), [Empty, Unknown, AtCapacity, Empty]);
    let tried = tried(&mut fleet, &ask_for("m", "new"));
    assert_eq!(tried[0].0, "merchant:acme");
}

#[test]
fn a_document_that_cannot_be_used_is_reported_and_passed_over() {
    let mut fleet = fleet(TWO_TIERS, 1);
    fleet.set_merchant(&name("m"), Some("not a document"), Edit::ANY).unwrap();
    let given = fleet.allocate(&ask_for("m", "c1"), NOW).unwrap();
    assert!(given.malformed_merchant.is_some() && given.tried.is_empty());
    let refused = fleet.allocate(&ask_for("m", "c2"), NOW).unwrap_err();
    assert!(refused.malformed_merchant.is_some());
    assert_eq!(refused.tried.len(), 2);
}

#[test]
fn a_favoured_pod_is_given_only_where_it_is_as_good() {
    let mut fleet = fleet(r#"{"basic": {"type": "shared", "target": 3, "max_concurrent": 2}}"#, 3);
    give_on(&mut fleet, &ask("c1"), "p2");
    fleet.favour([(name("c2"), name("p2"))].into());
    assert_eq!(give(&mut fleet, &ask("c2")), "p1");
    give_on(&mut fleet, &ask("c3"), "p3");
    // All have one call now.
    give_on(&mut fleet, &ask("c4"), "p2");
    let last = Allocate { after: Some(after("p3", 1)), ..ask("c5") };
    fleet.favour([(name("c5"), name("p3"))].into());
    assert_eq!(give(&mut fleet, &last), "p1");
}

#[test]
fn a_release_ends_only_the_attempt_it_names() {
    let mut fleet = fleet(TWO_TIERS, 2);
    give(&mut fleet, &ask_returning("c1"));
    let release = |attempt| Release { attempt: Some(attempt), ..Release::new(name("c1"), None) };
    assert_eq!(fleet.release(&release(2), NOW), Err(NotReleased::NotFound));
    let released = fleet.release(&release(1), NOW + 70).unwrap();
    assert_eq!((released.pod, released.lasted), (name("p1"), 70));
    assert_eq!(fleet.release(&release(1), NOW), Err(NotReleased::NotFound));
}

#[test]
fn a_release_says_where_the_pod_is_now() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("c1"));
    give_nothing_to_leaving_pods(&mut fleet);
    fleet.apply_tiers(&table(r#"{"tin": 1}"#), Edit::ANY).unwrap();
    let released = fleet.release(&Release::new(name("c1"), Some(name("p1"))), NOW).unwrap();
    assert_eq!((released.source_pool, released.pool), (name("gold"), name("tin")));
    assert!(released.was_draining);
    fleet.undrain(&name("p1")).unwrap();
    give(&mut fleet, &ask("c2"));
    assert!(!fleet.release(&Release::new(name("c2"), None), NOW).unwrap().was_draining);
}

fn give_nothing_to_leaving_pods(fleet: &mut Fleet) {
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    assert_eq!(why(fleet, &ask("c2"), NOW), Why::NoPods);
}

#[test]
fn the_words_for_reasons_are_those_of_the_json() {
    use Reason::{AllDraining, AtCapacity, Empty, Unknown};
    for reason in [Empty, AllDraining, AtCapacity, Unknown] {
        assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
    }
    use Cause::{Abandoned, Agent, Broken, Lease, PodGone, Provider, Stream, Unconfirmed};
    for cause in [Agent, Provider, Stream, Broken, Lease, Unconfirmed, PodGone, Abandoned] {
        assert_eq!(serde_json::to_value(cause).unwrap(), cause.as_str());
    }
}

#[test]
fn refusals_have_short_names() {
    let names = [
        (Why::NoPods, "no_pods"),
        (Why::Limit(Limit::MaxCalls), "max_calls"),
        (Why::Limit(Limit::MaxRate), "max_rate"),
        (Why::QueueFull, "queue_full"),
        (Why::TimeOver { waited: 1 }, "time_over"),
        (Why::Waiting { is_new: true, until: 1 }, "waiting"),
        (Why::Over, "over"),
        (Why::Unsettled, "unsettled"),
        (Why::Spent, "spent"),
    ];
    for (why, name) in names {
        assert_eq!(why.as_str(), name);
    }
}
