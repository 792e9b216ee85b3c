//! The policy: observations in, decisions out.

use serde::{Deserialize, Serialize};

use super::{
    Bounds, Decision, Observation, Outlook, Reason, Zone,
    distribution::{Mixture, Moments},
    durations::{Durations, Survival},
    margin::{Margin, Misses},
    profile::{Profile, slots_between},
    rate::{Expected, Rate},
    start_up::{PodCounts, StartUps},
};
use crate::Millis;

/// The longest interval between two observations that is learned from, in seconds.
const MAX_INTERVAL: f64 = 1_800.0;
/// An interval beyond this many seconds, and beyond this multiple of the usual one, that has less
/// than half of the expected arrivals is a step of the clock, or calls were not counted.
const UNUSUAL_INTERVAL: (f64, f64) = (60.0, 12.0);
/// The largest number of calls or pods that an observation may claim.
const MAX_COUNT: u64 = 100_000_000;
/// Parts of the forecast horizon at which the demand is evaluated.
const PARTS: usize = 3;

/// Pods are kept for a miss probability that is this much higher than the one to start them for.
const KEEP_EASE: f64 = 8.0;

/// Properties of a pool that the policy does not learn.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Share of calls that find a warm pod, between 0 and 1.
    pub target: f64,
    /// The start-up time before any is known, in seconds.
    pub start_up: f64,
    pub calls_per_pod: u64,
    pub zone: Zone,
    pub bounds: Bounds,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            target: 0.999,
            start_up: 60.0,
            calls_per_pod: 1,
            zone: Zone::default(),
            bounds: Bounds::default(),
        }
    }
}

/// The last observation.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq)]
struct Last {
    at: Millis,
    /// Live and waiting calls.
    calls: u64,
    pods: PodCounts,
}

/// All that the policy has learned of one pool. Its serialized form continues on another
/// replica, or after a restart, with the same decisions.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct State {
    last: Option<Last>,
    /// Mean time between observations, in seconds.
    interval: f64,
    profile: Profile,
    rate: Rate,
    durations: Durations,
    start_ups: StartUps,
    margin: Margin,
}

/// The capacity policy of one pool.
#[derive(Debug, Clone)]
pub struct Policy {
    pub settings: Settings,
    state: State,
    mixture: Mixture,
}

impl State {
    /// Whether the state may be continued. One that was edited by hand, or written by another
    /// version, may have other lengths or numbers that no observation leads to.
    pub fn is_sane(&self) -> bool {
        let is_last = |last: &Last| {
            last.calls <= 2 * MAX_COUNT && last.pods.ready.max(last.pods.starting) <= MAX_COUNT
        };
        (0.0..=MAX_INTERVAL).contains(&self.interval)
            && self.last.as_ref().is_none_or(is_last)
            && self.profile.is_sane()
            && self.rate.is_sane()
            && self.durations.is_sane()
            && self.start_ups.is_sane()
            && self.margin.is_sane()
    }

    /// The arrivals that were expected in the `elapsed` seconds before a local time; `None` if the
    /// clock stepped.
    fn expected(&mut self, to: f64, elapsed: f64, arrivals: u64) -> Option<f64> {
        let expected = self.rate.expected(&self.profile, (to - elapsed, to));
        let (least, multiple) = UNUSUAL_INTERVAL;
        let is_step =
            elapsed > least.max(multiple * self.interval) && (arrivals as f64) < expected / 2.0;
        if is_step {
            // An observer that is slower from now on is soon usual.
            self.interval *= 2.0;
        }
        (!is_step).then_some(expected)
    }
}

/// Whether a number is a plausible sum, time or weight.
pub(super) fn is_amount(number: f64) -> bool {
    (0.0..1e18).contains(&number)
}

impl Policy {
    pub fn new(settings: Settings) -> Self {
        Self::resume(settings, State::default())
    }

    /// Continues from a stored state.
    pub fn resume(settings: Settings, state: State) -> Self {
        Self { settings, state, mixture: Mixture::default() }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// Learns from an observation and decides the number of pods.
    pub fn step(&mut self, observation: &Observation) -> Decision {
        let seen = Counts::of(observation);
        let start_up = self.state.start_ups.seconds(self.settings.start_up);
        self.learn(observation, seen, start_up);
        let horizon = start_up + self.state.interval.clamp(1.0, MAX_INTERVAL);
        let (needed, expected_calls) = self.forecast(observation.at, seen, horizon);
        let kept = match seen.pods > needed {
            true => {
                self.forecast_until(observation.at, seen, (horizon, horizon + start_up), KEEP_EASE)
            }
            false => 0,
        };
        let (desired, reason) = self.bound(observation.at, seen, needed, kept, start_up);
        Decision { desired, reason, needed, expected_calls, start_up }
    }

    fn learn(&mut self, observation: &Observation, seen: Counts, start_up: f64) {
        let state = &mut self.state;
        state.start_ups.observe_times(&observation.start_ups);
        state.durations.observe_durations(&observation.durations);
        let pods = PodCounts { ready: seen.ready, starting: seen.starting };
        let last = state.last.replace(Last { at: observation.at, calls: seen.calls, pods });
        let at = observation.at as f64 / 1_000.0;
        let Some(last) = last else {
            state.rate.assume(seen.calls as f64, state.durations.mean());
            state.interval = start_up.min(10.0);
            state.start_ups.observe_counts((pods, pods), at, start_up, false);
            return;
        };
        let elapsed = at - last.at as f64 / 1_000.0;
        let to = self.settings.zone.local_seconds(observation.at);
        let is_known = elapsed > 0.0 && elapsed <= MAX_INTERVAL && !observation.gap;
        let Some(expected) = is_known.then(|| state.expected(to, elapsed, seen.arrivals)).flatten()
        else {
            // A clock step or missing observations: the counts belong to no known interval.
            state.profile.finish();
            state.rate.skip(elapsed.clamp(0.0, 7.0 * 86_400.0));
            state.start_ups.skip(elapsed);
            state.start_ups.observe_counts((last.pods, pods), at, start_up, false);
            return;
        };
        let blend = if elapsed > state.interval { 0.5 } else { 0.1 };
        state.interval += (elapsed - state.interval) * blend;
        state.start_ups.observe_counts((last.pods, pods), at, start_up, true);
        let mean_calls = (last.calls + seen.calls) as f64 / 2.0;
        state.margin.observe(mean_calls, elapsed);
        let slots = seen.ready.min(last.pods.ready) * self.settings.calls_per_pod;
        let arrived = seen.arrivals.saturating_sub(seen.refusals) + last.calls;
        // The arrivals of a full pool say nothing of ended calls: it may have refused some that
        // the observer does not count. Its recorded ends are exact.
        let is_certain = seen.live < slots || seen.refusals > 0;
        let counted = is_certain.then(|| arrived.saturating_sub(seen.calls));
        let recorded = state.durations.is_recorded().then_some(observation.durations.len() as u64);
        if let Some(ended) = counted.max(recorded) {
            state.durations.observe_counts(mean_calls, elapsed, ended as f64);
        }
        let miss_target = 1.0 - self.settings.target;
        let misses = Misses {
            counted: seen.counted_misses(),
            estimated: expected * seen.fullness(last, slots),
        };
        let arrivals = seen.arrivals as f64;
        state.margin.observe_misses(miss_target, arrivals, misses);
        let horizon = start_up + state.interval;
        state.rate.observe(&state.profile, (to - elapsed, to), arrivals, horizon);
        state.profile.observe(to - elapsed, to, arrivals);
    }

    /// Pods needed until a pod that starts now is ready, and the expected calls at that time.
    fn forecast(&mut self, at: Millis, seen: Counts, horizon: f64) -> (u64, f64) {
        let needed = self.forecast_until(at, seen, (0.0, horizon), 1.0);
        (needed, self.mixture.mean())
    }

    /// The largest number of pods needed between two times from now, for a miss probability that
    /// is `ease` times the planned one.
    fn forecast_until(
        &mut self,
        at: Millis,
        seen: Counts,
        (from, to): (f64, f64),
        ease: f64,
    ) -> u64 {
        let survival = self.state.durations.survival(to);
        let local = self.settings.zone.local_seconds(at);
        let mut needed = 0;
        for part in 1..=PARTS {
            let ahead = from + (to - from) * part as f64 / PARTS as f64;
            self.mix(local, seen, ahead, survival);
            let tail = self.state.margin.tail(1.0 - self.settings.target, self.mixture.mean());
            let slots = self.mixture.capacity(tail * ease);
            needed = needed.max((slots / self.settings.calls_per_pod as f64).ceil() as u64);
        }
        needed
    }

    /// The expected calls at several times after an observation, and the pods that they need.
    pub fn outlook(&mut self, observation: &Observation, ahead: &[f64]) -> Vec<Outlook> {
        let seen = Counts::of(observation);
        let local = self.settings.zone.local_seconds(observation.at);
        let point = |ahead: &f64| {
            let survival = self.state.durations.survival(*ahead);
            self.mix(local, seen, *ahead, survival);
            let expected_calls = self.mixture.mean();
            let tail = self.state.margin.tail(1.0 - self.settings.target, expected_calls);
            let slots = self.mixture.capacity(tail);
            let needed = (slots / self.settings.calls_per_pod as f64).ceil() as u64;
            Outlook { ahead: *ahead, expected_calls, needed }
        };
        ahead.iter().map(point).collect()
    }

    /// Forecasts the calls `ahead` seconds from now.
    fn mix(&mut self, local: f64, seen: Counts, ahead: f64, survival: Survival) {
        let state = &self.state;
        let (now, then) = (local, local + ahead);
        let mut expected = Expected::default();
        for (start, end) in slots_between(now, then) {
            let present = survival.of_arrivals(then - end, then - start);
            expected.add(&state.profile, start, present);
        }
        let staying = Moments::binomial(seen.calls as f64, survival.of_live(ahead));
        self.mixture.clear();
        for (weight, arrivals, variance) in state.rate.forecasts(expected) {
            self.mixture.add(weight, staying.plus(Moments::arrivals(arrivals, variance)));
        }
    }

    fn bound(
        &mut self,
        at: Millis,
        seen: Counts,
        needed: u64,
        kept: u64,
        start_up: f64,
    ) -> (u64, Reason) {
        let bounds = &self.settings.bounds;
        let (mut desired, mut reason) = (needed, Reason::Forecast);
        let mut raise = |to: u64, why| {
            if to > desired {
                (desired, reason) = (to, why);
            }
        };
        // The forecast has the dials that will be answered: they are arrivals as well.
        let used = seen.calls + seen.dial_slots;
        let reserve = bounds.inbound_reserve.beside_calls(used);
        let reserved = (used + reserve).div_ceil(self.settings.calls_per_pod);
        raise(reserved, Reason::Reserve);
        // The surplus decays within about a start-up time: removing a pod that is needed again
        // sooner saves nothing.
        let share = (-self.state.interval / start_up.max(1.0)).exp();
        let seconds = at as f64 / 1_000.0;
        let late = self.state.start_ups.late(seconds, start_up).min(seen.starting);
        let present = seen.pods - late;
        let surplus = (present.saturating_sub(needed) as f64 * share) as u64;
        let kept = kept.max(needed + surplus);
        raise(kept.min(present), Reason::Keep);
        let orders = bounds.prescale.iter().filter(|order| order.until > at);
        raise(orders.map(|order| order.pods).max().unwrap_or(0), Reason::Prescale);
        // A lower bound above the upper one gives way: the upper one limits the cost.
        raise(bounds.min.min(bounds.max), Reason::Min);
        if desired > bounds.max {
            (desired, reason) = (bounds.max, Reason::Max);
        }
        let is_short = desired > seen.ready;
        // Late pods serve no call: others take their places.
        desired = desired.saturating_add(late).min(bounds.max);
        let allowed = self.state.start_ups.allowed(seconds, start_up);
        if let Some(starting) = allowed.filter(|_| is_short) {
            (desired, reason) = (desired.min(seen.ready + starting), Reason::PodsNotReady);
        }
        (desired, reason)
    }
}

/// The counts of an observation within sane limits.
#[derive(Debug, Clone, Copy)]
struct Counts {
    arrivals: u64,
    refusals: u64,
    live: u64,
    /// Live and waiting calls.
    calls: u64,
    dial_slots: u64,
    ready: u64,
    starting: u64,
    /// Ready and starting pods.
    pods: u64,
}

impl Counts {
    /// Arrivals since the last observation that were refused or still wait. The calls that wait
    /// are the last ones that arrived.
    fn counted_misses(self) -> f64 {
        let waiting = (self.calls - self.live).min(self.arrivals);
        (self.refusals + waiting) as f64
    }

    /// The share of the time since the last observation in which all slots were taken, as both
    /// ends show it. `slots` are those that were ready all that time: pods that became ready at
    /// its end helped no call.
    fn fullness(self, last: Last, slots: u64) -> f64 {
        let is_full = |calls: u64| f64::from(u8::from(calls >= slots));
        (is_full(last.calls) + is_full(self.calls)) / 2.0
    }

    fn of(observation: &Observation) -> Self {
        let sane = |count: u64| count.min(MAX_COUNT);
        let (live, waiting) = (sane(observation.live), sane(observation.waiting));
        let (ready, starting) = (sane(observation.ready), sane(observation.starting));
        Self {
            arrivals: sane(observation.arrivals),
            refusals: sane(observation.refusals),
            live,
            calls: live + waiting,
            dial_slots: sane(observation.dial_slots),
            ready,
            starting,
            pods: ready + starting,
        }
    }
}
