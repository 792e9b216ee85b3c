//! `GET /health` and `/ready`.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::Shared;

/// The process lives, whatever else does not.
pub async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Whether calls should be sent here. A store that blinks is no reason against
/// it: all replicas would vanish at once.
pub async fn ready(State(context): Shared) -> Response {
    let (status, word) = match context.lifecycle.is_ready() {
        true => (StatusCode::OK, "ready"),
        false if context.lifecycle.stopping.is_cancelled() => {
            (StatusCode::SERVICE_UNAVAILABLE, "stopping")
        }
        false => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
    };
    let store = if context.store.is_up() { "up" } else { "down" };
    (status, Json(json!({"status": word, "store": store}))).into_response()
}
