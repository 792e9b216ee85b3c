//! W3C trace context: the headers `traceparent` and `tracestate`.

use std::{
    fmt::{self, Write},
    num::NonZero,
};

use http::HeaderMap;

/// Length of a `traceparent`. Fields that later versions append are ignored.
const TRACEPARENT_LENGTH: usize = 55;
/// Limits of a `tracestate` that is propagated: characters and members.
const MAX_TRACESTATE_LENGTH: usize = 512;
const MAX_TRACESTATE_MEMBERS: usize = 32;

/// The identity of a span: its trace, its id, and whether the trace is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    pub trace: NonZero<u128>,
    pub span: NonZero<u64>,
    pub is_sampled: bool,
}

impl SpanContext {
    /// Parses a `traceparent`. Later versions may be longer and are parsed like version 0.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (fixed, rest) = text.split_at_checked(TRACEPARENT_LENGTH)?;
        let version = hex(&fixed[..2])?;
        let has_more = match rest.first() {
            None => false,
            Some(b'-') => true,
            Some(_) => return None,
        };
        let is_supported = version < 0xff && !(version == 0 && has_more);
        let has_separators = [2, 35, 52].into_iter().all(|at| fixed[at] == b'-');
        if !is_supported || !has_separators {
            return None;
        }
        Some(Self {
            trace: NonZero::new(hex(&fixed[3..35])?)?,
            span: NonZero::new(hex(&fixed[36..52])? as u64)?,
            is_sampled: hex(&fixed[53..])? & 1 == 1,
        })
    }

    /// The `traceparent` of this span, with one allocation.
    pub fn traceparent(&self) -> String {
        let mut text = String::with_capacity(TRACEPARENT_LENGTH);
        write!(text, "{self}").expect("writing to a string cannot fail");
        text
    }

    /// The context in a request's headers; `None` if `traceparent` is repeated.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut given = headers.get_all("traceparent").iter();
        match (given.next(), given.next()) {
            (Some(given), None) => Self::parse(given.as_bytes()),
            _ => None,
        }
    }

    /// The context in the environment variable `TRACEPARENT`, by which a parent process passes its
    /// trace on.
    pub fn of_environment() -> Option<Self> {
        Self::parse(std::env::var("TRACEPARENT").ok()?.as_bytes())
    }
}

/// The `traceparent` of the span.
impl fmt::Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = u8::from(self.is_sampled);
        write!(f, "00-{:032x}-{:016x}-{flags:02x}", self.trace, self.span)
    }
}

/// Parses lowercase hexadecimal digits; uppercase is not valid in a `traceparent`.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(digit))
    })
}

/// The `tracestate` of a request, its header lines joined. Returns an empty string if it is invalid
/// or exceeds the limits.
pub(crate) fn tracestate(headers: &HeaderMap) -> String {
    let lines = headers.get_all("tracestate").iter().map(|line| line.to_str());
    let Ok(lines) = lines.collect::<Result<Vec<&str>, _>>() else { return String::new() };
    let all = lines.join(",");
    let members = || all.split(',').map(str::trim).filter(|member| !member.is_empty());
    let fits = all.len() <= MAX_TRACESTATE_LENGTH && members().count() <= MAX_TRACESTATE_MEMBERS;
    if fits && members().all(is_member) { all } else { String::new() }
}

/// Whether `text` is `key=value` with permitted characters.
fn is_member(text: &str) -> bool {
    let Some((key, value)) = text.split_once('=') else { return false };
    let is_key =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/@".contains(&byte);
    let is_value = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b'=';
    !key.is_empty() && key.bytes().all(is_key) && !value.is_empty() && value.bytes().all(is_value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(text: &str) -> Option<SpanContext> {
        SpanContext::parse(text.as_bytes())
    }

    #[test]
    fn a_traceparent_is_parsed_and_formatted() {
        let context = parse(GIVEN).unwrap();
        assert_eq!(context.trace.get(), 0x4bf92f3577b34da6a3ce929d0e0e4736);
        assert_eq!(context.span.get(), 0x00f067aa0ba902b7);
        assert!(context.is_sampled);
        assert_eq!(context.to_string(), GIVEN);
        assert!(!parse(&GIVEN.replace("-01", "-00")).unwrap().is_sampled);
        assert!(!parse(&GIVEN.replace("-01", "-fe")).unwrap().is_sampled, "only one bit counts");
    }

    #[test]
    fn a_later_version_is_parsed_and_may_be_longer() {
        let later = GIVEN.replacen("00", "cc", 1);
        assert_eq!(parse(&later), parse(GIVEN));
        assert_eq!(parse(&format!("{later}-new-field")), parse(GIVEN));
        assert_eq!(parse(&format!("{later}-")), parse(GIVEN));
        assert_eq!(parse(&format!("{later}.new-field")), None);
    }

    #[test]
    fn an_invalid_traceparent_is_rejected() {
        for bad in [
            "",
            "00",
            &GIVEN[..54],
            &format!("{GIVEN}-"),
            &format!("{GIVEN}0"),
            &format!(" {GIVEN}"),
            &GIVEN.replacen("00", "ff", 1),
            &GIVEN.replacen("00", "0x", 1),
            &GIVEN.to_uppercase(),
            &GIVEN.replace("-01", "_01"),
            &GIVEN.replace("-01", "-0g"),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    fn state(lines: &[&str]) -> String {
        let lines = lines.iter().map(|line| line.parse().unwrap());
        let name = http::HeaderName::from_static("tracestate");
        tracestate(&lines.map(|line| (name.clone(), line)).collect())
    }

    #[test]
    fn only_a_valid_tracestate_is_propagated() {
        assert_eq!(state(&["a=1,b@v=2 3", "c=4"]), "a=1,b@v=2 3,c=4");
        let long = format!("a={}", "x".repeat(600));
        let many = vec!["a=1"; 33].join(",");
        for bad in ["a", "A=1", "a=1,=2", "a=1=2", "a=", long.as_str(), many.as_str()] {
            assert_eq!(state(&[bad]), "", "{bad}");
        }
        assert_eq!(state(&[]), "");
    }

    proptest! {
        #[test]
        fn any_context_round_trips(trace in 1..u128::MAX, span in 1..u64::MAX, is_sampled: bool) {
            let (trace, span) = (NonZero::new(trace).unwrap(), NonZero::new(span).unwrap());
            let context = SpanContext { trace, span, is_sampled };
            prop_assert_eq!(parse(&context.to_string()), Some(context));
        }

        #[test]
        fn a_parsed_text_formats_to_the_same_fields(text in "[0-9a-fA-F-]{0,60}|(00|01|ff)-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?") {
            if let Some(context) = parse(&text) {
                let again = context.to_string();
                prop_assert_eq!(&again[2..53], &text[2..53]);
                prop_assert_eq!(parse(&again), Some(context));
            }
        }
    }
}
