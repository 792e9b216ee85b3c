//! `POST /renew`: calls are still alive. One call by its id, or all calls of a
//! pod at once.

use axum::{Json, extract::State, response::Response};
use serde::Deserialize;
use serde_json::json;

use super::{ApiError, Noted, Shared, body::JsonBody};
use crate::domain::{
    fleet::{CallNotFound, Renew},
    names::{CallSid, PodName},
};
use crate::store::StoreError;

#[derive(Deserialize)]
pub struct Body {
    call_sid: Option<String>,
    call_sids: Option<Vec<String>>,
    pod_name: Option<String>,
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
    Ok(noted.on(Json(json!({
        "success": true,
        "renewed": given - renewed.unknown.len() - renewed.later.len(),
        "lease_expires_at": renewed.until / 1_000,
        "registered": renewed.adopted,
        "unknown": renewed.unknown,
        "retry": renewed.later,
    }))))
}
