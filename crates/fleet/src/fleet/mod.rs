//! The fleet: the facts about pods and calls, the indexes derived from them, and every operation
//! of the router as a synchronous state machine.
//!
//! An operation checks the facts, records [`Change`]s to them and returns a result. Only
//! [`Fleet::apply`] changes a fact, and only [`Fleet::place`] writes the indexes of a pod, so
//! replaying the journal rebuilds the whole state.

mod apply_change;
mod call_history;
mod calls;
mod capacity;
mod change;
mod choose_pod;
mod clock_shift;
mod dial_limits;
mod drain;
mod events;
mod events_of_changes;
mod failover;
mod fencing;
mod indexes;
mod limits;
mod outbound_facts;
mod outbound_queries;
mod pod_failure;
mod pod_health;
mod pods;
#[cfg(test)]
mod properties;
mod queries;
mod queue;
mod rebalancing;
mod release;
mod renew;
mod reservations;
mod signed_requests;
mod streams;
mod surplus;
mod sweep;
#[cfg(test)]
mod tests;
mod waiting_dials;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use self::{
    call_history::CallHistory,
    capacity::CapacityFacts,
    fencing::PodList,
    indexes::{IndexedPod, PoolIndex},
    outbound_facts::OutboundFacts,
    queue::Queue,
    signed_requests::SeenRequests,
    streams::Gateway,
    waiting_dials::WaitingReports,
};
pub use self::{
    call_history::{CallEnd, EndCause},
    calls::{Allocate, Allocation, Call, PreviousPod, Refusal, RefusalReason},
    capacity::{CapacityRecord, CapacityRefused, CapacityUpdate, PrescaleOrder, TooManyOrders},
    change::{Change, PodFacts},
    drain::{Drained, Undrained, UnknownPod},
    events::{Event, EventId, EventKind, EventLog, LoggedEvent, RETURNED},
    failover::{Failover, FailoverRefused},
    fencing::{
        Claim, ClaimRefused, Claimant, PodOrigin, PodWriter, SIMULATED_DIGEST, WriteRefused,
    },
    outbound_facts::HeldDials,
    outbound_queries::{
        AccountStatus, NumberStatus, OutboundStatus, ReservationPage, ReservationQuery,
        ReservationStatus,
    },
    pod_failure::PodFailure,
    pods::{Conflict, Edit, MoveRefused, Observed, RemovalMode, Removed},
    queries::{
        CallCursor, CallLookup, CallPage, CallQuery, CallStatus, GatewayStatus, PodCall, PodStatus,
        PoolStatus, Status, WaitingCall,
    },
    queue::{AbandonedCall, Hold, QueueEntry},
    rebalancing::{Move, moves, rebalance},
    release::{CallNotFound, NotReleased, Release, Released},
    renew::{Confirm, Confirmed, Renew, Renewed},
    reservations::{
        DialLimit, DialRefused, Reservation, ReservationEnd, ReservationNotFound, ReservationUse,
        Reserve, Reserved,
    },
    signed_requests::SignedRequest,
    streams::{
        Attach, AttachRefused, Attached, AttachedStream, ConnectedStream, Detach, Heartbeat,
    },
    surplus::Surplus,
    sweep::{Audited, Swept},
    waiting_dials::{DialDemand, WaitingDials},
};
use crate::{
    Millis, Step, assignment,
    merchant::{Malformed, MerchantConfig},
    names::{CallSid, GatewayId, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// The reason why a chain step was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The pool has no pod in service and no draining or terminating pod.
    Empty,
    /// The pool has no pod in service; some are draining or terminating.
    AllDraining,
    /// Every pod in service has its maximum number of calls.
    AtCapacity,
    /// The tier is not in the table.
    Unknown,
    /// The free slots are held for outstanding dials.
    Held,
}

impl SkipReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::AllDraining => "all_draining",
            Self::AtCapacity => "at_capacity",
            Self::Unknown => "unknown",
            Self::Held => "held",
        }
    }
}

/// A chain step without a free pod, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedStep {
    pub step: Step,
    pub reason: SkipReason,
}

/// A call that ended without a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedCall {
    pub call: CallSid,
    pub pod: PodName,
    pub source_pool: Pool,
    pub lasted: Millis,
    pub cause: EndCause,
}

#[derive(Debug, Clone)]
struct Pod {
    facts: PodFacts,
    pool: Option<Pool>,
    draining_until: Option<Millis>,
    /// The drain takes a surplus pod out of service; no request asked for it.
    is_surplus: bool,
    /// Consecutive failures: calls that never connected or broke early.
    failures: u32,
    quarantined_until: Option<Millis>,
    /// A shared pod may have thousands.
    calls: BTreeSet<CallSid>,
    /// The pod's entry in the indexes; written by `place` only.
    indexed: Option<IndexedPod>,
}

impl Pod {
    fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            pool: None,
            draining_until: None,
            is_surplus: false,
            failures: 0,
            quarantined_until: None,
            calls: BTreeSet::new(),
            indexed: None,
        }
    }
}

struct Merchant {
    document: String,
    config: Result<MerchantConfig, Malformed>,
}

/// Calls that ended during the re-registration window. A renewal that arrives after the release
/// of its call must not re-register the call. Such renewals are at most seconds late, so a
/// bounded number of calls suffices.
#[derive(Default)]
struct RecentlyEnded {
    order: VecDeque<CallSid>,
    calls: HashSet<CallSid>,
}

impl RecentlyEnded {
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

/// The state of all pods, calls and pools. See the module documentation.
pub struct Fleet {
    /// End of the re-registration window.
    trusting_until: Millis,
    recently_ended: RecentlyEnded,
    /// The origin of the pods; `None` until the first write.
    origin: Option<PodOrigin>,
    epoch: u64,
    list: Option<PodList>,
    tiers: Tiers,
    merchants: HashMap<MerchantId, Merchant>,
    pods: HashMap<PodName, Pod>,
    calls: HashMap<CallSid, Call>,
    pools: HashMap<Pool, PoolIndex>,
    /// Live and waiting calls per merchant.
    merchant_calls: HashMap<MerchantId, usize>,
    /// Times of the latest admissions, for merchants with `max_rate`. Not journaled: only the
    /// last second counts.
    admissions: HashMap<MerchantId, VecDeque<Millis>>,
    history: CallHistory,
    seen_requests: SeenRequests,
    queue: Queue,
    /// Hand-offs since the last [`Fleet::take_handoffs`].
    handoffs: Vec<CallSid>,
    /// Pods whose drain may have ended; see [`Fleet::take_drained`].
    drained: Vec<PodName>,
    /// Media gateways; their calls are derived from the calls.
    gateways: BTreeMap<GatewayId, Gateway>,
    /// Gateways with released calls; see [`Fleet::take_ending`].
    ending: Vec<GatewayId>,
    /// The last sweep. Not journaled: after a restart gateways get a full lease.
    swept_at: Option<Millis>,
    /// The key of stream tokens.
    media_secret: Option<String>,
    capacity: CapacityFacts,
    waiting_reports: WaitingReports,
    outbound: OutboundFacts,
    leases: BTreeSet<(Millis, CallSid)>,
    drains: BTreeSet<(Millis, PodName)>,
    quarantines: BTreeSet<(Millis, PodName)>,
    /// Preferred pods among equivalent candidates; see [`Fleet::prefer`].
    preferred: HashMap<CallSid, PodName>,
    /// The last sequence number of an index entry.
    sequence: u64,
    change_log: Option<Vec<Change>>,
    events: Option<Vec<Event>>,
}

impl Fleet {
    /// An empty fleet. Until `trusting_until`, renewals by pods re-register unknown calls: the
    /// store may have lost them.
    pub fn new(tiers: Tiers, trusting_until: Millis) -> Self {
        Self {
            trusting_until,
            recently_ended: RecentlyEnded::default(),
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
            history: CallHistory::default(),
            seen_requests: SeenRequests::default(),
            queue: Queue::default(),
            handoffs: Vec::new(),
            drained: Vec::new(),
            gateways: BTreeMap::new(),
            ending: Vec::new(),
            swept_at: None,
            media_secret: None,
            capacity: CapacityFacts::default(),
            waiting_reports: WaitingReports::default(),
            outbound: OutboundFacts::default(),
            leases: BTreeSet::new(),
            drains: BTreeSet::new(),
            quarantines: BTreeSet::new(),
            preferred: HashMap::new(),
            sequence: 0,
            change_log: None,
            events: None,
        }
    }

    /// Starts to collect changes for [`Fleet::take_changes`].
    pub fn enable_change_log(&mut self) {
        self.change_log = Some(Vec::new());
    }

    /// The changes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.change_log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub fn active_calls(&self) -> usize {
        self.calls.len()
    }

    /// Applies a change and appends it to the change log.
    fn record(&mut self, change: Change) {
        self.record_event(|fleet| fleet.event_of(&change));
        if let Some(log) = &mut self.change_log {
            log.push(change.clone());
        }
        self.apply(change);
    }

    /// Assigns the pod its pool, then hands its free slots to waiting calls.
    fn reassign_and_hand_off(&mut self, name: &PodName) {
        self.assign_pool(name);
        self.hand_off_free_slots(name);
    }

    /// Assigns an idle pod the pool of its label, its current pool if the table still defines it,
    /// or a new one. A pod gets its first pool when it is first in service; a busy pod keeps its
    /// pool.
    fn assign_pool(&mut self, name: &PodName) {
        let Some(pod) = self.pods.get(name) else {
            return;
        };
        if !pod.calls.is_empty() {
            return;
        }
        let assigned = match (self.pinned(pod), &pod.pool) {
            (Some(pin), Some(pool)) if pin == *pool => return,
            (None, Some(pool)) if self.tiers.defines(pool) => return,
            (_, None) if !pod.is_serving() => return,
            (Some(pin), _) => Some(pin),
            (None, _) => assignment::default_pool(&self.tiers, |pool| self.assigned(pool)),
        };
        if let Some(pool) = assigned {
            self.record(Change::PoolAssigned { pod: name.clone(), pool });
        }
    }

    /// The pool that the pod's label names, if it exists.
    fn pinned(&self, pod: &Pod) -> Option<Pool> {
        pod.facts.pin.as_ref().and_then(|step| self.tiers.resolve(step))
    }

    fn assigned(&self, pool: &Pool) -> usize {
        self.pools.get(pool).map_or(0, |index| index.assigned)
    }

    /// Ends a call without a release.
    fn end(&mut self, call: &CallSid, cause: EndCause, now: Millis) -> Option<EndedCall> {
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

    /// Prefers these pods among equivalent candidates. Tests use it to follow the choices of
    /// another store.
    pub fn prefer(&mut self, pods: HashMap<CallSid, PodName>) {
        self.preferred = pods;
    }
}
