//! Wires the parts together at start-up and stops them in order.

mod servers;
mod simulated;
mod store;

use std::{
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use tokio::{sync::Notify, task::JoinHandle, time::timeout};
use tokio_util::task::TaskTracker;

use self::{servers::Servers, simulated::SimulatedAgents};
use crate::{
    auth::Access,
    capacity::Capacity,
    client_limits::RateLimiter,
    config::{Config, PodSource, ProcessRole, StoreConfig},
    control::{Control, Source},
    http::{
        self, Context, StreamUrls,
        api::{
            live::{Live, RouterInfo},
            snapshots::Snapshots,
        },
        middleware::stream_limit::StreamLimiter,
    },
    lifecycle::Lifecycle,
    media::{AtConnect, Gateway, GatewayParts},
    open_files::{self, Limits},
    telemetry::{
        metrics::Metrics,
        traces::{self, Exporter},
    },
    tls::Tls,
};
use ::store::{Functions, Store, observing};
use fleet::PodOrigin;
use spans::Tracer;
use telephony::WsUrls;

/// Time between reporting not ready and closing the listeners, so that load balancers can
/// take this replica out first.
const READINESS_GRACE: Duration = Duration::from_millis(500);
/// How long start-up waits for Redis, and for the cluster, before it continues without.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long media streams may take to close after their drain.
const STREAM_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// A running router or media process.
pub struct Running {
    pub api: SocketAddr,
    /// The address of everything but the webhooks.
    pub(crate) admin: SocketAddr,
    pub(crate) metrics_address: SocketAddr,
    pub(crate) context: Arc<Context>,
    servers: Servers,
    simulated: Option<SimulatedAgents>,
    gateway: Option<Arc<Gateway>>,
    upkeep: Option<JoinHandle<()>>,
    loops: TaskTracker,
    exporter: Option<Exporter>,
}

/// Starts the role of the configuration; it serves requests when this returns.
pub async fn start(config: Config) -> anyhow::Result<Running> {
    let functions = Functions::with_event_limit(config.events);
    start_with(config, functions).await
}

/// Starts with other Redis functions; tests use broken ones.
pub async fn start_with(config: Config, functions: Functions) -> anyhow::Result<Running> {
    let listener = servers::bind("HTTP_PORT", config.http.api)?;
    let api = listener.local_addr()?;
    let metrics = Arc::new(Metrics::default());
    let reconcile_now = Arc::new(Notify::new());
    let source = store::pod_source(&config).await?;
    let identified = store::identify(&config, &source).await?;
    let origin = identified.clone().or_else(|| config.pods.origin());
    let opened = store::open_store(&config, origin, &metrics, &reconcile_now, functions).await?;
    store::log_warnings(&config, opened.as_ref()).await;
    let (parts, exporter) = Parts::new(&config, opened, metrics, reconcile_now)?;
    let simulated = SimulatedAgents::start(&config, &parts).await?;
    let agents_address = simulated.as_ref().map(|simulated| simulated.address);
    let gateway = gateway(&config, &parts, api.port(), agents_address)?;
    if let Some(gateway) = &gateway {
        // Without the store, the first call reads the key.
        let _ = timeout(STARTUP_TIMEOUT, gateway.load_key()).await;
    }
    let context = Arc::new(context(&config, &parts, gateway.as_ref()));
    let control = Arc::new(control(&config, &parts, identified));
    if matches!(source, Source::Feed(_)) {
        // Without a Lease every replica does the leader's work.
        parts.metrics.leader.set(1);
    }
    let is_claimed = store::claim_pods(&control, &source).await?;
    if let (StoreConfig::Journal(_), Some(time)) = (&config.store, config.ttls.pending()) {
        // Streams may have started, and waiting calls polled, while the router was down.
        control.store.extend_pending(time).await?;
    }
    let servers = Servers::start(&config, &context, &parts, listener, simulated.as_ref())?;
    let loops = control.start(source, is_claimed);
    let upkeep = gateway.as_ref().map(|gateway| tokio::spawn(gateway.clone().run()));
    if config.role == ProcessRole::Router {
        loops.spawn(observing(context.live.clone().run()));
    }
    let (admin, metrics_address) = (servers.admin, servers.metrics);
    match config.role {
        ProcessRole::Router => tracing::info!(%api, %admin, metrics = %metrics_address, "serving"),
        ProcessRole::Media => {
            tracing::info!(media = %api, metrics = %metrics_address, "serving media streams only");
        }
    }
    Ok(Running {
        api,
        admin,
        metrics_address,
        context,
        servers,
        simulated,
        gateway,
        upkeep,
        loops,
        exporter,
    })
}

/// Shared by the HTTP API and the background work.
struct Parts {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    capacity: Arc<Capacity>,
    dial_queues: Arc<http::DialQueues>,
    reconcile_now: Arc<Notify>,
    access: Arc<Access>,
    tls: Option<Arc<Tls>>,
    lifecycle: Arc<Lifecycle>,
    rate_limiter: Arc<RateLimiter>,
    tracer: Option<Arc<Tracer>>,
    limits: Limits,
}

impl Parts {
    /// Also returns the exporter of traces, if there is one.
    fn new(
        config: &Config,
        store: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        reconcile_now: Arc<Notify>,
    ) -> anyhow::Result<(Self, Option<Exporter>)> {
        let access = open_access(config)?;
        let tls = config.tls.as_ref().map(Tls::new).transpose();
        let tls = tls.map_err(|expected| anyhow::anyhow!("TLS_CERT_FILE: expected {expected}"))?;
        let (tracer, exporter) = config
            .traces
            .clone()
            .map(|traces| traces::start(traces, metrics.spans.clone()))
            .unzip();
        let rate_limiter = RateLimiter::new(config.rate_limit, config.trusted_proxies.clone());
        open_files::raise_limit();
        let max_streams = config.media.as_ref().and_then(|media| media.max_streams);
        let parts = Self {
            store,
            capacity: Arc::new(Capacity::new(metrics.capacity.clone(), config.events > 0)),
            dial_queues: Arc::default(),
            metrics,
            reconcile_now,
            access,
            tls: tls.map(Arc::new),
            lifecycle: Arc::default(),
            rate_limiter: Arc::new(rate_limiter),
            tracer,
            limits: open_files::limits(config.http.max_connections, max_streams),
        };
        Ok((parts, exporter))
    }
}

fn open_access(config: &Config) -> anyhow::Result<Arc<Access>> {
    let access = Access::new(&config.access)
        .map_err(|bad| anyhow::anyhow!("{}={}: expected {}", bad.name, bad.shown, bad.expected))?;
    if config.role == ProcessRole::Router {
        access.warn_if_unauthenticated(&config.providers);
    }
    Ok(Arc::new(access))
}

/// Builds the state that the endpoints share.
fn context(config: &Config, parts: &Parts, gateway: Option<&Arc<Gateway>>) -> Context {
    let Parts { store, metrics, reconcile_now, access, tls, lifecycle, .. } = parts;
    let path = config.ws_path.clone();
    let info = RouterInfo {
        name: config.identity.clone(),
        store: if matches!(config.store, StoreConfig::Redis { .. }) { "redis" } else { "embedded" },
        has_cluster: matches!(config.pods, PodSource::Cluster(_)),
        has_events: config.events > 0,
        draining_ttl: config.ttls.draining,
    };
    let snapshots = Snapshots::new(store.clone());
    let (shared, counted) = (snapshots.clone(), metrics.clone());
    Context {
        live: Live::new(store.clone(), shared, counted, lifecycle.clone(), info),
        snapshots,
        store: store.clone(),
        metrics: metrics.clone(),
        urls: match gateway {
            Some(gateway) => StreamUrls::Gateway { gateway: gateway.clone(), path },
            None => {
                let base = config.agent_base_url.clone().unwrap_or_default();
                StreamUrls::Direct(WsUrls { base, path })
            }
        },
        access: access.clone(),
        scheme: if tls.is_some() { "https" } else { "http" },
        public_url: config.public_url.clone().unwrap_or_default(),
        stream_status: config.stream_status,
        busy_action: config.busy_action,
        hold: config.hold.clone(),
        max_retries: config.retries,
        providers: config.providers.clone(),
        honours_owners: matches!(&config.pods, PodSource::Cluster(it) if it.has_manifests),
        ttls: config.ttls,
        outbound: config.outbound,
        dial_queues: parts.dial_queues.clone(),
        replay_window: config.replay_window,
        read_timeout: config.http.read_timeout,
        reconcile_now: reconcile_now.clone(),
        lifecycle: lifecycle.clone(),
        capacity: parts.capacity.clone(),
        timelines: http::CallTimelines::default(),
        stream_limiter: StreamLimiter::new(metrics.clone()),
        rate_limiter: parts.rate_limiter.clone(),
        tracer: parts.tracer.clone(),
    }
}

/// Builds the media gateway, unless it is off.
fn gateway(
    config: &Config,
    parts: &Parts,
    api_port: u16,
    simulated_agents: Option<SocketAddr>,
) -> anyhow::Result<Option<Arc<Gateway>>> {
    let Some(media) = &config.media else { return Ok(None) };
    let Parts { store, metrics, access, lifecycle, rate_limiter, tracer, .. } = parts;
    let gateway = Gateway::new(
        media,
        GatewayParts {
            store: store.clone(),
            metrics: metrics.clone(),
            lifecycle: lifecycle.clone(),
            access: access.clone(),
            rate_limiter: rate_limiter.clone(),
            tracer: tracer.clone(),
            identity: config.identity.clone(),
            base_url: config.media_url(api_port),
            at_connect: AtConnect {
                providers: config.providers.clone(),
                path: config.ws_path.clone(),
                public_url: config.public_url.clone().unwrap_or_default(),
                lease: config.ttls.connect.unwrap_or(config.ttls.lease),
            },
            call_lease: config.ttls.lease,
            max_retries: config.retries,
            hold: config.hold.clone(),
            max_streams: parts.limits.streams,
            simulated_agents,
        },
    );
    gateway.map(Some).map_err(anyhow::Error::msg)
}

/// Builds the background tasks' state.
fn control(config: &Config, parts: &Parts, origin: Option<PodOrigin>) -> Control {
    Control {
        store: parts.store.clone(),
        metrics: parts.metrics.clone(),
        capacity: parts.capacity.clone(),
        dial_queues: parts.dial_queues.clone(),
        capacity_config: (config.events > 0).then(|| config.capacity.clone()),
        identity: config.identity.clone(),
        claimed_epoch: AtomicU64::new(0),
        lifecycle: parts.lifecycle.clone(),
        reconcile_now: parts.reconcile_now.clone(),
        access: parts.access.clone(),
        tls: parts.tls.clone(),
        cleanup_interval: config.cleanup_interval,
        reconcile_interval: config.reconcile_interval,
        settle_time: match &config.pods {
            PodSource::Cluster(cluster) => cluster.settle_time,
            _ => Duration::ZERO,
        },
        origin: origin.map(OnceLock::from).unwrap_or_default(),
        origin_key: store::origin_key(&config.store),
        force_origin: AtomicBool::new(config.force_pod_origin),
    }
}

impl Running {
    pub(crate) fn has_simulated_agents(&self) -> bool {
        self.simulated.is_some()
    }

    /// A handle to end the drain of streams early.
    pub(crate) fn stream_drain(&self) -> StreamDrain {
        StreamDrain(self.gateway.clone())
    }

    /// Shuts down gracefully: reports not ready, gives up the leader's role, ends long polls,
    /// finishes requests, drains the media streams, waits for agents and background tasks, closes
    /// the store and sends the last spans. Probes and metrics are served until the streams have
    /// ended.
    pub async fn stop(mut self) {
        tracing::info!("stopping");
        self.context.lifecycle.stopping.cancel();
        tokio::time::sleep(READINESS_GRACE).await;
        match &self.gateway {
            Some(gateway) => {
                let requests = self.servers.close_requests(|| gateway.has_streams());
                tokio::join!(requests, gateway.drain());
                gateway.stop(STREAM_SHUTDOWN_TIMEOUT).await;
            }
            None => self.servers.close_requests(|| false).await,
        }
        if let Some(simulated) = self.simulated {
            simulated.stop().await;
        }
        if let Some(upkeep) = self.upkeep {
            let _ = upkeep.await;
        }
        self.servers.close_probes().await;
        self.loops.wait().await;
        self.context.store.close().await;
        if let Some(exporter) = self.exporter {
            exporter.finish().await;
        }
        tracing::info!("stopped");
    }
}

/// The drain of a stopping process's streams.
pub(crate) struct StreamDrain(Option<Arc<Gateway>>);

impl StreamDrain {
    /// Closes the open streams at once. Returns false if there are none, or if they are closing
    /// already.
    pub(crate) fn end(&self) -> bool {
        self.0.as_ref().is_some_and(|gateway| gateway.end_drain())
    }
}
