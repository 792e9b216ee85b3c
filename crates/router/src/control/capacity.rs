//! Capacity: the router that takes the decisions observes each pool every few seconds, steps its
//! policy and publishes the decisions; the other replicas follow them.
//!
//! In a cluster that router is the leader. Without a Lease, the replicas share an epoch, and the
//! first one to update the store holds the decisions for as long as it renews its lease there.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use super::{Control, ticks};
use crate::{
    capacity::{
        CallTracker, CapacityConfig, CapacitySnapshot, ClockCheck, PodTracker, PoolPolicy, Pools,
        SavedState, ScalingReport, log_decision,
    },
    cluster::PodView,
};
use fleet::{
    CapacityRefused, CapacityUpdate, DialDemand, Millis, PrescaleOrder, Step,
    capacity::{Bounds, Observation, Prescale, Settings},
    default_pool,
    names::Pool,
    tiers::Tiers,
};
use store::{PoolPods, StoreError};

/// Interval at which events and pods are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the decisions.
const STEP_INTERVAL: Duration = Duration::from_secs(5);
/// Lease of the router that takes the decisions: several steps.
const LEASE: Millis = 15_000;
/// Interval at which the live calls are listed again: an edit of the store by hand has no event.
const LIST_INTERVAL: Duration = Duration::from_secs(600);
/// The start-up time before any is known, in seconds.
const START_UP: f64 = 60.0;
/// States read concurrently.
const CONCURRENT_READS: usize = 8;
/// States per update: each has about 30 kB.
const STATES_PER_UPDATE: usize = 20;

/// The state of the router that takes the decisions.
struct Lead {
    epoch: u64,
    calls: CallTracker,
    pools: BTreeMap<Pool, PoolPolicy>,
    orders: Vec<PrescaleOrder>,
    tiers: Tiers,
    known: HashSet<Pool>,
    listed_at: Instant,
    /// The pool whose state was saved last: the next update continues after it.
    saved_last: Option<Pool>,
    clock: ClockCheck,
}

/// The task of one replica.
struct Runner<'a> {
    control: &'a Control,
    config: CapacityConfig,
    view: Option<Arc<PodView>>,
    /// Identifies this process.
    holder: String,
    pods: PodTracker,
    lead: Option<Lead>,
    /// The last error, which is logged once.
    error: String,
}

impl Control {
    /// Takes capacity decisions, or follows them, until shutdown.
    pub(crate) async fn run_capacity(
        self: Arc<Self>,
        config: CapacityConfig,
        view: Option<Arc<PodView>>,
    ) {
        let holder = format!("{}_{:08x}", self.identity, crate::random_u32());
        let (pods, lead, error) = (PodTracker::default(), None, String::new());
        let mut runner = Runner { control: &self, config, view, holder, pods, lead, error };
        let (mut counts, mut step_at) = (ticks(COUNT_INTERVAL), Instant::now());
        while self.next_tick(&mut counts).await {
            let is_due = Instant::now() >= step_at;
            if is_due {
                step_at = Instant::now() + STEP_INTERVAL;
            }
            let outcome = runner.tick(is_due).await;
            runner.report(outcome);
        }
        runner.give_up().await;
    }

    /// The epoch with which this replica may take decisions: that of its last claim, while it leads
    /// or there is no Lease.
    pub(super) fn capacity_epoch(&self) -> Option<u64> {
        let is_leading = self.metrics.leader.get() == 1 && self.origin.get().is_some();
        is_leading.then(|| self.claimed_epoch.load(Ordering::Relaxed))
    }
}

impl Runner<'_> {
    async fn tick(&mut self, is_due: bool) -> Result<(), StoreError> {
        if let Some(view) = &self.view {
            self.pods.update(view);
        }
        let epoch = self.control.capacity_epoch();
        if let (Some(lead), Some(epoch), None) = (&mut self.lead, epoch, &self.view) {
            // A new list of pods raises the epoch of all replicas; the decisions stay here.
            lead.epoch = epoch;
        }
        if self.lead.as_ref().is_some_and(|lead| Some(lead.epoch) != epoch) {
            self.give_up().await;
        }
        match (&mut self.lead, epoch) {
            (Some(lead), _) if !is_due => {
                let store = &*self.control.store;
                let Lead { calls, tiers, known, .. } = lead;
                calls.update(store, &Pools { tiers, known }).await
            }
            (Some(_), _) => self.step().await,
            (None, Some(epoch)) if is_due && !self.control.lifecycle.stopping.is_cancelled() => {
                self.take_lead(epoch).await
            }
            (None, _) if is_due => self.follow().await,
            (None, _) => Ok(()),
        }
    }

    /// Logs an error once.
    fn report(&mut self, outcome: Result<(), StoreError>) {
        let error = outcome.err().map(|error| error.to_string()).unwrap_or_default();
        if !error.is_empty() && self.error != error {
            tracing::warn!(error, "cannot take or publish capacity decisions; retrying");
        }
        self.error = error;
    }

    /// Shows the decisions of another router.
    async fn follow(&mut self) -> Result<(), StoreError> {
        let record = self.control.store.capacity().await?;
        self.show(&record.decisions);
        Ok(())
    }

    fn show(&self, decisions: &str) {
        // Decisions of another version may not be readable; the last ones stay.
        if let Ok(snapshot) = serde_json::from_str::<CapacitySnapshot>(decisions) {
            self.control.capacity.follow(Arc::new(snapshot));
        }
    }

    /// Starts to take the decisions, unless another router does.
    async fn take_lead(&mut self, epoch: u64) -> Result<(), StoreError> {
        let store = &self.control.store;
        let record = store.capacity().await?;
        if record.excludes(&self.holder, epoch, store.now()) {
            self.show(&record.decisions);
            return Ok(());
        }
        // Start-up times from before belong to the last router, which has learned them.
        self.pods.take_start_ups();
        let update = CapacityUpdate {
            holder: self.holder.clone(),
            lease: LEASE,
            decisions: record.decisions.clone(),
            ..CapacityUpdate::default()
        };
        let updated = store.update_capacity(&update, self.control.writer(epoch)).await?;
        let Ok(orders) = updated else {
            self.show(&record.decisions);
            return Ok(());
        };
        let (tiers, pools) = store.pool_pods().await?;
        let mut lead = Lead {
            epoch,
            calls: CallTracker::default(),
            pools: BTreeMap::new(),
            orders,
            known: known_pools(&tiers, &pools),
            tiers,
            listed_at: Instant::now(),
            saved_last: None,
            clock: ClockCheck::default(),
        };
        let saved = self.load(lead.known.iter().cloned().collect()).await?;
        let cursors: HashMap<Pool, _> =
            saved.iter().map(|(pool, saved)| (pool.clone(), saved.cursor())).collect();
        let Lead { calls, tiers, known, .. } = &mut lead;
        calls.start(&**store, &Pools { tiers, known }, &cursors).await?;
        tracing::info!(
            epoch,
            pools = lead.known.len(),
            continued = saved.len(),
            "taking the capacity decisions"
        );
        for (pool, saved) in saved {
            let settings = self.settings(&pool, &lead);
            lead.pools.insert(pool, PoolPolicy::new(settings, Some(saved)));
        }
        self.lead = Some(lead);
        self.step().await
    }

    /// Reads the saved states of pools.
    async fn load(&self, pools: Vec<Pool>) -> Result<Vec<(Pool, SavedState)>, StoreError> {
        let read = |pool: Pool| async move {
            let text = self.control.store.capacity_state(&pool).await?;
            let saved = text.as_deref().map(SavedState::parse);
            if matches!(saved, Some(None)) {
                tracing::warn!(%pool, "the learned capacity state cannot be used; starting anew");
            }
            Ok::<_, StoreError>(saved.flatten().map(|saved| (pool, saved)))
        };
        let read = stream::iter(pools.into_iter().map(read)).buffer_unordered(CONCURRENT_READS);
        let read: Vec<Option<_>> = read.try_collect().await?;
        Ok(read.into_iter().flatten().collect())
    }

    fn settings(&self, pool: &Pool, lead: &Lead) -> Settings {
        let bounds = lead.tiers.bounds(pool);
        let orders = lead.orders.iter().filter(|order| order.pool == *pool);
        let order =
            |order: &PrescaleOrder| Prescale { pods: order.pods.into(), until: order.until };
        Settings {
            target: self.config.target,
            start_up: START_UP,
            calls_per_pod: lead.tiers.kind(pool).map_or(1, |kind| kind.cap().max(1).into()),
            zone: self.config.zone.clone(),
            bounds: Bounds {
                min: bounds.min.into(),
                max: bounds.max.map_or(u64::MAX, u64::from),
                inbound_reserve: bounds.inbound_reserve,
                prescale: orders.map(order).collect(),
            },
        }
    }

    /// Observes all pools, decides, and publishes.
    async fn step(&mut self) -> Result<(), StoreError> {
        let Some(mut lead) = self.lead.take() else { return Ok(()) };
        let outcome = self.step_with(&mut lead).await;
        match outcome {
            Ok(true) => self.lead = Some(lead),
            Ok(false) => {}
            Err(error) => {
                self.lead = Some(lead);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns whether this router still takes the decisions.
    async fn step_with(&mut self, lead: &mut Lead) -> Result<bool, StoreError> {
        let store = self.control.store.clone();
        let (tiers, pods) = store.pool_pods().await?;
        lead.known = known_pools(&tiers, &pods);
        lead.tiers = tiers;
        lead.pools.retain(|pool, _| lead.known.contains(pool));
        let dials = store.dial_demand().await?;
        let pools = Pools { tiers: &lead.tiers, known: &lead.known };
        lead.calls.update(&*store, &pools).await?;
        if lead.listed_at.elapsed() >= LIST_INTERVAL {
            lead.calls.list_calls(&*store, &pools).await?;
            lead.listed_at = Instant::now();
        }
        let new = lead.known.iter().filter(|pool| !lead.pools.contains_key(*pool));
        let saved: HashMap<Pool, SavedState> =
            self.load(new.cloned().collect()).await?.into_iter().collect();
        let snapshot = self.decide(lead, &pods, &dials, saved);
        let published = self.control.capacity.publish(snapshot);
        self.save(lead, &published).await
    }

    /// Steps the policy of each pool.
    fn decide(
        &mut self,
        lead: &mut Lead,
        pods: &[PoolPods],
        dials: &BTreeMap<Pool, DialDemand>,
        mut saved: HashMap<Pool, SavedState>,
    ) -> CapacitySnapshot {
        let at = self.control.store.now();
        let is_clock_step = lead.clock.has_stepped(at);
        let starting = self.starting(&lead.tiers, pods);
        let mut start_ups = self.start_ups(&lead.tiers, pods);
        let mut decided = BTreeMap::new();
        for PoolPods { pool, ready, not_ready, available } in pods {
            if !lead.known.contains(pool) {
                continue;
            }
            let settings = self.settings(pool, lead);
            let restored = saved.remove(pool);
            // The calls since that save were counted for no pool.
            let is_restored = restored.is_some();
            let (live, waiting) = lead.calls.calls(pool);
            let demand = dials.get(pool).copied().unwrap_or_default();
            let traffic = lead.calls.take(pool);
            let is_cluster = self.view.is_some();
            let observation = Observation {
                at,
                arrivals: traffic.arrivals,
                live,
                waiting,
                dial_slots: demand.slots(),
                refusals: traffic.refusals,
                ready: *ready as u64,
                starting: match is_cluster {
                    true => starting.get(pool).copied().unwrap_or(0),
                    false => *not_ready as u64,
                },
                start_ups: start_ups.remove(pool).unwrap_or_default(),
                durations: traffic.durations,
                gap: traffic.gap || is_restored || is_clock_step,
            };
            let policy = lead
                .pools
                .entry(pool.clone())
                .or_insert_with(|| PoolPolicy::new(settings.clone(), restored));
            let mut capacity = policy.step(settings, &observation, *available as u64);
            capacity.waiting_dials = demand.waiting;
            if is_cluster && lead.tiers.workload(pool).is_some() {
                capacity.scaling = Some(ScalingReport::default());
            }
            log_decision(pool, &observation, policy.bounds(), &capacity);
            decided.insert(pool.clone(), capacity);
        }
        let router = self.control.identity.clone();
        CapacitySnapshot { at, router, pools: decided, is_own: true }
    }

    /// The starting pods of each pool: that of their label, else the one that they will get.
    fn starting(&self, tiers: &Tiers, pods: &[PoolPods]) -> HashMap<Pool, u64> {
        let mut starting: HashMap<Pool, u64> = HashMap::new();
        let mut assigned = assigned(pods);
        for pin in self.pods.starting() {
            if let Some(pool) = future_pool(tiers, pin, &assigned) {
                *starting.entry(pool.clone()).or_default() += 1;
                *assigned.entry(pool).or_default() += 1;
            }
        }
        starting
    }

    fn start_ups(&mut self, tiers: &Tiers, pods: &[PoolPods]) -> HashMap<Pool, Vec<f64>> {
        let (mut start_ups, assigned) = (HashMap::<Pool, Vec<f64>>::new(), assigned(pods));
        for (pin, seconds) in self.pods.take_start_ups() {
            if let Some(pool) = future_pool(tiers, pin.as_ref(), &assigned) {
                start_ups.entry(pool).or_default().push(seconds);
            }
        }
        start_ups
    }

    /// Records the decisions and due states in the store. Returns whether this router still takes
    /// the decisions.
    async fn save(&self, lead: &mut Lead, snapshot: &CapacitySnapshot) -> Result<bool, StoreError> {
        let cursor = lead.calls.cursor();
        let mut update = CapacityUpdate {
            holder: self.holder.clone(),
            lease: LEASE,
            decisions: serde_json::to_string(snapshot).unwrap_or_default(),
            ..CapacityUpdate::default()
        };
        for (pool, policy) in &mut lead.pools {
            let Some(capacity) = snapshot.pools.get(pool) else { continue };
            update.events.extend(policy.due_event(capacity).map(|detail| (pool.clone(), detail)));
        }
        for pool in in_turn(&lead.pools, lead.saved_last.as_ref()) {
            if update.states.len() == STATES_PER_UPDATE {
                break;
            }
            let policy = lead.pools.get_mut(&pool).filter(|_| snapshot.pools.contains_key(&pool));
            if let Some(state) = policy.and_then(|policy| policy.due_state(cursor, false)) {
                lead.saved_last = Some(pool.clone());
                update.states.push((pool, state));
            }
        }
        let writer = self.control.writer(lead.epoch);
        match self.control.store.update_capacity(&update, writer).await {
            Ok(Ok(orders)) => {
                lead.orders = orders;
                Ok(true)
            }
            Ok(Err(refused)) => {
                log_refused(&refused);
                Ok(false)
            }
            Err(error) => {
                for (pool, _) in &update.states {
                    lead.pools.get_mut(pool).into_iter().for_each(PoolPolicy::save_failed);
                }
                Err(error)
            }
        }
    }

    /// Saves all states, and lets another router take the decisions at once.
    async fn give_up(&mut self) {
        let Some(mut lead) = self.lead.take() else { return };
        let cursor = lead.calls.cursor();
        let states = lead.pools.iter_mut();
        let states: Vec<(Pool, String)> = states
            .filter_map(|(pool, policy)| Some((pool.clone(), policy.due_state(cursor, true)?)))
            .collect();
        let decisions = serde_json::to_string(&*self.control.capacity.latest()).unwrap_or_default();
        let mut batches = states.chunks(STATES_PER_UPDATE).peekable();
        loop {
            let batch = batches.next().unwrap_or_default();
            let is_last = batches.peek().is_none();
            let update = CapacityUpdate {
                holder: self.holder.clone(),
                lease: if is_last { 0 } else { LEASE },
                decisions: decisions.clone(),
                states: batch.to_vec(),
                events: Vec::new(),
            };
            let writer = self.control.writer(lead.epoch);
            match self.control.store.update_capacity(&update, writer).await {
                Ok(Ok(_)) if is_last => {
                    return tracing::info!("saved the capacity states; another router may decide");
                }
                Ok(Ok(_)) => {}
                // The next router continues from the last save.
                Ok(Err(refused)) => return log_refused(&refused),
                Err(error) => {
                    return tracing::warn!(%error, "cannot save the capacity states");
                }
            }
        }
    }
}

/// All pools, from the one after `last`: with more states than updates can save, each has its turn.
fn in_turn<V>(pools: &BTreeMap<Pool, V>, last: Option<&Pool>) -> Vec<Pool> {
    let is_later = |pool: &&Pool| last.is_none_or(|last| *pool > last);
    let (later, before): (Vec<&Pool>, Vec<&Pool>) = pools.keys().partition(is_later);
    later.into_iter().chain(before).cloned().collect()
}

/// Pools that get decisions: those of the table, and merchants' own pools with pods.
fn known_pools(tiers: &Tiers, pods: &[PoolPods]) -> HashSet<Pool> {
    let pools = pods.iter().map(|pods| &pods.pool);
    pools.filter(|pool| tiers.kind(pool).is_some()).cloned().collect()
}

fn assigned(pods: &[PoolPods]) -> HashMap<Pool, usize> {
    pods.iter().map(|it| (it.pool.clone(), it.ready + it.not_ready)).collect()
}

/// The pool that a pod without one will get.
fn future_pool(tiers: &Tiers, pin: Option<&Step>, assigned: &HashMap<Pool, usize>) -> Option<Pool> {
    let pinned = pin.and_then(|pin| tiers.resolve(pin));
    let number = |pool: &Pool| assigned.get(pool).copied().unwrap_or(0);
    pinned.or_else(|| default_pool(tiers, number))
}

fn log_refused(refused: &CapacityRefused) {
    tracing::info!(%refused, "another router takes the capacity decisions");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_saved_in_turn() {
        let pool = |name: &str| name.parse::<Pool>().unwrap();
        let pools: BTreeMap<Pool, ()> = ["a", "b", "c"].map(|name| (pool(name), ())).into();
        let turn = |last: Option<&str>| {
            let order = in_turn(&pools, last.map(pool).as_ref());
            order.iter().map(Pool::as_tier_value).collect::<Vec<_>>().concat()
        };
        assert_eq!(turn(None), "abc");
        assert_eq!(turn(Some("b")), "cab");
        assert_eq!(turn(Some("bb")), "cab", "the pool is gone");
        assert_eq!(turn(Some("c")), "abc");
    }
}
