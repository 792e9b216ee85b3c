//! Authentication and authorization by bearer token.

use std::{convert::Infallible, fmt, sync::Arc};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{body, rate_limit};
use crate::auth::{Bearer, Role};
use crate::http::{ApiError, Context, RequestLog};
use store::observing;
use telephony::Secret;

/// Passes a request on if its token has the required role.
pub(crate) async fn check(
    State((context, needed)): State<(Arc<Context>, Role)>,
    mut request: Request,
    next: Next,
) -> Response {
    if !request.method().is_safe() && is_cross_origin(request.headers()) {
        context.metrics.denied("forbidden");
        let error = "cross-origin requests may not change anything";
        let log = RequestLog { outcome: "cross_origin", ..RequestLog::default() };
        return log.attach(ApiError::new(StatusCode::FORBIDDEN, error));
    }
    let Some(tokens) = context.access.tokens() else {
        return run(needed, request, next).await;
    };
    let bearer = token(request.headers()).and_then(|token| tokens.bearer(token));
    if bearer.is_none()
        && let Some(refused) = rate_limit::check(&context, request.extensions(), request.headers())
    {
        return refused;
    }
    if bearer.is_none_or(|bearer| !bearer.role.may(needed)) {
        // A client that is still sending would not receive the response.
        let _ = body::read(request.into_body(), context.read_timeout).await;
        return refuse(&context, bearer, needed);
    }
    request.extensions_mut().insert(Caller(bearer));
    log_bearer(run(needed, request, next).await, bearer)
}

/// Runs the handler. Viewer requests run with observer priority: the store sheds them first.
async fn run(needed: Role, request: Request, next: Next) -> Response {
    match needed {
        Role::Viewer => observing(next.run(request)).await,
        Role::Agent | Role::Admin => next.run(request).await,
    }
}

/// Bearer of the request's token; none without authentication.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Caller(Option<Bearer>);

impl Caller {
    pub(crate) fn is_admin(self) -> bool {
        self.0.is_some_and(|bearer| bearer.role == Role::Admin)
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |bearer| bearer.fmt(f))
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().copied().unwrap_or_default())
    }
}

/// Token of an open stream, checked again while it runs: a revoked token ends the stream.
pub(crate) struct StreamToken(Arc<Context>, Option<Secret>);

impl StreamToken {
    pub(crate) fn new(context: &Arc<Context>, headers: &HeaderMap) -> Self {
        Self(context.clone(), token(headers).map(Secret::from))
    }

    /// Whether the token still permits the stream.
    pub(crate) fn is_valid(&self) -> bool {
        let Self(context, given) = self;
        let Some(tokens) = context.access.tokens() else { return true };
        let bearer = given.as_ref().and_then(|given| tokens.bearer(given.expose()));
        bearer.is_some_and(|bearer| bearer.role.may(Role::Viewer))
    }
}

/// Whether a page of another origin sent the request. Only browsers set these headers.
fn is_cross_origin(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    match (text("sec-fetch-site"), text("origin")) {
        (Some(site), _) => !matches!(site, "same-origin" | "none"),
        (None, Some(origin)) => origin.split_once("://").map(|(_, host)| host) != text("host"),
        (None, None) => false,
    }
}

fn refuse(context: &Context, bearer: Option<Bearer>, needed: Role) -> Response {
    match bearer {
        None => {
            context.metrics.denied("unauthorized");
            let error = ApiError::new(StatusCode::UNAUTHORIZED, "a valid bearer token is required");
            RequestLog { outcome: "unauthorized", ..RequestLog::default() }.attach(error)
        }
        Some(Bearer { role, .. }) => {
            context.metrics.denied("forbidden");
            let (needed, role) = (needed.as_str(), role.as_str());
            let error = format!("a token with role {needed} is required; this one has role {role}");
            let response = ApiError::new(StatusCode::FORBIDDEN, error).into_response();
            log_bearer(
                RequestLog { outcome: "forbidden", ..RequestLog::default() }.attach(response),
                bearer,
            )
        }
    }
}

/// Adds the bearer to the access log.
fn log_bearer(mut response: Response, bearer: Option<Bearer>) -> Response {
    let mut log = response.extensions_mut().remove::<RequestLog>().unwrap_or_default();
    log.by = bearer;
    log.attach(response)
}

pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
