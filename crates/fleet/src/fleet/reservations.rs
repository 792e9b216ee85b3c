//! Reservations: capacity for a dial, from its grant until the dial is answered, has failed, is
//! given back or expires.

use serde::{Deserialize, Serialize};

use super::{
    Allocate, Allocation, Change, EventKind, Fleet, Refusal, RefusalReason, calls::Continuation,
    choose_pod::HeldSlots, dial_limits::PlannedDials, events::Event,
};
use crate::{
    Millis,
    merchant::Malformed,
    names::{AccountName, CallSid, MerchantId, PhoneNumber, Pool, ReservationId},
};

/// An outstanding reservation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    pub merchant: MerchantId,
    /// The pool whose slots are held.
    pub pool: Pool,
    /// The number that the call is made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<PhoneNumber>,
    /// The account whose rate limit the dial counts against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<AccountName>,
    /// Probability of an answer at the grant, in units of 1/1024.
    pub probability: u64,
    pub at: Millis,
    pub until: Millis,
    /// The provider's call, once the dialler has reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallSid>,
}

/// A request for reservations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserve {
    /// One id per reservation. The same ids again are a repeat of the same request.
    pub ids: Vec<ReservationId>,
    pub merchant: MerchantId,
    pub number: Option<PhoneNumber>,
    /// The accounts whose rate limit may apply; the first one with a limit counts.
    pub accounts: Vec<AccountName>,
    /// Lifetime of a reservation.
    pub ttl: Millis,
    /// Share of answered dials that may find no pod, in millionths.
    pub miss_target: u32,
}

/// A limit that refuses a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DialLimit {
    /// No pool of the chain has a free slot that is not held, or calls wait for it.
    Capacity,
    /// Free slots are kept for inbound calls.
    InboundReserve,
    /// The merchant's concurrent calls, with its dials.
    MaxCalls,
    /// The lines of the number.
    MaxLines,
    /// The calls per second of the provider account.
    MaxCps,
}

impl DialLimit {
    pub const ALL: [Self; 5] =
        [Self::Capacity, Self::InboundReserve, Self::MaxCalls, Self::MaxLines, Self::MaxCps];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::InboundReserve => "inbound_reserve",
            Self::MaxCalls => "max_calls",
            Self::MaxLines => "max_lines",
            Self::MaxCps => "max_cps",
        }
    }
}

impl std::str::FromStr for DialLimit {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|limit| limit.as_str() == text).ok_or(())
    }
}

/// The result of a request for reservations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// The granted reservations: the first ids of the request. All expire at `until`.
    pub granted: Vec<ReservationId>,
    pub until: Millis,
    /// The limit that refused the others; `None` if none was refused, or for a repeat.
    pub limit: Option<DialLimit>,
    /// Time after which another request may succeed.
    pub retry_after: Millis,
    /// The error in the merchant's document; the default chain applied.
    pub malformed_merchant: Option<Malformed>,
}

/// The reservation was used, has expired, was given back or never existed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("reservation not found")]
pub struct ReservationNotFound;

/// Why a dial was not recorded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialRefused {
    #[error(transparent)]
    NotFound(#[from] ReservationNotFound),
    /// The call is the dial of another outstanding reservation.
    #[error("the call is the dial of reservation {0}")]
    OtherReservation(ReservationId),
    /// The call was answered, with another reservation or without one.
    #[error("the call is in progress: it has another reservation, or none")]
    CallInProgress,
}

/// The effect of a reservation on an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservationUse {
    /// The call took the reserved capacity. It belongs to this merchant.
    Used { merchant: MerchantId },
    /// The request repeats an answer that was refused for lack of a pod. The call belongs to this
    /// merchant, and is served like the first request.
    Repeated { merchant: MerchantId },
    /// No such reservation is outstanding: the call is one without a reservation.
    Unknown,
    /// The reservation is another merchant's: the call is one without a reservation.
    OtherMerchant,
}

impl ReservationUse {
    /// The merchant of the reservation, if the call has one.
    pub fn merchant(&self) -> Option<&MerchantId> {
        match self {
            Self::Used { merchant } | Self::Repeated { merchant } => Some(merchant),
            Self::Unknown | Self::OtherMerchant => None,
        }
    }
}

/// The reason why a reservation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReservationEnd {
    /// A call used it.
    Answered,
    /// The provider reported the end of the dial.
    Unanswered,
    GivenBack,
    Expired,
}

impl ReservationEnd {
    pub const ALL: [Self; 4] = [Self::Answered, Self::Unanswered, Self::GivenBack, Self::Expired];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Unanswered => "unanswered",
            Self::GivenBack => "given_back",
            Self::Expired => "expired",
        }
    }
}

impl Fleet {
    /// Grants as many reservations as the limits allow. Idempotent for the same ids.
    pub fn reserve(&mut self, request: &Reserve, now: Millis) -> Reserved {
        let merchant = self.merchants.get(&request.merchant);
        let malformed_merchant = merchant.and_then(|merchant| merchant.config.clone().err());
        let mut reserved = Reserved {
            granted: Vec::new(),
            until: now + request.ttl,
            limit: None,
            retry_after: 0,
            malformed_merchant,
        };
        let known = request.ids.iter().filter_map(|id| Some((id, self.outbound.get(id)?)));
        for (id, facts) in known {
            reserved.granted.push(id.clone());
            reserved.until = facts.until;
        }
        if !reserved.granted.is_empty() {
            return reserved;
        }
        let plan = self.plan_dials(request, now);
        (reserved.limit, reserved.retry_after) = (plan.limit, plan.retry_after);
        let dials = plan.pools.into_iter().flat_map(|PlannedDials { pool, count, probability }| {
            std::iter::repeat_n((pool, probability), count)
        });
        for (id, (pool, probability)) in request.ids.iter().zip(dials) {
            let facts = Reservation {
                merchant: request.merchant.clone(),
                pool,
                number: request.number.clone(),
                account: plan.account.clone(),
                probability,
                at: now,
                until: reserved.until,
                call: None,
            };
            let (reservation, miss_target) = (id.clone(), request.miss_target);
            self.record(Change::Reserved { reservation, facts, miss_target });
            reserved.granted.push(id.clone());
        }
        reserved
    }

    /// Ties a reservation to the provider's call. It expires `ttl` after the first report of the
    /// dial; a repeat changes nothing.
    pub fn dialed(
        &mut self,
        id: &ReservationId,
        call: &CallSid,
        ttl: Millis,
        now: Millis,
    ) -> Result<Millis, DialRefused> {
        let facts = self.outstanding(id, now).ok_or(ReservationNotFound)?;
        if facts.call.as_ref() == Some(call) {
            return Ok(facts.until);
        }
        if let Some(other) = self.outbound.dial_of(call)
            && self.outstanding(other, now).is_some()
        {
            return Err(DialRefused::OtherReservation(other.clone()));
        }
        if self.calls.contains_key(call) || self.queue.get(call).is_some() {
            return Err(DialRefused::CallInProgress);
        }
        let until = now + ttl;
        let (reservation, call) = (id.clone(), call.clone());
        self.record(Change::Dialed { reservation, call, until });
        Ok(until)
    }

    /// Gives a reservation back.
    pub fn give_back(
        &mut self,
        id: &ReservationId,
        now: Millis,
    ) -> Result<(), ReservationNotFound> {
        self.outstanding(id, now).ok_or(ReservationNotFound)?;
        self.end_reservation(id, ReservationEnd::GivenBack, None, now);
        Ok(())
    }

    /// A reservation that has not expired.
    pub(super) fn outstanding(&self, id: &ReservationId, now: Millis) -> Option<&Reservation> {
        self.outbound.get(id).filter(|facts| facts.until > now)
    }

    /// Ends the reservation of a dial whose provider reports the end of the call. Returns whether
    /// there was one.
    pub(super) fn end_dial(&mut self, call: &CallSid, now: Millis) -> bool {
        let Some(id) = self.outbound.dial_of(call).cloned() else { return false };
        self.end_reservation(&id, ReservationEnd::Unanswered, None, now);
        true
    }

    /// Ends a reservation, and hands the slots that are no longer held to waiting calls. `call` is
    /// the call that used it.
    pub(super) fn end_reservation(
        &mut self,
        id: &ReservationId,
        cause: ReservationEnd,
        call: Option<&CallSid>,
        now: Millis,
    ) {
        let Some(pool) = self.outbound.get(id).map(|facts| facts.pool.clone()) else { return };
        let (reservation, call) = (id.clone(), call.cloned());
        self.record(Change::ReservationEnded { reservation, cause, at: now, call });
        self.hand_off_pool(&pool);
    }

    /// Ends expired reservations, at most `limit`.
    pub(super) fn sweep_reservations(&mut self, limit: usize, now: Millis) -> Vec<ReservationId> {
        let mut expired = Vec::new();
        while expired.len() < limit
            && let Some(id) = self.outbound.overdue(now).cloned()
        {
            self.end_reservation(&id, ReservationEnd::Expired, None, now);
            expired.push(id);
        }
        self.outbound.forget_expired_answers(now);
        expired
    }

    /// Allocates a pod to a new call that names a reservation.
    pub(super) fn allocate_dialed(
        &mut self,
        request: &Allocate,
        id: &ReservationId,
        now: Millis,
    ) -> Result<Allocation, Refusal> {
        let outstanding = self.outstanding(id, now);
        let is_repeat = outstanding.is_none();
        let missed = || self.outbound.missed_answer(&request.call, id, now);
        let (effect, facts) = match outstanding.or_else(missed) {
            None => (ReservationUse::Unknown, None),
            Some(facts) if request.merchant.as_ref().is_some_and(|it| *it != facts.merchant) => {
                (ReservationUse::OtherMerchant, None)
            }
            Some(facts) => {
                let merchant = facts.merchant.clone();
                let effect = match is_repeat {
                    true => ReservationUse::Repeated { merchant },
                    false => ReservationUse::Used { merchant },
                };
                (effect, Some(facts.clone()))
            }
        };
        let outcome = match facts {
            None => self.allocate_new(request, &Continuation::default(), now),
            Some(facts) => self.use_reservation(request, id, &facts, now),
        };
        match outcome {
            Ok(allocation) => Ok(Allocation { reservation: Some(effect), ..allocation }),
            Err(refusal) => Err(Refusal { reservation: Some(effect), ..refusal }),
        }
    }

    /// Allocates a pod to a call whose capacity is reserved: first as its chain says, with the held
    /// slots of the reservation's pool, then any free pod of the chain.
    fn use_reservation(
        &mut self,
        request: &Allocate,
        id: &ReservationId,
        facts: &Reservation,
        now: Millis,
    ) -> Result<Allocation, Refusal> {
        let request = &Allocate { merchant: Some(facts.merchant.clone()), ..request.clone() };
        let merchant = self.merchants.get(&facts.merchant);
        let malformed_merchant = merchant.and_then(|merchant| merchant.config.clone().err());
        let number = facts.number.clone();
        let continuation = Continuation { number, is_dialed: true, ..Continuation::default() };
        let mut chosen = Err(Vec::new());
        for held in [HeldSlots::UsedIn(&facts.pool), HeldSlots::Used] {
            chosen = self.walk_chain(&request.call, request.merchant.as_ref(), None, held);
            if chosen.is_ok() {
                break;
            }
        }
        let is_first = self.outbound.get(id).is_some();
        if is_first {
            let (reservation, call) = (id.clone(), Some(request.call.clone()));
            let cause = ReservationEnd::Answered;
            self.record(Change::ReservationEnded { reservation, cause, at: now, call });
        }
        let outcome = match chosen {
            Ok((pod, pool, tried)) => {
                let choice = (pod, pool, tried, malformed_merchant);
                Ok(self.allocate_pod(request, choice, &continuation, now))
            }
            Err(tried) => {
                let (reason, reservation) = (RefusalReason::NoPods, None);
                let refusal = Refusal { tried, malformed_merchant, reason, reservation };
                Err(self.enqueue(request, refusal, &continuation, now))
            }
        };
        match &outcome {
            Err(refusal) if !matches!(refusal.reason, RefusalReason::Waiting { .. }) => {
                self.outbound.set_missed_answer(request.call.clone(), id.clone(), facts.clone());
            }
            _ => self.outbound.forget_missed_answer(&request.call),
        }
        if is_first {
            self.hand_off_pool(&facts.pool);
        }
        outcome
    }

    /// The event of the end of a reservation.
    pub(super) fn reservation_event(
        &self,
        id: &ReservationId,
        cause: ReservationEnd,
        call: Option<&CallSid>,
        at: Millis,
    ) -> Option<Event> {
        let facts = self.outbound.get(id)?;
        let lasted = at.saturating_sub(facts.at);
        Some(Event {
            call: call.or(facts.call.as_ref()).cloned(),
            ..self
                .event_of_reservation(EventKind::ReservationEnded, facts)
                .with_detail(format!("{id} {} {lasted}", cause.as_str()))
        })
    }

    pub(super) fn event_of_reservation(&self, kind: EventKind, facts: &Reservation) -> Event {
        let merchant = Some(facts.merchant.clone());
        Event { merchant, ..Event::of_pool(kind, &facts.pool) }
    }
}
