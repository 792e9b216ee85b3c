//! `/merchants/{id}`: what a merchant's calls may use.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{ApiError, Noted, Shared, body::JsonBody, query::Query, reply::Named};
use crate::domain::{merchant::MerchantConfig, names::MerchantId};

pub async fn list(State(context): Shared, query: Query) -> Result<Json<Value>, ApiError> {
    query.only(&["limit", "cursor"])?;
    let limit = query.limit(100, 1_000)?;
    let after = query.cursor(&[])?.map(|id| id.parse::<MerchantId>()).transpose()?;
    let mut found = context.store.merchants(after.as_ref(), limit + 1).await?;
    let is_more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| is_more).map(|(id, _)| query.next(&[], id.as_str()));
    let merchants: Vec<Value> = found
        .iter()
        .map(|(id, document)| {
            // What somebody has put there by hand may be no JSON at all.
            let document = serde_json::from_str(document).unwrap_or_else(|_| json!(document));
            json!({"merchant_id": id, "document": document})
        })
        .collect();
    Ok(Json(json!({"merchants": merchants, "next": next})))
}

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
    let config = MerchantConfig::parse(&document)
        .map_err(|error| ApiError::bad_request(format!("not a merchant document: {error}")))?;
    let tiers = context.store.tiers().await?;
    if let Some(step) = config.unknown_tier(&tiers) {
        let error = format!("not a merchant document: fallback: there is no tier {step}");
        return Err(ApiError::bad_request(error));
    }
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
