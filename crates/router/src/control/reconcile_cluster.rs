//! The leader's work: reconciles the pods of the store with the view of the cluster.

use std::{collections::HashMap, convert::Infallible, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep_until};

use super::{
    Control,
    leader::{Halt, MIN_BACKOFF},
    reconcile_list::{BATCH_SIZE, CLAIM_INTERVAL, batch_size, off_the_runtime},
    settling::Settling,
};
use crate::cluster::{PodState, PodView};
use fleet::{Claimant, PodStatus, PodWriter, RemovalMode, Removed, names::PodName};
use store::{Pace, StoreError};

/// Delay between a change of pods and the rebalancing of pools.
const REBALANCE_DELAY: Duration = Duration::from_secs(1);
/// Pods that are compared before calls have their turn on this thread.
const PODS_PER_TURN: usize = 200;

impl Control {
    /// Reconciles the store with the view, and applies its changes. Ends only by an error.
    pub(crate) async fn reconcile_view(
        &self,
        view: &PodView,
        writer: PodWriter<'_>,
        backoff: &mut Duration,
    ) -> Result<Infallible, Halt> {
        let (mut reconciled, mut is_due) = (0, true);
        let mut list_at = view.lists().1.unwrap_or_else(Instant::now) + self.reconcile_interval;
        let mut rebalance_at: Option<Instant> = None;
        let mut claim_at = Instant::now() + CLAIM_INTERVAL;
        let mut settling = Settling::new(self.settle_time);
        loop {
            let (lists, listed_at) = view.lists();
            if let Some(listed_at) = listed_at.filter(|_| is_due || lists != reconciled) {
                self.reconcile_all(view, writer, &mut settling).await?;
                // The metric is the age of the list, not of the comparison.
                self.metrics.reconciled(listed_at.elapsed());
                if lists != reconciled {
                    list_at = listed_at + self.reconcile_interval;
                }
                (reconciled, is_due, rebalance_at, *backoff) = (lists, false, None, MIN_BACKOFF);
            } else {
                let changes = view.take_changes();
                if listed_at.is_some() && !changes.is_empty() {
                    let admit = |(name, state)| admitted(&mut settling, view, name, state);
                    let changes = changes.into_iter().map(admit).collect();
                    self.apply(changes, writer, BATCH_SIZE).await?;
                    rebalance_at = rebalance_at.or_else(|| Some(Instant::now() + REBALANCE_DELAY));
                }
            }
            let settled_at = settling.next_due();
            tokio::select! {
                () = view.changed.notified() => {}
                () = sleep_until(settled_at.unwrap_or(list_at)), if settled_at.is_some() => {
                    view.touch(settling.take_due(Instant::now()));
                }
                () = self.reconcile_now.notified() => is_due = true,
                // Without changes there are no writes. The claim records a lost origin again, and
                // detects that another origin took the store over.
                () = sleep_until(claim_at) => {
                    claim_at = Instant::now() + CLAIM_INTERVAL;
                    let by = Claimant::Leader { epoch: Some(writer.epoch) };
                    if self.claim(by).await?.is_err() {
                        return Err(Halt::Fenced);
                    }
                }
                () = sleep_until(list_at) => {
                    view.request_lists();
                    list_at = Instant::now() + self.reconcile_interval;
                }
                () = sleep_until(rebalance_at.unwrap_or(list_at)), if rebalance_at.is_some() => {
                    rebalance_at = None;
                    let (tiers, pods) = (self.store.tiers().await?, self.store.pods().await?);
                    self.rebalance(tiers, pods, writer).await?;
                }
            }
        }
    }

    /// Reconciles the pods of the store with the view, then the pools with their targets.
    async fn reconcile_all(
        &self,
        view: &PodView,
        writer: PodWriter<'_>,
        settling: &mut Settling,
    ) -> Result<(), Halt> {
        let started = Instant::now();
        let tiers = self.store.tiers().await?;
        view.set_workloads(&tiers);
        let known = self.store.pods().await?;
        let pod_count = known.len();
        let by_name = |pod: PodStatus| (pod.name.clone(), pod);
        let known: HashMap<PodName, PodStatus> =
            off_the_runtime(move || known.into_iter().map(by_name).collect()).await;
        let (is_complete, pods) = (view.is_complete(), view.all());
        let mut changes = Vec::new();
        let missing: Vec<&PodStatus> =
            known.values().filter(|pod| !pods.contains_key(&pod.name)).collect();
        let missing_count = missing.len();
        if is_complete {
            let gone = |pod: &&PodStatus| {
                (pod.name.clone(), PodState::Gone { uid: pod.facts.uid.clone() })
            };
            changes.extend(missing.iter().map(gone));
        } else {
            // They may be in a namespace that can't be listed: their calls go on.
            self.remove_all(&missing, writer.epoch).await?;
        }
        known.iter().for_each(|(name, pod)| settling.trust(name, &pod.facts));
        for (position, (name, state)) in pods.into_iter().enumerate() {
            if position % PODS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
            let (name, state) = admitted(settling, view, name, state);
            let is_known = match &state {
                PodState::Unreadable => true,
                PodState::Gone { .. } => !known.contains_key(&name),
                PodState::Present(facts) => {
                    let unknown = facts.pin.as_ref().filter(|pin| tiers.resolve(pin).is_none());
                    if let Some(pin) = unknown {
                        tracing::warn!(pod = %name, %pin, "ignoring the pod's label: it names an unknown tier");
                    }
                    known.get(&name).is_some_and(|pod| pod.facts == *facts)
                }
            };
            if !is_known {
                changes.push((name, state));
            }
        }
        let count = changes.len();
        self.apply(changes, writer, batch_size(pod_count, count)).await?;
        let pods = if count == 0 && missing_count == 0 {
            off_the_runtime(move || sorted(known)).await
        } else {
            self.store.pods().await?
        };
        self.rebalance(tiers, pods, writer).await?;
        self.lifecycle.store_reached();
        let took_ms = started.elapsed().as_millis() as u64;
        tracing::debug!(
            pods = pod_count,
            changes = count,
            took_ms,
            "reconciled the store with the cluster"
        );
        Ok(())
    }

    /// Writes changes to the store, sorted by name so that pods that join together get their
    /// pools in a fixed order.
    async fn apply(
        &self,
        mut changes: Vec<(PodName, PodState)>,
        writer: PodWriter<'_>,
        batch_size: usize,
    ) -> Result<(), Halt> {
        changes.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut pace = Pace::default();
        for batch in changes.chunks(batch_size) {
            let writes = batch.iter().map(|(name, state)| self.write_pod(name, state, writer));
            for fenced in pace.step(join_all(writes)).await {
                if fenced? {
                    return Err(Halt::Fenced);
                }
            }
        }
        Ok(())
    }

    /// Writes one pod to the store; returns whether this writer is fenced.
    async fn write_pod(
        &self,
        name: &PodName,
        state: &PodState,
        writer: PodWriter<'_>,
    ) -> Result<bool, StoreError> {
        let uid = match state {
            PodState::Present(facts) => return self.observe(name, facts, writer).await,
            PodState::Unreadable => return Ok(false),
            PodState::Gone { uid } => uid,
        };
        match self.remove(name, uid, RemovalMode::Immediate, writer).await? {
            Err(_) => Ok(true),
            Ok(Removed::NotFound) => {
                // The cluster has no pod of that name; the store may have an older one.
                let Some(pod) = self.store.pod(name).await? else { return Ok(false) };
                let gone =
                    self.remove(name, &pod.facts.uid, RemovalMode::Immediate, writer).await?;
                Ok(gone.is_err())
            }
            Ok(Removed::Gone { .. } | Removed::Busy) => Ok(false),
        }
    }
}

/// Pods by name, so that rebalancing moves the same ones each time.
fn sorted(pods: HashMap<PodName, PodStatus>) -> Vec<PodStatus> {
    let mut pods: Vec<PodStatus> = pods.into_values().collect();
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    pods
}

/// Returns the state of a pod to write: not ready while it settles.
fn admitted(
    settling: &mut Settling,
    view: &PodView,
    name: PodName,
    state: PodState,
) -> (PodName, PodState) {
    let ready_since = view.ready_since(&name);
    let state = settling.admit(&name, state, ready_since, Instant::now());
    (name, state)
}
