//! The objects of the fake API server, and their changes.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{ApiState, resources::Resource};

/// Maximum number of events from which a watch can resume; older ones are compacted.
const MAX_EVENTS: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) plural: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
}

impl Key {
    pub(super) fn new(plural: &'static str, namespace: &str, name: &str) -> Self {
        Self { plural, namespace: namespace.into(), name: name.into() }
    }

    /// Whether a list of this namespace, or of all if it is empty, contains the object.
    pub(super) fn is_in(&self, namespace: &str) -> bool {
        namespace.is_empty() || self.namespace == namespace
    }
}

/// A change of an object. The event type depends on the selector of the watch, so both the object
/// before and after the change are stored.
pub(super) struct ObjectEvent {
    pub(super) key: Key,
    pub(super) version: u64,
    pub(super) before: Option<Value>,
    /// `None` once the object is deleted.
    pub(super) after: Option<Value>,
}

impl ObjectEvent {
    /// Event type and object for one watch, as the watch cache of an API server converts them:
    /// an object that stops matching is `DELETED` with its former content and the version of
    /// the change, and one that starts matching is `ADDED`.
    pub(super) fn seen_with(
        &self,
        query: &HashMap<String, String>,
    ) -> Option<(&'static str, Value)> {
        let after = self.after.as_ref().filter(|object| selected(object, query));
        let before = self.before.as_ref().filter(|object| selected(object, query));
        match (before, after) {
            (None, None) => None,
            (None, Some(object)) => Some(("ADDED", object.clone())),
            (Some(_), Some(object)) => Some(("MODIFIED", object.clone())),
            (Some(object), None) => Some(("DELETED", versioned(object.clone(), self.version))),
        }
    }
}

/// An object with another resource version, unless it has no metadata.
pub(super) fn versioned(mut object: Value, version: u64) -> Value {
    if object["metadata"].is_object() {
        object["metadata"]["resourceVersion"] = json!(version.to_string());
    }
    object
}

/// Whether the selectors of a request match an object: one label, and the one field of nodes that
/// the router selects by.
pub(super) fn selected(object: &Value, query: &HashMap<String, String>) -> bool {
    let pair = |name: &str| query.get(name).and_then(|text| text.split_once('='));
    let has_label = pair("labelSelector").is_none_or(|(label, value)| {
        object["metadata"]["labels"][label] == value || !object["metadata"].is_object()
    });
    let has_field = pair("fieldSelector").is_none_or(|(field, value)| {
        assert_eq!(field, "spec.unschedulable", "the only known field selector");
        let is_unschedulable = object["spec"]["unschedulable"] == json!(true);
        is_unschedulable == (value == "true")
    });
    has_label && has_field
}

/// The time in the format of the API: whole seconds.
pub(super) fn now() -> String {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap().to_string()
}

impl ApiState {
    /// Changes an object; `change` maps the object to its new state. An object that is absent
    /// before and after creates no event, nor does a write that changes nothing of a custom object.
    /// (Renewals of a Lease differ by their time, except under the frozen clocks of tests.) A new
    /// spec raises the generation.
    pub(super) fn write(
        &mut self,
        key: Key,
        change: impl FnOnce(Option<Value>) -> Option<Value>,
    ) -> Value {
        let before = self.objects.get(&key).cloned();
        let after = change(before.clone());
        let is_custom = Resource::find(key.plural).is_custom;
        if before == after && (is_custom || after.is_none()) {
            return after.unwrap_or_default();
        }
        self.version += 1;
        let version = self.version;
        let after = after.map(|object| self.numbered(object, before.as_ref(), &key));
        let after = after.map(|object| versioned(object, version));
        match &after {
            None => drop(self.objects.remove(&key)),
            Some(object) => drop(self.objects.insert(key.clone(), object.clone())),
        }
        let written = after.clone().unwrap_or_default();
        self.events.push(ObjectEvent { key, version, before, after });
        if self.events.len() > MAX_EVENTS {
            let gone = self.events.remove(0);
            self.oldest = gone.version;
        }
        written
    }

    /// Sets the generation of a custom object.
    fn numbered(&self, mut object: Value, before: Option<&Value>, key: &Key) -> Value {
        if !Resource::find(key.plural).is_custom {
            return object;
        }
        let known = before.and_then(|before| before["metadata"]["generation"].as_u64());
        let is_new = before.is_none_or(|before| before["spec"] != object["spec"]);
        object["metadata"]["generation"] = json!(known.unwrap_or(0) + u64::from(is_new));
        object
    }
}
