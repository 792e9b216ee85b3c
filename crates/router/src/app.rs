//! How the parts are put together, and in which order they stop.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::Context as _;
use axum::Router;
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Notify,
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::telemetry::traces::{self, Exporter};
use crate::{
    auth::Access,
    cluster::Cluster,
    config::{Config, PodSource, StoreConfig},
    control::{Control, ListFile, PodFeed, Reconciled, Source},
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
use fleet::Claimant;
use store::{Embedded, Redis, RedisConfig, Scripts, Store, observing};
use telephony::WsUrls;

/// How long we go on accepting requests once we say that we are not ready: who
/// has not heard it yet shall not meet a closed door.
const FAREWELL: Duration = Duration::from_millis(500);
/// How long the start waits for Redis before it goes on without.
const FIRST_CONTACT: Duration = Duration::from_secs(2);
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
    let store = open_store(&config, &metrics, &nudge, scripts).await?;
    warn_about(&config, store.as_ref()).await;
    if let (StoreConfig::Journal(_), Some(time)) = (&config.store, config.ttls.spared()) {
        // Streams may have started, and callers asked again, while nobody listened.
        store.spare(time).await?;
    }
    let access = Access::new(&config.access)
        .map_err(|bad| anyhow::anyhow!("{}={}: expected {}", bad.name, bad.shown, bad.expected))?;
    access.warn_if_unauthenticated(&config.providers);
    let access = Arc::new(access);
    let tls = config.tls.as_ref().map(Tls::new).transpose();
    let tls = tls.map_err(|expected| anyhow::anyhow!("TLS_CERT_FILE: expected {expected}"))?;
    let tls = tls.map(Arc::new);
    let lifecycle = Arc::new(Lifecycle::default());
    let stopping = lifecycle.stopping.clone();
    let about = About {
        name: config.identity.clone(),
        store: if matches!(config.store, StoreConfig::Redis { .. }) { "redis" } else { "embedded" },
        has_cluster: matches!(config.pods, PodSource::Cluster(_)),
        has_events: config.events > 0,
        draining_ttl: config.ttls.draining,
    };
    let snapshots = Snapshots::new(store.clone());
    let live =
        Live::new(store.clone(), snapshots.clone(), metrics.clone(), lifecycle.clone(), about);
    let (tracer, exporter) =
        config.traces.clone().map(|traces| traces::start(traces, metrics.spans.clone())).unzip();
    let context = Arc::new(Context {
        store: store.clone(),
        metrics: metrics.clone(),
        urls: WsUrls { base: config.agent_base_url(api.port()), path: config.ws_path.clone() },
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
        lifecycle: lifecycle.clone(),
        snapshots,
        live: live.clone(),
        stories: http::Stories::default(),
        streams: Streams::new(metrics.clone()),
        rates: Rates::new(config.rate_limit, config.trusted_proxies.clone()),
        traces: tracer,
    });

    let simulated = config.pods == PodSource::Simulated;
    let source = pod_source(&config).await?;
    let control = Arc::new(Control {
        store: store.clone(),
        metrics: metrics.clone(),
        lifecycle,
        nudge,
        access,
        tls: tls.clone(),
        cleanup_interval: config.cleanup_interval,
        reconcile_interval: config.reconcile_interval,
        origin: config.pods.origin(),
        force_origin: AtomicBool::new(config.force_pod_origin),
    });
    if matches!(source, Source::Feed(_)) {
        // Without a Lease every replica does the leader's work.
        metrics.leader.set(1);
    }
    claim_pods(&control, &source).await?;

    let agents = simulated.then(|| {
        let lease_ttl = config.ttls.lease;
        let desk = Desk::Here { store, metrics, lease_ttl };
        // Three renewals in the time of one lease: two may fail.
        let interval = Duration::from_millis((lease_ttl / 3).max(1));
        Agents::new(desk, interval, stopping.clone())
    });
    let agent_routes = agents.as_ref().map(Agents::routes);
    let timeouts = Timeouts {
        read: config.http.read_timeout,
        idle: config.http.idle_timeout,
        shutdown: config.http.shutdown_timeout,
    };
    let turned_away = &context.metrics.turned_away;
    let limiter = ConnectionLimiter::new(config.http.max_connections, turned_away.clone());
    let closing = CancellationToken::new();
    let mut servers = JoinSet::new();
    let mut metrics_address = api;
    if config.http.metrics != config.http.api || config.http.metrics.port() == 0 {
        let listener = bind("METRICS_PORT", config.http.metrics)?;
        metrics_address = listener.local_addr()?;
        let routes: Router = http::metrics_routes(&context);
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
    let (mutual, server_only) = match &tls {
        None => (ListenerTls::Off, ListenerTls::Off),
        Some(tls) => (ListenerTls::Mutual(tls.clone()), ListenerTls::ServerOnly(tls.clone())),
    };
    let mut admin = api;
    let (routes, listener_tls) = match config.http.admin {
        None => (http::routes(&context, agent_routes), mutual),
        Some(address) => {
            let listener = bind("ADMIN_BIND", address)?;
            admin = listener.local_addr()?;
            if metrics_address == api {
                metrics_address = admin;
            }
            let routes = http::admin_routes(&context);
            let limiter = limiter.clone();
            servers.spawn(serve(listener, mutual, routes, timeouts, limiter, closing.clone()));
            (http::public_routes(&context, agent_routes), server_only)
        }
    };
    servers.spawn(serve(listener, listener_tls, routes, timeouts, limiter, closing.clone()));
    let loops = control.start(source);
    loops.spawn(observing(live.run()));
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
            && tokio::time::timeout(AGENTS_FINISH, agents.finish()).await.is_err()
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
            let config =
                RedisConfig { url, key_prefix, authority, ttls, tiers, nudge, metrics, scripts };
            let redis =
                Redis::start(config).map_err(|error| anyhow::anyhow!("REDIS_URL: {error}"))?;
            redis
                .first_contact(FIRST_CONTACT)
                .await
                .map_err(|error| anyhow::anyhow!("REDIS_URL: {error}"))?;
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
        Source::Cluster { .. } => {
            control.claim(Claimant::Leader { epoch: None }).await.map(Result::err)
        }
    };
    match refused {
        Ok(None) => {}
        Ok(Some(refused)) => anyhow::bail!("FORCE_POD_ORIGIN=off: {}", control.explain(&refused)),
        Err(error) => {
            tracing::error!(%error, "starting without the store; not ready until it is there");
        }
    }
    Ok(())
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
