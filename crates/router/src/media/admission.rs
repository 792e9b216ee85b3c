//! Admission of a stream: its URL, its token and its handshake.

use std::net::{IpAddr, SocketAddr};

use axum::{body::Body, http::HeaderMap};
use hyper::{
    Method, Request, Response, StatusCode, Version,
    body::Incoming,
    header::{self, HeaderValue},
    upgrade::OnUpgrade,
};

use super::{Gateway, PATH_PREFIX, empty};
use fleet::{AttachRefused, names::CallSid};
use media::{handshake, token::TokenError};

/// An admitted request for a stream.
pub(super) struct Admission {
    pub(super) call: CallSid,
    pub(super) pod_attempt: u32,
    /// Path and query that the agent sees.
    pub(super) target: String,
    /// The provider's offer of subprotocols.
    pub(super) protocols: Option<String>,
    /// Address of the client, behind trusted proxies.
    pub(super) from: IpAddr,
    /// `traceparent` and `tracestate` of the request.
    pub(super) trace_headers: HeaderMap,
    pub(super) upgrade: OnUpgrade,
    accept: String,
}

/// A refused request for a stream.
pub(super) struct NotAdmitted {
    pub(super) call: Option<CallSid>,
    pub(super) status: StatusCode,
    pub(super) from: IpAddr,
    reason: &'static str,
}

impl NotAdmitted {
    /// The label in metrics and logs.
    pub(super) fn reason(&self) -> &'static str {
        self.reason
    }

    pub(super) fn attach(admission: &Admission, refused: AttachRefused) -> Self {
        let (status, reason) = match refused {
            AttachRefused::NotFound => (StatusCode::FORBIDDEN, "unknown_call"),
            AttachRefused::OtherAttempt => (StatusCode::FORBIDDEN, "other_attempt"),
            AttachRefused::AlreadyAttached => (StatusCode::FORBIDDEN, "already_attached"),
            AttachRefused::NoPods => (StatusCode::SERVICE_UNAVAILABLE, "no_pods"),
        };
        Self { call: Some(admission.call.clone()), status, from: admission.from, reason }
    }
}

/// Headers that continue a trace.
const TRACE_HEADERS: [&str; 2] = ["traceparent", "tracestate"];

impl Gateway {
    /// Checks a request as far as that is possible without the store.
    pub(super) fn admit(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<Admission, NotAdmitted> {
        request.extensions_mut().insert(peer);
        let source = self.rate_limiter.source(request.extensions(), request.headers());
        let from = source.unwrap_or(peer.ip());
        let mut refused =
            NotAdmitted { call: None, status: StatusCode::FORBIDDEN, from, reason: "" };
        let (call, pod_attempt, target) = match self.check_url(&request) {
            Ok(checked) => checked,
            Err(reason) => {
                refused.reason = reason;
                if !self.rate_limiter.allows(request.extensions(), request.headers()) {
                    refused.status = StatusCode::TOO_MANY_REQUESTS;
                    refused.reason = "rate_limited";
                }
                return Err(refused);
            }
        };
        refused.call = Some(call.clone());
        let Some(accept) = accept_key(&request) else {
            (refused.status, refused.reason) = (StatusCode::UPGRADE_REQUIRED, "not_websocket");
            return Err(refused);
        };
        if self.lifecycle.stopping.is_cancelled() {
            (refused.status, refused.reason) = (StatusCode::SERVICE_UNAVAILABLE, "stopping");
            return Err(refused);
        }
        if self.streams.is_full() {
            (refused.status, refused.reason) = (StatusCode::SERVICE_UNAVAILABLE, "max_streams");
            return Err(refused);
        }
        let headers = request.headers();
        let mut trace_headers = HeaderMap::new();
        for name in TRACE_HEADERS {
            trace_headers.extend(
                headers
                    .get(name)
                    .map(|value| (Some(header::HeaderName::from_static(name)), value.clone())),
            );
        }
        let protocols = protocols(headers);
        let upgrade = hyper::upgrade::on(&mut request);
        Ok(Admission { call, pod_attempt, target, protocols, from, trace_headers, upgrade, accept })
    }

    /// The call and the pod attempt of a stream URL with a valid token, and the target for the
    /// agent.
    fn check_url(
        &self,
        request: &Request<Incoming>,
    ) -> Result<(CallSid, u32, String), &'static str> {
        let path = request.uri().path().strip_prefix(PATH_PREFIX).unwrap_or_default();
        let (call, rest) = path.split_once('/').ok_or("malformed_token")?;
        let (token, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let attempt = self.keys.verify(token, call, path).map_err(|error| match error {
            TokenError::Malformed => "malformed_token",
            TokenError::Wrong => "wrong_token",
            TokenError::Expired => "expired_token",
        })?;
        let call = call.parse().map_err(|_| "malformed_token")?;
        let path = if path.is_empty() { "/" } else { path };
        let target = match request.uri().query() {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        Ok((call, attempt, target))
    }
}

/// The `Sec-WebSocket-Accept` of a valid WebSocket handshake.
fn accept_key(request: &Request<Incoming>) -> Option<String> {
    let headers = request.headers();
    let text = |name| headers.get(name).and_then(|it: &HeaderValue| it.to_str().ok());
    let has_token = |name, token| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|it| it.to_str().ok())
            .any(|it| handshake::has_token(it, token))
    };
    let is_handshake = request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && has_token(header::UPGRADE, "websocket")
        && has_token(header::CONNECTION, "upgrade")
        && text(header::SEC_WEBSOCKET_VERSION) == Some("13");
    let key = text(header::SEC_WEBSOCKET_KEY).filter(|key| handshake::is_valid_key(key))?;
    is_handshake.then(|| handshake::accept_key(key))
}

/// All offers of subprotocols as one header value.
fn protocols(headers: &HeaderMap) -> Option<String> {
    let offers = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let offers: Vec<&str> = offers.filter_map(|offer| offer.to_str().ok()).collect();
    (!offers.is_empty()).then(|| offers.join(", "))
}

impl Admission {
    /// The response that opens the provider's WebSocket.
    pub(super) fn accept(&self, protocol: Option<&str>) -> Response<Body> {
        let mut response = empty(StatusCode::SWITCHING_PROTOCOLS);
        let headers = response.headers_mut();
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        let value = |text: &str| HeaderValue::try_from(text).ok();
        let chosen = [
            (header::SEC_WEBSOCKET_ACCEPT, value(&self.accept)),
            (header::SEC_WEBSOCKET_PROTOCOL, protocol.and_then(value)),
        ];
        for (name, value) in chosen {
            headers.extend(value.map(|value| (Some(name), value)));
        }
        response
    }
}
