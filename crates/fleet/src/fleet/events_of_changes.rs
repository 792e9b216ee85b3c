//! The events of changes, for the event log.

use std::fmt::Display;

use super::{
    Call, Change, EndCause, Fleet, PodFacts, QueueEntry,
    events::{Event, EventKind, RETURNED, skipped_text},
    reservations::Reservation,
};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName, Pool, ReservationId},
};

impl Fleet {
    /// The event of a change, derived from the facts before the change; `None` for changes without
    /// an event.
    pub(super) fn event_of(&self, change: &Change) -> Option<Event> {
        match change {
            Change::Call { call, facts } => Some(allocation_event(call, facts)),
            Change::HandoffAccepted { call, .. } => self.accepted_event(call),
            Change::Renewed { call, .. } => self.confirmed_event(call),
            Change::Attached { call, stream, .. } => {
                self.call_event(EventKind::Attached, call, stream.gateway.as_str())
            }
            Change::Ending { call, cause } => {
                self.call_event(EventKind::Ending, call, cause.as_str())
            }
            Change::FailedOver { call, pod, pool, cause, .. } => {
                self.failover_event(call, pod, pool, *cause)
            }
            Change::Ended { call, at, cause } => self.ended_event(call, *at, *cause),
            Change::Queued { call, entry } => Some(waiting_event(call, entry)),
            Change::LeftQueue { call } => self.left_queue_event(call),
            Change::Draining { pod, until, surplus } => self.drain_event(pod, *until, *surplus),
            Change::Pod { pod, facts } => self.pod_event(pod, facts),
            Change::PoolAssigned { pod, pool } => {
                Some(Event { pool: Some(pool.clone()), ..Event::of_pod(EventKind::Moved, pod) })
            }
            Change::Gone { pod } => Some(Event::of_pod(EventKind::Gone, pod)),
            Change::Health { pod, quarantined_until, .. } => {
                self.quarantine_event(pod, *quarantined_until)
            }
            Change::Epoch { epoch } => Some(event(EventKind::Leader, epoch)),
            Change::Origin { origin } => Some(event(EventKind::Origin, origin)),
            Change::Tiers { by, .. } => Some(event(EventKind::Tiers, by)),
            Change::Merchant { id, document, by } => {
                Some(merchant_event(id, document.is_some(), by))
            }
            Change::Prescale { order, by } => {
                let detail = format!("{} {} {by}", order.pods, order.until / 1_000);
                Some(Event::of_pool(EventKind::PrescaleSet, &order.pool).with_detail(detail))
            }
            Change::PrescaleDeleted { id, by } => {
                let order = self.capacity.order(id)?;
                let detail = format!("{} {by}", order.pods);
                Some(Event::of_pool(EventKind::PrescaleDeleted, &order.pool).with_detail(detail))
            }
            Change::Reserved { reservation, facts, .. } => {
                Some(self.reserved_event(reservation, facts))
            }
            Change::Dialed { reservation, call, .. } => self.dialed_event(reservation, call),
            Change::ReservationEnded { reservation, cause, at, call } => {
                self.reservation_event(reservation, *cause, call.as_ref(), *at)
            }
            Change::Number { number, max_lines, by } => {
                let kinds = (EventKind::NumberSet, EventKind::NumberDeleted);
                Some(dial_limit_event(kinds, number, *max_lines, by))
            }
            Change::Account { account, max_cps, by, .. } => {
                let kinds = (EventKind::AccountSet, EventKind::AccountDeleted);
                Some(dial_limit_event(kinds, account, *max_cps, by))
            }
            Change::Began { .. }
            | Change::AnswerRate { .. }
            | Change::List { .. }
            | Change::PendingExtended { .. }
            | Change::Heartbeat { .. }
            | Change::GatewayGone { .. }
            | Change::MediaSecret { .. }
            | Change::CapacityState { .. }
            | Change::PrescaleExpired { .. }
            | Change::CallEndRecorded { .. }
            | Change::CallEndDropped { .. }
            | Change::RequestSeen { .. }
            | Change::Polled { .. }
            | Change::EventRecorded { .. }
            | Change::Time { .. }
            | Change::Shifted { .. } => None,
        }
    }

    fn call_event(
        &self,
        kind: EventKind,
        call: &CallSid,
        detail: impl Into<String>,
    ) -> Option<Event> {
        let facts = self.calls.get(call)?;
        Some(Event::of_live_call(kind, call, facts).with_detail(detail))
    }

    fn accepted_event(&self, call: &CallSid) -> Option<Event> {
        let facts = self.calls.get(call)?;
        let pool = Some(facts.pool.clone());
        Some(Event { pool, ..Event::of_live_call(EventKind::HandoffAccepted, call, facts) })
    }

    fn confirmed_event(&self, call: &CallSid) -> Option<Event> {
        let facts = self.calls.get(call).filter(|facts| facts.provisional)?;
        Some(Event::of_live_call(EventKind::Confirmed, call, facts))
    }

    fn failover_event(
        &self,
        call: &CallSid,
        pod: &PodName,
        pool: &Pool,
        cause: EndCause,
    ) -> Option<Event> {
        // The same pod is tried again many times a second.
        let facts = self.calls.get(call).filter(|facts| facts.pod != *pod)?;
        let detail = format!("{} {}", cause.as_str(), facts.pod);
        let event = Event::of_live_call(EventKind::FailedOver, call, facts).with_detail(detail);
        Some(Event { pod: Some(pod.clone()), pool: Some(pool.clone()), ..event })
    }

    fn ended_event(&self, call: &CallSid, at: Millis, cause: EndCause) -> Option<Event> {
        let lasted = at.saturating_sub(self.calls.get(call)?.at);
        self.call_event(EventKind::Ended, call, format!("{} {lasted}", cause.as_str()))
    }

    fn left_queue_event(&self, call: &CallSid) -> Option<Event> {
        let entry = self.queue.get(call)?;
        Some(Event::of_call(EventKind::LeftQueue, call, entry.merchant.as_ref()))
    }

    fn drain_event(&self, pod: &PodName, until: Option<Millis>, surplus: bool) -> Option<Event> {
        // The scaler extends its drains while a pod is surplus.
        if surplus && self.pods.get(pod).is_some_and(|pod| pod.is_surplus) {
            return None;
        }
        let Some(until) = until else { return Some(Event::of_pod(EventKind::Undrained, pod)) };
        let by = if surplus { " surplus" } else { "" };
        let detail = format!("{}{by}", until / 1_000);
        Some(Event::of_pod(EventKind::Drained, pod).with_detail(detail))
    }

    fn pod_event(&self, pod: &PodName, facts: &PodFacts) -> Option<Event> {
        let known = self.pods.get(pod).map(|known| &known.facts);
        let Some(known) = known.filter(|known| known.uid == facts.uid) else {
            return Some(Event::of_pod(EventKind::Joined, pod).with_detail(&facts.address));
        };
        let kind = match facts.ready {
            _ if facts.terminating && !known.terminating => EventKind::Terminating,
            ready if ready == known.ready => return None,
            true => EventKind::Ready,
            false => EventKind::NotReady,
        };
        Some(Event::of_pod(kind, pod))
    }

    fn quarantine_event(&self, pod: &PodName, until: Option<Millis>) -> Option<Event> {
        match (self.pods.get(pod)?.quarantined_until, until) {
            (None, Some(until)) => Some(
                Event::of_pod(EventKind::Quarantined, pod).with_detail((until / 1_000).to_string()),
            ),
            (Some(_), None) => Some(Event::of_pod(EventKind::Restored, pod)),
            _ => None,
        }
    }

    fn reserved_event(&self, id: &ReservationId, facts: &Reservation) -> Event {
        let number = facts.number.as_ref().map(|it| format!(" {it}")).unwrap_or_default();
        self.event_of_reservation(EventKind::Reserved, facts).with_detail(format!("{id}{number}"))
    }

    fn dialed_event(&self, id: &ReservationId, call: &CallSid) -> Option<Event> {
        let facts = self.outbound.get(id)?;
        let event = self.event_of_reservation(EventKind::Dialed, facts).with_detail(id.as_str());
        Some(Event { call: Some(call.clone()), ..event })
    }
}

fn event(kind: EventKind, detail: impl Display) -> Event {
    Event::new(kind).with_detail(detail.to_string())
}

fn allocation_event(call: &CallSid, facts: &Call) -> Event {
    let kind = match facts.queue_entry {
        Some(_) => EventKind::HandedOff,
        None => EventKind::Allocated,
    };
    let detail = match facts.is_returned {
        true => RETURNED.to_owned(),
        false => skipped_text(&facts.tried),
    };
    let pool = Some(facts.pool.clone());
    Event { pool, ..Event::of_live_call(kind, call, facts) }.with_detail(detail)
}

fn waiting_event(call: &CallSid, entry: &QueueEntry) -> Event {
    Event::of_call(EventKind::Waiting, call, entry.merchant.as_ref())
        .with_detail(skipped_text(&entry.tried))
}

fn merchant_event(id: &MerchantId, is_set: bool, by: &str) -> Event {
    let kind = if is_set { EventKind::MerchantSet } else { EventKind::MerchantDeleted };
    Event { merchant: Some(id.clone()), ..event(kind, by) }
}

/// The event of a limit that was set, or deleted (`None`).
fn dial_limit_event(
    (set, deleted): (EventKind, EventKind),
    subject: impl Display,
    limit: Option<u32>,
    by: &str,
) -> Event {
    match limit {
        Some(limit) => event(set, format!("{subject} {limit} {by}")),
        None => event(deleted, format!("{subject} {by}")),
    }
}
