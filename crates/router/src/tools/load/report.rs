//! What came of a load: counts, percentiles, and what must not have happened.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::{judge::Judge, wire::Failure};

/// Times from a microsecond to a minute, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("the bounds make sense")
}

struct Kept {
    allocate: Histogram<u64>,
    refused: Histogram<u64>,
    release: Histogram<u64>,
    errors: BTreeMap<String, u64>,
}

/// Counts while a load runs.
pub(super) struct Counts(Mutex<Kept>);

impl Default for Counts {
    fn default() -> Self {
        let [allocate, refused, release] = [histogram(), histogram(), histogram()];
        Self(Mutex::new(Kept { allocate, refused, release, errors: BTreeMap::new() }))
    }
}

/// How far a load is.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    pub elapsed: Duration,
    pub allocated: u64,
    pub released: u64,
    pub errors: u64,
    span: Duration,
}

impl Tally {
    /// The difference to an earlier one.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            elapsed: self.elapsed,
            allocated: self.allocated - before.allocated,
            released: self.released - before.released,
            errors: self.errors - before.errors,
            span: self.elapsed.saturating_sub(before.elapsed),
        }
    }

    pub fn per_second(&self) -> f64 {
        (self.allocated + self.released) as f64 / self.span.as_secs_f64().max(0.001)
    }
}

/// Percentiles in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    pub count: u64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Latency {
    fn of(times: &Histogram<u64>) -> Self {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1_000.0;
        let max = times.max() as f64 / 1_000.0;
        let count = times.len();
        Self { count, p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max }
    }
}

/// What came of a load.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub seconds: f64,
    pub requests_per_second: f64,
    pub calls: u64,
    pub allocate: Latency,
    /// Calls that were told that there is no pod, or no room.
    pub refused: Latency,
    pub release: Latency,
    pub errors: BTreeMap<String, u64>,
    /// How many of these are failures: a call that is told that there is no pod is answered.
    pub failed: u64,
    /// The most calls that had a pod at the same time: without overlap the check
    /// proves nothing.
    pub overlap: usize,
    /// Calls that asked twice.
    pub repeated: u64,
    pub violations: u64,
    pub shown: Vec<String>,
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn allocated(&self, took: Duration) {
        self.lock().allocate.saturating_record(took.as_micros() as u64);
    }

    pub(super) fn refused(&self, took: Duration) {
        self.lock().refused.saturating_record(took.as_micros() as u64);
    }

    pub(super) fn released(&self, took: Duration) {
        self.lock().release.saturating_record(took.as_micros() as u64);
    }

    pub(super) fn failed(&self, operation: &str, failure: &Failure) {
        let kind = format!("{operation}: {}", failure.kind());
        *self.lock().errors.entry(kind).or_default() += 1;
    }

    pub(super) fn tally(&self, elapsed: Duration) -> Tally {
        let kept = self.lock();
        Tally {
            elapsed,
            allocated: kept.allocate.len(),
            released: kept.release.len(),
            errors: kept.errors.values().sum(),
            span: elapsed,
        }
    }

    pub(super) fn report(&self, elapsed: Duration, judge: &Judge) -> Report {
        let kept = self.lock();
        let (violations, shown) = judge.violations();
        let seconds = elapsed.as_secs_f64();
        let requests = kept.allocate.len() + kept.release.len();
        Report {
            seconds,
            requests_per_second: requests as f64 / seconds.max(0.001),
            calls: kept.allocate.len(),
            allocate: Latency::of(&kept.allocate),
            refused: Latency::of(&kept.refused),
            release: Latency::of(&kept.release),
            failed: failures(&kept.errors).map(|(_, count)| count).sum(),
            errors: kept.errors.clone(),
            overlap: judge.overlap(),
            repeated: judge.repeats(),
            violations,
            shown: shown.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The first of two calls for one id may be refused; what has a pod may not.
const REFUSED: &str = "allocate: refused";

fn failures(errors: &BTreeMap<String, u64>) -> impl Iterator<Item = (&String, &u64)> {
    errors.iter().filter(|(kind, _)| *kind != REFUSED)
}

/// Why a load is no success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    /// Something happened that must not, or nothing could be checked.
    Check(String),
    /// Requests failed.
    Requests(String),
}

impl Report {
    /// Whether nothing happened that must not, the check could have seen it, and all requests
    /// were answered.
    pub fn verdict(&self, connections: usize) -> Result<&'static str, Flaw> {
        if self.violations > 0 {
            let text = format!("{} violations, such as: {}", self.violations, self.shown[0]);
            return Err(Flaw::Check(text));
        }
        if self.failed > 0 {
            let kinds: Vec<String> =
                failures(&self.errors).map(|(kind, count)| format!("{count} × {kind}")).collect();
            let text = format!("{} requests failed: {}", self.failed, kinds.join(", "));
            return Err(Flaw::Requests(text));
        }
        if self.calls == 0 {
            return Err(Flaw::Check("no call got a pod".into()));
        }
        if self.overlap < 2 && connections > 1 {
            return Err(Flaw::Check(
                "no two calls had pods at the same time, so nothing was checked: raise --hold or --connections"
                    .into(),
            ));
        }
        Ok(match self.overlap {
            0 | 1 => "one call at a time: whether pods are given twice was not checked",
            _ => "no pod carried more than it may, no call had two pods",
        })
    }
}
