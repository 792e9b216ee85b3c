//! Watches the pods of the cluster and keeps this replica's view true to them.
//!
//! A new list of all pods is read by a second watch, which takes the place of the first when
//! its list is whole; until then the first one is followed.

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

use super::{Cluster, ClusterPod, PodState, PodView, Sighting, Trouble, is_expired, pods::Seen};
use crate::lifecycle::Lifecycle;

/// Pause after an error, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Events that are taken at once.
const AT_ONCE: usize = 512;
/// How long a list may make no progress.
const LIST: Duration = Duration::from_secs(30);
/// The two watches, where they stand in a pair.
const CURRENT: usize = 0;
const FRESH: usize = 1;

type Told = Result<Event<ClusterPod>, watcher::Error>;
type Events = Pin<Box<dyn Stream<Item = Vec<Told>> + Send>>;

/// A watch whose list is not whole yet.
struct Fresh {
    events: Events,
    listed: HashMap<PodName, Sighting>,
    /// When it is given up for want of progress.
    limit: Instant,
}

impl Fresh {
    fn new(events: Events) -> Self {
        Self { events, listed: HashMap::new(), limit: Instant::now() + LIST }
    }
}

/// The watches of this replica.
struct Watching<'a> {
    cluster: &'a Cluster,
    view: &'a PodView,
    /// The watch that is followed.
    current: Option<Events>,
    fresh: Option<Fresh>,
    /// The pods that the one that is followed told of since the fresh one began.
    touched: HashSet<PodName>,
    trouble: Trouble,
    /// Until when a watch that failed is left alone: the one that is followed, the fresh one.
    rest: [Instant; 2],
    pause: Duration,
}

/// The next events of a watch, if there is one.
async fn next(events: Option<&mut Events>) -> Vec<Told> {
    match events {
        Some(events) => events.next().await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

/// Keeps a view of the pods true to the cluster.
pub(crate) struct PodWatch {
    pub(crate) cluster: Cluster,
    pub(crate) view: Arc<PodView>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) ready_pods: Gauge,
}

impl PodWatch {
    /// Watches for as long as the process lives.
    pub(crate) async fn run(self: Arc<Self>) {
        let rest = [Instant::now(); 2];
        let mut watching = Watching {
            cluster: &self.cluster,
            view: &self.view,
            current: None,
            fresh: None,
            touched: HashSet::new(),
            trouble: Trouble::default(),
            rest,
            pause: PAUSE.0,
        };
        tokio::select! {
            never = self.watch(&mut watching) => match never {},
            () = self.lifecycle.stopping.cancelled() => {}
        }
    }

    async fn watch(&self, watching: &mut Watching<'_>) -> Infallible {
        watching.begin();
        loop {
            let is_resting = watching.rest.map(|rest| rest > Instant::now());
            let rested = watching.rest.into_iter().filter(|rest| *rest > Instant::now()).min();
            let limit = watching.fresh.as_ref().map_or(Instant::now(), |fresh| fresh.limit);
            let has_fresh = watching.fresh.is_some();
            tokio::select! {
                told = next(watching.fresh.as_mut().map(|fresh| &mut fresh.events)), if !is_resting[FRESH] => {
                    let told = self.read_list(watching, told);
                    self.follow_events(watching, told, FRESH);
                }
                told = next(watching.current.as_mut()), if !is_resting[CURRENT] => {
                    if told.iter().any(|event| matches!(event, Ok(Event::Init))) {
                        // It lists anew by itself, and is followed again when that is done.
                        watching.fresh = watching.current.take().map(Fresh::new);
                        watching.touched.clear();
                        let told = self.read_list(watching, told);
                        self.follow_events(watching, told, FRESH);
                    } else {
                        self.follow_events(watching, told, CURRENT);
                    }
                }
                () = sleep_until(rested.unwrap_or(limit)), if rested.is_some() => {}
                () = sleep_until(limit), if has_fresh => {
                    tracing::warn!("the list of pods makes no progress; beginning anew");
                    watching.begin();
                }
                () = watching.view.relist.notified() => if !has_fresh { watching.begin() },
            }
            self.ready_pods.set(watching.view.in_service() as i64);
        }
    }

    /// Takes from a fresh watch what belongs to its list; when that is whole, the view is
    /// replaced, and the watch is the one that is followed. Answers what is not part of it.
    fn read_list(&self, watching: &mut Watching<'_>, told: Vec<Told>) -> Vec<Told> {
        let mut rest = Vec::new();
        for event in told {
            let Some(fresh) = &mut watching.fresh else {
                rest.push(event);
                continue;
            };
            match event {
                Ok(Event::Init) => fresh.listed.clear(),
                Ok(Event::InitApply(pod)) => {
                    fresh.limit = Instant::now() + LIST;
                    fresh.listed.extend(watching.cluster.sighting(&pod));
                }
                Ok(Event::InitDone) => {
                    let fresh = watching.fresh.take().expect("its list has just ended");
                    watching.view.replace(fresh.listed, &watching.touched);
                    watching.current = Some(fresh.events);
                    watching.pause = PAUSE.0;
                    self.lifecycle.is_cluster_lost.store(false, Ordering::Relaxed);
                    if let Some(time) = watching.trouble.over() {
                        let after_ms = time.as_millis() as u64;
                        tracing::info!(after_ms, "the pods of the cluster are followed again");
                    }
                }
                other => rest.push(other),
            }
        }
        rest
    }

    /// Takes what a watch tells after its list.
    fn follow_events(&self, watching: &mut Watching<'_>, told: Vec<Told>, from: usize) {
        for event in told {
            let seen = match event {
                Ok(Event::Apply(pod)) => watching.cluster.sighting(&pod),
                Ok(Event::Delete(pod)) => deleted(&pod),
                Ok(Event::Init | Event::InitApply(_) | Event::InitDone) => None,
                Err(error) => {
                    self.watch_failed(watching, &error, from);
                    None
                }
            };
            let Some((name, (state, version))) = seen else { continue };
            if watching.view.apply(&name, state, version) {
                watching.touched.insert(name);
            } else {
                tracing::debug!(pod = %name, version, "an event that is older than the view is ignored");
            }
        }
    }

    /// A watch failed. If it is the one that is followed, it tries to go on, and a new list is
    /// read as well: the end of that list shows that the pods are followed again.
    fn watch_failed(&self, watching: &mut Watching<'_>, error: &watcher::Error, from: usize) {
        let rule = watching.cluster.watch_rule();
        if let Some(report) = watching.trouble.met_watching(error, &rule) {
            report.log("cannot follow the pods of the cluster; trying again");
        }
        self.lifecycle.is_cluster_lost.store(true, Ordering::Relaxed);
        watching.rest[from] = Instant::now() + watching.pause;
        if is_expired(error) && from == CURRENT {
            // There is nothing from which it could go on.
            watching.current = None;
        }
        if watching.fresh.is_none() {
            watching.begin();
            watching.rest[FRESH] = Instant::now() + watching.pause;
        }
        watching.pause = (watching.pause * 2).min(PAUSE.1);
    }
}

impl Watching<'_> {
    fn begin(&mut self) {
        let events = Box::pin(self.cluster.watch().ready_chunks(AT_ONCE));
        self.fresh = Some(Fresh::new(events));
        self.touched.clear();
    }
}

impl Cluster {
    /// What a pod of the cluster means; one that can't be read is reported.
    fn sighting(&self, pod: &ClusterPod) -> Option<(PodName, Sighting)> {
        let (name, state) = match pod.read(&self.config) {
            Ok(Seen::Present { name, facts, warnings }) => {
                for warning in warnings {
                    tracing::warn!(pod = %name, warning);
                }
                (name, PodState::Present(facts))
            }
            Ok(Seen::Finished { name, uid }) => (name, PodState::Gone { uid }),
            Err(error) => {
                let pod = pod.shown_name();
                tracing::warn!(pod, error, "a pod that makes no sense is passed over");
                (pod.parse().ok()?, PodState::Unreadable)
            }
        };
        Some((name, (state, pod.version())))
    }
}

/// A pod that was deleted or is no longer selected: the API tells both in the same way.
fn deleted(pod: &ClusterPod) -> Option<(PodName, Sighting)> {
    let (name, uid) = (pod.shown_name().parse().ok()?, pod.uid()?);
    Some((name, (PodState::Gone { uid }, pod.version())))
}
