//! WebSocket handshakes: the provider's request is checked and answered here, the agent's is
//! written and its response read here. Extensions are offered to neither side.

use aws_lc_rs::digest;
use data_encoding::BASE64;

/// Appended to the key before hashing (RFC 6455, section 1.3).
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Longest response head of an agent.
pub const MAX_RESPONSE_HEAD: usize = 16 << 10;
/// Most headers in the response of an agent.
const MAX_RESPONSE_HEADERS: usize = 64;

/// The `Sec-WebSocket-Accept` that answers a `Sec-WebSocket-Key`.
pub fn accept_key(key: &str) -> String {
    let mut hash = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key.as_bytes());
    hash.update(GUID);
    BASE64.encode(hash.finish().as_ref())
}

/// Whether a key decodes to the 16 bytes that the RFC asks for.
pub fn is_valid_key(key: &str) -> bool {
    BASE64.decode(key.as_bytes()).is_ok_and(|key| key.len() == 16)
}

/// A request to the agent.
pub struct AgentRequest<'a> {
    /// Path and query.
    pub target: &'a str,
    pub host: &'a str,
    /// Base64 of 16 random bytes.
    pub key: &'a str,
    /// The provider's offer, as it sent it.
    pub protocols: Option<&'a str>,
    /// Further headers; names and values must have been checked.
    pub headers: &'a [(&'a str, &'a str)],
}

impl AgentRequest<'_> {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut head = String::with_capacity(512);
        for part in ["GET ", self.target, " HTTP/1.1\r\nHost: ", self.host] {
            head.push_str(part);
        }
        head.push_str("\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n");
        head.push_str("Sec-WebSocket-Version: 13\r\n");
        let protocols = self.protocols.map(|protocols| ("Sec-WebSocket-Protocol", protocols));
        let own = [("Sec-WebSocket-Key", self.key)];
        for (name, value) in own.iter().chain(&protocols).chain(self.headers) {
            for part in [name, ": ", value, "\r\n"] {
                head.push_str(part);
            }
        }
        head.push_str("\r\n");
        head.into_bytes()
    }
}

/// The agent accepted the WebSocket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The subprotocol that the agent chose.
    pub protocol: Option<String>,
    /// Bytes of the head; what follows are frames.
    pub len: usize,
}

/// Why the response of an agent opens no stream. The texts reach the agent's author through
/// the page and the story of the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the agent's answer to the handshake is not HTTP: it is no WebSocket server")]
    NotHttp,
    #[error("the agent answered {0} instead of 101 Switching Protocols: {hint}", hint = hint(*.0))]
    Status(u16),
    #[error("the agent's response has no valid Upgrade and Connection headers")]
    NoUpgrade,
    #[error("the agent's Sec-WebSocket-Accept is wrong")]
    WrongAccept,
    #[error("the agent chose a subprotocol that the provider did not offer")]
    UnofferedProtocol,
    #[error("the agent chose an extension that was not offered")]
    UnofferedExtension,
    #[error("the agent's response head is larger than {MAX_RESPONSE_HEAD} bytes")]
    TooLarge,
}

/// The usual cause of a status.
fn hint(status: u16) -> &'static str {
    match status {
        404 => "it has no WebSocket at the path of the stream (WS_PATH_TEMPLATE)",
        401 | 403 => "it refuses the handshake; the router has no credentials for agents",
        400 | 426 => "it did not accept the handshake as one of a WebSocket",
        200..=299 => "it is an HTTP server without a WebSocket at the path of the stream",
        500..=599 => "it failed; its log has the cause",
        _ => "it is no WebSocket server",
    }
}

/// Reads the response of an agent; `None` if more bytes are needed.
pub fn read_response(
    bytes: &[u8],
    key: &str,
    offered: Option<&str>,
) -> Result<Option<Accepted>, Refused> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_RESPONSE_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let len = match response.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() >= MAX_RESPONSE_HEAD => {
            return Err(Refused::TooLarge);
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Refused::TooLarge),
        Err(_) => return Err(Refused::NotHttp),
    };
    let status = response.code.unwrap_or_default();
    if status != 101 {
        return Err(Refused::Status(status));
    }
    let header = |name: &str| {
        let mut values = response.headers.iter().filter(|it| it.name.eq_ignore_ascii_case(name));
        let value = values.next().map(|it| String::from_utf8_lossy(it.value).trim().to_owned());
        value.filter(|_| values.next().is_none())
    };
    let has_token = |name: &str, token: &str| header(name).is_some_and(|it| has_token(&it, token));
    if !has_token("upgrade", "websocket") || !has_token("connection", "upgrade") {
        return Err(Refused::NoUpgrade);
    }
    if header("sec-websocket-accept").as_deref() != Some(&accept_key(key)) {
        return Err(Refused::WrongAccept);
    }
    if header("sec-websocket-extensions").is_some_and(|it| !it.is_empty()) {
        return Err(Refused::UnofferedExtension);
    }
    let protocol = header("sec-websocket-protocol");
    if let Some(protocol) = &protocol
        && !offered.is_some_and(|offered| offered.split(',').any(|it| it.trim() == protocol))
    {
        return Err(Refused::UnofferedProtocol);
    }
    Ok(Some(Accepted { protocol, len }))
}

/// Whether a comma-separated header value contains a token, in any case.
pub fn has_token(value: &str, token: &str) -> bool {
    value.split(',').any(|it| it.trim().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The example of RFC 6455, section 1.3.
    const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
    const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

    fn response(lines: &str) -> Result<Option<Accepted>, Refused> {
        let text = format!("HTTP/1.1 {}\r\n\r\nrest", lines.trim().replace('\n', "\r\n"));
        read_response(text.as_bytes(), KEY, Some("a, audio.jambonz.org"))
    }

    #[test]
    fn accept_keys_follow_the_rfc() {
        assert_eq!(accept_key(KEY), ACCEPT);
        assert!(is_valid_key(KEY));
        for key in ["", "AAAA", "dGhlIHNhbXBsZSBub25jZQ", "?"] {
            assert!(!is_valid_key(key), "{key}");
        }
    }

    #[test]
    fn a_good_response_opens_the_stream() {
        let good = format!(
            "101 Switching Protocols\nUpgrade: WebSocket\nconnection: keep-alive, Upgrade\n\
             Sec-WebSocket-Accept: {ACCEPT}\nSec-WebSocket-Protocol: audio.jambonz.org"
        );
        let accepted = response(&good).unwrap().unwrap();
        assert_eq!(accepted.protocol.as_deref(), Some("audio.jambonz.org"));
        let text = format!("HTTP/1.1 {}\r\n\r\n", good.replace('\n', "\r\n"));
        assert_eq!(accepted.len, text.len());
        for short in 0..text.len() {
            let part = read_response(&text.as_bytes()[..short], KEY, None);
            assert!(matches!(part, Ok(None)), "{short} bytes: {part:?}");
        }
    }

    #[test]
    fn other_responses_are_refused_with_a_reason() {
        let upgrade = "101 OK\nUpgrade: websocket\nConnection: Upgrade\n";
        let accept = format!("Sec-WebSocket-Accept: {ACCEPT}\n");
        let cases = [
            ("500 Internal Server Error".to_owned(), Refused::Status(500)),
            ("200 OK\nContent-Length: 0".to_owned(), Refused::Status(200)),
            ("101 OK".to_owned(), Refused::NoUpgrade),
            (upgrade.to_owned(), Refused::WrongAccept),
            (format!("{upgrade}Sec-WebSocket-Accept: AAAA"), Refused::WrongAccept),
            (format!("{upgrade}{accept}{accept}"), Refused::WrongAccept),
            (format!("{upgrade}{accept}Sec-WebSocket-Protocol: other"), Refused::UnofferedProtocol),
            (
                format!("{upgrade}{accept}Sec-WebSocket-Extensions: permessage-deflate"),
                Refused::UnofferedExtension,
            ),
        ];
        for (lines, refused) in cases {
            assert_eq!(response(&lines), Err(refused), "{lines}");
        }
        assert_eq!(read_response(b"220 smtp ready\r\n\r\n", KEY, None), Err(Refused::NotHttp));
        let long = format!("HTTP/1.1 101 OK\r\nA: {}", "a".repeat(MAX_RESPONSE_HEAD));
        assert_eq!(read_response(long.as_bytes(), KEY, None), Err(Refused::TooLarge));
    }

    #[test]
    fn requests_carry_what_they_must() {
        let request = AgentRequest {
            target: "/ws?a=b",
            host: "10.0.0.1:8000",
            key: KEY,
            protocols: Some("p1, p2"),
            headers: &[("X-Call-Sid", "CA1")],
        };
        let text = String::from_utf8(request.to_bytes()).unwrap();
        let expected = "GET /ws?a=b HTTP/1.1\r\nHost: 10.0.0.1:8000\r\nUpgrade: websocket\r\n\
            Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
            Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: p1, p2\r\n\
            X-Call-Sid: CA1\r\n\r\n";
        assert_eq!(text, expected);
    }
}
