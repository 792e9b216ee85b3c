//! Learned start-up times of pods, and pods that do not become ready.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::policy::is_amount;

/// Remembered start-up times.
const SAMPLES: usize = 64;
/// The longest start-up time, in seconds. It bounds the time that a forecast covers.
pub const MAX_START_UP: f64 = 3_600.0;
const BOUNDS: (f64, f64) = (0.1, MAX_START_UP);
/// Start-up times from which the configured one has no weight.
const MIN_SAMPLES: usize = 4;
/// The largest number of pods in a stored state.
const MAX_PODS: u64 = 1_000_000_000;
/// Entries of the queue of starting pods; later ones join the last entry.
const MAX_GROUPS: usize = 256;
/// Start-up times without a ready pod after which a pool counts as stuck.
const STUCK_AFTER: f64 = 5.0;
/// The shortest time after which a pool counts as stuck, in seconds.
const STUCK_MIN: f64 = 300.0;

#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct StartUps {
    /// The last start-up times, in seconds.
    samples: VecDeque<f64>,
    /// Starting pods in the order of their start: time in seconds, number.
    starting: VecDeque<(f64, u64)>,
    /// Seconds of waiting for the first ready pod since one became ready.
    without_progress: f64,
    /// Starting pods when the pool became stuck.
    stuck_at: Option<u64>,
}

/// The pods of one observation.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct PodCounts {
    pub ready: u64,
    pub starting: u64,
}

impl StartUps {
    pub(super) fn is_sane(&self) -> bool {
        let pods = self.starting.iter().map(|(_, number)| number);
        self.samples.len() <= SAMPLES
            && self.samples.iter().all(|seconds| (BOUNDS.0..=BOUNDS.1).contains(seconds))
            && self.starting.len() <= MAX_GROUPS
            && self.starting.iter().all(|(since, _)| is_amount(*since))
            && pods.chain(&self.stuck_at).all(|number| *number <= MAX_PODS)
            && is_amount(self.without_progress)
    }

    /// The time to plan with: nine of ten pods are ready by then.
    pub(super) fn seconds(&self, assumed: f64) -> f64 {
        let mut known: Vec<f64> = self.samples.iter().copied().collect();
        // The configured time stands for the samples that are missing.
        known.extend([assumed; MIN_SAMPLES].iter().skip(known.len()));
        known.sort_by(f64::total_cmp);
        let rank = (known.len() as f64 * 0.9).ceil() as usize;
        known[rank.clamp(1, known.len()) - 1]
    }

    /// Records measured times.
    pub(super) fn observe_times(&mut self, seconds: &[f64]) {
        for time in seconds.iter().copied().filter(|time| time.is_finite() && *time >= 0.0) {
            self.push(time);
        }
    }

    fn push(&mut self, seconds: f64) {
        self.samples.push_back(seconds.clamp(BOUNDS.0, BOUNDS.1));
        if self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
    }

    /// Pairs pods that became ready with the oldest starts, and measures the time without
    /// progress. `learn` is false if measured times are known, or the clock stepped.
    pub(super) fn observe_counts(
        &mut self,
        (before, now): (PodCounts, PodCounts),
        at: f64,
        elapsed: f64,
        learn: bool,
    ) {
        let became_ready = now.ready.saturating_sub(before.ready);
        let mut left = became_ready;
        while left > 0 {
            let Some((since, number)) = self.starting.front_mut() else { break };
            let taken = left.min(*number);
            let seconds = at - *since;
            *number -= taken;
            left -= taken;
            if *number == 0 {
                self.starting.pop_front();
            }
            if learn && (0.0..=MAX_START_UP).contains(&seconds) {
                self.push(seconds);
            }
        }
        let known: u64 = self.starting.iter().map(|(_, number)| number).sum();
        match now.starting.cmp(&known) {
            std::cmp::Ordering::Greater => self.add_starting(at, now.starting - known),
            _ => self.remove_starting(known - now.starting),
        }
        self.watch_progress(became_ready > 0, now.starting, elapsed, at);
    }

    fn add_starting(&mut self, at: f64, number: u64) {
        let full = self.starting.len() >= MAX_GROUPS;
        match self.starting.back_mut() {
            Some((since, last)) if full || *since == at => *last += number,
            _ => self.starting.push_back((at, number)),
        }
    }

    /// Starting pods that are gone: a scale-down removes the youngest first.
    fn remove_starting(&mut self, mut number: u64) {
        while number > 0 {
            let Some((_, last)) = self.starting.back_mut() else { break };
            let taken = number.min(*last);
            *last -= taken;
            number -= taken;
            if *last == 0 {
                self.starting.pop_back();
            }
        }
    }

    fn watch_progress(&mut self, progress: bool, starting: u64, elapsed: f64, at: f64) {
        if progress || starting == 0 {
            self.without_progress = 0.0;
            self.stuck_at = None;
            return;
        }
        // A pod that started a moment ago is not late, whatever the one before it did.
        let waited = self.starting.front().map_or(0.0, |(since, _)| (at - since).max(0.0));
        self.without_progress = (self.without_progress + elapsed).min(waited.max(elapsed));
    }

    /// The number of starting pods beyond which a pool without progress may not go.
    pub(super) fn stuck(&mut self, start_up: f64, starting: u64) -> Option<u64> {
        let limit = (STUCK_AFTER * start_up).max(STUCK_MIN);
        if self.stuck_at.is_none() && self.without_progress > limit {
            self.stuck_at = Some(starting.max(1));
        }
        self.stuck_at
    }

    pub(super) fn forget_pending(&mut self) {
        self.starting.clear();
        self.without_progress = 0.0;
    }
}
