//! Calls for which there is no pod: on hold, or refused.

use std::time::Duration;

use fleet::{Hold, Millis};

/// What is done about a call for which there is no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BusyAction {
    Say,
    Reject,
}

/// How calls wait for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldConfig {
    pub time: Millis,
    /// How often they ask again.
    pub poll: Duration,
    pub most: usize,
    pub most_per_merchant: usize,
    pub message: String,
    pub audio: Option<String>,
}

/// So many times a call that waits may forget to ask.
const MISSED_POLLS: Millis = 3;

impl HoldConfig {
    pub fn patience(&self) -> Millis {
        MISSED_POLLS * self.poll.as_millis() as Millis
    }

    /// What a call that may wait for so long is told the store.
    pub fn hold(&self, time: Millis) -> Hold {
        Hold {
            time: time.min(self.time),
            patience: self.patience(),
            most: self.most,
            most_per_merchant: self.most_per_merchant,
        }
    }
}
