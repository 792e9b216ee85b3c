//! HTTP requests that report each kind of failure.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(6);

#[derive(Debug, Clone)]
pub(crate) struct Response {
    pub status: u16,
    pub body: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused.
    Refused,
    /// The connection closed before the response was complete.
    Broken,
    TimedOut,
    /// Redis may lose the acknowledged write during a failover: the response counts as lost.
    Unreplicated,
}

pub(crate) fn send(
    to: SocketAddr,
    method: &str,
    path: &str,
    content_type: &str,
    body: &[u8],
) -> Result<Response, Failure> {
    let began = Instant::now();
    let mut stream =
        TcpStream::connect_timeout(&to, RESPONSE_TIMEOUT).map_err(|_| Failure::Refused)?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = stream.set_nodelay(true);
    let request = [head.as_bytes(), body].concat();
    stream.write_all(&request).map_err(|_| Failure::Broken)?;
    read_response(&mut stream, began)
}

pub(crate) fn read_response(stream: &mut TcpStream, began: Instant) -> Result<Response, Failure> {
    let mut bytes = Vec::new();
    let mut some = [0; 8 << 10];
    loop {
        let left = RESPONSE_TIMEOUT.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        let _ = stream.set_read_timeout(Some(left));
        match stream.read(&mut some) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&some[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(Failure::TimedOut);
            }
            Err(_) => break,
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").ok_or(Failure::Broken)?;
    let status = head.get(9..12).and_then(|code| code.parse().ok()).ok_or(Failure::Broken)?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    if length.is_some_and(|length: usize| body.len() < length) {
        return Err(Failure::Broken);
    }
    Ok(Response { status, body: body.to_owned() })
}

pub(crate) fn post(
    to: SocketAddr,
    path: &str,
    body: &serde_json::Value,
) -> Result<Response, Failure> {
    send(to, "POST", path, "application/json", body.to_string().as_bytes())
}

pub(crate) fn form(to: SocketAddr, path: &str, body: &str) -> Result<Response, Failure> {
    send(to, "POST", path, "application/x-www-form-urlencoded", body.as_bytes())
}

pub(crate) fn get(to: SocketAddr, path: &str) -> Result<Response, Failure> {
    send(to, "GET", path, "text/plain", b"")
}
