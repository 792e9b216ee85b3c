//! The audit: every view derived again, in small steps.

use std::collections::BTreeSet;

use super::keys;
use super::{Redis, client::Timeliness, errors::is_wrong_type, functions::Script};
use crate::StoreError;
use fleet::{Audited, names::Pool};

/// Calls or members that one script looks at.
const BATCH: &str = "100";
/// Pods that one script places again.
const BATCH_OF_PODS: usize = 20;

impl Redis {
    /// Runs one step of an audit: where to go on, and what it saw.
    async fn audit_step(
        &self,
        script: &Script,
        args: &[&str],
    ) -> Result<(String, Audited), StoreError> {
        let answer = self.link.attempt(script, args, Timeliness::InTime).await?;
        let mut answer = self.found(answer)?;
        let (cursor, pods, repaired) = (answer.text()?, answer.number()? as usize, answer.texts()?);
        for name in &repaired {
            tracing::warn!(script = script.name, name, "the audit repaired a view");
        }
        Ok((cursor, Audited { pods, repaired: repaired.len() }))
    }

    /// Walks one scan of an audit to its end; how much it repaired.
    async fn audit_scan(&self, script: &Script, what: &[&str]) -> Result<usize, StoreError> {
        let mut repaired = 0;
        let mut cursor = "0".to_owned();
        loop {
            let args: Vec<&str> = what.iter().copied().chain([cursor.as_str(), BATCH]).collect();
            let audited;
            (cursor, audited) = self.audit_step(script, &args).await?;
            repaired += audited.repaired;
            if cursor == "0" {
                return Ok(repaired);
            }
        }
    }

    pub(super) async fn audit_all(&self) -> Result<Audited, StoreError> {
        let draining_ttl = self.draining_ttl.to_string();
        let mut all = Audited::default();
        // First the calls: a pod's own index may have to be mended before its views.
        all.repaired += self.audit_scan(&self.scripts.audit_calls, &[]).await?;
        // By name, so that pods which need another pool get it in an order.
        for some in self.pod_names().await?.chunks(BATCH_OF_PODS) {
            let args: Vec<&str> = std::iter::once(draining_ttl.as_str())
                .chain(some.iter().map(String::as_str))
                .collect();
            let (_, audited) = self.audit_step(&self.scripts.audit_pods, &args).await?;
            all.pods += audited.pods;
            all.repaired += audited.repaired;
        }
        let pools = self.pools().await?;
        for pool in &pools {
            if pool.parse::<Pool>().is_err() {
                tracing::warn!(pool, "voice:pools holds what is no pool; taking it out");
                self.command::<()>(redis::cmd("SREM").arg(self.key(keys::POOLS)).arg(pool)).await?;
                continue;
            }
            for view in ["available", "assigned", "out"] {
                all.repaired += self.audit_scan(&self.scripts.audit_pool, &[pool, view]).await?;
            }
        }
        Ok(all)
    }

    /// All pools that ever held a pod.
    async fn pools(&self) -> Result<Vec<String>, StoreError> {
        match self.link.command(redis::cmd("SMEMBERS").arg(self.key(keys::POOLS))).await {
            Err(error) if is_wrong_type(&error) => {
                // The pods of the next audit put their pools back.
                self.drop_key(keys::POOLS).await?;
                Ok(Vec::new())
            }
            pools => pools.map_err(|error| StoreError::Unavailable(error.to_string())),
        }
    }

    /// The names of all pods, in order. The list may have been replaced; the audit of a pod that
    /// a pool still has lists it again.
    async fn pod_names(&self) -> Result<Vec<String>, StoreError> {
        let mut names = match self.scan_members("HSCAN", keys::POD_METADATA).await {
            Err(error) if is_wrong_type(&error) => {
                self.drop_key(keys::POD_METADATA).await?;
                BTreeSet::new()
            }
            names => names.map_err(|error| StoreError::Unavailable(error.to_string()))?,
        };
        for pool in self.pools().await?.iter().filter_map(|pool| pool.parse::<Pool>().ok()) {
            let members = self.scan_members("SSCAN", &format!("{pool}:assigned")).await;
            names.extend(members.unwrap_or_default());
        }
        Ok(names.into_iter().collect())
    }

    /// The fields of a hash or the members of a set.
    async fn scan_members(
        &self,
        command: &str,
        key: &str,
    ) -> Result<BTreeSet<String>, redis::RedisError> {
        let step = if command == "HSCAN" { 2 } else { 1 };
        let mut members = BTreeSet::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd(command);
            scan.arg(self.key(key)).arg(cursor).arg("COUNT").arg(500);
            let (next, page): (u64, Vec<String>) = self.link.command(&scan).await?;
            members.extend(page.into_iter().step_by(step));
            cursor = next;
            if cursor == 0 {
                return Ok(members);
            }
        }
    }

    /// Deletes a derived key of the wrong type.
    async fn drop_key(&self, key: &str) -> Result<(), StoreError> {
        tracing::warn!(key, "the key has the wrong type; it is derived, so it is replaced");
        self.command(redis::cmd("DEL").arg(self.key(key))).await
    }
}
