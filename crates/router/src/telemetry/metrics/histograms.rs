//! Buckets of the histograms.

use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

/// From 50 µs to 13 s: from a store on loopback to a long poll.
pub(super) fn short_times() -> Histogram {
    Histogram::new(exponential_buckets(0.000_05, 2.0, 19))
}

/// From 100 ms to 14 min.
pub(super) fn waiting_times() -> Histogram {
    Histogram::new(exponential_buckets(0.1, 2.0, 14))
}

/// From 1 s to 9 h.
pub(super) fn call_times() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 16))
}
