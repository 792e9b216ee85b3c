//! The status of objects: counts, and conditions in words.

use jiff::Timestamp;
use serde_json::{Value, json};

use fleet::{
    PoolStatus, Status,
    manifests::{Manifest, Refused},
    names::{Pool, TierName},
};

/// Result of applying an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// In force. A VoiceTier has a tier, a VoiceMerchant may have a dedicated pool.
    Applied {
        tier: Option<TierName>,
        pool: Option<Pool>,
    },
    /// Valid, but not in force.
    Pending {
        tier: Option<TierName>,
        pool: Option<Pool>,
        reason: &'static str,
        message: String,
    },
    Refused(Refused),
}

/// Returns the status of an object. A condition that keeps its value keeps its time.
pub(super) fn status(
    object: &Manifest,
    outcome: &Outcome,
    fleet: &Status,
    before: &Value,
) -> Value {
    let (accepted, programmed, pool) = match outcome {
        Outcome::Applied { tier, pool } => {
            let accepted = ("True", "Accepted", "the object is valid");
            let programmed = ("True", "Programmed", "the object is in force");
            (accepted, programmed, pool_of(tier.as_ref(), pool.as_ref(), fleet))
        }
        Outcome::Pending { tier, pool, reason, message } => {
            let accepted = ("True", "Accepted", "the object is valid");
            let programmed = ("False", *reason, message.as_str());
            (accepted, programmed, pool_of(tier.as_ref(), pool.as_ref(), fleet))
        }
        Outcome::Refused(Refused { reason, message }) => {
            let accepted = ("False", *reason, message.as_str());
            let programmed = ("False", "NotAccepted", "the last accepted state stays in force");
            (accepted, programmed, None)
        }
    };
    let conditions = [("Accepted", accepted), ("Programmed", programmed)].map(
        |(kind, (status, reason, message))| {
            let time = time_of(before, kind, status);
            json!({
                "type": kind, "status": status, "reason": reason, "message": shortened(message),
                "observedGeneration": object.generation, "lastTransitionTime": time,
            })
        },
    );
    let mut status = json!({"observedGeneration": object.generation, "conditions": conditions});
    if let Some(pool) = pool {
        status["pods"] = json!(pool.assigned);
        status["available"] = json!(pool.available);
        status["calls"] = json!(pool.active_calls);
    }
    status
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

fn pool_of<'a>(
    tier: Option<&TierName>,
    pool: Option<&Pool>,
    fleet: &'a Status,
) -> Option<&'a PoolStatus> {
    let is_it = |it: &&PoolStatus| {
        // The pool of an exclusive tier outside of the chain is named like a merchant's.
        let is_tier = |tier: &TierName| match &it.pool {
            Pool::Tier(name) => name == tier,
            Pool::Merchant(id) => id.as_str() == tier.as_str(),
        };
        Some(&it.pool) == pool || tier.is_some_and(is_tier)
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
