//! `POST /renew`: extends the lease of one call, or of all calls of a pod at once.

use std::borrow::Cow;

use axum::{Json, extract::State, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use crate::http::{
    ApiError, RequestLog, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use fleet::{
    CallNotFound, Renew,
    names::{CallSid, PodName},
};
use store::StoreError;

#[derive(Deserialize)]
pub(crate) struct Body {
    call_sid: Option<String>,
    call_sids: Option<Vec<String>>,
    pod_name: Option<String>,
}

impl PartialSchema for Body {
    /// Either one call, or the calls of a pod.
    fn schema() -> RefOr<Schema> {
        let call = json!({"$ref": "#/components/schemas/CallSid"});
        schemas::schema(json!({"oneOf": [
            {
                "type": "object",
                "required": ["call_sid"],
                "properties": {
                    "call_sid": call,
                    "call_sids": {"type": "null"},
                    "pod_name": schemas::optional_pod(),
                },
            },
            {
                "type": "object",
                "required": ["pod_name", "call_sids"],
                "properties": {
                    "call_sid": {"type": "null"},
                    "call_sids": {"type": "array", "items": call},
                    "pod_name": {"$ref": "#/components/schemas/PodName"},
                },
            },
        ]}))
    }
}

impl ToSchema for Body {
    fn name() -> Cow<'static, str> {
        "Renew".into()
    }
}

#[derive(Serialize, ToSchema)]
struct RenewResponse {
    lease_expires_at: u64,
    /// Unknown calls that were re-registered on this pod.
    #[schema(value_type = Vec<schemas::CallSid>)]
    registered: Vec<CallSid>,
    renewed: usize,
    /// Calls that the store cannot re-register yet; renew them again shortly.
    #[schema(value_type = Vec<schemas::CallSid>)]
    retry: Vec<CallSid>,
    success: bool,
    #[schema(value_type = Vec<schemas::CallSid>)]
    unknown: Vec<CallSid>,
}

pub(crate) fn endpoint() -> Endpoint {
    Endpoint::new(Group::Calls, "Renew the leases of calls")
        .description("Extends the leases to now + `LEASE_TTL`.")
        .register_schema::<schemas::PodName>()
        .json_body::<Body>(json!({"pod_name": "voice-agent-0", "call_sids": ["CA1"]}))
        .responds(RenewResponse {
            lease_expires_at: 1_763_280_900,
            registered: Vec::new(),
            renewed: 1,
            retry: Vec::new(),
            success: true,
            unknown: Vec::new(),
        })
        .error_with(404, "The single call is unknown.", json!({"error": "call not found"}))
        .uses_store()
}

pub(crate) async fn renew(
    State(context): Shared,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let pod = body.pod_name.filter(|name| !name.is_empty()).map(PodName::try_from).transpose()?;
    let (calls, is_single) = match (body.call_sid, body.call_sids) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("expected call_sid or call_sids, not both"));
        }
        (call, None) => (vec![call.unwrap_or_default().parse()?], true),
        (None, Some(_)) if pod.is_none() => {
            return Err(ApiError::bad_request("call_sids requires pod_name"));
        }
        (None, Some(calls)) => {
            (calls.into_iter().map(CallSid::try_from).collect::<Result<_, _>>()?, false)
        }
    };
    let call = calls.first().cloned().filter(|_| is_single);
    let log = RequestLog { call, pod: pod.clone(), outcome: "renewed", ..RequestLog::default() };
    let given = calls.len();
    let renewed = context.store.renew(&Renew { calls, pod, lease_ttl: context.ttls.lease }).await?;
    if is_single && !renewed.unknown.is_empty() {
        return Ok(RequestLog { outcome: "not_found", ..log }.attach(ApiError::from(CallNotFound)));
    }
    if is_single && !renewed.retry.is_empty() {
        return Ok(RequestLog { outcome: "later", ..log }.attach(ApiError::from(
            StoreError::Unavailable(
                "the store restarted and this pod is not registered yet; renew again".into(),
            ),
        )));
    }
    Ok(log.attach(Json(RenewResponse {
        lease_expires_at: renewed.until / 1_000,
        registered: renewed.registered,
        renewed: given - renewed.unknown.len() - renewed.retry.len(),
        retry: renewed.retry,
        success: true,
        unknown: renewed.unknown,
    })))
}
