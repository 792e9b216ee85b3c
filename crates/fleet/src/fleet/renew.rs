//! Calls that go on: renewed by their agents, confirmed by their streams, spared
//! after an outage.

use super::{Call, Cause, Change, Fleet};
use crate::{
    Millis, assignment,
    names::{CallSid, PodName, Pool},
    tiers::Kind,
};

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

impl Fleet {
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
                let Some(pool) = assignment::home(&self.tiers, |pool| self.assigned(pool)) else {
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
        self.leave(call);
        self.record(Change::Call {
            call: call.clone(),
            facts: Call {
                pod: name,
                pool: tier,
                merchant: None,
                at: now,
                until: now + request.lease_ttl,
                tried: Vec::new(),
                provisional: false,
                attempts: 0,
                place: None,
            },
        });
        Adoption::Done
    }
}

/// The stream of a call has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirm {
    pub call: CallSid,
    pub pod: PodName,
    /// Which of the call's attempts this was, if that was told.
    pub attempt: Option<u32>,
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

impl Fleet {
    /// Makes a call sure of its pod, because its stream has started there.
    pub fn confirm(&mut self, request: &Confirm, now: Millis) -> Confirmed {
        let until = now + request.lease_ttl;
        if let Some(call) = self.calls.get(&request.call) {
            let is_other = request.attempt.is_some_and(|attempt| attempt != call.attempts);
            if call.pod != request.pod || is_other {
                return Confirmed::Unknown;
            }
            if call.provisional {
                self.record(Change::Renewed { call: request.call.clone(), until });
            }
            return Confirmed::Sure;
        }
        let remembered = self.ends.get(&request.call, now);
        let missed = remembered.filter(|it| {
            let is_that = request.attempt.is_none_or(|attempt| attempt == it.attempts);
            it.pod == request.pod && it.cause == Cause::Unconfirmed && is_that
        });
        let Some(missed) = missed else { return Confirmed::Unknown };
        let (merchant, attempts) = (missed.merchant.clone(), missed.attempts);
        let Some(pool) = self.has_room(&request.pod) else { return Confirmed::Unknown };
        self.leave(&request.call);
        self.record(Change::Forgotten { call: request.call.clone() });
        self.record(Change::Call {
            call: request.call.clone(),
            facts: Call {
                pod: request.pod.clone(),
                pool: pool.clone(),
                merchant,
                at: now,
                until,
                tried: Vec::new(),
                provisional: false,
                attempts,
                place: None,
            },
        });
        Confirmed::Retaken { pool }
    }

    /// The pool of a pod in service that can carry one more call.
    pub(super) fn has_room(&self, pod: &PodName) -> Option<Pool> {
        let pod = self.pods.get(pod).filter(|pod| pod.is_serving())?;
        let tier = pod.tier.clone()?;
        let cap = self.tiers.kind(&tier)?.cap();
        (pod.calls.len() < cap as usize).then_some(tier)
    }

    /// Gives calls that could not tell us of themselves at least so much more time:
    /// those whose stream has not started yet, and those that wait.
    pub fn spare(&mut self, time: Millis, now: Millis) {
        let until = now + time;
        let short = self.calls.iter().filter(|(_, it)| it.provisional || it.place.is_some());
        let early: Vec<CallSid> =
            short.filter(|(_, it)| it.until < until).map(|(call, _)| call.clone()).collect();
        for call in early {
            self.record(Change::Spared { call, until });
        }
        let places = self.queue.iter().filter(|(_, place)| place.poll_by < until);
        let early: Vec<CallSid> = places.map(|(call, _)| call.clone()).collect();
        for call in early {
            self.record(Change::Polled { call, poll_by: until });
        }
    }
}
