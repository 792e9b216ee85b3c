//! Limit of open event streams (`/live` and `/events`). Each holds a connection open indefinitely
//! and costs a write for each event.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::http::{StatusCode, request::Parts};

use super::auth::Caller;
use crate::{
    client_limits::network_of,
    http::{ApiError, Context},
    telemetry::metrics::Metrics,
};

/// Streams of one router.
pub(super) const MAX_STREAMS: usize = 200;
/// Unauthenticated streams of one source.
pub(super) const MAX_STREAMS_PER_SOURCE: usize = 50;

pub(crate) struct StreamLimiter {
    metrics: Arc<Metrics>,
    open: Mutex<OpenStreams>,
}

#[derive(Default)]
struct OpenStreams {
    all: usize,
    by_source: HashMap<IpAddr, usize>,
}

/// An open stream; counted until dropped.
pub(crate) struct StreamGuard {
    limiter: Arc<StreamLimiter>,
    source: Option<IpAddr>,
}

impl StreamLimiter {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { metrics, open: Mutex::default() })
    }

    /// Counts a stream, or fails at a limit. `source` is `None` for authenticated clients.
    fn open(self: &Arc<Self>, source: Option<IpAddr>) -> Result<StreamGuard, String> {
        let mut open = self.lock();
        if open.all >= MAX_STREAMS {
            return Err(format!("limit of {MAX_STREAMS} open event streams reached; retry later"));
        }
        if let Some(source) = source {
            let of_source = open.by_source.entry(source).or_default();
            if *of_source >= MAX_STREAMS_PER_SOURCE {
                return Err(format!(
                    "limit of {MAX_STREAMS_PER_SOURCE} unauthenticated event streams from one \
                     address reached; use a token"
                ));
            }
            *of_source += 1;
        }
        open.all += 1;
        self.metrics.open_streams.set(open.all as i64);
        Ok(StreamGuard { limiter: self.clone(), source })
    }

    fn lock(&self) -> MutexGuard<'_, OpenStreams> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let mut open = self.limiter.lock();
        open.all -= 1;
        self.limiter.metrics.open_streams.set(open.all as i64);
        if let Some(source) = self.source
            && let Some(of_source) = open.by_source.get_mut(&source)
        {
            *of_source -= 1;
            if *of_source == 0 {
                open.by_source.remove(&source);
            }
        }
    }
}

/// Counts the stream of a request, or responds 503 at a limit.
pub(crate) fn open(context: &Context, parts: &Parts) -> Result<StreamGuard, ApiError> {
    let is_authenticated = parts.extensions.get::<Caller>().is_some();
    let source = context.rate_limiter.source(&parts.extensions, &parts.headers).map(network_of);
    context.stream_limiter.open(source.filter(|_| !is_authenticated)).map_err(|error| {
        context.metrics.denied("too_many_streams");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
    })
}
