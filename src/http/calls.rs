//! `GET /calls/{sid}`: where a call is, since when, and why there.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{ApiError, Shared, reply::Named};
use crate::domain::{
    fleet::{CallNotFound, Found},
    names::CallSid,
};

pub async fn call(
    State(context): Shared,
    Named(sid): Named<CallSid>,
) -> Result<Json<Value>, ApiError> {
    let call = match context.store.call(&sid).await?.ok_or(CallNotFound)? {
        Found::Live(call) => call,
        Found::Waiting(call) => {
            return Ok(Json(json!({
                "call_sid": call.call,
                "is_waiting": true,
                "merchant_id": call.merchant,
                "waiting_since": call.since / 1_000,
                "waiting_until": call.until / 1_000,
                "tried": call.tried,
            })));
        }
    };
    Ok(Json(json!({
        "call_sid": call.call,
        "pod_name": call.pod,
        "source_pool": call.source_pool,
        "merchant_id": call.merchant,
        "allocated_at": call.allocated_at / 1_000,
        "lease_expires_at": call.lease_until / 1_000,
        "tried": call.tried,
        "is_confirmed": !call.provisional,
        // It was handed its pod, and has not come for it yet.
        "is_waiting": call.is_handed,
        "attempt": call.attempt.max(1),
    })))
}
