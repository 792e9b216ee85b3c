//! Background tasks: sweep, audit, reconciliation of pods, leader election, reload of secrets.

mod capacity;
mod claim;
mod leader;
mod manifests;
mod pod_events;
pub(crate) mod pod_list;
mod reconcile_cluster;
mod reconcile_list;
mod scaling;
mod settling;
mod stale_pods;
mod sweep;
mod waiting_dials;

use std::{
    future::Future,
    panic::AssertUnwindSafe,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{
    sync::Notify,
    time::{Interval, MissedTickBehavior},
};
use tokio_util::task::TaskTracker;

pub(crate) use self::{
    claim::explain_foreign,
    reconcile_list::{ListFile, PodFeed, Reconciled},
};
use crate::{
    auth::Access,
    capacity::{Capacity, CapacityConfig},
    cluster::{Cluster, LeaderConfig, NodeWatch, PodEvents, PodView, PodWatch},
    http::DialQueues,
    lifecycle::Lifecycle,
    telemetry::metrics::Metrics,
    tls::Tls,
};
use fleet::PodOrigin;
use store::Store;

/// Interval of the sweep of expired leases and drains.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a process that writes no pods checks whether the store can be used.
const STORE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Interval at which files of secrets are read; a change takes effect when two reads agree.
const SECRETS_INTERVAL: Duration = Duration::from_millis(500);

/// The source of pods.
pub(crate) enum Source {
    /// A list, which every replica reconciles by itself.
    Feed(PodFeed),
    /// A cluster, which every replica watches and the leader writes to the store.
    Cluster { cluster: Cluster, view: Arc<PodView>, leader: LeaderConfig, identity: String },
    /// Routers, which write the pods and keep the store; this process does neither.
    Routers,
}

/// State of the background tasks.
pub(crate) struct Control {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) capacity: Arc<Capacity>,
    /// Diallers that wait at this router.
    pub(crate) dial_queues: Arc<DialQueues>,
    /// Settings of the capacity policy; `None` without the events that it counts.
    pub(crate) capacity_config: Option<CapacityConfig>,
    /// The name of this router.
    pub(crate) identity: String,
    /// The fencing epoch of the last claim.
    pub(crate) claimed_epoch: AtomicU64,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// Notified when the pods must be reconciled at once, such as after a change of tiers.
    pub(crate) reconcile_now: Arc<Notify>,
    pub(crate) access: Arc<Access>,
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) cleanup_interval: Duration,
    pub(crate) reconcile_interval: Duration,
    /// Time after its Ready transition from which a pod of a cluster gets calls.
    pub(crate) settle_time: Duration,
    /// The origin of this router's pods; empty until its cluster is identified.
    pub(crate) origin: OnceLock<PodOrigin>,
    /// The key under which the store records the origin, for messages.
    pub(crate) origin_key: String,
    /// The next claim takes the store over from another origin.
    pub(crate) force_origin: AtomicBool,
}

impl Control {
    /// Starts all tasks; they end at shutdown.
    /// `is_claimed`: this router has claimed the store for its list of pods.
    pub(crate) fn start(self: Arc<Self>, source: Source, is_claimed: bool) -> TaskTracker {
        let tasks = TaskTracker::new();
        tasks.spawn(self.clone().supervise("secrets", Self::reload_secrets));
        if !matches!(source, Source::Routers) {
            tasks.spawn(self.clone().supervise("sweep", Self::run_sweeps));
            tasks.spawn(self.clone().supervise("audit", Self::run_audits));
        }
        if let Some(config) = self.capacity_config.clone() {
            let view = match &source {
                Source::Routers => None,
                Source::Feed(_) => Some(None),
                Source::Cluster { view, .. } => Some(Some(view.clone())),
            };
            if let Some(view) = view {
                let diallers = self.clone().supervise("diallers", Self::report_waiting_dials);
                tasks.spawn(diallers);
                tasks.spawn(self.clone().supervise("capacity", move |control| {
                    control.run_capacity(config.clone(), view.clone())
                }));
            }
        }
        match source {
            Source::Routers => tasks.spawn(self.supervise("store", Self::await_store)),
            Source::Feed(feed) => {
                let is_new = !is_claimed;
                tasks.spawn(
                    self.supervise("pods", move |control| control.run_list(feed.clone(), is_new)),
                )
            }
            Source::Cluster { cluster, view, leader, identity } => {
                if let Some(config) = &self.capacity_config {
                    let (mode, cluster, view) = (config.scaling, cluster.clone(), view.clone());
                    tasks.spawn(self.clone().supervise("scaling", move |control| {
                        control.run_scaling(cluster.clone(), view.clone(), mode)
                    }));
                }
                self.clone().watch_cluster(&tasks, &cluster, &view, &identity);
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

    /// Starts the tasks that every replica in a cluster has: watches, and work that only the leader
    /// does.
    fn watch_cluster(
        self: Arc<Self>,
        tasks: &TaskTracker,
        cluster: &Cluster,
        view: &Arc<PodView>,
        identity: &str,
    ) {
        for namespace in 0..cluster.config.namespaces.len() {
            let watch = Arc::new(PodWatch {
                cluster: cluster.clone(),
                namespace,
                view: view.clone(),
                lifecycle: self.lifecycle.clone(),
                ready_pods: self.metrics.cluster_ready_pods.clone(),
            });
            tasks.spawn(self.clone().supervise("watch", move |_| watch.clone().run()));
        }
        let nodes = Arc::new(NodeWatch {
            cluster: cluster.clone(),
            view: view.clone(),
            lifecycle: self.lifecycle.clone(),
        });
        tasks.spawn(self.clone().supervise("nodes", move |_| nodes.clone().run()));
        let stale_view = view.clone();
        tasks.spawn(
            self.clone().supervise("stale pods", move |control| {
                control.drain_stale_pods(stale_view.clone())
            }),
        );
        let (events, view) = (PodEvents::new(cluster.clone(), identity.into()), view.clone());
        tasks.spawn(self.clone().supervise("pod events", move |control| {
            control.report_pod_events(view.clone(), events.clone())
        }));
        if cluster.config.has_manifests {
            let cluster = cluster.clone();
            tasks.spawn(
                self.supervise("manifests", move |control| control.run_manifests(cluster.clone())),
            );
        }
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

    /// Reports ready once the store can be used. Routers do so with their first claim of pods.
    async fn await_store(self: Arc<Self>) {
        let mut ticks = ticks(STORE_CHECK_INTERVAL);
        while self.next_tick(&mut ticks).await {
            if self.store.outage().is_none() {
                return self.lifecycle.store_reached();
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
