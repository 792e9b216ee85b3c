//! Learned durations of calls: how many live calls are still there after a time.

use serde::{Deserialize, Serialize};

use super::policy::is_amount;

/// The mean duration before any call has ended, in seconds.
const PRIOR_MEAN: f64 = 180.0;
/// Weight of that assumption, in ended calls; it fades after as many calls.
const PRIOR_CALLS: f64 = 20.0;
/// Bounds of the mean duration, in seconds.
const MEAN_BOUNDS: (f64, f64) = (0.01, 43_200.0);
/// Ended calls after which old ones are forgotten.
const MEMORY: f64 = 5_000.0;
/// Bins of the histogram: bounds grow by the square root of 2 from 1 s, up to 13 h.
const BINS: usize = 31;
/// Recorded durations from which the histogram is used.
const ENOUGH: f64 = 200.0;

#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct Durations {
    /// Seconds that calls were live, and calls that ended in that time.
    live_seconds: f64,
    ended: f64,
    /// Ended calls by duration, where the observer knows them.
    histogram: Vec<f64>,
}

/// The share of live calls that remain after a time, and the expected time that a call which
/// arrives within it is present at its end, per second of the arrival's age.
#[derive(Debug, Clone, Copy)]
pub(super) struct Survival {
    mean: f64,
    /// Correction of the exponential survival of live calls by the histogram.
    residual: f64,
}

impl Survival {
    /// The share of the calls live now that are live after `seconds`.
    pub(super) fn of_live(self, seconds: f64) -> f64 {
        (-seconds / (self.mean * self.residual)).exp()
    }

    /// The share of the arrivals between two ages, in seconds, that are still live, times the
    /// length of that interval.
    pub(super) fn of_arrivals(self, from: f64, to: f64) -> f64 {
        self.mean * ((-from / self.mean).exp() - (-to / self.mean).exp())
    }
}

fn upper_bound(bin: usize) -> f64 {
    2.0_f64.powf((bin as f64 + 1.0) / 2.0)
}

impl Durations {
    pub(super) fn is_sane(&self) -> bool {
        [0, BINS].contains(&self.histogram.len())
            && self.histogram.iter().copied().all(is_amount)
            && is_amount(self.live_seconds)
            && is_amount(self.ended)
    }

    /// Whether the observer records durations: a step without one then had no ended call.
    pub(super) fn is_recorded(&self) -> bool {
        !self.histogram.is_empty()
    }

    /// Learns from counts: `ended` calls ended while `live` calls were live for `seconds`.
    pub(super) fn observe_counts(&mut self, live: f64, seconds: f64, ended: f64) {
        self.live_seconds += live * seconds;
        self.ended += ended;
        if self.ended > MEMORY {
            let keep = MEMORY / self.ended;
            self.live_seconds *= keep;
            self.ended *= keep;
        }
    }

    pub(super) fn observe_durations(&mut self, seconds: &[f64]) {
        if seconds.is_empty() {
            return;
        }
        self.histogram.resize(BINS, 0.0);
        for duration in seconds.iter().copied().filter(|seconds| seconds.is_finite()) {
            let bin = (2.0 * duration.max(1.0).log2()).floor().clamp(0.0, (BINS - 1) as f64);
            self.histogram[bin as usize] += 1.0;
        }
        let total: f64 = self.histogram.iter().sum();
        if total > MEMORY {
            self.histogram.iter_mut().for_each(|count| *count *= MEMORY / total);
        }
    }

    pub(super) fn mean(&self) -> f64 {
        // An assumption of constant weight would outweigh hundreds of calls of milliseconds.
        let weight = PRIOR_CALLS * (-self.ended / PRIOR_CALLS).exp();
        let mean = (self.live_seconds + weight * PRIOR_MEAN) / (self.ended + weight);
        mean.clamp(MEAN_BOUNDS.0, MEAN_BOUNDS.1)
    }

    /// The survival over about `horizon` seconds.
    pub(super) fn survival(&self, horizon: f64) -> Survival {
        let mean = self.mean();
        let residual =
            self.residual_life(horizon).map_or(1.0, |life| (life / mean).clamp(0.3, 4.0));
        Survival { mean, residual }
    }

    /// The mean of the exponential distribution that loses as many live calls over `horizon` as
    /// the recorded durations: a live call's remaining time follows the integrated tail of the
    /// distribution, which is not exponential itself.
    fn residual_life(&self, horizon: f64) -> Option<f64> {
        let total: f64 = self.histogram.iter().sum();
        if total < ENOUGH || horizon <= 0.0 {
            return None;
        }
        let (mut all, mut later) = (0.0, 0.0);
        for (bin, count) in self.histogram.iter().enumerate() {
            // The geometric middle of the bin stands for its durations.
            let duration = upper_bound(bin) / 2.0_f64.powf(0.25);
            all += count * duration;
            later += count * (duration - horizon).max(0.0);
        }
        let share = (later / all).clamp(1e-6, 1.0 - 1e-6);
        Some(-horizon / share.ln())
    }
}
