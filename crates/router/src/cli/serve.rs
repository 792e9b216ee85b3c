//! `smart-router serve` and `smart-router media`

use std::{io::Write, time::Duration};

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    app::{self, Running},
    config::Config,
    telemetry::logs,
};

/// The signals that stop the program.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("cannot install a signal handler");
        let terminate = install(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: install(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

pub(super) async fn serve(config: Config) -> anyhow::Result<()> {
    let logging = logs::init(config.log);
    let mut signals = Signals::install()?;
    let running = app::start(config).await?;
    if running.has_simulated_agents() {
        // A closed standard output is no error.
        let _ = write!(std::io::stdout(), "{}", welcome(&running));
    }
    let metrics = running.context.metrics.clone();
    let drain = running.stream_drain();
    let mut stop = std::pin::pin!(async {
        signals.next().await;
        let mut stopping = std::pin::pin!(running.stop());
        loop {
            tokio::select! {
                () = &mut stopping => return Ok(()),
                () = signals.next() => if !drain.end() {
                    anyhow::bail!("another signal received; stopping without a graceful shutdown")
                }
            }
        }
    });
    let mut second = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            stopped = &mut stop => return stopped,
            _ = second.tick() => metrics.log_lines_dropped.set(logging.dropped() as i64),
        };
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
