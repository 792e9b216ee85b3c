//! The WebSocket handshake of a request that axum has routed.

use std::future::Future;

use axum::{body::Body, extract::Request, http::StatusCode, response::Response};
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

/// Accepts a WebSocket handshake; returns the response and the future socket.
pub(super) fn accept(
    request: &mut Request,
) -> Result<(Response, impl Future<Output = hyper::Result<Socket>> + use<>), ApiError> {
    let response = create_response_with_body(request, Body::empty).map_err(|_| {
        ApiError::new(StatusCode::UPGRADE_REQUIRED, "this path accepts WebSocket connections only")
    })?;
    let upgrade = hyper::upgrade::on(request);
    let socket = async {
        let limits = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE_SIZE));
        let stream = TokioIo::new(upgrade.await?);
        Ok(WebSocketStream::from_raw_socket(stream, Role::Server, Some(limits)).await)
    };
    Ok((response, socket))
}
