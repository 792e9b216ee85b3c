//! OpenTelemetry traces: one span per request and one per store operation. A trace that is not
//! sampled allocates no spans; export never delays or fails a request.

mod context;
mod sampler;
mod span;

use std::{
    fmt,
    future::Future,
    hash::{BuildHasher, RandomState},
    num::NonZero,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use http::{HeaderMap, HeaderValue};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
};

use self::span::OpenSpan;
pub use self::{
    context::SpanContext,
    sampler::{SAMPLERS, Sampler},
    span::{BATCH, Span, SpanKind, SpanQueue, Value},
};

/// Counts spans that were sent, and spans that were dropped by reason.
#[derive(Debug, Clone, Default)]
pub struct SpanMetrics {
    pub sent: Counter,
    pub dropped: Family<DropReason, Counter>,
}

/// The label of dropped spans.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DropReason {
    pub reason: &'static str,
}

impl SpanMetrics {
    pub fn dropped(&self, reason: &'static str, spans: u64) {
        self.dropped.get_or_create(&DropReason { reason }).inc_by(spans);
    }
}

/// Begins the spans of requests. Finished spans go to its queue.
pub struct Tracer {
    sampler: Sampler,
    queue: Arc<SpanQueue>,
}

tokio::task_local! {
    /// The span context of the current request.
    static CURRENT: Current;
}

#[derive(Clone)]
struct Current {
    context: SpanContext,
    tracestate: String,
    /// The queue for its spans; `None` if the trace is not sampled.
    queue: Option<Arc<SpanQueue>>,
}

impl Tracer {
    pub fn new(sampler: Sampler, queue: Arc<SpanQueue>) -> Self {
        Self { sampler, queue }
    }

    /// Begins the span of a request. `describe` runs only if the trace is sampled.
    pub fn request(&self, headers: &HeaderMap, describe: impl FnOnce(&mut Span)) -> RequestSpan {
        let parent = SpanContext::of(headers);
        let trace = parent.map_or_else(id, |parent| parent.trace);
        let is_sampled = self.sampler.samples(trace.get(), parent.as_ref());
        let context = SpanContext { trace, span: short_id(), is_sampled };
        let mut current = Current { context, tracestate: String::new(), queue: None };
        if !is_sampled {
            return RequestSpan { current, open: None };
        }
        if parent.is_some() {
            current.tracestate = context::tracestate(headers);
        }
        current.queue = Some(self.queue.clone());
        let mut span = Box::new(Span {
            context,
            parent: parent.map(|parent| parent.span),
            has_remote_parent: parent.is_some(),
            tracestate: current.tracestate.clone(),
            name: String::new(),
            kind: SpanKind::Server,
            start: 0,
            end: 0,
            attributes: Vec::with_capacity(12),
            has_failed: false,
        });
        describe(&mut span);
        RequestSpan { current, open: Some(OpenSpan::new(span, self.queue.clone())) }
    }
}

/// Wraps `work` so that a spawned task keeps the span context of the current request.
pub fn in_current_span<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let current = CURRENT.try_with(Clone::clone).ok();
    async {
        match current {
            Some(current) => CURRENT.scope(current, work).await,
            None => work.await,
        }
    }
}

/// The span of a request, sampled or not; it ends when this is dropped.
pub struct RequestSpan {
    current: Current,
    open: Option<OpenSpan>,
}

impl RequestSpan {
    /// Runs `work` in the context of this request: its store operations become child spans.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        CURRENT.scope(self.current.clone(), work).await
    }

    /// The `traceparent` that names this span.
    pub fn header(&self) -> HeaderValue {
        HeaderValue::try_from(self.current.context.traceparent())
            .expect("digits are a header value")
    }

    /// The trace id, if the trace is sampled.
    pub fn trace(&self) -> Option<impl fmt::Display> {
        self.open.as_ref().map(|_| TraceId(self.current.context.trace))
    }

    /// The span to add attributes to, if the trace is sampled.
    pub fn span(&mut self) -> Option<&mut Span> {
        self.open.as_mut().and_then(OpenSpan::span)
    }
}

struct TraceId(NonZero<u128>);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The `traceparent` to propagate for the current request; `None` if traces are off.
pub fn traceparent() -> Option<String> {
    CURRENT.try_with(|current| current.context.traceparent()).ok()
}

/// The span of one store operation, if its trace is sampled; it ends when this is dropped.
pub struct StoreSpan(Option<OpenSpan>);

/// Begins the span of a store operation, if the current request is sampled.
pub fn store_span(system: &'static str, operation: &str, at: Option<(&str, u16)>) -> StoreSpan {
    let open = CURRENT.try_with(|current| {
        let queue = current.queue.clone()?;
        let mut span = Box::new(Span {
            context: SpanContext { span: short_id(), ..current.context },
            parent: Some(current.context.span),
            has_remote_parent: false,
            tracestate: current.tracestate.clone(),
            name: operation.to_owned(),
            kind: SpanKind::Client,
            start: 0,
            end: 0,
            attributes: Vec::with_capacity(5),
            has_failed: false,
        });
        span.set("db.system.name", system);
        span.set("db.operation.name", operation.to_owned());
        if let Some((host, port)) = at {
            span.set("server.address", host.to_owned());
            span.set("server.port", port);
        }
        Some(OpenSpan::new(span, queue))
    });
    StoreSpan(open.ok().flatten())
}

impl StoreSpan {
    pub fn fail(&mut self, kind: &'static str) {
        if let Some(span) = self.0.as_mut().and_then(OpenSpan::span) {
            span.fail(kind);
        }
    }
}

/// An unpredictable number: a counter hashed with a random key of this process.
fn random() -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

fn short_id() -> NonZero<u64> {
    NonZero::new(random()).unwrap_or(NonZero::<u64>::MIN)
}

fn id() -> NonZero<u128> {
    let number = u128::from(random()) << 64 | u128::from(random());
    NonZero::new(number).unwrap_or(NonZero::<u128>::MIN)
}
