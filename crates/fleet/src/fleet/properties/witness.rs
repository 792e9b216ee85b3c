//! A witness that knows only what callers were told, and the views derived again
//! the slow way.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::LEASE;
use crate::tiers::Kind;

/// What the callers of a fleet were told, and nothing else.
#[derive(Default)]
pub(super) struct Witness {
    pub calls: BTreeMap<CallSid, PodName>,
    /// Until when each call was promised its pod.
    pub leases: BTreeMap<CallSid, Millis>,
    /// Calls that ended and did not ask again.
    pub over: BTreeSet<CallSid>,
    /// Acknowledged drains: none of them may be given a call before this time.
    pub drains: BTreeMap<PodName, Millis>,
    pub seen: BTreeMap<PodName, PodFacts>,
    /// The highest epoch of a write that was accepted.
    pub epoch: u64,
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
        self.over.insert(call.clone());
        self.calls.remove(call)
    }

    pub(super) fn begin(&mut self, call: CallSid, pod: PodName, now: Millis) {
        self.over.remove(&call);
        self.leases.insert(call.clone(), now + LEASE);
        self.calls.insert(call, pod);
    }

    pub(super) fn allocated(&mut self, sid: CallSid, got: &Allocation, fleet: &Fleet, now: Millis) {
        if let Some(before) = self.calls.get(&sid) {
            assert!(
                got.was_existing && got.pod == *before,
                "I2: {sid} has {before} and was given {}",
                got.pod
            );
            return;
        }
        assert!(!got.was_existing, "an ended call came back");
        self.check(&got.pod, &got.pool, fleet, now);
        self.begin(sid, got.pod.clone(), now);
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
    fn check(&self, pod: &PodName, pool: &Pool, fleet: &Fleet, now: Millis) {
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

/// Every index and view, derived from the facts alone.
pub(super) fn views_follow_from_facts(fleet: &Fleet) {
    let leases: BTreeSet<_> =
        fleet.calls.iter().map(|(sid, call)| (call.until, sid.clone())).collect();
    assert_eq!(leases, fleet.leases);
    let drains: BTreeSet<_> = fleet
        .pods
        .iter()
        .filter_map(|(name, pod)| Some((pod.draining_until?, name.clone())))
        .collect();
    assert_eq!(drains, fleet.drains);
    let quarantines: BTreeSet<_> = fleet
        .pods
        .iter()
        .filter_map(|(name, pod)| Some((pod.quarantined_until?, name.clone())))
        .collect();
    assert_eq!(quarantines, fleet.quarantines);
    let mut merchant_calls: HashMap<MerchantId, usize> = HashMap::new();
    let live = fleet.calls.values().filter_map(|call| call.merchant.clone());
    for id in live.chain(fleet.queue.iter().filter_map(|(_, place)| place.merchant.clone())) {
        *merchant_calls.entry(id).or_default() += 1;
    }
    assert_eq!(merchant_calls, fleet.merchant_calls);
    for (name, pod) in &fleet.pods {
        let on: BTreeSet<_> =
            fleet.calls.iter().filter(|(_, call)| call.pod == *name).map(|(sid, _)| sid).collect();
        assert_eq!(on, pod.calls.iter().collect(), "the calls of {name}");
        assert_eq!(on.len(), pod.calls.len());
        let homeless = pod.is_serving() && pod.tier.is_none();
        assert!(!homeless, "I11: {name} is in service and in no pool");
        let pinned = pod.facts.pin.as_ref().and_then(|step| fleet.tiers.resolve(step));
        if let Some(tier) = pod.tier.as_ref().filter(|_| pod.calls.is_empty()) {
            assert!(
                fleet.tiers.wants(tier) || pinned.as_ref() == Some(tier),
                "I11: {name} idles in {tier}, which is no more"
            );
        }
    }
    for (pool, view) in &fleet.pools {
        let members: Vec<_> =
            fleet.pods.iter().filter(|(_, pod)| pod.tier.as_ref() == Some(pool)).collect();
        let shared = matches!(fleet.tiers.kind(pool), Some(Kind::Shared { .. }));
        let known = fleet.tiers.kind(pool).is_some();
        let open: BTreeSet<(usize, &PodName)> = members
            .iter()
            .filter(|(_, pod)| {
                pod.facts.ready
                    && !pod.facts.terminating
                    && pod.draining_until.is_none()
                    && pod.quarantined_until.is_none()
            })
            .filter(|(_, pod)| known && (shared || pod.calls.is_empty()))
            .map(|(name, pod)| (pod.calls.len(), *name))
            .collect();
        let shown: BTreeSet<(usize, &PodName)> =
            view.open.iter().map(|((calls, _), name)| (*calls, name)).collect();
        assert_eq!(shown, open, "I3, I11: the available view of {pool}");
        assert_eq!(view.open.len(), open.len(), "I11: a pod stands twice in {pool}");
        assert_eq!(view.assigned, members.len());
        assert_eq!(view.calls, members.iter().map(|(_, pod)| pod.calls.len()).sum::<usize>());
        assert_eq!(view.leaving, members.iter().filter(|(_, pod)| pod.is_leaving()).count());
        let staying = || members.iter().filter(|(_, pod)| !pod.is_leaving());
        assert_eq!(view.unready, staying().filter(|(_, pod)| !pod.facts.ready).count());
        let is_quarantined = |pod: &Pod| pod.facts.ready && pod.quarantined_until.is_some();
        assert_eq!(view.quarantined, staying().filter(|(_, pod)| is_quarantined(pod)).count());
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

pub(super) fn fullest_with_room(fleet: &Fleet) -> BTreeMap<Pool, usize> {
    let room = |pool: &Pool, view: &PoolView| match fleet.tiers.kind(pool) {
        Some(Kind::Shared { max_concurrent, .. }) => view
            .open
            .keys()
            .map(|(calls, _)| *calls)
            .filter(|calls| *calls < max_concurrent as usize)
            .max(),
        _ => None,
    };
    fleet.pools.iter().filter_map(|(pool, view)| Some((pool.clone(), room(pool, view)?))).collect()
}
