//! Latency of this router's own allocations and releases.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::CHART_SECONDS;
use crate::telemetry::metrics::Metrics;
use fleet::Millis;

/// Window of the latency quantiles.
const AVERAGING_PERIOD: Duration = Duration::from_secs(5);

/// Samples of the latency histograms and the quantiles of the last seconds. They are recorded
/// while no dashboard is open, so that its charts begin with past values.
#[derive(Default)]
pub(super) struct Latencies {
    buckets: VecDeque<(Instant, Buckets)>,
    seconds: VecDeque<(u64, Value)>,
}

/// Cumulative histogram buckets (upper bound in seconds, count) by operation.
type Buckets = BTreeMap<String, Vec<(f64, f64)>>;

impl Latencies {
    /// Samples the metrics and sets the quantiles of the seconds since the last update.
    pub(super) fn update(&mut self, metrics: &Metrics, at: Millis) {
        let recent = self.recent(metrics);
        let second = at / 1_000;
        // The clock was set back.
        if self.seconds.back().is_some_and(|(last, _)| *last > second) {
            self.seconds.clear();
        }
        self.seconds.pop_back_if(|(last, _)| *last == second);
        let earliest = second.saturating_sub(AVERAGING_PERIOD.as_secs());
        let first = self.seconds.back().map_or(second, |(last, _)| (last + 1).max(earliest));
        self.seconds.extend((first..=second).map(|second| (second, recent.clone())));
        while self.seconds.front().is_some_and(|(oldest, _)| oldest + CHART_SECONDS < second) {
            self.seconds.pop_front();
        }
    }

    /// Quantiles by second, oldest first.
    pub(super) fn history(&self) -> impl Iterator<Item = &(u64, Value)> {
        self.seconds.iter()
    }

    /// Quantiles of the last update.
    pub(super) fn last(&self) -> Value {
        self.seconds.back().map_or(Value::Null, |(_, value)| value.clone())
    }

    fn recent(&mut self, metrics: &Metrics) -> Value {
        let now = Instant::now();
        if self.buckets.is_empty() {
            // All counters were zero at the start of the router.
            self.buckets.push_back((now, Buckets::new()));
        }
        self.buckets.push_back((now, buckets(&metrics.render(None))));
        while self.buckets.len() > 2
            && self.buckets.get(1).is_some_and(|(at, _)| at.elapsed() > AVERAGING_PERIOD)
        {
            self.buckets.pop_front();
        }
        let (Some((_, before)), Some((_, after))) = (self.buckets.front(), self.buckets.back())
        else {
            return Value::Null;
        };
        let quantiles = |operation: &str| {
            let after = after.get(operation)?;
            let before = before.get(operation);
            let counts: Vec<(f64, f64)> = after
                .iter()
                .enumerate()
                .map(|(index, (limit, count))| {
                    let was = before.and_then(|it| it.get(index)).map_or(0.0, |it| it.1);
                    (*limit, count - was)
                })
                .collect();
            Some(json!({"p50": quantile(&counts, 0.5)?, "p99": quantile(&counts, 0.99)?}))
        };
        json!({"allocate": quantiles("allocate"), "release": quantiles("release")})
    }
}

/// Parses the histogram of store latencies from the metrics text.
fn buckets(text: &str) -> Buckets {
    let mut all = Buckets::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("smart_router_store_duration_seconds_bucket{") else {
            continue;
        };
        let Some((labels, count)) = rest.split_once("} ") else { continue };
        let label = |name: &str| {
            let from = labels.find(&format!("{name}=\""))? + name.len() + 2;
            labels[from..].split('"').next()
        };
        let (Some(operation), Some(limit)) = (label("operation"), label("le")) else { continue };
        let limit = limit.parse().unwrap_or(f64::INFINITY);
        let count = count.trim().parse().unwrap_or(0.0);
        all.entry(operation.to_owned()).or_default().push((limit, count));
    }
    all
}

/// A quantile in milliseconds, interpolated within its bucket.
fn quantile(buckets: &[(f64, f64)], q: f64) -> Option<f64> {
    let total = buckets.last()?.1;
    if total <= 0.0 {
        return None;
    }
    let wanted = total * q;
    let (mut low, mut below) = (0.0, 0.0);
    for (limit, count) in buckets {
        if *count >= wanted {
            let high = if limit.is_finite() { *limit } else { low };
            let share = if *count > below { (wanted - below) / (count - below) } else { 1.0 };
            let seconds: f64 = low + (high - low) * share;
            return Some((seconds * 100_000.0).round() / 100.0);
        }
        (low, below) = (*limit, *count);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_within_their_buckets() {
        let buckets = [(0.001, 50.0), (0.002, 90.0), (0.004, 100.0), (f64::INFINITY, 100.0)];
        assert_eq!(quantile(&buckets, 0.5), Some(1.0));
        assert_eq!(quantile(&buckets, 0.9), Some(2.0));
        assert_eq!(quantile(&buckets, 0.99), Some(3.8));
        assert_eq!(quantile(&[(0.001, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
    }

    #[test]
    fn each_second_between_two_updates_has_quantiles() {
        let (metrics, mut latencies) = (Metrics::default(), Latencies::default());
        let known = |latencies: &Latencies| -> Vec<u64> {
            let is_known = |(_, value): &&(u64, Value)| value["allocate"]["p50"].is_number();
            latencies.history().filter(is_known).map(|(second, _)| *second).collect()
        };
        latencies.update(&metrics, 100_000);
        assert!(known(&latencies).is_empty());
        metrics.store.observe("allocate", Duration::from_millis(3));
        latencies.update(&metrics, 103_500);
        assert_eq!(known(&latencies), [101, 102, 103]);
        // Updates may be far apart, and the clock may be set back.
        latencies.update(&metrics, 200_000);
        assert_eq!(known(&latencies), [101, 102, 103, 195, 196, 197, 198, 199, 200]);
        latencies.update(&metrics, 282_000);
        assert!(known(&latencies)[0] == 102 && latencies.last()["allocate"].is_object());
        latencies.update(&metrics, 50_000);
        assert_eq!(known(&latencies), [50]);
    }

    #[test]
    fn latencies_are_parsed_from_the_metrics() {
        let metrics = Metrics::default();
        metrics.store.observe("allocate", Duration::from_millis(3));
        let found = buckets(&metrics.render(None));
        let all = &found["allocate"];
        assert_eq!(all.last().unwrap().1, 1.0);
        let p50 = quantile(all, 0.5).unwrap();
        assert!((1.0..=6.4).contains(&p50), "{p50}");
    }
}
