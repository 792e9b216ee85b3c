//! A cell of the chaos matrix: a fault under load, and the broken build that it must detect.

use std::time::Duration;

use super::{
    callers::Workload, cells, diallers, faults::FaultContext, store::BackendKind, streams,
};

/// The mutation of a broken build.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Broken {
    /// The older procedure with many separate Redis commands.
    Baseline,
    /// Text replacements in the Redis functions.
    Edit(&'static [(&'static str, &'static str)]),
    /// Deadlines by the router's clock instead of Redis's.
    LocalClock,
    /// Settings that disable a mechanism.
    Settings(&'static [(&'static str, &'static str)]),
    /// The environment produces the effect of a defect in the router.
    Environment,
    /// Connects to a fixed address instead of asking Sentinels.
    NoSentinel,
}

impl Broken {
    pub(crate) fn is_baseline(self) -> bool {
        matches!(self, Self::Baseline)
    }

    /// Whether it runs in the test binary instead of the router's.
    pub(crate) fn needs_other_program(self) -> bool {
        matches!(self, Self::Baseline | Self::Edit(_) | Self::LocalClock)
    }
}

pub(crate) struct Cell {
    pub name: &'static str,
    pub description: &'static str,
    pub backend: BackendKind,
    pub settings: &'static [(&'static str, &'static str)],
    pub workload: Workload,
    /// Maximum time after the fault until all pods can be allocated again.
    pub recovery_time: Duration,
    pub fault: fn(&FaultContext),
    /// A cell with media streams has a deployment, callers and a fault of its own.
    pub streams: Option<&'static streams::Scenario>,
    pub broken: Broken,
    pub broken_description: &'static str,
}

/// All cells.
pub(crate) fn all() -> impl Iterator<Item = &'static Cell> {
    cells::CELLS.iter().chain(&diallers::CELLS).chain(&streams::CELLS)
}
