//! Media streams: a gateway attaches the stream of a call, keeps its own lease with heartbeats,
//! and detaches the stream, which ends the call.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    Allocate, Call, Change, EndCause, EndedCall, Fleet, NotReleased, Release, Released, Swept,
    change::is_default, pod_health::outcome_of, renew::NotReregistered,
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
    /// The call was released with this cause; the gateway has yet to close and detach the stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ending: Option<EndCause>,
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
    /// The pod that the stream is connected to, if it is: the gateway was cut off from the store,
    /// or the store has lost its data. It gets back a call that ended with the gateway's lease, and
    /// within the re-registration window it registers an unknown call.
    pub connected: Option<PodName>,
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
    /// The call had lost its pod, and no pod is free. For a connected stream: its pod is unknown or
    /// has no free slot.
    #[error("no pod is free")]
    NoPods,
}

/// A report that a stream has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detach {
    pub call: CallSid,
    pub stream: StreamId,
    /// The cause, unless the call was released before.
    pub cause: EndCause,
}

/// The result of a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// Released calls of the gateway, whose streams it has to close.
    pub ending: Vec<CallSid>,
    /// Calls of the gateway in the store: fewer than it relays if the store has lost some.
    pub calls: usize,
}

/// A gateway with its lease and the calls whose streams it relays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Gateway {
    pub(super) until: Millis,
    pub(super) lease: Millis,
    pub(super) calls: BTreeSet<CallSid>,
}

impl Fleet {
    /// Attaches a stream to its call. Idempotent for the same stream. A call whose pod was freed
    /// because no stream came in time gets the same pod if it is free, otherwise another one.
    pub fn attach(&mut self, request: &Attach, now: Millis) -> Result<Attached, AttachRefused> {
        let Some(call) = self.calls.get(&request.call) else {
            self.reallocate_for_stream(request, now)?;
            self.attach_stream(request, now);
            return Ok(Attached { is_reallocated: true, ..self.attached(&request.call) });
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
        let stream = AttachedStream { gateway, stream, since: now, ending: None };
        let until = now + request.lease_ttl;
        self.record(Change::Attached { call: request.call.clone(), stream, until });
    }

    fn attached(&self, call: &CallSid) -> Attached {
        let Call { pod, pool, merchant, .. } = &self.calls[call];
        Attached {
            pod: pod.clone(),
            address: self.pods.get(pod).map(|pod| pod.facts.address.clone()).unwrap_or_default(),
            pool: pool.clone(),
            merchant: merchant.clone(),
            is_reallocated: false,
        }
    }

    /// Allocates a pod to a call that has none, if the stream proves that the call goes on.
    fn reallocate_for_stream(
        &mut self,
        request: &Attach,
        now: Millis,
    ) -> Result<(), AttachRefused> {
        let (pod, pool, merchant) = self.choose_pod_for_stream(request, now)?;
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
                queue_entry: None,
                stream: None,
            },
        });
        Ok(())
    }

    /// The pod of a stream whose call has no pod, its pool, and the merchant.
    fn choose_pod_for_stream(
        &mut self,
        request: &Attach,
        now: Millis,
    ) -> Result<(PodName, Pool, Option<MerchantId>), AttachRefused> {
        let connected = request.connected.as_ref();
        let Some(end) = self.history.get(&request.call, now).cloned() else {
            let pod = connected.ok_or(AttachRefused::NotFound)?;
            return match self.reregistration_pool(&request.call, pod, now) {
                Ok(pool) => Ok((pod.clone(), pool, None)),
                Err(NotReregistered::CallEnded) => Err(AttachRefused::NotFound),
                Err(_) => Err(AttachRefused::NoPods),
            };
        };
        if end.pod_attempt != request.pod_attempt {
            return Err(AttachRefused::OtherAttempt);
        }
        match end.cause {
            EndCause::Unattached => {
                if let Some(pool) = self.pool_with_free_slot(&end.pod) {
                    return Ok((end.pod, pool, end.merchant));
                }
                let (call, lease) = (request.call.clone(), request.lease_ttl);
                let new = Allocate::new(call, end.merchant.clone(), lease);
                let choice = self.choose_pod(&new, true, now);
                let (pod, pool, ..) = choice.map_err(|_| AttachRefused::NoPods)?;
                Ok((pod, pool, end.merchant))
            }
            // The gateway was cut off from the store, and has kept the stream.
            EndCause::Gateway | EndCause::Lease if connected == Some(&end.pod) => {
                let pool = self.pool_below_cap(&end.pod).ok_or(AttachRefused::NoPods)?;
                Ok((end.pod, pool, end.merchant))
            }
            _ => Err(AttachRefused::NotFound),
        }
    }

    /// Ends the call of a stream that has ended. Idempotent: a repeat returns
    /// [`NotReleased::NotFound`].
    pub fn detach(&mut self, request: &Detach, now: Millis) -> Result<Released, NotReleased> {
        let stream = self.calls.get(&request.call).and_then(|call| call.stream.as_ref());
        let Some(stream) = stream.filter(|stream| stream.stream == request.stream) else {
            return Err(NotReleased::NotFound);
        };
        let cause = stream.ending.unwrap_or(request.cause);
        let release = Release { cause, ..Release::new(request.call.clone(), None) };
        self.end_released(&release, now)
    }

    /// Marks an attached call as released; its gateway closes the stream and detaches it.
    pub(super) fn end_stream(&mut self, request: &Release, now: Millis) -> Released {
        let call = &self.calls[&request.call];
        let (name, source_pool) = (call.pod.clone(), call.pool.clone());
        let lasted = now.saturating_sub(call.at);
        if let Some(stream) = call.stream.as_ref().filter(|stream| stream.ending.is_none()) {
            self.ending.push(stream.gateway.clone());
            let (call, cause) = (request.call.clone(), request.cause);
            self.record(Change::Ending { call, cause });
        }
        Released { is_ending: true, ..self.released(name, source_pool, lasted) }
    }

    /// Extends the lease of a gateway.
    pub fn heartbeat(&mut self, gateway: &GatewayId, lease: Millis, now: Millis) -> Heartbeat {
        self.record_heartbeat(gateway, lease, now);
        let Some(known) = self.gateways.get(gateway) else { return Heartbeat::default() };
        let ending = known.calls.iter().filter(|call| self.is_ending(call)).cloned().collect();
        Heartbeat { ending, calls: known.calls.len() }
    }

    pub(super) fn is_ending(&self, call: &CallSid) -> bool {
        let stream = self.calls.get(call).and_then(|call| call.stream.as_ref());
        stream.is_some_and(|stream| stream.ending.is_some())
    }

    fn record_heartbeat(&mut self, gateway: &GatewayId, lease: Millis, now: Millis) {
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

    /// Ends the calls of gateways whose lease has expired, at most `limit`. After a gap without
    /// sweeps every gateway first gets a full lease: it could not send heartbeats either.
    pub(super) fn sweep_gateways(&mut self, limit: usize, now: Millis, swept: &mut Swept) {
        let has_gap = self.swept_at.is_none_or(|at| now > at + SWEEP_GAP);
        self.swept_at = Some(now);
        let leases = self.gateways.iter();
        let leases: Vec<(GatewayId, Millis, Millis)> =
            leases.map(|(id, known)| (id.clone(), known.until, known.lease)).collect();
        let mut due: Vec<(Millis, GatewayId)> = Vec::new();
        for (gateway, before, lease) in leases {
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
        let cause = stream.and_then(|stream| stream.ending).unwrap_or(EndCause::Gateway);
        let ended = self.end(call, cause, now)?;
        self.record_outcome(&ended.pod, outcome_of(cause, ended.lasted), now);
        self.reassign_and_hand_off(&ended.pod);
        Some(ended)
    }
}
