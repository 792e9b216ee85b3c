//! Input and output of the policy.

use serde::{Deserialize, Serialize};

use crate::{Millis, tiers::InboundReserve};

/// A pool at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    pub at: Millis,
    /// Calls since the last observation that asked for this pool first, refused ones included.
    pub arrivals: u64,
    pub live: u64,
    pub waiting: u64,
    /// Calls since the last observation that were refused for lack of a pod.
    pub refusals: u64,
    /// Slots for outbound dials: held for outstanding ones, or needed by waiting ones.
    #[serde(default)]
    pub dial_slots: u64,
    /// Pods in service, busy or idle.
    pub ready: u64,
    pub starting: u64,
    /// Start-up times since the last observation, in seconds. Empty if unknown: the policy then
    /// derives them from the counts.
    pub start_ups: Vec<f64>,
    /// Durations of calls that ended since the last observation, in seconds. Empty if unknown:
    /// the policy then derives their mean from the counts.
    pub durations: Vec<f64>,
    /// The arrivals since the last observation are not known: the policy does not learn from them.
    pub gap: bool,
}

/// Limits of a pool, and its orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    pub min: u64,
    pub max: u64,
    /// Slots that stay free beyond the live calls, for inbound calls.
    pub inbound_reserve: InboundReserve,
    pub prescale: Vec<Prescale>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            min: 0,
            max: u64::MAX,
            inbound_reserve: InboundReserve::default(),
            prescale: Vec::new(),
        }
    }
}

/// An order for at least this number of pods, until it expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prescale {
    pub pods: u64,
    pub until: Millis,
}

/// A point of the outlook.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Seconds from the observation.
    pub ahead: f64,
    pub expected_calls: f64,
    /// Pods that these calls need.
    pub needed: u64,
}

/// The reason of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The forecast of demand.
    Forecast,
    /// Live calls, slots for dials and the inbound reserve.
    Reserve,
    /// A prescale order.
    Prescale,
    /// The lower bound.
    Min,
    /// The upper bound; demand is higher.
    Max,
    /// Surplus pods stay, because the forecast needs them again before a new pod would pay off.
    Keep,
    /// Starting pods do not become ready: no more are started.
    PodsNotReady,
}

impl Reason {
    pub const ALL: [Self; 7] = [
        Self::Forecast,
        Self::Reserve,
        Self::Prescale,
        Self::Min,
        Self::Max,
        Self::Keep,
        Self::PodsNotReady,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forecast => "forecast",
            Self::Reserve => "reserve",
            Self::Prescale => "prescale",
            Self::Min => "min",
            Self::Max => "max",
            Self::Keep => "keep",
            Self::PodsNotReady => "pods_not_ready",
        }
    }
}

/// The number of pods that a pool should have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Ready and starting pods.
    pub desired: u64,
    pub reason: Reason,
    /// Pods that the forecast alone asks for.
    pub needed: u64,
    /// Expected calls when a pod that starts now is ready.
    pub expected_calls: f64,
    /// The start-up time that the decision plans with, in seconds.
    pub start_up: f64,
}
