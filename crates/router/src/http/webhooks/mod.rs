//! `/{provider}/allocate` and `/{provider}/after-stream`: allocation in the provider's format.
//! Providers that play documents to the caller always receive 200 with a document, because an
//! error status leaves the caller on a dead line. Only requests with an invalid signature receive
//! 403 without a body.

pub(super) mod callbacks;
pub(super) mod query;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::{
    extract::{OriginalUri, Request, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use tokio::time::Instant;

use super::{
    ApiError, Context, RequestLog, Shared,
    api::allocate::{AllocateOptions, Connected, NotConnected, ReservationEffect, connect},
    middleware::{
        body::{self, BodyError},
        rate_limit,
    },
};
use crate::hold_config::BusyAction;
use fleet::{
    PreviousPod, Refusal, RefusalReason, ReservationUse,
    names::{InvalidName, PodName},
};
use telephony::{
    BodyFormat, CallRequest, Coverage, Document, HoldOptions, InvalidSignature, Provider, Stream,
    Verified, Webhook,
};

pub(super) async fn allocate(
    State(context): Shared,
    provider: Provider,
    request: Request,
) -> Response {
    let read = |webhook: &Webhook<'_>| {
        let missing = provider.dialect().missing_call_hint();
        let call = webhook.get(provider.dialect().call_id_field()).unwrap_or_default();
        if !missing.is_empty() && call.is_empty() {
            return Err(ApiError::bad_request(missing));
        }
        let call = CallRequest::from_webhook(provider, webhook)?;
        // A signature that does not cover the URL allows replaying a status callback here.
        let is_signed = webhook.fingerprint.is_some();
        if is_signed && provider.dialect().call_ended(webhook) == Some(true) {
            return Err(ApiError::bad_request(
                "the request reports the end of the call; expected an incoming call",
            ));
        }
        Ok((call, WaitState::read(webhook), webhook.fingerprint.clone()))
    };
    let (mut call, wait, fingerprint) =
        match receive(&context, provider, request, Coverage::Nothing, read).await {
            Ok(parsed) => parsed,
            Err(response) => return response,
        };
    let options = allocate_options(&context, provider, None, wait.since);
    let options = AllocateOptions { fingerprint, ..options };
    let (log, outcome) = connect(&context, &call, options).await;
    // The following webhooks of the call name the merchant of its reservation.
    if let Some(merchant) = outcome.reservation().and_then(ReservationUse::merchant) {
        call.merchant = Some(merchant.clone());
    }
    respond(&context, &call, wait, log, outcome)
}

/// Start of the wait (unix seconds) from the poll URL, capped at now.
fn waiting_since(webhook: &Webhook<'_>) -> Option<u64> {
    let since: u64 = webhook.query.get("waiting_since")?.parse().ok()?;
    Some(since.min(unix_seconds()))
}

/// State of a waiting call, carried in its poll URL.
struct WaitState {
    /// Start of the wait (unix seconds). A call with a start is answered and can no longer be
    /// rejected as busy.
    since: Option<u64>,
    /// Polls so far. The count makes each URL, and so each signature, unique: a repeated signature
    /// is a replay.
    polls: u32,
    /// Previous pod of a call whose stream ended.
    previous: Option<PreviousPod>,
}

impl WaitState {
    fn read(webhook: &Webhook<'_>) -> Self {
        let polls = webhook.query.get("poll").and_then(|text| text.parse().ok());
        Self { since: waiting_since(webhook), polls: polls.unwrap_or(0), previous: None }
    }

    fn next_poll_url(&self, context: &Context, call: &CallRequest, since: u64) -> String {
        context.poll_url(call, since, self.polls.saturating_add(1))
    }
}

/// `/{provider}/after-stream`: the stream of a call ended. Unless the agent released the call, it
/// reconnects to another pod.
pub(super) async fn after_stream(
    State(context): Shared,
    provider: Provider,
    request: Request,
) -> Response {
    let read = |webhook: &Webhook<'_>| {
        let call = CallRequest::from_webhook(provider, webhook)?;
        let pod: PodName = webhook.query.get("pod_name").unwrap_or_default().parse()?;
        let pod_attempt: Option<u32> =
            webhook.query.get("attempt").and_then(|text| text.parse().ok());
        let pod_attempt = pod_attempt.filter(|number| (1..=MAX_POD_ATTEMPT).contains(number));
        let pod_attempt = pod_attempt.ok_or_else(|| {
            ApiError::bad_request(
                "attempt: expected a number from 1 to 100, as in the generated URL",
            )
        })?;
        let max_retries = context.max_retries;
        let previous = PreviousPod { pod, pod_attempt, is_settled: false, max_retries };
        Ok((call, previous, WaitState::read(webhook), webhook.fingerprint.clone()))
    };
    let (call, mut previous, wait, fingerprint) =
        match receive(&context, provider, request, Coverage::Body, read).await {
            Ok(parsed) => parsed,
            Err(response) => return response,
        };
    if context.max_retries == 0 {
        let log = RequestLog { call: Some(call.call), outcome: "over", ..RequestLog::default() };
        return log.attach(document_response(provider.dialect().silent_hang_up()));
    }
    let began = Instant::now();
    let (until, deadline) = (began + SETTLE_TIMEOUT, Some(began + RESPONSE_TIMEOUT));
    loop {
        let options = allocate_options(&context, provider, Some(previous.clone()), wait.since);
        let options = AllocateOptions { deadline, fingerprint: fingerprint.clone(), ..options };
        let (log, outcome) = connect(&context, &call, options).await;
        match &outcome {
            Err(NotConnected::Refused(Refusal { reason: RefusalReason::Unsettled, .. })) => {}
            _ => {
                let since = Some(wait.since.unwrap_or_else(unix_seconds));
                let wait = WaitState { since, previous: Some(previous), ..wait };
                return respond(&context, &call, wait, log, outcome);
            }
        }
        tokio::time::sleep_until(until.min(Instant::now() + RETRY_INTERVAL)).await;
        previous.is_settled = Instant::now() >= until || context.lifecycle.stopping.is_cancelled();
    }
}

/// Options for a provider's calls. The time since `since` counts towards the hold time.
fn allocate_options(
    context: &Context,
    provider: Provider,
    previous: Option<PreviousPod>,
    since: Option<u64>,
) -> AllocateOptions {
    let dialect = provider.dialect();
    let hold = context.hold.as_ref().filter(|_| dialect.supports_redirect());
    AllocateOptions {
        connect_timeout: context.ttls.connect.filter(|_| dialect.reports_stream_start()),
        may_return: context.max_retries > 0
            && dialect.supports_redirect()
            && !context.public_url.is_empty(),
        hold: hold.map(|config| {
            let waited = since.map_or(0, |since| unix_seconds().saturating_sub(since));
            config.hold(config.time.saturating_sub(waited.saturating_mul(1_000)))
        }),
        previous,
        ..AllocateOptions::default()
    }
}

/// Renders the outcome of an allocation in the provider's format.
fn respond(
    context: &Context,
    call: &CallRequest,
    wait: WaitState,
    log: RequestLog,
    outcome: Result<Connected, NotConnected>,
) -> Response {
    let (provider, dialect) = (call.provider, call.provider.dialect());
    let failure = match outcome {
        Ok(connected) => {
            let given = &connected.allocation;
            let (status_url, after_stream_url) =
                (context.stream_status_url(provider, given), context.after_stream_url(call, given));
            let traceparent = spans::traceparent();
            let stream = Stream {
                url: &connected.ws_url,
                call: &call.call,
                status_url: status_url.as_deref(),
                after_stream_url: after_stream_url.as_deref(),
                traceparent: traceparent.as_deref(),
                parameters: &call.parameters,
            };
            return log.attach(document_response(dialect.connect(&stream)));
        }
        Err(failure) => failure,
    };
    let sentence = match &failure {
        NotConnected::Refused(refusal) => match refusal.reason {
            RefusalReason::Waiting { is_new, .. } => {
                let url =
                    wait.next_poll_url(context, call, wait.since.unwrap_or_else(unix_seconds));
                return match hold(context, call, &wait, is_new, &url) {
                    Some(document) => log.attach(document_response(document)),
                    None => log.attach(refuse(provider, BUSY, ApiError::from(&failure))),
                };
            }
            RefusalReason::CallEnded | RefusalReason::Replayed => {
                return log.attach(document_response(dialect.silent_hang_up()));
            }
            RefusalReason::RetriesExhausted | RefusalReason::Unsettled => LOST,
            _ if wait.since.is_none() && context.busy_action == BusyAction::Reject => {
                match dialect.busy() {
                    Some(busy) => return log.attach(document_response(busy)),
                    None => BUSY,
                }
            }
            _ => BUSY,
        },
        // The outage may be short: a waiting call keeps waiting until its hold time ends.
        NotConnected::Store(_) => {
            if let (Some(since), Some(config)) = (wait.since, &context.hold)
                && unix_seconds() < since.saturating_add(config.time / 1_000)
                && let url = match &wait.previous {
                    None => wait.next_poll_url(context, call, since),
                    Some(previous) => context.after_stream_retry_url(call, since, previous),
                }
                && let Some(document) = hold(context, call, &wait, false, &url)
            {
                return log.attach(document_response(document));
            }
            UNAVAILABLE
        }
    };
    log.attach(refuse(provider, sentence, ApiError::from(&failure)))
}

/// The document that a waiting call plays until its next poll.
fn hold(
    context: &Context,
    call: &CallRequest,
    wait: &WaitState,
    is_new: bool,
    url: &str,
) -> Option<Document> {
    let config = context.hold.as_ref()?;
    let waited = wait.since.map_or(0, |since| unix_seconds().saturating_sub(since));
    let left = (config.time / 1_000).saturating_sub(waited).max(1);
    call.provider.dialect().hold(&HoldOptions {
        sentence: Some(config.message.as_str()).filter(|it| is_new && !it.is_empty()),
        audio: config.audio.as_deref(),
        pause_seconds: config.poll_interval.as_secs().min(left),
        url,
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Time to wait for the agent's release after a stream ended, before the end counts as a
/// disconnect.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of the response to an after-stream webhook. Webhooks respond within two seconds
/// (I8): a stalled store, which times out after up to 750 ms, must not add to `SETTLE_TIMEOUT`.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(1_500);
const MAX_POD_ATTEMPT: u32 = 100;
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

const BUSY: &str = "All agents are busy. Please try again later.";
const LOST: &str = "The connection to the agent was lost. Please call again.";
pub(super) const UNAVAILABLE: &str = "The service is not available. Please try again later.";
const INVALID: &str = "This call cannot be connected, because the request is not valid. Goodbye.";

/// Reads a webhook, verifies its signature with at least the coverage `least`, and parses it with
/// `take`. Returns the error response if any of these fails.
pub(super) async fn receive<T>(
    context: &Context,
    provider: Provider,
    request: Request,
    least: Coverage,
    take: impl FnOnce(&Webhook<'_>) -> Result<T, ApiError>,
) -> Result<T, Response> {
    let (parts, body) = request.into_parts();
    let keys = context.access.keys(provider);
    let forged = |reason: String, is_unread: bool| {
        if let Some(refused) = rate_limit::check(context, &parts.extensions, &parts.headers) {
            return refused;
        }
        context.metrics.denied("forged");
        let log = RequestLog { outcome: "forged", reason: Some(reason), ..RequestLog::default() };
        let response = StatusCode::FORBIDDEN.into_response();
        log.attach(if is_unread { super::close_connection(response) } else { response })
    };
    let invalid = |error: ApiError| {
        let log = RequestLog {
            outcome: "invalid",
            reason: Some(error.error.clone()),
            ..RequestLog::default()
        };
        log.attach(refuse(provider, INVALID, error))
    };
    // An unreadable body cannot be verified.
    let unread = |error: ApiError| match keys {
        None => invalid(error),
        Some(_) => forged(error.error.clone(), is_body_unread(&error)),
    };

    let is_get = parts.method == Method::GET;
    let content_type = body::content_type(&parts.headers);
    let bytes = body::read(body, context.read_timeout).await;
    let bytes = bytes.map_err(|error| unread(error.into()))?;
    let body_format = match content_type.as_deref() {
        _ if is_get || bytes.is_empty() => BodyFormat::Form,
        Some(content_type) if body::is_json(content_type) => BodyFormat::Json,
        Some("application/x-www-form-urlencoded") => BodyFormat::Form,
        Some("multipart/form-data") => {
            BodyFormat::Multipart { boundary: body::boundary(&parts.headers) }
        }
        Some(other) => return Err(unread(BodyError::ContentType(other.into()).into())),
        None if bytes.trim_ascii_start().starts_with(b"{") => BodyFormat::Json,
        None => BodyFormat::Form,
    };
    let webhook = Webhook {
        is_get,
        public_url: &context.public_url,
        target: target(&parts),
        headers: &parts.headers,
        body: &bytes,
        body_format,
        received_at: unix_seconds(),
        query: Default::default(),
        body_params: Default::default(),
        coverage: Coverage::Everything,
        fingerprint: None,
    };
    let mut webhook =
        webhook.read().map_err(|error| unread(BodyError::Malformed(error.to_string()).into()))?;
    if let Some(keys) = &keys {
        let verified = match provider.dialect().verify(&webhook, keys) {
            Ok(Verified { coverage: Coverage::Nothing, .. }) if least != Coverage::Nothing => {
                Err(InvalidSignature::ContentNotSigned)
            }
            verified => verified,
        };
        let verified = verified.map_err(|error| forged(error.to_string(), false))?;
        (webhook.coverage, webhook.fingerprint) = (verified.coverage, verified.fingerprint);
        check_call_id(provider, &webhook).map_err(|error| invalid(error.into()))?;
    }
    take(&webhook).map_err(invalid)
}

/// Checks the provider's format of call ids. Some signature schemes concatenate names and values,
/// so that one signature fits several splits, and so several ids.
fn check_call_id(provider: Provider, webhook: &Webhook<'_>) -> Result<(), InvalidName> {
    let dialect = provider.dialect();
    let id = webhook.get(dialect.call_id_field()).unwrap_or_default();
    match dialect.call_format() {
        Some(format) if !format.matches(id) => {
            Err(InvalidName::new(dialect.call_id_field(), id, format.expected()))
        }
        _ => Ok(()),
    }
}

/// Path and query of the original request, before nested routing.
fn target(parts: &Parts) -> &str {
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    uri.path_and_query().map_or("/", |target| target.as_str())
}

/// Whether the rest of the request stays unread.
fn is_body_unread(error: &ApiError) -> bool {
    matches!(error.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT)
}

/// An error in the provider's format: a hang-up document, or JSON.
pub(super) fn refuse(provider: Provider, sentence: &str, error: ApiError) -> Response {
    match provider.dialect().hang_up(sentence) {
        None => error.into_response(),
        Some(document) if is_body_unread(&error) => {
            super::close_connection(document_response(document))
        }
        Some(document) => document_response(document),
    }
}

pub(super) fn document_response(document: Document) -> Response {
    let content_type = HeaderValue::from_static(document.content_type);
    ([(header::CONTENT_TYPE, content_type)], document.body).into_response()
}
