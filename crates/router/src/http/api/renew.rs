//! `POST /renew`: calls are still alive. One call by its id, or all calls of a
//! pod at once.

use std::borrow::Cow;

use axum::{Json, extract::State, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use crate::http::{
    ApiError, Noted, Shared,
    middleware::body::JsonBody,
    openapi::{Endpoint, Group, schemas},
};
use fleet::{
    CallNotFound, Renew,
    names::{CallSid, PodName},
};
use store::StoreError;

#[derive(Deserialize)]
pub struct Body {
    call_sid: Option<String>,
    call_sids: Option<Vec<String>>,
    pod_name: Option<String>,
}

impl PartialSchema for Body {
    /// One call, or those of a pod, and not both.
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
struct Lasting {
    lease_expires_at: u64,
    /// Calls that nobody knew, and that are on this pod now.
    #[schema(value_type = Vec<schemas::CallSid>)]
    registered: Vec<CallSid>,
    renewed: usize,
    /// Calls that are to be renewed again in a moment.
    #[schema(value_type = Vec<schemas::CallSid>)]
    retry: Vec<CallSid>,
    success: bool,
    #[schema(value_type = Vec<schemas::CallSid>)]
    unknown: Vec<CallSid>,
}

pub fn described() -> Endpoint {
    Endpoint::new(Group::Calls, "Calls are still alive")
        .about("Extends their leases to now + `LEASE_TTL`.")
        .knows::<schemas::PodName>()
        .takes::<Body>(json!({"pod_name": "voice-agent-0", "call_sids": ["CA1"]}))
        .gives(Lasting {
            lease_expires_at: 1_763_280_900,
            registered: Vec::new(),
            renewed: 1,
            retry: Vec::new(),
            success: true,
            unknown: Vec::new(),
        })
        .fails_with(404, "The one call is not known.", json!({"error": "call not found"}))
        .asks_store()
}

pub async fn renew(
    State(context): Shared,
    JsonBody(body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    let pod = body.pod_name.filter(|name| !name.is_empty()).map(PodName::try_from).transpose()?;
    let (calls, is_single) = match (body.call_sid, body.call_sids) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("give call_sid or call_sids, not both"));
        }
        (call, None) => (vec![call.unwrap_or_default().parse()?], true),
        (None, Some(_)) if pod.is_none() => {
            return Err(ApiError::bad_request("call_sids needs pod_name"));
        }
        (None, Some(calls)) => {
            (calls.into_iter().map(CallSid::try_from).collect::<Result<_, _>>()?, false)
        }
    };
    let call = calls.first().cloned().filter(|_| is_single);
    let noted = Noted { call, pod: pod.clone(), outcome: "renewed", ..Noted::default() };
    let given = calls.len();
    let renewed = context.store.renew(&Renew { calls, pod, lease_ttl: context.ttls.lease }).await?;
    if is_single && !renewed.unknown.is_empty() {
        return Ok(Noted { outcome: "not_found", ..noted }.on(ApiError::from(CallNotFound)));
    }
    if is_single && !renewed.later.is_empty() {
        return Ok(Noted { outcome: "later", ..noted }.on(ApiError::from(
            StoreError::Unavailable(
                "it began a short while ago and does not know this pod yet".into(),
            ),
        )));
    }
    Ok(noted.on(Json(Lasting {
        lease_expires_at: renewed.until / 1_000,
        registered: renewed.adopted,
        renewed: given - renewed.unknown.len() - renewed.later.len(),
        retry: renewed.later,
        success: true,
        unknown: renewed.unknown,
    })))
}
