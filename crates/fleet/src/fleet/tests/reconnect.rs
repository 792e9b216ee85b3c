//! Retry on disconnect: whether a call whose stream ended gets another pod.

use super::*;

/// A reconnect after this pod attempt, with a settled cause.
fn reconnect_request(call: &str, pod: &str, pod_attempt: u32) -> Allocate {
    Allocate { previous: Some(previous_pod(pod, pod_attempt)), ..returning_request(call) }
}

/// A reconnect whose cause is not settled yet.
fn unsettled_request(call: &str, pod: &str, pod_attempt: u32) -> Allocate {
    let previous = PreviousPod { is_settled: false, ..previous_pod(pod, pod_attempt) };
    Allocate { previous: Some(previous), ..returning_request(call) }
}

#[test]
fn pod_attempts_count_only_for_calls_that_may_return() {
    assert_eq!(plain_request("c1").pod_attempt(0), 0);
    assert_eq!(returning_request("c1").pod_attempt(0), 1);
    assert_eq!(reconnect_request("c1", "p1", 2).pod_attempt(0), 3);
}

#[test]
fn a_call_with_a_broken_stream_gets_another_pod() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    assert_eq!(allocate(&mut fleet, &returning_request("c1")), "p1");
    assert_eq!(
        refusal_reason(&mut fleet, &unsettled_request("c1", "p1", 1), NOW),
        RefusalReason::Unsettled
    );
    assert_eq!(pod_of(&fleet, "c1").unwrap(), "p1");
    let next = fleet.allocate(&reconnect_request("c1", "p1", 1), NOW).unwrap();
    assert_eq!((next.pod, next.pod_attempt, next.was_existing), (name("p2"), 2, false));
    // A repeat of the reconnect returns the second attempt.
    let again = fleet.allocate(&reconnect_request("c1", "p1", 1), NOW).unwrap();
    assert_eq!((again.pod, again.pod_attempt, again.was_existing), (name("p2"), 2, true));
    let again = fleet.allocate(&reconnect_request("c1", "p2", 1), NOW).unwrap();
    assert_eq!((again.pod_attempt, again.was_existing), (2, true));
}

#[test]
fn a_reconnect_gets_its_previous_pod_if_no_other_is_free() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &returning_request("c1"));
    // A waiting call is not handed the pod in between.
    assert!(fleet.allocate(&waiting_request("c2"), NOW).is_err());
    let next = fleet.allocate(&reconnect_request("c1", "p1", 1), NOW).unwrap();
    assert_eq!((next.pod, next.pod_attempt), (name("p1"), 2));
}

#[test]
fn reconnects_are_limited_to_max_retries() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &returning_request("c1"));
    fleet.allocate(&waiting_request("c2"), NOW).unwrap_err();
    assert_eq!(allocate(&mut fleet, &reconnect_request("c1", "p1", 1)), "p1");
    assert_eq!(allocate(&mut fleet, &reconnect_request("c1", "p1", 2)), "p1");
    assert_eq!(
        refusal_reason(&mut fleet, &reconnect_request("c1", "p1", 3), NOW),
        RefusalReason::RetriesExhausted
    );
    // Its pod is handed off to the waiting call.
    assert_eq!(fleet.take_handoffs(), [name("c2")]);
    assert_eq!(
        refusal_reason(&mut fleet, &reconnect_request("unknown", "p1", 3), NOW),
        RefusalReason::RetriesExhausted
    );
    assert_eq!(
        refusal_reason(&mut fleet, &reconnect_request("unknown", "p1", 2), NOW),
        RefusalReason::NoPods
    );
}

#[test]
fn the_end_cause_determines_the_result_of_a_reconnect() {
    let result = |cause, request: Allocate| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        allocate(&mut fleet, &returning_request("c1"));
        end(&mut fleet, "c1", cause, NOW);
        fleet
            .allocate(&request, NOW)
            .map(|given| given.pod_attempt)
            .map_err(|refusal| refusal.reason)
    };
    for cause in [EndCause::Agent, EndCause::Provider, EndCause::Operator] {
        assert_eq!(result(cause, reconnect_request("c1", "p1", 1)), Err(RefusalReason::CallEnded));
        assert_eq!(result(cause, unsettled_request("c1", "p1", 1)), Err(RefusalReason::CallEnded));
    }
    for cause in [EndCause::Stream, EndCause::Broken, EndCause::Lease, EndCause::Unconfirmed] {
        assert_eq!(result(cause, reconnect_request("c1", "p1", 1)), Ok(2));
        assert_eq!(result(cause, unsettled_request("c1", "p1", 1)), Err(RefusalReason::Unsettled));
    }
    assert_eq!(result(EndCause::PodGone, unsettled_request("c1", "p1", 1)), Ok(2));
    // A different pod attempt.
    assert_eq!(
        result(EndCause::Stream, reconnect_request("c1", "p1", 2)),
        Err(RefusalReason::CallEnded)
    );
}

#[test]
fn a_late_release_by_the_agent_prevents_a_reconnect() {
    let result = |release: Release| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        allocate(&mut fleet, &returning_request("c1"));
        end(&mut fleet, "c1", EndCause::Stream, NOW);
        assert_eq!(fleet.release(&release, NOW), Err(NotReleased::NotFound));
        fleet.allocate(&reconnect_request("c1", "p1", 1), NOW).map_err(|refusal| refusal.reason)
    };
    let release = |pod: &str| Release::new(name("c1"), Some(name(pod)));
    assert_eq!(result(release("p1")).unwrap_err(), RefusalReason::CallEnded);
    assert_eq!(
        result(Release { pod_attempt: Some(1), ..release("p1") }).unwrap_err(),
        RefusalReason::CallEnded
    );
    assert!(result(release("p2")).is_ok());
    assert!(result(Release { pod_attempt: Some(2), ..release("p1") }).is_ok());
    assert!(result(Release { cause: EndCause::Stream, ..release("p1") }).is_ok());
}

#[test]
fn the_first_final_end_cause_wins() {
    use EndCause::{Agent, Broken, Lease, Provider, Stream, Unconfirmed};
    for (known, reported, updated) in [
        (Agent, Provider, Agent),
        (Provider, Stream, Provider),
        (Stream, Agent, Agent),
        (Lease, Provider, Provider),
        (Lease, Stream, Lease),
        (Unconfirmed, Stream, Broken),
        (Unconfirmed, Lease, Unconfirmed),
    ] {
        assert_eq!(known.updated_by(reported), updated, "{known:?}, then {reported:?}");
    }
}

#[test]
fn an_unchanged_end_cause_is_not_journaled_again() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate(&mut fleet, &returning_request("c1"));
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    fleet.take_changes();
    fleet.release(&Release::new(name("c1"), None), NOW).unwrap_err();
    assert_eq!(fleet.take_changes(), []);
}

#[test]
fn the_call_history_lasts_an_hour() {
    const HOUR: Millis = 3_600_000;
    let is_allocated = |now| {
        let mut fleet = fleet(r#"{"gold": 2}"#, 2);
        allocate(&mut fleet, &returning_request("c1"));
        end(&mut fleet, "c1", EndCause::Agent, NOW);
        fleet.allocate(&reconnect_request("c1", "p1", 1), now).is_ok()
    };
    assert!(!is_allocated(NOW + HOUR));
    assert!(is_allocated(NOW + HOUR + 1));
}

#[test]
fn expired_call_ends_are_removed() {
    const HOUR: Millis = 3_600_000;
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let mut ended = |call: &str, now: Millis| {
        fleet.allocate(&returning_request(call), now).unwrap();
        end(&mut fleet, call, EndCause::Stream, now);
        let mut known: Vec<_> = fleet.history.iter().map(|(call, _)| call.to_string()).collect();
        known.sort();
        known.join(" ")
    };
    assert_eq!(ended("c1", NOW), "c1");
    assert_eq!(ended("c2", NOW + 1), "c1 c2");
    assert_eq!(ended("c3", NOW + HOUR), "c1 c2 c3");
    assert_eq!(ended("c4", NOW + HOUR + 1), "c2 c3 c4");
    // The second end of a call replaces the first and its expiry.
    assert_eq!(ended("c2", NOW + HOUR + 1), "c2 c3 c4");
    assert_eq!(ended("c5", NOW + HOUR + 2), "c2 c3 c4 c5");
}

#[test]
fn only_ends_of_calls_that_may_return_are_recorded() {
    let is_recorded = |request: &Allocate, cause| {
        let mut fleet = fleet(r#"{"gold": 1}"#, 1);
        allocate(&mut fleet, request);
        end(&mut fleet, "c1", cause, NOW);
        fleet.history.contains(&name("c1"))
    };
    assert!(is_recorded(&returning_request("c1"), EndCause::Stream));
    assert!(is_recorded(&returning_request("c1"), EndCause::Agent));
    assert!(!is_recorded(&plain_request("c1"), EndCause::Stream));
    assert!(is_recorded(&plain_request("c1"), EndCause::Unconfirmed));
    assert!(!is_recorded(&returning_request("c1"), EndCause::Abandoned));
}

#[test]
fn a_requeued_hand_off_is_no_pod_attempt() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.allocate(&Allocate { may_return: true, ..waiting_request("c2") }, NOW).unwrap_err();
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(pod_of(&fleet, "c2").unwrap(), "p1");
    observe(&mut fleet, "p1", PodFacts { uid: "u2".into(), ready: false, ..ready() });
    assert!(fleet.queue.get(&name("c2")).is_some());
    assert!(!fleet.history.contains(&name("c2")));
}

#[test]
fn a_new_provisional_allocation_drops_the_recorded_end() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let confirm =
        Confirm { call: name("c1"), pod: name("p1"), pod_attempt: None, lease_ttl: LEASE_TTL };
    allocate(&mut fleet, &provisional_request("c1"));
    fleet.sweep(1, NOW + LEASE_TTL);
    fleet.allocate(&provisional_request("c1"), NOW + LEASE_TTL).unwrap();
    end(&mut fleet, "c1", EndCause::Agent, NOW + LEASE_TTL);
    assert_eq!(fleet.confirm(&confirm, NOW + LEASE_TTL), Confirmed::Unknown);
}

#[test]
fn a_new_call_is_one_journal_entry() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &provisional_request("c1"));
    assert_eq!(fleet.take_changes().len(), 1);
    fleet.sweep(1, NOW + LEASE_TTL);
    fleet.take_changes();
    // The recorded end stays: the allocation is not provisional.
    fleet.allocate(&plain_request("c1"), NOW + LEASE_TTL).unwrap();
    assert_eq!(fleet.take_changes().len(), 1);
}

#[test]
fn a_waiting_call_keeps_its_queue_entry_on_a_reconnect() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("c1"));
    fleet.allocate(&waiting_request("c2"), NOW).unwrap_err();
    let request = Allocate { previous: Some(previous_pod("p9", 3)), ..waiting_request("c2") };
    let until = NOW + 30_000;
    assert_eq!(
        refusal_reason(&mut fleet, &request, NOW),
        RefusalReason::Waiting { is_new: false, until }
    );
}
