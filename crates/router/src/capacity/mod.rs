//! The capacity of pools: the decisions of the policy, as the router that takes them publishes
//! them to its own parts and to the other replicas.
//!
//! One router takes the decisions (`control/capacity.rs`). [`Capacity`] holds the latest ones on
//! every replica, for the API, the metrics and the writer of workloads.

mod call_tracker;
mod clock_check;
mod gauges;
mod pod_tracker;
mod pool_state;
mod scaling;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use self::scaling::Scaled;
pub(crate) use self::{
    call_tracker::{CallTracker, Pools},
    clock_check::ClockCheck,
    gauges::CapacityGauges,
    pod_tracker::PodTracker,
    pool_state::{FORECAST_STEP, PoolPolicy, SavedState, log_decision},
    scaling::{ScalingMode, ScalingReport},
};
use fleet::{
    Millis,
    capacity::{Reason, Zone},
    names::Pool,
};

/// Settings of the policy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CapacityConfig {
    /// Share of calls that find a warm pod.
    pub(crate) target: f64,
    pub(crate) zone: Zone,
    /// Action of the leader on the numbers.
    pub(crate) scaling: ScalingMode,
}

/// Age from which the decisions of this router are no longer reported: an autoscaler must not act
/// on them.
const MAX_AGE: Duration = Duration::from_secs(120);
/// The same for decisions of another router, which may be gone: three of its steps.
const MAX_FOLLOWED_AGE: Duration = Duration::from_secs(15);

/// The decisions for all pools at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CapacitySnapshot {
    /// Time of the decisions by the store's clock; 0 before the first ones.
    pub(crate) at: Millis,
    /// The router that took them.
    pub(crate) router: String,
    pub(crate) pools: BTreeMap<Pool, PoolCapacity>,
    /// This process took them.
    #[serde(skip)]
    pub(crate) is_own: bool,
}

impl CapacitySnapshot {
    /// Age from which the decisions are no longer reported.
    pub(crate) fn max_age(&self) -> Duration {
        if self.is_own { MAX_AGE } else { MAX_FOLLOWED_AGE }
    }
}

/// The decision for one pool, and the observation behind it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PoolCapacity {
    /// Pods that the policy asks for, ready and starting ones.
    pub(crate) desired: u64,
    pub(crate) reason: Reason,
    /// Pods that autoscalers should keep: `desired`, or more while surplus pods are in service or
    /// have calls ([`Capacity::set_scaling`]).
    pub(crate) published: u64,
    /// Pods that the forecast alone asks for.
    pub(crate) needed: u64,
    /// Pods in service, busy or idle.
    pub(crate) ready: u64,
    pub(crate) starting: u64,
    pub(crate) live: u64,
    pub(crate) waiting: u64,
    /// Slots for outbound dials: held for outstanding ones, or needed by waiting ones.
    #[serde(default)]
    pub(crate) dial_slots: u64,
    /// Dials that wait for a pod.
    #[serde(default)]
    pub(crate) waiting_dials: u64,
    /// Expected calls when a pod that starts now is ready.
    pub(crate) expected_calls: f64,
    /// The start-up time that the decision plans with, in seconds.
    pub(crate) start_up: f64,
    pub(crate) calls_per_pod: u64,
    /// Time in which pods of the pool idled within the last day, in pod-hours.
    pub(crate) idle_pod_hours: f64,
    /// Expected calls and the pods that they need, one point per 5 minutes from now.
    pub(crate) forecast: Vec<(f64, u64)>,
    /// The scaling of the pool's workload, if it has one.
    #[serde(default)]
    pub(crate) scaling: Option<ScalingReport>,
}

/// The latest decisions, and the floors that the scaler sets.
pub(crate) struct Capacity {
    snapshot: Mutex<Arc<CapacitySnapshot>>,
    scaled: Mutex<BTreeMap<Pool, Scaled>>,
    gauges: CapacityGauges,
    /// The router has the events from which decisions are taken.
    pub(crate) is_on: bool,
}

impl Capacity {
    pub(crate) fn new(gauges: CapacityGauges, is_on: bool) -> Self {
        Self { snapshot: Mutex::default(), scaled: Mutex::default(), gauges, is_on }
    }

    pub(crate) fn latest(&self) -> Arc<CapacitySnapshot> {
        self.snapshot().clone()
    }

    /// Keeps the published number of a pool at `floor` or above, because that number of its pods is
    /// in service or has calls. It applies to the latest decisions at once; the other replicas get
    /// it with the next ones.
    pub(crate) fn set_scaling(&self, pool: &Pool, floor: u64, report: ScalingReport) {
        self.change(pool, Some(Scaled { floor, report: Some(report) }));
    }

    /// Publishes the policy's own number of a pool, or the last one if a workload runs it.
    pub(crate) fn clear_scaling(&self, pool: &Pool) {
        self.change(pool, None);
    }

    fn change(&self, pool: &Pool, to: Option<Scaled>) {
        // The lock covers the publication: a later decision must not be replaced by this one.
        let mut scaled = self.scaled();
        let known = match to.clone() {
            Some(to) => scaled.insert(pool.clone(), to),
            None => scaled.remove(pool),
        };
        if known != to && to.is_some() {
            let latest = self.latest();
            self.publish_above(&scaled, CapacitySnapshot::clone(&latest));
        }
    }

    /// Publishes decisions of this router: applies the floors to them.
    pub(crate) fn publish(&self, snapshot: CapacitySnapshot) -> Arc<CapacitySnapshot> {
        self.publish_above(&self.scaled(), snapshot)
    }

    fn publish_above(
        &self,
        scaled: &BTreeMap<Pool, Scaled>,
        mut snapshot: CapacitySnapshot,
    ) -> Arc<CapacitySnapshot> {
        let before = self.latest();
        for (pool, capacity) in &mut snapshot.pools {
            let known = scaled.get(pool);
            if let Some(report) = known.and_then(|known| known.report.clone()) {
                capacity.scaling = Some(report);
            }
            // A new leader does not know the surplus pods yet: it must not publish a lower number.
            let pods = capacity.ready + capacity.starting;
            let last = before.pools.get(pool).map_or(pods, |last| last.published);
            let held = if capacity.scaling.is_some() { last } else { 0 };
            capacity.published = capacity.desired.max(known.map_or(held, |known| known.floor));
        }
        self.follow(Arc::new(snapshot))
    }

    /// Shows decisions as they are: those of another router.
    pub(crate) fn follow(&self, snapshot: Arc<CapacitySnapshot>) -> Arc<CapacitySnapshot> {
        self.gauges.set(snapshot.clone());
        *self.snapshot() = snapshot.clone();
        snapshot
    }

    fn snapshot(&self) -> MutexGuard<'_, Arc<CapacitySnapshot>> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scaled(&self) -> MutexGuard<'_, BTreeMap<Pool, Scaled>> {
        self.scaled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> Pool {
        "gold".parse().unwrap()
    }

    fn decided(desired: u64) -> CapacitySnapshot {
        let decision = PoolCapacity {
            desired,
            reason: Reason::Forecast,
            published: 0,
            needed: desired,
            ready: 1,
            starting: 0,
            live: 0,
            waiting: 0,
            dial_slots: 0,
            waiting_dials: 0,
            expected_calls: 0.0,
            start_up: 60.0,
            calls_per_pod: 1,
            idle_pod_hours: 0.0,
            forecast: Vec::new(),
            scaling: None,
        };
        let pools = BTreeMap::from([(pool(), decision)]);
        CapacitySnapshot { at: 1, router: "r".into(), pools, is_own: true }
    }

    #[test]
    fn decisions_of_another_router_are_reported_for_a_few_steps() {
        let own = decided(3);
        let text = serde_json::to_string(&own).unwrap();
        let followed: CapacitySnapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(followed.pools, own.pools);
        assert_eq!((followed.max_age(), own.max_age()), (MAX_FOLLOWED_AGE, MAX_AGE));
    }

    #[test]
    fn a_floor_holds_the_published_number_until_it_is_lowered() {
        let capacity = Capacity::new(CapacityGauges::default(), true);
        let published = |capacity: &Capacity| capacity.latest().pools[&pool()].published;
        capacity.publish(decided(5));
        assert_eq!(published(&capacity), 5);
        capacity.set_scaling(&pool(), 5, ScalingReport::default());
        capacity.publish(decided(3));
        assert_eq!(published(&capacity), 5, "five pods are in service");
        capacity.set_scaling(&pool(), 4, ScalingReport::default());
        assert_eq!(published(&capacity), 4);
        assert_eq!(capacity.latest().pools[&pool()].desired, 3);
        capacity.publish(decided(9));
        assert_eq!(published(&capacity), 9, "a floor is no ceiling");
        capacity.clear_scaling(&pool());
        capacity.publish(decided(2));
        assert_eq!(published(&capacity), 2);
    }
    #[test]
    fn a_new_leader_holds_the_number_of_a_workload_until_its_scaler_knows_the_pods() {
        let capacity = Capacity::new(CapacityGauges::default(), true);
        let published = |capacity: &Capacity| capacity.latest().pools[&pool()].published;
        let scaled = |desired| {
            let mut snapshot = decided(desired);
            let scaling = Some(ScalingReport::default());
            snapshot.pools.values_mut().for_each(|it| it.scaling.clone_from(&scaling));
            snapshot
        };
        let mut former = scaled(9);
        former.pools.values_mut().for_each(|it| it.published = 9);
        capacity.follow(Arc::new(former));
        capacity.publish(scaled(3));
        assert_eq!(published(&capacity), 9);
        capacity.set_scaling(&pool(), 4, ScalingReport::default());
        assert_eq!(published(&capacity), 4);
        capacity.clear_scaling(&pool());
        capacity.publish(scaled(2));
        assert_eq!(published(&capacity), 4, "the next leader holds it again");
    }
}
