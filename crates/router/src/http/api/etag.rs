//! Which version of something a request is about: `ETag`, and `If-Match` of who changes it.

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, StatusCode, header, request::Parts},
};

use crate::http::{
    ApiError,
    openapi::{Endpoint, schemas},
};
use telephony::sha256_hex;

/// The tag of a text.
pub fn tag(text: &str) -> [(HeaderName, String); 1] {
    [(header::ETAG, tag_of(text))]
}

fn tag_of(text: &str) -> String {
    format!("\"{}\"", &sha256_hex(text.as_bytes())[..16])
}

/// What a request says it would change: something that has one of these tags, and none of
/// those.
pub struct IfMatch {
    wanted: Option<String>,
    unwanted: Option<String>,
}

impl IfMatch {
    /// Refuses a change of what is another by now. Nothing has no tag.
    pub fn check(&self, present: Option<&str>) -> Result<(), ApiError> {
        let is_one = |tags: &String| {
            tags.split(',').any(|tag| match (tag.trim(), present) {
                ("*", present) => present.is_some(),
                (tag, Some(text)) => tag == tag_of(text),
                (_, None) => false,
            })
        };
        if self.wanted.as_ref().is_none_or(is_one) && !self.unwanted.as_ref().is_some_and(is_one) {
            return Ok(());
        }
        Err(changed(StatusCode::PRECONDITION_FAILED))
    }
}

/// It was changed by somebody else, long ago or just now.
pub fn changed(status: StatusCode) -> ApiError {
    ApiError::new(status, fleet::Changed.to_string())
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let text = |name| text_of(&parts.headers, name);
        Ok(Self { wanted: text(header::IF_MATCH)?, unwanted: text(header::IF_NONE_MATCH)? })
    }
}

fn text_of(headers: &HeaderMap, name: HeaderName) -> Result<Option<String>, ApiError> {
    let mut all = Vec::new();
    for value in headers.get_all(&name) {
        let text = value.to_str();
        all.push(text.map_err(|_| ApiError::bad_request(format!("{name} is no text")))?);
    }
    Ok((!all.is_empty()).then(|| all.join(",")))
}

/// Describes a change that may say what it is about.
pub fn guarded(endpoint: Endpoint) -> Endpoint {
    endpoint
        .header("If-Match", schemas::text(), "The `ETag` of what is to be changed.")
        .header("If-None-Match", schemas::text(), "`*`: only if there is nothing yet.")
        .fails(409, "Somebody else changed it in the same moment.")
        .fails(412, "It is no longer what `If-Match` says.")
}
