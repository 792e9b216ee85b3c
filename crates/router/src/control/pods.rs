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
use crate::watched_file::FollowedFile;
use fleet::{
    ClaimRefused, Claimant, Departure, EndedCall, Observed, PodFacts, PodStatus, PodWriter,
    Removed, SIMULATED, WriteRefused, names::PodName, rebalance, tiers::Tiers,
};
use store::StoreError;

/// How often a file of pods is looked at, and leaving pods for their last call.
const LOOK: Duration = Duration::from_secs(1);
/// Steps that are on their way to the store at one time.
pub(crate) const AT_ONCE: usize = 512;

/// How often a source of pods claims the store again: a list stays in force by it.
pub(crate) const CLAIM_INTERVAL: Duration = Duration::from_secs(10);

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
            Self::Simulated => SIMULATED.into(),
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
    pub(crate) async fn follow(self: Arc<Self>, mut feed: PodFeed, mut is_new: bool) {
        let (mut due, mut claim_due) = (Instant::now(), Instant::now() + CLAIM_INTERVAL);
        let mut look = super::ticks(LOOK);
        let mut said = String::new();
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
                    said.clear();
                    if leaving > 0 {
                        // A pod that leaves still has calls.
                        due = Instant::now() + LOOK;
                    }
                }
                Ok(Reconciled::Refused(_)) => due = claim_due,
                Err(error) => {
                    let error = error.to_string();
                    if error != said {
                        tracing::warn!(error, "cannot compare the pods");
                        said = error;
                    }
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
        // A name with another address is another pod, which joins when the one before has left
        // with its calls. (A pod that was adopted from the older router has no address yet.)
        let is_same = |known: &PodStatus, facts: &PodFacts| {
            known.facts.uid == facts.uid || known.facts.uid.is_empty()
        };
        let listed: HashMap<&PodName, PodFacts> =
            list.iter().map(|pod| (&pod.name, pod.facts())).collect();
        let (mut joining, mut replacing) = (Vec::new(), Vec::new());
        for pod in list {
            match known.get(&pod.name) {
                Some(before) if !is_same(before, &listed[&pod.name]) => replacing.push(&pod.name),
                Some(before) if before.facts == listed[&pod.name] => {}
                _ => joining.push(&pod.name),
            }
        }
        let leaving: Vec<_> = known
            .values()
            .filter(|pod| listed.get(&pod.name).is_none_or(|facts| !is_same(pod, facts)))
            .collect();
        // First new pods join: there must be no moment without any.
        let mut refused = self.join(&joining, &listed, epoch).await?;
        let staying = self.leave_all(&leaving, epoch).await?;
        replacing.retain(|name| !staying.contains(*name));
        refused |= self.join(&replacing, &listed, epoch).await?;
        if refused {
            self.note_claim(Some(&ClaimRefused::Superseded));
            return Ok(Reconciled::Refused(ClaimRefused::Superseded));
        }
        self.rebalance(&tiers, self.writer(epoch)).await?;
        self.lifecycle.store_reached();
        self.metrics.compared(Duration::ZERO);
        Ok(Reconciled::Done { leaving: staying.len() })
    }

    /// Notes pods of a list; answers whether the store refuses this writer.
    async fn join(
        &self,
        names: &[&PodName],
        listed: &HashMap<&PodName, PodFacts>,
        epoch: u64,
    ) -> Result<bool, StoreError> {
        let mut refused = false;
        for some in names.chunks(AT_ONCE) {
            let observed =
                some.iter().map(|name| self.observe(name, &listed[*name], self.writer(epoch)));
            for outcome in join_all(observed).await {
                refused |= outcome?;
            }
        }
        Ok(refused)
    }

    /// Takes pods that left the list out; those that stay until their last call ends.
    async fn leave_all(
        &self,
        pods: &[&PodStatus],
        epoch: u64,
    ) -> Result<HashSet<PodName>, StoreError> {
        let mut staying = HashSet::new();
        for some in pods.chunks(AT_ONCE) {
            let left = join_all(some.iter().map(|pod| self.leave(pod, epoch))).await;
            for (pod, left) in some.iter().zip(left) {
                if !left? {
                    staying.insert(pod.name.clone());
                }
            }
        }
        Ok(staying)
    }

    /// Takes note of a pod; answers whether the store refuses this writer.
    pub(crate) async fn observe(
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
    pub(crate) async fn forget(
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
    pub(crate) async fn rebalance(
        &self,
        tiers: &Tiers,
        writer: PodWriter<'_>,
    ) -> Result<(), StoreError> {
        let pods = self.store.pods().await?;
        for (PodStatus { name: pod, facts, .. }, to) in rebalance(tiers, &pods) {
            if self.store.move_pod(pod, &facts.uid, &to, writer).await?.is_ok() {
                tracing::info!(%pod, %to, "pod moved");
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
    use fleet::tiers::Origin;

    #[test]
    fn a_table_that_wants_millions_of_pods_gets_some_simulated_ones() {
        let count = |text| simulated_pods(&Tiers::parse(text, Origin::Settings).unwrap().0).len();
        assert_eq!(count(r#"{"gold": 0}"#), 1);
        assert_eq!(count(r#"{"gold": 3, "basic": 4}"#), 7);
        assert_eq!(count(r#"{"gold": 1000000, "basic": 1000000}"#), MOST_SIMULATED);
    }
}
