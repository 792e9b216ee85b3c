//! The leader: chosen through a Lease, it keeps the pools true to the cluster.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Control;
use crate::{
    cluster::{LeaderConfig, Lock, PodView, Renewal, Trouble},
    lifecycle::LeaderTimes,
};
use fleet::Claimant;
use store::StoreError;

/// How long to wait after an error, at first and at most.
pub(crate) const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
const GIVE_BACK: Duration = Duration::from_secs(2);

/// Why leader work has stopped.
#[derive(Debug)]
pub(crate) enum Halt {
    /// Another leader has begun: the store takes nothing from us any more.
    Fenced,
    Store(StoreError),
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Control {
    /// Leads whenever the lease is ours, for as long as the process lives.
    pub(crate) async fn campaign(
        self: Arc<Self>,
        mut lock: Lock,
        view: Arc<PodView>,
        config: LeaderConfig,
    ) {
        if !config.enabled {
            tracing::warn!(
                "LEADER_ELECTION_ENABLED is false: this must be the only replica, or live calls will be lost"
            );
            self.metrics.leader.set(1);
            tokio::select! {
                () = self.lead(&view, None) => {}
                () = self.lifecycle.stopping.cancelled() => {}
            }
            return;
        }
        let (mut trouble, mut holder) = (Trouble::default(), String::new());
        while !self.lifecycle.stopping.is_cancelled() && self.origin.get().is_some() {
            let asked = Instant::now();
            let floor = match self.claim(Claimant::Leader { epoch: None }).await {
                Ok(Ok(current)) => {
                    self.lifecycle.store_reached();
                    current
                }
                // The pods of another origin are not this cluster's to lead.
                Ok(Err(_)) => {
                    tokio::select! {
                        () = sleep(config.retry_period) => continue,
                        () = self.lifecycle.stopping.cancelled() => return,
                    }
                }
                // A term whose epoch is too small is given up at its first write.
                Err(_) => 0,
            };
            let taken = timeout(config.renew_deadline, lock.take(floor)).await;
            self.lifecycle.set_leader(match taken {
                Ok(Ok(_)) => router_of(&lock.holder),
                _ => None,
            });
            let report = match &taken {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => trouble.met(error, &rule(&config)),
                Err(_) => trouble.no_answer(),
            };
            if let Some(report) = report {
                report.log("cannot take part in the election; calls are served");
            }
            if let Ok(Ok(epoch)) = taken {
                if let Some(renewed) = lock.changed_at() {
                    self.lifecycle.saw_lease(renewed);
                }
                if let Some(time) = trouble.over() {
                    let after_ms = time.as_millis() as u64;
                    tracing::info!(after_ms, "taking part in the election again");
                }
                match epoch {
                    Some(epoch) => self.serve_term(&mut lock, &view, &config, epoch, asked).await,
                    None if holder != lock.holder => {
                        tracing::info!(holder = lock.holder, "another replica leads");
                    }
                    None => {}
                }
                holder.clone_from(&lock.holder);
            }
            tokio::select! {
                () = sleep(config.retry_period) => {}
                () = self.lifecycle.stopping.cancelled() => {}
            }
        }
    }

    /// Begins to count how long no replica leads.
    pub(crate) fn begin_election(&self, config: &LeaderConfig) {
        // Between two renewals that we see lie at most two periods, one of the leader's and one
        // of ours; half a period more is slack.
        let silence = config.retry_period * 5 / 2;
        self.lifecycle.begin_election(LeaderTimes { silence, lease: config.duration });
    }

    /// Leads until the lease is lost, another leader has begun, or the process stops.
    async fn serve_term(
        &self,
        lock: &mut Lock,
        view: &PodView,
        config: &LeaderConfig,
        epoch: u64,
        asked: Instant,
    ) {
        tracing::info!(epoch, "leading");
        self.metrics.leader_epoch.set(epoch);
        self.metrics.leader.set(1);
        tokio::select! {
            biased;
            () = self.keep(lock, config, asked) => {}
            () = self.lifecycle.stopping.cancelled() => {}
            () = self.lead(view, Some(epoch)) => {}
        }
        self.metrics.leader.set(0);
        self.lifecycle.set_leader(None);
        tracing::warn!(epoch, "no longer leading");
        // Whoever is next need not wait for the lease to run out.
        let _ = timeout(GIVE_BACK, lock.release()).await;
    }

    /// Renews the lease for as long as that works; `renewed` is when it was last
    /// known to be ours. Ends when it may have run out.
    async fn keep(&self, lock: &mut Lock, config: &LeaderConfig, mut renewed: Instant) {
        let mut trouble = Trouble::default();
        loop {
            let until = renewed + config.renew_deadline;
            sleep(config.retry_period.min(until.saturating_duration_since(Instant::now()))).await;
            let asked = Instant::now();
            if asked >= until {
                return tracing::warn!("the lease could not be renewed in time");
            }
            match timeout_at(until, lock.renew()).await {
                Ok(Ok(Renewal::Done)) => {
                    renewed = asked;
                    self.lifecycle.saw_lease(renewed.into());
                    trouble.over();
                }
                Ok(Ok(Renewal::Conflict)) => {}
                Ok(Ok(Renewal::Lost)) => {
                    return tracing::warn!(holder = lock.holder, "the lease is no longer ours");
                }
                Ok(Err(error)) => {
                    if let Some(report) = trouble.met(&error, &rule(config)) {
                        report.log("cannot renew the lease");
                    }
                }
                Err(_) => return tracing::warn!("the cluster does not answer; the lease is lost"),
            }
        }
    }

    /// The leader's work. Ends when the store takes no more of it.
    async fn lead(&self, view: &PodView, epoch: Option<u64>) {
        let mut pause = PAUSE.0;
        loop {
            // Those before us must not write any more, even if we have nothing to.
            let halt = match self.claim(Claimant::Leader { epoch }).await {
                Ok(Ok(epoch)) => {
                    let writer = self.writer(epoch);
                    let Err(halt) = self.follow_view(view, writer, &mut pause).await;
                    halt
                }
                Ok(Err(_)) => Halt::Fenced,
                Err(error) => Halt::Store(error),
            };
            match halt {
                Halt::Fenced => return tracing::warn!("another leader has begun"),
                Halt::Store(error) => tracing::warn!(%error, "cannot bring the pods in line"),
            }
            tokio::select! {
                () = sleep(pause) => pause = (pause * 2).min(PAUSE.1),
                () = self.nudge.notified() => {}
            }
        }
    }
}

/// The router that a Lease names, if any: what comes after its name tells its lives apart.
fn router_of(holder: &str) -> Option<String> {
    let name = holder.rsplit_once('_').map_or(holder, |(name, _)| name);
    (!name.is_empty()).then(|| name.to_owned())
}

/// What the election needs of the cluster.
fn rule(config: &LeaderConfig) -> String {
    let namespace = &config.namespace;
    format!("get, create and update on leases (coordination.k8s.io) in the namespace {namespace}")
}
