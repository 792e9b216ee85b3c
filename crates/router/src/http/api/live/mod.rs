//! What the page shows, kept up to date while anybody looks: pools, pods, calls and events are
//! read from the store, so that every replica shows the same; latencies and the connection to
//! the cluster are the replica's own. Since when something has been wrong is known before that.

mod latencies;
mod tally;
mod warnings;

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    extract::State,
    http::request::Parts,
    response::{
        IntoResponse, Response,
        sse::{Event as Message, KeepAlive, Sse},
    },
};
use futures_util::{StreamExt, future::ready, stream};
use serde_json::{Value, json};
use tokio::sync::{Notify, broadcast};

use self::{
    latencies::Latencies,
    tally::Tally,
    warnings::{Since, warnings},
};
use super::{events::HEARTBEAT, snapshots::Snapshots};
use crate::http::{
    ApiError, Shared,
    middleware::{auth::Pass, stream_limit},
    openapi::{Endpoint, Group, schemas},
};
use crate::{lifecycle::Lifecycle, telemetry::metrics::Metrics};
use fleet::{EventId, Logged, Millis, PodStatus, Status, names::Pool, tiers::Tiers};
use store::{Store, StoreError};

/// How often the store is looked at. (Readings that take long are further apart: see
/// [`Snapshots`].)
const LOOK: Duration = Duration::from_millis(500);
/// Events that one message carries, and that one look takes.
const IN_ONE_MESSAGE: usize = 200;
const IN_ONE_LOOK: usize = 5_000;
/// How often the pools are looked at while nobody else does.
const GLANCE: Duration = Duration::from_secs(5);
/// Events that are read in one step on the way back.
const STEP: usize = 1_000;
/// The charts show so many seconds.
const CHARTED: u64 = 180;
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
    snapshots: Arc<Snapshots>,
    metrics: Arc<Metrics>,
    lifecycle: Arc<Lifecycle>,
    about: About,
    started: Instant,
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
    /// What the charts show: rates and latencies, about once a second.
    points: VecDeque<(Millis, Value)>,
}

impl Now {
    fn add_point(&mut self, at: Millis, point: Value) {
        match self.points.back() {
            // The clock was set back.
            Some((last, _)) if at < *last => self.points.clear(),
            Some((last, _)) if at < last + 1_000 => return,
            _ => {}
        }
        self.points.push_back((at, point));
        while self.points.front().is_some_and(|(first, _)| first + CHARTED * 1_000 < at) {
            self.points.pop_front();
        }
    }

    fn history(&self) -> Told {
        let points: Vec<&Value> = self.points.iter().map(|(_, point)| point).collect();
        told("history", &json!({"points": points}))
    }
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
        snapshots: Arc<Snapshots>,
        metrics: Arc<Metrics>,
        lifecycle: Arc<Lifecycle>,
        about: About,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            snapshots,
            metrics,
            lifecycle,
            about,
            started: Instant::now(),
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
        let mut first = vec![now.history()];
        if let Some(state) = &now.state {
            first.push(Told { name: "state", text: state.clone() });
        }
        let pods: Vec<&Value> = now.pods.values().collect();
        first.push(told("pods", &json!({"is_full": true, "pods": pods, "gone": []})));
        first.push(told("events", &json!({"events": now.events, "skipped": 0})));
        Listener { live: self.clone(), first, next: self.told.subscribe() }
    }

    /// Looks at the store, closely while anybody wants to know.
    pub async fn run(self: Arc<Self>) {
        let (mut since, mut watch) = (Since::default(), Watch::default());
        let mut latencies = Latencies::default();
        loop {
            let began = Instant::now();
            let is_watched = self.listeners.load(Ordering::Relaxed) > 0;
            latencies.look(&self.metrics, self.store.now());
            let looked = if is_watched {
                self.look(&mut watch, &latencies).await
            } else {
                watch = Watch::default();
                *self.now() = Now::default();
                self.snapshots.status().await
            };
            if let Err(error) = &looked {
                tracing::debug!(%error, "the page cannot look at the store");
            }
            let status = looked.ok();
            since.note(status.as_deref(), status.is_some() && self.store.outage().is_none());
            if is_watched {
                self.tell_state(&since, &watch, latencies.last(), status);
            }
            let pause = if is_watched { LOOK } else { GLANCE };
            tokio::select! {
                () = self.lifecycle.stopping.cancelled() => return,
                () = self.arrived.notified(), if !is_watched => {}
                () = tokio::time::sleep(pause.saturating_sub(began.elapsed())) => {}
            }
        }
    }

    /// Reads events, pods and pools, and tells what has changed.
    async fn look(
        &self,
        watch: &mut Watch,
        latencies: &Latencies,
    ) -> Result<Arc<Status>, StoreError> {
        self.look_at_events(watch, latencies).await?;
        let status = self.snapshots.status().await?;
        let tiers = self.snapshots.tiers().await?;
        let pods = self.snapshots.pods().await?;
        self.tell_pods(&pods, &tiers);
        Ok(status)
    }

    async fn look_at_events(
        &self,
        watch: &mut Watch,
        latencies: &Latencies,
    ) -> Result<(), StoreError> {
        let Some(from) = watch.seen else { return self.look_back(watch, latencies).await };
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
        watch.tally.note(&fresh, self.store.now());
        let skipped = fresh.len().saturating_sub(IN_ONE_MESSAGE);
        self.tell_events(&fresh[skipped..], skipped);
        Ok(())
    }

    /// Reads what happened before anybody looked, as far back as it matters.
    async fn look_back(&self, watch: &mut Watch, latencies: &Latencies) -> Result<(), StoreError> {
        let now = self.store.now();
        let mut events = self.store.events_before(None, STEP).await?;
        let is_enough = |events: &[Logged]| {
            let is_old = |oldest: &Logged| oldest.at + tally::RECENT < now;
            events.len() >= tally::MOST || events.last().is_none_or(is_old)
        };
        while !is_enough(&events) {
            let before = events.last().map(|logged| logged.id);
            let some = self.store.events_before(before, STEP).await?;
            if some.is_empty() {
                break;
            }
            events.extend(some);
        }
        events.reverse();
        watch.seen = Some(events.last().map(|logged| logged.id).unwrap_or_default());
        watch.tally.note(&events, now);
        let rates = watch.tally.history(CHARTED, now);
        let mut points: BTreeMap<Millis, Value> =
            rates.into_iter().map(|(at, rates)| (at, json!({"at": at, "rates": rates}))).collect();
        for (second, latency) in latencies.history() {
            let at = second * 1_000;
            points.entry(at).or_insert_with(|| json!({"at": at}))["latency_ms"] = latency.clone();
        }
        {
            let mut now = self.now();
            now.points = points.into_iter().collect();
            let _ = self.told.send(now.history());
        }
        self.tell_events(&events[events.len().saturating_sub(IN_ONE_MESSAGE)..], 0);
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

    fn tell_state(
        &self,
        since: &Since,
        watch: &Watch,
        latencies: Value,
        status: Option<Arc<Status>>,
    ) {
        let at = self.store.now();
        let outage = self.store.outage();
        let is_up = status.is_some() && outage.is_none();
        // (they are counted from events)
        let rates = self.about.has_events.then(|| watch.tally.rates(at / 1_000));
        let mut state = json!({
            "at": at,
            "router": {
                "name": self.about.name,
                "version": env!("CARGO_PKG_VERSION"),
                "started_at": (at / 1_000).saturating_sub(self.started.elapsed().as_secs()),
                "draining_ttl": self.about.draining_ttl / 1_000,
            },
            "store": {"kind": self.about.store, "is_up": is_up, "reason": outage},
            "leader": {
                "is_leader": self.metrics.leader.get() == 1,
                "name": self.lifecycle.leader(),
                "epoch": self.metrics.leader_epoch.get(),
            },
            "cluster": {
                "is_used": self.about.has_cluster,
                "is_connected": !self.lifecycle.is_cluster_lost.load(Ordering::Relaxed),
            },
            "events": if self.about.has_events { "on" } else { "off" },
            "rates": rates,
            "latency_ms": latencies,
            "warnings": warnings(since, watch.tally.lately(), status.as_deref(), self.lifecycle.pods_refused()),
        });
        if let Some(status) = &status {
            state["active_calls"] = json!(status.active_calls);
            state["waiting"] = json!(status.waiting);
            state["pools"] = status.pools.iter().map(shown_pool).collect();
        }
        let told = told("state", &state);
        let mut now = self.now();
        now.state = Some(told.text.clone());
        now.add_point(at, json!({"at": at, "rates": rates, "latency_ms": latencies}));
        let _ = self.told.send(told);
    }
}

/// What is remembered from look to look, while anybody looks.
#[derive(Default)]
struct Watch {
    seen: Option<EventId>,
    tally: Tally,
}

fn shown_pool(pool: &fleet::PoolStatus) -> Value {
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
        .about("Messages `history`, `state`, `pods` and `events`, for as long as somebody listens.")
        .gives_some("text/event-stream", schemas::text(), example.into())
        .fails(503, "There are as many streams as there may be.")
}

/// `GET /live`: what the page shows, as it changes.
pub async fn live(State(context): Shared, parts: Parts) -> Result<Response, ApiError> {
    let open = stream_limit::open(&context, &parts)?;
    let pass = Pass::new(&context, &parts.headers);
    let mut listener = context.live.listen();
    let stopping = context.lifecycle.stopping.clone();
    let first = std::mem::take(&mut listener.first);
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
    let messages = messages.take_while(move |_| {
        let _counts = &open;
        ready(pass.holds())
    });
    Ok(Sse::new(messages).keep_alive(keep_alive).into_response())
}

fn told(name: &'static str, value: &Value) -> Told {
    Told { name, text: value.to_string().into() }
}
