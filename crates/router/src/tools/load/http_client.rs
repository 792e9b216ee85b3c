//! A minimal HTTP client: the load generator should cost as little as possible.

use std::{fmt, io, sync::Arc};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Duration, timeout},
};

use crate::{
    client::Wire,
    tools::provider_stream::{Dialer, MediaFormat, StreamError},
};
use telephony::{Provider, Secret};

/// How long a request may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The router to load.
#[derive(Debug, Clone)]
pub struct Target {
    /// Scheme, host and port.
    url: String,
    host: String,
    token: Option<Secret>,
    pub(super) dialer: Arc<Dialer>,
    is_loopback: bool,
}

impl Target {
    /// Parses `http://host:port` or `https://host:port`, and resolves the host.
    pub async fn parse(url: &str, token: Option<Secret>, dialer: Dialer) -> Result<Self, String> {
        let url = url.trim_end_matches('/');
        let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let host = host.ok_or("expected a URL that begins with http:// or https://")?.to_owned();
        let is_loopback = dialer.is_loopback(url).await.map_err(|error| error.to_string())?;
        Ok(Self { url: url.to_owned(), host, token, dialer: Arc::new(dialer), is_loopback })
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.is_loopback
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// Format of allocate and release requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Json,
    Provider(Provider),
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "json" => Ok(Self::Json),
            name => name
                .parse()
                .map(Self::Provider)
                .map_err(|_| "json or the name of a provider".to_owned()),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json => f.write_str("json"),
            Self::Provider(provider) => provider.fmt(f),
        }
    }
}

/// An allocate request.
#[derive(Clone, Copy)]
pub(super) struct Allocate<'a> {
    pub(super) format: Format,
    pub(super) call: &'a str,
    pub(super) merchant: Option<&'a str>,
    /// Provider to name in a JSON request.
    pub(super) media: Option<MediaFormat>,
}

/// A successful allocate request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    /// `None` if the document contains only the URL of the gateway.
    pub(super) pod: Option<String>,
    pub(super) ws_url: Option<String>,
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    NoConnection(io::Error),
    Timeout,
    /// No pod for the call.
    Refused,
    Status(u16),
    Other(String),
}

impl Failure {
    pub(super) fn kind(&self) -> String {
        match self {
            Self::NoConnection(error) => format!("no connection ({})", error.kind()),
            Self::Timeout => "no answer".into(),
            Self::Refused => "refused".into(),
            Self::Status(status) => format!("status {status}"),
            Self::Other(text) => text.clone(),
        }
    }
}

impl From<StreamError> for Failure {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::NoConnection(kind) => Self::NoConnection(kind.into()),
            StreamError::Timeout => Self::Timeout,
            StreamError::Refused(status) => Self::Status(status),
            other => Self::Other(other.to_string()),
        }
    }
}

/// A connection that reconnects after a failure.
pub(super) struct Connection {
    target: Target,
    stream: Option<Box<dyn Wire>>,
    buffer: Vec<u8>,
}

impl Connection {
    pub(super) fn new(target: &Target) -> Self {
        Self { target: target.clone(), stream: None, buffer: Vec::with_capacity(4096) }
    }

    /// Closes the connection; the next request opens another.
    pub(super) fn close(&mut self) {
        self.stream = None;
    }

    pub(super) async fn allocate(&mut self, request: Allocate<'_>) -> Result<Allocation, Failure> {
        let Allocate { format, call, merchant, media } = request;
        let merchant = merchant.map(|id| utf8_percent_encode(id, NON_ALPHANUMERIC).to_string());
        let (path, body) = match format {
            Format::Json => {
                let merchant = merchant.map(|id| format!(r#","merchant_id":"{id}""#));
                let provider = media.map(|media| format!(r#","provider":"{media}""#));
                let (merchant, provider) =
                    (merchant.unwrap_or_default(), provider.unwrap_or_default());
                let body = format!(r#"{{"call_sid":"{call}"{merchant}{provider}}}"#);
                ("/api/v1/allocate".into(), body)
            }
            Format::Provider(provider) => {
                let query = merchant.map(|id| format!("?merchant_id={id}")).unwrap_or_default();
                let field = provider.dialect().call_id_field();
                (format!("/api/v1/{provider}/allocate{query}"), format!("{field}={call}"))
            }
        };
        let (status, body) = self.post(&path, format, &body).await?;
        let (pod, ws_url) = (pod_in(body), ws_url_in(body));
        match status {
            200 if pod.is_some() || ws_url.is_some() => {
                Ok(Allocation { pod: pod.map(str::to_owned), ws_url })
            }
            200 | 503 => Err(Failure::Refused),
            status => Err(Failure::Status(status)),
        }
    }

    /// Looks up the pod of a call.
    pub(super) async fn pod_of(&mut self, call: &str) -> Result<Option<String>, Failure> {
        match self.get(&format!("/api/v1/calls/{call}")).await? {
            (200, body) => {
                let call: Value = serde_json::from_str(body).unwrap_or_default();
                Ok(call["pod_name"].as_str().map(str::to_owned))
            }
            (404, _) => Ok(None),
            (status, _) => Err(Failure::Status(status)),
        }
    }

    pub(super) async fn release(&mut self, format: Format, call: &str) -> Result<(), Failure> {
        let (path, body) = match format {
            Format::Json => ("/api/v1/release".into(), format!(r#"{{"call_sid":"{call}"}}"#)),
            Format::Provider(provider) => {
                let field = provider.dialect().call_id_field();
                let status =
                    "CallStatus=completed&Status=completed&status=completed&call_status=completed";
                (format!("/api/v1/{provider}/call-status"), format!("{field}={call}&{status}"))
            }
        };
        match self.post(&path, format, &body).await? {
            (200, _) => Ok(()),
            (status, _) => Err(Failure::Status(status)),
        }
    }

    /// Sends a GET request; returns the status and the body.
    pub(super) async fn get(&mut self, path: &str) -> Result<(u16, &str), Failure> {
        let request = format!("GET {path} HTTP/1.1\r\n{}\r\n", self.head());
        self.send(request.as_bytes()).await
    }

    async fn post(
        &mut self,
        path: &str,
        format: Format,
        body: &str,
    ) -> Result<(u16, &str), Failure> {
        let kind = match format {
            Format::Json => "application/json",
            Format::Provider(_) => "application/x-www-form-urlencoded",
        };
        let request = format!(
            "POST {path} HTTP/1.1\r\n{}content-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}",
            self.head(),
            body.len()
        );
        self.send(request.as_bytes()).await
    }

    fn head(&self) -> String {
        let token = self.target.token.as_ref();
        let bearer = token.map(|token| format!("authorization: Bearer {}\r\n", token.expose()));
        format!("host: {}\r\n{}", self.target.host, bearer.unwrap_or_default())
    }

    async fn send(&mut self, request: &[u8]) -> Result<(u16, &str), Failure> {
        let stream = match self.stream.take() {
            Some(stream) => Ok(stream),
            None => self.target.dialer.connect(&self.target.url).await,
        };
        let mut stream = stream?;
        self.buffer.clear();
        let exchange = exchange(&mut stream, request, &mut self.buffer);
        let (status, body, is_last) = match timeout(RESPONSE_TIMEOUT, exchange).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(Failure::NoConnection(error)),
            Err(_) => return Err(Failure::Timeout),
        };
        if !is_last {
            self.stream = Some(stream);
        }
        Ok((status, str::from_utf8(&self.buffer[body..]).unwrap_or_default()))
    }
}

/// Sends a request and reads the response; returns its status, the offset of its body, and
/// whether the server closes the connection.
async fn exchange(
    stream: &mut Box<dyn Wire>,
    request: &[u8],
    buffer: &mut Vec<u8>,
) -> io::Result<(u16, usize, bool)> {
    stream.write_all(request).await?;
    let mut body = None;
    loop {
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if body.is_none() {
            body = buffer.windows(4).position(|four| four == b"\r\n\r\n").map(|end| end + 4);
        }
        let Some(begin) = body else { continue };
        let head = str::from_utf8(&buffer[..begin]).map_err(|_| io::ErrorKind::InvalidData)?;
        let header = |name: &str| {
            head.lines().skip(1).find_map(|line| {
                let (other, value) = line.split_once(':')?;
                other.eq_ignore_ascii_case(name).then(|| value.trim())
            })
        };
        let length: usize = header("content-length").and_then(|it| it.parse().ok()).unwrap_or(0);
        if buffer.len() >= begin + length {
            let status = head.get(9..12).and_then(|status| status.parse().ok());
            let status = status.ok_or(io::ErrorKind::InvalidData)?;
            let is_last = header("connection").is_some_and(|it| it.eq_ignore_ascii_case("close"));
            return Ok((status, begin, is_last));
        }
    }
}

/// Returns the pod named in a response of any format.
fn pod_in(body: &str) -> Option<&str> {
    let after = |mark: &str| body.find(mark).map(|at| &body[at + mark.len()..]);
    let rest = after("\"pod_name\":\"").or_else(|| after("/ws/pod/"))?;
    Some(&rest[..rest.find(['"', '/'])?])
}

/// Returns the WebSocket URL in a response of any format.
fn ws_url_in(body: &str) -> Option<String> {
    let at = ["wss://", "ws://"].iter().filter_map(|scheme| body.find(scheme)).min()?;
    let rest = &body[at..];
    Some(rest[..rest.find(['"', '<'])?].replace("&amp;", "&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_is_found_in_every_format() {
        assert_eq!(pod_in(r#"{"success":true,"pod_name":"a-1","ws_url":"x"}"#), Some("a-1"));
        assert_eq!(pod_in(r#"<Stream url="wss://x/ws/pod/b-2/agent"/>"#), Some("b-2"));
        assert_eq!(pod_in(r#"{"url":"wss://x/ws/pod/c-3/agent"}"#), Some("c-3"));
        assert_eq!(pod_in("<Response><Hangup/></Response>"), None);
        assert_eq!(pod_in(r#"{"url":"wss://x/media/CA1/1.2.abc/agent"}"#), None);
    }

    #[test]
    fn the_stream_url_is_found_in_every_format() {
        for body in [
            r#"{"success":true,"pod_name":"a-1","ws_url":"wss://x/a?b=1&c=2"}"#,
            r#"<Stream url="wss://x/a?b=1&amp;c=2"><Parameter name="x" value="y"/></Stream>"#,
            r#"<Stream bidirectional="true">wss://x/a?b=1&amp;c=2</Stream>"#,
            r#"[{"action":"connect","endpoint":[{"uri":"wss://x/a?b=1&c=2"}]}]"#,
        ] {
            assert_eq!(ws_url_in(body).as_deref(), Some("wss://x/a?b=1&c=2"), "{body}");
        }
        assert_eq!(ws_url_in("<Response><Hangup/></Response>"), None);
    }
}
