//! The queue: order, limits, polls and hand-offs.

use super::*;

/// A fleet whose only pod has a call.
fn busy_fleet() -> Fleet {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("first"));
    fleet
}

fn assert_queued(fleet: &mut Fleet, request: &Allocate) {
    assert!(matches!(
        refusal_reason(fleet, request, NOW),
        RefusalReason::Waiting { is_new: true, .. }
    ));
}

fn waiting_for(merchant: &str, call: &str) -> Allocate {
    Allocate { merchant: Some(name(merchant)), ..waiting_request(call) }
}

fn with_hold(request: Allocate, edit: impl Fn(&mut Hold)) -> Allocate {
    let mut hold = request.hold.unwrap();
    edit(&mut hold);
    Allocate { hold: Some(hold), ..request }
}

/// Frees the pod repeatedly; returns the calls in the order of their hand-offs.
fn handed_off(fleet: &mut Fleet) -> String {
    let mut calls = Vec::new();
    end(fleet, "first", EndCause::Agent, NOW);
    while let Some(call) = fleet.take_handoffs().pop() {
        calls.push(call.to_string());
        fleet.release(&Release::new(call, None), NOW).unwrap_err();
    }
    calls.join(" ")
}

#[test]
fn calls_are_served_by_priority_then_arrival() {
    let mut fleet = busy_fleet();
    fleet.set_merchant(&name("low"), Some(r#"{"priority": -1}"#), Edit::ANY).unwrap();
    fleet.set_merchant(&name("high"), Some(r#"{"priority": 2}"#), Edit::ANY).unwrap();
    assert_queued(&mut fleet, &waiting_for("low", "a"));
    assert_queued(&mut fleet, &waiting_request("d"));
    assert_queued(&mut fleet, &waiting_request("c"));
    assert_queued(&mut fleet, &waiting_for("high", "e"));
    assert_eq!(fleet.status().waiting, 4);
    assert_eq!(fleet.status().pools[0].waiting, 4);
    assert_eq!(handed_off(&mut fleet), "e d c a");
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn reconnects_precede_new_calls() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    for call in ["z", "y", "first"] {
        allocate(&mut fleet, &Allocate { may_return: true, ..plain_request(call) });
    }
    assert_queued(&mut fleet, &waiting_request("b"));
    for (call, pod) in [("z", "p1"), ("y", "p2")] {
        fleet.drain(&name(pod), 1_000, NOW).unwrap();
        let previous = Some(previous_pod(pod, 1));
        assert_queued(
            &mut fleet,
            &Allocate { may_return: true, previous, ..waiting_request(call) },
        );
    }
    assert_queued(&mut fleet, &waiting_request("a"));
    assert_eq!(handed_off(&mut fleet), "z y b a");
}

#[test]
fn the_queue_length_is_limited() {
    let mut fleet = busy_fleet();
    let limited = |call| with_hold(waiting_request(call), |hold| hold.max_waiting = 2);
    assert_queued(&mut fleet, &limited("c1"));
    assert_queued(&mut fleet, &limited("c2"));
    assert_eq!(refusal_reason(&mut fleet, &limited("c3"), NOW), RefusalReason::QueueFull);
    fleet.release(&Release::new(name("c1"), None), NOW).unwrap_err();
    assert_queued(&mut fleet, &limited("c3"));
}

#[test]
fn the_queue_length_per_merchant_is_limited() {
    let mut fleet = busy_fleet();
    let limited =
        |id, call| with_hold(waiting_for(id, call), |hold| hold.max_waiting_per_merchant = 2);
    assert_queued(&mut fleet, &limited("m", "c1"));
    assert_queued(&mut fleet, &limited("m", "c2"));
    assert_eq!(refusal_reason(&mut fleet, &limited("m", "c3"), NOW), RefusalReason::QueueFull);
    assert_queued(&mut fleet, &limited("other", "c4"));
    for (left, next) in [("c1", "c3"), ("c2", "c5")] {
        fleet.release(&Release::new(name(left), None), NOW).unwrap_err();
        assert_queued(&mut fleet, &limited("m", next));
        assert_eq!(refusal_reason(&mut fleet, &limited("m", "c6"), NOW), RefusalReason::QueueFull);
    }
}

#[test]
fn calls_without_hold_time_or_pools_do_not_wait() {
    let mut fleet = busy_fleet();
    assert_eq!(refusal_reason(&mut fleet, &plain_request("c1"), NOW), RefusalReason::NoPods);
    let no_time = with_hold(waiting_request("c1"), |hold| hold.time = 0);
    assert_eq!(refusal_reason(&mut fleet, &no_time, NOW), RefusalReason::NoPods);
    fleet.set_merchant(&name("m"), Some(r#"{"fallback": ["nowhere"]}"#), Edit::ANY).unwrap();
    assert_eq!(refusal_reason(&mut fleet, &waiting_for("m", "c1"), NOW), RefusalReason::NoPods);
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn a_call_waits_until_its_hold_time_is_over() {
    let mut fleet = busy_fleet();
    let until = NOW + 30_000;
    assert_queued(&mut fleet, &waiting_request("c1"));
    let waiting = RefusalReason::Waiting { is_new: false, until };
    assert_eq!(refusal_reason(&mut fleet, &waiting_request("c1"), until - 1), waiting);
    // A request without hold is refused; the queue entry stays.
    assert_eq!(refusal_reason(&mut fleet, &plain_request("c1"), until - 1), RefusalReason::NoPods);
    let over = fleet.allocate(&waiting_request("c1"), until).unwrap_err();
    assert_eq!((over.reason, over.tried.len()), (RefusalReason::HoldExpired { waited: 30_000 }, 1));
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn a_call_that_misses_its_poll_deadline_leaves_the_queue() {
    let poll_by = |fleet: &Fleet| match fleet.find(&name("c1")) {
        Some(CallLookup::Waiting(waiting)) => waiting.poll_by,
        other => panic!("{other:?}"),
    };
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &waiting_request("c1"));
    assert_eq!(poll_by(&fleet), NOW + 3_000);
    fleet.allocate(&waiting_request("c1"), NOW + 1_000).unwrap_err();
    assert_eq!(poll_by(&fleet), NOW + 4_000);
    // The deadline ends one poll interval after the hold time.
    fleet.allocate(&waiting_request("c1"), NOW + 29_000).unwrap_err();
    assert_eq!(poll_by(&fleet), NOW + 31_000);
    assert_eq!(fleet.sweep(9, NOW + 30_999), Swept::default());
    let swept = fleet.sweep(9, NOW + 31_000);
    assert_eq!(swept.abandoned, [AbandonedCall { call: name("c1"), waited: 31_000 }]);
    assert_eq!((swept.max_count(), fleet.status().waiting), (1, 0));
}

#[test]
fn a_waiting_call_accepts_its_hand_off() {
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &Allocate { may_return: true, ..waiting_for("m", "c1") });
    end(&mut fleet, "first", EndCause::Agent, NOW + 1_000);
    assert_eq!((fleet.take_handoffs(), fleet.take_handoffs()), (vec![name("c1")], vec![]));
    let handed = fleet.call(&name("c1")).unwrap();
    assert_eq!((handed.is_handed, handed.allocated_at), (true, NOW));
    assert_eq!((handed.lease_until, handed.pod_attempt), (NOW + 3_000, 1));
    assert_eq!(handed.merchant, Some(name("m")));
    let request = Allocate { provisional: true, ..waiting_request("c1") };
    let accepted = fleet.allocate(&request, NOW + 2_000).unwrap();
    assert_eq!((accepted.waited, accepted.was_existing), (Some(2_000), false));
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.is_handed, call.provisional), (false, true));
    assert_eq!((call.allocated_at, call.lease_until), (NOW + 2_000, NOW + 2_000 + LEASE_TTL));
    assert!(fleet.allocate(&request, NOW + 2_000).unwrap().was_existing);
}

#[test]
fn an_expired_hand_off_goes_to_the_next_waiting_call() {
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &Allocate { may_return: true, ..waiting_request("c1") });
    fleet.allocate(&waiting_request("c2"), NOW + 1_000).unwrap_err();
    end(&mut fleet, "first", EndCause::Agent, NOW);
    let swept = fleet.sweep(9, NOW + 3_000);
    let causes: Vec<_> = swept.expired.iter().map(|ended| (ended.cause, ended.lasted)).collect();
    assert_eq!(causes, [(EndCause::Abandoned, 3_000)]);
    assert!(!fleet.history.contains(&name("c1")));
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p1");
}

#[test]
fn a_hand_off_to_a_removed_pod_is_requeued_in_order() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate(&mut fleet, &plain_request("b1"));
    allocate(&mut fleet, &plain_request("b2"));
    assert_queued(&mut fleet, &waiting_request("z"));
    assert_queued(&mut fleet, &waiting_request("a"));
    end(&mut fleet, "b1", EndCause::Agent, NOW);
    assert_eq!(fleet.take_handoffs(), [name("z")]);
    fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    assert!(
        matches!(fleet.find(&name("z")), Some(CallLookup::Waiting(it)) if it.poll_by == NOW + 3_000)
    );
    // It is first in the queue again.
    end(&mut fleet, "b2", EndCause::Agent, NOW);
    assert_eq!((pod_of(&fleet, "z").unwrap(), pod_of(&fleet, "a")), ("p2".into(), None));
}

#[test]
fn a_requeued_call_gets_another_free_pod_at_once() {
    let shared = r#"{"basic": {"type": "shared", "target": 2, "max_concurrent": 2}}"#;
    let mut fleet = fleet(shared, 1);
    for call in ["b1", "b2"] {
        allocate(&mut fleet, &plain_request(call));
    }
    assert_queued(&mut fleet, &waiting_request("z"));
    assert_queued(&mut fleet, &waiting_request("a"));
    end(&mut fleet, "b1", EndCause::Agent, NOW);
    end(&mut fleet, "b2", EndCause::Agent, NOW);
    observe(&mut fleet, "p2", ready());
    allocate_on(&mut fleet, &plain_request("c"), "p2");
    fleet.take_handoffs();
    // One slot is free, and z came first.
    fleet.remove_pod(&name("p1"), "u1", RemovalMode::Immediate, WRITER, NOW).unwrap();
    assert_eq!(fleet.take_handoffs(), [name("z")]);
    assert_eq!(fleet.status().waiting, 1);
}

#[test]
fn a_release_removes_a_waiting_call_from_the_queue() {
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &waiting_request("c1"));
    let on_pod = Release::new(name("c1"), Some(name("p1")));
    assert_eq!(fleet.release(&on_pod, NOW), Err(NotReleased::NotFound));
    let release = Release::new(name("c1"), None);
    let waited = Err(NotReleased::WasWaiting { waited: 50 });
    assert_eq!(fleet.release(&release, NOW + 50), waited);
    assert_eq!(fleet.status().waiting, 0);
    // The same for a handed-off call that has not accepted.
    assert_queued(&mut fleet, &waiting_request("c1"));
    end(&mut fleet, "first", EndCause::Agent, NOW);
    assert_eq!(fleet.release(&release, NOW + 50), waited);
    assert_eq!(fleet.active_calls(), 0);
}

#[test]
fn a_waiting_call_whose_pools_were_removed_is_queued_anew() {
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &waiting_request("c1"));
    fleet.apply_tiers(&table(r#"{"tin": 1, "zinc": 1}"#), Edit::ANY).unwrap();
    assert_queued(&mut fleet, &waiting_request("c1"));
    // One remaining pool keeps the queue entry.
    fleet.apply_tiers(&table(r#"{"tin": 1}"#), Edit::ANY).unwrap();
    let waiting = RefusalReason::Waiting { is_new: false, until: NOW + 30_000 };
    assert_eq!(refusal_reason(&mut fleet, &waiting_request("c1"), NOW), waiting);
}

#[test]
fn a_moved_or_new_pod_is_handed_to_a_waiting_call() {
    let mut fleet =
        fleet(r#"{"tiers": {"gold": {}, "tin": {}}, "default_chain": ["gold", "tin"]}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"fallback": ["gold"]}"#), Edit::ANY).unwrap();
    assert_queued(&mut fleet, &waiting_for("m", "c1"));
    fleet.move_pod(&name("p1"), "u1", &name("gold"), WRITER).unwrap();
    assert_eq!(pod_of(&fleet, "c1").unwrap(), "p1");
    assert_queued(&mut fleet, &waiting_for("m", "c2"));
    observe(&mut fleet, "p2", PodFacts { pin: Some(name("gold")), ..ready() });
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p2");
}

#[test]
fn a_hand_off_of_a_pod_that_left_service_is_not_accepted() {
    type LeaveService = fn(&mut Fleet);
    let cases: [(&str, LeaveService); 4] = [
        ("draining", |fleet| {
            fleet.drain(&name("p1"), 1_000, NOW).unwrap();
        }),
        ("terminating", |fleet| {
            drop(observe(fleet, "p1", PodFacts { terminating: true, ..ready() }))
        }),
        ("not ready", |fleet| drop(observe(fleet, "p1", PodFacts { ready: false, ..ready() }))),
        ("quarantined", |fleet| {
            let (pod, quarantined_until) = (name("p1"), Some(NOW + 60_000));
            fleet.apply(Change::Health { pod, failures: 3, quarantined_until });
        }),
    ];
    for (state, leave_service) in cases {
        let mut fleet = busy_fleet();
        assert_queued(&mut fleet, &waiting_request("a"));
        assert_queued(&mut fleet, &waiting_request("b"));
        end(&mut fleet, "first", EndCause::Agent, NOW);
        leave_service(&mut fleet);
        let refused = refusal_reason(&mut fleet, &waiting_request("a"), NOW);
        assert!(
            matches!(refused, RefusalReason::Waiting { is_new: false, .. }),
            "{state}: {refused:?}"
        );
        assert_eq!(fleet.status().waiting, 2, "{state}");
        // The call is still ahead of the one behind it.
        observe(&mut fleet, "p2", ready());
        assert_eq!(allocate(&mut fleet, &waiting_request("a")), "p2", "{state}");
    }
}

#[test]
fn a_handed_off_pod_that_left_service_is_replaced_by_a_free_pod() {
    let mut fleet = busy_fleet();
    assert_queued(&mut fleet, &waiting_request("a"));
    end(&mut fleet, "first", EndCause::Agent, NOW);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    observe(&mut fleet, "p2", ready());
    assert_eq!(allocate(&mut fleet, &waiting_request("a")), "p2");
    assert_eq!(fleet.pod(&name("p1")).unwrap().calls, []);
}
