//! `GET /health` and `/ready`.

use std::sync::atomic::Ordering;

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::{
    Shared,
    openapi::{Endpoint, Group},
};

#[derive(Serialize, ToSchema)]
pub struct Health {
    status: &'static str,
}

#[derive(Serialize, ToSchema)]
struct Ready {
    /// `ready`, `starting`, `refused` (the store holds the pods of another origin) or `stopping`.
    status: &'static str,
    /// `up` or `down`.
    store: &'static str,
    /// Why the store is down: the code of Redis's error, `timeout`, `unreachable`, or in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    reason: Option<String>,
}

pub fn health_described() -> Endpoint {
    Endpoint::new(Group::Router, "Whether the process lives").gives(Health { status: "ok" })
}

pub fn ready_described() -> Endpoint {
    Endpoint::new(Group::Router, "Whether calls should be sent here")
        .gives(Ready { status: "ready", store: "up", reason: None })
        .gives_with(
            503,
            "The store was not reached yet or holds the pods of another origin, or the router stops.",
            Ready { status: "starting", store: "down", reason: Some("unreachable".into()) },
        )
}

/// The process lives, whatever else does not.
pub async fn health() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Whether calls should be sent here. A store that blinks is no reason against
/// it: all replicas would vanish at once.
pub async fn ready(State(context): Shared) -> Response {
    let (status, word) = match context.lifecycle.is_ready() {
        true => (StatusCode::OK, "ready"),
        false if context.lifecycle.stopping.is_cancelled() => {
            (StatusCode::SERVICE_UNAVAILABLE, "stopping")
        }
        false if context.lifecycle.is_foreign.load(Ordering::Relaxed) => {
            (StatusCode::SERVICE_UNAVAILABLE, "refused")
        }
        false => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
    };
    let reason = context.store.outage();
    let store = if reason.is_none() { "up" } else { "down" };
    (status, Json(Ready { status: word, store, reason })).into_response()
}
