//! The status of objects: counts, and conditions in words.

use std::borrow::Cow;

use jiff::Timestamp;
use serde_json::{Value, json};

use fleet::{
    PoolStatus, Status,
    manifests::{AcceptedTier, Manifest, Refused},
    names::{Pool, TierName},
    workload::Workload,
};

/// The parts of the fleet that an object configures.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Configured {
    tier: Option<TierName>,
    workload: Option<Workload>,
    /// The pools of merchants that a VoiceMerchant names, in the order of its chain.
    pools: Vec<Pool>,
}

impl Configured {
    pub(super) fn tier(accepted: &AcceptedTier) -> Self {
        let workload = accepted.tier.workload.clone();
        Self { tier: Some(accepted.name.clone()), workload, pools: Vec::new() }
    }

    pub(super) fn merchant(pools: Vec<Pool>) -> Self {
        Self { pools, ..Self::default() }
    }

    /// Whether it has a pool of its own, whose counts are in the status.
    fn has_pool(&self) -> bool {
        self.tier.is_some() || !self.pools.is_empty()
    }
}

/// Result of applying an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// In force.
    Applied(Configured),
    /// Valid, but not in force.
    Pending { configured: Configured, reason: &'static str, message: String },
    /// Not valid. The state that the object had before may be in force.
    Refused { refused: Refused, has_last_state: bool },
}

/// Status, reason and message of a condition.
type Condition<'a> = (&'static str, &'a str, Cow<'a, str>);

/// Returns the status of an object. A condition that keeps its value keeps its time.
pub(super) fn status(
    object: &Manifest,
    outcome: &Outcome,
    fleet: &Status,
    before: &Value,
) -> Value {
    let valid: Condition<'_> = ("True", "Accepted", "the object is valid".into());
    let mut conditions: Vec<(&str, Condition<'_>)> = match outcome {
        Outcome::Applied(_) => {
            let programmed = ("True", "Programmed", "the object is in force".into());
            vec![("Accepted", valid), ("Programmed", programmed)]
        }
        Outcome::Pending { reason, message, .. } => {
            let programmed = ("False", *reason, message.as_str().into());
            vec![("Accepted", valid), ("Programmed", programmed)]
        }
        Outcome::Refused { refused: Refused { reason, message }, has_last_state } => {
            let effect = match has_last_state {
                true => "the last accepted state stays in force",
                false => "the object has no effect",
            };
            let accepted = ("False", *reason, message.as_str().into());
            vec![("Accepted", accepted), ("Programmed", ("False", "NotAccepted", effect.into()))]
        }
    };
    let configured = match outcome {
        Outcome::Applied(configured) | Outcome::Pending { configured, .. } => Some(configured),
        Outcome::Refused { .. } => None,
    };
    conditions.extend(configured.map(|it| ("Ready", readiness(it, fleet))));
    let conditions: Vec<Value> = conditions
        .into_iter()
        .map(|(kind, (status, reason, message))| {
            let time = time_of(before, kind, status);
            json!({
                "type": kind, "status": status, "reason": reason, "message": shortened(&message),
                "observedGeneration": object.generation, "lastTransitionTime": time,
            })
        })
        .collect();
    let mut status = json!({"observedGeneration": object.generation, "conditions": conditions});
    if let Some(configured) = configured.filter(|it| it.has_pool()) {
        let pool = pool_of(configured, fleet);
        status["pods"] = json!(pool.map_or(0, |it| it.assigned));
        status["available"] = json!(pool.map_or(0, |it| it.available));
        status["calls"] = json!(pool.map_or(0, |it| it.active_calls));
    }
    status
}

/// Whether the pools of an object have pods. A name that no pod and no tier has is valid, and may
/// be a typing error.
fn readiness<'a>(configured: &Configured, fleet: &Status) -> Condition<'a> {
    if configured.tier.is_some() && pool_of(configured, fleet).is_none_or(|it| it.assigned == 0) {
        let message = match &configured.workload {
            Some(workload) => format!("the pool has no pod: no pod of the {workload} is known"),
            None => "the pool has no pod".to_owned(),
        };
        return ("False", "NoPods", message.into());
    }
    let assigned =
        |pool: &Pool| fleet.pools.iter().find(|it| it.pool == *pool).map(|it| it.assigned);
    let of = |count: Option<usize>| {
        let pools = configured.pools.iter().filter(|pool| assigned(pool) == count);
        pools.map(Pool::to_string).collect::<Vec<_>>().join(", ")
    };
    let (unknown, empty) = (of(None), of(Some(0)));
    if !unknown.is_empty() {
        return ("False", "UnknownPool", format!("no tier and no pod defines {unknown}").into());
    }
    if !empty.is_empty() {
        return ("False", "NoPods", format!("no pod is in {empty}").into());
    }
    ("True", "Ready", "every pool of the object has pods".into())
}

/// Whether a merge patch with this status would change it: the patch keeps fields that it does not
/// name.
pub(super) fn is_new(status: &Value, before: &Value) -> bool {
    let fields = status.as_object().into_iter().flatten();
    fields.into_iter().any(|(name, value)| before.get(name) != Some(value))
}

/// The API limits the length of a message.
fn shortened(message: &str) -> String {
    const MAX_CHARS: usize = 1_000;
    message.chars().take(MAX_CHARS).collect()
}

/// The pool of a tier, or the first pool of a merchant.
fn pool_of<'a>(configured: &Configured, fleet: &'a Status) -> Option<&'a PoolStatus> {
    let is_it = |it: &&PoolStatus| match (&configured.tier, &it.pool) {
        (None, pool) => Some(pool) == configured.pools.first(),
        (Some(tier), Pool::Tier(name)) => name == tier,
        // The pool of an exclusive tier outside of the chain is named like a merchant's.
        (Some(tier), Pool::Merchant(id)) => id.as_str() == tier.as_str(),
    };
    fleet.pools.iter().find(is_it)
}

fn time_of(before: &Value, kind: &str, status: &str) -> String {
    let conditions = before["conditions"].as_array();
    let is_same = |it: &&Value| it["type"] == kind && it["status"] == status;
    let known = conditions.into_iter().flatten().find(is_same);
    let known = known.and_then(|it| it["lastTransitionTime"].as_str());
    known.map_or_else(now, str::to_owned)
}

/// The time in the format of the API: whole seconds.
fn now() -> String {
    let now = Timestamp::from_second(Timestamp::now().as_second());
    now.unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}
