//! The oracle: the state that callers and writers of pods expect from the results they received.

use std::collections::{BTreeMap, BTreeSet};

use super::super::*;
use super::{Writer, outbound};
use crate::{
    names::{Fingerprint, StreamId},
    rules::MAX_PRIORITY,
    tiers::TierKind,
};

/// The expected state of a fleet, derived from its results alone.
#[derive(Default)]
pub(super) struct Oracle {
    pub calls: BTreeMap<CallSid, PodName>,
    /// Lease deadline of each call.
    pub leases: BTreeMap<CallSid, Millis>,
    /// Provisional calls.
    pub provisional: BTreeSet<CallSid>,
    /// Calls that ended and were not allocated again.
    pub ended: BTreeSet<CallSid>,
    /// Acknowledged drains: no call may be allocated to these pods before this time.
    pub drains: BTreeMap<PodName, Millis>,
    pub pods: BTreeMap<PodName, PodFacts>,
    /// Origin and epoch of the last accepted write.
    origin: Option<PodOrigin>,
    epoch: u64,
    /// Fingerprints of answered signed requests, with their expiry.
    signed: BTreeMap<Fingerprint, Millis>,
    pub waiting: BTreeMap<CallSid, Waiter>,
    /// Handed-off calls that have not accepted the hand-off.
    pub handed: BTreeMap<CallSid, Waiter>,
    arrivals: i64,
    /// The streams of attached calls.
    pub streams: BTreeMap<CallSid, Stream>,
    /// End of the lease of each gateway.
    pub gateways: BTreeMap<GatewayId, Millis>,
    pub swept_at: Option<Millis>,
    pub outbound: outbound::OutboundOracle,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stream {
    pub gateway: GatewayId,
    pub stream: StreamId,
    /// The call was released with this cause.
    pub ending: Option<EndCause>,
}

#[derive(Debug, Clone)]
pub(super) struct Waiter {
    priority: i32,
    arrival: i64,
    pub pools: Vec<Pool>,
}

impl Oracle {
    pub(super) fn calls_on(&self, pod: &PodName) -> usize {
        self.calls.values().filter(|on| *on == pod).count()
    }

    pub(super) fn end(&mut self, ended: &[EndedCall]) {
        for ended in ended {
            assert_eq!(
                self.remove(&ended.call).as_ref(),
                Some(&ended.pod),
                "ended a call that was not live"
            );
        }
    }

    pub(super) fn remove(&mut self, call: &CallSid) -> Option<PodName> {
        self.handed.remove(call);
        self.leases.remove(call);
        self.provisional.remove(call);
        self.streams.remove(call);
        self.ended.insert(call.clone());
        self.calls.remove(call)
    }

    pub(super) fn insert(&mut self, call: CallSid, pod: PodName, until: Millis) {
        self.ended.remove(&call);
        self.leases.insert(call.clone(), until);
        self.calls.insert(call, pod);
    }

    /// A live call was renewed or confirmed.
    pub(super) fn confirm(&mut self, call: &CallSid, until: Millis) {
        self.handed.remove(call);
        self.provisional.remove(call);
        if let Some(lease) = self.leases.get_mut(call) {
            *lease = until;
        }
    }

    /// An attached call was released, or its provider reports the end of the stream. The first
    /// final cause holds. Returns false for any other call.
    pub(super) fn end_stream(&mut self, call: &CallSid, cause: EndCause) -> bool {
        let stream = self.streams.get_mut(call);
        stream.is_some_and(|stream| {
            let is_kept = stream.ending.is_some_and(|known| known.is_final() || !cause.is_final());
            stream.ending = if is_kept { stream.ending } else { Some(cause) };
            true
        })
    }

    /// These calls have to leave their pod: with a stream when its gateway reacts, the others at
    /// once.
    pub(super) fn displace(&mut self, calls: &[CallSid]) {
        for call in calls {
            if let Some(stream) = self.streams.get_mut(call) {
                stream.ending.get_or_insert(EndCause::Displaced);
            } else if self.handed.contains_key(call) {
                self.requeue(call);
            } else {
                assert!(self.provisional.contains(call), "{call} has begun on its pod");
                self.remove(call);
            }
        }
    }

    pub(super) fn extend_pending(&mut self, until: Millis) {
        for (call, lease) in &mut self.leases {
            if self.provisional.contains(call) || self.handed.contains_key(call) {
                *lease = until.max(*lease);
            }
        }
    }

    pub(super) fn shift(&mut self, by: i64) {
        let (leases, drains) = (self.leases.values_mut(), self.drains.values_mut());
        let gateways = self.gateways.values_mut().chain(self.swept_at.as_mut());
        let all = leases.chain(drains).chain(gateways).chain(self.signed.values_mut());
        all.for_each(|time| *time = time.saturating_add_signed(by));
        self.outbound.shift(by);
    }

    /// Whether another origin is in force. An origin without cluster UID was written by an earlier
    /// version: the first cluster of its namespace takes over.
    fn is_foreign(&self, origin: &PodOrigin) -> bool {
        let is_upgrade = |owner: &PodOrigin| {
            owner.to_string() == "kubernetes/ns" && origin.to_string().starts_with("kubernetes/ns/")
        };
        self.origin.as_ref().is_some_and(|owner| owner != origin && !is_upgrade(owner))
    }

    /// I9: only writes of the origin in force with the highest epoch are accepted.
    pub(super) fn check_write(&mut self, writer: &Writer, refused: Option<&WriteRefused>) {
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

    /// I9: another origin takes over only by force, and fences the previous one.
    pub(super) fn check_claim(&mut self, claim: &Claim, outcome: Result<u64, ClaimRefused>) {
        let is_foreign = self.is_foreign(&claim.origin);
        let is_query = claim.by == Claimant::Leader { epoch: None };
        let epoch = match outcome {
            Ok(epoch) => {
                assert!(!is_foreign || claim.force && epoch > self.epoch, "I9");
                if is_query && !is_foreign {
                    return assert_eq!(epoch, self.epoch);
                }
                epoch
            }
            Err(ClaimRefused::Write(WriteRefused::Foreign { .. })) => {
                return assert!(is_foreign && !claim.force, "I9");
            }
            // The takeover succeeded before the epoch was refused.
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

    /// Whether the signed request was answered before and its call is over.
    pub(super) fn is_replay(&self, request: &Allocate, now: Millis) -> bool {
        if self.calls.contains_key(&request.call) || self.waiting.contains_key(&request.call) {
            return false;
        }
        let until = request.signed.as_ref().and_then(|it| self.signed.get(&it.fingerprint));
        until.is_some_and(|until| now <= *until)
    }

    /// Records a signed request that must not get another pod.
    pub(super) fn record_signed_request(
        &mut self,
        request: &Allocate,
        outcome: &Result<Allocation, Refusal>,
        now: Millis,
    ) {
        let Some(SignedRequest { fingerprint, window }) = &request.signed else { return };
        let is_used = match outcome {
            Ok(_) => true,
            Err(refusal) => matches!(
                refusal.reason,
                RefusalReason::Waiting { .. }
                    | RefusalReason::CallEnded
                    | RefusalReason::RetriesExhausted
            ),
        };
        if is_used {
            self.signed.insert(fingerprint.clone(), now + window);
        }
    }

    /// A call joined the queue.
    pub(super) fn enqueue(&mut self, call: CallSid, fleet: &Fleet) {
        assert!(!self.calls.contains_key(&call), "{call} waits but has a pod");
        self.arrivals += 1;
        let entry = fleet.queue.get(&call).expect("a waiting call has a queue entry");
        // Reconnects precede all other calls of their priority, in order of arrival.
        let arrival = self.arrivals - if entry.ticket < 0 { 1 << 32 } else { 0 };
        let waiter = Waiter { priority: entry.priority, arrival, pools: entry.pools.clone() };
        assert!(self.waiting.insert(call, waiter).is_none(), "the call waited before");
    }

    /// A handed-off call was requeued.
    pub(super) fn requeue(&mut self, call: &CallSid) {
        let waiter = self.handed.remove(call).expect("the call was handed off");
        self.calls.remove(call);
        self.leases.remove(call);
        // An earlier end of the call counts again: a late stream may still come.
        self.ended.insert(call.clone());
        self.waiting.insert(call.clone(), waiter);
    }

    /// Whether a handed-off call's pod has left service (I5).
    pub(super) fn lost_service(&self, call: &CallSid, fleet: &Fleet) -> bool {
        self.handed.contains_key(call) && !fleet.pods[&self.calls[call]].is_serving()
    }

    /// Reads new hand-offs, and requeues calls whose hand-off failed because the pod left.
    pub(super) fn observe_handoffs(&mut self, fleet: &mut Fleet, now: Millis) {
        let handoffs = fleet.take_handoffs();
        let has_lost_pod =
            |call: &&CallSid| fleet.queue.get(call).is_some() || handoffs.contains(call);
        let requeued: Vec<CallSid> = self.handed.keys().filter(has_lost_pod).cloned().collect();
        requeued.iter().for_each(|call| self.requeue(call));
        for call in handoffs {
            let Some(facts) = fleet.calls.get(&call).cloned() else { continue };
            let Some(waiter) = self.waiting.remove(&call) else {
                panic!("{call} was handed off twice, or did not wait")
            };
            let before = |other: &Waiter| {
                (-other.priority, other.arrival) < (-waiter.priority, waiter.arrival)
            };
            for (other, earlier) in &self.waiting {
                let is_overtaken = before(earlier) && earlier.pools.contains(&facts.pool);
                assert!(!is_overtaken, "{call} overtook {other} for {}", facts.pool);
            }
            self.check_allocation(&facts.pod, &facts.pool, fleet, now);
            self.ended.remove(&call);
            self.leases.insert(call.clone(), facts.until);
            self.calls.insert(call.clone(), facts.pod);
            self.handed.insert(call, waiter);
        }
        for (call, waiter) in &self.waiting {
            for pool in &waiter.pools {
                let is_dialed = waiter.priority > MAX_PRIORITY;
                let held = if is_dialed { 0 } else { outbound::held_in(fleet, pool) };
                let free = free_slots(fleet, pool);
                assert!(free <= held, "{pool} has {free} slots, {held} held, while {call} waits");
            }
        }
        let entries = fleet.queue.len();
        assert_eq!(entries, self.waiting.len(), "a queue entry was lost or added unreported");
    }

    /// I1, I3, I5: the pod may take one more call.
    pub(super) fn check_allocation(&self, pod: &PodName, pool: &Pool, fleet: &Fleet, now: Millis) {
        let facts = &self.pods[pod];
        assert!(facts.ready && !facts.terminating, "I5: {pod} is not in service");
        assert!(self.drains.get(pod).is_none_or(|until| *until <= now), "I5: {pod} is draining");
        let others = self.calls_on(pod);
        match fleet.tiers.kind(pool) {
            Some(TierKind::Shared { max_concurrent, .. }) => {
                assert!(others < max_concurrent as usize, "I3: beyond the cap")
            }
            Some(_) => assert_eq!(others, 0, "I1: {pod} already has a call"),
            None => panic!("{pod} was drawn from {pool}, which is not in the table"),
        }
    }

    pub(super) fn check_state(&self, fleet: &Fleet) {
        let live: BTreeMap<CallSid, PodName> =
            fleet.calls.iter().map(|(sid, call)| (sid.clone(), call.pod.clone())).collect();
        assert_eq!(live, self.calls, "I6: the live calls differ from those that callers know");
        let streams = fleet.calls.iter().filter_map(|(sid, call)| {
            let AttachedStream { gateway, stream, ending, .. } = call.stream.clone()?;
            Some((sid.clone(), Stream { gateway, stream, ending }))
        });
        assert_eq!(streams.collect::<BTreeMap<_, _>>(), self.streams, "I12: streams differ");
        let gateways = fleet.gateways.iter().map(|(id, known)| (id.clone(), known.until));
        assert_eq!(gateways.collect::<BTreeMap<_, _>>(), self.gateways, "gateways differ");
        self.outbound.check_state(fleet);
        let pods: BTreeSet<&PodName> = fleet.pods.keys().collect();
        assert_eq!(pods, self.pods.keys().collect(), "a pod was added or removed unreported");
        for (name, pod) in &fleet.pods {
            let is_draining = self.drains.contains_key(name);
            assert_eq!(pod.draining_until.is_some(), is_draining, "unreported drain of {name}");
        }
    }
}

/// The free call slots of a pool, derived from the facts.
pub(super) fn free_slots(fleet: &Fleet, pool: &Pool) -> usize {
    let cap = match fleet.tiers.kind(pool) {
        Some(TierKind::Shared { max_concurrent, .. }) => max_concurrent as usize,
        Some(_) => 1,
        None => 0,
    };
    let serving = |pod: &&Pod| pod.pool.as_ref() == Some(pool) && pod.is_serving();
    fleet.pods.values().filter(serving).map(|pod| cap.saturating_sub(pod.calls.len())).sum()
}
