//! What is wrong, in plain words.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::tally::Counts;
use fleet::{PoolStatus, Status, names::Pool};

/// A pool that is empty for less is only busy.
const EMPTY: Duration = Duration::from_secs(10);
/// So many calls that ended by themselves are more than an accident.
const SEVERAL: usize = 3;

/// Since when something has been wrong; kept whether anybody looks or not.
#[derive(Default)]
pub(super) struct Since {
    /// Pools that have no room.
    empty: BTreeMap<Pool, Instant>,
    out: Option<Instant>,
}

impl Since {
    /// Takes note of how the store stands; without a status it is out, and nothing is known
    /// of its pools.
    pub(super) fn note(&mut self, status: Option<&Status>, is_up: bool) {
        self.out = (!is_up).then(|| self.out.unwrap_or_else(Instant::now));
        let Some(status) = status else { return };
        let before = std::mem::take(&mut self.empty);
        let empty = status.pools.iter().filter(|pool| is_empty(pool));
        self.empty = empty
            .map(|pool| {
                let since = before.get(&pool.pool).copied().unwrap_or_else(Instant::now);
                (pool.pool.clone(), since)
            })
            .collect();
    }
}

/// All there is to warn of.
pub(super) fn warnings(
    since: &Since,
    lately: Counts,
    status: Option<&Status>,
    pods_refused: Option<String>,
) -> Vec<Value> {
    let mut found = Vec::new();
    let mut warn = |level: &str, text: String| found.push(json!({"level": level, "text": text}));
    if let Some(out) = since.out {
        let time = spoken(out.elapsed());
        warn("error", format!("the store has not answered for {time}: calls are refused"));
    }
    if let Some(reason) = pods_refused {
        warn("error", format!("the store refuses this router's pods: {reason}"));
    }
    let Some(status) = status else { return found };
    for pool in &status.pools {
        let Some(since) = since.empty.get(&pool.pool) else { continue };
        if since.elapsed() >= EMPTY {
            let (name, time) = (pool.pool.as_tier_value(), spoken(since.elapsed()));
            let why = if pool.assigned == 0 { "has had no pod" } else { "has been full" };
            warn("warning", format!("{name} {why} for {time}"));
        }
    }
    let quarantined: usize = status.pools.iter().map(|pool| pool.quarantined).sum();
    if quarantined > 0 {
        let pods = if quarantined == 1 { "pod is" } else { "pods are" };
        warn("warning", format!("{quarantined} {pods} in quarantine: calls fail there"));
    }
    let Counts { expired, unconfirmed, no_pods, .. } = lately;
    if expired >= SEVERAL {
        warn(
            "warning",
            format!(
                "{expired} calls ended by lease, not by release, in the last 10 min: do the agents call /release?"
            ),
        );
    }
    if unconfirmed >= SEVERAL {
        warn(
            "warning",
            format!("{unconfirmed} calls in the last 10 min never started their stream"),
        );
    }
    if no_pods > 0 {
        warn("warning", format!("{no_pods} calls found no pod in the last 10 min"));
    }
    found
}

/// Whether a pool that is wanted has no room for another call.
fn is_empty(pool: &PoolStatus) -> bool {
    pool.target > 0 && pool.free_slots == 0
}

fn spoken(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7_200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}
