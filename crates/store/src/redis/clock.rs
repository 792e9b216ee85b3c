//! An estimate of Redis's clock: its offset from the monotonic clock of this process.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::retry::REQUEST_TIMEOUT;
use fleet::Millis;

/// Redis is responsive if it replied within this time.
const RECENT_REPLY_MS: u64 = 200;
/// Interval over which the largest observed offset is used.
const CLOCK_WINDOW: Duration = Duration::from_secs(2);

pub(super) struct RedisClock {
    started: Instant,
    /// Redis's clock minus the local clock (ms). Network latency only makes the observed offset
    /// smaller, so the largest recent one is the most accurate.
    offset: AtomicI64,
    /// Start of the current window, and the largest offset in it.
    clock_window: Mutex<(Instant, i64)>,
    /// Time of the last reply on the local clock (ms).
    last_reply_at: AtomicU64,
}

impl RedisClock {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            offset: AtomicI64::new(0),
            clock_window: Mutex::new((Instant::now(), i64::MIN)),
            last_reply_at: AtomicU64::new(0),
        }
    }

    /// Whether Redis has replied to any request recently.
    pub(super) fn has_recent_reply(&self) -> bool {
        let last_reply_at = self.last_reply_at.load(Ordering::Relaxed);
        self.started.elapsed().as_millis() as u64 - last_reply_at < RECENT_REPLY_MS
    }

    /// Records the time of Redis in a reply.
    pub(super) fn record(&self, redis: Millis) {
        let offset = self.record_offset(redis);
        if offset + (REQUEST_TIMEOUT.as_millis() as i64) < self.offset.load(Ordering::Relaxed) {
            // No reply takes longer than the request timeout: the clock was set back.
            return self.reset(redis);
        }
        let mut window = self.clock_window.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, largest) = &mut *window;
        *largest = offset.max(*largest);
        if since.elapsed() > CLOCK_WINDOW {
            // Accept a smaller offset: the clock may have been set back by less than the request
            // timeout.
            self.offset.store(*largest, Ordering::Relaxed);
            (*since, *largest) = (Instant::now(), offset);
        } else {
            self.offset.fetch_max(*largest, Ordering::Relaxed);
        }
    }

    /// Replaces the estimate on a new connection: the server may be another one.
    pub(super) fn reset(&self, redis: Millis) {
        let offset = self.record_offset(redis);
        let mut window = self.clock_window.lock().unwrap_or_else(PoisonError::into_inner);
        *window = (Instant::now(), offset);
        self.offset.store(offset, Ordering::Relaxed);
    }

    fn record_offset(&self, redis: Millis) -> i64 {
        let local = self.started.elapsed().as_millis() as i64;
        self.last_reply_at.store(local as u64, Ordering::Relaxed);
        redis as i64 - local
    }

    /// The estimated clock of Redis; `None` before the first reply.
    pub(super) fn now(&self) -> Option<Millis> {
        let is_known = self.offset.load(Ordering::Relaxed) > 0;
        is_known.then(|| self.at(Instant::now()))
    }

    /// The estimated clock of Redis at a local time.
    pub(super) fn at(&self, moment: Instant) -> Millis {
        let local = moment.duration_since(self.started).as_millis() as i64;
        u64::try_from(local + self.offset.load(Ordering::Relaxed)).unwrap_or(0)
    }
}
