//! How far the process is in its life.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use tokio_util::sync::CancellationToken;

/// Shared by all who must know whether the router begins, serves or stops.
#[derive(Debug, Default)]
pub struct Lifecycle {
    reached: AtomicBool,
    /// The cluster was there, and can't be followed.
    pub is_cluster_lost: AtomicBool,
    leader: Mutex<Option<String>>,
    /// Why the store refuses this router's pods.
    pods_refused: Mutex<Option<String>>,
    pub stopping: CancellationToken,
}

impl Lifecycle {
    /// The store has answered, and its pods are known.
    pub fn store_reached(&self) {
        self.reached.store(true, Ordering::Relaxed);
    }

    /// Which router leads, as the Lease says; `None` where there is no Lease, or it can't be
    /// read.
    pub fn leader(&self) -> Option<String> {
        self.leader.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_leader(&self, name: Option<String>) {
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Why the store refuses this router's pods, if it does.
    pub fn pods_refused(&self) -> Option<String> {
        self.pods_refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers whether that is news.
    pub fn set_pods_refused(&self, reason: Option<String>) -> bool {
        let mut known = self.pods_refused.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, reason.clone()) != reason
    }

    pub fn is_ready(&self) -> bool {
        self.reached.load(Ordering::Relaxed) && !self.stopping.is_cancelled()
    }
}
