//! `GET /whoami`: the role of a token.

use axum::{
    Json,
    extract::State,
    http::{Extensions, HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::auth::Role;
use crate::http::{
    ApiError, Shared,
    middleware::{auth, rate_limit},
    openapi::{Endpoint, Group},
};

#[derive(Serialize, ToSchema)]
#[schema(as = WhoAmI)]
pub(crate) struct Identity {
    needs_token: bool,
    /// `viewer`, `agent` or `admin`.
    role: &'static str,
}

pub(crate) fn endpoint() -> Endpoint {
    Endpoint::new(Group::Router, "Get the role of the token")
        .responds(Identity { needs_token: true, role: Role::Admin.as_str() })
}

pub(crate) async fn whoami(
    State(context): Shared,
    extensions: Extensions,
    headers: HeaderMap,
) -> Result<Json<Identity>, Response> {
    let Some(tokens) = context.access.tokens() else {
        return Ok(Json(Identity { needs_token: false, role: Role::Admin.as_str() }));
    };
    let bearer = auth::token(&headers).and_then(|token| tokens.bearer(token));
    let bearer = bearer.ok_or_else(|| {
        if let Some(refused) = rate_limit::check(&context, &extensions, &headers) {
            return refused;
        }
        context.metrics.denied("unauthorized");
        ApiError::new(StatusCode::UNAUTHORIZED, "a valid bearer token is required").into_response()
    })?;
    Ok(Json(Identity { needs_token: true, role: bearer.role.as_str() }))
}
