//! Keeps the pods of the store true to a list, and the pools to their targets.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    Control,
    pod_list::{self, ListedPod},
};
use crate::{
    domain::{
        assign,
        fleet::{Observed, PodFacts, PodStatus, Removed},
        names::PodName,
    },
    store::StoreError,
};

/// How often a file of pods is looked at, and leaving pods for their last call.
const LOOK: Duration = Duration::from_secs(1);
/// Steps that are on their way to the store at one time.
const AT_ONCE: usize = 512;

/// Where the list of pods comes from.
#[derive(Debug, Clone)]
pub enum PodFeed {
    Fixed(Vec<ListedPod>),
    File { path: PathBuf, agent_port: u16, pods: Vec<ListedPod> },
}

impl PodFeed {
    pub fn pods(&self) -> &[ListedPod] {
        match self {
            Self::Fixed(pods) | Self::File { pods, .. } => pods,
        }
    }

    /// Reads the file again. Answers whether the list is another one; a list
    /// that can't be read changes nothing.
    fn refresh(&mut self) -> bool {
        let Self::File { path, agent_port, pods } = self else {
            return false;
        };
        match pod_list::read(path, *agent_port) {
            Ok(read) if read != *pods => {
                tracing::info!(path = %path.display(), pods = read.len(), "the list of pods has changed");
                *pods = read;
                true
            }
            Ok(_) => false,
            Err(expected) => {
                tracing::warn!(path = %path.display(), expected, "keeping the list of pods: the file can't be read");
                false
            }
        }
    }
}

impl Control {
    /// Follows the list for as long as the process lives.
    pub(super) async fn follow(self: Arc<Self>, mut feed: PodFeed) {
        let mut due = Instant::now();
        let mut look = super::ticks(LOOK);
        while self.goes_on(&mut look).await {
            if !feed.refresh() && Instant::now() < due {
                continue;
            }
            due = Instant::now() + self.reconcile_interval;
            match self.reconcile(feed.pods()).await {
                // Someone is still on the phone with a pod that leaves.
                Ok(leaving) if leaving > 0 => due = Instant::now() + LOOK,
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot compare the pods");
                    due = Instant::now() + LOOK;
                }
            }
        }
    }

    /// Brings the store's pods in line with the list. Answers how many pods are
    /// leaving, and stay until their last call ends.
    pub async fn reconcile(&self, list: &[ListedPod]) -> Result<usize, StoreError> {
        let known: HashMap<PodName, PodStatus> =
            self.store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let changed = list.iter().map(|pod| (&pod.name, pod.facts()));
        let changed: Vec<_> = changed
            .filter(|(name, facts)| known.get(*name).is_none_or(|pod| pod.facts != *facts))
            .collect();
        for some in changed.chunks(AT_ONCE) {
            let observed =
                join_all(some.iter().map(|(name, facts)| self.observe(name, facts))).await;
            observed.into_iter().collect::<Result<(), _>>()?;
        }
        let listed: HashSet<&PodName> = list.iter().map(|pod| &pod.name).collect();
        let mut leaving = 0;
        for pod in known.values().filter(|pod| !listed.contains(&pod.name)) {
            leaving += usize::from(!self.leave(pod).await?);
        }
        self.rebalance().await?;
        Ok(leaving)
    }

    async fn observe(&self, name: &PodName, facts: &PodFacts) -> Result<(), StoreError> {
        let observed = self.store.observe_pod(name, facts, None).await?;
        let Ok(Observed { joined, ended, pool }) = observed else {
            return Ok(());
        };
        if joined {
            let pool = pool.map(|pool| pool.to_string());
            tracing::info!(pod = %name, address = facts.address, pool, "pod joined");
        }
        for call in ended {
            self.metrics.call_lasted(&call.source_pool, call.lasted);
            tracing::warn!(call_sid = %call.call, pod = %name, "a call ended with its pod");
        }
        Ok(())
    }

    /// A pod has left the list: it takes no more calls, and is forgotten when
    /// it has none. Answers whether it is gone.
    async fn leave(&self, pod: &PodStatus) -> Result<bool, StoreError> {
        if pod.calls.is_empty() {
            let removed = self.store.remove_pod(&pod.name, &pod.facts.uid, None).await?;
            if let Ok(Removed::Gone { .. }) = removed {
                tracing::info!(pod = %pod.name, "pod left");
            }
            return Ok(true);
        }
        if !pod.facts.terminating {
            let facts = PodFacts { terminating: true, ..pod.facts.clone() };
            self.observe(&pod.name, &facts).await?;
            tracing::info!(pod = %pod.name, calls = pod.calls.len(), "pod leaves when its calls end");
        }
        Ok(false)
    }

    /// Moves idle pods from chain tiers above their target to those below.
    async fn rebalance(&self) -> Result<(), StoreError> {
        let (tiers, stocks) = (self.store.tiers().await?, self.store.stocks().await?);
        for shift in assign::rebalance(&tiers, &stocks) {
            for (pod, uid) in self.store.movable_pods(&shift.from, shift.pods).await? {
                if self.store.move_pod(&pod, &uid, &shift.to, None).await?.is_ok() {
                    tracing::info!(%pod, from = %shift.from, to = %shift.to, "pod moved");
                }
            }
        }
        Ok(())
    }
}
