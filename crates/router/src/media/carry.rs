//! One stream, from its admission to its end.

use std::{
    fmt,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use axum::{body::Body, http::HeaderMap};
use hyper::{Response, StatusCode, upgrade::OnUpgrade};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{
    Gateway,
    admission::{Admission, NotAdmitted},
    agents::{self, AgentConnection, AgentTarget, Protocols},
    empty,
    failover::{NoAgent, Search},
    sockets::{self, ProviderSocket},
    streams::{self, OpenStream, PodConnection, StreamSlot},
};
use fleet::{
    Attach, Detach, EndCause, PodFailure,
    names::{CallSid, StreamId},
};
use media::relay::{Relay, StreamEnd};
use spans::RequestSpan;

/// A stream with both of its sides.
struct Connected {
    provider: ProviderSocket,
    /// Bytes of the provider that came with its handshake.
    received: Vec<u8>,
    agent: AgentConnection,
    target: AgentTarget,
}

/// How a stream ended.
pub(super) enum Ended {
    /// No pod was connected before the provider's handshake was answered.
    NotConnected(NoAgent),
    /// The pod was lost, and no other was found.
    NotContinued {
        end: StreamEnd,
        reason: NoAgent,
    },
    Stream(StreamEnd),
}

impl Ended {
    fn cause(&self) -> EndCause {
        match self {
            Self::NotConnected(_) => EndCause::Unreachable,
            Self::NotContinued { end, .. } | Self::Stream(end) => match end {
                StreamEnd::Agent(_) => EndCause::Agent,
                StreamEnd::AgentLost(_) => EndCause::PodLost,
                StreamEnd::Displaced => EndCause::Displaced,
                StreamEnd::Provider { .. }
                | StreamEnd::ProviderTimeout
                | StreamEnd::ProviderViolation(_) => EndCause::Provider,
                // The store has the cause of a release. Without one, the provider has lost the
                // stream, and the gateway did not notice.
                StreamEnd::Released | StreamEnd::Stopping => EndCause::Gateway,
            },
        }
    }

    /// The failure of the stream's last pod, unless a failover has recorded it.
    fn pod_failure(&self) -> PodFailure {
        match self {
            Self::NotConnected(NoAgent::Unreachable { failure, .. })
            | Self::NotContinued { reason: NoAgent::Unreachable { failure, .. }, .. } => {
                failure.clone()
            }
            Self::NotConnected(_) | Self::NotContinued { .. } => PodFailure::default(),
            Self::Stream(end) => pod_failure(*end),
        }
    }

    /// Close code for the provider.
    fn close_code(&self) -> u16 {
        match self {
            Self::NotConnected(reason) => reason.close_code(StreamEnd::Released),
            Self::NotContinued { end, reason } => reason.close_code(*end),
            Self::Stream(end) => end.close_code(),
        }
    }
}

/// The reason of a lost pod; none for other ends.
fn pod_failure(end: StreamEnd) -> PodFailure {
    match end {
        StreamEnd::AgentLost(loss) => PodFailure::new(&format_args!("the stream was lost: {loss}")),
        _ => PodFailure::default(),
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotConnected(reason) => write!(f, "no pod connected: {reason}"),
            Self::NotContinued { end, reason } => write!(f, "{end}; not continued: {reason}"),
            Self::Stream(end) => end.fmt(f),
        }
    }
}

impl Gateway {
    /// Carries one stream from its admission to its end.
    pub(super) async fn carry(
        self: Arc<Self>,
        admission: Admission,
        slot: StreamSlot,
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
        let span = self.begin_span(&admission.trace_headers, &call);
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
                let failure = PodFailure::default();
                let detach = Detach { call, stream, cause: EndCause::Gateway, failure };
                return drop(self.store.detach(&detach).await);
            }
        };
        let connection = PodConnection::new(stream, pod_attempt, &attached);
        let open = self.streams.open(call, connection, slot);
        let traceparent = span.as_ref().map(|span| span.header());
        // Boxed, so that the state of the handshakes takes no memory during the stream.
        let connect = Box::pin(async {
            let Handshake { target, accept, upgrade } = handshake(admission, traceparent);
            open.set_moving(true);
            let agent = self.connect_agent(&open, &target, attached, &Search::first(None)).await;
            open.set_moving(false);
            accept_provider(agent, target, accept, upgrade, respond).await
        });
        let ended = match connect.await {
            Ok(connected) => self.relay(connected, &open).await,
            Err(ended) => ended,
        };
        self.finish(&open, ended, span).await;
    }

    pub(super) fn begin_span(
        &self,
        trace_headers: &HeaderMap,
        call: &CallSid,
    ) -> Option<RequestSpan> {
        let tracer = self.tracer.as_ref()?;
        Some(tracer.request(trace_headers, |span| {
            span.name = "stream".into();
            span.set("call_sid", call.to_string());
            span.set("gateway", self.id.to_string());
        }))
    }

    /// Relays until the stream ends, over failovers from one agent to the next, and closes both
    /// sides.
    async fn relay(self: &Arc<Self>, connected: Connected, open: &Arc<OpenStream>) -> Ended {
        let Connected { provider, received, agent, target } = connected;
        let (handle, gaps) = (open.handle.clone(), self.streams.gaps.clone());
        let relay = Relay::new(provider, &received, self.limits, handle, gaps);
        drop(received);
        self.relay_from(relay, agent, &target, open).await
    }

    /// Relays a stream that begins with `agent`, as [`Self::relay`] does.
    pub(super) async fn relay_from(
        self: &Arc<Self>,
        mut relay: Relay<ProviderSocket>,
        agent: AgentConnection,
        target: &AgentTarget,
        open: &Arc<OpenStream>,
    ) -> Ended {
        let AgentConnection { mut socket, mut early, .. } = agent;
        let ended = loop {
            let end = relay.run(&mut socket, early, open.ping()).await;
            agents::close(socket).await;
            let cause = match end {
                StreamEnd::AgentLost(_) => EndCause::PodLost,
                StreamEnd::Displaced => EndCause::Displaced,
                end => break Ended::Stream(end),
            };
            if !relay.may_continue() {
                break Ended::Stream(end);
            }
            match Box::pin(self.fail_over(&mut relay, open, target, end, cause)).await {
                Ok(agent) => (socket, early) = (agent.socket, agent.early),
                Err(ended) => break ended,
            }
        };
        Box::pin(async {
            tokio::join!(self.detach(open, &ended), relay.close(ended.close_code(), ""));
        })
        .await;
        ended
    }

    /// Finds the next agent of a stream that has lost its pod, and begins with it.
    async fn fail_over(
        self: &Arc<Self>,
        relay: &mut Relay<ProviderSocket>,
        open: &Arc<OpenStream>,
        target: &AgentTarget,
        end: StreamEnd,
        cause: EndCause,
    ) -> Result<AgentConnection, Ended> {
        let lost_at = Instant::now();
        let connection = open.connection();
        tracing::warn!(
            call_sid = %open.call, pod = %connection.pod, reason = %end,
            "the stream has lost its pod; failing over"
        );
        relay.leave_agent();
        let failure = pod_failure(end);
        let is_over = CancellationToken::new();
        open.set_moving(true);
        let mut search = pin!(self.next_agent(open, target, cause, failure, &is_over));
        let next = relay.hold(search.as_mut()).await;
        if next.is_err() {
            is_over.cancel();
            drop(search.await);
        }
        open.set_moving(false);
        let agent = match next {
            Ok(Ok(agent)) => agent,
            Ok(Err(reason)) => {
                self.stream_metrics().failover_failed(cause.as_str());
                return Err(Ended::NotContinued { end, reason });
            }
            Err(end) => return Err(Ended::Stream(end)),
        };
        relay.replay_opening();
        let gap = lost_at.elapsed();
        self.stream_metrics().failed_over(cause.as_str(), gap);
        tracing::info!(
            call_sid = %open.call, pod = %open.connection().pod, former_pod = %connection.pod,
            gap_ms = gap.as_millis() as u64, "the stream goes on with another pod"
        );
        Ok(agent)
    }

    /// Detaches the stream. A failover whose reply did not come may have given it another id.
    pub(super) async fn detach(&self, open: &OpenStream, ended: &Ended) {
        let next = open.take_next();
        if !open.is_detached.swap(true, Ordering::Relaxed) {
            self.detach_as(open, open.connection().stream, ended).await;
        }
        if let Some(next) = next {
            self.detach_as(open, next, ended).await;
        }
    }

    async fn detach_as(&self, open: &OpenStream, stream: StreamId, ended: &Ended) {
        let (call, failure) = (open.call.clone(), ended.pod_failure());
        let detach = Detach { call, stream, cause: ended.cause(), failure };
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
    pub(super) async fn finish(
        &self,
        open: &Arc<OpenStream>,
        ended: Ended,
        mut span: Option<RequestSpan>,
    ) {
        Box::pin(self.detach(open, &ended)).await;
        self.streams.close(open);
        let figures = open.figures();
        let connection = open.connection();
        let text = ended.to_string();
        let trace_id = span.as_ref().and_then(RequestSpan::trace).map(|id| id.to_string());
        tracing::info!(
            call_sid = %open.call,
            pod = %connection.pod,
            pool = %connection.pool,
            stream = %connection.stream,
            end = text,
            failovers = open.moves.load(Ordering::Relaxed),
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
            span.set("pod", connection.pod.to_string());
            span.set("source_pool", connection.pool.to_string());
            span.set("end", text);
            if matches!(ended.cause(), EndCause::PodLost | EndCause::Unreachable) {
                span.fail(ended.cause().as_str());
            }
        }
    }
}

/// The parts of an admission: for the agents, and for the response to the provider.
struct Handshake {
    target: AgentTarget,
    accept: String,
    upgrade: OnUpgrade,
}

fn handshake(admission: Admission, traceparent: Option<hyper::header::HeaderValue>) -> Handshake {
    let Admission { call, target: path, protocols, parameters, from, upgrade, accept, .. } =
        admission;
    let protocols = Protocols::Offered(protocols);
    let target = AgentTarget { call, path, protocols, parameters, from, traceparent };
    Handshake { target, accept, upgrade }
}

/// Answers the provider's handshake: with that of the agent, or with an error.
async fn accept_provider(
    agent: Result<AgentConnection, NoAgent>,
    mut target: AgentTarget,
    accept: String,
    upgrade: OnUpgrade,
    respond: oneshot::Sender<Response<Body>>,
) -> Result<Connected, Ended> {
    let agent = match agent {
        Ok(agent) => agent,
        Err(reason) => {
            drop(respond.send(empty(reason.status())));
            return Err(Ended::NotConnected(reason));
        }
    };
    let response = super::admission::accepted(&accept, agent.protocol.as_deref());
    target.protocols = Protocols::Chosen(agent.protocol.clone());
    let provider = match respond.send(response).is_ok() {
        true => sockets::upgraded(upgrade).await,
        false => None,
    };
    let gone = Ended::Stream(StreamEnd::Provider { code: None });
    let (provider, received) = provider.ok_or(gone)?;
    Ok(Connected { provider, received, agent, target })
}
