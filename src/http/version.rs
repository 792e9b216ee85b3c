//! Which version of something a request is about: `ETag`, and `If-Match` of who changes it.

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, StatusCode, header, request::Parts},
};

use super::{
    ApiError,
    openapi::{Endpoint, schemas},
};
use crate::telephony::sha256_hex;

/// The tag of a text.
pub fn tag(text: &str) -> [(HeaderName, String); 1] {
    [(header::ETAG, tag_of(text))]
}

fn tag_of(text: &str) -> String {
    format!("\"{}\"", &sha256_hex(text.as_bytes())[..16])
}

/// What a request says it would change.
pub struct IfMatch(Option<String>);

impl IfMatch {
    /// Refuses a change of what is another by now. Nothing has no tag.
    pub fn check(&self, present: Option<&str>) -> Result<(), ApiError> {
        let Self(Some(wanted)) = self else { return Ok(()) };
        let is_one = |tag: &str| match (tag.trim(), present) {
            ("*", present) => present.is_some(),
            (tag, Some(text)) => tag == tag_of(text),
            (_, None) => false,
        };
        if wanted.split(',').any(is_one) {
            Ok(())
        } else {
            Err(changed(StatusCode::PRECONDITION_FAILED))
        }
    }
}

/// It was changed by somebody else, long ago or just now.
pub fn changed(status: StatusCode) -> ApiError {
    ApiError::new(status, crate::domain::fleet::Changed.to_string())
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        text_of(&parts.headers).map(Self)
    }
}

fn text_of(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut all = Vec::new();
    for value in headers.get_all(header::IF_MATCH) {
        let text = value.to_str().map_err(|_| ApiError::bad_request("If-Match is no text"))?;
        all.push(text);
    }
    Ok((!all.is_empty()).then(|| all.join(",")))
}

/// Describes a change that may say what it is about.
pub fn guarded(endpoint: Endpoint) -> Endpoint {
    endpoint
        .header("If-Match", schemas::text(), "The `ETag` of what is to be changed.")
        .fails(409, "Somebody else changed it in the same moment.")
        .fails(412, "It is no longer what `If-Match` says.")
}
