//! The cluster: pods appear, become ready and unready, restart, terminate, vanish,
//! and come back under the same name with another UID.

use super::{Simulation, events::Event};
use testkit::dice::Dice;

/// What the cluster says of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub uid: u32,
    pub is_ready: bool,
    pub is_terminating: bool,
    pub restarts: u32,
}

impl Seen {
    fn new(uid: u32) -> Self {
        Self { uid, is_ready: false, is_terminating: false, restarts: 0 }
    }

    /// One agent's life: calls do not outlive it.
    pub(crate) fn life(&self) -> (u32, u32) {
        (self.uid, self.restarts)
    }
}

/// A pod's name, and who has it now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub seen: Option<Seen>,
    /// Counts the changes, so that old news can be told from new.
    pub version: u64,
}

pub(super) struct Cluster {
    pub slots: Vec<Slot>,
    last_uid: u32,
}

impl Cluster {
    pub(super) fn new(pods: usize) -> Self {
        let slot = |uid| Slot { seen: Some(Seen { is_ready: true, ..Seen::new(uid) }), version: 1 };
        Self { slots: (0..pods as u32).map(slot).collect(), last_uid: pods as u32 }
    }

    fn another(&mut self) -> Seen {
        self.last_uid += 1;
        Seen::new(self.last_uid)
    }

    /// What becomes of a pod next.
    fn turn(&mut self, pod: usize, dice: &mut Dice) {
        let before = self.slots[pod].seen;
        let after = match before {
            None => Some(self.another()),
            Some(seen) if seen.is_terminating => None,
            Some(seen) if !seen.is_ready => Some(Seen { is_ready: true, ..seen }),
            Some(seen) => match dice.roll(20) {
                0..3 => Some(Seen { is_ready: false, ..seen }),
                3..7 => Some(Seen { is_terminating: true, ..seen }),
                7 => None,
                8 | 9 => Some(Seen { restarts: seen.restarts + 1, ..seen }),
                10 | 11 => Some(self.another()),
                _ => before,
            },
        };
        self.slots[pod] = Slot { seen: after, version: self.slots[pod].version + 1 };
    }

    /// All pods are there, and well.
    pub(super) fn recover(&mut self) {
        for pod in 0..self.slots.len() {
            let seen = match self.slots[pod].seen {
                Some(seen) if !seen.is_terminating => seen,
                _ => self.another(),
            };
            self.slots[pod].seen = Some(Seen { is_ready: true, ..seen });
            self.slots[pod].version += 1;
        }
    }
}

impl Simulation {
    pub(crate) fn cluster_turns(&mut self, pod: usize) {
        if self.is_calm {
            return;
        }
        self.cluster.turn(pod, &mut self.dice);
        self.tell_leaders(pod);
        let pause = self.dice.between(300, 6_000);
        self.at(self.now + pause, Event::ClusterTurns { pod });
    }

    /// News of a pod, to whoever watches. They come in order.
    pub(crate) fn tell_leaders(&mut self, pod: usize) {
        let slot = self.cluster.slots[pod];
        self.note(Some(pod), None, || format!("cluster: p{pod} is {:?}", slot.seen));
        self.promises.pod_changes(pod, slot.seen.map(|seen| seen.life()));
        for leader in 0..self.leaders.len() {
            let delay = self.dice.between(1, 60);
            self.at(self.now + delay, Event::Watch { leader, pod, slot });
        }
    }
}
