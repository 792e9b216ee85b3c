//! The pods of the view by name and namespace.

use std::time::{SystemTime, UNIX_EPOCH};

use super::*;

/// A pod of one namespace.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) namespace: usize,
    pub(super) state: PodState,
    pub(super) version: Option<u64>,
    pub(super) details: PodDetails,
    pub(super) at: Instant,
    /// Since when the pod is ready, by the local clock.
    pub(super) ready_since: Option<Instant>,
    /// The pod of this UID was ready at some time.
    pub(super) has_been_ready: bool,
}

impl Entry {
    fn is_present(&self) -> bool {
        matches!(self.state, PodState::Present(_))
    }

    /// Orders the pods of a name: existing before unreadable before deleted ones, then by age.
    /// Times of creation are those of the API server, so that all replicas agree.
    fn rank(&self) -> impl Ord {
        let kind = match self.state {
            PodState::Present(_) => 0,
            PodState::Unreadable => 1,
            PodState::Gone { .. } => 2,
        };
        let created = self.details.created.filter(|_| kind == 0).unwrap_or(i64::MAX);
        (kind, created, std::cmp::Reverse((kind == 2).then_some(self.at)), self.namespace)
    }

    fn is_ready(&self) -> bool {
        matches!(&self.state, PodState::Present(facts) if facts.ready)
    }
}

/// Returns since when a pod is ready. A transition that this replica observed counts from then by
/// its own clock. Otherwise the clock of the node counts, which may differ: a time in the future
/// counts as now.
fn ready_since(before: Option<&Entry>, seen: &Sighting, is_event: bool) -> Option<Instant> {
    let PodState::Present(PodFacts { ready: true, uid, .. }) = &seen.state else { return None };
    let is_same = |it: &&Entry| matches!(&it.state, PodState::Present(facts) if facts.uid == *uid);
    let before = before.filter(is_same);
    if let Some(known) = before.filter(|it| it.is_ready())
        && known.details.ready_at == seen.details.ready_at
    {
        return known.ready_since;
    }
    let now = Instant::now();
    if is_event && before.is_some() {
        return Some(now);
    }
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let at = seen.details.ready_at.and_then(|at| u64::try_from(at).ok());
    let age = at.map_or(0, |at| wall.saturating_sub(at));
    Some(now.checked_sub(Duration::from_secs(age)).unwrap_or(now))
}

/// Whether a pod was ready at some time.
fn has_been_ready(before: Option<&Entry>, seen: &Sighting) -> bool {
    let PodState::Present(facts) = &seen.state else { return false };
    let is_same =
        |it: &Entry| matches!(&it.state, PodState::Present(known) if known.uid == facts.uid);
    facts.ready || before.is_some_and(|it| it.has_been_ready && is_same(it))
}

impl Inner {
    pub(super) fn entry(&self, namespace: usize, name: &PodName) -> Option<&Entry> {
        self.pods.get(name)?.iter().find(|entry| entry.namespace == namespace)
    }

    pub(super) fn entries(&self, namespace: usize) -> impl Iterator<Item = (&PodName, &Entry)> {
        self.pods.iter().filter_map(move |(name, pods)| {
            Some((name, pods.iter().find(|entry| entry.namespace == namespace)?))
        })
    }

    /// The pod that has the name.
    pub(super) fn effective(&self, name: &PodName) -> Option<&Entry> {
        self.pods.get(name)?.iter().min_by_key(|entry| entry.rank())
    }

    /// The state of the pod that has the name; at risk if its node is cordoned.
    pub(super) fn state(&self, name: &PodName) -> Option<PodState> {
        let entry = self.effective(name)?;
        let mut state = entry.state.clone();
        if let PodState::Present(facts) = &mut state {
            let is_cordoned = |node: &String| self.cordoned.contains(node);
            facts.at_risk |= entry.details.node.as_ref().is_some_and(is_cordoned);
            if let Some(tier) = self.workload_tier(entry) {
                facts.pin = Some(tier.clone());
            }
        }
        Some(state)
    }

    fn is_in_service(&self, name: &PodName) -> bool {
        self.effective(name).is_some_and(|entry| entry.state.is_in_service())
    }

    pub(super) fn set(&mut self, namespace: usize, name: PodName, seen: Sighting, is_event: bool) {
        let at = Instant::now();
        let was_in_service = self.is_in_service(&name);
        let ready_since = ready_since(self.entry(namespace, &name), &seen, is_event);
        let has_been_ready = has_been_ready(self.entry(namespace, &name), &seen);
        let Sighting { state, version, details } = seen;
        if matches!(state, PodState::Gone { .. }) {
            self.tombstones.push_back((at, name.clone()));
        }
        let entry = Entry { namespace, state, version, details, at, ready_since, has_been_ready };
        let pods = self.pods.entry(name.clone()).or_default();
        pods.retain(|known| known.namespace != namespace);
        pods.push(entry);
        self.settle_name(&name, was_in_service);
        while let Some((gone, name)) =
            self.tombstones.pop_front_if(|(gone, _)| gone.elapsed() > TOMBSTONE_AGE)
        {
            self.drop_entry(&name, |it| matches!(it.state, PodState::Gone { .. }) && it.at == gone);
        }
    }

    fn drop_entry(&mut self, name: &PodName, is_it: impl Fn(&Entry) -> bool) {
        let Some(pods) = self.pods.get_mut(name) else { return };
        pods.retain(|entry| !is_it(entry));
        if pods.is_empty() {
            self.pods.remove(name);
        }
    }

    /// Updates the sets and the count that follow from the pods of a name.
    fn settle_name(&mut self, name: &PodName, was_in_service: bool) {
        self.in_service += usize::from(self.is_in_service(name));
        self.in_service -= usize::from(was_in_service);
        self.dirty.insert(name.clone());
        if self.effective(name).is_some_and(|entry| entry.state.has_departed()) {
            self.departed.insert(name.clone());
        }
        let present = self.pods.get(name).into_iter().flatten().filter(|it| it.is_present());
        if present.count() > 1 {
            if self.conflicts.insert(name.clone()) {
                tracing::warn!(pod = %name, "several namespaces have a pod of this name; using the oldest");
            }
        } else {
            self.conflicts.remove(name);
        }
    }

    /// Drops all pods of a namespace. They may exist: none of them counts as gone.
    pub(super) fn forget(&mut self, namespace: usize) {
        let names: Vec<PodName> = self.entries(namespace).map(|(name, _)| name.clone()).collect();
        for name in names {
            let was_in_service = self.is_in_service(&name);
            self.drop_entry(&name, |it| it.namespace == namespace);
            self.settle_name(&name, was_in_service);
        }
    }

    /// Marks a pod that a list no longer contains as gone.
    pub(super) fn remove_missing(&mut self, namespace: usize, name: PodName) {
        let Some(known) = self.entry(namespace, &name) else { return };
        match &known.state {
            PodState::Gone { .. } => {}
            PodState::Present(facts) => {
                let (state, version) = (PodState::Gone { uid: facts.uid.clone() }, known.version);
                let details = PodDetails::default();
                self.set(namespace, name, Sighting { state, version, details }, true);
            }
            PodState::Unreadable => {
                let was_in_service = self.is_in_service(&name);
                self.drop_entry(&name, |it| it.namespace == namespace);
                self.settle_name(&name, was_in_service);
            }
        }
    }
}
