//! A real redis-server for one test, optionally with a frozen clock.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fleet::{PodFacts, PodOrigin, PodWriter, tiers::Tiers};
use store::{Functions, MIGRATION_QUIET_PERIOD, RedisConfig, StoreMetrics, Ttls};

use super::{clock::WallClock, eventually, free_port, scratch};

pub struct RedisServer {
    child: Child,
    pub port: u16,
    directory: PathBuf,
    /// A frozen clock, if any.
    clock: Option<WallClock>,
}

/// `REDIS_SERVER` selects another server, such as valkey-server.
fn server_command() -> Command {
    Command::new(std::env::var_os("REDIS_SERVER").unwrap_or("redis-server".into()))
}

impl RedisServer {
    pub fn start(args: &[&str]) -> Self {
        Self::launch(free_port(), scratch(), args, &[], None)
    }

    pub fn start_on(port: u16) -> Self {
        Self::launch(port, scratch(), &[], &[], None)
    }

    /// A server with arbitrary arguments, such as TLS; waits only until its port is open.
    pub fn start_raw(port: u16, args: &[&str]) -> Self {
        let output = std::env::var_os("CHAOS_LOGS").map_or(Stdio::null(), |directory| {
            let path = PathBuf::from(directory).join(format!("redis-{port}.log"));
            File::create(path).expect("CHAOS_LOGS is a directory").into()
        });
        let child =
            server_command().args(args).stdout(output).spawn().expect("redis-server is installed");
        let server = Self { child, port, directory: scratch(), clock: None };
        eventually(Duration::from_secs(5), "redis-server listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        server
    }

    /// A server with a frozen clock; [`set_time`](Self::set_time) moves it.
    pub fn with_frozen_clock(now: u64) -> Self {
        let clock = WallClock::frozen(now);
        let settings = clock.settings();
        Self::launch(free_port(), scratch(), &[], &settings, Some(clock))
    }

    /// A server with a clock that can be stepped.
    pub fn with_clock(clock: &WallClock) -> Self {
        Self::launch(free_port(), scratch(), &[], &clock.settings(), None)
    }

    fn launch(
        port: u16,
        directory: PathBuf,
        args: &[&str],
        environment: &[(&str, String)],
        clock: Option<WallClock>,
    ) -> Self {
        let mut command = server_command();
        command.args([
            "--port",
            &port.to_string(),
            "--save",
            "",
            "--dir",
            directory.to_str().unwrap(),
        ]);
        command.args(args).stdout(Stdio::null());
        command.envs(environment.iter().map(|(name, value)| (*name, value)));
        let server = Self {
            child: command.spawn().expect("redis-server is installed"),
            port,
            directory,
            clock,
        };
        eventually(Duration::from_secs(5), "redis-server answers", || {
            server
                .client()
                .get_connection()
                .is_ok_and(|mut connection| redis::cmd("PING").exec(&mut connection).is_ok())
        });
        server
    }

    /// Sets a frozen clock.
    pub fn set_time(&self, now: u64) {
        self.clock.as_ref().expect("the clock is frozen").set_time(now);
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).unwrap()
    }

    pub fn connection(&self) -> redis::Connection {
        self.client().get_connection().unwrap()
    }

    /// Removes the data directory, so that the next snapshot fails.
    pub fn remove_directory(&self) {
        fs::remove_dir_all(&self.directory).unwrap();
    }

    pub fn signal(&self, name: &str) {
        let sent =
            Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Kills the server and restarts it from its snapshot, without waiting for the load.
    pub fn restart_loading(&mut self, args: &[&str]) {
        self.kill();
        let (port, directory) = (self.port.to_string(), self.directory.to_str().unwrap());
        let mut all = vec!["--port", &port, "--save", "", "--dir", directory];
        all.extend(args);
        self.child = server_command().args(all).stdout(Stdio::null()).spawn().unwrap();
        eventually(Duration::from_secs(5), "redis-server listens", || {
            std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok()
        });
    }

    /// Kills the server, if it runs, and starts an empty one on its port.
    pub fn restart_empty(&mut self) {
        self.restart(&[]);
    }

    /// Kills the server, if it runs, and restarts it from disk.
    pub fn restart(&mut self, args: &[&str]) {
        self.kill();
        let fresh = Self::launch(self.port, self.directory.clone(), args, &[], None);
        let old = std::mem::replace(self, fresh);
        std::mem::forget(old);
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Configuration of a store on a test server: leases of 15 minutes, no waiting.
pub fn store_config(server: &RedisServer, tiers: Tiers) -> RedisConfig {
    RedisConfig {
        url: server.url(),
        key_prefix: "voice:".into(),
        authority: None,
        ttls: Ttls {
            lease: 900_000,
            draining: 360_000,
            call_info: 3_600_000,
            connect: None,
            poll_timeout: None,
        },
        tiers,
        reconcile_now: Arc::default(),
        metrics: StoreMetrics::default(),
        functions: Functions::default(),
        migration_quiet_period: MIGRATION_QUIET_PERIOD,
        origin: None,
        force_origin: false,
        may_set_up: true,
    }
}

/// The pod writer for tests without fencing.
pub const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

/// A pod that is ready.
pub fn ready_pod() -> PodFacts {
    PodFacts {
        uid: "u".into(),
        address: "10.0.0.1:8000".into(),
        ready: true,
        terminating: false,
        at_risk: false,
        restarts: 0,
        pin: None,
    }
}
