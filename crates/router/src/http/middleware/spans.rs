//! Attributes of request spans: OpenTelemetry's HTTP conventions, plus calls and pods.

use std::net::SocketAddr;

use axum::extract::MatchedPath;

use crate::http::RequestLog;
use ::spans::Span;

/// Bytes of the path in a span; clients control its length.
const MAX_PATH_BYTES: usize = 256;

/// Sets the attributes of the request. `method` is a known method or `other`.
pub(super) fn begin(
    span: &mut Span,
    scheme: &'static str,
    method: &'static str,
    route: Option<&MatchedPath>,
    path: &str,
    peer: Option<SocketAddr>,
) {
    let (method, name) = if method == "other" { ("_OTHER", "HTTP") } else { (method, method) };
    span.name = match route {
        Some(route) => format!("{name} {}", route.as_str()),
        None => name.into(),
    };
    span.set("http.request.method", method);
    span.set_some("http.route", route.map(|route| route.as_str().to_owned()));
    span.set("url.path", path[..path.floor_char_boundary(MAX_PATH_BYTES)].to_owned());
    span.set("url.scheme", scheme);
    span.set_some("network.peer.address", peer.map(|peer| peer.ip().to_string()));
}

/// Sets the attributes of the response. The span of a streaming response ends at its head.
pub(super) fn end(span: &mut Span, status: u16, log: &RequestLog) {
    span.set("http.response.status_code", status);
    span.set_some("call_sid", log.call.as_ref().map(ToString::to_string));
    span.set_some("pod", log.pod.as_ref().map(ToString::to_string));
    span.set_some("pool", log.pool.clone());
    span.set_some("outcome", Some(log.outcome).filter(|outcome| !outcome.is_empty()));
    if status >= 500 {
        span.fail(status.to_string());
    }
}
