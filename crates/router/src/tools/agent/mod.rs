//! Simulated voice agents: they take the streams of calls, echo what they hear,
//! renew, and release when the caller hangs up, as real agents do.

mod desk;
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
pub use self::{
    desk::Desk,
    session::{Reaction, react},
};
use crate::http::ApiError;
use fleet::{
    UnknownPod,
    names::{CallSid, PodName},
};

/// The simulated agents of a process.
pub struct Agents {
    desk: Desk,
    renew_interval: Duration,
    stopping: CancellationToken,
    streams: Mutex<Streams>,
    sessions: TaskTracker,
}

impl Agents {
    pub fn new(desk: Desk, renew_interval: Duration, stopping: CancellationToken) -> Arc<Self> {
        let (streams, sessions) = (Mutex::default(), TaskTracker::new());
        Arc::new(Self { desk, renew_interval, stopping, streams, sessions })
    }

    /// The agents of all pods, behind one address.
    pub fn routes(self: &Arc<Self>) -> Router {
        let connect =
            |State(agents): State<Arc<Self>>,
             Path((pod, _)): Path<(String, String)>,
             request: Request| async move { agents.connect(pod.parse()?, request).await };
        Router::new().route("/ws/pod/{pod}/{*path}", get(connect)).with_state(self.clone())
    }

    /// The agent of one pod, at the paths of its own server.
    pub fn own_routes(self: &Arc<Self>, pod: PodName) -> Router {
        let connect = |State(agents): State<Arc<Self>>, request: Request| async move {
            agents.connect(pod, request).await
        };
        let health = || async { "ok" };
        Router::new().route("/health", get(health)).fallback(get(connect)).with_state(self.clone())
    }

    async fn connect(
        self: Arc<Self>,
        pod: PodName,
        mut request: Request,
    ) -> Result<Response, ApiError> {
        let (response, socket) = upgrade::accept(&mut request)?;
        let stream = self.open(&pod).await?.ok_or_else(|| {
            let error = format!("no call waits for a stream on {pod}: allocate one first");
            ApiError::new(StatusCode::CONFLICT, error)
        })?;
        let session = session::run(self.clone(), pod, stream, socket);
        self.sessions.spawn(session);
        Ok(response)
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
        let calls =
            self.desk.calls(pod).await.map_err(|error| {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            })?;
        Ok(self.streams().open(calls.ok_or(UnknownPod)?))
    }

    /// The stream has said which call it is for. Where that can't be looked up, it is
    /// believed: the router checks the pod of a call at each renewal and at its release.
    async fn name(&self, pod: &PodName, stream: StreamId, named: CallSid) {
        let is_here = match self.desk.calls(pod).await {
            Ok(calls) => calls.unwrap_or_default().contains(&named),
            Err(error) => {
                tracing::warn!(call_sid = %named, %pod, %error, "agent could not look up its calls");
                true
            }
        };
        self.streams().name(stream, named, is_here);
    }

    /// Says that the call of a stream is alive. Answers whether the router still
    /// thinks so.
    async fn renew(&self, pod: &PodName, stream: StreamId) -> anyhow::Result<bool> {
        let Some(call) = self.streams().call(stream).cloned() else {
            return Ok(false);
        };
        self.desk.renew(pod, call).await
    }

    /// Ends a stream and releases its call.
    async fn hang_up(&self, pod: &PodName, stream: StreamId) {
        let call = self.streams().close(stream);
        let Some(call) = call else { return };
        match self.desk.release(pod, &call).await {
            Ok(Some(pool)) => {
                tracing::info!(call_sid = %call, %pod, pool, "agent released the call")
            }
            Ok(None) => tracing::info!(call_sid = %call, %pod, "the call was over already"),
            Err(error) => {
                tracing::warn!(call_sid = %call, %pod, %error, "agent could not release the call");
            }
        }
    }
}
