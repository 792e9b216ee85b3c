//! What can be read about pools, pods and calls.

use std::{collections::BTreeSet, ops::Bound};

use super::{Call, Fleet, Place, Pod, PodFacts, Tried};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Kind,
};

/// How all pools stand.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    pub pools: Vec<PoolStatus>,
    pub active_calls: usize,
    /// Calls that wait for a pod.
    pub waiting: usize,
}

/// How a pool stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStatus {
    pub pool: Pool,
    /// `None` for a tier that is no more, but still has busy pods.
    pub kind: Option<Kind>,
    pub target: u32,
    pub assigned: usize,
    /// Pods in the available view.
    pub available: usize,
    pub draining: usize,
    pub not_ready: usize,
    pub quarantined: usize,
    pub active_calls: usize,
    /// How many more calls the pool can take.
    pub free_slots: usize,
    /// Calls that wait and may use it.
    pub waiting: usize,
}

/// A pod and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodStatus {
    pub name: PodName,
    pub facts: PodFacts,
    pub pool: Option<Pool>,
    pub draining_until: Option<Millis>,
    pub quarantined_until: Option<Millis>,
    /// Its live calls, the latest deadline first.
    pub calls: Vec<PodCall>,
}

/// A live call, seen from its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCall {
    pub call: CallSid,
    pub allocated_at: Millis,
    pub lease_until: Millis,
}

/// A live call, where it is, and why there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallStatus {
    pub call: CallSid,
    pub pod: PodName,
    pub source_pool: Pool,
    pub merchant: Option<MerchantId>,
    pub allocated_at: Millis,
    pub lease_until: Millis,
    pub tried: Vec<Tried>,
    /// Its stream has not started yet.
    pub provisional: bool,
    /// It was handed the pod while it waited, and has not come for it yet.
    pub is_handed: bool,
    /// Which pod of the call this is; 0 where nobody counts.
    pub attempt: u32,
}

/// A call that waits for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingCall {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub since: Millis,
    pub until: Millis,
    /// It is taken for gone after that, unless it asks again.
    pub poll_by: Millis,
    pub tried: Vec<Tried>,
}

/// Where a call was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Live(CallStatus),
    Waiting(WaitingCall),
}

/// Which calls are asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallQuery {
    /// Those that wait for a pod, and not those that have one.
    pub waiting: bool,
    pub pool: Option<Pool>,
    pub merchant: Option<MerchantId>,
    pub pod: Option<PodName>,
    /// Those that come after this one.
    pub after: Option<CallCursor>,
    pub most: usize,
}

/// Where a page of calls ends: calls come by the end of their lease, or of their patience.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallCursor {
    pub until: Millis,
    pub call: CallSid,
}

/// Some calls, and where to go on, if there may be more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallPage {
    pub calls: Vec<Found>,
    pub next: Option<CallCursor>,
}

impl CallCursor {
    /// Where a page ends whose last call this is.
    pub fn of(found: &Found) -> Self {
        match found {
            Found::Live(call) => Self { until: call.lease_until, call: call.call.clone() },
            Found::Waiting(call) => Self { until: call.poll_by, call: call.call.clone() },
        }
    }
}

impl Found {
    pub fn merchant(&self) -> Option<&MerchantId> {
        match self {
            Self::Live(call) => call.merchant.as_ref(),
            Self::Waiting(call) => call.merchant.as_ref(),
        }
    }

    /// Whether a query asks for it, wherever it stands.
    fn is_asked_for(&self, query: &CallQuery) -> bool {
        let is_of = query.merchant.is_none() || query.merchant.as_ref() == self.merchant();
        is_of
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
    /// Takes no new calls until it is gone or undrained.
    pub fn is_leaving(&self) -> bool {
        self.draining_until.is_some() || self.facts.terminating
    }

    /// Takes calls, as far as it has room.
    pub fn is_serving(&self) -> bool {
        self.facts.ready && !self.is_leaving() && self.quarantined_until.is_none()
    }
}

impl Fleet {
    pub fn status(&self) -> Status {
        let wanted = self.tiers.iter().filter_map(|(name, _)| self.tiers.pool(name));
        let held =
            self.pools.iter().filter(|(_, view)| view.assigned > 0).map(|(pool, _)| pool.clone());
        let pools: BTreeSet<Pool> = wanted.chain(held).collect();
        Status {
            pools: pools.into_iter().map(|pool| self.pool_status(pool)).collect(),
            active_calls: self.calls.len(),
            waiting: self.queue.len(),
        }
    }

    fn pool_status(&self, pool: Pool) -> PoolStatus {
        let kind = self.tiers.kind(&pool);
        let view = self.pools.get(&pool);
        let open = view.map(|view| &view.open);
        let cap = match kind {
            Some(Kind::Shared { max_concurrent, .. }) => max_concurrent as usize,
            _ => 1,
        };
        let room = |((calls, _), _): (&(usize, u64), _)| cap.saturating_sub(*calls);
        PoolStatus {
            kind,
            target: self.tiers.target(&pool),
            assigned: view.map_or(0, |view| view.assigned),
            available: open.map_or(0, |open| open.len()),
            draining: view.map_or(0, |view| view.leaving),
            not_ready: view.map_or(0, |view| view.unready),
            quarantined: view.map_or(0, |view| view.quarantined),
            waiting: self.queue.len_of(&pool),
            active_calls: view.map_or(0, |view| view.calls),
            free_slots: open.map_or(0, |open| open.iter().map(room).sum()),
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
            pool: pod.tier.clone(),
            draining_until: pod.draining_until,
            quarantined_until: pod.quarantined_until,
            calls,
        }
    }

    pub fn call(&self, call: &CallSid) -> Option<CallStatus> {
        let Call { pod, pool, merchant, at, until, tried, provisional, attempts, place } =
            self.calls.get(call)?;
        Some(CallStatus {
            call: call.clone(),
            pod: pod.clone(),
            source_pool: pool.clone(),
            merchant: merchant.clone(),
            allocated_at: *at,
            lease_until: *until,
            tried: tried.clone(),
            provisional: *provisional,
            is_handed: place.is_some(),
            attempt: *attempts,
        })
    }

    /// Where a call is, if it is anywhere.
    pub fn find(&self, call: &CallSid) -> Option<Found> {
        if let Some(live) = self.call(call) {
            return Some(Found::Live(live));
        }
        let Place { merchant, since, until, poll_by, tried, .. } = self.queue.get(call)?.clone();
        let call = call.clone();
        Some(Found::Waiting(WaitingCall { call, merchant, since, until, poll_by, tried }))
    }

    /// Some calls, by deadline.
    pub fn calls(&self, query: &CallQuery) -> CallPage {
        let index = if query.waiting { self.queue.polls() } else { &self.leases };
        let after = query.after.clone().map(|CallCursor { until, call }| (until, call));
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut page = CallPage::default();
        for (until, call) in index.range((after, Bound::Unbounded)) {
            let Some(found) = self.find(call).filter(|found| found.is_asked_for(query)) else {
                continue;
            };
            if page.calls.len() == query.most {
                return page;
            }
            page.calls.push(found);
            page.next = Some(CallCursor { until: *until, call: call.clone() });
        }
        page.next = None;
        page
    }

    /// All merchants with a document after one, by name.
    pub fn merchants(&self, after: Option<&MerchantId>, most: usize) -> Vec<(MerchantId, String)> {
        let mut names: Vec<&MerchantId> =
            self.merchants.keys().filter(|id| after.is_none_or(|after| *id > after)).collect();
        names.sort();
        let document = |id: &MerchantId| (id.clone(), self.merchants[id].document.clone());
        names.into_iter().take(most).map(document).collect()
    }

    /// The available view of a pool: its pods and their live calls, by name.
    pub fn available(&self, pool: &Pool) -> Vec<(PodName, usize)> {
        let open = self.pools.get(pool).into_iter().flat_map(|view| &view.open);
        let mut pods: Vec<_> = open.map(|((calls, _), pod)| (pod.clone(), *calls)).collect();
        pods.sort();
        pods
    }
}
