//! The cluster: pods appear, become ready and unready, restart, terminate, disappear, and are
//! replaced under the same name with another UID.

use super::{Simulation, events::Event};
use testkit::dice::Dice;

/// The state of a pod in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PodState {
    pub uid: u32,
    pub is_ready: bool,
    pub is_terminating: bool,
    pub restarts: u32,
}

impl PodState {
    fn new(uid: u32) -> Self {
        Self { uid, is_ready: false, is_terminating: false, restarts: 0 }
    }

    /// Identifies the running agent: its calls end with it.
    pub(crate) fn incarnation(&self) -> (u32, u32) {
        (self.uid, self.restarts)
    }
}

/// A pod name and its current pod.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub state: Option<PodState>,
    /// Counts the changes, so that stale watch events can be recognized.
    pub version: u64,
}

pub(super) struct Cluster {
    pub slots: Vec<Slot>,
    last_uid: u32,
}

impl Cluster {
    pub(super) fn new(pods: usize) -> Self {
        let slot = |uid| Slot {
            state: Some(PodState { is_ready: true, ..PodState::new(uid) }),
            version: 1,
        };
        Self { slots: (0..pods as u32).map(slot).collect(), last_uid: pods as u32 }
    }

    fn new_pod(&mut self) -> PodState {
        self.last_uid += 1;
        PodState::new(self.last_uid)
    }

    /// Changes the state of a pod at random.
    fn change(&mut self, pod: usize, dice: &mut Dice) {
        let before = self.slots[pod].state;
        let after = match before {
            None => Some(self.new_pod()),
            Some(state) if state.is_terminating => None,
            Some(state) if !state.is_ready => Some(PodState { is_ready: true, ..state }),
            Some(state) => match dice.roll(20) {
                0..3 => Some(PodState { is_ready: false, ..state }),
                3..7 => Some(PodState { is_terminating: true, ..state }),
                7 => None,
                8 | 9 => Some(PodState { restarts: state.restarts + 1, ..state }),
                10 | 11 => Some(self.new_pod()),
                _ => before,
            },
        };
        self.slots[pod] = Slot { state: after, version: self.slots[pod].version + 1 };
    }

    /// Makes all pods ready.
    pub(super) fn recover(&mut self) {
        for pod in 0..self.slots.len() {
            let state = match self.slots[pod].state {
                Some(state) if !state.is_terminating => state,
                _ => self.new_pod(),
            };
            self.slots[pod].state = Some(PodState { is_ready: true, ..state });
            self.slots[pod].version += 1;
        }
    }
}

impl Simulation {
    pub(crate) fn cluster_changes(&mut self, pod: usize) {
        if self.is_fault_free {
            return;
        }
        let incarnation = |it: &Self| it.cluster.slots[pod].state.map(|state| state.incarnation());
        let before = incarnation(self);
        self.cluster.change(pod, &mut self.dice);
        self.notify_leaders(pod);
        if incarnation(self) != before {
            self.agent_ends(pod);
        }
        let pause = self.dice.between(300, 6_000);
        self.at(self.now + pause, Event::ClusterChanges { pod });
    }

    /// Sends a watch event of a pod to all leaders.
    pub(crate) fn notify_leaders(&mut self, pod: usize) {
        let slot = self.cluster.slots[pod];
        self.log(Some(pod), None, || format!("cluster: p{pod} is {:?}", slot.state));
        self.checker.pod_changes(pod, slot.state.map(|state| state.incarnation()));
        for leader in 0..self.leaders.len() {
            let delay = self.dice.between(1, 60);
            self.at(self.now + delay, Event::PodWatched { leader, pod, slot });
        }
    }
}
