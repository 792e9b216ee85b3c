//! A small HTTP client for the router's own API.

use anyhow::{Context, bail};
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response, StatusCode, Uri, body::Incoming, client::conn::http1, header,
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::{secrets::Secret, traces::SpanContext};

/// A router, as its users see it.
#[derive(Debug, Clone)]
pub struct Client {
    base: String,
    authority: String,
    token: Option<Secret>,
}

impl Client {
    pub fn new(url: &str, token: Option<Secret>) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().with_context(|| format!("{url:?} is not a URL"))?;
        if uri.scheme_str() != Some("http") {
            bail!("{url:?}: expected a URL that begins with http://");
        }
        let host = uri.host().context("the URL has no host")?;
        Ok(Self { authority: format!("{host}:{}", uri.port_u16().unwrap_or(80)), base, token })
    }

    /// Sends a request; the answer's JSON is null where there is none.
    pub async fn send(
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

    /// Opens a stream of events.
    pub async fn stream(&self, path: &str) -> anyhow::Result<Messages> {
        let response = self.request(Method::GET, path, None, "text/event-stream").await?;
        let status = response.status();
        if !status.is_success() {
            let bytes = response.into_body().collect().await?.to_bytes();
            let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            bail!("{}", answer["error"].as_str().unwrap_or(status.as_str()));
        }
        Ok(Messages { body: response.into_body(), read: String::new() })
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        accept: &str,
    ) -> anyhow::Result<Response<Incoming>> {
        let stream = TcpStream::connect(&self.authority)
            .await
            .with_context(|| format!("no router answers at {}", self.base))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
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
            .uri(path)
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, accept)
            .body(Full::new(Bytes::from(body)))?;
        Ok(sender.send_request(request).await?)
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::POST, path, Some(body)).await
    }
}

/// Messages of a stream of events, as they come.
pub struct Messages {
    body: Incoming,
    read: String,
}

impl Messages {
    /// The next message: its name and what it says. `None` at the end.
    pub async fn next(&mut self) -> anyhow::Result<Option<(String, String)>> {
        loop {
            if let Some((message, rest)) = self.read.split_once("\n\n") {
                let field = |name: &str| {
                    let lines = message.lines().filter_map(|line| line.strip_prefix(name));
                    lines.map(|line| line.trim_start()).collect::<Vec<_>>().join("\n")
                };
                let (name, data) = (field("event:"), field("data:"));
                self.read = rest.to_owned();
                // (a heartbeat says nothing)
                if !data.is_empty() {
                    return Ok(Some((name, data)));
                }
                continue;
            }
            let Some(frame) = self.body.frame().await.transpose()? else { return Ok(None) };
            if let Ok(data) = frame.into_data() {
                self.read += &String::from_utf8_lossy(&data);
            }
        }
    }
}
