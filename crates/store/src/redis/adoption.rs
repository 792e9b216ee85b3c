//! The adoption of a store that the older router has written. That router must be stopped.

use std::{collections::BTreeSet, sync::PoisonError, time::Duration};

use redis::cmd;

use super::{
    Redis,
    errors::is_wrong_type,
    keys,
    recovery::{Document, text_of},
    retry::Deadline,
    tier_table::DependsOn,
};
use crate::StoreError;
use fleet::names::Pool;

/// Lifetime of the adoption lock without a renewal; another replica continues after it.
const LOCK_TTL: Duration = Duration::from_secs(10);
/// Pods or calls that one function adopts.
const BATCH_SIZE: usize = 100;

impl Redis {
    /// Adopts the store under a lock, so that one replica does it.
    pub(super) async fn adopt(&self) -> Result<(), StoreError> {
        let (lock, ours) = (self.key(keys::ADOPTING), self.instance.to_string());
        let mut acquire = cmd("SET");
        acquire.arg(&lock).arg(&ours).arg("NX").arg("PX").arg(LOCK_TTL.as_millis() as u64);
        let acquired: Option<String> = self.command(&acquire).await?;
        let holder: Option<String> = self.command(cmd("GET").arg(&lock)).await?;
        if acquired.is_none() && holder.as_ref() != Some(&ours) {
            let reason = "another replica adopts the store of the older router";
            self.client.record_reason(reason);
            return Err(StoreError::Unavailable(reason.into()));
        }
        let outcome = self.adopt_locked(&lock).await;
        if outcome.is_ok() {
            self.command::<()>(cmd("DEL").arg(&lock)).await?;
        }
        outcome
    }

    /// Adopts the store. Every step is idempotent, so that a replica can continue where another has
    /// stopped.
    async fn adopt_locked(&self, lock: &str) -> Result<(), StoreError> {
        tracing::info!("adopting the store of the older router");
        let (tiers, is_absent) = match self.tier_document().await? {
            Document::Good { tiers, .. } => (tiers, false),
            Document::Bad(_) => (self.in_force(), false),
            Document::Absent => (self.in_force(), true),
        };
        let document = if is_absent { text_of(&tiers) } else { String::new() };
        self.put_table(&tiers, "", "", DependsOn::Nothing, "adopting").await?;
        *self.tiers.write().unwrap_or_else(PoisonError::into_inner) = tiers.clone();
        for (pattern, is_merchant) in [("pool:*:assigned", false), ("merchant:*:assigned", true)] {
            for key in self.scan(pattern).await? {
                self.adopt_pool(&key, is_merchant).await?;
            }
        }
        let (adopted, dropped) = self.adopt_calls(lock).await?;
        self.put_table(&tiers, &document, "", DependsOn::Nothing, "adopted").await?;
        // The store is usable from here on: allocations check the facts, so that wrong indexes do
        // no harm until the audit has corrected them.
        self.audit_all().await?;
        tracing::info!(adopted, dropped, "adopted the calls of the older router");
        Ok(())
    }

    /// Adopts the pods of a pool, by the key of its assigned pods.
    async fn adopt_pool(&self, key: &str, is_merchant: bool) -> Result<(), StoreError> {
        let name = key.strip_prefix(&self.prefix).and_then(|key| key.strip_suffix(":assigned"));
        let name =
            name.and_then(|name| name.split_once(':')).map(|(_, name)| name).unwrap_or_default();
        let tier = if is_merchant { format!("merchant:{name}") } else { name.to_owned() };
        if tier.parse::<Pool>().is_err() {
            tracing::warn!(key, "the key does not contain a pool name; skipping it");
            return Ok(());
        }
        let pods = match self.client.command::<Vec<String>>(cmd("SMEMBERS").arg(key)).await {
            Ok(pods) => pods,
            Err(error) if is_wrong_type(&error) => {
                tracing::warn!(key, "the key is not a set of pods; skipping it");
                return Ok(());
            }
            Err(error) => return Err(StoreError::Unavailable(error.to_string())),
        };
        for batch in pods.chunks(BATCH_SIZE) {
            let mut args = vec![tier.as_str()];
            args.extend(batch.iter().map(String::as_str));
            let function = &self.functions().adopt_pods;
            let mut reply = self.client.run_unchecked(function, &args, Deadline::Enforced).await?;
            for pod in reply.texts()? {
                tracing::warn!(pod, "a key of the pod has the wrong type; skipping the pod");
            }
        }
        Ok(())
    }

    /// Adopts all calls, and renews the lock. Returns the numbers of adopted and dropped calls.
    async fn adopt_calls(&self, lock: &str) -> Result<(u64, u64), StoreError> {
        let (mut adopted, mut dropped) = (0, 0);
        let (lease, expiry) = (self.lease_ttl.to_string(), self.record_expiry(self.lease_ttl));
        let calls = self.scan("call:*").await?;
        let prefix_length = self.key(keys::CALL).len();
        for batch in calls.chunks(BATCH_SIZE) {
            let mut args = vec![lease.as_str(), &expiry];
            args.extend(batch.iter().filter_map(|key| key.get(prefix_length..)));
            let function = &self.functions().adopt_calls;
            let mut reply = self.client.run_unchecked(function, &args, Deadline::Enforced).await?;
            adopted += reply.number()?;
            dropped += reply.number()?;
            self.command::<()>(cmd("PEXPIRE").arg(lock).arg(LOCK_TTL.as_millis() as u64)).await?;
        }
        Ok((adopted, dropped))
    }

    async fn scan(&self, pattern: &str) -> Result<Vec<String>, StoreError> {
        let mut keys = BTreeSet::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(self.key(pattern)).arg("COUNT").arg(500);
            let (next, page): (u64, Vec<String>) = self.command(&scan).await?;
            keys.extend(page);
            cursor = next;
            if cursor == 0 {
                return Ok(keys.into_iter().collect());
            }
        }
    }
}
