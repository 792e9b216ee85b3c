//! The miss probability to plan with at one moment.

use serde::{Deserialize, Serialize};

use super::{
    distribution::{normal_quantile, normal_tail},
    policy::is_amount,
};

/// Days after which the mean load forgets.
const MEMORY: f64 = 7.0 * 86_400.0;
/// Bounds of the planned miss probability, as multiples of the target.
const BOUNDS: (f64, f64) = (0.1, 20.0);

/// Expected misses after which the correction may change by a factor of e.
const CORRECTION_MISSES: f64 = 30.0;
/// Misses of one observation that count, at most: a burst that no margin covers must not raise
/// the margin of the days after it.
const MAX_MISSES: f64 = 5.0;
/// The share of the target that the correction aims at.
const AIM: f64 = 0.55;
/// Misses that the target must have allowed before the margin may shrink.
const MIN_ALLOWED: f64 = 30.0;
/// Bounds of the correction, as logarithms.
const CORRECTION: (f64, f64) = (-1.9, 0.7);

/// The load that calls met, by call.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct Margin {
    /// Sums of live calls, and of their squares, over time.
    load: f64,
    squares: f64,
    /// Logarithm of the factor between the planned miss probability and the target: it grows while
    /// fewer calls miss than the target allows, and falls with each miss.
    correction: f64,
    /// Calls that the target has allowed to miss so far.
    #[serde(default)]
    allowed: f64,
    /// Misses have been counted: their absence says that there were none.
    #[serde(default)]
    is_counted: bool,
}

/// Calls of one interval that found no warm pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct Misses {
    /// Refused and waiting calls.
    pub counted: f64,
    /// Arrivals that a full pool met, as far as the observations show it.
    pub estimated: f64,
}

impl Margin {
    pub(super) fn is_sane(self) -> bool {
        [self.load, self.squares, self.allowed].into_iter().all(is_amount)
            && (CORRECTION.0..=CORRECTION.1).contains(&self.correction)
    }

    pub(super) fn observe(&mut self, live: f64, seconds: f64) {
        let keep = (-seconds / MEMORY).exp();
        self.load = self.load * keep + live * seconds;
        self.squares = self.squares * keep + live * live * seconds;
    }

    /// Compares the calls that found no warm pod with the target.
    pub(super) fn observe_misses(&mut self, target: f64, arrivals: f64, misses: Misses) {
        self.is_counted |= misses.counted > 0.0;
        self.allowed = (self.allowed + target * arrivals).min(MIN_ALLOWED);
        let missed = misses.counted.max(misses.estimated).min(MAX_MISSES + 0.1 * arrivals);
        let change = (AIM * target * arrivals - missed) / CORRECTION_MISSES;
        // Few calls, or misses that are only estimated, do not prove that fewer pods suffice.
        let is_proven = self.is_counted && self.allowed >= MIN_ALLOWED;
        let top = if is_proven { CORRECTION.1 } else { 0.0 };
        self.correction = (self.correction + change).clamp(CORRECTION.0, top);
    }

    /// The probability of a miss that makes the next pod worth the same at any load.
    ///
    /// A pod more saves (rate of calls) × (density of demand at the capacity) calls per second.
    /// With equal savings everywhere, the square of the margin in standard deviations grows with
    /// the logarithm of the load: the busy hours get more, the quiet ones less, and the share of
    /// all calls without a pod stays at the target with fewer pods.
    pub(super) fn tail(self, target: f64, load: f64) -> f64 {
        let target = (target * self.correction.exp()).min(0.5);
        if self.load <= 0.0 || load <= 0.0 {
            return target;
        }
        // The load that a call meets, without the Poisson noise of the calls themselves.
        let typical = (self.squares / self.load - 1.0).max(1.0);
        let z = normal_quantile(target);
        let squared = z * z + (load.max(1.0) / typical).ln();
        normal_tail(squared.max(0.25).sqrt()).clamp(target * BOUNDS.0, target * BOUNDS.1)
    }
}
