//! Leaders: one is in office, and the one before may not know yet.

use super::{
    Sabotage, Simulation,
    cluster::{Seen, Slot},
    events::Event,
    requests::{Answer, Op},
    router::Asker,
};

/// What a leader knows the store to have of a pod.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Word {
    Unknown,
    /// The store has it under this UID, and the cluster has no such pod.
    Leftover(u32),
    Is(Option<Seen>),
}

#[derive(Default)]
pub(super) struct Leader {
    /// Its term, while it believes that it has one.
    epoch: Option<u64>,
    /// The store has taken its epoch, and it has listed the pods.
    has_begun: bool,
    is_busy: bool,
    /// Sleeps until then: events wait.
    asleep_until: u64,
    seen: Vec<Slot>,
    written: Vec<Word>,
}

impl Leader {
    /// Its process begins anew.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}

impl Simulation {
    /// The lease goes to a leader, and with it a higher epoch.
    pub(crate) fn election(&mut self) {
        let before = self.holder;
        if self.is_calm || self.dice.percent(40) {
            self.holder = self.dice.roll(self.leaders.len());
        }
        let has_none = self.leaders[self.holder].epoch.is_none();
        if self.holder != before || has_none {
            self.epoch += 1;
            let epoch = self.epoch;
            if self.holder != before
                && let Some(old) = self.leaders[before].epoch
            {
                // It learns late, and may be asleep until then.
                let late = self.dice.between(0, 4_000);
                self.at(self.now + late, Event::LeaderStops { leader: before, epoch: old });
                if self.dice.percent(50) {
                    self.leaders[before].asleep_until = self.now + self.dice.between(0, 3_500);
                }
            }
            let leader = self.holder;
            self.note(None, None, || format!("l{leader} has the lease, epoch {epoch}"));
            self.leaders[leader] = Leader { epoch: Some(epoch), ..Leader::default() };
            self.at(self.now, Event::LeaderTurns { leader });
        }
        let pause = self.dice.between(500, 8_000);
        self.at(self.now + pause, Event::Election);
    }

    pub(crate) fn leader_stops(&mut self, leader: usize, epoch: u64) {
        if self.leaders[leader].epoch == Some(epoch) {
            self.leaders[leader].restart();
        }
    }

    pub(crate) fn watch(&mut self, leader: usize, pod: usize, slot: Slot) {
        let it = &mut self.leaders[leader];
        if it.has_begun && slot.version > it.seen[pod].version {
            it.seen[pod] = slot;
            self.leader_turns(leader);
        }
    }

    /// A leader does its next write, if there is one to do.
    pub(crate) fn leader_turns(&mut self, leader: usize) {
        let it = &self.leaders[leader];
        let Some(epoch) = it.epoch.filter(|_| !it.is_busy) else { return };
        if self.now < it.asleep_until {
            let wakes = it.asleep_until;
            return self.at(wakes, Event::LeaderTurns { leader });
        }
        let op = if it.has_begun {
            let Some(op) = self.next_write(leader, epoch) else { return };
            op
        } else {
            Op::Epoch { epoch }
        };
        self.leaders[leader].is_busy = true;
        let is_replaced = self.promises.is_replaced(epoch);
        self.ask(leader, Asker::Leader { leader, epoch, is_replaced }, op);
    }

    fn next_write(&mut self, leader: usize, epoch: u64) -> Option<Op> {
        let it = &self.leaders[leader];
        let written = Some(epoch).filter(|_| self.settings.sabotage != Some(Sabotage::AnyEpoch));
        for pod in 0..it.seen.len() {
            let op = match (it.seen[pod].seen, it.written[pod]) {
                (seen, Word::Is(is)) if seen == is => continue,
                (Some(seen), _) => Op::Observe { pod, seen, epoch: written },
                (None, Word::Is(Some(Seen { uid, .. })) | Word::Leftover(uid)) => {
                    Op::Remove { pod, uid, epoch: written }
                }
                (None, _) => Op::Uid { pod },
            };
            return Some(op);
        }
        if self.is_calm || !self.dice.percent(10) {
            return None;
        }
        let pod = self.dice.roll(it.seen.len());
        let uid = self.leaders[leader].seen[pod].seen?.uid;
        let to = ["pool:gold", "pool:basic", "merchant:acme"][self.dice.roll(3)];
        Some(Op::Move { pod, uid, to, epoch: written })
    }

    /// The answer to a leader's write.
    pub(crate) fn leader_hears(&mut self, asker: Asker, op: Op, answer: Option<Answer>) {
        let Asker::Leader { leader, epoch, is_replaced } = asker else { return };
        let is_taken = matches!(answer, Some(Answer::Taken | Answer::NotThere))
            && !matches!(op, Op::Uid { .. });
        if is_taken {
            self.promises.leader_wrote(&op, epoch, is_replaced, self.now);
        }
        let it = &mut self.leaders[leader];
        if it.epoch != Some(epoch) {
            return;
        }
        it.is_busy = false;
        match (&op, answer) {
            // It begins with its epoch and a list again, after a pause.
            (_, None) => {
                it.has_begun = false;
                return self.at(self.now + 100, Event::LeaderTurns { leader });
            }
            (_, Some(Answer::Fenced)) => return it.restart(),
            (Op::Epoch { .. }, _) => {
                it.has_begun = true;
                it.seen = self.cluster.slots.clone();
                it.written = vec![Word::Unknown; it.seen.len()];
            }
            (Op::Observe { pod, seen, .. }, _) => it.written[*pod] = Word::Is(Some(*seen)),
            (Op::Remove { pod, .. }, Some(Answer::Taken)) => it.written[*pod] = Word::Is(None),
            (Op::Remove { pod, .. }, _) => it.written[*pod] = Word::Unknown,
            (Op::Uid { pod }, Some(Answer::Uid { uid })) => {
                it.written[*pod] = uid.map_or(Word::Is(None), Word::Leftover);
            }
            _ => {}
        }
        self.leader_turns(leader);
    }
}
