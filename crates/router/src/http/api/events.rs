//! `GET /events`: what happened, as a page or as a stream.

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
        sse::{Event as Message, KeepAlive, Sse},
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
    middleware::{auth::Pass, stream_limit},
    openapi::{Endpoint, Group, schemas},
    webhooks::query::Query,
};
use fleet::{
    Event, EventId, EventKind, Logged,
    names::{CallSid, MerchantId, PodName, Pool},
};
use store::{Store, StoreError, observing};

/// Events that are looked at in one step.
const STEP: usize = 1_000;
/// Steps that one request may take.
const STEPS: usize = 50;
/// How often a stream looks for news.
const LOOK: Duration = Duration::from_millis(200);
/// How often a stream says that it is there.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// An event as callers see it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = Event)]
pub struct Shown {
    /// When it happened, in milliseconds.
    at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::CallSid>)]
    call_sid: Option<CallSid>,
    /// What belongs to the kind.
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

impl Shown {
    pub fn example() -> Self {
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

pub fn shown(logged: &Logged) -> Shown {
    let Logged { id, at, event } = logged;
    Shown {
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
    events: Vec<Shown>,
    /// What goes into `before`, or into `after` if that was given.
    #[schema(required)]
    next: Option<String>,
}

pub fn described() -> Endpoint {
    let kinds: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
    let example = Shown::example();
    let text = serde_json::to_string(&example).expect("an event is JSON");
    let message = format!("id: {}\nevent: allocated\ndata: {text}\n\n", example.id);
    Endpoint::new(Group::Calls, "What happened")
        .about(
            "The latest first, with `after` the oldest first. With `Accept: text/event-stream` a \
             stream that begins now, or after `Last-Event-ID`, and does not end.",
        )
        .query("event", schemas::one_of_or_empty(&kinds), "Of this kind alone.")
        .query("call", schemas::call_or_empty(), "Of this call alone.")
        .query("pod", schemas::pod_or_empty(), "Of this pod alone.")
        .query("pool", schemas::pool_or_empty(), "Of this pool alone.")
        .query("merchant", schemas::merchant_or_empty(), "Of this merchant alone.")
        .query("limit", schemas::limit(100, 1_000), "How many at most.")
        .query(
            "before",
            schemas::event_id_or_empty(),
            "What happened before; not together with `after`.",
        )
        .query("after", schemas::event_id_or_empty(), "What happened after.")
        .header("Last-Event-ID", schemas::event_id_or_empty(), "Where a stream goes on.")
        .gives(Events { events: vec![example], next: None })
        .or_gives("text/event-stream", schemas::text(), message.into())
        .fails(400, "A parameter makes no sense, or is not known.")
        .fails(404, "This router keeps no events.")
        .asks_store()
}

/// Which events are asked for.
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

    fn takes(&self, event: &Event) -> bool {
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

pub async fn events(
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
        let error = "this router keeps no events (EVENTS=off)";
        return Err(ApiError::new(StatusCode::NOT_FOUND, error));
    }
    if wants_stream(headers) {
        if before.is_some() || query.has("limit") {
            return Err(ApiError::bad_request("a stream has neither before nor limit"));
        }
        let open = stream_limit::open(&context, &parts)?;
        let from = match last_seen.or(after) {
            Some(after) => after,
            None => last(&context).await?,
        };
        let keep_alive = KeepAlive::new().interval(HEARTBEAT);
        let pass = Pass::new(&context, headers);
        let told = told(context, filter, from).take_while(move |_| {
            let _counts = &open;
            ready(pass.holds())
        });
        return Ok(Sse::new(told).keep_alive(keep_alive).into_response());
    }
    if before.is_some() && after.is_some() {
        return Err(ApiError::bad_request("before and after can't be combined"));
    }
    let (found, next) = page(&context, &filter, before, after, limit).await?;
    let events = found.iter().map(shown).collect();
    Ok(Json(Events { events, next: next.map(|id| id.to_string()) }).into_response())
}

/// Whether a client names a stream among what it takes.
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

/// Some events that a filter takes, and where to go on: with `after` the oldest first, else
/// the latest.
async fn page(
    context: &Context,
    filter: &Filter,
    before: Option<EventId>,
    after: Option<EventId>,
    limit: usize,
) -> Result<(Vec<Logged>, Option<EventId>), StoreError> {
    let (mut found, mut at) = (Vec::new(), after.or(before));
    for _ in 0..STEPS {
        let some = match after {
            Some(_) => context.store.events_after(at.unwrap_or_default(), STEP).await?,
            None => context.store.events_before(at, STEP).await?,
        };
        let is_all = some.len() < STEP;
        for logged in some {
            at = Some(logged.id);
            if filter.takes(&logged.event) {
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

/// News, until the client or the router goes.
fn told(
    context: Arc<Context>,
    filter: Filter,
    from: EventId,
) -> impl Stream<Item = Result<Message, Infallible>> {
    stream::unfold((context, filter, from, Vec::new().into_iter()), async |state| {
        let (context, filter, mut from, mut left) = state;
        loop {
            if let Some(logged) = left.next() {
                let logged: Logged = logged;
                from = logged.id;
                if !filter.takes(&logged.event) {
                    continue;
                }
                let text = serde_json::to_string(&shown(&logged)).expect("an event is JSON");
                let message = Message::default()
                    .id(logged.id.to_string())
                    .event(logged.event.kind.as_str())
                    .data(text);
                return Some((Ok(message), (context, filter, from, left)));
            }
            // A store that is out has no news; the stream goes on when it is back.
            let some = observing(context.store.events_after(from, STEP)).await.unwrap_or_default();
            let is_quiet = some.len() < STEP / 2;
            left = some.into_iter();
            if is_quiet {
                tokio::select! {
                    () = context.lifecycle.stopping.cancelled() => return None,
                    () = tokio::time::sleep(LOOK) => {}
                }
            }
        }
    })
}

/// The stories of calls: events by call, read from the store once each.
#[derive(Default)]
pub struct Stories {
    read: tokio::sync::Mutex<Read>,
}

#[derive(Default)]
struct Read {
    last: EventId,
    /// Whose events these were, the oldest first.
    order: VecDeque<CallSid>,
    by_call: HashMap<CallSid, VecDeque<Logged>>,
}

/// Events that are remembered here at most: as many as `EVENTS` may ask for, and some.
const REMEMBERED: usize = 110_000;

impl Stories {
    /// What happened to a call, as far as that is kept.
    pub async fn of(&self, store: &dyn Store, call: &CallSid) -> Result<Vec<Logged>, StoreError> {
        let mut read = self.read.lock().await;
        // What came since somebody last asked; the first has to read all of it, of which
        // there is not more than is remembered.
        for _ in 0..=REMEMBERED / STEP {
            let fresh = store.events_after(read.last, STEP).await?;
            let is_all = fresh.len() < STEP;
            fresh.into_iter().for_each(|logged| read.note(logged));
            if is_all {
                break;
            }
        }
        Ok(read.by_call.get(call).into_iter().flatten().cloned().collect())
    }
}

impl Read {
    fn note(&mut self, logged: Logged) {
        self.last = logged.id;
        let Some(call) = logged.event.call.clone() else { return };
        self.by_call.entry(call.clone()).or_default().push_back(logged);
        self.order.push_back(call);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
            && let Some(story) = self.by_call.get_mut(&oldest)
        {
            story.pop_front();
            if story.is_empty() {
                self.by_call.remove(&oldest);
            }
        }
    }
}
