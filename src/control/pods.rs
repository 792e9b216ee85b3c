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
        fleet::{
            ClaimRefused, Claimant, Departure, EndedCall, Observed, PodFacts, PodStatus, PodWriter,
            Removed, WriteRefused,
        },
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

/// How often a list is claimed, so that it stays in force.
const CLAIM_INTERVAL: Duration = Duration::from_secs(10);

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

impl PodFeed {
    /// What tells this list from others. Simulated pods follow the tiers of the store, which
    /// all replicas share.
    fn digest(&self) -> String {
        match self {
            Self::Fixed(pods) | Self::File(ListFile { pods, .. }) => pod_list::digest(pods),
            Self::Simulated => "simulated".into(),
        }
    }
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

/// What became of a comparison.
pub enum Reconciled {
    /// The store's pods are those of the list; so many leave when their last call ends.
    Done { leaving: usize },
    /// The store takes the pods of another origin, or of a newer list.
    Refused(ClaimRefused),
}

impl Control {
    /// Follows the list for as long as the process lives. `is_new` says whether the list was
    /// read since it was last claimed.
    pub(super) async fn follow(self: Arc<Self>, mut feed: PodFeed, mut is_new: bool) {
        let (mut due, mut claim_due) = (Instant::now(), Instant::now() + CLAIM_INTERVAL);
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
            is_new |= changed;
            if !nudged && !changed && Instant::now() < due {
                if Instant::now() >= claim_due {
                    claim_due = Instant::now() + CLAIM_INTERVAL;
                    if !matches!(self.claim_list(&feed, is_new).await, Ok(Ok(_))) {
                        due = Instant::now();
                    }
                }
                continue;
            }
            (due, claim_due) =
                (Instant::now() + self.reconcile_interval, Instant::now() + CLAIM_INTERVAL);
            match self.reconcile(&feed, is_new).await {
                Ok(Reconciled::Done { leaving }) => {
                    is_new = false;
                    if leaving > 0 {
                        // A pod that leaves still has calls.
                        due = Instant::now() + LOOK;
                    }
                }
                Ok(Reconciled::Refused(_)) => due = claim_due,
                Err(error) => {
                    tracing::warn!(%error, "cannot compare the pods");
                    due = Instant::now() + LOOK;
                }
            }
        }
    }

    /// Claims the store for a list of pods; the epoch of its writes.
    async fn claim_list(
        &self,
        feed: &PodFeed,
        is_new: bool,
    ) -> Result<Result<u64, ClaimRefused>, StoreError> {
        self.claim(Claimant::List { digest: feed.digest(), is_new }).await
    }

    /// Brings the store's pods in line with the list.
    pub async fn reconcile(&self, feed: &PodFeed, is_new: bool) -> Result<Reconciled, StoreError> {
        let epoch = match self.claim_list(feed, is_new).await? {
            Ok(epoch) => epoch,
            Err(refused) => return Ok(Reconciled::Refused(refused)),
        };
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
        let listed: HashMap<&PodName, PodFacts> =
            list.iter().map(|pod| (&pod.name, pod.facts())).collect();
        // A name with another address is another pod. The one before leaves first, with its calls.
        let is_gone =
            |pod: &&PodStatus| listed.get(&pod.name).is_none_or(|facts| facts.uid != pod.facts.uid);
        let gone: Vec<_> = known.values().filter(is_gone).collect();
        let mut leaving = HashSet::new();
        for some in gone.chunks(AT_ONCE) {
            let left = join_all(some.iter().map(|pod| self.leave(pod, epoch))).await;
            for (pod, left) in some.iter().zip(left) {
                if !left? {
                    leaving.insert(&pod.name);
                }
            }
        }
        let is_news = |(name, facts): &(&PodName, PodFacts)| {
            known.get(*name).is_none_or(|pod| pod.facts != *facts) && !leaving.contains(*name)
        };
        let mut changed: Vec<_> =
            list.iter().map(|pod| (&pod.name, pod.facts())).filter(is_news).collect();
        changed.sort_by_key(|(name, _)| *name);
        for some in changed.chunks(AT_ONCE) {
            let observed =
                some.iter().map(|(name, facts)| self.observe(name, facts, self.writer(epoch)));
            for refused in join_all(observed).await {
                if refused? {
                    self.note_claim(Some(&ClaimRefused::Superseded));
                    return Ok(Reconciled::Refused(ClaimRefused::Superseded));
                }
            }
        }
        self.rebalance(&tiers, self.writer(epoch)).await?;
        self.lifecycle.store_reached();
        self.metrics.compared();
        Ok(Reconciled::Done { leaving: leaving.len() })
    }

    /// Takes note of a pod; answers whether the store refuses this writer.
    pub(super) async fn observe(
        &self,
        name: &PodName,
        facts: &PodFacts,
        writer: PodWriter<'_>,
    ) -> Result<bool, StoreError> {
        let observed = match self.store.observe_pod(name, facts, writer).await {
            // The keys of one pod must not keep the others from being compared.
            Err(StoreError::Failed(error)) => {
                tracing::error!(pod = %name, error, "the store refused a pod; skipping it");
                return Ok(false);
            }
            observed => observed?,
        };
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
        writer: PodWriter<'_>,
    ) -> Result<Result<Removed, WriteRefused>, StoreError> {
        let removed = match self.store.remove_pod(name, uid, departure, writer).await {
            Err(StoreError::Failed(error)) => {
                tracing::error!(pod = %name, error, "the store refused to remove a pod; skipping it");
                return Ok(Ok(Removed::NotThere));
            }
            removed => removed?,
        };
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
    async fn leave(&self, pod: &PodStatus, epoch: u64) -> Result<bool, StoreError> {
        let writer = self.writer(epoch);
        // First the mark: whether it is idle can be asked only once that stands.
        if !pod.facts.terminating {
            let facts = PodFacts { terminating: true, ..pod.facts.clone() };
            self.observe(&pod.name, &facts, writer).await?;
        }
        let gone = self.forget(&pod.name, &pod.facts.uid, Departure::WhenIdle, writer).await?;
        Ok(gone != Ok(Removed::Busy))
    }

    /// Moves idle pods from chain tiers above their target to those below.
    pub(super) async fn rebalance(
        &self,
        tiers: &Tiers,
        writer: PodWriter<'_>,
    ) -> Result<(), StoreError> {
        let stocks = self.store.stocks().await?;
        for shift in assign::rebalance(tiers, &stocks) {
            for (pod, uid) in self.store.movable_pods(&shift.from, shift.pods).await? {
                if self.store.move_pod(&pod, &uid, &shift.to, writer).await?.is_ok() {
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
