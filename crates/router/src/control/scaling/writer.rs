//! Writes of the replicas of a workload, and conflicts with other writers.

use std::time::Duration;

use tokio::time::Instant;

use super::pool::Step;
use crate::{
    cluster::{Replicas, ScaleError, Workloads},
    control::leader::Halt,
};
use fleet::{Claimant, capacity::ScalePlan, workload::Workload};

/// Interval at which the autoscalers of the namespace are listed.
const AUTOSCALER_INTERVAL: Duration = Duration::from_secs(15);
/// How long the router leaves a workload alone that another writer has changed; doubles with each
/// time.
const MIN_HOLD: Duration = Duration::from_secs(300);
const MAX_HOLD: Duration = Duration::from_secs(3_600);
/// How long pods may be missing before that is reported.
const MISSING_GRACE: Duration = Duration::from_secs(120);

/// The writes of one workload within a term.
#[derive(Default)]
pub(super) struct Writing {
    /// The replicas that this leader wrote, may have written, or found right: another number is
    /// that of another writer.
    written: Option<u64>,
    hold: Option<Hold>,
    /// Number of times that another writer changed the replicas.
    foreign_writes: u32,
    /// The other autoscaler of the workload, and when it was last looked for.
    autoscaler: Option<(Option<String>, Instant)>,
    missing_since: Option<Instant>,
    /// Since when the workload has pods that the router does not see.
    unknown_since: Option<Instant>,
    /// The last change that a dry run reported.
    reported: Option<(u64, u64)>,
}

struct Hold {
    until: Instant,
    reason: String,
}

impl Writing {
    /// Reads the replicas of the workload.
    pub(super) async fn read(
        &mut self,
        workloads: &Workloads,
        workload: &Workload,
    ) -> Result<Option<Replicas>, String> {
        match workloads.replicas(workload).await {
            Ok(replicas) => Ok(Some(replicas)),
            Err(ScaleError::Changed) => Err(format!("{workload} changes at the moment")),
            Err(ScaleError::Failed(reason)) => Err(format!("cannot read {workload}: {reason}")),
        }
    }

    /// Returns why the router must not write the replicas, in words.
    pub(super) async fn conflict(
        &mut self,
        step: &Step<'_>,
        workload: &Workload,
        replicas: &Option<Replicas>,
    ) -> Option<String> {
        let wanted = replicas.as_ref()?.wanted;
        if let Some(other) = self.other_autoscaler(step.workloads, workload).await {
            self.written = None;
            return Some(other);
        }
        if wanted == 0 {
            self.written = None;
            return Some(format!(
                "{workload} has 0 replicas, which the router never writes: scaling is paused until \
                 another number is set"
            ));
        }
        if let Some(written) = self.written.filter(|written| *written != wanted) {
            self.written = None;
            let hold = (MIN_HOLD * 2_u32.pow(self.foreign_writes.min(8))).min(MAX_HOLD);
            self.foreign_writes += 1;
            let minutes = hold.as_secs() / 60;
            let reason = format!(
                "another writer changed the replicas of {workload} from {written} to {wanted}; the \
                 router leaves them alone for {minutes} minutes"
            );
            tracing::warn!(pool = %step.pool, reason, "scaling is on hold");
            self.hold = Some(Hold { until: Instant::now() + hold, reason });
        }
        self.hold = self.hold.take().filter(|hold| Instant::now() < hold.until);
        self.hold.as_ref().map(|hold| hold.reason.clone())
    }

    /// Returns the other autoscaler of the workload, or why it is unknown whether there is one.
    pub(super) async fn other_autoscaler(
        &mut self,
        workloads: &Workloads,
        workload: &Workload,
    ) -> Option<String> {
        if let Some((known, at)) = &self.autoscaler
            && at.elapsed() < AUTOSCALER_INTERVAL
        {
            return known.clone();
        }
        let other = match workloads.autoscaler_of(workload).await {
            Ok(None) => None,
            Ok(Some(other)) => Some(format!(
                "{other} scales {workload} as well; delete it, or set SCALING=external"
            )),
            Err(ScaleError::Changed) => None,
            Err(ScaleError::Failed(reason)) => {
                Some(format!("cannot check whether another autoscaler scales {workload}: {reason}"))
            }
        };
        self.autoscaler = Some((other.clone(), Instant::now()));
        other
    }

    /// Writes the planned number. Returns the error of the Kubernetes API, in words.
    pub(super) async fn write(
        &mut self,
        step: &Step<'_>,
        workload: &Workload,
        replicas: &Replicas,
        planned: &ScalePlan,
        seen: usize,
    ) -> Result<Option<String>, Halt> {
        // A person sets 0 to pause the workload.
        let number = planned.number.max(1);
        if number == replicas.wanted {
            self.written = Some(number);
            return Ok(self.missing(workload, replicas, planned));
        }
        if number < replicas.wanted && replicas.pods > seen as u64 {
            // A pod that the router does not know could be removed instead of a surplus one.
            let since = *self.unknown_since.get_or_insert_with(Instant::now);
            let error = format!(
                "{workload} has {} pods, and the router sees {seen}: it does not lower the number; \
                 check POD_LABEL_SELECTOR",
                replicas.pods
            );
            return Ok((since.elapsed() >= MISSING_GRACE).then_some(error));
        }
        self.unknown_since = None;
        let by = Claimant::Leader { epoch: Some(step.writer.epoch) };
        if step.control.claim(by).await?.is_err() {
            return Err(Halt::Fenced);
        }
        self.written = Some(number);
        match step.workloads.write(workload, replicas, number).await {
            Ok(()) => {}
            // The next step reads it again, and finds another writer.
            Err(ScaleError::Changed) => {
                self.written = None;
                return Ok(None);
            }
            Err(ScaleError::Failed(reason)) => {
                self.written = None;
                step.count_error();
                let error = format!("cannot scale {workload} to {number}: {reason}");
                return Ok(Some(error));
            }
        }
        step.control.metrics.capacity.scaling.writes.inc();
        self.record(step, workload, (replicas.wanted, number), "").await?;
        Ok(None)
    }

    /// Reports a workload whose pods are not created.
    fn missing(
        &mut self,
        workload: &Workload,
        replicas: &Replicas,
        planned: &ScalePlan,
    ) -> Option<String> {
        if replicas.pods >= replicas.wanted {
            self.missing_since = None;
            return None;
        }
        let since = *self.missing_since.get_or_insert_with(Instant::now);
        (since.elapsed() >= MISSING_GRACE).then(|| {
            format!(
                "{workload} has {} of {} pods: the cluster does not create the others; check \
                 quotas and admission",
                planned.pods, replicas.wanted
            )
        })
    }

    /// Reports the change that a write would make, once.
    pub(super) async fn dry_run(
        &mut self,
        step: &Step<'_>,
        workload: &Workload,
        replicas: &Option<Replicas>,
        planned: &ScalePlan,
    ) -> Result<(), Halt> {
        let Some(replicas) = replicas else { return Ok(()) };
        let decided = step.decided.map_or(0, |decided| decided.desired);
        let change = (replicas.wanted, decided.max(1));
        if change.0 == change.1 || self.reported == Some(change) {
            return Ok(());
        }
        tracing::debug!(pool = %step.pool, number = planned.number, "dry run");
        self.reported = Some(change);
        self.record(step, workload, change, " dry_run").await
    }

    /// Logs a change, and appends it to the event log.
    async fn record(
        &self,
        step: &Step<'_>,
        workload: &Workload,
        (from, to): (u64, u64),
        suffix: &str,
    ) -> Result<(), Halt> {
        let reason = step.decided.map_or("", |decided| decided.reason.as_str());
        let detail = format!("{workload} {from} {to} {reason}{suffix}");
        let is_dry_run = !suffix.is_empty();
        tracing::info!(pool = %step.pool, %workload, from, to, reason, is_dry_run, "scaled a workload");
        let store = &step.control.store;
        match store.record_scaling(step.pool, &detail, step.writer).await? {
            Ok(()) => Ok(()),
            Err(_) => Err(Halt::Fenced),
        }
    }
}
