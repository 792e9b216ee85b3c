//! `smart-router agent`: one simulated agent as a separate process, as in a pod.

use std::net::SocketAddr;

use anyhow::Context;
use clap::Args;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use super::router_client::RouterArgs;
use crate::{
    client_limits::ConnectionLimiter,
    http::server::{Service, Timeouts, serve},
    human_duration::HumanDuration,
    telemetry::logs::{self, LogConfig, LogFormat},
    tls::ListenerTls,
    tools::agent::{Agents, RouterApi},
};
use fleet::names::PodName;

#[derive(Debug, Args)]
pub(super) struct AgentArgs {
    /// Name of this agent's pod
    #[arg(long, env, value_name = "NAME", value_parser = pod_name)]
    pod_name: PodName,
    #[command(flatten)]
    router: RouterArgs,
    /// Address to listen on
    #[arg(long, env = "AGENT_BIND", value_name = "IP:PORT", default_value = "0.0.0.0:8000")]
    bind: SocketAddr,
    /// Interval at which calls are renewed
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    renew: HumanDuration,
}

fn pod_name(text: &str) -> Result<PodName, String> {
    text.parse().map_err(|error| format!("{error}"))
}

pub(super) async fn agent(args: AgentArgs) -> anyhow::Result<()> {
    let _logging = logs::init(LogConfig {
        level: tracing_subscriber::filter::LevelFilter::INFO,
        format: LogFormat::Console,
    });
    let mut terminate =
        signal(SignalKind::terminate()).context("cannot install a signal handler")?;
    let mut interrupt =
        signal(SignalKind::interrupt()).context("cannot install a signal handler")?;
    let client = args.router.client()?;
    let stopping = CancellationToken::new();
    let agents = Agents::new(RouterApi::Remote(client), args.renew.0, stopping.clone());
    let listener = TcpListener::bind(args.bind)
        .await
        .with_context(|| format!("cannot listen on {}", args.bind))?;
    tracing::info!(pod = %args.pod_name, address = %args.bind, router = args.router.router, "the simulated agent is listening");
    let timeouts = Timeouts {
        read: args.renew.0,
        idle: args.renew.0,
        shutdown: std::time::Duration::from_secs(5),
    };
    let closing = CancellationToken::new();
    let routes = agents.own_routes(args.pod_name);
    let limiter = ConnectionLimiter::new(usize::MAX, Counter::default());
    let served =
        serve(listener, ListenerTls::Off, Service::of(routes), timeouts, limiter, closing.clone());
    let server = tokio::spawn(served);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stopping.cancel();
    closing.cancel();
    server.await?;
    agents.finish().await;
    Ok(())
}
