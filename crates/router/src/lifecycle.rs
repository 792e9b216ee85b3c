//! Readiness, leadership and shutdown of the process.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

/// Lifecycle state, shared by the endpoints and the background tasks.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    is_store_reached: AtomicBool,
    /// This replica's watch of the cluster failed, and no list has been read since.
    pub(crate) is_cluster_lost: AtomicBool,
    leader: Mutex<Leader>,
    /// The store holds pods of another origin, so that no call is served from it.
    pub(crate) is_foreign: AtomicBool,
    /// The reason for which the store refuses this router's pods.
    pods_refused: Mutex<Option<String>>,
    /// Problems of the connection to the cluster in words, by their source.
    problems: Mutex<BTreeMap<String, String>>,
    pub(crate) stopping: CancellationToken,
}

/// The leader as this replica sees it.
#[derive(Debug, Default)]
struct Leader {
    name: Option<String>,
    /// Time of its last renewal by the local clock; `None` without an election.
    renewed: Option<Instant>,
    /// Time of the last read of the Lease.
    read: Option<Instant>,
    times: LeaderTimes,
}

/// Limits after which the leader counts as silent or absent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LeaderTimes {
    /// Time without a renewal after which the leader is silent: it may have died.
    pub(crate) silence: Duration,
    /// Time without a renewal after which the Lease has expired.
    pub(crate) lease: Duration,
}

impl Lifecycle {
    /// Records that the store answered and holds this router's pods.
    pub(crate) fn store_reached(&self) {
        self.is_store_reached.store(true, Ordering::Relaxed);
    }

    /// Returns the holder of the Lease; `None` without a Lease or if it can't be read.
    pub(crate) fn leader(&self) -> Option<String> {
        self.leader_state().name.clone()
    }

    pub(crate) fn set_leader(&self, name: Option<String>) {
        self.leader_state().name = name;
    }

    /// Starts an election. An existing leader counts as alive until its silence is observed.
    pub(crate) fn begin_election(&self, times: LeaderTimes) {
        let mut leader = self.leader_state();
        (leader.times, leader.renewed) = (times, Some(Instant::now()));
    }

    /// Records a read of the Lease that its holder last renewed at `renewed`.
    pub(crate) fn saw_lease(&self, renewed: Instant) {
        let mut leader = self.leader_state();
        (leader.renewed, leader.read) = (Some(renewed), Some(Instant::now()));
    }

    /// The Lease is readable and its holder does not renew it: the leader may have died, and no
    /// replica has replaced it.
    pub(crate) fn is_leader_silent(&self) -> bool {
        let leader = self.leader_state();
        let within =
            |at: Option<Instant>| at.is_some_and(|at| at.elapsed() <= leader.times.silence);
        within(leader.read) && !within(leader.renewed)
    }

    /// No replica is known to lead: the Lease has expired or can't be read.
    pub(crate) fn is_leaderless(&self) -> bool {
        let leader = self.leader_state();
        leader.renewed.is_some_and(|at| at.elapsed() > leader.times.lease)
    }

    fn leader_state(&self) -> MutexGuard<'_, Leader> {
        self.leader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reason for which the store refuses this router's pods, if it does.
    pub(crate) fn pods_refused(&self) -> Option<String> {
        self.pods_refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether the reason changed.
    pub(crate) fn set_pods_refused(&self, reason: Option<String>) -> bool {
        let mut known = self.pods_refused.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, reason.clone()) != reason
    }

    /// Records or clears a problem of the connection to the cluster.
    pub(crate) fn set_problem(&self, source: &str, problem: Option<String>) {
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        match problem {
            Some(problem) => drop(problems.insert(source.to_owned(), problem)),
            None => drop(problems.remove(source)),
        }
    }

    /// Returns the problems of the connection to the cluster.
    pub(crate) fn problems(&self) -> Vec<String> {
        let problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        problems.values().cloned().collect()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.is_store_reached.load(Ordering::Relaxed)
            && !self.is_foreign.load(Ordering::Relaxed)
            && !self.stopping.is_cancelled()
    }
}
