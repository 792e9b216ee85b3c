//! How the parts are put together, and in which order they stop.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use axum::Router;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Notify,
    task::JoinSet,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::telemetry::traces::{self, Exporter};
use crate::{
    auth::Access,
    cluster::Cluster,
    config::{Config, PodSource, StoreConfig},
    control::{Control, ListFile, PodFeed, Reconciled, Source, explain_foreign},
    http::{
        self, Context,
        api::{
            live::{About, Live},
            snapshots::Snapshots,
        },
        middleware::{
            connection_limit::ConnectionLimiter, rate_limit::Rates, stream_limit::Streams,
        },
        server::{Timeouts, serve},
    },
    lifecycle::Lifecycle,
    telemetry::metrics::Metrics,
    tls::{ListenerTls, Tls},
    tools::agent::{Agents, Desk},
};
use fleet::{Claimant, PodOrigin};
use spans::Tracer;
use store::{Embedded, Redis, RedisConfig, Scripts, Store, Unusable, observing};
use telephony::WsUrls;

/// How long we go on accepting requests once we say that we are not ready: who
/// has not heard it yet shall not meet a closed door.
const FAREWELL: Duration = Duration::from_millis(500);
/// How long the start waits for Redis, and for the cluster, before it goes on without.
const FIRST_CONTACT: Duration = Duration::from_secs(2);
/// How long a right may be missing before it counts as not given.
const API_SERVER_START: Duration = Duration::from_secs(5);
/// How long agents may take to let go of their calls at the end.
const AGENTS_FINISH: Duration = Duration::from_secs(5);

/// A router that runs.
pub struct Running {
    pub api: SocketAddr,
    /// Where everything but the webhooks is.
    pub admin: SocketAddr,
    pub metrics_address: SocketAddr,
    /// Whether its agents are simulated.
    pub simulated: bool,
    pub context: Arc<Context>,
    closing: CancellationToken,
    servers: JoinSet<()>,
    agents: Option<Arc<Agents>>,
    loops: TaskTracker,
    exporter: Option<Exporter>,
}

/// Starts a router. It answers requests when this returns.
pub async fn start(config: Config) -> anyhow::Result<Running> {
    let scripts = Scripts::keeping(config.events);
    start_with(config, scripts).await
}

/// The same with other scripts than ours: tests break them on purpose.
pub async fn start_with(config: Config, scripts: Scripts) -> anyhow::Result<Running> {
    let listener = bind("HTTP_PORT", config.http.api)?;
    let api = listener.local_addr()?;
    let metrics = Arc::new(Metrics::default());
    let nudge = Arc::new(Notify::new());
    let source = pod_source(&config).await?;
    let identified = identify(&config, &source).await?;
    let origin = identified.clone().unwrap_or_else(|| config.pods.origin());
    let store = open_store(&config, origin, &metrics, &nudge, scripts).await?;
    warn_about(&config, store.as_ref()).await;
    let access = open_access(&config)?;
    let tls = config.tls.as_ref().map(Tls::new).transpose();
    let tls = tls.map_err(|expected| anyhow::anyhow!("TLS_CERT_FILE: expected {expected}"))?;
    let tls = tls.map(Arc::new);
    let (tracer, exporter) =
        config.traces.clone().map(|traces| traces::start(traces, metrics.spans.clone())).unzip();
    let parts = Parts { store, metrics, nudge, access, tls };
    let context = Arc::new(context(&config, &parts, api.port(), tracer));
    let control = Arc::new(control(&config, &parts, context.lifecycle.clone(), identified));
    if matches!(source, Source::Feed(_)) {
        // Without a Lease every replica does the leader's work.
        parts.metrics.leader.set(1);
    }
    claim_pods(&control, &source).await?;
    if let (StoreConfig::Journal(_), Some(time)) = (&config.store, config.ttls.spared()) {
        // Streams may have started, and callers asked again, while the router was down.
        control.store.spare(time).await?;
    }
    let simulated = config.pods == PodSource::Simulated;
    let agents = simulated.then(|| simulated_agents(&config, &parts, &context.lifecycle));
    let agent_routes = agents.as_ref().map(Agents::routes);
    let closing = CancellationToken::new();
    let served =
        serve_all(&config, &context, parts.tls.as_ref(), listener, agent_routes, &closing)?;
    let loops = control.start(source);
    loops.spawn(observing(context.live.clone().run()));
    let Served { admin, metrics_address, servers } = served;
    tracing::info!(%api, %admin, metrics = %metrics_address, "serving");
    Ok(Running {
        api,
        admin,
        metrics_address,
        simulated,
        context,
        closing,
        servers,
        agents,
        loops,
        exporter,
    })
}

/// Shared by the HTTP API and the background work.
struct Parts {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    nudge: Arc<Notify>,
    access: Arc<Access>,
    tls: Option<Arc<Tls>>,
}

fn open_access(config: &Config) -> anyhow::Result<Arc<Access>> {
    let access = Access::new(&config.access)
        .map_err(|bad| anyhow::anyhow!("{}={}: expected {}", bad.name, bad.shown, bad.expected))?;
    access.warn_if_unauthenticated(&config.providers);
    Ok(Arc::new(access))
}

/// What the endpoints use.
fn context(config: &Config, parts: &Parts, api_port: u16, traces: Option<Arc<Tracer>>) -> Context {
    let Parts { store, metrics, nudge, access, tls } = parts;
    let lifecycle = Arc::new(Lifecycle::default());
    let about = About {
        name: config.identity.clone(),
        store: if matches!(config.store, StoreConfig::Redis { .. }) { "redis" } else { "embedded" },
        has_cluster: matches!(config.pods, PodSource::Cluster(_)),
        has_events: config.events > 0,
        draining_ttl: config.ttls.draining,
    };
    let snapshots = Snapshots::new(store.clone());
    let (shared, counted) = (snapshots.clone(), metrics.clone());
    Context {
        live: Live::new(store.clone(), shared, counted, lifecycle.clone(), about),
        snapshots,
        store: store.clone(),
        metrics: metrics.clone(),
        urls: WsUrls { base: config.agent_base_url(api_port), path: config.ws_path.clone() },
        access: access.clone(),
        scheme: if tls.is_some() { "https" } else { "http" },
        public_url: config.public_url.clone().unwrap_or_default(),
        stream_status: config.stream_status,
        busy_action: config.busy_action,
        hold: config.hold.clone(),
        retries: config.retries,
        providers: config.providers.clone(),
        ttls: config.ttls,
        replay_window: config.replay_window,
        read_timeout: config.http.read_timeout,
        nudge: nudge.clone(),
        lifecycle,
        stories: http::Stories::default(),
        streams: Streams::new(metrics.clone()),
        rates: Rates::new(config.rate_limit, config.trusted_proxies.clone()),
        traces,
    }
}

/// The background work.
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
        nudge: parts.nudge.clone(),
        access: parts.access.clone(),
        tls: parts.tls.clone(),
        cleanup_interval: config.cleanup_interval,
        reconcile_interval: config.reconcile_interval,
        origin: origin.map(OnceLock::from).unwrap_or_default(),
        origin_key: origin_key(&config.store),
        force_origin: AtomicBool::new(config.force_pod_origin),
    }
}

fn simulated_agents(config: &Config, parts: &Parts, lifecycle: &Lifecycle) -> Arc<Agents> {
    let lease_ttl = config.ttls.lease;
    let (store, metrics) = (parts.store.clone(), parts.metrics.clone());
    // Three renewals in the time of one lease: two may fail.
    let interval = Duration::from_millis((lease_ttl / 3).max(1));
    Agents::new(Desk::Here { store, metrics, lease_ttl }, interval, lifecycle.stopping.clone())
}

/// The servers, and the addresses besides that of the API.
struct Served {
    admin: SocketAddr,
    metrics_address: SocketAddr,
    servers: JoinSet<()>,
}

/// Serves the API on its listener, and metrics and administration on theirs, if they have any.
fn serve_all(
    config: &Config,
    context: &Arc<Context>,
    tls: Option<&Arc<Tls>>,
    listener: TcpListener,
    agent_routes: Option<Router>,
    closing: &CancellationToken,
) -> anyhow::Result<Served> {
    let api = listener.local_addr()?;
    let timeouts = Timeouts {
        read: config.http.read_timeout,
        idle: config.http.idle_timeout,
        shutdown: config.http.shutdown_timeout,
    };
    let turned_away = &context.metrics.turned_away;
    let limiter = ConnectionLimiter::new(config.http.max_connections, turned_away.clone());
    let mut servers = JoinSet::new();
    let mut metrics_address = api;
    if config.http.metrics != config.http.api || config.http.metrics.port() == 0 {
        let listener = bind("METRICS_PORT", config.http.metrics)?;
        metrics_address = listener.local_addr()?;
        let routes: Router = http::metrics_routes(context);
        // Probes and Prometheus have no certificates.
        let limiter = ConnectionLimiter::new(MOST_LOOKING, turned_away.clone());
        servers.spawn(serve(
            listener,
            ListenerTls::Off,
            routes,
            timeouts,
            limiter,
            closing.clone(),
        ));
    }
    let (mutual, server_only) = match tls {
        None => (ListenerTls::Off, ListenerTls::Off),
        Some(tls) => (ListenerTls::Mutual(tls.clone()), ListenerTls::ServerOnly(tls.clone())),
    };
    let mut admin = api;
    let (routes, listener_tls) = match config.http.admin {
        None => (http::routes(context, agent_routes), mutual),
        Some(address) => {
            let listener = bind("ADMIN_BIND", address)?;
            admin = listener.local_addr()?;
            if metrics_address == api {
                metrics_address = admin;
            }
            let routes = http::admin_routes(context);
            let limiter = limiter.clone();
            servers.spawn(serve(listener, mutual, routes, timeouts, limiter, closing.clone()));
            (http::public_routes(context, agent_routes), server_only)
        }
    };
    servers.spawn(serve(listener, listener_tls, routes, timeouts, limiter, closing.clone()));
    Ok(Served { admin, metrics_address, servers })
}

impl Running {
    /// Stops in order: unready, waiting requests answered, requests finished,
    /// agents and loops done, store closed, the last spans sent.
    pub async fn stop(mut self) {
        tracing::info!("stopping");
        self.context.lifecycle.stopping.cancel();
        tokio::time::sleep(FAREWELL).await;
        self.closing.cancel();
        while self.servers.join_next().await.is_some() {}
        if let Some(agents) = self.agents
            && timeout(AGENTS_FINISH, agents.finish()).await.is_err()
        {
            tracing::warn!("agents did not finish in time");
        }
        self.loops.wait().await;
        self.context.store.close().await;
        if let Some(exporter) = self.exporter {
            exporter.finish().await;
        }
        tracing::info!("stopped");
    }
}

/// How many connections the port of the metrics has room for.
const MOST_LOOKING: usize = 64;

/// How many connections may wait to be accepted. The usual number is small enough for a
/// burst of calls to fill it, and who finds it full tries again a second later.
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
    nudge: &Arc<Notify>,
    scripts: Scripts,
) -> anyhow::Result<Arc<dyn Store>> {
    let (tiers, lease, metrics) = (config.tiers.clone(), config.ttls.lease, metrics.store.clone());
    match &config.store {
        StoreConfig::Memory => {
            tracing::warn!(
                "calls are kept in memory only: set DATA_DIR or REDIS_URL to keep them over a restart"
            );
            let store = Embedded::in_memory(tiers, lease, metrics);
            store.keep_events(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Journal(path) => {
            let store = Embedded::open(path, tiers, lease, metrics);
            let store = store.with_context(|| format!("DATA_DIR={}", path.display()))?;
            store.keep_events(config.events);
            Ok(Arc::new(store))
        }
        StoreConfig::Redis { url, key_prefix, ca_file } => {
            let read = |path: &PathBuf| {
                std::fs::read(path).with_context(|| format!("REDIS_CA_FILE={}", path.display()))
            };
            let authority = ca_file.as_ref().map(read).transpose()?;
            let (url, key_prefix, ttls) = (url.clone(), key_prefix.clone(), config.ttls);
            let nudge = nudge.clone();
            let origin_key = origin_key(&config.store);
            let force_origin = config.force_pod_origin;
            let config = RedisConfig {
                url,
                key_prefix,
                authority,
                ttls,
                tiers,
                nudge,
                metrics,
                scripts,
                origin: Some(origin.clone()),
                force_origin,
            };
            let redis =
                Redis::start(config).map_err(|error| anyhow::anyhow!("REDIS_URL: {error}"))?;
            redis.first_contact(FIRST_CONTACT).await.map_err(|unusable| match unusable {
                Unusable::Foreign(owner) => {
                    foreign_error(&explain_foreign(&owner, &origin_key, &origin))
                }
                Unusable::Other(error) => anyhow::anyhow!("REDIS_URL: {error}"),
            })?;
            Ok(redis)
        }
    }
}

/// Claims the pods of the store, and compares them with a list of our own. Pods of another
/// origin are none of this router's business: it does not start over them.
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
            tracing::error!(%error, "starting without the store; not ready until it is there");
        }
    }
    Ok(())
}

/// Where the store records the origin of its pods: ` (voice:origin)` in a Redis.
fn origin_key(store: &StoreConfig) -> String {
    match store {
        StoreConfig::Redis { key_prefix, .. } => format!(" ({key_prefix}origin)"),
        StoreConfig::Memory | StoreConfig::Journal(_) => String::new(),
    }
}

fn foreign_error(explained: &str) -> anyhow::Error {
    anyhow::anyhow!("FORCE_POD_ORIGIN=off: {explained}")
}

async fn warn_about(config: &Config, store: &dyn Store) {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    if store.tiers().await.is_ok_and(|tiers| tiers != config.tiers) {
        tracing::warn!(
            "the tiers in the store differ from TIER_CONFIG and are used; change them with PUT /api/v1/tiers"
        );
    }
}

/// The origin of the pods; `None` while the cluster can't be asked which one it is.
async fn identify(config: &Config, source: &Source) -> anyhow::Result<Option<PodOrigin>> {
    let Source::Cluster { cluster, .. } = source else { return Ok(Some(config.pods.origin())) };
    let started = Instant::now();
    let reason = loop {
        match timeout(FIRST_CONTACT, cluster.namespace_uid()).await {
            Ok(Ok(uid)) => return Ok(Some(cluster.origin(uid))),
            Ok(Err(error)) => match cluster.explain_identity(&error) {
                // An API server that starts forbids everything for a moment.
                (_, true) if started.elapsed() < API_SERVER_START => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                // Without it a store could be taken over from another cluster.
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
                // Two replicas must not be taken for one, whatever they are called.
                identity: format!("{}_{:08x}", config.identity, crate::random_u32()),
            });
        }
    }))
}
