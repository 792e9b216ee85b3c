//! The life of a call: allocate, renew, release.

use super::{Change, Fleet, Reason, Tried};
use crate::domain::{
    Millis, assign,
    merchant::{self, Limit, Limits, Malformed},
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Kind, Strategy},
};

/// A call asks for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocate {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub lease_ttl: Millis,
    /// Its stream has to start before the call is sure of its pod: the lease is
    /// short until then.
    pub provisional: bool,
}

/// A call has a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    pub pod: PodName,
    pub pool: Pool,
    /// The call had this pod before it asked.
    pub was_existing: bool,
    /// The steps of the chain that were tried in vain.
    pub tried: Vec<Tried>,
    /// The merchant's document could not be used; the default chain was.
    pub malformed_merchant: Option<Malformed>,
}

/// No pool of the chain has a pod for the call, or the merchant may have no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub tried: Vec<Tried>,
    pub malformed_merchant: Option<Malformed>,
    /// The merchant has as much as it may; no step was tried.
    pub limit: Option<Limit>,
}

/// A call is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub call: CallSid,
    /// Given by callers who know: if the call is elsewhere, it is not theirs.
    pub pod: Option<PodName>,
}

/// A call gave its pod back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    pub pod: PodName,
    /// The pool the pod was drawn from.
    pub source_pool: Pool,
    /// The pool the pod belongs to now.
    pub pool: Pool,
    /// The pod stays out of its pool.
    pub was_draining: bool,
    pub lasted: Millis,
}

/// No such call is live (on that pod).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such call")]
pub struct CallNotFound;

/// Calls say that they are still alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renew {
    pub calls: Vec<CallSid>,
    /// The pod that speaks for them, if it is one.
    pub pod: Option<PodName>,
    pub lease_ttl: Millis,
}

/// What became of a renewal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Renewed {
    /// Until when the renewed calls are safe.
    pub until: Millis,
    /// Calls that are no longer known (on that pod).
    pub unknown: Vec<CallSid>,
    /// Calls that were not known, and were registered on the pod that has them.
    pub adopted: Vec<CallSid>,
    /// Calls whose pod is not known yet, in a store that began a short while ago.
    pub later: Vec<CallSid>,
}

/// What became of a call that only its pod knew.
enum Adoption {
    Done,
    /// The pod is not known either, and may be soon.
    TooEarly,
    Refused,
}

const SECOND: Millis = 1_000;

/// The pod drawn, its pool, the steps tried before, and a document set aside.
pub(super) type Choice = (PodName, Pool, Vec<Tried>, Option<Malformed>);

impl Fleet {
    /// Gives the call a pod, or says again which one it has.
    pub fn allocate(&mut self, request: &Allocate, now: Millis) -> Result<Allocation, Refusal> {
        if let Some(call) = self.calls.get(&request.call) {
            return Ok(Allocation {
                pod: call.pod.clone(),
                pool: call.pool.clone(),
                was_existing: true,
                tried: call.tried.clone(),
                malformed_merchant: None,
            });
        }
        let choice = self.choose(request, now)?;
        Ok(self.give(request, choice, now))
    }

    /// Gives a new call the pod that was chosen for it.
    pub(super) fn give(&mut self, request: &Allocate, choice: Choice, now: Millis) -> Allocation {
        let (pod, pool, tried, malformed_merchant) = choice;
        self.admitted(request, now);
        self.record(Change::Call {
            call: request.call.clone(),
            pod: pod.clone(),
            pool: pool.clone(),
            merchant: request.merchant.clone(),
            at: now,
            until: now + request.lease_ttl,
            tried: tried.clone(),
            provisional: request.provisional,
        });
        if request.provisional {
            self.missed.remove(&request.call);
        }
        Allocation { pod, pool, was_existing: false, tried, malformed_merchant }
    }

    /// Walks the chain of a new call to the first pod that may take it.
    pub(super) fn choose(&self, request: &Allocate, now: Millis) -> Result<Choice, Refusal> {
        let merchant = request.merchant.as_ref().and_then(|id| self.merchants.get(id));
        let (config, malformed_merchant) = match merchant.map(|merchant| &merchant.config) {
            None => (None, None),
            Some(Ok(config)) => (Some(config), None),
            Some(Err(malformed)) => (None, Some(malformed.clone())),
        };
        let mut tried = Vec::new();
        if let Some(limit) = self.exceeded(request, now) {
            return Err(Refusal { tried, malformed_merchant, limit: Some(limit) });
        }
        for step in merchant::chain(&self.tiers, config) {
            let drawn = match self.tiers.resolve(step) {
                None => Err(Reason::Unknown),
                Some(pool) => self.draw(&pool).map(|pod| (pod.clone(), pool)),
            };
            match drawn {
                Ok((pod, pool)) => return Ok((pod, pool, tried, malformed_merchant)),
                Err(reason) => tried.push(Tried { step: step.clone(), reason }),
            }
        }
        Err(Refusal { tried, malformed_merchant, limit: None })
    }

    fn limits_of<'a>(&self, request: &'a Allocate) -> Option<(&'a MerchantId, Limits)> {
        let id = request.merchant.as_ref()?;
        let config = self.merchants.get(id)?.config.as_ref().ok()?;
        Some((id, config.limits))
    }

    /// The limit that a new call would exceed, if any.
    fn exceeded(&self, request: &Allocate, now: Millis) -> Option<Limit> {
        let (id, limits) = self.limits_of(request)?;
        let live = self.merchant_calls.get(id).copied().unwrap_or(0);
        if limits.max_calls.is_some_and(|most| live >= most as usize) {
            return Some(Limit::MaxCalls);
        }
        let most = limits.max_rate?;
        let recent = self.admissions.get(id);
        let nth = most.checked_sub(1).map(|nth| recent.and_then(|it| it.get(nth as usize)));
        match nth {
            None => Some(Limit::MaxRate),
            Some(at) => at.is_some_and(|at| now < at + SECOND).then_some(Limit::MaxRate),
        }
    }

    /// Remembers when a merchant with a rate had its last calls, the newest first.
    fn admitted(&mut self, request: &Allocate, now: Millis) {
        let Some((id, Limits { max_rate: Some(most), .. })) = self.limits_of(request) else {
            return;
        };
        let id = id.clone();
        let recent = self.admissions.entry(id).or_default();
        if recent.front().is_some_and(|last| now >= last + SECOND) {
            recent.clear();
        }
        recent.push_front(now);
        recent.truncate(most as usize);
    }

    /// The pod of a pool that takes the next call.
    fn draw(&self, pool: &Pool) -> Result<&PodName, Reason> {
        let view = self.pools.get(pool).ok_or(Reason::Empty)?;
        let drawn = match self.tiers.kind(pool) {
            None => return Err(Reason::Unknown),
            Some(Kind::Exclusive | Kind::Dedicated) => view.open.values().next(),
            Some(Kind::Shared { max_concurrent, strategy }) => {
                let mut with_room = view.open.range(..(max_concurrent as usize, 0));
                match strategy {
                    Strategy::Spread => with_room.next(),
                    Strategy::Pack => with_room.next_back(),
                }
                .map(|(_, pod)| pod)
            }
        };
        drawn.ok_or(match (view.in_service(), view.leaving) {
            (0, 0) => Reason::Empty,
            (0, _) => Reason::AllDraining,
            _ => Reason::AtCapacity,
        })
    }

    /// Ends a call at its own request and gives the pod back.
    pub fn release(&mut self, request: &Release, now: Millis) -> Result<Released, CallNotFound> {
        let call = self.calls.get(&request.call).ok_or(CallNotFound)?;
        if request.pod.as_ref().is_some_and(|pod| *pod != call.pod) {
            return Err(CallNotFound);
        }
        let (name, source_pool, at) = (call.pod.clone(), call.pool.clone(), call.at);
        self.record(Change::Ended { call: request.call.clone(), at: now });
        self.settle(&name);
        let pod = self.pods.get(&name);
        Ok(Released {
            pool: pod.and_then(|pod| pod.tier.clone()).unwrap_or_else(|| source_pool.clone()),
            was_draining: pod.is_some_and(|pod| pod.is_leaving()),
            pod: name,
            source_pool,
            lasted: now.saturating_sub(at),
        })
    }

    /// Extends the leases of live calls. For a while after the fleet began, a
    /// pod's word is enough to register a call that nobody knows: the store may
    /// just have lost it.
    pub fn renew(&mut self, request: &Renew, now: Millis) -> Renewed {
        let mut renewed = Renewed { until: now + request.lease_ttl, ..Renewed::default() };
        for call in &request.calls {
            let on = self.calls.get(call).map(|known| &known.pod);
            let is_theirs = request.pod.as_ref().is_none_or(|pod| on == Some(pod));
            let told = match on {
                Some(_) if is_theirs => {
                    self.record(Change::Renewed { call: call.clone(), until: renewed.until });
                    continue;
                }
                Some(_) => Adoption::Refused,
                None => self.adopt(call, request, now),
            };
            match told {
                Adoption::Done => &mut renewed.adopted,
                Adoption::TooEarly => &mut renewed.later,
                Adoption::Refused => &mut renewed.unknown,
            }
            .push(call.clone());
        }
        renewed
    }

    fn adopt(&mut self, call: &CallSid, request: &Renew, now: Millis) -> Adoption {
        let Some(name) = &request.pod else { return Adoption::Refused };
        if now >= self.trusting_until || self.ended.contains(call) {
            return Adoption::Refused;
        }
        let Some((name, pod)) = self.pods.get_key_value(name) else {
            return Adoption::TooEarly;
        };
        let (name, calls) = (name.clone(), pod.calls.len());
        let tier = match &pod.tier {
            Some(tier) => tier.clone(),
            None => {
                let Some(pool) = assign::home(&self.tiers, |pool| self.assigned(pool)) else {
                    return Adoption::Refused;
                };
                self.record(Change::Home { pod: name.clone(), pool: pool.clone() });
                pool
            }
        };
        let cap = match self.tiers.kind(&tier) {
            Some(Kind::Shared { max_concurrent, .. }) => max_concurrent as usize,
            _ => 1,
        };
        if calls >= cap {
            return Adoption::Refused;
        }
        self.record(Change::Call {
            call: call.clone(),
            pod: name,
            pool: tier,
            merchant: None,
            at: now,
            until: now + request.lease_ttl,
            tried: Vec::new(),
            provisional: false,
        });
        Adoption::Done
    }
}

/// The stream of a call has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirm {
    pub call: CallSid,
    pub pod: PodName,
    pub lease_ttl: Millis,
}

/// What became of a confirmation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Confirmed {
    /// The call is sure of its pod.
    Sure,
    /// It came too late, and has taken the pod again.
    Retaken { pool: Pool },
    /// The call is over, or on another pod, or its pod has another call.
    Unknown,
}

/// For so long a call that never had its stream is remembered.
pub(super) const REMEMBERED: Millis = 3_600_000;

impl Fleet {
    /// Makes a call sure of its pod, because its stream has started there.
    pub fn confirm(&mut self, request: &Confirm, now: Millis) -> Confirmed {
        let until = now + request.lease_ttl;
        if let Some(call) = self.calls.get(&request.call) {
            if call.pod != request.pod {
                return Confirmed::Unknown;
            }
            if call.provisional {
                self.record(Change::Renewed { call: request.call.clone(), until });
            }
            return Confirmed::Sure;
        }
        let remembered = self.missed.get(&request.call);
        let Some(missed) =
            remembered.filter(|it| it.pod == request.pod && now < it.at + REMEMBERED)
        else {
            return Confirmed::Unknown;
        };
        let merchant = missed.merchant.clone();
        let Some(pool) = self.has_room(&request.pod) else { return Confirmed::Unknown };
        self.missed.remove(&request.call);
        self.record(Change::Call {
            call: request.call.clone(),
            pod: request.pod.clone(),
            pool: pool.clone(),
            merchant,
            at: now,
            until,
            tried: Vec::new(),
            provisional: false,
        });
        Confirmed::Retaken { pool }
    }

    /// The pool of a pod in service that can carry one more call.
    fn has_room(&self, pod: &PodName) -> Option<Pool> {
        let pod = self.pods.get(pod).filter(|pod| pod.facts.ready && !pod.is_leaving())?;
        let tier = pod.tier.clone()?;
        let cap = match self.tiers.kind(&tier)? {
            Kind::Shared { max_concurrent, .. } => max_concurrent as usize,
            Kind::Exclusive | Kind::Dedicated => 1,
        };
        (pod.calls.len() < cap).then_some(tier)
    }

    /// Gives calls whose stream has not started yet at least so much more time.
    pub fn spare(&mut self, time: Millis, now: Millis) {
        let waiting = self.calls.iter().filter(|(_, call)| call.provisional);
        let early = waiting.filter(|(_, call)| call.until < now + time);
        let early: Vec<CallSid> = early.map(|(call, _)| call.clone()).collect();
        for call in early {
            self.record(Change::Spared { call, until: now + time });
        }
    }
}
