//! `/twilio/allocate`, `/plivo/allocate`, `/exotel/allocate`: a pod for a call,
//! in the provider's own format. Providers that speak to the caller always get
//! 200 with a document, because anything else is a dead line.

use axum::{
    body::Bytes,
    extract::{Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};

use super::{
    ApiError, Context, Noted, Shared,
    allocate::{NotConnected, connect},
    body::{self, BodyError},
};
use crate::telephony::{CallRequest, Document, Params, Provider};

pub async fn allocate(State(context): Shared, provider: Provider, request: Request) -> Response {
    let call = match read(&context, provider, request).await {
        Ok(call) => call,
        Err(error) => {
            let noted = Noted { outcome: "invalid", ..Noted::default() };
            let sentence =
                "This call cannot be connected, because the request is not valid. Goodbye.";
            return noted.on(refuse(provider, sentence, error));
        }
    };
    let (noted, outcome) = connect(&context, &call).await;
    match outcome {
        Ok(connected) => noted.on(answer(provider.connect(&connected.ws_url))),
        Err(failure) => {
            let sentence = match failure {
                NotConnected::Refused(_) => "All agents are busy. Please try again later.",
                NotConnected::Store(_) => "The service is not available. Please try again later.",
            };
            noted.on(refuse(provider, sentence, ApiError::from(&failure)))
        }
    }
}

async fn read(
    context: &Context,
    provider: Provider,
    request: Request,
) -> Result<CallRequest, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = body::read(body, context.read_timeout).await?;
    let query = Params::from_form(parts.uri.query().unwrap_or_default())
        .map_err(|error| ApiError::bad_request(format!("the query cannot be read: {error}")))?;
    let sent = read_params(body::content_type(&parts.headers), &bytes)?;
    Ok(CallRequest::from_webhook(provider, &query, &sent)?)
}

/// Reads a form or JSON, whichever the content type says. Without one, what
/// begins with a brace is JSON.
fn read_params(content_type: Option<String>, bytes: &Bytes) -> Result<Params, BodyError> {
    if bytes.is_empty() {
        return Ok(Params::default());
    }
    let is_json = match content_type.as_deref() {
        Some(content_type) if body::is_json(content_type) => true,
        Some("application/x-www-form-urlencoded") => false,
        Some(other) => return Err(BodyError::ContentType(other.into())),
        None => bytes.trim_ascii_start().starts_with(b"{"),
    };
    let params = if is_json {
        Params::from_json(bytes)
    } else {
        let text =
            str::from_utf8(bytes).map_err(|error| BodyError::Malformed(error.to_string()))?;
        Params::from_form(text)
    };
    params.map_err(|error| BodyError::Malformed(error.to_string()))
}

fn refuse(provider: Provider, sentence: &str, error: ApiError) -> Response {
    let too_much = error.status == axum::http::StatusCode::PAYLOAD_TOO_LARGE
        || error.status == axum::http::StatusCode::REQUEST_TIMEOUT;
    match provider.hang_up(sentence) {
        None => error.into_response(),
        Some(document) if too_much => super::close(answer(document)),
        Some(document) => answer(document),
    }
}

fn answer(document: Document) -> Response {
    let content_type = HeaderValue::from_static(document.content_type);
    ([(header::CONTENT_TYPE, content_type)], document.body).into_response()
}
