//! Access of commands to a router: URL, credentials, requests, exit codes.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use hyper::{Method, StatusCode};
use serde_json::Value;

use crate::{
    client::{Client, Messages},
    tls::Trust,
};
use telephony::Secret;

#[derive(Debug, Args)]
pub(super) struct RouterArgs {
    /// URL of the router
    #[arg(
        long,
        env = "SMART_ROUTER_URL",
        value_name = "URL",
        default_value = "http://localhost:8080",
        global = true
    )]
    pub(super) router: String,
    /// API token, if the router requires one
    #[arg(long, env = "SMART_ROUTER_TOKEN", value_name = "TOKEN", global = true)]
    token: Option<Secret>,
    /// Certificate authority to trust for https://, besides the system's (PEM)
    #[arg(long, env = "SMART_ROUTER_CA_FILE", value_name = "PATH", global = true)]
    ca_file: Option<PathBuf>,
    /// Client certificate, if the router requires one (PEM)
    #[arg(
        long,
        env = "SMART_ROUTER_CERT_FILE",
        value_name = "PATH",
        requires = "key_file",
        global = true
    )]
    cert_file: Option<PathBuf>,
    /// Private key of the client certificate (PEM)
    #[arg(
        long,
        env = "SMART_ROUTER_KEY_FILE",
        value_name = "PATH",
        requires = "cert_file",
        global = true
    )]
    key_file: Option<PathBuf>,
}

impl RouterArgs {
    pub(super) fn client(&self) -> anyhow::Result<Client> {
        self.client_of(&self.router)
    }

    /// A client of another process, with the same credentials.
    pub(super) fn client_of(&self, url: &str) -> anyhow::Result<Client> {
        let trust = Trust {
            authority: self.ca_file.clone(),
            identity: self.cert_file.clone().zip(self.key_file.clone()),
        };
        Client::new(url, self.token.clone(), &trust)
    }
}

/// A failed command with its exit code: 3 not found, 4 no response from a router, 5 calls left
/// after a drain, 6 failed requests of a load, else 1.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Failed {
    pub(super) code: u8,
    pub(super) text: String,
}

/// Sends a request; returns the body of a successful response.
pub(super) async fn request(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> anyhow::Result<Value> {
    let answer = client.send(method, &format!("/api/v1{path}"), body).await;
    match answer.map_err(no_answer)? {
        (status, answer) if status.is_success() => Ok(answer),
        (status, answer) => Err(refused(status, &answer).into()),
    }
}

/// Opens an event stream.
pub(super) async fn listen(client: &Client, path: &str) -> anyhow::Result<Messages> {
    let opened = client.stream(&format!("/api/v1{path}")).await.map_err(no_answer)?;
    opened.map_err(|(status, answer)| refused(status, &answer).into())
}

pub(super) fn no_answer(error: anyhow::Error) -> Failed {
    Failed { code: 4, text: format!("{error:#}") }
}

pub(super) fn refused(status: StatusCode, answer: &Value) -> Failed {
    let code = if status == StatusCode::NOT_FOUND { 3 } else { 1 };
    let text = answer["error"].as_str().unwrap_or_default();
    let text = match status {
        _ if text.is_empty() => format!("the router answered {status}"),
        StatusCode::UNAUTHORIZED => format!("{text}: set SMART_ROUTER_TOKEN"),
        _ => text.to_owned(),
    };
    Failed { code, text }
}

/// Reads all pages of a list, at most `limit` rows.
pub(super) async fn all_pages(
    client: &Client,
    path: &str,
    rows: &str,
    limit: usize,
) -> anyhow::Result<Vec<Value>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let join = if path.contains('?') { '&' } else { '?' };
        let next = cursor.map(|cursor: String| format!("{join}cursor={cursor}"));
        let answer =
            request(client, Method::GET, &format!("{path}{}", next.unwrap_or_default()), None)
                .await?;
        let page = answer[rows].as_array().context("the response has no list of rows")?;
        found.extend(page.iter().take(limit - found.len()).cloned());
        match answer["next"].as_str() {
            Some(next) if found.len() < limit => cursor = Some(next.to_owned()),
            _ => return Ok(found),
        }
    }
}

/// Formats a JSON value for a table.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
