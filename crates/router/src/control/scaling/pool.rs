//! One step of a pool: plan, take pods out of service or return them, publish, write.

use std::collections::{HashMap, HashSet};

use super::{ScalingMode, failed, writer::Writing};
use crate::{
    capacity::{PoolCapacity, ScalingReport},
    cluster::{ScaleError, WorkloadPod, Workloads},
    control::{Control, leader::Halt},
};
use fleet::{
    Millis, PodStatus, PodWriter,
    capacity::{PodStage, ScaleMemory, ScalePlan, ScaledPod, ScaledPool, plan},
    names::{PodName, Pool},
    workload::{self, Workload, WorkloadKind},
};

/// How long the drain of a surplus pod lasts without renewal while no visible number removes the
/// pod: it returns by itself if no leader follows.
const DRAIN_TIME: Millis = 60_000;
/// The same for a pod that a published or written number removes. The number stands for as long as
/// no leader replaces it, and the workload may act on it late: the next leader returns the pod.
const EXPOSED_DRAIN_TIME: Millis = 3_600_000;

/// The state of a pool between two steps, within a term.
pub(super) struct PoolScaler {
    pub(super) workload: Workload,
    memory: ScaleMemory,
    published: Option<u64>,
    pub(super) writing: Writing,
}

impl PoolScaler {
    pub(super) fn new(workload: Workload, elapsed: Millis, settle_time: Millis) -> Self {
        let memory = ScaleMemory::new(elapsed, settle_time);
        Self { workload, memory, published: None, writing: Writing::default() }
    }
}

/// The inputs of one step.
pub(super) struct Step<'a> {
    pub(super) control: &'a Control,
    pub(super) workloads: &'a Workloads,
    pub(super) mode: ScalingMode,
    pub(super) pool: &'a Pool,
    pub(super) writer: PodWriter<'a>,
    /// The time by the store's clock.
    pub(super) now: Millis,
    /// The time by the monotonic clock of this process.
    pub(super) elapsed: Millis,
    /// The decision of the policy; `None` if it is too old.
    pub(super) decided: Option<&'a PoolCapacity>,
}

impl Step<'_> {
    /// Returns the floor of the published number, and the report.
    pub(super) async fn run(
        &self,
        scaler: &mut PoolScaler,
        seen: &[WorkloadPod],
        known: &HashMap<PodName, PodStatus>,
    ) -> Result<(u64, ScalingReport), Halt> {
        let is_writer = matches!(self.mode, ScalingMode::On | ScalingMode::DryRun);
        let read = match is_writer {
            true => scaler.writing.read(self.workloads, &scaler.workload).await,
            false => Ok(None),
        };
        let first_ordinal = match &read {
            Ok(Some(replicas)) => replicas.first_ordinal,
            _ => 0,
        };
        let pods: Vec<ScaledPod> = seen
            .iter()
            .map(|pod| self.scaled_pod(pod, known.get(&pod.name), first_ordinal))
            .collect();
        let active = pods.iter().filter(|pod| pod.stage != PodStage::Terminating).count() as u64;
        // A step that ends early leaves the last number in place.
        self.renew_exposed(scaler, &pods, known).await?;
        let mut report = ScalingReport { mode: self.mode.as_str().into(), ..Default::default() };
        let replicas = match read {
            Ok(replicas) => replicas,
            Err(error) => {
                self.count_error();
                return Ok((active, ScalingReport { mode: report.mode, ..failed(error) }));
            }
        };
        report.replicas = replicas.as_ref().map(|replicas| replicas.wanted);
        let Some(decided) = self.decided else { return Ok((active, report)) };
        let PoolScaler { workload, writing, .. } = &mut *scaler;
        report.conflict = match self.mode {
            ScalingMode::On => writing.conflict(self, workload, &replicas).await,
            // A dry run writes nothing, so that no change of the replicas is a conflict.
            ScalingMode::DryRun => writing.other_autoscaler(self.workloads, workload).await,
            ScalingMode::Off | ScalingMode::External => None,
        };
        let serving = pods.iter().filter(|pod| is_serving(pod)).count() as u64;
        // A workload that cannot be scaled keeps its pods in service.
        let desired = match report.conflict {
            Some(_) => decided.desired.max(serving),
            None => decided.desired,
        };
        let pool = ScaledPool {
            kind: scaler.workload.kind,
            desired,
            replicas: replicas.as_ref().map(|replicas| replicas.wanted),
            published: scaler.published.unwrap_or(decided.published),
            pods: &pods,
            is_rolling_out: is_rolling_out(&scaler.workload, seen),
        };
        let settle_time = self.mode.settle_time();
        let planned = plan(&pool, &mut scaler.memory, self.elapsed, settle_time);
        match self.mode {
            ScalingMode::Off => {
                self.return_surplus(scaler, active, &pods, known).await?;
                return Ok((active, report));
            }
            ScalingMode::DryRun => {
                self.return_surplus(scaler, active, &pods, known).await?;
                scaler.writing.dry_run(self, &scaler.workload, &replicas, &planned).await?;
                return Ok((active.max(planned.number), report));
            }
            ScalingMode::External | ScalingMode::On => {}
        }
        scaler.memory.published(planned.number, planned.pods, self.elapsed, settle_time);
        scaler.published = Some(planned.number);
        report.surplus = pods.iter().filter(|pod| pod.stage == PodStage::Surplus).count() as u64;
        // Before the number is visible.
        self.renew_exposed(scaler, &pods, known).await?;
        report.error = self.carry_out(&planned, &pods, known).await?;
        if let (Some(replicas), None) = (&replicas, &report.conflict) {
            let (workload, writing) = (&scaler.workload, &mut scaler.writing);
            let error = writing.write(self, workload, replicas, &planned, seen.len()).await?;
            report.error = error.or(report.error);
        }
        Ok((planned.number, report))
    }

    /// A pod of the view with its calls and drains of the store.
    fn scaled_pod(
        &self,
        seen: &WorkloadPod,
        known: Option<&PodStatus>,
        first_ordinal: u32,
    ) -> ScaledPod {
        let known = known.filter(|pod| pod.facts.uid == seen.facts.uid);
        let stage = match known {
            _ if seen.facts.terminating => PodStage::Terminating,
            Some(pod) if pod.is_surplus => PodStage::Surplus,
            Some(pod) if pod.draining_until.is_some() => PodStage::OutOfService,
            Some(pod) if pod.quarantined_until.is_some() => PodStage::OutOfService,
            Some(pod) if pod.is_serving() && pod.pool.as_ref() == Some(self.pool) => {
                PodStage::InService
            }
            // Serves another pool until its calls have ended.
            Some(pod) if pod.is_serving() && !pod.calls.is_empty() => PodStage::OutOfService,
            _ => PodStage::Starting,
        };
        let ordinal = workload::ordinal(seen.name.as_str());
        let created = seen.details.created.and_then(|it| u64::try_from(it).ok()).unwrap_or(0);
        ScaledPod {
            name: seen.name.clone(),
            stage,
            is_ready: seen.facts.ready,
            calls: known.map_or(0, |pod| pod.calls.len()),
            ordinal: ordinal.map(|ordinal| ordinal.saturating_sub(first_ordinal)),
            created_at: created * 1_000,
            is_marked: seen.details.is_marked,
        }
    }

    /// Extends the drains of surplus pods that a number removes, in the modes that have them.
    async fn renew_exposed(
        &self,
        scaler: &PoolScaler,
        pods: &[ScaledPod],
        known: &HashMap<PodName, PodStatus>,
    ) -> Result<(), Halt> {
        if matches!(self.mode, ScalingMode::Off | ScalingMode::DryRun) {
            return Ok(());
        }
        let (kind, memory) = (scaler.workload.kind, &scaler.memory);
        let surplus = pods.iter().filter(|pod| pod.stage == PodStage::Surplus);
        for pod in surplus.filter(|pod| memory.is_exposed(kind, pod, self.elapsed)) {
            self.renew(&pod.name, known, EXPOSED_DRAIN_TIME).await?;
        }
        Ok(())
    }

    /// Returns surplus pods that a leader with another mode left, once its number has settled.
    async fn return_surplus(
        &self,
        scaler: &mut PoolScaler,
        active: u64,
        pods: &[ScaledPod],
        known: &HashMap<PodName, PodStatus>,
    ) -> Result<(), Halt> {
        scaler.memory.published(active, active, self.elapsed, self.mode.settle_time());
        if scaler.memory.has_settled(self.elapsed) {
            for pod in pods.iter().filter(|pod| pod.stage == PodStage::Surplus) {
                self.set_surplus(&pod.name, known, None).await?;
            }
        }
        Ok(())
    }

    /// Changes pods as planned, and renews the drains of surplus pods. Returns an error of the
    /// Kubernetes API, which does not stop the rest.
    async fn carry_out(
        &self,
        planned: &ScalePlan,
        pods: &[ScaledPod],
        known: &HashMap<PodName, PodStatus>,
    ) -> Result<Option<String>, Halt> {
        let mut error = None;
        let marked: HashSet<&PodName> =
            pods.iter().filter(|pod| pod.is_marked).map(|pod| &pod.name).collect();
        for name in &planned.unmark {
            self.mark(name, known, false, &mut error).await;
        }
        for name in &planned.restore {
            let is_clear =
                !marked.contains(name) || self.mark(name, known, false, &mut error).await;
            if is_clear {
                self.set_surplus(name, known, None).await?;
            }
        }
        for name in &planned.retire {
            self.set_surplus(name, known, Some(DRAIN_TIME)).await?;
        }
        for name in &planned.mark {
            // A marked pod is the first that a lower number removes.
            self.renew(name, known, EXPOSED_DRAIN_TIME).await?;
            self.mark(name, known, true, &mut error).await;
        }
        for pod in pods.iter().filter(|pod| pod.stage == PodStage::Surplus) {
            if !planned.restore.contains(&pod.name) {
                self.renew(&pod.name, known, DRAIN_TIME).await?;
            }
        }
        Ok(error)
    }

    /// Extends the drain of a surplus pod once a third of `time` has passed.
    async fn renew(
        &self,
        name: &PodName,
        known: &HashMap<PodName, PodStatus>,
        time: Millis,
    ) -> Result<(), Halt> {
        let until = known.get(name).and_then(|pod| pod.draining_until).unwrap_or(0);
        match until < self.now + time / 3 * 2 {
            true => self.set_surplus(name, known, Some(time)).await,
            false => Ok(()),
        }
    }

    /// Sets or removes the deletion cost of a surplus pod; returns whether it has.
    async fn mark(
        &self,
        name: &PodName,
        known: &HashMap<PodName, PodStatus>,
        is_surplus: bool,
        error: &mut Option<String>,
    ) -> bool {
        let Some(pod) = known.get(name) else { return false };
        match self.workloads.mark(name.as_str(), &pod.facts.uid, is_surplus).await {
            Ok(()) => true,
            // Another pod has the name by now.
            Err(ScaleError::Changed) => false,
            Err(ScaleError::Failed(reason)) => {
                self.count_error();
                *error = Some(format!("cannot annotate the pod {name}: {reason}"));
                false
            }
        }
    }

    async fn set_surplus(
        &self,
        name: &PodName,
        known: &HashMap<PodName, PodStatus>,
        ttl: Option<Millis>,
    ) -> Result<(), Halt> {
        let Some(pod) = known.get(name) else { return Ok(()) };
        let store = &self.control.store;
        let changed = store.set_surplus(name, &pod.facts.uid, ttl, self.writer).await?;
        changed.map(drop).map_err(|_| Halt::Fenced)
    }

    pub(super) fn count_error(&self) {
        self.control.metrics.capacity.scaling.errors.inc();
    }
}

fn is_serving(pod: &ScaledPod) -> bool {
    matches!(pod.stage, PodStage::InService | PodStage::Starting)
}

/// Whether a Deployment replaces its pods: they have two revisions.
fn is_rolling_out(workload: &Workload, seen: &[WorkloadPod]) -> bool {
    let present = seen.iter().filter(|pod| !pod.facts.terminating);
    let revisions: HashSet<&Option<String>> = present.map(|pod| &pod.details.revision).collect();
    workload.kind == WorkloadKind::Deployment && revisions.len() > 1
}
