//! Reads pods of the cluster.

use std::borrow::Cow;

use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Pod, PodCondition},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{ClusterConfig, workloads};
use fleet::{PodFacts, Step, names::PodName, workload::Workload};

const TIER_LABEL: &str = "smart-router/tier";
const MERCHANT_LABEL: &str = "smart-router/merchant";

/// A pod object of the API. A malformed one is held as an error, so that it does not fail a
/// whole list.
#[derive(Debug, Clone)]
pub struct ClusterPod {
    metadata: ObjectMeta,
    pod: Result<Box<Pod>, String>,
}

/// A pod object as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodObject {
    /// Exists and may serve.
    Present { name: PodName, facts: PodFacts, details: PodDetails, warnings: Vec<String> },
    /// Ran to completion and never serves again.
    Finished { name: PodName, uid: String },
}

/// Properties of a pod object that the store does not record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodDetails {
    /// When the API server created the object (s).
    pub(crate) created: Option<i64>,
    pub(crate) node: Option<String>,
    /// When the pod last became ready, by the clock of its node (s).
    pub(crate) ready_at: Option<i64>,
    /// The workload that runs the pod, and the revision of its template.
    pub(crate) workload: Option<Workload>,
    pub(crate) revision: Option<String>,
    /// Its deletion cost is that of a surplus pod.
    pub(crate) is_marked: bool,
}

impl<'de> Deserialize<'de> for ClusterPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let metadata = serde_json::from_value(value["metadata"].clone()).unwrap_or_else(|_| {
            // The watch resumes from the version of the last object it saw.
            let text = |field: &str| value["metadata"][field].as_str().map(str::to_owned);
            ObjectMeta {
                name: text("name"),
                resource_version: text("resourceVersion"),
                ..ObjectMeta::default()
            }
        });
        let pod = serde_json::from_value(value).map(Box::new).map_err(|error| error.to_string());
        Ok(Self { metadata, pod })
    }
}

impl Resource for ClusterPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl ClusterPod {
    /// The name in the cluster, for the log.
    pub(crate) fn display_name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or("?")
    }

    pub(crate) fn uid(&self) -> Option<String> {
        self.metadata.uid.clone()
    }

    /// The resource version: a number that grows with every change of an object of this kind.
    /// A version that is not a number can't be compared.
    pub(crate) fn version(&self) -> Option<u64> {
        self.metadata.resource_version.as_deref()?.parse().ok()
    }

    /// Returns the facts that the store records about the pod, or why they can't be read.
    pub fn read(&self, config: &ClusterConfig) -> Result<PodObject, String> {
        let pod = self.pod.as_ref().map_err(Clone::clone)?;
        let name = self.metadata.name.as_deref().unwrap_or_default();
        let name: PodName = name.parse().map_err(|error| format!("{error}"))?;
        let uid =
            self.metadata.uid.clone().filter(|uid| !uid.is_empty()).ok_or("the pod has no UID")?;
        let status = pod.status.clone().unwrap_or_default();
        let phase = status.phase.as_deref().unwrap_or_default();
        if matches!(phase, "Succeeded" | "Failed") {
            return Ok(PodObject::Finished { name, uid });
        }
        let ip = status.pod_ip.clone().filter(|ip| !ip.is_empty());
        let condition = |kind: &str| {
            let is_it = |it: &&PodCondition| it.type_ == kind && it.status == "True";
            status.conditions.iter().flatten().find(is_it)
        };
        let ready = condition("Ready");
        let is_ready = ready.is_some();
        let details = PodDetails {
            created: self.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            ready_at: ready
                .and_then(|it| it.last_transition_time.as_ref())
                .map(|time| time.0.as_second()),
            workload: workloads::workload_of(&self.metadata),
            revision: workloads::revision_of(&self.metadata),
            is_marked: workloads::is_marked(&self.metadata),
        };
        let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
        let agent = config.agent_container.as_deref().or(first.map(|it| it.name.as_str()));
        let restarts = status
            .container_statuses
            .iter()
            .flatten()
            .find(|container| Some(container.name.as_str()) == agent)
            .map_or(0, |container| container.restart_count);
        let (pin, mut warnings) = self.pin();
        let names = pod.spec.iter().flat_map(|spec| &spec.containers).map(|it| &it.name);
        if let Some(agent) = &config.agent_container
            && !names.into_iter().any(|name| name == agent)
        {
            warnings
                .push(format!("the pod has no container {agent}; its restarts are not detected"));
        }
        let facts = PodFacts {
            uid,
            ready: phase == "Running" && is_ready && ip.is_some(),
            address: ip.map(|ip| address(&ip, config.agent_port)).unwrap_or_default(),
            terminating: self.metadata.deletion_timestamp.is_some(),
            at_risk: condition("DisruptionTarget").is_some(),
            restarts: u32::try_from(restarts).unwrap_or(0),
            pin,
        };
        Ok(PodObject::Present { name, facts, details, warnings })
    }

    /// Returns the pool that the labels pin the pod to, and warnings about them.
    fn pin(&self) -> (Option<Step>, Vec<String>) {
        let label = |name: &str| {
            let value = self.metadata.labels.as_ref()?.get(name)?;
            Some(value.as_str()).filter(|value| !value.is_empty())
        };
        let (text, name) = match (label(MERCHANT_LABEL), label(TIER_LABEL)) {
            (Some(merchant), _) => (format!("merchant:{merchant}"), MERCHANT_LABEL),
            (None, Some(tier)) => (tier.to_owned(), TIER_LABEL),
            (None, None) => return (None, Vec::new()),
        };
        match text.parse() {
            Ok(pin) => (Some(pin), Vec::new()),
            Err(error) => (None, vec![format!("the label {name} is ignored: {error}")]),
        }
    }
}

fn address(ip: &str, port: u16) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn config() -> ClusterConfig {
        ClusterConfig {
            namespace: "default".into(),
            namespaces: vec!["default".into()],
            selector: "app=voice-agent".into(),
            agent_container: None,
            agent_port: 8000,
            settle_time: Duration::ZERO,
            has_manifests: true,
        }
    }

    /// A pod in service, with changes.
    fn pod(change: impl FnOnce(&mut Value)) -> Result<PodObject, String> {
        let mut value = json!({
            "metadata": {"name": "voice-agent-0", "uid": "u1", "resourceVersion": "7"},
            "spec": {"containers": [{"name": "agent"}, {"name": "sidecar"}]},
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [
                    {"name": "sidecar", "restartCount": 5, "ready": true, "image": "", "imageID": ""},
                    {"name": "agent", "restartCount": 1, "ready": true, "image": "", "imageID": ""},
                ],
            },
        });
        change(&mut value);
        serde_json::from_value::<ClusterPod>(value).unwrap().read(&config())
    }

    fn facts(change: impl FnOnce(&mut Value)) -> PodFacts {
        match pod(change).unwrap() {
            PodObject::Present { facts, .. } => facts,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_in_service_is_running_ready_and_has_an_address() {
        let facts_of_pod = facts(|_| {});
        assert_eq!(
            (facts_of_pod.ready, facts_of_pod.terminating, facts_of_pod.restarts),
            (true, false, 1)
        );
        assert_eq!(
            (facts_of_pod.uid.as_str(), facts_of_pod.address.as_str()),
            ("u1", "10.0.0.1:8000")
        );
        assert_eq!(
            facts(|pod| pod["status"]["podIP"] = json!("fd00::1")).address,
            "[fd00::1]:8000"
        );
        let not_ready: [fn(&mut Value); 5] = [
            |pod| pod["status"]["phase"] = json!("Pending"),
            |pod| pod["status"]["podIP"] = json!(null),
            |pod| pod["status"]["conditions"][0]["status"] = json!("False"),
            |pod| pod["status"]["conditions"] = json!(null),
            |pod| pod["status"] = json!(null),
        ];
        for change in not_ready {
            assert!(!facts(change).ready);
        }
    }

    #[test]
    fn a_pod_whose_eviction_is_announced_is_at_risk() {
        let disrupted = |status: &'static str| {
            facts(move |pod| {
                let condition = json!({"type": "DisruptionTarget", "status": status});
                pod["status"]["conditions"].as_array_mut().unwrap().push(condition);
            })
        };
        assert!(disrupted("True").at_risk && disrupted("True").ready);
        assert!(!disrupted("False").at_risk && !facts(|_| {}).at_risk);
    }

    #[test]
    fn a_deleted_pod_terminates_and_a_completed_one_is_finished() {
        assert!(
            facts(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"))
                .terminating
        );
        for phase in ["Succeeded", "Failed"] {
            let finished = pod(|pod| pod["status"]["phase"] = json!(phase)).unwrap();
            assert!(matches!(finished, PodObject::Finished { .. }), "{finished:?}");
        }
    }

    #[test]
    fn labels_pin_a_pod_to_a_pool() {
        let pin = |labels: Value| {
            let PodObject::Present { facts, warnings, .. } =
                pod(|pod| pod["metadata"]["labels"] = labels).unwrap()
            else {
                panic!()
            };
            (facts.pin.map(|pin| pin.to_string()), warnings.len())
        };
        assert_eq!(pin(json!({"smart-router/tier": "gold"})), (Some("gold".into()), 0));
        assert_eq!(
            pin(json!({"smart-router/merchant": "acme"})),
            (Some("merchant:acme".into()), 0)
        );
        assert_eq!(pin(json!({"smart-router/tier": ""})), (None, 0));
        assert_eq!(pin(json!({"smart-router/tier": "a b"})), (None, 1));
        assert_eq!(pin(json!({"app": "x"})), (None, 0));
    }

    #[test]
    fn a_malformed_pod_is_an_error_and_not_a_panic() {
        let bad: [fn(&mut Value); 5] = [
            |pod| pod["status"] = json!("broken"),
            |pod| pod["metadata"]["name"] = json!("Not.A.Label"),
            |pod| pod["metadata"]["name"] = json!(7),
            |pod| pod["metadata"]["uid"] = json!(null),
            |pod| pod["metadata"] = json!(null),
        ];
        for change in bad {
            assert!(pod(change).is_err());
        }
    }
}
