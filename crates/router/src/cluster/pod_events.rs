//! Writes Kubernetes Events about pods, which `kubectl describe pod` shows.

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Error,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{ApiFailure, Cluster, is_status};

/// The API limits the note of an Event (bytes).
const MAX_NOTE: usize = 1_024;
const CONTROLLER: &str = "smart-router";

/// An Event about a pod, with its repetitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodEvent {
    /// Identifies the Event in its namespace.
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) uid: String,
    pub(crate) reason: &'static str,
    pub(crate) note: String,
    /// Otherwise the type is Normal.
    pub(crate) is_warning: bool,
    pub(crate) count: u32,
}

/// Writes Events as one replica.
#[derive(Clone)]
pub(crate) struct PodEvents {
    cluster: Cluster,
    instance: String,
}

impl PodEvents {
    pub(crate) fn new(cluster: Cluster, instance: String) -> Self {
        Self { cluster, instance }
    }

    /// Writes an Event, or the number of its repetitions.
    pub(crate) async fn publish(&self, event: &PodEvent) -> Result<(), ApiFailure> {
        let api: Api<Event> = Api::namespaced(self.cluster.client.clone(), &event.namespace);
        self.write(&api, event).await.map_err(|error| {
            let namespace = &event.namespace;
            let rule =
                format!("create and patch on events (events.k8s.io) in the namespace {namespace}");
            ApiFailure::Error { error, rule }
        })
    }

    async fn write(&self, api: &Api<Event>, event: &PodEvent) -> Result<(), Error> {
        if event.count > 1 {
            let series = EventSeries {
                count: i32::try_from(event.count).unwrap_or(i32::MAX),
                last_observed_time: MicroTime(Timestamp::now()),
            };
            // The API server allows no change of any other field.
            let patch = json!({"series": series});
            let patched =
                api.patch(&event.name, &PatchParams::default(), &Patch::Merge(patch)).await;
            match patched {
                // The API server deletes an Event after an hour.
                Err(error) if is_status(Some(&error), 404) => {}
                patched => return patched.map(drop),
            }
        }
        match api.create(&PostParams::default(), &self.object(event)).await {
            Err(error) if is_status(Some(&error), 409) => Ok(()),
            created => created.map(drop),
        }
    }

    fn object(&self, event: &PodEvent) -> Event {
        Event {
            metadata: ObjectMeta {
                name: Some(event.name.clone()),
                namespace: Some(event.namespace.clone()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            reporting_controller: Some(CONTROLLER.into()),
            reporting_instance: Some(self.instance.clone()),
            action: Some("Route".into()),
            reason: Some(event.reason.into()),
            type_: Some(if event.is_warning { "Warning" } else { "Normal" }.into()),
            note: Some(note(event)),
            regarding: Some(ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                name: Some(event.pod.clone()),
                namespace: Some(event.namespace.clone()),
                uid: Some(event.uid.clone()),
                ..ObjectReference::default()
            }),
            ..Event::default()
        }
    }
}

fn note(event: &PodEvent) -> String {
    let mut end = event.note.len().min(MAX_NOTE);
    while !event.note.is_char_boundary(end) {
        end -= 1;
    }
    event.note[..end].to_owned()
}
