//! How calls ended, and what that says of their pods.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Change, Fleet, Pod, calls::Call};
use crate::rules::{
    CALL_HISTORY_TTL, EARLY_FAILURE, QUARANTINE_FAILURES, QUARANTINE_SHARE, QUARANTINE_TIME,
};
use crate::{
    Millis,
    names::{CallSid, MerchantId, PodName},
};

/// Why a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its agent let it go.
    #[default]
    Agent,
    /// The provider said that it is over.
    Provider,
    /// Somebody ended it by hand.
    Operator,
    /// Its stream is gone, and its agent has said nothing.
    Stream,
    /// The same, and it is clear that nobody explains it.
    Broken,
    /// Nobody renewed it.
    Lease,
    /// Its stream never started.
    Unconfirmed,
    /// Its pod is no more, or another.
    PodGone,
    /// It waited, was handed a pod, and did not come for it.
    Abandoned,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Provider => "provider",
            Self::Operator => "operator",
            Self::Stream => "stream",
            Self::Broken => "broken",
            Self::Lease => "lease",
            Self::Unconfirmed => "unconfirmed",
            Self::PodGone => "pod_gone",
            Self::Abandoned => "abandoned",
        }
    }

    /// Nobody is left who would want another pod.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Agent | Self::Provider | Self::Operator)
    }

    /// Its agent's word may still be on its way.
    pub(super) fn may_be_explained(self) -> bool {
        matches!(self, Self::Stream | Self::Broken | Self::Lease | Self::Unconfirmed)
    }

    /// What is known of an end once somebody says more of it.
    pub(super) fn explained_by(self, told: Self) -> Self {
        match (self, told) {
            (before, _) if before.is_final() => before,
            (_, told) if told.is_final() => told,
            // A stream that is over does not start any more; its pod was blamed before.
            (Self::Unconfirmed, Self::Stream) => Self::Broken,
            (before, _) => before,
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub(super) pod: PodName,
    pub(super) cause: Cause,
    pub(super) attempts: u32,
    pub(super) lasted: Millis,
    pub(super) merchant: Option<MerchantId>,
    pub(super) at: Millis,
}

/// The ends of the last hour.
#[derive(Debug, Default)]
pub(super) struct Ends {
    by_call: HashMap<CallSid, End>,
    order: VecDeque<(Millis, CallSid)>,
}

impl Ends {
    /// Remembers the end of a call that may come back: those whose documents send
    /// them back to us, and those whose stream may still start.
    pub(super) fn note(&mut self, call: CallSid, facts: &Call, cause: Cause, at: Millis) {
        let returns = facts.attempts > 0 || cause == Cause::Unconfirmed;
        // What was taken back was never the caller's.
        if !returns || facts.place.is_some() || cause == Cause::Abandoned {
            return;
        }
        let end = End {
            pod: facts.pod.clone(),
            cause,
            attempts: facts.attempts,
            lasted: at.saturating_sub(facts.at),
            merchant: facts.merchant.clone(),
            at,
        };
        self.insert(call, end);
    }

    pub(super) fn insert(&mut self, call: CallSid, end: End) {
        while let Some((at, oldest)) = self.order.front()
            && at + CALL_HISTORY_TTL <= end.at
        {
            if self.by_call.get(oldest).is_some_and(|end| end.at == *at) {
                self.by_call.remove(oldest);
            }
            self.order.pop_front();
        }
        self.order.push_back((end.at, call.clone()));
        self.by_call.insert(call, end);
    }

    pub(super) fn get(&self, call: &CallSid, now: Millis) -> Option<&End> {
        self.by_call.get(call).filter(|end| now < end.at + CALL_HISTORY_TTL)
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

    pub(super) fn iter(&self) -> impl Iterator<Item = (&CallSid, &End)> {
        self.by_call.iter()
    }
}

/// What an end says of the pod: good, bad, or nothing.
pub(super) fn speaks_for(cause: Cause, lasted: Millis) -> Option<bool> {
    match cause {
        Cause::Unconfirmed => Some(false),
        Cause::Agent => Some(true),
        Cause::Provider if lasted >= EARLY_FAILURE => Some(true),
        // A stream that broke counts once it is clear that nobody explains it.
        _ => None,
    }
}

/// A stream that is gone without a word.
pub(super) fn broke_soon(lasted: Millis) -> Option<bool> {
    (lasted < EARLY_FAILURE).then_some(false)
}

impl Fleet {
    /// Notes how a pod fared with a call. Several bad ones in a row put it into
    /// quarantine, if not too many of its pool are there; a good one takes it out.
    pub(super) fn fared(&mut self, name: &PodName, well: Option<bool>, now: Millis) {
        let (Some(well), Some(pod)) = (well, self.pods.get(name)) else { return };
        if well {
            return self.absolve(name);
        }
        let failures = pod.failures + 1;
        let may_be = pod.quarantined_until.is_none() && failures >= QUARANTINE_FAILURES;
        let until = Some(now + QUARANTINE_TIME).filter(|_| may_be && self.can_spare(name));
        let quarantined_until = until.or(pod.quarantined_until);
        self.record(Change::Health { pod: name.clone(), failures, quarantined_until });
    }

    /// Whether one more pod of its pool may be in quarantine.
    fn can_spare(&self, name: &PodName) -> bool {
        let tier = self.pods.get(name).and_then(|pod| pod.tier.as_ref());
        let view = tier.and_then(|tier| self.pools.get(tier));
        view.is_some_and(|view| (view.quarantined + 1) * QUARANTINE_SHARE <= view.assigned)
    }

    /// Forgets how a pod fared: it is another, or somebody has looked after it.
    pub(super) fn absolve(&mut self, name: &PodName) {
        let is_blamed = |pod: &Pod| pod.failures > 0 || pod.quarantined_until.is_some();
        if self.pods.get(name).is_some_and(is_blamed) {
            let (failures, quarantined_until) = (0, None);
            self.record(Change::Health { pod: name.clone(), failures, quarantined_until });
        }
    }
}
