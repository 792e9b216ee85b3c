//! From an HTTP request to a WebSocket.

use std::future::Future;

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header},
    response::Response,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        handshake::derive_accept_key,
        protocol::{Role, WebSocketConfig},
    },
};

use crate::http::ApiError;

pub(super) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts a WebSocket handshake: the answer, and the socket that follows it.
pub(super) fn accept(
    request: &mut Request,
) -> Result<(Response, impl Future<Output = hyper::Result<Socket>> + use<>), ApiError> {
    let headers = request.headers();
    let is_websocket = request.version() == Version::HTTP_11
        && has(headers, header::CONNECTION, "upgrade")
        && has(headers, header::UPGRADE, "websocket")
        && has(headers, header::SEC_WEBSOCKET_VERSION, "13");
    let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|_| is_websocket);
    let Some(accept) = key.map(|key| derive_accept_key(key.as_bytes())) else {
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, "a WebSocket is expected here"));
    };
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let accept = HeaderValue::try_from(accept).expect("base64 is a header value");
    response.headers_mut().extend([
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static("websocket")),
        (header::SEC_WEBSOCKET_ACCEPT, accept),
    ]);
    let upgrade = hyper::upgrade::on(request);
    let socket = async {
        let limits = WebSocketConfig::default().max_message_size(Some(1 << 20));
        Ok(WebSocketStream::from_raw_socket(
            TokioIo::new(upgrade.await?),
            Role::Server,
            Some(limits),
        )
        .await)
    };
    Ok((response, socket))
}

/// Whether a header lists a word, whatever its case.
fn has(headers: &HeaderMap, name: HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|part| part.trim().eq_ignore_ascii_case(word))
}
