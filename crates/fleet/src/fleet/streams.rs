//! Media streams: a gateway attaches the stream of a call, keeps its own lease with heartbeats,
//! and detaches the stream, which ends the call.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    Call, Change, EndCause, EndedCall, Fleet, NotReleased, PodFailure, Release, Released, Swept,
    change::is_default, choose_pod::HeldSlots, pod_health::outcome_of, renew::NotReregistered,
};
use crate::{
    Millis,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool, StreamId},
    rules::SWEEP_GAP,
};

/// The stream that a gateway relays for a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedStream {
    pub gateway: GatewayId,
    pub stream: StreamId,
    pub since: Millis,
    /// The gateway has an order for the stream: to close and detach it, because the call was
    /// released with this cause or its provider reports the end of the stream, or to fail over
    /// ([`EndCause::Displaced`]).
    #[serde(default, skip_serializing_if = "is_default")]
    pub ending: Option<EndCause>,
}

impl AttachedStream {
    /// The cause of the call's end: that of the release, if the call was released.
    pub(super) fn end_cause(&self, otherwise: EndCause) -> EndCause {
        self.ending.filter(|cause| cause.is_final()).unwrap_or(otherwise)
    }
}

/// A request to attach a stream to its call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attach {
    pub call: CallSid,
    /// The pod attempt that the stream was opened for.
    pub pod_attempt: u32,
    pub gateway: GatewayId,
    /// Lease of the gateway: an attach is a heartbeat.
    pub gateway_lease: Millis,
    pub stream: StreamId,
    pub lease_ttl: Millis,
    /// The stream is connected to a pod: the gateway was cut off from the store, or the store has
    /// lost data. It gets back a call that ended with the gateway's lease, and registers a call of
    /// which the store knows neither the allocation nor the end.
    pub connected: Option<ConnectedStream>,
}

/// An open stream that is attached again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectedStream {
    pub pod: PodName,
    /// Time since it was first attached.
    pub age: Millis,
    /// Pods that it has lost in mid-call.
    pub failovers: u32,
    /// The merchant of its call.
    pub merchant: Option<MerchantId>,
}

/// The pod of an attached stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub pod: PodName,
    /// `host:port`.
    pub address: String,
    pub pool: Pool,
    pub merchant: Option<MerchantId>,
    /// The call had lost its pod, and has one again.
    pub is_reallocated: bool,
    /// Ordinal of the pod in the conversation: 2 and above if the call had another pod before.
    pub ordinal: u32,
    /// Calls that had been given the exclusive pod of this stream meanwhile: they move.
    pub displaced: Vec<CallSid>,
}

/// The reason why a stream was not attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AttachRefused {
    #[error("no such call")]
    NotFound,
    #[error("the call has another pod by now")]
    OtherAttempt,
    #[error("another stream of the call is attached")]
    AlreadyAttached,
    /// The call had lost its pod, and no pod is free. For a connected stream: its pod has no free
    /// slot.
    #[error("no pod is free")]
    NoPods,
    /// The store does not know the pod of a connected stream yet.
    #[error("the store does not know the pod")]
    UnknownPod,
}

/// A report that a stream has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detach {
    pub call: CallSid,
    pub stream: StreamId,
    /// The cause, unless the call was released before.
    pub cause: EndCause,
    pub failure: PodFailure,
}

/// The result of a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// Calls of the gateway with an order for their stream: see [`AttachedStream::ending`].
    pub ending: Vec<(CallSid, EndCause)>,
    /// Calls of the gateway in the store: fewer than it relays if the store has lost some.
    pub calls: usize,
    /// Reported calls that are not calls of the gateway in the store.
    pub unknown: Vec<CallSid>,
}

/// A gateway with its lease and the calls whose streams it relays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Gateway {
    pub(super) until: Millis,
    pub(super) lease: Millis,
    pub(super) calls: BTreeSet<CallSid>,
}

/// The pod for a stream whose call has no pod.
struct ChosenPod {
    pod: PodName,
    pool: Pool,
    merchant: Option<MerchantId>,
    /// Calls that have to leave the pod.
    displaced: Vec<CallSid>,
    /// The displaced calls that wait again.
    requeued: Vec<CallSid>,
}

impl ChosenPod {
    fn new(pod: PodName, pool: Pool, merchant: Option<MerchantId>) -> Self {
        Self { pod, pool, merchant, displaced: Vec::new(), requeued: Vec::new() }
    }
}

impl Fleet {
    /// Attaches a stream to its call. Idempotent for the same stream. A call whose pod was freed
    /// because no stream came in time gets the same pod if it is free, otherwise another one.
    pub fn attach(&mut self, request: &Attach, now: Millis) -> Result<Attached, AttachRefused> {
        let Some(call) = self.calls.get(&request.call) else {
            let displaced = self.reallocate_for_stream(request, now)?;
            self.attach_stream(request, now);
            let attached = self.attached(&request.call);
            return Ok(Attached { is_reallocated: true, displaced, ..attached });
        };
        if call.queue_entry.is_some() {
            return Err(AttachRefused::NotFound);
        }
        if call.pod_attempt != request.pod_attempt {
            return Err(AttachRefused::OtherAttempt);
        }
        match &call.stream {
            Some(attached) if attached.stream != request.stream => {
                return Err(AttachRefused::AlreadyAttached);
            }
            Some(_) => self.record_heartbeat(&request.gateway, request.gateway_lease, now),
            None => self.attach_stream(request, now),
        }
        Ok(self.attached(&request.call))
    }

    fn attach_stream(&mut self, request: &Attach, now: Millis) {
        self.record_heartbeat(&request.gateway, request.gateway_lease, now);
        let (gateway, stream) = (request.gateway.clone(), request.stream.clone());
        let age = request.connected.as_ref().map_or(0, |connected| connected.age);
        let since = now.saturating_sub(age);
        let stream = AttachedStream { gateway, stream, since, ending: None };
        let until = now + request.lease_ttl;
        self.record(Change::Attached { call: request.call.clone(), stream, until });
    }

    pub(super) fn attached(&self, call: &CallSid) -> Attached {
        let Call { pod, pool, merchant, pod_attempt, failovers, .. } = &self.calls[call];
        Attached {
            pod: pod.clone(),
            address: self.pods.get(pod).map(|pod| pod.facts.address.clone()).unwrap_or_default(),
            pool: pool.clone(),
            merchant: merchant.clone(),
            is_reallocated: false,
            ordinal: (*pod_attempt).max(1) + failovers,
            displaced: Vec::new(),
        }
    }

    /// Allocates a pod to a call that has none, if the stream proves that the call goes on. Returns
    /// the calls that have to leave that pod.
    fn reallocate_for_stream(
        &mut self,
        request: &Attach,
        now: Millis,
    ) -> Result<Vec<CallSid>, AttachRefused> {
        let ChosenPod { pod, pool, merchant, displaced, requeued } =
            self.choose_pod_for_stream(request, now)?;
        let number = self.history.get(&request.call, now).and_then(|end| end.number.clone());
        self.leave_queue(&request.call);
        if self.history.contains(&request.call) {
            self.record(Change::CallEndDropped { call: request.call.clone() });
        }
        self.record(Change::Call {
            call: request.call.clone(),
            facts: Call {
                pod,
                pool,
                merchant,
                at: now,
                // The attach that follows begins the lease.
                until: now,
                tried: Vec::new(),
                provisional: false,
                expects_stream: false,
                pod_attempt: request.pod_attempt,
                failovers: request.connected.as_ref().map_or(0, |connected| connected.failovers),
                queue_entry: None,
                stream: None,
                is_returned: true,
                number,
            },
        });
        // Only now: the pod itself must not be handed to them.
        self.hand_off_requeued(requeued);
        Ok(displaced)
    }

    /// The pod for a stream whose call has no pod.
    fn choose_pod_for_stream(
        &mut self,
        request: &Attach,
        now: Millis,
    ) -> Result<ChosenPod, AttachRefused> {
        let connected = request.connected.as_ref();
        let Some(end) = self.history.get(&request.call, now).cloned() else {
            let connected = connected.ok_or(AttachRefused::NotFound)?;
            let merchant = connected.merchant.clone();
            return match self.reregistration_pool(&request.call, &connected.pod, now) {
                Ok(pool) => Ok(ChosenPod::new(connected.pod.clone(), pool, merchant)),
                Err(NotReregistered::CallEnded) => Err(AttachRefused::NotFound),
                Err(NotReregistered::PodUnknown) => Err(AttachRefused::UnknownPod),
                Err(NotReregistered::NoSlot) => self.displace(connected, merchant, now),
            };
        };
        if end.pod_attempt != request.pod_attempt {
            return Err(AttachRefused::OtherAttempt);
        }
        match end.cause {
            EndCause::Unattached => {
                if let Some(pool) = self.pool_with_free_slot(&end.pod) {
                    return Ok(ChosenPod::new(end.pod, pool, end.merchant));
                }
                let choice =
                    self.walk_chain(&request.call, end.merchant.as_ref(), None, HeldSlots::Used);
                let (pod, pool, _) = choice.map_err(|_| AttachRefused::NoPods)?;
                Ok(ChosenPod::new(pod, pool, end.merchant))
            }
            // The gateway was cut off from the store, and has kept the stream.
            EndCause::Gateway | EndCause::Lease => {
                let connected = connected.filter(|connected| connected.pod == end.pod);
                let connected = connected.ok_or(AttachRefused::NotFound)?;
                match self.pool_below_cap(&end.pod) {
                    Some(pool) => Ok(ChosenPod::new(end.pod, pool, end.merchant)),
                    None => self.displace(connected, end.merchant, now),
                }
            }
            _ => Err(AttachRefused::NotFound),
        }
    }

    /// Gives an exclusive pod back to the stream that is connected to it. The calls that were given
    /// the pod since then leave it: their gateways fail over, as after a lost pod. A call that has
    /// no stream yet gets another pod when it comes.
    fn displace(
        &mut self,
        connected: &ConnectedStream,
        merchant: Option<MerchantId>,
        now: Millis,
    ) -> Result<ChosenPod, AttachRefused> {
        let ConnectedStream { pod: name, age, .. } = connected;
        let since = now.saturating_sub(*age);
        let pod = self.pods.get(name).ok_or(AttachRefused::UnknownPod)?;
        let pool = pod.pool.clone().ok_or(AttachRefused::NoPods)?;
        let is_exclusive = self.tiers.kind(&pool).is_none_or(|kind| kind.cap() == 1);
        let is_movable = |call: &CallSid| match &self.calls[call] {
            Call { stream: Some(stream), .. } => stream.ending.is_some() || stream.since > since,
            call => call.expects_stream || call.queue_entry.is_some(),
        };
        let displaced: Vec<CallSid> = pod.calls.iter().cloned().collect();
        if !is_exclusive || !displaced.iter().all(is_movable) {
            return Err(AttachRefused::NoPods);
        }
        let mut requeued = Vec::new();
        for call in &displaced {
            let known = &self.calls[call];
            if let Some(stream) = &known.stream {
                if stream.ending.is_none() {
                    self.ending.push(stream.gateway.clone());
                    self.record(Change::Ending { call: call.clone(), cause: EndCause::Displaced });
                }
            } else if known.expects_stream {
                self.end(call, EndCause::Unattached, now);
            } else if self.requeue(call, now) {
                requeued.push(call.clone());
            }
        }
        Ok(ChosenPod { requeued, displaced, ..ChosenPod::new(name.clone(), pool, merchant) })
    }

    /// Ends the call of a stream that has ended. Idempotent: a repeat returns
    /// [`NotReleased::NotFound`].
    pub fn detach(&mut self, request: &Detach, now: Millis) -> Result<Released, NotReleased> {
        let stream = self.calls.get(&request.call).and_then(|call| call.stream.as_ref());
        let Some(stream) = stream.filter(|stream| stream.stream == request.stream) else {
            return Err(NotReleased::NotFound);
        };
        let cause = stream.end_cause(request.cause);
        self.record_pod_failure(&request.call, &request.failure);
        let release = Release { cause, ..Release::new(request.call.clone(), None) };
        self.end_released(&release, now)
    }

    /// Marks an attached call as released; its gateway closes the stream and detaches it.
    pub(super) fn end_stream(&mut self, request: &Release, now: Millis) -> Released {
        let call = &self.calls[&request.call];
        let (name, source_pool) = (call.pod.clone(), call.pool.clone());
        let lasted = now.saturating_sub(call.at);
        // The first final cause holds.
        let is_new = |ending: Option<EndCause>| match ending {
            None => true,
            Some(known) => !known.is_final() && request.cause.is_final(),
        };
        if let Some(stream) = call.stream.as_ref().filter(|stream| is_new(stream.ending)) {
            self.ending.push(stream.gateway.clone());
            let (call, cause) = (request.call.clone(), request.cause);
            self.record(Change::Ending { call, cause });
        }
        Released { is_ending: true, ..self.released(name, source_pool, lasted) }
    }

    /// Extends the lease of a gateway, which reports some of the calls that it relays.
    pub fn heartbeat(
        &mut self,
        gateway: &GatewayId,
        lease: Millis,
        relayed: &[CallSid],
        now: Millis,
    ) -> Heartbeat {
        self.record_heartbeat(gateway, lease, now);
        let Some(known) = self.gateways.get(gateway) else { return Heartbeat::default() };
        let order = |call: &CallSid| Some((call.clone(), self.ending_of(call)?));
        Heartbeat {
            ending: known.calls.iter().filter_map(order).collect(),
            calls: known.calls.len(),
            unknown: relayed.iter().filter(|call| !known.calls.contains(*call)).cloned().collect(),
        }
    }

    /// The order for the stream of a call.
    fn ending_of(&self, call: &CallSid) -> Option<EndCause> {
        self.calls.get(call)?.stream.as_ref()?.ending
    }

    pub(super) fn is_ending(&self, call: &CallSid) -> bool {
        self.ending_of(call).is_some()
    }

    pub(super) fn record_heartbeat(&mut self, gateway: &GatewayId, lease: Millis, now: Millis) {
        let (gateway, until) = (gateway.clone(), now + lease);
        self.record(Change::Heartbeat { gateway, until, lease });
    }

    /// The key of stream tokens; the first candidate becomes the key.
    pub fn media_secret(&mut self, candidate: &str) -> String {
        if self.media_secret.is_none() {
            self.record(Change::MediaSecret { secret: candidate.to_owned() });
        }
        self.media_secret.clone().unwrap_or_default()
    }

    /// Gateways with newly released calls since the last call.
    pub fn take_ending(&mut self) -> Vec<GatewayId> {
        std::mem::take(&mut self.ending)
    }

    /// Ends the calls of gateways whose lease has expired, at most `limit`. After a time without
    /// sweeps in which a lease could end, the gateway first gets a full lease: it could not send
    /// heartbeats either.
    pub(super) fn sweep_gateways(&mut self, limit: usize, now: Millis, swept: &mut Swept) {
        let swept_at = self.swept_at.replace(now);
        let leases = self.gateways.iter();
        let leases: Vec<(GatewayId, Millis, Millis)> =
            leases.map(|(id, known)| (id.clone(), known.until, known.lease)).collect();
        let mut due: Vec<(Millis, GatewayId)> = Vec::new();
        for (gateway, before, lease) in leases {
            // Heartbeats are at most a third of the lease apart.
            let has_gap = swept_at.is_none_or(|at| now > at + SWEEP_GAP.min(lease * 2 / 3));
            let until = before.max(if has_gap { now + lease } else { 0 });
            if until != before {
                let gateway = gateway.clone();
                self.record(Change::Heartbeat { gateway, until, lease });
            }
            if until <= now {
                due.push((until, gateway));
            }
        }
        due.sort();
        let mut left = limit;
        for (_, gateway) in due {
            let mut calls: Vec<CallSid> =
                self.gateways.get(&gateway).into_iter().flat_map(|it| it.calls.clone()).collect();
            calls.sort_by_key(|call| self.is_ending(call));
            let is_last = calls.len() <= left;
            for call in calls.into_iter().take(left) {
                left -= 1;
                swept.expired.extend(self.end_lost_stream(&call, now));
            }
            if is_last {
                self.record(Change::GatewayGone { gateway });
            }
        }
    }

    /// Ends a call whose gateway is lost.
    fn end_lost_stream(&mut self, call: &CallSid, now: Millis) -> Option<EndedCall> {
        let stream = self.calls.get(call)?.stream.as_ref();
        let cause = stream.map_or(EndCause::Gateway, |it| it.end_cause(EndCause::Gateway));
        let ended = self.end(call, cause, now)?;
        self.record_outcome(&ended.pod, outcome_of(cause, ended.lasted), now);
        self.reassign_and_hand_off(&ended.pod);
        Some(ended)
    }
}
