//! A fake Kubernetes API server with fault injection: pods, nodes, leases, events and custom
//! resources, with list, watch and the status subresource.

mod fixtures;
mod namespaces;
mod objects;
mod resources;
mod server;
mod workloads;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::Router;
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

use self::objects::{Key, ObjectEvent};
pub use self::workloads::Controllers;
use super::scratch;

/// The namespace of the router and, unless a test names another, of the pods.
pub const NAMESPACE: &str = "default";

#[derive(Default)]
struct ApiState {
    /// Identifies the cluster, independent of its address.
    namespace_uid: String,
    version: u64,
    objects: BTreeMap<Key, Value>,
    /// The CustomResourceDefinitions are installed.
    has_custom_resources: bool,
    expired: usize,
    events: Vec<ObjectEvent>,
    /// The oldest version from which a watch can resume.
    oldest: u64,
    /// Remaining items of paged lists, by continue token.
    pages: HashMap<String, Vec<Value>>,
    faults: Faults,
    scale_writes: Vec<(String, i64)>,
    scale_reads: u64,
    /// Number of pod lists (first pages only), and of failed ones.
    lists: usize,
    failed_lists: usize,
    /// Number of requests answered with 403.
    forbidden: usize,
}

/// Injected faults.
#[derive(Default, Clone)]
pub struct Faults {
    /// Status of the next pod requests, and their number.
    pub error_responses: Option<(u16, usize)>,
    /// Queues events until the fault ends.
    pub withhold_events: bool,
    /// Discards events.
    pub drop_events: bool,
    pub event_delay: Duration,
    /// Responds with 403 to paths that contain this text.
    pub forbidden_path: Option<&'static str>,
    /// More such texts.
    pub forbidden_paths: Vec<String>,
    /// Refuses writes of the scale subresource with this status and message.
    pub scale_error: Option<(u16, String)>,
    /// Inserts events whose object is not a pod.
    pub malformed_events: bool,
    /// Reports an expired watch by HTTP status 410 instead of an `ERROR` event.
    pub expire_with_status: bool,
    /// Responds with 500 to lists.
    pub fail_lists: bool,
    /// Delays responses to lists until the fault ends; their content is then outdated.
    pub stall_lists: bool,
}

pub struct FakeKube {
    state: Arc<Mutex<ApiState>>,
    /// Wakes watches: the first counter counts changes, and a change of the second ends all
    /// watches.
    changes: watch::Sender<(u64, u64)>,
    runtime: Option<Runtime>,
    pub port: u16,
    pub config: PathBuf,
}

/// A test may end in an asynchronous context, which a runtime must not block.
impl Drop for FakeKube {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Clone)]
struct Shared {
    state: Arc<Mutex<ApiState>>,
    changes: watch::Receiver<(u64, u64)>,
    notify: watch::Sender<(u64, u64)>,
}

impl FakeKube {
    pub fn start() -> Self {
        let port = super::free_port();
        let config = scratch().join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
            "users": [{"name": "fake", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        });
        std::fs::write(&config, text.to_string()).unwrap();
        let namespace_uid = namespaces::uid(port);
        let state = ApiState { version: 100, oldest: 100, namespace_uid, ..ApiState::default() };
        let mut kube = Self {
            state: Arc::new(Mutex::new(state)),
            changes: watch::Sender::new((0, 0)),
            runtime: None,
            port,
            config,
        };
        kube.restart();
        kube
    }

    /// Stops the server and closes its connections.
    pub fn stop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    /// Starts the server with its former state.
    pub fn restart(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let shared = Shared {
            state: self.state.clone(),
            changes: self.changes.subscribe(),
            notify: self.changes.clone(),
        };
        let port = self.port;
        runtime.spawn(async move {
            let listener = loop {
                match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
                    Ok(listener) => break listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            axum::serve(listener, Router::new().fallback(server::handle).with_state(shared))
                .await
                .unwrap();
        });
        self.runtime = Some(runtime);
    }

    fn state(&self) -> MutexGuard<'_, ApiState> {
        self.state.lock().unwrap()
    }

    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.state().faults);
    }

    /// Ends all watches.
    pub fn drop_watches(&self) {
        self.changes.send_modify(|changes| changes.1 += 1);
    }

    /// Compacts all events: a watch from an older version gets 410.
    pub fn compact(&self) {
        let mut state = self.state();
        state.version += 1;
        state.oldest = state.version;
        state.events.clear();
    }

    /// Number of watches that were refused with 410.
    pub fn expired_watches(&self) -> usize {
        self.state().expired
    }

    pub fn forbidden(&self) -> usize {
        self.state().forbidden
    }

    pub fn lists(&self) -> usize {
        self.state().lists
    }

    pub fn failed_lists(&self) -> usize {
        self.state().failed_lists
    }

    /// Changes an object; `change` maps it to its new state.
    fn change(&self, key: Key, change: impl FnOnce(Option<Value>) -> Option<Value>) {
        self.state().write(key, change);
        self.changes.send_modify(|changes| changes.0 += 1);
    }

    /// The holder of the leader lease and the number of transitions.
    pub fn lease_holder(&self) -> Option<(String, u64)> {
        let state = self.state();
        let key = Key::new("leases", NAMESPACE, "smart-router-leader");
        let spec = &state.objects.get(&key)?["spec"];
        let holder = spec["holderIdentity"].as_str().unwrap_or_default().to_owned();
        Some((holder, spec["leaseTransitions"].as_u64().unwrap_or(0)))
    }

    pub fn delete_lease(&self) {
        self.change(Key::new("leases", NAMESPACE, "smart-router-leader"), |_| None);
    }
}
