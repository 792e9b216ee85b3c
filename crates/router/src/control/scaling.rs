//! Scaling: the leader takes surplus pods out of service, and lets the published number, or the
//! replicas of the workload, follow (decision 0037).
//!
//! Towards the Kubernetes API a write is fenced in two ways: the store confirms the epoch right
//! before it, and the API server refuses it if the workload changed since it was read.

mod pool;
mod writer;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use self::pool::PoolScaler;
use super::{Control, leader::Halt, ticks};
use crate::{
    capacity::{ScalingMode, ScalingReport},
    cluster::{Cluster, PodView, Workloads},
};
use fleet::{
    Millis, PodStatus, PodWriter,
    names::{PodName, Pool},
    workload::Workload,
};

/// Interval at which the pods of workloads are compared with the decisions.
const SCALE_INTERVAL: Duration = Duration::from_secs(1);
/// Decisions older than this are not acted on (ms).
const MAX_DECISION_AGE: Millis = 60_000;

/// The scaler of one replica. It acts while the replica leads.
struct Scaler<'a> {
    control: &'a Control,
    workloads: Workloads,
    view: Arc<PodView>,
    mode: ScalingMode,
    /// The epoch of the term in which the state was collected.
    epoch: Option<u64>,
    pools: BTreeMap<Pool, PoolScaler>,
    /// Surplus pods of no workload of a tier, and since when.
    orphans: HashMap<PodName, Millis>,
    /// The store may have such pods.
    may_have_orphans: bool,
    /// Numbers settle by the monotonic clock, which does not jump.
    began: Instant,
}

impl Control {
    /// Scales the workloads of tiers while this replica leads, until shutdown.
    pub(crate) async fn run_scaling(
        self: Arc<Self>,
        cluster: Cluster,
        view: Arc<PodView>,
        mode: ScalingMode,
    ) {
        let mut scaler = Scaler {
            control: &self,
            workloads: cluster.workloads(),
            view,
            mode,
            epoch: None,
            pools: BTreeMap::new(),
            orphans: HashMap::new(),
            may_have_orphans: true,
            began: Instant::now(),
        };
        let mut ticks = ticks(SCALE_INTERVAL);
        while self.next_tick(&mut ticks).await {
            let began = Instant::now();
            let outcome = scaler.tick().await;
            // A large fleet, or many workloads, take a small share of the time.
            ticks.reset_after(SCALE_INTERVAL.max(began.elapsed() * 5));
            match outcome {
                Ok(()) => {}
                Err(Halt::Fenced) => scaler.forget(),
                Err(Halt::Store(error)) => {
                    tracing::debug!(%error, "cannot scale the workloads; retrying");
                }
            }
        }
    }
}

impl Scaler<'_> {
    /// Drops the state of a term: another leader may act from now on.
    fn forget(&mut self) {
        (self.epoch, self.may_have_orphans) = (None, true);
        self.orphans.clear();
        for pool in std::mem::take(&mut self.pools).into_keys() {
            self.control.capacity.clear_scaling(&pool);
        }
    }

    async fn tick(&mut self) -> Result<(), Halt> {
        let epoch = self.control.capacity_epoch();
        if epoch != self.epoch {
            self.forget();
            self.epoch = epoch;
        }
        let Some(epoch) = epoch else { return Ok(()) };
        let store = &self.control.store;
        let tiers = store.tiers().await?;
        let wanted: BTreeMap<Pool, Workload> = tiers
            .iter()
            .filter_map(|(name, tier)| Some((tiers.pool(name)?, tier.workload.clone()?)))
            .collect();
        let gone = |pool: &Pool, scaler: &PoolScaler| wanted.get(pool) != Some(&scaler.workload);
        let gone: Vec<Pool> = self
            .pools
            .iter()
            .filter(|(pool, scaler)| gone(pool, scaler))
            .map(|(pool, _)| pool.clone())
            .collect();
        for pool in gone {
            self.pools.remove(&pool);
            self.control.capacity.clear_scaling(&pool);
            self.may_have_orphans = true;
        }
        let is_needed = !wanted.is_empty() || self.may_have_orphans;
        let is_known = self.view.lists().1.is_some() && self.view.knows_workloads();
        if !is_needed || !is_known {
            return Ok(());
        }
        self.view.set_workloads(&tiers);
        let pods: HashMap<PodName, PodStatus> =
            store.pods().await?.into_iter().map(|pod| (pod.name.clone(), pod)).collect();
        for (pool, workload) in wanted {
            self.scale(&pool, workload, &pods, self.control.writer(epoch)).await?;
        }
        self.return_orphans(&pods, self.control.writer(epoch)).await
    }

    /// Returns surplus pods whose workload no tier has any more, once the last number has settled.
    async fn return_orphans(
        &mut self,
        pods: &HashMap<PodName, PodStatus>,
        writer: PodWriter<'_>,
    ) -> Result<(), Halt> {
        let workloads = self.pools.values().map(|scaler| &scaler.workload);
        let scaled: HashSet<PodName> = workloads
            .flat_map(|workload| self.view.pods_of(workload))
            .map(|pod| pod.name)
            .collect();
        let elapsed = self.began.elapsed().as_millis() as Millis;
        let is_orphan = |pod: &&PodStatus| pod.is_surplus && !scaled.contains(&pod.name);
        let orphans: Vec<&PodStatus> = pods.values().filter(is_orphan).collect();
        let since: HashMap<PodName, Millis> = orphans
            .iter()
            .map(|pod| (pod.name.clone(), *self.orphans.get(&pod.name).unwrap_or(&elapsed)))
            .collect();
        (self.may_have_orphans, self.orphans) = (!since.is_empty(), since);
        for pod in orphans {
            if elapsed >= self.orphans[&pod.name].saturating_add(self.mode.settle_time()) {
                let store = &self.control.store;
                let returned = store.set_surplus(&pod.name, &pod.facts.uid, None, writer).await?;
                returned.map(drop).map_err(|_| Halt::Fenced)?;
            }
        }
        Ok(())
    }

    /// One step of a pool.
    async fn scale(
        &mut self,
        pool: &Pool,
        workload: Workload,
        pods: &HashMap<PodName, PodStatus>,
        writer: PodWriter<'_>,
    ) -> Result<(), Halt> {
        let (now, mode) = (self.control.store.now(), self.mode);
        let (settle_time, elapsed) =
            (mode.settle_time(), self.began.elapsed().as_millis() as Millis);
        let scaler = self
            .pools
            .entry(pool.clone())
            .or_insert_with(|| PoolScaler::new(workload, elapsed, settle_time));
        let latest = self.control.capacity.latest();
        let decided = latest.pools.get(pool).filter(|_| {
            let age = now.saturating_sub(latest.at);
            latest.router == self.control.identity && age <= MAX_DECISION_AGE
        });
        let read = self.view.pods_of(&scaler.workload);
        let step = pool::Step {
            control: self.control,
            workloads: &self.workloads,
            mode,
            pool,
            writer,
            now,
            elapsed,
            decided,
        };
        let (floor, report) = step.run(scaler, &read, pods).await?;
        self.control.capacity.set_scaling(pool, floor, report);
        Ok(())
    }
}

/// Describes what keeps a workload from being scaled.
fn failed(error: String) -> ScalingReport {
    ScalingReport { error: Some(error), ..ScalingReport::default() }
}
