//! The WebSocket handshake of a request that axum has routed.

use std::future::Future;

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header::SEC_WEBSOCKET_PROTOCOL},
    response::Response,
};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        handshake::server::create_response_with_body,
        protocol::{Role, WebSocketConfig},
    },
};

use crate::http::ApiError;

pub(super) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Size limit of a message (bytes).
const MAX_MESSAGE_SIZE: usize = 1 << 20;
/// Media messages are small; the library's default of 128 KiB per stream is for bulk data.
const READ_BUFFER_SIZE: usize = 4 << 10;
/// Subprotocol that jambonz offers and expects the agent to accept.
const JAMBONZ: &str = "audio.jambonz.org";

/// Accepts a WebSocket handshake; returns the response and the future socket.
pub(super) fn accept(
    request: &mut Request,
) -> Result<(Response, impl Future<Output = hyper::Result<Socket>> + use<>), ApiError> {
    let mut response = create_response_with_body(request, Body::empty).map_err(|_| {
        ApiError::new(StatusCode::UPGRADE_REQUIRED, "this path accepts WebSocket connections only")
    })?;
    if offers(request.headers(), JAMBONZ) {
        let name = HeaderValue::from_static(JAMBONZ);
        response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, name);
    }
    let upgrade = hyper::upgrade::on(request);
    let socket = async {
        let limits = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_SIZE))
            .read_buffer_size(READ_BUFFER_SIZE);
        let stream = TokioIo::new(upgrade.await?);
        Ok(WebSocketStream::from_raw_socket(stream, Role::Server, Some(limits)).await)
    };
    Ok((response, socket))
}

/// Whether the client offers a subprotocol.
fn offers(headers: &HeaderMap, name: &str) -> bool {
    let values = headers.get_all(SEC_WEBSOCKET_PROTOCOL).into_iter();
    let mut offered = values.filter_map(|value| value.to_str().ok()).flat_map(|it| it.split(','));
    offered.any(|offer| offer.trim() == name)
}
