//! The claim of this router on the pods of the store: one origin, and one list at a time.

use std::sync::atomic::Ordering;

use tokio::time::{sleep, timeout};

use super::Control;
use crate::cluster::{Cluster, LeaderConfig};
use fleet::{Claim, ClaimRefused, Claimant, PodOrigin, PodWriter, WriteRefused};
use store::StoreError;

impl Control {
    /// Claims the pods of the store; returns the fencing epoch of this router's writes.
    pub(crate) async fn claim(
        &self,
        by: Claimant,
    ) -> Result<Result<u64, ClaimRefused>, StoreError> {
        let force = self.force_origin.load(Ordering::Relaxed);
        let claim = Claim { origin: self.origin().clone(), by, force };
        let claimed = self.store.claim_pods(&claim).await?;
        if let Ok(epoch) = claimed {
            self.claimed_epoch.store(epoch, Ordering::Relaxed);
            // Only the first claim takes over: later ones must not compete with another router.
            self.force_origin.store(false, Ordering::Relaxed);
        }
        self.record_claim(claimed.as_ref().err());
        Ok(claimed)
    }

    /// The origin of this router's pods. Claims and writes start once it is known.
    fn origin(&self) -> &PodOrigin {
        self.origin.get().expect("the origin is known before pods are claimed")
    }

    /// Identifies the cluster if start-up could not. Meanwhile calls are served, and no pods are
    /// written.
    pub(crate) async fn identify(&self, cluster: &Cluster, config: &LeaderConfig) {
        if config.enabled {
            self.begin_election(config);
        }
        while self.origin.get().is_none() {
            if self.store.tiers().await.is_ok() {
                self.lifecycle.store_reached();
            }
            if let Ok(Ok(uid)) = timeout(config.renew_deadline, cluster.namespace_uid()).await {
                tracing::info!(uid, "identified the cluster by the UID of its namespace");
                let _ = self.origin.set(cluster.origin(uid));
                return;
            }
            tokio::select! {
                () = sleep(config.retry_period) => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
        }
    }

    pub(crate) fn writer(&self, epoch: u64) -> PodWriter<'_> {
        PodWriter { origin: self.origin(), epoch }
    }

    /// Records whether the store accepts this router's pods, and logs a change.
    pub(crate) fn record_claim(&self, refused: Option<&ClaimRefused>) {
        let is_foreign = matches!(refused, Some(ClaimRefused::Write(WriteRefused::Foreign { .. })));
        self.lifecycle.is_foreign.store(is_foreign, Ordering::Relaxed);
        let reason = refused.map(|refused| self.explain(refused));
        self.metrics.pods_refused.set(reason.is_some().into());
        if !self.lifecycle.set_pods_refused(reason.clone()) {
            return;
        }
        match reason {
            Some(reason) => tracing::error!(reason, "the store refuses this router's pods"),
            None => tracing::info!("the store accepts this router's pods"),
        }
    }

    /// Explains a refused claim to an operator.
    pub(crate) fn explain(&self, refused: &ClaimRefused) -> String {
        match refused {
            ClaimRefused::Write(WriteRefused::Foreign { owner }) => {
                explain_foreign(owner, &self.origin_key, self.origin())
            }
            ClaimRefused::Write(WriteRefused::Fenced { .. }) | ClaimRefused::Superseded => {
                "another replica started later with a different list of pods, which is in force; \
                 give all replicas the same PODS or PODS_FILE"
                    .into()
            }
        }
    }
}

/// Explains to an operator that the store has another origin; `key` names where it is recorded.
pub(crate) fn explain_foreign(owner: &str, key: &str, origin: &PodOrigin) -> String {
    format!(
        "the store holds the pods of origin {owner}{key}, and the origin of this router's pods is {origin}; \
         use another store (REDIS_URL, KEY_PREFIX or DATA_DIR), or take its pods over with \
         --force-pod-origin on (FORCE_POD_ORIGIN=on)"
    )
}
