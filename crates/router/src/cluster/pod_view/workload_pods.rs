//! Starting pods, and the pods of workloads.

use super::*;
use fleet::tiers::Tiers;

/// The namespace whose workloads tiers may name: the first watched one.
const WORKLOAD_NAMESPACE: usize = 0;

/// A pod that is neither ready nor terminating.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StartingPod {
    pub(crate) name: PodName,
    pub(crate) uid: String,
    /// The pool that the pod's label or workload names.
    pub(crate) pin: Option<Step>,
    /// The pod was ready before.
    pub(crate) has_been_ready: bool,
}

/// A pod of a workload that is not gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkloadPod {
    pub(crate) name: PodName,
    pub(crate) facts: PodFacts,
    pub(crate) details: PodDetails,
}

impl PodView {
    /// Sets the tiers that take the pods of workloads. Their pods are written again.
    pub(crate) fn set_workloads(&self, tiers: &Tiers) {
        let tier = |(name, tier): (&_, &fleet::tiers::Tier)| {
            Some((tier.workload.clone()?, Step::Tier(Clone::clone(name))))
        };
        let workload_tiers: HashMap<Workload, Step> = tiers.iter().filter_map(tier).collect();
        let mut inner = self.inner();
        if inner.workload_tiers == workload_tiers {
            return;
        }
        let has_workload = |it: &Entry| it.details.workload.is_some();
        let names = inner.pods.iter().filter(|(_, pods)| pods.iter().any(has_workload));
        let names: Vec<PodName> = names.map(|(name, _)| name.clone()).collect();
        inner.dirty.extend(names);
        inner.workload_tiers = workload_tiers;
        self.notify(inner);
    }

    /// Whether the pods of workloads are known.
    pub(crate) fn knows_workloads(&self) -> bool {
        self.inner().listed_at.contains_key(&WORKLOAD_NAMESPACE)
    }

    /// Returns the pods of a workload.
    pub(crate) fn pods_of(&self, workload: &Workload) -> Vec<WorkloadPod> {
        let inner = self.inner();
        let pod = |name: &PodName| {
            let entry = inner.effective(name)?;
            let is_it = entry.namespace == WORKLOAD_NAMESPACE
                && entry.details.workload.as_ref() == Some(workload);
            let PodState::Present(facts) = &entry.state else { return None };
            let (facts, details) = (facts.clone(), entry.details.clone());
            is_it.then(|| WorkloadPod { name: name.clone(), facts, details })
        };
        inner.pods.keys().filter_map(pod).collect()
    }

    /// Returns the pods that are neither ready nor terminating.
    pub(crate) fn starting(&self) -> Vec<StartingPod> {
        let inner = self.inner();
        let starting = |name: &PodName| {
            let (entry, state) = (inner.effective(name)?, inner.state(name)?);
            let PodState::Present(facts) = state else { return None };
            (!facts.ready && !facts.terminating).then(|| StartingPod {
                name: name.clone(),
                uid: facts.uid,
                pin: facts.pin,
                has_been_ready: entry.has_been_ready,
            })
        };
        inner.pods.keys().filter_map(starting).collect()
    }

    /// Returns the details of the pod with this UID if it is ready.
    pub(crate) fn ready_details(&self, pod: &PodName, uid: &str) -> Option<PodDetails> {
        let inner = self.inner();
        let entry = inner.effective(pod)?;
        let PodState::Present(facts) = &entry.state else { return None };
        (facts.ready && facts.uid == uid).then(|| entry.details.clone())
    }
}

impl Inner {
    /// The tier that takes a pod because it runs in the workload of the tier.
    pub(super) fn workload_tier(&self, entry: &Entry) -> Option<&Step> {
        let workload = entry.details.workload.as_ref()?;
        self.workload_tiers.get(workload).filter(|_| entry.namespace == WORKLOAD_NAMESPACE)
    }
}
