//! Leader election through a Lease, and the leader's term.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Control;
use crate::{
    cluster::{ApiErrors, LeaderConfig, Lock, PodView, Renewal},
    lifecycle::LeaderTimes,
};
use fleet::Claimant;
use store::StoreError;

/// Backoff after an error.
pub(crate) const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// How long the release of the Lease may take.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the leader's work stopped.
#[derive(Debug)]
pub(crate) enum Halt {
    /// The store has a newer epoch or another origin, and rejects this writer.
    Fenced,
    Store(StoreError),
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Control {
    /// Takes part in the election and leads when elected, until shutdown.
    pub(crate) async fn campaign(
        self: Arc<Self>,
        mut lock: Lock,
        view: Arc<PodView>,
        config: LeaderConfig,
    ) {
        if !config.enabled {
            tracing::warn!(
                "LEADER_ELECTION_ENABLED is false: run only one replica, or live calls will be lost"
            );
            self.metrics.leader.set(1);
            tokio::select! {
                () = self.lead(&view, None) => {}
                () = self.lifecycle.stopping.cancelled() => {}
            }
            return;
        }
        let (mut errors, mut holder) = (ApiErrors::default(), String::new());
        while !self.lifecycle.stopping.is_cancelled() && self.origin.get().is_some() {
            let attempted_at = Instant::now();
            let floor = match self.claim(Claimant::Leader { epoch: None }).await {
                Ok(Ok(current)) => {
                    self.lifecycle.store_reached();
                    current
                }
                // The store belongs to another origin: retry until it does not.
                Ok(Err(_)) => {
                    tokio::select! {
                        () = sleep(config.retry_period) => continue,
                        () = self.lifecycle.stopping.cancelled() => return,
                    }
                }
                // A term whose epoch is too small ends at its first write.
                Err(_) => 0,
            };
            let acquired = timeout(config.renew_deadline, lock.acquire(floor)).await;
            self.lifecycle.set_leader(match acquired {
                Ok(Ok(_)) => router_of(&lock.holder),
                _ => None,
            });
            let report = match &acquired {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => errors.record(error, &rule(&config)),
                Err(_) => errors.record_timeout(),
            };
            if let Some(report) = report {
                report.log("cannot take part in the leader election; calls are still served");
            }
            if let Ok(Ok(epoch)) = acquired {
                if let Some(renewed) = lock.changed_at() {
                    self.lifecycle.saw_lease(renewed);
                }
                if let Some(time) = errors.clear() {
                    let after_ms = time.as_millis() as u64;
                    tracing::info!(after_ms, "taking part in the leader election again");
                }
                match epoch {
                    Some(epoch) => {
                        self.serve_term(&mut lock, &view, &config, epoch, attempted_at).await
                    }
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

    /// Starts to measure the time without a leader.
    pub(crate) fn begin_election(&self, config: &LeaderConfig) {
        // Observed renewals are at most two periods apart, one of the leader's and one of this
        // replica's; half a period is slack.
        let silence = config.retry_period * 5 / 2;
        self.lifecycle.begin_election(LeaderTimes { silence, lease: config.duration });
    }

    /// Leads until the Lease is lost, the store rejects the writes, or the process stops.
    async fn serve_term(
        &self,
        lock: &mut Lock,
        view: &PodView,
        config: &LeaderConfig,
        epoch: u64,
        acquired_at: Instant,
    ) {
        tracing::info!(epoch, "elected as leader");
        self.metrics.leader_epoch.set(epoch);
        self.metrics.leader.set(1);
        tokio::select! {
            biased;
            () = self.renew_lease(lock, config, acquired_at) => {}
            () = self.lifecycle.stopping.cancelled() => {}
            () = self.lead(view, Some(epoch)) => {}
        }
        self.metrics.leader.set(0);
        self.lifecycle.set_leader(None);
        tracing::warn!(epoch, "no longer the leader");
        // The next leader need not wait for the Lease to expire.
        let _ = timeout(RELEASE_TIMEOUT, lock.release()).await;
    }

    /// Renews the Lease, last held for certain at `renewed`. Ends when it may have expired.
    async fn renew_lease(&self, lock: &mut Lock, config: &LeaderConfig, mut renewed: Instant) {
        let mut errors = ApiErrors::default();
        loop {
            let until = renewed + config.renew_deadline;
            sleep(config.retry_period.min(until.saturating_duration_since(Instant::now()))).await;
            let attempted_at = Instant::now();
            if attempted_at >= until {
                return tracing::warn!("could not renew the Lease in time; stepping down");
            }
            match timeout_at(until, lock.renew()).await {
                Ok(Ok(Renewal::Done)) => {
                    renewed = attempted_at;
                    self.lifecycle.saw_lease(renewed.into());
                    errors.clear();
                }
                Ok(Ok(Renewal::Conflict)) => {}
                Ok(Ok(Renewal::Lost)) => {
                    return tracing::warn!(
                        holder = lock.holder,
                        "another replica holds the Lease; stepping down"
                    );
                }
                Ok(Err(error)) => {
                    if let Some(report) = errors.record(&error, &rule(config)) {
                        report.log("cannot renew the Lease; retrying until the deadline");
                    }
                }
                Err(_) => {
                    return tracing::warn!(
                        "the Kubernetes API did not answer before the renew deadline; stepping down"
                    );
                }
            }
        }
    }

    /// Does the leader's work until the store rejects its writes.
    async fn lead(&self, view: &PodView, epoch: Option<u64>) {
        let mut backoff = MIN_BACKOFF;
        loop {
            // The claim fences earlier leaders even if this one has nothing to write.
            let halt = match self.claim(Claimant::Leader { epoch }).await {
                Ok(Ok(epoch)) => {
                    let writer = self.writer(epoch);
                    let Err(halt) = self.reconcile_view(view, writer, &mut backoff).await;
                    halt
                }
                Ok(Err(_)) => Halt::Fenced,
                Err(error) => Halt::Store(error),
            };
            match halt {
                Halt::Fenced => {
                    return tracing::warn!(
                        "the store rejects this leader's writes: its epoch or origin is outdated"
                    );
                }
                Halt::Store(error) => {
                    tracing::warn!(%error, "cannot write the pods to the store; retrying")
                }
            }
            tokio::select! {
                () = sleep(backoff) => backoff = (backoff * 2).min(MAX_BACKOFF),
                () = self.reconcile_now.notified() => {}
            }
        }
    }
}

/// Returns the router that holds a Lease, if any: the suffix of the identity differs with each
/// start.
fn router_of(holder: &str) -> Option<String> {
    let name = holder.rsplit_once('_').map_or(holder, |(name, _)| name);
    (!name.is_empty()).then(|| name.to_owned())
}

/// Names the permissions that the election needs.
fn rule(config: &LeaderConfig) -> String {
    let namespace = &config.namespace;
    format!("get, create and update on leases (coordination.k8s.io) in the namespace {namespace}")
}
