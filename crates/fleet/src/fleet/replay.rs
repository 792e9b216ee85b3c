//! The one place that changes a fact.

use super::{Cause, Change, Fleet, Merchant, Pod, PodList, calls::Call};
use crate::{
    Millis,
    merchant::MerchantConfig,
    names::{CallSid, MerchantId, PodName},
};

impl Fleet {
    /// Changes a fact as it was decided before, and derives the views again.
    pub fn replay(&mut self, change: Change) {
        match change {
            Change::Began { trusting_until } => self.trusting_until = trusting_until,
            Change::Epoch { epoch } => self.epoch = epoch,
            Change::Origin { origin } => {
                if self.owner().is_some_and(|owner| !origin.may_follow(&owner)) {
                    self.list = None;
                }
                self.origin = Some(origin);
            }
            Change::List { digest, at } => self.list = Some(PodList { digest, followed_at: at }),
            Change::Tiers { tiers, .. } => {
                self.tiers = tiers;
                let names: Vec<PodName> = self.pods.keys().cloned().collect();
                for name in &names {
                    self.place(name);
                }
            }
            Change::Merchant { id, document: None, .. } => drop(self.merchants.remove(&id)),
            Change::Merchant { id, document: Some(document), .. } => {
                let config = MerchantConfig::parse(&document);
                self.merchants.insert(id, Merchant { document, config });
            }
            Change::Pod { pod, facts } => {
                match self.pods.get_mut(&pod) {
                    Some(known) => known.facts = facts,
                    None => drop(self.pods.insert(pod.clone(), Pod::new(facts))),
                }
                self.place(&pod);
            }
            Change::Home { pod, pool } => {
                if let Some(known) = self.pods.get_mut(&pod) {
                    known.tier = Some(pool);
                }
                self.place(&pod);
            }
            Change::Gone { pod } => {
                self.forget(&pod);
                self.drained.push(pod);
            }
            Change::Draining { pod, until } => self.set_draining(&pod, until),
            Change::Health { pod, failures, quarantined_until } => {
                self.set_health(&pod, failures, quarantined_until);
            }
            Change::Call { call, facts } => self.begin(call, facts),
            Change::Fetched { call, at, until, provisional } => {
                self.lease(&call, until);
                if let Some(known) = self.calls.get_mut(&call) {
                    (known.at, known.provisional, known.place) = (at, provisional, None);
                }
            }
            Change::Renewed { call, until } => {
                self.lease(&call, until);
                if let Some(known) = self.calls.get_mut(&call) {
                    (known.provisional, known.place) = (false, None);
                }
            }
            Change::Spared { call, until } => self.lease(&call, until),
            Change::Ended { call, at, cause } => self.finish(call, at, cause),
            Change::Remembered { call, end } => self.ends.insert(call, end),
            Change::Seen { fingerprint, at, until } => self.seen.insert(fingerprint, at, until),
            Change::Forgotten { call } => self.ends.remove(&call),
            Change::Told { .. } | Change::Time { .. } => {}
            Change::Shifted { by } => self.shift_times(by),
            Change::Waits { call, place } => {
                self.count(place.merchant.as_ref());
                self.queue.insert(call, place);
            }
            Change::Polled { call, poll_by } => self.queue.poll(&call, poll_by),
            Change::Left { call } => {
                if let Some(place) = self.queue.remove(&call) {
                    self.uncount(place.merchant.as_ref());
                }
            }
        }
    }

    /// A call has a pod. One that waited for it leaves the queues.
    fn begin(&mut self, call: CallSid, facts: Call) {
        let name = facts.pod.clone();
        if let Some(pod) = self.pods.get_mut(&name) {
            pod.calls.push(call.clone());
            if self.queue.remove(&call).is_none() {
                self.count(facts.merchant.as_ref());
            }
            self.leases.insert((facts.until, call.clone()));
            self.calls.insert(call, facts);
        }
        self.place(&name);
    }

    fn finish(&mut self, call: CallSid, at: Millis, cause: Cause) {
        if at < self.trusting_until {
            self.ended.insert(call.clone());
        }
        if let Some(ended) = self.calls.remove(&call) {
            self.uncount(ended.merchant.as_ref());
            if let Some(pod) = self.pods.get_mut(&ended.pod) {
                pod.calls.retain(|other| *other != call);
            }
            self.leases.remove(&(ended.until, call.clone()));
            self.place(&ended.pod);
            self.ends.note(call, &ended, cause, at);
        }
    }

    fn set_draining(&mut self, name: &PodName, until: Option<Millis>) {
        if until.is_none() {
            self.drained.push(name.clone());
        }
        if let Some(known) = self.pods.get_mut(name) {
            let before = std::mem::replace(&mut known.draining_until, until);
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

    fn lease(&mut self, call: &CallSid, until: Millis) {
        if let Some(known) = self.calls.get_mut(call) {
            self.leases.remove(&(known.until, call.clone()));
            known.until = until;
            self.leases.insert((until, call.clone()));
        }
    }

    fn count(&mut self, merchant: Option<&MerchantId>) {
        if let Some(id) = merchant {
            *self.merchant_calls.entry(id.clone()).or_default() += 1;
        }
    }

    fn uncount(&mut self, merchant: Option<&MerchantId>) {
        if let Some(id) = merchant
            && let Some(live) = self.merchant_calls.get_mut(id)
        {
            *live -= 1;
            if *live == 0 {
                self.merchant_calls.remove(id);
            }
        }
    }

    /// The calls of a pod that leaves have ended before.
    fn forget(&mut self, name: &PodName) {
        let Some(pod) = self.pods.remove(name) else {
            return;
        };
        if let Some(until) = pod.draining_until {
            self.drains.remove(&(until, name.clone()));
        }
        if let Some(until) = pod.quarantined_until {
            self.quarantines.remove(&(until, name.clone()));
        }
        if let Some(placed) = &pod.placed
            && let Some(view) = self.pools.get_mut(&placed.pool)
        {
            view.discount(placed);
        }
    }
}
