//! One state of the small world: the store, the requests under way, and what each
//! router, client, leader and the operator knows.

use super::{ATTEMPTS, Bounds, CALLS, PODS, store::Op};

/// Which call each attempt is for. The first call is asked for by both routers.
pub(super) const CALL_OF: [u8; ATTEMPTS] = [0, 0, 1, 2];

/// Who sent a request, and hears the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Who {
    /// A router, with its first or second try.
    Attempt {
        attempt: u8,
        number: u8,
    },
    /// A router that takes back what may have happened.
    Doubt {
        attempt: u8,
    },
    Client {
        call: u8,
    },
    Operator,
    /// And whether it was known to be replaced when it wrote.
    Leader {
        leader: u8,
        is_replaced: bool,
    },
}

/// A request on its way to the store. Answers are heard at once or never: one that
/// is heard later leaves less that is certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Request {
    pub from: Who,
    pub op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    NotAsked,
    Waiting {
        number: u8,
    },
    Told {
        pod: u8,
    },
    /// Refused, given up, or of no more interest.
    Over,
}

/// An allocation, as its router and its client know it. The pods are bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub stage: Stage,
    /// Pods that the store knew when this began, and that have lived since.
    pub sound: u8,
    /// Pods that were known to drain, or to terminate, when this began.
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
    /// No allocation was under way when its release was sent, and none has begun since.
    pub is_settled: bool,
    pub has_lease: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Drain {
    No,
    Asked,
    Acknowledged,
    Unasked,
}

/// What the cluster has under a pod's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Seen {
    Ready { uid: u8 },
    Terminating { uid: u8 },
    Gone { uid: u8 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Leader {
    /// 0 if it does not lead.
    pub epoch: u8,
    pub has_begun: bool,
    pub is_busy: bool,
    /// What it knows the store to have.
    pub written: [Option<Seen>; PODS],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub store: u16,
    /// In order, so that equal states look equal.
    pub requests: Vec<Request>,
    pub attempts: [Attempt; ATTEMPTS],
    pub calls: [Call; CALLS],
    pub drain: Drain,
    pub cluster: [Seen; PODS],
    pub leaders: [Leader; 2],
    /// The highest epoch known to be taken.
    pub epoch: u8,
    /// Pods whose agent the store is known to know, and that it knows to terminate.
    pub known: u8,
    pub terminating: u8,
    pub left: Bounds,
}

impl State {
    pub(super) fn first(left: Bounds) -> Self {
        let ready = [Seen::Ready { uid: 0 }; PODS];
        let nobody = Leader { epoch: 0, has_begun: false, is_busy: false, written: [None; PODS] };
        let first = Leader { epoch: 1, has_begun: true, written: ready.map(Some), ..nobody };
        Self {
            store: 0,
            requests: Vec::new(),
            attempts: [Attempt { stage: Stage::NotAsked, sound: 0, leaving: 0 }; ATTEMPTS],
            calls: [Call { released: Released::No, is_settled: false, has_lease: true }; CALLS],
            drain: Drain::No,
            cluster: ready,
            leaders: [first, nobody],
            epoch: 1,
            known: (1 << PODS) - 1,
            terminating: 0,
            left,
        }
    }

    pub(super) fn send(&mut self, from: Who, op: Op) {
        let request = Request { from, op };
        let place = self.requests.partition_point(|other| *other < request);
        self.requests.insert(place, request);
    }

    pub(super) fn remove(&mut self, request: Request) {
        let place = self.requests.iter().position(|other| *other == request);
        self.requests.remove(place.expect("it is under way"));
    }

    /// Pods that are known to take no new calls.
    pub(super) fn leaving(&self) -> u8 {
        let drained = if self.drain == Drain::Acknowledged { 1 << super::DRAINED } else { 0 };
        drained | self.terminating
    }

    /// Another agent has a pod's name, or none: what was certain is not any more.
    pub(super) fn agent_ends(&mut self, pod: usize) {
        let others = !(1 << pod);
        for attempt in &mut self.attempts {
            attempt.sound &= others;
            attempt.leaving &= others;
        }
        self.known &= others;
        self.terminating &= others;
    }

    /// Forgets what no longer matters, so that states that behave alike are one.
    pub(super) fn simplify(&mut self) {
        for (attempt, call) in self.attempts.iter_mut().zip(CALL_OF) {
            let it = &self.calls[call as usize];
            let is_certain = it.released == Released::No && it.has_lease;
            if let Stage::Told { pod } = attempt.stage {
                (attempt.sound, attempt.leaving) = (attempt.sound & 1 << pod, 0);
                if !is_certain || attempt.sound == 0 {
                    attempt.stage = Stage::Over;
                }
            }
            if matches!(attempt.stage, Stage::Over) {
                (attempt.sound, attempt.leaving) = (0, 0);
            }
        }
        for call in self.calls.iter_mut().filter(|call| call.released != Released::No) {
            call.has_lease = true;
            if !call.is_settled {
                call.released = Released::Sent;
            }
        }
    }

    /// The attempts of a call whose client was told of a pod that has lived since.
    fn told(&self, call: usize) -> impl Iterator<Item = u8> {
        let of_call = self.attempts.iter().zip(CALL_OF).filter(move |(_, of)| *of as usize == call);
        of_call.filter_map(|(attempt, _)| match attempt.stage {
            Stage::Told { pod } if attempt.sound & 1 << pod != 0 => Some(pod),
            _ => None,
        })
    }

    /// The pods that a call certainly has.
    pub(super) fn held(&self, call: usize) -> impl Iterator<Item = u8> {
        let is_certain = self.calls[call].released == Released::No && self.calls[call].has_lease;
        self.told(call).filter(move |_| is_certain)
    }

    /// What a state must not be. `pod_of` is where a look-up would find a call.
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
                    return Some(format!(
                        "I6, I7: c{call} has p{pod}, and the store has let it go"
                    ));
                }
                let holder = *holders[pod as usize].get_or_insert(call);
                if holder != call {
                    return Some(format!("I1: p{pod} serves c{holder} and c{call}"));
                }
            }
            let is_over = it.released == Released::Acknowledged && it.is_settled;
            if let Some(pod) = pod_of(call).filter(|_| is_over) {
                return Some(format!("I6: c{call} was released, and is live on p{pod}"));
            }
        }
        None
    }
}
