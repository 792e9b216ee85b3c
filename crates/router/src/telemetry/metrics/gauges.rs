//! Gauges read at each scrape: the pools of the store, and the process.

use std::{
    fmt, fs,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use fleet::{PoolStatus, Status};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Tier {
    tier: String,
}

/// A status, and the time it was read.
pub(super) type StatusRead = (Arc<Status>, SystemTime);

/// The last status read from the store.
#[derive(Debug, Clone, Default)]
pub(super) struct StoreGauges(Arc<Mutex<Option<StatusRead>>>);

impl StoreGauges {
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<StatusRead>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A gauge of a pool: name, help text, value.
type PoolGauge = (&'static str, &'static str, fn(&PoolStatus) -> usize);

const POOL_GAUGES: [PoolGauge; 8] = [
    ("pool_available_pods", "Pods that can take a call", |pool| pool.available),
    ("pool_assigned_pods", "Pods assigned to the pool", |pool| pool.assigned),
    ("pool_target_pods", "Target number of pods", |pool| pool.target as usize),
    ("pool_draining_pods", "Draining pods: they finish their calls and get no new ones", |pool| {
        pool.draining
    }),
    ("pool_not_ready_pods", "Pods that are not ready", |pool| pool.not_ready),
    ("pool_quarantined_pods", "Pods in quarantine after several failed calls", |pool| {
        pool.quarantined
    }),
    ("pool_active_calls", "Live calls on the pods of the pool", |pool| pool.active_calls),
    ("pool_free_slots", "Further calls that the pods of the pool can take", |pool| pool.free_slots),
];

impl Collector for StoreGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let read = self.lock();
        let Some((status, at)) = &*read else { return Ok(()) };
        let descriptor = encoder.encode_descriptor(
            "store_read_timestamp_seconds",
            "Time at which the gauges of calls and pools were read from the store, in unix seconds",
            None,
            MetricType::Gauge,
        )?;
        ConstGauge::new(unix_seconds(*at)).encode(descriptor)?;
        let all = [
            ("active_calls", "Live calls, read from the store", status.active_calls),
            ("waiting_calls", "Calls waiting for a pod, read from the store", status.waiting),
        ];
        for (name, help, count) in all {
            let descriptor = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(count as i64).encode(descriptor)?;
        }
        for (name, help, count) in POOL_GAUGES {
            let help = format!("{help}, read from the store");
            let mut gauges = encoder.encode_descriptor(name, &help, None, MetricType::Gauge)?;
            for pool in &status.pools {
                let labels = Tier { tier: pool.pool.as_tier_value() };
                ConstGauge::new(count(pool) as i64).encode(gauges.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// Process metrics by their conventional names.
#[derive(Debug)]
pub(super) struct Process;

/// Start time of the process (unix seconds); set when first read, at start-up.
pub(super) static START_TIME: LazyLock<f64> = LazyLock::new(|| unix_seconds(SystemTime::now()));

fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Unit of processor time in `/proc/self/stat` (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let started = encoder.encode_descriptor(
            "process_start_time_seconds",
            "Start time of the process, in unix seconds",
            None,
            MetricType::Gauge,
        )?;
        ConstGauge::new(*START_TIME).encode(started)?;
        if let Some(seconds) = cpu_seconds() {
            let help = "Processor time used by the process, in seconds";
            let cpu = encoder.encode_descriptor(
                "process_cpu_seconds",
                help,
                None,
                MetricType::Counter,
            )?;
            ConstCounter::new(seconds).encode(cpu)?;
        }
        let counts = [
            (
                "process_resident_memory_bytes",
                "Resident memory of the process, in bytes",
                resident_memory(),
            ),
            ("process_open_fds", "Open file descriptors", open_files()),
        ];
        for (name, help, count) in counts {
            if let Some(count) = count {
                let descriptor = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                ConstGauge::new(count).encode(descriptor)?;
            }
        }
        Ok(())
    }
}

fn cpu_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name is in parentheses and may contain parentheses itself.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_SECOND)
}

fn resident_memory() -> Option<i64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: i64 = line.trim().split(' ').next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

fn open_files() -> Option<i64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as i64)
}
