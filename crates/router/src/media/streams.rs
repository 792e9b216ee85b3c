//! The streams that this process relays.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::telemetry::metrics::{StreamMetrics, StreamTotals};
use fleet::{
    Attached,
    names::{CallSid, MerchantId, PodName, Pool, StreamId},
};
use media::{
    relay::GapSink,
    stats::{Order, StreamFigures, StreamHandle},
};

/// The connection of a stream to its pod; a failover replaces it.
#[derive(Debug, Clone)]
pub(super) struct PodConnection {
    pub(super) stream: StreamId,
    pub(super) pod: PodName,
    pub(super) pool: Pool,
    pub(super) merchant: Option<MerchantId>,
    /// Ordinal of the pod in the conversation.
    pub(super) ordinal: u32,
    /// The pod attempt of the call in the store.
    pub(super) pod_attempt: u32,
}

impl PodConnection {
    pub(super) fn new(stream: StreamId, pod_attempt: u32, attached: &Attached) -> Self {
        Self {
            stream,
            pod: attached.pod.clone(),
            pool: attached.pool.clone(),
            merchant: attached.merchant.clone(),
            ordinal: attached.ordinal,
            pod_attempt,
        }
    }

    /// Pods that the stream has lost since its pod attempt began.
    pub(super) fn failovers(&self) -> u32 {
        self.ordinal.saturating_sub(self.pod_attempt.max(1))
    }
}

/// An open stream.
pub(super) struct OpenStream {
    pub(super) call: CallSid,
    connection: Mutex<PodConnection>,
    /// Failovers of this stream, including those from pods that could not be reached.
    pub(super) moves: AtomicU32,
    pub(super) opened: Instant,
    /// Time of the last renewal of the call's lease, since `opened` (ms).
    renewed: AtomicU64,
    pub(super) is_detached: AtomicBool,
    /// A failover is under way: the store may know the stream by another id already.
    is_moving: AtomicBool,
    /// The id that a failover, or the attach after it, gives to the stream, until its reply.
    next: Mutex<Option<StreamId>>,
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

    pub(super) fn connection(&self) -> PodConnection {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_connection(&self, connection: PodConnection) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
        self.set_next(None);
    }

    pub(super) fn set_next(&self, next: Option<StreamId>) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }

    /// The id of a failover without a reply: the store may know the stream by it.
    pub(super) fn take_next(&self) -> Option<StreamId> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn set_moving(&self, is_moving: bool) {
        self.is_moving.store(is_moving, Ordering::SeqCst);
    }

    /// Whether the stream has, and keeps, the connection that it had with this id.
    pub(super) fn is_settled_as(&self, stream: &StreamId) -> bool {
        !self.is_moving.load(Ordering::SeqCst) && self.connection().stream == *stream
    }

    /// The payload of pings to the agent.
    pub(super) fn ping(&self) -> [u8; 8] {
        let mut ping = [0; 8];
        ping.copy_from_slice(&self.connection().stream.as_str().as_bytes()[..8]);
        ping
    }

    fn is_renewal_due(&self, age: Duration) -> bool {
        let renewed = Duration::from_millis(self.renewed.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(renewed) >= age
    }

    pub(super) fn set_renewed(&self) {
        self.renewed.store(self.opened.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

type Opening = Mutex<Vec<Arc<StreamHandle>>>;

/// The slot of a stream that is admitted and not open yet: its call is not known, or the store has
/// not attached it. It counts against `MAX_STREAMS` until it is dropped.
pub(super) struct StreamSlot {
    opening: Arc<Opening>,
    pub(super) handle: Arc<StreamHandle>,
}

impl StreamSlot {
    fn release(&self, opening: &mut Vec<Arc<StreamHandle>>) {
        opening.retain(|other| !Arc::ptr_eq(other, &self.handle));
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.release(&mut self.opening.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// All open streams, by call.
pub(super) struct Streams {
    max: usize,
    open: Mutex<HashMap<CallSid, Arc<OpenStream>>>,
    /// Streams with a [`StreamSlot`]; locked before `open`.
    opening: Arc<Opening>,
    /// Streams that were reported to the store in this turn.
    reported: AtomicUsize,
    metrics: StreamMetrics,
    pub(super) gaps: Arc<dyn GapSink>,
}

impl Streams {
    pub(super) fn new(max: usize, metrics: StreamMetrics) -> Self {
        metrics.set_limit(max);
        let gaps = metrics.gaps.clone();
        Self {
            max,
            open: Mutex::default(),
            opening: Arc::default(),
            reported: AtomicUsize::new(0),
            metrics,
            gaps,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CallSid, Arc<OpenStream>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock_opening(&self) -> MutexGuard<'_, Vec<Arc<StreamHandle>>> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of streams, including those whose attach is under way.
    pub(super) fn count_with_slots(&self) -> usize {
        let opening = self.lock_opening();
        opening.len() + self.count()
    }

    /// The number of streams that the store certainly had at a time, and has to have now: those
    /// that were attached before it, and are not detached.
    pub(super) fn attached_since(&self, then: Instant) -> usize {
        let open = self.lock();
        let is_attached = |stream: &&Arc<OpenStream>| {
            stream.opened <= then && !stream.is_detached.load(Ordering::Relaxed)
        };
        open.values().filter(is_attached).count()
    }

    /// The calls to report with the next heartbeat, at most `limit`: those of attached streams,
    /// in turns.
    pub(super) fn next_reported(&self, limit: usize) -> Vec<CallSid> {
        let open = self.lock();
        let begin = self.reported.load(Ordering::Relaxed);
        let begin = if begin < open.len() { begin } else { 0 };
        self.reported.store(begin + limit, Ordering::Relaxed);
        let turn = open.values().skip(begin).take(limit);
        let attached = turn.filter(|stream| !stream.is_detached.load(Ordering::Relaxed));
        attached.map(|stream| stream.call.clone()).collect()
    }

    /// Reserves the slot of a stream; `None` if there are too many streams.
    pub(super) fn reserve(&self) -> Option<StreamSlot> {
        let mut opening = self.lock_opening();
        (self.count() + opening.len() < self.max).then(|| {
            let handle: Arc<StreamHandle> = Arc::default();
            opening.push(handle.clone());
            StreamSlot { opening: self.opening.clone(), handle }
        })
    }

    /// Adds an attached stream in place of its slot.
    pub(super) fn open(
        &self,
        call: CallSid,
        connection: PodConnection,
        slot: StreamSlot,
    ) -> Arc<OpenStream> {
        let open = Arc::new(OpenStream {
            call,
            connection: Mutex::new(connection),
            moves: AtomicU32::new(0),
            opened: Instant::now(),
            renewed: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
            is_moving: AtomicBool::new(false),
            next: Mutex::default(),
            handle: slot.handle.clone(),
        });
        let mut opening = self.lock_opening();
        slot.release(&mut opening);
        self.lock().insert(open.call.clone(), open.clone());
        // The slot locks it again.
        drop(opening);
        open
    }

    /// Removes a stream, and adds its figures to the totals.
    pub(super) fn close(&self, stream: &Arc<OpenStream>) {
        let mut open = self.lock();
        // The call may have a newer stream already.
        if open.get(&stream.call).is_some_and(|known| Arc::ptr_eq(known, stream)) {
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
        self.lock_opening().iter().for_each(|handle| handle.order(order));
    }

    /// Streams whose last renewal has this age or more.
    pub(super) fn due(&self, age: Duration) -> Vec<Arc<OpenStream>> {
        let open = self.lock();
        let is_due = |stream: &&Arc<OpenStream>| {
            !stream.is_detached.load(Ordering::Relaxed) && stream.is_renewal_due(age)
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
    use std::collections::HashSet;

    use super::*;

    fn attached(stream: &str) -> PodConnection {
        PodConnection {
            stream: stream.parse().unwrap(),
            pod: "gold-0".parse().unwrap(),
            pool: "pool:gold".parse().unwrap(),
            merchant: None,
            ordinal: 1,
            pod_attempt: 1,
        }
    }

    fn open(streams: &Streams, call: &str, stream: &str) -> Arc<OpenStream> {
        let slot = streams.reserve().expect("a free slot");
        streams.open(call.parse().unwrap(), attached(stream), slot)
    }

    #[test]
    fn a_stream_counts_once_from_its_admission_to_its_end() {
        let streams = Streams::new(2, StreamMetrics::default());
        let first = open(&streams, "CA1", "0123456789abcdef");
        let slot = streams.reserve().expect("a free slot");
        assert!(streams.reserve().is_none());
        drop(slot);
        let second = open(&streams, "CA2", "1123456789abcdef");
        assert!(streams.reserve().is_none());
        streams.close(&first);
        streams.close(&second);
        let slots = [streams.reserve(), streams.reserve(), streams.reserve()];
        assert_eq!(slots.map(|slot| slot.is_some()), [true, true, false]);
    }

    #[test]
    fn streams_that_begin_or_end_are_not_missed_in_the_store() {
        let streams = Streams::new(9, StreamMetrics::default());
        let first = open(&streams, "CA1", "0123456789abcdef");
        let second = open(&streams, "CA2", "1123456789abcdef");
        let heartbeat = Instant::now();
        assert_eq!(streams.attached_since(heartbeat), 2);
        // The last bytes of a stream may take a while after the detach.
        second.is_detached.store(true, Ordering::Relaxed);
        assert_eq!(streams.attached_since(heartbeat), 1);
        assert_eq!(streams.attached_since(first.opened - Duration::from_millis(1)), 0);
        assert_eq!(streams.count(), 2);
    }

    #[test]
    fn all_streams_are_reported_in_turns() {
        let streams = Streams::new(99, StreamMetrics::default());
        assert!(streams.next_reported(4).is_empty());
        let calls = (0..10).map(|number| format!("CA{number}"));
        let open: Vec<_> = calls.map(|call| open(&streams, &call, "0123456789abcdef")).collect();
        open[3].is_detached.store(true, Ordering::Relaxed);
        let turn = || (0..3).flat_map(|_| streams.next_reported(4)).collect::<HashSet<_>>();
        for _ in 0..2 {
            let turn = turn();
            assert_eq!(turn.len(), 9);
            assert!(!turn.contains(&open[3].call));
        }
    }

    #[test]
    fn a_stream_that_moves_has_no_settled_connection() {
        let streams = Streams::new(9, StreamMetrics::default());
        let open = open(&streams, "CA1", "0123456789abcdef");
        let before = open.connection().stream;
        assert!(open.is_settled_as(&before));
        open.set_moving(true);
        assert!(!open.is_settled_as(&before));
        open.set_connection(attached("1123456789abcdef"));
        open.set_moving(false);
        assert!(!open.is_settled_as(&before));
        assert!(open.is_settled_as(&open.connection().stream));
    }

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
