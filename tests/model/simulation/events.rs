//! The events of the simulation, in the order of their time.

use std::{cmp::Ordering, collections::BinaryHeap};

use fleet::Millis;
use store::retry;

use super::{
    clients::ClientAction,
    cluster::Slot,
    requests::{Op, Reply},
    router::Requester,
};

#[derive(Debug, Clone)]
pub(super) enum Event {
    /// A client's request reaches a router.
    RequestArrives {
        router: usize,
        requester: Requester,
        op: Op,
    },
    /// A router's request reaches the store.
    StoreReceives {
        ticket: Ticket,
        op: Op,
        not_after: Option<Millis>,
    },
    /// The write of a non-atomic allocation (a defect).
    SecondWrite {
        ticket: Ticket,
        call: u32,
        pod: usize,
        pool: &'static str,
    },
    /// The store sends a reply, after replication if that is required.
    ReplyLeaves {
        ticket: Ticket,
        reply: Reply,
        generation: u32,
    },
    /// The store's reply reaches a router.
    ReplyArrives {
        ticket: Ticket,
        reply: Reply,
    },
    /// The connection of a request to the store breaks.
    ConnectionBreaks {
        ticket: Ticket,
    },
    /// A timer of the retry protocol fires.
    Retry {
        ticket: Ticket,
        event: retry::Event,
    },
    CallerDisconnects {
        ticket: Ticket,
    },
    /// A router's response reaches the requester; `None` is an error.
    ResponseArrives {
        requester: Requester,
        op: Op,
        reply: Option<Reply>,
    },
    FlushDeferred {
        router: usize,
    },
    RouterCrashes {
        router: usize,
    },
    StreamOpens {
        router: usize,
        call: u32,
    },
    GatewayBeats {
        router: usize,
    },
    GatewayCutOff {
        router: usize,
    },
    Sweep,
    Audit,
    Failover,
    NewCall,
    ClientActs {
        call: u32,
        action: ClientAction,
    },
    OperatorActs,
    ClusterChanges {
        pod: usize,
    },
    PodWatched {
        leader: usize,
        pod: usize,
        slot: Slot,
    },
    LeaderActs {
        leader: usize,
    },
    LeaderStops {
        leader: usize,
        epoch: u64,
    },
    Election,
}

/// Identifies a request of a router, and the action of its retry protocol.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ticket {
    pub router: usize,
    /// Changes when the router crashes.
    pub incarnation: u32,
    pub request: u64,
    pub step: u8,
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
    /// Reversed: the heap returns the earliest event first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

#[derive(Default)]
pub(super) struct EventQueue {
    scheduled: BinaryHeap<Scheduled>,
    sequence: u64,
}

impl EventQueue {
    pub(super) fn add(&mut self, at: Millis, event: Event) {
        self.sequence += 1;
        self.scheduled.push(Scheduled { at, sequence: self.sequence, event });
    }

    pub(super) fn next(&mut self) -> Option<(Millis, Event)> {
        self.scheduled.pop().map(|it| (it.at, it.event))
    }
}
