//! `/{provider}/allocate`: a pod for a call, in the provider's own format.
//! Providers that speak to the caller always get 200 with a document, because
//! anything else is a dead line; only what is not genuine gets 403 and no word.

pub(super) mod callbacks;
pub(super) mod query;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::{
    extract::{OriginalUri, Request, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};

use tokio::time::Instant;

use super::BusyAction;
use super::{
    ApiError, Context, Noted, Shared,
    api::allocate::{Connected, NotConnected, Way, connect},
    middleware::{
        body::{self, BodyError},
        rate_limit,
    },
};
use fleet::{
    After, Refusal, Why,
    names::{InvalidName, PodName},
};
use telephony::{
    CallRequest, Content, Covered, Document, Forged, Genuine, OnHold, Provider, Stream, Webhook,
};

pub(super) async fn allocate(
    State(context): Shared,
    provider: Provider,
    request: Request,
) -> Response {
    let read = |webhook: &Webhook<'_>| {
        let missing = provider.dialect().without_call();
        let call = webhook.get(provider.dialect().call_field()).unwrap_or_default();
        if !missing.is_empty() && call.is_empty() {
            return Err(ApiError::bad_request(missing));
        }
        let call = CallRequest::from_webhook(provider, webhook)?;
        // Where the signature does not cover the URL, a callback could be sent here instead.
        let is_signed = webhook.fingerprint.is_some();
        if is_signed && provider.dialect().call_is_over(webhook) == Some(true) {
            return Err(ApiError::bad_request("it says that the call is over"));
        }
        Ok((call, Back::read(webhook), webhook.fingerprint.clone()))
    };
    let (call, back, fingerprint) =
        match receive(&context, provider, request, Covered::Nothing, read).await {
            Ok(asked) => asked,
            Err(response) => return response,
        };
    let way = Way { fingerprint, ..way(&context, provider, None, back.since) };
    let (noted, outcome) = connect(&context, &call, way).await;
    respond(&context, &call, back, noted, outcome)
}

/// Since when a call waits, by the URL that we gave it (unix seconds). Nobody has
/// waited since a time to come.
fn waiting_since(webhook: &Webhook<'_>) -> Option<u64> {
    let since: u64 = webhook.query.get("waiting_since")?.parse().ok()?;
    Some(since.min(unix_seconds()))
}

/// Where a call that has to be patient comes back to.
struct Back {
    /// When it began to wait, if it has (unix seconds): then it has been answered, and
    /// can't be told that the line is busy.
    since: Option<u64>,
    /// How often it has asked since. It makes every URL another, so that the signatures of its
    /// requests differ: the same again is a replay.
    polls: u32,
    /// Its stream is gone, and it is not settled yet what that means.
    after: Option<After>,
}

impl Back {
    fn read(webhook: &Webhook<'_>) -> Self {
        let polls = webhook.query.get("poll").and_then(|text| text.parse().ok());
        Self { since: waiting_since(webhook), polls: polls.unwrap_or(0), after: None }
    }

    /// Where it asks again.
    fn url(&self, context: &Context, call: &CallRequest, since: u64) -> String {
        context.waiting_url(call, since, self.polls.saturating_add(1))
    }
}

/// `/{provider}/after-stream`: the stream of a call is gone. If its agent did not
/// end it, the call gets another.
pub(super) async fn after_stream(
    State(context): Shared,
    provider: Provider,
    request: Request,
) -> Response {
    let read = |webhook: &Webhook<'_>| {
        let call = CallRequest::from_webhook(provider, webhook)?;
        let pod: PodName = webhook.query.get("pod_name").unwrap_or_default().parse()?;
        let attempt: Option<u32> = webhook.query.get("attempt").and_then(|text| text.parse().ok());
        let attempt = attempt.filter(|attempt| (1..=MOST_ATTEMPTS).contains(attempt));
        let attempt = attempt.ok_or_else(|| {
            ApiError::bad_request("attempt: expected a number, as in the URL that we gave")
        })?;
        let retries = context.retries;
        let after = After { pod, attempt, is_final: false, retries };
        Ok((call, after, Back::read(webhook), webhook.fingerprint.clone()))
    };
    let (call, mut after, back, fingerprint) =
        match receive(&context, provider, request, Covered::Body, read).await {
            Ok(told) => told,
            Err(response) => return response,
        };
    if context.retries == 0 {
        let noted = Noted { call: Some(call.call), outcome: "over", ..Noted::default() };
        return noted.on(answer(provider.dialect().goodbye()));
    }
    let began = Instant::now();
    let (until, answer_by) = (began + EXPLANATION, Some(began + ANSWER));
    loop {
        let way = way(&context, provider, Some(after.clone()), back.since);
        let way = Way { answer_by, fingerprint: fingerprint.clone(), ..way };
        let (noted, outcome) = connect(&context, &call, way).await;
        match &outcome {
            Err(NotConnected::Refused(Refusal { why: Why::Unsettled, .. })) => {}
            _ => {
                let since = Some(back.since.unwrap_or_else(unix_seconds));
                let back = Back { since, after: Some(after), ..back };
                return respond(&context, &call, back, noted, outcome);
            }
        }
        tokio::time::sleep_until(until.min(Instant::now() + LOOK)).await;
        after.is_final = Instant::now() >= until || context.lifecycle.stopping.is_cancelled();
    }
}

/// How calls of a provider ask. One that has waited since `since` has only the rest
/// of its time left.
fn way(context: &Context, provider: Provider, after: Option<After>, since: Option<u64>) -> Way {
    let dialect = provider.dialect();
    let waits = context.hold.as_ref().filter(|_| dialect.comes_back());
    Way {
        connect: context.ttls.connect.filter(|_| dialect.tells_of_starts()),
        returns: context.retries > 0 && dialect.comes_back(),
        hold: waits.map(|config| {
            let waited = since.map_or(0, |since| unix_seconds().saturating_sub(since));
            config.hold(config.time.saturating_sub(waited.saturating_mul(1_000)))
        }),
        after,
        ..Way::default()
    }
}

/// What a call is told.
fn respond(
    context: &Context,
    call: &CallRequest,
    back: Back,
    noted: Noted,
    outcome: Result<Connected, NotConnected>,
) -> Response {
    let (provider, dialect) = (call.provider, call.provider.dialect());
    let failure = match outcome {
        Ok(connected) => {
            let given = &connected.allocation;
            let (status_url, after_url) =
                (context.stream_status_url(provider, given), context.after_stream_url(call, given));
            let traceparent = spans::traceparent();
            let stream = Stream {
                url: &connected.ws_url,
                call: &call.call,
                status_url: status_url.as_deref(),
                after_url: after_url.as_deref(),
                traceparent: traceparent.as_deref(),
            };
            return noted.on(answer(dialect.connect(&stream)));
        }
        Err(failure) => failure,
    };
    let sentence = match &failure {
        NotConnected::Refused(refusal) => match refusal.why {
            Why::Waiting { is_new, .. } => {
                let url = back.url(context, call, back.since.unwrap_or_else(unix_seconds));
                return match hold(context, call, &back, is_new, &url) {
                    Some(document) => noted.on(answer(document)),
                    None => noted.on(refuse(provider, BUSY, ApiError::from(&failure))),
                };
            }
            Why::Over | Why::Replayed => return noted.on(answer(dialect.goodbye())),
            Why::Spent | Why::Unsettled => LOST,
            _ if back.since.is_none() && context.busy_action == BusyAction::Reject => {
                match dialect.busy() {
                    Some(busy) => return noted.on(answer(busy)),
                    None => BUSY,
                }
            }
            _ => BUSY,
        },
        // It may be a moment only; who waits goes on waiting, but not for ever.
        NotConnected::Store(_) => {
            if let (Some(since), Some(config)) = (back.since, &context.hold)
                && unix_seconds() < since.saturating_add(config.time / 1_000)
                && let url = match &back.after {
                    None => back.url(context, call, since),
                    Some(after) => context.after_stream_again_url(call, since, after),
                }
                && let Some(document) = hold(context, call, &back, false, &url)
            {
                return noted.on(answer(document));
            }
            UNAVAILABLE
        }
    };
    noted.on(refuse(provider, sentence, ApiError::from(&failure)))
}

/// What a call hears until it asks again.
fn hold(
    context: &Context,
    call: &CallRequest,
    back: &Back,
    is_new: bool,
    url: &str,
) -> Option<Document> {
    let config = context.hold.as_ref()?;
    let waited = back.since.map_or(0, |since| unix_seconds().saturating_sub(since));
    let left = (config.time / 1_000).saturating_sub(waited).max(1);
    call.provider.dialect().hold(&OnHold {
        sentence: Some(config.message.as_str()).filter(|it| is_new && !it.is_empty()),
        audio: config.audio.as_deref(),
        pause_seconds: config.poll.as_secs().min(left),
        url,
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// How long the end of a stream may go unexplained: the agent's release may be on
/// its way.
const EXPLANATION: Duration = Duration::from_secs(1);
/// How long the whole answer to a call that comes back may take. Every webhook is answered within
/// two seconds (I8): a stalled store, which takes up to 750 ms to give up, must not add to the
/// time for the explanation.
const ANSWER: Duration = Duration::from_millis(1_500);
/// More nobody is given.
const MOST_ATTEMPTS: u32 = 100;
const LOOK: Duration = Duration::from_millis(100);

const BUSY: &str = "All agents are busy. Please try again later.";
const LOST: &str = "The connection to the agent was lost. Please call again.";
pub(super) const UNAVAILABLE: &str = "The service is not available. Please try again later.";
const UNUSABLE: &str = "This call cannot be connected, because the request is not valid. Goodbye.";

/// Reads a webhook, makes sure that it is genuine and at least so much of it
/// covered, and takes from it what is
/// needed; or the answer to one that is not, or is of no use.
pub(super) async fn receive<T>(
    context: &Context,
    provider: Provider,
    request: Request,
    least: Covered,
    take: impl FnOnce(&Webhook<'_>) -> Result<T, ApiError>,
) -> Result<T, Response> {
    let (parts, body) = request.into_parts();
    let keys = context.access.keys(provider);
    let forged = |why: String, is_unread: bool| {
        if let Some(refused) = rate_limit::charge(context, &parts.extensions, &parts.headers) {
            return refused;
        }
        context.metrics.denied("forged");
        let noted = Noted { outcome: "forged", why: Some(why), ..Noted::default() };
        let response = StatusCode::FORBIDDEN.into_response();
        noted.on(if is_unread { super::close(response) } else { response })
    };
    let unusable = |error: ApiError| {
        let noted =
            Noted { outcome: "invalid", why: Some(error.error.clone()), ..Noted::default() };
        noted.on(refuse(provider, UNUSABLE, error))
    };
    // What can't be read can't be genuine.
    let unread = |error: ApiError| match keys {
        None => unusable(error),
        Some(_) => forged(error.error.clone(), is_cut_short(&error)),
    };

    let is_get = parts.method == Method::GET;
    let content_type = body::content_type(&parts.headers);
    let bytes = body::read(body, context.read_timeout).await;
    let bytes = bytes.map_err(|error| unread(error.into()))?;
    let content = match content_type.as_deref() {
        _ if is_get || bytes.is_empty() => Content::Form,
        Some(content_type) if body::is_json(content_type) => Content::Json,
        Some("application/x-www-form-urlencoded") => Content::Form,
        Some("multipart/form-data") => {
            Content::Multipart { boundary: body::boundary(&parts.headers) }
        }
        Some(other) => return Err(unread(BodyError::ContentType(other.into()).into())),
        None if bytes.trim_ascii_start().starts_with(b"{") => Content::Json,
        None => Content::Form,
    };
    let webhook = Webhook {
        is_get,
        public_url: &context.public_url,
        target: target(&parts),
        headers: &parts.headers,
        body: &bytes,
        content,
        at: unix_seconds(),
        query: Default::default(),
        sent: Default::default(),
        covered: Covered::Everything,
        fingerprint: None,
    };
    let mut webhook =
        webhook.read().map_err(|error| unread(BodyError::Malformed(error.to_string()).into()))?;
    if let Some(keys) = &keys {
        let genuine = match provider.dialect().verify(&webhook, keys) {
            Ok(Genuine { covered: Covered::Nothing, .. }) if least != Covered::Nothing => {
                Err(Forged::Uncovered)
            }
            verified => verified,
        };
        let genuine = genuine.map_err(|error| forged(error.to_string(), false))?;
        (webhook.covered, webhook.fingerprint) = (genuine.covered, genuine.fingerprint);
        check_call_id(provider, &webhook).map_err(|error| unusable(error.into()))?;
    }
    take(&webhook).map_err(unusable)
}

/// Whether a genuine request names its call as its provider does. Some signatures are right for
/// several divisions of a text into names and values, and so for several ids.
fn check_call_id(provider: Provider, webhook: &Webhook<'_>) -> Result<(), InvalidName> {
    let dialect = provider.dialect();
    let id = webhook.get(dialect.call_field()).unwrap_or_default();
    match dialect.call_format() {
        Some(format) if !format.fits(id) => {
            Err(InvalidName::new(dialect.call_field(), id, format.expected()))
        }
        _ => Ok(()),
    }
}

/// Path and query as they came, before routing took its part off.
fn target(parts: &Parts) -> &str {
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    uri.path_and_query().map_or("/", |target| target.as_str())
}

/// Whether the rest of a request was not read, and is not going to be.
fn is_cut_short(error: &ApiError) -> bool {
    matches!(error.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT)
}

/// An error in the provider's own format.
pub(super) fn refuse(provider: Provider, sentence: &str, error: ApiError) -> Response {
    match provider.dialect().hang_up(sentence) {
        None => error.into_response(),
        Some(document) if is_cut_short(&error) => super::close(answer(document)),
        Some(document) => answer(document),
    }
}

pub(super) fn answer(document: Document) -> Response {
    let content_type = HeaderValue::from_static(document.content_type);
    ([(header::CONTENT_TYPE, content_type)], document.body).into_response()
}
