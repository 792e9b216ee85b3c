//! `POST /drain` and `/undrain`: take a pod out of service for new calls, and back.

use std::{pin::pin, time::Duration};

use axum::{Json, extract::State, http::StatusCode, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::http::{
    ApiError, Context, RequestLog, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use crate::human_duration::HumanDuration;
use fleet::{PodStatus, names::PodName};

/// Poll interval of a waiting drain: a notification by another replica can be lost.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Poll interval while the store is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(3600);
const STOPPING: &str = "the router is shutting down; retry, the pod keeps draining";

#[derive(Deserialize, ToSchema)]
#[schema(as = Drain)]
pub(crate) struct DrainBody {
    #[schema(value_type = schemas::PodName, required)]
    pod_name: Option<String>,
    #[schema(schema_with = schemas::wait_for_calls)]
    wait: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Undrain)]
pub(crate) struct UndrainBody {
    #[schema(value_type = schemas::PodName, required)]
    pod_name: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct DrainResponse {
    success: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    has_active_call: bool,
    active_calls: usize,
    /// Whether the pod has no live call and may stop.
    drained: bool,
    /// End of the drain in unix seconds.
    draining_until: u64,
    message: String,
}

#[derive(Serialize, ToSchema)]
struct UndrainResponse {
    /// Whether the pod is terminating; it then gets no calls in spite of the undrain.
    is_terminating: bool,
    message: String,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    success: bool,
    was_draining: bool,
    was_quarantined: bool,
}

pub(crate) fn drain_endpoint() -> Endpoint {
    Endpoint::new(Group::Pods, "Drain a pod")
        .description(
            "The pod gets no new calls. `wait` makes the request a long poll: it returns when the \
             pod has no live call or the time is over. The drain lasts the longer of \
             `DRAINING_TTL` and `wait`.",
        )
        .json_body::<DrainBody>(json!({"pod_name": "voice-agent-0", "wait": "300s"}))
        .responds(DrainResponse {
            success: true,
            pod_name: example(),
            has_active_call: false,
            active_calls: 0,
            drained: true,
            draining_until: 1_763_280_360,
            message: "Pod voice-agent-0 is draining and has no active call.".into(),
        })
        .error_with(404, "The pod is unknown.", json!({"error": "pod not found"}))
        .uses_store()
        .error_with(
            503,
            "The store is unavailable, or the router is shutting down; retry.",
            json!({"error": STOPPING}),
        )
}

pub(crate) fn undrain_endpoint() -> Endpoint {
    Endpoint::new(Group::Pods, "Undrain a pod")
        .description("Ends the drain and the quarantine of a pod.")
        .json_body::<UndrainBody>(json!({"pod_name": "voice-agent-0"}))
        .responds(UndrainResponse {
            is_terminating: false,
            message: "Pod voice-agent-0 takes calls again.".into(),
            pod_name: example(),
            success: true,
            was_draining: true,
            was_quarantined: false,
        })
        .error_with(404, "The pod is unknown.", json!({"error": "pod not found"}))
        .uses_store()
}

fn example() -> PodName {
    "voice-agent-0".parse().expect("a name")
}

pub(crate) async fn drain(
    State(context): Shared,
    JsonBody(body): JsonBody<DrainBody>,
) -> Result<Response, ApiError> {
    let pod: PodName = body.pod_name.unwrap_or_default().parse()?;
    let wait =
        body.wait.filter(|wait| !wait.is_empty()).map(|wait| read_wait(&wait)).transpose()?;
    let started = Instant::now();
    // The drain outlasts the wait: the pod must not get a call before it stops.
    let ttl = context.ttls.draining.max(wait.map_or(0, |wait| wait.as_millis() as u64));
    let drained = context.store.drain(&pod, ttl).await??;
    context.metrics.drains.inc();
    let mut progress = Progress { active_calls: drained.active_calls, is_draining: true };
    if let Some(wait) = wait
        && !wait_for_calls(&context, &pod, &mut progress, started + wait).await
    {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, STOPPING));
    }
    let active = progress.active_calls;
    if wait.is_some() && active > 0 && progress.is_draining {
        context.metrics.drains_unfinished.inc();
    }
    let message = match active {
        _ if !progress.is_draining => format!("Pod {pod} was undrained, and takes calls again."),
        0 => format!("Pod {pod} is draining and has no active call."),
        1 => format!(
            "Pod {pod} is draining with active call in progress. Will complete when call ends."
        ),
        n => format!(
            "Pod {pod} is draining with {n} active calls in progress. Will complete when they end."
        ),
    };
    let log = RequestLog { pod: Some(pod.clone()), outcome: "draining", ..RequestLog::default() };
    Ok(log.attach(Json(DrainResponse {
        success: true,
        pod_name: pod,
        has_active_call: active > 0,
        active_calls: active,
        drained: active == 0 && progress.is_draining,
        draining_until: drained.until / 1_000,
        message,
    })))
}

fn read_wait(text: &str) -> Result<Duration, ApiError> {
    let expected = "expected a duration such as 300s, at most 1h";
    let wait =
        text.parse::<HumanDuration>().ok().map(|wait| wait.0).filter(|wait| *wait <= MAX_WAIT);
    wait.ok_or_else(|| ApiError::bad_request(format!("wait {text:?}: {expected}")))
}

/// Progress of a drain.
struct Progress {
    active_calls: usize,
    is_draining: bool,
}

/// Waits until the pod has no live call, is undrained, or the time is over. Store errors are
/// retried: they prove nothing about the calls. Returns false if the router shuts down first.
async fn wait_for_calls(
    context: &Context,
    pod: &PodName,
    progress: &mut Progress,
    until: Instant,
) -> bool {
    let listener = context.store.drains().listen(pod);
    while progress.active_calls > 0 && progress.is_draining {
        let mut notified = pin!(listener.notified());
        notified.as_mut().enable();
        let mut poll = POLL_INTERVAL;
        match context.store.pod(pod).await {
            Ok(status) => {
                progress.is_draining = status.as_ref().is_none_or(PodStatus::is_leaving);
                progress.active_calls = status.map_or(0, |status| status.calls.len());
                if progress.active_calls == 0 || !progress.is_draining {
                    break;
                }
            }
            Err(_) => poll = RETRY_INTERVAL,
        }
        if Instant::now() >= until {
            break;
        }
        tokio::select! {
            () = notified => {}
            () = tokio::time::sleep_until(until.min(Instant::now() + poll)) => {}
            () = context.lifecycle.stopping.cancelled() => return false,
        }
    }
    true
}

pub(crate) async fn undrain(
    State(context): Shared,
    JsonBody(body): JsonBody<UndrainBody>,
) -> Result<Response, ApiError> {
    let pod: PodName = body.pod_name.unwrap_or_default().parse()?;
    let undrained = context.store.undrain(&pod).await??;
    let log = RequestLog { pod: Some(pod.clone()), outcome: "undrained", ..RequestLog::default() };
    let message = match undrained {
        _ if undrained.is_terminating => {
            format!("Pod {pod} is terminating and takes no new calls.")
        }
        _ if undrained.was_draining => format!("Pod {pod} takes calls again."),
        _ if undrained.was_quarantined => format!("Pod {pod} takes calls again."),
        _ => format!("Pod {pod} was not draining."),
    };
    Ok(log.attach(Json(UndrainResponse {
        is_terminating: undrained.is_terminating,
        message,
        pod_name: pod,
        success: true,
        was_draining: undrained.was_draining,
        was_quarantined: undrained.was_quarantined,
    })))
}
