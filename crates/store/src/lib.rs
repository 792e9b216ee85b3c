//! What the rest of the program sees of the fleet: one method per operation,
//! whatever keeps the facts.

mod clock;
mod embedded;
mod journal;
mod metrics;
mod notifier;
mod redis;

use std::{
    future::Future,
    pin::Pin,
    time::{SystemTime, UNIX_EPOCH},
};

pub use self::{
    embedded::Embedded,
    journal::JournalError,
    metrics::StoreMetrics,
    notifier::{Listener, Notifier},
    redis::{Redis, RedisConfig, Scripts, Unusable},
};
use fleet::{
    Allocate, Allocation, Audited, CallPage, CallQuery, Changed, Claim, ClaimRefused, Confirm,
    Confirmed, Departure, Drained, Edit, EventId, Found, Logged, Millis, MoveRefused, NotReleased,
    Observed, PodFacts, PodStatus, PodWriter, Refusal, Release, Released, Removed, Renew, Renewed,
    Status, Swept, Undrained, UnknownPod, WriteRefused,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// The store did not answer, or not in time; nothing is known to have changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("the store cannot be reached: {0}")]
    Unavailable(String),
    #[error("the store has more to do than it can: ask again in a moment")]
    Busy,
    #[error("the store is full and takes nothing new: {0}")]
    Full(String),
    #[error("the store refused: {0}")]
    Failed(String),
}

impl StoreError {
    /// In a word, for traces.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "unavailable",
            Self::Busy => "busy",
            Self::Full(_) => "full",
            Self::Failed(_) => "failed",
        }
    }
}

/// How long leases, drains and records last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ttls {
    pub lease: Millis,
    pub draining: Millis,
    pub call_info: Millis,
    /// How long a call may wait for its stream, if that is looked at.
    pub connect: Option<Millis>,
    /// How long a call that waits keeps its place without asking again, if any may.
    pub patience: Option<Millis>,
}

impl Ttls {
    /// What calls that could not tell us of themselves are given after an outage.
    pub fn spared(&self) -> Option<Millis> {
        self.connect.max(self.patience)
    }
}

/// What our own clock shows.
fn wall_clock() -> Millis {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as Millis)
}

tokio::task_local! {
    static OBSERVING: ();
}

/// Runs a read for people or monitoring. When the store has more to do than it can, such reads are
/// refused first: they never displace a call.
pub fn observing<F: Future>(read: F) -> impl Future<Output = F::Output> {
    OBSERVING.scope((), read)
}

fn is_observing() -> bool {
    OBSERVING.try_with(|()| ()).is_ok()
}

/// The answer of a store, on its way.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Every operation is one atomic step; what it answers is done.
pub trait Store: Send + Sync + 'static {
    fn allocate<'a>(&'a self, request: &'a Allocate) -> Reply<'a, Result<Allocation, Refusal>>;
    fn release<'a>(&'a self, request: &'a Release) -> Reply<'a, Result<Released, NotReleased>>;
    fn confirm<'a>(&'a self, request: &'a Confirm) -> Reply<'a, Confirmed>;
    /// Gives calls that could not tell us of themselves at least so much more time:
    /// those whose stream has not started yet, and those that wait.
    fn spare(&self, time: Millis) -> Reply<'_, ()>;
    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed>;
    fn drain<'a>(&'a self, pod: &'a PodName, ttl: Millis)
    -> Reply<'a, Result<Drained, UnknownPod>>;
    fn undrain<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Result<Undrained, UnknownPod>>;

    /// Claims the pods of the store for a source of pods; the epoch of its writes.
    fn claim_pods<'a>(&'a self, claim: &'a Claim) -> Reply<'a, Result<u64, ClaimRefused>>;
    fn observe_pod<'a>(
        &'a self,
        pod: &'a PodName,
        facts: &'a PodFacts,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Observed, WriteRefused>>;
    fn remove_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        departure: Departure,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Removed, WriteRefused>>;
    fn move_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        to: &'a Pool,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), MoveRefused>>;
    fn apply_tiers<'a>(
        &'a self,
        tiers: &'a Tiers,
        edit: Edit<'a, Tiers>,
    ) -> Reply<'a, Result<(), Changed>>;
    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Changed>>;

    fn sweep(&self, most: usize) -> Reply<'_, Swept>;
    fn audit(&self) -> Reply<'_, Audited>;

    fn status(&self) -> Reply<'_, Status>;
    fn tiers(&self) -> Reply<'_, Tiers>;
    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>>;
    fn pod<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Option<PodStatus>>;
    fn pods(&self) -> Reply<'_, Vec<PodStatus>>;
    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<Found>>;
    /// Some calls, by the end of their lease or of their patience.
    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage>;
    /// Merchants with a document after one, by name.
    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        most: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>>;
    /// The first events after one.
    fn events_after(&self, id: EventId, most: usize) -> Reply<'_, Vec<Logged>>;
    /// The last events before one, or of all, the latest first.
    fn events_before(&self, id: Option<EventId>, most: usize) -> Reply<'_, Vec<Logged>>;

    /// Tells when calls that wait are handed a pod, by whichever replica.
    fn handoffs(&self) -> &Notifier<CallSid>;

    /// Notifies when a pod that is leaving has no call left, is gone, or serves again.
    fn drains(&self) -> &Notifier<PodName>;

    /// What the store's clock shows, as far as we know: that of events and leases.
    fn now(&self) -> Millis;

    /// Why the store can't be used, in a word; `None` while it can.
    fn outage(&self) -> Option<String>;

    /// Makes durable what is not, and lets go of files and connections.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// A number that cannot be guessed from another one; `RandomState` is seeded by the operating
/// system.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32
}
