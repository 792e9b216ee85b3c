//! The audit: derives all indexes again, in small steps.

use std::collections::BTreeSet;

use redis::cmd;

use super::{Redis, errors::is_wrong_type, functions::Function, keys, retry::Deadline};
use crate::{StoreError, pacing::Pace};
use fleet::{Audited, names::Pool};

/// Calls or index members per step.
const PAGE_SIZE: &str = "100";
/// Pods per step.
const POD_BATCH_SIZE: usize = 40;

impl Redis {
    /// Runs one step of an audit. Returns the next cursor and the counts.
    async fn audit_step(
        &self,
        function: &Function,
        args: &[&str],
    ) -> Result<(String, Audited), StoreError> {
        let reply = self.client.run_unchecked(function, args, Deadline::Enforced).await?;
        let mut reply = self.check_initialized(reply)?;
        let (cursor, pods, repaired) = (reply.text()?, reply.number()? as usize, reply.texts()?);
        for name in &repaired {
            tracing::warn!(function = function.name, name, "the audit repaired an index");
        }
        Ok((cursor, Audited { pods, repaired: repaired.len() }))
    }

    /// Runs all steps of a scan. Returns the number of repairs.
    async fn audit_scan(&self, function: &Function, scope: &[&str]) -> Result<usize, StoreError> {
        let mut repaired = 0;
        let mut cursor = "0".to_owned();
        let mut pace = Pace::default();
        loop {
            let args: Vec<&str> =
                scope.iter().copied().chain([cursor.as_str(), PAGE_SIZE]).collect();
            let audited;
            (cursor, audited) = pace.step(self.audit_step(function, &args)).await?;
            repaired += audited.repaired;
            if cursor == "0" {
                return Ok(repaired);
            }
        }
    }

    pub(super) async fn audit_all(&self) -> Result<Audited, StoreError> {
        let draining_ttl = self.draining_ttl.to_string();
        let mut all = Audited::default();
        // The calls first: the other indexes of a pod follow from its index of calls.
        all.repaired += self.audit_scan(&self.functions().audit_calls, &[]).await?;
        // By name, so that pods are assigned to pools in a fixed order.
        let mut pace = Pace::default();
        for batch in self.pod_names().await?.chunks(POD_BATCH_SIZE) {
            let args: Vec<&str> = std::iter::once(draining_ttl.as_str())
                .chain(batch.iter().map(String::as_str))
                .collect();
            let step = self.audit_step(&self.functions().audit_pods, &args);
            let (_, audited) = pace.step(step).await?;
            all.pods += audited.pods;
            all.repaired += audited.repaired;
        }
        all.repaired += self.audit_outbound().await?;
        let pools = self.pools().await?;
        for pool in &pools {
            if pool.parse::<Pool>().is_err() {
                tracing::warn!(pool, "voice:pools has an invalid pool name; removing it");
                self.command::<()>(cmd("SREM").arg(self.key(keys::POOLS)).arg(pool)).await?;
                continue;
            }
            for index in ["available", "at_risk", "assigned", "out"] {
                let function = &self.functions().audit_pool;
                all.repaired += self.audit_scan(function, &[pool, index]).await?;
            }
        }
        Ok(all)
    }

    /// Audits reservations, the lines of numbers with a limit, and the sums of dials. Returns the
    /// number of repairs.
    async fn audit_outbound(&self) -> Result<usize, StoreError> {
        let mut repaired = self.audit_scan(&self.functions().audit_reservations, &[]).await?;
        // A key of the wrong type has no numbers; a limit that is set replaces it.
        let numbers = self.scan_members("HSCAN", keys::NUMBERS).await.unwrap_or_default();
        for number in &numbers {
            repaired += self.audit_scan(&self.functions().audit_lines, &[number]).await?;
        }
        let (_, dials) = self.audit_step(&self.functions().audit_dials, &[]).await?;
        Ok(repaired + dials.repaired)
    }

    /// All pools that ever held a pod.
    async fn pools(&self) -> Result<Vec<String>, StoreError> {
        match self.client.command(cmd("SMEMBERS").arg(self.key(keys::POOLS))).await {
            Err(error) if is_wrong_type(&error) => {
                // The audit of the pods adds their pools again.
                self.drop_key(keys::POOLS).await?;
                Ok(Vec::new())
            }
            pools => pools.map_err(|error| StoreError::Unavailable(error.to_string())),
        }
    }

    /// The names of all pods, in order. Includes the members of all pools, because the list of pods
    /// may have been replaced; the audit of a pod lists it again.
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
        let width = if command == "HSCAN" { 2 } else { 1 };
        let (mut members, mut pace) = (BTreeSet::new(), Pace::default());
        let mut cursor = 0u64;
        loop {
            let mut scan = cmd(command);
            scan.arg(self.key(key)).arg(cursor).arg("COUNT").arg(500);
            let (next, page): (u64, Vec<String>) = pace.step(self.client.command(&scan)).await?;
            members.extend(page.into_iter().step_by(width));
            cursor = next;
            if cursor == 0 {
                return Ok(members);
            }
        }
    }

    /// Deletes an index of the wrong type.
    async fn drop_key(&self, key: &str) -> Result<(), StoreError> {
        tracing::warn!(key, "an index has the wrong type; replacing it");
        self.command(cmd("DEL").arg(self.key(key))).await
    }
}
