//! One stream that no webhook has announced: the gateway reads its start message, allocates a pod
//! to the call that it names, and relays as for any other stream.

use std::{net::IpAddr, pin::pin, sync::Arc, time::Duration};

use aws_lc_rs::rand;
use axum::body::Body;
use data_encoding::HEXLOWER;
use hyper::Response;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    Gateway,
    admission::accepted,
    agents::{AgentConnection, AgentTarget, Protocols},
    carry::Ended,
    connect_admission::ConnectAdmission,
    failover::{NoAgent, Search},
    sockets::{self, ProviderSocket},
    streams::{OpenStream, PodConnection, StreamSlot, new_stream_id},
};
use fleet::{
    Allocate, Allocation, Attach, AttachRefused, Attached, Detach, EndCause, Hold, NotReleased,
    Refusal, RefusalReason, Release,
    names::{CallSid, InvalidName},
};
use media::relay::{Relay, StreamEnd};
use spans::RequestSpan;
use store::StoreError;
use telephony::{CallRequest, InvalidStart, Params, Provider};

/// Time from the handshake to the start message.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that the store's clock may be behind this router's clock.
const CLOCK_SKEW: Duration = Duration::from_millis(100);
/// Shortest pause between two polls of a waiting call.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The reason why a stream has no call.
#[derive(Debug, thiserror::Error)]
enum NoCall {
    #[error("no start message within {} s", START_TIMEOUT.as_secs())]
    NoStart,
    #[error(transparent)]
    InvalidStart(#[from] InvalidStart),
    #[error("the call exists already")]
    CallExists,
    #[error("no pod: {}", .0.as_str())]
    Refused(RefusalReason),
    #[error("{0}")]
    Store(StoreError),
    /// The provider or the gateway ended the stream, or the call was released.
    #[error("{0}")]
    Ended(StreamEnd),
}

impl NoCall {
    /// Close code for the provider.
    fn close_code(&self) -> u16 {
        match self {
            Self::NoStart | Self::InvalidStart(_) | Self::CallExists => 1008,
            Self::Refused(_) | Self::Store(_) => 1013,
            Self::Ended(end) => end.close_code(),
        }
    }

    /// The label in metrics and logs; `None` if the stream was not refused.
    fn reason(&self) -> Option<&'static str> {
        Some(match self {
            Self::NoStart => "no_start",
            Self::InvalidStart(_) | Self::Ended(StreamEnd::ProviderViolation(_)) => "invalid_start",
            Self::CallExists => "call_exists",
            Self::Refused(RefusalReason::Limit(limit)) => limit.as_str(),
            Self::Refused(_) => "no_pods",
            Self::Store(_) => "storage_error",
            Self::Ended(_) => return None,
        })
    }
}

/// A stream with its call and the result of connecting it.
struct Opened {
    open: Arc<OpenStream>,
    agent: Result<AgentConnection, NoAgent>,
}

/// A refused stream, for its log line.
struct Unopened<'a> {
    provider: Provider,
    call: Option<&'a CallSid>,
    from: IpAddr,
    cause: NoCall,
}

impl Gateway {
    /// Carries a stream whose call is not known yet from its admission to its end.
    pub(super) async fn carry_connect(
        self: Arc<Self>,
        admission: ConnectAdmission,
        respond: oneshot::Sender<Response<Body>>,
    ) {
        let ConnectAdmission {
            provider,
            query,
            protocol,
            from,
            trace_headers,
            upgrade,
            accept,
            slot,
        } = admission;
        if respond.send(accepted(&accept, protocol)).is_err() {
            return;
        }
        let Some((socket, received)) = sockets::upgraded(upgrade).await else { return };
        let (handle, gaps) = (slot.handle.clone(), self.streams.gaps.clone());
        let mut relay = Relay::new(socket, &received, self.limits, handle, gaps);
        drop(received);
        let request = match Box::pin(self.read_start(&mut relay, provider, &query)).await {
            Ok(request) => request,
            Err(cause) => {
                let unopened = Unopened { provider, call: None, from, cause };
                return self.close_unopened(relay, unopened).await;
            }
        };
        let call = request.call.clone();
        let span = self.begin_span(&trace_headers, &call);
        let target = AgentTarget {
            call: call.clone(),
            path: self.at_connect.path.fill(&request),
            protocols: Protocols::Chosen(protocol.map(str::to_owned)),
            parameters: request.parameters.clone(),
            from,
            traceparent: span.as_ref().map(|span| span.header()),
        };
        let found = Box::pin(async {
            let find = self.find_agent(&mut relay, &request, &target, slot);
            match &span {
                Some(span) => span.during(find).await,
                None => find.await,
            }
        });
        let (opened, end) = found.await;
        match (opened, end) {
            (Ok(Opened { open, agent: Ok(agent) }), None) => {
                relay.replay_opening();
                let ended = self.relay_from(relay, agent, &target, &open).await;
                self.finish(&open, ended, span).await;
            }
            (Ok(Opened { open, agent: Err(reason) }), None) => {
                let code = if matches!(reason, NoAgent::CallEnded) { 1000 } else { 1013 };
                self.end_unconnected(relay, &open, Ended::NotConnected(reason), code, span).await;
            }
            (Ok(Opened { open, .. }), Some(end)) => {
                let (ended, code) = (Ended::Stream(end), end.close_code());
                self.end_unconnected(relay, &open, ended, code, span).await;
            }
            (Err(cause), end) => {
                let cause = end.map_or(cause, NoCall::Ended);
                let unopened = Unopened { provider, call: Some(&call), from, cause };
                self.close_unopened(relay, unopened).await;
            }
        }
    }

    /// Reads the provider's opening and the call that it names.
    async fn read_start(
        &self,
        relay: &mut Relay<ProviderSocket>,
        provider: Provider,
        query: &Params,
    ) -> Result<CallRequest, NoCall> {
        let opened = timeout(START_TIMEOUT, relay.read_opening());
        opened.await.map_err(|_| NoCall::NoStart)?.map_err(NoCall::Ended)?;
        let message = relay.start_message().ok_or(InvalidStart::NotStart)?;
        let request = CallRequest::from_start(provider, query, &message, new_call_id)?;
        // The same call ids as in verified webhooks.
        let format = provider.dialect().call_format();
        let format = format.filter(|_| self.access.keys(provider).is_some());
        if let Some(format) = format.filter(|format| !format.matches(request.call.as_str())) {
            let call = request.call.as_str();
            return Err(
                InvalidStart::from(InvalidName::new("call_sid", call, format.expected())).into()
            );
        }
        Ok(request)
    }

    /// Allocates a pod and connects the stream to it, while the provider's side stays open. If that
    /// side ends first, the steps that have begun are completed, so that none of them is left in
    /// the store: the second value is the end then.
    async fn find_agent(
        self: &Arc<Self>,
        relay: &mut Relay<ProviderSocket>,
        request: &CallRequest,
        target: &AgentTarget,
        slot: StreamSlot,
    ) -> (Result<Opened, NoCall>, Option<StreamEnd>) {
        let ended = CancellationToken::new();
        let mut work = pin!(async {
            let allocation = self.allocate_at_connect(request, &ended).await?;
            let (open, attached) = self.attach_new(request, &allocation, slot).await?;
            let agent = match ended.is_cancelled() {
                true => Err(NoAgent::CallEnded),
                false => {
                    let search = Search::first(Some(&ended));
                    self.connect_agent(&open, target, attached, &search).await
                }
            };
            Ok(Opened { open, agent })
        });
        match relay.hold(work.as_mut()).await {
            Ok(opened) => (opened, None),
            Err(end) => {
                ended.cancel();
                (work.await, Some(end))
            }
        }
    }

    /// Allocates a pod to a new call; it waits for one where calls may wait. A call that exists is
    /// left as it is: its id is known to others than the provider, and a second stream must not
    /// get its pod.
    async fn allocate_at_connect(
        &self,
        request: &CallRequest,
        ended: &CancellationToken,
    ) -> Result<Allocation, NoCall> {
        // An allocate request would extend the lease of a provisional call.
        if self.store.call(&request.call).await.map_err(NoCall::Store)?.is_some() {
            return Err(NoCall::CallExists);
        }
        let hold = self.hold.as_ref().map(|hold| hold.hold(hold.time));
        let mut allocate = Allocate {
            provisional: true,
            expects_stream: true,
            hold,
            ..Allocate::new(request.call.clone(), request.merchant.clone(), self.at_connect.lease)
        };
        let listener = self.store.handoffs().listen(&request.call);
        let ends = Instant::now() + Duration::from_millis(hold.map_or(0, |hold| hold.time));
        // Whether this stream has put the call into the queues.
        let mut is_waiting = false;
        loop {
            let mut woken = pin!(listener.notified());
            woken.as_mut().enable();
            let outcome = self.store.allocate(&allocate).await;
            self.count_allocation(request, &outcome);
            match outcome {
                Ok(Ok(allocation)) if is_waiting || is_new(&allocation) => return Ok(allocation),
                // Another request has allocated the call, or waits for it, since the check above.
                Ok(Ok(_)) => return Err(NoCall::CallExists),
                Ok(Err(Refusal { reason, .. })) => match reason {
                    // The call was released while it waited, and has entered the queue again.
                    RefusalReason::Waiting { is_new: true, .. } if is_waiting => {
                        self.leave_queue(&request.call).await;
                        return Err(NoCall::Ended(StreamEnd::Released));
                    }
                    RefusalReason::Waiting { is_new, .. } if is_new || is_waiting => {
                        is_waiting = true;
                    }
                    RefusalReason::Waiting { .. } => return Err(NoCall::CallExists),
                    reason => return Err(NoCall::Refused(reason)),
                },
                // A waiting call outlasts a short outage of the store.
                Err(error) if !is_waiting => return Err(NoCall::Store(error)),
                Err(error) if Instant::now() >= ends => {
                    self.leave_queue(&request.call).await;
                    return Err(NoCall::Store(error));
                }
                Err(_) => {}
            }
            let now = Instant::now();
            if now >= ends + CLOCK_SKEW {
                self.leave_queue(&request.call).await;
                return Err(NoCall::Refused(RefusalReason::NoPods));
            }
            let poll = self.hold.as_ref().map_or(MIN_POLL_INTERVAL, |hold| hold.poll_interval);
            let pause = poll.min(ends.saturating_duration_since(now)).max(MIN_POLL_INTERVAL);
            tokio::select! {
                () = woken => {}
                () = sleep(pause) => {}
                () = ended.cancelled() => {
                    self.leave_queue(&request.call).await;
                    return Err(NoCall::Refused(RefusalReason::NoPods));
                }
            }
            if Instant::now() >= ends {
                // A call whose time is over must not be enqueued again.
                allocate.hold = hold.map(|hold| Hold { time: 0, ..hold });
            }
        }
    }

    /// Removes a waiting call from the queues.
    pub(super) async fn leave_queue(&self, call: &CallSid) {
        let release =
            Release { call: call.clone(), pod: None, pod_attempt: None, cause: EndCause::Provider };
        match self.store.release(&release).await {
            Ok(Err(NotReleased::WasWaiting { waited })) => self.metrics.abandoned(waited),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(
                    call_sid = %call, %error,
                    "a waiting call could not leave the queue; it does when it stops polling"
                );
            }
        }
    }

    fn count_allocation(
        &self,
        request: &CallRequest,
        outcome: &Result<Result<Allocation, Refusal>, StoreError>,
    ) {
        let malformed = match outcome {
            Ok(Ok(allocation)) => {
                let result = if allocation.was_existing { "existing" } else { "success" };
                self.metrics.allocated(Some(&allocation.pool), result);
                if let Some(waited) = allocation.waited {
                    self.metrics.waited("served", waited);
                }
                allocation.malformed_merchant.as_ref()
            }
            Ok(Err(refusal)) => {
                self.metrics.refused(refusal);
                refusal.malformed_merchant.as_ref()
            }
            Err(_) => {
                self.metrics.allocated(None, "storage_error");
                None
            }
        };
        if let (Some(malformed), Some(merchant)) = (malformed, &request.merchant) {
            self.metrics.malformed_merchants.inc();
            tracing::warn!(
                %merchant, %malformed,
                "merchant document is malformed; using the default chain"
            );
        }
    }

    /// Attaches the stream to its new call.
    async fn attach_new(
        &self,
        request: &CallRequest,
        allocation: &Allocation,
        slot: StreamSlot,
    ) -> Result<(Arc<OpenStream>, Attached), NoCall> {
        let attach = Attach {
            call: request.call.clone(),
            pod_attempt: allocation.pod_attempt,
            gateway: self.id.clone(),
            gateway_lease: self.lease,
            stream: new_stream_id(),
            lease_ttl: self.call_lease,
            connected: None,
        };
        let attached = match self.store.attach(&attach).await {
            Ok(Ok(attached)) => attached,
            Ok(Err(refused)) => {
                return Err(match refused {
                    // Released since.
                    AttachRefused::NotFound => NoCall::Ended(StreamEnd::Released),
                    // A client with a stream URL of the same call was faster.
                    AttachRefused::OtherAttempt | AttachRefused::AlreadyAttached => {
                        NoCall::CallExists
                    }
                    AttachRefused::NoPods | AttachRefused::UnknownPod => {
                        NoCall::Refused(RefusalReason::NoPods)
                    }
                });
            }
            Err(error) => {
                self.undo_attach(attach, allocation).await;
                return Err(NoCall::Store(error));
            }
        };
        let connection = PodConnection::new(attach.stream, attach.pod_attempt, &attached);
        Ok((self.streams.open(attach.call, connection, slot), attached))
    }

    /// Ends a call whose attach has failed: the attach may have taken effect or not.
    async fn undo_attach(&self, attach: Attach, allocation: &Allocation) {
        let Attach { call, stream, pod_attempt, .. } = attach;
        let cause = EndCause::Gateway;
        let detach =
            Detach { call: call.clone(), stream, cause, failure: fleet::PodFailure::default() };
        let undone = match self.store.detach(&detach).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                let pod = Some(allocation.pod.clone());
                let release = Release { call, pod, pod_attempt: Some(pod_attempt), cause };
                self.store.release(&release).await.map(drop)
            }
        };
        if let Err(error) = undone {
            tracing::warn!(
                call_sid = %detach.call, %error,
                "the store could not release a call without a stream; CONNECT_TIMEOUT ends it"
            );
        }
    }

    /// Ends a stream that has a call and no agent.
    async fn end_unconnected(
        &self,
        relay: Relay<ProviderSocket>,
        open: &Arc<OpenStream>,
        ended: Ended,
        code: u16,
        span: Option<RequestSpan>,
    ) {
        tokio::join!(self.detach(open, &ended), relay.close(code, ""));
        self.finish(open, ended, span).await;
    }

    /// Closes a stream that has no call.
    async fn close_unopened(&self, relay: Relay<ProviderSocket>, unopened: Unopened<'_>) {
        let Unopened { provider, call, from, cause } = unopened;
        let call_sid = call.map(tracing::field::display);
        let code = cause.close_code();
        match cause.reason() {
            Some(reason) => {
                self.stream_metrics().refused(reason);
                tracing::warn!(
                    call_sid, code, reason, %from, %provider, error = %cause,
                    "stream refused"
                );
            }
            None => tracing::info!(
                call_sid, %from, %provider, end = %cause,
                "stream ended before its call had a pod"
            ),
        }
        Box::pin(relay.close(code, "")).await;
    }
}

/// Whether this request has allocated the call: an accepted hand-off was another request's.
fn is_new(allocation: &Allocation) -> bool {
    !allocation.was_existing && allocation.waited.is_none()
}

/// The id of a call whose provider sends none: a random UUID.
fn new_call_id() -> String {
    let mut bytes = [0; 16];
    rand::fill(&mut bytes).expect("the system provides random numbers");
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = HEXLOWER.encode(&bytes);
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}
