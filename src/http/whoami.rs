//! `GET /whoami`: what the bearer of a token may do.

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
};
use serde_json::{Value, json};

use super::{ApiError, Shared, auth};
use crate::access::Role;

pub async fn whoami(State(context): Shared, headers: HeaderMap) -> Result<Json<Value>, ApiError> {
    let Some(tokens) = context.access.tokens() else {
        return Ok(Json(json!({"role": Role::Admin.as_str(), "needs_token": false})));
    };
    let bearer = auth::token(&headers).and_then(|token| tokens.bearer(token));
    let bearer = bearer.ok_or_else(|| {
        context.metrics.denied("unauthorized");
        ApiError::new(StatusCode::UNAUTHORIZED, "a valid bearer token is needed")
    })?;
    Ok(Json(json!({"role": bearer.role.as_str(), "needs_token": true})))
}
