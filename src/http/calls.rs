//! `/calls`: who is live or waits, and the story of a call.

use axum::{Json, extract::State, http::StatusCode};
use serde_json::{Value, json};

use super::{ApiError, Shared, events::shown, query::Query, reply::Named};
use crate::domain::{
    fleet::{CallCursor, CallQuery, Found},
    names::{CallSid, Pool},
};

const FILTERS: [&str; 4] = ["state", "pool", "merchant", "pod"];

pub async fn list(State(context): Shared, query: Query) -> Result<Json<Value>, ApiError> {
    query.only(&["state", "pool", "merchant", "pod", "limit", "cursor"])?;
    let waiting = match query.text("state") {
        None | Some("live") => false,
        Some("waiting") => true,
        Some(_) => return Err(ApiError::bad_request("state: expected live or waiting")),
    };
    let wanted = CallQuery {
        waiting,
        pool: pool_filter(&query, "pool")?,
        merchant: query.parse("merchant", "the id of a merchant")?,
        pod: query.parse("pod", "the name of a pod")?,
        after: query.cursor(&FILTERS)?.map(|place| read_place(&place)).transpose()?,
        most: query.limit(50, 500)?,
    };
    if waiting && (wanted.pool.is_some() || wanted.pod.is_some()) {
        return Err(ApiError::bad_request("calls that wait are in no pool and on no pod yet"));
    }
    let page = context.store.calls(&wanted).await?;
    let next = page.next.map(|it| query.next(&FILTERS, &format!("{} {}", it.until, it.call)));
    let calls: Vec<Value> = page.calls.iter().map(described).collect();
    Ok(Json(json!({"calls": calls, "next": next})))
}

fn read_place(place: &str) -> Result<CallCursor, ApiError> {
    let wrong = || ApiError::bad_request("cursor: not one that this router gave out");
    let (until, call) = place.split_once(' ').ok_or_else(wrong)?;
    let (until, call) = (until.parse().map_err(|_| wrong())?, call.parse().map_err(|_| wrong())?);
    Ok(CallCursor { until, call })
}

/// A pool as people call it: `gold`, `merchant:acme`, or as calls name it, `pool:gold`.
pub fn pool_filter(query: &Query, name: &str) -> Result<Option<Pool>, ApiError> {
    query.parse(name, "a tier such as gold, or merchant:acme")
}

/// The story of a call: where it is, and what happened to it. One that is not live is not
/// found, and its story comes with that.
pub async fn call(
    State(context): Shared,
    Named(sid): Named<CallSid>,
) -> Result<Json<Value>, ApiError> {
    let found = context.store.call(&sid).await?;
    let told = context.stories.of(&*context.store, &sid).await?;
    let told: Vec<Value> = told.iter().map(shown).collect();
    let Some(found) = found else {
        let mut error = ApiError::new(StatusCode::NOT_FOUND, "call not found");
        if !told.is_empty() {
            error.details = Some(json!({"call_sid": sid, "state": "ended", "events": told}));
        }
        return Err(error);
    };
    let mut described = described(&found);
    let is_waiting = matches!(found, Found::Waiting(_));
    described["state"] = json!(if is_waiting { "waiting" } else { "live" });
    described["events"] = json!(told);
    Ok(Json(described))
}

fn described(found: &Found) -> Value {
    match found {
        Found::Waiting(call) => json!({
            "call_sid": call.call,
            "is_waiting": true,
            "merchant_id": call.merchant,
            "waiting_since": call.since / 1_000,
            "waiting_until": call.until / 1_000,
            "tried": call.tried,
        }),
        Found::Live(call) => json!({
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
        }),
    }
}
