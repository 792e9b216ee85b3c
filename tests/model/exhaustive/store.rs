//! The store of the small model. It has few states, so each is interned as a number, and the effect
//! of a request on a state is computed once, by the fleet.

use std::collections::HashMap;

use fleet::{
    Allocate, Change, Fleet, Millis, PodFacts, Release, RemovalMode, Removed,
    names::{CallSid, PodName},
    tiers::{DocumentSource, Tiers},
};
use serde_json::json;

use super::{CALLS, PODS, state::PodState};
use crate::{
    common::{claim_epoch, sorted_facts, writer},
    simulation::InjectedDefect,
};

/// The clock stands still; the end of a lease is an action.
const NOW: Millis = 1_000_000;
const LEASE: Millis = 60_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Op {
    Allocate {
        call: u8,
        allocation: u8,
    },
    /// The write of a non-atomic allocation (a defect).
    WriteCall {
        call: u8,
        allocation: u8,
        pod: u8,
    },
    Release {
        call: u8,
        pod: Option<u8>,
        /// The allocation that a compensating release undoes.
        compensates: Option<u8>,
    },
    Drain {
        pod: u8,
    },
    Undrain {
        pod: u8,
    },
    Epoch {
        epoch: u8,
    },
    Observe {
        pod: u8,
        uid: u8,
        is_terminating: bool,
        epoch: Option<u8>,
    },
    Remove {
        pod: u8,
        uid: u8,
        epoch: Option<u8>,
    },
    /// The lease of a call ends, and a sweep ends the call.
    Expire {
        call: u8,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Reply {
    Allocated {
        pod: u8,
    },
    /// The read of a non-atomic allocation (a defect).
    FreePod {
        pod: u8,
    },
    Refused,
    Released,
    NotFound,
    Drained,
    Undrained,
    Accepted,
    Fenced,
}

struct StoreState {
    facts: Vec<Change>,
    /// For each call the allocations that may have been answered with it, as bits.
    allocations: [u8; CALLS],
    /// The pod of each call.
    calls: [Option<u8>; CALLS],
    pods: [Option<PodState>; PODS],
}

pub(super) struct Stores {
    states: Vec<StoreState>,
    numbers: HashMap<(Vec<String>, [u8; CALLS]), u16>,
    steps: HashMap<(u16, Op, u8), (u16, Reply)>,
    pods: Vec<PodName>,
    calls: Vec<CallSid>,
    tiers: Tiers,
    defect: Option<InjectedDefect>,
}

impl Stores {
    /// The first state has two ready pods, written by the first leader.
    pub(super) fn new(defect: Option<InjectedDefect>) -> Self {
        let table = r#"{"gold": 2}"#;
        let mut stores = Self {
            states: Vec::new(),
            numbers: HashMap::new(),
            steps: HashMap::new(),
            pods: (0..PODS).map(|pod| format!("p{pod}").parse().expect("valid name")).collect(),
            calls: (0..CALLS).map(|call| format!("c{call}").parse().expect("valid name")).collect(),
            tiers: Tiers::parse(table, DocumentSource::Settings).expect("valid tier table").0,
            defect,
        };
        let mut fleet = Fleet::new(stores.tiers.clone(), 0);
        for pod in &stores.pods {
            let writer = writer(&mut fleet, Some(1));
            fleet
                .observe_pod(pod, &facts_of(0, false), writer, NOW)
                .expect("the first epoch is accepted");
        }
        stores.intern(&fleet, [0; CALLS]);
        stores
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    /// The pod of a call.
    pub(super) fn pod_of(&self, store: u16, call: usize) -> Option<u8> {
        self.states[store as usize].calls[call]
    }

    /// The stored state of a pod.
    pub(super) fn pod(&self, store: u16, pod: usize) -> Option<PodState> {
        self.states[store as usize].pods[pod]
    }

    fn intern(&mut self, fleet: &Fleet, allocations: [u8; CALLS]) -> u16 {
        let facts = sorted_facts(fleet);
        let key = (facts.iter().map(|(text, _)| text.clone()).collect(), allocations);
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let number = u16::try_from(self.states.len()).expect("the model is small");
        let mut calls = [None; CALLS];
        for (call, sid) in self.calls.iter().enumerate() {
            calls[call] = fleet.call(sid).map(|live| number_of(&live.pod));
        }
        let mut pods = [None; PODS];
        for (pod, name) in self.pods.iter().enumerate() {
            pods[pod] = fleet.pod(name).map(|it| pod_state(&it.facts));
        }
        let facts = facts.into_iter().map(|(_, change)| change).collect();
        self.states.push(StoreState { facts, allocations, calls, pods });
        self.numbers.insert(key, number);
        number
    }

    /// The effect of a request. An allocation takes the preferred pod if it is free.
    pub(super) fn step(&mut self, store: u16, op: Op, preferred: u8) -> (u16, Reply) {
        if let Some(done) = self.steps.get(&(store, op, preferred)) {
            return *done;
        }
        let before = &self.states[store as usize];
        let mut allocations = before.allocations;
        let mut fleet = Fleet::new(self.tiers.clone(), 0);
        before.facts.iter().for_each(|change| fleet.apply(change.clone()));
        let reply = self.execute(&mut fleet, &mut allocations, op, preferred);
        for (call, sid) in self.calls.iter().enumerate() {
            if fleet.call(sid).is_none() {
                allocations[call] = 0;
            }
        }
        let done = (self.intern(&fleet, allocations), reply);
        self.steps.insert((store, op, preferred), done);
        done
    }

    fn release(
        &self,
        fleet: &mut Fleet,
        requests: &mut u8,
        call: u8,
        pod: Option<u8>,
        compensates: Option<u8>,
    ) -> Reply {
        // The last allocation that may have been answered with the call ends it.
        let is_last = compensates.is_none_or(|it| {
            let was = std::mem::replace(requests, *requests & !(1 << it));
            was != 0 && *requests == 0
        });
        if !is_last && self.defect != Some(InjectedDefect::CompensateWithoutRequestId) {
            return Reply::NotFound;
        }
        let name = pod.map(|pod| self.pods[pod as usize].clone());
        let mut released = self.calls[call as usize].clone();
        if self.defect == Some(InjectedDefect::ReleaseByPod)
            && let Some(on) = name.as_ref().and_then(|name| fleet.pod(name))
            && let Some(first) = on.calls.first()
        {
            released = first.call.clone();
        }
        match fleet.release(&Release::new(released, name), NOW) {
            Ok(_) => Reply::Released,
            Err(_) => Reply::NotFound,
        }
    }

    fn execute(
        &self,
        fleet: &mut Fleet,
        allocations: &mut [u8; CALLS],
        op: Op,
        preferred: u8,
    ) -> Reply {
        let (pod_name, sid) =
            (|pod: u8| &self.pods[pod as usize], |call: u8| &self.calls[call as usize]);
        match op {
            Op::Allocate { call, .. }
                if self.defect == Some(InjectedDefect::NonAtomicAllocate)
                    && fleet.call(sid(call)).is_none() =>
            {
                let free = fleet.available(&"pool:gold".parse().expect("valid pool"));
                match free.first() {
                    Some((pod, _)) => Reply::FreePod { pod: number_of(pod) },
                    None => Reply::Refused,
                }
            }
            Op::Allocate { call, allocation } => {
                fleet.prefer([(sid(call).clone(), pod_name(preferred).clone())].into());
                let request = Allocate::new(sid(call).clone(), None, LEASE);
                let Ok(got) = fleet.allocate(&request, NOW) else { return Reply::Refused };
                // Another allocation that may be answered with this call.
                allocations[call as usize] |= 1 << allocation;
                Reply::Allocated { pod: number_of(&got.pod) }
            }
            Op::WriteCall { call, allocation, pod } => {
                if fleet.call(sid(call)).is_some() || fleet.pod(pod_name(pod)).is_none() {
                    return Reply::Refused;
                }
                let (call_name, name, until) = (sid(call), pod_name(pod), NOW + LEASE);
                let facts = json!({"is": "call", "call": call_name, "pod": name, "pool": "pool:gold", "at": NOW, "until": until});
                fleet.apply(serde_json::from_value(facts).expect("valid change"));
                allocations[call as usize] = 1 << allocation;
                Reply::Allocated { pod }
            }
            Op::Release { call, pod, compensates } => {
                self.release(fleet, &mut allocations[call as usize], call, pod, compensates)
            }
            Op::Drain { pod } => match fleet.drain(pod_name(pod), LEASE, NOW) {
                Ok(_) => Reply::Drained,
                Err(_) => Reply::NotFound,
            },
            Op::Undrain { pod } => match fleet.undrain(pod_name(pod)) {
                Ok(_) => Reply::Undrained,
                Err(_) => Reply::NotFound,
            },
            Op::Epoch { epoch } => accepted(claim_epoch(fleet, epoch.into())),
            Op::Observe { pod, uid, is_terminating, epoch } => {
                let facts = facts_of(uid, is_terminating);
                let writer = writer(fleet, epoch.map(u64::from));
                accepted(fleet.observe_pod(pod_name(pod), &facts, writer, NOW).is_ok())
            }
            Op::Remove { pod, uid, epoch } => {
                let (uid, writer) = (format!("u{uid}"), writer(fleet, epoch.map(u64::from)));
                match fleet.remove_pod(pod_name(pod), &uid, RemovalMode::Immediate, writer, NOW) {
                    Ok(Removed::NotFound | Removed::Busy) => Reply::NotFound,
                    gone => accepted(gone.is_ok()),
                }
            }
            Op::Expire { call } => {
                if fleet.call(sid(call)).is_some() {
                    fleet.apply(Change::PendingExtended { call: sid(call).clone(), until: NOW });
                    fleet.sweep(CALLS, NOW);
                }
                Reply::Released
            }
        }
    }
}

fn accepted(is_accepted: bool) -> Reply {
    if is_accepted { Reply::Accepted } else { Reply::Fenced }
}

fn number_of(pod: &PodName) -> u8 {
    pod.as_str()[1..].parse().expect("pods are named p0, p1, …")
}

fn pod_state(facts: &PodFacts) -> PodState {
    let uid = facts.uid[1..].parse().expect("UIDs are u0, u1, …");
    if facts.terminating { PodState::Terminating { uid } } else { PodState::Ready { uid } }
}

fn facts_of(uid: u8, is_terminating: bool) -> PodFacts {
    PodFacts {
        uid: format!("u{uid}"),
        address: "a:1".into(),
        ready: true,
        terminating: is_terminating,
        at_risk: false,
        restarts: 0,
        pin: None,
    }
}
