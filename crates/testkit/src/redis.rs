//! A real redis-server of a test's own, with a clock that can be held.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fleet::{PodFacts, PodOrigin, PodWriter, tiers::Tiers};
use store::{RedisConfig, Scripts, StoreMetrics, Ttls};

use super::{clock::WallClock, eventually, free_port, scratch};

pub struct RedisServer {
    child: Child,
    pub port: u16,
    directory: PathBuf,
    /// Held if there is one.
    clock: Option<WallClock>,
}

/// `REDIS_SERVER` names another server to try, such as valkey-server.
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

    /// A server that speaks in its own way: waits only until its port is open.
    pub fn start_raw(port: u16, args: &[&str]) -> Self {
        let said = std::env::var_os("CHAOS_LOGS").map_or(Stdio::null(), |directory| {
            let path = PathBuf::from(directory).join(format!("redis-{port}.log"));
            File::create(path).expect("CHAOS_LOGS is a directory").into()
        });
        let child =
            server_command().args(args).stdout(said).spawn().expect("redis-server is installed");
        let server = Self { child, port, directory: scratch(), clock: None };
        eventually(Duration::from_secs(5), "redis-server listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        server
    }

    /// A server whose time stands still, except when it is moved.
    pub fn with_held_clock(now: u64) -> Self {
        let clock = WallClock::held(now);
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

    /// Moves a held clock.
    pub fn set_time(&self, now: u64) {
        self.clock.as_ref().expect("the clock is held").set_time(now);
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

    /// Takes the directory away, so that the next snapshot fails.
    pub fn lose_directory(&self) {
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

    /// Kills the server and starts it again with the snapshot it has; does not wait until that
    /// is loaded.
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

    /// Kills the server, if it lives, and starts an empty one in its place.
    pub fn replace(&mut self) {
        self.restart(&[]);
    }

    /// Kills the server, if it lives, and starts it again with what it has on disk.
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

/// A store on a server of these tests; leases of 15 minutes, nothing waits.
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
            patience: None,
        },
        tiers,
        nudge: Arc::default(),
        metrics: StoreMetrics::default(),
        scripts: Scripts::default(),
        origin: None,
        force_origin: false,
    }
}

/// The writer of pods in tests that are not about fencing.
pub const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };

/// A pod that is ready.
pub fn ready_pod() -> PodFacts {
    PodFacts {
        uid: "u".into(),
        address: "10.0.0.1:8000".into(),
        ready: true,
        terminating: false,
        restarts: 0,
        pin: None,
    }
}
