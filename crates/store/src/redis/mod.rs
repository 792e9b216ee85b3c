//! The store that replicas share: a Redis, with one function of a Lua library per operation.
//! docs/redis.md documents its keys.

mod address;
mod adoption;
mod audit;
mod calls;
mod capacity;
mod client;
mod clock;
mod concurrency_limit;
mod deferred_writes;
mod errors;
mod functions;
mod keys;
mod libraries;
mod migration;
mod operations;
mod outbound;
mod paging;
mod recovery;
mod reply;
pub mod retry;
mod scaling;
mod streams;
mod subscriber;
mod tier_table;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    address::Address, client::RedisClient, deferred_writes::DeferredWrites, errors::store_error,
    functions::Function, migration::Layout, reply::FunctionReply, retry::Deadline,
};
pub use self::{functions::Functions, migration::MIGRATION_QUIET_PERIOD};
use crate::{Notifier, StoreError};
use crate::{StoreMetrics, Ttls};
use fleet::{
    Millis, PodOrigin,
    names::{CallSid, GatewayId, PodName},
    rules::KEY_SLACK,
    tiers::Tiers,
};

/// The configuration of a Redis store.
pub struct RedisConfig {
    pub url: String,
    pub key_prefix: String,
    /// A certificate authority to trust besides the system's (PEM).
    pub authority: Option<Vec<u8>>,
    pub ttls: Ttls,
    /// The tiers of a store without tiers.
    pub tiers: Tiers,
    /// Notified when the pods have to be reconciled at once.
    pub reconcile_now: Arc<Notify>,
    pub metrics: StoreMetrics,
    pub functions: Functions,
    /// Time without routers of the previous version before the layout is migrated.
    pub migration_quiet_period: Duration,
    /// The origin of this router's pods. A store with another origin is refused, unless this is
    /// `None`.
    pub origin: Option<PodOrigin>,
    /// Accepts a store with another origin until the first claim replaces its origin.
    pub force_origin: bool,
    /// Routers set an empty store up, adopt and migrate its layout, write its tiers, extend pending
    /// calls, and delete the functions of other versions. A process without this right uses a store
    /// only after a router has set it up, so that its settings cannot become those of the routers.
    pub may_set_up: bool,
}

/// A permanent reason why a Redis cannot be used.
#[derive(Debug)]
pub enum Unusable {
    /// It holds pods of this other origin.
    Foreign(String),
    Other(String),
}

/// The store on Redis, shared with other replicas.
pub struct Redis {
    client: RedisClient,
    functions: Functions,
    layout: Layout,
    migration_quiet_period: Duration,
    prefix: String,
    lease_ttl: Millis,
    draining_ttl: Millis,
    /// The extension of pending calls after an outage.
    pending_ttl: Option<Millis>,
    /// Lifetime of a call record after its last renewal.
    record_ttl: Millis,
    /// The tiers in force.
    tiers: RwLock<Tiers>,
    /// The tier table has changed, and not all pods have been assigned to a pool since.
    placement_due: AtomicBool,
    /// An index was replaced and has to be filled by an audit.
    audit_due: AtomicBool,
    placement_lock: tokio::sync::Mutex<()>,
    /// The error of the tier document that was logged last.
    reported_tier_error: Mutex<String>,
    deferred: Mutex<DeferredWrites>,
    /// Set if this Redis can never be used.
    permanent_error: OnceLock<String>,
    /// The origin of the latest claim: a cluster may be identified after the start.
    origin: RwLock<Option<PodOrigin>>,
    force_origin: AtomicBool,
    may_set_up: bool,
    /// The origin in Redis, while it differs from this router's.
    foreign_origin: Mutex<Option<String>>,
    reconcile_now: Arc<Notify>,
    /// End of the store's last re-registration window; it identifies the last time the store began
    /// empty.
    reregistration_until: Mutex<Option<Millis>>,
    handoffs: Notifier<CallSid>,
    drains: Notifier<PodName>,
    endings: Notifier<GatewayId>,
    /// Identifies this process in request ids and locks.
    instance: u32,
    next_request_id: AtomicU64,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl Redis {
    /// Connects in the background: a router also starts while Redis is unavailable.
    pub fn start(config: RedisConfig) -> Result<Arc<Self>, String> {
        let address = Address::parse(&config.url, config.authority)?;
        // Fails only if a provider is installed already.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let store = Arc::new(Self {
            client: RedisClient::new(address, &config.key_prefix, config.metrics),
            functions: config.functions,
            layout: Layout::default(),
            migration_quiet_period: config.migration_quiet_period,
            prefix: config.key_prefix,
            lease_ttl: config.ttls.lease,
            draining_ttl: config.ttls.draining,
            pending_ttl: config.ttls.pending().filter(|_| config.may_set_up),
            record_ttl: config.ttls.call_info.max(config.ttls.lease),
            tiers: RwLock::new(config.tiers),
            placement_due: AtomicBool::new(false),
            audit_due: AtomicBool::new(false),
            placement_lock: tokio::sync::Mutex::default(),
            reported_tier_error: Mutex::default(),
            deferred: Mutex::default(),
            permanent_error: OnceLock::new(),
            origin: RwLock::new(config.origin),
            force_origin: AtomicBool::new(config.force_origin),
            may_set_up: config.may_set_up,
            foreign_origin: Mutex::default(),
            reconcile_now: config.reconcile_now,
            reregistration_until: Mutex::default(),
            handoffs: Notifier::default(),
            drains: Notifier::default(),
            endings: Notifier::default(),
            instance: crate::random_u32(),
            next_request_id: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        store.tasks.spawn(store.clone().maintain());
        store.tasks.spawn(store.clone().follow_notifications());
        store.tasks.spawn(store.clone().follow_layout());
        store.tasks.close();
        Ok(store)
    }

    /// Waits until Redis is available, at most for `timeout`. Returns permanent errors only.
    pub async fn wait_until_available(&self, timeout: Duration) -> Result<(), Unusable> {
        let until = tokio::time::Instant::now() + timeout;
        while !self.client.is_up() && tokio::time::Instant::now() < until {
            if let Some(error) = self.permanent_error.get() {
                return Err(Unusable::Other(error.clone()));
            }
            if let Some(owner) = self.foreign_origin() {
                return Err(Unusable::Foreign(owner));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Runs a Redis function. A write must take effect while its caller waits.
    async fn run(&self, function: &Function, args: &[&str]) -> Result<FunctionReply, StoreError> {
        let deadline = if function.is_reading() { Deadline::None } else { Deadline::Enforced };
        let reply = self.client.run(function, args, deadline).await?;
        self.check_initialized(reply)
    }

    /// Opens the circuit if Redis has lost its data: recovery has to initialize it first.
    fn check_initialized(&self, reply: FunctionReply) -> Result<FunctionReply, StoreError> {
        if reply.word == "lost" {
            self.client.record_reason("empty");
            self.client.open_circuit();
            return Err(StoreError::Unavailable("Redis is empty and is being initialized".into()));
        }
        Ok(reply)
    }

    fn origin(&self) -> Option<PodOrigin> {
        self.origin.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn record_origin(&self, claimed: &PodOrigin) {
        if let Some(origin) = &mut *self.origin.write().unwrap_or_else(PoisonError::into_inner) {
            origin.clone_from(claimed);
        }
    }

    /// The origin in Redis, if it differs from this router's.
    fn foreign_origin(&self) -> Option<String> {
        self.foreign_origin.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether the value changed.
    fn set_foreign_origin(&self, owner: Option<String>) -> bool {
        let mut known = self.foreign_origin.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, owner.clone()) != owner
    }

    /// Opens the circuit because Redis holds pods of another origin.
    fn refuse_foreign(&self, owner: &str) {
        let Some(origin) = self.origin() else { return };
        self.client.record_reason(format!(
            "{} is {owner}, and the origin of this router's pods is {origin}",
            self.key(keys::ORIGIN)
        ));
        self.client.open_circuit();
        if self.set_foreign_origin(Some(owner.to_owned())) {
            self.reconcile_now.notify_one();
        }
    }

    fn deferred(&self) -> MutexGuard<'_, DeferredWrites> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The expiry of a call record with this lease. The sweep ends calls at their deadlines; the
    /// expiry only removes records if no router runs.
    fn record_expiry(&self, lease: Millis) -> String {
        (self.record_ttl.max(lease) + KEY_SLACK).to_string()
    }

    /// Reconciles the pods at once if the store began empty since the last sweep: another replica
    /// may have initialized it.
    fn record_reregistration_window(&self, until: Millis) {
        let mut known = self.reregistration_until.lock().unwrap_or_else(PoisonError::into_inner);
        if known.replace(until).is_some_and(|before| before != until) {
            self.reconcile_now.notify_one();
        }
    }

    /// Runs a plain command for a request. Refuses it while the circuit is open.
    async fn query<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> Result<T, StoreError> {
        if !self.client.is_up() {
            return Err(self.client.unavailable());
        }
        if crate::is_observing() {
            return self.client.observe(command).await;
        }
        self.client.command(command).await.map_err(|error| store_error(&error))
    }

    /// Like [`Self::query`]; errors name the key.
    async fn query_key<T: redis::FromRedisValue>(
        &self,
        key: &str,
        command: &redis::Cmd,
    ) -> Result<T, StoreError> {
        self.query(command).await.map_err(|error| match error {
            StoreError::Failed(error) => StoreError::Failed(format!("{key}: {error}")),
            error => error,
        })
    }

    /// Like [`Self::query`]; `None` if the key has the wrong type.
    async fn query_unless_wrong_type<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
    ) -> Result<Option<T>, StoreError> {
        match self.query(command).await {
            Err(StoreError::Failed(error)) if error.contains("WRONGTYPE") => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// Runs a plain command of a background task.
    async fn command<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
    ) -> Result<T, StoreError> {
        let outcome = self.client.command(command).await;
        outcome.map_err(|error| StoreError::Unavailable(error.to_string()))
    }
}
