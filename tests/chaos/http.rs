//! Requests that may fail in every way.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// Who has waited for so long has waited for nothing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(6);

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub status: u16,
    pub body: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Nobody listens.
    Refused,
    /// The line broke before the answer was there.
    Broken,
    TimedOut,
    /// The answer was there, but what it said may not last: it counts as lost.
    Unheard,
}

pub(crate) fn ask(
    to: SocketAddr,
    method: &str,
    path: &str,
    kind: &str,
    body: &[u8],
) -> Result<Answer, Failure> {
    let began = Instant::now();
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE).map_err(|_| Failure::Refused)?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = stream.set_nodelay(true);
    let request = [head.as_bytes(), body].concat();
    stream.write_all(&request).map_err(|_| Failure::Broken)?;
    read(&mut stream, began)
}

/// The answer that comes on a line.
pub(crate) fn read(stream: &mut TcpStream, began: Instant) -> Result<Answer, Failure> {
    let mut bytes = Vec::new();
    let mut some = [0; 8 << 10];
    loop {
        let left = PATIENCE.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
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
    Ok(Answer { status, body: body.to_owned() })
}

pub(crate) fn post(
    to: SocketAddr,
    path: &str,
    body: &serde_json::Value,
) -> Result<Answer, Failure> {
    ask(to, "POST", path, "application/json", body.to_string().as_bytes())
}

pub(crate) fn form(to: SocketAddr, path: &str, body: &str) -> Result<Answer, Failure> {
    ask(to, "POST", path, "application/x-www-form-urlencoded", body.as_bytes())
}

pub(crate) fn get(to: SocketAddr, path: &str) -> Result<Answer, Failure> {
    ask(to, "GET", path, "text/plain", b"")
}
