//! The pods of the cluster as this replica's own watches show them. Every replica has such a view;
//! the leader writes it to the store, the others drain pods that it shows out of service.
//!
//! The store knows pods by their names. If two namespaces have a pod of the same name, the older
//! one is in the view and the other is ignored: a new pod never displaces one that may have calls.

mod entries;
#[cfg(test)]
mod tests;
mod workload_pods;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use self::entries::Entry;
use super::pods::PodDetails;
use fleet::{PodFacts, Step, names::PodName, workload::Workload};

pub(crate) use self::workload_pods::{StartingPod, WorkloadPod};

/// How long a deleted pod stays in the view: longer than a failover of the leader and than a
/// list of pods take.
const TOMBSTONE_AGE: Duration = Duration::from_secs(300);

/// State of a pod by its last event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PodState {
    Present(PodFacts),
    /// Deleted, completed, or no longer selected.
    Gone {
        uid: String,
    },
    /// Exists, but its object is malformed.
    Unreadable,
}

impl PodState {
    fn is_in_service(&self) -> bool {
        matches!(self, Self::Present(facts) if facts.ready && !facts.terminating)
    }

    fn has_departed(&self) -> bool {
        match self {
            Self::Present(facts) => facts.terminating,
            Self::Gone { .. } => true,
            Self::Unreadable => false,
        }
    }
}

/// A pod as an event or a list shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) state: PodState,
    /// Its resource version.
    pub(crate) version: Option<u64>,
    pub(crate) details: PodDetails,
}

/// Evidence that a pod should get no call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Staleness {
    /// The pod it applies to; `None` for any pod of that name.
    uid: Option<String>,
    pub(crate) reason: StaleReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StaleReason {
    Gone,
    Terminating,
    NotReady,
    /// No pod of this name is in the cluster.
    Unknown,
}

impl StaleReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Terminating => "terminating",
            Self::NotReady => "not ready",
            Self::Unknown => "not in the cluster",
        }
    }

    /// Whether the reason is permanent for this UID, so that an old view cannot be wrong. Other
    /// reasons are transient: this replica's watch may lag behind the leader's.
    pub(crate) fn is_permanent(self) -> bool {
        matches!(self, Self::Gone | Self::Terminating)
    }
}

impl Staleness {
    /// Whether it applies to the pod with this UID.
    pub(crate) fn applies_to(&self, uid: &str) -> bool {
        self.uid.as_deref().is_none_or(|other| other == uid)
    }
}

#[derive(Debug)]
pub(crate) struct PodView {
    /// The watched namespaces; their indexes identify them here.
    namespaces: Vec<String>,
    inner: Mutex<Inner>,
    /// Notified about every change, for the leader.
    pub(crate) changed: Notify,
    /// Notified when pods terminate or are gone: see [`Self::take_departed`].
    pub(crate) departed: Notify,
    /// Requests for a new list, by namespace.
    relist: Vec<Notify>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The pods of a name, of different namespaces.
    pods: HashMap<PodName, Vec<Entry>>,
    /// Deleted pods in order of deletion.
    tombstones: VecDeque<(Instant, PodName)>,
    /// Names that several namespaces have a pod of.
    conflicts: HashSet<PodName>,
    /// Nodes that take no new pods.
    cordoned: HashSet<String>,
    /// The tiers that take the pods of workloads.
    workload_tiers: HashMap<Workload, Step>,
    in_service: usize,
    /// Number of complete lists, and of namespaces that were forgotten.
    lists: u64,
    /// When each namespace was last listed.
    listed_at: HashMap<usize, Instant>,
    /// Namespaces whose watch fails.
    failing: HashSet<usize>,
    /// Pods that changed since the leader last took them.
    dirty: HashSet<PodName>,
    /// Pods that began to terminate or were deleted since they were last taken.
    departed: HashSet<PodName>,
}

/// Whether version `new` is no newer than `known`. A version that can't be compared counts as
/// newer.
fn is_stale(known: Option<u64>, new: Option<u64>) -> bool {
    matches!((known, new), (Some(known), Some(new)) if new <= known)
}

impl PodView {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A view of the pods of these namespaces.
    pub(crate) fn new(namespaces: Vec<String>) -> Self {
        let relist = namespaces.iter().map(|_| Notify::new()).collect();
        let (changed, departed) = (Notify::new(), Notify::new());
        Self { namespaces, inner: Mutex::default(), changed, departed, relist }
    }

    /// Requests a new list of the pods of all namespaces.
    pub(crate) fn request_lists(&self) {
        self.relist.iter().for_each(Notify::notify_one);
    }

    /// Waits until a new list of this namespace is requested.
    pub(super) async fn list_requested(&self, namespace: usize) {
        self.relist[namespace].notified().await;
    }

    /// Applies an event of a watch; returns whether it is newer than the view. A watch that
    /// replaces another repeats its events since the list, with versions already seen.
    pub(super) fn apply(&self, namespace: usize, name: &PodName, seen: Sighting) -> bool {
        let mut inner = self.inner();
        let known = inner.entry(namespace, name);
        if known.is_some_and(|known| is_stale(known.version, seen.version)) {
            return false;
        }
        inner.set(namespace, name.clone(), seen, true);
        self.notify(inner);
        true
    }

    /// Replaces the pods of a namespace by a complete list. `touched` are the pods with events
    /// while the list was read: the list may be older than these events.
    pub(super) fn replace(
        &self,
        namespace: usize,
        listed: HashMap<PodName, Sighting>,
        touched: &HashSet<PodName>,
    ) {
        let mut inner = self.inner();
        let newest = listed.values().filter_map(|seen| seen.version).max();
        let missing: Vec<PodName> = inner
            .entries(namespace)
            .filter(|(name, known)| {
                // A list newer than the pod's last event would contain the pod.
                let may_be_older = known.version.is_none() || known.version > newest;
                let is_newer_event = touched.contains(*name) && may_be_older;
                !listed.contains_key(*name) && !is_newer_event
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in missing {
            inner.remove_missing(namespace, name);
        }
        for (name, seen) in listed {
            let known = inner.entry(namespace, &name).filter(|_| touched.contains(&name));
            let is_old = known.is_some_and(|known| {
                seen.version
                    .is_none_or(|version| known.version.is_none_or(|known| version <= known))
            });
            if !is_old {
                inner.set(namespace, name, seen, false);
            }
        }
        inner.lists += 1;
        inner.listed_at.insert(namespace, Instant::now());
        inner.failing.remove(&namespace);
        self.notify(inner);
    }

    /// Records that the watch of a namespace failed; returns whether all of them fail.
    pub(super) fn list_failed(&self, namespace: usize) -> bool {
        let mut inner = self.inner();
        let is_new = inner.failing.insert(namespace);
        let are_all = inner.failing.len() == self.namespaces.len();
        drop(inner);
        if is_new {
            // The leader waits for each namespace until it is listed or fails.
            self.changed.notify_one();
        }
        are_all
    }

    /// Forgets the pods of a namespace that the Role does not cover any more: those of the store
    /// then get no new calls, as at the start without that Role. Returns whether it did. If no
    /// other namespace works, the last state stays: the service account itself may have a problem,
    /// and without any pod all calls would be refused.
    pub(super) fn forget(&self, namespace: usize) -> bool {
        let mut inner = self.inner();
        let works = |it: &usize| *it != namespace && !inner.failing.contains(it);
        if !inner.listed_at.keys().any(works) || inner.listed_at.remove(&namespace).is_none() {
            return false;
        }
        inner.forget(namespace);
        // The leader compares the store with the view again.
        inner.lists += 1;
        self.notify(inner);
        true
    }

    /// Replaces the nodes that take no new pods.
    pub(super) fn set_cordoned(&self, nodes: HashSet<String>) {
        let mut inner = self.inner();
        let changed: HashSet<&String> = nodes.symmetric_difference(&inner.cordoned).collect();
        let is_on = |it: &Entry| it.details.node.as_ref().is_some_and(|it| changed.contains(it));
        let names = inner.pods.iter().filter(|(_, pods)| pods.iter().any(is_on));
        let names: Vec<PodName> = names.map(|(name, _)| name.clone()).collect();
        inner.dirty.extend(names);
        inner.cordoned = nodes;
        self.notify(inner);
    }

    /// Marks pods as changed, so that the leader writes them again.
    pub(crate) fn touch(&self, names: impl IntoIterator<Item = PodName>) {
        self.inner().dirty.extend(names);
        self.changed.notify_one();
    }

    /// Returns since when a pod is ready, as far as known.
    pub(crate) fn ready_since(&self, name: &PodName) -> Option<Instant> {
        self.inner().effective(name)?.ready_since
    }

    /// Returns the namespace and the UID of a pod.
    pub(crate) fn reference(&self, name: &PodName) -> Option<(String, String)> {
        let inner = self.inner();
        let entry = inner.effective(name)?;
        let PodState::Present(facts) = &entry.state else { return None };
        Some((self.namespaces[entry.namespace].clone(), facts.uid.clone()))
    }

    /// Describes pods that are ignored because another namespace has a pod of their name.
    pub(super) fn name_conflict(&self) -> Option<String> {
        let inner = self.inner();
        let name = inner.conflicts.iter().min()?;
        let used = inner.effective(name)?;
        let ignored = inner.pods[name].iter().find(|it| it.namespace != used.namespace)?;
        let (used, ignored) =
            (&self.namespaces[used.namespace], &self.namespaces[ignored.namespace]);
        let count = inner.conflicts.len();
        let more = if count == 1 { String::new() } else { format!(", and {} more", count - 1) };
        Some(format!(
            "the pod {name} of the namespace {ignored} is ignored: the namespace {used} has an \
             older pod of that name{more}"
        ))
    }

    fn notify(&self, inner: MutexGuard<'_, Inner>) {
        let has_departures = !inner.departed.is_empty();
        drop(inner);
        self.changed.notify_one();
        if has_departures {
            self.departed.notify_one();
        }
    }

    /// Takes the pods that began to terminate or were deleted since the last call.
    pub(crate) fn take_departed(&self) -> HashSet<PodName> {
        std::mem::take(&mut self.inner().departed)
    }

    /// Returns a number that every complete list and every forgotten namespace raise, and when the
    /// oldest list was read: `None` until every namespace is listed, or fails while another is
    /// listed.
    pub(crate) fn lists(&self) -> (u64, Option<Instant>) {
        let inner = self.inner();
        let is_known = |it: usize| inner.listed_at.contains_key(&it) || inner.failing.contains(&it);
        let are_known = (0..self.namespaces.len()).all(is_known);
        let oldest = inner.listed_at.values().min().copied();
        (inner.lists, oldest.filter(|_| are_known))
    }

    /// Whether every namespace has been listed, so that a pod outside of the view does not exist.
    pub(crate) fn is_complete(&self) -> bool {
        self.inner().listed_at.len() == self.namespaces.len()
    }

    /// Returns the number of pods that are ready and not terminating.
    pub(super) fn in_service(&self) -> usize {
        self.inner().in_service
    }

    /// Returns all pods for a reconciliation, and clears the pending changes.
    pub(crate) fn all(&self) -> HashMap<PodName, PodState> {
        let mut inner = self.inner();
        inner.dirty.clear();
        let state = |name: &PodName| Some((name.clone(), inner.state(name)?));
        inner.pods.keys().filter_map(state).collect()
    }

    /// Takes the pods that changed since the last call.
    pub(crate) fn take_changes(&self) -> Vec<(PodName, PodState)> {
        let mut inner = self.inner();
        let dirty = std::mem::take(&mut inner.dirty);
        let state = |name| inner.state(&name).map(|state| (name, state));
        dirty.into_iter().filter_map(state).collect()
    }

    /// Returns why this pod should get no call; `None` if it may get calls, or before the first
    /// list.
    pub(crate) fn staleness(&self, pod: &PodName) -> Option<Staleness> {
        let inner = self.inner();
        let (uid, reason) = match inner.effective(pod).map(|entry| &entry.state) {
            // A pod of a namespace that is not listed yet may exist.
            None if inner.listed_at.len() < self.namespaces.len() => return None,
            None => (None, StaleReason::Unknown),
            Some(PodState::Gone { uid }) => (Some(uid), StaleReason::Gone),
            Some(PodState::Present(PodFacts { uid, terminating: true, .. })) => {
                (Some(uid), StaleReason::Terminating)
            }
            Some(PodState::Present(PodFacts { uid, ready: false, .. })) => {
                (Some(uid), StaleReason::NotReady)
            }
            Some(PodState::Present(_) | PodState::Unreadable) => return None,
        };
        Some(Staleness { uid: uid.cloned(), reason })
    }
}
