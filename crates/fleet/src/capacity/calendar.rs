//! Local time of a time zone, from a bundled database.

use std::str::FromStr;

use jiff::{
    Timestamp,
    tz::{TimeZone, TimeZoneDatabase},
};

use crate::Millis;

/// The time zone of days and weeks.
#[derive(Debug, Clone, PartialEq)]
pub struct Zone(TimeZone);

impl Default for Zone {
    fn default() -> Self {
        Self(TimeZone::UTC)
    }
}

impl FromStr for Zone {
    type Err = String;

    /// Parses an IANA name such as `Europe/Berlin`.
    fn from_str(name: &str) -> Result<Self, String> {
        if name.eq_ignore_ascii_case("utc") {
            return Ok(Self::default());
        }
        let zone = TimeZoneDatabase::bundled().get(name);
        zone.map(Self).map_err(|_| "the name of a time zone such as Europe/Berlin".into())
    }
}

impl Zone {
    /// Seconds of local time since the start of a Monday long ago.
    pub(super) fn local_seconds(&self, at: Millis) -> f64 {
        // 1970-01-01 was a Thursday.
        const FIRST_MONDAY: f64 = 3.0 * 86_400.0;
        let seconds = at as f64 / 1_000.0;
        let stamp = i64::try_from(at).ok().and_then(|at| Timestamp::from_millisecond(at).ok());
        let offset = stamp.map_or(0, |stamp| self.0.to_offset(stamp).seconds());
        seconds + f64::from(offset) + FIRST_MONDAY
    }
}
