//! HTTP requests to the fake API server: get, list, watch, create, replace, merge patch, delete,
//! and the status subresource.

use std::{collections::HashMap, convert::Infallible, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde_json::{Value, json};

use super::{
    ApiState, Shared, namespaces,
    objects::{Key, now, selected},
    resources::{Resource, Target},
    workloads,
};

type Query = HashMap<String, String>;

pub(super) fn failure(code: u16, reason: &str, message: &str) -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason, "message": message});
    (StatusCode::from_u16(code).unwrap(), axum::Json(status)).into_response()
}

pub(super) async fn handle(State(shared): State<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let (answer, is_list_of_pods) = respond(shared.clone(), &parts, &body);
    while is_list_of_pods && shared.state.lock().unwrap().faults.stall_lists {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    answer
}

/// Returns the response, and whether it is a list of pods.
fn respond(shared: Shared, parts: &Parts, body: &Bytes) -> (Response, bool) {
    let query: Query = parts
        .uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.into(), value.replace("%3D", "=").replace("%3A", ":")))
        .collect();
    let path = parts.uri.path();
    let at_once = |answer| (answer, false);
    let mut state = shared.state.lock().unwrap();
    if let Some(refused) = forbidden(&mut state, parts, &query) {
        return at_once(refused);
    }
    if let Some(name) = path.strip_prefix("/api/v1/namespaces/").filter(|it| !it.contains('/')) {
        return at_once(namespaces::object(name, &state.namespace_uid));
    }
    let Some(target) = Target::parse(path)
        .filter(|target| state.has_custom_resources || !target.resource.is_custom)
    else {
        // The API server answers in plain text for a resource that it does not have.
        return at_once((StatusCode::NOT_FOUND, "404 page not found\n").into_response());
    };
    if parts.method == Method::GET && target.name.is_empty() {
        let is_pods = target.resource.plural == "pods";
        if let Some(failed) = state.injected_failure(&query).filter(|_| is_pods) {
            return at_once(failed);
        }
        return match query.get("watch").map(String::as_str) {
            Some("true" | "1") => {
                drop(state);
                at_once(watch(shared, &target, &query))
            }
            _ => (list(&mut state, &target, &query), is_pods),
        };
    }
    let answer = one_object(&mut state, &target, &parts.method, body);
    drop(state);
    shared.notify.send_modify(|changes| changes.0 += 1);
    at_once(answer)
}

/// Returns the response to a request that the injected faults forbid.
fn forbidden(state: &mut ApiState, parts: &Parts, query: &Query) -> Option<Response> {
    let (faults, path) = (&state.faults, parts.uri.path());
    let mut texts = faults.forbidden_path.iter().copied();
    let mut paths = faults.forbidden_paths.iter().map(String::as_str);
    if !texts.any(|text| path.contains(text)) && !paths.any(|text| path.contains(text)) {
        return None;
    }
    state.forbidden += 1;
    let message = match Target::parse(path) {
        None => format!("{path} is forbidden: User \"router\" cannot do this"),
        Some(Target { resource, namespace, name, .. }) => {
            let verb = match &parts.method {
                &Method::GET if query.contains_key("watch") => "watch".into(),
                &Method::GET if name.is_empty() => "list".into(),
                method => method.as_str().to_lowercase(),
            };
            let scope = match namespace {
                "" => "at the cluster scope".to_owned(),
                namespace => format!("in the namespace \"{namespace}\""),
            };
            let (plural, group) = (resource.plural, resource.group());
            format!(
                "{plural} is forbidden: User \"router\" cannot {verb} resource \"{plural}\" in API \
                 group \"{group}\" {scope}"
            )
        }
    };
    Some(failure(403, "Forbidden", &message))
}

impl ApiState {
    /// Returns an injected failure of a list or watch of pods.
    fn injected_failure(&mut self, query: &Query) -> Option<Response> {
        if let Some((code, left)) = &mut self.faults.error_responses
            && *left > 0
        {
            *left -= 1;
            return Some(failure(*code, "Injected", "injected failure"));
        }
        if self.faults.fail_lists && !query.contains_key("watch") {
            self.failed_lists += 1;
            return Some(failure(500, "Injected", "injected failure of a list"));
        }
        None
    }
}

fn list(state: &mut ApiState, target: &Target<'_>, query: &Query) -> Response {
    let Resource { plural, kind, .. } = target.resource;
    let version = state.version;
    let mut rest = match query.get("continue") {
        Some(token) => match state.pages.remove(token) {
            Some(rest) => rest,
            None => return failure(410, "Expired", "the continue token is too old"),
        },
        None => {
            state.lists += usize::from(*plural == "pods");
            let objects = state.objects.iter().filter(|(key, object)| {
                key.plural == *plural && key.is_in(target.namespace) && selected(object, query)
            });
            objects.map(|(_, object)| object.clone()).collect()
        }
    };
    let limit = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let items: Vec<Value> = if rest.len() > limit {
        let token = format!("{plural}-{version}-{}-{}", target.namespace, rest.len());
        let later = rest.split_off(limit);
        metadata["continue"] = json!(token);
        metadata["remainingItemCount"] = json!(later.len());
        state.pages.insert(token, later);
        rest
    } else {
        rest
    };
    let list = json!({"kind": format!("{kind}List"), "apiVersion": target.resource.api_version(), "metadata": metadata, "items": items});
    axum::Json(list).into_response()
}

fn watch(shared: Shared, target: &Target<'_>, query: &Query) -> Response {
    let from: u64 = query.get("resourceVersion").and_then(|text| text.parse().ok()).unwrap_or(0);
    let (query, namespace) = (query.clone(), target.namespace.to_owned());
    let resource = target.resource;
    let is_pods = resource.plural == "pods";
    let (oldest, expire) = {
        let mut state = shared.state.lock().unwrap();
        state.expired += usize::from(from < state.oldest && is_pods);
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
    let lines = stream::unfold((shared, from), move |(mut shared, mut from)| {
        let (query, namespace) = (query.clone(), namespace.clone());
        async move {
            loop {
                if shared.changes.borrow_and_update().1 != begun {
                    return None;
                }
                let (text, seen, delay) = {
                    let state = shared.state.lock().unwrap();
                    let (text, seen) = events_since(&state, from, resource, &namespace, &query);
                    (text, seen, state.faults.event_delay)
                };
                if !text.is_empty() {
                    tokio::time::sleep(delay).await;
                    return Some((Ok::<_, Infallible>(Bytes::from(text)), (shared, seen)));
                }
                // A dropped event is lost: the watch does not look at it again.
                from = seen;
                let changed =
                    tokio::time::timeout(Duration::from_secs(1), shared.changes.changed()).await;
                match changed {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return None,
                    Err(_) => {
                        let object = json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": {"resourceVersion": from.to_string()}});
                        let line = json!({"type": "BOOKMARK", "object": object}).to_string() + "\n";
                        return Some((Ok(Bytes::from(line)), (shared, from)));
                    }
                }
            }
        }
    });
    Response::new(Body::from_stream(lines))
}

/// The events of a watch after a version as lines, and the version of the last one.
fn events_since(
    state: &ApiState,
    from: u64,
    resource: &Resource,
    namespace: &str,
    query: &Query,
) -> (String, u64) {
    let (mut text, mut seen) = (String::new(), from);
    let (faults, is_pods) = (&state.faults, resource.plural == "pods");
    if is_pods && faults.withhold_events {
        return (text, seen);
    }
    for event in state.events.iter().filter(|event| event.version > from) {
        seen = seen.max(event.version);
        if event.key.plural != resource.plural || !event.key.is_in(namespace) {
            continue;
        }
        let is_dropped = is_pods && faults.drop_events;
        let Some((kind, object)) = event.seen_with(query).filter(|_| !is_dropped) else { continue };
        if is_pods && faults.malformed_events {
            text += "{\"type\": \"MODIFIED\", \"object\": 7}\n";
        }
        text += &json!({"type": kind, "object": object}).to_string();
        text += "\n";
    }
    (text, seen)
}

/// A request for one object, or a create.
fn one_object(
    state: &mut ApiState,
    target: &Target<'_>,
    method: &Method,
    body: &Bytes,
) -> Response {
    if target.is_scale {
        return workloads::scale(state, target, method, body);
    }
    let Target { resource, namespace, name, is_status, .. } = target;
    let not_found = || {
        let (plural, group) = (resource.plural, resource.group());
        let suffix = if group.is_empty() { String::new() } else { format!(".{group}") };
        failure(404, "NotFound", &format!("{plural}{suffix} \"{name}\" not found"))
    };
    let known = state.objects.get(&Key::new(resource.plural, namespace, name)).cloned();
    let given: Value = serde_json::from_slice(body).unwrap_or_default();
    let changed = match (method.as_str(), known) {
        ("GET", Some(known)) => return axum::Json(known).into_response(),
        ("POST", _) if name.is_empty() => return create(state, target, given),
        ("DELETE", Some(known)) => {
            state.write(Key::new(resource.plural, namespace, name), |_| None);
            return axum::Json(known).into_response();
        }
        ("GET" | "PUT" | "PATCH" | "DELETE", None) => return not_found(),
        ("PUT", Some(known)) => {
            let version = &given["metadata"]["resourceVersion"];
            if !version.is_null() && *version != known["metadata"]["resourceVersion"] {
                return failure(409, "Conflict", "the object has been modified");
            }
            (given, known)
        }
        ("PATCH", Some(known)) => {
            let mut patched = known.clone();
            merge(&mut patched, &given);
            if patched["metadata"]["uid"] != known["metadata"]["uid"] {
                return failure(422, "Invalid", "metadata.uid: field is immutable");
            }
            (patched, known)
        }
        _ => return failure(405, "MethodNotAllowed", "the server does not allow this method"),
    };
    let (mut after, known) = changed;
    if resource.plural == "events" {
        let mut others = [after.clone(), known.clone()];
        others.iter_mut().for_each(|event| drop(event.as_object_mut().unwrap().remove("series")));
        let count = after["series"]["count"].as_u64();
        if others[0] != others[1] || count.is_some_and(|count| count < 2) {
            return failure(422, "Invalid", "only a series of 2 or more may change");
        }
    }
    if *is_status {
        let status = after["status"].clone();
        after = known.clone();
        after["status"] = status;
    } else if resource.is_custom {
        after["status"] = known["status"].clone();
    }
    let key = Key::new(resource.plural, namespace, name);
    axum::Json(state.write(key, |_| Some(after))).into_response()
}

fn create(state: &mut ApiState, target: &Target<'_>, mut given: Value) -> Response {
    let Target { resource, namespace, .. } = target;
    let name = given["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let key = Key::new(resource.plural, namespace, &name);
    if name.is_empty() {
        return failure(422, "Invalid", "metadata.name: Required value");
    }
    if state.objects.contains_key(&key) {
        return failure(409, "AlreadyExists", &format!("{} \"{name}\" exists", resource.plural));
    }
    let event_is_elsewhere =
        resource.plural == "events" && given["regarding"]["namespace"].as_str() != Some(namespace);
    if event_is_elsewhere {
        return failure(422, "Invalid", "regarding.namespace: must be that of the event");
    }
    if resource.is_custom {
        given.as_object_mut().unwrap().remove("status");
    }
    given["metadata"]["namespace"] = json!(namespace);
    given["metadata"]["uid"] = json!(format!("{name}-{}", state.version));
    given["metadata"]["creationTimestamp"] = json!(now());
    (StatusCode::CREATED, axum::Json(state.write(key, |_| Some(given)))).into_response()
}

/// Applies a JSON merge patch (RFC 7386).
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    let target = object.as_object_mut().expect("an object");
    for (name, value) in fields {
        if value.is_null() {
            target.remove(name);
        } else {
            merge(target.entry(name).or_insert(Value::Null), value);
        }
    }
}
