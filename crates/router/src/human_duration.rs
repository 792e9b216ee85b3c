//! Durations of settings, arguments and the API as text.

use std::{fmt, str::FromStr, time::Duration};

use jiff::fmt::friendly::SpanParser;

/// A duration, written `15m`, `30s`, `500ms` or `1h30m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HumanDuration(pub(crate) Duration);

const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

impl FromStr for HumanDuration {
    type Err = String;

    /// Parses a subset of jiff's "friendly" format: whole numbers of h, m, s and ms, without
    /// spaces.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_short = text.bytes().all(|byte| byte.is_ascii_digit() || b"hms".contains(&byte));
        let duration = SpanParser::new().parse_unsigned_duration(text).ok();
        duration
            .filter(|duration| is_short && !duration.is_zero() && *duration <= MAX_DURATION)
            .map(Self)
            .ok_or_else(|| "a duration above zero such as 15m, 30s or 500ms".into())
    }
}

impl HumanDuration {
    pub(crate) fn millis(self) -> u64 {
        self.0.as_millis() as u64
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.millis();
        match millis {
            _ if millis.is_multiple_of(3_600_000) => write!(f, "{}h", millis / 3_600_000),
            _ if millis.is_multiple_of(60_000) => write!(f, "{}m", millis / 60_000),
            _ if millis.is_multiple_of(1_000) => write!(f, "{}s", millis / 1_000),
            _ => write!(f, "{millis}ms"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_and_printed_in_the_same_format() {
        for (text, millis) in [
            ("15m", 900_000),
            ("30s", 30_000),
            ("500ms", 500),
            ("1h30m", 5_400_000),
            ("90s", 90_000),
        ] {
            assert_eq!(text.parse::<HumanDuration>().unwrap().millis(), millis, "{text}");
        }
        for bad in [
            "",
            "0s",
            "5",
            "s",
            "-5s",
            "1.5s",
            "5 s",
            "5d",
            "99999999999999999999s",
            "5m5",
            "9999999h",
            "5min",
            "5us",
            "PT5s",
            "00:00:05",
        ] {
            assert!(bad.parse::<HumanDuration>().is_err(), "{bad}");
        }
        for text in ["15m", "90s", "1h", "250ms"] {
            assert_eq!(text.parse::<HumanDuration>().unwrap().to_string(), text);
        }
    }
}
