//! Watches the VoiceTier and VoiceMerchant objects of the router's namespace, and writes their
//! status. While their CustomResourceDefinitions are not installed, the watch looks for them.

use std::{collections::BTreeMap, pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
    runtime::watcher::{self, Event},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::{ApiErrors, ApiFailure, Cluster, PAGE_SIZE, api_errors::Report, cause_of, is_status};
use crate::lifecycle::Lifecycle;
use fleet::manifests::Manifest;

const GROUP: &str = "voice.smart-router.io";
const VERSION: &str = "v1alpha1";
/// Backoff after an error.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(15);
/// Consecutive answers of 404 after which the resource counts as not installed: an API server that
/// starts may answer so for a moment.
const MIN_ABSENCES: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ManifestKind {
    Tier,
    Merchant,
}

impl ManifestKind {
    pub(crate) const ALL: [Self; 2] = [Self::Tier, Self::Merchant];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Tier => "VoiceTier",
            Self::Merchant => "VoiceMerchant",
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::Tier => "voicetiers",
            Self::Merchant => "voicemerchants",
        }
    }

    fn resource(self) -> ApiResource {
        let kind = GroupVersionKind::gvk(GROUP, VERSION, self.as_str());
        ApiResource::from_gvk_with_plural(&kind, self.plural())
    }
}

/// An object and its status as last read.
#[derive(Debug, Clone)]
struct Object {
    manifest: Manifest,
    status: Value,
}

impl Object {
    fn read(object: DynamicObject) -> (String, Self) {
        let metadata = object.metadata;
        let name = metadata.name.unwrap_or_default();
        let manifest = Manifest {
            name: name.clone(),
            generation: metadata.generation.unwrap_or(0),
            created: metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
            spec: object.data.get("spec").cloned().unwrap_or_default(),
        };
        let status = object.data.get("status").cloned().unwrap_or_default();
        (name, Self { manifest, status })
    }
}

type Events = Pin<Box<dyn Stream<Item = Result<Event<DynamicObject>, watcher::Error>> + Send>>;

/// The watch of one kind.
struct KindWatch {
    cluster: Cluster,
    kind: ManifestKind,
    events: Events,
    /// `None` until the objects are known.
    objects: Option<BTreeMap<String, Object>>,
    /// Objects of a list that is not complete.
    listed: BTreeMap<String, Object>,
    /// Consecutive answers of 404.
    absences: u32,
    errors: ApiErrors,
    retry_at: Instant,
    backoff: Duration,
}

impl KindWatch {
    fn new(cluster: &Cluster, kind: ManifestKind) -> Self {
        Self {
            cluster: cluster.clone(),
            kind,
            events: cluster.watch_manifests(kind),
            objects: None,
            listed: BTreeMap::new(),
            absences: 0,
            errors: ApiErrors::default(),
            retry_at: Instant::now(),
            backoff: MIN_BACKOFF,
        }
    }

    async fn next(&mut self) -> Result<Event<DynamicObject>, watcher::Error> {
        sleep_until(self.retry_at).await;
        match self.events.next().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Applies an event; returns whether objects or their specs changed.
    fn apply(
        &mut self,
        event: Result<Event<DynamicObject>, watcher::Error>,
        lifecycle: &Lifecycle,
    ) -> bool {
        match event {
            Ok(Event::Init) => {
                self.listed.clear();
                false
            }
            Ok(Event::InitApply(object)) => {
                let (name, object) = Object::read(object);
                self.listed.insert(name, object);
                false
            }
            Ok(Event::InitDone) => {
                if self.absences >= MIN_ABSENCES {
                    tracing::info!(
                        kind = self.kind.as_str(),
                        "the resource is installed; applying its objects"
                    );
                }
                self.objects = Some(std::mem::take(&mut self.listed));
                (self.absences, self.backoff) = (0, MIN_BACKOFF);
                self.errors.clear();
                lifecycle.set_problem(self.kind.plural(), None);
                true
            }
            Ok(Event::Apply(object)) => {
                let (name, object) = Object::read(object);
                let manifest = object.manifest.clone();
                let known = self.objects.get_or_insert_default().insert(name, object);
                // A change of the status alone is this router's own.
                known.is_none_or(|known| known.manifest != manifest)
            }
            Ok(Event::Delete(object)) => {
                let name = object.metadata.name.unwrap_or_default();
                self.objects.get_or_insert_default().remove(&name).is_some()
            }
            Err(error) => self.failed(&error, lifecycle),
        }
    }

    /// Handles an error; returns whether the resource is newly known to be absent.
    fn failed(&mut self, error: &watcher::Error, lifecycle: &Lifecycle) -> bool {
        // A new watch lists the objects again, which shows that it works.
        self.events = self.cluster.watch_manifests(self.kind);
        self.retry_at = Instant::now() + self.backoff;
        self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
        if is_status(cause_of(error), 404) {
            self.absences = self.absences.saturating_add(1);
            lifecycle.set_problem(self.kind.plural(), None);
            if self.absences == MIN_ABSENCES {
                self.objects = Some(BTreeMap::new());
                tracing::debug!(kind = self.kind.as_str(), "the resource is not installed");
                return true;
            }
            return false;
        }
        self.absences = 0;
        let (kind, plural) = (self.kind.as_str(), self.kind.plural());
        let rule = format!(
            "list and watch on {plural} ({GROUP}) in the namespace {}",
            self.cluster.config.namespace
        );
        if let Some(report) = self.errors.record_watch_error(error, &rule) {
            report.log(&format!("cannot watch the {kind} objects; the last state stays"));
            if let Report::Lasting(text) = report {
                let problem = format!("{kind} objects are not applied: {text}");
                lifecycle.set_problem(plural, Some(problem));
            }
        }
        false
    }
}

/// The objects of one kind, and their status as last read.
pub(crate) struct ManifestList {
    pub(crate) kind: ManifestKind,
    pub(crate) manifests: Vec<Manifest>,
    /// In the order of the objects.
    pub(crate) statuses: Vec<Value>,
    /// The resource itself is not installed.
    pub(crate) is_absent: bool,
}

/// The watches of both kinds.
pub(crate) struct ManifestWatch {
    lifecycle: Arc<Lifecycle>,
    tiers: KindWatch,
    merchants: KindWatch,
}

impl ManifestWatch {
    pub(crate) fn new(cluster: &Cluster, lifecycle: Arc<Lifecycle>) -> Self {
        let [tiers, merchants] = ManifestKind::ALL.map(|kind| KindWatch::new(cluster, kind));
        Self { lifecycle, tiers, merchants }
    }

    /// Waits until objects or their specs change. Cancellation loses no event.
    pub(crate) async fn changed(&mut self) {
        loop {
            let is_changed = tokio::select! {
                event = self.tiers.next() => self.tiers.apply(event, &self.lifecycle),
                event = self.merchants.next() => self.merchants.apply(event, &self.lifecycle),
            };
            if is_changed {
                return;
            }
        }
    }

    /// Returns the objects of a kind; `None` while they are unknown.
    pub(crate) fn objects(&self, kind: ManifestKind) -> Option<ManifestList> {
        let watch = match kind {
            ManifestKind::Tier => &self.tiers,
            ManifestKind::Merchant => &self.merchants,
        };
        let objects = watch.objects.as_ref()?.values();
        let (manifests, statuses) =
            objects.map(|object| (object.manifest.clone(), object.status.clone())).unzip();
        let is_absent = watch.absences >= MIN_ABSENCES;
        Some(ManifestList { kind, manifests, statuses, is_absent })
    }
}

impl Cluster {
    /// Writes the status of an object.
    pub(crate) async fn write_status(
        &self,
        kind: ManifestKind,
        name: &str,
        status: &Value,
    ) -> Result<(), ApiFailure> {
        let api = self.manifests(kind);
        let patch = Patch::Merge(json!({"status": status}));
        match api.patch_status(name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            // The object was deleted in the meantime.
            Err(error) if is_status(Some(&error), 404) => Ok(()),
            Err(error) => {
                let (plural, namespace) = (kind.plural(), &self.config.namespace);
                let rule =
                    format!("patch on {plural}/status ({GROUP}) in the namespace {namespace}");
                Err(ApiFailure::Error { error, rule })
            }
        }
    }

    fn watch_manifests(&self, kind: ManifestKind) -> Events {
        let config = watcher::Config::default().page_size(PAGE_SIZE);
        Box::pin(watcher::watcher(self.manifests(kind), config))
    }

    fn manifests(&self, kind: ManifestKind) -> Api<DynamicObject> {
        let namespace = &self.config.namespace;
        Api::namespaced_with(self.client.clone(), namespace, &kind.resource())
    }
}
