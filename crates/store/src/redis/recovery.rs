//! What a Redis needs before calls can be served from it, at the start and after
//! every outage; and what has to be looked at while they are.

use super::keys;
use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use redis::cmd;

use super::{
    Redis,
    calls::{number_text, release_args},
    client::{Failure, Timeliness},
    deferred_writes::Debt,
    errors::is_wrong_type,
    operations::unexpected,
    reply::Reply as Answer,
    tier_table::{self, DependsOn},
};
use crate::StoreError;
use fleet::{
    Cause, Changed, Edit, Millis, PodOrigin, Release,
    names::{Fingerprint, Pool},
    tiers::{Origin, Tiers},
};

/// The layout of the keys that this program writes.
const SCHEMA: u64 = 1;
/// How often Redis is tried while it is out.
const PROBE: Duration = Duration::from_millis(200);
/// How long a recovery may go on once the program stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// How often the tier document is looked at.
const REFRESH: Duration = Duration::from_secs(10);

/// How long another replica waits for one that adopts, and was not heard of since.
const ADOPTION: Duration = Duration::from_secs(10);
/// Debts that are paid at one time.
const DEBTS_AT_ONCE: usize = 256;

/// The tier document as it stands in Redis.
enum Document {
    Absent,
    /// Its text, if it is text.
    Bad(Option<String>),
    Good {
        text: String,
        tiers: Tiers,
        warnings: Vec<String>,
    },
}

fn text_of(tiers: &Tiers) -> String {
    serde_json::Value::from(tiers.clone()).to_string()
}

impl Redis {
    /// Brings Redis back into use whenever it is out, and follows its tiers.
    pub(super) async fn tend(self: Arc<Self>) {
        let mut said = String::new();
        let mut tidied = false;
        let mut looked = Instant::now();
        loop {
            let pause = if self.link.is_up() {
                // Debts may have come while the circuit was just closing.
                if let Err(error) = self.pay_debts().await {
                    tracing::warn!(%error, "cannot do what was left undone");
                    PROBE
                } else {
                    if self.audit_due.swap(false, Ordering::Relaxed)
                        && let Err(error) = self.audit_all().await
                    {
                        self.audit_due.store(true, Ordering::Relaxed);
                        tracing::warn!(%error, "cannot fill a view that was replaced");
                    }
                    if looked.elapsed() >= REFRESH {
                        looked = Instant::now();
                        if let Err(error) = self.follow_tiers().await {
                            tracing::warn!(%error, "cannot look at the tiers");
                        }
                    }
                    let next = REFRESH.saturating_sub(looked.elapsed());
                    self.kept().next_due().map_or(next, |due| due.min(next))
                }
            } else {
                let recovered = tokio::select! {
                    recovered = self.recover() => recovered,
                    () = self.shutdown_grace_over() => return,
                };
                match recovered {
                    Ok(()) => {
                        tracing::info!("Redis is in use");
                        said.clear();
                        self.warn_about_settings().await;
                        self.link.close_circuit();
                        if !std::mem::replace(&mut tidied, true)
                            && let Err(error) = self.link.tidy_libraries().await
                        {
                            tracing::warn!(%error, "cannot take libraries of other versions out of Redis");
                        }
                        self.nudge.notify_one();
                        continue;
                    }
                    Err(error) => {
                        // Redis answers, so that the connection has no reason of its own.
                        if let StoreError::Failed(reason) | StoreError::Full(reason) = &error {
                            self.link.note_reason(reason.clone());
                        }
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
                () = self.link.opened.notified(), if pause != PROBE => {}
                () = self.stopping.cancelled() => return self.leave().await,
            }
        }
    }

    /// Ends a grace period after the program was told to stop: a recovery that is under way may
    /// flush deferred writes meanwhile, but must not delay the exit for longer.
    async fn shutdown_grace_over(&self) {
        self.stopping.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    }

    /// Does what is still owed before the program ends, if it can be done soon.
    async fn leave(&self) {
        let last_due = self.kept().last_due();
        tokio::time::sleep(last_due.unwrap_or_default()).await;
        if self.link.is_up()
            && let Err(error) = self.pay_debts().await
        {
            tracing::warn!(%error, "leases will end what was left undone");
        }
    }

    /// Everything that has to be done before requests may come again.
    async fn recover(&self) -> Result<(), StoreError> {
        let lease = self.lease_ttl.to_string();
        let is_forced = self.force_origin.load(Ordering::Relaxed);
        let origin = self.origin().filter(|_| !is_forced).as_ref().map(PodOrigin::to_string);
        let args = [lease.as_str(), origin.as_deref().unwrap_or_default()];
        let answer = self.link.attempt(&self.scripts.begin, &args, Timeliness::InTime).await;
        let mut answer = answer.map_err(|failure| match StoreError::from(failure) {
            StoreError::Failed(error) if error.contains("unknown command") => {
                let error = format!("Redis 7 or Valkey is needed, for its functions: {error}");
                let _ = self.refused.set(error.clone());
                StoreError::Failed(error)
            }
            error => error,
        })?;
        if answer.word == "foreign" {
            self.refuse_foreign(&answer.text()?);
            return Err(self.link.out());
        }
        self.set_foreign(None);
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
        if let Some(time) = self.spared_ttl {
            // Streams may have started while nobody could tell us.
            self.spare_all(time).await?;
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

    /// The tier document in Redis; what can't be used is reported.
    async fn tier_document(&self) -> Result<Document, StoreError> {
        let read =
            self.link.command::<Option<String>>(cmd("GET").arg(self.key(keys::TIER_CONFIG))).await;
        let text = match read {
            Ok(None) => return Ok(Document::Absent),
            Ok(Some(text)) => text,
            Err(error) if error.code().is_some() => {
                self.report_tiers(&error.to_string());
                return Ok(Document::Bad(None));
            }
            Err(error) => return Err(StoreError::Unavailable(error.to_string())),
        };
        match Tiers::parse(&text, Origin::Store) {
            Ok((tiers, warnings)) => Ok(Document::Good { text, tiers, warnings }),
            Err(error) => {
                self.report_tiers(&error.to_string());
                Ok(Document::Bad(Some(text)))
            }
        }
    }

    /// Says once what is wrong with the tier document.
    fn report_tiers(&self, error: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != error {
            tracing::warn!(
                error,
                "the tier document in Redis cannot be used; keeping the tiers in force"
            );
            *said = error.to_owned();
        }
    }

    /// At the start and after a loss: the document holds if it can be used, else
    /// the table that the scripts use, else our own tiers.
    async fn take_tiers(&self) -> Result<(), StoreError> {
        let document = self.tier_document().await?;
        // A table of the wrong type is written again.
        let fields = self.link.command(cmd("HGETALL").arg(self.key(keys::TIERS))).await;
        let fields: Vec<String> = match fields {
            Err(error) if is_wrong_type(&error) => Vec::new(),
            fields => fields.map_err(|error| StoreError::Unavailable(error.to_string()))?,
        };
        let is_absent = matches!(document, Document::Absent);
        let tiers = match (document, tier_table::read(&fields)) {
            (Document::Good { tiers, .. }, _) => tiers,
            (Document::Absent | Document::Bad(_), Ok(table)) => table,
            (Document::Absent | Document::Bad(_), Err(_)) => self.in_force(),
        };
        // A document that is there, good or bad, is left to those who wrote it.
        let text = if is_absent { text_of(&tiers) } else { String::new() };
        let _ = self.put_tiers(&tiers, &text, "", DependsOn::Nothing).await?;
        Ok(())
    }

    /// Follows a document that someone has changed, and mends a table that is not
    /// as it should be.
    async fn follow_tiers(&self) -> Result<(), StoreError> {
        let (tiers, document) = match self.tier_document().await? {
            Document::Good { text, tiers, warnings } => {
                if tiers != self.in_force() {
                    warnings
                        .iter()
                        .for_each(|warning| tracing::warn!(warning, "in the tier document"));
                    tracing::info!("the tiers have changed in Redis");
                    self.nudge.notify_one();
                }
                (tiers, Some(text))
            }
            Document::Bad(text) => (self.in_force(), text),
            Document::Absent => {
                self.report_tiers("it is gone");
                (self.in_force(), Some(String::new()))
            }
        };
        // Who has changed the document since has changed the table, too.
        let depends_on = document.as_deref().map_or(DependsOn::Nothing, DependsOn::Document);
        let _ = self.put_tiers(&tiers, "", "", depends_on).await?;
        Ok(())
    }

    fn in_force(&self) -> Tiers {
        self.tiers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts the tiers that somebody has written in force.
    pub(super) async fn edit_tiers(
        &self,
        tiers: &Tiers,
        edit: Edit<'_, Tiers>,
    ) -> Result<Result<(), Changed>, StoreError> {
        let depends_on = edit.instead_of.map_or(DependsOn::Nothing, DependsOn::Table);
        self.put_tiers(tiers, &text_of(tiers), edit.by, depends_on).await
    }

    /// Puts a tier table in force, and every pod where it belongs then.
    async fn put_tiers(
        &self,
        tiers: &Tiers,
        document: &str,
        by: &str,
        depends_on: DependsOn<'_>,
    ) -> Result<Result<(), Changed>, StoreError> {
        let answer = self.put_table(tiers, document, by, depends_on, "").await?;
        let answer = self.found(answer)?;
        if answer.word == "changed" {
            return Ok(Err(Changed));
        }
        *self.tiers.write().unwrap_or_else(PoisonError::into_inner) = tiers.clone();
        if answer.word == "applied" {
            self.unplaced.store(true, Ordering::Relaxed);
        }
        // Whoever comes while pods are being placed waits, and finds it done.
        let _alone = self.placing.lock().await;
        if self.unplaced.swap(false, Ordering::Relaxed)
            && let Err(error) = self.audit_all().await
        {
            self.unplaced.store(true, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Ok(()))
    }

    /// Writes the table; the pods are not placed yet.
    async fn put_table(
        &self,
        tiers: &Tiers,
        document: &str,
        by: &str,
        depends_on: DependsOn<'_>,
        stage: &str,
    ) -> Result<Answer, StoreError> {
        let (chain, entries) = (tier_table::chain(tiers), tier_table::entries(tiers));
        let depends_on = depends_on.text();
        let mut args = vec![by, document, &chain, stage, &depends_on];
        args.extend(entries.iter().flat_map(|(name, entry)| [name.as_str(), entry.as_str()]));
        Ok(self.link.attempt(&self.scripts.apply_tiers, &args, Timeliness::InTime).await?)
    }

    /// Does what was left undone while Redis was out: as much as is owed now.
    async fn pay_debts(&self) -> Result<(), StoreError> {
        let dropped = std::mem::take(&mut self.kept().dropped);
        if dropped > 0 {
            tracing::error!(
                dropped,
                "more releases came than could be kept; leases will end those calls"
            );
        }
        let owed = self.kept().due();
        let mut paid = 0;
        while paid < owed {
            // Those who have calls come first: half of what it can do at a time.
            let at_once = DEBTS_AT_ONCE.min(self.link.bound() / 2);
            let debts = self.kept().take(at_once.min(owed - paid));
            let outcomes = join_all(debts.iter().map(|debt| self.pay(debt))).await;
            let failed = outcomes.iter().find_map(|outcome| outcome.as_ref().err().cloned());
            let unpaid = debts.into_iter().zip(outcomes).filter(|(_, outcome)| outcome.is_err());
            let unpaid: Vec<Debt> = unpaid.map(|(debt, _)| debt).collect();
            paid += at_once;
            self.kept().put_back(unpaid);
            self.link.metrics.kept.set(self.kept().len() as i64);
            if let Some(error) = failed {
                return Err(error);
            }
        }
        if owed > 0 {
            tracing::info!(owed, "did what was left undone while Redis was out");
        }
        Ok(())
    }

    /// Runs a deferred write. One that Redis would refuse for ever is dropped: it must not keep
    /// the others, and the recovery, waiting.
    async fn pay(&self, debt: &Debt) -> Result<(), StoreError> {
        let outcome = match debt {
            Debt::Confirm(confirm) => {
                let args = self.confirm_args(confirm);
                let args = args.each_ref().map(String::as_str);
                self.link.attempt(&self.scripts.confirm, &args, Timeliness::Whenever).await
            }
            Debt::Release { release, asked } => self.pay_release(release, "", *asked, None).await,
            Debt::Doubt { call, attempt, fingerprint } => {
                let release =
                    Release { cause: Cause::Abandoned, ..Release::new(call.clone(), None) };
                self.pay_release(&release, attempt, None, fingerprint.as_ref()).await
            }
        };
        match outcome.map(drop).map_err(StoreError::from) {
            Err(StoreError::Failed(error)) => {
                tracing::error!(?debt, error, "Redis refused a deferred write; it is dropped");
                Ok(())
            }
            outcome => outcome,
        }
    }

    async fn pay_release(
        &self,
        release: &Release,
        stems_from: &str,
        asked: Option<Millis>,
        fingerprint: Option<&Fingerprint>,
    ) -> Result<Answer, Failure> {
        let number = number_text(release.attempt);
        let asked = asked.map(|asked| asked.to_string()).unwrap_or_default();
        let mut args = release_args(release, stems_from, &number, &asked).to_vec();
        args.extend(fingerprint.map(Fingerprint::as_str));
        self.link.attempt(&self.scripts.release, &args, Timeliness::Whenever).await
    }

    /// Takes over what the older router left. It must be stopped by now.
    async fn adopt(&self) -> Result<(), StoreError> {
        let (lock, ours) = (self.key(keys::ADOPTING), self.process.to_string());
        let mut take = cmd("SET");
        take.arg(&lock).arg(&ours).arg("NX").arg("PX").arg(ADOPTION.as_millis() as u64);
        let taken: Option<String> = self.command(&take).await?;
        let holder: Option<String> = self.command(cmd("GET").arg(&lock)).await?;
        if taken.is_none() && holder.as_ref() != Some(&ours) {
            let reason = "another replica takes over what the older router left";
            self.link.note_reason(reason);
            return Err(StoreError::Unavailable(reason.into()));
        }
        let outcome = self.adopt_alone(&lock).await;
        if outcome.is_ok() {
            self.command::<()>(cmd("DEL").arg(&lock)).await?;
        }
        outcome
    }

    /// The adoption itself. Each step may be repeated, so that a replica can go on
    /// where another has died.
    async fn adopt_alone(&self, lock: &str) -> Result<(), StoreError> {
        tracing::info!("taking over what the older router left");
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
                let name =
                    key.strip_prefix(&self.prefix).and_then(|key| key.strip_suffix(":assigned"));
                let name = name
                    .and_then(|name| name.split_once(':'))
                    .map(|(_, name)| name)
                    .unwrap_or_default();
                let tier = if is_merchant { format!("merchant:{name}") } else { name.to_owned() };
                if tier.parse::<Pool>().is_err() {
                    tracing::warn!(key, "not the name of a pool; left alone");
                    continue;
                }
                let pods = self.link.command::<Vec<String>>(cmd("SMEMBERS").arg(&key)).await;
                let pods = match pods {
                    Ok(pods) => pods,
                    Err(error) if is_wrong_type(&error) => {
                        tracing::warn!(key, "not the pods of a pool; left alone");
                        continue;
                    }
                    Err(error) => return Err(StoreError::Unavailable(error.to_string())),
                };
                for some in pods.chunks(100) {
                    let mut args = vec![tier.as_str()];
                    args.extend(some.iter().map(String::as_str));
                    let script = &self.scripts.adopt_pods;
                    let mut answer = self.link.attempt(script, &args, Timeliness::InTime).await?;
                    for pod in answer.texts()? {
                        tracing::warn!(pod, "its keys make no sense; left alone");
                    }
                }
            }
        }
        let (mut taken, mut dropped) = (0, 0);
        let (lease, life) = (self.lease_ttl.to_string(), self.record_life(self.lease_ttl));
        let calls = self.scan("call:*").await?;
        let skip = self.prefix.len() + "call:".len();
        for some in calls.chunks(100) {
            let mut args = vec![lease.as_str(), &life];
            args.extend(some.iter().filter_map(|key| key.get(skip..)));
            let mut answer =
                self.link.attempt(&self.scripts.adopt_calls, &args, Timeliness::InTime).await?;
            taken += answer.number()?;
            dropped += answer.number()?;
            self.command::<()>(cmd("PEXPIRE").arg(lock).arg(ADOPTION.as_millis() as u64)).await?;
        }
        self.put_table(&tiers, &document, "", DependsOn::Nothing, "adopted").await?;
        // From here on the store is ours; views that are not right yet harm nobody,
        // because facts are looked at before a pod is given.
        self.audit_all().await?;
        tracing::info!(taken, dropped, "took over the calls of the older router");
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
