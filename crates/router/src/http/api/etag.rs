//! Optimistic concurrency: `ETag` of a document, `If-Match` and `If-None-Match` of a change.

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, StatusCode, header, request::Parts},
};

use crate::http::{
    ApiError,
    openapi::{Endpoint, schemas},
};
use telephony::sha256_hex;

/// `ETag` header of a document.
pub(super) fn etag(text: &str) -> [(HeaderName, String); 1] {
    [(header::ETAG, etag_value(text))]
}

fn etag_value(text: &str) -> String {
    format!("\"{}\"", &sha256_hex(text.as_bytes())[..16])
}

/// Preconditions of a change.
pub(crate) struct IfMatch {
    if_match: Option<String>,
    if_none_match: Option<String>,
}

impl IfMatch {
    /// Fails with 412 unless the current document meets the preconditions.
    pub(super) fn check(&self, current: Option<&str>) -> Result<(), ApiError> {
        let matches = |tags: &String| {
            tags.split(',').any(|tag| match (tag.trim(), current) {
                ("*", current) => current.is_some(),
                (tag, Some(text)) => tag == etag_value(text),
                (_, None) => false,
            })
        };
        if self.if_match.as_ref().is_none_or(matches)
            && !self.if_none_match.as_ref().is_some_and(matches)
        {
            return Ok(());
        }
        Err(conflict(StatusCode::PRECONDITION_FAILED))
    }
}

/// The error for a document that changed before (412) or during (409) the request.
pub(super) fn conflict(status: StatusCode) -> ApiError {
    ApiError::new(status, fleet::Conflict.to_string())
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let text = |name| text_of(&parts.headers, name);
        Ok(Self { if_match: text(header::IF_MATCH)?, if_none_match: text(header::IF_NONE_MATCH)? })
    }
}

fn text_of(headers: &HeaderMap, name: HeaderName) -> Result<Option<String>, ApiError> {
    let mut all = Vec::new();
    for value in headers.get_all(&name) {
        let text = value.to_str();
        all.push(text.map_err(|_| ApiError::bad_request(format!("{name}: expected ASCII text")))?);
    }
    Ok((!all.is_empty()).then(|| all.join(",")))
}

/// Describes the preconditions of a change.
pub(super) fn conditional(endpoint: Endpoint) -> Endpoint {
    endpoint
        .header_param("If-Match", schemas::text(), "`ETag` of the expected version.")
        .header_param("If-None-Match", schemas::text(), "`*`: only create, never replace.")
        .error(409, "Another request changed the document at the same time.")
        .error(412, "The document is not the expected version.")
}
