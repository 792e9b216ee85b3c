//! Refuses requests without a valid token or signature over the rate limit of their source.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{Extensions, HeaderMap, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::http::{ApiError, Context, RequestLog};

/// Counts an unauthenticated request; returns the 429 response if its source is over the limit.
pub(crate) fn check(
    context: &Context,
    extensions: &Extensions,
    headers: &HeaderMap,
) -> Option<Response> {
    if context.rate_limiter.allows(extensions, headers) {
        return None;
    }
    context.metrics.denied("rate_limited");
    let error = "too many requests without a valid token or signature";
    let response = ApiError::new(StatusCode::TOO_MANY_REQUESTS, error).into_response();
    Some(RequestLog { outcome: "rate_limited", ..RequestLog::default() }.attach(response))
}

/// Middleware for routes that require no token.
pub(crate) async fn limit(
    State(context): State<Arc<Context>>,
    request: Request,
    next: Next,
) -> Response {
    match check(&context, request.extensions(), request.headers()) {
        Some(refused) => refused,
        None => next.run(request).await,
    }
}
