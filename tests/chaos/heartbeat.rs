//! Whether the machine stood still. A virtual machine may be stopped, or have so much other work
//! that nothing of ours runs: then answers are late through no fault of the routers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const BEAT: Duration = Duration::from_millis(10);
/// A thread that wants next to nothing waits no longer than this beside other work.
const STALLED: Duration = Duration::from_millis(500);

/// A thread that notes by how much it woke up late.
pub(crate) struct Heartbeat {
    is_over: Arc<AtomicBool>,
    longest: Arc<AtomicU64>,
}

impl Heartbeat {
    pub(crate) fn start() -> Self {
        let heartbeat = Self { is_over: Arc::default(), longest: Arc::default() };
        let (is_over, longest) = (heartbeat.is_over.clone(), heartbeat.longest.clone());
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                thread::sleep(BEAT);
                let late = began.elapsed().saturating_sub(BEAT);
                longest.fetch_max(late.as_millis() as u64, Ordering::Relaxed);
            }
        });
        heartbeat
    }

    /// How long the machine stood still, if it did.
    pub(crate) fn stall(&self) -> Option<Duration> {
        let longest = Duration::from_millis(self.longest.load(Ordering::Relaxed));
        (longest > STALLED).then_some(longest)
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}
