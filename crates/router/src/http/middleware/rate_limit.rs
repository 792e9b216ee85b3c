//! Requests that nobody vouches for, by token or signature: so many a second from one
//! source are answered. Who is authenticated is never counted, so that a stranger behind
//! the same proxy can't keep calls out.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    extract::{Request, State},
    http::{Extensions, HeaderMap, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::http::{ApiError, Context, Noted};
use crate::networks::Networks;

/// A source that was quiet may ask as often at once as in so many seconds.
const BURST: u32 = 4;
/// About so many sources are told apart; the others count as one.
const SOURCES: usize = 10_000;

/// What each source has spent of what it may.
pub struct Rates {
    per_second: u32,
    trusted: Networks,
    began: Instant,
    /// For each, when it will have paid for all it asked.
    paid: Mutex<HashMap<IpAddr, Duration>>,
}

impl Rates {
    /// Zero requests a second mean that nobody counts.
    pub fn new(per_second: u32, trusted: Networks) -> Self {
        Self { per_second, trusted, began: Instant::now(), paid: Mutex::default() }
    }

    /// Where a request comes from: the last address on its way that is none of our proxies.
    pub fn source(&self, extensions: &Extensions, headers: &HeaderMap) -> Option<IpAddr> {
        let peer = extensions.get::<SocketAddr>()?.ip().to_canonical();
        let mut source = peer;
        let forwarded = headers.get_all("x-forwarded-for").iter().rev();
        let hops = forwarded.flat_map(|it| it.to_str().unwrap_or("?").rsplit(','));
        for hop in hops {
            if !self.trusted.contains(source) {
                break;
            }
            let Some(hop) = address(hop.trim()) else { break };
            source = hop.to_canonical();
        }
        Some(source)
    }

    /// Counts a request; whether its source may still ask.
    fn spend(&self, source: IpAddr, now: Duration) -> bool {
        let each = Duration::from_secs(1) / self.per_second;
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        if paid.len() >= SOURCES {
            paid.retain(|_, until| *until > now);
        }
        let mut key = network_of(source);
        if paid.len() >= SOURCES && !paid.contains_key(&key) {
            key = Ipv6Addr::UNSPECIFIED.into();
        }
        let until = paid.entry(key).or_default();
        let next = now.max(*until) + each;
        let may = next <= now + BURST * Duration::from_secs(1);
        if may {
            *until = next;
        }
        may
    }
}

/// An address as proxies write it, some with a port.
fn address(text: &str) -> Option<IpAddr> {
    let plain = text.trim_start_matches('[').trim_end_matches(']').parse();
    plain.ok().or_else(|| Some(text.parse::<SocketAddr>().ok()?.ip()))
}

/// Whoever has an address of IPv6 has many.
pub fn network_of(source: IpAddr) -> IpAddr {
    match source {
        IpAddr::V6(it) => Ipv6Addr::from_bits(it.to_bits() & (u128::MAX << 64)).into(),
        source => source,
    }
}

/// Counts a request that is not authenticated; the answer if its source has had enough.
pub fn charge(context: &Context, extensions: &Extensions, headers: &HeaderMap) -> Option<Response> {
    let rates = &context.rates;
    if rates.per_second == 0 {
        return None;
    }
    let source = rates.source(extensions, headers)?;
    if rates.spend(source, rates.began.elapsed()) {
        return None;
    }
    context.metrics.denied("rate_limited");
    let error = "too many requests without a valid token or signature";
    let response = ApiError::new(StatusCode::TOO_MANY_REQUESTS, error).into_response();
    Some(Noted { outcome: "rate_limited", ..Noted::default() }.on(response))
}

/// What anyone may ask, but not as often as they like.
pub async fn limit(State(context): State<Arc<Context>>, request: Request, next: Next) -> Response {
    match charge(&context, request.extensions(), request.headers()) {
        Some(refused) => refused,
        None => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(trusted: &str) -> Rates {
        Rates::new(10, trusted.parse().unwrap())
    }

    #[test]
    fn a_source_may_ask_so_often_and_another_does_not_suffer() {
        let rates = rates("");
        let (one, other) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let at = Duration::from_millis;
        let allowed = |source, now| (0..100).filter(|_| rates.spend(source, at(now))).count();
        assert_eq!(allowed(one, 0), 40);
        assert_eq!(allowed(other, 0), 40);
        assert_eq!(allowed(one, 1_000), 10, "what it has regained");
        assert_eq!(allowed(one, 60_000), 40);
    }

    #[test]
    fn addresses_of_one_network_are_one_source_and_sources_are_bounded() {
        let rates = rates("");
        let allowed = |n: u128| {
            let source = IpAddr::from(Ipv6Addr::from_bits((0x2001_0db8 << 96) + n));
            rates.spend(source, Duration::ZERO)
        };
        assert_eq!((0..100).filter(|n| allowed(*n)).count(), 40);
        let many = (1..11_000).filter(|n| allowed(n << 64)).count();
        assert_eq!(many, SOURCES - 1 + 40, "and those beyond count as one");
        assert!(rates.paid.lock().unwrap().len() <= SOURCES + 1);
    }

    #[test]
    fn only_our_proxies_are_believed() {
        let source = |trusted: &str, peer: &str, forwarded: &[&str]| {
            let mut extensions = Extensions::new();
            extensions.insert(SocketAddr::new(peer.parse().unwrap(), 1));
            let mut headers = HeaderMap::new();
            for it in forwarded {
                headers.append("x-forwarded-for", it.parse().unwrap());
            }
            rates(trusted).source(&extensions, &headers).unwrap().to_string()
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
