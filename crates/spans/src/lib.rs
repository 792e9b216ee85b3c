//! Traces in the manner of OpenTelemetry: one span for a request and one for each call of
//! the store. Off, they cost nothing; on, they never slow or fail what they tell of.

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

use self::span::Open;
pub use self::{
    context::SpanContext,
    sampler::{SAMPLERS, Sampler},
    span::{BATCH, Kind, Span, SpanQueue, Value},
};

/// Counts spans that were sent, and spans that were dropped by reason.
#[derive(Debug, Clone, Default)]
pub struct SpanMetrics {
    pub sent: Counter,
    pub dropped: Family<Reason, Counter>,
}

/// Why spans were dropped.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    pub reason: &'static str,
}

impl SpanMetrics {
    pub fn dropped(&self, reason: &'static str, spans: u64) {
        self.dropped.get_or_create(&Reason { reason }).inc_by(spans);
    }
}

/// Begins the spans of requests. Finished spans go to its queue.
pub struct Tracer {
    sampler: Sampler,
    queue: Arc<SpanQueue>,
}

tokio::task_local! {
    /// The request that is being answered.
    static CURRENT: Current;
}

#[derive(Clone)]
struct Current {
    context: SpanContext,
    tracestate: String,
    /// Where its spans go, if it is recorded.
    queue: Option<Arc<SpanQueue>>,
}

impl Tracer {
    pub fn new(sampler: Sampler, queue: Arc<SpanQueue>) -> Self {
        Self { sampler, queue }
    }

    /// Begins the span of a request; what `describe` tells of it is asked only if it is
    /// recorded.
    pub fn request(&self, headers: &HeaderMap, describe: impl FnOnce(&mut Span)) -> RequestSpan {
        let parent = SpanContext::of(headers);
        let trace = parent.map_or_else(id, |parent| parent.trace);
        let is_sampled = self.sampler.takes(trace.get(), parent.as_ref());
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
            kind: Kind::Server,
            start: 0,
            end: 0,
            attributes: Vec::with_capacity(12),
            has_failed: false,
        });
        describe(&mut span);
        RequestSpan { current, open: Some(Open::new(span, self.queue.clone())) }
    }
}

/// Work for the request that is being answered, in a task of its own: it knows for which.
pub fn carried<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let current = CURRENT.try_with(Clone::clone).ok();
    async {
        match current {
            Some(current) => CURRENT.scope(current, work).await,
            None => work.await,
        }
    }
}

/// The span of a request, recorded or not; it ends when this is dropped.
pub struct RequestSpan {
    current: Current,
    open: Option<Open>,
}

impl RequestSpan {
    /// Answers the request: what is done for it knows for which.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        CURRENT.scope(self.current.clone(), work).await
    }

    /// The `traceparent` that names this span.
    pub fn header(&self) -> HeaderValue {
        HeaderValue::try_from(self.current.context.traceparent())
            .expect("digits are a header value")
    }

    /// The trace, if it is recorded.
    pub fn trace(&self) -> Option<impl fmt::Display> {
        self.open.as_ref().map(|_| TraceId(self.current.context.trace))
    }

    /// What is recorded, if it is.
    pub fn span(&mut self) -> Option<&mut Span> {
        self.open.as_mut().and_then(Open::span)
    }
}

struct TraceId(NonZero<u128>);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The `traceparent` for what goes on with the request that is being answered; none where
/// traces are off.
pub fn traceparent() -> Option<String> {
    CURRENT.try_with(|current| current.context.traceparent()).ok()
}

/// The span of one call of the store, if it is recorded; it ends when this is dropped.
pub struct StoreCall(Option<Open>);

/// Begins the span of a call of the store, if it is for a request that is recorded.
pub fn store_call(system: &'static str, operation: &str, at: Option<(&str, u16)>) -> StoreCall {
    let open = CURRENT.try_with(|current| {
        let queue = current.queue.clone()?;
        let mut span = Box::new(Span {
            context: SpanContext { span: short_id(), ..current.context },
            parent: Some(current.context.span),
            has_remote_parent: false,
            tracestate: current.tracestate.clone(),
            name: operation.to_owned(),
            kind: Kind::Client,
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
        Some(Open::new(span, queue))
    });
    StoreCall(open.ok().flatten())
}

impl StoreCall {
    pub fn fail(&mut self, kind: &'static str) {
        if let Some(span) = self.0.as_mut().and_then(Open::span) {
            span.fail(kind);
        }
    }
}

/// Numbers that nobody can guess: a count under a key of this process.
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
