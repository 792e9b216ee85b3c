//! The settle time of pods: a pod that becomes ready gets calls some time later, for a proxy that
//! finds pods by DNS and caches its answers.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use tokio::time::Instant;

use crate::cluster::PodState;
use fleet::{PodFacts, names::PodName};

/// The pods that settle, and those that have settled.
pub(crate) struct Settling {
    time: Duration,
    /// UIDs of the pods that serve. The settle time never takes a pod out of service.
    serving: HashMap<PodName, String>,
    due: BTreeSet<(Instant, PodName)>,
}

impl Settling {
    pub(crate) fn new(time: Duration) -> Self {
        Self { time, serving: HashMap::new(), due: BTreeSet::new() }
    }

    /// Records a pod that is ready in the store: a new leader does not take it out of service.
    pub(crate) fn trust(&mut self, name: &PodName, facts: &PodFacts) {
        if facts.ready && !self.time.is_zero() {
            self.serving.insert(name.clone(), facts.uid.clone());
        }
    }

    /// Returns the state to write: a pod that settles counts as not ready.
    pub(crate) fn admit(
        &mut self,
        name: &PodName,
        mut state: PodState,
        ready_since: Option<Instant>,
        now: Instant,
    ) -> PodState {
        if self.time.is_zero() {
            return state;
        }
        let PodState::Present(facts) = &mut state else {
            self.serving.remove(name);
            return state;
        };
        let is_serving = self.serving.get(name) == Some(&facts.uid);
        if !facts.ready {
            self.serving.remove(name);
        } else if !is_serving {
            let settled_at = ready_since.unwrap_or(now) + self.time;
            if now >= settled_at {
                self.serving.insert(name.clone(), facts.uid.clone());
            } else {
                self.serving.remove(name);
                self.due.insert((settled_at, name.clone()));
                facts.ready = false;
            }
        }
        state
    }

    /// Returns when the next pod has settled.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes the pods that have settled.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<PodName> {
        let is_due = |(at, _): &&(Instant, PodName)| *at <= now;
        let names: Vec<PodName> =
            self.due.iter().take_while(is_due).map(|(_, name)| name.clone()).collect();
        self.due.retain(|(at, _)| *at > now);
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(30);

    fn pod(uid: &str, ready: bool) -> PodState {
        PodState::Present(facts(uid, ready))
    }

    fn facts(uid: &str, ready: bool) -> PodFacts {
        PodFacts {
            uid: uid.into(),
            address: "a:1".into(),
            ready,
            terminating: false,
            at_risk: false,
            restarts: 0,
            pin: None,
        }
    }

    fn is_ready(state: PodState) -> bool {
        matches!(state, PodState::Present(PodFacts { ready: true, .. }))
    }

    #[test]
    fn a_pod_gets_calls_the_settle_time_after_it_became_ready() {
        let (mut settling, name) = (Settling::new(TIME), "p1".parse().unwrap());
        let since = Instant::now();
        let admit = |settling: &mut Settling, uid, ready, since, now| {
            is_ready(settling.admit(&name, pod(uid, ready), Some(since), now))
        };
        assert!(!admit(&mut settling, "u1", true, since, since));
        assert_eq!(settling.next_due(), Some(since + TIME));
        let early = since + TIME - Duration::from_millis(1);
        assert!(settling.take_due(early).is_empty());
        assert!(!admit(&mut settling, "u1", true, since, early));
        assert_eq!(settling.take_due(since + TIME), ["p1".parse::<PodName>().unwrap()]);
        assert!(admit(&mut settling, "u1", true, since, since + TIME));
        // A later transition settles again, and so does another pod of the name.
        let later = since + 2 * TIME;
        assert!(!admit(&mut settling, "u1", false, since, later));
        assert!(!admit(&mut settling, "u1", true, later, later));
        assert!(admit(&mut settling, "u1", true, later, later + TIME));
        assert!(!admit(&mut settling, "u2", true, later + TIME, later + TIME));
    }

    #[test]
    fn a_pod_in_service_stays_in_service_under_a_new_leader() {
        let (mut settling, name) = (Settling::new(TIME), "p1".parse().unwrap());
        settling.trust(&name, &facts("u1", true));
        // The clock of its node is ahead of the leader's, so that its age is unknown.
        let now = Instant::now();
        assert!(is_ready(settling.admit(&name, pod("u1", true), Some(now), now)));
        settling.trust(&name, &facts("u1", false));
        assert!(is_ready(settling.admit(&name, pod("u1", true), Some(now), now)));
        assert!(!is_ready(settling.admit(&name, pod("u2", true), Some(now), now)));
    }

    #[test]
    fn without_a_settle_time_states_pass() {
        let (mut settling, now) = (Settling::new(Duration::ZERO), Instant::now());
        let name = "p1".parse().unwrap();
        assert!(is_ready(settling.admit(&name, pod("u1", true), Some(now), now)));
        assert_eq!(settling.next_due(), None);
    }
}
