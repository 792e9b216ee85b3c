//! A state of the small model: the store, the requests in flight, and the knowledge of each router,
//! client, leader and the operator.

use super::{ALLOCATIONS, Bounds, CALLS, PODS, store::Op};

/// The call of each allocation. Both routers allocate the first call.
pub(super) const CALL_OF: [u8; ALLOCATIONS] = [0, 0, 1, 2];

/// The sender of a request, which receives the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Sender {
    /// A router, with a try of an allocation.
    Allocation {
        allocation: u8,
        try_number: u8,
    },
    /// A router, with a compensating release.
    Compensation {
        allocation: u8,
    },
    Client {
        call: u8,
    },
    Operator,
    Leader {
        leader: u8,
        /// Its epoch was known to be superseded when it wrote.
        is_replaced: bool,
    },
}

/// A request in flight to the store. Replies arrive at once or never: a later arrival makes fewer
/// facts certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Request {
    pub from: Sender,
    pub op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    NotStarted,
    Pending {
        try_number: u8,
    },
    Allocated {
        pod: u8,
    },
    /// Refused, given up, or no longer relevant.
    Finished,
}

/// An allocation as its router and its client know it. Pods are bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Allocation {
    pub stage: Stage,
    /// Pods that the store knew when this started, and whose agent has not ended since.
    pub sound: u8,
    /// Pods that were known to drain or terminate when this started.
    pub leaving: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Released {
    No,
    Sent,
    Acknowledged,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Call {
    pub released: Released,
    /// No allocation was in flight when its release was sent, and none has started since.
    pub is_settled: bool,
    pub has_lease: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Drain {
    No,
    Sent,
    Acknowledged,
    UndrainSent,
}

/// The state of a pod in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PodState {
    Ready { uid: u8 },
    Terminating { uid: u8 },
    Gone { uid: u8 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Leader {
    /// 0 if it is not the leader.
    pub epoch: u8,
    pub has_begun: bool,
    pub is_busy: bool,
    /// The state of each pod that it last wrote or read.
    pub written: [Option<PodState>; PODS],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub store: u16,
    /// Sorted, so that equal states compare equal.
    pub requests: Vec<Request>,
    pub allocations: [Allocation; ALLOCATIONS],
    pub calls: [Call; CALLS],
    pub drain: Drain,
    pub cluster: [PodState; PODS],
    pub leaders: [Leader; 2],
    /// The highest epoch that the store has acknowledged.
    pub epoch: u8,
    /// Pods whose current agent the store has acknowledged, and those acknowledged as terminating.
    pub known: u8,
    pub terminating: u8,
    pub left: Bounds,
}

impl State {
    pub(super) fn first(left: Bounds) -> Self {
        let ready = [PodState::Ready { uid: 0 }; PODS];
        let follower = Leader { epoch: 0, has_begun: false, is_busy: false, written: [None; PODS] };
        let first = Leader { epoch: 1, has_begun: true, written: ready.map(Some), ..follower };
        Self {
            store: 0,
            requests: Vec::new(),
            allocations: [Allocation { stage: Stage::NotStarted, sound: 0, leaving: 0 };
                ALLOCATIONS],
            calls: [Call { released: Released::No, is_settled: false, has_lease: true }; CALLS],
            drain: Drain::No,
            cluster: ready,
            leaders: [first, follower],
            epoch: 1,
            known: (1 << PODS) - 1,
            terminating: 0,
            left,
        }
    }

    pub(super) fn send(&mut self, from: Sender, op: Op) {
        let request = Request { from, op };
        let position = self.requests.partition_point(|other| *other < request);
        self.requests.insert(position, request);
    }

    pub(super) fn remove(&mut self, request: Request) {
        let position = self.requests.iter().position(|other| *other == request);
        self.requests.remove(position.expect("the request is in flight"));
    }

    /// Pods that are known to accept no new calls.
    pub(super) fn leaving(&self) -> u8 {
        let drained = if self.drain == Drain::Acknowledged { 1 << super::DRAINED } else { 0 };
        drained | self.terminating
    }

    /// The agent of a pod ends: nothing is certain about the pod any more.
    pub(super) fn agent_ends(&mut self, pod: usize) {
        let others = !(1 << pod);
        for allocation in &mut self.allocations {
            allocation.sound &= others;
            allocation.leaving &= others;
        }
        self.known &= others;
        self.terminating &= others;
    }

    /// Clears irrelevant fields, so that equivalent states become equal.
    pub(super) fn simplify(&mut self) {
        for (allocation, call) in self.allocations.iter_mut().zip(CALL_OF) {
            let it = &self.calls[call as usize];
            let is_certain = it.released == Released::No && it.has_lease;
            if let Stage::Allocated { pod } = allocation.stage {
                (allocation.sound, allocation.leaving) = (allocation.sound & 1 << pod, 0);
                if !is_certain || allocation.sound == 0 {
                    allocation.stage = Stage::Finished;
                }
            }
            if matches!(allocation.stage, Stage::Finished) {
                (allocation.sound, allocation.leaving) = (0, 0);
            }
        }
        for call in self.calls.iter_mut().filter(|call| call.released != Released::No) {
            call.has_lease = true;
            if !call.is_settled {
                call.released = Released::Sent;
            }
        }
    }

    /// The pods that the client of a call was allocated and whose agent has not ended since.
    fn allocated_pods(&self, call: usize) -> impl Iterator<Item = u8> {
        let of_call =
            self.allocations.iter().zip(CALL_OF).filter(move |(_, of)| *of as usize == call);
        of_call.filter_map(|(allocation, _)| match allocation.stage {
            Stage::Allocated { pod } if allocation.sound & 1 << pod != 0 => Some(pod),
            _ => None,
        })
    }

    /// The pods that a call certainly has.
    pub(super) fn held(&self, call: usize) -> impl Iterator<Item = u8> {
        let is_certain = self.calls[call].released == Released::No && self.calls[call].has_lease;
        self.allocated_pods(call).filter(move |_| is_certain)
    }

    /// The violated invariant of a state, if any. `pod_of` looks up a call in the store.
    pub(super) fn violation(&self, pod_of: impl Fn(usize) -> Option<u8>) -> Option<String> {
        let mut holders = [None; PODS];
        for (call, it) in self.calls.iter().enumerate() {
            let mut first = None;
            for pod in self.held(call) {
                let has = *first.get_or_insert(pod);
                if has != pod {
                    return Some(format!("I2: c{call} has p{has} and p{pod}"));
                }
                if pod_of(call) != Some(pod) {
                    return Some(format!("I6, I7: c{call} has p{pod}, but the store has ended it"));
                }
                let holder = *holders[pod as usize].get_or_insert(call);
                if holder != call {
                    return Some(format!("I1: p{pod} serves c{holder} and c{call}"));
                }
            }
            let has_ended = it.released == Released::Acknowledged && it.is_settled;
            if let Some(pod) = pod_of(call).filter(|_| has_ended) {
                return Some(format!("I6: c{call} was released, but is live on p{pod}"));
            }
        }
        None
    }
}
