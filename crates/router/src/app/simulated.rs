//! Agents inside this process, on a server of their own.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::{
    config::{Config, PodSource},
    tools::agent::{Agents, RouterApi},
};

/// How long simulated agents may take to release their calls at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct SimulatedAgents {
    pub(super) agents: Arc<Agents>,
    pub(super) address: SocketAddr,
    stopping: CancellationToken,
}

impl SimulatedAgents {
    /// Starts the agents, if the pods are simulated.
    pub(super) async fn start(config: &Config, parts: &Parts) -> anyhow::Result<Option<Self>> {
        if config.pods != PodSource::Simulated {
            return Ok(None);
        }
        let stopping = CancellationToken::new();
        let lease_ttl = config.ttls.lease;
        let (store, metrics) = (parts.store.clone(), parts.metrics.clone());
        // Three renewals per lease, so that two may fail.
        let interval = Duration::from_millis((lease_ttl / 3).max(1));
        let router = RouterApi::InProcess { store, metrics, lease_ttl };
        let agents = Agents::new(router, interval, stopping.clone());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let routes = agents.own_routes("simulated".parse().expect("a valid pod name"));
        let closed = stopping.clone();
        tokio::spawn(async move {
            axum::serve(listener, routes).with_graceful_shutdown(closed.cancelled_owned()).await
        });
        Ok(Some(Self { agents, address, stopping }))
    }

    /// Ends the streams of the agents, which release their calls.
    pub(super) async fn stop(self) {
        self.stopping.cancel();
        if timeout(SHUTDOWN_TIMEOUT, self.agents.finish()).await.is_err() {
            tracing::warn!("simulated agents did not release their calls in time");
        }
    }
}
