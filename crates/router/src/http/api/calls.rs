//! `/calls`: who is live or waits, and the story of a call.

use axum::{Json, extract::State, http::StatusCode};
use serde::Serialize;
use serde_json::json;
use utoipa::{PartialSchema, ToSchema};

use super::events::{Shown, shown};
use crate::http::{
    ApiError, Shared,
    openapi::{Endpoint, Group, schemas},
    reply::Named,
    webhooks::query::Query,
};
use fleet::{
    CallCursor, CallQuery, EventKind, Found, Reason, Tried,
    names::{CallSid, MerchantId, PodName, Pool},
};

/// A step of a chain that gave no pod, and why.
#[derive(Serialize, ToSchema)]
pub struct TriedStep {
    #[schema(value_type = schemas::Reason)]
    reason: Reason,
    /// A tier, or `merchant:acme`.
    step: String,
}

/// What a list and the story of a call have in common.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub enum Call {
    Live {
        allocated_at: u64,
        /// How many pods it was given, with this one.
        attempt: u32,
        #[schema(value_type = schemas::CallSid)]
        call_sid: CallSid,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        events: Option<Vec<Shown>>,
        is_confirmed: bool,
        /// It was handed its pod, and has not come for it yet.
        is_waiting: bool,
        lease_expires_at: u64,
        #[schema(required)]
        #[schema(value_type = Option<schemas::MerchantId>)]
        merchant_id: Option<MerchantId>,
        #[schema(value_type = schemas::PodName)]
        pod_name: PodName,
        #[schema(value_type = schemas::Pool)]
        source_pool: Pool,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        state: Option<&'static str>,
        tried: Vec<TriedStep>,
    },
    Waiting {
        #[schema(value_type = schemas::CallSid)]
        call_sid: CallSid,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        events: Option<Vec<Shown>>,
        is_waiting: bool,
        #[schema(required)]
        #[schema(value_type = Option<schemas::MerchantId>)]
        merchant_id: Option<MerchantId>,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        state: Option<&'static str>,
        tried: Vec<TriedStep>,
        waiting_since: u64,
        waiting_until: u64,
    },
}

#[derive(Serialize, ToSchema)]
pub struct Calls {
    calls: Vec<Call>,
    /// Where the next page begins.
    #[schema(required)]
    next: Option<String>,
}

pub fn list_described() -> Endpoint {
    Endpoint::new(Group::Calls, "Calls that are live or wait")
        .about("By the end of their lease, or of those that wait by when they have to ask again.")
        .query("state", schemas::one_of_or_empty(&["live", "waiting"]), "`live` unless given.")
        .query("pool", schemas::pool_or_empty(), "Of this pool alone; not of calls that wait.")
        .query("merchant", schemas::merchant_or_empty(), "Of this merchant alone.")
        .query("pod", schemas::pod_or_empty(), "On this pod alone; not of calls that wait.")
        .pages(50, 500)
        .gives(Calls { calls: vec![example(None)], next: None })
        .asks_store()
}

pub fn call_described() -> Endpoint {
    let ended = json!({
        "error": "call not found",
        "details": {"call_sid": "CA1", "state": "ended", "events": [Shown::example()]},
    });
    Endpoint::new(Group::Calls, "The story of a call")
        .path("sid", schemas::CallSid::schema(), "CA1")
        .gives(example(Some(vec![Shown::example()])))
        .fails(400, "The id is not one of a call.")
        .fails_with(404, "The call is not live; its story, if it is kept, is in `details`.", ended)
        .asks_store()
}

fn example(events: Option<Vec<Shown>>) -> Call {
    Call::Live {
        allocated_at: 1_763_280_000,
        attempt: 1,
        call_sid: "CA1".parse().expect("a name"),
        state: events.is_some().then_some("live"),
        events,
        is_confirmed: true,
        is_waiting: false,
        lease_expires_at: 1_763_280_900,
        merchant_id: None,
        pod_name: "voice-agent-0".parse().expect("a name"),
        source_pool: "pool:gold".parse().expect("a name"),
        tried: Vec::new(),
    }
}

const FILTERS: [&str; 4] = ["state", "pool", "merchant", "pod"];

pub async fn list(State(context): Shared, query: Query) -> Result<Json<Calls>, ApiError> {
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
    let calls = page.calls.iter().map(|found| described(found, None)).collect();
    Ok(Json(Calls { calls, next }))
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
) -> Result<Json<Call>, ApiError> {
    let found = context.store.call(&sid).await?;
    let told = context.stories.of(&*context.store, &sid).await?;
    let is_refused = told.last().is_some_and(|last| last.event.kind == EventKind::Refused);
    let told: Vec<Shown> = told.iter().map(shown).collect();
    let Some(found) = found else {
        let mut error = ApiError::new(StatusCode::NOT_FOUND, "call not found");
        if !told.is_empty() {
            let state = if is_refused { "refused" } else { "ended" };
            error.details = Some(json!({"call_sid": sid, "state": state, "events": told}));
        }
        return Err(error);
    };
    Ok(Json(described(&found, Some(told))))
}

fn tried(tried: &[Tried]) -> Vec<TriedStep> {
    let shown = |it: &Tried| TriedStep { reason: it.reason, step: it.step.to_string() };
    tried.iter().map(shown).collect()
}

/// A call, with its events where its story is asked for.
fn described(found: &Found, events: Option<Vec<Shown>>) -> Call {
    match found {
        Found::Waiting(call) => Call::Waiting {
            call_sid: call.call.clone(),
            state: events.is_some().then_some("waiting"),
            events,
            is_waiting: true,
            merchant_id: call.merchant.clone(),
            tried: tried(&call.tried),
            waiting_since: call.since / 1_000,
            waiting_until: call.until / 1_000,
        },
        Found::Live(call) => Call::Live {
            allocated_at: call.allocated_at / 1_000,
            attempt: call.attempt.max(1),
            call_sid: call.call.clone(),
            state: events.is_some().then_some("live"),
            events,
            is_confirmed: !call.provisional,
            is_waiting: call.is_handed,
            lease_expires_at: call.lease_until / 1_000,
            merchant_id: call.merchant.clone(),
            pod_name: call.pod.clone(),
            source_pool: call.source_pool.clone(),
            tried: tried(&call.tried),
        },
    }
}
