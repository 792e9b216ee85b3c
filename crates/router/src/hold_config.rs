//! Configuration of calls without a free pod: put on hold, or refused.

use std::time::Duration;

use fleet::{Hold, Millis};

/// Response to a call that is refused because no pod is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BusyAction {
    Say,
    Reject,
}

/// Limits and messages for waiting calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HoldConfig {
    pub(crate) time: Millis,
    pub(crate) poll_interval: Duration,
    pub(crate) max_waiting: usize,
    pub(crate) max_waiting_per_merchant: usize,
    pub(crate) message: String,
    pub(crate) audio: Option<String>,
}

/// Polls that a waiting call may miss before it loses its queue entry.
const MAX_MISSED_POLLS: Millis = 3;

impl HoldConfig {
    pub(crate) fn poll_timeout(&self) -> Millis {
        MAX_MISSED_POLLS * self.poll_interval.as_millis() as Millis
    }

    /// Hold parameters of one call; `time` is capped at the configured hold time.
    pub(crate) fn hold(&self, time: Millis) -> Hold {
        Hold {
            time: time.min(self.time),
            poll_timeout: self.poll_timeout(),
            max_waiting: self.max_waiting,
            max_waiting_per_merchant: self.max_waiting_per_merchant,
        }
    }
}
