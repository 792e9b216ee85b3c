//! The queue: waiting calls, in one queue per pool. A pod that becomes free is handed off to the
//! first call that may use it, in the same operation.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::{
    Allocate, Allocation, Change, EndCause, Fleet, Pod, Refusal, SkippedStep,
    calls::{Call, Continuation, RefusalReason},
    clock_shift::shift_deadlines,
};
use crate::rules::{MAX_PRIORITY, REQUEUE_ADVANTAGE};
use crate::{
    Millis, merchant,
    names::{CallSid, MerchantId, PhoneNumber, PodName, Pool},
};

/// The terms under which a call may wait for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// The hold time.
    pub time: Millis,
    /// A call that has not polled for this long has left.
    pub poll_timeout: Millis,
    /// Maximum number of waiting calls.
    pub max_waiting: usize,
    /// Maximum number of waiting calls per merchant.
    pub max_waiting_per_merchant: usize,
}

impl Hold {
    /// The next poll deadline of a call that polls now. Past the hold time it has a third of the
    /// timeout, for the poll that reports the refusal.
    fn poll_by(&self, until: Millis, now: Millis) -> Millis {
        (now + self.poll_timeout).min(until + self.poll_timeout / 3)
    }
}

/// A call's position in the queues of the pools that it may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueEntry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merchant: Option<MerchantId>,
    pub(super) priority: i32,
    /// Orders calls of one priority; negative for calls that had a pod before.
    pub(super) ticket: i64,
    pub(super) pools: Vec<Pool>,
    pub since: Millis,
    /// End of the hold time: the call is refused after that.
    pub until: Millis,
    /// Poll deadline: the entry is removed after that.
    pub poll_by: Millis,
    pub tried: Vec<SkippedStep>,
    /// The pod attempt of the hand-off to come.
    #[serde(rename = "attempts", default)]
    pub(super) pod_attempt: u32,
    /// The number whose line the call uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) number: Option<PhoneNumber>,
}

/// Sort key of a queue: higher priorities first, then by ticket.
type Position = (i32, i64, CallSid);

impl QueueEntry {
    /// Whether the call had a reservation: it precedes all calls without one, and may use held slots.
    pub(super) fn is_dialed(&self) -> bool {
        self.priority > MAX_PRIORITY
    }

    fn position(&self, call: &CallSid) -> Position {
        (-self.priority, self.ticket, call.clone())
    }
}

/// A waiting call that missed its poll deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbandonedCall {
    pub call: CallSid,
    pub waited: Millis,
}

/// All queue entries and the indexes derived from them.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: HashMap<CallSid, QueueEntry>,
    by_pool: HashMap<Pool, BTreeSet<Position>>,
    by_merchant: HashMap<MerchantId, usize>,
    polls: BTreeSet<(Millis, CallSid)>,
    last_ticket: i64,
}

impl Queue {
    pub(super) fn insert(&mut self, call: CallSid, entry: QueueEntry) {
        let position = entry.position(&call);
        for pool in &entry.pools {
            self.by_pool.entry(pool.clone()).or_default().insert(position.clone());
        }
        if let Some(id) = &entry.merchant {
            *self.by_merchant.entry(id.clone()).or_default() += 1;
        }
        self.polls.insert((entry.poll_by, call.clone()));
        let ticket = entry.ticket + if entry.ticket < 0 { REQUEUE_ADVANTAGE } else { 0 };
        self.last_ticket = self.last_ticket.max(ticket);
        self.entries.insert(call, entry);
    }

    pub(super) fn remove(&mut self, call: &CallSid) -> Option<QueueEntry> {
        let entry = self.entries.remove(call)?;
        let position = entry.position(call);
        for pool in &entry.pools {
            if let Some(queue) = self.by_pool.get_mut(pool) {
                queue.remove(&position);
                if queue.is_empty() {
                    self.by_pool.remove(pool);
                }
            }
        }
        if let Some(id) = &entry.merchant
            && let Some(waiting) = self.by_merchant.get_mut(id)
        {
            *waiting -= 1;
            if *waiting == 0 {
                self.by_merchant.remove(id);
            }
        }
        self.polls.remove(&(entry.poll_by, call.clone()));
        Some(entry)
    }

    pub(super) fn set_poll_by(&mut self, call: &CallSid, poll_by: Millis) {
        if let Some(entry) = self.entries.get_mut(call) {
            self.polls.remove(&(entry.poll_by, call.clone()));
            entry.poll_by = poll_by;
            self.polls.insert((poll_by, call.clone()));
        }
    }

    pub(super) fn shift(&mut self, by: i64) {
        self.entries.values_mut().for_each(|entry| entry.shift(by));
        shift_deadlines(&mut self.polls, by);
    }

    pub(super) fn get(&self, call: &CallSid) -> Option<&QueueEntry> {
        self.entries.get(call)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&CallSid, &QueueEntry)> {
        self.entries.iter()
    }

    /// Waiting calls by poll deadline.
    pub(super) fn polls(&self) -> &BTreeSet<(Millis, CallSid)> {
        &self.polls
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn len_of(&self, pool: &Pool) -> usize {
        self.by_pool.get(pool).map_or(0, BTreeSet::len)
    }

    /// The first call in the queue of a pool.
    pub(super) fn first(&self, pool: &Pool) -> Option<&CallSid> {
        self.by_pool.get(pool)?.first().map(|(_, _, call)| call)
    }

    /// The call with the earliest poll deadline, if that has passed.
    pub(super) fn overdue(&self, now: Millis) -> Option<&CallSid> {
        self.polls.first().filter(|(poll_by, _)| *poll_by <= now).map(|(_, call)| call)
    }
}

impl Fleet {
    /// Adds a refused call to the queue, if the call may wait and the queue is not full.
    pub(super) fn enqueue(
        &mut self,
        request: &Allocate,
        refusal: Refusal,
        continuation: &Continuation,
        now: Millis,
    ) -> Refusal {
        let Some(hold) = &request.hold else { return refusal };
        let config = self.merchant_config_of(request.merchant.as_ref());
        let priority = match continuation.is_dialed {
            true => MAX_PRIORITY + 1,
            false => config.map_or(0, |config| config.priority),
        };
        let steps = merchant::chain(&self.tiers, config);
        let pools: Vec<Pool> = steps.filter_map(|step| self.tiers.resolve(step)).collect();
        if pools.is_empty() || hold.time == 0 {
            return refusal;
        }
        let merchant = request.merchant.as_ref();
        let waiting = merchant.and_then(|id| self.queue.by_merchant.get(id)).copied();
        if self.queue.len() >= hold.max_waiting
            || waiting.unwrap_or(0) >= hold.max_waiting_per_merchant
        {
            return Refusal { reason: RefusalReason::QueueFull, ..refusal };
        }
        let is_reconnect = continuation.is_known;
        if !is_reconnect && !continuation.is_dialed {
            self.count_admission(request, now);
        }
        let until = now + hold.time;
        let entry = QueueEntry {
            merchant: request.merchant.clone(),
            priority,
            // A reconnect precedes all new calls of its priority.
            ticket: self.queue.last_ticket + 1 - if is_reconnect { REQUEUE_ADVANTAGE } else { 0 },
            pools,
            since: now,
            until,
            poll_by: hold.poll_by(until, now),
            tried: refusal.tried.clone(),
            pod_attempt: request.pod_attempt(continuation.failovers),
            number: self.number_of(request, continuation),
        };
        self.record(Change::Queued { call: request.call.clone(), entry });
        Refusal { reason: RefusalReason::Waiting { is_new: true, until }, ..refusal }
    }

    /// Answers the poll of a waiting call; `None` if the call does not wait.
    pub(super) fn poll_queue(&mut self, request: &Allocate, now: Millis) -> Option<Refusal> {
        let entry = self.queue.get(&request.call)?;
        if entry.pools.iter().all(|pool| self.tiers.kind(pool).is_none()) {
            // None of its pools exists any more: the request is handled as a new one.
            self.leave_queue(&request.call);
            return None;
        }
        let (until, waited) = (entry.until, now.saturating_sub(entry.since));
        let tried = entry.tried.clone();
        let reason = match &request.hold {
            None => RefusalReason::NoPods,
            Some(_) if now >= until => {
                self.record(Change::LeftQueue { call: request.call.clone() });
                RefusalReason::HoldExpired { waited }
            }
            Some(hold) => {
                let poll_by = hold.poll_by(until, now);
                self.record(Change::Polled { call: request.call.clone(), poll_by });
                RefusalReason::Waiting { is_new: false, until }
            }
        };
        Some(Refusal { tried, malformed_merchant: None, reason, reservation: None })
    }

    /// Accepts the hand-off of a call: its lease begins. If the pod has left service since, the
    /// call gets another pod, or waits again with its old queue entry.
    pub(super) fn accept_handoff(&mut self, request: &Allocate, now: Millis) -> Option<Allocation> {
        let pod = self.calls.get(&request.call)?.pod.clone();
        if !self.pods.get(&pod).is_some_and(Pod::is_serving) && self.requeue(&request.call, now) {
            self.reassign_and_hand_off(&pod);
            self.hand_off_requeued(vec![request.call.clone()]);
        }
        let call = self.calls.get(&request.call)?;
        let since = call.queue_entry.as_ref()?.since;
        let allocation = Allocation {
            waited: Some(now.saturating_sub(since)),
            was_existing: false,
            ..call.allocation()
        };
        self.record(Change::HandoffAccepted {
            call: request.call.clone(),
            at: now,
            until: now + request.lease_ttl,
            provisional: request.provisional,
            expects_stream: request.expects_stream,
        });
        self.drop_call_end(request);
        Some(allocation)
    }

    /// Takes a handed-off call off its pod and restores its queue entry. Returns false for any
    /// other call.
    pub(super) fn requeue(&mut self, call: &CallSid, now: Millis) -> bool {
        let Some(known) = self.calls.get(call) else { return false };
        let Some(entry) = known.queue_entry.clone() else { return false };
        let entry = QueueEntry { poll_by: known.until, ..entry };
        self.end(call, EndCause::PodGone, now);
        self.record(Change::Queued { call: call.clone(), entry });
        true
    }

    /// Removes a call from the queue, if it waits.
    pub(super) fn leave_queue(&mut self, call: &CallSid) {
        if self.queue.get(call).is_some() {
            self.record(Change::LeftQueue { call: call.clone() });
        }
    }

    /// Hands the free slots of a pod to waiting calls.
    pub(super) fn hand_off_free_slots(&mut self, pod: &PodName) {
        while let Some(pool) = self.pool_with_free_slot(pod)
            && let Some(call) = self.queue.first(&pool).cloned()
            && self.may_hand_off(&call, &pool)
        {
            self.hand_off(call, pod.clone(), pool);
        }
    }

    /// Hands free slots of a pool to waiting calls, after fewer are held for dials.
    pub(super) fn hand_off_pool(&mut self, pool: &Pool) {
        while let Some(call) = self.queue.first(pool).cloned()
            && self.may_hand_off(&call, pool)
            && let Ok(pod) = self.draw(pool, None, &call)
        {
            let pod = pod.clone();
            self.hand_off(call, pod, pool.clone());
        }
    }

    /// Whether a waiting call may use a free slot of the pool, in view of the held ones.
    fn may_hand_off(&self, call: &CallSid, pool: &Pool) -> bool {
        self.queue.get(call).is_some_and(QueueEntry::is_dialed) || self.is_open(pool)
    }

    fn hand_off(&mut self, call: CallSid, pod: PodName, pool: Pool) {
        let Some(entry) = self.queue.get(&call).cloned() else { return };
        self.handoffs.push(call.clone());
        let facts = Call {
            pod,
            pool,
            merchant: entry.merchant.clone(),
            // Until the call accepts the hand-off, its time counts from its arrival in the queue.
            at: entry.since,
            until: entry.poll_by,
            tried: entry.tried.clone(),
            provisional: false,
            expects_stream: false,
            pod_attempt: entry.pod_attempt,
            failovers: 0,
            number: entry.number.clone(),
            queue_entry: Some(entry),
            stream: None,
            is_returned: false,
        };
        self.record(Change::Call { call, facts });
    }

    /// Hands free pods to requeued calls: calls whose hand-off failed because the pod left.
    pub(super) fn hand_off_requeued(&mut self, calls: Vec<CallSid>) {
        let position = |call: CallSid| self.queue.get(&call).map(|entry| entry.position(&call));
        let mut positions: Vec<Position> = calls.into_iter().filter_map(position).collect();
        positions.sort();
        for (_, _, call) in &positions {
            let pools = self.queue.get(call).map(|entry| entry.pools.clone()).unwrap_or_default();
            let free = pools.into_iter().find_map(|pool| {
                let pool = Some(pool).filter(|pool| self.may_hand_off(call, pool))?;
                let pod = self.draw(&pool, None, call).ok()?.clone();
                Some((pod, pool))
            });
            if let Some((pod, pool)) = free {
                self.hand_off(call.clone(), pod, pool);
            }
        }
    }

    /// Calls that were handed a pod since the last call of this function: long polls may wait for
    /// them.
    pub fn take_handoffs(&mut self) -> Vec<CallSid> {
        std::mem::take(&mut self.handoffs)
    }
}
