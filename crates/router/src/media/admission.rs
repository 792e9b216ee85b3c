//! Admission of a stream: its URL, its token and its handshake.

use std::net::{IpAddr, SocketAddr};

use axum::{body::Body, http::HeaderMap};
use data_encoding::BASE64URL_NOPAD;
use hyper::{
    Method, Request, Response, StatusCode, Version,
    body::Incoming,
    header::{self, HeaderValue},
    upgrade::OnUpgrade,
};

use super::{Gateway, PATH_PREFIX, empty, streams::StreamSlot};
use fleet::{AttachRefused, names::CallSid};
use media::{handshake, token::TokenError};
use telephony::Parameters;

/// An admitted request for a stream.
pub(super) struct Admission {
    pub(super) call: CallSid,
    pub(super) pod_attempt: u32,
    /// Path and query that the agent sees.
    pub(super) target: String,
    /// The provider's offer of subprotocols.
    pub(super) protocols: Option<String>,
    /// Custom values for the agent.
    pub(super) parameters: Parameters,
    /// Address of the client, behind trusted proxies.
    pub(super) from: IpAddr,
    /// `traceparent` and `tracestate` of the request.
    pub(super) trace_headers: HeaderMap,
    pub(super) upgrade: OnUpgrade,
    pub(super) accept: String,
}

/// A refused request for a stream.
pub(super) struct NotAdmitted {
    pub(super) call: Option<CallSid>,
    pub(super) status: StatusCode,
    pub(super) from: IpAddr,
    pub(super) reason: &'static str,
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
            AttachRefused::NoPods | AttachRefused::UnknownPod => {
                (StatusCode::SERVICE_UNAVAILABLE, "no_pods")
            }
        };
        Self { call: Some(admission.call.clone()), status, from: admission.from, reason }
    }
}

/// Headers that continue a trace.
const TRACE_HEADERS: [&str; 2] = ["traceparent", "tracestate"];

impl Gateway {
    /// Checks a request as far as that is possible without the store, and reserves its slot.
    pub(super) fn admit(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<(Admission, StreamSlot), NotAdmitted> {
        request.extensions_mut().insert(peer);
        let source = self.rate_limiter.source(request.extensions(), request.headers());
        let from = source.unwrap_or(peer.ip());
        let mut refused =
            NotAdmitted { call: None, status: StatusCode::FORBIDDEN, from, reason: "" };
        let (call, pod_attempt, target, parameters) = match self.check_url(&request) {
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
        let Some(slot) = self.streams.reserve() else {
            (refused.status, refused.reason) = (StatusCode::SERVICE_UNAVAILABLE, "max_streams");
            return Err(refused);
        };
        let headers = request.headers();
        let (trace_headers, protocols) = (trace_headers(headers), protocols(headers));
        let upgrade = hyper::upgrade::on(&mut request);
        let admission = Admission {
            call,
            pod_attempt,
            target,
            protocols,
            parameters,
            from,
            trace_headers,
            upgrade,
            accept,
        };
        Ok((admission, slot))
    }

    /// The call and the pod attempt of a stream URL with a valid token, the target for the agent
    /// and its parameters.
    fn check_url(
        &self,
        request: &Request<Incoming>,
    ) -> Result<(CallSid, u32, String, Parameters), &'static str> {
        let path = request.uri().path().strip_prefix(PATH_PREFIX).unwrap_or_default();
        let (call, rest) = path.split_once('/').ok_or("malformed_token")?;
        let (token, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let verified = self.keys.verify(token, call, path).map_err(|error| match error {
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
        let parameters = decode_parameters(verified.parameters).ok_or("malformed_token")?;
        Ok((call, verified.attempt, target, parameters))
    }
}

/// The parameters as text for a token.
pub(super) fn encode_parameters(parameters: &Parameters) -> String {
    match parameters.is_empty() {
        true => String::new(),
        false => BASE64URL_NOPAD.encode(parameters.to_lines().as_bytes()),
    }
}

fn decode_parameters(text: &str) -> Option<Parameters> {
    if text.is_empty() {
        return Some(Parameters::NONE);
    }
    let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).ok()?;
    Parameters::from_lines(std::str::from_utf8(&bytes).ok()?)
}

/// The headers of a request that continue a trace.
pub(super) fn trace_headers(headers: &HeaderMap) -> HeaderMap {
    let mut found = HeaderMap::new();
    for name in TRACE_HEADERS {
        let value = headers.get(name);
        found.extend(
            value.map(|value| (Some(header::HeaderName::from_static(name)), value.clone())),
        );
    }
    found
}

/// The `Sec-WebSocket-Accept` of a valid WebSocket handshake.
pub(super) fn accept_key(request: &Request<Incoming>) -> Option<String> {
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
pub(super) fn protocols(headers: &HeaderMap) -> Option<String> {
    let offers = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let offers: Vec<&str> = offers.filter_map(|offer| offer.to_str().ok()).collect();
    (!offers.is_empty()).then(|| offers.join(", "))
}

/// The response that opens the provider's WebSocket.
pub(super) fn accepted(accept: &str, protocol: Option<&str>) -> Response<Body> {
    let mut response = empty(StatusCode::SWITCHING_PROTOCOLS);
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    let value = |text: &str| HeaderValue::try_from(text).ok();
    let chosen = [
        (header::SEC_WEBSOCKET_ACCEPT, value(accept)),
        (header::SEC_WEBSOCKET_PROTOCOL, protocol.and_then(value)),
    ];
    for (name, value) in chosen {
        headers.extend(value.map(|value| (Some(name), value)));
    }
    response
}
