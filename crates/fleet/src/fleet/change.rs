//! Changes to the facts: the entries of the journal.

use serde::{Deserialize, Serialize};

use super::{
    AttachedStream, Call, CallEnd, EndCause, Event, Fleet, PodOrigin, PrescaleOrder, QueueEntry,
    Reservation, ReservationEnd, SkippedStep,
};
use crate::{
    Millis, Step,
    names::{
        AccountName, CallSid, Fingerprint, GatewayId, MerchantId, OrderId, PhoneNumber, PodName,
        Pool, ReservationId, StreamId,
    },
    tiers::Tiers,
};

/// The facts about a pod that its origin reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFacts {
    /// A different UID under the same name is a different pod.
    pub uid: String,
    /// Address of the agent's server, `host:port`.
    pub address: String,
    pub ready: bool,
    /// The pod is being deleted; unlike a drain this state is permanent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub terminating: bool,
    /// The cluster is about to disrupt the pod: its node is cordoned, or its eviction is announced.
    /// It serves, as the last choice of its pool for new calls.
    #[serde(default, skip_serializing_if = "is_default")]
    pub at_risk: bool,
    /// Restart count of the agent's container.
    #[serde(default, skip_serializing_if = "is_default")]
    pub restarts: u32,
    /// The pool that the pod's label names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<Step>,
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A change to the facts. The journal holds decisions, not requests, so a later version replays
/// it to the same state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Change {
    /// The store began empty; renewals re-register unknown calls until `trusting_until`.
    Began { trusting_until: Millis },
    /// The fencing epoch increased.
    Epoch { epoch: u64 },
    /// The origin of the pods changed.
    Origin { origin: PodOrigin },
    /// A different list of pods is in force.
    List { digest: String, at: Millis },
    /// A different tier table is in force.
    Tiers {
        tiers: Tiers,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// A merchant's document was written or deleted.
    Merchant {
        id: MerchantId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        document: Option<String>,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// The facts about a pod are new or changed.
    Pod {
        pod: PodName,
        #[serde(flatten)]
        facts: PodFacts,
    },
    /// A pod was assigned to a pool.
    #[serde(rename = "home")]
    PoolAssigned { pod: PodName, pool: Pool },
    /// A pod was removed; its calls ended before.
    Gone { pod: PodName },
    /// A drain began, was extended, or ended (`None`).
    Draining {
        pod: PodName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Millis>,
        /// The drain takes a surplus pod out of service; no request asked for it.
        #[serde(default, skip_serializing_if = "is_default")]
        surplus: bool,
    },
    /// A pod was allocated to a call, or handed off to a waiting call.
    Call {
        call: CallSid,
        #[serde(flatten)]
        facts: Call,
    },
    /// A call accepted its hand-off.
    #[serde(rename = "fetched")]
    HandoffAccepted {
        call: CallSid,
        at: Millis,
        until: Millis,
        #[serde(default, skip_serializing_if = "is_default")]
        provisional: bool,
        #[serde(default, skip_serializing_if = "is_default")]
        expects_stream: bool,
    },
    /// A lease was renewed; the call is no longer provisional or handed off.
    Renewed { call: CallSid, until: Millis },
    /// The lease of a provisional or handed-off call was extended.
    #[serde(rename = "spared")]
    PendingExtended { call: CallSid, until: Millis },
    /// The stream of a call was attached; the call is no longer provisional.
    Attached { call: CallSid, stream: AttachedStream, until: Millis },
    /// The gateway of an attached call got an order: see [`AttachedStream::ending`].
    Ending { call: CallSid, cause: EndCause },
    /// The stream of a call moved to another pod.
    FailedOver {
        call: CallSid,
        pod: PodName,
        pool: Pool,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        tried: Vec<SkippedStep>,
        stream: StreamId,
        gateway: GatewayId,
        /// The former pod was lost in mid-call.
        #[serde(default, skip_serializing_if = "is_default")]
        is_lost: bool,
        until: Millis,
        cause: EndCause,
    },
    /// The lease of a gateway was extended.
    Heartbeat { gateway: GatewayId, until: Millis, lease: Millis },
    /// A gateway without calls was removed after its lease expired.
    GatewayGone { gateway: GatewayId },
    /// The key of stream tokens.
    MediaSecret { secret: String },
    /// The learned capacity state of a pool.
    CapacityState { pool: Pool, at: Millis, state: String },
    /// A prescale order.
    Prescale {
        #[serde(flatten)]
        order: PrescaleOrder,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// An operator deleted a prescale order.
    PrescaleDeleted {
        id: OrderId,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// An expired prescale order was removed.
    PrescaleExpired { id: OrderId },
    /// Capacity was reserved for a dial.
    Reserved {
        reservation: ReservationId,
        #[serde(flatten)]
        facts: Reservation,
        /// Share of answered dials that may find no pod, in millionths.
        miss_target: u32,
    },
    /// The dialler reported the provider's call of a reservation.
    Dialed { reservation: ReservationId, call: CallSid, until: Millis },
    /// A reservation ended; `call` is the call that used it.
    ReservationEnded {
        reservation: ReservationId,
        cause: ReservationEnd,
        at: Millis,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        call: Option<CallSid>,
    },
    /// The learned answer rate of a merchant, from compaction.
    AnswerRate { merchant: MerchantId, dials: u64, answers: u64, at: Millis },
    /// The limit of lines of a number was set or deleted.
    Number {
        number: PhoneNumber,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_lines: Option<u32>,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// The rate limit of a provider account was set or deleted.
    Account {
        account: AccountName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_cps: Option<u32>,
        #[serde(default, skip_serializing_if = "is_default")]
        last_dial: Millis,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// A call ended.
    Ended {
        call: CallSid,
        at: Millis,
        #[serde(default, skip_serializing_if = "is_default")]
        cause: EndCause,
    },
    /// The end of a call in the call history: from compaction, or with an updated cause.
    #[serde(rename = "remembered")]
    CallEndRecorded { call: CallSid, end: CallEnd },
    /// The end of a call was dropped from the call history.
    #[serde(rename = "forgotten")]
    CallEndDropped { call: CallSid },
    /// A signed request was answered; replays are refused until `until`.
    #[serde(rename = "seen")]
    RequestSeen {
        fingerprint: Fingerprint,
        #[serde(default, skip_serializing_if = "is_default")]
        at: Millis,
        until: Millis,
    },
    /// A call joined the queue.
    #[serde(rename = "waits")]
    Queued {
        call: CallSid,
        #[serde(rename = "place")]
        entry: QueueEntry,
    },
    /// A waiting call polled; its next poll is due by `poll_by`.
    Polled { call: CallSid, poll_by: Millis },
    /// A call left the queue without a pod.
    #[serde(rename = "left")]
    LeftQueue { call: CallSid },
    /// An event of the event log; changes no fact.
    #[serde(rename = "told")]
    EventRecorded { at: Millis, event: Event },
    /// The time of the write; changes no fact.
    Time { at: Millis },
    /// The clock was stepped by `by` ms; all times move along.
    Shifted { by: i64 },
    /// The consecutive failures of a pod and its quarantine.
    Health {
        pod: PodName,
        failures: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        quarantined_until: Option<Millis>,
    },
}

impl Fleet {
    /// The changes that rebuild the facts from an empty fleet, for compaction.
    pub fn facts(&self) -> Vec<Change> {
        let mut changes = vec![
            Change::Began { trusting_until: self.trusting_until },
            Change::Epoch { epoch: self.epoch },
            Change::Tiers { tiers: self.tiers.clone(), by: String::new() },
        ];
        changes.extend(self.origin.clone().map(|origin| Change::Origin { origin }));
        if let Some(list) = &self.list {
            let (digest, at) = (list.digest.clone(), list.followed_at);
            changes.push(Change::List { digest, at });
        }
        for (id, merchant) in &self.merchants {
            let document = Some(merchant.document.clone());
            changes.push(Change::Merchant { id: id.clone(), document, by: String::new() });
        }
        for (name, pod) in &self.pods {
            changes.push(Change::Pod { pod: name.clone(), facts: pod.facts.clone() });
            if let Some(pool) = pod.pool.clone() {
                changes.push(Change::PoolAssigned { pod: name.clone(), pool });
            }
            if pod.draining_until.is_some() {
                changes.push(Change::Draining {
                    pod: name.clone(),
                    until: pod.draining_until,
                    surplus: pod.is_surplus,
                });
            }
            if pod.failures > 0 {
                let (failures, quarantined_until) = (pod.failures, pod.quarantined_until);
                changes.push(Change::Health { pod: name.clone(), failures, quarantined_until });
            }
        }
        // Any time within the re-registration window rebuilds the entry.
        for call in &self.recently_ended.order {
            changes.push(Change::Ended { call: call.clone(), at: 0, cause: EndCause::default() });
        }
        for (call, end) in self.history.iter() {
            changes.push(Change::CallEndRecorded { call: call.clone(), end: end.clone() });
        }
        for (fingerprint, until) in self.seen_requests.iter() {
            changes.push(Change::RequestSeen { fingerprint: fingerprint.clone(), at: 0, until });
        }
        for (gateway, known) in &self.gateways {
            let (gateway, until, lease) = (gateway.clone(), known.until, known.lease);
            changes.push(Change::Heartbeat { gateway, until, lease });
        }
        changes.extend(self.capacity.facts());
        changes.extend(self.outbound.facts());
        changes.extend(self.media_secret.clone().map(|secret| Change::MediaSecret { secret }));
        for (call, facts) in &self.calls {
            changes.push(Change::Call { call: call.clone(), facts: facts.clone() });
        }
        for (call, entry) in self.queue.iter() {
            changes.push(Change::Queued { call: call.clone(), entry: entry.clone() });
        }
        changes
    }
}
