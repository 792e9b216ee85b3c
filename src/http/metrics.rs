//! `GET /metrics`: for Prometheus.

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use super::Shared;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub async fn metrics(State(context): Shared) -> Response {
    let status = context.store.status().await.ok();
    let text = context.metrics.render(status);
    ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}
