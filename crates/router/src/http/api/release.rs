//! `POST /release`: ends a call and frees its pod.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::http::{
    ApiError, Context, RequestLog, Shared,
    middleware::{auth::Caller, body::JsonBody},
    openapi::{Endpoint, Group, schemas},
};
use fleet::{
    CallNotFound, EndCause, NotReleased, Release, Released,
    names::{CallSid, PodName},
};
use store::StoreError;

#[derive(Deserialize, ToSchema)]
#[schema(as = Release)]
pub(crate) struct Body {
    #[schema(value_type = schemas::CallSid, required)]
    call_sid: Option<String>,
    #[schema(schema_with = schemas::optional_pod)]
    pod_name: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum ReleaseResponse<'a> {
    Released {
        success: bool,
        #[schema(value_type = schemas::PodName)]
        pod_name: &'a str,
        #[schema(value_type = schemas::Pool)]
        released_to_pool: &'a str,
        was_draining: bool,
        /// The call has a stream: its gateway closes the stream, and the slot is free after that.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        ending: Option<bool>,
    },
    /// The call was waiting; its queue entry is removed.
    WasWaiting { success: bool, was_waiting: bool },
    /// The call was a dial without an answer; its reservation has ended.
    WasDialed { success: bool, was_dialed: bool },
}

pub(crate) fn endpoint() -> Endpoint {
    Endpoint::new(Group::Calls, "Release a call")
        .description(
            "With `pod_name`, the call is released only if it is on that pod. A call with a stream \
             ends with it: the gateway closes both sides.",
        )
        .json_body::<Body>(json!({"call_sid": "CA1", "pod_name": "voice-agent-0"}))
        .responds(ReleaseResponse::Released {
            success: true,
            pod_name: "voice-agent-0",
            released_to_pool: "pool:gold",
            was_draining: false,
            ending: None,
        })
        .error_with(
            404,
            "The call is unknown or on another pod.",
            json!({"error": "call not found"}),
        )
        .uses_store()
}

/// Releases a call; updates metrics and returns the access log fields with the outcome.
pub(crate) async fn release_call(
    context: &Context,
    release: Release,
) -> (RequestLog, Result<Result<Released, NotReleased>, StoreError>) {
    let mut log = RequestLog {
        call: Some(release.call.clone()),
        pod: release.pod.clone(),
        ..RequestLog::default()
    };
    let metrics = &context.metrics;
    let outcome = context.store.release(&release).await;
    match &outcome {
        Ok(Ok(released)) => {
            log.outcome = if released.is_ending { "ending" } else { "success" };
            metrics.released(Some(&released.source_pool), log.outcome);
            // The gateway records the duration when the stream is closed.
            if !released.is_ending {
                metrics.call_lasted(&released.source_pool, released.lasted);
            }
            log.pod = Some(released.pod.clone());
            log.pool = Some(released.pool.to_string());
        }
        Ok(Err(NotReleased::NotFound)) => {
            metrics.released(None, "not_found");
            log.outcome = "not_found";
        }
        Ok(Err(NotReleased::WasWaiting { waited })) => {
            metrics.abandoned(*waited);
            log.outcome = "waited";
        }
        Ok(Err(NotReleased::WasDialed)) => {
            metrics.outbound.ended("unanswered");
            log.outcome = "dial_ended";
        }
        Err(_) => {
            metrics.released(None, "error");
            log.outcome = "storage_error";
        }
    }
    (log, outcome)
}

pub(crate) async fn release(
    State(context): Shared,
    caller: Caller,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let call: CallSid = body.call_sid.unwrap_or_default().parse()?;
    let pod = body.pod_name.filter(|name| !name.is_empty()).map(PodName::try_from).transpose()?;
    let cause = if caller.is_admin() { EndCause::Operator } else { EndCause::Agent };
    let (log, outcome) = release_call(&context, Release { cause, ..Release::new(call, pod) }).await;
    Ok(match outcome {
        Ok(Ok(released)) => {
            let response = Json(ReleaseResponse::Released {
                success: true,
                pod_name: released.pod.as_str(),
                released_to_pool: log.pool.as_deref().unwrap_or_default(),
                was_draining: released.was_draining,
                ending: released.is_ending.then_some(true),
            })
            .into_response();
            log.attach(response)
        }
        Ok(Err(NotReleased::NotFound)) => log.attach(ApiError::from(CallNotFound)),
        Ok(Err(NotReleased::WasWaiting { .. })) => {
            log.attach(Json(ReleaseResponse::WasWaiting { success: true, was_waiting: true }))
        }
        Ok(Err(NotReleased::WasDialed)) => {
            log.attach(Json(ReleaseResponse::WasDialed { success: true, was_dialed: true }))
        }
        Err(error) => log.attach(ApiError::from(error)),
    })
}
