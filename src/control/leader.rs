//! The leader: chosen through a Lease, it keeps the pools true to the cluster.

use std::{collections::HashMap, pin::pin, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::join_all};
use kube::runtime::watcher::Event;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::{Control, pods::AT_ONCE};
use crate::{
    cluster::{Cluster, ClusterPod, Lock, Renewal, explain, pods::Seen},
    config::LeaderConfig,
    domain::{
        fleet::{Departure, PodFacts, PodStatus},
        names::PodName,
    },
    store::StoreError,
};

/// How long the list of all pods may take.
const LIST: Duration = Duration::from_secs(30);
/// How long to wait after an error, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long after a change of pods the pools are balanced.
const SETTLE: Duration = Duration::from_secs(1);
const GIVE_BACK: Duration = Duration::from_secs(2);

/// Why leader work has stopped.
#[derive(Debug)]
enum Halt {
    /// Another leader has begun: the store takes nothing from us any more.
    Fenced,
    Store(StoreError),
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// What became of a pod, by the last word on it.
enum Change {
    Present(PodFacts),
    Gone { uid: String },
}

impl Control {
    /// Leads whenever the lease is ours, for as long as the process lives.
    pub(super) async fn campaign(
        self: Arc<Self>,
        cluster: Cluster,
        config: LeaderConfig,
        identity: String,
    ) {
        if !config.enabled {
            self.metrics.leader.set(1);
            tokio::select! {
                () = self.lead(&cluster, None) => {}
                () = self.lifecycle.stopping.cancelled() => {}
            }
            return;
        }
        let mut lock = cluster.lock(&config, identity);
        let mut said = String::new();
        while !self.lifecycle.stopping.is_cancelled() {
            let asked = Instant::now();
            let floor = match self.store.epoch(None).await {
                Ok(current) => {
                    self.lifecycle.store_reached();
                    current.unwrap_or_default()
                }
                // A term whose epoch is too small is given up at its first write.
                Err(_) => 0,
            };
            match timeout(config.renew_deadline, lock.take(floor)).await {
                Ok(Ok(Some(epoch))) => {
                    said.clear();
                    tracing::info!(epoch, "leading");
                    self.metrics.leader_epoch.set(epoch);
                    self.metrics.leader.set(1);
                    tokio::select! {
                        biased;
                        () = self.keep(&mut lock, &config, asked) => {}
                        () = self.lifecycle.stopping.cancelled() => {}
                        () = self.lead(&cluster, Some(epoch)) => {}
                    }
                    self.metrics.leader.set(0);
                    tracing::warn!(epoch, "no longer leading");
                    // Whoever is next need not wait for the lease to run out.
                    let _ = timeout(GIVE_BACK, lock.release()).await;
                }
                Ok(Ok(None)) => {
                    let holder = format!("led by {}", lock.holder);
                    if holder != said {
                        tracing::info!(holder = lock.holder, "another replica leads");
                        said = holder;
                    }
                }
                Ok(Err(error)) => {
                    let rule = format!(
                        "get, create and update on leases (coordination.k8s.io) in the namespace {}",
                        config.namespace
                    );
                    let error = explain(&error, &rule);
                    if error != said {
                        tracing::error!(
                            error,
                            "cannot take part in the election; calls are served"
                        );
                        said = error;
                    }
                }
                Err(_) => tracing::warn!("the cluster does not answer"),
            }
            tokio::select! {
                () = sleep(config.retry_period) => {}
                () = self.lifecycle.stopping.cancelled() => {}
            }
        }
    }

    /// Renews the lease for as long as that works; `renewed` is when it was last
    /// known to be ours. Ends when it may have run out.
    async fn keep(&self, lock: &mut Lock, config: &LeaderConfig, mut renewed: Instant) {
        loop {
            let until = renewed + config.renew_deadline;
            sleep(config.retry_period.min(until.saturating_duration_since(Instant::now()))).await;
            let asked = Instant::now();
            if asked >= until {
                return tracing::warn!("the lease could not be renewed in time");
            }
            match timeout_at(until, lock.renew()).await {
                Ok(Ok(Renewal::Done)) => renewed = asked,
                Ok(Ok(Renewal::Conflict)) => {}
                Ok(Ok(Renewal::Lost)) => {
                    return tracing::warn!(holder = lock.holder, "the lease is no longer ours");
                }
                Ok(Err(error)) => tracing::warn!(%error, "cannot renew the lease"),
                Err(_) => return tracing::warn!("the cluster does not answer; the lease is lost"),
            }
        }
    }

    /// The leader's work. Ends when the store takes no more of it.
    async fn lead(&self, cluster: &Cluster, epoch: Option<u64>) {
        let mut pause = PAUSE.0;
        loop {
            // Those before us must not write any more, even if we have nothing to.
            let halt = match self.store.epoch(epoch).await {
                Ok(Ok(_)) => match self.follow_cluster(cluster, epoch, &mut pause).await {
                    Ok(()) => continue,
                    Err(halt) => halt,
                },
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

    /// Lists all pods, brings the store in line, and follows what becomes of them
    /// until it is time to list them again.
    async fn follow_cluster(
        &self,
        cluster: &Cluster,
        epoch: Option<u64>,
        pause: &mut Duration,
    ) -> Result<(), Halt> {
        let mut events = pin!(cluster.watch().ready_chunks(AT_ONCE));
        let mut listed: Option<HashMap<PodName, Change>> = None;
        let mut again = Instant::now() + LIST;
        let mut balance: Option<Instant> = None;
        let mut said = String::new();
        loop {
            let chunk = tokio::select! {
                chunk = events.next() => chunk.unwrap_or_default(),
                () = sleep_until(again) => return Ok(()),
                () = self.nudge.notified() => return Ok(()),
                () = sleep_until(balance.unwrap_or(again)), if balance.is_some() => {
                    balance = None;
                    let tiers = self.store.tiers().await?;
                    self.rebalance(&tiers, epoch).await?;
                    continue;
                }
            };
            let mut changes = HashMap::new();
            let mut failed = None;
            for event in chunk {
                match event {
                    Ok(Event::Init) => listed = Some(HashMap::new()),
                    Ok(Event::InitApply(pod)) => {
                        if let (Some(listed), Some((name, change))) =
                            (&mut listed, self.read(cluster, &pod))
                        {
                            listed.insert(name, change);
                        }
                    }
                    Ok(Event::InitDone) => {
                        self.compare(listed.take().unwrap_or_default(), epoch).await?;
                        changes.clear();
                        again = Instant::now() + self.reconcile_interval;
                        *pause = PAUSE.0;
                        said.clear();
                    }
                    Ok(Event::Apply(pod)) => changes.extend(self.read(cluster, &pod)),
                    Ok(Event::Delete(pod)) => {
                        if let (Ok(name), Some(uid)) = (pod.shown_name().parse(), pod.uid()) {
                            changes.insert(name, Change::Gone { uid });
                        }
                    }
                    Err(error) => failed = Some(cluster.explain_watch(&error)),
                }
            }
            if !changes.is_empty() {
                self.apply(changes, epoch).await?;
                balance = balance.or_else(|| Some(Instant::now() + SETTLE));
            }
            if let Some(error) = failed {
                if error != said {
                    tracing::warn!(error, "cannot follow the pods of the cluster; trying again");
                    said = error;
                }
                sleep(*pause).await;
                *pause = (*pause * 2).min(PAUSE.1);
            }
        }
    }

    /// What a pod of the cluster means; one that makes no sense is reported.
    fn read(&self, cluster: &Cluster, pod: &ClusterPod) -> Option<(PodName, Change)> {
        match pod.read(&cluster.config) {
            Ok(Seen::Present { name, facts, warnings }) => {
                for warning in warnings {
                    tracing::warn!(pod = %name, warning);
                }
                Some((name, Change::Present(facts)))
            }
            Ok(Seen::Finished { name, uid }) => Some((name, Change::Gone { uid })),
            Err(error) => {
                tracing::warn!(
                    pod = pod.shown_name(),
                    error,
                    "a pod that makes no sense is passed over"
                );
                None
            }
        }
    }

    /// Compares the pods of the store with those of the cluster, and then the
    /// pools with their targets.
    async fn compare(
        &self,
        listed: HashMap<PodName, Change>,
        epoch: Option<u64>,
    ) -> Result<(), Halt> {
        let started = Instant::now();
        let tiers = self.store.tiers().await?;
        let known: HashMap<PodName, PodStatus> =
            self.store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let ghosts = known.iter().filter(|(name, _)| !listed.contains_key(*name));
        let ghosts =
            ghosts.map(|(name, pod)| (name.clone(), Change::Gone { uid: pod.facts.uid.clone() }));
        let mut changes: HashMap<PodName, Change> = ghosts.collect();
        for (name, change) in listed {
            if let Change::Present(facts) = &change {
                let unknown = facts.pin.as_ref().filter(|pin| tiers.resolve(pin).is_none());
                if let Some(pin) = unknown {
                    tracing::warn!(pod = %name, %pin, "the pod's label names no tier; ignored");
                }
                if known.get(&name).is_some_and(|pod| pod.facts == *facts) {
                    continue;
                }
            }
            changes.insert(name, change);
        }
        let count = changes.len();
        self.apply(changes, epoch).await?;
        self.rebalance(&tiers, epoch).await?;
        self.lifecycle.store_reached();
        tracing::debug!(
            pods = known.len(),
            changes = count,
            took_ms = started.elapsed().as_millis() as u64,
            "compared with the cluster"
        );
        Ok(())
    }

    /// Tells the store, pods by name so that those who come together get their
    /// pools in an order.
    async fn apply(
        &self,
        changes: HashMap<PodName, Change>,
        epoch: Option<u64>,
    ) -> Result<(), Halt> {
        let mut changes: Vec<_> = changes.into_iter().collect();
        changes.sort_by(|(a, _), (b, _)| a.cmp(b));
        for some in changes.chunks(AT_ONCE) {
            let told =
                join_all(some.iter().map(|(name, change)| self.tell(name, change, epoch))).await;
            for fenced in told {
                if fenced? {
                    return Err(Halt::Fenced);
                }
            }
        }
        Ok(())
    }

    /// Tells the store of one pod; answers whether we were fenced off.
    async fn tell(
        &self,
        name: &PodName,
        change: &Change,
        epoch: Option<u64>,
    ) -> Result<bool, StoreError> {
        match change {
            Change::Present(facts) => self.observe(name, facts, epoch).await,
            Change::Gone { uid } => {
                self.forget(name, uid, Departure::Now, epoch).await.map(|gone| gone.is_err())
            }
        }
    }
}
