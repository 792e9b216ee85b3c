//! `/{provider}/allocate`: a pod for a call, in the provider's own format.
//! Providers that speak to the caller always get 200 with a document, because
//! anything else is a dead line; only what is not genuine gets 403 and no word.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::{
    extract::{OriginalUri, Request, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};

use super::{
    ApiError, Context, Noted, Shared,
    allocate::{NotConnected, connect},
    body::{self, BodyError},
};
use crate::{
    config::BusyAction,
    telephony::{CallRequest, Content, Covered, Document, Forged, Provider, Stream, Webhook},
};

pub async fn allocate(State(context): Shared, provider: Provider, request: Request) -> Response {
    let read = |webhook: &Webhook<'_>| {
        let missing = provider.dialect().without_call();
        let call = webhook.get(provider.dialect().call_field()).unwrap_or_default();
        if !missing.is_empty() && call.is_empty() {
            return Err(ApiError::bad_request(missing));
        }
        Ok(CallRequest::from_webhook(provider, webhook)?)
    };
    let call = match receive(&context, provider, request, Covered::Nothing, read).await {
        Ok(call) => call,
        Err(response) => return response,
    };
    let confirms = provider.dialect().tells_of_starts();
    let within = context.ttls.connect.filter(|_| confirms);
    let (noted, outcome) = connect(&context, &call, within).await;
    match outcome {
        Ok(connected) => {
            let status_url = context.stream_status_url(provider, &connected.allocation.pod);
            let stream = Stream {
                url: &connected.ws_url,
                call: &call.call,
                status_url: status_url.as_deref(),
            };
            noted.on(answer(provider.dialect().connect(&stream)))
        }
        Err(failure) => {
            if let NotConnected::Refused(_) = failure
                && context.busy_action == BusyAction::Reject
                && let Some(busy) = provider.dialect().busy()
            {
                return noted.on(answer(busy));
            }
            let sentence = match failure {
                NotConnected::Refused(_) => "All agents are busy. Please try again later.",
                NotConnected::Store(_) => UNAVAILABLE,
            };
            noted.on(refuse(provider, sentence, ApiError::from(&failure)))
        }
    }
}

pub const UNAVAILABLE: &str = "The service is not available. Please try again later.";
const UNUSABLE: &str = "This call cannot be connected, because the request is not valid. Goodbye.";

/// Reads a webhook, makes sure that it is genuine and at least so much of it
/// covered, and takes from it what is
/// needed; or the answer to one that is not, or is of no use.
pub async fn receive<T>(
    context: &Context,
    provider: Provider,
    request: Request,
    least: Covered,
    take: impl FnOnce(&Webhook<'_>) -> Result<T, ApiError>,
) -> Result<T, Response> {
    let (parts, body) = request.into_parts();
    let keys = context.access.keys(provider);
    let forged = |why: String, is_unread: bool| {
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
        at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        query: Default::default(),
        sent: Default::default(),
        covered: Covered::Everything,
    };
    let mut webhook =
        webhook.read().map_err(|error| unread(BodyError::Malformed(error.to_string()).into()))?;
    if let Some(keys) = &keys {
        webhook.covered = match provider.dialect().verify(&webhook, keys) {
            Ok(Covered::Nothing) if least != Covered::Nothing => Err(Forged::Uncovered),
            verified => verified,
        }
        .map_err(|error| forged(error.to_string(), false))?;
    }
    take(&webhook).map_err(unusable)
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
pub fn refuse(provider: Provider, sentence: &str, error: ApiError) -> Response {
    match provider.dialect().hang_up(sentence) {
        None => error.into_response(),
        Some(document) if is_cut_short(&error) => super::close(answer(document)),
        Some(document) => answer(document),
    }
}

pub fn answer(document: Document) -> Response {
    let content_type = HeaderValue::from_static(document.content_type);
    ([(header::CONTENT_TYPE, content_type)], document.body).into_response()
}
