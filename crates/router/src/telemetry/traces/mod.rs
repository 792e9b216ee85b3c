//! Exports trace spans by OTLP over HTTP.

mod exporter;
mod otlp;

use std::sync::Arc;

use spans::{Sampler, SpanMetrics, SpanQueue, Tracer};

pub(crate) use self::exporter::{Collector, Exporter};

/// The sampling of spans, and their collector.
#[derive(Debug, Clone)]
pub(crate) struct TraceConfig {
    pub(crate) collector: Collector,
    pub(crate) sampler: Sampler,
    /// Resource attributes of this program.
    pub(crate) resource: Vec<(String, String)>,
}

/// Starts to record and export spans.
pub(crate) fn start(config: TraceConfig, metrics: SpanMetrics) -> (Arc<Tracer>, Exporter) {
    let queue = Arc::new(SpanQueue::new(metrics));
    let tracer = Tracer::new(config.sampler, queue.clone());
    (Arc::new(tracer), Exporter::start(config, queue))
}
