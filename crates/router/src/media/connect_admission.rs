//! Admission of a stream that no webhook has announced: its URL, its signature or secret, and its
//! handshake. The call is read from the stream itself.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{body::Body, http::HeaderMap};
use hyper::{Request, Response, StatusCode, body::Incoming, upgrade::OnUpgrade};
use tokio::sync::oneshot;

use super::{
    CONNECT_PREFIX, Gateway,
    admission::{self, NotAdmitted},
    agents::JAMBONZ,
    empty,
    streams::StreamSlot,
};
use telephony::{BodyFormat, Coverage, InvalidSignature, Params, Provider, Webhook};

/// An admitted request for a stream whose call is not known yet.
pub(super) struct ConnectAdmission {
    pub(super) provider: Provider,
    pub(super) query: Params,
    /// The subprotocol that the provider is answered.
    pub(super) protocol: Option<&'static str>,
    /// Address of the client, behind trusted proxies.
    pub(super) from: IpAddr,
    /// `traceparent` and `tracestate` of the request.
    pub(super) trace_headers: HeaderMap,
    pub(super) upgrade: OnUpgrade,
    pub(super) accept: String,
    pub(super) slot: StreamSlot,
}

/// Status and reason of a refusal.
type Refusal = (StatusCode, &'static str);

impl Gateway {
    /// Responds to a request below [`CONNECT_PREFIX`].
    pub(crate) async fn serve_connect(
        self: &Arc<Self>,
        request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Response<Body> {
        let admission = match self.admit_connect(request, peer) {
            Ok(admission) => admission,
            Err(refused) => return self.refuse(&refused),
        };
        let (respond, response) = oneshot::channel();
        let gateway = self.clone();
        self.tasks.spawn(async move { gateway.carry_connect(admission, respond).await });
        response.await.unwrap_or_else(|_| empty(StatusCode::INTERNAL_SERVER_ERROR))
    }

    fn admit_connect(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<ConnectAdmission, NotAdmitted> {
        request.extensions_mut().insert(peer);
        let source = self.rate_limiter.source(request.extensions(), request.headers());
        let from = source.unwrap_or(peer.ip());
        let refused = |(status, reason)| NotAdmitted { call: None, status, from, reason };
        let (provider, query) = self.authenticate(&request).map_err(|refusal| {
            match self.rate_limiter.allows(request.extensions(), request.headers()) {
                true => refused(refusal),
                false => refused((StatusCode::TOO_MANY_REQUESTS, "rate_limited")),
            }
        })?;
        let Some(accept) = admission::accept_key(&request) else {
            return Err(refused((StatusCode::UPGRADE_REQUIRED, "not_websocket")));
        };
        if self.lifecycle.stopping.is_cancelled() {
            return Err(refused((StatusCode::SERVICE_UNAVAILABLE, "stopping")));
        }
        let Some(slot) = self.streams.reserve() else {
            return Err(refused((StatusCode::SERVICE_UNAVAILABLE, "max_streams")));
        };
        let headers = request.headers();
        let offers = admission::protocols(headers).unwrap_or_default();
        let protocol = offers.split(',').any(|offer| offer.trim() == JAMBONZ).then_some(JAMBONZ);
        let trace_headers = admission::trace_headers(headers);
        let upgrade = hyper::upgrade::on(&mut request);
        Ok(ConnectAdmission {
            provider,
            query,
            protocol,
            from,
            trace_headers,
            upgrade,
            accept,
            slot,
        })
    }

    /// Checks the URL and its signature or secret.
    fn authenticate(&self, request: &Request<Incoming>) -> Result<(Provider, Params), Refusal> {
        let path = request.uri().path().strip_prefix(CONNECT_PREFIX).unwrap_or_default();
        let (name, secret) = match path.split_once('/') {
            Some((name, secret)) => (name, Some(secret)),
            None => (path, None),
        };
        let provider = name.parse().ok();
        let provider = provider.filter(|provider| self.at_connect.providers.contains(provider));
        let provider: Provider = provider.ok_or((StatusCode::NOT_FOUND, "unknown_provider"))?;
        let query = Params::from_form(request.uri().query().unwrap_or_default())
            .map_err(|_| (StatusCode::BAD_REQUEST, "malformed_query"))?;
        let forbidden = |reason| (StatusCode::FORBIDDEN, reason);
        let keys = self.access.keys(provider).filter(|_| provider.dialect().signs_streams());
        match (keys, self.access.connect_secrets()) {
            (Some(keys), _) => {
                self.check_signature(request, provider, &query, &keys).map_err(|error| {
                    forbidden(match error {
                        InvalidSignature::Missing(_) => "missing_signature",
                        _ => "wrong_signature",
                    })
                })?;
            }
            (None, Some(secrets)) => {
                let secret = secret.ok_or(forbidden("missing_secret"))?;
                // Compares with every secret, so that the time tells nothing about their order.
                let matching = secrets.iter().filter(|known| known.matches(secret)).count();
                if matching == 0 {
                    return Err(forbidden("wrong_secret"));
                }
            }
            (None, None) => {
                tracing::warn!(
                    %provider,
                    "allocate at connect is off for this provider: set CONNECT_SECRET, or its secret if it signs handshakes"
                );
                return Err(forbidden("connect_off"));
            }
        }
        Ok((provider, query))
    }

    /// Verifies the signature of a handshake: that of a GET of the stream URL. The base of the URL
    /// is configured; the `Host` of the request is the client's choice.
    fn check_signature(
        &self,
        request: &Request<Incoming>,
        provider: Provider,
        query: &Params,
        keys: &[telephony::Secret],
    ) -> Result<(), InvalidSignature> {
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        // https:// becomes wss://, http:// becomes ws://.
        let public = self.at_connect.public_url.strip_prefix("http").map(|it| format!("ws{it}"));
        let mut outcome = Err(InvalidSignature::Mismatch);
        for base in [Some(&self.base_url), public.as_ref()].into_iter().flatten() {
            let webhook = Webhook {
                is_get: true,
                public_url: base,
                target,
                headers: request.headers(),
                body: &[],
                body_format: BodyFormat::Form,
                received_at: 0,
                query: query.clone(),
                body_params: Params::default(),
                coverage: Coverage::Everything,
                fingerprint: None,
            };
            outcome = provider.dialect().verify(&webhook, keys).map(drop);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }
}
