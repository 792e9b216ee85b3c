//! The store without Redis: the fleet itself behind a lock, and a journal.

use std::{
    future::Future,
    io,
    path::Path,
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use tokio::sync::watch;

use crate::StoreMetrics;
use crate::{
    Notifier, Reply, Store,
    clock::Clock,
    journal::{Directory, Journal, JournalError},
};
use fleet::{
    Allocate, Allocation, Audited, CallPage, CallQuery, Change, Changed, Claim, ClaimRefused,
    Confirm, Confirmed, Departure, Drained, Edit, EventId, EventLog, Fleet, Found, Logged, Millis,
    MoveRefused, NotReleased, Observed, PodFacts, PodStatus, PodWriter, Refusal, Release, Released,
    Removed, Renew, Renewed, Status, Swept, Undrained, UnknownPod, WriteRefused,
    names::{CallSid, MerchantId, PodName, Pool},
    tiers::Tiers,
};

/// Events that are read back from a journal at most, and that a compacted one begins with.
const EVENTS: usize = 100_000;
const KEPT_IN_JOURNAL: usize = 2_000;
/// Changes and events that may wait for the disk before events have to, too: the bound of
/// what is in memory, and of the length of a line.
const AHEAD_OF_DISK: usize = 1_000;
/// Pods that are audited in one step.
const AUDIT_BATCH: usize = 500;

/// The fleet in this process, in memory or with a journal on disk.
pub struct Embedded {
    shared: Arc<Shared>,
    /// The last commit that is on disk; `None` without a journal.
    durable: Option<watch::Receiver<u64>>,
    writer: Mutex<Option<thread::JoinHandle<()>>>,
    handoffs: Notifier<CallSid>,
    drains: Notifier<PodName>,
    metrics: StoreMetrics,
}

struct Shared {
    // A std mutex: it is held for microseconds and never across an await.
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    fleet: Fleet,
    events: EventLog,
    clock: Clock,
    /// Decided, and not yet handed to the writer.
    pending: Vec<Change>,
    /// Counts the steps that changed something.
    commit: u64,
    closing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|_| poisoned())
    }
}

impl Embedded {
    /// A store that forgets everything when the process ends.
    /// For the time of one lease it believes pods about calls it does not know.
    pub fn in_memory(tiers: Tiers, lease_ttl: Millis, metrics: StoreMetrics) -> Self {
        let mut state = State::new(tiers);
        state.begin(lease_ttl);
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Condvar::new() });
        Self {
            shared,
            durable: None,
            writer: Mutex::new(None),
            handoffs: Notifier::default(),
            drains: Notifier::default(),
            metrics,
        }
    }

    /// A store that keeps a journal in the directory `path`. `seed` is the tier table of
    /// a journal that does not exist yet; an existing one brings its own.
    pub fn open(
        path: &Path,
        seed: Tiers,
        lease_ttl: Millis,
        metrics: StoreMetrics,
    ) -> Result<Self, JournalError> {
        let (directory, recovered) = Directory::take(path)?;
        let mut state = State::new(seed);
        match recovered {
            None => state.begin(lease_ttl),
            Some(recovered) => {
                if recovered.torn > 0 {
                    tracing::warn!(
                        bytes = recovered.torn,
                        "cut an unfinished record off the journal"
                    );
                }
                state.recover(recovered.changes);
            }
        }
        let journal = directory.begin(&state.facts())?;
        state.fleet.keep_changes();
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Condvar::new() });
        let (publish, durable) = watch::channel(0);
        let writer = thread::Builder::new().name("journal".into()).spawn({
            let shared = shared.clone();
            move || write(&shared, journal, &publish)
        });
        let writer = writer.map_err(|error| JournalError::Io { path: path.to_owned(), error })?;
        let (durable, writer) = (Some(durable), Mutex::new(Some(writer)));
        let (handoffs, drains) = (Notifier::default(), Notifier::default());
        Ok(Self { shared, durable, writer, handoffs, drains, metrics })
    }

    /// Keeps so many events from now on; none for 0.
    pub fn keep_events(&self, most: usize) {
        let mut state = self.shared.lock();
        let kept = state.events.before(None, most);
        state.events = EventLog::keeping(most);
        for Logged { at, event, .. } in kept.into_iter().rev() {
            state.events.push(event, at);
        }
        if most > 0 {
            state.fleet.keep_events();
        }
    }

    /// Runs one step on the fleet. Answers once everything the step has read or
    /// written is on disk: an answer may not rest on what a crash could undo.
    fn step<'a, T: Send + 'a>(
        &'a self,
        operation: &'static str,
        step: impl FnOnce(&mut Fleet, Millis) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        Box::pin(async move {
            let started = Instant::now();
            let _call = spans::store_call("embedded", operation, None);
            let (outcome, commit, handed, drained) = {
                let mut state = self.shared.lock();
                let now = state.clock.now();
                let outcome = step(&mut state.fleet, now);
                let events = state.fleet.take_events();
                let changes = state.fleet.take_changes();
                if self.durable.is_some() && !(events.is_empty() && changes.is_empty()) {
                    let has_changed = !changes.is_empty();
                    let told = events.iter().cloned().map(|event| Change::Told { at: now, event });
                    state.pending.extend(told);
                    state.pending.extend(changes);
                    // Events alone are written behind the answer, as long as the disk keeps up.
                    if has_changed || state.pending.len() > AHEAD_OF_DISK {
                        state.commit += 1;
                    }
                    self.shared.work.notify_one();
                }
                events.into_iter().for_each(|event| state.events.push(event, now));
                let (handed, drained) = (state.fleet.take_handed(), state.fleet.take_drained());
                (outcome, state.commit, handed, drained)
            };
            if let Some(durable) = &self.durable {
                let written = durable.clone().wait_for(|durable| *durable >= commit).await.is_ok();
                assert!(written, "the journal's writer is gone");
            }
            handed.iter().for_each(|call| self.handoffs.notify(call));
            drained.iter().for_each(|pod| self.drains.notify(pod));
            self.metrics.observe(operation, started.elapsed());
            Ok(outcome)
        })
    }
}

impl State {
    fn new(tiers: Tiers) -> Self {
        let (fleet, events) = (Fleet::new(tiers, 0), EventLog::keeping(EVENTS));
        let (clock, pending) = (Clock::start(), Vec::new());
        Self { fleet, events, clock, pending, commit: 0, closing: false }
    }

    /// What a journal begins with: all facts, the last events, and the time.
    fn facts(&self) -> Vec<Change> {
        let mut facts = self.fleet.facts();
        let told = self.events.before(None, KEPT_IN_JOURNAL).into_iter().rev();
        facts.extend(told.map(|Logged { at, event, .. }| Change::Told { at, event }));
        facts.push(Change::Time { at: self.clock.now() });
        facts
    }

    /// Takes over what a journal holds. If it ends later than the clock shows, the clock was
    /// set back since, and all deadlines move along: none is further away than it was.
    fn recover(&mut self, changes: Vec<Change>) {
        let mut ended_at = 0;
        for change in changes {
            match change {
                Change::Told { at, event } => self.events.push(event, at),
                Change::Time { at } => ended_at = at,
                change => self.fleet.replay(change),
            }
        }
        let ahead = ended_at.saturating_sub(self.clock.now());
        if ahead > 0 {
            tracing::warn!(
                seconds = ahead as f64 / 1_000.0,
                "the journal ends later than the clock shows now; deadlines are set back by as much"
            );
            self.fleet.shift(-(ahead as i64));
        }
    }

    fn follow_wall_clock(&mut self) {
        if let Some(by) = self.clock.follow_wall_clock() {
            let seconds = by as f64 / 1_000.0;
            tracing::warn!(seconds, "the wall clock was stepped; deadlines move along");
            self.fleet.shift(by);
        }
    }

    fn begin(&mut self, lease_ttl: Millis) {
        let trusting_until = self.clock.now() + lease_ttl;
        self.fleet.replay(Change::Began { trusting_until });
    }
}

/// The writer's life: take what is pending, make it durable, say so.
fn write(shared: &Shared, mut journal: Journal, publish: &watch::Sender<u64>) {
    loop {
        let mut state = shared.lock();
        while state.pending.is_empty() && !state.closing {
            state = shared.work.wait(state).unwrap_or_else(|_| poisoned());
        }
        if state.pending.is_empty() {
            return;
        }
        let mut changes = std::mem::take(&mut state.pending);
        changes.push(Change::Time { at: state.clock.now() });
        let commit = state.commit;
        let facts = journal.wants_compaction().then(|| state.facts());
        drop(state);
        let written = match facts {
            Some(facts) => journal.compact(&facts),
            None => journal.commit(&changes),
        };
        match written {
            Ok(()) => drop(publish.send(commit)),
            Err(error) => stop(journal.path(), &error),
        }
    }
}

/// After a failed write or sync nobody knows what the disk holds, and trying
/// again may lie. The next start reads what is there.
fn stop(path: &Path, error: &io::Error) -> ! {
    let directory = path.parent().unwrap_or(path).display();
    eprintln!(
        "smart-router: DATA_DIR={directory}: the journal cannot be written: {error}; stopping so that no answer is given that a restart would undo"
    );
    std::process::exit(74);
}

/// A panic inside the fleet may have left it between two facts.
fn poisoned() -> ! {
    eprintln!("smart-router: a step of the fleet failed half-way; stopping");
    std::process::exit(70);
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

    fn spare(&self, time: Millis) -> Reply<'_, ()> {
        self.step("spare", move |fleet, now| fleet.spare(time, now))
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
        departure: Departure,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Removed, WriteRefused>> {
        self.step("remove_pod", move |fleet, now| {
            fleet.remove_pod(pod, uid, departure, writer, now)
        })
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
    ) -> Reply<'a, Result<(), Changed>> {
        self.step("apply_tiers", move |fleet, _| fleet.apply_tiers(tiers, edit))
    }

    fn set_merchant<'a>(
        &'a self,
        id: &'a MerchantId,
        document: Option<&'a str>,
        edit: Edit<'a, str>,
    ) -> Reply<'a, Result<(), Changed>> {
        self.step("set_merchant", move |fleet, _| fleet.set_merchant(id, document, edit))
    }

    fn sweep(&self, most: usize) -> Reply<'_, Swept> {
        self.shared.lock().follow_wall_clock();
        self.step("sweep", move |fleet, now| fleet.sweep(most, now))
    }

    /// In batches, so that requests get in between.
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

    fn call<'a>(&'a self, call: &'a CallSid) -> Reply<'a, Option<Found>> {
        self.step("call", |fleet, _| fleet.find(call))
    }

    fn calls<'a>(&'a self, query: &'a CallQuery) -> Reply<'a, CallPage> {
        self.step("calls", |fleet, _| fleet.calls(query))
    }

    fn merchants<'a>(
        &'a self,
        after: Option<&'a MerchantId>,
        most: usize,
    ) -> Reply<'a, Vec<(MerchantId, String)>> {
        self.step("merchants", move |fleet, _| fleet.merchants(after, most))
    }

    fn events_after(&self, id: EventId, most: usize) -> Reply<'_, Vec<Logged>> {
        let events = self.shared.lock().events.after(id, most);
        Box::pin(async { Ok(events) })
    }

    fn events_before(&self, id: Option<EventId>, most: usize) -> Reply<'_, Vec<Logged>> {
        let events = self.shared.lock().events.before(id, most);
        Box::pin(async { Ok(events) })
    }

    fn handoffs(&self) -> &Notifier<CallSid> {
        &self.handoffs
    }

    fn drains(&self) -> &Notifier<PodName> {
        &self.drains
    }

    fn now(&self) -> Millis {
        self.shared.lock().clock.now()
    }

    fn outage(&self) -> Option<String> {
        None
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            self.shared.lock().closing = true;
            self.shared.work.notify_one();
            let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(writer) = writer {
                let joined = tokio::task::spawn_blocking(|| writer.join()).await;
                debug_assert!(joined.is_ok());
            }
        })
    }
}
