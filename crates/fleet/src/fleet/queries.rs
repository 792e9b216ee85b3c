//! Read models of pools, pods and calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use super::{
    AttachedStream, Call, Fleet, Pod, PodFacts, QueueEntry, SkippedStep, indexes::PoolIndex,
};
use crate::{
    Millis,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool},
    tiers::TierKind,
};

/// The status of all pools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    pub pools: Vec<PoolStatus>,
    pub active_calls: usize,
    /// Number of waiting calls.
    pub waiting: usize,
}

/// The status of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStatus {
    pub pool: Pool,
    /// `None` for a tier that is not in the table but still has busy pods.
    pub kind: Option<TierKind>,
    pub target: u32,
    pub assigned: usize,
    /// Pods in the availability index.
    pub available: usize,
    pub draining: usize,
    pub not_ready: usize,
    pub quarantined: usize,
    pub active_calls: usize,
    /// Free call slots of the available pods.
    pub free_slots: usize,
    /// Waiting calls that may use the pool.
    pub waiting: usize,
}

/// The status of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodStatus {
    pub name: PodName,
    pub facts: PodFacts,
    pub pool: Option<Pool>,
    pub draining_until: Option<Millis>,
    /// The drain takes a surplus pod out of service; no request asked for it.
    pub is_surplus: bool,
    pub quarantined_until: Option<Millis>,
    /// Live calls, the latest lease deadline first.
    pub calls: Vec<PodCall>,
}

/// A live call of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCall {
    pub call: CallSid,
    pub allocated_at: Millis,
    pub lease_until: Millis,
}

/// A live call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallStatus {
    pub call: CallSid,
    pub pod: PodName,
    pub source_pool: Pool,
    pub merchant: Option<MerchantId>,
    pub allocated_at: Millis,
    pub lease_until: Millis,
    pub tried: Vec<SkippedStep>,
    /// The stream has not started yet.
    pub provisional: bool,
    /// The pod was handed off to the call, and the call has not accepted it yet.
    pub is_handed: bool,
    /// Ordinal of the pod that the call has been given; 0 if the call may not return.
    pub pod_attempt: u32,
    /// The stream that a gateway relays.
    pub stream: Option<AttachedStream>,
}

/// A media gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayStatus {
    pub gateway: GatewayId,
    /// End of its lease.
    pub until: Millis,
    pub lease: Millis,
    /// Calls whose streams it relays, by name, and whether they were released.
    pub calls: Vec<(CallSid, bool)>,
}

/// A waiting call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingCall {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub since: Millis,
    pub until: Millis,
    /// Poll deadline: the call leaves the queue after that.
    pub poll_by: Millis,
    pub tried: Vec<SkippedStep>,
}

/// The result of a call lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallLookup {
    Live(CallStatus),
    Waiting(WaitingCall),
}

impl CallLookup {
    /// The call if it is live.
    pub fn into_live(self) -> Option<CallStatus> {
        match self {
            Self::Live(status) => Some(status),
            Self::Waiting(_) => None,
        }
    }
}

/// A query for calls.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallQuery {
    /// Selects waiting calls instead of live calls.
    pub waiting: bool,
    pub pool: Option<Pool>,
    pub merchant: Option<MerchantId>,
    pub pod: Option<PodName>,
    /// The page begins after this cursor.
    pub after: Option<CallCursor>,
    pub limit: usize,
}

/// Position of a call in a listing: live calls are ordered by lease deadline, waiting calls by
/// poll deadline.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallCursor {
    pub until: Millis,
    pub call: CallSid,
}

/// A page of calls, and the cursor of the next page if there may be more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallPage {
    pub calls: Vec<CallLookup>,
    pub next: Option<CallCursor>,
}

impl CallCursor {
    /// The cursor after this call.
    pub fn of(found: &CallLookup) -> Self {
        match found {
            CallLookup::Live(call) => Self { until: call.lease_until, call: call.call.clone() },
            CallLookup::Waiting(call) => Self { until: call.poll_by, call: call.call.clone() },
        }
    }
}

impl CallLookup {
    pub fn merchant(&self) -> Option<&MerchantId> {
        match self {
            Self::Live(call) => call.merchant.as_ref(),
            Self::Waiting(call) => call.merchant.as_ref(),
        }
    }

    /// Whether the call matches the filters of a query; ignores the cursor.
    fn matches(&self, query: &CallQuery) -> bool {
        let is_merchant = query.merchant.is_none() || query.merchant.as_ref() == self.merchant();
        is_merchant
            && match self {
                Self::Waiting(_) => query.waiting,
                Self::Live(call) => {
                    !query.waiting
                        && query.pool.as_ref().is_none_or(|pool| *pool == call.source_pool)
                        && query.pod.as_ref().is_none_or(|pod| *pod == call.pod)
                }
            }
    }
}

impl PodStatus {
    /// Whether the pod is draining or terminating.
    pub fn is_leaving(&self) -> bool {
        self.draining_until.is_some() || self.facts.terminating
    }

    /// Whether the pod is in service: it takes calls while it has a free slot.
    pub fn is_serving(&self) -> bool {
        self.facts.ready && !self.is_leaving() && self.quarantined_until.is_none()
    }
}

impl Fleet {
    pub fn status(&self) -> Status {
        let defined = self.tiers.iter().filter_map(|(name, _)| self.tiers.pool(name));
        let in_use =
            self.pools.iter().filter(|(_, index)| index.assigned > 0).map(|(pool, _)| pool.clone());
        let pools: BTreeSet<Pool> = defined.chain(in_use).collect();
        Status {
            pools: pools.into_iter().map(|pool| self.pool_status(pool)).collect(),
            active_calls: self.calls.len(),
            waiting: self.queue.len(),
        }
    }

    /// The pods of each pool of [`Self::status`]: those in service, not ready, and available.
    pub fn pool_pods(&self) -> Vec<(Pool, usize, usize, usize)> {
        let pods = |status: PoolStatus| {
            let out = status.draining + status.not_ready + status.quarantined;
            let ready = status.assigned.saturating_sub(out);
            (status.pool, ready, status.not_ready, status.available)
        };
        self.status().pools.into_iter().map(pods).collect()
    }

    fn pool_status(&self, pool: Pool) -> PoolStatus {
        let kind = self.tiers.kind(&pool);
        let index = self.pools.get(&pool);
        let available = || index.into_iter().flat_map(PoolIndex::choices).flatten();
        let cap = match kind {
            Some(TierKind::Shared { max_concurrent, .. }) => max_concurrent as usize,
            _ => 1,
        };
        let free_slots = |((calls, _), _): (&(usize, u64), _)| cap.saturating_sub(*calls);
        PoolStatus {
            kind,
            target: self.tiers.target(&pool),
            assigned: index.map_or(0, |index| index.assigned),
            available: available().count(),
            draining: index.map_or(0, |index| index.leaving),
            not_ready: index.map_or(0, |index| index.unready),
            quarantined: index.map_or(0, |index| index.quarantined),
            waiting: self.queue.len_of(&pool),
            active_calls: index.map_or(0, |index| index.calls),
            free_slots: available().map(free_slots).sum(),
            pool,
        }
    }

    pub fn pod(&self, name: &PodName) -> Option<PodStatus> {
        self.pods.get(name).map(|pod| self.pod_status(name, pod))
    }

    /// All pods, by name.
    pub fn pods(&self) -> Vec<PodStatus> {
        let mut pods: Vec<_> =
            self.pods.iter().map(|(name, pod)| self.pod_status(name, pod)).collect();
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        pods
    }

    fn pod_status(&self, name: &PodName, pod: &Pod) -> PodStatus {
        let live = pod.calls.iter().filter_map(|call| Some((call, self.calls.get(call)?)));
        let mut calls: Vec<PodCall> = live
            .map(|(call, facts)| PodCall {
                call: call.clone(),
                allocated_at: facts.at,
                lease_until: facts.until,
            })
            .collect();
        calls.sort_by(|a, b| (b.lease_until, &b.call).cmp(&(a.lease_until, &a.call)));
        PodStatus {
            name: name.clone(),
            facts: pod.facts.clone(),
            pool: pod.pool.clone(),
            draining_until: pod.draining_until,
            is_surplus: pod.is_surplus,
            quarantined_until: pod.quarantined_until,
            calls,
        }
    }

    pub fn call(&self, call: &CallSid) -> Option<CallStatus> {
        let Call { pod, pool, merchant, at, until, tried, .. } = self.calls.get(call)?;
        let Call { provisional, pod_attempt, queue_entry, stream, .. } = self.calls.get(call)?;
        Some(CallStatus {
            call: call.clone(),
            pod: pod.clone(),
            source_pool: pool.clone(),
            merchant: merchant.clone(),
            allocated_at: *at,
            lease_until: *until,
            tried: tried.clone(),
            provisional: *provisional,
            is_handed: queue_entry.is_some(),
            pod_attempt: *pod_attempt,
            stream: stream.clone(),
        })
    }

    /// Pod and pod attempt of an ended call in the call history.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn last_pod_attempt(&self, call: &CallSid) -> Option<(PodName, u32)> {
        let (_, end) = self.history.iter().find(|(ended, _)| *ended == call)?;
        Some((end.pod.clone(), end.pod_attempt))
    }

    /// All gateways, by name.
    pub fn gateways(&self) -> Vec<GatewayStatus> {
        let known = self.gateways.iter();
        known
            .map(|(gateway, known)| GatewayStatus {
                gateway: gateway.clone(),
                until: known.until,
                lease: known.lease,
                calls: known
                    .calls
                    .iter()
                    .map(|call| (call.clone(), self.is_ending(call)))
                    .collect(),
            })
            .collect()
    }

    /// Looks a call up among live and waiting calls.
    pub fn find(&self, call: &CallSid) -> Option<CallLookup> {
        if let Some(live) = self.call(call) {
            return Some(CallLookup::Live(live));
        }
        let QueueEntry { merchant, since, until, poll_by, tried, .. } =
            self.queue.get(call)?.clone();
        let call = call.clone();
        Some(CallLookup::Waiting(WaitingCall { call, merchant, since, until, poll_by, tried }))
    }

    /// A page of calls, by deadline.
    pub fn calls(&self, query: &CallQuery) -> CallPage {
        let index = if query.waiting { self.queue.polls() } else { &self.leases };
        let after = query.after.clone().map(|CallCursor { until, call }| (until, call));
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut page = CallPage::default();
        for (until, call) in index.range((after, Bound::Unbounded)) {
            let Some(found) = self.find(call).filter(|found| found.matches(query)) else {
                continue;
            };
            if page.calls.len() == query.limit {
                return page;
            }
            page.calls.push(found);
            page.next = Some(CallCursor { until: *until, call: call.clone() });
        }
        page.next = None;
        page
    }

    /// Merchants with a document, by name, that follow `after`.
    pub fn merchants(&self, after: Option<&MerchantId>, limit: usize) -> Vec<(MerchantId, String)> {
        let mut names: Vec<&MerchantId> =
            self.merchants.keys().filter(|id| after.is_none_or(|after| *id > after)).collect();
        names.sort();
        let document = |id: &MerchantId| (id.clone(), self.merchants[id].document.clone());
        names.into_iter().take(limit).map(document).collect()
    }

    /// The availability index of a pool: its pods and their live calls, by name.
    pub fn available(&self, pool: &Pool) -> Vec<(PodName, usize)> {
        self.pools.get(pool).map_or_else(Vec::new, |index| by_name(&index.available))
    }

    /// The index of available pods at risk, as [`Self::available`].
    pub fn at_risk(&self, pool: &Pool) -> Vec<(PodName, usize)> {
        self.pools.get(pool).map_or_else(Vec::new, |index| by_name(&index.at_risk))
    }
}

fn by_name(index: &BTreeMap<(usize, u64), PodName>) -> Vec<(PodName, usize)> {
    let mut pods: Vec<_> = index.iter().map(|((calls, _), pod)| (pod.clone(), *calls)).collect();
    pods.sort();
    pods
}
