//! `GET /metrics`: Prometheus metrics.

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use crate::http::{
    Shared,
    openapi::{Endpoint, Group, schemas},
};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub fn endpoint() -> Endpoint {
    let example = "# TYPE smart_router_active_calls gauge\nsmart_router_active_calls 0\n# EOF\n";
    Endpoint::new(Group::Router, "Prometheus metrics").responds_untyped(
        OPEN_METRICS,
        schemas::text(),
        example.into(),
    )
}

pub async fn metrics(State(context): Shared) -> Response {
    context.metrics.cluster.problems.set(context.lifecycle.problems().len() as i64);
    if let Ok(outbound) = context.snapshots.outbound().await {
        context.metrics.outbound.set(outbound);
    }
    let text = context.metrics.render(context.snapshots.recent_status().await);
    ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}
