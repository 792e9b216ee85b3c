//! `smart-router serve`

use std::{io::Write, time::Duration};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    app::{self, Running},
    config::Config,
    telemetry::logs,
};

pub(super) async fn serve(config: Config) -> anyhow::Result<()> {
    let logging = logs::init(config.log);
    let mut terminate =
        signal(SignalKind::terminate()).context("cannot install a signal handler")?;
    let mut interrupt =
        signal(SignalKind::interrupt()).context("cannot install a signal handler")?;
    let running = app::start(config).await?;
    if running.has_simulated_agents() {
        // A closed standard output is no error.
        let _ = write!(std::io::stdout(), "{}", welcome(&running));
    }
    let mut second = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = second.tick() => {
                running.context.metrics.log_lines_dropped.set(logging.dropped() as i64);
            }
        }
    }
    tokio::select! {
        () = running.stop() => Ok(()),
        _ = terminate.recv() => anyhow::bail!("second signal received; stopping without a graceful shutdown"),
        _ = interrupt.recv() => anyhow::bail!("second signal received; stopping without a graceful shutdown"),
    }
}

/// Text with commands to try on a router with simulated agents.
fn welcome(running: &Running) -> String {
    let program = std::env::args().next().unwrap_or("smart-router".into());
    let url = format!("{}://localhost:{}", running.context.scheme, running.admin.port());
    format!(
        r#"
smart-router serves on {url} with simulated agents. Open it in a browser. Try:

  curl -s {url}/api/v1/status
  curl -s {url}/api/v1/allocate -H 'Content-Type: application/json' -d '{{"call_sid": "CA1"}}'

Open the ws_url of the response with any WebSocket client, send a message, and close it:
the pod is free again. Or run one command that does all of it:

  {program} call --router {url}

Metrics: http://localhost:{}/metrics   Stop: Ctrl-C

"#,
        running.metrics_address.port()
    )
}
