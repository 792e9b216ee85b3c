//! Leaders: one holds the lease; a former leader may not know yet that it lost it.

use super::{
    InjectedDefect, Simulation,
    cluster::{PodState, Slot},
    events::Event,
    requests::{Op, Reply},
    router::Requester,
};

/// A leader's knowledge of a pod in the store.
#[derive(Debug, Clone, Copy, PartialEq)]
enum StoredPod {
    Unknown,
    /// The store has a pod with this UID that the cluster no longer has.
    Leftover(u32),
    /// The state that the leader wrote last; `None` if it removed the pod.
    Written(Option<PodState>),
}

#[derive(Default)]
pub(super) struct Leader {
    /// Its epoch, until it learns that it lost the lease.
    epoch: Option<u64>,
    /// The store has accepted its epoch, and it has listed the pods.
    has_begun: bool,
    is_busy: bool,
    /// The process is paused until then.
    paused_until: u64,
    watched: Vec<Slot>,
    written: Vec<StoredPod>,
}

impl Leader {
    /// The process restarts.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}

impl Simulation {
    /// A leader acquires the lease with a higher epoch.
    pub(crate) fn election(&mut self) {
        let before = self.holder;
        if self.is_fault_free || self.dice.percent(40) {
            self.holder = self.dice.roll(self.leaders.len());
        }
        let has_none = self.leaders[self.holder].epoch.is_none();
        if self.holder != before || has_none {
            self.epoch += 1;
            let epoch = self.epoch;
            if self.holder != before
                && let Some(old) = self.leaders[before].epoch
            {
                // The former leader learns of it late, and may be paused meanwhile.
                let late = self.dice.between(0, 4_000);
                self.at(self.now + late, Event::LeaderStops { leader: before, epoch: old });
                if self.dice.percent(50) {
                    self.leaders[before].paused_until = self.now + self.dice.between(0, 3_500);
                }
            }
            let leader = self.holder;
            self.log(None, None, || format!("l{leader} has the lease, epoch {epoch}"));
            self.leaders[leader] = Leader { epoch: Some(epoch), ..Leader::default() };
            self.at(self.now, Event::LeaderActs { leader });
        }
        let pause = self.dice.between(500, 8_000);
        self.at(self.now + pause, Event::Election);
    }

    pub(crate) fn leader_stops(&mut self, leader: usize, epoch: u64) {
        if self.leaders[leader].epoch == Some(epoch) {
            self.leaders[leader].restart();
        }
    }

    pub(crate) fn receive_watch_event(&mut self, leader: usize, pod: usize, slot: Slot) {
        let it = &mut self.leaders[leader];
        if it.has_begun && slot.version > it.watched[pod].version {
            it.watched[pod] = slot;
            self.leader_acts(leader);
        }
    }

    /// A leader sends its next write, if any.
    pub(crate) fn leader_acts(&mut self, leader: usize) {
        let it = &self.leaders[leader];
        let Some(epoch) = it.epoch.filter(|_| !it.is_busy) else { return };
        if self.now < it.paused_until {
            let wakes = it.paused_until;
            return self.at(wakes, Event::LeaderActs { leader });
        }
        let op = if it.has_begun {
            let Some(op) = self.next_write(leader, epoch) else { return };
            op
        } else {
            Op::Epoch { epoch }
        };
        self.leaders[leader].is_busy = true;
        let is_replaced = self.checker.is_replaced(epoch);
        self.start_request(leader, Requester::Leader { leader, epoch, is_replaced }, op);
    }

    fn next_write(&mut self, leader: usize, epoch: u64) -> Option<Op> {
        let it = &self.leaders[leader];
        let write_epoch =
            Some(epoch).filter(|_| self.settings.defect != Some(InjectedDefect::NoFencing));
        for pod in 0..it.watched.len() {
            let op = match (it.watched[pod].state, it.written[pod]) {
                (state, StoredPod::Written(written)) if state == written => continue,
                (Some(state), _) => Op::Observe { pod, state, epoch: write_epoch },
                (
                    None,
                    StoredPod::Written(Some(PodState { uid, .. })) | StoredPod::Leftover(uid),
                ) => Op::Remove { pod, uid, epoch: write_epoch },
                (None, _) => Op::Uid { pod },
            };
            return Some(op);
        }
        if self.is_fault_free || !self.dice.percent(10) {
            return None;
        }
        let pod = self.dice.roll(it.watched.len());
        let uid = self.leaders[leader].watched[pod].state?.uid;
        let to = ["pool:gold", "pool:basic", "merchant:acme"][self.dice.roll(3)];
        Some(Op::Move { pod, uid, to, epoch: write_epoch })
    }

    /// A leader receives the reply to a write.
    pub(crate) fn leader_receives(&mut self, requester: Requester, op: Op, reply: Option<Reply>) {
        let Requester::Leader { leader, epoch, is_replaced } = requester else { return };
        let is_accepted = matches!(reply, Some(Reply::Accepted | Reply::NoSuchPod))
            && !matches!(op, Op::Uid { .. });
        if is_accepted {
            self.checker.leader_wrote(&op, epoch, is_replaced, self.now);
        }
        let it = &mut self.leaders[leader];
        if it.epoch != Some(epoch) {
            return;
        }
        it.is_busy = false;
        match (&op, reply) {
            // Start again with the epoch and a list, after a pause.
            (_, None) => {
                it.has_begun = false;
                return self.at(self.now + 100, Event::LeaderActs { leader });
            }
            (_, Some(Reply::Fenced)) => return it.restart(),
            (Op::Epoch { .. }, _) => {
                it.has_begun = true;
                it.watched = self.cluster.slots.clone();
                it.written = vec![StoredPod::Unknown; it.watched.len()];
            }
            (Op::Observe { pod, state, .. }, _) => {
                it.written[*pod] = StoredPod::Written(Some(*state))
            }
            (Op::Remove { pod, .. }, Some(Reply::Accepted)) => {
                it.written[*pod] = StoredPod::Written(None)
            }
            (Op::Remove { pod, .. }, _) => it.written[*pod] = StoredPod::Unknown,
            (Op::Uid { pod }, Some(Reply::Uid { uid })) => {
                it.written[*pod] = uid.map_or(StoredPod::Written(None), StoredPod::Leftover);
            }
            _ => {}
        }
        self.leader_acts(leader);
    }
}
