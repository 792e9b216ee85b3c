//! `/tiers`: the tier table in force.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{ApiError, Noted, Shared, body::JsonBody, query::Query};
use crate::domain::{
    fleet,
    names::Pool,
    tiers::{Origin, Tiers},
};

pub async fn get(State(context): Shared) -> Result<Json<Tiers>, ApiError> {
    Ok(Json(context.store.tiers().await?))
}

/// Puts a table in force, or says what that would move.
pub async fn put(
    State(context): Shared,
    query: Query,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    query.only(&["dry_run"])?;
    let (tiers, mut warnings) = Tiers::parse(&body.to_string(), Origin::Settings)
        .map_err(|error| ApiError::bad_request(format!("not a tier document: {error}")))?;
    let moves = fleet::moves(&tiers, &context.store.pods().await?);
    let busy = moves.iter().filter(|it| it.is_busy && it.to.is_some()).count();
    if busy > 0 {
        warnings.push(format!("{busy} busy pods move when their calls are over"));
    }
    let stranded: Vec<&str> =
        moves.iter().filter(|it| it.to.is_none()).map(|it| it.pod.as_str()).collect();
    if !stranded.is_empty() {
        let shown = stranded.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        let error = format!("no tier would take {} pods, such as {shown}", stranded.len());
        return Err(ApiError::new(StatusCode::CONFLICT, error));
    }
    if query.flag("dry_run")? {
        let tier = |pool: &Option<Pool>| pool.as_ref().map(Pool::as_tier_value);
        let moves: Vec<Value> = moves
            .iter()
            .map(|it| {
                let (from, to) = (tier(&it.from), tier(&it.to));
                json!({"pod_name": it.pod, "from": from, "to": to, "is_busy": it.is_busy})
            })
            .collect();
        let told = json!({"tiers": tiers, "warnings": warnings, "moves": moves});
        return Ok(Json(told).into_response());
    }
    let fenced = context.store.apply_tiers(&tiers, None).await?;
    fenced.map_err(|fenced| ApiError::new(StatusCode::CONFLICT, fenced.to_string()))?;
    context.nudge.notify_one();
    let noted = Noted { outcome: "tiers_applied", ..Noted::default() };
    Ok(noted.on(Json(json!({"success": true, "tiers": tiers, "warnings": warnings}))))
}
