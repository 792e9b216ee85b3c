//! The media gateway. A provider opens the stream of a call here; the gateway attaches it to the
//! call in the store, connects to the call's pod, and relays frames until one side ends. Agents
//! need no code for the router: the gateway renews the lease of the call and ends the call with
//! its stream.

mod admission;
mod agents;
mod keys;
mod sockets;
mod streams;
mod upkeep;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::Body;
use hyper::{Request, Response, StatusCode, body::Incoming, header};
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

pub use self::streams::StreamFigures;
use self::{
    admission::{Admission, NotAdmitted},
    agents::{AgentConnection, AgentConnector},
    keys::Keys,
    sockets::ProviderSocket,
    streams::{OpenStream, Streams},
};
use crate::{
    auth::Access,
    config::MediaConfig,
    http::middleware::rate_limit::RateLimiter,
    lifecycle::Lifecycle,
    telemetry::metrics::{Metrics, StreamMetrics},
};
use fleet::{
    Attach, Attached, Detach, EndCause, Millis,
    names::{CallSid, GatewayId},
};
use media::{
    relay::{Limits, Relay, StreamEnd},
    stats::Order,
};
use spans::{RequestSpan, Tracer};
use store::{Store, StoreError};

/// The part of a stream URL before the call.
pub const PATH_PREFIX: &str = "/media/";

/// The media gateway of this process.
pub struct Gateway {
    id: GatewayId,
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    lifecycle: Arc<Lifecycle>,
    rate_limiter: Arc<RateLimiter>,
    tracer: Option<Arc<Tracer>>,
    keys: Keys,
    /// Public base of stream URLs.
    base_url: String,
    agents: AgentConnector,
    limits: Limits,
    /// Lease of this gateway.
    lease: Millis,
    /// Lease of an attached call.
    call_lease: Millis,
    streams: Streams,
    tasks: TaskTracker,
}

/// What the gateway shares with the rest of the router.
pub struct GatewayParts {
    pub store: Arc<dyn Store>,
    pub metrics: Arc<Metrics>,
    pub lifecycle: Arc<Lifecycle>,
    pub access: Arc<Access>,
    pub rate_limiter: Arc<RateLimiter>,
    pub tracer: Option<Arc<Tracer>>,
    /// Identity of this replica.
    pub identity: String,
    pub base_url: String,
    pub call_lease: Millis,
    pub max_streams: usize,
    /// The server of simulated agents.
    pub simulated_agents: Option<SocketAddr>,
}

impl Gateway {
    pub fn new(config: &MediaConfig, parts: GatewayParts) -> Result<Arc<Self>, String> {
        let limits = Limits {
            max_frame: config.max_frame,
            provider_timeout: config.idle_timeout,
            wrap_up: config.wrap_up,
            ..Limits::default()
        };
        let gateway = Arc::new(Self {
            id: gateway_id(&parts.identity),
            keys: Keys::new(parts.access),
            base_url: parts.base_url,
            agents: AgentConnector::new(config.agent_tls.as_ref(), parts.simulated_agents)?,
            limits,
            lease: config.lease.as_millis() as Millis,
            call_lease: parts.call_lease,
            streams: Streams::new(parts.max_streams, parts.metrics.streams.clone()),
            tasks: TaskTracker::new(),
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
    pub fn url(&self, call: &CallSid, pod_attempt: u32, path: &str) -> Option<String> {
        let token = self.keys.sign(call, pod_attempt, path)?;
        Some([&self.base_url, PATH_PREFIX, call.as_str(), "/", &token, path].concat())
    }

    /// Reads the key of stream tokens from the store, unless it is known or configured.
    pub async fn load_key(&self) -> Result<(), StoreError> {
        if self.keys.is_known() { Ok(()) } else { self.keys.refresh(self.store.as_ref()).await }
    }

    /// Figures of a stream that this process relays.
    pub fn figures(&self, call: &CallSid) -> Option<StreamFigures> {
        self.streams.figures(call)
    }

    pub fn id(&self) -> &GatewayId {
        &self.id
    }

    fn stream_metrics(&self) -> &StreamMetrics {
        &self.metrics.streams
    }

    /// Responds to a request below [`PATH_PREFIX`].
    pub async fn serve(
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
        let admission = match self.admit(request, peer) {
            Ok(admission) => admission,
            Err(refused) => return self.refuse(&refused),
        };
        let (respond, response) = oneshot::channel();
        // A task of its own: the request is dropped when the client goes, and an attached stream
        // has to be detached then, too.
        let gateway = self.clone();
        self.tasks.spawn(async move { gateway.carry(admission, respond).await });
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

    /// Carries one stream from its admission to its end.
    async fn carry(
        self: Arc<Self>,
        admission: Admission,
        respond: oneshot::Sender<Response<Body>>,
    ) {
        let (call, pod_attempt) = (admission.call.clone(), admission.pod_attempt);
        let stream = streams::new_stream_id();
        let attach = Attach {
            call: call.clone(),
            pod_attempt,
            gateway: self.id.clone(),
            gateway_lease: self.lease,
            stream: stream.clone(),
            lease_ttl: self.call_lease,
            connected: None,
        };
        let span = self.begin_span(&admission);
        let attached = match &span {
            Some(span) => Box::pin(span.during(self.store.attach(&attach))).await,
            None => self.store.attach(&attach).await,
        };
        drop(attach);
        let attached = match attached {
            Ok(Ok(attached)) => attached,
            Ok(Err(refused)) => {
                let refused = NotAdmitted::attach(&admission, refused);
                return drop(respond.send(self.refuse(&refused)));
            }
            Err(error) => {
                tracing::warn!(call_sid = %call, %error, "the store could not attach a stream");
                self.stream_metrics().refused("storage_error");
                drop(respond.send(empty(StatusCode::SERVICE_UNAVAILABLE)));
                // The attach may have taken effect.
                let detach = Detach { call, stream, cause: EndCause::Gateway };
                return drop(self.store.detach(&detach).await);
            }
        };
        let open = self.streams.open(&admission, stream, &attached);
        // Boxed, so that the state of the handshakes takes no memory during the stream.
        let connect = Box::pin(self.connect(admission, &attached, span.as_ref(), respond));
        let ended = match connect.await {
            Ok(connected) => self.relay(connected, &open).await,
            Err(ended) => ended,
        };
        self.finish(&open, &attached, ended, span).await;
    }

    fn begin_span(&self, admission: &Admission) -> Option<RequestSpan> {
        let tracer = self.tracer.as_ref()?;
        Some(tracer.request(&admission.trace_headers, |span| {
            span.name = "stream".into();
            span.set("call_sid", admission.call.to_string());
            span.set("gateway", self.id.to_string());
        }))
    }

    /// Connects to the pod, and accepts the provider's handshake.
    async fn connect(
        &self,
        admission: Admission,
        attached: &Attached,
        span: Option<&RequestSpan>,
        respond: oneshot::Sender<Response<Body>>,
    ) -> Result<Connected, Ended> {
        let traceparent = span.map(|span| span.header());
        let started = Instant::now();
        let connected = self.agents.connect(&admission, attached, traceparent.as_ref()).await;
        self.stream_metrics().connected(started.elapsed(), connected.is_ok());
        let agent = match connected {
            Ok(agent) => agent,
            Err(error) => {
                tracing::warn!(
                    call_sid = %admission.call, pod = %attached.pod, %error,
                    "cannot connect the stream to its pod"
                );
                drop(respond.send(empty(StatusCode::BAD_GATEWAY)));
                return Err(Ended::Unreachable(error.to_string()));
            }
        };
        let is_waiting = respond.send(admission.accept(agent.protocol.as_deref())).is_ok();
        let provider = match is_waiting {
            true => sockets::upgraded(admission.upgrade).await,
            false => None,
        };
        let (provider, received) =
            provider.ok_or(Ended::Stream(StreamEnd::Provider { code: None }))?;
        Ok(Connected { provider, received, agent })
    }

    /// Relays until the stream ends, and closes both sides.
    async fn relay(&self, connected: Connected, open: &OpenStream) -> Ended {
        let Connected { provider, received, agent } = connected;
        let AgentConnection { mut socket, early, .. } = agent;
        let (handle, gaps) = (open.handle.clone(), self.streams.gaps.clone());
        let mut relay = Relay::new(provider, &received, self.limits, handle, gaps);
        drop(received);
        let end = relay.run(&mut socket, early, open.ping()).await;
        let ended = Ended::Stream(end);
        agents::close(socket).await;
        Box::pin(async {
            tokio::join!(self.detach(open, &ended), relay.close(end.close_code(), ""));
        })
        .await;
        ended
    }

    async fn detach(&self, open: &OpenStream, ended: &Ended) {
        if open.is_detached.swap(true, std::sync::atomic::Ordering::Relaxed) {
            return;
        }
        let (call, stream) = (open.call.clone(), open.stream.clone());
        let detach = Detach { call, stream, cause: ended.cause() };
        match self.store.detach(&detach).await {
            Ok(Ok(released)) => {
                self.metrics.released(Some(&released.source_pool), "success");
                self.metrics.call_lasted(&released.source_pool, released.lasted);
            }
            Ok(Err(_)) => self.metrics.released(None, "not_found"),
            Err(error) => {
                self.metrics.released(None, "error");
                tracing::warn!(call_sid = %open.call, %error, "the store could not detach a stream");
            }
        }
    }

    /// Detaches the stream, and writes its log line and span.
    async fn finish(
        &self,
        open: &OpenStream,
        attached: &Attached,
        ended: Ended,
        mut span: Option<RequestSpan>,
    ) {
        Box::pin(self.detach(open, &ended)).await;
        self.streams.close(open);
        let figures = open.figures();
        let text = ended.to_string();
        let trace_id = span.as_ref().and_then(RequestSpan::trace).map(|id| id.to_string());
        tracing::info!(
            call_sid = %open.call,
            pod = %attached.pod,
            pool = %attached.pool,
            stream = %open.stream,
            end = text,
            duration_ms = open.opened.elapsed().as_millis() as u64,
            provider = figures.provider,
            frames_from_provider = figures.from_provider.frames,
            frames_from_agent = figures.from_agent.frames,
            longest_gap_ms_provider = figures.from_provider.longest_gap.as_millis() as u64,
            longest_gap_ms_agent = figures.from_agent.longest_gap.as_millis() as u64,
            trace_id,
            "stream"
        );
        if let Some(span) = span.as_mut().and_then(RequestSpan::span) {
            span.set("pod", attached.pod.to_string());
            span.set("source_pool", attached.pool.to_string());
            span.set("end", text);
            if matches!(ended.cause(), EndCause::PodLost | EndCause::Unreachable) {
                span.fail(ended.cause().as_str());
            }
        }
    }

    /// Tells every stream to close, and waits for them at most for `time`.
    pub async fn stop(&self, time: Duration) {
        self.streams.order_all(Order::Stop);
        self.tasks.close();
        if tokio::time::timeout(time, self.tasks.wait()).await.is_err() {
            tracing::warn!(streams = self.streams.count(), "media streams did not close in time");
        }
    }
}

/// A stream with both of its sides.
struct Connected {
    provider: ProviderSocket,
    /// Bytes of the provider that came with its handshake.
    received: Vec<u8>,
    agent: AgentConnection,
}

/// How a stream ended.
enum Ended {
    /// The pod could not be connected.
    Unreachable(String),
    Stream(StreamEnd),
}

impl Ended {
    fn cause(&self) -> EndCause {
        match self {
            Self::Unreachable(_) => EndCause::Unreachable,
            Self::Stream(end) => match end {
                StreamEnd::Agent(_) => EndCause::Agent,
                StreamEnd::AgentLost(_) => EndCause::PodLost,
                StreamEnd::Provider { .. }
                | StreamEnd::ProviderTimeout
                | StreamEnd::ProviderViolation(_) => EndCause::Provider,
                // The store has the cause of the release.
                StreamEnd::Released => EndCause::Operator,
                StreamEnd::Stopping => EndCause::Gateway,
            },
        }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unreachable(error) => write!(f, "pod unreachable: {error}"),
            Self::Stream(end) => end.fmt(f),
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
