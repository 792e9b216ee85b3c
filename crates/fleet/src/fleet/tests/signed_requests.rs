//! Signed requests: each is good for one call.

use super::*;

const WINDOW: Millis = 5_000;

fn signed(fingerprint: &str, request: Allocate) -> Allocate {
    let fingerprint = name(&format!("{fingerprint:-<16}"));
    Allocate { signed: Some(Signed { fingerprint, window: WINDOW }), ..request }
}

#[test]
fn a_signed_request_gives_no_pod_once_its_call_is_over() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let request = signed("a", ask("c1"));
    let pod = give(&mut fleet, &request);
    assert_eq!(give(&mut fleet, &request), pod, "a repeat");
    // The same signature with another id is no other call, whether the first lives or not.
    let divided = signed("a", ask("c2"));
    assert_eq!(why(&mut fleet, &divided, NOW), Why::Replayed);
    end(&mut fleet, "c1", Cause::Agent, NOW);
    assert_eq!(why(&mut fleet, &request, NOW), Why::Replayed);
    assert_eq!(why(&mut fleet, &divided, NOW), Why::Replayed);
    assert_eq!(fleet.active_calls(), 0);
    // Another signature is another request, and so is one without.
    give(&mut fleet, &signed("b", ask("c1")));
    end(&mut fleet, "c1", Cause::Agent, NOW);
    give(&mut fleet, &ask("c1"));
}

#[test]
fn it_is_remembered_for_its_window_counted_from_the_last_answer() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    let request = signed("a", ask("c1"));
    give(&mut fleet, &request);
    fleet.allocate(&request, NOW + 1_000).unwrap();
    end(&mut fleet, "c1", Cause::Agent, NOW + 1_000);
    let until = NOW + 1_000 + WINDOW;
    assert_eq!(why(&mut fleet, &request, until), Why::Replayed);
    fleet.allocate(&request, until + 1).unwrap();
}

#[test]
fn what_began_nothing_may_come_again() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    give(&mut fleet, &ask("busy"));
    let request = signed("a", ask("c1"));
    assert_eq!(why(&mut fleet, &request, NOW), Why::NoPods);
    // A place is something.
    let patient = signed("b", ask_patient("c2"));
    assert!(matches!(why(&mut fleet, &patient, NOW), Why::Waiting { is_new: true, .. }));
    assert!(matches!(why(&mut fleet, &patient, NOW), Why::Waiting { is_new: false, .. }));
    fleet.release(&Release::new(name("c2"), None), NOW).unwrap_err();
    assert_eq!(why(&mut fleet, &patient, NOW), Why::Replayed);
    end(&mut fleet, "busy", Cause::Agent, NOW);
    give(&mut fleet, &request);
}

#[test]
fn a_call_that_comes_back_is_told_once_that_it_is_over() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let pod = give(&mut fleet, &signed("a", ask_returning("c1")));
    let back = |fingerprint: &str, is_final, attempt| {
        let after = Some(After { is_final, ..after(&pod, attempt) });
        signed(fingerprint, Allocate { after, ..ask_returning("c1") })
    };
    assert_eq!(why(&mut fleet, &back("b", false, 1), NOW), Why::Unsettled);
    fleet.allocate(&back("b", true, 1), NOW).expect("it has begun nothing before");
    end(&mut fleet, "c1", Cause::Agent, NOW);
    assert_eq!(why(&mut fleet, &back("b", true, 1), NOW), Why::Replayed);
    assert_eq!(why(&mut fleet, &back("c", true, 2), NOW), Why::Over);
    // How it ended is forgotten before its signature is.
    let request = Signed { window: 10 * 3_600_000, ..back("c", true, 2).signed.unwrap() };
    let late = Allocate { signed: Some(request), ..back("c", true, 2) };
    assert_eq!(why(&mut fleet, &late, NOW), Why::Replayed);
}

#[test]
fn memory_is_kept_in_the_journal_and_tidied_up() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    let request = signed("a", ask("c1"));
    give(&mut fleet, &request);
    end(&mut fleet, "c1", Cause::Agent, NOW);
    let mut read = Fleet::new(table(r#"{"x": 1}"#), 0);
    fleet.facts().into_iter().for_each(|change| read.replay(change));
    assert_eq!(why(&mut read, &request, NOW), Why::Replayed);
    assert_eq!(read.facts().len(), fleet.facts().len());
    // The next that comes when its time is over takes its place.
    let seen = |fleet: &Fleet| {
        fleet.facts().into_iter().filter(|it| matches!(it, Change::Seen { .. })).count()
    };
    fleet.allocate(&signed("b", ask("c2")), NOW + WINDOW).unwrap();
    assert_eq!(seen(&fleet), 2);
    fleet.allocate(&signed("c", ask("c3")), NOW + WINDOW + 1).unwrap();
    assert_eq!(seen(&fleet), 2, "and not the first");
}
