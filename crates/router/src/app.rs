//! Wires the parts together at start-up and stops them in order.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use axum::Router;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Notify,
    task::{JoinHandle, JoinSet},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::telemetry::traces::{self, Exporter};
use crate::{
    auth::Access,
    cluster::{Cluster, FORBIDDEN_GRACE},
    config::{Config, PodSource, StoreConfig},
    control::{Control, ListFile, PodFeed, Reconciled, Source, explain_foreign},
    http::{
        self, Context, StreamUrls,
        api::{
            live::{Live, RouterInfo},
            snapshots::Snapshots,
        },
        middleware::{
            connection_limit::ConnectionLimiter, rate_limit::RateLimiter,
            stream_limit::StreamLimiter,
        },
        server::{Service, Timeouts, serve},
    },
    lifecycle::Lifecycle,
    media::{Gateway, GatewayParts},
    open_files::{self, Limits},
    telemetry::metrics::Metrics,
    tls::{ListenerTls, Tls},
    tools::agent::{Agents, RouterApi},
};
use fleet::{Claimant, PodOrigin};
use spans::Tracer;
use store::{
    Embedded, Functions, MIGRATION_QUIET_PERIOD, Redis, RedisConfig, Store, Unusable, observing,
};
use telephony::WsUrls;

/// Time between reporting not ready and closing the listeners, so that load balancers can
/// take this replica out first.
const READINESS_GRACE: Duration = Duration::from_millis(500);
/// How long start-up waits for Redis, and for the cluster, before it continues without.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long media streams may take to close at shutdown.
const STREAM_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long simulated agents may take to release their calls at shutdown.
const AGENT_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// A running router.
pub struct Running {
    pub api: SocketAddr,
    /// The address of everything but the webhooks.
    pub admin: SocketAddr,
    pub metrics_address: SocketAddr,
    pub context: Arc<Context>,
    closing: CancellationToken,
    servers: JoinSet<()>,
    simulated: Option<SimulatedAgents>,
    gateway: Option<Arc<Gateway>>,
    upkeep: Option<JoinHandle<()>>,
    loops: TaskTracker,
    exporter: Option<Exporter>,
}

/// Starts a router; it serves requests when this returns.
pub async fn start(config: Config) -> anyhow::Result<Running> {
    let functions = Functions::with_event_limit(config.events);
    start_with(config, functions).await
}

/// Starts a router with other Redis functions; tests use broken ones.
pub async fn start_with(config: Config, functions: Functions) -> anyhow::Result<Running> {
    let listener = bind("HTTP_PORT", config.http.api)?;
    let api = listener.local_addr()?;
    let metrics = Arc::new(Metrics::default());
    let reconcile_now = Arc::new(Notify::new());
    let source = pod_source(&config).await?;
    let identified = identify(&config, &source).await?;
    let origin = identified.clone().unwrap_or_else(|| config.pods.origin());
    let store = open_store(&config, origin, &metrics, &reconcile_now, functions).await?;
    log_warnings(&config, store.as_ref()).await;
    let access = open_access(&config)?;
    let tls = config.tls.as_ref().map(Tls::new).transpose();
    let tls = tls.map_err(|expected| anyhow::anyhow!("TLS_CERT_FILE: expected {expected}"))?;
    let tls = tls.map(Arc::new);
    let (tracer, exporter) =
        config.traces.clone().map(|traces| traces::start(traces, metrics.spans.clone())).unzip();
    let lifecycle = Arc::new(Lifecycle::default());
    let rate_limiter = RateLimiter::new(config.rate_limit, config.trusted_proxies.clone());
    let rate_limiter = Arc::new(rate_limiter);
    open_files::raise_limit();
    let max_streams = config.media.as_ref().and_then(|media| media.max_streams);
    let limits = open_files::limits(config.http.max_connections, max_streams);
    let parts = Parts {
        store,
        metrics,
        reconcile_now,
        access,
        tls,
        lifecycle,
        rate_limiter,
        tracer,
        limits,
    };
    let closing = CancellationToken::new();
    let simulated = simulated_agents(&config, &parts).await?;
    let agents_address = simulated.as_ref().map(|simulated| simulated.address);
    let gateway = gateway(&config, &parts, api.port(), agents_address)?;
    if let Some(gateway) = &gateway {
        // Without the store, the first call reads the key.
        let _ = timeout(STARTUP_TIMEOUT, gateway.load_key()).await;
    }
    let context = Arc::new(context(&config, &parts, gateway.as_ref()));
    let control = Arc::new(control(&config, &parts, context.lifecycle.clone(), identified));
    if matches!(source, Source::Feed(_)) {
        // Without a Lease every replica does the leader's work.
        parts.metrics.leader.set(1);
    }
    claim_pods(&control, &source).await?;
    if let (StoreConfig::Journal(_), Some(time)) = (&config.store, config.ttls.pending()) {
        // Streams may have started, and waiting calls polled, while the router was down.
        control.store.extend_pending(time).await?;
    }
    let served = serve_all(&config, &context, &parts, listener, simulated.as_ref(), &closing)?;
    let loops = control.start(source);
    let upkeep = gateway.as_ref().map(|gateway| tokio::spawn(gateway.clone().run()));
    loops.spawn(observing(context.live.clone().run()));
    let Served { admin, metrics_address, servers } = served;
    tracing::info!(%api, %admin, metrics = %metrics_address, "serving");
    Ok(Running {
        api,
        admin,
        metrics_address,
        context,
        closing,
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
    reconcile_now: Arc<Notify>,
    access: Arc<Access>,
    tls: Option<Arc<Tls>>,
    lifecycle: Arc<Lifecycle>,
    rate_limiter: Arc<RateLimiter>,
    tracer: Option<Arc<Tracer>>,
    limits: Limits,
}

fn open_access(config: &Config) -> anyhow::Result<Arc<Access>> {
    let access = Access::new(&config.access)
        .map_err(|bad| anyhow::anyhow!("{}={}: expected {}", bad.name, bad.shown, bad.expected))?;
    access.warn_if_unauthenticated(&config.providers);
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
        ttls: config.ttls,
        replay_window: config.replay_window,
        read_timeout: config.http.read_timeout,
        reconcile_now: reconcile_now.clone(),
        lifecycle: lifecycle.clone(),
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
            call_lease: config.ttls.lease,
            max_streams: parts.limits.streams,
            simulated_agents,
        },
    );
    gateway.map(Some).map_err(anyhow::Error::msg)
}

/// Builds the background tasks' state.
fn control(
    config: &Config,
    parts: &Parts,
    lifecycle: Arc<Lifecycle>,
    origin: Option<PodOrigin>,
) -> Control {
    Control {
        store: parts.store.clone(),
        metrics: parts.metrics.clone(),
        lifecycle,
        reconcile_now: parts.reconcile_now.clone(),
        access: parts.access.clone(),
        tls: parts.tls.clone(),
        cleanup_interval: config.cleanup_interval,
        reconcile_interval: config.reconcile_interval,
        origin: origin.map(OnceLock::from).unwrap_or_default(),
        origin_key: origin_key(&config.store),
        force_origin: AtomicBool::new(config.force_pod_origin),
    }
}

/// Agents inside this process, on a server of their own.
struct SimulatedAgents {
    agents: Arc<Agents>,
    address: SocketAddr,
    stopping: CancellationToken,
}

async fn simulated_agents(
    config: &Config,
    parts: &Parts,
) -> anyhow::Result<Option<SimulatedAgents>> {
    if config.pods != PodSource::Simulated {
        return Ok(None);
    }
    let stopping = CancellationToken::new();
    let agents = new_simulated_agents(config, parts, &stopping);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let routes = agents.own_routes("simulated".parse().expect("a valid pod name"));
    let closed = stopping.clone();
    tokio::spawn(async move {
        axum::serve(listener, routes).with_graceful_shutdown(closed.cancelled_owned()).await
    });
    Ok(Some(SimulatedAgents { agents, address, stopping }))
}

fn new_simulated_agents(
    config: &Config,
    parts: &Parts,
    stopping: &CancellationToken,
) -> Arc<Agents> {
    let lease_ttl = config.ttls.lease;
    let (store, metrics) = (parts.store.clone(), parts.metrics.clone());
    // Three renewals per lease, so that two may fail.
    let interval = Duration::from_millis((lease_ttl / 3).max(1));
    Agents::new(RouterApi::InProcess { store, metrics, lease_ttl }, interval, stopping.clone())
}

/// The running servers, and their addresses besides the API's.
struct Served {
    admin: SocketAddr,
    metrics_address: SocketAddr,
    servers: JoinSet<()>,
}

/// Serves the API on its listener, and metrics and administration on theirs if configured.
fn serve_all(
    config: &Config,
    context: &Arc<Context>,
    parts: &Parts,
    listener: TcpListener,
    simulated: Option<&SimulatedAgents>,
    closing: &CancellationToken,
) -> anyhow::Result<Served> {
    let media = context.urls.gateway().cloned();
    // Without the gateway, streams reach simulated agents on the API's address.
    let agents = simulated.filter(|_| media.is_none()).map(|simulated| simulated.agents.routes());
    let api = listener.local_addr()?;
    let timeouts = Timeouts {
        read: config.http.read_timeout,
        idle: config.http.idle_timeout,
        shutdown: config.http.shutdown_timeout,
    };
    let turned_away = &context.metrics.turned_away;
    let limiter = ConnectionLimiter::new(parts.limits.connections, turned_away.clone());
    let mut servers = JoinSet::new();
    let mut metrics_address = api;
    if config.http.metrics != config.http.api || config.http.metrics.port() == 0 {
        let listener = bind("METRICS_PORT", config.http.metrics)?;
        metrics_address = listener.local_addr()?;
        let routes: Router = http::metrics_routes(context);
        // Probes and Prometheus present no certificate.
        let limiter = ConnectionLimiter::new(MAX_METRICS_CONNECTIONS, turned_away.clone());
        servers.spawn(serve(
            listener,
            ListenerTls::Off,
            Service::of(routes),
            timeouts,
            limiter,
            closing.clone(),
        ));
    }
    let (mutual, server_only) = match &parts.tls {
        None => (ListenerTls::Off, ListenerTls::Off),
        Some(tls) => (ListenerTls::Mutual(tls.clone()), ListenerTls::ServerOnly(tls.clone())),
    };
    let mut admin = api;
    let (routes, listener_tls) = match config.http.admin {
        None => (http::routes(context, agents), mutual),
        Some(address) => {
            let listener = bind("ADMIN_BIND", address)?;
            admin = listener.local_addr()?;
            if metrics_address == api {
                metrics_address = admin;
            }
            let service = Service::of(http::admin_routes(context));
            let limiter = limiter.clone();
            servers.spawn(serve(listener, mutual, service, timeouts, limiter, closing.clone()));
            (http::public_routes(context, agents), server_only)
        }
    };
    let service = Service { routes, media };
    servers.spawn(serve(listener, listener_tls, service, timeouts, limiter, closing.clone()));
    Ok(Served { admin, metrics_address, servers })
}

impl Running {
    pub fn has_simulated_agents(&self) -> bool {
        self.simulated.is_some()
    }

    /// Shuts down gracefully: reports not ready, ends long polls, finishes requests, waits for
    /// agents and background tasks, closes the store and sends the last spans.
    pub async fn stop(mut self) {
        tracing::info!("stopping");
        self.context.lifecycle.stopping.cancel();
        tokio::time::sleep(READINESS_GRACE).await;
        self.closing.cancel();
        while self.servers.join_next().await.is_some() {}
        if let Some(gateway) = &self.gateway {
            gateway.stop(STREAM_SHUTDOWN_TIMEOUT).await;
        }
        if let Some(SimulatedAgents { agents, stopping, .. }) = self.simulated {
            stopping.cancel();
            if timeout(AGENT_SHUTDOWN_TIMEOUT, agents.finish()).await.is_err() {
                tracing::warn!("simulated agents did not release their calls in time");
            }
        }
        if let Some(upkeep) = self.upkeep {
            let _ = upkeep.await;
        }
        self.loops.wait().await;
        self.context.store.close().await;
        if let Some(exporter) = self.exporter {
            exporter.finish().await;
        }
        tracing::info!("stopped");
    }
}

/// Connection limit of the metrics port.
const MAX_METRICS_CONNECTIONS: usize = 64;

/// Connections that may wait to be accepted. A burst of calls fills the usual backlog, and a
/// client that finds it full retries its SYN only after a second.
const BACKLOG: u32 = 4096;

fn bind(variable: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("{variable}: cannot listen on {address}"))
}

async fn open_store(
    config: &Config,
    origin: PodOrigin,
    metrics: &Metrics,
    reconcile_now: &Arc<Notify>,
    functions: Functions,
) -> anyhow::Result<Arc<dyn Store>> {
    let (tiers, lease, metrics) = (config.tiers.clone(), config.ttls.lease, metrics.store.clone());
    match &config.store {
        StoreConfig::Memory => {
            tracing::warn!(
                "calls are held in memory only and lost at a restart: set DATA_DIR or REDIS_URL"
            );
            let store = Embedded::in_memory(tiers, lease, metrics);
            store.set_event_limit(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Journal(path) => {
            let store = Embedded::open(path, tiers, lease, metrics);
            let store = store.with_context(|| format!("DATA_DIR={}", path.display()))?;
            store.set_event_limit(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Redis { url, key_prefix, ca_file } => {
            let read = |path: &PathBuf| {
                std::fs::read(path).with_context(|| format!("REDIS_CA_FILE={}", path.display()))
            };
            let authority = ca_file.as_ref().map(read).transpose()?;
            let (url, key_prefix, ttls) = (url.clone(), key_prefix.clone(), config.ttls);
            let reconcile_now = reconcile_now.clone();
            let origin_key = origin_key(&config.store);
            let force_origin = config.force_pod_origin;
            let config = RedisConfig {
                url,
                key_prefix,
                authority,
                ttls,
                tiers,
                reconcile_now,
                metrics,
                functions,
                migration_quiet_period: MIGRATION_QUIET_PERIOD,
                origin: Some(origin.clone()),
                force_origin,
            };
            let redis =
                Redis::start(config).map_err(|error| anyhow::anyhow!("REDIS_URL: {error}"))?;
            redis.wait_until_available(STARTUP_TIMEOUT).await.map_err(
                |unusable| match unusable {
                    Unusable::Foreign(owner) => {
                        foreign_error(&explain_foreign(&owner, &origin_key, &origin))
                    }
                    Unusable::Other(error) => anyhow::anyhow!("REDIS_URL: {error}"),
                },
            )?;
            Ok(redis)
        }
    }
}

/// Claims the pods of the store, and reconciles them with a list of pods. A store whose pods
/// have another origin stops the start.
async fn claim_pods(control: &Control, source: &Source) -> anyhow::Result<()> {
    let refused = match source {
        Source::Feed(feed) => match control.reconcile(feed, true).await {
            Ok(Reconciled::Refused(refused)) => Ok(Some(refused)),
            Ok(Reconciled::Done { .. }) => Ok(None),
            Err(error) => Err(error),
        },
        Source::Cluster { .. } if control.origin.get().is_none() => Ok(None),
        Source::Cluster { .. } => {
            control.claim(Claimant::Leader { epoch: None }).await.map(Result::err)
        }
    };
    match refused {
        Ok(None) => {}
        Ok(Some(refused)) => return Err(foreign_error(&control.explain(&refused))),
        Err(error) => {
            tracing::error!(%error, "starting without the store; not ready until it answers");
        }
    }
    Ok(())
}

/// The key that records the origin of pods, for messages: ` (voice:origin)` in Redis.
fn origin_key(store: &StoreConfig) -> String {
    match store {
        StoreConfig::Redis { key_prefix, .. } => format!(" ({key_prefix}origin)"),
        StoreConfig::Memory | StoreConfig::Journal(_) => String::new(),
    }
}

fn foreign_error(explained: &str) -> anyhow::Error {
    anyhow::anyhow!("FORCE_POD_ORIGIN=off: {explained}")
}

async fn log_warnings(config: &Config, store: &dyn Store) {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    if store.tiers().await.is_ok_and(|tiers| tiers != config.tiers) {
        tracing::warn!(
            "the tiers in the store differ from TIER_CONFIG and are used; change them with PUT /api/v1/tiers"
        );
    }
}

/// Returns the origin of the pods; `None` while the cluster does not answer.
async fn identify(config: &Config, source: &Source) -> anyhow::Result<Option<PodOrigin>> {
    let Source::Cluster { cluster, .. } = source else { return Ok(Some(config.pods.origin())) };
    let started = Instant::now();
    let reason = loop {
        match timeout(STARTUP_TIMEOUT, cluster.namespace_uid()).await {
            Ok(Ok(uid)) => return Ok(Some(cluster.origin(uid))),
            Ok(Err(error)) => match cluster.explain_identity(&error) {
                (_, true) if started.elapsed() < FORBIDDEN_GRACE => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                // Without the UID, this router could take over a store of another cluster.
                (reason, true) => anyhow::bail!("cannot identify the cluster: {reason}"),
                (reason, false) => break reason,
            },
            Err(_) => break "no answer in time".into(),
        }
    };
    tracing::error!(reason, "cannot identify the cluster; writing no pods until it answers");
    Ok(None)
}

async fn pod_source(config: &Config) -> anyhow::Result<Source> {
    Ok(Source::Feed(match &config.pods {
        PodSource::List(pods) => PodFeed::Fixed(pods.clone()),
        PodSource::File(path) => {
            let file = ListFile::open(path.clone(), config.agent_port);
            PodFeed::File(file.map_err(|expected| {
                anyhow::anyhow!("PODS_FILE={}: expected {expected}", path.display())
            })?)
        }
        PodSource::Simulated => PodFeed::Simulated,
        PodSource::Cluster(cluster) => {
            return Ok(Source::Cluster {
                cluster: Cluster::find(cluster.clone()).await?,
                view: Arc::default(),
                leader: config.leader.clone(),
                // Replicas that share a name must still have distinct identities.
                identity: format!("{}_{:08x}", config.identity, crate::random_u32()),
            });
        }
    }))
}
