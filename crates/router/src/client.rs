//! A small HTTP client for the router's own API.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context as TaskContext, Poll},
};

use anyhow::{Context, bail};
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response, StatusCode, Uri, body::Incoming, client::conn::http1, header,
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::tls::Trust;
use spans::SpanContext;
use telephony::Secret;

/// A connection, with TLS or without.
pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// A client of one router.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    base: Uri,
    token: Option<Secret>,
    tls: Option<Arc<ClientConfig>>,
}

impl Client {
    pub(crate) fn new(url: &str, token: Option<Secret>, trust: &Trust) -> anyhow::Result<Self> {
        let base: Uri = url.parse().with_context(|| format!("{url:?} is not a URL"))?;
        let tls = match base.scheme_str() {
            Some("http") => None,
            Some("https") => Some(trust.client_config().map_err(anyhow::Error::msg)?),
            _ => bail!("{url:?}: expected a URL that begins with http:// or https://"),
        };
        base.host().context("the URL has no host")?;
        Ok(Self { base, token, tls })
    }

    /// Connects to the host of a URL, with TLS for `https` and `wss`.
    pub(crate) async fn connect(&self, url: &Uri) -> anyhow::Result<Box<dyn Wire>> {
        connect(url, self.tls.as_ref()).await
    }

    /// Sends a request; returns the status and the JSON body, or null without one.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Value)> {
        let response = self.request(method, path, body, "application/json").await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
    }

    /// Opens an event stream; a refusal is returned with its status and body.
    pub(crate) async fn stream(
        &self,
        path: &str,
    ) -> anyhow::Result<Result<Messages, (StatusCode, Value)>> {
        let response = self.request(Method::GET, path, None, "text/event-stream").await?;
        let status = response.status();
        if !status.is_success() {
            let bytes = response.into_body().collect().await?.to_bytes();
            return Ok(Err((status, serde_json::from_slice(&bytes).unwrap_or_default())));
        }
        Ok(Ok(Messages { body: response.into_body(), buffer: String::new() }))
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        accept: &str,
    ) -> anyhow::Result<Response<Incoming>> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut request = Request::builder();
        if let Some(token) = &self.token {
            let bearer = format!("Bearer {}", token.expose());
            request = request.header(header::AUTHORIZATION, bearer);
        }
        if let Some(parent) = SpanContext::of_environment() {
            request = request.header("traceparent", parent.to_string());
        }
        let request = request
            .method(method)
            .uri(format!("{}{path}", self.base.path().trim_end_matches('/')))
            .header(header::HOST, self.base.authority().map_or("", |it| it.as_str()))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, accept)
            .body(Full::new(Bytes::from(body)))?;
        self.exchange(request).await.map_err(with_advice)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Response<Incoming>> {
        let base = self.base.to_string();
        let stream = self
            .connect(&self.base)
            .await
            .with_context(|| format!("no router answers at {}", base.trim_end_matches('/')))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // The request is queued before the connection runs: a connection that ends at once
        // (TLS 1.3 refuses a client after its handshake) then fails the request with the
        // reason. In the other order the request would only be cancelled.
        let response = sender.send_request(request);
        tokio::spawn(connection);
        Ok(response.await?)
    }

    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::GET, path, None).await
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::POST, path, Some(body)).await
    }
}

/// Adds the setting to change if the router refused the client certificate or its absence.
fn with_advice(error: anyhow::Error) -> anyhow::Error {
    use rustls::AlertDescription as Alert;
    let advice = match error.chain().find_map(tls_alert) {
        Some(Alert::CertificateRequired) => {
            "the router requires a client certificate: set SMART_ROUTER_CERT_FILE and SMART_ROUTER_KEY_FILE"
        }
        Some(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::DecryptError,
        ) => "the router does not accept the certificate in SMART_ROUTER_CERT_FILE",
        _ => return error,
    };
    error.context(advice)
}

/// Returns the alert with which the peer ended TLS. An `io::Error` holds it without exposing it
/// as its source.
fn tls_alert(cause: &(dyn std::error::Error + 'static)) -> Option<rustls::AlertDescription> {
    let inner = cause.downcast_ref::<io::Error>()?.get_ref()?;
    match inner.downcast_ref::<rustls::Error>()? {
        rustls::Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}

/// Connects to the host of a URL, with TLS for `https` and `wss`.
pub(crate) async fn connect(
    url: &Uri,
    tls: Option<&Arc<ClientConfig>>,
) -> anyhow::Result<Box<dyn Wire>> {
    let host = url.host().context("the URL has no host")?;
    let port = url.port_u16().unwrap_or(if is_tls(url) { 443 } else { 80 });
    let stream = TcpStream::connect(format!("{host}:{port}")).await?;
    stream.set_nodelay(true)?;
    add_tls(stream, url, tls).await
}

/// Performs the TLS handshake of a new connection if the URL's scheme is `https` or `wss`.
pub(crate) async fn add_tls(
    stream: TcpStream,
    url: &Uri,
    tls: Option<&Arc<ClientConfig>>,
) -> anyhow::Result<Box<dyn Wire>> {
    if !is_tls(url) {
        return Ok(Box::new(stream));
    }
    let host = url.host().context("the URL has no host")?;
    let settings = match tls {
        Some(settings) => settings.clone(),
        None => Trust::default().client_config().map_err(anyhow::Error::msg)?,
    };
    let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
    let stream = TlsConnector::from(settings).connect(name, stream).await?;
    Ok(Box::new(AlertFirst { stream, failed: None }))
}

fn is_tls(url: &Uri) -> bool {
    matches!(url.scheme_str(), Some("https" | "wss"))
}

/// A TLS stream whose failed writes report the peer's alert: a write to a closed socket fails
/// while the alert is still unread.
struct AlertFirst {
    stream: TlsStream<TcpStream>,
    failed: Option<io::Error>,
}

impl AlertFirst {
    /// Writes; after a failure, reads until an alert or the end.
    fn write<T>(
        &mut self,
        cx: &mut TaskContext<'_>,
        write: impl FnOnce(Pin<&mut TlsStream<TcpStream>>, &mut TaskContext<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let error = match self.failed.take() {
            Some(error) => error,
            None => match write(Pin::new(&mut self.stream), cx) {
                Poll::Ready(Err(error)) => error,
                written => return written,
            },
        };
        let mut byte = [0];
        match Pin::new(&mut self.stream).poll_read(cx, &mut ReadBuf::new(&mut byte)) {
            Poll::Ready(Err(alert)) if tls_alert(&alert).is_some() => Poll::Ready(Err(alert)),
            Poll::Ready(_) => Poll::Ready(Err(error)),
            Poll::Pending => {
                self.failed = Some(error);
                Poll::Pending
            }
        }
    }
}

impl AsyncRead for AlertFirst {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for AlertFirst {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        self.write(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Messages of an event stream.
pub(crate) struct Messages {
    body: Incoming,
    buffer: String,
}

impl Messages {
    /// Returns the name and data of the next message; `None` at the end.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<(String, String)>> {
        loop {
            if let Some((message, rest)) = self.buffer.split_once("\n\n") {
                let field = |name: &str| {
                    let lines = message.lines().filter_map(|line| line.strip_prefix(name));
                    lines.map(|line| line.trim_start()).collect::<Vec<_>>().join("\n")
                };
                let (name, data) = (field("event:"), field("data:"));
                self.buffer = rest.to_owned();
                // Heartbeats have no data.
                if !data.is_empty() {
                    return Ok(Some((name, data)));
                }
                continue;
            }
            let Some(frame) = self.body.frame().await.transpose()? else { return Ok(None) };
            if let Ok(data) = frame.into_data() {
                self.buffer += &String::from_utf8_lossy(&data);
            }
        }
    }
}
