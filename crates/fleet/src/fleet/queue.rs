//! Waiting: calls for which there is no pod yet, in one queue per pool. A pod that
//! becomes free goes to the first who may use it, in the same step.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::{
    Allocate, Allocation, Cause, Change, Fleet, Pod, Refusal, Tried,
    calls::{Call, Why},
    clock_shift::shift_deadlines,
};
use crate::rules::REQUEUE_ADVANTAGE;
use crate::{
    Millis, merchant,
    names::{CallSid, MerchantId, PodName, Pool},
};

/// How a call may wait for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// For so long.
    pub time: Millis,
    /// Who has not asked again for so long has gone.
    pub patience: Millis,
    /// So many may wait.
    pub most: usize,
    /// So many of one merchant.
    pub most_per_merchant: usize,
}

impl Hold {
    /// When a call that asks now has to ask again: three times it may miss, and once
    /// when its time is over.
    fn poll_by(&self, until: Millis, now: Millis) -> Millis {
        (now + self.patience).min(until + self.patience / 3)
    }
}

/// A call's place in the queues of the pools that it may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merchant: Option<MerchantId>,
    pub(super) priority: i32,
    pub(super) ticket: i64,
    pub(super) pools: Vec<Pool>,
    pub since: Millis,
    /// The call is refused after that.
    pub until: Millis,
    /// The place is lost after that.
    pub poll_by: Millis,
    pub tried: Vec<Tried>,
    /// As the call that it will be.
    #[serde(default)]
    pub(super) attempts: u32,
}

/// Higher priorities first, then who came first.
type Turn = (i32, i64, CallSid);

impl Place {
    fn turn(&self, call: &CallSid) -> Turn {
        (-self.priority, self.ticket, call.clone())
    }
}

/// A call that left without a pod because nobody asked for it any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abandoned {
    pub call: CallSid,
    pub waited: Millis,
}

/// All places, and the queues that follow from them.
#[derive(Debug, Default)]
pub(super) struct Queue {
    places: HashMap<CallSid, Place>,
    by_pool: HashMap<Pool, BTreeSet<Turn>>,
    of_merchant: HashMap<MerchantId, usize>,
    polls: BTreeSet<(Millis, CallSid)>,
    last_ticket: i64,
}

impl Queue {
    pub(super) fn insert(&mut self, call: CallSid, place: Place) {
        let turn = place.turn(&call);
        for pool in &place.pools {
            self.by_pool.entry(pool.clone()).or_default().insert(turn.clone());
        }
        if let Some(id) = &place.merchant {
            *self.of_merchant.entry(id.clone()).or_default() += 1;
        }
        self.polls.insert((place.poll_by, call.clone()));
        let number = place.ticket + if place.ticket < 0 { REQUEUE_ADVANTAGE } else { 0 };
        self.last_ticket = self.last_ticket.max(number);
        self.places.insert(call, place);
    }

    pub(super) fn remove(&mut self, call: &CallSid) -> Option<Place> {
        let place = self.places.remove(call)?;
        let turn = place.turn(call);
        for pool in &place.pools {
            if let Some(queue) = self.by_pool.get_mut(pool) {
                queue.remove(&turn);
                if queue.is_empty() {
                    self.by_pool.remove(pool);
                }
            }
        }
        if let Some(id) = &place.merchant
            && let Some(waiting) = self.of_merchant.get_mut(id)
        {
            *waiting -= 1;
            if *waiting == 0 {
                self.of_merchant.remove(id);
            }
        }
        self.polls.remove(&(place.poll_by, call.clone()));
        Some(place)
    }

    pub(super) fn poll(&mut self, call: &CallSid, poll_by: Millis) {
        if let Some(place) = self.places.get_mut(call) {
            self.polls.remove(&(place.poll_by, call.clone()));
            place.poll_by = poll_by;
            self.polls.insert((poll_by, call.clone()));
        }
    }

    pub(super) fn shift(&mut self, by: i64) {
        self.places.values_mut().for_each(|place| place.shift(by));
        shift_deadlines(&mut self.polls, by);
    }

    pub(super) fn get(&self, call: &CallSid) -> Option<&Place> {
        self.places.get(call)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&CallSid, &Place)> {
        self.places.iter()
    }

    /// Who waits, by when each has to ask again.
    pub(super) fn polls(&self) -> &BTreeSet<(Millis, CallSid)> {
        &self.polls
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn len_of(&self, pool: &Pool) -> usize {
        self.by_pool.get(pool).map_or(0, BTreeSet::len)
    }

    /// The first who may use a pool.
    pub(super) fn first(&self, pool: &Pool) -> Option<&CallSid> {
        self.by_pool.get(pool)?.first().map(|(_, _, call)| call)
    }

    /// Whose time to ask again has passed.
    pub(super) fn overdue(&self, now: Millis) -> Option<&CallSid> {
        self.polls.first().filter(|(poll_by, _)| *poll_by <= now).map(|(_, call)| call)
    }
}

impl Fleet {
    /// Gives a call that was refused a place, if there is one left.
    pub(super) fn wait(
        &mut self,
        request: &Allocate,
        refusal: Refusal,
        is_rescue: bool,
        now: Millis,
    ) -> Refusal {
        let Some(hold) = &request.hold else { return refusal };
        let config = self.config_of(request.merchant.as_ref());
        let priority = config.map_or(0, |config| config.priority);
        let steps = merchant::chain(&self.tiers, config);
        let pools: Vec<Pool> = steps.filter_map(|step| self.tiers.resolve(step)).collect();
        if pools.is_empty() || hold.time == 0 {
            return refusal;
        }
        let merchant = request.merchant.as_ref();
        let of_merchant = merchant.and_then(|id| self.queue.of_merchant.get(id)).copied();
        if self.queue.len() >= hold.most || of_merchant.unwrap_or(0) >= hold.most_per_merchant {
            return Refusal { why: Why::QueueFull, ..refusal };
        }
        if !is_rescue {
            self.admitted(request, now);
        }
        let until = now + hold.time;
        let place = Place {
            merchant: request.merchant.clone(),
            priority,
            // A call that had a pod came before all who wait.
            ticket: self.queue.last_ticket + 1 - if is_rescue { REQUEUE_ADVANTAGE } else { 0 },
            pools,
            since: now,
            until,
            poll_by: hold.poll_by(until, now),
            tried: refusal.tried.clone(),
            attempts: request.attempts(),
        };
        self.record(Change::Waits { call: request.call.clone(), place });
        Refusal { why: Why::Waiting { is_new: true, until }, ..refusal }
    }

    /// A call that waits asks again.
    pub(super) fn poll(&mut self, request: &Allocate, now: Millis) -> Option<Refusal> {
        let place = self.queue.get(&request.call)?;
        if place.pools.iter().all(|pool| self.tiers.kind(pool).is_none()) {
            // No pool that it waits for is there any more: it begins again.
            self.leave(&request.call);
            return None;
        }
        let (until, waited) = (place.until, now.saturating_sub(place.since));
        let tried = place.tried.clone();
        let why = match &request.hold {
            None => Why::NoPods,
            Some(_) if now >= until => {
                self.record(Change::Left { call: request.call.clone() });
                Why::TimeOver { waited }
            }
            Some(hold) => {
                let poll_by = hold.poll_by(until, now);
                self.record(Change::Polled { call: request.call.clone(), poll_by });
                Why::Waiting { is_new: false, until }
            }
        };
        Some(Refusal { tried, malformed_merchant: None, why })
    }

    /// A call asks for the pod that it was handed while it waited. Its lease begins. If the pod
    /// has left service since, the call is handed another pod, or waits again in its old place.
    pub(super) fn fetch(&mut self, request: &Allocate, now: Millis) -> Option<Allocation> {
        let pod = self.calls.get(&request.call)?.pod.clone();
        if !self.pods.get(&pod).is_some_and(Pod::is_serving) && self.requeue(&request.call, now) {
            self.settle(&pod);
            self.reseat(vec![request.call.clone()]);
        }
        let call = self.calls.get(&request.call)?;
        let since = call.place.as_ref()?.since;
        let allocation = Allocation {
            waited: Some(now.saturating_sub(since)),
            was_existing: false,
            ..call.allocation()
        };
        self.record(Change::Fetched {
            call: request.call.clone(),
            at: now,
            until: now + request.lease_ttl,
            provisional: request.provisional,
        });
        self.start_over(request);
        Some(allocation)
    }

    /// Takes a handed-off call back from its pod: it has its old place in the queues again.
    /// Answers false for any other call.
    pub(super) fn requeue(&mut self, call: &CallSid, now: Millis) -> bool {
        let Some(known) = self.calls.get(call) else { return false };
        let Some(place) = known.place.clone() else { return false };
        let place = Place { poll_by: known.until, ..place };
        self.end(call, Cause::PodGone, now);
        self.record(Change::Waits { call: call.clone(), place });
        true
    }

    /// A call gives its place up, if it has one.
    pub(super) fn leave(&mut self, call: &CallSid) {
        if self.queue.get(call).is_some() {
            self.record(Change::Left { call: call.clone() });
        }
    }

    /// Hands what a pod has free to those who wait for it.
    pub(super) fn serve(&mut self, pod: &PodName) {
        while let Some(pool) = self.has_room(pod)
            && let Some(call) = self.queue.first(&pool).cloned()
        {
            self.hand(call, pod.clone(), pool);
        }
    }

    fn hand(&mut self, call: CallSid, pod: PodName, pool: Pool) {
        let Some(place) = self.queue.get(&call).cloned() else { return };
        self.handed.push(call.clone());
        let facts = Call {
            pod,
            pool,
            merchant: place.merchant.clone(),
            // Until it comes for the pod, what counts is how long it has waited.
            at: place.since,
            until: place.poll_by,
            tried: place.tried.clone(),
            provisional: false,
            attempts: place.attempts,
            place: Some(place),
        };
        self.record(Change::Call { call, facts });
    }

    /// Gives calls that wait again, because the pod they were handed has gone, any
    /// other that is free.
    pub(super) fn reseat(&mut self, calls: Vec<CallSid>) {
        let place = |call: CallSid| self.queue.get(&call).map(|place| place.turn(&call));
        let mut turns: Vec<Turn> = calls.into_iter().filter_map(place).collect();
        turns.sort();
        for (_, _, call) in &turns {
            let pools = self.queue.get(call).map(|place| place.pools.clone()).unwrap_or_default();
            let free = pools.into_iter().find_map(|pool| {
                let pod = self.draw(&pool, None, call).ok()?.clone();
                Some((pod, pool))
            });
            if let Some((pod, pool)) = free {
                self.hand(call.clone(), pod, pool);
            }
        }
    }

    /// Calls that were handed a pod since the last time: somebody may be waiting
    /// for that.
    pub fn take_handed(&mut self) -> Vec<CallSid> {
        std::mem::take(&mut self.handed)
    }
}
