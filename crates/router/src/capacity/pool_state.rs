//! The policy of one pool in the router that takes the decisions.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::PoolCapacity;
use fleet::{
    EventId, Millis,
    capacity::{Bounds, Decision, Observation, Policy, Settings, State},
    names::Pool,
    tiers::InboundReserve,
};

/// Interval between saves of the state of a pool with calls, and of one without. The store writes
/// about 30 kB per save.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);
const IDLE_SAVE_INTERVAL: Duration = Duration::from_secs(600);
/// Interval between two events about changed decisions of a pool.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which the forecast is computed, the distance of its points, and their number.
const FORECAST_INTERVAL: Duration = Duration::from_secs(60);
pub(crate) const FORECAST_STEP: u64 = 300;
const FORECAST_POINTS: u64 = 24;
/// The longest interval whose idle time is counted.
const MAX_IDLE_INTERVAL: Millis = 60_000;
const HOUR: Millis = 3_600_000;

/// The version of [`SavedState`].
const VERSION: u32 = 1;

/// The state of a pool as the store keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    version: u32,
    /// The last event that the state includes.
    cursor: String,
    state: State,
    idle: VecDeque<(u64, f64)>,
}

impl SavedState {
    /// Parses a stored state. One of another version, or edited by hand, is not used.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let saved: Self = serde_json::from_str(text).ok()?;
        let is_hour = |(_, seconds): &(u64, f64)| (0.0..1e12).contains(seconds);
        let is_valid = saved.version == VERSION
            && saved.state.is_sane()
            && saved.idle.len() <= 25
            && saved.idle.iter().all(is_hour)
            && saved.cursor.parse::<EventId>().is_ok();
        is_valid.then_some(saved)
    }

    pub(crate) fn cursor(&self) -> EventId {
        self.cursor.parse().unwrap_or_default()
    }
}

/// The policy of a pool, and the results that are computed less often than its decisions.
#[derive(Debug)]
pub(crate) struct PoolPolicy {
    policy: Policy,
    /// Idle pod-seconds by hour.
    idle: VecDeque<(u64, f64)>,
    last_at: Option<Millis>,
    saved: Option<Instant>,
    /// Calls arrived or lived since the last save.
    is_busy: bool,
    forecast: Vec<(f64, u64)>,
    forecast_at: Option<Instant>,
    /// The decision of the last event, and its time.
    reported: Option<(u64, Instant)>,
}

impl PoolPolicy {
    pub(crate) fn new(settings: Settings, saved: Option<SavedState>) -> Self {
        let (state, idle) = saved.map(|saved| (saved.state, saved.idle)).unwrap_or_default();
        Self {
            policy: Policy::resume(settings, state),
            idle,
            last_at: None,
            saved: None,
            is_busy: false,
            forecast: Vec::new(),
            forecast_at: None,
            reported: None,
        }
    }

    pub(crate) fn bounds(&self) -> &Bounds {
        &self.policy.settings.bounds
    }

    /// Learns from an observation, and decides. `available` pods can take a call.
    pub(crate) fn step(
        &mut self,
        settings: Settings,
        observation: &Observation,
        available: u64,
    ) -> PoolCapacity {
        let calls_per_pod = settings.calls_per_pod;
        self.policy.settings = settings;
        let decision = self.policy.step(observation);
        self.is_busy |= observation.arrivals > 0 || observation.live > 0;
        self.count_idle(observation, calls_per_pod, available);
        if self.forecast_at.is_none_or(|at| at.elapsed() >= FORECAST_INTERVAL) {
            self.forecast_at = Some(Instant::now());
            let ahead: Vec<f64> =
                (1..=FORECAST_POINTS).map(|point| (point * FORECAST_STEP) as f64).collect();
            let points = self.policy.outlook(observation, &ahead).into_iter();
            self.forecast = points
                .map(|point| ((point.expected_calls * 10.0).round() / 10.0, point.needed))
                .collect();
        }
        self.capacity(observation, decision, calls_per_pod)
    }

    fn capacity(
        &self,
        observation: &Observation,
        decision: Decision,
        calls_per_pod: u64,
    ) -> PoolCapacity {
        let Observation { live, waiting, dial_slots, ready, starting, .. } = *observation;
        let Decision { desired, reason, needed, expected_calls, start_up } = decision;
        let idle: f64 = self.idle.iter().map(|(_, seconds)| seconds).sum();
        PoolCapacity {
            desired,
            reason,
            published: desired,
            needed,
            ready,
            starting,
            live,
            waiting,
            dial_slots,
            waiting_dials: 0,
            expected_calls: (expected_calls * 10.0).round() / 10.0,
            start_up: (start_up * 10.0).round() / 10.0,
            calls_per_pod,
            idle_pod_hours: (idle / 36.0).round() / 100.0,
            forecast: self.forecast.clone(),
            scaling: None,
        }
    }

    /// Adds the idle pods of the interval before an observation. The available pods of an exclusive
    /// pool are idle; a shared pool counts the slots that its calls leave free, in pods.
    fn count_idle(&mut self, observation: &Observation, calls_per_pod: u64, available: u64) {
        let Observation { at, live, ready, .. } = *observation;
        let since = self.last_at.replace(at).map_or(0, |last| at.saturating_sub(last));
        let idle = match calls_per_pod {
            1 => available as f64,
            _ => (ready as f64 - live as f64 / calls_per_pod as f64).max(0.0),
        };
        let (hour, seconds) = (at / HOUR, since.min(MAX_IDLE_INTERVAL) as f64 / 1_000.0);
        // Hours of the future are left from before the clock was set back.
        self.idle.retain(|(known, _)| *known + 24 > hour && *known <= hour);
        match self.idle.back_mut().filter(|(known, _)| *known == hour) {
            Some((_, sum)) => *sum += idle * seconds,
            None => self.idle.push_back((hour, idle * seconds)),
        }
    }

    /// The state to save, if it is due.
    pub(crate) fn due_state(&mut self, cursor: EventId, is_last: bool) -> Option<String> {
        let interval = if self.is_busy { SAVE_INTERVAL } else { IDLE_SAVE_INTERVAL };
        let is_due = self.saved.is_none_or(|saved| saved.elapsed() >= interval);
        if !is_due && !is_last {
            return None;
        }
        (self.saved, self.is_busy) = (Some(Instant::now()), false);
        let saved = SavedState {
            version: VERSION,
            cursor: cursor.to_string(),
            state: self.policy.state().clone(),
            idle: self.idle.clone(),
        };
        serde_json::to_string(&saved).ok()
    }

    /// The save did not reach the store: it is due again.
    pub(crate) fn save_failed(&mut self) {
        (self.saved, self.is_busy) = (None, true);
    }

    /// The detail of an event about a changed decision: the new number, the one before, and the
    /// reason. At most one per [`EVENT_INTERVAL`].
    pub(crate) fn due_event(&mut self, decided: &PoolCapacity) -> Option<String> {
        let Some((before, at)) = self.reported else {
            self.reported = Some((decided.desired, Instant::now()));
            return None;
        };
        if before == decided.desired || at.elapsed() < EVENT_INTERVAL {
            return None;
        }
        self.reported = Some((decided.desired, Instant::now()));
        Some(format!("{} {before} {}", decided.desired, decided.reason.as_str()))
    }
}

/// Logs an observation as a line of `smart-router plan --step`, and its decision.
pub(crate) fn log_decision(
    pool: &Pool,
    observation: &Observation,
    bounds: &Bounds,
    capacity: &PoolCapacity,
) {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    let line = step_line(observation, bounds);
    let (desired, reason) = (capacity.desired, capacity.reason.as_str());
    tracing::debug!(%pool, observation = %line, desired, reason, "capacity decision");
}

/// An observation as a line of `smart-router plan --step`, with the bounds that are set.
fn step_line(observation: &Observation, bounds: &Bounds) -> Value {
    let mut line = json!({
        "t": observation.at as f64 / 1_000.0,
        "arrivals": observation.arrivals,
        "live": observation.live,
        "waiting": observation.waiting,
        "dial_slots": observation.dial_slots,
        "refusals": observation.refusals,
        "ready": observation.ready,
        "starting": observation.starting,
        "start_ups": observation.start_ups,
        "durations": observation.durations,
        "gap": observation.gap,
    });
    let in_force = bounds.prescale.iter().filter(|order| order.until > observation.at);
    let reserve = bounds.inbound_reserve;
    let optional = [
        ("min", Some(bounds.min).filter(|min| *min > 0).map(Value::from)),
        ("max", Some(bounds.max).filter(|max| *max < u64::MAX).map(Value::from)),
        (
            "inbound_reserve",
            Some(reserve).filter(|it| *it != InboundReserve::default()).map(Value::from),
        ),
        ("prescale", in_force.map(|order| order.pods).max().map(Value::from)),
    ];
    for (field, value) in optional {
        if let Some(value) = value {
            line[field] = value;
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::capacity::Prescale;

    fn observation(at: Millis, ready: u64) -> Observation {
        Observation { at, ready, ..Observation::default() }
    }

    fn step(policy: &mut PoolPolicy, at: Millis, available: u64) -> PoolCapacity {
        policy.step(Settings::default(), &observation(at, available), available)
    }

    #[test]
    fn a_logged_observation_has_the_bounds_that_are_set() {
        let seen = observation(5_000, 2);
        let line = step_line(&seen, &Bounds::default());
        assert!(line["min"].is_null() && line["max"].is_null(), "{line}");
        let order = |pods, until| Prescale { pods, until };
        let bounds = Bounds {
            min: 3,
            max: 40,
            inbound_reserve: InboundReserve::Share(20),
            prescale: vec![order(30, 5_000), order(7, 5_001), order(9, 6_000)],
        };
        let line = step_line(&seen, &bounds);
        assert_eq!((&line["min"], &line["max"]), (&json!(3), &json!(40)));
        assert_eq!((&line["inbound_reserve"], &line["prescale"]), (&json!("20%"), &json!(9)));
    }

    #[test]
    fn a_saved_state_continues_with_its_cursor() {
        let mut policy = PoolPolicy::new(Settings::default(), None);
        step(&mut policy, 10 * HOUR, 3);
        let cursor = EventId { at: 7, number: 1 };
        let text = policy.due_state(cursor, false).unwrap();
        assert!(text.len() < 60_000, "{} bytes", text.len());
        assert_eq!(policy.due_state(cursor, false), None, "saved a moment ago");
        let saved = SavedState::parse(&text).unwrap();
        assert_eq!(saved.cursor(), cursor);
        assert_eq!(PoolPolicy::new(Settings::default(), Some(saved)).idle, policy.idle);
        policy.save_failed();
        assert!(policy.due_state(cursor, false).is_some(), "the store does not have it");
        for (from, to) in [
            ("\"version\":1", "\"version\":2"),
            ("\"cursor\":\"7-1\"", "\"cursor\":\"x\""),
            ("\"idle\":[[", "\"idle\":[[1,-5.0],["),
            ("\"interval\":", "\"interval\":-"),
        ] {
            assert!(text.contains(from), "{from}");
            assert_eq!(SavedState::parse(&text.replacen(from, to, 1)), None, "{to}");
        }
    }

    #[test]
    fn idle_pod_hours_cover_the_last_day() {
        let mut policy = PoolPolicy::new(Settings::default(), None);
        let start = 1_000_000 * HOUR;
        let mut last = 0.0;
        for minute in 0..=30 * 60 {
            last = step(&mut policy, start + minute * 60_000, 2).idle_pod_hours;
        }
        assert!((46.0..=48.1).contains(&last), "{last}");
        // Minutes without observations are not counted as idle.
        let later = step(&mut policy, start + 40 * HOUR, 2).idle_pod_hours;
        assert!(later < last - 15.0, "{later}");
        // The clock is set back.
        assert!(step(&mut policy, start, 2).idle_pod_hours < 1.0);
    }

    #[test]
    fn changed_decisions_are_events_at_a_bounded_rate() {
        let mut policy = PoolPolicy::new(Settings::default(), None);
        let first = step(&mut policy, HOUR, 2);
        assert_eq!(policy.due_event(&first), None, "nothing is known from before");
        let changed = PoolCapacity { desired: first.desired + 3, ..first.clone() };
        assert_eq!(policy.due_event(&changed), None, "within a minute");
        policy.reported = Instant::now().checked_sub(EVENT_INTERVAL).map(|at| (5, at));
        let detail = format!("{} 5 {}", changed.desired, changed.reason.as_str());
        assert_eq!(policy.due_event(&changed), Some(detail));
    }
}
