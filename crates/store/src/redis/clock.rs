//! Redis's clock, as far as its answers tell: its difference from our monotonic clock.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::client::BUDGET;
use fleet::Millis;

/// Who has answered within this time (ms) is there.
const LATELY: u64 = 200;
/// For so long the truest word about Redis's clock counts.
const WINDOW: Duration = Duration::from_secs(2);

pub(super) struct RedisClock {
    started: Instant,
    /// Redis's clock minus ours (ms), as far as we know: answers take their time, so that the
    /// largest difference lately is the truest.
    offset: AtomicI64,
    /// Since when, and what it has been at most.
    lately: Mutex<(Instant, i64)>,
    /// When Redis last answered, on our clock (ms).
    heard: AtomicU64,
}

impl RedisClock {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            offset: AtomicI64::new(0),
            lately: Mutex::new((Instant::now(), i64::MIN)),
            heard: AtomicU64::new(0),
        }
    }

    /// Whether Redis has answered anything lately.
    pub(super) fn is_heard(&self) -> bool {
        let heard = self.heard.load(Ordering::Relaxed);
        self.started.elapsed().as_millis() as u64 - heard < LATELY
    }

    /// Takes note of what Redis's clock showed in an answer.
    pub(super) fn note(&self, redis: Millis) {
        let offset = self.offset_by(redis);
        if offset + (BUDGET.as_millis() as i64) < self.offset.load(Ordering::Relaxed) {
            // No answer takes so long: the clock was set back.
            return self.begin(redis);
        }
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, most) = &mut *lately;
        *most = offset.max(*most);
        if since.elapsed() > WINDOW {
            // A clock may have been set back by less.
            self.offset.store(*most, Ordering::Relaxed);
            (*since, *most) = (Instant::now(), offset);
        } else {
            self.offset.fetch_max(*most, Ordering::Relaxed);
        }
    }

    /// The same on a new connection: what was known may have been another's clock.
    pub(super) fn begin(&self, redis: Millis) {
        let offset = self.offset_by(redis);
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        *lately = (Instant::now(), offset);
        self.offset.store(offset, Ordering::Relaxed);
    }

    fn offset_by(&self, redis: Millis) -> i64 {
        let ours = self.started.elapsed().as_millis() as i64;
        self.heard.store(ours as u64, Ordering::Relaxed);
        redis as i64 - ours
    }

    /// What Redis's clock shows, if we have ever heard of it.
    pub(super) fn now(&self) -> Option<Millis> {
        let has_heard = self.offset.load(Ordering::Relaxed) > 0;
        has_heard.then(|| self.at(Instant::now()))
    }

    /// What Redis's clock will show at a moment of ours.
    pub(super) fn at(&self, moment: Instant) -> Millis {
        let ours = moment.duration_since(self.started).as_millis() as i64;
        u64::try_from(ours + self.offset.load(Ordering::Relaxed)).unwrap_or(0)
    }
}
