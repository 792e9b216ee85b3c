//! Simulated voice agents: they take the streams of calls, echo what they hear,
//! renew, and release when the caller hangs up, as real agents do.

mod session;
mod streams;
mod upgrade;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::StatusCode,
    response::Response,
    routing::get,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::streams::{StreamId, Streams};

use crate::{
    domain::{
        Millis,
        fleet::{Release, Renew, UnknownPod},
        names::{CallSid, PodName},
    },
    http::ApiError,
    metrics::Metrics,
    store::{Store, StoreError},
};

/// All simulated agents of this process.
pub struct Agents {
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    lease_ttl: Millis,
    stopping: CancellationToken,
    streams: Mutex<Streams>,
    sessions: TaskTracker,
}

impl Agents {
    pub fn new(
        store: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        lease_ttl: Millis,
        stopping: CancellationToken,
    ) -> Arc<Self> {
        let (streams, sessions) = (Mutex::default(), TaskTracker::new());
        Arc::new(Self { store, metrics, lease_ttl, stopping, streams, sessions })
    }

    pub fn routes(self: &Arc<Self>) -> Router {
        Router::new().route("/ws/pod/{pod}/{*path}", get(connect)).with_state(self.clone())
    }

    /// Waits until every agent has let go of its call.
    pub async fn finish(&self) {
        self.sessions.close();
        self.sessions.wait().await;
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream for the call that has waited longest on a pod.
    async fn open(&self, pod: &PodName) -> Result<Option<StreamId>, ApiError> {
        let mut calls = self.store.pod(pod).await?.ok_or(UnknownPod)?.calls;
        calls.sort_by_key(|call| call.allocated_at);
        Ok(self.streams().open(calls.into_iter().map(|call| call.call)))
    }

    /// The stream has said which call it is for.
    async fn name(&self, pod: &PodName, stream: StreamId, named: CallSid) {
        let status = self.store.pod(pod).await.ok().flatten();
        let is_here =
            status.is_some_and(|status| status.calls.iter().any(|call| call.call == named));
        self.streams().name(stream, named, is_here);
    }

    /// Says that the call of a stream is alive. Answers whether the router still
    /// thinks so. The pod is not named, since these agents forget nothing that
    /// the router could have forgotten.
    async fn renew(&self, stream: StreamId) -> Result<bool, StoreError> {
        let Some(call) = self.streams().call(stream).cloned() else {
            return Ok(false);
        };
        let renew = Renew { calls: vec![call], pod: None, lease_ttl: self.lease_ttl };
        Ok(self.store.renew(&renew).await?.unknown.is_empty())
    }

    /// Ends a stream and releases its call.
    async fn hang_up(&self, pod: &PodName, stream: StreamId) {
        let call = self.streams().close(stream);
        if let Some(call) = call {
            self.release(pod, &call).await;
        }
    }

    async fn release(&self, pod: &PodName, call: &CallSid) {
        let request = Release { call: call.clone(), pod: Some(pod.clone()) };
        match self.store.release(&request).await {
            Ok(Ok(released)) => {
                self.metrics.released(Some(&released.source_pool), "success");
                self.metrics.call_lasted(&released.source_pool, released.lasted);
                tracing::info!(call_sid = %call, %pod, pool = %released.pool, "agent released the call");
            }
            Ok(Err(_)) => {
                self.metrics.released(None, "not_found");
                tracing::info!(call_sid = %call, %pod, "the call was over already");
            }
            Err(error) => {
                self.metrics.released(None, "error");
                tracing::warn!(call_sid = %call, %pod, %error, "agent could not release the call");
            }
        }
    }

    /// Three renewals in the time of one lease: two may fail.
    fn renew_interval(&self) -> Duration {
        Duration::from_millis((self.lease_ttl / 3).max(1))
    }
}

async fn connect(
    State(agents): State<Arc<Agents>>,
    Path((pod, _)): Path<(String, String)>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let pod: PodName = pod.parse()?;
    let (response, socket) = upgrade::accept(&mut request)?;
    let stream = agents.open(&pod).await?.ok_or_else(|| {
        let error = format!("no call waits for a stream on {pod}: allocate one first");
        ApiError::new(StatusCode::CONFLICT, error)
    })?;
    agents.sessions.spawn(session::run(agents.clone(), pod, stream, socket));
    Ok(response)
}
