//! What the page shows, kept up to date while anybody looks: read from the store, so that
//! every replica shows the same.

mod warnings;

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    extract::State,
    http::HeaderMap,
    response::{
        IntoResponse, Response,
        sse::{Event as Message, KeepAlive, Sse},
    },
};
use futures_util::{StreamExt, future::ready, stream};
use serde_json::{Value, json};
use tokio::sync::{Notify, broadcast};

use self::warnings::Warnings;
use super::{
    Shared,
    auth::Pass,
    events::HEARTBEAT,
    openapi::{Endpoint, Group, schemas},
};
use crate::{
    domain::{
        Millis,
        fleet::{Event, EventId, EventKind, Logged, PodStatus, Status},
        names::Pool,
        tiers::Tiers,
    },
    lifecycle::Lifecycle,
    metrics::Metrics,
    store::{Store, StoreError},
};

/// How often the store is looked at, and for how long at most in proportion.
const LOOK: Duration = Duration::from_millis(500);
const SHARE: u32 = 10;
/// Events that one message carries, and that one look takes.
const IN_ONE_MESSAGE: usize = 200;
const IN_ONE_LOOK: usize = 5_000;
/// For so long rates and latencies are averaged.
const RECENT: Duration = Duration::from_secs(5);
/// Messages that a slow listener may be behind.
const BEHIND: usize = 64;

/// A message: its name and its JSON.
#[derive(Debug, Clone)]
pub struct Told {
    pub name: &'static str,
    pub text: Arc<str>,
}

/// What this router is, which does not change.
pub struct About {
    pub name: String,
    pub store: &'static str,
    pub has_cluster: bool,
    pub has_events: bool,
    pub draining_ttl: Millis,
}

pub struct Live {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    lifecycle: Arc<Lifecycle>,
    about: About,
    started_at: u64,
    told: broadcast::Sender<Told>,
    /// What a newcomer has to know.
    now: Mutex<Now>,
    listeners: AtomicUsize,
    arrived: Notify,
}

#[derive(Default)]
struct Now {
    state: Option<Arc<str>>,
    pods: BTreeMap<String, Value>,
    events: VecDeque<Value>,
}

/// Somebody looks, for as long as this is there.
pub struct Listener {
    live: Arc<Live>,
    pub first: Vec<Told>,
    pub next: broadcast::Receiver<Told>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.live.listeners.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Live {
    pub fn new(
        store: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        lifecycle: Arc<Lifecycle>,
        about: About,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            metrics,
            lifecycle,
            about,
            started_at: unix_millis() / 1_000,
            told: broadcast::Sender::new(BEHIND),
            now: Mutex::default(),
            listeners: AtomicUsize::new(0),
            arrived: Notify::new(),
        })
    }

    pub fn has_events(&self) -> bool {
        self.about.has_events
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to look: what is there now, and what comes.
    pub fn listen(self: &Arc<Self>) -> Listener {
        self.listeners.fetch_add(1, Ordering::Relaxed);
        self.arrived.notify_one();
        // Nothing is told in between: that needs the same lock.
        let now = self.now();
        let mut first = Vec::new();
        if let Some(state) = &now.state {
            first.push(Told { name: "state", text: state.clone() });
        }
        let pods: Vec<&Value> = now.pods.values().collect();
        first.push(told("pods", &json!({"is_full": true, "pods": pods, "gone": []})));
        first.push(told("events", &json!({"events": now.events, "skipped": 0})));
        Listener { live: self.clone(), first, next: self.told.subscribe() }
    }

    /// Looks at the store while anybody wants to know.
    pub async fn run(self: Arc<Self>) {
        let mut watch = Watch::default();
        loop {
            while self.listeners.load(Ordering::Relaxed) == 0 {
                watch = Watch::default();
                *self.now() = Now::default();
                tokio::select! {
                    () = self.lifecycle.stopping.cancelled() => return,
                    () = self.arrived.notified() => {}
                }
            }
            let began = Instant::now();
            let looked = self.look(&mut watch).await;
            if let Err(error) = &looked {
                tracing::debug!(%error, "the page cannot look at the store");
            }
            self.tell_state(&mut watch, looked.ok());
            let pause = LOOK.max(SHARE * began.elapsed()).saturating_sub(began.elapsed());
            tokio::select! {
                () = self.lifecycle.stopping.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Reads events, pods and pools, and tells what has changed.
    async fn look(&self, watch: &mut Watch) -> Result<Status, StoreError> {
        self.look_at_events(watch).await?;
        let status = self.store.status().await?;
        let tiers = self.store.tiers().await?;
        let pods = self.store.pods().await?;
        self.tell_pods(&pods, &tiers);
        Ok(status)
    }

    async fn look_at_events(&self, watch: &mut Watch) -> Result<(), StoreError> {
        let Some(from) = watch.seen else {
            // What happened before anybody looked: the last events, and no rates yet.
            let mut last = self.store.events_before(None, IN_ONE_MESSAGE).await?;
            last.reverse();
            watch.seen = Some(last.last().map(|logged| logged.id).unwrap_or_default());
            watch.warnings.note(&last);
            self.tell_events(&last, 0);
            return Ok(());
        };
        let mut fresh = self.store.events_after(from, IN_ONE_LOOK).await?;
        if fresh.len() == IN_ONE_LOOK {
            // More happens than anybody can follow: what is told is what happened last.
            let mut last = self.store.events_before(None, IN_ONE_MESSAGE).await?;
            last.reverse();
            let known = fresh.last().map(|logged| logged.id);
            fresh.extend(last.into_iter().filter(|logged| Some(logged.id) > known));
        }
        if let Some(last) = fresh.last() {
            watch.seen = Some(last.id);
        }
        watch.count(&fresh);
        watch.warnings.note(&fresh);
        let skipped = fresh.len().saturating_sub(IN_ONE_MESSAGE);
        self.tell_events(&fresh[skipped..], skipped);
        Ok(())
    }

    fn tell_events(&self, events: &[Logged], skipped: usize) {
        if events.is_empty() {
            return;
        }
        let shown: Vec<Value> =
            events.iter().map(|logged| json!(super::events::shown(logged))).collect();
        let mut now = self.now();
        now.events.extend(shown.iter().cloned());
        let extra = now.events.len().saturating_sub(IN_ONE_MESSAGE);
        now.events.drain(..extra);
        // (nobody may be there to hear it)
        let _ = self.told.send(told("events", &json!({"events": shown, "skipped": skipped})));
    }

    fn tell_pods(&self, pods: &[PodStatus], tiers: &Tiers) {
        let fresh: BTreeMap<String, Value> = pods
            .iter()
            .map(|pod| (pod.name.to_string(), json!(super::pods::described(pod, tiers))))
            .collect();
        let mut now = self.now();
        let changed: Vec<&Value> = fresh
            .iter()
            .filter(|(name, pod)| now.pods.get(*name) != Some(pod))
            .map(|(_, pod)| pod)
            .collect();
        let gone: Vec<&String> =
            now.pods.keys().filter(|name| !fresh.contains_key(*name)).collect();
        if !changed.is_empty() || !gone.is_empty() {
            let text = json!({"is_full": false, "pods": changed, "gone": gone});
            let _ = self.told.send(told("pods", &text));
        }
        now.pods = fresh;
    }

    fn tell_state(&self, watch: &mut Watch, status: Option<Status>) {
        let is_up = status.is_some() && self.store.is_up();
        let warnings = watch.warnings.now(status.as_ref(), is_up);
        let mut state = json!({
            "at": unix_millis(),
            "router": {
                "name": self.about.name,
                "version": env!("CARGO_PKG_VERSION"),
                "started_at": self.started_at,
                "draining_ttl": self.about.draining_ttl / 1_000,
            },
            "store": {"kind": self.about.store, "is_up": is_up},
            "leader": {
                "is_leader": self.metrics.leader.get() == 1,
                "epoch": self.metrics.leader_epoch.get(),
            },
            "cluster": {
                "is_used": self.about.has_cluster,
                "is_connected": !self.lifecycle.is_cluster_lost.load(Ordering::Relaxed),
            },
            "events": if self.about.has_events { "on" } else { "off" },
            // (they are counted from events)
            "rates": if self.about.has_events { watch.rates() } else { Value::Null },
            "latency_ms": watch.latencies(&self.metrics),
            "warnings": warnings,
        });
        if let Some(status) = &status {
            state["active_calls"] = json!(status.active_calls);
            state["waiting"] = json!(status.waiting);
            state["pools"] = status.pools.iter().map(shown_pool).collect();
        }
        let told = told("state", &state);
        let mut now = self.now();
        now.state = Some(told.text.clone());
        let _ = self.told.send(told);
    }
}

/// What is remembered from look to look.
#[derive(Default)]
struct Watch {
    seen: Option<EventId>,
    /// When so many of a kind happened.
    counts: VecDeque<(Instant, BTreeMap<&'static str, usize>)>,
    began: Option<Instant>,
    buckets: VecDeque<(Instant, Buckets)>,
    warnings: Warnings,
}

/// How many requests took how long at most, by operation.
type Buckets = BTreeMap<String, Vec<(f64, f64)>>;

impl Watch {
    fn count(&mut self, events: &[Logged]) {
        let now = Instant::now();
        self.began.get_or_insert(now);
        let mut counts = BTreeMap::new();
        for Logged { event, .. } in events {
            if let Some(name) = rate_of(event) {
                *counts.entry(name).or_default() += 1;
            }
        }
        self.counts.push_back((now, counts));
        while self.counts.front().is_some_and(|(at, _)| at.elapsed() > RECENT) {
            self.counts.pop_front();
        }
    }

    /// How much happened per second, lately.
    fn rates(&self) -> Value {
        let time = self.began.map_or(LOOK, |began| began.elapsed().clamp(LOOK, RECENT));
        let rate = |name: &str| {
            let sum: usize = self.counts.iter().filter_map(|(_, counts)| counts.get(name)).sum();
            (sum as f64 / time.as_secs_f64() * 10.0).round() / 10.0
        };
        json!({
            "allocated": rate("allocated"),
            "ended": rate("ended"),
            "refused": rate("refused"),
            "expired": rate("expired"),
        })
    }

    /// How long allocations and releases of this router took, lately.
    fn latencies(&mut self, metrics: &Metrics) -> Value {
        let now = Instant::now();
        self.buckets.push_back((now, buckets(&metrics.render(None))));
        while self.buckets.len() > 2
            && self.buckets.get(1).is_some_and(|(at, _)| at.elapsed() > RECENT)
        {
            self.buckets.pop_front();
        }
        let (Some((_, before)), Some((_, after))) = (self.buckets.front(), self.buckets.back())
        else {
            return Value::Null;
        };
        let shown = |operation: &str| {
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
        json!({"allocate": shown("allocate"), "release": shown("release")})
    }
}

fn rate_of(event: &Event) -> Option<&'static str> {
    Some(match event.kind {
        EventKind::Allocated | EventKind::Fetched => "allocated",
        EventKind::Refused => "refused",
        EventKind::Ended if warnings::is_expiry(event) => "expired",
        EventKind::Ended => "ended",
        _ => return None,
    })
}

/// The store's times out of the text of the metrics.
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

/// The time (ms) within which this part of all requests was done.
fn quantile(buckets: &[(f64, f64)], part: f64) -> Option<f64> {
    let all = buckets.last()?.1;
    if all <= 0.0 {
        return None;
    }
    let wanted = all * part;
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

fn shown_pool(pool: &crate::domain::fleet::PoolStatus) -> Value {
    let mut shown = json!(super::status::describe(pool));
    let (name, is_merchant) = match &pool.pool {
        Pool::Tier(tier) => (tier.to_string(), false),
        Pool::Merchant(id) => (id.to_string(), true),
    };
    shown["name"] = json!(name);
    shown["is_merchant"] = json!(is_merchant);
    shown
}

pub fn described() -> Endpoint {
    let example = "event: pods\ndata: {\"gone\":[],\"is_full\":true,\"pods\":[]}\n\n";
    Endpoint::new(Group::Router, "What the page shows, as it changes")
        .about("Messages `state`, `pods` and `events`, for as long as somebody listens.")
        .gives_some("text/event-stream", schemas::text(), example.into())
}

/// `GET /live`: what the page shows, as it changes.
pub async fn live(State(context): Shared, headers: HeaderMap) -> Response {
    let pass = Pass::new(&context, &headers);
    let listener = context.live.listen();
    let stopping = context.lifecycle.stopping.clone();
    let first: Vec<Told> = listener.first.clone();
    let messages =
        stream::unfold((listener, first.into_iter()), move |(mut listener, mut first)| {
            let stopping = stopping.clone();
            async move {
                let told = match first.next() {
                    Some(told) => told,
                    None => tokio::select! {
                        // Who was too slow begins again with what is there then.
                        told = listener.next.recv() => told.ok()?,
                        () = stopping.cancelled() => return None,
                    },
                };
                let message = Message::default().event(told.name).data(&*told.text);
                Some((Ok::<_, Infallible>(message), (listener, first)))
            }
        });
    let keep_alive = KeepAlive::new().interval(HEARTBEAT);
    let messages = messages.take_while(move |_| ready(pass.holds()));
    Sse::new(messages).keep_alive(keep_alive).into_response()
}

fn told(name: &'static str, value: &Value) -> Told {
    Told { name, text: value.to_string().into() }
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
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
    fn times_are_read_from_the_metrics() {
        let metrics = Metrics::default();
        metrics.store.observe("allocate", Duration::from_millis(3));
        let found = buckets(&metrics.render(None));
        let all = &found["allocate"];
        assert_eq!(all.last().unwrap().1, 1.0);
        let p50 = quantile(all, 0.5).unwrap();
        assert!((1.0..=6.4).contains(&p50), "{p50}");
    }
}
