//! The pods of the cluster as this replica's own watch shows them. Every replica keeps such a
//! view; the leader writes it to the store, and the others drain pods that it shows out of service.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use fleet::{PodFacts, names::PodName};

/// How long a deleted pod is remembered: longer than a cluster is without a leader when one
/// replica dies, and than a list of pods takes.
const TOMBSTONE_AGE: Duration = Duration::from_secs(300);

/// A pod by the last event about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodState {
    Present(PodFacts),
    /// Deleted, run to its end, or no longer selected.
    Gone {
        uid: String,
    },
    /// It exists, and its object can't be read.
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

/// A pod and the resource version it was seen with.
pub type Sighting = (PodState, Option<u64>);

#[derive(Debug)]
struct Entry {
    state: PodState,
    version: Option<u64>,
    at: Instant,
}

/// Why a pod should get no call, as far as this replica can see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doubt {
    /// The pod it is about; `None` for any of its name.
    uid: Option<String>,
    pub reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Gone,
    Terminating,
    NotReady,
    /// The cluster has no pod of this name.
    Unknown,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Terminating => "terminating",
            Self::NotReady => "not ready",
            Self::Unknown => "not in the cluster",
        }
    }

    /// It holds for a UID for ever, however old the view is. The others pass: this replica's
    /// watch may only lag behind the leader's.
    pub fn is_lasting(self) -> bool {
        matches!(self, Self::Gone | Self::Terminating)
    }
}

impl Doubt {
    /// Whether it concerns the pod with this UID.
    pub fn concerns(&self, uid: &str) -> bool {
        self.uid.as_deref().is_none_or(|other| other == uid)
    }
}

#[derive(Debug, Default)]
pub struct PodView {
    inner: Mutex<Inner>,
    /// Wakes the leader.
    pub changed: Notify,
    /// Pods terminate or are gone: see [`Self::take_departed`].
    pub departed: Notify,
    /// Asks the watch for a new list of all pods.
    pub relist: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    pods: HashMap<PodName, Entry>,
    /// Pods that went, in order.
    tombstones: VecDeque<(Instant, PodName)>,
    in_service: usize,
    /// Whole lists read so far, and when the last one was.
    lists: u64,
    listed_at: Option<Instant>,
    /// Pods that changed since the leader last looked.
    dirty: HashSet<PodName>,
    /// Pods that began to terminate or went, since they were last taken.
    departed: HashSet<PodName>,
}

/// Whether something seen with version `new` adds nothing to what was seen with `known`.
/// Versions that can't be compared are taken for news.
fn is_stale(known: Option<u64>, new: Option<u64>) -> bool {
    matches!((known, new), (Some(known), Some(new)) if new <= known)
}

impl PodView {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an event of the watch; answers whether it is news. A watch that replaces another
    /// repeats what that one told since the list; such repeats have an older version.
    pub fn apply(&self, name: &PodName, state: PodState, version: Option<u64>) -> bool {
        let mut inner = self.inner();
        if inner.pods.get(name).is_some_and(|known| is_stale(known.version, version)) {
            return false;
        }
        inner.set(name.clone(), state, version);
        self.notify(inner);
        true
    }

    /// Takes a whole list. `touched` are the pods that a watch told of while the list was read:
    /// the list may be older than that.
    pub fn replace(&self, listed: HashMap<PodName, Sighting>, touched: &HashSet<PodName>) {
        let mut inner = self.inner();
        let newest = listed.values().filter_map(|(_, version)| *version).max();
        let missing: Vec<PodName> = inner
            .pods
            .iter()
            .filter(|(name, known)| {
                // A list that is newer than the last event of a pod would contain it.
                let may_be_older = known.version.is_none() || known.version > newest;
                let is_newer_event = touched.contains(*name) && may_be_older;
                !listed.contains_key(*name) && !is_newer_event
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in missing {
            inner.lose(name);
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

    /// The pods that began to terminate or went since the last time.
    pub fn take_departed(&self) -> HashSet<PodName> {
        std::mem::take(&mut self.inner().departed)
    }

    /// How many whole lists were read, and when the last one was.
    pub fn lists(&self) -> (u64, Option<Instant>) {
        let inner = self.inner();
        (inner.lists, inner.listed_at)
    }

    /// How many pods are ready and not terminating.
    pub fn in_service(&self) -> usize {
        self.inner().in_service
    }

    /// All pods, for a comparison; nothing is left to do after it.
    pub fn all(&self) -> HashMap<PodName, PodState> {
        let mut inner = self.inner();
        inner.dirty.clear();
        let pods = inner.pods.iter();
        pods.map(|(name, entry)| (name.clone(), entry.state.clone())).collect()
    }

    /// The pods that changed since the last time.
    pub fn take_changes(&self) -> Vec<(PodName, PodState)> {
        let mut inner = self.inner();
        let dirty = std::mem::take(&mut inner.dirty);
        let state = |name| inner.pods.get(&name).map(|entry| (name, entry.state.clone()));
        dirty.into_iter().filter_map(state).collect()
    }

    /// Why this pod should get no call; `None` if it may, or before the first list.
    pub fn doubt(&self, pod: &PodName) -> Option<Doubt> {
        let inner = self.inner();
        if inner.lists == 0 {
            return None;
        }
        let (uid, reason) = match inner.pods.get(pod).map(|entry| &entry.state) {
            None => (None, Reason::Unknown),
            Some(PodState::Gone { uid }) => (Some(uid), Reason::Gone),
            Some(PodState::Present(PodFacts { uid, terminating: true, .. })) => {
                (Some(uid), Reason::Terminating)
            }
            Some(PodState::Present(PodFacts { uid, ready: false, .. })) => {
                (Some(uid), Reason::NotReady)
            }
            Some(PodState::Present(_) | PodState::Unreadable) => return None,
        };
        Some(Doubt { uid: uid.cloned(), reason })
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

    /// A pod is missing in a list: it went unnoticed.
    fn lose(&mut self, name: PodName) {
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

    /// A view of one list, and the pods that changed since it was read.
    fn view(pods: &[(&str, &str, u64)]) -> PodView {
        let view = PodView::default();
        view.replace(list(pods), &HashSet::new());
        view.all();
        view
    }

    fn reason(view: &PodView, pod: &str) -> Option<Reason> {
        view.doubt(&name(pod)).map(|doubt| doubt.reason)
    }

    #[test]
    fn an_event_that_is_not_newer_than_the_last_of_its_pod_is_ignored() {
        let view = view(&[("a", "u1", 100)]);
        assert!(view.apply(&name("a"), gone("u1"), Some(105)));
        for version in [100, 104, 105] {
            assert!(!view.apply(&name("a"), present("u1"), Some(version)), "{version}");
        }
        assert_eq!(view.take_changes(), [(name("a"), gone("u1"))]);
        // The same pod, selected again.
        assert!(view.apply(&name("a"), present("u1"), Some(106)));
        assert_eq!(view.take_changes(), [(name("a"), present("u1"))]);
        // Versions that are no numbers can't be compared.
        assert!(view.apply(&name("a"), gone("u1"), None));
        assert!(view.apply(&name("a"), present("u1"), Some(1)));
    }

    #[test]
    fn a_list_does_not_undo_what_a_watch_told_while_it_was_read() {
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
        // Read at 103: older than two of the events, and newer than one.
        view.replace(list(&[("deleted", "u1", 90), ("changed", "u6", 103)]), &touched);
        let pods = view.all();
        assert_eq!(pods[&name("deleted")], gone("u1"));
        assert_eq!(pods[&name("changed")], present("u6"));
        assert_eq!(pods[&name("new")], present("u5"));
        assert_eq!(pods[&name("lost")], gone("u3"));
        assert_eq!(view.in_service(), 2);
    }

    #[test]
    fn a_list_newer_than_the_last_event_of_a_pod_shows_that_it_is_gone() {
        let view = view(&[("a", "u1", 90), ("b", "u2", 91)]);
        assert!(view.apply(&name("a"), present("u1"), Some(100)));
        view.replace(list(&[("b", "u2", 101)]), &HashSet::from([name("a")]));
        assert_eq!(view.all()[&name("a")], gone("u1"));
    }

    #[test]
    fn a_list_with_smaller_versions_replaces_all() {
        // The cluster was restored from a backup.
        let view = view(&[("a", "u1", 1_000)]);
        view.replace(list(&[("a", "u1", 10), ("b", "u2", 11)]), &HashSet::new());
        assert!(view.apply(&name("a"), gone("u1"), Some(12)));
        assert_eq!((reason(&view, "a"), reason(&view, "b")), (Some(Reason::Gone), None));
    }

    #[test]
    fn doubts_name_what_speaks_against_a_pod_and_which_pod_it_is() {
        assert_eq!(PodView::default().doubt(&name("a")), None, "nothing is known yet");
        let view = view(&[("a", "u1", 1)]);
        assert_eq!((reason(&view, "a"), reason(&view, "b")), (None, Some(Reason::Unknown)));
        let with = |change: fn(&mut PodFacts)| {
            let PodState::Present(mut facts) = present("u1") else { unreachable!() };
            change(&mut facts);
            PodState::Present(facts)
        };
        view.apply(&name("a"), with(|facts| facts.ready = false), Some(2));
        assert_eq!((reason(&view, "a"), view.in_service()), (Some(Reason::NotReady), 0));
        view.apply(&name("a"), with(|facts| facts.terminating = true), Some(3));
        assert_eq!(reason(&view, "a"), Some(Reason::Terminating));
        view.apply(&name("a"), PodState::Unreadable, Some(4));
        assert_eq!(reason(&view, "a"), None);
        view.apply(&name("a"), gone("u1"), Some(5));
        let doubt = view.doubt(&name("a")).unwrap();
        assert_eq!(
            (doubt.reason, doubt.concerns("u1"), doubt.concerns("u2")),
            (Reason::Gone, true, false)
        );
        let lasting = [Reason::Gone, Reason::Terminating, Reason::NotReady, Reason::Unknown];
        assert_eq!(lasting.map(Reason::is_lasting), [true, true, false, false]);
    }

    #[test]
    fn deleted_pods_are_forgotten_after_a_while() {
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
