//! What happens without being asked: sweeps, audits, and pods that come and go.

mod claim;
mod follow;
mod leader;
pub mod pod_list;
mod pods;
mod stale_pods;
mod upkeep;

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
    pods::{ListFile, PodFeed, Reconciled},
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

/// How often overdue leases and drains are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// How often the files of secrets are looked at; a change counts when two looks
/// agree.
const SECRETS_INTERVAL: Duration = Duration::from_millis(500);

/// Where pods come from.
pub enum Source {
    /// A list, which every replica follows by itself.
    Feed(PodFeed),
    /// A cluster, which every replica watches and one leader writes to the store.
    Cluster { cluster: Cluster, view: Arc<PodView>, leader: LeaderConfig, identity: String },
}

/// The router's own work, beside requests.
pub struct Control {
    pub store: Arc<dyn Store>,
    pub metrics: Arc<Metrics>,
    pub lifecycle: Arc<Lifecycle>,
    /// Told when something has changed that the pods should follow at once.
    pub nudge: Arc<Notify>,
    pub access: Arc<Access>,
    pub tls: Option<Arc<Tls>>,
    pub cleanup_interval: Duration,
    pub reconcile_interval: Duration,
    /// Where this router's pods come from; empty until its cluster is identified.
    pub origin: OnceLock<PodOrigin>,
    /// Where the store records the origin of its pods, for messages.
    pub origin_key: String,
    /// The next claim takes the store over from another origin.
    pub force_origin: AtomicBool,
}

impl Control {
    /// Starts all loops; they end when the process is stopping.
    pub fn start(self: Arc<Self>, source: Source) -> TaskTracker {
        let tasks = TaskTracker::new();
        tasks.spawn(self.clone().supervise("sweep", Self::sweeps));
        tasks.spawn(self.clone().supervise("audit", Self::audits));
        tasks.spawn(self.clone().supervise("secrets", Self::follow_secrets));
        match source {
            Source::Feed(feed) => {
                let is_new = !self.lifecycle.is_ready();
                tasks.spawn(
                    self.supervise("pods", move |control| control.follow(feed.clone(), is_new)),
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
                let seen = view.clone();
                tasks.spawn(self.clone().supervise("stale pods", move |control| {
                    control.drain_stale_pods(seen.clone())
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

    /// Runs a loop again if it panics: a router whose sweep is gone looks
    /// healthy and loses pods.
    async fn supervise<F>(self: Arc<Self>, name: &'static str, run: impl Fn(Arc<Self>) -> F + Send)
    where
        F: Future<Output = ()> + Send,
    {
        while AssertUnwindSafe(run(self.clone())).catch_unwind().await.is_err() {
            self.metrics.panics_recovered.inc();
            tracing::error!(name, "a loop panicked; starting it again");
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    async fn sweeps(self: Arc<Self>) {
        let mut ticks = ticks(SWEEP_INTERVAL);
        while self.goes_on(&mut ticks).await {
            self.sweep().await;
        }
    }

    async fn audits(self: Arc<Self>) {
        let mut ticks = ticks(self.cleanup_interval);
        while self.goes_on(&mut ticks).await {
            // The leader's is enough. Without a leader every replica audits: what one repairs
            // the others find in order.
            if self.metrics.leader.get() == 1 || self.lifecycle.is_leaderless() {
                self.audit().await;
            }
        }
    }

    async fn follow_secrets(self: Arc<Self>) {
        let mut ticks = ticks(SECRETS_INTERVAL);
        while self.goes_on(&mut ticks).await {
            let control = self.clone();
            // Files may lie on a disk that is slow.
            let look = tokio::task::spawn_blocking(move || {
                control.access.look();
                if let Some(tls) = &control.tls {
                    tls.look();
                    control.metrics.certificate_ends(tls.ends_at());
                }
            });
            tokio::select! {
                _ = look => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    /// Waits for the next tick; answers whether there is one.
    async fn goes_on(&self, ticks: &mut Interval) -> bool {
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
