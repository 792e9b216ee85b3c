//! The recovery of the store, at the start and after every outage, and its maintenance in between:
//! deferred writes, due audits, and changes of the tier document.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use redis::cmd;

use super::{
    Redis,
    errors::is_wrong_type,
    functions::SCHEMA,
    keys,
    operations::{flag, unexpected},
    reply::FunctionReply,
    retry::Deadline,
    tier_table::{self, DependsOn},
};
use crate::StoreError;
use fleet::{
    Conflict, Edit, PodOrigin,
    tiers::{DocumentSource, Tiers},
};

/// Time between two recovery attempts.
const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// Time that a recovery may take once the program stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Time between two reads of the tier document.
const REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// The tier document in Redis.
pub(super) enum Document {
    Absent,
    /// Malformed; its text, if the key has the right type.
    Bad(Option<String>),
    Good {
        text: String,
        tiers: Tiers,
        warnings: Vec<String>,
    },
}

pub(super) fn text_of(tiers: &Tiers) -> String {
    serde_json::Value::from(tiers.clone()).to_string()
}

impl Redis {
    /// Recovers the store whenever the circuit is open, and maintains it while it is closed.
    pub(super) async fn maintain(self: Arc<Self>) {
        let mut reported = String::new();
        let mut is_tidy = false;
        let mut refreshed = Instant::now();
        loop {
            let pause = if self.client.is_up() {
                self.maintain_once(&mut refreshed).await
            } else {
                let recovered = tokio::select! {
                    recovered = self.recover() => recovered,
                    () = self.shutdown_grace_over() => return,
                };
                match recovered {
                    Ok(()) => {
                        tracing::info!("Redis is available");
                        reported.clear();
                        self.warn_about_settings().await;
                        self.client.close_circuit();
                        if self.may_set_up
                            && !std::mem::replace(&mut is_tidy, true)
                            && let Err(error) = self.tidy_libraries().await
                        {
                            tracing::warn!(%error, "cannot delete function libraries of other versions");
                        }
                        self.reconcile_now.notify_one();
                        self.layout.check();
                        continue;
                    }
                    Err(error) => {
                        // Redis has replied, so the connection has not recorded a reason.
                        if let StoreError::Failed(reason) | StoreError::Full(reason) = &error {
                            self.client.record_reason(reason.clone());
                        }
                        let error = error.to_string();
                        if error != reported {
                            tracing::error!(error, "Redis cannot be used");
                            reported = error;
                        }
                        PROBE_INTERVAL
                    }
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.client.maintenance_due.notified(), if pause != PROBE_INTERVAL => {}
                () = self.stopping.cancelled() => return self.flush_before_exit().await,
            }
        }
    }

    /// Does the maintenance that is due. Returns the time until the next.
    async fn maintain_once(&self, refreshed: &mut Instant) -> Duration {
        // Writes may have been deferred while the circuit was closing.
        if let Err(error) = self.flush_deferred().await {
            tracing::warn!(%error, "cannot flush deferred writes; retrying");
            return PROBE_INTERVAL;
        }
        if self.audit_due.swap(false, Ordering::Relaxed)
            && let Err(error) = self.audit_all().await
        {
            self.audit_due.store(true, Ordering::Relaxed);
            tracing::warn!(%error, "cannot fill an index that was replaced; retrying");
        }
        if refreshed.elapsed() >= REFRESH_INTERVAL {
            *refreshed = Instant::now();
            if let Err(error) = self.follow_tiers().await {
                tracing::warn!(%error, "cannot read the tier document; retrying");
            }
        }
        let next = REFRESH_INTERVAL.saturating_sub(refreshed.elapsed());
        self.deferred().next_due().map_or(next, |due| due.min(next))
    }

    /// Waits for the shutdown and its grace period: a recovery that is under way may flush deferred
    /// writes meanwhile, but must not delay the exit for longer.
    async fn shutdown_grace_over(&self) {
        self.stopping.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    }

    /// Prepares the store for requests: checks and sets it up, extends pending calls, and flushes
    /// deferred writes.
    async fn recover(&self) -> Result<(), StoreError> {
        let lease = self.lease_ttl.to_string();
        let is_forced = self.force_origin.load(Ordering::Relaxed);
        let origin = self.origin().filter(|_| !is_forced).as_ref().map(PodOrigin::to_string);
        let origin = origin.as_deref().unwrap_or_default();
        let args = [lease.as_str(), origin, flag(self.may_set_up)];
        let schema = self.layout.schema();
        let function = &self.functions().open_store;
        let reply = self.client.run_unchecked(function, &args, Deadline::Enforced).await;
        let mut reply = reply.map_err(|failure| match StoreError::from(failure) {
            StoreError::Failed(error) if error.contains("unknown command") => {
                let error = format!("Redis 7 or Valkey is needed, for its functions: {error}");
                let _ = self.permanent_error.set(error.clone());
                StoreError::Failed(error)
            }
            error => error,
        })?;
        if reply.word == "foreign" {
            self.refuse_foreign(&reply.text()?);
            return Err(self.client.unavailable());
        }
        self.set_foreign_origin(None);
        match reply.word.as_str() {
            "ready" => {
                let version = reply.number()?;
                if version > SCHEMA {
                    let error = format!(
                        "the layout in Redis has schema {version}, and this version knows up to {SCHEMA}: use a newer release"
                    );
                    let _ = self.permanent_error.set(error.clone());
                    return Err(StoreError::Failed(error));
                }
                self.layout.set(version);
                self.resume_migration().await?;
                self.take_tiers().await?;
            }
            "began" => {
                tracing::warn!("Redis was empty; setting the store up");
                self.layout.set(schema);
                self.take_tiers().await?;
            }
            "older" => {
                self.layout.set(schema);
                self.adopt().await?;
            }
            "absent" => {
                let error = "no router has set the store up yet; waiting for one";
                return Err(StoreError::Failed(error.into()));
            }
            _ => return Err(unexpected(&reply)),
        }
        if let Some(time) = self.pending_ttl {
            // Streams may have started during the outage without a confirmation.
            self.extend_all_pending(time).await?;
        }
        self.flush_deferred().await
    }

    /// Warns about settings of Redis under which it may lose data. Without the permission to read
    /// them there is no warning.
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
                "Redis evicts keys when it is full, which loses calls: set maxmemory-policy noeviction"
            );
        }
        let replicas = field(&replication, "connected_slaves");
        let good = field(&replication, "min_slaves_good_slaves");
        if replicas != "0" && !replicas.is_empty() && good.is_empty() {
            tracing::warn!(
                replicas,
                "Redis has replicas without min-replicas-to-write: a failover can lose allocated calls"
            );
        }
    }

    /// Reads the tier document, and reports a malformed one.
    pub(super) async fn tier_document(&self) -> Result<Document, StoreError> {
        let get = cmd("GET").arg(self.key(keys::TIER_CONFIG)).to_owned();
        let text = match self.client.command::<Option<String>>(&get).await {
            Ok(None) => return Ok(Document::Absent),
            Ok(Some(text)) => text,
            Err(error) if error.code().is_some() => {
                self.report_tiers(&error.to_string());
                return Ok(Document::Bad(None));
            }
            Err(error) => return Err(StoreError::Unavailable(error.to_string())),
        };
        match Tiers::parse(&text, DocumentSource::Store) {
            Ok((tiers, warnings)) => Ok(Document::Good { text, tiers, warnings }),
            Err(error) => {
                self.report_tiers(&error.to_string());
                Ok(Document::Bad(Some(text)))
            }
        }
    }

    /// Logs an error of the tier document once.
    fn report_tiers(&self, error: &str) {
        let mut reported = self.reported_tier_error.lock().unwrap_or_else(PoisonError::into_inner);
        if *reported != error {
            tracing::warn!(
                error,
                "the tier document in Redis cannot be used; keeping the tiers in force"
            );
            *reported = error.to_owned();
        }
    }

    /// The tiers in force in the store: those of a usable document, else of the tier table, else of
    /// this router. Also returns whether there is no document.
    async fn stored_tiers(&self) -> Result<(Tiers, bool), StoreError> {
        let document = self.tier_document().await?;
        // A table of the wrong type is rewritten.
        let fields = self.client.command(cmd("HGETALL").arg(self.key(keys::TIERS))).await;
        let fields: Vec<String> = match fields {
            Err(error) if is_wrong_type(&error) => Vec::new(),
            fields => fields.map_err(|error| StoreError::Unavailable(error.to_string()))?,
        };
        let key = self.key(keys::TIER_BOUNDS);
        let bounds: Vec<String> = match self.client.command(cmd("HGETALL").arg(&key)).await {
            Err(error) if is_wrong_type(&error) => Vec::new(),
            bounds => bounds.map_err(|error| StoreError::Unavailable(error.to_string()))?,
        };
        let is_absent = matches!(document, Document::Absent);
        let tiers = match (document, tier_table::read(&fields, &bounds)) {
            (Document::Good { tiers, .. }, _) => tiers,
            (Document::Absent | Document::Bad(_), Ok(table)) => table,
            (Document::Absent | Document::Bad(_), Err(_)) => self.in_force(),
        };
        Ok((tiers, is_absent))
    }

    /// Puts the stored tiers in force.
    async fn take_tiers(&self) -> Result<(), StoreError> {
        let (tiers, is_absent) = self.stored_tiers().await?;
        if !self.may_set_up {
            *self.tiers.write().unwrap_or_else(PoisonError::into_inner) = tiers;
            return Ok(());
        }
        // An existing document stays, even a malformed one: operators edit it.
        let text = if is_absent { text_of(&tiers) } else { String::new() };
        let _ = self.put_tiers(&tiers, &text, "", DependsOn::Nothing).await?;
        Ok(())
    }

    /// Puts a changed tier document in force, and rewrites a malformed table.
    async fn follow_tiers(&self) -> Result<(), StoreError> {
        if !self.may_set_up {
            return self.take_tiers().await;
        }
        let (tiers, document) = match self.tier_document().await? {
            Document::Good { text, tiers, warnings } => {
                if tiers != self.in_force() {
                    for warning in &warnings {
                        tracing::warn!(warning, "the tier document in Redis has a warning");
                    }
                    tracing::info!("the tier document in Redis has changed; applying it");
                    self.reconcile_now.notify_one();
                }
                (tiers, Some(text))
            }
            Document::Bad(text) => (self.in_force(), text),
            Document::Absent => {
                self.report_tiers("it was deleted");
                (self.in_force(), Some(String::new()))
            }
        };
        // A later change of the document has changed the table as well.
        let depends_on = document.as_deref().map_or(DependsOn::Nothing, DependsOn::Document);
        let _ = self.put_tiers(&tiers, "", "", depends_on).await?;
        Ok(())
    }

    pub(super) fn in_force(&self) -> Tiers {
        self.tiers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts edited tiers in force, and writes their document.
    pub(super) async fn edit_tiers(
        &self,
        tiers: &Tiers,
        edit: Edit<'_, Tiers>,
    ) -> Result<Result<(), Conflict>, StoreError> {
        let depends_on = edit.expected.map_or(DependsOn::Nothing, DependsOn::Table);
        self.put_tiers(tiers, &text_of(tiers), edit.by, depends_on).await
    }

    /// Puts a tier table in force, and assigns every pod to its pool.
    async fn put_tiers(
        &self,
        tiers: &Tiers,
        document: &str,
        by: &str,
        depends_on: DependsOn<'_>,
    ) -> Result<Result<(), Conflict>, StoreError> {
        let reply = self.put_table(tiers, document, by, depends_on, "").await?;
        let reply = self.check_initialized(reply)?;
        if reply.word == "changed" {
            return Ok(Err(Conflict));
        }
        *self.tiers.write().unwrap_or_else(PoisonError::into_inner) = tiers.clone();
        if reply.word == "applied" {
            self.placement_due.store(true, Ordering::Relaxed);
        }
        // A concurrent change waits here, and finds the pods placed.
        let _placing = self.placement_lock.lock().await;
        if self.placement_due.swap(false, Ordering::Relaxed)
            && let Err(error) = self.audit_all().await
        {
            self.placement_due.store(true, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Ok(()))
    }

    /// Writes the tier table; the pods are not placed yet.
    pub(super) async fn put_table(
        &self,
        tiers: &Tiers,
        document: &str,
        by: &str,
        depends_on: DependsOn<'_>,
        stage: &str,
    ) -> Result<FunctionReply, StoreError> {
        let (chain, entries) = (tier_table::chain(tiers), tier_table::entries(tiers));
        let depends_on = depends_on.text();
        let mut args = vec![by, document, &chain, stage, &depends_on];
        args.extend(entries.iter().flatten().map(String::as_str));
        let function = &self.functions().apply_tiers;
        Ok(self.client.run_unchecked(function, &args, Deadline::Enforced).await?)
    }
}
