//! A span, and the bounded queue of finished spans.

use std::{
    borrow::Cow,
    mem,
    num::NonZero,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::{Serialize, Serializer};
use tokio::sync::Notify;

use crate::SpanContext;
use crate::SpanMetrics;

/// Spans per export request.
pub const BATCH: usize = 512;
/// Capacity of the queue; further spans are dropped.
const MAX_QUEUED: usize = 8_192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Server = 2,
    Client = 3,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Value {
    #[serde(rename = "stringValue")]
    Text(Cow<'static, str>),
    #[serde(rename = "intValue", serialize_with = "decimal")]
    Number(u64),
}

/// OTLP/JSON writes 64-bit integers as strings.
fn decimal<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<u16> for Value {
    fn from(number: u16) -> Self {
        Self::Number(number.into())
    }
}

#[derive(Debug)]
pub struct Span {
    pub context: SpanContext,
    pub parent: Option<NonZero<u64>>,
    /// The parent is a span of another process.
    pub has_remote_parent: bool,
    pub tracestate: String,
    pub name: String,
    pub kind: SpanKind,
    /// Nanoseconds since 1970.
    pub start: u64,
    pub end: u64,
    pub attributes: Vec<(&'static str, Value)>,
    pub has_failed: bool,
}

impl Span {
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.attributes.push((name, value.into()));
    }

    /// Sets an attribute that has a value.
    pub fn set_some(&mut self, name: &'static str, value: Option<impl Into<Value>>) {
        self.attributes.extend(value.map(|value| (name, value.into())));
    }

    pub fn fail(&mut self, kind: impl Into<Value>) {
        self.has_failed = true;
        self.set("error.type", kind);
    }
}

/// An unfinished span; it ends when this is dropped.
pub(crate) struct OpenSpan {
    span: Option<Box<Span>>,
    started: Instant,
    queue: Arc<SpanQueue>,
}

impl OpenSpan {
    pub(crate) fn new(mut span: Box<Span>, queue: Arc<SpanQueue>) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        span.start = now.map_or(0, |now| now.as_nanos() as u64);
        Self { span: Some(span), started: Instant::now(), queue }
    }

    pub(crate) fn span(&mut self) -> Option<&mut Span> {
        self.span.as_deref_mut()
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if let Some(mut span) = self.span.take() {
            // The monotonic clock measures the duration: the wall clock may be stepped meanwhile.
            span.end = span.start + self.started.elapsed().as_nanos() as u64;
            self.queue.push(*span);
        }
    }
}

/// Finished spans, bounded, until the exporter takes them.
pub struct SpanQueue {
    // A std mutex: it is held for a push or a swap, never across an await.
    spans: Mutex<Vec<Span>>,
    /// Notified when a batch is complete.
    pub batch_ready: Notify,
    pub metrics: SpanMetrics,
}

impl SpanQueue {
    pub fn new(metrics: SpanMetrics) -> Self {
        Self { spans: Mutex::default(), batch_ready: Notify::new(), metrics }
    }

    fn spans(&self) -> MutexGuard<'_, Vec<Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, span: Span) {
        let mut spans = self.spans();
        if spans.len() >= MAX_QUEUED {
            drop(spans);
            return self.metrics.dropped("full", 1);
        }
        spans.push(span);
        if spans.len() == BATCH {
            self.batch_ready.notify_one();
        }
    }

    pub fn count(&self) -> usize {
        self.spans().len()
    }

    /// Takes the oldest spans, at most one batch.
    pub fn take(&self) -> Vec<Span> {
        let mut spans = self.spans();
        match spans.len() > BATCH {
            true => spans.drain(..BATCH).collect(),
            false => mem::take(&mut *spans),
        }
    }
}
