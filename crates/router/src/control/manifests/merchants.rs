//! VoiceMerchant objects: one document each.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{AUTHOR, Configured, Outcome, Outcomes};
use crate::control::Control;
use fleet::{
    Edit, Step,
    manifests::{self, Manifest},
    names::{MerchantId, Pool},
    tiers::MANAGED_BY,
};
use store::StoreError;

/// Documents read at a time.
const PAGE_SIZE: usize = 1_000;

impl Control {
    /// Applies the documents of the objects, and deletes those whose object is gone. If the
    /// resource itself is gone, their documents stay, and the API may change them.
    pub(super) async fn apply_merchant_objects(
        &self,
        objects: &[Manifest],
        namespace: &str,
        is_absent: bool,
    ) -> Result<Outcomes, StoreError> {
        let tiers = self.store.tiers().await?;
        let folded = manifests::fold_merchants(objects, namespace, &tiers);
        let wanted = folded.values().flatten().map(|it| (&it.id, &it.document));
        let wanted: BTreeMap<&MerchantId, &String> = wanted.collect();
        let stored = self.managed_or_wanted(&wanted).await?;
        let owners: BTreeMap<String, MerchantId> = objects
            .iter()
            .filter_map(|object| {
                let owner = manifests::merchant_owner(namespace, &object.name);
                Some((owner, manifests::merchant_id(object).ok()?))
            })
            .collect();
        for (id, document) in &stored {
            let Some(owner) = manifests::owner_of(document) else { continue };
            let is_current = owners.get(&owner) == Some(id);
            if is_current || wanted.contains_key(id) {
                continue;
            }
            let is_ours = owner.starts_with(&manifests::merchant_owner(namespace, ""));
            // An object whose id can't be read keeps the document that it had.
            let is_unreadable = objects.iter().any(|object| {
                manifests::merchant_owner(namespace, &object.name) == owner
                    && manifests::merchant_id(object).is_err()
            });
            if is_unreadable {
                continue;
            }
            let kept = (is_absent || !is_ours).then(|| without_owner(document));
            self.write_merchant(id, kept.as_deref(), document).await?;
        }
        for (id, document) in wanted {
            let current = stored.get(id).map(String::as_str);
            if current != Some(document.as_str()) {
                self.write_merchant(id, Some(document), current.unwrap_or_default()).await?;
            }
        }
        let has_document = |object: &str| {
            let owner = manifests::merchant_owner(namespace, object);
            stored.values().any(|document| manifests::owner_of(document).as_ref() == Some(&owner))
        };
        let outcome = |name: String, folded| match folded {
            Err(refused) => {
                let has_last_state = has_document(&name);
                (name, Outcome::Refused { refused, has_last_state })
            }
            Ok(manifests::FoldedMerchant { config, .. }) => {
                let pools = config.steps().filter_map(|step| match step {
                    Step::Merchant(id) => Some(Pool::Merchant(id.clone())),
                    Step::Tier(_) => None,
                });
                (name, Outcome::Applied(Configured::merchant(pools.collect())))
            }
        };
        Ok(folded.into_iter().map(|(name, folded)| outcome(name, folded)).collect())
    }

    /// Returns the documents that an object manages or defines.
    async fn managed_or_wanted(
        &self,
        wanted: &BTreeMap<&MerchantId, &String>,
    ) -> Result<BTreeMap<MerchantId, String>, StoreError> {
        let (mut stored, mut after) = (BTreeMap::new(), None);
        loop {
            let page = self.store.merchants(after.as_ref(), PAGE_SIZE).await?;
            let is_last = page.len() < PAGE_SIZE;
            after = page.last().map(|(id, _)| id.clone());
            let is_relevant = |(id, document): &(MerchantId, String)| {
                wanted.contains_key(id) || document.contains(MANAGED_BY)
            };
            stored.extend(page.into_iter().filter(is_relevant));
            if is_last {
                return Ok(stored);
            }
        }
    }

    /// Writes or deletes a document. A document that changed in the meantime is compared again at
    /// the next pass.
    async fn write_merchant(
        &self,
        id: &MerchantId,
        document: Option<&str>,
        expected: &str,
    ) -> Result<(), StoreError> {
        let edit = Edit { expected: Some(expected), by: AUTHOR };
        if self.store.set_merchant(id, document, edit).await?.is_ok() {
            let is_managed = document.is_some_and(|it| manifests::owner_of(it).is_some());
            match (document, is_managed) {
                (None, _) => {
                    tracing::info!(merchant = %id, "deleted the document of a deleted VoiceMerchant")
                }
                (Some(_), true) => {
                    tracing::info!(merchant = %id, "applied the document of a VoiceMerchant")
                }
                (Some(_), false) => {
                    tracing::info!(merchant = %id, "the document has no VoiceMerchant any more; the API may change it")
                }
            }
        }
        Ok(())
    }
}

fn without_owner(document: &str) -> String {
    let mut value: Value = serde_json::from_str(document).unwrap_or_default();
    if let Some(fields) = value.as_object_mut() {
        fields.remove(MANAGED_BY);
    }
    value.to_string()
}
