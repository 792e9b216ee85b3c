//! Simulated voice agents: they accept the streams of calls and echo the audio. Without the media
//! gateway they also renew their calls, and release them when the caller hangs up.

mod audio;
mod router_api;
mod session;
mod streams;
mod websocket;

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

pub(crate) use self::router_api::RouterApi;
pub use self::session::{Reaction, react};
use self::streams::{StreamId, Streams};
use crate::http::ApiError;
use fleet::{
    UnknownPod,
    names::{CallSid, PodName},
};

/// The header with which the media gateway names the call of a stream.
const GATEWAY_CALL: &str = "x-call-sid";

/// The simulated agents of a process.
pub(crate) struct Agents {
    router: RouterApi,
    renew_interval: Duration,
    stopping: CancellationToken,
    streams: Mutex<Streams>,
    sessions: TaskTracker,
}

impl Agents {
    pub(crate) fn new(
        router: RouterApi,
        renew_interval: Duration,
        stopping: CancellationToken,
    ) -> Arc<Self> {
        let (streams, sessions) = (Mutex::default(), TaskTracker::new());
        Arc::new(Self { router, renew_interval, stopping, streams, sessions })
    }

    /// Routes to the agents of all pods, on one address.
    pub(crate) fn routes(self: &Arc<Self>) -> Router {
        let connect =
            |State(agents): State<Arc<Self>>,
             Path((pod, _)): Path<(String, String)>,
             request: Request| async move { agents.connect(pod.parse()?, request).await };
        Router::new().route("/ws/pod/{pod}/{*path}", get(connect)).with_state(self.clone())
    }

    /// Routes to the agent of one pod, as on its own server.
    pub(crate) fn own_routes(self: &Arc<Self>, pod: PodName) -> Router {
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
        let (response, socket) = websocket::accept(&mut request)?;
        let stream = match request.headers().contains_key(GATEWAY_CALL) {
            true => None,
            false => Some(self.open(&pod).await?.ok_or_else(|| {
                let error = format!("no call waits for a stream on {pod}: allocate one first");
                ApiError::new(StatusCode::CONFLICT, error)
            })?),
        };
        let session = session::run(self.clone(), pod, stream, socket);
        self.sessions.spawn(session);
        Ok(response)
    }

    /// Waits until every agent has released its call.
    pub(crate) async fn finish(&self) {
        self.sessions.close();
        self.sessions.wait().await;
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream for the oldest call of the pod without one.
    async fn open(&self, pod: &PodName) -> Result<Option<StreamId>, ApiError> {
        let calls =
            self.router.calls(pod).await.map_err(|error| {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            })?;
        Ok(self.streams().open(calls.ok_or(UnknownPod)?))
    }

    /// Assigns the call that the stream's first frame names. If the lookup fails, the name is
    /// trusted: the router checks the pod of a call at each renewal and at its release.
    async fn assign_call(&self, pod: &PodName, stream: StreamId, named: CallSid) {
        let is_on_pod = match self.router.calls(pod).await {
            Ok(calls) => calls.unwrap_or_default().contains(&named),
            Err(error) => {
                tracing::warn!(call_sid = %named, %pod, %error, "the agent could not look up its calls");
                true
            }
        };
        self.streams().assign(stream, named, is_on_pod);
    }

    /// Renews the call of a stream; returns false if the stream has no live call.
    async fn renew(&self, pod: &PodName, stream: StreamId) -> anyhow::Result<bool> {
        let Some(call) = self.streams().call(stream).cloned() else {
            return Ok(false);
        };
        self.router.renew(pod, call).await
    }

    /// Ends a stream and releases its call.
    async fn hang_up(&self, pod: &PodName, stream: StreamId) {
        let call = self.streams().close(stream);
        let Some(call) = call else { return };
        match self.router.release(pod, &call).await {
            Ok(Some(pool)) => {
                tracing::info!(call_sid = %call, %pod, pool, "the agent released the call")
            }
            Ok(None) => tracing::info!(call_sid = %call, %pod, "the call had already ended"),
            Err(error) => {
                tracing::warn!(call_sid = %call, %pod, %error, "the agent could not release the call");
            }
        }
    }
}
