//! A witness that knows only what callers and writers of pods were told.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::Writer;
use crate::{names::Fingerprint, tiers::Kind};

/// What the callers of a fleet were told, and nothing else.
#[derive(Default)]
pub(super) struct Witness {
    pub calls: BTreeMap<CallSid, PodName>,
    /// Until when each call was promised its pod.
    pub leases: BTreeMap<CallSid, Millis>,
    /// Calls whose stream has not started yet.
    pub provisional: BTreeSet<CallSid>,
    /// Calls that ended and did not ask again.
    pub over: BTreeSet<CallSid>,
    /// Acknowledged drains: none of them may be given a call before this time.
    pub drains: BTreeMap<PodName, Millis>,
    pub seen: BTreeMap<PodName, PodFacts>,
    /// The origin and the epoch of the last write that was accepted.
    origin: Option<PodOrigin>,
    epoch: u64,
    /// Signed requests that were answered, and until when that is remembered.
    signed: BTreeMap<Fingerprint, Millis>,
    /// Calls that wait.
    pub waiting: BTreeMap<CallSid, Waiter>,
    /// Calls that were handed a pod, and have not come for it.
    pub handed: BTreeMap<CallSid, Waiter>,
    arrivals: i64,
}

#[derive(Debug, Clone)]
pub(super) struct Waiter {
    priority: i32,
    arrival: i64,
    pub pools: Vec<Pool>,
}

impl Witness {
    pub(super) fn calls_on(&self, pod: &PodName) -> usize {
        self.calls.values().filter(|on| *on == pod).count()
    }

    pub(super) fn end(&mut self, ended: &[EndedCall]) {
        for ended in ended {
            assert_eq!(
                self.forget(&ended.call).as_ref(),
                Some(&ended.pod),
                "ended a call that was not live"
            );
        }
    }

    pub(super) fn forget(&mut self, call: &CallSid) -> Option<PodName> {
        self.handed.remove(call);
        self.leases.remove(call);
        self.provisional.remove(call);
        self.over.insert(call.clone());
        self.calls.remove(call)
    }

    pub(super) fn begin(&mut self, call: CallSid, pod: PodName, until: Millis) {
        self.over.remove(&call);
        self.leases.insert(call.clone(), until);
        self.calls.insert(call, pod);
    }

    /// A live call has shown that its pod has it.
    pub(super) fn is_sure(&mut self, call: &CallSid, until: Millis) {
        self.handed.remove(call);
        self.provisional.remove(call);
        if let Some(lease) = self.leases.get_mut(call) {
            *lease = until;
        }
    }

    /// Calls that could not report have at least so much time.
    pub(super) fn extend_pending(&mut self, until: Millis) {
        for (call, lease) in &mut self.leases {
            if self.provisional.contains(call) || self.handed.contains_key(call) {
                *lease = until.max(*lease);
            }
        }
    }

    pub(super) fn shift(&mut self, by: i64) {
        let (leases, drains) = (self.leases.values_mut(), self.drains.values_mut());
        let all = leases.chain(drains).chain(self.signed.values_mut());
        all.for_each(|time| *time = time.saturating_add_signed(by));
    }

    /// Whether another origin is in force. A cluster without its UID was written by an earlier
    /// version: the first cluster of that namespace takes over.
    fn is_foreign(&self, origin: &PodOrigin) -> bool {
        let is_upgrade = |owner: &PodOrigin| {
            owner.to_string() == "kubernetes/ns" && origin.to_string().starts_with("kubernetes/ns/")
        };
        self.origin.as_ref().is_some_and(|owner| owner != origin && !is_upgrade(owner))
    }

    /// I9: a write is accepted from the origin in force, under the highest epoch.
    pub(super) fn wrote(&mut self, writer: &Writer, refused: Option<&WriteRefused>) {
        let Writer { origin, epoch } = writer.clone();
        let is_foreign = self.is_foreign(&origin);
        match refused {
            None => {
                assert!(!is_foreign && epoch >= self.epoch, "I9");
                (self.origin, self.epoch) = (Some(origin), epoch);
            }
            Some(WriteRefused::Foreign { owner }) => {
                let in_force = self.origin.as_ref().map(ToString::to_string);
                assert!(is_foreign && Some(owner) == in_force.as_ref(), "I9");
            }
            Some(refused) => {
                assert!(!is_foreign && epoch < self.epoch, "I9");
                assert_eq!(*refused, WriteRefused::Fenced { epoch, current: self.epoch });
            }
        }
    }

    /// I9: another origin takes over by force only, and fences the one before.
    pub(super) fn claimed(&mut self, claim: &Claim, outcome: Result<u64, ClaimRefused>) {
        let is_foreign = self.is_foreign(&claim.origin);
        let is_question = claim.by == Claimant::Leader { epoch: None };
        let epoch = match outcome {
            Ok(epoch) => {
                assert!(!is_foreign || claim.force && epoch > self.epoch, "I9");
                if is_question && !is_foreign {
                    return assert_eq!(epoch, self.epoch);
                }
                epoch
            }
            Err(ClaimRefused::Write(WriteRefused::Foreign { .. })) => {
                return assert!(is_foreign && !claim.force, "I9");
            }
            // The store is taken over all the same.
            Err(ClaimRefused::Write(WriteRefused::Fenced { current, .. }))
                if is_foreign && claim.force =>
            {
                current
            }
            Err(_) => return assert!(!is_foreign, "I9"),
        };
        assert!(epoch >= self.epoch, "I9");
        (self.origin, self.epoch) = (Some(claim.origin.clone()), epoch);
    }

    /// Whether the same signed request was answered before, and its call is over.
    pub(super) fn is_replay(&self, request: &Allocate, now: Millis) -> bool {
        if self.calls.contains_key(&request.call) || self.waiting.contains_key(&request.call) {
            return false;
        }
        let until = request.signed.as_ref().and_then(|it| self.signed.get(&it.fingerprint));
        until.is_some_and(|until| now <= *until)
    }

    /// Notes a signed request that is not to be answered with a pod again.
    pub(super) fn signs(
        &mut self,
        request: &Allocate,
        outcome: &Result<Allocation, Refusal>,
        now: Millis,
    ) {
        let Some(Signed { fingerprint, window }) = &request.signed else { return };
        let is_spent = match outcome {
            Ok(_) => true,
            Err(refusal) => matches!(refusal.why, Why::Waiting { .. } | Why::Over | Why::Spent),
        };
        if is_spent {
            self.signed.insert(fingerprint.clone(), now + window);
        }
    }

    /// A call has begun to wait.
    pub(super) fn waits(&mut self, call: CallSid, fleet: &Fleet) {
        assert!(!self.calls.contains_key(&call), "{call} waits, and has a pod");
        self.arrivals += 1;
        let place = fleet.queue.get(&call).expect("it has a place");
        // Those that had a pod come before all others, in the order of their arrival.
        let arrival = self.arrivals - if place.ticket < 0 { 1 << 32 } else { 0 };
        let waiter = Waiter { priority: place.priority, arrival, pools: place.pools.clone() };
        assert!(self.waiting.insert(call, waiter).is_none(), "it waited before");
    }

    /// A handed-off call waits again.
    pub(super) fn requeue(&mut self, call: &CallSid) {
        let waiter = self.handed.remove(call).expect("it was handed a pod");
        self.calls.remove(call);
        self.leases.remove(call);
        self.waiting.insert(call.clone(), waiter);
    }

    /// Whether a call was handed a pod that is out of service by now (I5).
    pub(super) fn lost_service(&self, call: &CallSid, fleet: &Fleet) -> bool {
        self.handed.contains_key(call) && !fleet.pods[&self.calls[call]].is_serving()
    }

    /// Hears which calls were handed a pod, and which had to give it back because
    /// the pod has gone.
    pub(super) fn hear(&mut self, fleet: &mut Fleet, now: Millis) {
        let handed = fleet.take_handed();
        let has_lost_it =
            |call: &&CallSid| fleet.queue.get(call).is_some() || handed.contains(call);
        let back: Vec<CallSid> = self.handed.keys().filter(has_lost_it).cloned().collect();
        back.iter().for_each(|call| self.requeue(call));
        for call in handed {
            let Some(facts) = fleet.calls.get(&call).cloned() else { continue };
            let Some(waiter) = self.waiting.remove(&call) else {
                panic!("{call} was served twice, or did not wait")
            };
            let before = |other: &Waiter| {
                (-other.priority, other.arrival) < (-waiter.priority, waiter.arrival)
            };
            for (other, earlier) in &self.waiting {
                let is_passed = before(earlier) && earlier.pools.contains(&facts.pool);
                assert!(!is_passed, "{call} overtook {other} for {}", facts.pool);
            }
            self.check(&facts.pod, &facts.pool, fleet, now);
            self.over.remove(&call);
            self.leases.insert(call.clone(), facts.until);
            self.calls.insert(call.clone(), facts.pod);
            self.handed.insert(call, waiter);
        }
        for (call, waiter) in &self.waiting {
            for pool in &waiter.pools {
                assert_eq!(room(fleet, pool), 0, "{pool} has room, and {call} waits for it");
            }
        }
        let places = fleet.queue.len();
        assert_eq!(places, self.waiting.len(), "a place was lost, or taken untold");
    }

    /// Whether a pod may be given one more call.
    pub(super) fn check(&self, pod: &PodName, pool: &Pool, fleet: &Fleet, now: Millis) {
        let seen = &self.seen[pod];
        assert!(seen.ready && !seen.terminating, "I5: {pod} is not in service");
        assert!(self.drains.get(pod).is_none_or(|until| *until <= now), "I5: {pod} is draining");
        let others = self.calls_on(pod);
        match fleet.tiers.kind(pool) {
            Some(Kind::Shared { max_concurrent, .. }) => {
                assert!(others < max_concurrent as usize, "I3: beyond the cap")
            }
            Some(_) => assert_eq!(others, 0, "I1: {pod} already has a call"),
            None => panic!("{pod} was drawn from a pool that is no more"),
        }
    }

    pub(super) fn agrees(&self, fleet: &Fleet) {
        let live: BTreeMap<CallSid, PodName> =
            fleet.calls.iter().map(|(sid, call)| (sid.clone(), call.pod.clone())).collect();
        assert_eq!(live, self.calls, "I6: the live calls are not those that callers know of");
        let pods: BTreeSet<&PodName> = fleet.pods.keys().collect();
        assert_eq!(pods, self.seen.keys().collect(), "a pod came or went untold");
        for (name, pod) in &fleet.pods {
            let told = self.drains.contains_key(name);
            assert_eq!(pod.draining_until.is_some(), told, "a drain began or ended untold: {name}");
        }
    }
}

/// How many calls the pods of a pool could take, by the facts.
pub(super) fn room(fleet: &Fleet, pool: &Pool) -> usize {
    let cap = match fleet.tiers.kind(pool) {
        Some(Kind::Shared { max_concurrent, .. }) => max_concurrent as usize,
        Some(_) => 1,
        None => 0,
    };
    let serving = |pod: &&Pod| pod.tier.as_ref() == Some(pool) && pod.is_serving();
    fleet.pods.values().filter(serving).map(|pod| cap.saturating_sub(pod.calls.len())).sum()
}
