//! `POST /drain` and `/undrain`: a pod takes no new calls, or does again.

use std::{pin::pin, time::Duration};

use axum::{Json, extract::State, http::StatusCode, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::config::HumanDuration;
use crate::http::{
    ApiError, Context, Noted, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use fleet::{PodStatus, names::PodName};

/// How often a waiting drain reads its pod although nothing was announced: an announcement of
/// another replica can be lost.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// The same while the store does not answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
const STOPPING: &str = "this router is stopping; ask again, the pod stays drained";

#[derive(Deserialize, ToSchema)]
#[schema(as = Drain)]
pub struct DrainBody {
    #[schema(value_type = schemas::PodName, required)]
    pod_name: Option<String>,
    #[schema(schema_with = schemas::wait_for_calls)]
    wait: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Undrain)]
pub struct UndrainBody {
    #[schema(value_type = schemas::PodName, required)]
    pod_name: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct Draining {
    success: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    has_active_call: bool,
    active_calls: usize,
    /// No live call is left: the pod may go.
    drained: bool,
    /// Unix seconds until which the pod gets no calls.
    draining_until: u64,
    message: String,
}

#[derive(Serialize, ToSchema)]
struct Undrained {
    /// It goes for good, and is given no calls whatever anybody says.
    is_terminating: bool,
    message: String,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    success: bool,
    was_draining: bool,
    was_quarantined: bool,
}

pub fn drain_described() -> Endpoint {
    Endpoint::new(Group::Pods, "No new calls for a pod")
        .about(
            "With `wait` the answer comes when the pod has no live call or the time is over. The \
             mark lasts the longer of `DRAINING_TTL` and the wait.",
        )
        .takes::<DrainBody>(json!({"pod_name": "voice-agent-0", "wait": "300s"}))
        .gives(Draining {
            success: true,
            pod_name: example(),
            has_active_call: false,
            active_calls: 0,
            drained: true,
            draining_until: 1_763_280_360,
            message: "Pod voice-agent-0 is draining and has no active call.".into(),
        })
        .fails_with(404, "There is no such pod.", json!({"error": "pod not found"}))
        .asks_store()
        .fails_with(
            503,
            "The store can't be reached, or the router stops while the drain waits; ask again.",
            json!({"error": STOPPING}),
        )
}

pub fn undrain_described() -> Endpoint {
    Endpoint::new(Group::Pods, "Calls for a pod again")
        .takes::<UndrainBody>(json!({"pod_name": "voice-agent-0"}))
        .gives(Undrained {
            is_terminating: false,
            message: "Pod voice-agent-0 takes calls again.".into(),
            pod_name: example(),
            success: true,
            was_draining: true,
            was_quarantined: false,
        })
        .fails_with(404, "There is no such pod.", json!({"error": "pod not found"}))
        .asks_store()
}

fn example() -> PodName {
    "voice-agent-0".parse().expect("a name")
}

pub async fn drain(
    State(context): Shared,
    JsonBody(body): JsonBody<DrainBody>,
) -> Result<Response, ApiError> {
    let pod: PodName = body.pod_name.unwrap_or_default().parse()?;
    let wait =
        body.wait.filter(|wait| !wait.is_empty()).map(|wait| read_wait(&wait)).transpose()?;
    let started = Instant::now();
    // The mark outlasts the wait: a pod must not get a call while it waits to go.
    let ttl = context.ttls.draining.max(wait.map_or(0, |wait| wait.as_millis() as u64));
    let drained = context.store.drain(&pod, ttl).await??;
    context.metrics.drains.inc();
    let mut left = Left { active: drained.active_calls, is_draining: true };
    if let Some(wait) = wait
        && !wait_for_calls(&context, &pod, &mut left, started + wait).await
    {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, STOPPING));
    }
    let active = left.active;
    if wait.is_some() && active > 0 && left.is_draining {
        context.metrics.drains_unfinished.inc();
    }
    let message = match active {
        _ if !left.is_draining => format!("Pod {pod} was undrained, and takes calls again."),
        0 => format!("Pod {pod} is draining and has no active call."),
        1 => format!(
            "Pod {pod} is draining with active call in progress. Will complete when call ends."
        ),
        n => format!(
            "Pod {pod} is draining with {n} active calls in progress. Will complete when they end."
        ),
    };
    let noted = Noted { pod: Some(pod.clone()), outcome: "draining", ..Noted::default() };
    Ok(noted.on(Json(Draining {
        success: true,
        pod_name: pod,
        has_active_call: active > 0,
        active_calls: active,
        drained: active == 0 && left.is_draining,
        draining_until: drained.until / 1_000,
        message,
    })))
}

fn read_wait(text: &str) -> Result<Duration, ApiError> {
    let expected = "expected a length of time such as 300s, at most 1h";
    let wait =
        text.parse::<HumanDuration>().ok().map(|wait| wait.0).filter(|wait| *wait <= LONGEST_WAIT);
    wait.ok_or_else(|| ApiError::bad_request(format!("wait {text:?}: {expected}")))
}

/// What is left on a pod that drains.
struct Left {
    active: usize,
    is_draining: bool,
}

/// Waits until the pod has no live call, someone undrained it, or the time is
/// over. A store that blinks meanwhile proves nothing about the calls: wait on. Answers
/// false if the router stops before that.
async fn wait_for_calls(context: &Context, pod: &PodName, left: &mut Left, until: Instant) -> bool {
    let listener = context.store.drains().listen(pod);
    while left.active > 0 && left.is_draining {
        let mut announced = pin!(listener.notified());
        announced.as_mut().enable();
        let mut poll = POLL_INTERVAL;
        match context.store.pod(pod).await {
            Ok(status) => {
                left.is_draining = status.as_ref().is_none_or(PodStatus::is_leaving);
                left.active = status.map_or(0, |status| status.calls.len());
                if left.active == 0 || !left.is_draining {
                    break;
                }
            }
            Err(_) => poll = RETRY_INTERVAL,
        }
        if Instant::now() >= until {
            break;
        }
        tokio::select! {
            () = announced => {}
            () = tokio::time::sleep_until(until.min(Instant::now() + poll)) => {}
            () = context.lifecycle.stopping.cancelled() => return false,
        }
    }
    true
}

pub async fn undrain(
    State(context): Shared,
    JsonBody(body): JsonBody<UndrainBody>,
) -> Result<Response, ApiError> {
    let pod: PodName = body.pod_name.unwrap_or_default().parse()?;
    let undrained = context.store.undrain(&pod).await??;
    let noted = Noted { pod: Some(pod.clone()), outcome: "undrained", ..Noted::default() };
    let message = match undrained {
        _ if undrained.is_terminating => {
            format!("Pod {pod} is terminating and takes no new calls.")
        }
        _ if undrained.was_draining => format!("Pod {pod} takes calls again."),
        _ if undrained.was_quarantined => format!("Pod {pod} takes calls again."),
        _ => format!("Pod {pod} was not draining."),
    };
    Ok(noted.on(Json(Undrained {
        is_terminating: undrained.is_terminating,
        message,
        pod_name: pod,
        success: true,
        was_draining: undrained.was_draining,
        was_quarantined: undrained.was_quarantined,
    })))
}
