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
/// Start-up times after which a starting pod is late.
const LATE_AFTER: f64 = 5.0;
/// The shortest time after which a pod is late, in seconds.
const LATE_MIN: f64 = 300.0;
/// Failed starts after which a pool with ready pods counts as stuck: one or two of them may be the
/// fault of a single node.
const STUCK_PODS: u64 = 3;

#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct StartUps {
    /// The last start-up times, in seconds.
    samples: VecDeque<f64>,
    /// Times were measured: the counts, which do not tell pods apart, are no longer learned from.
    #[serde(default)]
    is_measured: bool,
    /// Starting pods in the order of their start: time in seconds, number.
    starting: VecDeque<(f64, u64)>,
    /// The last time that a pod became ready, in seconds.
    #[serde(default)]
    last_ready: f64,
    /// The time since which all starts count as failed, and the starting pods at that time.
    #[serde(default)]
    stuck: Option<(f64, u64)>,
}

/// The pods of one observation.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, PartialEq)]
pub(super) struct PodCounts {
    pub ready: u64,
    pub starting: u64,
}

impl StartUps {
    pub(super) fn is_sane(&self) -> bool {
        let is_start = |(since, pods): &(f64, u64)| is_amount(*since) && *pods <= MAX_PODS;
        self.samples.len() <= SAMPLES
            && self.samples.iter().all(|seconds| (BOUNDS.0..=BOUNDS.1).contains(seconds))
            && self.starting.len() <= MAX_GROUPS
            && self.starting.iter().chain(&self.stuck).all(is_start)
            && is_amount(self.last_ready)
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
            self.is_measured = true;
            self.push(time);
        }
    }

    fn push(&mut self, seconds: f64) {
        self.samples.push_back(seconds.clamp(BOUNDS.0, BOUNDS.1));
        if self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
    }

    /// Pairs pods that became ready with their starts, and finds out whether the pool is stuck.
    /// The times are not learned without `learn`, or if measured ones are known.
    pub(super) fn observe_counts(
        &mut self,
        (before, now): (PodCounts, PodCounts),
        at: f64,
        start_up: f64,
        learn: bool,
    ) {
        let became_ready = now.ready.saturating_sub(before.ready);
        let mut known: u64 = self.starting.iter().map(|(_, number)| number).sum();
        if became_ready > 0 {
            known = self.pair(became_ready, (known, now.starting), at, start_up, learn);
        }
        match now.starting.cmp(&known) {
            std::cmp::Ordering::Greater => self.add_starting(at, now.starting - known),
            _ => self.remove_starting(known - now.starting),
        }
        self.watch_progress(became_ready > 0, now, at, start_up);
    }

    /// Pairs pods that became ready with the oldest starts that are not late, then with late ones.
    /// Returns the number of starts that are left of `known`.
    fn pair(
        &mut self,
        mut became_ready: u64,
        (mut known, starting): (u64, u64),
        at: f64,
        start_up: f64,
        learn: bool,
    ) -> u64 {
        let late = self.late_starts(at, start_up).count();
        for index in (late..self.starting.len()).chain(0..late) {
            let (since, number) = self.starting[index];
            // Pods that return from a drain raise the number of ready ones as well: a late pod is
            // ready only if fewer pods are starting.
            let most = if index < late { known.saturating_sub(starting) } else { number };
            let taken = became_ready.min(number).min(most);
            self.starting[index].1 -= taken;
            (became_ready, known) = (became_ready - taken, known - taken);
            let seconds = at - since;
            if taken > 0 && learn && !self.is_measured && (0.0..=MAX_START_UP).contains(&seconds) {
                self.push(seconds);
            }
        }
        self.starting.retain(|(_, number)| *number > 0);
        known
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

    fn watch_progress(&mut self, progress: bool, now: PodCounts, at: f64, start_up: f64) {
        if progress {
            self.last_ready = at;
        }
        if progress || now.starting == 0 {
            self.stuck = None;
        } else if self.stuck.is_none() {
            let late = self.late_starts(at, start_up);
            let failed = late.filter(|(since, _)| *since >= self.last_ready);
            let failed: u64 = failed.map(|(_, number)| number).sum();
            let is_stuck = failed >= if now.ready == 0 { 1 } else { STUCK_PODS };
            self.stuck = is_stuck.then_some((at, now.starting));
        }
    }

    fn late_starts(&self, at: f64, start_up: f64) -> impl Iterator<Item = &(f64, u64)> {
        let late_before = at - late_after(start_up);
        self.starting.iter().take_while(move |(since, _)| *since < late_before)
    }

    /// The number of late pods: they have been starting for too long to be counted on.
    pub(super) fn late(&self, at: f64, start_up: f64) -> u64 {
        self.late_starts(at, start_up).map(|(_, number)| number).sum()
    }

    /// The number of starting pods that a stuck pool may have. One more tries to start at once, and
    /// then after pauses that double: a bad node or two must not keep the others from growing.
    pub(super) fn allowed(&self, at: f64, start_up: f64) -> Option<u64> {
        self.stuck.map(|(since, pods)| {
            let periods = (at - since).max(0.0) / late_after(start_up);
            pods + 1 + (1.0 + periods).log2() as u64
        })
    }

    /// Moves the known times by an interval that does not count: the clock stepped, or
    /// observations are missing.
    pub(super) fn skip(&mut self, elapsed: f64) {
        let times = self.starting.iter_mut().chain(&mut self.stuck).map(|(since, _)| since);
        for time in times.chain([&mut self.last_ready]) {
            *time = (*time + elapsed).max(0.0);
        }
    }
}

/// The time after which a starting pod is late, in seconds.
fn late_after(start_up: f64) -> f64 {
    (LATE_AFTER * start_up).max(LATE_MIN)
}
