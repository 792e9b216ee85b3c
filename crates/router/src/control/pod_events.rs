//! Kubernetes Events about pods: the leader reads the event log of the store and reports
//! quarantines, failed connections and calls that ended by force. Best effort: Events are
//! aggregated and limited, and no request waits for them (decision 40).

use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::time::{Instant, timeout};

use super::{Control, ticks};
use crate::cluster::{ApiErrors, ApiFailure, PodEvent, PodEvents, PodView};
use fleet::{Event, EventId, EventKind, Millis, names::PodName};
use store::observing;

const READ_INTERVAL: Duration = Duration::from_secs(1);
/// A new leader begins this long before its term (ms).
const LOOK_BACK: Millis = 15_000;
/// Events of the store read per interval; more than these are skipped.
const PAGE_SIZE: usize = 1_000;
const MAX_PAGES: usize = 10;
/// Interval of the updates of one repeated Event.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Events written per interval.
const MAX_WRITES: usize = 5;
/// Events held for their repetitions, and how long after the last one.
const MAX_HELD: usize = 5_000;
const HOLD_TIME: Duration = Duration::from_secs(600);
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
const PROBLEM: &str = "events";

/// Meaning of a store event for its pod.
struct Report {
    reason: &'static str,
    note: String,
    is_warning: bool,
}

/// Returns the report of an event; `None` for the normal course of calls.
fn report_of(event: &Event) -> Option<Report> {
    let (reason, note, is_warning) = match event.kind {
        EventKind::Quarantined => {
            let until = event.detail.parse().ok().and_then(|at| Timestamp::from_second(at).ok());
            let until = until.map(|at| format!(" until {at}")).unwrap_or_default();
            ("Quarantined", format!("calls failed on this pod; it gets no new calls{until}"), true)
        }
        EventKind::Restored => {
            ("QuarantineEnded", "the pod gets new calls again".to_owned(), false)
        }
        EventKind::PodFailed => {
            let note = format!(
                "the media gateway lost or could not open its connection to the agent: {}",
                event.detail
            );
            ("ConnectionFailed", note, true)
        }
        EventKind::Ended => {
            let (reason, note, is_warning) = match event.detail.split(' ').next()? {
                "lease" => (
                    "LeaseExpired",
                    "a call ended because its lease expired: the agent did not release it",
                    true,
                ),
                "broken" => {
                    ("StreamBroken", "the stream of a call ended, and no cause was reported", true)
                }
                "unconfirmed" => {
                    ("StreamNotStarted", "the stream of a call did not start in time", true)
                }
                "pod_gone" => {
                    ("CallLost", "a call ended because the pod was replaced or restarted", true)
                }
                "operator" => ("CallEnded", "an operator ended a call", false),
                _ => return None,
            };
            (reason, note.to_owned(), is_warning)
        }
        _ => return None,
    };
    Some(Report { reason, note, is_warning })
}

/// An Event and its repetitions since the last write.
struct Held {
    event: PodEvent,
    written: u32,
    next_write: Instant,
    last: Instant,
}

/// Events by the UID of their pod and their reason.
#[derive(Default)]
struct Aggregator {
    held: HashMap<(String, &'static str), Held>,
}

impl Aggregator {
    fn record(
        &mut self,
        pod: &PodName,
        (namespace, uid): (String, String),
        report: Report,
        now: Instant,
    ) {
        let Report { reason, note, is_warning } = report;
        let key = (uid.clone(), reason);
        if let Some(held) = self.held.get_mut(&key) {
            held.event.count = held.event.count.saturating_add(1);
            held.last = now;
            return;
        }
        if self.held.len() >= MAX_HELD {
            return;
        }
        let name = format!("{pod}.{:08x}{:08x}", crate::random_u32(), crate::random_u32());
        let pod = pod.to_string();
        let event = PodEvent { name, namespace, pod, uid, reason, note, is_warning, count: 1 };
        self.held.insert(key, Held { event, written: 0, next_write: now, last: now });
    }

    /// Returns the Events to write now, the longest due first.
    fn due(&mut self, now: Instant) -> Vec<&mut Held> {
        self.held.retain(|_, it| now < it.last + HOLD_TIME || it.written < it.event.count);
        let is_due = |it: &&mut Held| it.written < it.event.count && it.next_write <= now;
        let mut due: Vec<&mut Held> = self.held.values_mut().filter(is_due).collect();
        due.sort_by_key(|it| it.next_write);
        due.truncate(MAX_WRITES);
        due
    }
}

impl Control {
    /// Reports until shutdown, while this replica leads.
    pub(crate) async fn report_pod_events(self: Arc<Self>, view: Arc<PodView>, events: PodEvents) {
        let (mut from, mut aggregator) = (None, Aggregator::default());
        let mut errors = ApiErrors::default();
        let mut ticks = ticks(READ_INTERVAL);
        while self.next_tick(&mut ticks).await {
            if self.metrics.leader.get() != 1 {
                (from, aggregator) = (None, Aggregator::default());
                continue;
            }
            let start = from.unwrap_or_else(|| EventId {
                at: self.store.now().saturating_sub(LOOK_BACK),
                number: 0,
            });
            from = Some(self.read_reports(start, &view, &mut aggregator).await);
            tokio::select! {
                () = self.write_events(&events, &mut aggregator, &mut errors) => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    /// Reads the events of the store after `from`; returns the last one read.
    async fn read_reports(
        &self,
        mut from: EventId,
        view: &PodView,
        aggregator: &mut Aggregator,
    ) -> EventId {
        for _ in 0..MAX_PAGES {
            let Ok(page) = observing(self.store.events_after(from, PAGE_SIZE)).await else {
                return from;
            };
            for logged in &page {
                from = logged.id;
                let Some(pod) = &logged.event.pod else { continue };
                let Some(report) = report_of(&logged.event) else { continue };
                if let Some(reference) = view.reference(pod) {
                    aggregator.record(pod, reference, report, Instant::now());
                }
            }
            if page.len() < PAGE_SIZE {
                return from;
            }
        }
        // The reader does not keep up: it goes on with the present.
        EventId { at: self.store.now().max(from.at), number: 0 }
    }

    async fn write_events(
        &self,
        events: &PodEvents,
        aggregator: &mut Aggregator,
        errors: &mut ApiErrors,
    ) {
        for held in aggregator.due(Instant::now()) {
            let written = timeout(WRITE_TIMEOUT, events.publish(&held.event)).await;
            let written = written.unwrap_or(Err(ApiFailure::Timeout));
            held.next_write = Instant::now() + REPEAT_INTERVAL;
            match written {
                Ok(()) => {
                    held.written = held.event.count;
                    errors.clear();
                    self.lifecycle.set_problem(PROBLEM, None);
                }
                Err(failure) => {
                    if let Some(report) = errors.record_failure(&failure) {
                        report.log("cannot write Events about pods; retrying in a minute");
                    }
                    let problem = format!("Events about pods are not written: {failure}");
                    self.lifecycle.set_problem(PROBLEM, Some(problem));
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &str, detail: &str) -> Event {
        Event::read(kind, &format!("CA1 p1 pool:gold - {detail}")).unwrap()
    }

    #[test]
    fn only_failures_of_a_pod_are_reported() {
        let reason = |kind, detail| report_of(&event(kind, detail)).map(|report| report.reason);
        assert_eq!(reason("quarantined", "1700000000"), Some("Quarantined"));
        assert_eq!(reason("pod_failed", "refused"), Some("ConnectionFailed"));
        assert_eq!(reason("ended", "lease 1000"), Some("LeaseExpired"));
        for (kind, detail) in [("ended", "agent 5"), ("ended", "gateway 5"), ("allocated", "")] {
            assert_eq!(reason(kind, detail), None, "{kind} {detail}");
        }
        let note = report_of(&event("quarantined", "1700000000")).unwrap().note;
        assert!(note.contains("2023-11-14T22:13:20Z"), "{note}");
    }

    #[test]
    fn repetitions_are_one_event_with_a_count() {
        let (mut aggregator, now) = (Aggregator::default(), Instant::now());
        let record = |aggregator: &mut Aggregator| {
            let report = report_of(&event("pod_failed", "refused")).unwrap();
            aggregator.record(&"p1".parse().unwrap(), ("ns".into(), "u1".into()), report, now);
        };
        record(&mut aggregator);
        let due = aggregator.due(now);
        assert_eq!((due.len(), due[0].event.count), (1, 1));
        for held in due {
            (held.written, held.next_write) = (1, now + REPEAT_INTERVAL);
        }
        (0..100).for_each(|_| record(&mut aggregator));
        assert!(aggregator.due(now).is_empty(), "the Event was written just now");
        let due = aggregator.due(now + HOLD_TIME);
        assert_eq!((due.len(), due[0].event.count), (1, 101), "an unwritten count is held");
        due.into_iter().for_each(|held| held.written = 101);
        assert!(aggregator.due(now + HOLD_TIME).is_empty() && aggregator.held.is_empty());
    }

    #[test]
    fn events_of_many_pods_are_limited() {
        let (mut aggregator, now) = (Aggregator::default(), Instant::now());
        for number in 0..MAX_HELD + 10 {
            let pod: PodName = format!("p{number}").parse().unwrap();
            let report = report_of(&event("pod_failed", "refused")).unwrap();
            aggregator.record(&pod, ("ns".into(), number.to_string()), report, now);
        }
        assert_eq!((aggregator.held.len(), aggregator.due(now).len()), (MAX_HELD, MAX_WRITES));
    }
}
