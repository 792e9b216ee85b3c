//! VoiceTier objects: one tier table, applied in one step.

use std::collections::BTreeMap;

use super::{AUTHOR, Configured, Outcome, Outcomes};
use crate::control::Control;
use fleet::{
    Edit,
    manifests::{self, FoldedTiers, Manifest, Refused},
    tiers::Tiers,
};
use store::StoreError;

/// Result of applying the objects to the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AppliedTiers {
    /// The table is in force already, or no object manages it.
    Unchanged,
    Changed,
    /// The last table stays.
    Refused {
        reason: &'static str,
        message: String,
        current: Tiers,
    },
}

impl Control {
    /// Applies the table of the objects. Without objects, the table stays and the API may change
    /// it again.
    pub(super) async fn apply_tier_objects(
        &self,
        objects: &[Manifest],
        namespace: &str,
    ) -> Result<AppliedTiers, StoreError> {
        let current = self.store.tiers().await?;
        let FoldedTiers { table, error, objects: verdicts, .. } =
            manifests::fold_tiers(objects, &manifests::tiers_owner(namespace));
        let table = match table {
            Some(table) => table,
            None if objects.is_empty() => current.clone().with_owner(None),
            None => {
                let problem = error.unwrap_or_else(|| not_accepted(&verdicts));
                let message = format!("the last tier table stays: {problem}");
                return Ok(AppliedTiers::Refused { reason: "TableRefused", message, current });
            }
        };
        if table == current {
            return Ok(AppliedTiers::Unchanged);
        }
        let pods = self.store.pods().await?;
        let moves = fleet::moves(&table, &pods);
        if let Some(stranded) = moves.iter().find(|it| it.to.is_none()) {
            let pod = &stranded.pod;
            let message = format!(
                "the last tier table stays: the new one has no tier for pods such as {pod}"
            );
            return Ok(AppliedTiers::Refused { reason: "NoTierForPods", message, current });
        }
        let edit = Edit { expected: Some(&current), by: AUTHOR };
        if self.store.apply_tiers(&table, edit).await?.is_err() {
            // Another request changed the table; the next pass compares again.
            return Ok(AppliedTiers::Refused {
                reason: "Retrying",
                message: "the tier table changed at the same time; retrying".into(),
                current,
            });
        }
        match table.managed_by() {
            Some(owner) => tracing::info!(
                tiers = table.iter().count(),
                moves = moves.len(),
                "applied the tier table of {owner}"
            ),
            None => tracing::info!(
                "no VoiceTier object is left; the tier table stays, and the API may change it"
            ),
        }
        self.reconcile_now.notify_one();
        Ok(AppliedTiers::Changed)
    }

    /// Returns the outcome of each object.
    pub(super) fn tier_outcomes(
        &self,
        objects: &[Manifest],
        namespace: &str,
        applied: &AppliedTiers,
    ) -> Outcomes {
        let owner = manifests::tiers_owner(namespace);
        let folded = manifests::fold_tiers(objects, &owner);
        let last_table = match applied {
            AppliedTiers::Refused { current, .. } => Some(current),
            AppliedTiers::Unchanged | AppliedTiers::Changed => None,
        };
        // The tier of a refused object is in force if the objects manage it, and no other does.
        let has_last_state = |object: &Manifest| {
            let (Ok(tier), Some(table)) = (manifests::tier_name(object), last_table) else {
                return false;
            };
            let is_taken = folded.objects.values().flatten().any(|it| it.name == tier);
            table.managed_by() == Some(&owner) && table.get(&tier).is_some() && !is_taken
        };
        let outcome = |object: &Manifest| {
            let accepted = match folded.objects.get(&object.name)? {
                Ok(accepted) => accepted,
                Err(refused) => {
                    let has_last_state = has_last_state(object);
                    return Some(Outcome::Refused { refused: refused.clone(), has_last_state });
                }
            };
            let configured = Configured::tier(accepted);
            Some(match applied {
                AppliedTiers::Refused { reason, message, current }
                    if !folded.is_in_force(accepted, current) =>
                {
                    Outcome::Pending { configured, reason, message: message.clone() }
                }
                _ => Outcome::Applied(configured),
            })
        };
        let outcomes = objects.iter().map(|object| Some((object.name.clone(), outcome(object)?)));
        outcomes.flatten().collect()
    }
}

/// Names the objects that are not accepted.
fn not_accepted<T>(verdicts: &BTreeMap<String, Result<T, Refused>>) -> String {
    const MAX_SHOWN: usize = 5;
    let refused = verdicts.iter().filter(|(_, it)| it.is_err());
    let names: Vec<&str> = refused.map(|(name, _)| name.as_str()).collect();
    match names.as_slice() {
        [name] => format!("the VoiceTier {name} is not accepted"),
        names => {
            let shown = names.iter().take(MAX_SHOWN).copied().collect::<Vec<_>>().join(", ");
            format!("{} VoiceTiers are not accepted, such as {shown}", names.len())
        }
    }
}
