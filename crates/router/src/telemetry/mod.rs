//! Metrics, logs and traces.

pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod traces;
