//! `/tiers`: the tier table in force.

use axum::{Json, extract::State, response::Response};
use serde_json::{Value, json};

use super::{ApiError, Noted, Shared, body::JsonBody};
use crate::domain::tiers::{Origin, Tiers};

pub async fn get(State(context): Shared) -> Result<Json<Tiers>, ApiError> {
    Ok(Json(context.store.tiers().await?))
}

pub async fn put(
    State(context): Shared,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    let (tiers, warnings) = Tiers::parse(&body.to_string(), Origin::Settings)
        .map_err(|error| ApiError::bad_request(format!("not a tier document: {error}")))?;
    let fenced = context.store.apply_tiers(&tiers, None).await?;
    fenced.map_err(|fenced| ApiError::new(axum::http::StatusCode::CONFLICT, fenced.to_string()))?;
    context.nudge.notify_one();
    let noted = Noted { outcome: "tiers_applied", ..Noted::default() };
    Ok(noted.on(Json(json!({"success": true, "tiers": tiers, "warnings": warnings}))))
}
