//! Simulated voice agents: they take the streams of calls, echo what they hear,
//! renew, and release when the caller hangs up, as real agents do.

mod session;
mod upgrade;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
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

use crate::{
    domain::{
        Millis,
        fleet::{Release, Renew},
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
    /// Calls whose stream is open here.
    streaming: Mutex<HashSet<CallSid>>,
    sessions: TaskTracker,
}

impl Agents {
    pub fn new(
        store: Arc<dyn Store>,
        metrics: Arc<Metrics>,
        lease_ttl: Millis,
        stopping: CancellationToken,
    ) -> Arc<Self> {
        let (streaming, sessions) = (Mutex::default(), TaskTracker::new());
        Arc::new(Self { store, metrics, lease_ttl, stopping, streaming, sessions })
    }

    pub fn routes(self: &Arc<Self>) -> Router {
        Router::new().route("/ws/pod/{pod}/{*path}", get(connect)).with_state(self.clone())
    }

    /// Waits until every agent has let go of its call.
    pub async fn finish(&self) {
        self.sessions.close();
        self.sessions.wait().await;
    }

    /// The call that a new stream on a pod is for: the one that has waited
    /// longest. A client without frames of its own can't say it any better.
    async fn claim(&self, pod: &PodName) -> Result<Option<CallSid>, ApiError> {
        let status = self.store.pod(pod).await?;
        let mut calls = status.ok_or(crate::domain::fleet::UnknownPod)?.calls;
        calls.sort_by_key(|call| call.allocated_at);
        let mut streaming = self.streaming.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(calls.into_iter().map(|call| call.call).find(|call| streaming.insert(call.clone())))
    }

    /// The stream has named its call: let go of the guess, if it was another.
    async fn correct(&self, pod: &PodName, guess: &mut CallSid, named: CallSid) {
        let status = self.store.pod(pod).await.ok().flatten();
        let is_here =
            status.is_some_and(|status| status.calls.iter().any(|call| call.call == named));
        let mut streaming = self.streaming.lock().unwrap_or_else(PoisonError::into_inner);
        if is_here && streaming.insert(named.clone()) {
            streaming.remove(guess);
            *guess = named;
        }
    }

    /// Says that a call is alive. Answers whether the router still thinks so.
    async fn renew(&self, pod: &PodName, call: &CallSid) -> Result<bool, StoreError> {
        let (calls, pod) = (vec![call.clone()], Some(pod.clone()));
        let renewed = self.store.renew(&Renew { calls, pod, lease_ttl: self.lease_ttl }).await?;
        Ok(renewed.unknown.is_empty())
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
        self.streaming.lock().unwrap_or_else(PoisonError::into_inner).remove(call);
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
    let call = agents.claim(&pod).await?.ok_or_else(|| {
        ApiError::new(
            StatusCode::CONFLICT,
            format!("no call waits for a stream on {pod}: allocate one first"),
        )
    })?;
    let session = session::run(agents.clone(), pod, call, socket);
    agents.sessions.spawn(session);
    Ok(response)
}
