//! Configuration of calls without a free pod: put on hold, or refused.

use std::time::Duration;

use fleet::{Hold, Millis};

/// Response to a call that is refused because no pod is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BusyAction {
    Say,
    Reject,
}

/// Limits and messages for waiting calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldConfig {
    pub time: Millis,
    pub poll_interval: Duration,
    pub max_waiting: usize,
    pub max_waiting_per_merchant: usize,
    pub message: String,
    pub audio: Option<String>,
}

/// Polls that a waiting call may miss before it loses its queue entry.
const MAX_MISSED_POLLS: Millis = 3;

impl HoldConfig {
    pub fn poll_timeout(&self) -> Millis {
        MAX_MISSED_POLLS * self.poll_interval.as_millis() as Millis
    }

    /// Hold parameters of one call; `time` is capped at the configured hold time.
    pub fn hold(&self, time: Millis) -> Hold {
        Hold {
            time: time.min(self.time),
            poll_timeout: self.poll_timeout(),
            max_waiting: self.max_waiting,
            max_waiting_per_merchant: self.max_waiting_per_merchant,
        }
    }
}
