//! Deployments and StatefulSets of the fake cluster, their scale subresource, and the controllers
//! that follow their replicas.

use std::{
    cmp::Reverse,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use axum::{
    body::Bytes,
    http::Method,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    ApiState, FakeKube, NAMESPACE, Shared,
    objects::{Key, now},
    resources::Target,
    server::failure,
};

const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The hash of the only revision of a template.
const HASH: &str = "5d4f8c7b9";
/// Interval of the controllers.
const SYNC_INTERVAL: Duration = Duration::from_millis(20);

/// A request for the scale subresource: get, replace and merge patch.
pub(super) fn scale(
    state: &mut ApiState,
    target: &Target<'_>,
    method: &Method,
    body: &Bytes,
) -> Response {
    let key = Key::new(target.resource.plural, target.namespace, target.name);
    let Some(known) = state.objects.get(&key).cloned() else {
        let plural = target.resource.plural;
        return failure(404, "NotFound", &format!("{plural}.apps {:?} not found", target.name));
    };
    if *method == Method::GET {
        state.scale_reads += 1;
        return axum::Json(scale_of(&known)).into_response();
    }
    if !matches!(method.as_str(), "PUT" | "PATCH") {
        return failure(405, "MethodNotAllowed", "the server does not allow this method");
    }
    if let Some((code, message)) = state.faults.scale_error.clone() {
        return failure(code, "Injected", &message);
    }
    let given: Value = serde_json::from_slice(body).unwrap_or_default();
    let version = &given["metadata"]["resourceVersion"];
    if !version.is_null() && *version != known["metadata"]["resourceVersion"] {
        let message = format!(
            "Operation cannot be fulfilled on {}.apps {:?}: the object has been modified; please \
             apply your changes to the latest version and try again",
            target.resource.plural, target.name
        );
        return failure(409, "Conflict", &message);
    }
    let Some(replicas) = given["spec"]["replicas"].as_i64().filter(|number| *number >= 0) else {
        return failure(422, "Invalid", "spec.replicas: must be greater than or equal to 0");
    };
    state.scale_writes.push((target.name.to_owned(), replicas));
    let written = state.write(key, |object| {
        let mut object = object?;
        object["spec"]["replicas"] = json!(replicas);
        Some(object)
    });
    axum::Json(scale_of(&written)).into_response()
}

fn scale_of(object: &Value) -> Value {
    let metadata = &object["metadata"];
    let fields = ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"];
    let metadata: serde_json::Map<String, Value> =
        fields.iter().map(|field| ((*field).to_owned(), metadata[*field].clone())).collect();
    json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
        "spec": {"replicas": object["spec"]["replicas"]},
        "status": {
            "replicas": object["status"]["replicas"].as_i64().unwrap_or(0),
            "selector": "app=voice-agent",
        },
    })
}

/// The controllers; they stop when this is dropped.
pub struct Controllers {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Controllers {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

impl FakeKube {
    /// A workload with this number of replicas: `deployments` or `statefulsets`.
    pub fn add_workload(&self, plural: &'static str, name: &str, replicas: u64) {
        let uid = format!("{name}-{}", self.state().version);
        let kind = if plural == "deployments" { "Deployment" } else { "StatefulSet" };
        let object = json!({
            "apiVersion": "apps/v1", "kind": kind,
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid, "creationTimestamp": now()},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "voice-agent"}},
                "serviceName": "", "template": {},
            },
            "status": {"replicas": 0},
        });
        self.change(Key::new(plural, NAMESPACE, name), |_| Some(object));
    }

    pub fn replicas(&self, plural: &'static str, name: &str) -> u64 {
        let state = self.state();
        let object = &state.objects[&Key::new(plural, NAMESPACE, name)];
        object["spec"]["replicas"].as_u64().unwrap()
    }

    /// Sets the replicas as another client does.
    pub fn set_replicas(&self, plural: &'static str, name: &str, replicas: u64) {
        self.change(Key::new(plural, NAMESPACE, name), |object| {
            let mut object = object?;
            object["spec"]["replicas"] = json!(replicas);
            Some(object)
        });
    }

    /// Writes of the scale subresource, in order: the workload and its replicas.
    pub fn scale_writes(&self) -> Vec<(String, i64)> {
        self.state().scale_writes.clone()
    }

    /// The number of reads of scale subresources.
    pub fn scale_reads(&self) -> u64 {
        self.state().scale_reads
    }

    /// A HorizontalPodAutoscaler of a workload, as KEDA creates it for a ScaledObject.
    pub fn add_autoscaler(&self, name: &str, kind: &str, workload: &str) {
        let object = json!({
            "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {
                "name": name, "namespace": NAMESPACE, "uid": name,
                "ownerReferences": [{"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject",
                    "name": workload, "uid": "s", "controller": true}],
            },
            "spec": {
                "maxReplicas": 10,
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": workload},
            },
        });
        self.change(Key::new("horizontalpodautoscalers", NAMESPACE, name), |_| Some(object));
    }

    /// Runs the controllers of workloads. New pods become ready after `start_up`; removed ones are
    /// gone at once, so that each removal of a busy pod shows.
    pub fn run_controllers(&self, start_up: Duration) -> Controllers {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (stopped, shared) = (is_stopped.clone(), self.shared());
        let thread = std::thread::spawn(move || {
            let mut controller = Controller { start_up, created: Vec::new(), number: 0 };
            while !stopped.load(Ordering::Relaxed) {
                let is_changed = controller.sync(&mut shared.state.lock().unwrap());
                if is_changed {
                    shared.notify.send_modify(|changes| changes.0 += 1);
                }
                std::thread::sleep(SYNC_INTERVAL);
            }
        });
        Controllers { is_stopped, thread: Some(thread) }
    }

    fn shared(&self) -> Shared {
        Shared {
            state: self.state.clone(),
            changes: self.changes.subscribe(),
            notify: self.changes.clone(),
        }
    }
}

struct Controller {
    start_up: Duration,
    /// Pods that are not ready yet.
    created: Vec<(Key, Instant)>,
    number: u64,
}

impl Controller {
    /// One pass over all workloads; returns whether anything changed.
    fn sync(&mut self, state: &mut ApiState) -> bool {
        let before = state.version;
        self.start_pods(state);
        let workloads: Vec<(Key, Value)> = state
            .objects
            .iter()
            .filter(|(key, _)| matches!(key.plural, "deployments" | "statefulsets"))
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        for (key, object) in workloads {
            let wanted = object["spec"]["replicas"].as_u64().unwrap_or(1) as usize;
            let pods = pods_of(state, &key);
            match key.plural {
                "deployments" => self.sync_deployment(state, &key, pods, wanted),
                _ => self.sync_stateful_set(state, &key, &object, pods, wanted),
            }
            let count = pods_of(state, &key).len();
            if object["status"]["replicas"].as_u64() != Some(count as u64) {
                state.write(key, |object| {
                    let mut object = object?;
                    object["status"]["replicas"] = json!(count);
                    Some(object)
                });
            }
        }
        state.version != before
    }

    /// Makes pods ready whose start-up time has passed.
    fn start_pods(&mut self, state: &mut ApiState) {
        let start_up = self.start_up;
        let (due, rest) = std::mem::take(&mut self.created)
            .into_iter()
            .partition(|(_, at): &(Key, Instant)| at.elapsed() >= start_up);
        self.created = rest;
        for (key, _) in due {
            state.write(key, |pod| {
                let mut pod = pod?;
                pod["status"] = json!({
                    "phase": "Running", "podIP": "127.0.0.1",
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now()}],
                    "containerStatuses": [
                        {"name": "agent", "restartCount": 0, "ready": true, "image": "a", "imageID": "a"},
                    ],
                });
                Some(pod)
            });
        }
    }

    /// A ReplicaSet creates all missing pods at once, and removes pods in the order of
    /// `removal_order`.
    fn sync_deployment(
        &mut self,
        state: &mut ApiState,
        workload: &Key,
        mut pods: Vec<(Key, Value)>,
        wanted: usize,
    ) {
        for _ in pods.len()..wanted {
            self.number += 1;
            let name = format!("{}-{HASH}-x{:04}", workload.name, self.number);
            let set = format!("{}-{HASH}", workload.name);
            self.create(state, &name, "ReplicaSet", &set, ("pod-template-hash", HASH));
        }
        pods.sort_by_key(|(_, pod)| removal_order(pod));
        let surplus = pods.len().saturating_sub(wanted);
        for (key, _) in pods.into_iter().take(surplus) {
            state.write(key, |_| None);
        }
    }

    /// A StatefulSet creates the lowest missing ordinal, and removes the highest; one at a time,
    /// unless its pods are managed in parallel.
    fn sync_stateful_set(
        &mut self,
        state: &mut ApiState,
        workload: &Key,
        object: &Value,
        pods: Vec<(Key, Value)>,
        wanted: usize,
    ) {
        let is_parallel = object["spec"]["podManagementPolicy"] == "Parallel";
        let names: Vec<&str> = pods.iter().map(|(key, _)| key.name.as_str()).collect();
        let are_ready = pods.iter().all(|(_, pod)| is_ready(pod));
        for ordinal in 0..wanted {
            let name = format!("{}-{ordinal}", workload.name);
            if names.contains(&name.as_str()) {
                continue;
            }
            if is_parallel || are_ready {
                let label = ("controller-revision-hash", HASH);
                self.create(state, &name, "StatefulSet", &workload.name, label);
            }
            if !is_parallel {
                return;
            }
        }
        let ordinal =
            |key: &Key| key.name.rsplit('-').next().and_then(|it| it.parse::<usize>().ok());
        let mut surplus: Vec<Key> = pods.iter().map(|(key, _)| key.clone()).collect();
        surplus.retain(|key| ordinal(key).is_some_and(|ordinal| ordinal >= wanted));
        surplus.sort_by_key(|key| Reverse(ordinal(key)));
        let count = if is_parallel { surplus.len() } else { 1 };
        for key in surplus.into_iter().take(count) {
            state.write(key, |_| None);
        }
    }

    fn create(
        &mut self,
        state: &mut ApiState,
        name: &str,
        owner_kind: &str,
        owner: &str,
        (label, value): (&str, &str),
    ) {
        let key = Key::new("pods", NAMESPACE, name);
        let uid = format!("{name}-{}", state.version);
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": NAMESPACE, "uid": uid, "creationTimestamp": now(),
                "labels": {"app": "voice-agent"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": owner_kind, "name": owner,
                    "uid": owner, "controller": true, "blockOwnerDeletion": true}],
            },
            "spec": {"nodeName": "node-1", "containers": [{"name": "agent"}]},
            "status": {"phase": "Pending"},
        });
        pod["metadata"]["labels"][label] = json!(value);
        state.write(key.clone(), |_| Some(pod));
        self.created.push((key, Instant::now()));
    }
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

/// The active pods of a workload.
fn pods_of(state: &ApiState, workload: &Key) -> Vec<(Key, Value)> {
    let owner = match workload.plural {
        "deployments" => format!("{}-{HASH}", workload.name),
        _ => workload.name.clone(),
    };
    let is_it = |pod: &Value| {
        let metadata = &pod["metadata"];
        metadata["ownerReferences"][0]["name"] == json!(owner)
            && metadata["deletionTimestamp"].is_null()
    };
    let pods = state.objects.iter().filter(|(key, pod)| key.plural == "pods" && is_it(pod));
    pods.map(|(key, pod)| (key.clone(), pod.clone())).collect()
}

/// The order in which a ReplicaSet removes pods: without a node, by phase, not ready, the lowest
/// deletion cost, the youngest.
fn removal_order(pod: &Value) -> impl Ord + use<> {
    let cost = pod["metadata"]["annotations"][DELETION_COST].as_str();
    let cost: i32 = cost.and_then(|cost| cost.parse().ok()).unwrap_or(0);
    let phase = match pod["status"]["phase"].as_str() {
        Some("Pending") => 0,
        Some("Unknown") => 1,
        _ => 2,
    };
    let has_node = pod["spec"]["nodeName"].is_string();
    let version: u64 =
        pod["metadata"]["resourceVersion"].as_str().and_then(|it| it.parse().ok()).unwrap_or(0);
    (has_node, phase, is_ready(pod), cost, Reverse(version))
}
