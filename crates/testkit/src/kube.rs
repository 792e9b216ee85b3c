//! A Kubernetes API server, as far as the router sees one: pods to list and watch,
//! leases to fight for, and whatever can go wrong with both.

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

/// Events that a watch may still ask for; those before are gone.
const HISTORY: usize = 10_000;

#[derive(Default)]
struct ApiState {
    /// Tells this cluster from others, whatever address it is reached by.
    namespace_uid: String,
    version: u64,
    pods: BTreeMap<String, Value>,
    expired: usize,
    leases: BTreeMap<String, Value>,
    events: Vec<PodEvent>,
    /// The oldest version from which a watch may go on.
    oldest: u64,
    /// Lists that are being read page by page.
    pages: HashMap<String, Vec<Value>>,
    faults: Faults,
    /// How often pods were listed (first pages only), and how many of these lists failed.
    lists: usize,
    failed_lists: usize,
    /// How many requests were answered 403.
    forbidden: usize,
}

/// A change of a pod. A watch with a selector gets it as an event of its own kind, so the
/// object before the change is kept, too.
struct PodEvent {
    version: u64,
    before: Option<Value>,
    /// `None` once the pod is deleted.
    after: Option<Value>,
}

impl PodEvent {
    /// Type and object, as the watch cache of an API server converts a change for one watch:
    /// an object that stops to match is `DELETED` with its former content and the version of
    /// the change, and one that begins to match is `ADDED`.
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

/// What goes wrong.
#[derive(Default, Clone)]
pub struct Faults {
    /// Answers this to so many requests for pods.
    pub answer: Option<(u16, usize)>,
    /// Keeps events from watchers.
    pub mute: bool,
    /// Loses events: watchers never hear of them.
    pub lose: bool,
    /// Takes so long over every event.
    pub delay: Duration,
    /// Forbids what is on this path.
    pub forbid: Option<&'static str>,
    /// Sends lines that are not objects.
    pub garbage: bool,
    /// Says by the status of the answer, not in a line, that a watch is too old.
    pub expire: bool,
    /// Answers 500 to whoever wants a list.
    pub fail_lists: bool,
    /// Keeps the answers to lists until it is lifted: what they say is what was true before.
    pub hold_lists: bool,
}

pub struct Kube {
    world: Arc<Mutex<ApiState>>,
    /// Rings for watchers when the world has changed; a change of the second
    /// number ends them.
    bell: watch::Sender<(u64, u64)>,
    runtime: Option<Runtime>,
    pub port: u16,
    pub config: PathBuf,
}

#[derive(Clone)]
struct Shared {
    world: Arc<Mutex<ApiState>>,
    bell: watch::Receiver<(u64, u64)>,
}

impl Kube {
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
        let world = ApiState { version: 100, oldest: 100, namespace_uid, ..ApiState::default() };
        let mut kube = Self {
            world: Arc::new(Mutex::new(world)),
            bell: watch::Sender::new((0, 0)),
            runtime: None,
            port,
            config,
        };
        kube.resume();
        kube
    }

    /// Takes the server away, with all its connections.
    pub fn vanish(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    /// Brings it back, with all it knew.
    pub fn resume(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let shared = Shared { world: self.world.clone(), bell: self.bell.subscribe() };
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

    fn world(&self) -> MutexGuard<'_, ApiState> {
        self.world.lock().unwrap()
    }

    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.world().faults);
    }

    /// Cuts all watches off.
    pub fn drop_watches(&self) {
        self.bell.send_modify(|bell| bell.1 += 1);
    }

    /// Forgets the past: who asks for it gets 410.
    pub fn compact(&self) {
        let mut world = self.world();
        world.version += 1;
        world.oldest = world.version;
        world.events.clear();
    }

    /// How often somebody was told that the past is gone.
    pub fn expired(&self) -> usize {
        self.world().expired
    }

    pub fn forbidden(&self) -> usize {
        self.world().forbidden
    }

    pub fn lists(&self) -> usize {
        self.world().lists
    }

    pub fn failed_lists(&self) -> usize {
        self.world().failed_lists
    }

    /// Changes a pod; `change` gets the pod as it is and answers what it becomes. A pod that
    /// was not there and is not there afterwards gives no event.
    fn change(&self, name: &str, change: impl FnOnce(Option<Value>) -> Option<Value>) {
        let mut world = self.world();
        let before = world.pods.get(name).cloned();
        let after = change(before.clone());
        if before.is_none() && after.is_none() {
            return;
        }
        world.version += 1;
        let version = world.version;
        let after = after.map(|pod| versioned(pod, version));
        match &after {
            None => drop(world.pods.remove(name)),
            Some(pod) => drop(world.pods.insert(name.into(), pod.clone())),
        }
        world.events.push(PodEvent { version, before, after });
        if world.events.len() > HISTORY {
            let gone = world.events.remove(0);
            world.oldest = gone.version;
        }
        drop(world);
        self.bell.send_modify(|bell| bell.0 += 1);
    }

    /// A pod that is ready to serve.
    pub fn add(&self, name: &str) {
        self.add_with(name, |_| {});
    }

    pub fn add_with(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let uid = format!("{name}-{}", self.world().version);
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

    /// Begins to delete a pod.
    pub fn terminate(&self, name: &str) {
        self.update(name, |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(name, |_| None);
    }

    pub fn uid(&self, name: &str) -> Option<String> {
        self.world().pods.get(name)?["metadata"]["uid"].as_str().map(str::to_owned)
    }

    pub fn pod(&self, name: &str) -> Value {
        self.world().pods[name].clone()
    }

    /// Tells watchers what was true of a pod before, or, what looks alike, of another one
    /// of its name, which is new.
    pub fn tell_again(&self, mut was: Value, as_another: bool) {
        let mut world = self.world();
        world.version += 1;
        let version = world.version;
        if as_another {
            was["metadata"]["uid"] = json!(format!("{}-again", was["metadata"]["uid"]));
            was = versioned(was, version);
        }
        world.events.push(PodEvent { version, before: Some(was.clone()), after: Some(was) });
        drop(world);
        self.bell.send_modify(|bell| bell.0 += 1);
    }

    /// Who holds the lease, and in which term.
    pub fn holder(&self) -> Option<(String, u64)> {
        let world = self.world();
        let spec = &world.leases.get("smart-router-leader")?["spec"];
        let holder = spec["holderIdentity"].as_str().unwrap_or_default().to_owned();
        Some((holder, spec["leaseTransitions"].as_u64().unwrap_or(0)))
    }

    pub fn delete_lease(&self) {
        self.world().leases.clear();
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
    while is_list && shared.world.lock().unwrap().faults.hold_lists {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    answer
}

/// The answer to a request, and whether it is a list of pods.
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
    let mut world = shared.world.lock().unwrap();
    if world.faults.forbid.is_some_and(|forbidden| path.contains(forbidden)) {
        let message = format!("{path} is forbidden: User cannot do this");
        world.forbidden += 1;
        return at_once(failure(403, "Forbidden", &message));
    }
    if path == "/api/v1/namespaces/default/pods" && parts.method == Method::GET {
        if let Some((code, left)) = &mut world.faults.answer
            && *left > 0
        {
            *left -= 1;
            let code = *code;
            return at_once(failure(code, "Injected", "this goes wrong on purpose"));
        }
        if world.faults.fail_lists && !query.contains_key("watch") {
            world.failed_lists += 1;
            return at_once(failure(500, "Injected", "no lists today"));
        }
        drop(world);
        return match query.get("watch").map(String::as_str) {
            Some("true" | "1") => at_once(watch_pods(shared, &query)),
            _ => (list_pods(&shared, &query), true),
        };
    }
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    at_once(match path.strip_prefix(leases) {
        Some(rest) => lease(&mut world, &parts.method, rest.trim_start_matches('/'), body),
        None if path == "/api/v1/namespaces/default" => cluster::namespace(&world.namespace_uid),
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
    let mut world = shared.world.lock().unwrap();
    let version = world.version;
    let mut rest = match query.get("continue") {
        Some(token) => match world.pages.remove(token) {
            Some(rest) => rest,
            None => return failure(410, "Expired", "the continue token is too old"),
        },
        None => {
            world.lists += 1;
            world.pods.values().filter(|pod| selected(pod, query)).cloned().collect()
        }
    };
    let limit = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let items: Vec<Value> = if rest.len() > limit {
        let token = format!("page-{version}-{}", rest.len());
        let later = rest.split_off(limit);
        metadata["continue"] = json!(token);
        metadata["remainingItemCount"] = json!(later.len());
        world.pages.insert(token, later);
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
        let mut world = shared.world.lock().unwrap();
        world.expired += usize::from(from < world.oldest);
        (world.oldest, world.faults.expire)
    };
    if from < oldest && expire {
        return failure(410, "Expired", "too old resource version");
    }
    if from < oldest {
        let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old resource version"});
        let line = json!({"type": "ERROR", "object": status}).to_string() + "\n";
        return Response::new(Body::from(line));
    }
    let begun = shared.bell.borrow().1;
    let lines = stream::unfold((shared, from), move |(mut shared, from)| {
        let query = query.clone();
        async move {
            loop {
                if shared.bell.borrow_and_update().1 != begun {
                    return None;
                }
                let (mut text, mut seen) = (String::new(), from);
                let delay = {
                    let world = shared.world.lock().unwrap();
                    if !world.faults.mute {
                        for event in world.events.iter().filter(|event| event.version > from) {
                            let told = event.seen_with(&query).filter(|_| !world.faults.lose);
                            if let Some((kind, object)) = told {
                                if world.faults.garbage {
                                    text += "{\"type\": \"MODIFIED\", \"object\": 7}\n";
                                }
                                text += &json!({"type": kind, "object": object}).to_string();
                                text += "\n";
                            }
                            seen = seen.max(event.version);
                        }
                    }
                    world.faults.delay
                };
                if !text.is_empty() {
                    tokio::time::sleep(delay).await;
                    return Some((Ok::<_, Infallible>(Bytes::from(text)), (shared, seen)));
                }
                let from = seen;
                let rung =
                    tokio::time::timeout(Duration::from_secs(1), shared.bell.changed()).await;
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

fn lease(world: &mut ApiState, method: &Method, name: &str, body: &Bytes) -> Response {
    if *method == Method::GET {
        return match world.leases.get(name) {
            Some(lease) => axum::Json(lease.clone()).into_response(),
            None => failure(404, "NotFound", "leases.coordination.k8s.io not found"),
        };
    }
    let mut given: Value = serde_json::from_slice(body).unwrap();
    let name = given["metadata"]["name"].as_str().unwrap_or(name).to_owned();
    let known = world.leases.get(&name).map(|lease| lease["metadata"]["resourceVersion"].clone());
    match (method.as_str(), known) {
        ("POST", Some(_)) => return failure(409, "AlreadyExists", "the lease exists"),
        ("PUT", None) => return failure(404, "NotFound", "no such lease"),
        ("PUT", Some(version)) if given["metadata"]["resourceVersion"] != version => {
            return failure(409, "Conflict", "the object has been modified");
        }
        ("POST", None) | ("PUT", Some(_)) => {}
        _ => return failure(405, "MethodNotAllowed", "not here"),
    }
    world.version += 1;
    given["metadata"]["resourceVersion"] = json!(world.version.to_string());
    given["metadata"]["namespace"] = json!("default");
    world.leases.insert(name, given.clone());
    axum::Json(given).into_response()
}
