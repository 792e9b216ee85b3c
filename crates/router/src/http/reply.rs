//! Response parts shared by all endpoints: errors, access log fields, fallbacks.

use axum::{
    Json,
    extract::{FromRequestParts, Path, Request, State},
    http::{HeaderValue, Method, StatusCode, Uri, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    Shared,
    middleware::{body, rate_limit},
};

use crate::auth::Bearer;
use fleet::{
    CallNotFound, Refusal, RefusalReason, SkippedStep, UnknownPod,
    names::{CallSid, InvalidName, PodName},
};
use store::StoreError;

/// JSON body of an error response.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
pub(super) struct ErrorBody<'a> {
    /// Context of the error, such as the field or the skipped steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>, nullable = false)]
    details: Option<&'a Value>,
    /// Condition, subject and remedy.
    error: &'a str,
}

/// An error response of the JSON API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) error: String,
    pub(crate) details: Option<Value>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into(), details: None }
    }

    pub(super) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    /// Refused allocation, with the reason for each skipped step of the chain.
    pub(super) fn refused(refusal: &Refusal) -> Self {
        let mut details = json!({"reason": refusal.reason.as_str()});
        let error = match refusal.reason {
            RefusalReason::Limit(_) => "the merchant has reached its call limit",
            _ => {
                details["chain"] = json!(refusal.tried);
                "no pods available"
            }
        };
        Self { details: Some(details), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, error) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = ErrorBody { details: self.details.as_ref(), error: &self.error };
        let mut response = (self.status, Json(body)).into_response();
        let mut set_header = |name, value| {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        };
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                set_header(header::RETRY_AFTER, "1");
            }
            StatusCode::UNAUTHORIZED => set_header(header::WWW_AUTHENTICATE, "Bearer"),
            _ => {}
        }
        // The rest of the request is not read, so the connection cannot be reused.
        match self.status {
            StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_MANY_REQUESTS => super::close_connection(response),
            _ => response,
        }
    }
}

impl From<InvalidName> for ApiError {
    fn from(error: InvalidName) -> Self {
        Self {
            details: Some(json!({"field": error.field})),
            ..Self::bad_request(error.to_string())
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let status = match error {
            StoreError::Unavailable(_) | StoreError::Busy | StoreError::Full(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            StoreError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl From<CallNotFound> for ApiError {
    fn from(_: CallNotFound) -> Self {
        Self::new(StatusCode::NOT_FOUND, "call not found")
    }
}

impl From<UnknownPod> for ApiError {
    fn from(_: UnknownPod) -> Self {
        Self::new(StatusCode::NOT_FOUND, "pod not found")
    }
}

/// Fields of the access log, attached to a response as an extension.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestLog {
    pub(crate) call: Option<CallSid>,
    pub(crate) pod: Option<PodName>,
    pub(crate) pool: Option<String>,
    pub(crate) outcome: &'static str,
    pub(crate) tried: Vec<SkippedStep>,
    /// Bearer of the request's token.
    pub(crate) by: Option<Bearer>,
    /// Reason of a refusal.
    pub(crate) reason: Option<String>,
    /// Condition that the caller should know of, in the header `X-Warning`.
    pub(crate) warning: Option<&'static str>,
}

impl RequestLog {
    pub(super) fn attach(self, response: impl IntoResponse) -> Response {
        let mut response = response.into_response();
        if let Some(warning) = self.warning {
            response.headers_mut().insert("x-warning", HeaderValue::from_static(warning));
        }
        response.extensions_mut().insert(self);
        response
    }
}

pub(super) async fn not_found(State(context): Shared, uri: Uri, request: Request) -> Response {
    if let Some(refused) = rate_limit::check(&context, request.extensions(), request.headers()) {
        return refused;
    }
    // A client that is still sending would not receive the response.
    let _ = body::read(request.into_body(), context.read_timeout).await;
    ApiError::new(StatusCode::NOT_FOUND, format!("no such path: {}", uri.path())).into_response()
}

pub(super) async fn method_not_allowed(
    State(context): Shared,
    method: Method,
    uri: Uri,
    request: Request,
) -> Response {
    if let Some(refused) = rate_limit::check(&context, request.extensions(), request.headers()) {
        return refused;
    }
    let _ = body::read(request.into_body(), context.read_timeout).await;
    let error = format!("{method} is not allowed at {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, error).into_response()
}

/// Extractor of a validated name from the path.
pub(super) struct PathName<T>(pub(super) T);

impl<T, S> FromRequestParts<S> for PathName<T>
where
    T: TryFrom<String, Error = InvalidName> + Send,
    S: Send + Sync,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| ApiError::bad_request(error.body_text()))?;
        Ok(Self(T::try_from(text)?))
    }
}
