//! `GET /live`: the event stream of the dashboard. Pools, pods, calls and events are read from the
//! store, so that every replica shows the same; latencies, the number of media streams and the
//! state of the cluster connection are the replica's own. Latencies and start times of problems are
//! recorded even while no dashboard is open.

mod event_rates;
mod latencies;
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
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use futures_util::{StreamExt, future::ready, stream};
use serde_json::{Value, json};
use tokio::sync::{Notify, broadcast};

use self::{
    event_rates::EventRates,
    latencies::Latencies,
    warnings::{ProblemStarts, warnings},
};
use super::{events::HEARTBEAT_INTERVAL, snapshots::Snapshots};
use crate::http::{
    ApiError, Shared,
    middleware::{auth::StreamToken, stream_limit},
    openapi::{Endpoint, Group, schemas},
};
use crate::{lifecycle::Lifecycle, telemetry::metrics::Metrics};
use fleet::{
    EventId, LoggedEvent, Millis, OutboundStatus, PodStatus, Status, names::Pool, tiers::Tiers,
};
use store::{Outbound, Store, StoreError};

/// Refresh interval while dashboards are open. (Slow reads are further apart: see [`Snapshots`].)
const WATCHED_INTERVAL: Duration = Duration::from_millis(500);
/// Refresh interval while no dashboard is open.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// Events in one message.
const MAX_MESSAGE_EVENTS: usize = 200;
/// New events read by one refresh.
const MAX_NEW_EVENTS: usize = 5_000;
/// Events read at a time when the history is loaded.
const PAGE_SIZE: usize = 1_000;
/// Period that the charts show.
const CHART_SECONDS: u64 = 180;
/// Messages that a listener may lag behind.
const MAX_LAG: usize = 64;

/// A server-sent event: its name and its JSON.
#[derive(Debug, Clone)]
pub(super) struct LiveMessage {
    pub(super) name: &'static str,
    pub(super) text: Arc<str>,
}

/// Static properties of this router.
pub(crate) struct RouterInfo {
    pub(crate) name: String,
    pub(crate) store: &'static str,
    pub(crate) has_cluster: bool,
    pub(crate) has_events: bool,
    pub(crate) draining_ttl: Millis,
}

pub(crate) struct Live {
    store: Arc<dyn Store>,
    snapshots: Arc<Snapshots>,
    metrics: Arc<Metrics>,
    lifecycle: Arc<Lifecycle>,
    info: RouterInfo,
    started: Instant,
    messages: broadcast::Sender<LiveMessage>,
    /// State sent to new listeners.
    current: Mutex<Current>,
    listeners: AtomicUsize,
    connected: Notify,
}

#[derive(Default)]
struct Current {
    state: Option<Arc<str>>,
    pods: BTreeMap<String, Value>,
    events: VecDeque<Value>,
    /// Points of the charts (rates and latencies), about one per second.
    points: VecDeque<(Millis, Value)>,
}

impl Current {
    fn add_point(&mut self, at: Millis, point: Value) {
        match self.points.back() {
            // The clock was set back.
            Some((last, _)) if at < *last => self.points.clear(),
            Some((last, _)) if at < last + 1_000 => return,
            _ => {}
        }
        self.points.push_back((at, point));
        while self.points.front().is_some_and(|(first, _)| first + CHART_SECONDS * 1_000 < at) {
            self.points.pop_front();
        }
    }

    fn history(&self) -> LiveMessage {
        let points: Vec<&Value> = self.points.iter().map(|(_, point)| point).collect();
        live_message("history", &json!({"points": points}))
    }
}

/// An open stream; counted until dropped.
pub(super) struct Listener {
    live: Arc<Live>,
    pub(super) initial: Vec<LiveMessage>,
    pub(super) updates: broadcast::Receiver<LiveMessage>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.live.listeners.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Live {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        snapshots: Arc<Snapshots>,
        metrics: Arc<Metrics>,
        lifecycle: Arc<Lifecycle>,
        info: RouterInfo,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            snapshots,
            metrics,
            lifecycle,
            info,
            started: Instant::now(),
            messages: broadcast::Sender::new(MAX_LAG),
            current: Mutex::default(),
            listeners: AtomicUsize::new(0),
            connected: Notify::new(),
        })
    }

    pub(super) fn has_events(&self) -> bool {
        self.info.has_events
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to updates, with messages for the current state.
    pub(super) fn listen(self: &Arc<Self>) -> Listener {
        self.listeners.fetch_add(1, Ordering::Relaxed);
        self.connected.notify_one();
        // The lock excludes updates between the initial messages and the subscription.
        let current = self.current();
        let mut initial = vec![current.history()];
        if let Some(state) = &current.state {
            initial.push(LiveMessage { name: "state", text: state.clone() });
        }
        let pods: Vec<&Value> = current.pods.values().collect();
        initial.push(live_message("pods", &json!({"is_full": true, "pods": pods, "gone": []})));
        initial.push(live_message("events", &json!({"events": current.events, "skipped": 0})));
        Listener { live: self.clone(), initial, updates: self.messages.subscribe() }
    }

    /// Refreshes from the store, more often while dashboards are open.
    pub(crate) async fn run(self: Arc<Self>) {
        let (mut starts, mut feed) = (ProblemStarts::default(), EventFeed::default());
        let mut latencies = Latencies::default();
        loop {
            let started = Instant::now();
            let is_watched = self.listeners.load(Ordering::Relaxed) > 0;
            latencies.update(&self.metrics, self.store.now());
            let refreshed = if is_watched {
                self.refresh(&mut feed, &latencies).await
            } else {
                feed = EventFeed::default();
                *self.current() = Current::default();
                self.snapshots.status().await
            };
            if let Err(error) = &refreshed {
                tracing::debug!(%error, "the dashboard cannot be refreshed from the store");
            }
            let status = refreshed.ok();
            starts.update(status.as_deref(), status.is_some() && self.store.outage().is_none());
            if is_watched {
                let outbound = self.snapshots.outbound().await.ok();
                self.publish_state(&starts, &feed, latencies.last(), status, outbound);
            }
            let pause = if is_watched { WATCHED_INTERVAL } else { IDLE_INTERVAL };
            tokio::select! {
                () = self.lifecycle.stopping.cancelled() => return,
                () = self.connected.notified(), if !is_watched => {}
                () = tokio::time::sleep(pause.saturating_sub(started.elapsed())) => {}
            }
        }
    }

    /// Reads events, pods and pools, and publishes events and changed pods.
    async fn refresh(
        &self,
        feed: &mut EventFeed,
        latencies: &Latencies,
    ) -> Result<Arc<Status>, StoreError> {
        self.poll_events(feed, latencies).await?;
        let status = self.snapshots.status().await?;
        let tiers = self.snapshots.tiers().await?;
        let pods = self.snapshots.pods().await?;
        self.publish_pods(&pods, &tiers);
        Ok(status)
    }

    async fn poll_events(
        &self,
        feed: &mut EventFeed,
        latencies: &Latencies,
    ) -> Result<(), StoreError> {
        let Some(from) = feed.last_seen else { return self.load_history(feed, latencies).await };
        let mut fresh = self.store.events_after(from, MAX_NEW_EVENTS).await?;
        if fresh.len() == MAX_NEW_EVENTS {
            // Too many new events to show: skip to the latest ones.
            let mut last = self.store.events_before(None, MAX_MESSAGE_EVENTS).await?;
            last.reverse();
            let known = fresh.last().map(|logged| logged.id);
            fresh.extend(last.into_iter().filter(|logged| Some(logged.id) > known));
        }
        if let Some(last) = fresh.last() {
            feed.last_seen = Some(last.id);
        }
        feed.rates.record(&fresh, self.store.now());
        let skipped = fresh.len().saturating_sub(MAX_MESSAGE_EVENTS);
        self.publish_events(&fresh[skipped..], skipped);
        Ok(())
    }

    /// Reads past events, as far back as the charts and warnings need.
    async fn load_history(
        &self,
        feed: &mut EventFeed,
        latencies: &Latencies,
    ) -> Result<(), StoreError> {
        let now = self.store.now();
        let mut events = self.store.events_before(None, PAGE_SIZE).await?;
        let is_enough = |events: &[LoggedEvent]| {
            let is_old = |oldest: &LoggedEvent| oldest.at + event_rates::RETENTION < now;
            events.len() >= event_rates::MAX_EVENTS || events.last().is_none_or(is_old)
        };
        while !is_enough(&events) {
            let before = events.last().map(|logged| logged.id);
            let some = self.store.events_before(before, PAGE_SIZE).await?;
            if some.is_empty() {
                break;
            }
            events.extend(some);
        }
        events.reverse();
        feed.last_seen = Some(events.last().map(|logged| logged.id).unwrap_or_default());
        feed.rates.record(&events, now);
        let rates = feed.rates.history(CHART_SECONDS, now);
        let mut points: BTreeMap<Millis, Value> =
            rates.into_iter().map(|(at, rates)| (at, json!({"at": at, "rates": rates}))).collect();
        for (second, latency) in latencies.history() {
            let at = second * 1_000;
            points.entry(at).or_insert_with(|| json!({"at": at}))["latency_ms"] = latency.clone();
        }
        {
            let mut current = self.current();
            current.points = points.into_iter().collect();
            let _ = self.messages.send(current.history());
        }
        self.publish_events(&events[events.len().saturating_sub(MAX_MESSAGE_EVENTS)..], 0);
        Ok(())
    }

    fn publish_events(&self, events: &[LoggedEvent], skipped: usize) {
        if events.is_empty() {
            return;
        }
        let values: Vec<Value> =
            events.iter().map(|logged| json!(super::events::event_json(logged))).collect();
        let mut current = self.current();
        current.events.extend(values.iter().cloned());
        let extra = current.events.len().saturating_sub(MAX_MESSAGE_EVENTS);
        current.events.drain(..extra);
        // Sending fails only without listeners.
        let _ = self
            .messages
            .send(live_message("events", &json!({"events": values, "skipped": skipped})));
    }

    fn publish_pods(&self, pods: &[PodStatus], tiers: &Tiers) {
        let fresh: BTreeMap<String, Value> = pods
            .iter()
            .map(|pod| (pod.name.to_string(), json!(super::pods::pod_json(pod, tiers))))
            .collect();
        let mut current = self.current();
        let changed: Vec<&Value> = fresh
            .iter()
            .filter(|(name, pod)| current.pods.get(*name) != Some(pod))
            .map(|(_, pod)| pod)
            .collect();
        let gone: Vec<&String> =
            current.pods.keys().filter(|name| !fresh.contains_key(*name)).collect();
        if !changed.is_empty() || !gone.is_empty() {
            let text = json!({"is_full": false, "pods": changed, "gone": gone});
            let _ = self.messages.send(live_message("pods", &text));
        }
        current.pods = fresh;
    }

    fn publish_state(
        &self,
        starts: &ProblemStarts,
        feed: &EventFeed,
        latencies: Value,
        status: Option<Arc<Status>>,
        outbound: Option<Arc<Outbound>>,
    ) {
        let at = self.store.now();
        let outage = self.store.outage();
        let is_up = status.is_some() && outage.is_none();
        // Rates are computed from events.
        let rates = self.info.has_events.then(|| feed.rates.rates(at / 1_000));
        let mut state = json!({
            "at": at,
            "router": {
                "name": self.info.name,
                "version": env!("CARGO_PKG_VERSION"),
                "started_at": (at / 1_000).saturating_sub(self.started.elapsed().as_secs()),
                "draining_ttl": self.info.draining_ttl / 1_000,
            },
            "store": {"kind": self.info.store, "is_up": is_up, "reason": outage},
            "leader": {
                "is_leader": self.metrics.leader.get() == 1,
                "name": self.lifecycle.leader(),
                "epoch": self.metrics.leader_epoch.get(),
            },
            "cluster": {
                "is_used": self.info.has_cluster,
                "is_connected": !self.lifecycle.is_cluster_lost.load(Ordering::Relaxed),
            },
            "events": if self.info.has_events { "on" } else { "off" },
            "rates": rates,
            "latency_ms": latencies,
            // Media streams of this router; null without a gateway.
            "streams": self.metrics.streams.open_count(),
            "warnings": warnings(starts, feed.rates.recent(), status.as_deref(), &self.lifecycle),
        });
        if let Some(status) = &status {
            state["active_calls"] = json!(status.active_calls);
            state["waiting"] = json!(status.waiting);
            let outbound = outbound.unwrap_or_default();
            state["reservations"] = json!(outbound.status.reservations);
            let pool_json = |pool| pool_json(pool, &outbound.status);
            state["pools"] = status.pools.iter().map(pool_json).collect();
        }
        let message = live_message("state", &state);
        let mut current = self.current();
        current.state = Some(message.text.clone());
        current.add_point(at, json!({"at": at, "rates": rates, "latency_ms": latencies}));
        let _ = self.messages.send(message);
    }
}

/// Progress in the event log while dashboards are open.
#[derive(Default)]
struct EventFeed {
    last_seen: Option<EventId>,
    rates: EventRates,
}

fn pool_json(pool: &fleet::PoolStatus, outbound: &OutboundStatus) -> Value {
    let mut value = json!(super::status::pool_status_json(pool));
    let (name, is_merchant) = match &pool.pool {
        Pool::Tier(tier) => (tier.to_string(), false),
        Pool::Merchant(id) => (id.to_string(), true),
    };
    value["name"] = json!(name);
    value["is_merchant"] = json!(is_merchant);
    if let Some((_, dials)) = outbound.pools.iter().find(|(known, _)| *known == pool.pool) {
        value["dials"] = json!(dials.sums.dials);
        value["held"] = json!(dials.held);
        value["answer_rate"] = json!(dials.answer_rate());
    }
    value
}

pub(crate) fn endpoint() -> Endpoint {
    let example = "event: pods\ndata: {\"gone\":[],\"is_full\":true,\"pods\":[]}\n\n";
    Endpoint::new(Group::Router, "Stream the data of the dashboard")
        .description("Server-sent events `history`, `state`, `pods` and `events`; does not end.")
        .responds_untyped("text/event-stream", schemas::text(), example.into())
        .error(503, "The limit of open event streams is reached.")
}

pub(crate) async fn live(State(context): Shared, parts: Parts) -> Result<Response, ApiError> {
    let guard = stream_limit::open(&context, &parts)?;
    let token = StreamToken::new(&context, &parts.headers);
    let mut listener = context.live.listen();
    let stopping = context.lifecycle.stopping.clone();
    let initial = std::mem::take(&mut listener.initial);
    let messages =
        stream::unfold((listener, initial.into_iter()), move |(mut listener, mut initial)| {
            let stopping = stopping.clone();
            async move {
                let message = match initial.next() {
                    Some(message) => message,
                    None => tokio::select! {
                        // A listener that lags too far is closed; the client reconnects.
                        message = listener.updates.recv() => message.ok()?,
                        () = stopping.cancelled() => return None,
                    },
                };
                let message = SseEvent::default().event(message.name).data(&*message.text);
                Some((Ok::<_, Infallible>(message), (listener, initial)))
            }
        });
    let keep_alive = KeepAlive::new().interval(HEARTBEAT_INTERVAL);
    let messages = messages.take_while(move |_| {
        let _guard = &guard;
        ready(token.is_valid())
    });
    Ok(Sse::new(messages).keep_alive(keep_alive).into_response())
}

fn live_message(name: &'static str, value: &Value) -> LiveMessage {
    LiveMessage { name, text: value.to_string().into() }
}
