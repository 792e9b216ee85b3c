//! Declarative configuration: every replica watches the VoiceTier and VoiceMerchant objects, and the
//! leader applies them to the store and writes their status (decision 39).

mod conditions;
mod merchants;
mod tiers;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout};

use self::{
    conditions::{Configured, Outcome},
    tiers::AppliedTiers,
};
use super::Control;
use crate::cluster::{ApiErrors, ApiFailure, Cluster, ManifestKind, ManifestList, ManifestWatch};
use fleet::manifests::Manifest;
use store::StoreError;

/// Quiet time after a change: objects that are applied together take effect together.
const QUIET_TIME: Duration = Duration::from_millis(500);
/// Limit of the delay by further changes.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Interval at which the store is compared with the objects, and their status is written.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which a replica checks whether it leads.
const LEADER_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which all merchants' documents are compared.
const MERCHANTS_INTERVAL: Duration = Duration::from_secs(60);
/// Bounds of the writes of status: per pass, and concurrent.
const MAX_STATUS_WRITES: usize = 200;
const MAX_CONCURRENT_WRITES: usize = 10;
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// The author of changes in the event log.
const AUTHOR: &str = "manifests";
/// The name of failed writes of status on the dashboard.
const STATUS_PROBLEM: &str = "status of manifests";

/// Outcomes of the last pass, by object.
type Outcomes = BTreeMap<String, Outcome>;

/// State between the passes of a leader.
#[derive(Default)]
struct Progress {
    merchants: Outcomes,
    /// When all merchants were last compared; `None` if they must be.
    merchants_checked: Option<Instant>,
    /// Errors of the writes of status.
    status_errors: ApiErrors,
}

impl Control {
    /// Watches until shutdown, and applies the objects while this replica leads.
    pub(crate) async fn run_manifests(self: Arc<Self>, cluster: Cluster) {
        let mut watch = ManifestWatch::new(&cluster, self.lifecycle.clone());
        let mut progress = Progress::default();
        let (mut due, mut changed_at): (Instant, Option<Instant>) = (Instant::now(), None);
        loop {
            tokio::select! {
                () = watch.changed() => {
                    let first = *changed_at.get_or_insert_with(Instant::now);
                    due = (Instant::now() + QUIET_TIME).min(first + MAX_DELAY);
                    progress.merchants_checked = None;
                    continue;
                }
                () = sleep_until(due) => {}
                () = self.lifecycle.stopping.cancelled() => return,
            }
            if self.metrics.leader.get() != 1 {
                progress = Progress::default();
                self.metrics.cluster.refused_manifests.set(0);
                due = Instant::now() + LEADER_CHECK_INTERVAL;
                continue;
            }
            changed_at = None;
            due = Instant::now() + CHECK_INTERVAL;
            let objects = ManifestKind::ALL.map(|kind| watch.objects(kind));
            if let Err(error) = self.apply_manifests(&cluster, objects, &mut progress).await {
                tracing::warn!(%error, "cannot apply the VoiceTier and VoiceMerchant objects; retrying");
                due = Instant::now() + LEADER_CHECK_INTERVAL * 2;
            }
        }
    }

    /// Applies all objects to the store, then writes their status.
    async fn apply_manifests(
        &self,
        cluster: &Cluster,
        [tiers, merchants]: [Option<ManifestList>; 2],
        progress: &mut Progress,
    ) -> Result<(), StoreError> {
        let namespace = &cluster.config.namespace;
        let (mut writes, mut refused) = (Vec::new(), 0);
        if let Some(tiers) = &tiers {
            let applied = self.apply_tier_objects(&tiers.manifests, namespace).await?;
            if applied == AppliedTiers::Changed {
                progress.merchants_checked = None;
            }
            let outcomes = self.tier_outcomes(&tiers.manifests, namespace, &applied);
            refused += count_refused(&outcomes);
            writes.extend(self.new_statuses(tiers, &outcomes).await?);
        }
        if let Some(merchants) = &merchants {
            let checked = progress.merchants_checked;
            if checked.is_none_or(|at| at.elapsed() >= MERCHANTS_INTERVAL) {
                let (objects, is_absent) = (&merchants.manifests, merchants.is_absent);
                progress.merchants =
                    self.apply_merchant_objects(objects, namespace, is_absent).await?;
                progress.merchants_checked = Some(Instant::now());
            }
            refused += count_refused(&progress.merchants);
            writes.extend(self.new_statuses(merchants, &progress.merchants).await?);
        }
        self.metrics.cluster.refused_manifests.set(refused as i64);
        self.write_statuses(cluster, writes, &mut progress.status_errors).await;
        Ok(())
    }

    /// Returns the statuses that differ from those of the objects.
    async fn new_statuses(
        &self,
        objects: &ManifestList,
        outcomes: &Outcomes,
    ) -> Result<Vec<(ManifestKind, String, Value)>, StoreError> {
        if objects.manifests.is_empty() {
            return Ok(Vec::new());
        }
        let fleet = self.store.status().await?;
        let status_of = |(object, before): (&Manifest, &Value)| {
            let outcome = outcomes.get(&object.name)?;
            let after = conditions::status(object, outcome, &fleet, before);
            conditions::is_new(&after, before).then(|| (objects.kind, object.name.clone(), after))
        };
        Ok(objects.manifests.iter().zip(&objects.statuses).filter_map(status_of).collect())
    }

    /// Writes the status of objects. A failure is logged, shown on the dashboard and retried.
    async fn write_statuses(
        &self,
        cluster: &Cluster,
        mut writes: Vec<(ManifestKind, String, Value)>,
        errors: &mut ApiErrors,
    ) {
        writes.truncate(MAX_STATUS_WRITES);
        for batch in writes.chunks(MAX_CONCURRENT_WRITES) {
            let written = batch.iter().map(|(kind, name, status)| async move {
                timeout(STATUS_TIMEOUT, cluster.write_status(*kind, name, status))
                    .await
                    .unwrap_or(Err(ApiFailure::Timeout))
            });
            let failed = join_all(written).await.into_iter().find_map(Result::err);
            let problem = failed
                .as_ref()
                .map(|error| format!("the status of objects is not written: {error}"));
            self.lifecycle.set_problem(STATUS_PROBLEM, problem);
            if let Some(failure) = failed {
                if let Some(report) = errors.record_failure(&failure) {
                    report.log("cannot write the status of objects; retrying");
                }
                return;
            }
            errors.clear();
        }
    }
}

/// Counts the refused objects. The valid ones that wait for them are not counted, unless no object
/// is refused: then the table as a whole is.
fn count_refused(outcomes: &Outcomes) -> usize {
    let refused = |it: &&Outcome| matches!(it, Outcome::Refused { .. });
    let pending = |it: &&Outcome| matches!(it, Outcome::Pending { .. });
    match outcomes.values().filter(refused).count() {
        0 => outcomes.values().filter(pending).count(),
        count => count,
    }
}
