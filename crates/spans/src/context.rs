//! W3C trace context: what `traceparent` and `tracestate` say.

use std::{
    fmt::{self, Write},
    num::NonZero,
};

use http::HeaderMap;

/// How long a `traceparent` is. What a later version has beyond is not looked at.
const LENGTH: usize = 55;
/// What of a `tracestate` is passed on: so many characters, so many members.
const LONGEST_STATE: usize = 512;
const MOST_MEMBERS: usize = 32;

/// Where a span stands: in which trace, which it is, and whether it is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    pub trace: NonZero<u128>,
    pub span: NonZero<u64>,
    pub is_sampled: bool,
}

impl SpanContext {
    /// Reads a `traceparent`. Versions to come may be longer, and are read as ours.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (fixed, rest) = text.split_at_checked(LENGTH)?;
        let version = hex(&fixed[..2])?;
        let has_more = match rest.first() {
            None => false,
            Some(b'-') => true,
            Some(_) => return None,
        };
        let is_known = version < 0xff && !(version == 0 && has_more);
        let is_divided = [2, 35, 52].into_iter().all(|at| fixed[at] == b'-');
        if !is_known || !is_divided {
            return None;
        }
        Some(Self {
            trace: NonZero::new(hex(&fixed[3..35])?)?,
            span: NonZero::new(hex(&fixed[36..52])? as u64)?,
            is_sampled: hex(&fixed[53..])? & 1 == 1,
        })
    }

    /// The `traceparent` that names this span, in one piece of memory.
    pub fn traceparent(&self) -> String {
        let mut text = String::with_capacity(LENGTH);
        write!(text, "{self}").expect("a string takes every write");
        text
    }

    /// What a request's headers say; nothing if they say it twice.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut given = headers.get_all("traceparent").iter();
        match (given.next(), given.next()) {
            (Some(given), None) => Self::parse(given.as_bytes()),
            _ => None,
        }
    }

    /// What the variable `TRACEPARENT` says, by which programs are told whose part they are.
    pub fn of_environment() -> Option<Self> {
        Self::parse(std::env::var("TRACEPARENT").ok()?.as_bytes())
    }
}

/// The `traceparent` that names a span.
impl fmt::Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = u8::from(self.is_sampled);
        write!(f, "00-{:032x}-{:016x}-{flags:02x}", self.trace, self.span)
    }
}

/// A number in small hexadecimal digits; others are not valid.
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

/// The `tracestate` of a request, all its lines as one. One that is not valid, or too
/// long, is empty.
pub(crate) fn tracestate(headers: &HeaderMap) -> String {
    let lines = headers.get_all("tracestate").iter().map(|line| line.to_str());
    let Ok(lines) = lines.collect::<Result<Vec<&str>, _>>() else { return String::new() };
    let all = lines.join(",");
    let members = || all.split(',').map(str::trim).filter(|member| !member.is_empty());
    let fits = all.len() <= LONGEST_STATE && members().count() <= MOST_MEMBERS;
    if fits && members().all(is_member) { all } else { String::new() }
}

/// `key=value` in the letters that each may have.
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
    fn a_traceparent_is_read_as_it_is_written() {
        let context = parse(GIVEN).unwrap();
        assert_eq!(context.trace.get(), 0x4bf92f3577b34da6a3ce929d0e0e4736);
        assert_eq!(context.span.get(), 0x00f067aa0ba902b7);
        assert!(context.is_sampled);
        assert_eq!(context.to_string(), GIVEN);
        assert!(!parse(&GIVEN.replace("-01", "-00")).unwrap().is_sampled);
        assert!(!parse(&GIVEN.replace("-01", "-fe")).unwrap().is_sampled, "only one bit counts");
    }

    #[test]
    fn a_later_version_is_read_as_ours_and_may_be_longer() {
        let later = GIVEN.replacen("00", "cc", 1);
        assert_eq!(parse(&later), parse(GIVEN));
        assert_eq!(parse(&format!("{later}-what-is-new")), parse(GIVEN));
        assert_eq!(parse(&format!("{later}-")), parse(GIVEN));
        assert_eq!(parse(&format!("{later}.what-is-new")), None);
    }

    #[test]
    fn what_is_not_valid_is_nothing() {
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
    fn a_tracestate_is_kept_if_it_is_one() {
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
        fn whatever_is_written_is_read_back(trace in 1..u128::MAX, span in 1..u64::MAX, is_sampled: bool) {
            let (trace, span) = (NonZero::new(trace).unwrap(), NonZero::new(span).unwrap());
            let context = SpanContext { trace, span, is_sampled };
            prop_assert_eq!(parse(&context.to_string()), Some(context));
        }

        #[test]
        fn what_is_read_means_what_it_says(text in "[0-9a-fA-F-]{0,60}|(00|01|ff)-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?") {
            if let Some(context) = parse(&text) {
                let again = context.to_string();
                prop_assert_eq!(&again[2..53], &text[2..53]);
                prop_assert_eq!(parse(&again), Some(context));
            }
        }
    }
}
