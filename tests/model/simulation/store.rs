//! The store: the fleet, the request ids of each call, and a replica that lags behind.

use std::collections::{HashMap, VecDeque};

use fleet::{
    Allocate, CallLookup, Change, Edit, Fleet, Millis, MoveRefused, PodFacts, Release, RemovalMode,
    Removed, Renew,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{DocumentSource, Tiers},
};
use serde_json::json;

use super::{
    Acknowledged, CAP, Failover, InjectedDefect, LEASE,
    cluster::PodState,
    requests::{Op, Reply},
};

use crate::common::{claim_epoch, sorted_facts, writer};

const TIER_TABLE: &str = r#"{"tiers": {"gold": {"target": 2}, "acme": {"target": 1},
    "basic": {"type": "shared", "target": 2, "max_concurrent": 3}}, "default_chain": ["gold", "basic"]}"#;
/// Writes that the replica may lag behind, at most.
const MAX_BACKLOG: usize = 40;

/// A call whose request ids changed, and their new value.
type RequestIdChange = Option<(u32, Option<Vec<u64>>)>;

/// The changes of one write.
struct ReplicatedWrite {
    changes: Vec<Change>,
    request_ids: RequestIdChange,
    /// When the replica receives it.
    replicated_at: Millis,
}

/// A fleet, and for each unconfirmed call the ids of the requests that may have been answered with
/// it.
pub(super) struct Facts {
    pub(super) fleet: Fleet,
    pub(super) request_ids: HashMap<u32, Vec<u64>>,
}

impl Facts {
    fn apply(&mut self, written: ReplicatedWrite) {
        written.changes.into_iter().for_each(|change| self.fleet.apply(change));
        self.set_request_ids(written.request_ids);
    }

    fn set_request_ids(&mut self, change: RequestIdChange) {
        match change {
            Some((call, Some(ids))) => drop(self.request_ids.insert(call, ids)),
            Some((call, None)) => drop(self.request_ids.remove(&call)),
            None => {}
        }
    }

    fn copy(&self) -> Self {
        let mut fleet = Fleet::new(self.fleet.tiers().clone(), 0);
        sorted_facts(&self.fleet).into_iter().for_each(|(_, change)| fleet.apply(change));
        Self { fleet, request_ids: self.request_ids.clone() }
    }
}

pub(super) struct Store {
    pub(super) facts: Facts,
    replica: Option<Facts>,
    backlog: VecDeque<ReplicatedWrite>,
    acknowledged: Acknowledged,
    pub(super) pods: Vec<PodName>,
    calls: Vec<CallSid>,
    merchant: MerchantId,
    pub(super) defect: Option<InjectedDefect>,
    /// Counts failovers: replies of the old primary are lost.
    pub generation: u32,
    pub writes: u64,
    pub lost: u64,
}

impl Store {
    pub(super) fn new(
        pods: usize,
        failover: Option<Failover>,
        defect: Option<InjectedDefect>,
    ) -> Self {
        let tiers = Tiers::parse(TIER_TABLE, DocumentSource::Settings).expect("valid tier table").0;
        let merchant: MerchantId = "m".parse().expect("valid name");
        let mut facts = Facts { fleet: Fleet::new(tiers, 0), request_ids: HashMap::new() };
        facts.fleet.set_merchant(&merchant, Some(r#"{"pool": "acme"}"#), Edit::ANY).unwrap();
        let replica = failover.is_some().then(|| facts.copy());
        if replica.is_some() {
            facts.fleet.enable_change_log();
        }
        Self {
            facts,
            replica,
            backlog: VecDeque::new(),
            acknowledged: failover.map_or(Acknowledged::AtOnce, |it| it.acknowledged),
            pods: (0..pods).map(|pod| format!("p{pod}").parse().expect("valid name")).collect(),
            calls: Vec::new(),
            merchant,
            defect,
            generation: 0,
            writes: 0,
            lost: 0,
        }
    }

    pub(super) fn fleet(&self) -> &Fleet {
        &self.facts.fleet
    }

    pub(super) fn sid(&mut self, call: u32) -> CallSid {
        while self.calls.len() <= call as usize {
            let name = format!("c{}", self.calls.len());
            self.calls.push(name.parse().expect("valid name"));
        }
        self.calls[call as usize].clone()
    }

    pub(super) fn number_of(&self, pod: &PodName) -> usize {
        pod.as_str()[1..].parse().expect("pods are named p0, p1, …")
    }

    /// Executes a request. Returns the reply and when it may be sent.
    pub(super) fn execute(&mut self, op: &Op, now: Millis, lag: Millis) -> (Reply, Millis) {
        let before = op.call().map(|call| (call, self.facts.request_ids.get(&call).cloned()));
        let reply = self.step(op, now);
        let after = op.call().map(|call| (call, self.facts.request_ids.get(&call).cloned()));
        let changed = after != before;
        self.replicate(after.filter(|_| changed), now, lag);
        let held = match self.acknowledged {
            Acknowledged::AtOnce => now,
            // The data that the request has read must be replicated, too.
            Acknowledged::WhenReplicated => {
                self.backlog.back().map_or(now, |last| last.replicated_at.max(now))
            }
        };
        (reply, held)
    }

    fn replicate(&mut self, request_ids: RequestIdChange, now: Millis, lag: Millis) {
        let Some(replica) = &mut self.replica else { return };
        let changes = self.facts.fleet.take_changes();
        if changes.is_empty() && request_ids.is_none() {
            return;
        }
        self.writes += 1;
        let last = self.backlog.back().map_or(0, |last| last.replicated_at);
        let replicated_at = last.max(now + lag);
        self.backlog.push_back(ReplicatedWrite { changes, request_ids, replicated_at });
        if self.backlog.len() > MAX_BACKLOG {
            replica.apply(self.backlog.pop_front().expect("the backlog is not empty"));
        }
    }

    /// Promotes the replica. Returns the number of lost writes.
    pub(super) fn fail_over(&mut self, failover: Failover, now: Millis) -> u64 {
        let mut replica = self.replica.take().expect("failover needs a replica");
        let replicated = match failover.acknowledged {
            Acknowledged::AtOnce => self.backlog.len().saturating_sub(failover.max_lost),
            Acknowledged::WhenReplicated => {
                let unreplicated = self.backlog.iter().filter(|it| it.replicated_at > now).count();
                self.backlog.len() - unreplicated
            }
        };
        let lost = (self.backlog.len() - replicated) as u64;
        self.backlog.drain(..).take(replicated).for_each(|written| replica.apply(written));
        self.replica = Some(replica.copy());
        replica.fleet.enable_change_log();
        self.facts = replica;
        self.generation += 1;
        self.lost += lost;
        lost
    }

    pub(super) fn sweep(&mut self, now: Millis, lag: Millis) {
        self.facts.fleet.sweep(50, now);
        self.replicate(None, now, lag);
    }

    /// Audits all pods. Returns the number of repaired ones.
    pub(super) fn audit(&mut self) -> usize {
        let names = self.facts.fleet.pod_names();
        self.facts.fleet.audit(&names).repaired
    }

    fn step(&mut self, op: &Op, now: Millis) -> Reply {
        match op {
            Op::Allocate { call, is_merchant, request_id } => {
                self.allocate(*call, *is_merchant, *request_id, now)
            }
            Op::Release { call, pod, request_id } => self.release(*call, *pod, *request_id, now),
            Op::Renew { call, pod } => self.renew(*call, *pod, now),
            Op::Find { call } => {
                let found = self.sid(*call);
                let pod = match self.facts.fleet.find(&found) {
                    Some(CallLookup::Live(live)) => Some(self.number_of(&live.pod)),
                    _ => None,
                };
                Reply::Found { pod }
            }
            Op::Attach { .. } | Op::Detach { .. } | Op::Heartbeat { .. } | Op::Failover { .. } => {
                self.stream_step(op, now)
            }
            Op::Drain { pod, ttl } => match self.facts.fleet.drain(&self.pods[*pod], *ttl, now) {
                Ok(drained) => Reply::Drained { until: drained.until },
                Err(_) => Reply::UnknownPod,
            },
            Op::Undrain { pod } => match self.facts.fleet.undrain(&self.pods[*pod]) {
                Ok(_) => Reply::Undrained,
                Err(_) => Reply::UnknownPod,
            },
            Op::Epoch { epoch } => accepted(claim_epoch(&mut self.facts.fleet, *epoch)),
            Op::Observe { pod, state, epoch } => {
                let facts = facts_of(state);
                let writer = writer(&mut self.facts.fleet, *epoch);
                accepted(
                    self.facts.fleet.observe_pod(&self.pods[*pod], &facts, writer, now).is_ok(),
                )
            }
            Op::Remove { pod, uid, epoch } => {
                let (name, uid) = (&self.pods[*pod], format!("u{uid}"));
                let writer = writer(&mut self.facts.fleet, *epoch);
                match self.facts.fleet.remove_pod(name, &uid, RemovalMode::Immediate, writer, now) {
                    Ok(Removed::NotFound) => Reply::NoSuchPod,
                    gone => accepted(gone.is_ok()),
                }
            }
            Op::Move { pod, uid, to, epoch } => {
                let pool: Pool = to.parse().expect("valid pool");
                let (name, uid) = (&self.pods[*pod], format!("u{uid}"));
                let writer = writer(&mut self.facts.fleet, *epoch);
                match self.facts.fleet.move_pod(name, &uid, &pool, writer) {
                    Err(MoveRefused::Write(_)) => Reply::Fenced,
                    Ok(()) => Reply::Accepted,
                    Err(_) => Reply::NoSuchPod,
                }
            }
            Op::Uid { pod } => {
                let uid = self.facts.fleet.pod(&self.pods[*pod]).map(|pod| pod.facts.uid);
                Reply::Uid { uid: uid.map(|uid| uid[1..].parse().expect("UIDs are u0, u1, …")) }
            }
        }
    }

    fn allocate(&mut self, call: u32, is_merchant: bool, request_id: u64, now: Millis) -> Reply {
        let sid = self.sid(call);
        let merchant = is_merchant.then(|| self.merchant.clone());
        let Ok(got) = self.facts.fleet.allocate(&Allocate::new(sid, merchant, LEASE), now) else {
            return Reply::Refused;
        };
        let is_new = match self.facts.request_ids.get_mut(&call) {
            _ if !got.was_existing => {
                self.facts.request_ids.insert(call, vec![request_id]);
                true
            }
            // A repeat of the same request: its first reply was lost.
            Some(request_ids) if request_ids.first() == Some(&request_id) => true,
            // Another request that may be answered with this call.
            Some(request_ids) => {
                if !request_ids.contains(&request_id) {
                    request_ids.push(request_id);
                }
                false
            }
            None => false,
        };
        let is_shared = got.pool.to_string() == "pool:basic";
        Reply::Allocated { pod: self.number_of(&got.pod), is_shared, is_new }
    }

    fn renew(&mut self, call: u32, pod: usize, now: Millis) -> Reply {
        let (calls, pod) = (vec![self.sid(call)], Some(self.pods[pod].clone()));
        let renewed = self.facts.fleet.renew(&Renew { calls, pod, lease_ttl: LEASE }, now);
        if !renewed.unknown.is_empty() {
            return Reply::NotFound;
        }
        // The agent has the call: a compensating release must not end it any more.
        if self.defect != Some(InjectedDefect::CompensateRenewedCall) {
            self.facts.request_ids.remove(&call);
        }
        Reply::Renewed
    }

    fn release(
        &mut self,
        call: u32,
        pod: Option<usize>,
        request_id: Option<u64>,
        now: Millis,
    ) -> Reply {
        // The last request that may have been answered with the call ends it.
        let is_last = request_id.is_none_or(|it| {
            self.facts.request_ids.get_mut(&call).is_some_and(|request_ids| {
                // The first id keeps its position: it decides whether a repeat is new.
                request_ids.iter_mut().filter(|other| **other == it).for_each(|it| *it = u64::MAX);
                request_ids.iter().all(|other| *other == u64::MAX)
            })
        });
        if !is_last && self.defect != Some(InjectedDefect::CompensateWithoutRequestId) {
            return Reply::NotFound;
        }
        let mut sid = self.sid(call);
        let name = pod.map(|pod| self.pods[pod].clone());
        if self.defect == Some(InjectedDefect::ReleaseByPod)
            && let Some(on) = name.as_ref().and_then(|name| self.facts.fleet.pod(name))
            && let Some(first) = on.calls.first()
        {
            sid = first.call.clone();
        }
        match self.facts.fleet.release(&Release::new(sid, name), now) {
            Ok(released) => Reply::Released { pod: self.number_of(&released.pod) },
            Err(_) => Reply::NotFound,
        }
    }

    /// The read of a non-atomic allocation: returns a free pod.
    pub(super) fn read_free_pod(&mut self, call: u32) -> Option<(usize, &'static str)> {
        let sid = self.sid(call);
        if self.facts.fleet.call(&sid).is_some() {
            return None;
        }
        [("pool:gold", 1), ("pool:basic", CAP)].into_iter().find_map(|(pool, cap)| {
            let free = self.facts.fleet.available(&pool.parse().expect("valid pool"));
            let (pod, _) = free.into_iter().find(|(_, calls)| *calls < cap)?;
            Some((self.number_of(&pod), pool))
        })
    }

    /// The write of a non-atomic allocation: assigns the pod to the call.
    pub(super) fn write_call(&mut self, call: u32, pod: usize, pool: &str, now: Millis) -> Reply {
        let (sid, name) = (self.sid(call), self.pods[pod].clone());
        if self.facts.fleet.call(&sid).is_some() || self.facts.fleet.pod(&name).is_none() {
            return Reply::Refused;
        }
        let facts = json!({"is": "call", "call": sid, "pod": name, "pool": pool, "at": now, "until": now + LEASE});
        self.facts.fleet.apply(serde_json::from_value(facts).expect("valid change"));
        Reply::Allocated { pod, is_shared: pool == "pool:basic", is_new: true }
    }
}

fn accepted(is_accepted: bool) -> Reply {
    if is_accepted { Reply::Accepted } else { Reply::Fenced }
}

fn facts_of(state: &PodState) -> PodFacts {
    PodFacts {
        uid: format!("u{}", state.uid),
        address: "a:1".into(),
        ready: state.is_ready,
        terminating: state.is_terminating,
        at_risk: false,
        restarts: state.restarts,
        pin: None,
    }
}
