//! Objects that tests create, change and read in the fake cluster.

use serde_json::{Value, json};

use super::{
    FakeKube, NAMESPACE,
    objects::{Key, ObjectEvent, now, versioned},
    resources::Resource,
};

fn pod_key(name: &str) -> Key {
    Key::new("pods", NAMESPACE, name)
}

impl FakeKube {
    /// A pod that is ready to serve.
    pub fn add(&self, name: &str) {
        self.add_with(name, |_| {});
    }

    pub fn add_with(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.add_in(NAMESPACE, name, change);
    }

    /// A pod of a namespace.
    pub fn add_in(&self, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let uid = format!("{name}-{}", self.state().version);
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name, "namespace": namespace, "uid": uid, "labels": {"app": "voice-agent"},
                "creationTimestamp": now(),
            },
            "spec": {"nodeName": "node-1", "containers": [{"name": "agent"}, {"name": "sidecar"}]},
            "status": {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now()}],
                "containerStatuses": [
                    {"name": "agent", "restartCount": 0, "ready": true, "image": "a", "imageID": "a"},
                    {"name": "sidecar", "restartCount": 0, "ready": true, "image": "b", "imageID": "b"},
                ],
            },
        });
        change(&mut pod);
        self.change(Key::new("pods", namespace, name), |_| Some(pod));
    }

    pub fn update(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.change_object(pod_key(name), change);
    }

    fn change_object(&self, key: Key, change: impl FnOnce(&mut Value)) {
        self.change(key, |object| {
            let mut object = object?;
            change(&mut object);
            Some(object)
        });
    }

    /// Marks a pod as terminating.
    pub fn terminate(&self, name: &str) {
        self.update(name, |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(pod_key(name), |_| None);
    }

    pub fn delete_in(&self, namespace: &str, name: &str) {
        self.change(Key::new("pods", namespace, name), |_| None);
    }

    pub fn uid(&self, name: &str) -> Option<String> {
        let uid = &self.object(&pod_key(name))?["metadata"]["uid"];
        uid.as_str().map(str::to_owned)
    }

    pub fn pod(&self, name: &str) -> Value {
        self.object(&pod_key(name)).expect("the pod exists")
    }

    fn object(&self, key: &Key) -> Option<Value> {
        self.state().objects.get(key).cloned()
    }

    /// Sets a condition of a pod.
    pub fn set_condition(&self, name: &str, kind: &str, status: &str) {
        self.update(name, |pod| {
            let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
            conditions.retain(|condition| condition["type"] != kind);
            conditions.push(json!({"type": kind, "status": status, "lastTransitionTime": now()}));
        });
    }

    /// Sends an outdated pod event again, or the same event for a new pod of the same name.
    pub fn replay_event(&self, mut was: Value, as_another: bool) {
        let mut state = self.state();
        state.version += 1;
        let version = state.version;
        if as_another {
            was["metadata"]["uid"] = json!(format!("{}-again", was["metadata"]["uid"]));
            was = versioned(was, version);
        }
        let key = pod_key(was["metadata"]["name"].as_str().unwrap_or_default());
        let (before, after) = (Some(was.clone()), Some(was));
        state.events.push(ObjectEvent { key, version, before, after });
        drop(state);
        self.changes.send_modify(|changes| changes.0 += 1);
    }

    /// Cordons a node, or uncordons it.
    pub fn set_unschedulable(&self, node: &str, is_unschedulable: bool) {
        let mut object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "spec": {}});
        if is_unschedulable {
            object["spec"]["unschedulable"] = json!(true);
        }
        self.change(Key::new("nodes", "", node), |_| Some(object));
    }

    /// Installs the CustomResourceDefinitions, or removes them with their objects.
    pub fn install_crds(&self, are_installed: bool) {
        let mut state = self.state();
        state.has_custom_resources = are_installed;
        let keys: Vec<Key> = state.objects.keys().cloned().collect();
        for key in keys {
            if !are_installed && Resource::find(key.plural).is_custom {
                state.write(key, |_| None);
            }
        }
        drop(state);
        self.changes.send_modify(|changes| changes.0 += 1);
    }

    /// Creates a custom object, or replaces its spec.
    pub fn apply(&self, plural: &str, namespace: &str, name: &str, spec: Value) {
        let resource = Resource::find(plural);
        let uid = format!("{name}-{}", self.state().version);
        self.change(Key::new(resource.plural, namespace, name), |object| {
            let mut object = object.unwrap_or_else(|| {
                json!({
                    "apiVersion": resource.api_version(), "kind": resource.kind,
                    "metadata": {"name": name, "namespace": namespace, "uid": uid, "creationTimestamp": now()},
                })
            });
            object["spec"] = spec;
            Some(object)
        });
    }

    pub fn remove(&self, plural: &str, namespace: &str, name: &str) {
        self.change(Key::new(Resource::find(plural).plural, namespace, name), |_| None);
    }

    /// A custom object; null if there is none.
    pub fn custom(&self, plural: &str, namespace: &str, name: &str) -> Value {
        let key = Key::new(Resource::find(plural).plural, namespace, name);
        self.object(&key).unwrap_or_default()
    }

    /// The Events that were written.
    pub fn cluster_events(&self) -> Vec<Value> {
        let state = self.state();
        let events = state.objects.iter().filter(|(key, _)| key.plural == "events");
        events.map(|(_, event)| event.clone()).collect()
    }
}
