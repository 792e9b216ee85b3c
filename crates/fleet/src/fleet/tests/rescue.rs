//! A stream that is gone: whether the call has another pod.

use super::*;

/// The second pod of a call whose first stream broke.
fn ask_after(call: &str, pod: &str, attempt: u32) -> Allocate {
    Allocate { after: Some(after(pod, attempt)), ..ask_returning(call) }
}

/// The same, while somebody may still explain it.
fn ask_early(call: &str, pod: &str, attempt: u32) -> Allocate {
    let after = After { is_final: false, ..after(pod, attempt) };
    Allocate { after: Some(after), ..ask_returning(call) }
}

#[test]
fn attempts_count_only_for_calls_that_come_back() {
    assert_eq!(ask("c1").attempts(), 0);
    assert_eq!(ask_returning("c1").attempts(), 1);
    assert_eq!(ask_after("c1", "p1", 2).attempts(), 3);
}

#[test]
fn a_call_whose_stream_broke_is_given_another_pod() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    assert_eq!(give(&mut fleet, &ask_returning("c1")), "p1");
    assert_eq!(why(&mut fleet, &ask_early("c1", "p1", 1), NOW), Why::Unsettled);
    assert_eq!(pod_of(&fleet, "c1").unwrap(), "p1");
    let next = fleet.allocate(&ask_after("c1", "p1", 1), NOW).unwrap();
    assert_eq!((next.pod, next.attempt, next.was_existing), (name("p2"), 2, false));
    // Who asks for the first attempt once more hears of the second.
    let again = fleet.allocate(&ask_after("c1", "p1", 1), NOW).unwrap();
    assert_eq!((again.pod, again.attempt, again.was_existing), (name("p2"), 2, true));
    let again = fleet.allocate(&ask_after("c1", "p2", 1), NOW).unwrap();
    assert_eq!((again.attempt, again.was_existing), (2, true));
}

#[test]
fn a_call_goes_back_to_its_pod_if_there_is_no_other() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask_returning("c1"));
    // Nobody who waits is given it in between.
    assert!(fleet.allocate(&ask_patient("c2"), NOW).is_err());
    let next = fleet.allocate(&ask_after("c1", "p1", 1), NOW).unwrap();
    assert_eq!((next.pod, next.attempt), (name("p1"), 2));
}

#[test]
fn a_call_has_so_many_pods_and_no_more() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask_returning("c1"));
    fleet.allocate(&ask_patient("c2"), NOW).unwrap_err();
    assert_eq!(give(&mut fleet, &ask_after("c1", "p1", 1)), "p1");
    assert_eq!(give(&mut fleet, &ask_after("c1", "p1", 2)), "p1");
    assert_eq!(why(&mut fleet, &ask_after("c1", "p1", 3), NOW), Why::Spent);
    // Its pod is for others now.
    assert_eq!(fleet.take_handed(), [name("c2")]);
    assert_eq!(why(&mut fleet, &ask_after("unheard-of", "p1", 3), NOW), Why::Spent);
    assert_eq!(why(&mut fleet, &ask_after("unheard-of", "p1", 2), NOW), Why::NoPods);
}

#[test]
fn what_an_ended_call_hears_depends_on_its_end() {
    let told = |cause, request: Allocate| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        give(&mut fleet, &ask_returning("c1"));
        end(&mut fleet, "c1", cause, NOW);
        fleet.allocate(&request, NOW).map(|given| given.attempt).map_err(|refusal| refusal.why)
    };
    for cause in [Cause::Agent, Cause::Provider, Cause::Operator] {
        assert_eq!(told(cause, ask_after("c1", "p1", 1)), Err(Why::Over));
        assert_eq!(told(cause, ask_early("c1", "p1", 1)), Err(Why::Over));
    }
    for cause in [Cause::Stream, Cause::Broken, Cause::Lease, Cause::Unconfirmed] {
        assert_eq!(told(cause, ask_after("c1", "p1", 1)), Ok(2));
        assert_eq!(told(cause, ask_early("c1", "p1", 1)), Err(Why::Unsettled));
    }
    assert_eq!(told(Cause::PodGone, ask_early("c1", "p1", 1)), Ok(2));
    // That was another attempt.
    assert_eq!(told(Cause::Stream, ask_after("c1", "p1", 2)), Err(Why::Over));
}

#[test]
fn an_agent_explains_the_end_of_its_own_stream() {
    let told = |release: Release| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        give(&mut fleet, &ask_returning("c1"));
        end(&mut fleet, "c1", Cause::Stream, NOW);
        assert_eq!(fleet.release(&release, NOW), Err(NotReleased::NotFound));
        fleet.allocate(&ask_after("c1", "p1", 1), NOW).map_err(|refusal| refusal.why)
    };
    let release = |pod: &str| Release::new(name("c1"), Some(name(pod)));
    assert_eq!(told(release("p1")).unwrap_err(), Why::Over);
    assert_eq!(told(Release { attempt: Some(1), ..release("p1") }).unwrap_err(), Why::Over);
    assert!(told(release("p2")).is_ok());
    assert!(told(Release { attempt: Some(2), ..release("p1") }).is_ok());
    assert!(told(Release { cause: Cause::Stream, ..release("p1") }).is_ok());
}

#[test]
fn the_first_who_knows_why_a_call_ended_is_believed() {
    use Cause::{Agent, Broken, Lease, Provider, Stream, Unconfirmed};
    for (before, told, known) in [
        (Agent, Provider, Agent),
        (Provider, Stream, Provider),
        (Stream, Agent, Agent),
        (Lease, Provider, Provider),
        (Lease, Stream, Lease),
        (Unconfirmed, Stream, Broken),
        (Unconfirmed, Lease, Unconfirmed),
    ] {
        assert_eq!(before.explained_by(told), known, "{before:?}, then {told:?}");
    }
}

#[test]
fn what_is_known_already_is_not_written_again() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    give(&mut fleet, &ask_returning("c1"));
    end(&mut fleet, "c1", Cause::Agent, NOW);
    fleet.take_changes();
    fleet.release(&Release::new(name("c1"), None), NOW).unwrap_err();
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn ends_are_remembered_for_an_hour() {
    const HOUR: Millis = 3_600_000;
    let asks = |now| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        give(&mut fleet, &ask_returning("c1"));
        end(&mut fleet, "c1", Cause::Agent, NOW);
        fleet.allocate(&ask_after("c1", "p1", 1), now).is_ok()
    };
    assert!(!asks(NOW + HOUR - 1));
    assert!(asks(NOW + HOUR));
}

#[test]
fn old_ends_make_room_for_new_ones() {
    const HOUR: Millis = 3_600_000;
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let mut ended = |call: &str, now: Millis| {
        fleet.allocate(&ask_returning(call), now).unwrap();
        end(&mut fleet, call, Cause::Stream, now);
        let mut known: Vec<_> = fleet.ends.iter().map(|(call, _)| call.to_string()).collect();
        known.sort();
        known.join(" ")
    };
    assert_eq!(ended("c1", NOW), "c1");
    assert_eq!(ended("c2", NOW + 1), "c1 c2");
    assert_eq!(ended("c3", NOW + HOUR - 1), "c1 c2 c3");
    assert_eq!(ended("c4", NOW + HOUR), "c2 c3 c4");
    // The second end of a call outlives the first.
    assert_eq!(ended("c2", NOW + HOUR), "c2 c3 c4");
    assert_eq!(ended("c5", NOW + HOUR + 1), "c2 c3 c4 c5");
}

#[test]
fn only_ends_that_somebody_may_ask_for_are_remembered() {
    let is_remembered = |request: &Allocate, cause| {
        let mut fleet = fleet(r#"{"gold": 1}"#, 1);
        give(&mut fleet, request);
        end(&mut fleet, "c1", cause, NOW);
        fleet.ends.contains(&name("c1"))
    };
    assert!(is_remembered(&ask_returning("c1"), Cause::Stream));
    assert!(is_remembered(&ask_returning("c1"), Cause::Agent));
    assert!(!is_remembered(&ask("c1"), Cause::Stream));
    assert!(is_remembered(&ask("c1"), Cause::Unconfirmed));
    assert!(!is_remembered(&ask_returning("c1"), Cause::Abandoned));
}

#[test]
fn a_pod_that_was_handed_over_and_taken_back_is_no_attempt() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("c1"));
    fleet.allocate(&Allocate { returns: true, ..ask_patient("c2") }, NOW).unwrap_err();
    end(&mut fleet, "c1", Cause::Agent, NOW);
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p1");
    see(&mut fleet, "p1", PodFacts { uid: "u2".into(), ready: false, ..ready() });
    assert!(fleet.queue.get(&name("c2")).is_some());
    assert!(!fleet.ends.contains(&name("c2")));
}

#[test]
fn a_stream_that_is_to_come_is_not_the_one_that_never_came() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let confirm = Confirm { call: name("c1"), pod: name("p1"), attempt: None, lease_ttl: LEASE };
    give(&mut fleet, &ask_provisional("c1"));
    fleet.sweep(1, NOW + LEASE);
    fleet.allocate(&ask_provisional("c1"), NOW + LEASE).unwrap();
    end(&mut fleet, "c1", Cause::Agent, NOW + LEASE);
    assert_eq!(fleet.confirm(&confirm, NOW + LEASE), Confirmed::Unknown);
}

#[test]
fn a_new_call_is_one_line_in_the_journal() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask_provisional("c1"));
    assert_eq!(fleet.take_changes().len(), 1);
    fleet.sweep(1, NOW + LEASE);
    fleet.take_changes();
    // What is remembered stays: this call promises no stream.
    fleet.allocate(&ask("c1"), NOW + LEASE).unwrap();
    assert_eq!(fleet.take_changes().len(), 1);
}

#[test]
fn a_call_that_waits_keeps_its_place_when_its_stream_is_explained() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("c1"));
    fleet.allocate(&ask_patient("c2"), NOW).unwrap_err();
    let request = Allocate { after: Some(after("p9", 3)), ..ask_patient("c2") };
    let until = NOW + 30_000;
    assert_eq!(why(&mut fleet, &request, NOW), Why::Waiting { is_new: false, until });
}
