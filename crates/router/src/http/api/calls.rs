//! `GET /calls` and `GET /calls/{sid}`: live and waiting calls, and the events of one call.

use axum::{Json, extract::State, http::StatusCode};
use serde::Serialize;
use serde_json::json;
use utoipa::{PartialSchema, ToSchema};

use super::events::{EventJson, event_json};
use crate::http::{
    ApiError, Context, Shared,
    openapi::{Endpoint, Group, schemas},
    reply::PathName,
    webhooks::query::Query,
};
use fleet::{
    AttachedStream, CallCursor, CallLookup, CallQuery, CallStatus, EventKind, SkipReason,
    SkippedStep,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool, StreamId},
};
use media::stats::SideFigures;

/// A skipped step of a chain, with the reason.
#[derive(Serialize, ToSchema)]
pub(crate) struct TriedStep {
    #[schema(value_type = schemas::Reason)]
    reason: SkipReason,
    /// A tier, or `merchant:acme`.
    step: String,
}

/// The stream of a call through a media gateway.
#[derive(Serialize, ToSchema)]
pub(crate) struct Stream {
    /// `null` if another replica relays the stream; for a single call its figures of a few seconds
    /// ago, if it has published them.
    #[schema(required)]
    figures: Option<StreamFigures>,
    /// The router that relays the stream: its name and a random number.
    #[schema(value_type = String)]
    gateway: GatewayId,
    /// Whether the call was released; the gateway is closing the stream.
    is_ending: bool,
    since: u64,
    /// Id of the stream.
    #[schema(value_type = String)]
    stream: StreamId,
}

/// Figures of a stream so far.
#[derive(Serialize, ToSchema)]
pub(super) struct StreamFigures {
    from_agent: StreamSide,
    from_provider: StreamSide,
    /// The provider as its opening message shows it; `unknown` before that.
    provider: &'static str,
}

/// Frames from one side of a stream.
#[derive(Serialize, ToSchema)]
pub(super) struct StreamSide {
    bytes: u64,
    frames: u64,
    /// Longest time between two frames, in milliseconds.
    longest_gap_ms: u64,
}

/// A live or waiting call; `state` and `events` are set only for a single call.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Call {
    Live {
        allocated_at: u64,
        /// Ordinal of the pod that the call has been given, from 1.
        attempt: u32,
        #[schema(value_type = schemas::CallSid)]
        call_sid: CallSid,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        events: Option<Vec<EventJson>>,
        is_confirmed: bool,
        /// Whether the hand-off of the pod has not been accepted yet.
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
        /// `null` if no stream is attached.
        #[schema(required)]
        stream: Option<Stream>,
        tried: Vec<TriedStep>,
    },
    Waiting {
        #[schema(value_type = schemas::CallSid)]
        call_sid: CallSid,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        events: Option<Vec<EventJson>>,
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
pub(crate) struct Calls {
    calls: Vec<Call>,
    /// Cursor of the next page.
    #[schema(required)]
    next: Option<String>,
}

pub(crate) fn list_endpoint() -> Endpoint {
    let states = schemas::one_of_or_empty(&["live", "waiting"]);
    Endpoint::new(Group::Calls, "List live or waiting calls")
        .description(
            "Live calls in order of lease expiry, waiting calls in order of poll deadline.",
        )
        .query_param("state", states, "State of the calls; default `live`.")
        .query_param("pool", schemas::pool_or_empty(), "Only this pool; live calls only.")
        .query_param("merchant", schemas::merchant_or_empty(), "Only this merchant.")
        .query_param("pod", schemas::pod_or_empty(), "Only this pod; live calls only.")
        .paginated(50, 500)
        .responds(Calls { calls: vec![example(None)], next: None })
        .uses_store()
}

pub(crate) fn call_endpoint() -> Endpoint {
    let ended = json!({
        "error": "call not found",
        "details": {"call_sid": "CA1", "state": "ended", "events": [EventJson::example()]},
    });
    Endpoint::new(Group::Calls, "Get a call and its events")
        .path_param("sid", schemas::CallSid::schema(), "CA1")
        .responds(example(Some(vec![EventJson::example()])))
        .error(400, "The call id is invalid.")
        .error_with(404, "The call is not live; `details` has its events, if retained.", ended)
        .uses_store()
}

fn example(events: Option<Vec<EventJson>>) -> Call {
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
        stream: Some(Stream::example()),
        tried: Vec::new(),
    }
}

impl Stream {
    fn example() -> Self {
        let side = |bytes| StreamSide { bytes, frames: 1_500, longest_gap_ms: 43 };
        Self {
            figures: Some(StreamFigures {
                from_agent: side(457_500),
                from_provider: side(573_000),
                provider: "twilio",
            }),
            gateway: "router-1-5f3a09c2".parse().expect("a name"),
            is_ending: false,
            since: 1_763_280_001,
            stream: "9c1e5f0a77b3d244".parse().expect("a name"),
        }
    }
}

const FILTERS: [&str; 4] = ["state", "pool", "merchant", "pod"];

pub(crate) async fn list(State(context): Shared, query: Query) -> Result<Json<Calls>, ApiError> {
    query.only(&["state", "pool", "merchant", "pod", "limit", "cursor"])?;
    let waiting = match query.text("state") {
        None | Some("live") => false,
        Some("waiting") => true,
        Some(_) => return Err(ApiError::bad_request("state: expected live or waiting")),
    };
    let call_query = CallQuery {
        waiting,
        pool: pool_filter(&query, "pool")?,
        merchant: query.parse("merchant", "the id of a merchant")?,
        pod: query.parse("pod", "the name of a pod")?,
        after: query.cursor(&FILTERS)?.map(|position| read_cursor(&position)).transpose()?,
        limit: query.limit(50, 500)?,
    };
    if waiting && (call_query.pool.is_some() || call_query.pod.is_some()) {
        let error = "waiting calls have no pool and no pod; remove these filters";
        return Err(ApiError::bad_request(error));
    }
    let page = context.store.calls(&call_query).await?;
    let next = page.next.map(|it| query.next(&FILTERS, &format!("{} {}", it.until, it.call)));
    let calls = page.calls.iter().map(|found| call_json(&context, found, None)).collect();
    Ok(Json(Calls { calls, next }))
}

fn read_cursor(position: &str) -> Result<CallCursor, ApiError> {
    let invalid = || ApiError::bad_request("cursor: expected `next` of a previous page");
    let (until, call) = position.split_once(' ').ok_or_else(invalid)?;
    let until = until.parse().map_err(|_| invalid())?;
    let call = call.parse().map_err(|_| invalid())?;
    Ok(CallCursor { until, call })
}

/// Parses a pool filter: `gold`, `merchant:acme`, or `pool:gold`.
pub(super) fn pool_filter(query: &Query, name: &str) -> Result<Option<Pool>, ApiError> {
    query.parse(name, "a tier such as gold, or merchant:acme")
}

/// Returns a call with its events. For a call that is not live, the 404 carries the events.
pub(crate) async fn call(
    State(context): Shared,
    PathName(sid): PathName<CallSid>,
) -> Result<Json<Call>, ApiError> {
    let found = context.store.call(&sid).await?;
    let events = context.timelines.of(&*context.store, &sid).await?;
    let is_refused = events.last().is_some_and(|last| last.event.kind == EventKind::Refused);
    let events: Vec<EventJson> = events.iter().map(event_json).collect();
    let Some(found) = found else {
        let mut error = ApiError::new(StatusCode::NOT_FOUND, "call not found");
        if !events.is_empty() {
            let state = if is_refused { "refused" } else { "ended" };
            error.details = Some(json!({"call_sid": sid, "state": state, "events": events}));
        }
        return Err(error);
    };
    let mut call = call_json(&context, &found, Some(events));
    if let Call::Live { stream: Some(stream), .. } = &mut call
        && stream.figures.is_none()
    {
        // Another replica relays the stream, and publishes its figures every few seconds.
        let published = context.store.figures(&sid).await?;
        stream.figures = published.and_then(|text| text.parse().ok()).map(figures_json);
    }
    Ok(Json(call))
}

fn tried_json(tried: &[SkippedStep]) -> Vec<TriedStep> {
    let step = |it: &SkippedStep| TriedStep { reason: it.reason, step: it.step.to_string() };
    tried.iter().map(step).collect()
}

fn stream_json(context: &Context, call: &CallStatus) -> Option<Stream> {
    let AttachedStream { gateway, stream, since, ending } = call.stream.as_ref()?;
    Some(Stream {
        figures: figures(context, &call.call, gateway),
        gateway: gateway.clone(),
        is_ending: ending.is_some(),
        since: since / 1_000,
        stream: stream.clone(),
    })
}

/// Figures of a stream, if this process relays it.
fn figures(context: &Context, call: &CallSid, gateway: &GatewayId) -> Option<StreamFigures> {
    let own = context.urls.gateway().filter(|own| own.id() == gateway)?;
    own.figures(call).map(figures_json)
}

fn figures_json(figures: media::stats::StreamFigures) -> StreamFigures {
    let media::stats::StreamFigures { provider, from_provider, from_agent } = figures;
    let side = |side: SideFigures| StreamSide {
        bytes: side.bytes,
        frames: side.frames,
        longest_gap_ms: side.longest_gap.as_millis() as u64,
    };
    StreamFigures { from_agent: side(from_agent), from_provider: side(from_provider), provider }
}

fn call_json(context: &Context, found: &CallLookup, events: Option<Vec<EventJson>>) -> Call {
    match found {
        CallLookup::Waiting(call) => Call::Waiting {
            call_sid: call.call.clone(),
            state: events.is_some().then_some("waiting"),
            events,
            is_waiting: true,
            merchant_id: call.merchant.clone(),
            tried: tried_json(&call.tried),
            waiting_since: call.since / 1_000,
            waiting_until: call.until / 1_000,
        },
        CallLookup::Live(call) => Call::Live {
            allocated_at: call.allocated_at / 1_000,
            attempt: call.pod_attempt.max(1),
            call_sid: call.call.clone(),
            state: events.is_some().then_some("live"),
            events,
            is_confirmed: !call.provisional,
            is_waiting: call.is_handed,
            lease_expires_at: call.lease_until / 1_000,
            merchant_id: call.merchant.clone(),
            pod_name: call.pod.clone(),
            source_pool: call.source_pool.clone(),
            stream: stream_json(context, call),
            tried: tried_json(&call.tried),
        },
    }
}
