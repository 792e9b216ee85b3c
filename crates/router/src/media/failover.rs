//! The next agent of a stream: its pod cannot be reached, is lost in mid-call, or serves an older
//! stream. The store names the pod; connections are tried for a few seconds.

use std::{
    pin::pin,
    sync::{Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use hyper::StatusCode;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{
    Gateway,
    agents::{AgentConnection, AgentTarget},
    streams::{OpenStream, PodConnection, new_stream_id},
};
use fleet::{
    Allocate, Allocation, Attach, Attached, EndCause, Failover, FailoverRefused, Hold, PodFailure,
    PreviousPod, RefusalReason, names::PodName,
};
use media::relay::StreamEnd;
use store::StoreError;

/// How long other pods are tried after one that cannot be reached, and the store after an error.
const CONNECT_BUDGET: Duration = Duration::from_secs(5);
/// Pauses between tries: none before the first two, then doubled up to the longest.
const FIRST_BACKOFF: Duration = Duration::from_millis(25);
const LONGEST_BACKOFF: Duration = Duration::from_millis(500);

/// The reason why a stream has no agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAgent {
    /// `failure` is empty if it is recorded.
    #[error("no pod could be reached: {reason}")]
    Unreachable { reason: String, failure: PodFailure },
    #[error("no pod is free")]
    NoPods,
    #[error("the call has lost as many pods as RETRY_ON_DISCONNECT allows")]
    RetriesExhausted,
    #[error("the call has ended")]
    CallEnded,
    #[error("the store does not know the stream")]
    Unknown,
    #[error("{0}")]
    Store(StoreError),
}

impl NoAgent {
    /// Close code for the provider after the end of the stream to its last agent.
    pub(super) fn close_code(&self, end: StreamEnd) -> u16 {
        match self {
            Self::NoPods | Self::Unreachable { .. } => 1013,
            Self::CallEnded | Self::Unknown => 1000,
            Self::RetriesExhausted | Self::Store(_) => end.close_code(),
        }
    }

    /// Response to a handshake of the provider.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Unreachable { .. } => StatusCode::BAD_GATEWAY,
            Self::CallEnded | Self::Unknown => StatusCode::FORBIDDEN,
            Self::NoPods | Self::RetriesExhausted | Self::Store(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

/// The bounds of a search for an agent.
pub(super) struct Search<'a> {
    deadline: Instant,
    /// Cancelled when the provider has ended the stream. Requests to the store are completed then,
    /// so that the end of the stream knows their result; nothing new begins.
    is_over: Option<&'a CancellationToken>,
    /// Pods that have failed during the search.
    failed: Mutex<Vec<PodName>>,
}

impl<'a> Search<'a> {
    fn new(budget: Duration, is_over: Option<&'a CancellationToken>) -> Self {
        Self { deadline: Instant::now() + budget, is_over, failed: Mutex::default() }
    }

    /// The failure of a pod as it is to be recorded: a pod is tried many times, and its first
    /// failure is enough.
    fn first_failure(&self, pod: &PodName, failure: PodFailure) -> PodFailure {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.as_str().is_empty() || failed.contains(pod) {
            return PodFailure::default();
        }
        failed.push(pod.clone());
        failure
    }

    /// The search for the first agent of a stream.
    pub(super) fn first(is_over: Option<&'a CancellationToken>) -> Self {
        Self::new(CONNECT_BUDGET, is_over)
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || self.is_over.is_some_and(CancellationToken::is_cancelled)
    }

    /// Resolves when the provider has ended the stream.
    async fn gone(&self) {
        match self.is_over {
            Some(is_over) => is_over.cancelled().await,
            None => std::future::pending().await,
        }
    }
}

/// Doubled pauses between tries.
struct Backoff(u32);

impl Backoff {
    async fn pause(&mut self, search: &Search<'_>) {
        self.0 += 1;
        if let Some(doublings) = self.0.checked_sub(2) {
            let pause = FIRST_BACKOFF.saturating_mul(1 << doublings.min(8)).min(LONGEST_BACKOFF);
            tokio::select! {
                () = sleep_until(search.deadline.min(Instant::now() + pause)) => {}
                () = search.gone() => {}
            }
        }
    }
}

impl Gateway {
    /// Connects a stream to its pod, or to other pods if that one cannot be reached.
    pub(super) async fn connect_agent(
        &self,
        open: &OpenStream,
        target: &AgentTarget,
        mut attached: Attached,
        search: &Search<'_>,
    ) -> Result<AgentConnection, NoAgent> {
        let mut backoff = Backoff(0);
        loop {
            let started = Instant::now();
            let connected = tokio::select! {
                biased;
                () = search.gone() => return Err(NoAgent::CallEnded),
                connected = self.agents.connect(target, &attached) => connected,
            };
            self.stream_metrics().connected(started.elapsed(), connected.is_ok());
            let error = match connected {
                Ok(agent) => return Ok(agent),
                Err(error) => error,
            };
            tracing::warn!(
                call_sid = %open.call, pod = %attached.pod, %error,
                "cannot connect the stream to its pod; trying another one"
            );
            let failure = search.first_failure(&attached.pod, PodFailure::new(&error));
            if search.is_over() {
                return Err(NoAgent::Unreachable { reason: error.to_string(), failure });
            }
            backoff.pause(search).await;
            attached = self.move_stream(open, EndCause::Unreachable, failure, search).await?;
        }
    }

    /// The next agent of a stream in mid-call. Waits for a free pod where calls may wait.
    pub(super) async fn next_agent(
        &self,
        open: &OpenStream,
        target: &AgentTarget,
        cause: EndCause,
        failure: PodFailure,
        is_over: &CancellationToken,
    ) -> Result<AgentConnection, NoAgent> {
        // The caller is on the line: pods that cannot be reached are tried for as long as the call
        // may wait for a free one.
        let hold = self.hold.as_ref().map_or(0, |hold| hold.time);
        let budget = CONNECT_BUDGET.max(Duration::from_millis(hold));
        let search = Search::new(budget, Some(is_over));
        if search.is_over() {
            return Err(NoAgent::CallEnded);
        }
        let failure = search.first_failure(&open.connection().pod, failure);
        let moved = self.move_stream(open, cause, failure, &search).await;
        let attached = self.or_wait(open, moved, &search).await?;
        match self.connect_agent(open, target, attached, &search).await {
            Err(NoAgent::NoPods) => {
                let attached = self.or_wait(open, Err(NoAgent::NoPods), &search).await?;
                self.connect_agent(open, target, attached, &search).await
            }
            connected => connected,
        }
    }

    /// Moves the stream to another pod in the store. An unavailable store is asked again.
    async fn move_stream(
        &self,
        open: &OpenStream,
        cause: EndCause,
        failure: PodFailure,
        search: &Search<'_>,
    ) -> Result<Attached, NoAgent> {
        match self.move_in_store(open, cause, failure, search).await {
            // The gateway was cut off from the store, where the call has ended meanwhile.
            Err(NoAgent::Unknown) => self.allocate_again(open, None, search).await,
            moved => moved,
        }
    }

    async fn move_in_store(
        &self,
        open: &OpenStream,
        cause: EndCause,
        failure: PodFailure,
        search: &Search<'_>,
    ) -> Result<Attached, NoAgent> {
        let connection = open.connection();
        let failover = Failover {
            call: open.call.clone(),
            stream: connection.stream.clone(),
            next: new_stream_id(),
            gateway: self.id.clone(),
            gateway_lease: self.lease,
            cause,
            failure,
            max_retries: self.max_retries,
            lease_ttl: self.call_lease,
        };
        open.set_next(Some(failover.next.clone()));
        let mut backoff = Backoff(1);
        loop {
            let error = match self.store.failover(&failover).await {
                Ok(Ok(attached)) => {
                    open.moves.fetch_add(1, Ordering::Relaxed);
                    let pod_attempt = connection.pod_attempt;
                    open.set_connection(PodConnection::new(failover.next, pod_attempt, &attached));
                    return Ok(attached);
                }
                Ok(Err(FailoverRefused::Ending)) => {
                    open.set_next(None);
                    return Err(NoAgent::CallEnded);
                }
                Ok(Err(refused)) => {
                    open.set_next(None);
                    // The call has ended in the store.
                    open.is_detached.store(true, Ordering::Relaxed);
                    return Err(match refused {
                        FailoverRefused::RetriesExhausted => NoAgent::RetriesExhausted,
                        FailoverRefused::NotFound => NoAgent::Unknown,
                        _ => NoAgent::NoPods,
                    });
                }
                Err(error) => error,
            };
            if search.is_over() {
                return Err(NoAgent::Store(error));
            }
            backoff.pause(search).await;
        }
    }

    /// The moved stream, or, if no pod was free, one for which the call has waited.
    async fn or_wait(
        &self,
        open: &OpenStream,
        moved: Result<Attached, NoAgent>,
        search: &Search<'_>,
    ) -> Result<Attached, NoAgent> {
        match (moved, &self.hold) {
            (Err(NoAgent::NoPods), Some(hold)) => {
                self.allocate_again(open, Some(hold.hold(hold.time)), search).await
            }
            (moved, _) => moved,
        }
    }

    /// Allocates another pod to a call that has ended in the store because of its pod or its
    /// gateway, and attaches the stream to it. With `hold`, the call waits for a free pod.
    async fn allocate_again(
        &self,
        open: &OpenStream,
        hold: Option<Hold>,
        search: &Search<'_>,
    ) -> Result<Attached, NoAgent> {
        let connection = open.connection();
        let previous = PreviousPod {
            pod: connection.pod.clone(),
            pod_attempt: connection.pod_attempt,
            is_settled: true,
            max_retries: self.max_retries,
        };
        let mut request = Allocate {
            provisional: true,
            expects_stream: true,
            may_return: true,
            hold,
            previous: Some(previous),
            ..Allocate::new(open.call.clone(), connection.merchant.clone(), self.lease)
        };
        let listener = self.store.handoffs().listen(&open.call);
        let ends = Instant::now() + Duration::from_millis(hold.map_or(0, |hold| hold.time));
        let mut is_waiting = false;
        loop {
            let mut woken = pin!(listener.notified());
            woken.as_mut().enable();
            match self.store.allocate(&request).await {
                Ok(Ok(Allocation { pod_attempt, .. })) => {
                    return self.attach_at(open, pod_attempt).await;
                }
                Ok(Err(refusal)) => match refusal.reason {
                    // The call was released while it waited, and has entered the queue again.
                    RefusalReason::Waiting { is_new: true, .. } if is_waiting => {
                        self.leave_queue(&open.call).await;
                        return Err(NoAgent::CallEnded);
                    }
                    RefusalReason::Waiting { .. } if Instant::now() < ends => is_waiting = true,
                    RefusalReason::RetriesExhausted => return Err(NoAgent::RetriesExhausted),
                    RefusalReason::CallEnded => return Err(NoAgent::CallEnded),
                    _ => return Err(NoAgent::NoPods),
                },
                Err(error) if hold.is_none() => return Err(NoAgent::Store(error)),
                Err(_) if Instant::now() < ends => {}
                Err(error) => return Err(NoAgent::Store(error)),
            }
            let poll = self.hold.as_ref().map_or(CONNECT_BUDGET, |hold| hold.poll_interval);
            tokio::select! {
                () = woken => {}
                () = sleep(poll.min(ends.saturating_duration_since(Instant::now()))) => {}
                () = search.gone() => {
                    self.leave_queue(&open.call).await;
                    return Err(NoAgent::CallEnded);
                }
            }
            if Instant::now() >= ends {
                // The last poll leaves the queue.
                request.hold = hold.map(|hold| Hold { time: 0, ..hold });
            }
        }
    }

    /// Attaches the stream to the pod that its call was allocated again.
    async fn attach_at(&self, open: &OpenStream, pod_attempt: u32) -> Result<Attached, NoAgent> {
        let attach = Attach {
            call: open.call.clone(),
            pod_attempt,
            gateway: self.id.clone(),
            gateway_lease: self.lease,
            stream: new_stream_id(),
            lease_ttl: self.call_lease,
            connected: None,
        };
        open.set_next(Some(attach.stream.clone()));
        match self.store.attach(&attach).await {
            Ok(Ok(attached)) => {
                open.set_connection(PodConnection::new(attach.stream, pod_attempt, &attached));
                open.moves.fetch_add(1, Ordering::Relaxed);
                open.is_detached.store(false, Ordering::Relaxed);
                Ok(attached)
            }
            Ok(Err(_)) => Err(NoAgent::CallEnded),
            Err(error) => Err(NoAgent::Store(error)),
        }
    }
}
