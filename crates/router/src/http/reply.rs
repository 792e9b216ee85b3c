//! Answers that all endpoints share: JSON, errors, and notes for the log.

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
    CallNotFound, Refusal, Tried, UnknownPod, Why,
    names::{CallSid, InvalidName, PodName},
};
use store::StoreError;

/// An error as it is sent.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
pub(super) struct ErrorBody<'a> {
    /// What would help to understand it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>, nullable = false)]
    details: Option<&'a Value>,
    /// What happened, to what, and what to do.
    error: &'a str,
}

/// An error in the format of JSON callers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub error: String,
    pub details: Option<Value>,
}

impl ApiError {
    pub fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into(), details: None }
    }

    pub fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    /// A call has no pod; says why, and for each step that was tried.
    pub fn refused(refusal: &Refusal) -> Self {
        let mut details = json!({"reason": refusal.why.as_str()});
        let error = match refusal.why {
            Why::Limit(_) => "the merchant has as many calls as it may",
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
        let mut tell = |name, value| {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        };
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                tell(header::RETRY_AFTER, "1");
            }
            StatusCode::UNAUTHORIZED => tell(header::WWW_AUTHENTICATE, "Bearer"),
            _ => {}
        }
        // What is left of such a request is not worth reading.
        match self.status {
            StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_MANY_REQUESTS => super::close(response),
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

/// What a request was about, for its line in the log.
#[derive(Debug, Clone, Default)]
pub struct Noted {
    pub call: Option<CallSid>,
    pub pod: Option<PodName>,
    pub pool: Option<String>,
    /// In a word, what came of it.
    pub outcome: &'static str,
    /// Steps of the chain that were tried in vain.
    pub tried: Vec<Tried>,
    /// Whose token it came with.
    pub by: Option<Bearer>,
    /// Why it was refused.
    pub why: Option<String>,
}

impl Noted {
    pub fn on(self, response: impl IntoResponse) -> Response {
        let mut response = response.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

pub(super) async fn not_found(State(context): Shared, uri: Uri, request: Request) -> Response {
    if let Some(refused) = rate_limit::charge(&context, request.extensions(), request.headers()) {
        return refused;
    }
    // Who still sends would not hear the answer.
    let _ = body::read(request.into_body(), context.read_timeout).await;
    ApiError::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path()))
        .into_response()
}

pub(super) async fn method_not_allowed(
    State(context): Shared,
    method: Method,
    uri: Uri,
    request: Request,
) -> Response {
    if let Some(refused) = rate_limit::charge(&context, request.extensions(), request.headers()) {
        return refused;
    }
    let _ = body::read(request.into_body(), context.read_timeout).await;
    let error = format!("{method} is not allowed at {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, error).into_response()
}

/// A checked name from the path of a request.
pub struct Named<T>(pub T);

impl<T, S> FromRequestParts<S> for Named<T>
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
