//! The streams that this process relays.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::admission::Admission;
use crate::telemetry::metrics::{StreamMetrics, StreamTotals};
use fleet::{
    Attached,
    names::{CallSid, PodName, StreamId},
};
use media::{
    opening::Dialect,
    relay::GapSink,
    stats::{Order, SideFigures, StreamHandle},
};

/// Figures of a stream.
#[derive(Debug, Clone, Copy)]
pub struct StreamFigures {
    /// The provider as its opening message shows it.
    pub provider: &'static str,
    pub from_provider: SideFigures,
    pub from_agent: SideFigures,
}

/// One line, for the store.
impl fmt::Display for StreamFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.provider)?;
        for side in [self.from_provider, self.from_agent] {
            write!(f, " {} {} {}", side.frames, side.bytes, side.longest_gap.as_millis())?;
        }
        Ok(())
    }
}

impl FromStr for StreamFigures {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ');
        let provider = Dialect::from_name(parts.next().unwrap_or_default()).as_str();
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or(());
        let mut side = || {
            Ok::<_, ()>(SideFigures {
                frames: number()?,
                bytes: number()?,
                longest_gap: Duration::from_millis(number()?),
            })
        };
        Ok(Self { provider, from_provider: side()?, from_agent: side()? })
    }
}

/// An open stream.
pub(super) struct OpenStream {
    pub(super) call: CallSid,
    pub(super) stream: StreamId,
    pub(super) pod: PodName,
    pub(super) pod_attempt: u32,
    pub(super) opened: Instant,
    /// Time of the last renewal of the call's lease, since `opened` (ms).
    renewed: AtomicU64,
    pub(super) is_detached: AtomicBool,
    pub(super) handle: Arc<StreamHandle>,
}

impl OpenStream {
    pub(super) fn figures(&self) -> StreamFigures {
        StreamFigures {
            provider: self.handle.dialect().as_str(),
            from_provider: self.handle.provider.read(),
            from_agent: self.handle.agent.read(),
        }
    }

    /// The payload of pings to the agent.
    pub(super) fn ping(&self) -> [u8; 8] {
        let mut ping = [0; 8];
        ping.copy_from_slice(&self.stream.as_str().as_bytes()[..8]);
        ping
    }

    fn is_renewal_due(&self, interval: Duration) -> bool {
        let renewed = Duration::from_millis(self.renewed.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(renewed) >= interval
    }

    pub(super) fn set_renewed(&self) {
        self.renewed.store(self.opened.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

/// All open streams, by call.
pub(super) struct Streams {
    max: usize,
    open: Mutex<HashMap<CallSid, Arc<OpenStream>>>,
    metrics: StreamMetrics,
    pub(super) gaps: Arc<dyn GapSink>,
}

impl Streams {
    pub(super) fn new(max: usize, metrics: StreamMetrics) -> Self {
        metrics.set_limit(max);
        let gaps = metrics.gaps.clone();
        Self { max, open: Mutex::default(), metrics, gaps }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CallSid, Arc<OpenStream>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.count() >= self.max
    }

    pub(super) fn open(
        &self,
        admission: &Admission,
        stream: StreamId,
        attached: &Attached,
    ) -> Arc<OpenStream> {
        let open = Arc::new(OpenStream {
            call: admission.call.clone(),
            stream,
            pod: attached.pod.clone(),
            pod_attempt: admission.pod_attempt,
            opened: Instant::now(),
            renewed: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
            handle: Arc::default(),
        });
        self.lock().insert(open.call.clone(), open.clone());
        open
    }

    /// Removes a stream, and adds its figures to the totals.
    pub(super) fn close(&self, stream: &OpenStream) {
        let mut open = self.lock();
        // The call may have a newer stream already.
        if open.get(&stream.call).is_some_and(|known| known.stream == stream.stream) {
            open.remove(&stream.call);
        }
        self.metrics.ended.add(&stream.figures());
    }

    pub(super) fn get(&self, call: &CallSid) -> Option<Arc<OpenStream>> {
        self.lock().get(call).cloned()
    }

    pub(super) fn figures(&self, call: &CallSid) -> Option<StreamFigures> {
        self.get(call).map(|stream| stream.figures())
    }

    pub(super) fn order_all(&self, order: Order) {
        self.lock().values().for_each(|stream| stream.handle.order(order));
    }

    /// Streams whose calls are due for a renewal.
    pub(super) fn due(&self, interval: Duration) -> Vec<Arc<OpenStream>> {
        let open = self.lock();
        let is_due = |stream: &&Arc<OpenStream>| {
            !stream.is_detached.load(Ordering::Relaxed) && stream.is_renewal_due(interval)
        };
        open.values().filter(is_due).cloned().collect()
    }

    /// The figures of all streams, as text.
    pub(super) fn published(&self) -> Vec<(CallSid, String)> {
        let open = self.lock();
        open.values().map(|it| (it.call.clone(), it.figures().to_string())).collect()
    }

    /// The number of open streams by provider, and what they have carried.
    pub(super) fn totals(&self) -> StreamTotals {
        let mut totals = StreamTotals::default();
        for stream in self.lock().values() {
            totals.add_open(&stream.figures());
        }
        totals
    }
}

pub(super) fn new_stream_id() -> StreamId {
    let (high, low) = (crate::random_u32(), crate::random_u32());
    format!("{high:08x}{low:08x}").parse().expect("16 hexadecimal digits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_they_were_published() {
        let text = "twilio 12 4584 20 11 3355 1300";
        let figures: StreamFigures = text.parse().unwrap();
        assert_eq!(figures.from_agent.longest_gap, Duration::from_millis(1_300));
        assert_eq!(figures.to_string(), text);
        for bad in ["", "twilio", "twilio 1 2 3 4 5", "twilio 1 2 3 4 5 x"] {
            assert!(bad.parse::<StreamFigures>().is_err(), "{bad}");
        }
    }
}
