//! Metrics of media streams. Figures of open streams are read at each scrape, so that a frame
//! costs no shared counter.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
};

use super::{Histograms, labels::Denied, short_times};
use media::{
    relay::{GapSink, Gaps},
    stats::{GAP_BUCKETS, StreamFigures},
};

/// Metrics of media streams.
#[derive(Debug, Clone)]
pub(crate) struct StreamMetrics {
    pub(super) refused: Family<Denied, Counter>,
    pub(super) connect_duration: Histograms<Connect>,
    pub(super) failovers: Histograms<Cause>,
    pub(super) failed_failovers: Family<Cause, Counter>,
    /// Exclusive pods that were given to two calls.
    pub(crate) conflicts: Counter,
    /// 1 while the streams of a stopping process are drained.
    pub(crate) draining: Gauge,
    pub(crate) gaps: Arc<GapCounts>,
    /// What ended streams carried.
    pub(crate) ended: Arc<EndedTotals>,
    pub(super) open: OpenStreams,
}

impl Default for StreamMetrics {
    fn default() -> Self {
        Self {
            refused: Family::default(),
            connect_duration: Family::new_with_constructor(short_times),
            failovers: Family::new_with_constructor(short_times),
            failed_failovers: Family::default(),
            conflicts: Counter::default(),
            draining: Gauge::default(),
            gaps: Arc::default(),
            ended: Arc::default(),
            open: OpenStreams::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Connect {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Cause {
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByProvider {
    provider: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySender {
    from: &'static str,
}

impl StreamMetrics {
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&Denied { reason }).inc();
    }

    /// Records the time to connect a pod.
    pub(crate) fn connected(&self, took: Duration, is_ok: bool) {
        let result = if is_ok { "success" } else { "error" };
        self.connect_duration.get_or_create(&Connect { result }).observe(took.as_secs_f64());
    }

    /// Records a failover in mid-call, and how long the stream had no agent.
    pub(crate) fn failed_over(&self, cause: &'static str, gap: Duration) {
        self.failovers.get_or_create(&Cause { cause }).observe(gap.as_secs_f64());
    }

    /// Records a stream that ended because no other pod took over.
    pub(crate) fn failover_failed(&self, cause: &'static str) {
        self.failed_failovers.get_or_create(&Cause { cause }).inc();
    }

    pub(crate) fn set_limit(&self, limit: usize) {
        self.open.limit.store(limit as u64, Ordering::Relaxed);
    }

    /// Sets the source of the figures of open streams.
    pub(crate) fn read_open(&self, read: impl Fn() -> StreamTotals + Send + Sync + 'static) {
        let _ = self.open.read.set(Box::new(read));
    }

    /// Number of open streams of this process; `None` without a gateway.
    pub(crate) fn open_count(&self) -> Option<u64> {
        self.open.read.get().map(|read| read().open.values().sum())
    }

    /// The series that alerts use, with the value 0.
    pub(super) fn create_alert_series(&self) {
        const REASONS: [&str; 11] = [
            "malformed_token",
            "wrong_token",
            "expired_token",
            "not_websocket",
            "unknown_call",
            "other_attempt",
            "already_attached",
            "no_pods",
            "max_streams",
            "storage_error",
            "stopping",
        ];
        for reason in REASONS {
            drop(self.refused.get_or_create(&Denied { reason }));
        }
        for cause in ["pod_lost", "displaced"] {
            drop(self.failovers.get_or_create(&Cause { cause }));
            drop(self.failed_failovers.get_or_create(&Cause { cause }));
        }
        for result in ["success", "error"] {
            drop(self.connect_duration.get_or_create(&Connect { result }));
        }
    }

    pub(super) fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.clone())
    }
}

/// What streams carried: frames and bytes from providers and from agents.
#[derive(Debug, Clone, Default)]
pub(crate) struct StreamTotals {
    open: BTreeMap<&'static str, u64>,
    frames: [u64; 2],
    bytes: [u64; 2],
}

impl StreamTotals {
    pub(crate) fn add_open(&mut self, figures: &StreamFigures) {
        *self.open.entry(figures.provider).or_default() += 1;
        for (index, side) in [figures.from_provider, figures.from_agent].into_iter().enumerate() {
            self.frames[index] += side.frames;
            self.bytes[index] += side.bytes;
        }
    }
}

/// Totals of ended streams.
#[derive(Debug, Default)]
pub(crate) struct EndedTotals(Mutex<StreamTotals>);

impl EndedTotals {
    pub(crate) fn add(&self, figures: &StreamFigures) {
        let mut totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        totals.add_open(figures);
        totals.open.clear();
    }

    fn read(&self) -> StreamTotals {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

type ReadOpen = Box<dyn Fn() -> StreamTotals + Send + Sync>;

/// The open streams of the gateway.
#[derive(Clone, Default)]
pub(super) struct OpenStreams {
    read: Arc<OnceLock<ReadOpen>>,
    limit: Arc<AtomicU64>,
}

impl fmt::Debug for OpenStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenStreams").finish_non_exhaustive()
    }
}

/// Gaps between frames, by bucket: of providers and of agents.
#[derive(Debug, Default)]
pub(crate) struct GapCounts([[AtomicU64; GAP_BUCKETS.len() + 1]; 2]);

impl GapSink for GapCounts {
    fn record(&self, provider: &Gaps, agent: &Gaps) {
        for (counts, gaps) in self.0.iter().zip([provider, agent]) {
            for (count, gap) in counts.iter().zip(gaps).filter(|(_, gap)| **gap > 0) {
                count.fetch_add(u64::from(*gap), Ordering::Relaxed);
            }
        }
    }
}

const SENDERS: [&str; 2] = ["provider", "agent"];

impl Collector for StreamMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(read) = self.open.read.get() else { return Ok(()) };
        let open = read();
        // Read after the open ones: a stream that ends in between is missing for one scrape
        // rather than counted twice.
        let ended = self.ended.read();
        let help = "Open media streams of this process";
        let mut family =
            encoder.encode_descriptor("media_streams", help, None, MetricType::Gauge)?;
        for (provider, count) in &open.open {
            let labels = ByProvider { provider };
            ConstGauge::new(*count as i64).encode(family.encode_family(&labels)?)?;
        }
        let help = "Limit of open media streams of this process";
        let limit =
            encoder.encode_descriptor("media_streams_limit", help, None, MetricType::Gauge)?;
        ConstGauge::new(self.open.limit.load(Ordering::Relaxed) as i64).encode(limit)?;
        let help = "1 while this process stops and relays its open media streams until they end";
        let draining =
            encoder.encode_descriptor("media_draining", help, None, MetricType::Gauge)?;
        self.draining.encode(draining)?;
        let counters = [
            ("media_frames", "Frames of media streams", [open.frames, ended.frames]),
            ("media_bytes", "Bytes of media streams", [open.bytes, ended.bytes]),
        ];
        for (name, help, [open, ended]) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (index, from) in SENDERS.into_iter().enumerate() {
                let total = open[index] + ended[index];
                ConstCounter::new(total).encode(family.encode_family(&BySender { from })?)?;
            }
        }
        self.encode_gaps(&mut encoder)
    }
}

impl StreamMetrics {
    /// A histogram of gaps. Its sum is estimated from the upper bounds of the buckets.
    fn encode_gaps(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Gaps between frames of media streams; the sum is an upper estimate";
        let name = "media_gap_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (index, from) in SENDERS.into_iter().enumerate() {
            let seconds = |bound: u64| bound as f64 / 1_000.0;
            let bounds = GAP_BUCKETS.map(seconds).into_iter().chain([f64::INFINITY]);
            let counts = self.gaps.0[index].iter().map(|count| count.load(Ordering::Relaxed));
            let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
            let count = buckets.iter().map(|(_, count)| count).sum();
            let last = seconds(GAP_BUCKETS[GAP_BUCKETS.len() - 1]);
            let sum = buckets.iter().map(|(bound, count)| bound.min(last) * *count as f64).sum();
            let labels = BySender { from };
            let mut encoder = family.encode_family(&labels)?;
            encoder.encode_histogram::<BySender>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}
