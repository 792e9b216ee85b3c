//! `GET /events`: the event log, as a page or as a stream.

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{
        IntoResponse, Response,
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use futures_util::{
    StreamExt,
    future::ready,
    stream::{self, Stream},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::calls::pool_filter;
use crate::http::{
    ApiError, Context, Shared,
    middleware::{auth::StreamToken, stream_limit},
    openapi::{Endpoint, Group, schemas},
    webhooks::query::Query,
};
use fleet::{
    Event, EventId, EventKind, LoggedEvent,
    names::{CallSid, MerchantId, PodName, Pool},
};
use store::{Store, StoreError, observing};

/// Events read from the store at a time.
const PAGE_SIZE: usize = 1_000;
/// Reads that one request may take to fill a page with matching events.
const MAX_PAGES: usize = 50;
/// Interval at which a stream polls the store.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the keep-alive comments of a stream.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// An event of the API.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = Event)]
pub(crate) struct EventJson {
    /// Unix time in milliseconds.
    at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::CallSid>)]
    call_sid: Option<CallSid>,
    /// Details that depend on the kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    detail: Option<String>,
    #[schema(value_type = schemas::EventKind)]
    event: EventKind,
    #[schema(schema_with = schemas::event_id)]
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::MerchantId>)]
    merchant_id: Option<MerchantId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::PodName>)]
    pod_name: Option<PodName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::Pool>)]
    pool: Option<Pool>,
}

impl EventJson {
    pub(super) fn example() -> Self {
        Self {
            at: 1_763_280_000_123,
            call_sid: "CA1".parse().ok(),
            detail: Some("gold=at_capacity".into()),
            event: EventKind::Allocated,
            id: "1763280000123-0".into(),
            merchant_id: None,
            pod_name: "voice-agent-0".parse().ok(),
            pool: "pool:basic".parse().ok(),
        }
    }
}

pub(super) fn event_json(logged: &LoggedEvent) -> EventJson {
    let LoggedEvent { id, at, event } = logged;
    EventJson {
        at: *at,
        call_sid: event.call.clone(),
        detail: Some(event.detail.clone()).filter(|detail| !detail.is_empty()),
        event: event.kind,
        id: id.to_string(),
        merchant_id: event.merchant.clone(),
        pod_name: event.pod.clone(),
        pool: event.pool.clone(),
    }
}

#[derive(Serialize, ToSchema)]
struct Events {
    events: Vec<EventJson>,
    /// Value of `before` (or `after`, if given) for the next page.
    #[schema(required)]
    next: Option<String>,
}

pub(crate) fn endpoint() -> Endpoint {
    let kinds: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
    let example = EventJson::example();
    let text = serde_json::to_string(&example).expect("an event is JSON");
    let message = format!("id: {}\nevent: allocated\ndata: {text}\n\n", example.id);
    Endpoint::new(Group::Calls, "List or stream events")
        .description(
            "Newest first; with `after`, oldest first. With `Accept: text/event-stream`, a stream \
             that begins now, or after `Last-Event-ID`, and does not end.",
        )
        .query_param("event", schemas::one_of_or_empty(&kinds), "Only this kind.")
        .query_param("call", schemas::call_or_empty(), "Only this call.")
        .query_param("pod", schemas::pod_or_empty(), "Only this pod.")
        .query_param("pool", schemas::pool_or_empty(), "Only this pool.")
        .query_param("merchant", schemas::merchant_or_empty(), "Only this merchant.")
        .query_param("limit", schemas::limit(100, 1_000), "Maximum number of events.")
        .query_param(
            "before",
            schemas::event_id_or_empty(),
            "Only events before this one; excludes `after`.",
        )
        .query_param("after", schemas::event_id_or_empty(), "Only events after this one.")
        .header_param(
            "Last-Event-ID",
            schemas::event_id_or_empty(),
            "Resume a stream after this event.",
        )
        .responds(Events { events: vec![example], next: None })
        .or_content("text/event-stream", schemas::text(), message.into())
        .error(400, "A parameter is invalid or unknown.")
        .error(404, "Events are disabled (`EVENTS=off`).")
        .uses_store()
}

struct Filter {
    kind: Option<EventKind>,
    call: Option<CallSid>,
    pod: Option<PodName>,
    pool: Option<Pool>,
    merchant: Option<MerchantId>,
}

impl Filter {
    fn read(query: &Query) -> Result<Self, ApiError> {
        let kinds: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
        Ok(Self {
            kind: query.parse("event", &format!("one of {}", kinds.join(", ")))?,
            call: query.parse("call", "the id of a call")?,
            pod: query.parse("pod", "the name of a pod")?,
            pool: pool_filter(query, "pool")?,
            merchant: query.parse("merchant", "the id of a merchant")?,
        })
    }

    fn matches(&self, event: &Event) -> bool {
        fn is<T: PartialEq>(wanted: Option<&T>, found: Option<&T>) -> bool {
            wanted.is_none() || wanted == found
        }
        is(self.kind.as_ref(), Some(&event.kind))
            && is(self.call.as_ref(), event.call.as_ref())
            && is(self.pod.as_ref(), event.pod.as_ref())
            && is(self.pool.as_ref(), event.pool.as_ref())
            && is(self.merchant.as_ref(), event.merchant.as_ref())
    }
}

pub(crate) async fn events(
    State(context): Shared,
    parts: Parts,
    query: Query,
) -> Result<Response, ApiError> {
    let headers = &parts.headers;
    query.only(&["event", "call", "pod", "pool", "merchant", "limit", "before", "after"])?;
    const ID: &str = "the id of an event";
    let filter = Filter::read(&query)?;
    let (before, after) =
        (query.parse::<EventId>("before", ID)?, query.parse::<EventId>("after", ID)?);
    let limit = query.limit(100, 1_000)?;
    let last_seen = headers.get("last-event-id").filter(|id| !id.is_empty());
    let last_seen: Option<EventId> = match last_seen.map(|id| id.to_str().unwrap_or("?").parse()) {
        Some(Err(())) => {
            return Err(ApiError::bad_request(format!("last-event-id: expected {ID}")));
        }
        Some(Ok(id)) => Some(id),
        None => None,
    };
    if !context.live.has_events() {
        let error = "events are disabled (EVENTS=off)";
        return Err(ApiError::new(StatusCode::NOT_FOUND, error));
    }
    if wants_stream(headers) {
        if before.is_some() || query.has("limit") {
            return Err(ApiError::bad_request("a stream does not support before and limit"));
        }
        let guard = stream_limit::open(&context, &parts)?;
        let from = match last_seen.or(after) {
            Some(after) => after,
            None => last(&context).await?,
        };
        let keep_alive = KeepAlive::new().interval(HEARTBEAT_INTERVAL);
        let token = StreamToken::new(&context, headers);
        let stream = follow(context, filter, from).take_while(move |_| {
            let _guard = &guard;
            ready(token.is_valid())
        });
        return Ok(Sse::new(stream).keep_alive(keep_alive).into_response());
    }
    if before.is_some() && after.is_some() {
        return Err(ApiError::bad_request("before and after can't be combined"));
    }
    let (found, next) = page(&context, &filter, before, after, limit).await?;
    let events = found.iter().map(event_json).collect();
    Ok(Json(Events { events, next: next.map(|id| id.to_string()) }).into_response())
}

/// Whether `Accept` includes server-sent events.
fn wants_stream(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|it| it.to_str().ok());
    let mut kinds = accepted.flat_map(|text| text.split(','));
    kinds.any(|kind| {
        let mut parts = kind.split(';').map(str::trim);
        let is_stream = parts.next().is_some_and(|it| it.eq_ignore_ascii_case("text/event-stream"));
        let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
        is_stream && weight != Some(0.0)
    })
}

/// A page of matching events and the position of the next page. With `after` oldest first, else
/// newest first.
async fn page(
    context: &Context,
    filter: &Filter,
    before: Option<EventId>,
    after: Option<EventId>,
    limit: usize,
) -> Result<(Vec<LoggedEvent>, Option<EventId>), StoreError> {
    let (mut found, mut at) = (Vec::new(), after.or(before));
    for _ in 0..MAX_PAGES {
        let page = match after {
            Some(_) => context.store.events_after(at.unwrap_or_default(), PAGE_SIZE).await?,
            None => context.store.events_before(at, PAGE_SIZE).await?,
        };
        let is_all = page.len() < PAGE_SIZE;
        for logged in page {
            at = Some(logged.id);
            if filter.matches(&logged.event) {
                found.push(logged);
                if found.len() == limit {
                    return Ok((found, at));
                }
            }
        }
        if is_all {
            return Ok((found, None));
        }
    }
    Ok((found, at))
}

async fn last(context: &Context) -> Result<EventId, StoreError> {
    let last = context.store.events_before(None, 1).await?;
    Ok(last.first().map(|logged| logged.id).unwrap_or_default())
}

/// Streams new events until the client disconnects or the router shuts down.
fn follow(
    context: Arc<Context>,
    filter: Filter,
    from: EventId,
) -> impl Stream<Item = Result<SseEvent, Infallible>> {
    stream::unfold((context, filter, from, Vec::new().into_iter()), async |state| {
        let (context, filter, mut from, mut left) = state;
        loop {
            if let Some(logged) = left.next() {
                let logged: LoggedEvent = logged;
                from = logged.id;
                if !filter.matches(&logged.event) {
                    continue;
                }
                let text = serde_json::to_string(&event_json(&logged)).expect("an event is JSON");
                let message = SseEvent::default()
                    .id(logged.id.to_string())
                    .event(logged.event.kind.as_str())
                    .data(text);
                return Some((Ok(message), (context, filter, from, left)));
            }
            // Store errors are retried: the stream continues after an outage.
            let page =
                observing(context.store.events_after(from, PAGE_SIZE)).await.unwrap_or_default();
            let is_quiet = page.len() < PAGE_SIZE / 2;
            left = page.into_iter();
            if is_quiet {
                tokio::select! {
                    () = context.lifecycle.stopping.cancelled() => return None,
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                }
            }
        }
    })
}

/// Events by call. Each event is read from the store once.
#[derive(Default)]
pub(crate) struct CallTimelines {
    cache: tokio::sync::Mutex<TimelineCache>,
}

#[derive(Default)]
struct TimelineCache {
    last: EventId,
    /// Call of each cached event, oldest first.
    order: VecDeque<CallSid>,
    by_call: HashMap<CallSid, VecDeque<LoggedEvent>>,
}

/// Limit of cached events: the maximum of `EVENTS`, and some more.
const MAX_TIMELINE_EVENTS: usize = 110_000;

impl CallTimelines {
    /// Returns the retained events of a call.
    pub(super) async fn of(
        &self,
        store: &dyn Store,
        call: &CallSid,
    ) -> Result<Vec<LoggedEvent>, StoreError> {
        let mut cache = self.cache.lock().await;
        // Reads events since the last request; the first request reads the whole log.
        for _ in 0..=MAX_TIMELINE_EVENTS / PAGE_SIZE {
            let fresh = store.events_after(cache.last, PAGE_SIZE).await?;
            let is_all = fresh.len() < PAGE_SIZE;
            fresh.into_iter().for_each(|logged| cache.record(logged));
            if is_all {
                break;
            }
        }
        Ok(cache.by_call.get(call).into_iter().flatten().cloned().collect())
    }
}

impl TimelineCache {
    fn record(&mut self, logged: LoggedEvent) {
        self.last = logged.id;
        let Some(call) = logged.event.call.clone() else { return };
        self.by_call.entry(call.clone()).or_default().push_back(logged);
        self.order.push_back(call);
        if self.order.len() > MAX_TIMELINE_EVENTS
            && let Some(oldest) = self.order.pop_front()
            && let Some(timeline) = self.by_call.get_mut(&oldest)
        {
            timeline.pop_front();
            if timeline.is_empty() {
                self.by_call.remove(&oldest);
            }
        }
    }
}
