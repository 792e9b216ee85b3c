//! How far the process is in its life.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;

/// Shared by all who must know whether the router begins, serves or stops.
#[derive(Debug, Default)]
pub struct Lifecycle {
    reached: AtomicBool,
    /// The cluster was there, and can't be followed.
    pub is_cluster_lost: AtomicBool,
    pub stopping: CancellationToken,
}

impl Lifecycle {
    /// The store has answered, and its pods are known.
    pub fn store_reached(&self) {
        self.reached.store(true, Ordering::Relaxed);
    }

    pub fn is_ready(&self) -> bool {
        self.reached.load(Ordering::Relaxed) && !self.stopping.is_cancelled()
    }
}
