//! The fleet: all facts about pods and calls, the views that follow from them,
//! and every operation of the router as a plain state machine.
//!
//! An operation reads and checks, records [`Change`]s to the facts, and answers.
//! [`Fleet::replay`] is the only place that changes a fact, and [`Fleet::place`]
//! the only one that writes a view, so a journal of changes rebuilds everything.

mod call_history;
mod calls;
mod change;
mod clock_shift;
mod drain;
mod events;
mod indexes;
mod limits;
mod moves;
mod pod_writers;
mod pods;
#[cfg(test)]
mod properties;
mod queries;
mod queue;
mod renew;
mod replay;
mod signed_requests;
mod sweep;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use self::{
    call_history::Ends,
    indexes::{Placed, PoolView},
    pod_writers::PodList,
    queue::Queue,
    signed_requests::Seen,
};
pub use self::{
    call_history::{Cause, End},
    calls::{
        After, Allocate, Allocation, Call, CallNotFound, NotReleased, Refusal, Release, Released,
        Why,
    },
    change::{Change, PodFacts},
    drain::{Drained, Undrained, UnknownPod},
    events::{Event, EventId, EventLog, Kind as EventKind, Logged},
    moves::{Move, moves, rebalance},
    pod_writers::{
        Claim, ClaimRefused, Claimant, LIST_TTL, PodOrigin, PodWriter, SIMULATED, WriteRefused,
    },
    pods::{Changed, Departure, Edit, MoveRefused, Observed, Removed},
    queries::{
        CallCursor, CallPage, CallQuery, CallStatus, Found, PodCall, PodStatus, PoolStatus, Status,
        WaitingCall,
    },
    queue::{Abandoned, Hold, Place},
    renew::{Confirm, Confirmed, Renew, Renewed},
    signed_requests::Signed,
    sweep::{Audited, Swept},
};
use crate::{
    Millis, assignment,
    merchant::{Malformed, MerchantConfig, Step},
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
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

/// A call that an operation ended on its own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedCall {
    pub call: CallSid,
    pub pod: PodName,
    pub source_pool: Pool,
    pub lasted: Millis,
    pub cause: Cause,
}

#[derive(Debug, Clone)]
struct Pod {
    facts: PodFacts,
    tier: Option<Pool>,
    draining_until: Option<Millis>,
    /// Calls in a row that never connected or broke at once.
    failures: u32,
    quarantined_until: Option<Millis>,
    calls: Vec<CallSid>,
    /// Where the views hold this pod; nothing but `place` touches it.
    placed: Option<Placed>,
}

impl Pod {
    fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            tier: None,
            draining_until: None,
            failures: 0,
            quarantined_until: None,
            calls: Vec::new(),
            placed: None,
        }
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
    fn insert(&mut self, call: CallSid) {
        if self.calls.insert(call.clone()) {
            self.order.push_back(call);
        }
        if self.order.len() > crate::rules::MAX_RECENT_ENDS
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
    /// The origin of the pods, once one has written.
    origin: Option<PodOrigin>,
    epoch: u64,
    list: Option<PodList>,
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
    ends: Ends,
    /// Signed requests that were answered.
    seen: Seen,
    queue: Queue,
    /// Calls that were handed a pod and may be waiting to hear of it.
    handed: Vec<CallSid>,
    /// Pods whose drain may have ended; see [`Fleet::take_drained`].
    drained: Vec<PodName>,
    leases: BTreeSet<(Millis, CallSid)>,
    drains: BTreeSet<(Millis, PodName)>,
    quarantines: BTreeSet<(Millis, PodName)>,
    /// Which pods calls are given where others would do as well: the choice of
    /// another store, when the fleet judges it.
    favoured: HashMap<CallSid, PodName>,
    turn: u64,
    log: Option<Vec<Change>>,
    events: Option<Vec<Event>>,
}

impl Fleet {
    /// An empty fleet. Until `trusting_until` it believes pods that it may have
    /// forgotten their calls.
    pub fn new(tiers: Tiers, trusting_until: Millis) -> Self {
        Self {
            trusting_until,
            ended: Ended::default(),
            origin: None,
            epoch: 0,
            list: None,
            tiers,
            merchants: HashMap::new(),
            pods: HashMap::new(),
            calls: HashMap::new(),
            pools: HashMap::new(),
            merchant_calls: HashMap::new(),
            admissions: HashMap::new(),
            ends: Ends::default(),
            seen: Seen::default(),
            queue: Queue::default(),
            handed: Vec::new(),
            drained: Vec::new(),
            leases: BTreeSet::new(),
            drains: BTreeSet::new(),
            quarantines: BTreeSet::new(),
            favoured: HashMap::new(),
            turn: 0,
            log: None,
            events: None,
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
        self.tell(|fleet| fleet.meaning(&change));
        if let Some(log) = &mut self.log {
            log.push(change.clone());
        }
        self.replay(change);
    }

    /// Gives an idle pod the pool it should be in: the one its label names, the
    /// one it has if that is still wanted, or a new one. A pod gets its first
    /// pool when it is first in service; a busy one keeps what it has. Then hands
    /// what it has free to those who wait for it.
    fn settle(&mut self, name: &PodName) {
        self.find_home(name);
        self.serve(name);
    }

    fn find_home(&mut self, name: &PodName) {
        let Some(pod) = self.pods.get(name) else {
            return;
        };
        if !pod.calls.is_empty() {
            return;
        }
        let home = match (self.pinned(pod), &pod.tier) {
            (Some(pin), Some(tier)) if pin == *tier => return,
            (None, Some(tier)) if self.tiers.wants(tier) => return,
            (_, None) if !pod.is_serving() => return,
            (Some(pin), _) => Some(pin),
            (None, _) => assignment::home(&self.tiers, |pool| self.assigned(pool)),
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
    fn end(&mut self, call: &CallSid, cause: Cause, now: Millis) -> Option<EndedCall> {
        let facts = self.calls.get(call)?;
        let ended = EndedCall {
            call: call.clone(),
            pod: facts.pod.clone(),
            source_pool: facts.pool.clone(),
            lasted: now.saturating_sub(facts.at),
            cause,
        };
        self.record(Change::Ended { call: call.clone(), at: now, cause });
        Some(ended)
    }

    /// From now on gives these calls these pods where others would do as well: so
    /// the fleet follows another store's choices, if they are legal.
    pub fn favour(&mut self, pods: HashMap<CallSid, PodName>) {
        self.favoured = pods;
    }
}
