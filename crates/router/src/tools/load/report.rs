//! Results of a load: counts, percentiles, violations.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::{http_client::Failure, invariants::InvariantChecker, media::MediaReport};

/// Times from a microsecond to a minute, to three digits.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("the bounds are valid")
}

struct Measurements {
    allocate: Histogram<u64>,
    refused: Histogram<u64>,
    release: Histogram<u64>,
    errors: BTreeMap<String, u64>,
}

/// Counts while a load runs.
pub(super) struct Counts(Mutex<Measurements>);

impl Default for Counts {
    fn default() -> Self {
        let [allocate, refused, release] = [histogram(), histogram(), histogram()];
        Self(Mutex::new(Measurements { allocate, refused, release, errors: BTreeMap::new() }))
    }
}

/// Progress of a load.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    pub elapsed: Duration,
    pub allocated: u64,
    pub released: u64,
    pub errors: u64,
    /// Open streams and echoed frames, if the load has streams.
    pub streams: u64,
    pub frames: u64,
    interval: Duration,
}

impl Progress {
    /// Returns the progress since an earlier state.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            elapsed: self.elapsed,
            allocated: self.allocated - before.allocated,
            released: self.released - before.released,
            errors: self.errors - before.errors,
            streams: self.streams,
            frames: self.frames - before.frames,
            interval: self.elapsed.saturating_sub(before.elapsed),
        }
    }

    pub fn per_second(&self) -> f64 {
        (self.allocated + self.released) as f64 / self.interval.as_secs_f64().max(0.001)
    }

    pub(crate) fn frames_per_second(&self) -> f64 {
        self.frames as f64 / self.interval.as_secs_f64().max(0.001)
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
    pub(super) fn of(times: &Histogram<u64>) -> Self {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1_000.0;
        let max = times.max() as f64 / 1_000.0;
        let count = times.len();
        Self { count, p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max }
    }
}

/// Results of a load.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub seconds: f64,
    pub requests_per_second: f64,
    pub calls: u64,
    pub allocate: Latency,
    /// Refused calls.
    pub refused: Latency,
    pub release: Latency,
    pub errors: BTreeMap<String, u64>,
    /// The number of failures among the errors: a refused call is not a failure.
    pub failed: u64,
    /// Maximum number of calls that had a pod at the same time: without overlap the invariants
    /// are not tested.
    pub overlap: usize,
    /// Repeated allocate requests.
    pub repeated: u64,
    pub violations: u64,
    pub shown: Vec<String>,
    /// Results of the streams, if the load has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub media: Option<MediaReport>,
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, Measurements> {
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

    pub(super) fn progress(&self, elapsed: Duration) -> Progress {
        let measured = self.lock();
        Progress {
            elapsed,
            allocated: measured.allocate.len(),
            released: measured.release.len(),
            errors: measured.errors.values().sum(),
            streams: 0,
            frames: 0,
            interval: elapsed,
        }
    }

    pub(super) fn report(&self, elapsed: Duration, invariants: &InvariantChecker) -> Report {
        let measured = self.lock();
        let (violations, shown) = invariants.violations();
        let seconds = elapsed.as_secs_f64();
        let requests = measured.allocate.len() + measured.release.len();
        Report {
            seconds,
            requests_per_second: requests as f64 / seconds.max(0.001),
            calls: measured.allocate.len(),
            allocate: Latency::of(&measured.allocate),
            refused: Latency::of(&measured.refused),
            release: Latency::of(&measured.release),
            failed: failures(&measured.errors).map(|(_, count)| count).sum(),
            errors: measured.errors.clone(),
            overlap: invariants.overlap(),
            repeated: invariants.repeats(),
            violations,
            shown: shown.iter().map(ToString::to_string).collect(),
            media: None,
        }
    }
}

/// A refused allocation is a valid outcome; a refused repeat is a failure.
const REFUSED: &str = "allocate: refused";

fn failures(errors: &BTreeMap<String, u64>) -> impl Iterator<Item = (&String, &u64)> {
    errors.iter().filter(|(kind, _)| *kind != REFUSED)
}

/// Why a load failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadFailure {
    /// An invariant was violated, or could not be checked.
    Check(String),
    /// Requests failed.
    Requests(String),
}

impl Report {
    /// Succeeds if no invariant was violated, violations could have been detected, and no request
    /// failed.
    pub(crate) fn verdict(&self, connections: usize) -> Result<&'static str, LoadFailure> {
        if self.violations > 0 {
            let text = format!("{} violations, the first: {}", self.violations, self.shown[0]);
            return Err(LoadFailure::Check(text));
        }
        let frames = self.media.as_ref().map(|media| media.frames).unwrap_or_default();
        for (count, what) in [
            (frames.foreign, "from another call"),
            (frames.out_of_order, "out of order"),
            (frames.duplicated, "more than once"),
        ] {
            if count > 0 {
                return Err(LoadFailure::Check(format!("{count} frames came back {what}")));
            }
        }
        if self.failed > 0 {
            let kinds: Vec<String> =
                failures(&self.errors).map(|(kind, count)| format!("{count} × {kind}")).collect();
            let text = format!("{} requests failed: {}", self.failed, kinds.join(", "));
            return Err(LoadFailure::Requests(text));
        }
        if frames.lost > 0 {
            let text = format!("{} of {} frames did not come back", frames.lost, frames.sent);
            return Err(LoadFailure::Requests(text));
        }
        let audio = self.media.as_ref().and_then(|media| media.audio);
        if let Some(audio) = audio.filter(|audio| audio.differing > 0) {
            let text = format!(
                "the audio of {} of {} streams did not come back",
                audio.differing, audio.compared
            );
            return Err(LoadFailure::Requests(text));
        }
        if self.calls == 0 {
            return Err(LoadFailure::Check("no call got a pod".into()));
        }
        if self.overlap < 2 && connections > 1 {
            return Err(LoadFailure::Check(
                "no two calls had pods at the same time, so that the invariants were not tested: raise --hold or --connections"
                    .into(),
            ));
        }
        Ok(match self.overlap {
            0 | 1 => "one call at a time: double allocation was not tested",
            _ => "no pod exceeded its capacity, no call had two pods",
        })
    }
}
