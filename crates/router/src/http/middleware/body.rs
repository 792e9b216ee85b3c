//! Request bodies, read with limits on size and time.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{HeaderMap, StatusCode, header},
};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use crate::http::{ApiError, Context};

/// Largest accepted body.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Bytes of a larger body that are read and discarded, so that the client receives the response.
const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// Reason for which a body is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the body is larger than 64 KiB")]
    TooLarge,
    #[error("the body did not arrive in time")]
    TooSlow,
    #[error("reading the body failed: {0}")]
    Broken(String),
    #[error("the content type {0:?} is not supported")]
    ContentType(String),
    #[error("the body cannot be parsed: {0}")]
    Malformed(String),
}

impl BodyError {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::ContentType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Broken(_) | Self::Malformed(_) => StatusCode::BAD_REQUEST,
        }
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        Self::new(error.status(), error.to_string())
    }
}

/// Reads a body of at most `MAX_BODY_BYTES` within `timeout`.
pub(crate) async fn read(body: Body, timeout: Duration) -> Result<Bytes, BodyError> {
    tokio::time::timeout(timeout, collect(body)).await.unwrap_or(Err(BodyError::TooSlow))
}

async fn collect(mut body: Body) -> Result<Bytes, BodyError> {
    // Most bodies arrive as one frame, which is not copied.
    let (mut only, mut bytes) = (Bytes::new(), Vec::new());
    let mut seen = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| BodyError::Broken(error.to_string()))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        seen += data.len();
        match seen {
            _ if seen > MAX_DISCARDED_BYTES => return Err(BodyError::TooLarge),
            _ if seen > MAX_BODY_BYTES => bytes = Vec::new(),
            _ if seen == data.len() => only = data,
            _ => {
                if bytes.is_empty() {
                    bytes.extend(&only);
                }
                bytes.extend(&data);
            }
        }
    }
    match seen {
        _ if seen > MAX_BODY_BYTES => Err(BodyError::TooLarge),
        _ if seen == only.len() => Ok(only),
        _ => Ok(bytes.into()),
    }
}

/// The content type without parameters, in lower case.
pub(crate) fn content_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?;
    let essence = value.to_str().unwrap_or("?").split(';').next().unwrap_or_default();
    Some(essence.trim().to_ascii_lowercase())
}

/// Boundary between the parts of a multipart body.
pub(crate) fn boundary(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let mut parts = value.unwrap_or_default().split(';').map(str::trim);
    let boundary = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then(|| value.trim_matches('"').to_owned())
    });
    boundary.unwrap_or_default()
}

pub(crate) fn is_json(content_type: &str) -> bool {
    content_type == "application/json"
        || (content_type.starts_with("application/") && content_type.ends_with("+json"))
}

/// JSON body of a request, with any content type: clients of the older router send none, or
/// another. [`super::auth`] rejects cross-origin requests, which this would otherwise permit.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Arc<Context>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, context: &Arc<Context>) -> Result<Self, ApiError> {
        let bytes = read(request.into_body(), context.read_timeout).await?;
        // Serde also reads the fields of a struct from an array, in their order.
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            return Err(BodyError::Malformed("expected a JSON object".into()).into());
        }
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|error| BodyError::Malformed(error.to_string()).into())
    }
}
