//! What the span of a request tells, in the names of OpenTelemetry's conventions, and of
//! ours for calls and pods.

use std::net::SocketAddr;

use axum::extract::MatchedPath;

use crate::http::Noted;
use ::spans::Span;

/// So much of a path is told: anybody can make it long.
const LONGEST_PATH: usize = 256;

/// What is known when the request comes. `method` is one of those we know, or `other`.
pub fn begin(
    span: &mut Span,
    scheme: &'static str,
    method: &'static str,
    route: Option<&MatchedPath>,
    path: &str,
    peer: Option<SocketAddr>,
) {
    let (method, shown) = if method == "other" { ("_OTHER", "HTTP") } else { (method, method) };
    span.name = match route {
        Some(route) => format!("{shown} {}", route.as_str()),
        None => shown.into(),
    };
    span.set("http.request.method", method);
    span.set_some("http.route", route.map(|route| route.as_str().to_owned()));
    span.set("url.path", path[..path.floor_char_boundary(LONGEST_PATH)].to_owned());
    span.set("url.scheme", scheme);
    span.set_some("network.peer.address", peer.map(|peer| peer.ip().to_string()));
}

/// What is known when it is answered. An answer that has no end counts until it begins.
pub fn end(span: &mut Span, status: u16, noted: &Noted) {
    span.set("http.response.status_code", status);
    span.set_some("call_sid", noted.call.as_ref().map(ToString::to_string));
    span.set_some("pod", noted.pod.as_ref().map(ToString::to_string));
    span.set_some("pool", noted.pool.clone());
    span.set_some("outcome", Some(noted.outcome).filter(|outcome| !outcome.is_empty()));
    if status >= 500 {
        span.fail(status.to_string());
    }
}
