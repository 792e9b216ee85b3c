//! The state of scaling: what the router does about its numbers, and what keeps it from it.

use serde::{Deserialize, Serialize};

use fleet::Millis;

/// Action of the router on the number of pods that a pool should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ScalingMode {
    /// Publishes numbers that never fall below the pods of a workload.
    #[default]
    Off,
    /// As off, and reports each change that it would make.
    DryRun,
    /// Takes surplus pods out of service; another autoscaler acts on the published number.
    External,
    /// Takes surplus pods out of service, and writes the replicas of workloads.
    On,
}

impl ScalingMode {
    pub(crate) const ALL: [Self; 4] = [Self::Off, Self::DryRun, Self::External, Self::On];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::DryRun => "dry-run",
            Self::External => "external",
            Self::On => "on",
        }
    }

    /// How long after a number was replaced a workload may still act on it (ms). A controller acts
    /// within a second on its replicas. KEDA and a HorizontalPodAutoscaler read the published
    /// number every 30 s and 15 s.
    pub(crate) fn settle_time(self) -> Millis {
        match self {
            Self::On => 5_000,
            Self::Off | Self::DryRun | Self::External => 75_000,
        }
    }
}

/// The scaling of a pool that a workload runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ScalingReport {
    /// The mode of the leader.
    pub(crate) mode: String,
    /// The replicas of the workload, if the leader reads them.
    pub(crate) replicas: Option<u64>,
    /// Pods that are out of service because they are surplus.
    pub(crate) surplus: u64,
    /// An error that keeps the workload from being scaled.
    pub(crate) error: Option<String>,
    /// Another writer of the replicas.
    pub(crate) conflict: Option<String>,
}

/// The part of the scaler in what is published about a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scaled {
    /// The published number is at least this.
    pub(super) floor: u64,
    pub(super) report: Option<ScalingReport>,
}
