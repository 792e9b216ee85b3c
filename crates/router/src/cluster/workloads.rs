//! Workloads: the owner of a pod, and the replicas of Deployments and StatefulSets.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    api::{
        apps::v1::{Deployment, StatefulSet},
        autoscaling::{v1::Scale, v2::HorizontalPodAutoscaler},
        core::v1::Pod,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Error, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::timeout;

use super::{Cluster, explain, is_status};
use fleet::workload::{Workload, WorkloadKind};

/// The annotation by which a Deployment orders the pods that it removes.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The deletion cost of surplus pods: below the default of 0 and any cost that people set.
const SURPLUS_COST: &str = "-2000000000";
/// The label of a Deployment's pods with the hash that ends the name of their ReplicaSet.
const TEMPLATE_HASH: &str = "pod-template-hash";
/// The label of a StatefulSet's pods with the revision of their template.
const REVISION_HASH: &str = "controller-revision-hash";
/// How long a request may take. Shorter than the time in which a number settles, so that a former
/// leader's write is over before its successor returns a pod to service.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the workload that controls a pod. The ReplicaSet of a Deployment has the name of the
/// Deployment and the template hash of its pods, so that it need not be read.
pub(super) fn workload_of(metadata: &ObjectMeta) -> Option<Workload> {
    let owners = metadata.owner_references.iter().flatten();
    let owner = owners.into_iter().find(|owner| owner.controller == Some(true))?;
    if owner.api_version.split_once('/').map(|(group, _)| group) != Some("apps") {
        return None;
    }
    let (kind, name) = match owner.kind.as_str() {
        "StatefulSet" => (WorkloadKind::StatefulSet, owner.name.as_str()),
        "ReplicaSet" => {
            let hash = label(metadata, TEMPLATE_HASH)?;
            let name = owner.name.strip_suffix(hash)?.strip_suffix('-')?;
            (WorkloadKind::Deployment, name)
        }
        _ => return None,
    };
    format!("{}/{name}", kind.as_str()).parse().ok()
}

/// Returns the revision of the template from which a pod was created.
pub(super) fn revision_of(metadata: &ObjectMeta) -> Option<String> {
    let revision = label(metadata, TEMPLATE_HASH).or_else(|| label(metadata, REVISION_HASH));
    revision.map(str::to_owned)
}

/// Whether a pod has the deletion cost of a surplus pod.
pub(super) fn is_marked(metadata: &ObjectMeta) -> bool {
    let cost = metadata.annotations.as_ref().and_then(|them| them.get(DELETION_COST));
    cost.is_some_and(|cost| cost == SURPLUS_COST)
}

fn label<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    let value = metadata.labels.as_ref().map(|labels: &BTreeMap<_, _>| labels.get(name));
    value.flatten().map(String::as_str).filter(|value| !value.is_empty())
}

/// The replicas of a workload at one version.
#[derive(Debug, Clone)]
pub(crate) struct Replicas {
    /// The number that the workload should have.
    pub(crate) wanted: u64,
    /// Pods that its controller counts.
    pub(crate) pods: u64,
    /// The first ordinal of a StatefulSet.
    pub(crate) first_ordinal: u32,
    scale: Scale,
}

/// The reason why a request to a workload failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScaleError {
    /// The workload changed since it was read.
    Changed,
    /// The cause, in words.
    Failed(String),
}

/// The workloads of the namespace of the pods.
#[derive(Clone)]
pub(crate) struct Workloads {
    client: Client,
    pub(crate) namespace: String,
}

/// Runs a request within its time; describes its error. `rule` names the permissions it needs.
async fn run<T>(
    request: impl Future<Output = Result<T, Error>>,
    rule: &str,
) -> Result<T, ScaleError> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) if is_status(Some(&error), 409) => Err(ScaleError::Changed),
        Ok(Err(error)) => Err(ScaleError::Failed(explain(&error, rule))),
        Err(_) => Err(ScaleError::Failed("the Kubernetes API does not answer".into())),
    }
}

/// Runs the same request on the API of the kind of a workload.
macro_rules! on_kind {
    ($self:ident, $workload:ident, |$api:ident| $request:expr) => {
        match $workload.kind {
            WorkloadKind::Deployment => {
                let $api: Api<Deployment> = Api::namespaced($self.client.clone(), &$self.namespace);
                $request
            }
            WorkloadKind::StatefulSet => {
                let $api: Api<StatefulSet> =
                    Api::namespaced($self.client.clone(), &$self.namespace);
                $request
            }
        }
    };
}

impl Cluster {
    /// Returns the workloads of the first namespace of the pods.
    pub(crate) fn workloads(&self) -> Workloads {
        let namespaces = &self.config.namespaces;
        let namespace = namespaces.first().unwrap_or(&self.config.namespace).clone();
        Workloads { client: self.client.clone(), namespace }
    }
}

impl Workloads {
    fn rule(&self, verbs: &str, resource: &str) -> String {
        format!("{verbs} on {resource} in the namespace {}", self.namespace)
    }

    /// Reads the replicas of a workload.
    pub(crate) async fn replicas(&self, workload: &Workload) -> Result<Replicas, ScaleError> {
        let (kind, name) = (workload.kind.as_str(), &workload.name);
        let rule = self.rule("get", &format!("{kind}s/scale (apps)"));
        let scale = on_kind!(self, workload, |api| run(api.get_scale(name), &rule).await)?;
        let first_ordinal = match workload.kind {
            WorkloadKind::Deployment => 0,
            WorkloadKind::StatefulSet => self.first_ordinal(name).await?,
        };
        let number = |number: Option<i32>| number.and_then(|it| u64::try_from(it).ok());
        // An API server sets the field; its default is 1 replica.
        let wanted = scale.spec.as_ref().and_then(|spec| number(spec.replicas)).unwrap_or(0);
        let pods = scale.status.as_ref().and_then(|status| number(Some(status.replicas)));
        Ok(Replicas { wanted, pods: pods.unwrap_or(0), first_ordinal, scale })
    }

    /// Reads the first ordinal of a StatefulSet, which the scale subresource does not show.
    async fn first_ordinal(&self, name: &str) -> Result<u32, ScaleError> {
        let sets: Api<StatefulSet> = Api::namespaced(self.client.clone(), &self.namespace);
        let set = run(sets.get(name), &self.rule("get", "statefulsets (apps)")).await?;
        let start = set.spec.and_then(|spec| spec.ordinals).and_then(|ordinals| ordinals.start);
        Ok(start.and_then(|start| u32::try_from(start).ok()).unwrap_or(0))
    }

    /// Writes the replicas of a workload, if it has not changed since it was read.
    pub(crate) async fn write(
        &self,
        workload: &Workload,
        read: &Replicas,
        number: u64,
    ) -> Result<(), ScaleError> {
        let (kind, name) = (workload.kind.as_str(), &workload.name);
        let rule = self.rule("update", &format!("{kind}s/scale (apps)"));
        let mut scale = read.scale.clone();
        let spec = scale.spec.get_or_insert_default();
        spec.replicas = Some(i32::try_from(number).unwrap_or(i32::MAX));
        let params = PostParams::default();
        on_kind!(self, workload, |api| {
            run(api.replace_scale(name, &params, &scale), &rule).await.map(drop)
        })
    }

    /// Returns the HorizontalPodAutoscaler that also scales a workload, in words.
    pub(crate) async fn autoscaler_of(
        &self,
        workload: &Workload,
    ) -> Result<Option<String>, ScaleError> {
        let autoscalers: Api<HorizontalPodAutoscaler> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let rule = self.rule("list", "horizontalpodautoscalers (autoscaling)");
        let listed = run(autoscalers.list(&ListParams::default()), &rule).await?;
        let is_it = |autoscaler: &&HorizontalPodAutoscaler| {
            let target = autoscaler.spec.as_ref().map(|spec| &spec.scale_target_ref);
            target.is_some_and(|target| {
                target.name == workload.name
                    && target.kind.eq_ignore_ascii_case(workload.kind.as_str())
            })
        };
        Ok(listed.items.iter().find(is_it).map(|autoscaler| {
            let owners = autoscaler.owner_references().iter();
            let owner = owners.map(|owner| format!(" of the {} {}", owner.kind, owner.name)).next();
            let name = autoscaler.name_any();
            format!("the HorizontalPodAutoscaler {name}{}", owner.unwrap_or_default())
        }))
    }

    /// Sets the deletion cost of a surplus pod, or removes it. Another cost is left alone.
    pub(crate) async fn mark(
        &self,
        pod: &str,
        uid: &str,
        is_surplus: bool,
    ) -> Result<(), ScaleError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let cost = if is_surplus { json!(SURPLUS_COST) } else { json!(null) };
        // With the UID the API server refuses the patch of another pod of that name.
        let patch = json!({"metadata": {"uid": uid, "annotations": {DELETION_COST: cost}}});
        let (rule, params) = (self.rule("patch", "pods"), PatchParams::default());
        let patch = Patch::Merge(&patch);
        let patched = async {
            match pods.patch_metadata(pod, &params, &patch).await {
                // Another pod has the name (422), or none has (404).
                Err(error) if [404, 422].iter().any(|it| is_status(Some(&error), *it)) => Ok(false),
                patched => patched.map(|_| true),
            }
        };
        match run(patched, &rule).await {
            Ok(false) => Err(ScaleError::Changed),
            patched => patched.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(owner: (&str, &str, &str), label: (&str, &str)) -> ObjectMeta {
        let (api_version, kind, name) = owner;
        serde_json::from_value(json!({
            "labels": {label.0: label.1},
            "annotations": {DELETION_COST: label.1},
            "ownerReferences": [{"apiVersion": api_version, "kind": kind, "name": name,
                "uid": "u", "controller": true}],
        }))
        .unwrap()
    }

    #[test]
    fn the_owner_of_a_pod_names_its_workload() {
        let workload = |owner, label| {
            workload_of(&metadata(owner, label)).map(|it| it.to_string()).unwrap_or_default()
        };
        let hash = (TEMPLATE_HASH, "5d4f8");
        let set = ("apps/v1", "StatefulSet", "agent-gold");
        assert_eq!(workload(set, hash), "statefulset/agent-gold");
        let replicas = |name| ("apps/v1", "ReplicaSet", name);
        assert_eq!(workload(replicas("agent-gold-5d4f8"), hash), "deployment/agent-gold");
        // A ReplicaSet of its own, and one of another controller.
        assert_eq!(workload(replicas("agent-gold"), hash), "");
        assert_eq!(workload(replicas("agent-5d4f8"), ("rollouts-pod-template-hash", "5d4f8")), "");
        assert_eq!(workload(("argoproj.io/v1", "StatefulSet", "agent"), hash), "");
        assert_eq!(workload(("apps/v1", "DaemonSet", "agent"), hash), "");
        assert_eq!(workload_of(&ObjectMeta::default()), None);
        let marked = metadata(set, ("any", SURPLUS_COST));
        assert!(is_marked(&marked) && !is_marked(&metadata(set, ("any", "5"))));
        assert_eq!(revision_of(&metadata(set, (REVISION_HASH, "r2"))).as_deref(), Some("r2"));
    }
}
