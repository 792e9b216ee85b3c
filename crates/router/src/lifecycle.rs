//! How far the process is in its life.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

/// Shared by all who must know whether the router begins, serves or stops.
#[derive(Debug, Default)]
pub struct Lifecycle {
    reached: AtomicBool,
    /// This replica's own watch of the cluster has failed, and no list was read since.
    pub is_cluster_lost: AtomicBool,
    leader: Mutex<Leader>,
    /// The store holds the pods of another origin: no call is served from it.
    pub is_foreign: AtomicBool,
    /// Why the store refuses this router's pods.
    pods_refused: Mutex<Option<String>>,
    pub stopping: CancellationToken,
}

/// What this replica knows of the leader.
#[derive(Debug, Default)]
struct Leader {
    name: Option<String>,
    /// When it last renewed the Lease, by our clock; `None` where there is no election.
    renewed: Option<Instant>,
    /// When the Lease was last read.
    asked: Option<Instant>,
    times: LeaderTimes,
}

/// When the absence of a leader counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeaderTimes {
    /// A leader that has not renewed for so long is silent: it may have died.
    pub silence: Duration,
    /// So long after its last renewal its Lease has run out.
    pub lease: Duration,
}

impl Lifecycle {
    /// The store has answered, and its pods are known.
    pub fn store_reached(&self) {
        self.reached.store(true, Ordering::Relaxed);
    }

    /// Which router leads, as the Lease says; `None` where there is no Lease, or it can't be
    /// read.
    pub fn leader(&self) -> Option<String> {
        self.leader_state().name.clone()
    }

    pub fn set_leader(&self, name: Option<String>) {
        self.leader_state().name = name;
    }

    /// An election begins. A leader that is there already counts as alive until it is known
    /// better.
    pub fn begin_election(&self, times: LeaderTimes) {
        let mut leader = self.leader_state();
        (leader.times, leader.renewed) = (times, Some(Instant::now()));
    }

    /// The Lease was read, and its holder renewed it last at `renewed`.
    pub fn saw_lease(&self, renewed: Instant) {
        let mut leader = self.leader_state();
        (leader.renewed, leader.asked) = (Some(renewed), Some(Instant::now()));
    }

    /// The Lease can be read, and its holder does not renew it: it may have died, and nobody
    /// has taken its place.
    pub fn is_leader_silent(&self) -> bool {
        let leader = self.leader_state();
        let within =
            |at: Option<Instant>| at.is_some_and(|at| at.elapsed() <= leader.times.silence);
        within(leader.asked) && !within(leader.renewed)
    }

    /// No replica is known to lead, because its Lease has run out or can't be read.
    pub fn is_leaderless(&self) -> bool {
        let leader = self.leader_state();
        leader.renewed.is_some_and(|at| at.elapsed() > leader.times.lease)
    }

    fn leader_state(&self) -> MutexGuard<'_, Leader> {
        self.leader.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.reached.load(Ordering::Relaxed)
            && !self.is_foreign.load(Ordering::Relaxed)
            && !self.stopping.is_cancelled()
    }
}
