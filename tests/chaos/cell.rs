//! What a cell is: a fault under load, and the broken build that it has to catch.

use std::time::Duration;

use super::{callers::Style, faults::Scene, store::Kind};

/// What is wrong with a build that is broken on purpose.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Broken {
    /// The older procedure: many commands, one after the other.
    Procedure,
    /// Our functions, with this text changed to that.
    Edit(&'static [(&'static str, &'static str)]),
    /// Deadlines by the router's own clock instead of Redis's.
    OwnClock,
    /// Settings that amount to a missing part.
    Settings(&'static [(&'static str, &'static str)]),
    /// The surroundings do to the router what a mistake in it would do.
    Surroundings,
    /// Connects to an address, whatever Sentinels say.
    NoSentinel,
}

impl Broken {
    pub(crate) fn is_procedure(self) -> bool {
        matches!(self, Self::Procedure)
    }

    /// Whether it needs another program than ours.
    pub(crate) fn is_another_program(self) -> bool {
        matches!(self, Self::Procedure | Self::Edit(_) | Self::OwnClock)
    }
}

pub(crate) struct Cell {
    pub name: &'static str,
    pub says: &'static str,
    pub backend: Kind,
    pub settings: &'static [(&'static str, &'static str)],
    pub style: Style,
    /// Within which time after the fault all pods are there again.
    pub allowed: Duration,
    pub fault: fn(&Scene),
    pub broken: Broken,
    /// What is broken, in words.
    pub broken_says: &'static str,
}
