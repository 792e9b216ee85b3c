//! Gauges of the capacity of pools: the latest decisions, of this or another replica.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::Counter, gauge::ConstGauge},
};

use super::{CapacitySnapshot, PoolCapacity, ScalingReport};
use fleet::capacity::Reason;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabel {
    pool: String,
}

/// The latest decisions, and when this process saw them first.
type Latest = Option<(Arc<CapacitySnapshot>, Instant)>;

/// The latest decisions.
#[derive(Debug, Clone, Default)]
pub(crate) struct CapacityGauges {
    latest: Arc<Mutex<Latest>>,
    pub(crate) scaling: ScalingCounters,
}

/// Writes of workloads by this router.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScalingCounters {
    pub(crate) writes: Counter,
    pub(crate) errors: Counter,
}

impl CapacityGauges {
    pub(super) fn set(&self, snapshot: Arc<CapacitySnapshot>) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let known = latest.as_ref().filter(|(known, _)| known.at == snapshot.at);
        let seen = known.map_or_else(Instant::now, |(_, seen)| *seen);
        *latest = Some((snapshot, seen));
    }
}

/// A gauge of a pool: name, help text, value.
type CapacityGauge = (&'static str, &'static str, fn(&PoolCapacity) -> f64);

const GAUGES: [CapacityGauge; 10] = [
    ("desired_pods", "Pods that the pool should have, for autoscalers", |pool| {
        pool.published as f64
    }),
    ("capacity_policy_pods", "Pods that the capacity policy asks for", |pool| pool.desired as f64),
    ("capacity_ready_pods", "Pods in service, busy or idle", |pool| pool.ready as f64),
    ("capacity_starting_pods", "Pods that are not ready yet", |pool| pool.starting as f64),
    ("capacity_expected_calls", "Calls expected when a pod that starts now is ready", |pool| {
        pool.expected_calls
    }),
    ("capacity_start_up_seconds", "Start-up time of pods that the policy plans with", |pool| {
        pool.start_up
    }),
    ("capacity_at_max", "1 if demand is above the pool's max", |pool| {
        f64::from(u8::from(pool.reason == Reason::Max))
    }),
    ("capacity_pods_not_ready", "1 if starting pods do not become ready", |pool| {
        f64::from(u8::from(pool.reason == Reason::PodsNotReady))
    }),
    ("scaling_surplus_pods", "Pods out of service because they are surplus", |pool| {
        pool.scaling.as_ref().map_or(0.0, |scaling| scaling.surplus as f64)
    }),
    (
        "scaling_blocked",
        "1 if an error or a conflict keeps the workload from being scaled",
        |pool| {
            let is_blocked = |it: &ScalingReport| it.error.is_some() || it.conflict.is_some();
            f64::from(u8::from(pool.scaling.as_ref().is_some_and(is_blocked)))
        },
    ),
];

impl Collector for CapacityGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counters = [
            ("scaling_writes", "Changes of the replicas of workloads", &self.scaling.writes),
            ("scaling_errors", "Failed requests to scale workloads", &self.scaling.errors),
        ];
        for (name, help, counter) in counters {
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let latest = latest.filter(|(snapshot, seen)| seen.elapsed() < snapshot.max_age());
        let Some((snapshot, _)) = latest else { return Ok(()) };
        let descriptor = encoder.encode_descriptor(
            "capacity_decided_timestamp_seconds",
            "Time of the latest capacity decisions, in unix seconds",
            None,
            MetricType::Gauge,
        )?;
        ConstGauge::new(snapshot.at as f64 / 1_000.0).encode(descriptor)?;
        for (name, help, value) in GAUGES {
            let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (pool, capacity) in &snapshot.pools {
                let labels = PoolLabel { pool: pool.as_tier_value() };
                ConstGauge::new(value(capacity)).encode(gauges.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
