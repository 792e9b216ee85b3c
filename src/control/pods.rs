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
        fleet::{Departure, EndedCall, Fenced, Observed, PodFacts, PodStatus, Removed},
        names::PodName,
        tiers::Tiers,
    },
    followed::FollowedFile,
    store::StoreError,
};

/// How often a file of pods is looked at, and leaving pods for their last call.
const LOOK: Duration = Duration::from_secs(1);
/// Steps that are on their way to the store at one time.
pub(super) const AT_ONCE: usize = 512;

/// Where the list of pods comes from.
#[derive(Clone)]
pub enum PodFeed {
    Fixed(Vec<ListedPod>),
    File(ListFile),
    /// As many agents of our own as the tiers in force want.
    Simulated,
}

/// A file of pods, and the list it last held.
#[derive(Clone)]
pub struct ListFile {
    file: FollowedFile<Vec<ListedPod>>,
    pods: Vec<ListedPod>,
}

impl ListFile {
    pub fn open(path: PathBuf, agent_port: u16) -> Result<Self, String> {
        let read = move |text: &str| pod_list::parse(text, agent_port);
        let (pods, file) = FollowedFile::open("PODS_FILE", path, Arc::new(read))?;
        Ok(Self { file, pods })
    }

    /// Looks at the file; answers whether another list holds now.
    fn look(&mut self) -> bool {
        let Some(pods) = self.file.look() else { return false };
        self.pods = pods;
        true
    }
}

impl Control {
    /// Follows the list for as long as the process lives.
    pub(super) async fn follow(self: Arc<Self>, mut feed: PodFeed) {
        let mut due = Instant::now();
        let mut look = super::ticks(LOOK);
        loop {
            let nudged = tokio::select! {
                goes_on = self.goes_on(&mut look) => if goes_on { false } else { return },
                () = self.nudge.notified() => true,
            };
            let changed = match &mut feed {
                PodFeed::File(file) => file.look(),
                PodFeed::Fixed(_) | PodFeed::Simulated => false,
            };
            if !nudged && !changed && Instant::now() < due {
                continue;
            }
            due = Instant::now() + self.reconcile_interval;
            match self.reconcile(&feed).await {
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
    pub async fn reconcile(&self, feed: &PodFeed) -> Result<usize, StoreError> {
        let tiers = self.store.tiers().await?;
        let simulated;
        let list = match feed {
            PodFeed::Fixed(pods) | PodFeed::File(ListFile { pods, .. }) => pods,
            PodFeed::Simulated => {
                simulated = simulated_pods(&tiers);
                &simulated
            }
        };
        let known: HashMap<PodName, PodStatus> =
            self.store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let changed = list.iter().map(|pod| (&pod.name, pod.facts()));
        let changed: Vec<_> = changed
            .filter(|(name, facts)| known.get(*name).is_none_or(|pod| pod.facts != *facts))
            .collect();
        for some in changed.chunks(AT_ONCE) {
            let observed =
                join_all(some.iter().map(|(name, facts)| self.observe(name, facts, None))).await;
            observed.into_iter().collect::<Result<Vec<_>, _>>()?;
        }
        let listed: HashSet<&PodName> = list.iter().map(|pod| &pod.name).collect();
        let gone: Vec<_> = known.values().filter(|pod| !listed.contains(&pod.name)).collect();
        let mut leaving = 0;
        for some in gone.chunks(AT_ONCE) {
            for left in join_all(some.iter().map(|pod| self.leave(pod))).await {
                leaving += usize::from(!left?);
            }
        }
        self.rebalance(&tiers, None).await?;
        self.lifecycle.store_reached();
        self.metrics.compared(Duration::ZERO);
        Ok(leaving)
    }

    /// Takes note of a pod; answers whether a newer leader has fenced us off.
    pub(super) async fn observe(
        &self,
        name: &PodName,
        facts: &PodFacts,
        epoch: Option<u64>,
    ) -> Result<bool, StoreError> {
        let observed = self.store.observe_pod(name, facts, epoch).await?;
        let Ok(Observed { joined, ended, pool }) = observed else {
            return Ok(true);
        };
        if joined {
            let pool = pool.map(|pool| pool.to_string());
            tracing::info!(pod = %name, address = facts.address, pool, "pod joined");
        }
        self.ended_with(name, &ended);
        Ok(false)
    }

    fn ended_with(&self, pod: &PodName, ended: &[EndedCall]) {
        for call in ended {
            self.metrics.call_lasted(&call.source_pool, call.lasted);
            tracing::warn!(call_sid = %call.call, %pod, "a call ended with its pod");
        }
    }

    /// Forgets a pod that has left.
    pub(super) async fn forget(
        &self,
        name: &PodName,
        uid: &str,
        departure: Departure,
        epoch: Option<u64>,
    ) -> Result<Result<Removed, Fenced>, StoreError> {
        let removed = self.store.remove_pod(name, uid, departure, epoch).await?;
        match &removed {
            Ok(Removed::Busy) => tracing::debug!(pod = %name, "pod leaves when its calls end"),
            Ok(Removed::Gone { ended }) => {
                tracing::info!(pod = %name, "pod left");
                self.ended_with(name, ended);
            }
            Ok(Removed::NotThere) | Err(_) => {}
        }
        Ok(removed)
    }

    /// A pod has left the list: it takes no more calls, and is forgotten when
    /// it has none. Answers whether it is gone.
    async fn leave(&self, pod: &PodStatus) -> Result<bool, StoreError> {
        // First the mark: whether it is idle can be asked only once that stands.
        if !pod.facts.terminating {
            let facts = PodFacts { terminating: true, ..pod.facts.clone() };
            self.observe(&pod.name, &facts, None).await?;
        }
        let gone = self.forget(&pod.name, &pod.facts.uid, Departure::WhenIdle, None).await?;
        Ok(gone != Ok(Removed::Busy))
    }

    /// Moves idle pods from chain tiers above their target to those below.
    pub(super) async fn rebalance(
        &self,
        tiers: &Tiers,
        epoch: Option<u64>,
    ) -> Result<(), StoreError> {
        let stocks = self.store.stocks().await?;
        for shift in assign::rebalance(tiers, &stocks) {
            for (pod, uid) in self.store.movable_pods(&shift.from, shift.pods).await? {
                if self.store.move_pod(&pod, &uid, &shift.to, epoch).await?.is_ok() {
                    tracing::info!(%pod, from = %shift.from, to = %shift.to, "pod moved");
                }
            }
        }
        Ok(())
    }
}

/// A table may want millions of pods; a router that makes them up must still answer.
const MOST_SIMULATED: usize = 10_000;

/// No address of their own: their calls stay valid whatever our port is.
fn simulated_pods(tiers: &Tiers) -> Vec<ListedPod> {
    let numbers = 0..tiers.wanted_pods().clamp(1, MOST_SIMULATED);
    let pod = |number| ListedPod {
        name: format!("voice-agent-{number}").parse().expect("a valid pod name"),
        address: "simulated".into(),
    };
    numbers.map(pod).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::tiers::Origin;

    #[test]
    fn a_table_that_wants_millions_of_pods_gets_some_simulated_ones() {
        let count = |text| simulated_pods(&Tiers::parse(text, Origin::Settings).unwrap().0).len();
        assert_eq!(count(r#"{"gold": 0}"#), 1);
        assert_eq!(count(r#"{"gold": 3, "basic": 4}"#), 7);
        assert_eq!(count(r#"{"gold": 1000000, "basic": 1000000}"#), MOST_SIMULATED);
    }
}
