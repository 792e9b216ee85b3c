//! Event counts and rates by second. They are computed from the event log, so that every replica
//! shows the same numbers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use fleet::{Event, EventKind, LoggedEvent, Millis};

/// Period that warnings cover.
pub(super) const RETENTION: Millis = 600_000;
pub(super) const MAX_EVENTS: usize = 20_000;
/// Window of the averaged rates.
const AVERAGING_SECONDS: u64 = 5;

#[derive(Default)]
pub(super) struct EventRates {
    seconds: BTreeMap<u64, EventCounts>,
    /// Total number of counted events.
    events: usize,
}

/// Number of events by kind and cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EventCounts {
    events: usize,
    allocated: usize,
    ended: usize,
    refused: usize,
    /// Refusals for lack of a pod; included in `refused`.
    pub(super) no_pods: usize,
    /// Calls ended by lease expiry.
    pub(super) expired: usize,
    /// Provisional calls ended because the stream never started.
    pub(super) unconfirmed: usize,
    /// Calls ended because their pod could not be connected or was lost; included in `ended`.
    pub(super) pod_lost: usize,
}

impl EventCounts {
    fn record(&mut self, event: &Event) {
        self.events += 1;
        let cause = event.detail.split(' ').next().unwrap_or_default();
        match (event.kind, cause) {
            (EventKind::Allocated | EventKind::HandoffAccepted, _) => self.allocated += 1,
            (EventKind::Ended, "lease") => self.expired += 1,
            (EventKind::Ended, "unconfirmed" | "unattached") => self.unconfirmed += 1,
            (EventKind::Ended, cause) => {
                self.ended += 1;
                self.pod_lost += usize::from(matches!(cause, "unreachable" | "pod_lost"));
            }
            (EventKind::Refused, cause) => {
                self.refused += 1;
                self.no_pods += usize::from(cause == "no_pods");
            }
            _ => {}
        }
    }

    fn plus(self, other: &Self) -> Self {
        Self {
            events: self.events + other.events,
            allocated: self.allocated + other.allocated,
            ended: self.ended + other.ended,
            refused: self.refused + other.refused,
            no_pods: self.no_pods + other.no_pods,
            expired: self.expired + other.expired,
            unconfirmed: self.unconfirmed + other.unconfirmed,
            pod_lost: self.pod_lost + other.pod_lost,
        }
    }
}

impl EventRates {
    /// Counts events and drops old ones. `RETENTION` and `MAX_EVENTS` bound the counts, so that a
    /// replica that counts incrementally agrees with one that reads the log at once. Seconds within
    /// the averaging window are always kept.
    pub(super) fn record(&mut self, events: &[LoggedEvent], now: Millis) {
        for LoggedEvent { at, event, .. } in events {
            // After its clock is set back, Redis gives events the time of the last one before.
            self.seconds.entry(now.min(*at) / 1_000).or_default().record(event);
        }
        self.events += events.len();
        while let Some(oldest) = self.seconds.first_entry()
            && let age = (now / 1_000).saturating_sub(*oldest.key())
            && (age * 1_000 > RETENTION || self.events > MAX_EVENTS && age > AVERAGING_SECONDS)
        {
            self.events -= oldest.remove().events;
        }
        // The clock was set back.
        while let Some(newest) = self.seconds.last_entry()
            && *newest.key() > now / 1_000 + AVERAGING_SECONDS
        {
            self.events -= newest.remove().events;
        }
    }

    /// Counts of the retained period.
    pub(super) fn recent(&self) -> EventCounts {
        self.seconds.values().fold(EventCounts::default(), EventCounts::plus)
    }

    /// Average rates per second over the window before `second`.
    pub(super) fn rates(&self, second: u64) -> Value {
        let counted = self.seconds.range(second.saturating_sub(AVERAGING_SECONDS)..second);
        let sum = counted.map(|(_, counts)| counts).fold(EventCounts::default(), EventCounts::plus);
        let rate = |count: usize| (count as f64 / AVERAGING_SECONDS as f64 * 10.0).round() / 10.0;
        json!({
            "allocated": rate(sum.allocated),
            "ended": rate(sum.ended),
            "refused": rate(sum.refused),
            "expired": rate(sum.expired + sum.unconfirmed),
        })
    }

    /// Rates of each of the last seconds, as far back as events are retained.
    pub(super) fn history(&self, seconds: u64, now: Millis) -> Vec<(Millis, Value)> {
        let Some((oldest, _)) = self.seconds.first_key_value() else { return Vec::new() };
        let now = now / 1_000;
        let first = (oldest + AVERAGING_SECONDS).max(now.saturating_sub(seconds));
        (first..=now).map(|second| (second * 1_000, self.rates(second))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::EventId;

    fn logged(at: Millis, kind: &str, detail: &str) -> LoggedEvent {
        let event = Event::read(kind, &format!("CA1 a pool:gold  {detail}")).unwrap();
        LoggedEvent { id: EventId { at, number: 0 }, at, event }
    }

    #[test]
    fn rates_average_the_preceding_whole_seconds() {
        let mut rates = EventRates::default();
        let events: Vec<LoggedEvent> =
            (0..10).map(|number| logged(10_000 + number * 500, "allocated", "")).collect();
        rates.record(&events, 15_000);
        assert_eq!(rates.rates(15)["allocated"], 2.0);
        assert_eq!(rates.rates(17)["allocated"], 1.2);
        assert_eq!(rates.rates(30)["allocated"], 0.0);
        let history = rates.history(180, 20_000);
        let ats: Vec<Millis> = history.iter().map(|(at, _)| *at).collect();
        assert_eq!(ats, [15_000, 16_000, 17_000, 18_000, 19_000, 20_000], "no earlier events");
        assert_eq!(rates.history(2, 20_000).len(), 3);
    }

    #[test]
    fn ends_are_counted_by_their_cause() {
        let causes = ["agent", "unconfirmed", "unattached", "lease", "unreachable", "pod_lost"];
        let details = causes.map(|cause| format!("{cause} 1000"));
        let events = details.map(|detail| logged(10_000, "ended", &detail));
        let mut rates = EventRates::default();
        rates.record(&events, 10_000);
        let EventCounts { ended, expired, unconfirmed, pod_lost, .. } = rates.recent();
        assert_eq!((ended, expired, unconfirmed, pod_lost), (3, 1, 2, 2));
    }

    #[test]
    fn rates_stay_correct_when_the_clock_is_set_back() {
        let mut rates = EventRates::default();
        rates.record(&[logged(5_000_000, "refused", "no_pods")], 5_000_000);
        // A Redis stream gives later entries the time of the last one.
        rates.record(&vec![logged(5_000_000, "allocated", ""); 10], 1_000_000);
        assert_eq!(rates.rates(1_001)["allocated"], 2.0);
        assert_eq!(rates.recent().no_pods, 0, "its time is after now");
        assert_eq!(rates.events, 10);
    }

    #[test]
    fn rates_stay_correct_above_the_event_limit() {
        let mut rates = EventRates::default();
        for second in 1..=20_u64 {
            let event = logged(second * 1_000, "allocated", "");
            rates.record(&vec![event; 15_000], second * 1_000);
        }
        assert_eq!(rates.rates(20)["allocated"], 15_000.0);
        assert_eq!(rates.seconds.len(), AVERAGING_SECONDS as usize + 1);
    }

    #[test]
    fn incremental_counts_equal_counts_read_at_once() {
        let events: Vec<LoggedEvent> = (0..MAX_EVENTS as u64 + 5_000)
            .map(|number| match number % 3 {
                0 => logged(number * 20, "refused", "no_pods gold=at_capacity"),
                1 => logged(number * 20, "ended", "lease 1000"),
                _ => logged(number * 20, "ended", "agent 1000"),
            })
            .collect();
        let now = events.last().unwrap().id.at;
        let mut incremental = EventRates::default();
        events.chunks(7).for_each(|some| incremental.record(some, some.last().unwrap().id.at));
        let mut at_once = EventRates::default();
        at_once.record(&events[5_000..], now);
        assert_eq!(incremental.recent(), at_once.recent());
        assert_eq!(incremental.recent().no_pods, 6_667);
        // After the retention period nothing remains.
        incremental.record(&[], now + RETENTION + 1_000);
        assert_eq!(incremental.recent(), EventCounts::default());
    }
}
