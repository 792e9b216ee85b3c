//! Secrets: redacted in output and compared in constant time.

use std::{fmt, str::FromStr};

use aws_lc_rs::constant_time;

/// A text that is redacted in logs, errors and printed configuration.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in constant time; only the length is observable.
    pub fn matches(&self, given: &str) -> bool {
        constant_time_eq(self.as_bytes(), given.as_bytes())
    }
}

/// Compares in constant time; only the lengths are observable.
pub(crate) fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    constant_time::verify_slices_are_equal(a, b).is_ok()
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Parses secrets separated by commas or line breaks.
pub fn list(text: &str) -> Result<Vec<Secret>, String> {
    let secrets: Vec<Secret> = entries(text).map(Secret::from).collect();
    if secrets.is_empty() { Err("at least one secret".into()) } else { Ok(secrets) }
}

/// Entries separated by commas or line breaks, trimmed; empty ones are skipped.
pub fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n', '\r']).map(str::trim).filter(|entry| !entry.is_empty())
}
