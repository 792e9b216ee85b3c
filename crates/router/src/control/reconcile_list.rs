//! Reconciles the pods of the store with a list, and the pools with their targets.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::{
    Control,
    pod_list::{self, ListedPod},
};
use crate::watched_file::WatchedFile;
use fleet::{
    ClaimRefused, Claimant, EndedCall, Observed, PodFacts, PodStatus, PodWriter, RemovalMode,
    Removed, SIMULATED_DIGEST, WriteRefused, names::PodName, rebalance, tiers::Tiers,
};
use store::{Pace, StoreError};

/// Interval at which a file of pods is read, and a leaving pod is checked for its last call.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Concurrent requests to a store that lacks most of its pods.
const MAX_CONCURRENT: usize = 512;
/// Concurrent requests to a store that serves calls: about a millisecond of its time.
pub(super) const BATCH_SIZE: usize = 32;

/// Interval at which a source of pods renews its claim on the store; a list stays in force by it.
pub(crate) const CLAIM_INTERVAL: Duration = Duration::from_secs(10);

/// The source of a list of pods.
#[derive(Clone)]
pub(crate) enum PodFeed {
    Fixed(Arc<Vec<ListedPod>>),
    File(ListFile),
    /// As many simulated agents as the tiers in force want.
    Simulated,
}

/// A file of pods, and its last valid list.
#[derive(Clone)]
pub(crate) struct ListFile {
    file: WatchedFile<Vec<ListedPod>>,
    pods: Arc<Vec<ListedPod>>,
}

impl PodFeed {
    /// Returns a hash that identifies this list. Simulated pods depend on the tiers of the store
    /// alone, which all replicas share.
    fn digest(&self) -> String {
        match self {
            Self::Fixed(pods) | Self::File(ListFile { pods, .. }) => pod_list::digest(pods),
            Self::Simulated => SIMULATED_DIGEST.into(),
        }
    }
}

impl ListFile {
    pub(crate) fn open(path: PathBuf, agent_port: u16) -> Result<Self, String> {
        let parse = move |text: &str| pod_list::parse(text, agent_port);
        let (pods, file) = WatchedFile::open("PODS_FILE", path, Arc::new(parse))?;
        Ok(Self { file, pods: Arc::new(pods) })
    }

    /// Reads the file; returns whether its list changed.
    fn reload_if_changed(&mut self) -> bool {
        let Some(pods) = self.file.reload_if_changed() else { return false };
        self.pods = Arc::new(pods);
        true
    }
}

/// Outcome of a reconciliation.
pub(crate) enum Reconciled {
    /// The store has the pods of the list; `leaving` pods remain until their last call ends.
    Done { leaving: usize },
    /// The store accepts only another origin, or a newer list.
    Refused(ClaimRefused),
}

impl Control {
    /// Reconciles the store with the list until shutdown. `is_new`: the list was read after its
    /// last claim.
    pub(crate) async fn run_list(self: Arc<Self>, mut feed: PodFeed, mut is_new: bool) {
        let (mut due, mut claim_due) = (Instant::now(), Instant::now() + CLAIM_INTERVAL);
        let mut ticks = super::ticks(POLL_INTERVAL);
        let mut logged = String::new();
        loop {
            let nudged = tokio::select! {
                is_running = self.next_tick(&mut ticks) => if is_running { false } else { return },
                () = self.reconcile_now.notified() => true,
            };
            let changed = match &mut feed {
                PodFeed::File(file) => file.reload_if_changed(),
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
            let reconciled = self.reconcile(&feed, is_new);
            match self.claiming_meanwhile(&feed, reconciled).await {
                Ok(Reconciled::Done { leaving }) => {
                    is_new = false;
                    logged.clear();
                    if leaving > 0 {
                        due = Instant::now() + POLL_INTERVAL;
                    }
                }
                Ok(Reconciled::Refused(_)) => {
                    // Another list is in force: its replicas keep the pods up to date.
                    self.lifecycle.store_reached();
                    due = claim_due;
                }
                Err(error) => {
                    let error = error.to_string();
                    if error != logged {
                        tracing::warn!(error, "cannot reconcile the pods of the store; retrying");
                        logged = error;
                    }
                    due = Instant::now() + POLL_INTERVAL;
                }
            }
        }
    }

    /// Renews the claim of the list every [`CLAIM_INTERVAL`] until `work` ends: a reconciliation of
    /// many pods takes longer than a claim lasts.
    async fn claiming_meanwhile<T>(&self, feed: &PodFeed, work: impl Future<Output = T>) -> T {
        let claims = async {
            loop {
                sleep(CLAIM_INTERVAL).await;
                // `work` reports a refused claim and an unavailable store.
                let _ = self.claim_list(feed, false).await;
            }
        };
        tokio::select! {
            outcome = work => outcome,
            never = claims => never,
        }
    }

    /// Claims the store for a list of pods; returns the fencing epoch of its writes.
    pub(crate) async fn claim_list(
        &self,
        feed: &PodFeed,
        is_new: bool,
    ) -> Result<Result<u64, ClaimRefused>, StoreError> {
        self.claim(Claimant::List { digest: feed.digest(), is_new }).await
    }

    /// Reconciles the pods of the store with the list.
    pub(crate) async fn reconcile(
        &self,
        feed: &PodFeed,
        is_new: bool,
    ) -> Result<Reconciled, StoreError> {
        match self.claim_list(feed, is_new).await? {
            Ok(epoch) => self.reconcile_claimed(feed, epoch).await,
            Err(refused) => Ok(Reconciled::Refused(refused)),
        }
    }

    /// Reconciles the pods of a store that this router has claimed. May be cancelled and repeated.
    pub(crate) async fn reconcile_claimed(
        &self,
        feed: &PodFeed,
        epoch: u64,
    ) -> Result<Reconciled, StoreError> {
        let tiers = self.store.tiers().await?;
        let list = match feed {
            PodFeed::Fixed(pods) | PodFeed::File(ListFile { pods, .. }) => pods.clone(),
            PodFeed::Simulated => Arc::new(simulated_pods(&tiers)),
        };
        let known = self.store.pods().await?;
        let (differences, known) = off_the_runtime(move || (compare(&list, &known), known)).await;
        let Differences { joining, mut replacing, leaving } = differences;
        let batch_size = batch_size(known.len(), joining.len());
        let is_unchanged = joining.is_empty() && replacing.is_empty() && leaving.is_empty();
        // New pods join first, so that the fleet is never empty.
        let mut refused = self.join(&joining, epoch, batch_size).await?;
        let staying = self.remove_all(&leaving.iter().collect::<Vec<_>>(), epoch).await?;
        replacing.retain(|pod| !staying.contains(&pod.name));
        refused |= self.join(&replacing, epoch, batch_size).await?;
        if refused {
            self.record_claim(Some(&ClaimRefused::Superseded));
            return Ok(Reconciled::Refused(ClaimRefused::Superseded));
        }
        let known = if is_unchanged { known } else { self.store.pods().await? };
        self.rebalance(tiers, known, self.writer(epoch)).await?;
        self.lifecycle.store_reached();
        self.metrics.reconciled(Duration::ZERO);
        Ok(Reconciled::Done { leaving: staying.len() })
    }

    /// Writes pods of a list to the store; returns whether the store refuses this writer.
    async fn join(
        &self,
        pods: &[ListedPod],
        epoch: u64,
        batch_size: usize,
    ) -> Result<bool, StoreError> {
        let (mut refused, mut pace) = (false, Pace::default());
        for batch in pods.chunks(batch_size) {
            let observed = batch
                .iter()
                .map(async |pod| self.observe(&pod.name, &pod.facts(), self.writer(epoch)).await);
            for outcome in pace.step(join_all(observed)).await {
                refused |= outcome?;
            }
        }
        Ok(refused)
    }

    /// Removes pods that left the list; returns the busy ones, which remain until their last call
    /// ends.
    pub(crate) async fn remove_all(
        &self,
        pods: &[&PodStatus],
        epoch: u64,
    ) -> Result<HashSet<PodName>, StoreError> {
        let (mut staying, mut pace) = (HashSet::new(), Pace::default());
        for batch in pods.chunks(BATCH_SIZE) {
            let removed = join_all(batch.iter().map(|pod| self.remove_when_idle(pod, epoch)));
            let removed = pace.step(removed).await;
            for (pod, removed) in batch.iter().zip(removed) {
                if !removed? {
                    staying.insert(pod.name.clone());
                }
            }
        }
        Ok(staying)
    }

    /// Writes the facts of a pod; returns whether the store refuses this writer.
    pub(crate) async fn observe(
        &self,
        name: &PodName,
        facts: &PodFacts,
        writer: PodWriter<'_>,
    ) -> Result<bool, StoreError> {
        let observed = match self.store.observe_pod(name, facts, writer).await {
            // Malformed keys of one pod must not block the others.
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
        self.record_ended_calls(name, &ended);
        Ok(false)
    }

    fn record_ended_calls(&self, pod: &PodName, ended: &[EndedCall]) {
        for call in ended {
            self.metrics.call_lasted(&call.source_pool, call.lasted);
            tracing::warn!(call_sid = %call.call, %pod, "call ended: its pod is gone");
        }
    }

    /// Removes a pod from the store.
    pub(crate) async fn remove(
        &self,
        name: &PodName,
        uid: &str,
        mode: RemovalMode,
        writer: PodWriter<'_>,
    ) -> Result<Result<Removed, WriteRefused>, StoreError> {
        let removed = match self.store.remove_pod(name, uid, mode, writer).await {
            Err(StoreError::Failed(error)) => {
                tracing::error!(pod = %name, error, "the store refused to remove a pod; skipping it");
                return Ok(Ok(Removed::NotFound));
            }
            removed => removed?,
        };
        match &removed {
            Ok(Removed::Busy) => tracing::debug!(pod = %name, "pod stays until its calls end"),
            Ok(Removed::Gone { ended }) => {
                tracing::info!(pod = %name, "pod left");
                self.record_ended_calls(name, ended);
            }
            Ok(Removed::NotFound) | Err(_) => {}
        }
        Ok(removed)
    }

    /// Marks a pod that left the list as terminating, and removes it once it has no call. Returns
    /// whether it is removed.
    async fn remove_when_idle(&self, pod: &PodStatus, epoch: u64) -> Result<bool, StoreError> {
        let writer = self.writer(epoch);
        // The mark comes first: without it the pod could get a call after the check.
        if !pod.facts.terminating {
            let facts = PodFacts { terminating: true, ..pod.facts.clone() };
            self.observe(&pod.name, &facts, writer).await?;
        }
        let gone = self.remove(&pod.name, &pod.facts.uid, RemovalMode::WhenIdle, writer).await?;
        Ok(gone != Ok(Removed::Busy))
    }

    /// Moves idle pods from tiers of the chain above their target to tiers below theirs.
    pub(crate) async fn rebalance(
        &self,
        tiers: Tiers,
        pods: Vec<PodStatus>,
        writer: PodWriter<'_>,
    ) -> Result<(), StoreError> {
        let moves = off_the_runtime(move || {
            let moves = rebalance(&tiers, &pods).into_iter();
            moves.map(|(pod, to)| (pod.name.clone(), pod.facts.uid.clone(), to)).collect::<Vec<_>>()
        });
        for (pod, uid, to) in moves.await {
            if self.store.move_pod(&pod, &uid, &to, writer).await?.is_ok() {
                tracing::info!(%pod, %to, "pod moved");
            }
        }
        Ok(())
    }
}

/// Differences between the pods of the store and a list.
struct Differences {
    joining: Vec<ListedPod>,
    /// Pods that join after the last call of the previous pod of their name.
    replacing: Vec<ListedPod>,
    leaving: Vec<PodStatus>,
}

/// Compares the pods of the store with a list.
fn compare(list: &[ListedPod], known: &[PodStatus]) -> Differences {
    // A name with another address is another pod. A pod adopted from the older router has no
    // address yet.
    let is_same = |known: &PodStatus, facts: &PodFacts| {
        known.facts.uid == facts.uid || known.facts.uid.is_empty()
    };
    let by_name: HashMap<&PodName, &PodStatus> = known.iter().map(|pod| (&pod.name, pod)).collect();
    let listed: HashMap<&PodName, PodFacts> =
        list.iter().map(|pod| (&pod.name, pod.facts())).collect();
    let (mut joining, mut replacing) = (Vec::new(), Vec::new());
    for pod in list {
        let facts = &listed[&pod.name];
        match by_name.get(&pod.name) {
            Some(before) if !is_same(before, facts) => replacing.push(pod.clone()),
            Some(before) if before.facts == *facts => {}
            _ => joining.push(pod.clone()),
        }
    }
    let is_leaving =
        |pod: &&PodStatus| listed.get(&pod.name).is_none_or(|facts| !is_same(pod, facts));
    let leaving = known.iter().filter(is_leaving).cloned().collect();
    Differences { joining, replacing, leaving }
}

/// Pods per step of upkeep. A store that lacks most of its pods gets them at once: calls would be
/// refused meanwhile.
pub(super) fn batch_size(known_pods: usize, changes: usize) -> usize {
    if changes > known_pods { MAX_CONCURRENT } else { BATCH_SIZE }
}

/// Runs work that grows with the number of pods on another thread: the workers of the runtime
/// serve calls meanwhile.
pub(super) async fn off_the_runtime<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Limit of simulated pods: a tier document may want millions.
const MAX_SIMULATED_PODS: usize = 10_000;

/// Simulated pods have no real address: their calls stay valid if the port changes.
fn simulated_pods(tiers: &Tiers) -> Vec<ListedPod> {
    let numbers = 0..tiers.total_target().clamp(1, MAX_SIMULATED_PODS);
    let pod = |number| ListedPod {
        name: format!("voice-agent-{number}").parse().expect("a valid pod name"),
        address: "simulated".into(),
    };
    numbers.map(pod).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fleet::tiers::DocumentSource;

    #[test]
    fn the_number_of_simulated_pods_is_limited() {
        let count =
            |text| simulated_pods(&Tiers::parse(text, DocumentSource::Settings).unwrap().0).len();
        assert_eq!(count(r#"{"gold": 0}"#), 1);
        assert_eq!(count(r#"{"gold": 3, "basic": 4}"#), 7);
        assert_eq!(count(r#"{"gold": 1000000, "basic": 1000000}"#), MAX_SIMULATED_PODS);
    }
}
