//! Bearer tokens: who asks, and whether they may.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{ApiError, Context, Noted, body, rate};
use crate::access::{Bearer, Role};

/// Lets a request through if its token is of the role it needs.
pub async fn check(
    State((context, needed)): State<(Arc<Context>, Role)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(tokens) = context.access.tokens() else {
        return next.run(request).await;
    };
    let bearer = token(request.headers()).and_then(|token| tokens.bearer(token));
    if bearer.is_none()
        && let Some(refused) = rate::charge(&context, request.extensions(), request.headers())
    {
        return refused;
    }
    if bearer.is_none_or(|bearer| !bearer.role.may(needed)) {
        // Who still sends would not hear the answer.
        let _ = body::read(request.into_body(), context.read_timeout).await;
        return refuse(&context, bearer, needed);
    }
    note(next.run(request).await, bearer)
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
