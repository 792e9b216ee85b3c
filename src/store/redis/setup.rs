//! What a Redis needs before calls can be served from it, at the start and after
//! every outage; and what has to be looked at while they are.

use std::{sync::Arc, time::Duration};

use redis::cmd;

use super::{
    Redis,
    kept::Debt,
    link::Timeliness,
    operations::{epoch_text, fenced, unexpected},
    table,
};
use crate::{
    domain::{
        fleet::Fenced,
        tiers::{Origin, Tiers},
    },
    store::StoreError,
};

/// The layout of the keys that this program writes.
const SCHEMA: u64 = 1;
/// How often Redis is tried while it is out.
const PROBE: Duration = Duration::from_millis(200);
/// How often the tier document is looked at.
const REFRESH: Duration = Duration::from_secs(10);

impl Redis {
    /// Brings Redis back into use whenever it is out, and follows its tiers.
    pub(super) async fn tend(self: Arc<Self>) {
        let mut said = String::new();
        loop {
            let pause = if self.link.is_up() {
                // Debts may have come while the circuit was just closing.
                if let Err(error) = self.pay_debts().await {
                    tracing::warn!(%error, "cannot do what was left undone");
                }
                if let Err(error) = self.follow_tiers().await {
                    tracing::warn!(%error, "cannot look at the tiers");
                }
                REFRESH
            } else {
                match self.recover().await {
                    Ok(()) => {
                        tracing::info!("Redis is in use");
                        said.clear();
                        self.warn_about_settings().await;
                        self.link.close_circuit();
                        self.nudge.notify_one();
                        continue;
                    }
                    Err(error) => {
                        let error = error.to_string();
                        if error != said {
                            tracing::error!(error, "Redis cannot be used");
                            said = error;
                        }
                        PROBE
                    }
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.link.opened.notified(), if pause == REFRESH => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Everything that has to be done before requests may come again.
    async fn recover(&self) -> Result<(), StoreError> {
        let lease = self.lease_ttl.to_string();
        let mut answer =
            self.link.attempt(&self.scripts.begin, &[&lease], Timeliness::InTime).await?;
        match answer.word.as_str() {
            "ready" => {
                let version = answer.number()?;
                if version > SCHEMA {
                    let error = format!(
                        "its layout is version {version}, and this program knows {SCHEMA}: use a newer release"
                    );
                    let _ = self.refused.set(error.clone());
                    return Err(StoreError::Failed(error));
                }
                self.take_tiers().await?;
            }
            "began" => {
                tracing::warn!("Redis was empty; filling it again");
                self.take_tiers().await?;
            }
            "older" => self.adopt().await?,
            _ => return Err(unexpected(&answer)),
        }
        self.pay_debts().await
    }

    /// Warns where Redis may lose what it was told; one that does not say is none
    /// of our business.
    async fn warn_about_settings(&self) {
        let memory: String = self.command(cmd("INFO").arg("memory")).await.unwrap_or_default();
        let replication: String =
            self.command(cmd("INFO").arg("replication")).await.unwrap_or_default();
        let field = |info: &str, name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.unwrap_or_default().trim().to_owned()
        };
        let policy = field(&memory, "maxmemory_policy");
        if !policy.is_empty() && policy != "noeviction" {
            tracing::warn!(
                policy,
                "Redis evicts keys when it is full: set maxmemory-policy noeviction, or calls will be lost"
            );
        }
        let replicas = field(&replication, "connected_slaves");
        let good = field(&replication, "min_slaves_good_slaves");
        if replicas != "0" && !replicas.is_empty() && good.is_empty() {
            tracing::warn!(
                replicas,
                "Redis has replicas but no min-replicas-to-write: a failover can lose calls that were given"
            );
        }
    }

    /// At the start and after a loss: the store's tiers hold if it has any, else ours.
    async fn take_tiers(&self) -> Result<(), StoreError> {
        let document: Option<String> =
            self.command(cmd("GET").arg(self.key("tier:config"))).await?;
        let (ours, _) =
            self.tiers.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let stored = document.and_then(|document| match Tiers::parse(&document, Origin::Store) {
            Ok((tiers, _)) => Some((tiers, document)),
            Err(error) => {
                tracing::warn!(%error, "the tier document in Redis cannot be used; keeping the tiers in force");
                None
            }
        });
        let (tiers, document) = stored.unwrap_or_else(|| {
            let document = serde_json::Value::from(ours.clone()).to_string();
            (ours, document)
        });
        let _ = self.put_tiers(&tiers, &document, None).await?;
        Ok(())
    }

    /// Looks whether someone has changed the tier document.
    async fn follow_tiers(&self) -> Result<(), StoreError> {
        let document: Option<String> =
            self.command(cmd("GET").arg(self.key("tier:config"))).await?;
        let (_, seen) =
            self.tiers.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let Some(document) = document else {
            tracing::warn!("the tier document is gone from Redis; keeping the tiers in force");
            return Ok(());
        };
        if document == seen {
            return Ok(());
        }
        match Tiers::parse(&document, Origin::Store) {
            Ok((tiers, warnings)) => {
                for warning in warnings {
                    tracing::warn!(warning, "in the tier document");
                }
                tracing::info!("the tiers have changed in Redis");
                let _ = self.put_tiers(&tiers, &document, None).await?;
                self.nudge.notify_one();
            }
            Err(error) => {
                tracing::warn!(%error, "the tier document in Redis cannot be used; keeping the tiers in force")
            }
        }
        Ok(())
    }

    /// Puts a tier table in force, and every pod where it belongs then.
    pub(super) async fn put_tiers(
        &self,
        tiers: &Tiers,
        document: &str,
        epoch: Option<u64>,
    ) -> Result<Result<(), Fenced>, StoreError> {
        let (epoch_text, chain, entries) =
            (epoch_text(epoch), table::chain(tiers), table::entries(tiers));
        let mut args = vec![epoch_text.as_str(), document, &chain];
        args.extend(entries.iter().flat_map(|(name, entry)| [name.as_str(), entry.as_str()]));
        let mut answer =
            self.link.attempt(&self.scripts.apply_tiers, &args, Timeliness::InTime).await?;
        if answer.word == "fenced" {
            return Ok(Err(fenced(&mut answer, epoch)?));
        }
        let in_force = (tiers.clone(), document.to_owned());
        *self.tiers.write().unwrap_or_else(std::sync::PoisonError::into_inner) = in_force;
        if answer.word == "applied" {
            self.audit_all().await?;
        }
        Ok(Ok(()))
    }

    /// Does what was left undone while Redis was out.
    async fn pay_debts(&self) -> Result<(), StoreError> {
        let owed = self.kept().len();
        let dropped = std::mem::take(&mut self.kept().dropped);
        if dropped > 0 {
            tracing::error!(
                dropped,
                "more releases came than could be kept; leases will end those calls"
            );
        }
        while let Some(debt) = { self.kept().first() } {
            let (call, pod, attempt) = match &debt {
                Debt::Release(release) => {
                    (&release.call, release.pod.as_ref().map_or("", |pod| pod.as_str()), "")
                }
                Debt::Doubt { call, attempt } => (call, "", attempt.as_str()),
            };
            self.link
                .attempt(
                    &self.scripts.release,
                    &[call.as_str(), pod, attempt],
                    Timeliness::Whenever,
                )
                .await?;
            self.kept().paid();
        }
        if owed > 0 {
            tracing::info!(owed, "did what was left undone while Redis was out");
        }
        Ok(())
    }

    /// Takes over what the older router left. It must be stopped by now.
    async fn adopt(&self) -> Result<(), StoreError> {
        let lock = self.key("adopting");
        let mut take = cmd("SET");
        take.arg(&lock).arg(self.process).arg("NX").arg("PX").arg(60_000);
        if self.command::<Option<String>>(&take).await?.is_none() {
            return Err(StoreError::Unavailable(
                "another replica takes over what the older router left".into(),
            ));
        }
        tracing::info!("taking over what the older router left");
        self.take_tier_table_only().await?;
        for (pattern, is_merchant) in [("pool:*:assigned", false), ("merchant:*:assigned", true)] {
            for key in self.scan(pattern).await? {
                let name =
                    key.strip_prefix(&self.prefix).and_then(|key| key.strip_suffix(":assigned"));
                let name = name
                    .and_then(|name| name.split_once(':'))
                    .map(|(_, name)| name)
                    .unwrap_or_default();
                let tier = if is_merchant { format!("merchant:{name}") } else { name.to_owned() };
                let pods: Vec<String> = self.command(cmd("SMEMBERS").arg(&key)).await?;
                for some in pods.chunks(100) {
                    let mut args = vec![tier.as_str()];
                    args.extend(some.iter().map(String::as_str));
                    self.link.attempt(&self.scripts.adopt_pods, &args, Timeliness::InTime).await?;
                }
            }
        }
        let (mut taken, mut dropped) = (0, 0);
        let (lease, life) = (self.lease_ttl.to_string(), self.record_ttl.to_string());
        let calls = self.scan("call:*").await?;
        let skip = self.prefix.len() + "call:".len();
        for some in calls.chunks(100) {
            let mut args = vec![lease.as_str(), &life];
            args.extend(some.iter().filter_map(|key| key.get(skip..)));
            let mut answer =
                self.link.attempt(&self.scripts.adopt_calls, &args, Timeliness::InTime).await?;
            taken += answer.number()?;
            dropped += answer.number()?;
        }
        self.audit_all().await?;
        self.command::<()>(cmd("SET").arg(self.key("schema")).arg(SCHEMA)).await?;
        self.command::<()>(cmd("DEL").arg(&lock)).await?;
        tracing::info!(taken, dropped, "took over the calls of the older router");
        Ok(())
    }

    /// The table without placing pods: those of the older router are not ours yet.
    async fn take_tier_table_only(&self) -> Result<(), StoreError> {
        let document: Option<String> =
            self.command(cmd("GET").arg(self.key("tier:config"))).await?;
        let (ours, _) =
            self.tiers.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let tiers = document
            .and_then(|text| Tiers::parse(&text, Origin::Store).ok())
            .map_or(ours, |(tiers, _)| tiers);
        let document = serde_json::Value::from(tiers.clone()).to_string();
        let (chain, entries) = (table::chain(&tiers), table::entries(&tiers));
        let mut args = vec!["", document.as_str(), &chain];
        args.extend(entries.iter().flat_map(|(name, entry)| [name.as_str(), entry.as_str()]));
        self.link.attempt(&self.scripts.apply_tiers, &args, Timeliness::InTime).await?;
        *self.tiers.write().unwrap_or_else(std::sync::PoisonError::into_inner) = (tiers, document);
        Ok(())
    }

    async fn scan(&self, pattern: &str) -> Result<Vec<String>, StoreError> {
        let mut keys = std::collections::BTreeSet::new();
        let mut cursor = 0u64;
        loop {
            let mut scan = cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(self.key(pattern)).arg("COUNT").arg(500);
            let (next, some): (u64, Vec<String>) = self.command(&scan).await?;
            keys.extend(some);
            cursor = next;
            if cursor == 0 {
                return Ok(keys.into_iter().collect());
            }
        }
    }
}
