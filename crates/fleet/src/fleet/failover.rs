//! Failover: a stream whose pod cannot be reached, or is lost in mid-call, moves to another pod in
//! one step. The provider's side of the stream stays open.

use super::{
    Attached, AttachedStream, Change, EndCause, Fleet, PodFailure, SkippedStep,
    choose_pod::HeldSlots, pod_health::outcome_of,
};
use crate::{
    Millis,
    names::{CallSid, GatewayId, PodName, Pool, StreamId},
};

/// A request to move a stream to another pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    pub call: CallSid,
    pub stream: StreamId,
    /// The id of the stream on its next pod: a repeated request finds it and changes nothing.
    pub next: StreamId,
    pub gateway: GatewayId,
    /// Lease of the gateway: a failover is a heartbeat.
    pub gateway_lease: Millis,
    /// [`EndCause::Unreachable`], [`EndCause::PodLost`] or [`EndCause::Displaced`].
    pub cause: EndCause,
    pub failure: PodFailure,
    /// The maximum number of pods that a call may lose in mid-call and go on.
    pub max_retries: u32,
    pub lease_ttl: Millis,
}

/// The reason why a stream was not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FailoverRefused {
    #[error("the stream is not attached")]
    NotFound,
    /// The call was released, or its provider reports the end of the stream: the gateway detaches.
    #[error("the call has ended")]
    Ending,
    /// The call has ended: it has lost as many pods as it may.
    #[error("all retries are used")]
    RetriesExhausted,
    /// The call has ended: no pod is free.
    #[error("no pod is free")]
    NoPods,
}

impl Fleet {
    /// Moves a stream to another pod. The same pod is used again only if no other is free and it
    /// is in service. Idempotent for the same `next`.
    pub fn failover(
        &mut self,
        request: &Failover,
        now: Millis,
    ) -> Result<Attached, FailoverRefused> {
        let call = self.calls.get(&request.call).ok_or(FailoverRefused::NotFound)?;
        let stream = call.stream.as_ref().ok_or(FailoverRefused::NotFound)?;
        if stream.stream == request.next {
            self.record_heartbeat(&request.gateway, request.gateway_lease, now);
            return Ok(self.attached(&request.call));
        }
        if stream.stream != request.stream {
            return Err(FailoverRefused::NotFound);
        }
        if stream.ending.is_some_and(|cause| cause != EndCause::Displaced) {
            return Err(FailoverRefused::Ending);
        }
        let (pod, lasted) = (call.pod.clone(), now.saturating_sub(call.at));
        // A pod that was never reached has not begun a conversation.
        let is_lost = request.cause != EndCause::Unreachable;
        let is_last = is_lost && call.pod_attempt.max(1) + call.failovers > request.max_retries;
        self.record_pod_failure(&request.call, &request.failure);
        self.record_outcome(&pod, outcome_of(request.cause, lasted), now);
        let chosen = if is_last { None } else { self.choose_failover_pod(&request.call, &pod) };
        let Some((next_pod, pool, tried)) = chosen else {
            self.end(&request.call, request.cause, now);
            self.reassign_and_hand_off(&pod);
            return Err(match is_last {
                true => FailoverRefused::RetriesExhausted,
                false => FailoverRefused::NoPods,
            });
        };
        self.record_heartbeat(&request.gateway, request.gateway_lease, now);
        self.record(Change::FailedOver {
            call: request.call.clone(),
            pod: next_pod,
            pool,
            tried,
            stream: request.next.clone(),
            gateway: request.gateway.clone(),
            is_lost,
            until: now + request.lease_ttl,
            cause: request.cause,
        });
        self.reassign_and_hand_off(&pod);
        Ok(self.attached(&request.call))
    }

    /// The next pod of a stream: another one, else the same one if it is in service.
    fn choose_failover_pod(
        &self,
        call: &CallSid,
        pod: &PodName,
    ) -> Option<(PodName, Pool, Vec<SkippedStep>)> {
        let merchant = self.calls[call].merchant.as_ref();
        if let Ok(other) = self.walk_chain(call, merchant, Some(pod), HeldSlots::Used) {
            return Some(other);
        }
        let known = self.pods.get(pod).filter(|known| known.is_serving())?;
        let pool = known.pool.clone().filter(|pool| self.tiers.kind(pool).is_some())?;
        // More than its cap are on the pod while others have to leave it, or after a new table.
        let cap = self.tiers.kind(&pool)?.cap() as usize;
        (known.calls.len() <= cap).then(|| (pod.clone(), pool, Vec::new()))
    }

    /// Moves the stream of a call to a pod.
    pub(super) fn move_stream(&mut self, moved: Moved) {
        let Moved { call, pod, pool, tried, stream, gateway, is_lost, until } = moved;
        self.set_lease(&call, until);
        let Some(known) = self.calls.get_mut(&call) else { return };
        let left = std::mem::replace(&mut known.pod, pod.clone());
        (known.pool, known.tried) = (pool, tried);
        known.failovers += u32::from(is_lost);
        let since = known.stream.as_ref().map_or(until, |stream| stream.since);
        let before = known.stream.replace(AttachedStream {
            gateway: gateway.clone(),
            stream,
            since,
            ending: None,
        });
        if let Some(before) = before
            && let Some(gateway) = self.gateways.get_mut(&before.gateway)
        {
            gateway.calls.remove(&call);
        }
        self.gateways.entry(gateway).or_default().calls.insert(call.clone());
        if left != pod {
            if let Some(known) = self.pods.get_mut(&left) {
                known.calls.remove(&call);
            }
            if let Some(known) = self.pods.get_mut(&pod) {
                known.calls.insert(call);
            }
            self.place(&left);
        }
        self.place(&pod);
    }
}

/// The stream of a call on its next pod.
pub(super) struct Moved {
    pub(super) call: CallSid,
    pub(super) pod: PodName,
    pub(super) pool: Pool,
    pub(super) tried: Vec<SkippedStep>,
    pub(super) stream: StreamId,
    pub(super) gateway: GatewayId,
    pub(super) is_lost: bool,
    pub(super) until: Millis,
}
