//! The audit: every view derived again, in small steps.

use std::collections::BTreeSet;

use super::{Redis, link::Timeliness, scripts::Script};
use crate::{
    domain::{fleet::Audited, names::Pool},
    store::StoreError,
};

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
        let pools: Vec<String> =
            self.command(redis::cmd("SMEMBERS").arg(self.key("pools"))).await?;
        for pool in &pools {
            if pool.parse::<Pool>().is_err() {
                tracing::warn!(pool, "voice:pools holds what is no pool; taking it out");
                self.command::<()>(redis::cmd("SREM").arg(self.key("pools")).arg(pool)).await?;
                continue;
            }
            for view in ["available", "assigned", "out"] {
                all.repaired += self.audit_scan(&self.scripts.audit_pool, &[pool, view]).await?;
            }
        }
        Ok(all)
    }

    /// The names of all pods, in order.
    async fn pod_names(&self) -> Result<Vec<String>, StoreError> {
        let mut names = BTreeSet::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd("HSCAN");
            scan.arg(self.key("pod:metadata")).arg(cursor).arg("COUNT").arg(500);
            let (next, pairs): (u64, Vec<String>) = self.command(&scan).await?;
            names.extend(pairs.into_iter().step_by(2));
            cursor = next;
            if cursor == 0 {
                return Ok(names.into_iter().collect());
            }
        }
    }
}
