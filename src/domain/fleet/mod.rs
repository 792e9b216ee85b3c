//! The fleet: all facts about pods and calls, the views that follow from them,
//! and every operation of the router as a plain state machine.
//!
//! An operation reads and checks, records [`Change`]s to the facts, and answers.
//! [`Fleet::replay`] is the only place that changes a fact, and [`Fleet::place`]
//! the only one that writes a view, so a journal of changes rebuilds everything.

mod calls;
mod change;
mod drain;
mod follow;
mod pods;
#[cfg(test)]
mod properties;
mod upkeep;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

pub use self::{
    calls::{
        Allocate, Allocation, CallNotFound, Confirm, Confirmed, Refusal, Release, Released, Renew,
        Renewed,
    },
    change::{Change, PodFacts},
    drain::{Drained, Undrained, UnknownPod},
    follow::Illegal,
    pods::{Departure, Fenced, MoveRefused, Observed, Removed},
    upkeep::{Audited, Swept},
    view::{CallStatus, PodCall, PodStatus, PoolStatus, Status},
};
use super::{
    Millis, assign,
    merchant::{Malformed, MerchantConfig, Step},
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Kind, Tiers},
};

/// Why a step of a chain gave no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// No pod of the pool is in service, and none is leaving.
    Empty,
    /// Every pod that was in service is draining or terminating.
    AllDraining,
    /// Every pod in service carries all the calls it may.
    AtCapacity,
    /// There is no such tier.
    Unknown,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::AllDraining => "all_draining",
            Self::AtCapacity => "at_capacity",
            Self::Unknown => "unknown",
        }
    }
}

/// A step of a chain that gave no pod, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    pub step: Step,
    pub reason: Reason,
}

/// A live call: its record and the deadline of its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Call {
    pod: PodName,
    /// The pool the pod was drawn from.
    pool: Pool,
    merchant: Option<MerchantId>,
    at: Millis,
    until: Millis,
    tried: Vec<Tried>,
    /// Its stream has not started yet.
    provisional: bool,
}

/// A call whose stream never started while it had its pod.
#[derive(Debug, Clone)]
struct Missed {
    pod: PodName,
    merchant: Option<MerchantId>,
    at: Millis,
}

/// A call that an operation ended on its own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedCall {
    pub call: CallSid,
    pub pod: PodName,
    pub source_pool: Pool,
    pub lasted: Millis,
    /// A sweep ended it because its stream never started.
    pub unconfirmed: bool,
}

#[derive(Debug, Clone)]
struct Pod {
    facts: PodFacts,
    tier: Option<Pool>,
    draining_until: Option<Millis>,
    calls: Vec<CallSid>,
    /// Where the views hold this pod; nothing but `place` touches it.
    placed: Option<Placed>,
}

impl Pod {
    /// Takes no new calls until it is gone or undrained.
    fn is_leaving(&self) -> bool {
        self.draining_until.is_some() || self.facts.terminating
    }

    fn spot(&self, kind: Option<Kind>) -> Spot {
        match kind {
            _ if self.is_leaving() => Spot::Leaving,
            _ if !self.facts.ready => Spot::Unready,
            Some(Kind::Shared { .. }) => Spot::Open,
            Some(Kind::Exclusive | Kind::Dedicated) if self.calls.is_empty() => Spot::Open,
            _ => Spot::Taken,
        }
    }
}

/// How a pool counts one of its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spot {
    /// In the available view, with its live calls as the score.
    Open,
    /// In service, but not in the view: an exclusive pod with a call, or any
    /// pod of a tier that is no more.
    Taken,
    Leaving,
    Unready,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Placed {
    pool: Pool,
    spot: Spot,
    calls: usize,
    /// Orders pods of one score by how long they have been waiting.
    turn: u64,
}

/// The views of one pool.
#[derive(Debug, Default)]
struct PoolView {
    /// Pods that may be drawn, by live calls, then by who has waited longest.
    open: BTreeMap<(usize, u64), PodName>,
    assigned: usize,
    leaving: usize,
    unready: usize,
    calls: usize,
}

impl PoolView {
    fn count(&mut self, placed: &Placed, name: &PodName) {
        self.assigned += 1;
        self.calls += placed.calls;
        match placed.spot {
            Spot::Open => drop(self.open.insert((placed.calls, placed.turn), name.clone())),
            Spot::Taken => {}
            Spot::Leaving => self.leaving += 1,
            Spot::Unready => self.unready += 1,
        }
    }

    fn discount(&mut self, placed: &Placed) {
        self.assigned -= 1;
        self.calls -= placed.calls;
        match placed.spot {
            Spot::Open => drop(self.open.remove(&(placed.calls, placed.turn))),
            Spot::Taken => {}
            Spot::Leaving => self.leaving -= 1,
            Spot::Unready => self.unready -= 1,
        }
    }

    fn in_service(&self) -> usize {
        self.assigned - self.leaving - self.unready
    }
}

struct Merchant {
    document: String,
    config: Result<MerchantConfig, Malformed>,
}

/// The last calls that ended. A renewal that overtakes its own release comes
/// within moments, so the last few are enough.
#[derive(Default)]
struct Ended {
    order: VecDeque<CallSid>,
    calls: HashSet<CallSid>,
}

impl Ended {
    const MOST: usize = 10_000;

    fn insert(&mut self, call: CallSid) {
        if self.calls.insert(call.clone()) {
            self.order.push_back(call);
        }
        if self.order.len() > Self::MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.calls.remove(&oldest);
        }
    }

    fn contains(&self, call: &CallSid) -> bool {
        self.calls.contains(call)
    }
}

/// All pods, calls and pools of one router. See the module's own words.
pub struct Fleet {
    /// Until then a pod's word is enough for a call that nobody knows.
    trusting_until: Millis,
    /// Calls that ended while we were trusting: they must not come back.
    ended: Ended,
    epoch: u64,
    tiers: Tiers,
    merchants: HashMap<MerchantId, Merchant>,
    pods: HashMap<PodName, Pod>,
    calls: HashMap<CallSid, Call>,
    pools: HashMap<Pool, PoolView>,
    /// How many live calls a merchant has.
    merchant_calls: HashMap<MerchantId, usize>,
    /// When merchants with a rate had their last calls. Not worth a journal: after
    /// a second it is of no use.
    admissions: HashMap<MerchantId, VecDeque<Millis>>,
    /// Calls whose stream may still come. Not worth a journal either.
    missed: HashMap<CallSid, Missed>,
    leases: BTreeSet<(Millis, CallSid)>,
    drains: BTreeSet<(Millis, PodName)>,
    turn: u64,
    log: Option<Vec<Change>>,
}

impl Fleet {
    /// An empty fleet. Until `trusting_until` it believes pods that it may have
    /// forgotten their calls.
    pub fn new(tiers: Tiers, trusting_until: Millis) -> Self {
        Self {
            trusting_until,
            ended: Ended::default(),
            epoch: 0,
            tiers,
            merchants: HashMap::new(),
            pods: HashMap::new(),
            calls: HashMap::new(),
            pools: HashMap::new(),
            merchant_calls: HashMap::new(),
            admissions: HashMap::new(),
            missed: HashMap::new(),
            leases: BTreeSet::new(),
            drains: BTreeSet::new(),
            turn: 0,
            log: None,
        }
    }

    /// From now on keeps the changes it makes, for [`Fleet::take_changes`].
    pub fn keep_changes(&mut self) {
        self.log = Some(Vec::new());
    }

    /// The changes since the last time, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub fn active_calls(&self) -> usize {
        self.calls.len()
    }

    /// Changes a fact and notes it for the journal.
    fn record(&mut self, change: Change) {
        if let Some(log) = &mut self.log {
            log.push(change.clone());
        }
        self.replay(change);
    }

    /// Changes a fact as it was decided before, and derives the views again.
    pub fn replay(&mut self, change: Change) {
        match change {
            Change::Began { trusting_until } => self.trusting_until = trusting_until,
            Change::Epoch { epoch } => self.epoch = epoch,
            Change::Tiers { tiers } => {
                self.tiers = tiers;
                let names: Vec<PodName> = self.pods.keys().cloned().collect();
                for name in &names {
                    self.place(name);
                }
            }
            Change::Merchant { id, document: None } => drop(self.merchants.remove(&id)),
            Change::Merchant { id, document: Some(document) } => {
                let config = MerchantConfig::parse(&document);
                self.merchants.insert(id, Merchant { document, config });
            }
            Change::Pod { pod, facts } => {
                match self.pods.get_mut(&pod) {
                    Some(known) => known.facts = facts,
                    None => {
                        let fresh = Pod {
                            facts,
                            tier: None,
                            draining_until: None,
                            calls: Vec::new(),
                            placed: None,
                        };
                        self.pods.insert(pod.clone(), fresh);
                    }
                }
                self.place(&pod);
            }
            Change::Home { pod, pool } => {
                if let Some(known) = self.pods.get_mut(&pod) {
                    known.tier = Some(pool);
                }
                self.place(&pod);
            }
            Change::Gone { pod } => self.forget(&pod),
            Change::Draining { pod, until } => {
                if let Some(known) = self.pods.get_mut(&pod) {
                    if let Some(before) = std::mem::replace(&mut known.draining_until, until) {
                        self.drains.remove(&(before, pod.clone()));
                    }
                    if let Some(until) = until {
                        self.drains.insert((until, pod.clone()));
                    }
                }
                self.place(&pod);
            }
            Change::Call { call, pod, pool, merchant, at, until, tried, provisional } => {
                if let Some(known) = self.pods.get_mut(&pod) {
                    known.calls.push(call.clone());
                    self.leases.insert((until, call.clone()));
                    if let Some(id) = &merchant {
                        *self.merchant_calls.entry(id.clone()).or_default() += 1;
                    }
                    let pod = pod.clone();
                    let record = Call { pod, pool, merchant, at, until, tried, provisional };
                    self.calls.insert(call, record);
                }
                self.place(&pod);
            }
            Change::Renewed { call, until } => {
                if let Some(known) = self.calls.get_mut(&call) {
                    known.provisional = false;
                    self.leases.remove(&(known.until, call.clone()));
                    known.until = until;
                    self.leases.insert((until, call));
                }
            }
            Change::Spared { call, until } => {
                if let Some(known) = self.calls.get_mut(&call) {
                    self.leases.remove(&(known.until, call.clone()));
                    known.until = until;
                    self.leases.insert((until, call));
                }
            }
            Change::Ended { call, at } => {
                if at < self.trusting_until {
                    self.ended.insert(call.clone());
                }
                if let Some(ended) = self.calls.remove(&call) {
                    if let Some(id) = &ended.merchant
                        && let Some(live) = self.merchant_calls.get_mut(id)
                    {
                        *live -= 1;
                        if *live == 0 {
                            self.merchant_calls.remove(id);
                        }
                    }
                    if let Some(pod) = self.pods.get_mut(&ended.pod) {
                        pod.calls.retain(|other| *other != call);
                    }
                    self.leases.remove(&(ended.until, call));
                    self.place(&ended.pod);
                }
            }
        }
    }

    fn forget(&mut self, name: &PodName) {
        let Some(pod) = self.pods.remove(name) else {
            return;
        };
        if let Some(until) = pod.draining_until {
            self.drains.remove(&(until, name.clone()));
        }
        for call in &pod.calls {
            if let Some(call_facts) = self.calls.remove(call) {
                self.leases.remove(&(call_facts.until, call.clone()));
            }
        }
        if let Some(placed) = &pod.placed
            && let Some(view) = self.pools.get_mut(&placed.pool)
        {
            view.discount(placed);
        }
    }

    /// Brings the views of a pod in line with its facts. Answers whether they
    /// were out of line.
    fn place(&mut self, name: &PodName) -> bool {
        let Some(pod) = self.pods.get_mut(name) else {
            return false;
        };
        let should_be = pod.tier.as_ref().map(|tier| {
            let spot = pod.spot(self.tiers.kind(tier));
            (tier, spot, pod.calls.len())
        });
        let is = pod.placed.as_ref().map(|placed| (&placed.pool, placed.spot, placed.calls));
        if should_be == is {
            return false;
        }
        if let Some(before) = pod.placed.take()
            && let Some(view) = self.pools.get_mut(&before.pool)
        {
            view.discount(&before);
        }
        if let Some((pool, spot, calls)) = should_be {
            self.turn += 1;
            let placed = Placed { pool: pool.clone(), spot, calls, turn: self.turn };
            if !self.pools.contains_key(pool) {
                self.pools.insert(pool.clone(), PoolView::default());
            }
            let view = self.pools.get_mut(pool).expect("just made");
            view.count(&placed, name);
            pod.placed = Some(placed);
        }
        true
    }

    /// Gives an idle pod the pool it should be in: the one its label names, the
    /// one it has if that is still wanted, or a new one. A pod gets its first
    /// pool when it is first ready; a busy one keeps what it has.
    fn settle(&mut self, name: &PodName) {
        let Some(pod) = self.pods.get(name) else {
            return;
        };
        if !pod.calls.is_empty() {
            return;
        }
        let home = match (self.pinned(pod), &pod.tier) {
            (Some(pin), Some(tier)) if pin == *tier => return,
            (None, Some(tier)) if self.tiers.wants(tier) => return,
            (_, None) if pod.is_leaving() || !pod.facts.ready => return,
            (Some(pin), _) => Some(pin),
            (None, _) => assign::home(&self.tiers, |pool| self.assigned(pool)),
        };
        if let Some(pool) = home {
            self.record(Change::Home { pod: name.clone(), pool });
        }
    }

    /// The pool a pod's labels ask for, if there is such a pool.
    fn pinned(&self, pod: &Pod) -> Option<Pool> {
        pod.facts.pin.as_ref().and_then(|step| self.tiers.resolve(step))
    }

    fn assigned(&self, pool: &Pool) -> usize {
        self.pools.get(pool).map_or(0, |view| view.assigned)
    }

    /// Ends a call for a reason other than its release.
    fn end(&mut self, call: &CallSid, now: Millis) -> Option<EndedCall> {
        let facts = self.calls.get(call)?;
        let ended = EndedCall {
            call: call.clone(),
            pod: facts.pod.clone(),
            source_pool: facts.pool.clone(),
            lasted: now.saturating_sub(facts.at),
            unconfirmed: false,
        };
        self.record(Change::Ended { call: call.clone(), at: now });
        Some(ended)
    }
}
