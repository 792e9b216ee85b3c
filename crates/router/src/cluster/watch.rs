//! Watches the pods of the cluster and updates this replica's view.
//!
//! A new list of all pods is read by a second watch, which replaces the first when its list is
//! complete; until then the first one stays in use.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{Stream, StreamExt};
use kube::runtime::watcher::{self, Event};
use tokio::time::{Instant, sleep_until};

use fleet::names::PodName;
use prometheus_client::metrics::gauge::Gauge;

use super::{
    ApiErrors, Cluster, ClusterPod, PodState, PodView, Sighting,
    api_errors::Report,
    is_expired,
    pods::{PodDetails, PodObject},
};
use crate::lifecycle::Lifecycle;

/// Backoff after an error.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Events processed per wake-up.
const MAX_EVENTS: usize = 512;
/// How long a list may make no progress.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Indexes of the two watches in [`Watching::retry_at`].
const CURRENT: usize = 0;
const FRESH: usize = 1;

type WatchEvent = Result<Event<ClusterPod>, watcher::Error>;
type Events = Pin<Box<dyn Stream<Item = Vec<WatchEvent>> + Send>>;

/// A watch whose list is not complete yet.
struct Fresh {
    events: Events,
    listed: HashMap<PodName, Sighting>,
    /// When the watch is restarted for lack of progress.
    deadline: Instant,
}

impl Fresh {
    fn new(events: Events) -> Self {
        Self { events, listed: HashMap::new(), deadline: Instant::now() + LIST_TIMEOUT }
    }

    fn extend_deadline(&mut self) {
        self.deadline = Instant::now() + LIST_TIMEOUT;
    }
}

/// The watches of this replica.
struct Watching<'a> {
    cluster: &'a Cluster,
    view: &'a PodView,
    /// The index of the namespace in the view.
    namespace: usize,
    /// The watch in use.
    current: Option<Events>,
    fresh: Option<Fresh>,
    /// Pods with events of the current watch since the fresh one began.
    touched: HashSet<PodName>,
    errors: ApiErrors,
    /// When a failed watch is polled again: the current one, the fresh one.
    retry_at: [Instant; 2],
    backoff: Duration,
}

/// Returns the next events of a watch; never without a watch.
async fn next(events: Option<&mut Events>) -> Vec<WatchEvent> {
    match events {
        Some(events) => events.next().await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

/// Updates a view from the pods of one namespace.
pub(crate) struct PodWatch {
    pub(crate) cluster: Cluster,
    /// Its index in the settings.
    pub(crate) namespace: usize,
    pub(crate) view: Arc<PodView>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) ready_pods: Gauge,
}

impl PodWatch {
    fn namespace_name(&self) -> &str {
        &self.cluster.config.namespaces[self.namespace]
    }

    /// The name of this watch's problem on the dashboard.
    fn problem(&self) -> String {
        format!("pods of {}", self.namespace_name())
    }

    /// Watches until shutdown.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut watching = Watching {
            cluster: &self.cluster,
            view: &self.view,
            namespace: self.namespace,
            current: None,
            fresh: None,
            touched: HashSet::new(),
            errors: ApiErrors::default(),
            retry_at: [Instant::now(); 2],
            backoff: MIN_BACKOFF,
        };
        tokio::select! {
            never = self.watch(&mut watching) => match never {},
            () = self.lifecycle.stopping.cancelled() => {}
        }
    }

    async fn watch(&self, watching: &mut Watching<'_>) -> Infallible {
        watching.start_list();
        loop {
            let is_in_backoff = watching.retry_at.map(|at| at > Instant::now());
            let retry = watching.retry_at.into_iter().filter(|at| *at > Instant::now()).min();
            let deadline = watching.fresh.as_ref().map_or(Instant::now(), |fresh| fresh.deadline);
            let has_fresh = watching.fresh.is_some();
            tokio::select! {
                events = next(watching.fresh.as_mut().map(|fresh| &mut fresh.events)), if !is_in_backoff[FRESH] => {
                    let events = self.read_list(watching, events);
                    self.apply_events(watching, events, FRESH);
                }
                events = next(watching.current.as_mut()), if !is_in_backoff[CURRENT] => {
                    if events.iter().any(|event| matches!(event, Ok(Event::Init))) {
                        // The watcher lists again by itself, and is in use again after that.
                        watching.fresh = watching.current.take().map(Fresh::new);
                        watching.touched.clear();
                        let events = self.read_list(watching, events);
                        self.apply_events(watching, events, FRESH);
                    } else {
                        self.apply_events(watching, events, CURRENT);
                    }
                }
                () = sleep_until(retry.unwrap_or(deadline)), if retry.is_some() => {}
                () = sleep_until(deadline), if has_fresh => {
                    let namespace = self.namespace_name();
                    tracing::warn!(namespace, "the list of pods makes no progress; starting a new one");
                    watching.start_list();
                }
                () = watching.view.list_requested(self.namespace) => if !has_fresh { watching.start_list() },
            }
            self.ready_pods.set(watching.view.in_service() as i64);
            self.lifecycle.set_problem("pod names", watching.view.name_conflict());
        }
    }

    /// Reads the list of a fresh watch. A complete list replaces the view, and the watch becomes
    /// the current one. Returns the events that are not part of the list.
    fn read_list(&self, watching: &mut Watching<'_>, events: Vec<WatchEvent>) -> Vec<WatchEvent> {
        let mut rest = Vec::new();
        for event in events {
            let Some(fresh) = &mut watching.fresh else {
                rest.push(event);
                continue;
            };
            match event {
                Ok(Event::Init) => fresh.listed.clear(),
                Ok(Event::InitApply(pod)) => {
                    fresh.extend_deadline();
                    fresh.listed.extend(watching.cluster.sighting(&pod));
                }
                Ok(Event::InitDone) => {
                    let fresh =
                        watching.fresh.take().expect("the fresh watch has just sent this event");
                    watching.view.replace(self.namespace, fresh.listed, &watching.touched);
                    watching.current = Some(fresh.events);
                    watching.backoff = MIN_BACKOFF;
                    self.lifecycle.is_cluster_lost.store(false, Ordering::Relaxed);
                    self.lifecycle.set_problem(&self.problem(), None);
                    if let Some(time) = watching.errors.clear() {
                        let after_ms = time.as_millis() as u64;
                        let namespace = self.namespace_name();
                        tracing::info!(after_ms, namespace, "the watch of pods works again");
                    }
                }
                other => rest.push(other),
            }
        }
        rest
    }

    /// Applies the events of a watch after its list.
    fn apply_events(&self, watching: &mut Watching<'_>, events: Vec<WatchEvent>, from: usize) {
        for event in events {
            let seen = match event {
                Ok(Event::Apply(pod)) => watching.cluster.sighting(&pod),
                Ok(Event::Delete(pod)) => deleted(&pod),
                Ok(Event::Init | Event::InitApply(_) | Event::InitDone) => None,
                Err(error) => {
                    self.watch_failed(watching, &error, from);
                    None
                }
            };
            let Some((name, sighting)) = seen else { continue };
            if watching.view.apply(self.namespace, &name, sighting) {
                watching.touched.insert(name);
            } else {
                tracing::debug!(pod = %name, "ignoring an event older than the view");
            }
        }
    }

    /// Handles a failed watch. The current one tries to resume while a new list is read; its
    /// completion shows that the watch works again.
    fn watch_failed(&self, watching: &mut Watching<'_>, error: &watcher::Error, from: usize) {
        let namespace = self.namespace_name();
        if let Some(report) =
            watching.errors.record_watch_error(error, &Cluster::watch_rule(namespace))
        {
            report.log(&format!("cannot watch the pods of the namespace {namespace}; retrying"));
            if let Report::Lasting(text) = report {
                let problem =
                    format!("the pods of the namespace {namespace} are not watched: {text}");
                self.lifecycle.set_problem(&self.problem(), Some(problem));
            }
        }
        let is_lost = watching.view.list_failed(self.namespace);
        self.lifecycle.is_cluster_lost.store(is_lost, Ordering::Relaxed);
        if watching.errors.is_forbidden() && watching.view.forget(self.namespace) {
            // An open watch outlives its Role; only a new list shows the pods again.
            watching.current = None;
            tracing::warn!(namespace, "the namespace may not be read; its pods get no new calls");
        }
        watching.retry_at[from] = Instant::now() + watching.backoff;
        if is_expired(error) && from == CURRENT {
            // The API no longer has the version to resume from.
            watching.current = None;
        }
        match &mut watching.fresh {
            // An error is an answer: a list that fails is retried, and does not stall.
            Some(fresh) if from == FRESH => fresh.extend_deadline(),
            Some(_) => {}
            None => {
                watching.start_list();
                watching.retry_at[FRESH] = Instant::now() + watching.backoff;
            }
        }
        watching.backoff = (watching.backoff * 2).min(MAX_BACKOFF);
    }
}

impl Watching<'_> {
    fn start_list(&mut self) {
        let namespace = &self.cluster.config.namespaces[self.namespace];
        let events = Box::pin(self.cluster.watch(namespace).ready_chunks(MAX_EVENTS));
        self.fresh = Some(Fresh::new(events));
        self.touched.clear();
    }
}

impl Cluster {
    /// Reads a pod object; logs one that is malformed.
    fn sighting(&self, pod: &ClusterPod) -> Option<(PodName, Sighting)> {
        let mut details = PodDetails::default();
        let (name, state) = match pod.read(&self.config) {
            Ok(PodObject::Present { name, facts, details: read, warnings }) => {
                for warning in warnings {
                    tracing::warn!(pod = %name, warning);
                }
                details = read;
                (name, PodState::Present(facts))
            }
            Ok(PodObject::Finished { name, uid }) => (name, PodState::Gone { uid }),
            Err(error) => {
                let pod = pod.display_name();
                tracing::warn!(pod, error, "ignoring a malformed pod");
                (pod.parse().ok()?, PodState::Unreadable)
            }
        };
        Some((name, Sighting { state, version: pod.version(), details }))
    }
}

/// Reads a delete event: the pod was deleted, or is no longer selected.
fn deleted(pod: &ClusterPod) -> Option<(PodName, Sighting)> {
    let (name, uid) = (pod.display_name().parse().ok()?, pod.uid()?);
    let (state, version) = (PodState::Gone { uid }, pod.version());
    Some((name, Sighting { state, version, details: PodDetails::default() }))
}
