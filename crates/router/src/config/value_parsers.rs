//! Parsers of single values. Each error names what was expected.

use std::{num::NonZeroUsize, ops::RangeInclusive, time::Duration};

use hyper::Uri;

use crate::human_duration::HumanDuration;

pub(super) fn bind_address(text: &str) -> Result<std::net::IpAddr, String> {
    text.parse().map_err(|_| "an IP address such as 0.0.0.0 or ::1".into())
}

pub(super) fn socket_address(text: &str) -> Result<std::net::SocketAddr, String> {
    text.parse().map_err(|_| "an IP address and a port such as 127.0.0.1:8081".into())
}

pub(super) fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| match text.contains("://") {
        false => "a port from 0 to 65535".into(),
        true => {
            "a port from 0 to 65535; Kubernetes sets this variable for a Service of that name: set \
                 enableServiceLinks: false in the pod's spec, or rename the Service"
                .into()
        }
    })
}

/// The number of stored events.
pub(super) fn events(text: &str) -> Result<usize, String> {
    number_or_off(text, 100..=100_000).map(|number| number as usize)
}

/// Requests per second.
pub(super) fn rate_limit(text: &str) -> Result<u32, String> {
    number_or_off(text, 1..=1_000_000)
}

/// Returns 0 for off.
fn number_or_off(text: &str, range: RangeInclusive<u32>) -> Result<u32, String> {
    if text == "off" {
        return Ok(0);
    }
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("off, or a number from {} to {}", range.start(), range.end()))
}

/// Returns zero for off.
pub(super) fn duration_or_off(text: &str) -> Result<HumanDuration, String> {
    match text {
        "off" => Ok(HumanDuration(Duration::ZERO)),
        _ => text.parse().map_err(|expected| format!("off, or {expected}")),
    }
}

/// The settle time of pods; zero for 0 and off.
pub(super) fn settle_time(text: &str) -> Result<HumanDuration, String> {
    const MAX: Duration = Duration::from_secs(3_600);
    let time = if text == "0" { "off" } else { text };
    let time = duration_or_off(time)?;
    if time.0 <= MAX { Ok(time) } else { Err("off, or a duration of at most 1h".into()) }
}

pub(super) fn on_off(text: &str) -> Result<bool, String> {
    boolean(text).map_err(|_| "on or off".into())
}

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" | "on" | "yes" => Ok(true),
        "false" | "0" | "off" | "no" => Ok(false),
        _ => Err("true or false".into()),
    }
}

/// Parses an absolute URL of one of the given schemes, without query and fragment; removes
/// trailing slashes.
fn base_url(text: &str, schemes: [&str; 2]) -> Result<String, String> {
    let expected = || {
        format!("a URL that begins with {}:// or {}:// and has no query", schemes[0], schemes[1])
    };
    let trimmed = text.trim_end_matches('/');
    let uri: Uri = trimmed.parse().map_err(|_| expected())?;
    let known = uri.scheme_str().is_some_and(|scheme| schemes.contains(&scheme));
    let has_host = uri.host().is_some_and(|host| !host.is_empty());
    if !known || !has_host || uri.query().is_some() || text.contains(['#', '@']) {
        return Err(expected());
    }
    Ok(trimmed.into())
}

pub(super) fn agent_url(text: &str) -> Result<String, String> {
    base_url(text, ["ws", "wss"])
}

pub(super) fn public_url(text: &str) -> Result<String, String> {
    base_url(text, ["http", "https"])
}

/// Providers accept pauses of whole seconds only.
pub(super) fn whole_seconds(text: &str) -> Result<HumanDuration, String> {
    let duration: Result<HumanDuration, String> = text.parse();
    let whole = duration.ok().filter(|duration| duration.millis().is_multiple_of(1_000));
    whole.ok_or_else(|| "whole seconds, such as 5s".into())
}

pub(super) fn retries(text: &str) -> Result<u32, String> {
    let number: Option<u32> = text.parse().ok();
    number.filter(|number| *number <= 9).ok_or_else(|| "a whole number from 0 to 9".into())
}

pub(super) fn queue_limit(text: &str) -> Result<usize, String> {
    let number: Option<usize> = text.parse().ok();
    let valid = number.filter(|number| (1..=1_000_000).contains(number));
    valid.ok_or_else(|| "a whole number from 1 to 1000000".into())
}

/// Size (bytes) of a frame.
pub(super) fn max_frame(text: &str) -> Result<u64, String> {
    let number: Option<u64> = text.parse().ok();
    let valid = number.filter(|number| (1_024..=268_435_456).contains(number));
    valid.ok_or_else(|| "a whole number from 1024 to 268435456".into())
}

pub(super) fn above_zero(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "a whole number of at least 1".into())
}

/// A URL that providers fetch.
pub(super) fn audio_url(text: &str) -> Result<String, String> {
    let uri: Option<Uri> = text.parse().ok();
    let known = uri.filter(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.host().is_some_and(|host| !host.is_empty())
    });
    known.map(|_| text.into()).ok_or_else(|| "a URL that begins with http:// or https://".into())
}

pub(super) fn redis_url(text: &str) -> Result<String, String> {
    let known = ["redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://"];
    if known.iter().any(|scheme| text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())) {
        return Ok(text.into());
    }
    Err(format!("a URL that begins with {}", known.join(" or ")))
}

/// Removes the credentials and the query of a URL, for display.
pub(crate) fn without_password(url: &str) -> String {
    let (url, query) = match url.split_once('?') {
        Some((url, _)) => (url, "?***"),
        None => (url, ""),
    };
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}{query}"),
        _ => format!("{url}{query}"),
    }
}

pub(super) fn key_prefix(text: &str) -> Result<String, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_graphic() && !b"*?[]\\\"'".contains(&byte));
    if text.len() > 64 || !plain {
        return Err("up to 64 printable characters other than * ? [ ] \\ \" '".into());
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_have_a_scheme_and_a_host_and_no_query() {
        assert_eq!(agent_url("wss://voice.example.com/").unwrap(), "wss://voice.example.com");
        assert_eq!(agent_url("ws://localhost:8080/a").unwrap(), "ws://localhost:8080/a");
        for bad in [
            "",
            "http://a",
            "wss://",
            "wss:///a",
            "wss://a?b",
            "wss://a#b",
            "a.example",
            "wss://u:p@a",
        ] {
            assert!(agent_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("redis://u:p@ss@host:1/2"), "redis://***@host:1/2");
        assert_eq!(without_password("redis://host"), "redis://host");
        assert_eq!(without_password("redis://h:1/?password=x@y"), "redis://h:1/?***");
    }
}
