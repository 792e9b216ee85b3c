//! Settings of outbound calls.

use clap::Args;

use crate::{http::OutboundConfig, human_duration::HumanDuration};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Outbound calls")]
pub(crate) struct OutboundSettings {
    /// How long a reservation is held after its grant, and after the dial was reported, from 1s to
    /// 1h. It should be longer than the provider lets a phone ring (60 s at Twilio)
    #[arg(
        long, env, value_name = "DURATION", default_value = "75s",
        value_parser = reservation_ttl
    )]
    pub(crate) reservation_ttl: HumanDuration,

    /// Share of answered dials that may find no pod. The router learns how many dials are answered
    /// and holds no more slots than this share needs; 0 holds a slot per dial
    #[arg(
        long, env, value_name = "0%..50%", default_value = "1%",
        value_parser = miss_target
    )]
    pub(crate) outbound_miss_target: u32,
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

fn reservation_ttl(text: &str) -> Result<HumanDuration, String> {
    let ttl: Option<HumanDuration> = text.parse().ok();
    let ttl = ttl.filter(|ttl| (1_000..=3_600_000).contains(&ttl.millis()));
    ttl.ok_or("a duration from 1s to 1h such as 75s".into())
}

/// Parses `1%`, or the same without the sign, to millionths.
fn miss_target(text: &str) -> Result<u32, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).trim_end();
    let number: Option<f64> = percent.parse().ok();
    let number = number.filter(|number| *number == 0.0 || (0.0001..=50.0).contains(number));
    let millionths = number.map(|number| (number * 1e4).round() as u32);
    millionths.ok_or("0, or a percentage from 0.0001% to 50%".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_miss_target_is_a_percentage() {
        assert_eq!(miss_target("1%"), Ok(10_000));
        assert_eq!(miss_target("0"), Ok(0));
        assert_eq!(miss_target("0.25%"), Ok(2_500));
        assert_eq!(miss_target("0.0001%"), Ok(1));
        for bad in ["", "-1%", "51%", "NaN", "1/100", "0.00001%", "0.00009%"] {
            assert!(miss_target(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reservation_lasts_for_a_second_to_an_hour() {
        for (text, millis) in [("1s", 1_000), ("75s", 75_000), ("1h", 3_600_000)] {
            assert_eq!(reservation_ttl(text).map(HumanDuration::millis), Ok(millis));
        }
        for bad in ["999ms", "61m", "365h", "0", "off", "soon"] {
            assert!(reservation_ttl(bad).is_err(), "{bad}");
        }
    }
}
