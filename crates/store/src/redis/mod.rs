//! The store that replicas share: one function of a Lua library per operation, over the
//! documented keys of a Redis.

mod address;
mod audit;
mod calls;
mod client;
mod clock;
mod concurrency_limit;
mod deferred_writes;
mod errors;
mod functions;
mod keys;
mod operations;
mod paging;
mod recovery;
mod reply;
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

pub use self::functions::Scripts;
use self::{
    address::Address,
    client::{Link, Timeliness},
    deferred_writes::{Debt, Kept},
    errors::store_error,
    functions::Script,
    reply::Reply as Answer,
};
use crate::{Notifier, StoreError};
use crate::{StoreMetrics, Ttls};
use fleet::{
    Millis, PodOrigin,
    names::{CallSid, PodName},
    tiers::Tiers,
};

/// What a Redis store is told at the start.
pub struct RedisConfig {
    pub url: String,
    pub key_prefix: String,
    /// A certificate authority to trust besides the system's (PEM).
    pub authority: Option<Vec<u8>>,
    pub ttls: Ttls,
    /// The tiers of a store that has none.
    pub tiers: Tiers,
    /// Told when pods have to be compared at once.
    pub nudge: Arc<Notify>,
    pub metrics: StoreMetrics,
    pub scripts: Scripts,
    /// Where the pods of this router come from; a store of another origin is not used. `None`
    /// uses any.
    pub origin: Option<PodOrigin>,
    /// Uses a store of another origin, until the first claim has taken it over.
    pub force_origin: bool,
}

/// Why a Redis can't be used, however long one waits.
#[derive(Debug)]
pub enum Unusable {
    /// It holds the pods of this origin.
    Foreign(String),
    Other(String),
}

/// A Redis, shared with other replicas.
pub struct Redis {
    link: Link,
    scripts: Scripts,
    prefix: String,
    lease_ttl: Millis,
    draining_ttl: Millis,
    /// What calls that could not tell us of themselves are given after an outage.
    spared_ttl: Option<Millis>,
    /// How long the record of a call lives, counted from its last renewal.
    record_ttl: Millis,
    /// The tiers in force.
    tiers: RwLock<Tiers>,
    /// The table has changed, and not every pod is where it belongs yet.
    unplaced: AtomicBool,
    /// A view was replaced that an audit has to fill.
    audit_due: AtomicBool,
    placing: tokio::sync::Mutex<()>,
    /// What was last said about a tier document that can't be used.
    said: Mutex<String>,
    kept: Mutex<Kept>,
    /// Why this Redis is not for us, if it is not.
    refused: OnceLock<String>,
    /// That of the latest claim: a cluster may be identified after the start.
    origin: RwLock<Option<PodOrigin>>,
    force_origin: AtomicBool,
    /// The origin of the pods in Redis, while it keeps this router from using it.
    foreign: Mutex<Option<String>>,
    nudge: Arc<Notify>,
    /// Until when the store believes pods: another time is another beginning.
    beginning: Mutex<Option<Millis>>,
    handoffs: Notifier<CallSid>,
    drains: Notifier<PodName>,
    process: u32,
    attempts: AtomicU64,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl Redis {
    /// Connects in the background: a router starts without its Redis, too.
    pub fn start(config: RedisConfig) -> Result<Arc<Self>, String> {
        let address = Address::parse(&config.url, config.authority)?;
        // Fails only where a provider is installed already, which is as good.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let store = Arc::new(Self {
            link: Link::new(
                address,
                config.scripts.library.clone(),
                &config.key_prefix,
                config.metrics,
            ),
            scripts: config.scripts,
            prefix: config.key_prefix,
            lease_ttl: config.ttls.lease,
            draining_ttl: config.ttls.draining,
            spared_ttl: config.ttls.spared(),
            record_ttl: config.ttls.call_info.max(config.ttls.lease),
            tiers: RwLock::new(config.tiers),
            unplaced: AtomicBool::new(false),
            audit_due: AtomicBool::new(false),
            placing: tokio::sync::Mutex::default(),
            said: Mutex::default(),
            kept: Mutex::default(),
            refused: OnceLock::new(),
            origin: RwLock::new(config.origin),
            force_origin: AtomicBool::new(config.force_origin),
            foreign: Mutex::default(),
            nudge: config.nudge,
            beginning: Mutex::default(),
            handoffs: Notifier::default(),
            drains: Notifier::default(),
            process: crate::random_u32(),
            attempts: AtomicU64::new(0),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        store.tasks.spawn(store.clone().tend());
        store.tasks.spawn(store.clone().follow_notifications());
        store.tasks.close();
        Ok(store)
    }

    /// Waits until Redis is in use, for so long. An error is one that waiting
    /// does not mend.
    pub async fn first_contact(&self, patience: Duration) -> Result<(), Unusable> {
        let until = tokio::time::Instant::now() + patience;
        while !self.link.is_up() && tokio::time::Instant::now() < until {
            if let Some(refused) = self.refused.get() {
                return Err(Unusable::Other(refused.clone()));
            }
            if let Some(owner) = self.foreign() {
                return Err(Unusable::Foreign(owner));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Runs a script that must be done while its caller waits, or only looks.
    async fn run(&self, script: &Script, args: &[&str]) -> Result<Answer, StoreError> {
        let timeliness =
            if script.is_reading() { Timeliness::Whenever } else { Timeliness::InTime };
        let answer = self.link.run(script, args, timeliness).await?;
        self.found(answer)
    }

    /// A store that is empty has to be set up again before anything else.
    fn found(&self, answer: Answer) -> Result<Answer, StoreError> {
        if answer.word == "lost" {
            self.link.note_reason("empty");
            self.link.open_circuit();
            return Err(StoreError::Unavailable("Redis is empty and being set up".into()));
        }
        Ok(answer)
    }

    fn origin(&self) -> Option<PodOrigin> {
        self.origin.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_origin(&self, claimed: &PodOrigin) {
        if let Some(origin) = &mut *self.origin.write().unwrap_or_else(PoisonError::into_inner) {
            origin.clone_from(claimed);
        }
    }

    /// The origin of the pods in Redis, if it keeps this router from using it.
    fn foreign(&self) -> Option<String> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers whether that is news.
    fn set_foreign(&self, owner: Option<String>) -> bool {
        let mut known = self.foreign.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, owner.clone()) != owner
    }

    /// Takes a Redis out of use that holds the pods of another origin: its calls are not this
    /// router's to serve.
    fn refuse_foreign(&self, owner: &str) {
        let Some(origin) = self.origin() else { return };
        self.link.note_reason(format!(
            "{} is {owner}, and the origin of this router's pods is {origin}",
            self.key(keys::ORIGIN)
        ));
        self.link.open_circuit();
        if self.set_foreign(Some(owner.to_owned())) {
            self.nudge.notify_one();
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// How long the record of a call with such a lease lives. Deadlines end calls; this
    /// only tidies up where no router is left, and gives them time to.
    fn record_life(&self, lease: Millis) -> String {
        const SLACK: Millis = 30_000;
        (self.record_ttl.max(lease) + SLACK).to_string()
    }

    /// Compares pods at once if the store has begun anew since we last looked: another
    /// replica may have set it up while we had nothing to ask.
    fn note_beginning(&self, at: Millis) {
        let mut known = self.beginning.lock().unwrap_or_else(PoisonError::into_inner);
        if known.replace(at).is_some_and(|before| before != at) {
            self.nudge.notify_one();
        }
    }

    /// Owes Redis something, and sees to it that it is done soon.
    fn owe(&self, debt: Debt) {
        let kept = {
            let mut kept = self.kept();
            kept.push(debt);
            kept.len()
        };
        self.link.metrics.kept.set(kept as i64);
        self.link.opened.notify_one();
    }

    /// A plain command for a request: at once refused while Redis is out.
    async fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> Result<T, StoreError> {
        if !self.link.is_up() {
            return Err(self.link.out());
        }
        if crate::is_observing() {
            return self.link.observe(command).await;
        }
        self.link.command(command).await.map_err(|error| store_error(&error))
    }

    /// The same about one key, which an error names.
    async fn ask_fact<T: redis::FromRedisValue>(
        &self,
        key: &str,
        command: &redis::Cmd,
    ) -> Result<T, StoreError> {
        self.ask(command).await.map_err(|error| match error {
            StoreError::Failed(error) => StoreError::Failed(format!("{key}: {error}")),
            error => error,
        })
    }

    /// The same; `None` where the key has the wrong type, and so holds nothing of ours.
    async fn ask_unless_wrong_type<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
    ) -> Result<Option<T>, StoreError> {
        match self.ask(command).await {
            Err(StoreError::Failed(error)) if error.contains("WRONGTYPE") => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// A plain command, off the path of calls.
    async fn command<T: redis::FromRedisValue>(
        &self,
        command: &redis::Cmd,
    ) -> Result<T, StoreError> {
        self.link.command(command).await.map_err(|error| StoreError::Unavailable(error.to_string()))
    }
}
