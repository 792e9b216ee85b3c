//! Settings of the capacity policy.

use clap::Args;

use crate::capacity::{CapacityConfig, ScalingMode};
use fleet::capacity::Zone;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Capacity")]
pub(crate) struct CapacitySettings {
    /// Share of calls that should find a warm pod, for the capacity policy
    #[arg(
        long, env, value_name = "50%..99.999%", default_value = "99.9%",
        value_parser = capacity_target
    )]
    pub(crate) capacity_target: f64,

    /// Time zone of the days and weeks that the capacity policy learns, such as Europe/Berlin
    #[arg(long, env, value_name = "NAME", default_value = "UTC", value_parser = zone_name)]
    pub(crate) capacity_time_zone: String,

    /// Action of the leader on the number of pods of tiers with a workload. `off`: publish
    /// numbers that never fall below the pods. `dry-run`: also report the changes that `on` would
    /// make. `external`: take surplus pods out of service, so that KEDA or a HorizontalPodAutoscaler
    /// can act on the published number. `on`: also write the replicas of the workloads
    #[arg(
        long, env, value_name = "off|dry-run|external|on", default_value = "off",
        value_parser = scaling_mode
    )]
    pub(crate) scaling: ScalingMode,
}

impl CapacitySettings {
    pub(super) fn config(&self) -> CapacityConfig {
        let zone = self.capacity_time_zone.parse().unwrap_or_default();
        CapacityConfig { target: self.capacity_target, zone, scaling: self.scaling }
    }

    pub(super) fn describe(&self) -> [(&'static str, String); 3] {
        let percent = (self.capacity_target * 100_000.0).round() / 1_000.0;
        [
            ("CAPACITY_TARGET", format!("{percent}%")),
            ("CAPACITY_TIME_ZONE", self.capacity_time_zone.clone()),
            ("SCALING", self.scaling.as_str().to_owned()),
        ]
    }
}

/// Parses `99.9%`, or the same without the sign.
pub(crate) fn capacity_target(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).trim_end();
    let number: Option<f64> = percent.parse().ok();
    let number = number.filter(|number| (50.0..=99.999).contains(number));
    number.map(|number| number / 100.0).ok_or("a percentage from 50% to 99.999%".into())
}

fn zone_name(text: &str) -> Result<String, String> {
    text.parse::<Zone>().map(|_| text.into())
}

fn scaling_mode(text: &str) -> Result<ScalingMode, String> {
    let mode = ScalingMode::ALL.into_iter().find(|mode| mode.as_str() == text);
    mode.ok_or_else(|| "off, dry-run, external or on".to_owned())
}
