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
use fleet::NumberStatus;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(crate) fn endpoint() -> Endpoint {
    let example = "# TYPE smart_router_active_calls gauge\nsmart_router_active_calls 0\n# EOF\n";
    Endpoint::new(Group::Router, "Prometheus metrics").responds_untyped(
        OPEN_METRICS,
        schemas::text(),
        example.into(),
    )
}

pub(crate) async fn metrics(State(context): Shared) -> Response {
    context.metrics.cluster.problems.set(context.lifecycle.problems().len() as i64);
    if let Ok(outbound) = context.snapshots.outbound().await {
        context.metrics.outbound.set(outbound);
    }
    if let Ok(numbers) = context.snapshots.numbers().await {
        // A number without lines is blocked, not full.
        let is_full = |it: &&NumberStatus| it.max_lines > 0 && it.lines >= it.max_lines as usize;
        context.metrics.outbound.set_full_numbers(numbers.iter().filter(is_full).count());
    }
    let text = context.metrics.render(context.snapshots.recent_status().await);
    ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}
