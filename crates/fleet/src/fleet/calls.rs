//! Live calls, and their allocation.

use serde::{Deserialize, Serialize};

use super::{
    AttachedStream, Change, EndCause, Fleet, Hold, QueueEntry, Release, SignedRequest, SkipReason,
    SkippedStep, change::is_default, pod_health::early_failure,
};
use crate::{
    Millis,
    merchant::{self, Limit, Malformed},
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::{Strategy, TierKind},
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
    /// The queue entry of a handed-off call, until it accepts the hand-off.
    #[serde(rename = "place", default, skip_serializing_if = "Option::is_none")]
    pub(super) queue_entry: Option<QueueEntry>,
    /// The stream that a gateway relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stream: Option<AttachedStream>,
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
    /// Whether no reconnect is left.
    fn is_last(&self) -> bool {
        self.pod_attempt > self.max_retries
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
        }
    }

    /// The pod attempt that this request begins; 0 if the call may not return.
    pub fn pod_attempt(&self) -> u32 {
        let before = self.previous.as_ref().map_or(0, |previous| previous.pod_attempt);
        if self.may_return { before + 1 } else { 0 }
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
}

/// An allocate request without a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub tried: Vec<SkippedStep>,
    pub malformed_merchant: Option<Malformed>,
    pub reason: RefusalReason,
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

/// Whether a request continues a known call.
#[derive(PartialEq)]
enum Continuation {
    NewCall,
    /// The call has or had a pod, or waits.
    KnownCall,
    /// This request ended the previous attempt, on this pod.
    LeftPod(PodName),
}

/// The chosen pod, its pool, the skipped steps, and the error in the merchant's document.
type Choice = (PodName, Pool, Vec<SkippedStep>, Option<Malformed>);

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
        let refusal = |reason| Refusal { tried: Vec::new(), malformed_merchant: None, reason };
        if self.is_replay(request, now) {
            return Err(refusal(RefusalReason::Replayed));
        }
        let continuation = match &request.previous {
            None => Continuation::NewCall,
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
        let is_reconnect = continuation != Continuation::NewCall;
        let outcome = match self.choose_pod(request, is_reconnect, now) {
            Ok(choice) => Ok(self.allocate_pod(request, choice, is_reconnect, now)),
            Err(refusal) if refusal.reason == RefusalReason::NoPods => {
                Err(self.enqueue(request, refusal, is_reconnect, now))
            }
            Err(refusal) => Err(refusal),
        };
        // The previous pod is handed to waiting calls only now: the call may have needed it again.
        if let Continuation::LeftPod(pod) = continuation {
            self.reassign_and_hand_off(&pod);
        }
        outcome
    }

    /// Settles the previous pod attempt of a call whose stream has ended: ends it if it is still
    /// live, and decides whether the call may have another pod.
    fn settle_previous(
        &mut self,
        call: &CallSid,
        previous: &PreviousPod,
        now: Millis,
    ) -> Result<Continuation, RefusalReason> {
        if let Some(live) = self.calls.get(call) {
            let is_current = live.pod == previous.pod && live.pod_attempt == previous.pod_attempt;
            if !is_current || live.queue_entry.is_some() {
                return Ok(Continuation::KnownCall);
            }
            if !previous.is_settled {
                return Err(RefusalReason::Unsettled);
            }
            if live.stream.is_some() {
                // The pod serves the stream until the gateway detaches it.
                let cause = EndCause::Stream;
                self.end_stream(&Release { cause, ..Release::new(call.clone(), None) }, now);
                return Err(RefusalReason::CallEnded);
            }
            if let Some(ended) = self.end(call, EndCause::Broken, now) {
                self.record_outcome(&ended.pod, early_failure(ended.lasted), now);
                if previous.is_last() {
                    self.reassign_and_hand_off(&ended.pod);
                    return Err(RefusalReason::RetriesExhausted);
                }
                self.assign_pool(&ended.pod);
                return Ok(Continuation::LeftPod(ended.pod));
            }
        }
        if self.queue.get(call).is_some() {
            return Ok(Continuation::KnownCall);
        }
        // A call without history is new.
        let mut continuation = Continuation::NewCall;
        if let Some(end) = self.history.get(call, now) {
            continuation = Continuation::KnownCall;
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
        }
        if previous.is_last() { Err(RefusalReason::RetriesExhausted) } else { Ok(continuation) }
    }

    /// Allocates the chosen pod to the call.
    fn allocate_pod(
        &mut self,
        request: &Allocate,
        choice: Choice,
        is_reconnect: bool,
        now: Millis,
    ) -> Allocation {
        let (pod, pool, tried, malformed_merchant) = choice;
        if !is_reconnect {
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
            pod_attempt: request.pod_attempt(),
            queue_entry: None,
            stream: None,
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

    /// Walks the chain to the first free pod. A reconnect gets its previous pod again only if no
    /// other pod is free.
    pub(super) fn choose_pod(
        &self,
        request: &Allocate,
        is_reconnect: bool,
        now: Millis,
    ) -> Result<Choice, Refusal> {
        let merchant = request.merchant.as_ref().and_then(|id| self.merchants.get(id));
        let malformed_merchant = merchant.and_then(|merchant| merchant.config.clone().err());
        let refusal = |tried, reason| Refusal {
            tried,
            malformed_merchant: malformed_merchant.clone(),
            reason,
        };
        if !is_reconnect && let Some(limit) = self.exceeded_limit(request, now) {
            return Err(refusal(Vec::new(), RefusalReason::Limit(limit)));
        }
        let mut tried = Vec::new();
        let config = self.merchant_config_of(request.merchant.as_ref());
        let avoided = request.previous.as_ref().map(|previous| Some(&previous.pod));
        for avoid in avoided.into_iter().chain([None]) {
            tried.clear();
            for step in merchant::chain(&self.tiers, config) {
                let drawn = match self.tiers.resolve(step) {
                    None => Err(SkipReason::Unknown),
                    Some(pool) => {
                        self.draw(&pool, avoid, &request.call).map(|pod| (pod.clone(), pool))
                    }
                };
                match drawn {
                    Ok((pod, pool)) => return Ok((pod, pool, tried, malformed_merchant)),
                    Err(reason) => tried.push(SkippedStep { step: step.clone(), reason }),
                }
            }
        }
        Err(refusal(tried, RefusalReason::NoPods))
    }

    /// The pod of a pool that takes the next call.
    pub(super) fn draw(
        &self,
        pool: &Pool,
        avoid: Option<&PodName>,
        call: &CallSid,
    ) -> Result<&PodName, SkipReason> {
        let index = self.pools.get(pool).ok_or(SkipReason::Empty)?;
        let (cap, is_pack) = match self.tiers.kind(pool) {
            None => return Err(SkipReason::Unknown),
            Some(TierKind::Exclusive | TierKind::Dedicated) => (1, false),
            Some(TierKind::Shared { max_concurrent, strategy }) => {
                (max_concurrent as usize, strategy == Strategy::Pack)
            }
        };
        let mut candidates =
            index.available.range(..(cap, 0)).filter(|(_, pod)| Some(*pod) != avoid);
        let drawn = if is_pack { candidates.next_back() } else { candidates.next() };
        let Some(((calls, _), drawn)) = drawn else {
            return Err(match (index.in_service(), index.leaving) {
                (0, 0) => SkipReason::Empty,
                (0, _) => SkipReason::AllDraining,
                _ => SkipReason::AtCapacity,
            });
        };
        let Some(preferred) = self.preferred.get(call) else { return Ok(drawn) };
        let equivalent = index.available.range((*calls, 0)..(*calls + 1, 0)).map(|(_, pod)| pod);
        Ok(equivalent
            .filter(|pod| Some(*pod) != avoid)
            .find(|pod| *pod == preferred)
            .unwrap_or(drawn))
    }
}
