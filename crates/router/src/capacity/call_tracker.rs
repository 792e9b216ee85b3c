//! The calls of each pool, from the event log. Every operation writes its event, whichever replica
//! runs it, so the log has the arrivals of all replicas without a further command per request.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use fleet::{
    CallLookup, CallQuery, Event, EventId, EventKind, LoggedEvent, RETURNED, Step,
    names::{CallSid, Pool},
    tiers::Tiers,
};
use store::{Store, StoreError};

/// Events per read. A read occupies the store and the thread that parses it, while calls wait.
const MIN_PAGE: usize = 100;
const MAX_PAGE: usize = 1_000;
/// Pause between reads.
const PAUSE: Duration = Duration::from_millis(5);
/// Reads per update at a steady rate: a page has 1/64 of the events of the last update. The reads
/// and their pauses fit into the interval of updates on a slow connection, too.
const READS: usize = 64;
/// Maximum number of reads per update; more events follow with the next one.
const MAX_READS: usize = 2 * READS;
/// Calls per read.
const CALL_PAGE: usize = 100;
/// Durations of a pool between two observations, at most.
const MAX_DURATIONS: usize = 1_000;
/// Interval between warnings about lost events.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The traffic of a pool since it was last taken.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) arrivals: u64,
    /// Calls that were refused, or left the queue, for lack of a pod.
    pub(crate) refusals: u64,
    /// Durations of ended calls, in seconds.
    pub(crate) durations: Vec<f64>,
    /// Events were lost: the numbers are too low.
    pub(crate) gap: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Tracked {
    pool: Pool,
    is_waiting: bool,
    /// The call is known from the list of calls only; the event of its arrival may follow.
    is_listed: bool,
}

/// Live and waiting calls by the first pool of their chain, and the traffic of each pool.
#[derive(Debug, Default)]
pub(crate) struct CallTracker {
    /// The last event that was read; `None` before the first read.
    cursor: Option<EventId>,
    /// Events of the last update.
    last_update: usize,
    calls: HashMap<CallSid, Tracked>,
    /// The last event before the end of the listing. Later events concern calls that it missed.
    listed_until: EventId,
    traffic: HashMap<Pool, Traffic>,
    /// Live and waiting calls.
    counts: HashMap<Pool, (u64, u64)>,
    /// The last warning about lost events.
    warned: Option<Instant>,
}

/// The pools that calls can be attributed to.
pub(crate) struct Pools<'a> {
    pub(crate) tiers: &'a Tiers,
    pub(crate) known: &'a HashSet<Pool>,
}

impl Pools<'_> {
    /// The first known pool of a chain: of the skipped steps, then the pool that the call got.
    fn first(&self, detail: &str, own: Option<&Pool>) -> Option<Pool> {
        let steps = detail.split(' ').filter_map(|word| word.split_once('='));
        let steps = steps.filter_map(|(step, _)| step.parse::<Step>().ok());
        self.first_of(steps, own)
    }

    fn first_of(&self, steps: impl Iterator<Item = Step>, own: Option<&Pool>) -> Option<Pool> {
        let pools = steps.filter_map(|step| self.tiers.resolve(&step)).chain(own.cloned());
        pools.into_iter().find(|pool| self.known.contains(pool))
    }
}

/// The largest id before this one.
fn before(id: EventId) -> EventId {
    match id {
        EventId { at, number: 0 } => EventId { at: at.saturating_sub(1), number: u64::MAX },
        EventId { at, number } => EventId { at, number: number - 1 },
    }
}

/// The next events after the one with this id, at most `limit`; `None` if the log has lost that
/// one, and perhaps events after it.
async fn events_since(
    store: &dyn Store,
    id: EventId,
    limit: usize,
) -> Result<Option<Vec<LoggedEvent>>, StoreError> {
    if id == EventId::default() {
        return store.events_after(id, limit).await.map(Some);
    }
    let mut events = store.events_after(before(id), limit + 1).await?;
    let is_there = events.first().is_some_and(|event| event.id == id);
    Ok(is_there.then(|| events.split_off(1)))
}

async fn newest_event(store: &dyn Store) -> Result<EventId, StoreError> {
    let newest = store.events_before(None, 1).await?;
    Ok(newest.first().map_or_else(EventId::default, |event| event.id))
}

impl CallTracker {
    pub(crate) fn cursor(&self) -> EventId {
        self.cursor.unwrap_or_default()
    }

    /// Starts over: counts the traffic since each pool's `cursors`, then lists the live calls.
    /// Pools without a cursor count from now on.
    pub(crate) async fn start(
        &mut self,
        store: &dyn Store,
        pools: &Pools<'_>,
        cursors: &HashMap<Pool, EventId>,
    ) -> Result<(), StoreError> {
        *self = Self { warned: self.warned, ..Self::default() };
        let newest = newest_event(store).await?;
        if let Some(oldest) = cursors.values().min().copied() {
            self.cursor = Some(oldest);
            let mut lost_before = None;
            if !self.has_event(store, oldest).await? {
                // The oldest event that is left: pools with an earlier cursor have a gap.
                let first = store.events_after(EventId::default(), 1).await?;
                lost_before = Some(first.first().map_or(newest, |event| event.id));
            }
            self.replay(store, pools, cursors, newest).await?;
            for (pool, cursor) in cursors {
                let is_lost = lost_before.is_some_and(|lost| *cursor < lost) || *cursor > newest;
                let traffic = self.traffic.entry(pool.clone()).or_default();
                traffic.gap = is_lost;
                // The durations of calls from before the replay are missing: the rest is biased.
                traffic.durations.clear();
            }
        }
        self.cursor = Some(newest);
        self.list_calls(store, pools).await
    }

    /// Counts the events up to `newest`, for each pool those after its cursor.
    async fn replay(
        &mut self,
        store: &dyn Store,
        pools: &Pools<'_>,
        cursors: &HashMap<Pool, EventId>,
        newest: EventId,
    ) -> Result<(), StoreError> {
        while self.cursor() < newest {
            let page = store.events_after(self.cursor(), MIN_PAGE).await?;
            let Some(last) = page.last() else { break };
            self.cursor = Some(last.id);
            for logged in page.iter().filter(|logged| logged.id <= newest) {
                let is_new =
                    |pool: &Pool| cursors.get(pool).is_some_and(|cursor| logged.id > *cursor);
                self.record(logged, pools, is_new);
            }
            // A page may be short: the store leaves out events of a kind that it does not know.
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Whether the log still has the event with this id, and so all events after it.
    async fn has_event(&self, store: &dyn Store, id: EventId) -> Result<bool, StoreError> {
        Ok(events_since(store, id, 0).await?.is_some())
    }

    /// Reads the events since the last update. If some were lost, all pools have a gap, and the
    /// live calls are listed again.
    pub(crate) async fn update(
        &mut self,
        store: &dyn Store,
        pools: &Pools<'_>,
    ) -> Result<(), StoreError> {
        let page_size = (self.last_update / READS).clamp(MIN_PAGE, MAX_PAGE);
        self.last_update = 0;
        for _ in 0..MAX_READS {
            let Some(page) = events_since(store, self.cursor(), page_size).await? else {
                return self.start_after_gap(store, pools).await;
            };
            if let Some(LoggedEvent { id, .. }) = page.last() {
                self.cursor = Some(*id);
            }
            page.iter().for_each(|logged| self.record(logged, pools, |_| true));
            self.last_update += page.len();
            if page.len() < page_size {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Starts over after lost events. The tracker stays as it is if the store fails meanwhile.
    async fn start_after_gap(
        &mut self,
        store: &dyn Store,
        pools: &Pools<'_>,
    ) -> Result<(), StoreError> {
        if self.warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
            self.warned = Some(Instant::now());
            tracing::warn!(
                "events were lost before they were counted; the capacity policy does not learn \
                 from this interval: raise EVENTS if it happens under load"
            );
        }
        let mut fresh = Self { warned: self.warned, ..Self::default() };
        fresh.start(store, pools, &HashMap::new()).await?;
        fresh.traffic = std::mem::take(&mut self.traffic);
        for pool in pools.known {
            fresh.traffic.entry(pool.clone()).or_default().gap = true;
        }
        *self = fresh;
        Ok(())
    }

    /// Replaces the live and waiting calls by those of the store.
    pub(crate) async fn list_calls(
        &mut self,
        store: &dyn Store,
        pools: &Pools<'_>,
    ) -> Result<(), StoreError> {
        let mut listed = Vec::new();
        for is_waiting in [false, true] {
            let mut query =
                CallQuery { waiting: is_waiting, limit: CALL_PAGE, ..CallQuery::default() };
            loop {
                let page = store.calls(&query).await?;
                for found in page.calls {
                    let (call, tried, own) = match found {
                        CallLookup::Live(it) => (it.call, it.tried, Some(it.source_pool)),
                        CallLookup::Waiting(it) => (it.call, it.tried, None),
                    };
                    let steps = tried.into_iter().map(|skipped| skipped.step);
                    if let Some(pool) = pools.first_of(steps, own.as_ref()) {
                        let is_listed = self.calls.get(&call).is_none_or(|known| known.is_listed);
                        listed.push((call, Tracked { pool, is_waiting, is_listed }));
                    }
                }
                query.after = page.next;
                if query.after.is_none() {
                    break;
                }
            }
        }
        self.listed_until = newest_event(store).await?;
        self.calls.clear();
        self.counts.clear();
        listed.into_iter().for_each(|(call, tracked)| self.insert(call, tracked));
        Ok(())
    }

    fn insert(&mut self, call: CallSid, tracked: Tracked) {
        self.remove(&call);
        let count = self.counts.entry(tracked.pool.clone()).or_default();
        *(if tracked.is_waiting { &mut count.1 } else { &mut count.0 }) += 1;
        self.calls.insert(call, tracked);
    }

    fn remove(&mut self, call: &CallSid) -> Option<Tracked> {
        let tracked = self.calls.remove(call)?;
        if let Some(count) = self.counts.get_mut(&tracked.pool) {
            let count = if tracked.is_waiting { &mut count.1 } else { &mut count.0 };
            *count = count.saturating_sub(1);
        }
        Some(tracked)
    }

    /// Records an event; its traffic counts if `is_counted` holds for its pool.
    fn record(
        &mut self,
        LoggedEvent { id, event, .. }: &LoggedEvent,
        pools: &Pools<'_>,
        is_counted: impl Fn(&Pool) -> bool,
    ) {
        let Event { kind, call, pool: own, detail, .. } = event;
        let Some(call) = call else { return };
        match kind {
            EventKind::Allocated | EventKind::HandedOff | EventKind::Waiting => {
                let known = self.calls.get(call);
                let is_new = detail != RETURNED
                    && known.is_none_or(|known| {
                        known.is_listed && *kind != EventKind::HandedOff && *id <= self.listed_until
                    });
                let known = known.map(|tracked| tracked.pool.clone());
                let Some(pool) = known.or_else(|| pools.first(detail, own.as_ref())) else {
                    return;
                };
                if is_new && is_counted(&pool) {
                    self.traffic.entry(pool.clone()).or_default().arrivals += 1;
                }
                let is_waiting = *kind == EventKind::Waiting;
                self.insert(call.clone(), Tracked { pool, is_waiting, is_listed: false });
            }
            EventKind::Refused => {
                let reason = detail.split(' ').next().unwrap_or_default();
                // Other refusals, such as those by a merchant's limits, need no pod.
                if !matches!(reason, "no_pods" | "queue_full") {
                    return;
                }
                if let Some(pool) = pools.first(detail, None).filter(|pool| is_counted(pool)) {
                    let traffic = self.traffic.entry(pool).or_default();
                    traffic.arrivals += 1;
                    traffic.refusals += 1;
                }
            }
            EventKind::LeftQueue => {
                let left = self.remove(call).map(|tracked| tracked.pool);
                if let Some(pool) = left.filter(|pool| is_counted(pool)) {
                    self.traffic.entry(pool).or_default().refusals += 1;
                }
            }
            EventKind::Ended => {
                let Some(Tracked { pool, .. }) = self.remove(call) else { return };
                let lasted = detail.split(' ').nth(1).and_then(|text| text.parse::<u64>().ok());
                let durations = &mut self.traffic.entry(pool).or_default().durations;
                if let Some(lasted) = lasted.filter(|_| durations.len() < MAX_DURATIONS) {
                    durations.push(lasted as f64 / 1_000.0);
                }
            }
            _ => {}
        }
    }

    /// Live and waiting calls of a pool.
    pub(crate) fn calls(&self, pool: &Pool) -> (u64, u64) {
        self.counts.get(pool).copied().unwrap_or_default()
    }

    /// Takes the traffic of a pool since the last time.
    pub(crate) fn take(&mut self, pool: &Pool) -> Traffic {
        self.traffic.remove(pool).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
