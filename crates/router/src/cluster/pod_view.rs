//! The pods of the cluster as this replica's own watch shows them. Every replica has such a view;
//! the leader writes it to the store, the others drain pods that it shows out of service.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use fleet::{PodFacts, names::PodName};

/// How long a deleted pod stays in the view: longer than a failover of the leader and than a
/// list of pods take.
const TOMBSTONE_AGE: Duration = Duration::from_secs(300);

/// State of a pod by its last event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodState {
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

/// A pod's state and resource version.
pub type Sighting = (PodState, Option<u64>);

#[derive(Debug)]
struct Entry {
    state: PodState,
    version: Option<u64>,
    at: Instant,
}

/// Evidence that a pod should get no call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Staleness {
    /// The pod it applies to; `None` for any pod of that name.
    uid: Option<String>,
    pub reason: StaleReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleReason {
    Gone,
    Terminating,
    NotReady,
    /// No pod of this name is in the cluster.
    Unknown,
}

impl StaleReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Terminating => "terminating",
            Self::NotReady => "not ready",
            Self::Unknown => "not in the cluster",
        }
    }

    /// Whether the reason is permanent for this UID, so that an old view cannot be wrong. Other
    /// reasons are transient: this replica's watch may lag behind the leader's.
    pub fn is_permanent(self) -> bool {
        matches!(self, Self::Gone | Self::Terminating)
    }
}

impl Staleness {
    /// Whether it applies to the pod with this UID.
    pub fn applies_to(&self, uid: &str) -> bool {
        self.uid.as_deref().is_none_or(|other| other == uid)
    }
}

#[derive(Debug, Default)]
pub struct PodView {
    inner: Mutex<Inner>,
    /// Notified about every change, for the leader.
    pub changed: Notify,
    /// Notified when pods terminate or are gone: see [`Self::take_departed`].
    pub departed: Notify,
    /// Requests a new list of all pods from the watch.
    pub relist: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    pods: HashMap<PodName, Entry>,
    /// Deleted pods in order of deletion.
    tombstones: VecDeque<(Instant, PodName)>,
    in_service: usize,
    /// Number of complete lists, and when the last one was read.
    lists: u64,
    listed_at: Option<Instant>,
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

    /// Applies an event of the watch; returns whether it is newer than the view. A watch that
    /// replaces another repeats its events since the list, with versions already seen.
    pub fn apply(&self, name: &PodName, state: PodState, version: Option<u64>) -> bool {
        let mut inner = self.inner();
        if inner.pods.get(name).is_some_and(|known| is_stale(known.version, version)) {
            return false;
        }
        inner.set(name.clone(), state, version);
        self.notify(inner);
        true
    }

    /// Replaces the view by a complete list. `touched` are the pods with events while the list
    /// was read: the list may be older than these events.
    pub fn replace(&self, listed: HashMap<PodName, Sighting>, touched: &HashSet<PodName>) {
        let mut inner = self.inner();
        let newest = listed.values().filter_map(|(_, version)| *version).max();
        let missing: Vec<PodName> = inner
            .pods
            .iter()
            .filter(|(name, known)| {
                // A list newer than the pod's last event would contain the pod.
                let may_be_older = known.version.is_none() || known.version > newest;
                let is_newer_event = touched.contains(*name) && may_be_older;
                !listed.contains_key(*name) && !is_newer_event
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in missing {
            inner.remove_missing(name);
        }
        for (name, (state, version)) in listed {
            let known = inner.pods.get(&name).filter(|_| touched.contains(&name));
            let is_old = known.is_some_and(|known| {
                version.is_none_or(|version| known.version.is_none_or(|known| version <= known))
            });
            if !is_old {
                inner.set(name, state, version);
            }
        }
        inner.lists += 1;
        inner.listed_at = Some(Instant::now());
        self.notify(inner);
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
    pub fn take_departed(&self) -> HashSet<PodName> {
        std::mem::take(&mut self.inner().departed)
    }

    /// Returns the number of complete lists, and when the last one was read.
    pub fn lists(&self) -> (u64, Option<Instant>) {
        let inner = self.inner();
        (inner.lists, inner.listed_at)
    }

    /// Returns the number of pods that are ready and not terminating.
    pub fn in_service(&self) -> usize {
        self.inner().in_service
    }

    /// Returns all pods for a reconciliation, and clears the pending changes.
    pub fn all(&self) -> HashMap<PodName, PodState> {
        let mut inner = self.inner();
        inner.dirty.clear();
        let pods = inner.pods.iter();
        pods.map(|(name, entry)| (name.clone(), entry.state.clone())).collect()
    }

    /// Takes the pods that changed since the last call.
    pub fn take_changes(&self) -> Vec<(PodName, PodState)> {
        let mut inner = self.inner();
        let dirty = std::mem::take(&mut inner.dirty);
        let state = |name| inner.pods.get(&name).map(|entry| (name, entry.state.clone()));
        dirty.into_iter().filter_map(state).collect()
    }

    /// Returns why this pod should get no call; `None` if it may get calls, or before the first
    /// list.
    pub fn staleness(&self, pod: &PodName) -> Option<Staleness> {
        let inner = self.inner();
        if inner.lists == 0 {
            return None;
        }
        let (uid, reason) = match inner.pods.get(pod).map(|entry| &entry.state) {
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

impl Inner {
    fn set(&mut self, name: PodName, state: PodState, version: Option<u64>) {
        let at = Instant::now();
        if matches!(state, PodState::Gone { .. }) {
            self.tombstones.push_back((at, name.clone()));
        }
        self.in_service += usize::from(state.is_in_service());
        self.dirty.insert(name.clone());
        if state.has_departed() {
            self.departed.insert(name.clone());
        }
        let before = self.pods.insert(name, Entry { state, version, at });
        self.in_service -= usize::from(before.is_some_and(|it| it.state.is_in_service()));
        while let Some((gone, name)) =
            self.tombstones.pop_front_if(|(gone, _)| gone.elapsed() > TOMBSTONE_AGE)
        {
            let is_that = |it: &Entry| matches!(it.state, PodState::Gone { .. }) && it.at == gone;
            if self.pods.get(&name).is_some_and(is_that) {
                self.pods.remove(&name);
            }
        }
    }

    /// Marks a pod that a list no longer contains as gone.
    fn remove_missing(&mut self, name: PodName) {
        let Some(known) = self.pods.get(&name) else { return };
        match &known.state {
            PodState::Gone { .. } => {}
            PodState::Present(facts) => {
                let (uid, version) = (facts.uid.clone(), known.version);
                self.set(name, PodState::Gone { uid }, version);
            }
            PodState::Unreadable => drop(self.pods.remove(&name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> PodName {
        text.parse().unwrap()
    }

    fn present(uid: &str) -> PodState {
        PodState::Present(PodFacts {
            uid: uid.into(),
            address: "a:1".into(),
            ready: true,
            terminating: false,
            restarts: 0,
            pin: None,
        })
    }

    fn gone(uid: &str) -> PodState {
        PodState::Gone { uid: uid.into() }
    }

    fn list(pods: &[(&str, &str, u64)]) -> HashMap<PodName, Sighting> {
        pods.iter().map(|(pod, uid, at)| (name(pod), (present(uid), Some(*at)))).collect()
    }

    /// A view after one list, without pending changes.
    fn view(pods: &[(&str, &str, u64)]) -> PodView {
        let view = PodView::default();
        view.replace(list(pods), &HashSet::new());
        view.all();
        view
    }

    fn reason(view: &PodView, pod: &str) -> Option<StaleReason> {
        view.staleness(&name(pod)).map(|stale| stale.reason)
    }

    #[test]
    fn an_event_no_newer_than_the_pods_last_one_is_ignored() {
        let view = view(&[("a", "u1", 100)]);
        assert!(view.apply(&name("a"), gone("u1"), Some(105)));
        for version in [100, 104, 105] {
            assert!(!view.apply(&name("a"), present("u1"), Some(version)), "{version}");
        }
        assert_eq!(view.take_changes(), [(name("a"), gone("u1"))]);
        // The same pod is selected again.
        assert!(view.apply(&name("a"), present("u1"), Some(106)));
        assert_eq!(view.take_changes(), [(name("a"), present("u1"))]);
        // Versions that are not numbers can't be compared.
        assert!(view.apply(&name("a"), gone("u1"), None));
        assert!(view.apply(&name("a"), present("u1"), Some(1)));
    }

    #[test]
    fn a_list_does_not_undo_newer_events_of_the_watch() {
        let view = view(&[("deleted", "u1", 90), ("changed", "u2", 91), ("lost", "u3", 92)]);
        let mut touched = HashSet::new();
        for (pod, state, version) in [
            ("deleted", gone("u1"), 105),
            ("changed", present("u4"), 101),
            ("new", present("u5"), 106),
        ] {
            assert!(view.apply(&name(pod), state, Some(version)));
            touched.insert(name(pod));
        }
        view.all();
        // Read at version 103: older than two of the events, newer than one.
        view.replace(list(&[("deleted", "u1", 90), ("changed", "u6", 103)]), &touched);
        let pods = view.all();
        assert_eq!(pods[&name("deleted")], gone("u1"));
        assert_eq!(pods[&name("changed")], present("u6"));
        assert_eq!(pods[&name("new")], present("u5"));
        assert_eq!(pods[&name("lost")], gone("u3"));
        assert_eq!(view.in_service(), 2);
    }

    #[test]
    fn a_pod_missing_from_a_list_newer_than_its_last_event_is_gone() {
        let view = view(&[("a", "u1", 90), ("b", "u2", 91)]);
        assert!(view.apply(&name("a"), present("u1"), Some(100)));
        view.replace(list(&[("b", "u2", 101)]), &HashSet::from([name("a")]));
        assert_eq!(view.all()[&name("a")], gone("u1"));
    }

    #[test]
    fn a_list_with_smaller_versions_replaces_the_view() {
        // The cluster was restored from a backup.
        let view = view(&[("a", "u1", 1_000)]);
        view.replace(list(&[("a", "u1", 10), ("b", "u2", 11)]), &HashSet::new());
        assert!(view.apply(&name("a"), gone("u1"), Some(12)));
        assert_eq!((reason(&view, "a"), reason(&view, "b")), (Some(StaleReason::Gone), None));
    }

    #[test]
    fn staleness_names_the_reason_and_the_uid() {
        assert_eq!(PodView::default().staleness(&name("a")), None, "nothing is known yet");
        let view = view(&[("a", "u1", 1)]);
        assert_eq!((reason(&view, "a"), reason(&view, "b")), (None, Some(StaleReason::Unknown)));
        let with = |change: fn(&mut PodFacts)| {
            let PodState::Present(mut facts) = present("u1") else { unreachable!() };
            change(&mut facts);
            PodState::Present(facts)
        };
        view.apply(&name("a"), with(|facts| facts.ready = false), Some(2));
        assert_eq!((reason(&view, "a"), view.in_service()), (Some(StaleReason::NotReady), 0));
        view.apply(&name("a"), with(|facts| facts.terminating = true), Some(3));
        assert_eq!(reason(&view, "a"), Some(StaleReason::Terminating));
        view.apply(&name("a"), PodState::Unreadable, Some(4));
        assert_eq!(reason(&view, "a"), None);
        view.apply(&name("a"), gone("u1"), Some(5));
        let stale = view.staleness(&name("a")).unwrap();
        assert_eq!(
            (stale.reason, stale.applies_to("u1"), stale.applies_to("u2")),
            (StaleReason::Gone, true, false)
        );
        let reasons = [
            StaleReason::Gone,
            StaleReason::Terminating,
            StaleReason::NotReady,
            StaleReason::Unknown,
        ];
        assert_eq!(reasons.map(StaleReason::is_permanent), [true, true, false, false]);
    }

    #[test]
    fn deleted_pods_leave_the_view_after_the_tombstone_age() {
        let view = view(&[("a", "u1", 1), ("b", "u2", 2)]);
        view.apply(&name("a"), gone("u1"), Some(3));
        let past = Instant::now() - TOMBSTONE_AGE - Duration::from_secs(1);
        let mut inner = view.inner();
        inner.tombstones[0].0 = past;
        inner.pods.get_mut(&name("a")).unwrap().at = past;
        drop(inner);
        view.apply(&name("b"), gone("u2"), Some(4));
        let pods = view.all();
        assert_eq!((pods.contains_key(&name("a")), pods.len()), (false, 1));
    }
}
