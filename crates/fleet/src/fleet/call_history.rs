//! Call history: the ends of recent calls, by which a reconnect or a late confirmation is decided.

use std::{
    collections::{HashMap, VecDeque},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use super::{calls::Call, change::is_default};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PhoneNumber, PodName},
    rules::CALL_HISTORY_TTL,
};

/// The cause of a call's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// The agent released the call.
    #[default]
    Agent,
    /// The provider reported the end of the call.
    Provider,
    /// An operator ended the call.
    Operator,
    /// The stream ended; the agent or the provider may still report the cause.
    Stream,
    /// The stream ended, and no cause was reported in time.
    Broken,
    /// The lease expired.
    Lease,
    /// The stream never started.
    Unconfirmed,
    /// The stream never reached a gateway; no failure of the pod.
    Unattached,
    /// The gateway stopped or was lost with the stream.
    Gateway,
    /// The gateway could not connect to the pod.
    Unreachable,
    /// The gateway lost the connection to the pod.
    PodLost,
    /// The pod serves an older stream of a gateway that was cut off from the store.
    Displaced,
    /// The pod was removed, replaced or restarted.
    PodGone,
    /// A handed-off call did not accept the hand-off in time, or a compensating release ended the
    /// call.
    Abandoned,
}

impl EndCause {
    pub const ALL: [Self; 14] = [
        Self::Agent,
        Self::Provider,
        Self::Operator,
        Self::Stream,
        Self::Broken,
        Self::Lease,
        Self::Unconfirmed,
        Self::Unattached,
        Self::Gateway,
        Self::Unreachable,
        Self::PodLost,
        Self::Displaced,
        Self::PodGone,
        Self::Abandoned,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Provider => "provider",
            Self::Operator => "operator",
            Self::Stream => "stream",
            Self::Broken => "broken",
            Self::Lease => "lease",
            Self::Unconfirmed => "unconfirmed",
            Self::Unattached => "unattached",
            Self::Gateway => "gateway",
            Self::Unreachable => "unreachable",
            Self::PodLost => "pod_lost",
            Self::Displaced => "displaced",
            Self::PodGone => "pod_gone",
            Self::Abandoned => "abandoned",
        }
    }

    /// Whether the call is over: it must not be given another pod.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Agent | Self::Provider | Self::Operator)
    }

    /// Whether a report of a final cause may still arrive.
    pub(super) fn may_be_updated(self) -> bool {
        matches!(
            self,
            Self::Stream | Self::Broken | Self::Lease | Self::Unconfirmed | Self::Unattached
        )
    }

    /// The cause after another report of the same end. The first final cause wins.
    pub(super) fn updated_by(self, reported: Self) -> Self {
        match (self, reported) {
            (known, _) if known.is_final() => known,
            (_, reported) if reported.is_final() => reported,
            // The stream is over, so a late confirmation must not reallocate the pod. The failure
            // of the pod was counted at the first end.
            (Self::Unconfirmed | Self::Unattached, Self::Stream) => Self::Broken,
            (known, _) => known,
        }
    }
}

impl FromStr for EndCause {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|cause| cause.as_str() == text).ok_or(())
    }
}

/// The end of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallEnd {
    pub(super) pod: PodName,
    pub(super) cause: EndCause,
    #[serde(rename = "attempts")]
    pub(super) pod_attempt: u32,
    /// Failovers of the stream since that pod attempt began.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) failovers: u32,
    pub(super) lasted: Millis,
    pub(super) merchant: Option<MerchantId>,
    pub(super) at: Millis,
    /// The number whose line the call used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) number: Option<PhoneNumber>,
}

/// The ends of calls within [`CALL_HISTORY_TTL`].
#[derive(Debug, Default)]
pub(super) struct CallHistory {
    by_call: HashMap<CallSid, CallEnd>,
    order: VecDeque<(Millis, CallSid)>,
}

impl CallHistory {
    /// Records the end of a call that may reconnect, confirm late or attach late. Others are not
    /// looked up.
    pub(super) fn record(&mut self, call: CallSid, facts: &Call, cause: EndCause, at: Millis) {
        let may_start_late = matches!(cause, EndCause::Unconfirmed | EndCause::Unattached);
        // A gateway that was cut off from the store attaches its streams again. An end in the
        // history tells a call that ended meanwhile from one that the store has lost.
        let may_return = may_start_late || facts.stream.is_some() || facts.pod_attempt > 0;
        // A hand-off that was never accepted is no pod attempt.
        if !may_return || facts.queue_entry.is_some() || cause == EndCause::Abandoned {
            return;
        }
        let end = CallEnd {
            pod: facts.pod.clone(),
            cause,
            pod_attempt: facts.pod_attempt,
            failovers: facts.failovers,
            lasted: at.saturating_sub(facts.at),
            merchant: facts.merchant.clone(),
            at,
            number: facts.number.clone(),
        };
        self.insert(call, end);
    }

    pub(super) fn insert(&mut self, call: CallSid, end: CallEnd) {
        while let Some((at, oldest)) = self.order.front()
            && at + CALL_HISTORY_TTL < end.at
        {
            if self.by_call.get(oldest).is_some_and(|end| end.at == *at) {
                self.by_call.remove(oldest);
            }
            self.order.pop_front();
        }
        self.order.push_back((end.at, call.clone()));
        self.by_call.insert(call, end);
    }

    pub(super) fn get(&self, call: &CallSid, now: Millis) -> Option<&CallEnd> {
        self.by_call.get(call).filter(|end| now <= end.at + CALL_HISTORY_TTL)
    }

    pub(super) fn contains(&self, call: &CallSid) -> bool {
        self.by_call.contains_key(call)
    }

    pub(super) fn remove(&mut self, call: &CallSid) {
        self.by_call.remove(call);
    }

    pub(super) fn shift(&mut self, by: i64) {
        let ends = self.by_call.values_mut().map(|end| &mut end.at);
        for at in ends.chain(self.order.iter_mut().map(|(at, _)| at)) {
            *at = at.saturating_add_signed(by);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&CallSid, &CallEnd)> {
        self.by_call.iter()
    }
}
