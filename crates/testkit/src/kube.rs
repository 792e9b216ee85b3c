//! A fake Kubernetes API server with fault injection: list and watch of pods, and leases.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

use super::{cluster, scratch};

/// Maximum number of events from which a watch can resume; older ones are compacted.
const MAX_EVENTS: usize = 10_000;

#[derive(Default)]
struct ApiState {
    /// Identifies the cluster, independent of its address.
    namespace_uid: String,
    version: u64,
    pods: BTreeMap<String, Value>,
    expired: usize,
    leases: BTreeMap<String, Value>,
    events: Vec<PodEvent>,
    /// The oldest version from which a watch can resume.
    oldest: u64,
    /// Remaining items of paged lists, by continue token.
    pages: HashMap<String, Vec<Value>>,
    faults: Faults,
    /// Number of pod lists (first pages only), and of failed ones.
    lists: usize,
    failed_lists: usize,
    /// Number of requests answered with 403.
    forbidden: usize,
}

/// A change of a pod. The event type depends on the selector of the watch, so both the object
/// before and after the change are stored.
struct PodEvent {
    version: u64,
    before: Option<Value>,
    /// `None` once the pod is deleted.
    after: Option<Value>,
}

impl PodEvent {
    /// Event type and object for one watch, as the watch cache of an API server converts them:
    /// an object that stops matching is `DELETED` with its former content and the version of
    /// the change, and one that starts matching is `ADDED`.
    fn seen_with(&self, query: &HashMap<String, String>) -> Option<(&'static str, Value)> {
        let after = self.after.as_ref().filter(|pod| selected(pod, query));
        let before = self.before.as_ref().filter(|pod| selected(pod, query));
        match (before, after) {
            (None, None) => None,
            (None, Some(pod)) => Some(("ADDED", pod.clone())),
            (Some(_), Some(pod)) => Some(("MODIFIED", pod.clone())),
            (Some(pod), None) => Some(("DELETED", versioned(pod.clone(), self.version))),
        }
    }
}

/// A pod with another resource version, unless it has no metadata.
fn versioned(mut pod: Value, version: u64) -> Value {
    if pod["metadata"].is_object() {
        pod["metadata"]["resourceVersion"] = json!(version.to_string());
    }
    pod
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

#[derive(Clone)]
struct Shared {
    state: Arc<Mutex<ApiState>>,
    changes: watch::Receiver<(u64, u64)>,
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
        let namespace_uid = cluster::namespace_uid(port);
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
        let shared = Shared { state: self.state.clone(), changes: self.changes.subscribe() };
        let port = self.port;
        runtime.spawn(async move {
            let listener = loop {
                match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
                    Ok(listener) => break listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            axum::serve(listener, Router::new().fallback(handle).with_state(shared)).await.unwrap();
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

    /// Changes a pod; `change` maps the pod to its new state. A pod that is absent before and
    /// after creates no event.
    fn change(&self, name: &str, change: impl FnOnce(Option<Value>) -> Option<Value>) {
        let mut state = self.state();
        let before = state.pods.get(name).cloned();
        let after = change(before.clone());
        if before.is_none() && after.is_none() {
            return;
        }
        state.version += 1;
        let version = state.version;
        let after = after.map(|pod| versioned(pod, version));
        match &after {
            None => drop(state.pods.remove(name)),
            Some(pod) => drop(state.pods.insert(name.into(), pod.clone())),
        }
        state.events.push(PodEvent { version, before, after });
        if state.events.len() > MAX_EVENTS {
            let gone = state.events.remove(0);
            state.oldest = gone.version;
        }
        drop(state);
        self.changes.send_modify(|changes| changes.0 += 1);
    }

    /// A pod that is ready to serve.
    pub fn add(&self, name: &str) {
        self.add_with(name, |_| {});
    }

    pub fn add_with(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let uid = format!("{name}-{}", self.state().version);
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": uid, "labels": {"app": "voice-agent"}},
            "spec": {"containers": [{"name": "agent"}, {"name": "sidecar"}]},
            "status": {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [
                    {"name": "agent", "restartCount": 0, "ready": true, "image": "a", "imageID": "a"},
                    {"name": "sidecar", "restartCount": 0, "ready": true, "image": "b", "imageID": "b"},
                ],
            },
        });
        change(&mut pod);
        self.change(name, |_| Some(pod));
    }

    pub fn update(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.change(name, |pod| {
            let mut pod = pod?;
            change(&mut pod);
            Some(pod)
        });
    }

    /// Marks a pod as terminating.
    pub fn terminate(&self, name: &str) {
        self.update(name, |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(name, |_| None);
    }

    pub fn uid(&self, name: &str) -> Option<String> {
        self.state().pods.get(name)?["metadata"]["uid"].as_str().map(str::to_owned)
    }

    pub fn pod(&self, name: &str) -> Value {
        self.state().pods[name].clone()
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
        state.events.push(PodEvent { version, before: Some(was.clone()), after: Some(was) });
        drop(state);
        self.changes.send_modify(|changes| changes.0 += 1);
    }

    /// The holder of the leader lease and the number of transitions.
    pub fn lease_holder(&self) -> Option<(String, u64)> {
        let state = self.state();
        let spec = &state.leases.get("smart-router-leader")?["spec"];
        let holder = spec["holderIdentity"].as_str().unwrap_or_default().to_owned();
        Some((holder, spec["leaseTransitions"].as_u64().unwrap_or(0)))
    }

    pub fn delete_lease(&self) {
        self.state().leases.clear();
    }
}

fn failure(code: u16, reason: &str, message: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message});
    (StatusCode::from_u16(code).unwrap(), axum::Json(status)).into_response()
}

async fn handle(State(shared): State<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let (answer, is_list) = respond(shared.clone(), &parts, &body);
    while is_list && shared.state.lock().unwrap().faults.stall_lists {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    answer
}

/// Returns the response, and whether it is a list of pods.
fn respond(shared: Shared, parts: &Parts, body: &Bytes) -> (Response, bool) {
    let query: HashMap<String, String> = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.into(), value.replace("%3D", "=").replace("%3A", ":")))
        .collect();
    let path = parts.uri.path().to_owned();
    let at_once = |answer| (answer, false);
    let mut state = shared.state.lock().unwrap();
    if state.faults.forbidden_path.is_some_and(|forbidden| path.contains(forbidden)) {
        let message = format!("{path} is forbidden: User cannot do this");
        state.forbidden += 1;
        return at_once(failure(403, "Forbidden", &message));
    }
    if path == "/api/v1/namespaces/default/pods" && parts.method == Method::GET {
        if let Some((code, left)) = &mut state.faults.error_responses
            && *left > 0
        {
            *left -= 1;
            let code = *code;
            return at_once(failure(code, "Injected", "injected failure"));
        }
        if state.faults.fail_lists && !query.contains_key("watch") {
            state.failed_lists += 1;
            return at_once(failure(500, "Injected", "injected failure of a list"));
        }
        drop(state);
        return match query.get("watch").map(String::as_str) {
            Some("true" | "1") => at_once(watch_pods(shared, &query)),
            _ => (list_pods(&shared, &query), true),
        };
    }
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    at_once(match path.strip_prefix(leases) {
        Some(rest) => lease(&mut state, &parts.method, rest.trim_start_matches('/'), body),
        None if path == "/api/v1/namespaces/default" => cluster::namespace(&state.namespace_uid),
        None => failure(404, "NotFound", &format!("the server could not find {path}")),
    })
}

fn selected(pod: &Value, query: &HashMap<String, String>) -> bool {
    let Some((label, value)) = query.get("labelSelector").and_then(|text| text.split_once('='))
    else {
        return true;
    };
    pod["metadata"]["labels"][label] == value || !pod["metadata"].is_object()
}

fn list_pods(shared: &Shared, query: &HashMap<String, String>) -> Response {
    let mut state = shared.state.lock().unwrap();
    let version = state.version;
    let mut rest = match query.get("continue") {
        Some(token) => match state.pages.remove(token) {
            Some(rest) => rest,
            None => return failure(410, "Expired", "the continue token is too old"),
        },
        None => {
            state.lists += 1;
            state.pods.values().filter(|pod| selected(pod, query)).cloned().collect()
        }
    };
    let limit = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let items: Vec<Value> = if rest.len() > limit {
        let token = format!("page-{version}-{}", rest.len());
        let later = rest.split_off(limit);
        metadata["continue"] = json!(token);
        metadata["remainingItemCount"] = json!(later.len());
        state.pages.insert(token, later);
        rest
    } else {
        rest
    };
    axum::Json(json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}))
        .into_response()
}

fn watch_pods(shared: Shared, query: &HashMap<String, String>) -> Response {
    let from: u64 = query.get("resourceVersion").and_then(|text| text.parse().ok()).unwrap_or(0);
    let query = query.clone();
    let (oldest, expire) = {
        let mut state = shared.state.lock().unwrap();
        state.expired += usize::from(from < state.oldest);
        (state.oldest, state.faults.expire_with_status)
    };
    if from < oldest && expire {
        return failure(410, "Expired", "too old resource version");
    }
    if from < oldest {
        let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old resource version"});
        let line = json!({"type": "ERROR", "object": status}).to_string() + "\n";
        return Response::new(Body::from(line));
    }
    let begun = shared.changes.borrow().1;
    let lines = stream::unfold((shared, from), move |(mut shared, from)| {
        let query = query.clone();
        async move {
            loop {
                if shared.changes.borrow_and_update().1 != begun {
                    return None;
                }
                let (mut text, mut seen) = (String::new(), from);
                let delay = {
                    let state = shared.state.lock().unwrap();
                    if !state.faults.withhold_events {
                        for event in state.events.iter().filter(|event| event.version > from) {
                            let sent =
                                event.seen_with(&query).filter(|_| !state.faults.drop_events);
                            if let Some((kind, object)) = sent {
                                if state.faults.malformed_events {
                                    text += "{\"type\": \"MODIFIED\", \"object\": 7}\n";
                                }
                                text += &json!({"type": kind, "object": object}).to_string();
                                text += "\n";
                            }
                            seen = seen.max(event.version);
                        }
                    }
                    state.faults.event_delay
                };
                if !text.is_empty() {
                    tokio::time::sleep(delay).await;
                    return Some((Ok::<_, Infallible>(Bytes::from(text)), (shared, seen)));
                }
                let from = seen;
                let rung =
                    tokio::time::timeout(Duration::from_secs(1), shared.changes.changed()).await;
                match rung {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return None,
                    Err(_) => {
                        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": from.to_string()}});
                        let line = json!({"type": "BOOKMARK", "object": object}).to_string() + "\n";
                        return Some((Ok(Bytes::from(line)), (shared, from)));
                    }
                }
            }
        }
    });
    Response::new(Body::from_stream(lines))
}

fn lease(state: &mut ApiState, method: &Method, name: &str, body: &Bytes) -> Response {
    if *method == Method::GET {
        return match state.leases.get(name) {
            Some(lease) => axum::Json(lease.clone()).into_response(),
            None => failure(404, "NotFound", "leases.coordination.k8s.io not found"),
        };
    }
    let mut given: Value = serde_json::from_slice(body).unwrap();
    let name = given["metadata"]["name"].as_str().unwrap_or(name).to_owned();
    let known = state.leases.get(&name).map(|lease| lease["metadata"]["resourceVersion"].clone());
    match (method.as_str(), known) {
        ("POST", Some(_)) => return failure(409, "AlreadyExists", "the lease exists"),
        ("PUT", None) => return failure(404, "NotFound", "no such lease"),
        ("PUT", Some(version)) if given["metadata"]["resourceVersion"] != version => {
            return failure(409, "Conflict", "the object has been modified");
        }
        ("POST", None) | ("PUT", Some(_)) => {}
        _ => return failure(405, "MethodNotAllowed", "not here"),
    }
    state.version += 1;
    given["metadata"]["resourceVersion"] = json!(state.version.to_string());
    given["metadata"]["namespace"] = json!("default");
    state.leases.insert(name, given.clone());
    axum::Json(given).into_response()
}
