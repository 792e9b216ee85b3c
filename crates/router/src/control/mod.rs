//! Background tasks: sweep, audit, reconciliation of pods, leader election, reload of secrets.

mod claim;
mod leader;
pub mod pod_list;
mod reconcile_cluster;
mod reconcile_list;
mod stale_pods;
mod sweep;

use std::{
    future::Future,
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{
    sync::Notify,
    time::{Interval, MissedTickBehavior},
};
use tokio_util::task::TaskTracker;

pub use self::{
    claim::explain_foreign,
    reconcile_list::{ListFile, PodFeed, Reconciled},
};
use crate::{
    auth::Access,
    cluster::{Cluster, LeaderConfig, PodView, PodWatch},
    lifecycle::Lifecycle,
    telemetry::metrics::Metrics,
    tls::Tls,
};
use fleet::PodOrigin;
use store::Store;

/// Interval of the sweep of expired leases and drains.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which files of secrets are read; a change takes effect when two reads agree.
const SECRETS_INTERVAL: Duration = Duration::from_millis(500);

/// The source of pods.
pub enum Source {
    /// A list, which every replica reconciles by itself.
    Feed(PodFeed),
    /// A cluster, which every replica watches and the leader writes to the store.
    Cluster { cluster: Cluster, view: Arc<PodView>, leader: LeaderConfig, identity: String },
}

/// State of the background tasks.
pub struct Control {
    pub store: Arc<dyn Store>,
    pub metrics: Arc<Metrics>,
    pub lifecycle: Arc<Lifecycle>,
    /// Notified when the pods must be reconciled at once, such as after a change of tiers.
    pub reconcile_now: Arc<Notify>,
    pub access: Arc<Access>,
    pub tls: Option<Arc<Tls>>,
    pub cleanup_interval: Duration,
    pub reconcile_interval: Duration,
    /// The origin of this router's pods; empty until its cluster is identified.
    pub origin: OnceLock<PodOrigin>,
    /// The key under which the store records the origin, for messages.
    pub origin_key: String,
    /// The next claim takes the store over from another origin.
    pub force_origin: AtomicBool,
}

impl Control {
    /// Starts all tasks; they end at shutdown.
    pub fn start(self: Arc<Self>, source: Source) -> TaskTracker {
        let tasks = TaskTracker::new();
        tasks.spawn(self.clone().supervise("sweep", Self::run_sweeps));
        tasks.spawn(self.clone().supervise("audit", Self::run_audits));
        tasks.spawn(self.clone().supervise("secrets", Self::reload_secrets));
        match source {
            Source::Feed(feed) => {
                let is_new = !self.lifecycle.is_ready();
                tasks.spawn(
                    self.supervise("pods", move |control| control.run_list(feed.clone(), is_new)),
                )
            }
            Source::Cluster { cluster, view, leader, identity } => {
                let watch = Arc::new(PodWatch {
                    cluster: cluster.clone(),
                    view: view.clone(),
                    lifecycle: self.lifecycle.clone(),
                    ready_pods: self.metrics.cluster_ready_pods.clone(),
                });
                tasks.spawn(self.clone().supervise("watch", move |_| watch.clone().run()));
                let stale_view = view.clone();
                tasks.spawn(self.clone().supervise("stale pods", move |control| {
                    control.drain_stale_pods(stale_view.clone())
                }));
                tasks.spawn(self.supervise("leader", move |control| {
                    let lock = cluster.lock(&leader, identity.clone());
                    let (cluster, view, leader) = (cluster.clone(), view.clone(), leader.clone());
                    async move {
                        control.identify(&cluster, &leader).await;
                        control.campaign(lock, view, leader).await;
                    }
                }))
            }
        };
        tasks.close();
        tasks
    }

    /// Restarts a task that panics: a router without its sweep would look healthy and lose pods.
    async fn supervise<F>(self: Arc<Self>, name: &'static str, run: impl Fn(Arc<Self>) -> F + Send)
    where
        F: Future<Output = ()> + Send,
    {
        while AssertUnwindSafe(run(self.clone())).catch_unwind().await.is_err() {
            self.metrics.panics_recovered.inc();
            tracing::error!(name, "a background task panicked; restarting it");
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    async fn run_sweeps(self: Arc<Self>) {
        let mut ticks = ticks(SWEEP_INTERVAL);
        while self.next_tick(&mut ticks).await {
            self.sweep().await;
        }
    }

    async fn run_audits(self: Arc<Self>) {
        let mut ticks = ticks(self.cleanup_interval);
        while self.next_tick(&mut ticks).await {
            // The leader's audit is enough. Without a leader every replica audits: repairs are
            // idempotent.
            if self.metrics.leader.get() == 1 || self.lifecycle.is_leaderless() {
                self.audit().await;
            }
        }
    }

    async fn reload_secrets(self: Arc<Self>) {
        let mut ticks = ticks(SECRETS_INTERVAL);
        while self.next_tick(&mut ticks).await {
            let control = self.clone();
            // Reading a file may block on a slow disk.
            let reload = tokio::task::spawn_blocking(move || {
                control.access.reload_if_changed();
                if let Some(tls) = &control.tls {
                    tls.reload_if_changed();
                    control.metrics.certificate_ends(tls.ends_at());
                }
            });
            tokio::select! {
                _ = reload => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    /// Waits for the next tick; returns false at shutdown.
    async fn next_tick(&self, ticks: &mut Interval) -> bool {
        tokio::select! {
            _ = ticks.tick() => true,
            () = self.lifecycle.stopping.cancelled() => false,
        }
    }
}

fn ticks(interval: Duration) -> Interval {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
