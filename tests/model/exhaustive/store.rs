//! The store of the small world. Its states are few, and each is a number; what a
//! request does to one is worked out once, by the fleet.

use std::collections::HashMap;

use fleet::{
    Allocate, Change, Departure, Fleet, Millis, PodFacts, Release, Removed,
    names::{CallSid, PodName},
    tiers::{Origin, Tiers},
};
use serde_json::json;

use super::{CALLS, PODS, state::Seen};
use crate::{
    common::{begin_term, facts_in_order, writer},
    simulation::Sabotage,
};

/// Time stands still; a lease ends when that is what happens next.
const NOW: Millis = 1_000_000;
const LEASE: Millis = 60_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Op {
    Allocate {
        call: u8,
        attempt: u8,
    },
    /// The second half of an allocation in two steps (a sabotage).
    Take {
        call: u8,
        attempt: u8,
        pod: u8,
    },
    Release {
        call: u8,
        pod: Option<u8>,
        stems_from: Option<u8>,
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
    /// The lease of a call is over, and a sweep finds it.
    Expire {
        call: u8,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Answer {
    Given {
        pod: u8,
    },
    /// This pod is free (a sabotage).
    Free {
        pod: u8,
    },
    Refused,
    Released,
    NotFound,
    Drained,
    Undrained,
    Taken,
    Fenced,
}

struct Known {
    facts: Vec<Change>,
    /// The attempts that may have heard of each call, a bit each.
    attempts: [u8; CALLS],
    /// Where each call is.
    calls: [Option<u8>; CALLS],
    pods: [Option<Seen>; PODS],
}

pub(super) struct Stores {
    known: Vec<Known>,
    numbers: HashMap<(Vec<String>, [u8; CALLS]), u16>,
    steps: HashMap<(u16, Op, u8), (u16, Answer)>,
    pods: Vec<PodName>,
    calls: Vec<CallSid>,
    tiers: Tiers,
    sabotage: Option<Sabotage>,
}

impl Stores {
    /// The first one has two ready pods, written by the first leader.
    pub(super) fn new(sabotage: Option<Sabotage>) -> Self {
        let table = r#"{"gold": 2}"#;
        let mut stores = Self {
            known: Vec::new(),
            numbers: HashMap::new(),
            steps: HashMap::new(),
            pods: (0..PODS).map(|pod| format!("p{pod}").parse().expect("a name")).collect(),
            calls: (0..CALLS).map(|call| format!("c{call}").parse().expect("a name")).collect(),
            tiers: Tiers::parse(table, Origin::Settings).expect("a tier table").0,
            sabotage,
        };
        let mut fleet = Fleet::new(stores.tiers.clone(), 0);
        for pod in &stores.pods {
            let writer = writer(&mut fleet, Some(1));
            fleet.observe_pod(pod, &facts_of(0, false), writer, NOW).expect("the first epoch");
        }
        stores.number(&fleet, [0; CALLS]);
        stores
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Where the store says that a call is.
    pub(super) fn pod_of(&self, store: u16, call: usize) -> Option<u8> {
        self.known[store as usize].calls[call]
    }

    /// What the store has of a pod.
    pub(super) fn pod(&self, store: u16, pod: usize) -> Option<Seen> {
        self.known[store as usize].pods[pod]
    }

    fn number(&mut self, fleet: &Fleet, attempts: [u8; CALLS]) -> u16 {
        let facts = facts_in_order(fleet);
        let key = (facts.iter().map(|(text, _)| text.clone()).collect(), attempts);
        if let Some(number) = self.numbers.get(&key) {
            return *number;
        }
        let number = u16::try_from(self.known.len()).expect("a small world");
        let mut calls = [None; CALLS];
        for (call, sid) in self.calls.iter().enumerate() {
            calls[call] = fleet.call(sid).map(|live| number_of(&live.pod));
        }
        let mut pods = [None; PODS];
        for (pod, name) in self.pods.iter().enumerate() {
            pods[pod] = fleet.pod(name).map(|it| seen(&it.facts));
        }
        let facts = facts.into_iter().map(|(_, change)| change).collect();
        self.known.push(Known { facts, attempts, calls, pods });
        self.numbers.insert(key, number);
        number
    }

    /// What a request does. Of two pods that would do, it gives the favoured one.
    pub(super) fn step(&mut self, store: u16, op: Op, favoured: u8) -> (u16, Answer) {
        if let Some(done) = self.steps.get(&(store, op, favoured)) {
            return *done;
        }
        let before = &self.known[store as usize];
        let mut attempts = before.attempts;
        let mut fleet = Fleet::new(self.tiers.clone(), 0);
        before.facts.iter().for_each(|change| fleet.replay(change.clone()));
        let answer = self.execute(&mut fleet, &mut attempts, op, favoured);
        for (call, sid) in self.calls.iter().enumerate() {
            if fleet.call(sid).is_none() {
                attempts[call] = 0;
            }
        }
        let done = (self.number(&fleet, attempts), answer);
        self.steps.insert((store, op, favoured), done);
        done
    }

    fn release(
        &self,
        fleet: &mut Fleet,
        heard: &mut u8,
        call: u8,
        pod: Option<u8>,
        stems_from: Option<u8>,
    ) -> Answer {
        // It is over when no attempt is left that may have heard of it.
        let is_that = stems_from.is_none_or(|it| {
            let was = std::mem::replace(heard, *heard & !(1 << it));
            was != 0 && *heard == 0
        });
        if !is_that && self.sabotage != Some(Sabotage::DoubtsWithoutAttempt) {
            return Answer::NotFound;
        }
        let name = pod.map(|pod| self.pods[pod as usize].clone());
        let mut released = self.calls[call as usize].clone();
        if self.sabotage == Some(Sabotage::ReleaseByPod)
            && let Some(on) = name.as_ref().and_then(|name| fleet.pod(name))
            && let Some(first) = on.calls.first()
        {
            released = first.call.clone();
        }
        match fleet.release(&Release::new(released, name), NOW) {
            Ok(_) => Answer::Released,
            Err(_) => Answer::NotFound,
        }
    }

    fn execute(
        &self,
        fleet: &mut Fleet,
        attempts: &mut [u8; CALLS],
        op: Op,
        favoured: u8,
    ) -> Answer {
        let (pod_name, sid) =
            (|pod: u8| &self.pods[pod as usize], |call: u8| &self.calls[call as usize]);
        match op {
            Op::Allocate { call, .. }
                if self.sabotage == Some(Sabotage::TwoSteps) && fleet.call(sid(call)).is_none() =>
            {
                let free = fleet.available(&"pool:gold".parse().expect("a pool"));
                match free.first() {
                    Some((pod, _)) => Answer::Free { pod: number_of(pod) },
                    None => Answer::Refused,
                }
            }
            Op::Allocate { call, attempt } => {
                fleet.favour([(sid(call).clone(), pod_name(favoured).clone())].into());
                let request = Allocate::new(sid(call).clone(), None, LEASE);
                let Ok(got) = fleet.allocate(&request, NOW) else { return Answer::Refused };
                // One more who may hear of it.
                attempts[call as usize] |= 1 << attempt;
                Answer::Given { pod: number_of(&got.pod) }
            }
            Op::Take { call, attempt, pod } => {
                if fleet.call(sid(call)).is_some() || fleet.pod(pod_name(pod)).is_none() {
                    return Answer::Refused;
                }
                let (call_name, name, until) = (sid(call), pod_name(pod), NOW + LEASE);
                let facts = json!({"is": "call", "call": call_name, "pod": name, "pool": "pool:gold", "at": NOW, "until": until});
                fleet.replay(serde_json::from_value(facts).expect("a call"));
                attempts[call as usize] = 1 << attempt;
                Answer::Given { pod }
            }
            Op::Release { call, pod, stems_from } => {
                self.release(fleet, &mut attempts[call as usize], call, pod, stems_from)
            }
            Op::Drain { pod } => match fleet.drain(pod_name(pod), LEASE, NOW) {
                Ok(_) => Answer::Drained,
                Err(_) => Answer::NotFound,
            },
            Op::Undrain { pod } => match fleet.undrain(pod_name(pod)) {
                Ok(_) => Answer::Undrained,
                Err(_) => Answer::NotFound,
            },
            Op::Epoch { epoch } => taken(begin_term(fleet, epoch.into())),
            Op::Observe { pod, uid, is_terminating, epoch } => {
                let facts = facts_of(uid, is_terminating);
                let writer = writer(fleet, epoch.map(u64::from));
                taken(fleet.observe_pod(pod_name(pod), &facts, writer, NOW).is_ok())
            }
            Op::Remove { pod, uid, epoch } => {
                let (uid, writer) = (format!("u{uid}"), writer(fleet, epoch.map(u64::from)));
                match fleet.remove_pod(pod_name(pod), &uid, Departure::Now, writer, NOW) {
                    Ok(Removed::NotThere | Removed::Busy) => Answer::NotFound,
                    gone => taken(gone.is_ok()),
                }
            }
            Op::Expire { call } => {
                if fleet.call(sid(call)).is_some() {
                    fleet.replay(Change::Spared { call: sid(call).clone(), until: NOW });
                    fleet.sweep(CALLS, NOW);
                }
                Answer::Released
            }
        }
    }
}

fn taken(is_taken: bool) -> Answer {
    if is_taken { Answer::Taken } else { Answer::Fenced }
}

fn number_of(pod: &PodName) -> u8 {
    pod.as_str()[1..].parse().expect("p and a number")
}

fn seen(facts: &PodFacts) -> Seen {
    let uid = facts.uid[1..].parse().expect("u and a number");
    if facts.terminating { Seen::Terminating { uid } } else { Seen::Ready { uid } }
}

fn facts_of(uid: u8, is_terminating: bool) -> PodFacts {
    PodFacts {
        uid: format!("u{uid}"),
        address: "a:1".into(),
        ready: true,
        terminating: is_terminating,
        restarts: 0,
        pin: None,
    }
}
