//! Access log: request id, metrics, span and log line of every request. Recovers from panics of
//! handlers.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr},
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;

use super::spans;
use crate::http::{ApiError, Context, RequestLog};
use crate::media;
use crate::telemetry::metrics::{Endpoint, Request as RequestLabels};
use ::spans::RequestSpan;

/// Bytes of the path in a log line. The log buffers lines, and a path may have 64 KiB.
const MAX_PATH_BYTES: usize = 1024;

static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

pub(crate) async fn observe(
    State(context): State<Arc<Context>>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID.clone(), id.clone());
    let method = request.method().clone();
    let uri = request.uri().clone();
    let source = context.rate_limiter.source(request.extensions(), request.headers());
    let peer = request.extensions().get::<SocketAddr>().copied();
    let endpoint = Endpoint(request.extensions().get::<MatchedPath>().cloned());
    // A method is free text; the metric label needs a bounded set of values.
    let known = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"];
    let label = known.into_iter().find(|known| *known == method.as_str()).unwrap_or("other");
    let is_probe =
        ["/health", "/ready", "/metrics"].iter().any(|probe| endpoint.as_str().ends_with(probe));
    let mut span = context.tracer.as_ref().filter(|_| !is_probe).map(|tracer| {
        tracer.request(request.headers(), |span| {
            spans::begin(span, context.scheme, label, endpoint.0.as_ref(), shown(uri.path()), peer);
        })
    });
    let handler = AssertUnwindSafe(next.run(request)).catch_unwind();
    let result = match &span {
        Some(span) => span.during(handler).await,
        None => handler.await,
    };
    let mut response = match result {
        Ok(response) => response,
        Err(_) => {
            context.metrics.panics_recovered.inc();
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error").into_response()
        }
    };
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID.clone(), id.clone());
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(span) = &span {
        response.headers_mut().insert(TRACEPARENT.clone(), span.header());
    }
    if context.lifecycle.stopping.is_cancelled() {
        response = crate::http::close_connection(response);
    }
    let status = response.status().as_u16();
    let took = started.elapsed();
    let labels = RequestLabels { method: label, endpoint, status };
    context.metrics.requested(&labels, took);
    let log = response.extensions_mut().remove::<RequestLog>().unwrap_or_default();
    if let Some(span) = span.as_mut().and_then(RequestSpan::span) {
        spans::end(span, status, &log);
    }
    let line = LogLine {
        method: method.as_str(),
        path: shown(uri.path()),
        status,
        took,
        id: id.to_str().unwrap_or_default(),
        is_probe,
        source,
        trace: span.as_ref().and_then(RequestSpan::trace),
    };
    line.write(&log);
    response
}

/// The part of a path that is logged. Stream URLs contain tokens and secrets; one that reaches
/// another listener than the gateway's is shown without them.
fn shown(path: &str) -> &str {
    let prefixes = [media::PATH_PREFIX, media::CONNECT_PREFIX];
    let prefix = prefixes.into_iter().find(|prefix| path.starts_with(prefix));
    prefix.unwrap_or(&path[..path.floor_char_boundary(MAX_PATH_BYTES)])
}

/// A line of the access log.
struct LogLine<'a, T> {
    method: &'a str,
    path: &'a str,
    status: u16,
    took: Duration,
    id: &'a str,
    is_probe: bool,
    source: Option<IpAddr>,
    trace: Option<T>,
}

impl<T: Display> LogLine<'_, T> {
    fn write(&self, log: &RequestLog) {
        let Self { method, path, status, id: request_id, .. } = *self;
        let duration_ms = self.took.as_micros() as f64 / 1_000.0;
        let refused = matches!(status, 401 | 403);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    method,
                    path,
                    status,
                    duration_ms,
                    request_id,
                    outcome = Some(log.outcome).filter(|outcome| !outcome.is_empty()),
                    call_sid = log.call.as_ref().map(|call| call.as_str()),
                    pod = log.pod.as_ref().map(|pod| pod.as_str()),
                    pool = log.pool.as_deref(),
                    tried = (!log.tried.is_empty()).then(|| tried(log)),
                    by = log.by.map(tracing::field::display),
                    why = log.reason.as_deref(),
                    trace_id = self.trace.as_ref().map(tracing::field::display),
                    from = refused.then_some(self.source).flatten().map(tracing::field::display),
                    "request"
                )
            };
        }
        match status {
            500.. if !self.is_probe => line!(warn),
            _ if refused => line!(warn),
            // A flood of rejected requests must not fill the log.
            429 => line!(debug),
            _ if self.is_probe => line!(debug),
            _ => line!(info),
        }
    }
}

/// `gold=at_capacity standard=empty`
fn tried(log: &RequestLog) -> String {
    let steps = log.tried.iter().map(|tried| format!("{}={}", tried.step, tried.reason.as_str()));
    steps.collect::<Vec<_>>().join(" ")
}

/// The client's request id, if it is short printable ASCII, or a generated one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static PROCESS: std::sync::LazyLock<u32> = std::sync::LazyLock::new(crate::random_u32);
    let given = headers.get(&REQUEST_ID).filter(|id| {
        (1..=128).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    });
    given.cloned().unwrap_or_else(|| {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        HeaderValue::try_from(format!("{:08x}-{count:08x}", *PROCESS))
            .expect("hexadecimal is a header value")
    })
}

#[cfg(test)]
mod tests {
    use axum::{Router, body::Body, middleware, routing::get};
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn a_panic_in_a_handler_responds_500_and_is_counted() {
        let context = Context::for_tests();
        let broken = || async {
            if true {
                panic!("on purpose")
            }
        };
        let routes: Router = Router::new()
            .route("/", get(broken))
            .layer(middleware::from_fn_with_state(context.clone(), observe));
        let response = routes.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(response.headers().contains_key(&REQUEST_ID));
        assert_eq!(context.metrics.panics_recovered.get(), 1);
    }
}
