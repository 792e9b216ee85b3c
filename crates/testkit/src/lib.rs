//! Test fixtures: routers, redis-server, a fake Kubernetes API, nginx, fault injection, and
//! clients.

pub mod baseline;
pub mod certificates;
pub mod clock;
pub mod cluster;
pub mod collector;
pub mod disk;
pub mod echo_agent;
pub mod events;
pub mod http;
pub mod kube;
mod log;
pub mod measurement;
pub mod nginx;
mod preload;
pub mod process;
pub mod provider;
pub mod proxy;
pub mod redis;
pub mod snapshot;

use std::{
    net::{SocketAddr, TcpListener},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

pub use fleet::testing::{dice, invariants, operations};

pub use self::{
    http::{Connection, HttpResponse},
    log::Log,
    process::Process,
};

/// The root of the repository.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The setting that turns the media gateway off: streams reach the agents through a proxy, as for
/// tests of stream-status callbacks, and of agents that renew and release their calls.
pub const WITHOUT_GATEWAY: (&str, &str) = (AGENT_BASE_URL, "wss://voice.example.com");
const AGENT_BASE_URL: &str = "VOICE_AGENT_BASE_URL";

/// The program under test. Cargo builds it next to the tests.
pub fn program_path() -> &'static Path {
    static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
        let test = std::env::current_exe().expect("the path of the test is known");
        let target = test.parent().and_then(Path::parent).expect("tests are in target/*/deps");
        target.join("smart-router")
    });
    &PATH
}

/// Number of port ranges, which limits the test processes that run at the same time.
const RANGES: u16 = 9;
/// Ports per range. `free_port` returns to the first port of a range only after all others, so that
/// a server that restarts finds its port free.
const PORTS: u16 = 2_000;

/// A free port below the ephemeral range. Each test process reserves its own range of ports, so
/// that no other test binds the port before it is used.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static RANGE: OnceLock<(TcpListener, u16)> = OnceLock::new();
    let (_, first) = RANGE.get_or_init(|| {
        let claim = |range: u16| {
            let claimed = TcpListener::bind(("127.0.0.1", 13_000 + range)).ok()?;
            Some((claimed, 14_000 + range * PORTS))
        };
        (0..RANGES).find_map(claim).expect("a range of ports is free")
    });
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % PORTS;
        if is_free(port) {
            return port;
        }
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

/// A new empty directory.
pub fn scratch() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path =
        std::env::temp_dir().join(format!("smart-router-test-{}-{number}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// The program with only the given settings in its environment.
pub fn program(settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program_path());
    command.env_clear().envs(settings.iter().copied());
    command
}

/// Factor between the usual time of an operation and its timeout. Load on the machine must not
/// fail a test; the timeout only ends tests that would hang.
const TIMEOUT_FACTOR: u32 = 10;

/// Waits until `holds`. `usual` is ample on an idle machine; the test fails after
/// [`TIMEOUT_FACTOR`] times that.
pub fn eventually(usual: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let (started, within) = (Instant::now(), usual * TIMEOUT_FACTOR);
    while !holds() {
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs an external checker and expects success.
pub fn run_external_check(command: &mut Command) {
    let program = command.get_program().to_owned();
    let output = command.current_dir(ROOT).output().unwrap_or_else(|error| {
        panic!("{program:?}: {error}; ./test.sh installs the external checkers")
    });
    let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    println!("{printed}");
}

/// A running router, or a media process. On drop, the status of a router must be consistent, and
/// the process must stop on SIGTERM.
pub struct Router {
    pub child: Child,
    role: Role,
    pub address: SocketAddr,
    pub metrics: SocketAddr,
    settings: Vec<(String, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Router,
    /// `smart-router media`, which has no API.
    Media,
}

impl Router {
    pub fn start(settings: &[(&str, &str)]) -> Self {
        Self::start_on_free_ports(settings, Role::Router, Stdio::inherit)
    }

    /// Starts `smart-router media`.
    pub fn start_media(settings: &[(&str, &str)]) -> Self {
        Self::start_on_free_ports(settings, Role::Media, Stdio::inherit)
    }

    /// A router whose stream URLs lead to its simulated agents, without the media gateway.
    pub fn start_without_gateway(settings: &[(&str, &str)]) -> Self {
        let port = free_port().to_string();
        let base = format!("ws://127.0.0.1:{port}");
        let mut all = vec![("HTTP_PORT", port.as_str()), (AGENT_BASE_URL, &base)];
        all.extend(settings);
        Self::start(&all)
    }

    /// A router with a log for the test to read.
    pub fn start_logged(settings: &[(&str, &str)]) -> (Self, Log) {
        let log = Log::create();
        (Self::start_on_free_ports(settings, Role::Router, || log.sink()), log)
    }

    fn start_on_free_ports(settings: &[(&str, &str)], role: Role, log: impl Fn() -> Stdio) -> Self {
        loop {
            let (api, metrics) = (free_port().to_string(), free_port().to_string());
            let mut all = vec![
                ("HTTP_PORT", api.as_str()),
                ("METRICS_PORT", metrics.as_str()),
                ("LOG_LEVEL", "warn"),
                // Streams that a test leaves open must not delay its end.
                ("MEDIA_DRAIN_TIME", "off"),
            ];
            if settings.iter().all(|(name, _)| *name != AGENT_BASE_URL) {
                // Calls of most tests have no stream. They must stay on an overloaded machine.
                all.push(("CONNECT_TIMEOUT", "15m"));
            }
            all.extend(settings);
            let mut command = program(&all);
            command.args((role == Role::Media).then_some("media"));
            let command = command.stdout(Stdio::null()).stderr(log());
            if let Some(mut router) = Self::try_start(command, &all) {
                router.role = role;
                return router;
            }
            // Only a port that another program has bound meanwhile may prevent the start.
            let is_taken = |port: &str| !is_free(port.parse().unwrap());
            assert!(is_taken(&api) || is_taken(&metrics), "the router did not start");
        }
    }

    pub fn start_with(settings: &[(&str, &str)], log: Stdio) -> Self {
        Self::start_command(program(settings).stdout(Stdio::null()).stderr(log), settings)
    }

    pub fn start_command(command: &mut Command, settings: &[(&str, &str)]) -> Self {
        Self::try_start(command, settings).expect("the router did not start")
    }

    /// Returns `None` if the program exits before it is ready.
    fn try_start(command: &mut Command, settings: &[(&str, &str)]) -> Option<Self> {
        let child = command.spawn().unwrap();
        // The last value of a setting counts, as in the environment.
        let port = |name: &str| {
            settings.iter().rfind(|(other, _)| *other == name).unwrap().1.parse().unwrap()
        };
        let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let settings =
            settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let mut router = Self {
            child,
            role: Role::Router,
            address: address(port("HTTP_PORT")),
            metrics: address(port("METRICS_PORT")),
            settings,
        };
        let mut has_ended = false;
        eventually(Duration::from_secs(10), "the router is ready", || {
            has_ended = router.child.try_wait().unwrap().is_some();
            has_ended
                || Connection::try_open(router.address)
                    .and_then(|mut connection| connection.try_get("/ready"))
                    .is_some_and(|answer| answer.status == 200)
        });
        if has_ended {
            std::mem::forget(router);
            return None;
        }
        Some(router)
    }

    /// Kills the process without a graceful shutdown and starts another.
    pub fn kill_and_restart(mut self) -> Self {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let settings = std::mem::take(&mut self.settings);
        std::mem::forget(self);
        let settings: Vec<_> =
            settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Self::start_with(&settings, Stdio::inherit())
    }

    pub fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    fn setting(&self, name: &str) -> Option<&str> {
        self.settings.iter().rfind(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// A connection with the admin role.
    pub fn connect_as_admin(&self) -> Connection {
        let address = self.setting("ADMIN_BIND").map(|address| address.parse().unwrap());
        let mut connection = Connection::open(address.unwrap_or(self.address));
        let file = self.setting("API_TOKENS_FILE");
        let text = match file.map(std::fs::read_to_string) {
            Some(text) => text.unwrap(),
            None => self.setting("API_TOKENS").unwrap_or_default().to_owned(),
        };
        let mut tokens = text.split(',');
        connection.token = tokens.find_map(|token| token.strip_prefix("admin:")).map(str::to_owned);
        connection
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        self.connect_as_admin().get(path).json()
    }

    pub fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.connect_as_admin().post(path, &body).json()
    }

    pub fn put(&self, path: &str, body: &str) -> (u16, Value) {
        self.connect_as_admin()
            .send("PUT", path, &[("content-type", "application/json")], body.as_bytes())
            .json()
    }

    /// Allocates and expects success. Returns the response.
    pub fn allocate(&self, call: &str) -> Value {
        let (status, answer) = self.post("/api/v1/allocate", json!({"call_sid": call}));
        assert_eq!(status, 200, "{answer}");
        answer
    }

    pub fn release(&self, call: &str) -> (u16, Value) {
        self.post("/api/v1/release", json!({"call_sid": call}))
    }

    /// The status. Retries on 503, which an overloaded store causes.
    pub fn status(&self) -> Value {
        let mut last = Value::Null;
        eventually(Duration::from_secs(1), "the status is available", || {
            let (status, answer) = self.get("/api/v1/status");
            assert!(matches!(status, 200 | 503), "{status}: {answer}");
            last = answer;
            status == 200
        });
        last
    }

    /// The value of a metric with these labels; 0 without one.
    pub fn metric(&self, series: &str) -> u64 {
        let text = Connection::open(self.metrics).get("/metrics").text();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse::<f64>().unwrap()) as u64
    }

    /// Waits for a sweep of the store that begins after this call.
    pub fn wait_for_sweep(&self) {
        const SWEEPS: &str = r#"smart_router_store_duration_seconds_count{operation="sweep"}"#;
        // The next sweep to end may have begun before.
        let last = self.metric(SWEEPS) + 2;
        eventually(Duration::from_secs(5), "the store is swept", || self.metric(SWEEPS) >= last);
    }

    pub fn signal(&self, name: &str) {
        let sent =
            Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
    }

    /// Waits for the process to exit. Returns its exit code.
    pub fn wait_for_exit(&mut self, usual: Duration) -> Option<i32> {
        let mut ended = None;
        eventually(usual, "the router stops", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.and_then(|status| status.code())
    }

    /// Expects one consistent status. A status combines several reads, between which a lease may
    /// end, so single ones may be inconsistent.
    fn assert_consistent(&self) {
        let mut last = String::new();
        for _ in 0..20 {
            match Self::inconsistency(&self.status()) {
                Some(found) => last = found,
                None => return,
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("{last}");
    }

    fn inconsistency(status: &Value) -> Option<String> {
        let groups =
            ["pools", "merchants"].map(|group| status[group].as_object().unwrap().values());
        let pools: Vec<&Value> = groups.into_iter().flatten().collect();
        let calls: u64 = pools.iter().map(|pool| pool["active_calls"].as_u64().unwrap()).sum();
        if Some(calls) != status["active_calls"].as_u64() {
            return Some(format!("the calls of the pools do not add up: {status}"));
        }
        let is_over = |pool: &&Value| {
            let count = |field: &str| pool[field].as_u64().unwrap();
            count("available") + count("draining") + count("not_ready") > count("assigned")
        };
        pools.into_iter().find(is_over).map(|pool| format!("a pod counts twice: {pool}"))
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let mut stopped = Ok(());
        if !thread::panicking() && matches!(self.child.try_wait(), Ok(None)) {
            stopped = catch_unwind(AssertUnwindSafe(|| {
                if self.role == Role::Router {
                    self.assert_consistent();
                }
                self.signal("TERM");
                assert_eq!(self.wait_for_exit(Duration::from_secs(10)), Some(0));
            }));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Err(panic) = stopped {
            resume_unwind(panic);
        }
    }
}

/// Runs a test on a router with the embedded store, and on one with Redis.
pub fn each_store(settings: &[(&str, &str)], test: impl Fn(&Router)) {
    test(&Router::start(settings));
    let server = redis::RedisServer::start(&[]);
    let url = server.url();
    test(&Router::start(&[settings, &[("REDIS_URL", &url)]].concat()));
}

/// Routers that share a Redis server.
pub fn replicas(server: &redis::RedisServer, count: usize, tiers: &str) -> Vec<Router> {
    let url = server.url();
    (0..count).map(|_| Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", tiers)])).collect()
}
