//! Warnings of the dashboard.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::event_rates::EventCounts;
use crate::lifecycle::Lifecycle;
use fleet::{PoolStatus, Status, names::Pool};

/// Time for which a pool may be full without a warning.
const FULL_THRESHOLD: Duration = Duration::from_secs(10);
/// Number of expired, unconfirmed or lost calls from which a warning is shown.
const MIN_LOST_CALLS: usize = 3;

/// Start times of ongoing problems, recorded even while no dashboard is open.
#[derive(Default)]
pub(super) struct ProblemStarts {
    full_pools: BTreeMap<Pool, Instant>,
    outage: Option<Instant>,
}

impl ProblemStarts {
    /// Updates the start times; `status` is `None` while the store is unavailable.
    pub(super) fn update(&mut self, status: Option<&Status>, is_up: bool) {
        self.outage = (!is_up).then(|| self.outage.unwrap_or_else(Instant::now));
        let Some(status) = status else { return };
        let before = std::mem::take(&mut self.full_pools);
        let full = status.pools.iter().filter(|pool| is_full(pool));
        self.full_pools = full
            .map(|pool| {
                let since = before.get(&pool.pool).copied().unwrap_or_else(Instant::now);
                (pool.pool.clone(), since)
            })
            .collect();
    }
}

/// Returns the current warnings.
pub(super) fn warnings(
    starts: &ProblemStarts,
    recent: EventCounts,
    status: Option<&Status>,
    lifecycle: &Lifecycle,
) -> Vec<Value> {
    let mut found = Vec::new();
    let mut warn = |level: &str, text: String| found.push(json!({"level": level, "text": text}));
    if let Some(since) = starts.outage {
        let time = format_duration(since.elapsed());
        warn("error", format!("the store has been unavailable for {time}; calls are refused"));
    }
    if let Some(reason) = lifecycle.pods_refused() {
        warn("error", format!("the store refuses this router's pods: {reason}"));
    }
    for problem in lifecycle.problems() {
        warn("warning", problem);
    }
    let Some(status) = status else { return found };
    for pool in &status.pools {
        let Some(since) = starts.full_pools.get(&pool.pool) else { continue };
        if since.elapsed() >= FULL_THRESHOLD {
            let (name, time) = (pool.pool.as_tier_value(), format_duration(since.elapsed()));
            let problem = if pool.assigned == 0 { "has had no pods" } else { "has been full" };
            warn("warning", format!("{name} {problem} for {time}"));
        }
    }
    let quarantined: usize = status.pools.iter().map(|pool| pool.quarantined).sum();
    if quarantined > 0 {
        let pods = if quarantined == 1 { "pod is" } else { "pods are" };
        warn("warning", format!("{quarantined} {pods} in quarantine after failed calls"));
    }
    let EventCounts { expired, unconfirmed, pod_lost, no_pods, .. } = recent;
    if expired >= MIN_LOST_CALLS {
        warn(
            "warning",
            format!(
                "{expired} calls ended by lease expiry, not by release, in the last 10 min; check \
                 that agents call /release"
            ),
        );
    }
    if unconfirmed >= MIN_LOST_CALLS {
        warn(
            "warning",
            format!("the streams of {unconfirmed} calls never started in the last 10 min"),
        );
    }
    if pod_lost >= MIN_LOST_CALLS {
        warn(
            "warning",
            format!(
                "the pods of {pod_lost} calls could not be connected or were lost in the last 10 \
                 min"
            ),
        );
    }
    if no_pods > 0 {
        warn("warning", format!("{no_pods} calls found no pod in the last 10 min"));
    }
    found
}

/// Whether a pool with a target has no free slot.
fn is_full(pool: &PoolStatus) -> bool {
    pool.target > 0 && pool.free_slots == 0
}

fn format_duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7_200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}
