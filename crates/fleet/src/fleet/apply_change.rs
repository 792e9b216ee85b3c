//! Applies changes: the only code that changes facts.

use super::{
    AttachedStream, Change, EndCause, Fleet, Merchant, Pod, PodFacts, PodList, PodOrigin,
    QueueEntry, calls::Call, failover::Moved, outbound_facts::call_line,
};
use crate::{
    Millis,
    merchant::MerchantConfig,
    names::{CallSid, MerchantId, PodName, Pool},
    outbound::AnswerRate,
    tiers::Tiers,
};

impl Fleet {
    /// Applies a change to the facts and derives the indexes from them.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Began { trusting_until } => self.trusting_until = trusting_until,
            Change::Epoch { epoch } => self.epoch = epoch,
            Change::Origin { origin } => self.set_origin(origin),
            Change::List { digest, at } => self.list = Some(PodList { digest, followed_at: at }),
            Change::Tiers { tiers, .. } => self.set_tiers(tiers),
            Change::Merchant { id, document, .. } => self.set_document(id, document),
            Change::Pod { pod, facts } => self.set_pod(&pod, facts),
            Change::PoolAssigned { pod, pool } => self.set_pool(&pod, pool),
            Change::Gone { pod } => {
                self.remove(&pod);
                self.drained.push(pod);
            }
            Change::Draining { pod, until, surplus } => self.set_draining(&pod, until, surplus),
            Change::Health { pod, failures, quarantined_until } => {
                self.set_health(&pod, failures, quarantined_until);
            }
            Change::Call { call, facts } => self.insert_call(call, facts),
            Change::HandoffAccepted { call, at, until, provisional, expects_stream } => {
                self.set_lease(&call, until);
                self.set_accepted(&call, at, provisional, expects_stream);
            }
            Change::Renewed { call, until } => self.set_confirmed(&call, until),
            Change::Attached { call, stream, until } => self.set_stream(call, stream, until),
            Change::Ending { call, cause } => self.set_ending(&call, cause),
            Change::FailedOver {
                call, pod, pool, tried, stream, gateway, is_lost, until, ..
            } => {
                let moved = Moved { call, pod, pool, tried, stream, gateway, is_lost, until };
                self.move_stream(moved);
            }
            Change::Heartbeat { gateway, until, lease } => {
                let known = self.gateways.entry(gateway).or_default();
                (known.until, known.lease) = (until, lease);
            }
            Change::GatewayGone { gateway } => drop(self.gateways.remove(&gateway)),
            Change::CapacityState { pool, at, state } => self.capacity.set_state(pool, at, state),
            Change::Prescale { order, .. } => self.capacity.set_order(order),
            Change::PrescaleDeleted { id, .. } | Change::PrescaleExpired { id } => {
                self.capacity.remove_order(&id);
            }
            Change::Reserved { reservation, facts, miss_target } => {
                self.count_call(Some(&facts.merchant));
                self.outbound.insert(reservation, facts, miss_target);
            }
            Change::Dialed { reservation, call, until } => {
                self.outbound.set_dialed(&reservation, call, until);
            }
            Change::ReservationEnded { reservation, cause, at, .. } => {
                if let Some(facts) = self.outbound.remove(&reservation, cause, at) {
                    self.uncount_call(Some(&facts.merchant));
                }
            }
            Change::AnswerRate { merchant, dials, answers, at } => {
                self.outbound.set_answer_rate(merchant, AnswerRate { dials, answers }, at);
            }
            Change::Number { number, max_lines, .. } => self.outbound.set_number(number, max_lines),
            Change::Account { account, max_cps, last_dial, .. } => {
                self.outbound.set_account(account, max_cps, last_dial);
            }
            Change::MediaSecret { secret } => self.media_secret = Some(secret),
            Change::PendingExtended { call, until } => self.set_lease(&call, until),
            Change::Ended { call, at, cause } => self.remove_call(call, at, cause),
            Change::CallEndRecorded { call, end } => self.history.insert(call, end),
            Change::RequestSeen { fingerprint, at, until } => {
                self.seen_requests.insert(fingerprint, at, until);
            }
            Change::CallEndDropped { call } => self.history.remove(&call),
            Change::EventRecorded { .. } | Change::Time { .. } => {}
            Change::Shifted { by } => self.shift_times(by),
            Change::Queued { call, entry } => self.insert_waiting(call, entry),
            Change::Polled { call, poll_by } => self.queue.set_poll_by(&call, poll_by),
            Change::LeftQueue { call } => self.remove_waiting(&call),
        }
    }

    fn set_origin(&mut self, origin: PodOrigin) {
        if self.owner().is_some_and(|owner| !origin.may_follow(&owner)) {
            self.list = None;
        }
        self.origin = Some(origin);
    }

    fn set_tiers(&mut self, tiers: Tiers) {
        self.tiers = tiers;
        let names: Vec<PodName> = self.pods.keys().cloned().collect();
        for name in &names {
            self.place(name);
        }
    }

    fn set_document(&mut self, id: MerchantId, document: Option<String>) {
        match document {
            None => drop(self.merchants.remove(&id)),
            Some(document) => {
                let config = MerchantConfig::parse(&document);
                self.merchants.insert(id, Merchant { document, config });
            }
        }
    }

    fn set_pod(&mut self, name: &PodName, facts: PodFacts) {
        match self.pods.get_mut(name) {
            Some(known) => known.facts = facts,
            None => drop(self.pods.insert(name.clone(), Pod::new(facts))),
        }
        self.place(name);
    }

    fn set_pool(&mut self, name: &PodName, pool: Pool) {
        if let Some(known) = self.pods.get_mut(name) {
            known.pool = Some(pool);
        }
        self.place(name);
    }

    /// Inserts a live call and removes it from the queue if it waited.
    fn insert_call(&mut self, call: CallSid, facts: Call) {
        let name = facts.pod.clone();
        if let Some(pod) = self.pods.get_mut(&name) {
            pod.calls.insert(call.clone());
            if self.queue.remove(&call).is_none() {
                self.count_call(facts.merchant.as_ref());
            }
            self.outbound.take_line(facts.number.as_ref(), call_line(&call));
            self.leases.insert((facts.until, call.clone()));
            if let Some(stream) = &facts.stream {
                self.gateways.entry(stream.gateway.clone()).or_default().calls.insert(call.clone());
            }
            self.calls.insert(call, facts);
        }
        self.place(&name);
    }

    fn set_accepted(&mut self, call: &CallSid, at: Millis, provisional: bool, stream: bool) {
        if let Some(known) = self.calls.get_mut(call) {
            (known.at, known.provisional, known.queue_entry) = (at, provisional, None);
            known.expects_stream = provisional && stream;
        }
    }

    fn set_confirmed(&mut self, call: &CallSid, until: Millis) {
        self.set_lease(call, until);
        if let Some(known) = self.calls.get_mut(call) {
            (known.provisional, known.queue_entry) = (false, None);
            known.expects_stream = false;
        }
    }

    fn set_ending(&mut self, call: &CallSid, cause: EndCause) {
        let stream = self.calls.get_mut(call).and_then(|call| call.stream.as_mut());
        stream.into_iter().for_each(|stream| stream.ending = Some(cause));
    }

    fn insert_waiting(&mut self, call: CallSid, entry: QueueEntry) {
        self.count_call(entry.merchant.as_ref());
        self.outbound.take_line(entry.number.as_ref(), call_line(&call));
        self.queue.insert(call, entry);
    }

    fn remove_waiting(&mut self, call: &CallSid) {
        if let Some(entry) = self.queue.remove(call) {
            self.uncount_call(entry.merchant.as_ref());
            self.outbound.free_line(entry.number.as_ref(), &call_line(call));
        }
    }

    fn remove_call(&mut self, call: CallSid, at: Millis, cause: EndCause) {
        if at < self.trusting_until {
            self.recently_ended.insert(call.clone());
        }
        if let Some(ended) = self.calls.remove(&call) {
            self.uncount_call(ended.merchant.as_ref());
            self.outbound.free_line(ended.number.as_ref(), &call_line(&call));
            if let Some(pod) = self.pods.get_mut(&ended.pod) {
                pod.calls.remove(&call);
            }
            self.leases.remove(&(ended.until, call.clone()));
            let gateway = ended.stream.as_ref().map(|stream| &stream.gateway);
            if let Some(known) = gateway.and_then(|gateway| self.gateways.get_mut(gateway)) {
                known.calls.remove(&call);
            }
            self.place(&ended.pod);
            self.history.record(call, &ended, cause, at);
        }
    }

    fn set_stream(&mut self, call: CallSid, stream: AttachedStream, until: Millis) {
        self.set_lease(&call, until);
        let Some(known) = self.calls.get_mut(&call) else { return };
        (known.provisional, known.expects_stream, known.queue_entry) = (false, false, None);
        self.gateways.entry(stream.gateway.clone()).or_default().calls.insert(call);
        known.stream = Some(stream);
    }

    fn set_draining(&mut self, name: &PodName, until: Option<Millis>, surplus: bool) {
        if until.is_none() {
            self.drained.push(name.clone());
        }
        if let Some(known) = self.pods.get_mut(name) {
            let before = std::mem::replace(&mut known.draining_until, until);
            known.is_surplus = surplus && until.is_some();
            before.map(|before| self.drains.remove(&(before, name.clone())));
            until.map(|until| self.drains.insert((until, name.clone())));
        }
        self.place(name);
    }

    fn set_health(&mut self, name: &PodName, failures: u32, until: Option<Millis>) {
        if let Some(known) = self.pods.get_mut(name) {
            known.failures = failures;
            let before = std::mem::replace(&mut known.quarantined_until, until);
            before.map(|before| self.quarantines.remove(&(before, name.clone())));
            until.map(|until| self.quarantines.insert((until, name.clone())));
        }
        self.place(name);
    }

    pub(super) fn set_lease(&mut self, call: &CallSid, until: Millis) {
        if let Some(known) = self.calls.get_mut(call) {
            self.leases.remove(&(known.until, call.clone()));
            known.until = until;
            self.leases.insert((until, call.clone()));
        }
    }

    fn count_call(&mut self, merchant: Option<&MerchantId>) {
        if let Some(id) = merchant {
            *self.merchant_calls.entry(id.clone()).or_default() += 1;
        }
    }

    fn uncount_call(&mut self, merchant: Option<&MerchantId>) {
        if let Some(id) = merchant
            && let Some(live) = self.merchant_calls.get_mut(id)
        {
            *live -= 1;
            if *live == 0 {
                self.merchant_calls.remove(id);
            }
        }
    }

    /// Removes a pod. Its calls have ended before.
    fn remove(&mut self, name: &PodName) {
        let Some(pod) = self.pods.remove(name) else {
            return;
        };
        if let Some(until) = pod.draining_until {
            self.drains.remove(&(until, name.clone()));
        }
        if let Some(until) = pod.quarantined_until {
            self.quarantines.remove(&(until, name.clone()));
        }
        if let Some(indexed) = &pod.indexed
            && let Some(index) = self.pools.get_mut(&indexed.pool)
        {
            index.remove(indexed);
        }
    }
}
