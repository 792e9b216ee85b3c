//! The event log: one event per change that matters to operators.

use std::{collections::VecDeque, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Call, Fleet, Refusal, RefusalReason, ReservationUse, SkippedStep, calls::Allocate};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool},
};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $text:literal)*) => {
        /// The kind of an event.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum EventKind {
            $($(#[$doc])* #[serde(rename = $text)] $kind,)*
        }

        impl EventKind {
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$kind => $text,)* }
            }
        }
    };
}

kinds! {
    /// A pod was allocated to a call; detail: the skipped steps, or `returned`.
    Allocated "allocated"
    /// A free pod was handed off to a waiting call.
    HandedOff "handed"
    /// A call accepted its hand-off.
    HandoffAccepted "fetched"
    /// The stream of a provisional call has started.
    Confirmed "confirmed"
    /// A gateway attached the stream of a call; detail: the gateway.
    Attached "attached"
    /// The gateway of a call has to close its stream, or to fail over; detail: the cause.
    Ending "ending"
    /// The stream of a call moved to another pod; detail: the cause and the former pod.
    FailedOver "failed_over"
    /// A pod could not be connected to the stream of its call, or was lost; detail: the reason.
    PodFailed "pod_failed"
    /// A call joined the queue; detail: the skipped steps.
    Waiting "waiting"
    /// A call left the queue without a pod.
    LeftQueue "left"
    /// A call was refused; detail: the reason and the skipped steps.
    Refused "refused"
    /// A call ended; detail: the cause and its duration (ms).
    Ended "ended"
    /// A pod is draining; detail: until when (s), and `surplus` if no request asked for it.
    Drained "drained"
    Undrained "undrained"
    /// A pod is new or replaced; detail: its address.
    Joined "joined"
    Ready "ready"
    NotReady "not_ready"
    Terminating "terminating"
    Gone "gone"
    /// A pod was assigned to a pool.
    Moved "moved"
    /// A pod was quarantined after failures; detail: until when (s).
    Quarantined "quarantined"
    /// A quarantine ended.
    Restored "restored"
    /// A new leader or a new list of pods; detail: its fencing epoch.
    Leader "leader"
    /// The origin of the pods changed; detail: the new origin.
    Origin "origin"
    /// A different tier table is in force.
    Tiers "tiers"
    /// The number of pods of a workload changed, or would have; detail: the workload, the number
    /// before and after, the reason, and `dry_run` if nothing was written.
    Scaled "scaled"
    MerchantSet "merchant_set"
    MerchantDeleted "merchant_deleted"
    /// The number of pods that a pool should have changed; detail: the new number, the one before,
    /// and the reason.
    Desired "desired"
    /// A prescale order; detail: pods, until when (s), and by whom.
    PrescaleSet "prescale_set"
    /// A prescale order was deleted; detail: pods, and by whom.
    PrescaleDeleted "prescale_deleted"
    /// Capacity was reserved for a dial; detail: the reservation and its number.
    Reserved "reserved"
    /// The dialler reported the provider's call of a reservation; detail: the reservation.
    Dialed "dialed"
    /// A reservation ended; detail: the reservation, the cause and its duration (ms).
    ReservationEnded "reservation_ended"
    /// The limit of lines of a number was set; detail: the number, the limit and by whom.
    NumberSet "number_set"
    /// The limit of lines of a number was deleted; detail: the number and by whom.
    NumberDeleted "number_deleted"
    /// The rate limit of an account was set; detail: the account, the limit and by whom.
    AccountSet "account_set"
    /// The rate limit of an account was deleted; detail: the account and by whom.
    AccountDeleted "account_deleted"
}

impl FromStr for EventKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.iter().copied().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// An event and its subjects.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Event {
    pub kind: EventKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallSid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merchant: Option<MerchantId>,
    /// Further information; its format depends on the kind.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Event {
    pub(super) fn new(kind: EventKind) -> Self {
        Self { kind, call: None, pod: None, pool: None, merchant: None, detail: String::new() }
    }

    pub(super) fn of_call(kind: EventKind, call: &CallSid, merchant: Option<&MerchantId>) -> Self {
        Self { call: Some(call.clone()), merchant: merchant.cloned(), ..Self::new(kind) }
    }

    pub(super) fn of_live_call(kind: EventKind, call: &CallSid, facts: &Call) -> Self {
        let pod = Some(facts.pod.clone());
        Self { pod, ..Self::of_call(kind, call, facts.merchant.as_ref()) }
    }

    pub(super) fn of_pod(kind: EventKind, pod: &PodName) -> Self {
        Self { pod: Some(pod.clone()), ..Self::new(kind) }
    }

    pub(super) fn of_pool(kind: EventKind, pool: &Pool) -> Self {
        Self { pool: Some(pool.clone()), ..Self::new(kind) }
    }

    pub(super) fn with_detail(self, detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..self }
    }

    /// Parses an event of the Redis stream: call, pod, pool, merchant and detail, separated by
    /// spaces. `None` for an unknown kind.
    pub fn read(kind: &str, text: &str) -> Option<Self> {
        let mut parts = text.splitn(5, ' ');
        let mut next = || parts.next().unwrap_or_default();
        Some(Self {
            kind: kind.parse().ok()?,
            call: next().parse().ok(),
            pod: next().parse().ok(),
            pool: next().parse().ok(),
            merchant: next().parse().ok(),
            detail: next().to_owned(),
        })
    }
}

/// Detail of the allocation of a call that the store had lost or ended early: no new call.
pub const RETURNED: &str = "returned";

/// Id of an event: its time (ms) and a sequence number within that time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct EventId {
    pub at: Millis,
    pub number: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}-{}", self.at, self.number)
    }
}

impl FromStr for EventId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (at, number) = text.split_once('-').ok_or(())?;
        let parse = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten().ok_or(())
        };
        let id = Self { at: parse(at)?, number: parse(number)? };
        // Rejects the maximum time: no id could follow it.
        if id.at < Millis::MAX { Ok(id) } else { Err(()) }
    }
}

/// An event with its id and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedEvent {
    pub id: EventId,
    /// The time of the event (ms). Earlier than the time in its id after the clock was set back:
    /// ids only increase.
    pub at: Millis,
    pub event: Event,
}

/// The latest events, up to a capacity.
#[derive(Debug)]
pub struct EventLog {
    events: VecDeque<LoggedEvent>,
    capacity: usize,
    last_id: EventId,
}

impl EventLog {
    pub fn with_capacity(capacity: usize) -> Self {
        Self { events: VecDeque::new(), capacity, last_id: EventId::default() }
    }

    pub fn push(&mut self, event: Event, now: Millis) {
        if self.capacity == 0 {
            return;
        }
        self.last_id = if now > self.last_id.at {
            EventId { at: now, number: 0 }
        } else {
            EventId { number: self.last_id.number + 1, ..self.last_id }
        };
        if self.events.len() == self.capacity {
            self.events.pop_front();
        }
        self.events.push_back(LoggedEvent { id: self.last_id, at: now, event });
    }

    /// The first events after `id`.
    pub fn after(&self, id: EventId, limit: usize) -> Vec<LoggedEvent> {
        let from = self.events.partition_point(|logged| logged.id <= id);
        self.events.range(from..).take(limit).cloned().collect()
    }

    /// The last events before `id` (`None`: before the end), the latest first.
    pub fn before(&self, id: Option<EventId>, limit: usize) -> Vec<LoggedEvent> {
        let to = id.map_or(self.events.len(), |id| self.events.partition_point(|it| it.id < id));
        self.events.range(..to).rev().take(limit).cloned().collect()
    }
}

/// Formats skipped steps: `gold=at_capacity basic=empty`.
pub(super) fn skipped_text(skipped: &[SkippedStep]) -> String {
    let steps: Vec<String> =
        skipped.iter().map(|it| format!("{}={}", it.step, it.reason.as_str())).collect();
    steps.join(" ")
}

impl Fleet {
    /// Starts to collect events for [`Fleet::take_events`].
    pub fn enable_events(&mut self) {
        self.events = Some(Vec::new());
    }

    /// The events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn record_event(&mut self, event: impl FnOnce(&Self) -> Option<Event>) {
        let Some(mut events) = self.events.take() else { return };
        events.extend(event(self));
        self.events = Some(events);
    }

    /// Records the refusal of a call, unless the caller asks again for the result.
    pub(super) fn record_refusal(&mut self, request: &Allocate, refusal: &Refusal) {
        if matches!(refusal.reason, RefusalReason::Waiting { .. } | RefusalReason::Unsettled) {
            return;
        }
        let steps = skipped_text(&refusal.tried);
        let reason = refusal.reason.as_str();
        let detail = if steps.is_empty() { reason.to_owned() } else { format!("{reason} {steps}") };
        let reserved = refusal.reservation.as_ref().and_then(ReservationUse::merchant);
        let merchant = reserved.or(request.merchant.as_ref());
        let event = Event::of_call(EventKind::Refused, &request.call, merchant);
        self.record_event(|_| Some(event.with_detail(detail)));
    }
}
