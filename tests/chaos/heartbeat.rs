//! Detects stalls of the machine. A virtual machine may be paused or starved of CPU time, and
//! responses are then late through no fault of the routers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const PERIOD: Duration = Duration::from_millis(10);
/// A thread with almost no work is not delayed longer than this by load alone.
const MAX_DELAY: Duration = Duration::from_millis(500);

/// A thread that measures how late it wakes up.
pub(crate) struct Heartbeat {
    is_finished: Arc<AtomicBool>,
    longest: Arc<AtomicU64>,
}

impl Heartbeat {
    pub(crate) fn start() -> Self {
        let heartbeat = Self { is_finished: Arc::default(), longest: Arc::default() };
        let (is_finished, longest) = (heartbeat.is_finished.clone(), heartbeat.longest.clone());
        thread::spawn(move || {
            while !is_finished.load(Ordering::Relaxed) {
                let began = Instant::now();
                thread::sleep(PERIOD);
                let late = began.elapsed().saturating_sub(PERIOD);
                longest.fetch_max(late.as_millis() as u64, Ordering::Relaxed);
            }
        });
        heartbeat
    }

    /// The longest stall of the machine, if any.
    pub(crate) fn longest_stall(&self) -> Option<Duration> {
        let longest = Duration::from_millis(self.longest.load(Ordering::Relaxed));
        (longest > MAX_DELAY).then_some(longest)
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.is_finished.store(true, Ordering::Relaxed);
    }
}
