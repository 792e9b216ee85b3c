//! `GET /calls/{sid}`: where a call is, since when, and why there.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{ApiError, Shared, reply::Named};
use crate::domain::{fleet::CallNotFound, names::CallSid};

pub async fn call(
    State(context): Shared,
    Named(sid): Named<CallSid>,
) -> Result<Json<Value>, ApiError> {
    let call = context.store.call(&sid).await?.ok_or(CallNotFound)?;
    Ok(Json(json!({
        "call_sid": call.call,
        "pod_name": call.pod,
        "source_pool": call.source_pool,
        "merchant_id": call.merchant,
        "allocated_at": call.allocated_at / 1_000,
        "lease_expires_at": call.lease_until / 1_000,
        "tried": call.tried,
        "is_confirmed": !call.provisional,
    })))
}
