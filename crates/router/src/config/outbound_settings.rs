//! Settings of outbound calls.

use clap::Args;

use crate::{http::OutboundConfig, human_duration::HumanDuration};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Outbound calls")]
pub struct OutboundSettings {
    /// How long a reservation is held after its grant, and after the dial was reported. It should be
    /// longer than the provider lets a phone ring (60 s at Twilio)
    #[arg(long, env, value_name = "DURATION", default_value = "75s")]
    pub reservation_ttl: HumanDuration,

    /// Share of answered dials that may find no pod. The router learns how many dials are answered
    /// and holds no more slots than this share needs; 0 holds a slot per dial
    #[arg(
        long, env, value_name = "0%..50%", default_value = "1%",
        value_parser = miss_target
    )]
    pub outbound_miss_target: u32,
}

impl OutboundSettings {
    pub(super) fn config(&self) -> OutboundConfig {
        OutboundConfig {
            reservation_ttl: self.reservation_ttl.millis(),
            miss_target: self.outbound_miss_target,
        }
    }

    pub(super) fn describe(&self) -> [(&'static str, String); 2] {
        [
            ("RESERVATION_TTL", self.reservation_ttl.to_string()),
            ("OUTBOUND_MISS_TARGET", format!("{}%", f64::from(self.outbound_miss_target) / 1e4)),
        ]
    }
}

/// Parses `1%`, or the same without the sign, to millionths.
fn miss_target(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).trim_end();
    let number: Option<f64> = percent.parse().ok();
    let number = number.filter(|number| (0.0..=50.0).contains(number));
    number.map(|number| (number * 1e4).round() as u32).ok_or("a percentage from 0% to 50%".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_miss_target_is_a_percentage() {
        assert_eq!(miss_target("1%"), Ok(10_000));
        assert_eq!(miss_target("0"), Ok(0));
        assert_eq!(miss_target("0.25%"), Ok(2_500));
        for bad in ["", "-1%", "51%", "NaN", "1/100"] {
            assert!(miss_target(bad).is_err(), "{bad}");
        }
    }
}
