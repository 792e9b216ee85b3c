//! The store: the fleet, and what Redis keeps beside it. Which attempt a call stems
//! from, until when a request may be executed, and what a replica has of it all.

use std::collections::{HashMap, VecDeque};

use fleet::{
    Allocate, Change, Departure, Edit, Fleet, Found, Millis, MoveRefused, NotReleased, PodFacts,
    Release, Removed, Renew,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Origin, Tiers},
};
use serde_json::json;

use super::{
    Acknowledged, CAP, Failover, LEASE, Sabotage,
    cluster::Seen,
    requests::{Answer, Op},
};

use crate::common::{begin_term, facts_in_order, writer};

const TABLE: &str = r#"{"tiers": {"gold": {"target": 2}, "acme": {"target": 1},
    "basic": {"type": "shared", "target": 2, "max_concurrent": 3}}, "default_chain": ["gold", "basic"]}"#;
/// So many writes a replica may be behind.
const BEHIND: usize = 40;

/// What one write changed.
struct Written {
    changes: Vec<Change>,
    attempt: Option<(u32, Option<Vec<u64>>)>,
    /// When the replica has it.
    replicated_at: Millis,
}

/// A fleet, and for each call the attempts that may have heard of it; none once it is sure.
struct Facts {
    fleet: Fleet,
    attempts: HashMap<u32, Vec<u64>>,
}

impl Facts {
    fn apply(&mut self, written: Written) {
        written.changes.into_iter().for_each(|change| self.fleet.replay(change));
        self.note(written.attempt);
    }

    fn note(&mut self, attempt: Option<(u32, Option<Vec<u64>>)>) {
        match attempt {
            Some((call, Some(attempt))) => drop(self.attempts.insert(call, attempt)),
            Some((call, None)) => drop(self.attempts.remove(&call)),
            None => {}
        }
    }

    fn copy(&self) -> Self {
        let mut fleet = Fleet::new(self.fleet.tiers().clone(), 0);
        facts_in_order(&self.fleet).into_iter().for_each(|(_, change)| fleet.replay(change));
        Self { fleet, attempts: self.attempts.clone() }
    }
}

pub(super) struct Store {
    facts: Facts,
    replica: Option<Facts>,
    behind: VecDeque<Written>,
    acknowledged: Acknowledged,
    pods: Vec<PodName>,
    calls: Vec<CallSid>,
    merchant: MerchantId,
    sabotage: Option<Sabotage>,
    /// Counts failovers: what the old primary had to say is never heard.
    pub generation: u32,
    pub writes: u64,
    pub lost: u64,
}

impl Store {
    pub(super) fn new(pods: usize, failover: Option<Failover>, sabotage: Option<Sabotage>) -> Self {
        let tiers = Tiers::parse(TABLE, Origin::Settings).expect("a tier table").0;
        let merchant: MerchantId = "m".parse().expect("a name");
        let mut facts = Facts { fleet: Fleet::new(tiers, 0), attempts: HashMap::new() };
        facts.fleet.set_merchant(&merchant, Some(r#"{"pool": "acme"}"#), Edit::ANY).unwrap();
        let replica = failover.is_some().then(|| facts.copy());
        if replica.is_some() {
            facts.fleet.keep_changes();
        }
        Self {
            facts,
            replica,
            behind: VecDeque::new(),
            acknowledged: failover.map_or(Acknowledged::AtOnce, |it| it.acknowledged),
            pods: (0..pods).map(|pod| format!("p{pod}").parse().expect("a name")).collect(),
            calls: Vec::new(),
            merchant,
            sabotage,
            generation: 0,
            writes: 0,
            lost: 0,
        }
    }

    pub(super) fn fleet(&self) -> &Fleet {
        &self.facts.fleet
    }

    fn sid(&mut self, call: u32) -> CallSid {
        while self.calls.len() <= call as usize {
            let name = format!("c{}", self.calls.len());
            self.calls.push(name.parse().expect("a name"));
        }
        self.calls[call as usize].clone()
    }

    fn number_of(&self, pod: &PodName) -> usize {
        pod.as_str()[1..].parse().expect("p and a number")
    }

    /// Executes a request. Answers, too, from when on the answer may leave.
    pub(super) fn execute(&mut self, op: &Op, now: Millis, lag: Millis) -> (Answer, Millis) {
        let before = op.call().map(|call| (call, self.facts.attempts.get(&call).cloned()));
        let answer = self.step(op, now);
        let after = op.call().map(|call| (call, self.facts.attempts.get(&call).cloned()));
        let changed = after != before;
        self.replicate(after.filter(|_| changed), now, lag);
        let held = match self.acknowledged {
            Acknowledged::AtOnce => now,
            // What it has read has to be safe as well.
            Acknowledged::WhenReplicated => {
                self.behind.back().map_or(now, |last| last.replicated_at.max(now))
            }
        };
        (answer, held)
    }

    fn replicate(&mut self, attempt: Option<(u32, Option<Vec<u64>>)>, now: Millis, lag: Millis) {
        let Some(replica) = &mut self.replica else { return };
        let changes = self.facts.fleet.take_changes();
        if changes.is_empty() && attempt.is_none() {
            return;
        }
        self.writes += 1;
        let last = self.behind.back().map_or(0, |last| last.replicated_at);
        let replicated_at = last.max(now + lag);
        self.behind.push_back(Written { changes, attempt, replicated_at });
        if self.behind.len() > BEHIND {
            replica.apply(self.behind.pop_front().expect("it is longer than that"));
        }
    }

    /// The replica takes over. Answers how many writes it has not seen.
    pub(super) fn fail_over(&mut self, failover: Failover, now: Millis) -> u64 {
        let mut replica = self.replica.take().expect("there is a replica");
        let kept = match failover.acknowledged {
            Acknowledged::AtOnce => self.behind.len().saturating_sub(failover.most),
            Acknowledged::WhenReplicated => {
                let unseen = self.behind.iter().filter(|it| it.replicated_at > now).count();
                self.behind.len() - unseen
            }
        };
        let lost = (self.behind.len() - kept) as u64;
        self.behind.drain(..).take(kept).for_each(|written| replica.apply(written));
        self.replica = Some(replica.copy());
        replica.fleet.keep_changes();
        self.facts = replica;
        self.generation += 1;
        self.lost += lost;
        lost
    }

    pub(super) fn sweep(&mut self, now: Millis, lag: Millis) {
        self.facts.fleet.sweep(50, now);
        self.replicate(None, now, lag);
    }

    /// Derives all views again; answers how many were wrong.
    pub(super) fn audit(&mut self) -> usize {
        let names = self.facts.fleet.pod_names();
        self.facts.fleet.audit(&names).repaired
    }

    fn step(&mut self, op: &Op, now: Millis) -> Answer {
        match op {
            Op::Allocate { call, is_merchant, attempt } => {
                self.allocate(*call, *is_merchant, *attempt, now)
            }
            Op::Release { call, pod, stems_from } => self.release(*call, *pod, *stems_from, now),
            Op::Renew { call, pod } => self.renew(*call, *pod, now),
            Op::Find { call } => {
                let found = self.sid(*call);
                let pod = match self.facts.fleet.find(&found) {
                    Some(Found::Live(live)) => Some(self.number_of(&live.pod)),
                    _ => None,
                };
                Answer::Found { pod }
            }
            Op::Drain { pod, ttl } => match self.facts.fleet.drain(&self.pods[*pod], *ttl, now) {
                Ok(drained) => Answer::Drained { until: drained.until },
                Err(_) => Answer::UnknownPod,
            },
            Op::Undrain { pod } => match self.facts.fleet.undrain(&self.pods[*pod]) {
                Ok(_) => Answer::Undrained,
                Err(_) => Answer::UnknownPod,
            },
            Op::Epoch { epoch } => taken(begin_term(&mut self.facts.fleet, *epoch)),
            Op::Observe { pod, seen, epoch } => {
                let facts = facts_of(seen);
                let writer = writer(&mut self.facts.fleet, *epoch);
                taken(self.facts.fleet.observe_pod(&self.pods[*pod], &facts, writer, now).is_ok())
            }
            Op::Remove { pod, uid, epoch } => {
                let (name, uid) = (&self.pods[*pod], format!("u{uid}"));
                let writer = writer(&mut self.facts.fleet, *epoch);
                match self.facts.fleet.remove_pod(name, &uid, Departure::Now, writer, now) {
                    Ok(Removed::NotThere) => Answer::NotThere,
                    gone => taken(gone.is_ok()),
                }
            }
            Op::Move { pod, uid, to, epoch } => {
                let pool: Pool = to.parse().expect("a pool");
                let (name, uid) = (&self.pods[*pod], format!("u{uid}"));
                let writer = writer(&mut self.facts.fleet, *epoch);
                match self.facts.fleet.move_pod(name, &uid, &pool, writer) {
                    Err(MoveRefused::Write(_)) => Answer::Fenced,
                    Ok(()) => Answer::Taken,
                    Err(_) => Answer::NotThere,
                }
            }
            Op::Uid { pod } => {
                let uid = self.facts.fleet.pod(&self.pods[*pod]).map(|pod| pod.facts.uid);
                Answer::Uid { uid: uid.map(|uid| uid[1..].parse().expect("u and a number")) }
            }
        }
    }

    fn allocate(&mut self, call: u32, is_merchant: bool, attempt: u64, now: Millis) -> Answer {
        let sid = self.sid(call);
        let merchant = is_merchant.then(|| self.merchant.clone());
        let Ok(got) = self.facts.fleet.allocate(&Allocate::new(sid, merchant, LEASE), now) else {
            return Answer::Refused;
        };
        let is_new = match self.facts.attempts.get_mut(&call) {
            _ if !got.was_existing => {
                self.facts.attempts.insert(call, vec![attempt]);
                true
            }
            // The same attempt again: its first answer was lost.
            Some(attempts) if attempts.first() == Some(&attempt) => true,
            // One more who may hear of it.
            Some(attempts) => {
                if !attempts.contains(&attempt) {
                    attempts.push(attempt);
                }
                false
            }
            None => false,
        };
        let is_shared = got.pool.to_string() == "pool:basic";
        Answer::Given { pod: self.number_of(&got.pod), is_shared, is_new }
    }

    fn renew(&mut self, call: u32, pod: usize, now: Millis) -> Answer {
        let (calls, pod) = (vec![self.sid(call)], Some(self.pods[pod].clone()));
        let renewed = self.facts.fleet.renew(&Renew { calls, pod, lease_ttl: LEASE }, now);
        if !renewed.unknown.is_empty() {
            return Answer::NotFound;
        }
        // Somebody has it: nobody may take it back any more.
        if self.sabotage != Some(Sabotage::DoubtsDespiteRenewal) {
            self.facts.attempts.remove(&call);
        }
        Answer::Renewed
    }

    fn release(
        &mut self,
        call: u32,
        pod: Option<usize>,
        stems_from: Option<u64>,
        now: Millis,
    ) -> Answer {
        // It is over when nobody is left who may have heard of it.
        let is_that = stems_from.is_none_or(|it| {
            self.facts.attempts.get_mut(&call).is_some_and(|attempts| {
                // (the place of the first stays its own)
                attempts.iter_mut().filter(|other| **other == it).for_each(|it| *it = u64::MAX);
                attempts.iter().all(|other| *other == u64::MAX)
            })
        });
        if !is_that && self.sabotage != Some(Sabotage::DoubtsWithoutAttempt) {
            return Answer::NotFound;
        }
        let mut sid = self.sid(call);
        let name = pod.map(|pod| self.pods[pod].clone());
        if self.sabotage == Some(Sabotage::ReleaseByPod)
            && let Some(on) = name.as_ref().and_then(|name| self.facts.fleet.pod(name))
            && let Some(first) = on.calls.first()
        {
            sid = first.call.clone();
        }
        match self.facts.fleet.release(&Release::new(sid, name), now) {
            Ok(released) => Answer::Released { pod: self.number_of(&released.pod) },
            Err(NotReleased::NotFound | NotReleased::Waited { .. }) => Answer::NotFound,
        }
    }

    /// Half of an allocation done in two steps: reads which pod is free.
    pub(super) fn peek(&mut self, call: u32) -> Option<(usize, &'static str)> {
        let sid = self.sid(call);
        if self.facts.fleet.call(&sid).is_some() {
            return None;
        }
        [("pool:gold", 1), ("pool:basic", CAP)].into_iter().find_map(|(pool, cap)| {
            let free = self.facts.fleet.available(&pool.parse().expect("a pool"));
            let (pod, _) = free.into_iter().find(|(_, calls)| *calls < cap)?;
            Some((self.number_of(&pod), pool))
        })
    }

    /// The other half: writes that the call has it.
    pub(super) fn poke(&mut self, call: u32, pod: usize, pool: &str, now: Millis) -> Answer {
        let (sid, name) = (self.sid(call), self.pods[pod].clone());
        if self.facts.fleet.call(&sid).is_some() || self.facts.fleet.pod(&name).is_none() {
            return Answer::Refused;
        }
        let facts = json!({"is": "call", "call": sid, "pod": name, "pool": pool, "at": now, "until": now + LEASE});
        self.facts.fleet.replay(serde_json::from_value(facts).expect("a call"));
        Answer::Given { pod, is_shared: pool == "pool:basic", is_new: true }
    }
}

fn taken(is_taken: bool) -> Answer {
    if is_taken { Answer::Taken } else { Answer::Fenced }
}

fn facts_of(seen: &Seen) -> PodFacts {
    PodFacts {
        uid: format!("u{}", seen.uid),
        address: "a:1".into(),
        ready: seen.is_ready,
        terminating: seen.is_terminating,
        restarts: seen.restarts,
        pin: None,
    }
}
