//! The systems under test: nginx, and the router as a media gateway.

use std::{
    io,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;
use testkit::{
    Process,
    certificates::Certificate,
    free_port,
    measurement::wait_for_port,
    nginx::Nginx,
    process::{cpu_time, pinned, resident_kib},
    program_path,
};
use tokio_rustls::TlsConnector;

use super::client::Endpoint;

/// Connections that allocate calls.
const ALLOCATORS: usize = 16;
/// Calls that one agent may have: more than a turn allocates.
const MAX_CALLS: u32 = 1_000_000;
/// Longest wait for a system to finish its work.
const SETTLE_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum System {
    Nginx,
    Gateway,
}

impl System {
    pub(crate) const ALL: [Self; 2] = [Self::Nginx, Self::Gateway];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Gateway => "gateway",
        }
    }
}

/// TLS between clients and a system.
pub(crate) struct Tls {
    pub certificate: Certificate,
    pub connector: TlsConnector,
}

/// What a system needs to start.
pub(crate) struct Setting {
    /// The core of the system.
    pub core: usize,
    pub agents: Vec<u16>,
    pub tls: Tls,
}

/// Ends the system on drop.
enum Handle {
    Nginx(Nginx),
    Gateway(Process),
}

/// A system that relays streams to the agents.
pub(crate) struct RunningSystem {
    pub endpoint: Endpoint,
    handle: Handle,
    allocated: usize,
}

impl RunningSystem {
    pub(crate) fn start(system: System, setting: &Setting, with_tls: bool) -> Self {
        let tls = with_tls.then_some(&setting.tls);
        let certificate = tls.map(|tls| &tls.certificate);
        let (handle, port) = match system {
            System::Nginx => {
                let nginx = Nginx::relay(setting.core, certificate, &setting.agents);
                let port = nginx.port;
                (Handle::Nginx(nginx), port)
            }
            System::Gateway => {
                let (gateway, port) = gateway(setting, certificate);
                (Handle::Gateway(gateway), port)
            }
        };
        let connector = tls.map(|tls| tls.connector.clone());
        let endpoint = Endpoint { tls: connector, ..Endpoint::plain(port) };
        Self { endpoint, handle, allocated: 0 }
    }

    /// Paths of new streams. The gateway needs an allocated call for each of them.
    pub(crate) async fn paths(&mut self, count: usize) -> Vec<String> {
        let numbers = self.allocated..self.allocated + count;
        self.allocated = numbers.end;
        if let Handle::Nginx(_) = self.handle {
            return numbers.map(|number| format!("/stream/{number}")).collect();
        }
        let allocators = (0..ALLOCATORS).map(|allocator| {
            let numbers = numbers.clone().skip(allocator).step_by(ALLOCATORS);
            tokio::spawn(allocate(self.endpoint.clone(), numbers.collect()))
        });
        let mut paths = Vec::with_capacity(count);
        for allocator in allocators.collect::<Vec<_>>() {
            paths.extend(allocator.await.unwrap().expect("calls are allocated"));
        }
        paths
    }

    /// The process that relays.
    fn pid(&self) -> u32 {
        match &self.handle {
            Handle::Nginx(nginx) => nginx.worker(),
            Handle::Gateway(process) => process.0.id(),
        }
    }

    pub(crate) fn cpu_time(&self) -> Duration {
        cpu_time(self.pid())
    }

    pub(crate) fn resident_kib(&self) -> f64 {
        resident_kib(self.pid()) as f64
    }

    /// Waits until the system has nothing left to do.
    pub(crate) async fn settle(&self) {
        let started = Instant::now();
        loop {
            let before = self.cpu_time();
            tokio::time::sleep(Duration::from_millis(250)).await;
            if self.cpu_time() - before <= Duration::from_millis(10) {
                return;
            }
            assert!(started.elapsed() < SETTLE_TIME, "the system is not idle");
        }
    }
}

fn gateway(setting: &Setting, certificate: Option<&Certificate>) -> (Process, u16) {
    let pods = setting.agents.iter().enumerate();
    let pods: Vec<String> =
        pods.map(|(index, agent)| format!("agent-{index}=127.0.0.1:{agent}")).collect();
    let tiers = json!({"basic": {
        "type": "shared", "target": pods.len(), "max_concurrent": MAX_CALLS,
    }});
    let scheme = if certificate.is_some() { "wss" } else { "ws" };
    start_router(setting.core, scheme, |command| {
        command.env("PODS", pods.join(",")).env("TIER_CONFIG", tiers.to_string());
        if let Some(Certificate { file, key }) = certificate {
            command.env("TLS_CERT_FILE", file).env("TLS_KEY_FILE", key);
        }
    })
}

/// The router as in production: JSON log lines at `info`, metrics, validation. Only its limit
/// per source is off, because all requests come from one address.
pub(crate) fn start_router(
    core: usize,
    scheme: &str,
    configure: impl FnOnce(&mut Command),
) -> (Process, u16) {
    let port = free_port();
    let mut command = pinned(core, "KILL", program_path());
    command
        .env_clear()
        .env("HTTP_BIND", "127.0.0.1")
        .env("HTTP_PORT", port.to_string())
        .env("METRICS_PORT", port.to_string())
        .env("LOG_FORMAT", "json")
        .env("RATE_LIMIT", "off")
        .env("MEDIA_URL", format!("{scheme}://localhost:{port}"))
        .stdin(Stdio::null());
    configure(&mut command);
    let process = Process::start(&mut command);
    wait_for_port(port);
    (process, port)
}

/// Allocates calls one after the other. Returns the paths of their streams.
async fn allocate(endpoint: Endpoint, numbers: Vec<usize>) -> io::Result<Vec<String>> {
    let mut client = endpoint.json_client().await?;
    let mut paths = Vec::with_capacity(numbers.len());
    for number in numbers {
        let call = json!({"call_sid": format!("CA{number:032x}")});
        let answer = client.post("/api/v1/allocate", &call).await?;
        let path = answer["ws_url"].as_str().and_then(path_of);
        paths.push(path.ok_or_else(|| io::Error::other(format!("no stream URL: {answer}")))?);
    }
    Ok(paths)
}

/// The path of a URL.
fn path_of(url: &str) -> Option<String> {
    let (_, rest) = url.split_once("://")?;
    Some(rest[rest.find('/')?..].to_owned())
}
