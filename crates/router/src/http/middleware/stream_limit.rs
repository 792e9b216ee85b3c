//! A limit on open event streams (`/live` and `/events`). Each holds a connection for as long as
//! its client likes, and is written to whenever something happens.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::http::{StatusCode, request::Parts};

use super::{auth::By, rate_limit::network_of};
use crate::http::{ApiError, Context};
use crate::telemetry::metrics::Metrics;

/// Streams of one router, and those of one source that are not authenticated.
pub const MOST: usize = 200;
pub const MOST_OF_SOURCE: usize = 50;

pub struct Streams {
    metrics: Arc<Metrics>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    all: usize,
    by_source: HashMap<IpAddr, usize>,
}

/// A stream that counts until this is dropped.
pub struct OpenStream {
    streams: Arc<Streams>,
    source: Option<IpAddr>,
}

impl Streams {
    pub fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { metrics, open: Mutex::default() })
    }

    /// Counts a stream, unless there are too many. Its source counts where it is not
    /// authenticated.
    fn open(self: &Arc<Self>, source: Option<IpAddr>) -> Result<OpenStream, String> {
        let mut open = self.lock();
        if open.all >= MOST {
            return Err(format!("this router has {MOST} open event streams, which is the limit"));
        }
        if let Some(source) = source {
            let of_source = open.by_source.entry(source).or_default();
            if *of_source >= MOST_OF_SOURCE {
                return Err(format!(
                    "{MOST_OF_SOURCE} event streams without a token are open from this address, \
                     which is the limit"
                ));
            }
            *of_source += 1;
        }
        open.all += 1;
        self.metrics.open_streams.set(open.all as i64);
        Ok(OpenStream { streams: self.clone(), source })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut open = self.streams.lock();
        open.all -= 1;
        self.streams.metrics.open_streams.set(open.all as i64);
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

/// Counts the stream that a request asks for, or refuses it.
pub fn open(context: &Context, parts: &Parts) -> Result<OpenStream, ApiError> {
    let is_known = parts.extensions.get::<By>().is_some();
    let source = context.rates.source(&parts.extensions, &parts.headers).map(network_of);
    context.streams.open(source.filter(|_| !is_known)).map_err(|error| {
        context.metrics.denied("too_many_streams");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error)
    })
}
