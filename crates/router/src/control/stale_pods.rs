//! Drains pods that the store still allocates although this replica's own watch shows that they
//! can't serve. Only the leader writes facts about pods; this covers the time without one
//! (decision 0022).

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{Control, reconcile_list::BATCH_SIZE, ticks};
use crate::cluster::PodView;
use fleet::{Millis, PodStatus, names::PodName};
use store::StoreError;

/// How long a stale pod is drained. The drain is renewed while there is no leader.
const DRAIN_TIME: Millis = 15_000;
/// A drain with less than this time left is renewed.
const RENEW_BELOW: Millis = 9_000;
/// Interval at which all pods of the store are compared with the view while the leader is silent.
const COMPARE_INTERVAL: Duration = Duration::from_secs(4);
/// Interval at which the leader's silence is checked, and failed drains are retried.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl Control {
    /// Runs on every replica, and does nothing while this one leads.
    pub(crate) async fn drain_stale_pods(self: Arc<Self>, view: Arc<PodView>) {
        let mut ticks = ticks(CHECK_INTERVAL);
        let mut departed = HashSet::new();
        let mut compared: Option<Instant> = None;
        loop {
            tokio::select! {
                () = view.departed.notified() => {}
                _ = ticks.tick() => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
            departed.extend(view.take_departed());
            if self.metrics.leader.get() == 1 {
                departed.clear();
                continue;
            }
            let is_due = compared.is_none_or(|at| at.elapsed() >= COMPARE_INTERVAL);
            let result = if !self.lifecycle.is_leader_silent() {
                compared = None;
                self.drain_departed(&view, &mut departed).await
            } else if is_due {
                compared = Some(Instant::now());
                departed.clear();
                self.drain_all_stale(&view).await
            } else {
                self.drain_departed(&view, &mut departed).await
            };
            if let Err(error) = result {
                tracing::debug!(%error, "cannot drain stale pods; retrying");
            }
        }
    }

    /// Drains pods that the watch reported as terminating or deleted. A pod stays in
    /// `departed` until the store has answered.
    async fn drain_departed(
        &self,
        view: &PodView,
        departed: &mut HashSet<PodName>,
    ) -> Result<(), StoreError> {
        let names: Vec<PodName> = departed.iter().cloned().collect();
        for batch in names.chunks(BATCH_SIZE) {
            let pods = join_all(batch.iter().map(|name| self.store.pod(name))).await;
            for (name, pod) in batch.iter().zip(pods) {
                if let Some(pod) = pod? {
                    self.drain_if_stale(view, &pod).await?;
                }
                departed.remove(name);
            }
        }
        Ok(())
    }

    async fn drain_all_stale(&self, view: &PodView) -> Result<(), StoreError> {
        for pod in self.store.pods().await? {
            self.drain_if_stale(view, &pod).await?;
        }
        Ok(())
    }

    /// Without a leader, a drain is the weakest sufficient write: it ends no call, expires, and
    /// a new pod under the same name clears it.
    async fn drain_if_stale(&self, view: &PodView, pod: &PodStatus) -> Result<(), StoreError> {
        let Some(stale) =
            view.staleness(&pod.name).filter(|stale| stale.applies_to(&pod.facts.uid))
        else {
            return Ok(());
        };
        // With an active leader, this replica's watch may only lag behind.
        if !stale.reason.is_permanent() && !self.lifecycle.is_leader_silent() {
            return Ok(());
        }
        let is_out_of_service = pod.facts.terminating || !pod.facts.ready || pod.pool.is_none();
        let drained_until = pod.draining_until.unwrap_or(0);
        if is_out_of_service || drained_until > self.store.now() + RENEW_BELOW {
            return Ok(());
        }
        if self.store.drain(&pod.name, DRAIN_TIME).await?.is_ok() && drained_until == 0 {
            let reason = stale.reason.as_str();
            tracing::warn!(pod = %pod.name, reason, "drained a pod that the cluster shows out of service");
            self.metrics.stale_pods_drained.inc();
        }
        Ok(())
    }
}
