//! All metrics with their names and labels. Label values never contain the name of a call or a
//! pod.

mod cluster;
mod gauges;
mod histograms;
mod labels;
mod outbound;
mod streams;

use spans::SpanMetrics;
use std::{
    sync::{Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use store::StoreMetrics;

use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

pub(crate) use self::labels::{Denied, Endpoint, Outcome, Refused, Request, SourcePool, Waited};
pub(crate) use self::streams::{StreamMetrics, StreamTotals};
use self::{
    gauges::{Process, StoreGauges},
    histograms::{call_times, short_times, waiting_times},
    labels::Build,
    outbound::OutboundMetrics,
};
use crate::capacity::CapacityGauges;
use fleet::{EndedCall, Refusal, RefusalReason, SkipReason, SkippedStep, Step, names::Pool};

type Histograms<Labels> = Family<Labels, Histogram, fn() -> Histogram>;

/// All metrics of the router.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    store_gauges: StoreGauges,
    pub(crate) capacity: CapacityGauges,
    pub(crate) outbound: OutboundMetrics,
    rendering: Mutex<()>,
    requests: Family<Request, Counter>,
    request_duration: Histograms<Request>,
    allocations: Family<Outcome, Counter>,
    releases: Family<Outcome, Counter>,
    refusals: Family<Refused, Counter>,
    leases_expired: Family<SourcePool, Counter>,
    unconfirmed: Family<SourcePool, Counter>,
    gateway_leases_expired: Family<SourcePool, Counter>,
    /// The same without labels: the alert needs a series that begins with 0.
    lost_gateway_calls: Counter,
    reconnected: Family<SourcePool, Counter>,
    wait: Histograms<Waited>,
    pub(crate) abandoned: Counter,
    pub(crate) lost: Counter,
    call_duration: Histograms<SourcePool>,
    denied: Family<Denied, Counter>,
    /// Connections closed or rejected by the connection limit.
    pub(crate) turned_away: Counter,
    pub(crate) open_streams: Gauge,
    /// Media streams.
    pub(crate) streams: StreamMetrics,
    limited: Family<Denied, Counter>,
    pub(crate) drains: Counter,
    pub(crate) drains_unfinished: Counter,
    pub(crate) zombies_recovered: Counter,
    pub(crate) panics_recovered: Counter,
    pub(crate) malformed_merchants: Counter,
    pub(crate) log_lines_dropped: Gauge,
    pub(crate) leader: Gauge,
    pub(crate) leader_epoch: Gauge<u64, AtomicU64>,
    last_comparison: Gauge,
    /// The store refuses this router's pods.
    pub(crate) pods_refused: Gauge,
    /// Pods drained because this replica's own watch shows them out of service.
    pub(crate) stale_pods_drained: Counter,
    pub(crate) cluster_ready_pods: Gauge,
    pub(crate) cluster: cluster::ClusterMetrics,
    certificate_ends: Gauge,
    pub(crate) store: StoreMetrics,
    pub(crate) spans: SpanMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            store_gauges: StoreGauges::default(),
            capacity: CapacityGauges::default(),
            outbound: OutboundMetrics::default(),
            rendering: Mutex::default(),
            requests: Family::default(),
            request_duration: Family::new_with_constructor(short_times),
            allocations: Family::default(),
            releases: Family::default(),
            refusals: Family::default(),
            leases_expired: Family::default(),
            unconfirmed: Family::default(),
            gateway_leases_expired: Family::default(),
            lost_gateway_calls: Counter::default(),
            reconnected: Family::default(),
            wait: Family::new_with_constructor(waiting_times),
            abandoned: Counter::default(),
            lost: Counter::default(),
            denied: Family::default(),
            turned_away: Counter::default(),
            open_streams: Gauge::default(),
            streams: StreamMetrics::default(),
            limited: Family::default(),
            call_duration: Family::new_with_constructor(call_times),
            drains: Counter::default(),
            drains_unfinished: Counter::default(),
            zombies_recovered: Counter::default(),
            panics_recovered: Counter::default(),
            malformed_merchants: Counter::default(),
            log_lines_dropped: Gauge::default(),
            leader: Gauge::default(),
            leader_epoch: Gauge::default(),
            certificate_ends: Gauge::default(),
            last_comparison: Gauge::default(),
            pods_refused: Gauge::default(),
            stale_pods_drained: Counter::default(),
            cluster_ready_pods: Gauge::default(),
            cluster: Default::default(),
            store: StoreMetrics::default(),
            spans: SpanMetrics::default(),
        };
        std::sync::LazyLock::force(&gauges::START_TIME);
        metrics.register();
        metrics.create_alert_series();
        metrics
    }
}

impl Metrics {
    /// Registers every metric; the encoder appends `_total` to counters.
    fn register(&mut self) {
        let mut registry = Registry::default();
        registry.register("http_requests", "HTTP responses sent", self.requests.clone());
        registry.register(
            "http_request_duration_seconds",
            "Duration of HTTP requests",
            self.request_duration.clone(),
        );
        registry.register_collector(Box::new(Process));
        let prefixed = registry.sub_registry_with_prefix("smart_router");
        let build: Family<Build, Gauge> = Family::default();
        build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION") }).set(1);
        prefixed.register("build_info", "Version of the program as a label; the value is 1", build);
        self.register_calls(prefixed);
        self.register_pods(prefixed);
        self.register_store(prefixed);
        self.register_streams(prefixed);
        self.register_process(prefixed);
        self.registry = registry;
    }

    fn register_calls(&self, prefixed: &mut Registry) {
        prefixed.register("allocations", "Allocate requests by result", self.allocations.clone());
        prefixed.register("releases", "Release requests by result", self.releases.clone());
        prefixed.register(
            "refusals",
            "Steps of the chain that had no pod for a refused call, by reason",
            self.refusals.clone(),
        );
        prefixed.register(
            "leases_expired",
            "Calls ended by the expiry of their lease",
            self.leases_expired.clone(),
        );
        prefixed.register(
            "unconfirmed",
            "Calls whose stream did not start within CONNECT_TIMEOUT",
            self.unconfirmed.clone(),
        );
        prefixed.register(
            "gateway_leases_expired",
            "Calls ended by the expiry of their media gateway's lease",
            self.gateway_leases_expired.clone(),
        );
        prefixed.register(
            "lost_gateway_calls",
            "Calls that ended because their media gateway sent no heartbeat",
            self.lost_gateway_calls.clone(),
        );
        prefixed.register(
            "rescued",
            "Calls that got another pod after their stream disconnected",
            self.reconnected.clone(),
        );
        prefixed.register(
            "lost",
            "Calls refused because RETRY_ON_DISCONNECT was exhausted",
            self.lost.clone(),
        );
        prefixed.register("wait_seconds", "Time that calls waited for a pod", self.wait.clone());
        prefixed.register(
            "abandoned",
            "Waiting calls that stopped polling",
            self.abandoned.clone(),
        );
        prefixed.register(
            "call_duration_seconds",
            "Duration of ended calls",
            self.call_duration.clone(),
        );
        prefixed.register(
            "limited",
            "Calls refused by a limit of their merchant, by limit",
            self.limited.clone(),
        );
        prefixed.register(
            "merchant_config_malformed",
            "Calls whose merchant document is malformed",
            self.malformed_merchants.clone(),
        );
    }

    fn register_pods(&self, prefixed: &mut Registry) {
        self.cluster.register(prefixed);
        prefixed.register("drains", "Drain requests", self.drains.clone());
        prefixed.register(
            "drains_unfinished",
            "Drains whose wait ended with calls left on the pod",
            self.drains_unfinished.clone(),
        );
        prefixed.register(
            "zombies_recovered",
            "Leases expired and indexes repaired by the audit",
            self.zombies_recovered.clone(),
        );
        prefixed.register(
            "leader_status",
            "1 while this replica does the leader's work",
            self.leader.clone(),
        );
        prefixed.register(
            "leader_epoch",
            "Fencing epoch of the leader's writes",
            self.leader_epoch.clone(),
        );
        prefixed.register(
            "last_comparison_timestamp_seconds",
            "Time at which the list of pods was read that the store was last reconciled with, in unix seconds; 0 for never",
            self.last_comparison.clone(),
        );
        prefixed.register(
            "pods_refused",
            "1 while the store refuses this replica's pods: another origin, or a newer list of pods",
            self.pods_refused.clone(),
        );
        prefixed.register(
            "stale_pods_drained",
            "Pods that this replica drained because its own watch shows them out of service",
            self.stale_pods_drained.clone(),
        );
        prefixed.register(
            "cluster_ready_pods",
            "Pods that this replica's own watch of the cluster shows in service",
            self.cluster_ready_pods.clone(),
        );
    }

    fn register_store(&self, prefixed: &mut Registry) {
        prefixed.register_collector(Box::new(self.store_gauges.clone()));
        prefixed.register_collector(Box::new(self.capacity.clone()));
        self.outbound.register(prefixed);
        prefixed.register(
            "store_duration_seconds",
            "Duration of store operations",
            self.store.duration.clone(),
        );
        prefixed.register(
            "store_errors",
            "Store operations that failed",
            self.store.errors.clone(),
        );
        prefixed.register(
            "kept_releases",
            "Deferred writes that wait for the store: releases, confirmations and compensating releases",
            self.store.deferred.clone(),
        );
        prefixed.register(
            "store_circuit_open",
            "1 while the circuit breaker of the store is open",
            self.store.circuit_open.clone(),
        );
    }

    fn register_streams(&self, prefixed: &mut Registry) {
        prefixed.register_collector(self.streams.collector());
        prefixed.register(
            "stream_refusals",
            "Media streams that were refused, by reason",
            self.streams.refused.clone(),
        );
        prefixed.register(
            "pod_connect_duration_seconds",
            "Time to connect a media stream to its pod",
            self.streams.connect_duration.clone(),
        );
        prefixed.register(
            "failover_gap_seconds",
            "Time that a stream which moved to another pod had none, by cause",
            self.streams.failovers.clone(),
        );
        prefixed.register(
            "failovers_failed",
            "Streams that ended because no other pod took over, by cause",
            self.streams.failed_failovers.clone(),
        );
        prefixed.register(
            "pod_conflicts",
            "Exclusive pods that were given to two calls: a gateway was cut off from the store",
            self.streams.conflicts.clone(),
        );
    }

    fn register_process(&self, prefixed: &mut Registry) {
        prefixed.register(
            "denied",
            "Requests refused for a missing or invalid token or signature, or by a limit",
            self.denied.clone(),
        );
        prefixed.register(
            "connections_turned_away",
            "Connections closed or rejected by the connection limit",
            self.turned_away.clone(),
        );
        prefixed.register(
            "open_streams",
            "Open event streams (/live and /events)",
            self.open_streams.clone(),
        );
        prefixed.register(
            "panics_recovered",
            "Panics caught in requests and background tasks",
            self.panics_recovered.clone(),
        );
        prefixed.register(
            "log_lines_dropped",
            "Log lines dropped because standard error was read too slowly",
            self.log_lines_dropped.clone(),
        );
        prefixed.register(
            "certificate_ends_timestamp_seconds",
            "Earliest end of validity in the TLS certificate chain, in unix seconds; 0 without TLS",
            self.certificate_ends.clone(),
        );
        prefixed.register("spans_sent", "Spans accepted by the collector", self.spans.sent.clone());
        prefixed.register("spans_dropped", "Spans dropped, by reason", self.spans.dropped.clone());
    }

    /// Creates the series that alerts use with the value 0: Prometheus computes no increase for
    /// a series that first appears above zero.
    fn create_alert_series(&self) {
        for reason in ["unauthorized", "forbidden", "forged", "rate_limited", "too_many_streams"] {
            drop(self.denied.get_or_create(&Denied { reason }));
        }
        let outcome = |result| Outcome { source_pool: String::new(), result };
        for result in ["no_pods", "queue_full", "time_over", "storage_error"] {
            drop(self.allocations.get_or_create(&outcome(result)));
        }
        self.streams.create_alert_series();
        drop(self.releases.get_or_create(&outcome("error")));
        drop(self.refusals.get_or_create(&Refused { tier: String::new(), reason: "unknown" }));
    }

    pub(crate) fn requested(&self, request: &Request, took: Duration) {
        self.requests.get_or_create(request).inc();
        self.request_duration.get_or_create(request).observe(took.as_secs_f64());
    }

    /// Records an allocate request; `pool` is the pool of its pod, if it got one.
    pub(crate) fn allocated(&self, pool: Option<&Pool>, result: &'static str) {
        let source_pool = pool.map(Pool::to_string).unwrap_or_default();
        if let (Some(_), "rescued") = (pool, result) {
            let source_pool = source_pool.clone();
            self.reconnected.get_or_create(&SourcePool { source_pool }).inc();
        }
        self.allocations.get_or_create(&Outcome { source_pool, result }).inc();
    }

    /// Records the end of a wait.
    pub(crate) fn waited(&self, result: &'static str, millis: u64) {
        self.wait.get_or_create(&Waited { result }).observe(millis as f64 / 1_000.0);
    }

    /// Records a waiting call that stopped polling.
    pub(crate) fn abandoned(&self, millis: u64) {
        self.abandoned.inc();
        self.waited("abandoned", millis);
    }

    /// Records a call refused by a limit of its merchant.
    fn limited(&self, reason: &'static str) {
        self.allocated(None, reason);
        self.limited.get_or_create(&Denied { reason }).inc();
    }

    /// Records the earliest end of validity of the certificate chain (unix seconds).
    pub(crate) fn certificate_ends(&self, at: Option<u64>) {
        self.certificate_ends.set(at.map_or(0, |at| at as i64));
    }

    /// Records a refused request.
    pub(crate) fn denied(&self, reason: &'static str) {
        self.denied.get_or_create(&Denied { reason }).inc();
    }

    /// Records a refused call. Only existing tiers appear as labels: a merchant's document can
    /// name anything.
    pub(crate) fn refused(&self, refusal: &Refusal) {
        match refusal.reason {
            RefusalReason::Limit(limit) => return self.limited(limit.as_str()),
            // Not decided yet, or already counted.
            RefusalReason::Unsettled | RefusalReason::Waiting { is_new: false, .. } => return,
            RefusalReason::CallEnded | RefusalReason::Replayed | RefusalReason::Waiting { .. } => {
                return self.allocated(None, refusal.reason.as_str());
            }
            RefusalReason::RetriesExhausted => drop(self.lost.inc()),
            RefusalReason::HoldExpired { waited } => self.waited("time_over", waited),
            RefusalReason::NoPods | RefusalReason::QueueFull => {}
        }
        self.allocated(None, refusal.reason.as_str());
        for SkippedStep { step, reason } in &refusal.tried {
            let tier = match step {
                _ if *reason == SkipReason::Unknown => String::new(),
                Step::Tier(tier) => tier.to_string(),
                Step::Merchant(_) => "merchant".into(),
            };
            self.refusals.get_or_create(&Refused { tier, reason: reason.as_str() }).inc();
        }
    }

    pub(crate) fn released(&self, pool: Option<&Pool>, result: &'static str) {
        let source_pool = pool.map(Pool::to_string).unwrap_or_default();
        self.releases.get_or_create(&Outcome { source_pool, result }).inc();
    }

    /// Records the duration of an ended call.
    pub(crate) fn call_lasted(&self, pool: &Pool, millis: u64) {
        let labels = SourcePool { source_pool: pool.to_string() };
        self.call_duration.get_or_create(&labels).observe(millis as f64 / 1_000.0);
    }

    /// Records a call whose stream did not start in time.
    pub(crate) fn unconfirmed(&self, ended: &EndedCall) {
        let labels = SourcePool { source_pool: ended.source_pool.to_string() };
        self.unconfirmed.get_or_create(&labels).inc();
    }

    /// Records a call whose gateway was lost with its stream.
    pub(crate) fn gateway_lost(&self, ended: &EndedCall) {
        let labels = SourcePool { source_pool: ended.source_pool.to_string() };
        self.gateway_leases_expired.get_or_create(&labels).inc();
        self.lost_gateway_calls.inc();
        self.call_lasted(&ended.source_pool, ended.lasted);
    }

    pub(crate) fn expired(&self, ended: &EndedCall) {
        let labels = SourcePool { source_pool: ended.source_pool.to_string() };
        self.leases_expired.get_or_create(&labels).inc();
        self.zombies_recovered.inc();
        self.call_lasted(&ended.source_pool, ended.lasted);
    }

    /// Records a reconciliation with a list of this age.
    pub(crate) fn reconciled(&self, age: Duration) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_comparison.set(now.saturating_sub(age).as_secs() as i64);
    }

    /// Renders all metrics as text. Without a status, the gauges of the store are omitted: old
    /// values would mislead.
    pub(crate) fn render(&self, status: Option<gauges::StatusRead>) -> String {
        let mut text = String::new();
        // A concurrent scrape must not replace the status.
        let _guard = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        *self.store_gauges.lock() = status;
        encode(&mut text, &self.registry).expect("a string takes every write");
        text
    }
}
