//! The migration of the layout from schema 1 to schema 2, which renames two fields of the call
//! records: docs/decisions/0029-layout-migration-with-a-guarded-library.md.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::cmd;
use tokio::sync::Notify;

use super::{
    Redis,
    errors::is_wrong_type,
    functions::{FunctionSet, Functions, PREVIOUS_SCHEMA, SCHEMA},
    keys,
    libraries::PreviousLibraries,
    operations::{flag, unexpected},
    retry::Deadline,
};
use crate::StoreError;

/// Time without a use of the store by routers of the previous version, before its migration.
pub const MIGRATION_QUIET_PERIOD: Duration = Duration::from_secs(30);
/// Time between two checks for libraries of the previous version.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Records that one step renames.
const PAGE_SIZE: &str = "100";
/// State of the migration in Redis: not all records are renamed yet.
const RENAMING: &str = "renaming";

/// The schema of the store, as this router knows it. The functions of either schema read the
/// records of both, so that a router may follow a change of the schema with a delay.
#[derive(Default)]
pub(super) struct Layout {
    /// 0 before the first recovery.
    schema: AtomicU64,
    /// The records have to be renamed.
    is_rename_due: AtomicBool,
    /// Wakes the migration task: the schema may have changed.
    changed: Notify,
}

impl Layout {
    pub(super) fn schema(&self) -> u64 {
        match self.schema.load(Ordering::Relaxed) {
            0 => SCHEMA,
            schema => schema,
        }
    }

    pub(super) fn set(&self, schema: u64) {
        let before = self.schema.swap(schema, Ordering::Relaxed);
        if before == schema {
            return;
        }
        tracing::info!(schema, "using the Redis functions for this schema of the layout");
        if before != 0 {
            self.require_rename();
        }
    }

    fn require_rename(&self) {
        self.is_rename_due.store(true, Ordering::Relaxed);
        self.check();
    }

    /// Makes the migration task read the schema.
    pub(super) fn check(&self) {
        self.changed.notify_one();
    }
}

/// The state of the migration task.
#[derive(Default)]
struct Progress {
    /// Time since which all libraries of the previous version are guarded.
    guarded_since: Option<Instant>,
    /// The obstacle that was logged last.
    reported: String,
}

impl Progress {
    /// Whether an obstacle has not been logged yet.
    fn is_news(&mut self, obstacle: &str) -> bool {
        let is_news = self.reported != obstacle;
        self.reported = obstacle.to_owned();
        is_news
    }
}

impl Redis {
    /// The functions for the schema of the store.
    pub(super) fn functions(&self) -> &FunctionSet {
        self.functions.of(self.layout.schema())
    }

    /// Deletes the libraries of other versions, and guards those of the previous version while
    /// routers of that version may be running.
    pub(super) async fn tidy_libraries(&self) -> Result<(), StoreError> {
        let state = self.read_text(keys::MIGRATION).await?;
        let is_guarded = self.layout.schema() == PREVIOUS_SCHEMA || state.is_some();
        let previous =
            if is_guarded { PreviousLibraries::Guard } else { PreviousLibraries::Delete };
        let Functions { schema_1, schema_2 } = &self.functions;
        let own = [schema_1.library.name.as_str(), &schema_2.library.name];
        let tidied = self.client.tidy_libraries(&self.functions().library, &own, previous).await;
        tidied.map_err(|error| StoreError::Unavailable(error.to_string()))
    }

    /// Makes this router finish a migration that another router has begun.
    pub(super) async fn resume_migration(&self) -> Result<(), StoreError> {
        let state = self.read_text(keys::MIGRATION).await?;
        if self.layout.schema() == SCHEMA && state.as_deref() == Some(RENAMING) {
            self.layout.require_rename();
        }
        Ok(())
    }

    /// The text under a key; `None` also for a key of another type.
    async fn read_text(&self, key: &str) -> Result<Option<String>, StoreError> {
        match self.client.command(cmd("GET").arg(self.key(key))).await {
            Err(error) if is_wrong_type(&error) => Ok(None),
            text => text.map_err(|error| StoreError::Unavailable(error.to_string())),
        }
    }

    /// Follows the schema of the store, migrates it, and renames the records after each change.
    pub(super) async fn follow_layout(self: Arc<Self>) {
        let mut progress = Progress::default();
        loop {
            let pause = tokio::select! {
                pause = self.advance_migration(&mut progress) => pause,
                () = self.stopping.cancelled() => return,
            };
            tokio::select! {
                () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
                () = self.layout.changed.notified() => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Does the work that is due. Returns the time until the next check; `None` if only a change of
    /// the schema requires one.
    async fn advance_migration(&self, progress: &mut Progress) -> Option<Duration> {
        let interval = CHECK_INTERVAL.min(self.migration_quiet_period / 4);
        // Each recovery ends with a check.
        if !self.client.is_up() {
            return (self.layout.schema() == PREVIOUS_SCHEMA).then_some(interval);
        }
        if let Err(error) = self.read_schema().await {
            tracing::warn!(%error, "cannot read the schema of the layout; retrying");
            return Some(CHECK_INTERVAL);
        }
        if self.layout.is_rename_due.swap(false, Ordering::Relaxed)
            && let Err(error) = self.rename_records().await
        {
            self.layout.is_rename_due.store(true, Ordering::Relaxed);
            tracing::warn!(%error, "cannot rename the fields of call records; retrying");
            return Some(interval);
        }
        if self.layout.schema() != PREVIOUS_SCHEMA {
            return None;
        }
        if self.may_set_up
            && let Err(error) = self.try_migrate(progress).await
        {
            progress.guarded_since = None;
            let error = error.to_string();
            if progress.is_news(&error) {
                tracing::warn!(error, "cannot migrate the layout; it stays at schema 1");
            }
        }
        Some(interval)
    }

    async fn read_schema(&self) -> Result<(), StoreError> {
        match self.read_text(keys::SCHEMA).await?.map(|schema| schema.parse()) {
            Some(Ok(schema @ (PREVIOUS_SCHEMA | SCHEMA))) => self.layout.set(schema),
            // The recovery refuses it.
            Some(Ok(_)) => self.client.open_circuit(),
            // The recovery sets an empty store up, and names a malformed key.
            Some(Err(_)) | None => {}
        }
        Ok(())
    }

    /// Changes the schema to 2, once no router of the previous version has used the store for the
    /// quiet period.
    async fn try_migrate(&self, progress: &mut Progress) -> Result<(), StoreError> {
        let guard = async || {
            let guarded = self.client.guard_libraries().await;
            guarded.map_err(|error| StoreError::Unavailable(error.to_string()))
        };
        let unguarded = guard().await?;
        if unguarded > 0 {
            progress.guarded_since = None;
        }
        let guarded_since = *progress.guarded_since.get_or_insert_with(Instant::now);
        let may_change = guarded_since.elapsed() >= self.migration_quiet_period;
        let quiet_period = self.migration_quiet_period.as_millis().to_string();
        let args = [quiet_period.as_str(), flag(may_change)];
        let function = &self.functions.schema_2.migrate;
        let reply = self.client.run_unchecked(function, &args, Deadline::Enforced).await?;
        match reply.word.as_str() {
            "migrated" => {
                tracing::info!("migrated the layout in Redis from schema 1 to 2");
                self.layout.set(SCHEMA);
                // A router of the previous version may have started at this moment.
                guard().await?;
            }
            "waiting" if progress.is_news("previous version") => tracing::info!(
                "routers of the previous version are connected; the migration of the layout to \
                 schema 2 waits until they are gone"
            ),
            "held" if progress.is_news("held") => tracing::info!(
                key = self.key(keys::MIGRATION),
                "the migration of the layout is held; delete the key to continue"
            ),
            "waiting" | "held" | "quiet" => {}
            "unchanged" => self.layout.check(),
            _ => return Err(unexpected(&reply)),
        }
        Ok(())
    }

    /// Gives the fields of all call records their names in the current schema, page by page.
    async fn rename_records(&self) -> Result<(), StoreError> {
        let mut renamed = 0;
        for index in [keys::CALLS, keys::WAITING] {
            let mut cursor = "0".to_owned();
            loop {
                let function = &self.functions().migrate_calls;
                let args = [index, &cursor, PAGE_SIZE];
                let mut reply =
                    self.client.run_unchecked(function, &args, Deadline::Enforced).await?;
                cursor = reply.text()?;
                renamed += reply.number()?;
                if cursor == "0" {
                    break;
                }
            }
        }
        tracing::info!(renamed, schema = self.layout.schema(), "renamed fields of call records");
        Ok(())
    }
}
