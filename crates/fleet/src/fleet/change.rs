//! Changes to the facts: what the journal holds.

use serde::{Deserialize, Serialize};

use super::{Call, Cause, End, Event, Fleet, Place, PodOrigin};
use crate::{
    Millis,
    merchant::Step,
    names::{CallSid, Fingerprint, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// What the cluster (or a list of pods) says about a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFacts {
    /// Another UID under the same name is another pod.
    pub uid: String,
    /// Where the agent's own server listens, `host:port`.
    pub address: String,
    pub ready: bool,
    /// On its way out; unlike a drain this never ends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub terminating: bool,
    /// How often the agent's container was restarted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub restarts: u32,
    /// The pool the pod's labels ask for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<Step>,
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// One decided change to the facts. Decisions are kept, not requests, so that a
/// later release of the program reads a journal to the same state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Change {
    /// The fleet began, empty, and believes pods about calls for a while.
    Began { trusting_until: Millis },
    /// The fencing epoch of the leader's writes rose.
    Epoch { epoch: u64 },
    /// The pods come from another origin.
    Origin { origin: PodOrigin },
    /// Another list of pods is in force.
    List { digest: String, at: Millis },
    /// Another tier table is in force.
    Tiers {
        tiers: Tiers,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// A merchant's document was written, or taken away.
    Merchant {
        id: MerchantId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        document: Option<String>,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        by: String,
    },
    /// A pod was seen.
    Pod {
        pod: PodName,
        #[serde(flatten)]
        facts: PodFacts,
    },
    /// A pod was given a pool.
    Home { pod: PodName, pool: Pool },
    /// A pod left, and its calls with it.
    Gone { pod: PodName },
    /// A pod is draining until then, or no longer.
    Draining {
        pod: PodName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Millis>,
    },
    /// A call was given a pod.
    Call {
        call: CallSid,
        #[serde(flatten)]
        facts: Call,
    },
    /// A call came for the pod that it was handed while it waited.
    Fetched {
        call: CallSid,
        at: Millis,
        until: Millis,
        #[serde(default, skip_serializing_if = "is_default")]
        provisional: bool,
    },
    /// The lease of a call was extended; it is sure of its pod.
    Renewed { call: CallSid, until: Millis },
    /// A call with a short lease was given more time.
    Spared { call: CallSid, until: Millis },
    /// A call ended.
    Ended {
        call: CallSid,
        at: Millis,
        #[serde(default, skip_serializing_if = "is_default")]
        cause: Cause,
    },
    /// How a call ended, in a compacted journal or on second thoughts.
    Remembered { call: CallSid, end: End },
    /// How a call ended before no longer matters.
    Forgotten { call: CallSid },
    /// A signed request was answered, and is remembered until then.
    Seen {
        fingerprint: Fingerprint,
        #[serde(default, skip_serializing_if = "is_default")]
        at: Millis,
        until: Millis,
    },
    /// A call waits for a pod.
    Waits { call: CallSid, place: Place },
    /// A call that waits has asked again, and has until then to do so once more.
    Polled { call: CallSid, poll_by: Millis },
    /// A call no longer waits.
    Left { call: CallSid },
    /// Something worth telling happened. It changes no fact.
    Told { at: Millis, event: Event },
    /// What the clock showed when this was written. It changes no fact.
    Time { at: Millis },
    /// The clock was stepped by so many ms, and every time moved along.
    Shifted { by: i64 },
    /// How a pod has fared, and until when it is given no calls for that.
    Health {
        pod: PodName,
        failures: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        quarantined_until: Option<Millis>,
    },
}

impl Fleet {
    /// The facts as the changes that would make them, for a compacted journal.
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
            if let Some(pool) = pod.tier.clone() {
                changes.push(Change::Home { pod: name.clone(), pool });
            }
            if pod.draining_until.is_some() {
                changes.push(Change::Draining { pod: name.clone(), until: pod.draining_until });
            }
            if pod.failures > 0 {
                let (failures, quarantined_until) = (pod.failures, pod.quarantined_until);
                changes.push(Change::Health { pod: name.clone(), failures, quarantined_until });
            }
        }
        // Any time at which we were trusting will do.
        for call in &self.ended.order {
            changes.push(Change::Ended { call: call.clone(), at: 0, cause: Cause::default() });
        }
        for (call, end) in self.ends.iter() {
            changes.push(Change::Remembered { call: call.clone(), end: end.clone() });
        }
        for (fingerprint, until) in self.seen.iter() {
            changes.push(Change::Seen { fingerprint: fingerprint.clone(), at: 0, until });
        }
        for (call, facts) in &self.calls {
            changes.push(Change::Call { call: call.clone(), facts: facts.clone() });
        }
        for (call, place) in self.queue.iter() {
            changes.push(Change::Waits { call: call.clone(), place: place.clone() });
        }
        changes
    }
}
