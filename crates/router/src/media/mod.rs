//! The media gateway. A provider opens the stream of a call here; the gateway attaches it to the
//! call in the store, connects to the call's pod, and relays frames until one side ends. Agents
//! need no code for the router: the gateway renews the lease of the call and ends the call with
//! its stream.

mod admission;
mod agents;
mod carry;
mod connect;
mod connect_admission;
mod drain;
mod failover;
mod keys;
mod sockets;
mod streams;
mod upkeep;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Body;
use hyper::{Request, Response, StatusCode, body::Incoming, header};
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use self::agents::AgentTls;
use self::{
    admission::NotAdmitted,
    agents::AgentConnector,
    keys::Keys,
    streams::{OpenStream, Streams},
};
use crate::{
    auth::Access,
    client_limits::RateLimiter,
    hold_config::HoldConfig,
    lifecycle::Lifecycle,
    telemetry::metrics::{Metrics, StreamMetrics},
};
use fleet::{
    Millis,
    names::{CallSid, GatewayId},
};
use media::{
    relay::Limits,
    stats::{Order, StreamFigures},
};
use spans::Tracer;
use store::{Store, StoreError};
use telephony::{Parameters, Provider, WsPath};

/// The part of a stream URL before the call.
pub(crate) const PATH_PREFIX: &str = "/media/";
/// The part before the provider of a stream URL that allocates at connect.
pub(crate) const CONNECT_PREFIX: &str = "/connect/";

/// The configuration of the media gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MediaConfig {
    /// Public base of stream URLs; `None` if it depends on the port chosen at start-up.
    pub(crate) url: Option<String>,
    pub(crate) max_frame: u64,
    pub(crate) idle_timeout: Duration,
    pub(crate) lease: Duration,
    /// How long open streams are relayed once the process stops.
    pub(crate) drain_time: Duration,
    pub(crate) wrap_up: Duration,
    /// `None`: derived from the limit of open files.
    pub(crate) max_streams: Option<usize>,
    /// TLS to agents, with a further authority.
    pub(crate) agent_tls: Option<AgentTls>,
}

/// The media gateway of this process.
pub(crate) struct Gateway {
    id: GatewayId,
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    lifecycle: Arc<Lifecycle>,
    rate_limiter: Arc<RateLimiter>,
    tracer: Option<Arc<Tracer>>,
    keys: Keys,
    access: Arc<Access>,
    /// Public base of stream URLs.
    base_url: String,
    /// Terms of calls that are allocated at connect.
    at_connect: AtConnect,
    agents: AgentConnector,
    limits: Limits,
    /// Lease of this gateway.
    lease: Millis,
    /// Lease of an attached call.
    call_lease: Millis,
    /// The maximum number of pods that a call may lose in mid-call and go on.
    max_retries: u32,
    /// Terms for streams that wait for a pod in mid-call; `None` if calls do not wait.
    hold: Option<HoldConfig>,
    streams: Streams,
    tasks: TaskTracker,
    /// How long open streams are relayed once the process stops.
    drain_time: Duration,
    /// The drain is over: open streams close.
    drain_ended: CancellationToken,
}

/// Terms of calls that are allocated when their stream connects.
pub(crate) struct AtConnect {
    /// The providers that are served.
    pub(crate) providers: Vec<Provider>,
    pub(crate) path: WsPath,
    /// Base of the webhooks' URLs; empty if it is not configured.
    pub(crate) public_url: String,
    /// Lease until the stream is attached.
    pub(crate) lease: Millis,
}

/// What the gateway shares with the rest of the router.
pub(crate) struct GatewayParts {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) access: Arc<Access>,
    pub(crate) rate_limiter: Arc<RateLimiter>,
    pub(crate) tracer: Option<Arc<Tracer>>,
    /// Identity of this replica.
    pub(crate) identity: String,
    pub(crate) base_url: String,
    pub(crate) at_connect: AtConnect,
    pub(crate) call_lease: Millis,
    pub(crate) max_retries: u32,
    pub(crate) hold: Option<HoldConfig>,
    pub(crate) max_streams: usize,
    /// The server of simulated agents.
    pub(crate) simulated_agents: Option<SocketAddr>,
}

impl Gateway {
    pub(crate) fn new(config: &MediaConfig, parts: GatewayParts) -> Result<Arc<Self>, String> {
        let limits = Limits {
            max_frame: config.max_frame,
            provider_timeout: config.idle_timeout,
            wrap_up: config.wrap_up,
            ..Limits::default()
        };
        let gateway = Arc::new(Self {
            id: gateway_id(&parts.identity),
            keys: Keys::new(parts.access.clone()),
            access: parts.access,
            base_url: parts.base_url,
            at_connect: parts.at_connect,
            agents: AgentConnector::new(config.agent_tls.as_ref(), parts.simulated_agents)?,
            limits,
            lease: config.lease.as_millis() as Millis,
            call_lease: parts.call_lease,
            max_retries: parts.max_retries,
            hold: parts.hold,
            streams: Streams::new(parts.max_streams, parts.metrics.streams.clone()),
            tasks: TaskTracker::new(),
            drain_time: config.drain_time,
            drain_ended: CancellationToken::new(),
            store: parts.store,
            metrics: parts.metrics,
            lifecycle: parts.lifecycle,
            rate_limiter: parts.rate_limiter,
            tracer: parts.tracer,
        });
        let weak = Arc::downgrade(&gateway);
        let read = move || weak.upgrade().map(|gateway| gateway.streams.totals());
        gateway.stream_metrics().read_open(move || read().unwrap_or_default());
        Ok(gateway)
    }

    /// The stream URL of a call. `path` is what the agent sees.
    pub(crate) fn url(
        &self,
        call: &CallSid,
        pod_attempt: u32,
        path: &str,
        parameters: &Parameters,
    ) -> Option<String> {
        let parameters = admission::encode_parameters(parameters);
        let token = self.keys.sign(call, pod_attempt, path, &parameters)?;
        Some([&self.base_url, PATH_PREFIX, call.as_str(), "/", &token, path].concat())
    }

    /// Reads the key of stream tokens from the store, unless it is known or configured.
    pub(crate) async fn load_key(&self) -> Result<(), StoreError> {
        if self.keys.is_known() { Ok(()) } else { self.keys.refresh(self.store.as_ref()).await }
    }

    /// Figures of a stream that this process relays.
    pub(crate) fn figures(&self, call: &CallSid) -> Option<StreamFigures> {
        self.streams.figures(call)
    }

    pub(crate) fn id(&self) -> &GatewayId {
        &self.id
    }

    fn stream_metrics(&self) -> &StreamMetrics {
        &self.metrics.streams
    }

    /// Responds to a request below [`PATH_PREFIX`].
    pub(crate) async fn serve(
        self: &Arc<Self>,
        request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Response<Body> {
        // A replica that has just started may not know the key that another one signed with.
        if let Err(error) = self.load_key().await {
            tracing::warn!(%error, "cannot read the key of stream tokens");
            self.stream_metrics().refused("storage_error");
            return empty(StatusCode::SERVICE_UNAVAILABLE);
        }
        let (admission, slot) = match self.admit(request, peer) {
            Ok(admitted) => admitted,
            Err(refused) => return self.refuse(&refused),
        };
        let (respond, response) = oneshot::channel();
        // A task of its own: the request is dropped when the client goes, and an attached stream
        // has to be detached then, too.
        let gateway = self.clone();
        self.tasks.spawn(async move { gateway.carry(admission, slot, respond).await });
        response.await.unwrap_or_else(|_| empty(StatusCode::INTERNAL_SERVER_ERROR))
    }

    fn refuse(&self, refused: &NotAdmitted) -> Response<Body> {
        self.stream_metrics().refused(refused.reason());
        let NotAdmitted { call, .. } = refused;
        let call_sid = call.as_ref().map(tracing::field::display);
        match refused.status {
            StatusCode::TOO_MANY_REQUESTS => {
                tracing::debug!(call_sid, reason = refused.reason(), "stream refused");
            }
            status => {
                let status = status.as_u16();
                tracing::warn!(
                    call_sid, status, reason = refused.reason(), from = %refused.from,
                    "stream refused"
                );
            }
        }
        let mut response = empty(refused.status);
        if refused.status == StatusCode::UPGRADE_REQUIRED {
            let headers = response.headers_mut();
            headers.insert("sec-websocket-version", header::HeaderValue::from_static("13"));
            headers.insert(header::UPGRADE, header::HeaderValue::from_static("websocket"));
            headers.insert(header::CONNECTION, header::HeaderValue::from_static("Upgrade"));
        }
        response
    }

    /// Tells every stream to close, and waits for them at most for `time`.
    pub(crate) async fn stop(&self, time: Duration) {
        self.streams.order_all(Order::Stop);
        self.tasks.close();
        if tokio::time::timeout(time, self.tasks.wait()).await.is_err() {
            tracing::warn!(streams = self.streams.count(), "media streams did not close in time");
        }
    }
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// Named after the replica, so that operators recognise it; unique for each run of it.
fn gateway_id(identity: &str) -> GatewayId {
    let name: String = identity
        .to_ascii_lowercase()
        .chars()
        .filter(|it| it.is_ascii_alphanumeric() || matches!(it, '-' | '.'))
        .take(63)
        .collect();
    let name = if name.is_empty() { "gateway" } else { &name };
    format!("{name}-{:08x}", crate::random_u32()).parse().expect("a valid gateway id")
}
