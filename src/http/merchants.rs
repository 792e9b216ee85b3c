//! `/merchants/{id}`: what a merchant's calls may use.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{ApiError, Noted, Shared, body::JsonBody, reply::Named};
use crate::domain::{merchant::MerchantConfig, names::MerchantId};

pub async fn get(
    State(context): Shared,
    Named(id): Named<MerchantId>,
) -> Result<Response, ApiError> {
    let document = context.store.merchant(&id).await?.ok_or_else(unknown)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], document).into_response())
}

pub async fn put(
    State(context): Shared,
    Named(id): Named<MerchantId>,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    let document = body.to_string();
    MerchantConfig::parse(&document)
        .map_err(|error| ApiError::bad_request(format!("not a merchant document: {error}")))?;
    context.store.set_merchant(&id, Some(&document)).await?;
    let noted = Noted { outcome: "merchant_set", ..Noted::default() };
    Ok(noted.on(Json(json!({"success": true, "merchant_id": id}))))
}

pub async fn delete(
    State(context): Shared,
    Named(id): Named<MerchantId>,
) -> Result<Response, ApiError> {
    context.store.merchant(&id).await?.ok_or_else(unknown)?;
    context.store.set_merchant(&id, None).await?;
    let noted = Noted { outcome: "merchant_deleted", ..Noted::default() };
    Ok(noted.on(Json(json!({"success": true, "merchant_id": id}))))
}

fn unknown() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "merchant not found")
}
