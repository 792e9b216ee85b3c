//! The embedded store: the fleet behind a mutex, with an optional journal on disk.

mod capacity;
mod outbound;
mod scaling;
mod writer;

use std::{
    future::Future,
    path::Path,
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use tokio::sync::watch;

use self::writer::{exit_poisoned, run_writer};
use crate::{
    Notifier, Reply, Store, StoreMetrics,
    clock::Clock,
    journal::{Directory, JournalError},
};
use fleet::{
    Allocate, Allocation, Attach, AttachRefused, Attached, Audited, CallLookup, CallPage,
    CallQuery, Change, Claim, ClaimRefused, Confirm, Confirmed, Conflict, Detach, Drained, Edit,
    EventId, EventLog, Failover, FailoverRefused, Fleet, Heartbeat, LoggedEvent, Millis,
    MoveRefused, NotReleased, Observed, PodFacts, PodStatus, PodWriter, Refusal, Release, Released,
    RemovalMode, Removed, Renew, Renewed, Status, Swept, Undrained, UnknownPod, WriteRefused,
    names::{CallSid, GatewayId, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// Events in memory by default, and events in a snapshot.
const MAX_EVENTS: usize = 100_000;
const SNAPSHOT_EVENTS: usize = 2_000;
/// Changes and events not yet on disk beyond which events wait for the disk, too. Bounds memory and
/// the length of a journal record.
const MAX_UNSYNCED: usize = 1_000;
/// Pods per audit step.
const AUDIT_BATCH: usize = 500;

/// The fleet in this process, in memory or with a journal on disk.
pub struct Embedded {
    shared: Arc<Shared>,
    /// The last durable commit; `None` without a journal.
    durable: Option<watch::Receiver<u64>>,
    writer: Mutex<Option<thread::JoinHandle<()>>>,
    handoffs: Notifier<CallSid>,
    drains: Notifier<PodName>,
    endings: Notifier<GatewayId>,
    metrics: StoreMetrics,
}

struct Shared {
    // A std mutex: it is held for microseconds, never across an await.
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    fleet: Fleet,
    events: EventLog,
    clock: Clock,
    /// Changes that the writer has not taken yet.
    pending: Vec<Change>,
    /// Number of the last step that has to be durable.
    commit: u64,
    is_closing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|_| exit_poisoned())
    }
}

impl Embedded {
    /// A store without persistence. Its re-registration window is one lease: renewals re-register
    /// calls from before the restart.
    pub fn in_memory(tiers: Tiers, lease_ttl: Millis, metrics: StoreMetrics) -> Self {
        let mut state = State::new(tiers);
        state.open_reregistration_window(lease_ttl);
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Condvar::new() });
        Self {
            shared,
            durable: None,
            writer: Mutex::new(None),
            handoffs: Notifier::default(),
            drains: Notifier::default(),
            endings: Notifier::default(),
            metrics,
        }
    }

    /// A store with a journal in the directory `path`. `seed` is the tier table of a new journal;
    /// an existing journal has its own.
    pub fn open(
        path: &Path,
        seed: Tiers,
        lease_ttl: Millis,
        metrics: StoreMetrics,
    ) -> Result<Self, JournalError> {
        let (directory, recovered) = Directory::open(path)?;
        let mut state = State::new(seed);
        match recovered {
            None => state.open_reregistration_window(lease_ttl),
            Some(recovered) => {
                if recovered.incomplete > 0 {
                    tracing::warn!(
                        bytes = recovered.incomplete,
                        "the last record of the journal was incomplete; removed it"
                    );
                }
                state.recover(recovered.changes);
            }
        }
        let journal = directory.begin(&state.snapshot())?;
        state.fleet.enable_change_log();
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Condvar::new() });
        let (publish, durable) = watch::channel(0);
        let writer = thread::Builder::new().name("journal".into()).spawn({
            let shared = shared.clone();
            move || run_writer(&shared, journal, &publish)
        });
        let writer = writer.map_err(|error| JournalError::Io { path: path.to_owned(), error })?;
        let (durable, writer) = (Some(durable), Mutex::new(Some(writer)));
        let (handoffs, drains, endings) = Default::default();
        Ok(Self { shared, durable, writer, handoffs, drains, endings, metrics })
    }

    /// Limits the event log; 0 disables it.
    pub fn set_event_limit(&self, limit: usize) {
        let mut state = self.shared.lock();
        let events = state.events.before(None, limit);
        state.events = EventLog::with_capacity(limit);
        for LoggedEvent { at, event, .. } in events.into_iter().rev() {
            state.events.push(event, at);
        }
        if limit > 0 {
            state.fleet.enable_events();
        }
    }

    /// Runs one step on the fleet. Returns once everything that the step has read or written is on
    /// disk: a crash must not undo data that a reply was based on.
    pub(crate) fn step<'a, T: Send + 'a>(
        &'a self,
        operation: &'static str,
        step: impl FnOnce(&mut Fleet, Millis) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        Box::pin(async move {
            let started = Instant::now();
            let _span = spans::store_span("embedded", operation, None);
            let (outcome, commit, handed, drained, ending) = {
                let mut state = self.shared.lock();
                let now = state.clock.now();
                let outcome = step(&mut state.fleet, now);
                let events = state.fleet.take_events();
                let changes = state.fleet.take_changes();
                if self.durable.is_some() && !(events.is_empty() && changes.is_empty()) {
                    let has_changed = !changes.is_empty();
                    let recorded = events
                        .iter()
                        .cloned()
                        .map(|event| Change::EventRecorded { at: now, event });
                    state.pending.extend(recorded);
                    state.pending.extend(changes);
                    // Events alone are written asynchronously, as long as the disk keeps up.
                    if has_changed || state.pending.len() > MAX_UNSYNCED {
                        state.commit += 1;
                    }
                    self.shared.work.notify_one();
                }
                events.into_iter().for_each(|event| state.events.push(event, now));
                let (handed, drained) = (state.fleet.take_handoffs(), state.fleet.take_drained());
                (outcome, state.commit, handed, drained, state.fleet.take_ending())
            };
            if let Some(durable) = &self.durable {
                let written = durable.clone().wait_for(|durable| *durable >= commit).await.is_ok();
                assert!(written, "the journal writer has stopped");
            }
            handed.iter().for_each(|call| self.handoffs.notify(call));
            drained.iter().for_each(|pod| self.drains.notify(pod));
            ending.iter().for_each(|gateway| self.endings.notify(gateway));
            self.metrics.observe(operation, started.elapsed());
            Ok(outcome)
        })
    }
}

impl State {
    fn new(tiers: Tiers) -> Self {
        let (fleet, events) = (Fleet::new(tiers, 0), EventLog::with_capacity(MAX_EVENTS));
        let (clock, pending) = (Clock::start(), Vec::new());
        Self { fleet, events, clock, pending, commit: 0, is_closing: false }
    }

    /// The content of a compacted journal: all facts, the last events, and the time.
    fn snapshot(&self) -> Vec<Change> {
        let mut facts = self.fleet.facts();
        let recorded = self.events.before(None, SNAPSHOT_EVENTS).into_iter().rev();
        facts.extend(
            recorded.map(|LoggedEvent { at, event, .. }| Change::EventRecorded { at, event }),
        );
        facts.push(Change::Time { at: self.clock.now() });
        facts
    }

    /// Replays a journal. If it ends in the future, the clock was set back since; all deadlines are
    /// shifted back by the difference, so that the remaining times stay the same.
    fn recover(&mut self, changes: Vec<Change>) {
        let mut ended_at = 0;
        for change in changes {
            match change {
                Change::EventRecorded { at, event } => self.events.push(event, at),
                Change::Time { at } => ended_at = at,
                change => self.fleet.apply(change),
            }
        }
        let ahead = ended_at.saturating_sub(self.clock.now());
        if ahead > 0 {
            tracing::warn!(
                seconds = ahead as f64 / 1_000.0,
                "the journal ends in the future: the clock was set back; shifting all deadlines"
            );
            self.fleet.shift(-(ahead as i64));
        }
    }

    fn follow_wall_clock(&mut self) {
        if let Some(by) = self.clock.follow_wall_clock() {
            let seconds = by as f64 / 1_000.0;
            tracing::warn!(seconds, "the wall clock was stepped; shifting all deadlines");
            self.fleet.shift(by);
        }
    }

    fn open_reregistration_window(&mut self, lease_ttl: Millis) {
        let trusting_until = self.clock.now() + lease_ttl;
        self.fleet.apply(Change::Began { trusting_until });
    }
}

impl Store for Embedded {
    fn allocate<'a>(&'a self, request: &'a Allocate) -> Reply<'a, Result<Allocation, Refusal>> {
        self.step("allocate", |fleet, now| fleet.allocate(request, now))
    }

    fn release<'a>(&'a self, request: &'a Release) -> Reply<'a, Result<Released, NotReleased>> {
        self.step("release", |fleet, now| fleet.release(request, now))
    }

    fn confirm<'a>(&'a self, request: &'a Confirm) -> Reply<'a, Confirmed> {
        self.step("confirm", move |fleet, now| fleet.confirm(request, now))
    }

    fn extend_pending(&self, time: Millis) -> Reply<'_, ()> {
        // The metric label keeps the operation's former name.
        self.step("spare", move |fleet, now| fleet.extend_pending(time, now))
    }

    fn attach<'a>(&'a self, request: &'a Attach) -> Reply<'a, Result<Attached, AttachRefused>> {
        self.step("attach", |fleet, now| fleet.attach(request, now))
    }

    fn failover<'a>(
        &'a self,
        request: &'a Failover,
    ) -> Reply<'a, Result<Attached, FailoverRefused>> {
        self.step("failover", |fleet, now| fleet.failover(request, now))
    }

    fn detach<'a>(&'a self, request: &'a Detach) -> Reply<'a, Result<Released, NotReleased>> {
        self.step("detach", |fleet, now| fleet.detach(request, now))
    }

    fn heartbeat<'a>(
        &'a self,
        gateway: &'a GatewayId,
        lease: Millis,
        relayed: &'a [CallSid],
    ) -> Reply<'a, Heartbeat> {
        self.step("heartbeat", move |fleet, now| fleet.heartbeat(gateway, lease, relayed, now))
    }

    fn record_figures<'a>(&'a self, _: &'a [(CallSid, String)], _: Millis) -> Reply<'a, ()> {
        // No other replica reads them.
        Box::pin(async { Ok(()) })
    }

    fn figures<'a>(&'a self, _: &'a CallSid) -> Reply<'a, Option<String>> {
        Box::pin(async { Ok(None) })
    }

    fn media_secret<'a>(&'a self, candidate: &'a str) -> Reply<'a, String> {
        self.step("media_secret", |fleet, _| fleet.media_secret(candidate))
    }

    fn renew<'a>(&'a self, request: &'a Renew) -> Reply<'a, Renewed> {
        self.step("renew", |fleet, now| fleet.renew(request, now))
    }

    fn drain<'a>(
        &'a self,
        pod: &'a PodName,
        ttl: Millis,
    ) -> Reply<'a, Result<Drained, UnknownPod>> {
        self.step("drain", move |fleet, now| fleet.drain(pod, ttl, now))
    }

    fn undrain<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Result<Undrained, UnknownPod>> {
        self.step("undrain", |fleet, _| fleet.undrain(pod))
    }

    fn observe_pod<'a>(
        &'a self,
        pod: &'a PodName,
        facts: &'a PodFacts,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Observed, WriteRefused>> {
        self.step("observe_pod", move |fleet, now| fleet.observe_pod(pod, facts, writer, now))
    }

    fn remove_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        mode: RemovalMode,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Removed, WriteRefused>> {
        self.step("remove_pod", move |fleet, now| fleet.remove_pod(pod, uid, mode, writer, now))
    }

    fn move_pod<'a>(
        &'a self,
        pod: &'a PodName,
        uid: &'a str,
        to: &'a Pool,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<(), MoveRefused>> {
        self.step("move_pod", move |fleet, _| fleet.move_pod(pod, uid, to, writer))
    }

    fn claim_pods<'a>(&'a self, claim: &'a Claim) -> Reply<'a, Result<u64, ClaimRefused>> {
        self.step("claim_pods", |fleet, now| fleet.claim_pods(claim, now))
    }

    fn apply_tiers<'a>(
        &'a self,
        tiers: &'a Tiers,
        edit: Edit<'a, Tiers>,
    ) -> Reply<'a, Result<(), Conflict>> {
        self.step("apply_tiers", move |fleet, _| fleet.apply_tiers(tiers, edit))
    }

    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Conflict>> {
        self.step("set_merchant", move |fleet, _| fleet.set_merchant(id, document, edit))
    }

    fn sweep(&self, limit: usize) -> Reply<'_, Swept> {
        self.shared.lock().follow_wall_clock();
        self.step("sweep", move |fleet, now| fleet.sweep(limit, now))
    }

    /// Runs in batches, so that requests run in between.
    fn audit(&self) -> Reply<'_, Audited> {
        Box::pin(async {
            let names = self.step("pod_names", |fleet, _| fleet.pod_names()).await?;
            let mut all = Audited::default();
            for batch in names.chunks(AUDIT_BATCH) {
                let audited = self.step("audit", move |fleet, _| fleet.audit(batch)).await?;
                all.pods += audited.pods;
                all.repaired += audited.repaired;
                tokio::task::yield_now().await;
            }
            Ok(all)
        })
    }

    fn status(&self) -> Reply<'_, Status> {
        self.step("status", |fleet, _| fleet.status())
    }

    fn tiers(&self) -> Reply<'_, Tiers> {
        self.step("tiers", |fleet, _| fleet.tiers().clone())
    }

    fn merchant<'a>(&'a self, id: &'a MerchantId) -> Reply<'a, Option<String>> {
        self.step("merchant", |fleet, _| fleet.merchant(id).map(str::to_owned))
    }

    fn pod<'a>(&'a self, pod: &'a PodName) -> Reply<'a, Option<PodStatus>> {
        self.step("pod", |fleet, _| fleet.pod(pod))
    }

    fn pods(&self) -> Reply<'_, Vec<PodStatus>> {
        self.step("pods", |fleet, _| fleet.pods())
    }

    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<CallLookup>> {
        self.step("call", |fleet, _| fleet.find(call))
    }

    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage> {
        self.step("calls", |fleet, _| fleet.calls(query))
    }

    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        limit: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>> {
        self.step("merchants", move |fleet, _| fleet.merchants(after, limit))
    }

    fn events_after(&self, id: EventId, limit: usize) -> Reply<'_, Vec<LoggedEvent>> {
        let events = self.shared.lock().events.after(id, limit);
        Box::pin(async { Ok(events) })
    }

    fn events_before(&self, id: Option<EventId>, limit: usize) -> Reply<'_, Vec<LoggedEvent>> {
        let events = self.shared.lock().events.before(id, limit);
        Box::pin(async { Ok(events) })
    }

    fn handoffs(&self) -> &Notifier<CallSid> {
        &self.handoffs
    }

    fn drains(&self) -> &Notifier<PodName> {
        &self.drains
    }

    fn endings(&self) -> &Notifier<GatewayId> {
        &self.endings
    }

    fn now(&self) -> Millis {
        self.shared.lock().clock.now()
    }

    fn outage(&self) -> Option<String> {
        None
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            self.shared.lock().is_closing = true;
            self.shared.work.notify_one();
            let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(writer) = writer {
                let joined = tokio::task::spawn_blocking(|| writer.join()).await;
                debug_assert!(joined.is_ok());
            }
        })
    }
}
