//! Scale-down without cut calls: which pods of a workload leave service, which return, and the
//! number of pods that may be published.
//!
//! A lower number is published only after the pods that it removes are out of service and idle.
//! [`plan`] decides about one pool from its pods; the caller carries the plan out and repeats it.

use std::cmp::Reverse;

use crate::{Millis, names::PodName, workload::WorkloadKind};

/// The state of a pod of a workload, as the scaler distinguishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodStage {
    /// Not ready yet, or not ready any more.
    Starting,
    InService,
    /// The scaler has taken it out of service.
    Surplus,
    /// Out of service for another reason: a requested drain, a quarantine.
    OutOfService,
    /// Being deleted: no longer counted by the workload.
    Terminating,
}

/// A pod of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaledPod {
    pub name: PodName,
    pub stage: PodStage,
    pub is_ready: bool,
    /// Live calls.
    pub calls: usize,
    /// Its position in a StatefulSet, from 0.
    pub ordinal: Option<u32>,
    /// Time of its creation; 0 if unknown.
    pub created_at: Millis,
    /// Its deletion cost makes a Deployment remove it before pods in service.
    pub is_marked: bool,
}

/// A pool whose pods a workload runs.
#[derive(Debug, Clone)]
pub struct ScaledPool<'a> {
    pub kind: WorkloadKind,
    /// Ready and starting pods that the policy asks for.
    pub desired: u64,
    /// The replicas of the workload, if they can be read. To keep them removes no pod.
    pub replicas: Option<u64>,
    /// The number published last.
    pub published: u64,
    pub pods: &'a [ScaledPod],
    /// Pods of two revisions exist: the workload replaces them, and removes pods of either.
    pub is_rolling_out: bool,
}

/// The memory of the scaler between two plans of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleMemory {
    /// Until then a workload may still act on a number that removes surplus pods: marked pods of a
    /// Deployment, and ordinals of a StatefulSet from `removed_from`.
    settles_at: Millis,
    /// The last number removes pods.
    is_low: bool,
    /// The lowest number published since the last time that nothing had to settle.
    removed_from: u64,
}

impl ScaleMemory {
    /// The memory of a new leader: the former one may have published any number just before.
    pub fn new(now: Millis, settle_time: Millis) -> Self {
        Self { settles_at: now.saturating_add(settle_time), is_low: true, removed_from: 0 }
    }

    /// Records the number that was published or written for `pods` pods, which remain.
    pub fn published(&mut self, number: u64, pods: u64, now: Millis, settle_time: Millis) {
        let was_low = self.is_low;
        self.is_low = number < pods;
        if self.is_low {
            let is_first = !was_low && now >= self.settles_at;
            self.removed_from = if is_first { number } else { self.removed_from.min(number) };
        }
        // The former number could be read until now.
        if was_low || self.is_low {
            self.settles_at = now.saturating_add(settle_time);
        }
    }

    /// Whether a number that was published or written may still remove a surplus pod. A mark
    /// stays until the pod returns.
    pub fn is_exposed(&self, kind: WorkloadKind, pod: &ScaledPod, now: Millis) -> bool {
        match kind {
            WorkloadKind::Deployment => pod.is_marked,
            WorkloadKind::StatefulSet => {
                let ordinal = u64::from(pod.ordinal.unwrap_or(u32::MAX));
                !self.has_settled(now) && ordinal >= self.removed_from
            }
        }
    }

    /// Whether no number that removes pods can be acted on any more.
    pub fn has_settled(&self, now: Millis) -> bool {
        !self.is_low && now >= self.settles_at
    }

    /// Bounds the time after a clock step backwards.
    fn bound(&mut self, now: Millis, settle_time: Millis) {
        self.settles_at = self.settles_at.min(now.saturating_add(settle_time));
    }
}

/// The next steps for a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScalePlan {
    /// Pods in service, or starting, to take out of service.
    pub retire: Vec<PodName>,
    /// Surplus pods to return to service. A mark has to be removed before.
    pub restore: Vec<PodName>,
    /// Surplus pods without calls that need a mark before the number falls.
    pub mark: Vec<PodName>,
    /// Other pods with a mark, which would be removed before surplus pods.
    pub unmark: Vec<PodName>,
    /// The number of pods that the workload may have now. A lower one could cut a call.
    pub number: u64,
    /// Pods that the workload counts.
    pub pods: u64,
}

/// Plans the next steps. `number` is safe for the pods as they are given: steps of the same plan
/// take effect for the next plan.
pub fn plan(
    pool: &ScaledPool<'_>,
    memory: &mut ScaleMemory,
    now: Millis,
    settle_time: Millis,
) -> ScalePlan {
    memory.bound(now, settle_time);
    let counts = Counts::of(pool.pods);
    // Pods that a request drained, or in quarantine, occupy replicas and serve no calls.
    let wanted = pool.desired.saturating_add(counts.out_of_service);
    let mut plan = ScalePlan { pods: counts.active(), ..ScalePlan::default() };
    let serving = counts.in_service + counts.starting;
    let mut floor = 0;
    if serving < pool.desired {
        let missing = pool.desired - serving;
        plan.restore = restorable(pool, memory, now, missing);
        // Surplus pods that a number removes are needed: the number rises first, and settles.
        let is_short = (plan.restore.len() as u64) < missing.min(counts.surplus);
        floor = if is_short { counts.active() } else { 0 };
    } else if pool.kind == WorkloadKind::Deployment {
        plan.retire = retire_from_deployment(pool, counts);
    } else {
        plan.retire = retire_from_stateful_set(pool, counts);
        // A surplus pod below a pod that serves cannot be removed: it takes the place of that pod.
        let serves = |pod: &&ScaledPod| {
            matches!(pod.stage, PodStage::InService | PodStage::Starting)
                && !plan.retire.contains(&pod.name)
        };
        let highest = pool.pods.iter().filter(serves).map(|pod| pod.ordinal).max().flatten();
        let is_below = |pod: &&ScaledPod| pod.stage == PodStage::Surplus && pod.ordinal < highest;
        let below = pool.pods.iter().filter(is_below).count() as u64;
        plan.restore = restorable(pool, memory, now, below);
    }
    let kept = match pool.kind {
        WorkloadKind::Deployment => deployment_floor(pool, counts, &mut plan),
        WorkloadKind::StatefulSet => stateful_set_floor(pool),
    };
    plan.number = wanted.max(kept.min(pool.replicas.unwrap_or(u64::MAX))).max(floor);
    plan
}

/// The pods of a workload by their stage.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    starting: u64,
    in_service: u64,
    surplus: u64,
    out_of_service: u64,
}

impl Counts {
    fn of(pods: &[ScaledPod]) -> Self {
        let mut counts = Self::default();
        for pod in pods {
            match pod.stage {
                PodStage::Starting => counts.starting += 1,
                PodStage::InService => counts.in_service += 1,
                PodStage::Surplus => counts.surplus += 1,
                PodStage::OutOfService => counts.out_of_service += 1,
                PodStage::Terminating => {}
            }
        }
        counts
    }

    /// Pods that the workload counts.
    fn active(self) -> u64 {
        self.starting + self.in_service + self.surplus + self.out_of_service
    }
}

fn in_stage(pool: &ScaledPool<'_>, stage: PodStage) -> Vec<ScaledPod> {
    pool.pods.iter().filter(|pod| pod.stage == stage).cloned().collect()
}

fn names(pods: impl IntoIterator<Item = ScaledPod>, count: u64) -> Vec<PodName> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    pods.into_iter().take(count).map(|pod| pod.name).collect()
}

/// Surplus pods that no published number can remove any more, those with calls first.
fn restorable(
    pool: &ScaledPool<'_>,
    memory: &ScaleMemory,
    now: Millis,
    count: u64,
) -> Vec<PodName> {
    let mut pods = in_stage(pool, PodStage::Surplus);
    pods.retain(|pod| memory.has_settled(now) || !memory.is_exposed(pool.kind, pod, now));
    match pool.kind {
        WorkloadKind::Deployment => {
            pods.sort_by(|a, b| (Reverse(a.calls), &a.name).cmp(&(Reverse(b.calls), &b.name)));
        }
        WorkloadKind::StatefulSet => pods.sort_by_key(|pod| pod.ordinal),
    }
    names(pods, count)
}

/// Pods of a Deployment beyond the desired number. Starting pods leave only if none of them is
/// needed, because a Deployment removes pods that are not ready in any order.
fn retire_from_deployment(pool: &ScaledPool<'_>, counts: Counts) -> Vec<PodName> {
    if counts.in_service < pool.desired {
        return Vec::new();
    }
    let mut starting = in_stage(pool, PodStage::Starting);
    starting.sort_by(|a, b| a.name.cmp(&b.name));
    let mut retired = names(starting, u64::MAX);
    let mut serving = in_stage(pool, PodStage::InService);
    // Idle and least loaded pods first; of these the youngest, whose caches are the coldest.
    serving.sort_by(|a, b| {
        let key = |pod: &ScaledPod| (pod.calls, Reverse(pod.created_at), pod.name.clone());
        key(a).cmp(&key(b))
    });
    retired.extend(names(serving, counts.in_service - pool.desired));
    retired
}

/// Pods of a StatefulSet beyond the desired number, from the highest ordinal down: the first that
/// has to stay ends the list, because all below it stay as well.
fn retire_from_stateful_set(pool: &ScaledPool<'_>, counts: Counts) -> Vec<PodName> {
    let mut pods: Vec<&ScaledPod> = pool.pods.iter().collect();
    pods.sort_by_key(|pod| Reverse(pod.ordinal));
    let (mut in_service, mut starting) = (counts.in_service, counts.starting);
    let mut retired = Vec::new();
    for pod in pods {
        match pod.stage {
            PodStage::Surplus | PodStage::Terminating => continue,
            PodStage::Starting if in_service + starting > pool.desired => starting -= 1,
            PodStage::InService if in_service > pool.desired => in_service -= 1,
            PodStage::Starting | PodStage::InService | PodStage::OutOfService => break,
        }
        retired.push(pod.name.clone());
    }
    retired
}

/// The number below which a Deployment could remove a pod with calls, and the marks that it needs.
///
/// A Deployment removes pods that are not ready first, then the lowest deletion cost. Marked pods
/// are therefore removed before pods in service, but only while the pods that are not ready are
/// surplus themselves and have no calls.
fn deployment_floor(pool: &ScaledPool<'_>, counts: Counts, plan: &mut ScalePlan) -> u64 {
    let is_removable = |pod: &&ScaledPod| pod.stage == PodStage::Surplus && pod.calls == 0;
    let is_fragile =
        |pod: &ScaledPod| pod.stage != PodStage::Terminating && !pod.is_ready && pod.calls > 0;
    let may_fall =
        counts.starting == 0 && !pool.is_rolling_out && !pool.pods.iter().any(is_fragile);
    if may_fall && plan.restore.is_empty() {
        let unmarked = pool.pods.iter().filter(is_removable).filter(|pod| !pod.is_marked);
        plan.mark = unmarked.map(|pod| pod.name.clone()).collect();
    }
    let misplaced = |pod: &&ScaledPod| {
        let is_surplus = matches!(pod.stage, PodStage::Surplus | PodStage::Terminating);
        pod.is_marked && (!is_surplus || pod.calls > 0 && pod.stage == PodStage::Surplus)
    };
    plan.unmark = pool.pods.iter().filter(misplaced).map(|pod| pod.name.clone()).collect();
    if pool.is_rolling_out {
        // The pods of a rollout exceed the number by its surge, which grows with the number.
        return counts.active().min(pool.replicas.unwrap_or(pool.published));
    }
    if !may_fall || !plan.unmark.is_empty() {
        return counts.active();
    }
    let ready = pool.pods.iter().filter(is_removable).filter(|pod| pod.is_marked);
    let leaving = ready.filter(|pod| !plan.restore.contains(&pod.name)).count() as u64;
    counts.active() - leaving
}

/// The number below which a StatefulSet would remove a pod that is in service or has calls: one
/// more than the highest ordinal of such a pod.
fn stateful_set_floor(pool: &ScaledPool<'_>) -> u64 {
    let stays = |pod: &&ScaledPod| match pod.stage {
        PodStage::Terminating => false,
        PodStage::Surplus => pod.calls > 0,
        PodStage::Starting | PodStage::InService | PodStage::OutOfService => true,
    };
    let kept = pool.pods.iter().filter(stays);
    // A pod without an ordinal is not removed by its position: it counts as one more pod.
    let ordinals = kept.clone().filter_map(|pod| pod.ordinal).max();
    let others = kept.filter(|pod| pod.ordinal.is_none()).count() as u64;
    ordinals.map_or(0, |ordinal| u64::from(ordinal) + 1) + others
}
