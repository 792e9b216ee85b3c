//! `POST /release`: a call is over.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::http::{
    ApiError, Context, Noted, Shared,
    middleware::{auth::By, body::JsonBody},
    openapi::{Endpoint, Group, schemas},
};
use fleet::{
    CallNotFound, Cause, NotReleased, Release, Released,
    names::{CallSid, PodName},
};
use store::StoreError;

#[derive(Deserialize, ToSchema)]
#[schema(as = Release)]
pub struct Body {
    #[schema(value_type = schemas::CallSid, required)]
    call_sid: Option<String>,
    #[schema(schema_with = schemas::optional_pod)]
    pod_name: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Ended<'a> {
    Released {
        success: bool,
        #[schema(value_type = schemas::PodName)]
        pod_name: &'a str,
        #[schema(value_type = schemas::Pool)]
        released_to_pool: &'a str,
        was_draining: bool,
    },
    /// The call had no pod yet, and loses its place.
    Waited { success: bool, was_waiting: bool },
}

pub fn described() -> Endpoint {
    Endpoint::new(Group::Calls, "A call is over")
        .about("With `pod_name`, it is only released if it is on that pod.")
        .takes::<Body>(json!({"call_sid": "CA1", "pod_name": "voice-agent-0"}))
        .gives(Ended::Released {
            success: true,
            pod_name: "voice-agent-0",
            released_to_pool: "pool:gold",
            was_draining: false,
        })
        .fails_with(404, "There is no such call, or not there.", json!({"error": "call not found"}))
        .asks_store()
}

/// Ends a call, and counts and notes what came of it.
pub async fn end(
    context: &Context,
    release: Release,
) -> (Noted, Result<Result<Released, NotReleased>, StoreError>) {
    let mut noted =
        Noted { call: Some(release.call.clone()), pod: release.pod.clone(), ..Noted::default() };
    let metrics = &context.metrics;
    let outcome = context.store.release(&release).await;
    match &outcome {
        Ok(Ok(released)) => {
            metrics.released(Some(&released.source_pool), "success");
            metrics.call_lasted(&released.source_pool, released.lasted);
            noted.outcome = "success";
            noted.pod = Some(released.pod.clone());
            noted.pool = Some(released.pool.to_string());
        }
        Ok(Err(NotReleased::NotFound)) => {
            metrics.released(None, "not_found");
            noted.outcome = "not_found";
        }
        Ok(Err(NotReleased::Waited { waited })) => {
            metrics.abandoned(*waited);
            noted.outcome = "waited";
        }
        Err(_) => {
            metrics.released(None, "error");
            noted.outcome = "storage_error";
        }
    }
    (noted, outcome)
}

pub async fn release(
    State(context): Shared,
    by: By,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let call: CallSid = body.call_sid.unwrap_or_default().parse()?;
    let pod = body.pod_name.filter(|name| !name.is_empty()).map(PodName::try_from).transpose()?;
    let cause = if by.is_admin() { Cause::Operator } else { Cause::Agent };
    let (noted, outcome) = end(&context, Release { cause, ..Release::new(call, pod) }).await;
    Ok(match outcome {
        Ok(Ok(released)) => {
            let answer = Json(Ended::Released {
                success: true,
                pod_name: released.pod.as_str(),
                released_to_pool: noted.pool.as_deref().unwrap_or_default(),
                was_draining: released.was_draining,
            })
            .into_response();
            noted.on(answer)
        }
        Ok(Err(NotReleased::NotFound)) => noted.on(ApiError::from(CallNotFound)),
        Ok(Err(NotReleased::Waited { .. })) => {
            noted.on(Json(Ended::Waited { success: true, was_waiting: true }))
        }
        Err(error) => noted.on(ApiError::from(error)),
    })
}
