//! Calls that wait: in which order, how many, for how long.

use super::*;

/// One pod, and a call that has it.
fn busy() -> Fleet {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("first"));
    fleet
}

fn waits(fleet: &mut Fleet, request: &Allocate) {
    assert!(matches!(why(fleet, request, NOW), Why::Waiting { is_new: true, .. }));
}

fn patient_for(merchant: &str, call: &str) -> Allocate {
    Allocate { merchant: Some(name(merchant)), ..ask_patient(call) }
}

fn with_hold(request: Allocate, edit: impl Fn(&mut Hold)) -> Allocate {
    let mut hold = request.hold.unwrap();
    edit(&mut hold);
    Allocate { hold: Some(hold), ..request }
}

/// Gives the one pod back again and again: who has it, in order.
fn served(fleet: &mut Fleet) -> String {
    let mut served = Vec::new();
    end(fleet, "first", Cause::Agent, NOW);
    while let Some(call) = fleet.take_handed().pop() {
        served.push(call.to_string());
        fleet.release(&Release::new(call, None), NOW).unwrap_err();
    }
    served.join(" ")
}

#[test]
fn priority_then_arrival_decide_who_is_next() {
    let mut fleet = busy();
    fleet.set_merchant(&name("low"), Some(r#"{"priority": -1}"#), Edit::ANY).unwrap();
    fleet.set_merchant(&name("high"), Some(r#"{"priority": 2}"#), Edit::ANY).unwrap();
    waits(&mut fleet, &patient_for("low", "a"));
    waits(&mut fleet, &ask_patient("d"));
    waits(&mut fleet, &ask_patient("c"));
    waits(&mut fleet, &patient_for("high", "e"));
    assert_eq!(fleet.status().waiting, 4);
    assert_eq!(fleet.status().pools[0].waiting, 4);
    assert_eq!(served(&mut fleet), "e d c a");
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn calls_that_had_a_pod_come_before_all_others() {
    let mut fleet = fleet(r#"{"gold": 3}"#, 3);
    for call in ["z", "y", "first"] {
        give(&mut fleet, &Allocate { returns: true, ..ask(call) });
    }
    waits(&mut fleet, &ask_patient("b"));
    for (call, pod) in [("z", "p1"), ("y", "p2")] {
        fleet.drain(&name(pod), 1_000, NOW).unwrap();
        let after = Some(after(pod, 1));
        waits(&mut fleet, &Allocate { returns: true, after, ..ask_patient(call) });
    }
    waits(&mut fleet, &ask_patient("a"));
    assert_eq!(served(&mut fleet), "z y b a");
}

#[test]
fn a_queue_is_bounded() {
    let mut fleet = busy();
    let ask = |call| with_hold(ask_patient(call), |hold| hold.most = 2);
    waits(&mut fleet, &ask("c1"));
    waits(&mut fleet, &ask("c2"));
    assert_eq!(why(&mut fleet, &ask("c3"), NOW), Why::QueueFull);
    fleet.release(&Release::new(name("c1"), None), NOW).unwrap_err();
    waits(&mut fleet, &ask("c3"));
}

#[test]
fn so_is_the_part_of_one_merchant() {
    let mut fleet = busy();
    let ask = |id, call| with_hold(patient_for(id, call), |hold| hold.most_per_merchant = 2);
    waits(&mut fleet, &ask("m", "c1"));
    waits(&mut fleet, &ask("m", "c2"));
    assert_eq!(why(&mut fleet, &ask("m", "c3"), NOW), Why::QueueFull);
    waits(&mut fleet, &ask("other", "c4"));
    for (left, next) in [("c1", "c3"), ("c2", "c5")] {
        fleet.release(&Release::new(name(left), None), NOW).unwrap_err();
        waits(&mut fleet, &ask("m", next));
        assert_eq!(why(&mut fleet, &ask("m", "c6"), NOW), Why::QueueFull);
    }
}

#[test]
fn nobody_waits_for_nothing() {
    let mut fleet = busy();
    assert_eq!(why(&mut fleet, &ask("c1"), NOW), Why::NoPods);
    let no_time = with_hold(ask_patient("c1"), |hold| hold.time = 0);
    assert_eq!(why(&mut fleet, &no_time, NOW), Why::NoPods);
    fleet.set_merchant(&name("m"), Some(r#"{"fallback": ["nowhere"]}"#), Edit::ANY).unwrap();
    assert_eq!(why(&mut fleet, &patient_for("m", "c1"), NOW), Why::NoPods);
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn a_call_waits_until_its_time_is_over() {
    let mut fleet = busy();
    let until = NOW + 30_000;
    waits(&mut fleet, &ask_patient("c1"));
    let waiting = Why::Waiting { is_new: false, until };
    assert_eq!(why(&mut fleet, &ask_patient("c1"), until - 1), waiting);
    // One that may not wait any more is told so, and keeps its place.
    assert_eq!(why(&mut fleet, &ask("c1"), until - 1), Why::NoPods);
    let over = fleet.allocate(&ask_patient("c1"), until).unwrap_err();
    assert_eq!((over.why, over.tried.len()), (Why::TimeOver { waited: 30_000 }, 1));
    assert_eq!(fleet.status().waiting, 0);
}

#[test]
fn who_does_not_ask_again_has_gone() {
    let poll_by = |fleet: &Fleet| match fleet.find(&name("c1")) {
        Some(Found::Waiting(waiting)) => waiting.poll_by,
        other => panic!("{other:?}"),
    };
    let mut fleet = busy();
    waits(&mut fleet, &ask_patient("c1"));
    assert_eq!(poll_by(&fleet), NOW + 3_000);
    fleet.allocate(&ask_patient("c1"), NOW + 1_000).unwrap_err();
    assert_eq!(poll_by(&fleet), NOW + 4_000);
    // Once more when its time is over, and no longer.
    fleet.allocate(&ask_patient("c1"), NOW + 29_000).unwrap_err();
    assert_eq!(poll_by(&fleet), NOW + 31_000);
    assert_eq!(fleet.sweep(9, NOW + 30_999), Swept::default());
    let swept = fleet.sweep(9, NOW + 31_000);
    assert_eq!(swept.abandoned, [Abandoned { call: name("c1"), waited: 31_000 }]);
    assert_eq!((swept.most(), fleet.status().waiting), (1, 0));
}

#[test]
fn a_call_comes_for_the_pod_it_was_handed() {
    let mut fleet = busy();
    waits(&mut fleet, &Allocate { returns: true, ..patient_for("m", "c1") });
    end(&mut fleet, "first", Cause::Agent, NOW + 1_000);
    assert_eq!((fleet.take_handed(), fleet.take_handed()), (vec![name("c1")], vec![]));
    let handed = fleet.call(&name("c1")).unwrap();
    assert_eq!((handed.is_handed, handed.allocated_at), (true, NOW));
    assert_eq!((handed.lease_until, handed.attempt), (NOW + 3_000, 1));
    assert_eq!(handed.merchant, Some(name("m")));
    let request = Allocate { provisional: true, ..ask_patient("c1") };
    let fetched = fleet.allocate(&request, NOW + 2_000).unwrap();
    assert_eq!((fetched.waited, fetched.was_existing), (Some(2_000), false));
    let call = fleet.call(&name("c1")).unwrap();
    assert_eq!((call.is_handed, call.provisional), (false, true));
    assert_eq!((call.allocated_at, call.lease_until), (NOW + 2_000, NOW + 2_000 + LEASE));
    assert!(fleet.allocate(&request, NOW + 2_000).unwrap().was_existing);
}

#[test]
fn who_does_not_come_for_a_pod_loses_it_to_the_next() {
    let mut fleet = busy();
    waits(&mut fleet, &Allocate { returns: true, ..ask_patient("c1") });
    fleet.allocate(&ask_patient("c2"), NOW + 1_000).unwrap_err();
    end(&mut fleet, "first", Cause::Agent, NOW);
    let swept = fleet.sweep(9, NOW + 3_000);
    let causes: Vec<_> = swept.expired.iter().map(|ended| (ended.cause, ended.lasted)).collect();
    assert_eq!(causes, [(Cause::Abandoned, 3_000)]);
    assert!(!fleet.ends.contains(&name("c1")));
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p1");
}

#[test]
fn a_call_whose_pod_went_before_it_came_for_it_waits_again() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    give(&mut fleet, &ask("b1"));
    give(&mut fleet, &ask("b2"));
    waits(&mut fleet, &ask_patient("z"));
    waits(&mut fleet, &ask_patient("a"));
    end(&mut fleet, "b1", Cause::Agent, NOW);
    assert_eq!(fleet.take_handed(), [name("z")]);
    fleet.remove_pod(&name("p1"), "u1", Departure::Now, WRITER, NOW).unwrap();
    assert!(
        matches!(fleet.find(&name("z")), Some(Found::Waiting(it)) if it.poll_by == NOW + 3_000)
    );
    // It is the first again.
    end(&mut fleet, "b2", Cause::Agent, NOW);
    assert_eq!((pod_of(&fleet, "z").unwrap(), pod_of(&fleet, "a")), ("p2".into(), None));
}

#[test]
fn it_is_given_another_pod_at_once_if_there_is_one() {
    let shared = r#"{"basic": {"type": "shared", "target": 2, "max_concurrent": 2}}"#;
    let mut fleet = fleet(shared, 1);
    for call in ["b1", "b2"] {
        give(&mut fleet, &ask(call));
    }
    waits(&mut fleet, &ask_patient("z"));
    waits(&mut fleet, &ask_patient("a"));
    end(&mut fleet, "b1", Cause::Agent, NOW);
    end(&mut fleet, "b2", Cause::Agent, NOW);
    see(&mut fleet, "p2", ready());
    give_on(&mut fleet, &ask("c"), "p2");
    fleet.take_handed();
    // There is room for one of them, and z came first.
    fleet.remove_pod(&name("p1"), "u1", Departure::Now, WRITER, NOW).unwrap();
    assert_eq!(fleet.take_handed(), [name("z")]);
    assert_eq!(fleet.status().waiting, 1);
}

#[test]
fn a_call_that_waits_may_leave() {
    let mut fleet = busy();
    waits(&mut fleet, &ask_patient("c1"));
    let on_pod = Release::new(name("c1"), Some(name("p1")));
    assert_eq!(fleet.release(&on_pod, NOW), Err(NotReleased::NotFound));
    let release = Release::new(name("c1"), None);
    let waited = Err(NotReleased::Waited { waited: 50 });
    assert_eq!(fleet.release(&release, NOW + 50), waited);
    assert_eq!(fleet.status().waiting, 0);
    // The same for one that was handed a pod, and has not come for it.
    waits(&mut fleet, &ask_patient("c1"));
    end(&mut fleet, "first", Cause::Agent, NOW);
    assert_eq!(fleet.release(&release, NOW + 50), waited);
    assert_eq!(fleet.active_calls(), 0);
}

#[test]
fn a_call_whose_pools_are_no_more_begins_again() {
    let mut fleet = busy();
    waits(&mut fleet, &ask_patient("c1"));
    fleet.apply_tiers(&table(r#"{"tin": 1, "zinc": 1}"#), Edit::ANY).unwrap();
    waits(&mut fleet, &ask_patient("c1"));
    // One of two pools is enough to stay.
    fleet.apply_tiers(&table(r#"{"tin": 1}"#), Edit::ANY).unwrap();
    let waiting = Why::Waiting { is_new: false, until: NOW + 30_000 };
    assert_eq!(why(&mut fleet, &ask_patient("c1"), NOW), waiting);
}

#[test]
fn a_pod_that_is_moved_or_comes_serves_who_waits_there() {
    let mut fleet =
        fleet(r#"{"tiers": {"gold": {}, "tin": {}}, "default_chain": ["gold", "tin"]}"#, 1);
    fleet.set_merchant(&name("m"), Some(r#"{"fallback": ["gold"]}"#), Edit::ANY).unwrap();
    waits(&mut fleet, &patient_for("m", "c1"));
    fleet.move_pod(&name("p1"), "u1", &name("gold"), WRITER).unwrap();
    assert_eq!(pod_of(&fleet, "c1").unwrap(), "p1");
    waits(&mut fleet, &patient_for("m", "c2"));
    see(&mut fleet, "p2", PodFacts { pin: Some(name("gold")), ..ready() });
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p2");
}

#[test]
fn a_handed_off_pod_that_left_service_is_not_fetched() {
    type Leave = fn(&mut Fleet);
    let leaves: [(&str, Leave); 4] = [
        ("draining", |fleet| {
            fleet.drain(&name("p1"), 1_000, NOW).unwrap();
        }),
        ("terminating", |fleet| drop(see(fleet, "p1", PodFacts { terminating: true, ..ready() }))),
        ("not ready", |fleet| drop(see(fleet, "p1", PodFacts { ready: false, ..ready() }))),
        ("quarantined", |fleet| {
            let (pod, quarantined_until) = (name("p1"), Some(NOW + 60_000));
            fleet.replay(Change::Health { pod, failures: 3, quarantined_until });
        }),
    ];
    for (state, leave) in leaves {
        let mut fleet = busy();
        waits(&mut fleet, &ask_patient("a"));
        waits(&mut fleet, &ask_patient("b"));
        end(&mut fleet, "first", Cause::Agent, NOW);
        leave(&mut fleet);
        let told = why(&mut fleet, &ask_patient("a"), NOW);
        assert!(matches!(told, Why::Waiting { is_new: false, .. }), "{state}: {told:?}");
        assert_eq!(fleet.status().waiting, 2, "{state}");
        // It is still ahead of the call that came after it.
        see(&mut fleet, "p2", ready());
        assert_eq!(give(&mut fleet, &ask_patient("a")), "p2", "{state}");
    }
}

#[test]
fn a_handed_off_pod_that_left_service_is_replaced_by_a_free_one() {
    let mut fleet = busy();
    waits(&mut fleet, &ask_patient("a"));
    end(&mut fleet, "first", Cause::Agent, NOW);
    fleet.drain(&name("p1"), 1_000, NOW).unwrap();
    see(&mut fleet, "p2", ready());
    assert_eq!(give(&mut fleet, &ask_patient("a")), "p2");
    assert_eq!(fleet.pod(&name("p1")).unwrap().calls, []);
}
