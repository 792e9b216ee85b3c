//! Every metric, its name and its labels. Label values never hold the name of
//! a call or a pod.

mod gauges;
mod labels;

use spans::SpanMetrics;
use std::{
    sync::{Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use store::StoreMetrics;

use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

pub(crate) use self::labels::{Denied, Endpoint, Outcome, Refused, Request, SourcePool, Waited};
use self::{
    gauges::{Process, StoreGauges},
    labels::Build,
};
use fleet::{EndedCall, Reason, Refusal, Tried, Why, merchant::Step, names::Pool};

type Histograms<Labels> = Family<Labels, Histogram, fn() -> Histogram>;

/// From 50 µs to 13 s: a store on loopback and a client that waits.
fn short_times() -> Histogram {
    Histogram::new(exponential_buckets(0.000_05, 2.0, 19))
}

/// From 100 ms to 14 min.
fn waiting_times() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 14))
}

/// From 1 s to 9 h.
fn call_times() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 16))
}

/// All metrics of the router.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    store_gauges: StoreGauges,
    rendering: Mutex<()>,
    requests: Family<Request, Counter>,
    request_duration: Histograms<Request>,
    allocations: Family<Outcome, Counter>,
    releases: Family<Outcome, Counter>,
    refusals: Family<Refused, Counter>,
    leases_expired: Family<SourcePool, Counter>,
    unconfirmed: Family<SourcePool, Counter>,
    rescued: Family<SourcePool, Counter>,
    wait: Histograms<Waited>,
    pub abandoned: Counter,
    pub lost: Counter,
    call_duration: Histograms<SourcePool>,
    denied: Family<Denied, Counter>,
    /// Connections that had to make room for others, or found none.
    pub turned_away: Counter,
    pub open_streams: Gauge,
    limited: Family<Denied, Counter>,
    pub drains: Counter,
    pub drains_unfinished: Counter,
    pub zombies_recovered: Counter,
    pub panics_recovered: Counter,
    pub malformed_merchants: Counter,
    pub log_lines_dropped: Gauge,
    pub leader: Gauge,
    pub leader_epoch: Gauge<u64, AtomicU64>,
    last_comparison: Gauge,
    /// The store refuses this router's pods.
    pub pods_refused: Gauge,
    /// Pods that the store handed out and that this replica's own view spoke against.
    pub stale_pods_drained: Counter,
    pub cluster_ready_pods: Gauge,
    certificate_ends: Gauge,
    pub store: StoreMetrics,
    pub spans: SpanMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            store_gauges: StoreGauges::default(),
            rendering: Mutex::default(),
            requests: Family::default(),
            request_duration: Family::new_with_constructor(short_times),
            allocations: Family::default(),
            releases: Family::default(),
            refusals: Family::default(),
            leases_expired: Family::default(),
            unconfirmed: Family::default(),
            rescued: Family::default(),
            wait: Family::new_with_constructor(waiting_times),
            abandoned: Counter::default(),
            lost: Counter::default(),
            denied: Family::default(),
            turned_away: Counter::default(),
            open_streams: Gauge::default(),
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
            store: StoreMetrics::default(),
            spans: SpanMetrics::default(),
        };
        std::sync::LazyLock::force(&gauges::BEGAN);
        metrics.register();
        metrics.begin_at_zero();
        metrics
    }
}

impl Metrics {
    /// Names every metric; counters get `_total` when they are written out.
    fn register(&mut self) {
        let mut registry = Registry::default();
        registry.register("http_requests", "Requests answered", self.requests.clone());
        registry.register(
            "http_request_duration_seconds",
            "Time to answer a request",
            self.request_duration.clone(),
        );
        registry.register_collector(Box::new(Process));
        let ours = registry.sub_registry_with_prefix("smart_router");
        let build: Family<Build, Gauge> = Family::default();
        build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION") }).set(1);
        ours.register("build_info", "1, with the version of the program", build);
        self.register_calls(ours);
        self.register_pods(ours);
        self.register_store(ours);
        self.register_process(ours);
        self.registry = registry;
    }

    fn register_calls(&self, ours: &mut Registry) {
        ours.register("allocations", "Calls that asked for a pod", self.allocations.clone());
        ours.register("releases", "Calls that gave a pod back", self.releases.clone());
        ours.register(
            "refusals",
            "Steps of a chain that had no pod for a refused call",
            self.refusals.clone(),
        );
        ours.register(
            "leases_expired",
            "Calls ended by their lease, not by a release",
            self.leases_expired.clone(),
        );
        ours.register(
            "unconfirmed",
            "Calls whose stream did not start in time",
            self.unconfirmed.clone(),
        );
        ours.register(
            "rescued",
            "Calls that were given another pod because their stream was gone",
            self.rescued.clone(),
        );
        ours.register("lost", "Calls whose stream was gone once too often", self.lost.clone());
        ours.register("wait_seconds", "How long calls waited for a pod", self.wait.clone());
        ours.register(
            "abandoned",
            "Calls that stopped asking while they waited",
            self.abandoned.clone(),
        );
        ours.register(
            "call_duration_seconds",
            "How long ended calls lasted",
            self.call_duration.clone(),
        );
        ours.register(
            "limited",
            "Calls refused by a limit of their merchant",
            self.limited.clone(),
        );
        ours.register(
            "merchant_config_malformed",
            "Calls whose merchant document could not be used",
            self.malformed_merchants.clone(),
        );
    }

    fn register_pods(&self, ours: &mut Registry) {
        ours.register("drains", "Drains asked for", self.drains.clone());
        ours.register(
            "drains_unfinished",
            "Drains whose wait was over while calls were left",
            self.drains_unfinished.clone(),
        );
        ours.register(
            "zombies_recovered",
            "Pods recovered from calls that never ended",
            self.zombies_recovered.clone(),
        );
        ours.register(
            "leader_status",
            "1 while this replica does the leader's work",
            self.leader.clone(),
        );
        ours.register(
            "leader_epoch",
            "Fencing epoch of the leader's writes",
            self.leader_epoch.clone(),
        );
        ours.register(
            "last_comparison_timestamp_seconds",
            "When the list of pods was read that this replica last compared the store with; 0 for never",
            self.last_comparison.clone(),
        );
        ours.register(
            "pods_refused",
            "1 while the store refuses this replica's pods: another origin, or a newer list of pods",
            self.pods_refused.clone(),
        );
        ours.register(
            "stale_pods_drained",
            "Pods that this replica drained because its own watch shows them out of service",
            self.stale_pods_drained.clone(),
        );
        ours.register(
            "cluster_ready_pods",
            "Pods that this replica's own watch of the cluster shows in service",
            self.cluster_ready_pods.clone(),
        );
    }

    fn register_store(&self, ours: &mut Registry) {
        ours.register_collector(Box::new(self.store_gauges.clone()));
        ours.register(
            "store_duration_seconds",
            "Time of one store operation",
            self.store.duration.clone(),
        );
        ours.register("store_errors", "Store operations that failed", self.store.errors.clone());
        ours.register(
            "kept_releases",
            "Releases and doubtful allocations that wait until the store is there",
            self.store.kept.clone(),
        );
        ours.register(
            "store_circuit_open",
            "1 while the store is not asked because it is out",
            self.store.circuit_open.clone(),
        );
    }

    fn register_process(&self, ours: &mut Registry) {
        ours.register(
            "denied",
            "Requests without a valid signature or token, or beyond a limit",
            self.denied.clone(),
        );
        ours.register(
            "connections_turned_away",
            "Connections that had to make room for others, or found none",
            self.turned_away.clone(),
        );
        ours.register(
            "open_streams",
            "Event streams that are open (/live and /events)",
            self.open_streams.clone(),
        );
        ours.register("panics_recovered", "Panics that were caught", self.panics_recovered.clone());
        ours.register(
            "log_lines_dropped",
            "Log lines dropped because nobody read them fast enough",
            self.log_lines_dropped.clone(),
        );
        ours.register(
            "certificate_ends_timestamp_seconds",
            "When the certificate of TLS ends, or one that vouches for it; 0 without",
            self.certificate_ends.clone(),
        );
        ours.register("spans_sent", "Spans that the collector took", self.spans.sent.clone());
        ours.register(
            "spans_dropped",
            "Spans that the collector did not take",
            self.spans.dropped.clone(),
        );
    }

    /// Makes the series that alerts count: Prometheus sees no rise in one that begins above
    /// zero.
    fn begin_at_zero(&self) {
        for reason in ["unauthorized", "forbidden", "forged", "rate_limited", "too_many_streams"] {
            drop(self.denied.get_or_create(&Denied { reason }));
        }
        let outcome = |result| Outcome { source_pool: String::new(), result };
        for result in ["no_pods", "queue_full", "time_over", "storage_error"] {
            drop(self.allocations.get_or_create(&outcome(result)));
        }
        drop(self.releases.get_or_create(&outcome("error")));
        drop(self.refusals.get_or_create(&Refused { tier: String::new(), reason: "unknown" }));
    }

    pub fn requested(&self, request: &Request, took: Duration) {
        self.requests.get_or_create(request).inc();
        self.request_duration.get_or_create(request).observe(took.as_secs_f64());
    }

    /// A call asked for a pod. `pool` is where it got one.
    pub fn allocated(&self, pool: Option<&Pool>, result: &'static str) {
        let source_pool = pool.map(Pool::to_string).unwrap_or_default();
        if let (Some(_), "rescued") = (pool, result) {
            let source_pool = source_pool.clone();
            self.rescued.get_or_create(&SourcePool { source_pool }).inc();
        }
        self.allocations.get_or_create(&Outcome { source_pool, result }).inc();
    }

    /// A call no longer waits.
    pub fn waited(&self, result: &'static str, millis: u64) {
        self.wait.get_or_create(&Waited { result }).observe(millis as f64 / 1_000.0);
    }

    /// A call stopped asking while it waited.
    pub fn abandoned(&self, millis: u64) {
        self.abandoned.inc();
        self.waited("abandoned", millis);
    }

    /// A merchant's limit kept a call out.
    fn limited(&self, reason: &'static str) {
        self.allocated(None, reason);
        self.limited.get_or_create(&Denied { reason }).inc();
    }

    /// When our certificate ends (s), as far as that is known.
    pub fn certificate_ends(&self, at: Option<u64>) {
        self.certificate_ends.set(at.map_or(0, |at| at as i64));
    }

    /// Somebody was not let in.
    pub fn denied(&self, reason: &'static str) {
        self.denied.get_or_create(&Denied { reason }).inc();
    }

    /// A call was refused. Only tiers have a name here: any other can stand in a
    /// merchant's document.
    pub fn refused(&self, refusal: &Refusal) {
        match refusal.why {
            Why::Limit(limit) => return self.limited(limit.as_str()),
            // It is not decided yet, or was counted before.
            Why::Unsettled | Why::Waiting { is_new: false, .. } => return,
            Why::Over | Why::Replayed | Why::Waiting { .. } => {
                return self.allocated(None, refusal.why.as_str());
            }
            Why::Spent => drop(self.lost.inc()),
            Why::TimeOver { waited } => self.waited("time_over", waited),
            Why::NoPods | Why::QueueFull => {}
        }
        self.allocated(None, refusal.why.as_str());
        for Tried { step, reason } in &refusal.tried {
            let tier = match step {
                _ if *reason == Reason::Unknown => String::new(),
                Step::Tier(tier) => tier.to_string(),
                Step::Merchant(_) => "merchant".into(),
            };
            self.refusals.get_or_create(&Refused { tier, reason: reason.as_str() }).inc();
        }
    }

    pub fn released(&self, pool: Option<&Pool>, result: &'static str) {
        let source_pool = pool.map(Pool::to_string).unwrap_or_default();
        self.releases.get_or_create(&Outcome { source_pool, result }).inc();
    }

    /// A call ended after so many milliseconds.
    pub fn call_lasted(&self, pool: &Pool, millis: u64) {
        let labels = SourcePool { source_pool: pool.to_string() };
        self.call_duration.get_or_create(&labels).observe(millis as f64 / 1_000.0);
    }

    /// A call whose stream never started.
    pub fn unconfirmed(&self, ended: &EndedCall) {
        let labels = SourcePool { source_pool: ended.source_pool.to_string() };
        self.unconfirmed.get_or_create(&labels).inc();
    }

    pub fn expired(&self, ended: &EndedCall) {
        let labels = SourcePool { source_pool: ended.source_pool.to_string() };
        self.leases_expired.get_or_create(&labels).inc();
        self.zombies_recovered.inc();
        self.call_lasted(&ended.source_pool, ended.lasted);
    }

    /// The store's pods were compared with a list that is so old.
    pub fn compared(&self, age: Duration) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_comparison.set(now.saturating_sub(age).as_secs() as i64);
    }

    /// All metrics as text. Without a status the gauges that the store knows
    /// are left out: an old value would be a lie.
    pub fn render(&self, status: Option<gauges::Read>) -> String {
        let mut text = String::new();
        // Another who asks at the same time must not take them away.
        let _alone = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        *self.store_gauges.lock() = status;
        encode(&mut text, &self.registry).expect("a string takes every write");
        text
    }
}
