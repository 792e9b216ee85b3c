//! What happened lately, counted by the second, as the event log tells it: every replica
//! counts the same.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use fleet::{Event, EventKind, Logged, Millis};

/// For so long what happened is worth a word, and so many events at most.
pub(super) const RECENT: Millis = 600_000;
pub(super) const MOST: usize = 20_000;
/// For so many seconds rates are averaged.
const AVERAGED: u64 = 5;

#[derive(Default)]
pub(super) struct Tally {
    seconds: BTreeMap<u64, Counts>,
    /// How many events they have in all.
    events: usize,
}

/// How often what happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    events: usize,
    allocated: usize,
    ended: usize,
    refused: usize,
    /// Of those that were refused, because there was no pod.
    pub no_pods: usize,
    /// Ended by their lease, or because their stream never started.
    pub expired: usize,
    pub unconfirmed: usize,
}

impl Counts {
    fn note(&mut self, event: &Event) {
        self.events += 1;
        let cause = event.detail.split(' ').next().unwrap_or_default();
        match (event.kind, cause) {
            (EventKind::Allocated | EventKind::Fetched, _) => self.allocated += 1,
            (EventKind::Ended, "lease") => self.expired += 1,
            (EventKind::Ended, "unconfirmed") => self.unconfirmed += 1,
            (EventKind::Ended, _) => self.ended += 1,
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
        }
    }
}

impl Tally {
    /// Counts events, and forgets what is no longer recent. Replicas that have counted for
    /// long forget as much as one that has just begun never knew, but for what rates need.
    pub(super) fn note(&mut self, events: &[Logged], now: Millis) {
        for Logged { at, event, .. } in events {
            // Redis gives events the time of the last before its clock was set back.
            self.seconds.entry(now.min(*at) / 1_000).or_default().note(event);
        }
        self.events += events.len();
        while let Some(oldest) = self.seconds.first_entry()
            && let age = (now / 1_000).saturating_sub(*oldest.key())
            && (age * 1_000 > RECENT || self.events > MOST && age > AVERAGED)
        {
            self.events -= oldest.remove().events;
        }
        // The clock was set back.
        while let Some(newest) = self.seconds.last_entry()
            && *newest.key() > now / 1_000 + AVERAGED
        {
            self.events -= newest.remove().events;
        }
    }

    /// All that is recent.
    pub(super) fn lately(&self) -> Counts {
        self.seconds.values().fold(Counts::default(), Counts::plus)
    }

    /// How much happened per second, up to this one.
    pub(super) fn rates(&self, second: u64) -> Value {
        let counted = self.seconds.range(second.saturating_sub(AVERAGED)..second);
        let sum = counted.map(|(_, counts)| counts).fold(Counts::default(), Counts::plus);
        let rate = |count: usize| (count as f64 / AVERAGED as f64 * 10.0).round() / 10.0;
        json!({
            "allocated": rate(sum.allocated),
            "ended": rate(sum.ended),
            "refused": rate(sum.refused),
            "expired": rate(sum.expired + sum.unconfirmed),
        })
    }

    /// The rates of the last seconds, as far as the events tell them.
    pub(super) fn history(&self, seconds: u64, now: Millis) -> Vec<(Millis, Value)> {
        let Some((oldest, _)) = self.seconds.first_key_value() else { return Vec::new() };
        let now = now / 1_000;
        let first = (oldest + AVERAGED).max(now.saturating_sub(seconds));
        (first..=now).map(|second| (second * 1_000, self.rates(second))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::EventId;

    fn logged(at: Millis, kind: &str, detail: &str) -> Logged {
        let event = Event::read(kind, &format!("CA1 a pool:gold  {detail}")).unwrap();
        Logged { id: EventId { at, number: 0 }, at, event }
    }

    #[test]
    fn rates_are_those_of_whole_seconds_before() {
        let mut tally = Tally::default();
        let events: Vec<Logged> =
            (0..10).map(|number| logged(10_000 + number * 500, "allocated", "")).collect();
        tally.note(&events, 15_000);
        assert_eq!(tally.rates(15)["allocated"], 2.0);
        assert_eq!(tally.rates(17)["allocated"], 1.2);
        assert_eq!(tally.rates(30)["allocated"], 0.0);
        let history = tally.history(180, 20_000);
        let ats: Vec<Millis> = history.iter().map(|(at, _)| *at).collect();
        assert_eq!(ats, [15_000, 16_000, 17_000, 18_000, 19_000, 20_000], "no more is known");
        assert_eq!(tally.history(2, 20_000).len(), 3);
    }

    #[test]
    fn a_clock_set_back_leaves_rates_right() {
        let mut tally = Tally::default();
        tally.note(&[logged(5_000_000, "refused", "no_pods")], 5_000_000);
        // A stream in Redis gives later entries the time of the last one.
        tally.note(&vec![logged(5_000_000, "allocated", ""); 10], 1_000_000);
        assert_eq!(tally.rates(1_001)["allocated"], 2.0);
        assert_eq!(tally.lately().no_pods, 0, "it happened in the future");
        assert_eq!(tally.events, 10);
    }

    #[test]
    fn rates_are_right_however_much_happens() {
        let mut tally = Tally::default();
        for second in 1..=20_u64 {
            let event = logged(second * 1_000, "allocated", "");
            tally.note(&vec![event; 15_000], second * 1_000);
        }
        assert_eq!(tally.rates(20)["allocated"], 15_000.0);
        assert_eq!(tally.seconds.len(), AVERAGED as usize + 1);
    }

    #[test]
    fn what_was_counted_one_by_one_is_what_is_read_at_once() {
        let events: Vec<Logged> = (0..MOST as u64 + 5_000)
            .map(|number| match number % 3 {
                0 => logged(number * 20, "refused", "no_pods gold=at_capacity"),
                1 => logged(number * 20, "ended", "lease 1000"),
                _ => logged(number * 20, "ended", "agent 1000"),
            })
            .collect();
        let now = events.last().unwrap().id.at;
        let mut followed = Tally::default();
        events.chunks(7).for_each(|some| followed.note(some, some.last().unwrap().id.at));
        let mut read = Tally::default();
        read.note(&events[5_000..], now);
        assert_eq!(followed.lately(), read.lately());
        assert_eq!(followed.lately().no_pods, 6_667);
        // In the end all of it is old.
        followed.note(&[], now + RECENT + 1_000);
        assert_eq!(followed.lately(), Counts::default());
    }
}
