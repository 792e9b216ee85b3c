//! The store of the fleet: one method per operation, implemented in memory with a journal, and on
//! Redis.

mod capacity;
mod clock;
mod embedded;
mod journal;
mod metrics;
mod notifier;
mod outbound;
mod pacing;
mod redis;
mod scaling;

use std::{
    future::Future,
    pin::Pin,
    time::{SystemTime, UNIX_EPOCH},
};

pub use self::{
    capacity::{CapacityStore, PoolPods},
    embedded::Embedded,
    journal::JournalError,
    metrics::StoreMetrics,
    notifier::{Listener, Notifier},
    outbound::{Outbound, OutboundStore},
    pacing::Pace,
    redis::{Functions, MIGRATION_QUIET_PERIOD, Redis, RedisConfig, Unusable, retry},
    scaling::ScalingStore,
};
use fleet::{
    Allocate, Allocation, Attach, AttachRefused, Attached, Audited, CallLookup, CallPage,
    CallQuery, Claim, ClaimRefused, Confirm, Confirmed, Conflict, Detach, Drained, Edit, EventId,
    Failover, FailoverRefused, Heartbeat, LoggedEvent, Millis, MoveRefused, NotReleased, Observed,
    PodFacts, PodStatus, PodWriter, Refusal, Release, Released, RemovalMode, Removed, Renew,
    Renewed, Status, Swept, Undrained, UnknownPod, WriteRefused,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// A failed store operation. It may have taken effect if the store did not reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    #[error("the store is overloaded: retry in a moment")]
    Busy,
    #[error("the store is out of memory and refuses new data: {0}")]
    Full(String),
    #[error("the store refused the request: {0}")]
    Failed(String),
}

impl StoreError {
    /// The error type in traces.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "unavailable",
            Self::Busy => "busy",
            Self::Full(_) => "full",
            Self::Failed(_) => "failed",
        }
    }
}

/// Lifetimes of leases, drains and call records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ttls {
    pub lease: Millis,
    pub draining: Millis,
    pub call_info: Millis,
    /// Time in which a provisional call must be confirmed, if that is required.
    pub connect: Option<Millis>,
    /// Time in which a waiting call must poll again, if calls may wait.
    pub poll_timeout: Option<Millis>,
}

impl Ttls {
    /// The extension of pending calls after an outage, in which they could not confirm or poll.
    pub fn pending(&self) -> Option<Millis> {
        self.connect.max(self.poll_timeout)
    }
}

/// The wall clock of this process.
fn wall_clock() -> Millis {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as Millis)
}

tokio::task_local! {
    static OBSERVING: ();
}

/// Runs a read for people or monitoring. Load shedding refuses such reads first: they never
/// displace a call.
pub fn observing<F: Future>(read: F) -> impl Future<Output = F::Output> {
    OBSERVING.scope((), read)
}

fn is_observing() -> bool {
    OBSERVING.try_with(|()| ()).is_ok()
}

/// The future reply of a store.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The operations of a store. Each is atomic, and durable when it returns.
pub trait Store: CapacityStore + OutboundStore + ScalingStore + Send + Sync + 'static {
    fn allocate<'a>(&'a self, request: &'a Allocate) -> Reply<'a, Result<Allocation, Refusal>>;
    fn release<'a>(&'a self, request: &'a Release) -> Reply<'a, Result<Released, NotReleased>>;
    fn confirm<'a>(&'a self, request: &'a Confirm) -> Reply<'a, Confirmed>;
    /// Extends pending calls (provisional and waiting ones) to at least `time` from now, after an
    /// outage in which they could not confirm or poll.
    fn extend_pending(&self, time: Millis) -> Reply<'_, ()>;
    /// Attaches a media stream to its call.
    fn attach<'a>(&'a self, request: &'a Attach) -> Reply<'a, Result<Attached, AttachRefused>>;
    /// Moves a media stream to another pod.
    fn failover<'a>(
        &'a self,
        request: &'a Failover,
    ) -> Reply<'a, Result<Attached, FailoverRefused>>;
    /// Ends the call of a media stream that has ended.
    fn detach<'a>(&'a self, request: &'a Detach) -> Reply<'a, Result<Released, NotReleased>>;
    /// Extends the lease of a gateway, which reports some of the calls that it relays.
    fn heartbeat<'a>(
        &'a self,
        gateway: &'a GatewayId,
        lease: Millis,
        relayed: &'a [CallSid],
    ) -> Reply<'a, Heartbeat>;
    /// Records figures of streams for other replicas. They are dropped after `ttl`.
    fn record_figures<'a>(&'a self, figures: &'a [(CallSid, String)], ttl: Millis)
    -> Reply<'a, ()>;
    /// The figures of a stream that another replica relays.
    fn figures<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<String>>;
    /// The key of stream tokens; the first candidate becomes the key.
    fn media_secret<'a>(&'a self, candidate: &'a str) -> Reply<'a, String>;
    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed>;
    fn drain<'a>(&'a self, pod: &'a PodName, ttl: Millis)
    -> Reply<'a, Result<Drained, UnknownPod>>;
    fn undrain<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Result<Undrained, UnknownPod>>;

    /// Claims the pods of the store for a source of pods. Returns the fencing epoch of its writes.
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
        mode: RemovalMode,
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
    ) -> Reply<'a, Result<(), Conflict>>;
    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Conflict>>;

    fn sweep(&self, limit: usize) -> Reply<'_, Swept>;
    fn audit(&self) -> Reply<'_, Audited>;

    fn status(&self) -> Reply<'_, Status>;
    fn tiers(&self) -> Reply<'_, Tiers>;
    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>>;
    fn pod<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Option<PodStatus>>;
    fn pods(&self) -> Reply<'_, Vec<PodStatus>>;
    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<CallLookup>>;
    /// One page of calls, in the order of their lease or poll deadline.
    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage>;
    /// Merchants with a document, by name, starting after `after`.
    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        limit: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>>;
    /// The first events after `id`.
    fn events_after(&self, id: EventId, limit: usize) -> Reply<'_, Vec<LoggedEvent>>;
    /// The last events before `id`, or of all, the latest first.
    fn events_before(&self, id: Option<EventId>, limit: usize) -> Reply<'_, Vec<LoggedEvent>>;

    /// Notifies when any replica hands a pod to a waiting call.
    fn handoffs(&self) -> &Notifier<CallSid>;

    /// Notifies when a draining pod has no call left, is removed, or is undrained.
    fn drains(&self) -> &Notifier<PodName>;

    /// Notifies a gateway when one of its calls is released: its next heartbeat returns the call.
    fn endings(&self) -> &Notifier<GatewayId>;

    /// The estimated clock of the store, which dates events and leases.
    fn now(&self) -> Millis;

    /// The cause of the current outage, in a word; `None` while the store is available.
    fn outage(&self) -> Option<String>;

    /// Flushes pending writes and closes files and connections.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// An unpredictable number: `RandomState` is seeded by the operating system.
fn random_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(()) as u32
}
