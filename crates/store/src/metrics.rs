//! Metrics of the store. The router registers them.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Operation {
    pub operation: &'static str,
}

#[derive(Debug, Clone)]
pub struct StoreMetrics {
    /// From 50 µs to 13 s: from a store on loopback to the timeout of a client.
    pub duration: Family<Operation, Histogram, fn() -> Histogram>,
    pub errors: Family<Operation, Counter>,
    /// 1 while the circuit breaker refuses requests.
    pub circuit_open: Gauge,
    /// Deferred writes that wait until Redis is available.
    pub deferred: Gauge,
}

impl StoreMetrics {
    /// Records how long an operation took, waiting for the disk or the network included.
    pub fn observe(&self, operation: &'static str, took: Duration) {
        self.duration.get_or_create(&Operation { operation }).observe(took.as_secs_f64());
    }

    pub fn failed(&self, operation: &'static str) {
        self.errors.get_or_create(&Operation { operation }).inc();
    }
}

impl Default for StoreMetrics {
    fn default() -> Self {
        let histogram = || Histogram::new(exponential_buckets(0.000_05, 2.0, 19));
        Self {
            duration: Family::new_with_constructor(histogram),
            errors: Family::default(),
            circuit_open: Gauge::default(),
            deferred: Gauge::default(),
        }
    }
}
