//! What happens, in the order of its time.

use std::{cmp::Ordering, collections::BinaryHeap};

use fleet::Millis;

use super::{
    cluster::Slot,
    requests::{Answer, Op},
    router::Asker,
};

#[derive(Debug, Clone)]
pub(super) enum Event {
    /// A client's request reaches a router.
    Asked {
        router: usize,
        asker: Asker,
        op: Op,
    },
    /// A router's request reaches the store.
    Executed {
        to: Ticket,
        op: Op,
        not_after: Option<Millis>,
    },
    /// The second half of an allocation in two steps (a sabotage).
    SecondHalf {
        to: Ticket,
        call: u32,
        pod: usize,
        pool: &'static str,
    },
    /// The store's answer leaves, now that it is safe.
    Leaves {
        to: Ticket,
        answer: Answer,
        generation: u32,
    },
    /// The store's answer reaches a router.
    Answered {
        to: Ticket,
        answer: Answer,
    },
    TryEnds {
        to: Ticket,
    },
    HangsUp {
        to: Ticket,
    },
    /// A router's answer reaches a client, or an error does.
    Heard {
        asker: Asker,
        op: Op,
        answer: Option<Answer>,
    },
    DebtsDue {
        router: usize,
    },
    RouterDies {
        router: usize,
    },
    Sweeps,
    Audits,
    FailsOver,
    CallBegins,
    /// A client does what it does next.
    ClientTurns {
        call: u32,
        turn: super::clients::Turn,
    },
    OperatorTurns,
    ClusterTurns {
        pod: usize,
    },
    Watch {
        leader: usize,
        pod: usize,
        slot: Slot,
    },
    LeaderTurns {
        leader: usize,
    },
    LeaderStops {
        leader: usize,
        epoch: u64,
    },
    Election,
}

/// Which try of which request of which router. A router that died has another life.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ticket {
    pub router: usize,
    pub life: u32,
    pub request: u64,
    pub number: u8,
}

struct Scheduled {
    at: Millis,
    sequence: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.sequence == other.sequence
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

#[derive(Default)]
pub(super) struct Agenda {
    scheduled: BinaryHeap<Scheduled>,
    sequence: u64,
}

impl Agenda {
    pub(super) fn add(&mut self, at: Millis, event: Event) {
        self.sequence += 1;
        self.scheduled.push(Scheduled { at, sequence: self.sequence, event });
    }

    pub(super) fn next(&mut self) -> Option<(Millis, Event)> {
        self.scheduled.pop().map(|it| (it.at, it.event))
    }
}
