//! The listeners and their servers. Probes and metrics have servers of their own, which stay open
//! while the streams of a stopping process are drained.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use axum::Router;
use tokio::{
    net::{TcpListener, TcpSocket},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{Parts, simulated::SimulatedAgents};
use crate::{
    client_limits::ConnectionLimiter,
    config::{Config, ProcessRole},
    http::{
        self, Context,
        server::{Service, Timeouts, serve},
    },
    tls::ListenerTls,
};

/// Connection limit of the metrics port.
const MAX_METRICS_CONNECTIONS: usize = 64;

/// Connections that may wait to be accepted. A burst of calls fills the usual backlog, and a
/// client that finds it full retries its SYN only after a second.
const BACKLOG: u32 = 4096;

pub(super) fn bind(variable: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("{variable}: cannot listen on {address}"))
}

/// Servers that close together.
#[derive(Default)]
struct Group {
    servers: JoinSet<()>,
    closing: CancellationToken,
}

impl Group {
    fn serve(
        &mut self,
        listener: TcpListener,
        tls: ListenerTls,
        service: Service,
        timeouts: Timeouts,
        limiter: Arc<ConnectionLimiter>,
    ) {
        self.servers.spawn(serve(listener, tls, service, timeouts, limiter, self.closing.clone()));
    }

    /// Closes the listeners, and finishes the requests in flight.
    async fn close(&mut self) {
        self.closing.cancel();
        while self.servers.join_next().await.is_some() {}
    }
}

/// The running servers.
pub(super) struct Servers {
    pub(super) admin: SocketAddr,
    pub(super) metrics: SocketAddr,
    /// Webhooks, API and handshakes of streams.
    requests: Group,
    /// Probes and metrics on METRICS_PORT.
    probes: Group,
    /// Whether METRICS_PORT is a port of the API.
    is_metrics_port_shared: bool,
    metrics_tls: ListenerTls,
    metrics_service: Service,
    timeouts: Timeouts,
    metrics_limiter: Arc<ConnectionLimiter>,
}

impl Servers {
    /// Serves the role of the process on its listener, and metrics and administration on theirs
    /// if configured.
    pub(super) fn start(
        config: &Config,
        context: &Arc<Context>,
        parts: &Parts,
        listener: TcpListener,
        simulated: Option<&SimulatedAgents>,
    ) -> anyhow::Result<Self> {
        let api = listener.local_addr()?;
        let timeouts = Timeouts {
            read: config.http.read_timeout,
            idle: config.http.idle_timeout,
            shutdown: config.http.shutdown_timeout,
        };
        let turned_away = &context.metrics.turned_away;
        let limiter = ConnectionLimiter::new(parts.limits.connections, turned_away.clone());
        let (mutual, server_only) = match &parts.tls {
            None => (ListenerTls::Off, ListenerTls::Off),
            Some(tls) => (ListenerTls::Mutual(tls.clone()), ListenerTls::ServerOnly(tls.clone())),
        };
        let is_metrics_port_shared =
            config.http.metrics == config.http.api && config.http.metrics.port() != 0;
        let mut servers = Self {
            admin: api,
            metrics: api,
            requests: Group::default(),
            probes: Group::default(),
            is_metrics_port_shared,
            // Probes and Prometheus present no certificate on a port of their own.
            metrics_tls: if is_metrics_port_shared { mutual.clone() } else { ListenerTls::Off },
            metrics_service: Service::of(http::metrics_routes(context)),
            timeouts,
            metrics_limiter: ConnectionLimiter::new(MAX_METRICS_CONNECTIONS, turned_away.clone()),
        };
        if !is_metrics_port_shared {
            servers.serve_metrics(bind("METRICS_PORT", config.http.metrics)?)?;
        }
        let has_admin_address = config.http.admin.is_some();
        if let (Some(address), ProcessRole::Router) = (config.http.admin, config.role) {
            let listener = bind("ADMIN_BIND", address)?;
            servers.admin = listener.local_addr()?;
            if is_metrics_port_shared {
                servers.metrics = servers.admin;
            }
            let service = Service::of(http::admin_routes(context));
            servers.requests.serve(listener, mutual.clone(), service, timeouts, limiter.clone());
        }
        let tls = if has_admin_address { server_only } else { mutual };
        let routes = main_routes(config, context, simulated, is_metrics_port_shared);
        let service = Service { routes, media: context.urls.gateway().cloned() };
        servers.requests.serve(listener, tls, service, timeouts, limiter);
        Ok(servers)
    }

    fn serve_metrics(&mut self, listener: TcpListener) -> anyhow::Result<()> {
        self.metrics = listener.local_addr()?;
        let (tls, service) = (self.metrics_tls.clone(), self.metrics_service.clone());
        self.probes.serve(listener, tls, service, self.timeouts, self.metrics_limiter.clone());
        Ok(())
    }

    /// Closes webhooks and API, and finishes their requests. Probes and metrics stay reachable:
    /// a port that they share with the API opens again for them, if streams are still open.
    pub(super) async fn close_requests(&mut self, has_streams: impl Fn() -> bool) {
        self.requests.close().await;
        if self.is_metrics_port_shared && has_streams() {
            let listening = bind("METRICS_PORT", self.metrics);
            if let Err(error) = listening.and_then(|listener| self.serve_metrics(listener)) {
                tracing::warn!(%error, "no probes and metrics while streams are drained");
            }
        }
    }

    pub(super) async fn close_probes(&mut self) {
        self.probes.close().await;
    }
}

/// The routes of HTTP_PORT.
fn main_routes(
    config: &Config,
    context: &Arc<Context>,
    simulated: Option<&SimulatedAgents>,
    is_metrics_port_shared: bool,
) -> Router {
    // Without the gateway, streams reach simulated agents on the API's address.
    let agents = simulated.filter(|_| context.urls.gateway().is_none());
    let agents = agents.map(|simulated| simulated.agents.routes());
    match (config.role, config.http.admin) {
        (ProcessRole::Media, _) if is_metrics_port_shared => http::metrics_routes(context),
        (ProcessRole::Media, _) => http::health_only_routes(context),
        (ProcessRole::Router, Some(_)) => http::public_routes(context, agents),
        (ProcessRole::Router, None) => http::routes(context, agents),
    }
}
