//! The leader's work: keeps the pods of the store true to the view of the cluster.

use std::{collections::HashMap, convert::Infallible, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep_until};

use super::{
    Control,
    leader::{Halt, PAUSE},
    pods::{AT_ONCE, CLAIM_INTERVAL},
};
use crate::cluster::{PodState, PodView};
use fleet::{Claimant, Departure, PodStatus, PodWriter, Removed, names::PodName};
use store::StoreError;

/// How long after a change of pods the pools are balanced.
const SETTLE: Duration = Duration::from_secs(1);

impl Control {
    /// Compares the store with the view, and writes what changes there. Ends only by an error.
    pub(crate) async fn follow_view(
        &self,
        view: &PodView,
        writer: PodWriter<'_>,
        pause: &mut Duration,
    ) -> Result<Infallible, Halt> {
        let (mut compared, mut is_due) = (0, true);
        let mut list_at = view.lists().1.unwrap_or_else(Instant::now) + self.reconcile_interval;
        let mut balance: Option<Instant> = None;
        let mut claim_at = Instant::now() + CLAIM_INTERVAL;
        loop {
            let (lists, listed_at) = view.lists();
            if let Some(listed_at) = listed_at.filter(|_| is_due || lists != compared) {
                self.compare(view, writer).await?;
                // A comparison with an older list proves nothing about lists.
                self.metrics.compared(listed_at.elapsed());
                if lists != compared {
                    list_at = listed_at + self.reconcile_interval;
                }
                (compared, is_due, balance, *pause) = (lists, false, None, PAUSE.0);
            } else {
                let changes = view.take_changes();
                if listed_at.is_some() && !changes.is_empty() {
                    self.apply(changes, writer).await?;
                    balance = balance.or_else(|| Some(Instant::now() + SETTLE));
                }
            }
            tokio::select! {
                () = view.changed.notified() => {}
                () = self.nudge.notified() => is_due = true,
                // Writes come only with changes. The claim records a lost origin again, and shows
                // that another origin has taken the store over.
                () = sleep_until(claim_at) => {
                    claim_at = Instant::now() + CLAIM_INTERVAL;
                    let by = Claimant::Leader { epoch: Some(writer.epoch) };
                    if self.claim(by).await?.is_err() {
                        return Err(Halt::Fenced);
                    }
                }
                () = sleep_until(list_at) => {
                    view.relist.notify_one();
                    list_at = Instant::now() + self.reconcile_interval;
                }
                () = sleep_until(balance.unwrap_or(list_at)), if balance.is_some() => {
                    balance = None;
                    let tiers = self.store.tiers().await?;
                    self.rebalance(&tiers, writer).await?;
                }
            }
        }
    }

    /// Compares the pods of the store with those of the view, and then the pools with their
    /// targets.
    async fn compare(&self, view: &PodView, writer: PodWriter<'_>) -> Result<(), Halt> {
        let started = Instant::now();
        let tiers = self.store.tiers().await?;
        let known: HashMap<PodName, PodStatus> =
            self.store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        let pods = view.all();
        let mut changes = Vec::new();
        for (name, pod) in known.iter().filter(|(name, _)| !pods.contains_key(*name)) {
            changes.push((name.clone(), PodState::Gone { uid: pod.facts.uid.clone() }));
        }
        for (name, state) in pods {
            let is_known = match &state {
                PodState::Unreadable => true,
                PodState::Gone { .. } => !known.contains_key(&name),
                PodState::Present(facts) => {
                    let unknown = facts.pin.as_ref().filter(|pin| tiers.resolve(pin).is_none());
                    if let Some(pin) = unknown {
                        tracing::warn!(pod = %name, %pin, "the pod's label names no tier; ignored");
                    }
                    known.get(&name).is_some_and(|pod| pod.facts == *facts)
                }
            };
            if !is_known {
                changes.push((name, state));
            }
        }
        let count = changes.len();
        self.apply(changes, writer).await?;
        self.rebalance(&tiers, writer).await?;
        self.lifecycle.store_reached();
        let took_ms = started.elapsed().as_millis() as u64;
        tracing::debug!(pods = known.len(), changes = count, took_ms, "compared with the cluster");
        Ok(())
    }

    /// Tells the store, pods by name so that those who come together get their
    /// pools in an order.
    async fn apply(
        &self,
        mut changes: Vec<(PodName, PodState)>,
        writer: PodWriter<'_>,
    ) -> Result<(), Halt> {
        changes.sort_by(|(a, _), (b, _)| a.cmp(b));
        for some in changes.chunks(AT_ONCE) {
            let told =
                join_all(some.iter().map(|(name, state)| self.tell(name, state, writer))).await;
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
        state: &PodState,
        writer: PodWriter<'_>,
    ) -> Result<bool, StoreError> {
        let uid = match state {
            PodState::Present(facts) => return self.observe(name, facts, writer).await,
            PodState::Unreadable => return Ok(false),
            PodState::Gone { uid } => uid,
        };
        match self.forget(name, uid, Departure::Now, writer).await? {
            Err(_) => Ok(true),
            Ok(Removed::NotThere) => {
                // The cluster has no pod of that name; the store may have one from
                // before.
                let Some(pod) = self.store.pod(name).await? else { return Ok(false) };
                let gone = self.forget(name, &pod.facts.uid, Departure::Now, writer).await?;
                Ok(gone.is_err())
            }
            Ok(Removed::Gone { .. } | Removed::Busy) => Ok(false),
        }
    }
}
