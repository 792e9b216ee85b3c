//! Bearer tokens: who asks, and whether they may.

use std::{convert::Infallible, fmt, sync::Arc};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{body, rate_limit};
use crate::auth::{Bearer, Role};
use crate::http::{ApiError, Context, Noted};
use store::observing;
use telephony::Secret;

/// Lets a request through if its token is of the role it needs.
pub async fn check(
    State((context, needed)): State<(Arc<Context>, Role)>,
    mut request: Request,
    next: Next,
) -> Response {
    if !request.method().is_safe() && is_from_elsewhere(request.headers()) {
        context.metrics.denied("forbidden");
        let error = "a page of another origin may not ask for this";
        let noted = Noted { outcome: "foreign_origin", ..Noted::default() };
        return noted.on(ApiError::new(StatusCode::FORBIDDEN, error));
    }
    let Some(tokens) = context.access.tokens() else {
        return run(needed, request, next).await;
    };
    let bearer = token(request.headers()).and_then(|token| tokens.bearer(token));
    if bearer.is_none()
        && let Some(refused) = rate_limit::charge(&context, request.extensions(), request.headers())
    {
        return refused;
    }
    if bearer.is_none_or(|bearer| !bearer.role.may(needed)) {
        // Who still sends would not hear the answer.
        let _ = body::read(request.into_body(), context.read_timeout).await;
        return refuse(&context, bearer, needed);
    }
    request.extensions_mut().insert(By(bearer));
    note(run(needed, request, next).await, bearer)
}

/// What viewers ask for only looks: the store refuses it before it refuses a call.
async fn run(needed: Role, request: Request, next: Next) -> Response {
    match needed {
        Role::Viewer => observing(next.run(request)).await,
        Role::Agent | Role::Admin => next.run(request).await,
    }
}

/// Who asks, if that is known.
#[derive(Debug, Clone, Copy, Default)]
pub struct By(Option<Bearer>);

impl By {
    pub fn is_admin(self) -> bool {
        self.0.is_some_and(|bearer| bearer.role == Role::Admin)
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |bearer| bearer.fmt(f))
    }
}

impl<S: Sync> FromRequestParts<S> for By {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().copied().unwrap_or_default())
    }
}

/// What a stream was opened with. A token that is taken away ends it.
pub struct Pass(Arc<Context>, Option<Secret>);

impl Pass {
    pub fn new(context: &Arc<Context>, headers: &HeaderMap) -> Self {
        Self(context.clone(), token(headers).map(Secret::from))
    }

    /// Whether it would still open the stream.
    pub fn holds(&self) -> bool {
        let Self(context, given) = self;
        let Some(tokens) = context.access.tokens() else { return true };
        let bearer = given.as_ref().and_then(|given| tokens.bearer(given.expose()));
        bearer.is_some_and(|bearer| bearer.role.may(Role::Viewer))
    }
}

/// Whether a page of somebody else sent this: browsers say so, and nobody else does.
fn is_from_elsewhere(headers: &HeaderMap) -> bool {
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
            let error = ApiError::new(StatusCode::UNAUTHORIZED, "a valid bearer token is needed");
            Noted { outcome: "unauthorized", ..Noted::default() }.on(error)
        }
        Some(Bearer { role, .. }) => {
            context.metrics.denied("forbidden");
            let (needed, role) = (needed.as_str(), role.as_str());
            let error = format!("this needs a token of the role {needed}; yours is {role}");
            let response = ApiError::new(StatusCode::FORBIDDEN, error).into_response();
            note(Noted { outcome: "forbidden", ..Noted::default() }.on(response), bearer)
        }
    }
}

/// Notes for the log who asked.
fn note(mut response: Response, bearer: Option<Bearer>) -> Response {
    let mut noted = response.extensions_mut().remove::<Noted>().unwrap_or_default();
    noted.by = bearer;
    noted.on(response)
}

pub fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
