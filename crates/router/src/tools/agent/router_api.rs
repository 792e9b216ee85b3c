//! The router's API as agents use it: in the same process, or over HTTP.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::{client::Client, telemetry::metrics::Metrics};
use fleet::{
    Millis, Release, Renew,
    names::{CallSid, PodName},
};
use store::Store;

/// Access to the router for agents.
pub(crate) enum RouterApi {
    InProcess { store: Arc<dyn Store>, metrics: Arc<Metrics>, lease_ttl: Millis },
    Remote(Client),
}

/// How long one request may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a failed request is retried, and the pause between attempts.
const RETRY_TIME: Duration = Duration::from_secs(3);
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Sends a request, with retries for a router that restarts. Every request is idempotent: it
/// names its call or its pod.
async fn send_with_retries(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> anyhow::Result<(StatusCode, Value)> {
    let until = Instant::now() + RETRY_TIME;
    loop {
        let answer = timeout(RESPONSE_TIMEOUT, client.send(method.clone(), path, body)).await;
        let answer = answer.context("the router does not answer").flatten();
        let is_final = answer.as_ref().is_ok_and(|(status, _)| !status.is_server_error());
        if is_final || Instant::now() + RETRY_PAUSE >= until {
            return answer;
        }
        sleep(RETRY_PAUSE).await;
    }
}

impl RouterApi {
    /// Returns the calls of a pod, oldest first; `None` for an unknown pod.
    pub(super) async fn calls(&self, pod: &PodName) -> anyhow::Result<Option<Vec<CallSid>>> {
        match self {
            Self::InProcess { store, .. } => {
                let Some(status) = store.pod(pod).await? else { return Ok(None) };
                let mut calls = status.calls;
                calls.sort_by_key(|call| call.allocated_at);
                Ok(Some(calls.into_iter().map(|call| call.call).collect()))
            }
            Self::Remote(client) => {
                let path = format!("/api/v1/pod/{pod}");
                let (status, answer) = send_with_retries(client, Method::GET, &path, None).await?;
                match status {
                    StatusCode::OK => {}
                    StatusCode::NOT_FOUND => return Ok(None),
                    _ => bail!("the router answered {status}: {answer}"),
                }
                let calls =
                    answer["calls"].as_array().context("the response has no list of calls")?;
                let mut calls: Vec<(u64, CallSid)> = calls
                    .iter()
                    .filter_map(|call| {
                        let name = call["call_sid"].as_str()?.parse().ok()?;
                        Some((call["allocated_at"].as_u64().unwrap_or(0), name))
                    })
                    .collect();
                calls.sort();
                Ok(Some(calls.into_iter().map(|(_, call)| call).collect()))
            }
        }
    }

    /// Renews a call; returns false if the router does not know it.
    pub(super) async fn renew(&self, pod: &PodName, call: CallSid) -> anyhow::Result<bool> {
        match self {
            // Without a pod name the store does not re-register an unknown call: these agents
            // run in the same process and know no calls that the store does not.
            Self::InProcess { store, lease_ttl, .. } => {
                let renew = Renew { calls: vec![call], pod: None, lease_ttl: *lease_ttl };
                Ok(store.renew(&renew).await?.unknown.is_empty())
            }
            Self::Remote(client) => {
                let body = json!({"call_sid": call, "pod_name": pod});
                let (status, answer) = client.post("/api/v1/renew", &body).await?;
                match status {
                    StatusCode::OK => Ok(true),
                    StatusCode::NOT_FOUND => Ok(false),
                    _ => bail!("the router answered {status}: {answer}"),
                }
            }
        }
    }

    /// Releases a call; returns the pool of its pod, or `None` if the call had ended.
    pub(super) async fn release(
        &self,
        pod: &PodName,
        call: &CallSid,
    ) -> anyhow::Result<Option<String>> {
        match self {
            Self::InProcess { store, metrics, .. } => {
                let request = Release::new(call.clone(), Some(pod.clone()));
                match store.release(&request).await {
                    Ok(Ok(released)) => {
                        metrics.released(Some(&released.source_pool), "success");
                        metrics.call_lasted(&released.source_pool, released.lasted);
                        Ok(Some(released.pool.to_string()))
                    }
                    Ok(Err(_)) => {
                        metrics.released(None, "not_found");
                        Ok(None)
                    }
                    Err(error) => {
                        metrics.released(None, "error");
                        Err(error.into())
                    }
                }
            }
            Self::Remote(client) => {
                let body = json!({"call_sid": call, "pod_name": pod});
                let (status, answer) =
                    send_with_retries(client, Method::POST, "/api/v1/release", Some(&body)).await?;
                match status {
                    StatusCode::OK => {
                        Ok(Some(answer["released_to_pool"].as_str().unwrap_or_default().into()))
                    }
                    StatusCode::NOT_FOUND => Ok(None),
                    _ => bail!("the router answered {status}: {answer}"),
                }
            }
        }
    }
}
