//! What is wrong, in plain words.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::domain::{
    fleet::{Event, EventKind, Logged, PoolStatus, Status},
    names::Pool,
};

/// A pool that is empty for less is only busy.
const EMPTY: Duration = Duration::from_secs(10);
/// For so long what happened is worth a word (ms).
const RECENT: u64 = 600_000;
/// So many calls that ended by themselves are more than an accident.
const SEVERAL: usize = 3;

#[derive(Default)]
pub struct Warnings {
    /// Since when pools have had no room.
    empty: BTreeMap<Pool, Instant>,
    out_since: Option<Instant>,
    /// When calls ended by their lease, never started their stream, or were refused.
    expired: VecDeque<u64>,
    unconfirmed: VecDeque<u64>,
    refused: VecDeque<u64>,
    /// The time of the store when events were last looked at, and ours.
    latest: u64,
    looked: Option<Instant>,
}

/// Whether a call ended without anybody saying so.
pub fn is_expiry(event: &Event) -> bool {
    let cause = event.detail.split(' ').next().unwrap_or_default();
    matches!(cause, "lease" | "unconfirmed")
}

impl Warnings {
    pub fn note(&mut self, events: &[Logged]) {
        for Logged { id, event } in events {
            self.latest = self.latest.max(id.at);
            match event.kind {
                EventKind::Ended if event.detail.starts_with("lease ") => {
                    self.expired.push_back(id.at);
                }
                EventKind::Ended if event.detail.starts_with("unconfirmed ") => {
                    self.unconfirmed.push_back(id.at);
                }
                EventKind::Refused if event.detail.starts_with("no_pods") => {
                    self.refused.push_back(id.at);
                }
                _ => {}
            }
        }
        if !events.is_empty() {
            self.looked = Some(Instant::now());
        }
        self.forget();
    }

    /// Forgets what is no longer recent.
    fn forget(&mut self) {
        let since = self.looked.map_or(0, |looked| looked.elapsed().as_millis() as u64);
        let oldest = (self.latest + since).saturating_sub(RECENT);
        for times in [&mut self.expired, &mut self.unconfirmed, &mut self.refused] {
            let old = times.iter().take_while(|at| **at < oldest).count();
            times.drain(..old);
        }
    }

    /// All there is to warn of. Without a status the store is out.
    pub fn now(&mut self, status: Option<&Status>, is_up: bool) -> Vec<Value> {
        self.forget();
        let mut found = Vec::new();
        let mut warn =
            |level: &str, text: String| found.push(json!({"level": level, "text": text}));
        if is_up {
            self.out_since = None;
        } else {
            let since = *self.out_since.get_or_insert_with(Instant::now);
            warn(
                "error",
                format!(
                    "the store has not answered for {}: calls are refused",
                    spoken(since.elapsed())
                ),
            );
        }
        let Some(status) = status else { return found };
        self.empty.retain(|pool, _| status.pools.iter().any(|it| it.pool == *pool && is_empty(it)));
        for pool in status.pools.iter().filter(|pool| is_empty(pool)) {
            let since = *self.empty.entry(pool.pool.clone()).or_insert_with(Instant::now);
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
        let times = |times: &VecDeque<u64>| times.len();
        if times(&self.expired) >= SEVERAL {
            let count = times(&self.expired);
            warn(
                "warning",
                format!(
                    "{count} calls ended by lease, not by release, in the last 10 min: do the agents call /release?"
                ),
            );
        }
        if times(&self.unconfirmed) >= SEVERAL {
            let count = times(&self.unconfirmed);
            warn("warning", format!("{count} calls in the last 10 min never started their stream"));
        }
        if times(&self.refused) > 0 {
            let count = times(&self.refused);
            warn("warning", format!("{count} calls found no pod in the last 10 min"));
        }
        found
    }
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
