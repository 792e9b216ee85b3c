//! Replay protection of signed requests.

use super::*;

const WINDOW: Millis = 5_000;

fn signed(fingerprint: &str, request: Allocate) -> Allocate {
    let fingerprint = name(&format!("{fingerprint:-<16}"));
    Allocate { signed: Some(SignedRequest { fingerprint, window: WINDOW }), ..request }
}

#[test]
fn a_signed_request_is_refused_once_its_call_is_over() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let request = signed("a", plain_request("c1"));
    let pod = allocate(&mut fleet, &request);
    assert_eq!(allocate(&mut fleet, &request), pod, "a repeat");
    // The same signature with another call id is a replay, even while the first call is live.
    let other_call = signed("a", plain_request("c2"));
    assert_eq!(refusal_reason(&mut fleet, &other_call, NOW), RefusalReason::Replayed);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(refusal_reason(&mut fleet, &request, NOW), RefusalReason::Replayed);
    assert_eq!(refusal_reason(&mut fleet, &other_call, NOW), RefusalReason::Replayed);
    assert_eq!(fleet.active_calls(), 0);
    // A different signature is a different request, and so is an unsigned one.
    allocate(&mut fleet, &signed("b", plain_request("c1")));
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    allocate(&mut fleet, &plain_request("c1"));
}

#[test]
fn the_replay_window_begins_at_the_last_answer() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let request = signed("a", plain_request("c1"));
    allocate(&mut fleet, &request);
    fleet.allocate(&request, NOW + 1_000).unwrap();
    end(&mut fleet, "c1", EndCause::Agent, NOW + 1_000);
    let until = NOW + 1_000 + WINDOW;
    assert_eq!(refusal_reason(&mut fleet, &request, until), RefusalReason::Replayed);
    fleet.allocate(&request, until + 1).unwrap();
}

#[test]
fn a_request_that_began_no_call_may_be_repeated() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    allocate(&mut fleet, &plain_request("busy"));
    let request = signed("a", plain_request("c1"));
    assert_eq!(refusal_reason(&mut fleet, &request, NOW), RefusalReason::NoPods);
    // A queue entry counts as a begun call.
    let waiting = signed("b", waiting_request("c2"));
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting, NOW),
        RefusalReason::Waiting { is_new: true, .. }
    ));
    assert!(matches!(
        refusal_reason(&mut fleet, &waiting, NOW),
        RefusalReason::Waiting { is_new: false, .. }
    ));
    fleet.release(&Release::new(name("c2"), None), NOW).unwrap_err();
    assert_eq!(refusal_reason(&mut fleet, &waiting, NOW), RefusalReason::Replayed);
    end(&mut fleet, "busy", EndCause::Agent, NOW);
    allocate(&mut fleet, &request);
}

#[test]
fn a_reconnect_of_an_ended_call_is_answered_once() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let pod = allocate(&mut fleet, &signed("a", returning_request("c1")));
    let reconnect = |fingerprint: &str, is_settled, pod_attempt| {
        let previous = Some(PreviousPod { is_settled, ..previous_pod(&pod, pod_attempt) });
        signed(fingerprint, Allocate { previous, ..returning_request("c1") })
    };
    assert_eq!(
        refusal_reason(&mut fleet, &reconnect("b", false, 1), NOW),
        RefusalReason::Unsettled
    );
    fleet.allocate(&reconnect("b", true, 1), NOW).expect("it has begun no call before");
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    assert_eq!(refusal_reason(&mut fleet, &reconnect("b", true, 1), NOW), RefusalReason::Replayed);
    assert_eq!(refusal_reason(&mut fleet, &reconnect("c", true, 2), NOW), RefusalReason::CallEnded);
    // The call history expires before the signature.
    let request =
        SignedRequest { window: 10 * 3_600_000, ..reconnect("c", true, 2).signed.unwrap() };
    let late = Allocate { signed: Some(request), ..reconnect("c", true, 2) };
    assert_eq!(refusal_reason(&mut fleet, &late, NOW), RefusalReason::Replayed);
}

#[test]
fn seen_requests_are_journaled_and_expire() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let request = signed("a", plain_request("c1"));
    allocate(&mut fleet, &request);
    end(&mut fleet, "c1", EndCause::Agent, NOW);
    let mut replayed = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| replayed.apply(change));
    assert_eq!(refusal_reason(&mut replayed, &request, NOW), RefusalReason::Replayed);
    assert_eq!(replayed.facts().len(), fleet.facts().len());
    // A new request removes expired ones.
    let seen_requests = |fleet: &Fleet| {
        fleet.facts().into_iter().filter(|it| matches!(it, Change::RequestSeen { .. })).count()
    };
    fleet.allocate(&signed("b", plain_request("c2")), NOW + WINDOW).unwrap();
    assert_eq!(seen_requests(&fleet), 2);
    fleet.allocate(&signed("c", plain_request("c3")), NOW + WINDOW + 1).unwrap();
    assert_eq!(seen_requests(&fleet), 2, "the first has expired");
}
