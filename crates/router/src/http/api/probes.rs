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
pub(crate) struct Health {
    status: &'static str,
}

#[derive(Serialize, ToSchema)]
struct Ready {
    /// `ready`, `starting`, `refused` (the store holds the pods of another origin) or `stopping`.
    status: &'static str,
    /// `up` or `down`.
    store: &'static str,
    /// Cause of the outage: a Redis error code, `timeout`, `unreachable`, or a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    reason: Option<String>,
    /// Open media streams of a stopping router, which it relays for up to `MEDIA_DRAIN_TIME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    draining_streams: Option<usize>,
}

pub(crate) fn health_endpoint() -> Endpoint {
    Endpoint::new(Group::Router, "Liveness").responds(Health { status: "ok" })
}

pub(crate) fn ready_endpoint() -> Endpoint {
    Endpoint::new(Group::Router, "Readiness")
        .responds(Ready { status: "ready", store: "up", reason: None, draining_streams: None })
        .responds_with(
            503,
            "The store was not reached or not reconciled with the list of pods yet, or holds pods \
             of another origin, or the router is shutting down.",
            Ready {
                status: "stopping",
                store: "down",
                reason: Some("unreachable".into()),
                draining_streams: Some(2),
            },
        )
}

/// Liveness; independent of the store.
pub(crate) async fn health() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Readiness. A store outage does not make the router unready: it would remove all replicas from
/// the load balancer at once.
pub(crate) async fn ready(State(context): Shared) -> Response {
    let (status, state) = match context.lifecycle.is_ready() {
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
    let is_stopping = context.lifecycle.stopping.is_cancelled();
    let draining_streams =
        context.urls.gateway().filter(|_| is_stopping).map(|it| it.stream_count());
    (status, Json(Ready { status: state, store, reason, draining_streams })).into_response()
}
