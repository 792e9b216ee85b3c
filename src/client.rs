//! A small HTTP client for the router's own API.

use anyhow::{Context, bail};
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode, Uri, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::secrets::Secret;

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
        let request = request
            .method(method)
            .uri(path)
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        Ok((status, serde_json::from_slice(&bytes).unwrap_or_default()))
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::POST, path, Some(body)).await
    }
}
