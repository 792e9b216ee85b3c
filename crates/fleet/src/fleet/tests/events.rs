//! The event log, and the subjects and details of events.

use super::*;

fn id(at: Millis, number: u64) -> EventId {
    EventId { at, number }
}

fn ids(events: &[LoggedEvent]) -> Vec<EventId> {
    events.iter().map(|logged| logged.id).collect()
}

/// A log with events at these times.
fn log(capacity: usize, times: &[Millis]) -> EventLog {
    let mut log = EventLog::with_capacity(capacity);
    for at in times {
        log.push(Event::new(EventKind::Tiers), *at);
    }
    log
}

#[test]
fn the_text_of_an_id_can_be_parsed() {
    let last = id(Millis::MAX - 1, u64::MAX);
    for (parsed, text) in [(id(0, 0), "0-0"), (id(17, 3), "17-3"), (last, &last.to_string())] {
        assert_eq!(parsed.to_string(), text);
        assert_eq!(text.parse(), Ok(parsed));
    }
    let too_late = format!("{}-0", Millis::MAX);
    for text in ["", "-", "1", "1-", "-1", "+1-0", "1-+0", "a-0", "0-a", "1-2-3", &too_late] {
        assert_eq!(text.parse::<EventId>(), Err(()), "{text:?}");
    }
}

#[test]
fn ids_increase_within_a_millisecond_and_after_a_backward_clock_step() {
    let log = log(10, &[5, 5, 4, 6, 6]);
    let events = log.after(EventId::default(), 10);
    assert_eq!(ids(&events), [id(5, 0), id(5, 1), id(5, 2), id(6, 0), id(6, 1)]);
    let times: Vec<Millis> = events.iter().map(|logged| logged.at).collect();
    assert_eq!(times, [5, 5, 4, 6, 6]);
}

#[test]
fn a_full_log_drops_its_oldest_event() {
    assert_eq!(ids(&log(2, &[1, 2, 3]).after(EventId::default(), 10)), [id(2, 0), id(3, 0)]);
    assert_eq!(log(0, &[1, 2, 3]).after(EventId::default(), 10), []);
}

#[test]
fn events_are_listed_in_both_directions() {
    let log = log(10, &[1, 2, 3, 4]);
    assert_eq!(ids(&log.after(id(2, 0), 10)), [id(3, 0), id(4, 0)]);
    assert_eq!(ids(&log.after(id(2, 1), 1)), [id(3, 0)]);
    assert_eq!(log.after(id(4, 0), 10), []);
    assert_eq!(ids(&log.before(None, 2)), [id(4, 0), id(3, 0)]);
    assert_eq!(ids(&log.before(Some(id(3, 0)), 10)), [id(2, 0), id(1, 0)]);
    assert_eq!(ids(&log.before(Some(id(2, 1)), 1)), [id(2, 0)]);
    assert_eq!(log.before(Some(id(1, 0)), 10), []);
}

#[test]
fn an_event_of_redis_is_parsed() {
    let text = "CA1 p1 pool:gold acme gold=empty basic=empty";
    let event = Event::read("allocated", text).unwrap();
    assert_eq!(
        event,
        Event {
            kind: EventKind::Allocated,
            call: Some(name("CA1")),
            pod: Some(name("p1")),
            pool: Some(name("gold")),
            merchant: Some(name("acme")),
            detail: "gold=empty basic=empty".into(),
        }
    );
    let event = Event::read("tiers", "    ").unwrap();
    assert_eq!(event, Event::new(EventKind::Tiers));
    assert_eq!(Event::read("tiers", "").unwrap(), Event::new(EventKind::Tiers));
    assert_eq!(Event::read("a kind of a newer version", text), None);
}

#[test]
fn events_name_their_subjects() {
    let mut fleet = fleet(r#"{"gold": 1}"#, 1);
    fleet.enable_events();
    allocate(&mut fleet, &merchant_request("acme", "CA1"));
    fleet.allocate(&plain_request("CA2"), NOW).unwrap_err();
    end(&mut fleet, "CA1", EndCause::Agent, NOW + 5);
    observe(&mut fleet, "p2", ready());
    let described: Vec<_> = fleet
        .take_events()
        .into_iter()
        .map(|it| {
            let subjects = [
                it.call.map(|call| call.to_string()),
                it.pod.map(|pod| pod.to_string()),
                it.pool.map(|pool| pool.to_string()),
                it.merchant.map(|merchant| merchant.to_string()),
            ];
            let subjects = subjects.map(Option::unwrap_or_default).join(" ");
            format!("{} {subjects} {}", it.kind.as_str(), it.detail)
        })
        .collect();
    assert_eq!(
        described,
        [
            "allocated CA1 p1 pool:gold acme ",
            "refused CA2    no_pods gold=at_capacity",
            "ended CA1 p1  acme agent 5",
            "joined  p2   a:1",
            "moved  p2 pool:gold  ",
        ]
    );
    assert_eq!(fleet.take_events(), []);
}

#[test]
fn a_drain_without_calls_is_reported_at_once() {
    let mut fleet = fleet(r#"{"gold": 2}"#, 2);
    allocate_on(&mut fleet, &plain_request("CA1"), "p1");
    for pod in ["p1", "p2"] {
        let drained = fleet.drain(&name(pod), LEASE_TTL, NOW).unwrap();
        assert_eq!(drained.until, NOW + LEASE_TTL);
    }
    assert_eq!(fleet.take_drained(), [name("p2")]);
    end(&mut fleet, "CA1", EndCause::Agent, NOW);
    assert_eq!(fleet.take_drained(), [name("p1")]);
    assert_eq!(fleet.take_drained(), []);
}
