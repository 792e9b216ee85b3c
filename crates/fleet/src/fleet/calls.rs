//! Live calls, and their allocation.

use serde::{Deserialize, Serialize};

use super::{
    AttachedStream, Change, EndCause, Fleet, Hold, QueueEntry, Release, ReservationUse,
    SignedRequest, SkippedStep, change::is_default, pod_health::early_failure,
};
use crate::{
    Millis,
    merchant::{Limit, Malformed},
    names::{CallSid, MerchantId, PhoneNumber, PodName, Pool, ReservationId},
};

/// A live call and the deadline of its lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub(super) pod: PodName,
    /// The pool from which the pod was allocated.
    pub(super) pool: Pool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) merchant: Option<MerchantId>,
    pub(super) at: Millis,
    pub(super) until: Millis,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) tried: Vec<SkippedStep>,
    /// The stream has not started yet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) provisional: bool,
    /// The stream of a provisional call comes through a gateway.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) expects_stream: bool,
    /// Ordinal of the pod that the call has been given; 0 if the call may not return.
    #[serde(rename = "attempts", default, skip_serializing_if = "is_default")]
    pub(super) pod_attempt: u32,
    /// Pods that the stream has lost in mid-call since that pod attempt began.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) failovers: u32,
    /// The queue entry of a handed-off call, until it accepts the hand-off.
    #[serde(rename = "place", default, skip_serializing_if = "Option::is_none")]
    pub(super) queue_entry: Option<QueueEntry>,
    /// The stream that a gateway relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stream: Option<AttachedStream>,
    /// The call is no new one: the store had lost it or ended it early.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) is_returned: bool,
    /// The number whose line the call uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) number: Option<PhoneNumber>,
}

impl Call {
    pub(super) fn allocation(&self) -> Allocation {
        Allocation {
            pod: self.pod.clone(),
            pool: self.pool.clone(),
            was_existing: true,
            tried: self.tried.clone(),
            malformed_merchant: None,
            pod_attempt: self.pod_attempt,
            waited: None,
            reservation: None,
        }
    }
}

/// A request for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocate {
    pub call: CallSid,
    pub merchant: Option<MerchantId>,
    pub lease_ttl: Millis,
    /// The allocation is provisional: its lease is short until the stream starts.
    pub provisional: bool,
    /// The stream of a provisional call comes through a gateway, which attaches it.
    pub expects_stream: bool,
    /// The call may reconnect after its stream ends, so its end is recorded in the call history.
    pub may_return: bool,
    /// Terms under which the call may wait; `None` refuses it at once.
    pub hold: Option<Hold>,
    /// The pod whose stream has ended, for a reconnect.
    pub previous: Option<PreviousPod>,
    /// The provider's signature, for replay protection.
    pub signed: Option<SignedRequest>,
    /// The reservation of a dial that was answered.
    pub reservation: Option<ReservationId>,
    /// The numbers of the call: the first one with a `max_lines` is the one whose line it uses.
    pub numbers: Vec<PhoneNumber>,
}

/// The pod attempt before a reconnect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviousPod {
    pub pod: PodName,
    pub pod_attempt: u32,
    /// The cause of the stream's end is settled: no further report is awaited.
    pub is_settled: bool,
    /// The maximum number of reconnects per call.
    pub max_retries: u32,
}

impl PreviousPod {
    /// Whether no reconnect is left after `failovers` of this pod attempt.
    fn is_last(&self, failovers: u32) -> bool {
        self.pod_attempt.max(1) + failovers > self.max_retries
    }
}

impl Allocate {
    /// A request without options.
    pub fn new(call: CallSid, merchant: Option<MerchantId>, lease_ttl: Millis) -> Self {
        Self {
            call,
            merchant,
            lease_ttl,
            provisional: false,
            expects_stream: false,
            may_return: false,
            hold: None,
            previous: None,
            signed: None,
            reservation: None,
            numbers: Vec::new(),
        }
    }

    /// The pod attempt that this request begins, after `failovers` of the previous one; 0 if the
    /// call may not return.
    pub fn pod_attempt(&self, failovers: u32) -> u32 {
        let before = self.previous.as_ref().map_or(0, |previous| previous.pod_attempt.max(1));
        if self.may_return { before + failovers + 1 } else { 0 }
    }
}

/// The pod of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    pub pod: PodName,
    pub pool: Pool,
    /// The call already had this pod: an idempotent repeat.
    pub was_existing: bool,
    /// The chain steps before it that had no free pod.
    pub tried: Vec<SkippedStep>,
    /// The error in the merchant's document; the call took the default chain.
    pub malformed_merchant: Option<Malformed>,
    /// Ordinal of the pod that the call has been given; 0 if the call may not return.
    pub pod_attempt: u32,
    /// Time in the queue, for an accepted hand-off.
    pub waited: Option<Millis>,
    /// The effect of the request's reservation; `None` without one, and for a repeat.
    pub reservation: Option<ReservationUse>,
}

/// An allocate request without a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub tried: Vec<SkippedStep>,
    pub malformed_merchant: Option<Malformed>,
    pub reason: RefusalReason,
    /// The effect of the request's reservation; `None` without one.
    pub reservation: Option<ReservationUse>,
}

/// The reason for a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// No pool of the chain has a free pod.
    NoPods,
    /// The merchant's limit is reached; no chain step was tried.
    Limit(Limit),
    /// No pod is free, and the queue is full.
    QueueFull,
    /// The hold time is over.
    HoldExpired { waited: Millis },
    /// The call waits in the queue until `until`.
    Waiting { is_new: bool, until: Millis },
    /// The call is over; it does not reconnect.
    CallEnded,
    /// The stream ended, and its cause is not settled yet; the caller asks again.
    Unsettled,
    /// The call has used all its reconnects.
    RetriesExhausted,
    /// The signed request was answered before, and its call is over.
    Replayed,
}

impl RefusalReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoPods => "no_pods",
            Self::Limit(limit) => limit.as_str(),
            Self::QueueFull => "queue_full",
            Self::HoldExpired { .. } => "time_over",
            Self::Waiting { .. } => "waiting",
            Self::CallEnded => "over",
            Self::Unsettled => "unsettled",
            Self::RetriesExhausted => "spent",
            Self::Replayed => "replayed",
        }
    }
}

/// How a request continues a call; the default is a new call.
#[derive(Default)]
pub(super) struct Continuation {
    /// The call has or had a pod, or waits.
    pub(super) is_known: bool,
    /// The pod of the previous attempt, which this request ended.
    pub(super) left: Option<PodName>,
    /// The pod that gets the call again if it can: the stream ended, and not because of the pod.
    pub(super) keeps: Option<PodName>,
    /// Failovers of the previous pod attempt.
    pub(super) failovers: u32,
    /// The number whose line the call uses: of the previous pod attempt, or of its reservation.
    pub(super) number: Option<PhoneNumber>,
    /// The call is a dial with a reservation: its limits were checked at the grant.
    pub(super) is_dialed: bool,
}

/// The chosen pod, its pool, the skipped steps, and the error in the merchant's document.
pub(super) type Choice = (PodName, Pool, Vec<SkippedStep>, Option<Malformed>);

impl Fleet {
    /// Allocates a pod to the call. Idempotent: a live call keeps its pod.
    pub fn allocate(&mut self, request: &Allocate, now: Millis) -> Result<Allocation, Refusal> {
        let outcome = self.try_allocate(request, now);
        self.record_signed_request(request, &outcome, now);
        if let Err(refusal) = &outcome {
            self.record_refusal(request, refusal);
        }
        outcome
    }

    fn try_allocate(&mut self, request: &Allocate, now: Millis) -> Result<Allocation, Refusal> {
        let refusal = |reason| Refusal {
            tried: Vec::new(),
            malformed_merchant: None,
            reason,
            reservation: None,
        };
        if self.is_replay(request, now) {
            return Err(refusal(RefusalReason::Replayed));
        }
        let continuation = match &request.previous {
            None => Continuation::default(),
            Some(previous) => {
                self.settle_previous(&request.call, previous, now).map_err(refusal)?
            }
        };
        if let Some(allocation) = self.accept_handoff(request, now) {
            return Ok(allocation);
        }
        if let Some(call) = self.calls.get(&request.call) {
            let allocation = call.allocation();
            if call.provisional && request.provisional {
                // The repeated answer opens a new stream, which gets the full connect timeout.
                let until = now + request.lease_ttl;
                self.record(Change::PendingExtended { call: request.call.clone(), until });
            }
            return Ok(allocation);
        }
        if let Some(refusal) = self.poll_queue(request, now) {
            return Err(refusal);
        }
        if let Some(id) = request.reservation.as_ref().filter(|_| request.previous.is_none()) {
            return self.allocate_dialed(request, id, now);
        }
        let outcome = self.allocate_new(request, &continuation, now);
        // The previous pod is handed to waiting calls only now: the call may have needed it again.
        if let Some(pod) = continuation.left {
            self.reassign_and_hand_off(&pod);
        }
        outcome
    }

    /// Allocates a pod to a call that has none, or enqueues the call.
    pub(super) fn allocate_new(
        &mut self,
        request: &Allocate,
        continuation: &Continuation,
        now: Millis,
    ) -> Result<Allocation, Refusal> {
        match self.choose_pod(request, continuation, now) {
            Ok(choice) => Ok(self.allocate_pod(request, choice, continuation, now)),
            Err(refusal) if refusal.reason == RefusalReason::NoPods => {
                Err(self.enqueue(request, refusal, continuation, now))
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Settles the previous pod attempt of a call whose stream has ended: ends it if it is still
    /// live, and decides whether the call may have another pod.
    fn settle_previous(
        &mut self,
        call: &CallSid,
        previous: &PreviousPod,
        now: Millis,
    ) -> Result<Continuation, RefusalReason> {
        let known = Continuation { is_known: true, ..Continuation::default() };
        if let Some(live) = self.calls.get(call) {
            // A failover, or a stream that came late, changes the pod of a pod attempt.
            let has_gateway = live.stream.is_some() || live.expects_stream;
            let is_current = live.pod_attempt == previous.pod_attempt
                && (has_gateway || live.pod == previous.pod);
            if !is_current || live.queue_entry.is_some() {
                return Ok(known);
            }
            if has_gateway {
                return self.settle_stream(call, previous, now);
            }
            if !previous.is_settled {
                return Err(RefusalReason::Unsettled);
            }
            let number = live.number.clone();
            if let Some(ended) = self.end(call, EndCause::Broken, now) {
                self.record_outcome(&ended.pod, early_failure(ended.lasted), now);
                if previous.is_last(0) {
                    self.reassign_and_hand_off(&ended.pod);
                    return Err(RefusalReason::RetriesExhausted);
                }
                self.assign_pool(&ended.pod);
                return Ok(Continuation { left: Some(ended.pod), number, ..known });
            }
        }
        if self.queue.get(call).is_some() {
            return Ok(known);
        }
        let Some(end) = self.history.get(call, now).cloned() else {
            // A call without history is new.
            let is_last = previous.is_last(0);
            let new = Continuation::default();
            return if is_last { Err(RefusalReason::RetriesExhausted) } else { Ok(new) };
        };
        if end.pod_attempt != previous.pod_attempt || end.cause.is_final() {
            return Err(RefusalReason::CallEnded);
        }
        if end.cause.may_be_updated() && !previous.is_settled {
            return Err(RefusalReason::Unsettled);
        }
        if end.cause == EndCause::Stream {
            let end = super::CallEnd { cause: EndCause::Broken, ..end.clone() };
            let (pod, lasted) = (end.pod.clone(), end.lasted);
            self.record(Change::CallEndRecorded { call: call.clone(), end });
            self.record_outcome(&pod, early_failure(lasted), now);
        }
        if previous.is_last(end.failovers) {
            return Err(RefusalReason::RetriesExhausted);
        }
        let is_pod_fine = matches!(end.cause, EndCause::Gateway | EndCause::Unattached);
        let keeps = is_pod_fine.then_some(end.pod);
        let (failovers, number) = (end.failovers, end.number);
        Ok(Continuation { keeps, failovers, number, ..known })
    }

    /// Settles the pod attempt of a live call whose stream a gateway relays, or was to relay. Only
    /// the gateway knows how the stream ended: it is asked, and counts as lost if it does not
    /// answer in time. The pod has not failed, and keeps the call.
    fn settle_stream(
        &mut self,
        call: &CallSid,
        previous: &PreviousPod,
        now: Millis,
    ) -> Result<Continuation, RefusalReason> {
        let known = Continuation { is_known: true, ..Continuation::default() };
        let live = &self.calls[call];
        let (failovers, mut cause) = (live.failovers, EndCause::Unattached);
        if let Some(stream) = &live.stream {
            if stream.ending.is_some_and(EndCause::is_final) {
                return Err(RefusalReason::CallEnded);
            }
            if !previous.is_settled {
                let cause = EndCause::Stream;
                self.end_stream(&Release { cause, ..Release::new(call.clone(), None) }, now);
                return Err(RefusalReason::Unsettled);
            }
            cause = EndCause::Gateway;
        }
        let (pod, number) = (live.pod.clone(), live.number.clone());
        self.end(call, cause, now);
        if previous.is_last(failovers) {
            self.reassign_and_hand_off(&pod);
            return Err(RefusalReason::RetriesExhausted);
        }
        self.assign_pool(&pod);
        let (left, keeps) = (Some(pod.clone()), Some(pod));
        Ok(Continuation { left, keeps, failovers, number, ..known })
    }

    /// Allocates the chosen pod to the call.
    pub(super) fn allocate_pod(
        &mut self,
        request: &Allocate,
        choice: Choice,
        continuation: &Continuation,
        now: Millis,
    ) -> Allocation {
        let (pod, pool, tried, malformed_merchant) = choice;
        if !continuation.is_known && !continuation.is_dialed {
            self.count_admission(request, now);
        }
        let facts = Call {
            pod,
            pool,
            merchant: request.merchant.clone(),
            at: now,
            until: now + request.lease_ttl,
            tried,
            provisional: request.provisional,
            expects_stream: request.provisional && request.expects_stream,
            pod_attempt: request.pod_attempt(continuation.failovers),
            failovers: 0,
            queue_entry: None,
            stream: None,
            is_returned: false,
            number: self.number_of(request, continuation),
        };
        let allocation =
            Allocation { was_existing: false, malformed_merchant, ..facts.allocation() };
        self.record(Change::Call { call: request.call.clone(), facts });
        self.drop_call_end(request);
        allocation
    }

    /// Drops the recorded end of a call whose new stream is still to start: a confirmation of the
    /// new stream must not match the old end.
    pub(super) fn drop_call_end(&mut self, request: &Allocate) {
        if request.provisional && self.history.contains(&request.call) {
            self.record(Change::CallEndDropped { call: request.call.clone() });
        }
    }
}
