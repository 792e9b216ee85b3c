//! `GET /whoami`: what the bearer of a token may do.

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
pub struct You {
    needs_token: bool,
    /// `viewer`, `agent` or `admin`.
    role: &'static str,
}

pub fn described() -> Endpoint {
    Endpoint::new(Group::Router, "What the bearer of a token may do")
        .gives(You { needs_token: true, role: Role::Admin.as_str() })
}

pub async fn whoami(
    State(context): Shared,
    extensions: Extensions,
    headers: HeaderMap,
) -> Result<Json<You>, Response> {
    let Some(tokens) = context.access.tokens() else {
        return Ok(Json(You { needs_token: false, role: Role::Admin.as_str() }));
    };
    let bearer = auth::token(&headers).and_then(|token| tokens.bearer(token));
    let bearer = bearer.ok_or_else(|| {
        if let Some(refused) = rate_limit::charge(&context, &extensions, &headers) {
            return refused;
        }
        context.metrics.denied("unauthorized");
        ApiError::new(StatusCode::UNAUTHORIZED, "a valid bearer token is needed").into_response()
    })?;
    Ok(Json(You { needs_token: true, role: bearer.role.as_str() }))
}
