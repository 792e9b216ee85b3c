//! Rate limiter (GCRA) by source for requests without a valid token or signature. Authenticated
//! requests are never limited, so that other clients behind the same proxy cannot block calls.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{Extensions, HeaderMap};

use crate::trusted_proxies::TrustedProxies;

/// Burst of an idle source, in seconds of its rate.
const BURST_SECONDS: u32 = 4;
/// Approximate limit of tracked sources; further sources share one limit.
const MAX_SOURCES: usize = 10_000;

pub struct RateLimiter {
    per_second: u32,
    trusted: TrustedProxies,
    started: Instant,
    /// Theoretical arrival time (TAT) of the next request of each source, since `started`.
    arrivals: Mutex<HashMap<IpAddr, Duration>>,
}

impl RateLimiter {
    /// A rate of zero disables the limit.
    pub fn new(per_second: u32, trusted: TrustedProxies) -> Self {
        Self { per_second, trusted, started: Instant::now(), arrivals: Mutex::default() }
    }

    /// Source of a request: the last address in `X-Forwarded-For` that is not a trusted proxy.
    pub fn source(&self, extensions: &Extensions, headers: &HeaderMap) -> Option<IpAddr> {
        let peer = extensions.get::<SocketAddr>()?.ip().to_canonical();
        let mut source = peer;
        let forwarded = headers.get_all("x-forwarded-for").iter().rev();
        let hops = forwarded.flat_map(|it| it.to_str().unwrap_or("?").rsplit(','));
        for hop in hops {
            if !self.trusted.contains(source) {
                break;
            }
            let Some(hop) = parse_address(hop.trim()) else { break };
            source = hop.to_canonical();
        }
        Some(source)
    }

    /// Counts an unauthenticated request; returns whether its source is within the limit.
    pub(crate) fn allows(&self, extensions: &Extensions, headers: &HeaderMap) -> bool {
        self.per_second == 0
            || self
                .source(extensions, headers)
                .is_none_or(|source| self.try_acquire(source, self.started.elapsed()))
    }

    /// Counts a request; returns whether its source is within the limit.
    fn try_acquire(&self, source: IpAddr, now: Duration) -> bool {
        let interval = Duration::from_secs(1) / self.per_second;
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.len() >= MAX_SOURCES {
            arrivals.retain(|_, arrival| *arrival > now);
        }
        let mut key = network_of(source);
        if arrivals.len() >= MAX_SOURCES && !arrivals.contains_key(&key) {
            key = Ipv6Addr::UNSPECIFIED.into();
        }
        let arrival = arrivals.entry(key).or_default();
        let next = now.max(*arrival) + interval;
        let is_allowed = next <= now + BURST_SECONDS * Duration::from_secs(1);
        if is_allowed {
            *arrival = next;
        }
        is_allowed
    }
}

/// Parses an address as proxies write it, with or without a port.
fn parse_address(text: &str) -> Option<IpAddr> {
    let plain = text.trim_start_matches('[').trim_end_matches(']').parse();
    plain.ok().or_else(|| Some(text.parse::<SocketAddr>().ok()?.ip()))
}

/// The /64 network of an IPv6 address: one client usually has a whole network.
pub(crate) fn network_of(source: IpAddr) -> IpAddr {
    match source {
        IpAddr::V6(it) => Ipv6Addr::from_bits(it.to_bits() & (u128::MAX << 64)).into(),
        source => source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(trusted: &str) -> RateLimiter {
        RateLimiter::new(10, trusted.parse().unwrap())
    }

    #[test]
    fn each_source_has_its_own_limit_and_burst() {
        let limiter = limiter("");
        let (one, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let at = Duration::from_millis;
        let allowed =
            |source, now| (0..100).filter(|_| limiter.try_acquire(source, at(now))).count();
        assert_eq!(allowed(one, 0), 40);
        assert_eq!(allowed(other, 0), 40);
        assert_eq!(allowed(one, 1_000), 10, "one second of its rate");
        assert_eq!(allowed(one, 60_000), 40);
    }

    #[test]
    fn an_ipv6_network_is_one_source_and_sources_are_bounded() {
        let limiter = limiter("");
        let allowed = |n: u128| {
            let source = IpAddr::from(Ipv6Addr::from_bits((0x2001_0db8 << 96) + n));
            limiter.try_acquire(source, Duration::ZERO)
        };
        assert_eq!((0..100).filter(|n| allowed(*n)).count(), 40);
        let many = (1..11_000).filter(|n| allowed(n << 64)).count();
        assert_eq!(many, MAX_SOURCES - 1 + 40, "further sources share one limit");
        assert!(limiter.arrivals.lock().unwrap().len() <= MAX_SOURCES + 1);
    }

    #[test]
    fn only_trusted_proxies_determine_the_source() {
        let source = |trusted: &str, peer: &str, forwarded: &[&str]| {
            let mut extensions = Extensions::new();
            extensions.insert(SocketAddr::new(peer.parse().unwrap(), 1));
            let mut headers = HeaderMap::new();
            for it in forwarded {
                headers.append("x-forwarded-for", it.parse().unwrap());
            }
            limiter(trusted).source(&extensions, &headers).unwrap().to_string()
        };
        assert_eq!(source("", "10.0.0.1", &["1.2.3.4"]), "10.0.0.1");
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["1.2.3.4"]), "1.2.3.4");
        assert_eq!(
            source("10.0.0.0/8", "::ffff:10.0.0.1", &["6.6.6.6, 1.2.3.4, 10.0.0.2"]),
            "1.2.3.4"
        );
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["6.6.6.6", "1.2.3.4"]), "1.2.3.4");
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["1.2.3.4:5678"]), "1.2.3.4");
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["[2001:db8::1]:80"]), "2001:db8::1");
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["[2001:db8::1]"]), "2001:db8::1");
        assert_eq!(source("10.0.0.0/8", "10.0.0.1", &["nonsense"]), "10.0.0.1");
        assert_eq!(source("10.0.0.0/8", "9.9.9.9", &["1.2.3.4"]), "9.9.9.9");
    }
}
