//! Which router a command talks to, as whom, and how it says what came of it.

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
    /// The router
    #[arg(
        long,
        env = "SMART_ROUTER_URL",
        value_name = "URL",
        default_value = "http://localhost:8080",
        global = true
    )]
    pub router: String,
    /// A token of its API, where it wants one
    #[arg(long, env = "SMART_ROUTER_TOKEN", value_name = "TOKEN", global = true)]
    token: Option<Secret>,
    /// Certificate authority of a router with https://, besides the system's (PEM)
    #[arg(long, env = "SMART_ROUTER_CA_FILE", value_name = "PATH", global = true)]
    ca_file: Option<PathBuf>,
    /// Certificate to show to a router that wants one (PEM)
    #[arg(
        long,
        env = "SMART_ROUTER_CERT_FILE",
        value_name = "PATH",
        requires = "key_file",
        global = true
    )]
    cert_file: Option<PathBuf>,
    /// The certificate's private key (PEM)
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
        let trust = Trust {
            authority: self.ca_file.clone(),
            identity: self.cert_file.clone().zip(self.key_file.clone()),
        };
        Client::new(&self.router, self.token.clone(), &trust)
    }
}

/// A command that did not come off, and how the program exits with that: 3 where there is
/// no such thing, 4 where no router answers, 5 where a drain left calls, 6 where requests of a
/// load failed, else 1.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Failed {
    pub code: u8,
    pub text: String,
}

/// The answer of a router, if it is a good one.
pub(super) async fn ask(
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

/// What a router says from now on.
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

/// All rows of a list that comes in pages, at most so many.
pub(super) async fn all_pages(
    client: &Client,
    path: &str,
    rows: &str,
    most: usize,
) -> anyhow::Result<Vec<Value>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let join = if path.contains('?') { '&' } else { '?' };
        let next = cursor.map(|cursor: String| format!("{join}cursor={cursor}"));
        let answer =
            ask(client, Method::GET, &format!("{path}{}", next.unwrap_or_default()), None).await?;
        let page = answer[rows].as_array().context("the router answered something else")?;
        found.extend(page.iter().take(most - found.len()).cloned());
        match answer["next"].as_str() {
            Some(next) if found.len() < most => cursor = Some(next.to_owned()),
            _ => return Ok(found),
        }
    }
}

/// What a value of an answer is in a table.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
