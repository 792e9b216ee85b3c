//! The Redis backend of a run: one server, or three with Sentinels.

use std::{
    collections::HashMap,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;

use super::cell::Broken;
use testkit::{clock::WallClock, free_port, proxy::FaultProxy, redis::RedisServer, scratch};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackendKind {
    /// In memory only.
    Plain,
    /// With an append-only file.
    Durable,
    /// Three servers and three Sentinels with the recommended settings.
    Sentinels,
    /// In memory only, with a clock that can be stepped.
    AdjustableClock,
}

const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "everysec"];
/// Sentinel's `down-after-milliseconds`. Sentinels ping once a second or at this interval, if it
/// is shorter; a much smaller value marks a new primary as down before its first reply.
const DOWN_AFTER_MS: u32 = 2_000;
/// Source address of replication and Sentinel connections, so that a proxy can refuse them and
/// still accept routers.
pub(crate) const REDIS_SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 9));

pub(crate) struct Backend {
    pub servers: Vec<RedisServer>,
    /// One proxy per server, with Sentinels only.
    pub proxies: Vec<FaultProxy>,
    sentinels: Vec<RedisServer>,
    kind: BackendKind,
    /// The adjustable clock of the server, if any.
    pub clock: Option<WallClock>,
}

impl Backend {
    /// `is_sound`: with the recommended settings.
    pub(crate) fn start(kind: BackendKind, is_sound: bool) -> Self {
        let clock = (kind == BackendKind::AdjustableClock).then(|| WallClock::ahead(0));
        let (servers, proxies, sentinels) = match kind {
            BackendKind::AdjustableClock => {
                (clock.iter().map(RedisServer::with_clock).collect(), Vec::new(), Vec::new())
            }
            BackendKind::Plain => (vec![RedisServer::start(&[])], Vec::new(), Vec::new()),
            BackendKind::Durable => (vec![RedisServer::start(&DURABLE)], Vec::new(), Vec::new()),
            // Retries, because Sentinel discovery is not under test.
            BackendKind::Sentinels => (0..3)
                .find_map(|_| start_sentinels(is_sound))
                .expect("the Sentinels find each other"),
        };
        Self { servers, proxies, sentinels, kind, clock }
    }

    /// The port of the first server.
    pub(crate) fn port(&self) -> u16 {
        self.servers[0].port
    }

    /// The Redis URL of a router. A broken build does not use Sentinels.
    pub(crate) fn url(&self, proxy: u16, broken: Option<Broken>) -> String {
        match (self.kind, broken) {
            (BackendKind::Sentinels, None) => {
                let sentinels: Vec<String> =
                    self.sentinels.iter().map(|it| format!("127.0.0.1:{}", it.port)).collect();
                format!("redis+sentinel://{}/chaos", sentinels.join(","))
            }
            (BackendKind::Sentinels, Some(_)) => {
                format!("redis://127.0.0.1:{}", self.proxies[0].port())
            }
            _ => format!("redis://127.0.0.1:{proxy}"),
        }
    }

    /// Fills the pools for the baseline.
    pub(crate) fn fill_pools(&self, pods: &[String]) {
        let mut redis = self.servers[0].connection();
        for pod in pods {
            let () = match pod.split('-').next().unwrap() {
                "gold" => redis.sadd("voice:pool:gold:available", pod).unwrap(),
                "basic" => redis.zadd("voice:pool:basic:available", pod, 0).unwrap(),
                _ => (),
            };
        }
    }

    /// Kills the server and restarts it from disk, or empty without a file.
    pub(crate) fn restart(&mut self) {
        match self.kind {
            BackendKind::Durable => self.servers[0].restart(&DURABLE),
            _ => self.servers[0].restart_empty(),
        }
    }

    /// The number of failovers.
    pub(crate) fn failovers(&self) -> u64 {
        let epoch = |sentinel: &RedisServer| -> Option<u64> {
            let mut connection = sentinel.client().get_connection().ok()?;
            let about: HashMap<String, String> =
                redis::cmd("SENTINEL").arg("master").arg("chaos").query(&mut connection).ok()?;
            about.get("config-epoch")?.parse().ok()
        };
        self.sentinels.iter().filter_map(epoch).max().unwrap_or(0)
    }

    /// A connection to the first server with a short timeout, because the server may be paused.
    pub(crate) fn connection_with_timeout(&self) -> Option<redis::Connection> {
        let timeout = Duration::from_millis(50);
        let connection = self.servers[0].client().get_connection_with_timeout(timeout).ok()?;
        connection.set_read_timeout(Some(timeout)).ok()?;
        Some(connection)
    }

    /// A connection to the primary.
    pub(crate) fn connection(&self) -> Option<redis::Connection> {
        let mut open =
            self.servers.iter().filter_map(|server| server.client().get_connection().ok());
        open.find_map(|mut connection| {
            let role: Vec<redis::Value> = redis::cmd("ROLE").query(&mut connection).ok()?;
            let name: String = redis::from_redis_value(role.into_iter().next()?).ok()?;
            (name == "master").then_some(connection)
        })
    }
}

/// Servers, the proxies before them, and Sentinels.
type SentinelSetup = (Vec<RedisServer>, Vec<FaultProxy>, Vec<RedisServer>);

/// Three servers behind proxies, and three Sentinels that watch them.
fn start_sentinels(is_sound: bool) -> Option<SentinelSetup> {
    let source = REDIS_SOURCE.to_string();
    let ports = [free_port(), free_port(), free_port()];
    let proxies: Vec<FaultProxy> = ports.iter().map(|port| FaultProxy::to(*port)).collect();
    let mut servers = Vec::new();
    for (number, port) in ports.iter().enumerate() {
        let (port, announced) = (port.to_string(), proxies[number].port().to_string());
        let primary = format!("127.0.0.1 {}", proxies[0].port());
        let directory = scratch();
        let mut args = vec![
            "--port",
            &port,
            "--save",
            "",
            "--dir",
            directory.to_str().unwrap(),
            "--replica-announce-ip",
            "127.0.0.1",
            "--replica-announce-port",
            &announced,
            "--repl-diskless-sync-delay",
            "0",
            "--repl-ping-replica-period",
            "1",
            "--repl-timeout",
            "3",
            "--bind-source-addr",
            &source,
        ];
        if is_sound {
            args.extend(["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]);
        }
        if number > 0 {
            args.extend(["--replicaof", &primary]);
        }
        let args: Vec<&str> = args
            .iter()
            .flat_map(|arg| {
                if arg.contains("127.0.0.1 ") { arg.split(' ').collect() } else { vec![*arg] }
            })
            .collect();
        servers.push(RedisServer::start_raw(port.parse().unwrap(), &args));
    }
    let sentinels = (0..3)
        .map(|_| {
            let port = free_port();
            let file = scratch().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\nbind-source-addr {source}\nsentinel announce-ip 127.0.0.1\nsentinel monitor chaos 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds chaos {DOWN_AFTER_MS}\nsentinel failover-timeout chaos 2000\n\
                 sentinel parallel-syncs chaos 2\n",
                proxies[0].port()
            );
            std::fs::write(&file, text).unwrap();
            RedisServer::start_raw(port, &[file.to_str().unwrap(), "--sentinel"])
        })
        .collect::<Vec<_>>();
    let until = Instant::now() + Duration::from_secs(30);
    // Each Sentinel must know the two others and both replicas.
    while !sentinels.iter().all(knows_all) {
        if Instant::now() > until {
            return None;
        }
        thread::sleep(Duration::from_millis(50));
    }
    Some((servers, proxies, sentinels))
}

fn knows_all(sentinel: &RedisServer) -> bool {
    let Ok(mut connection) = sentinel.client().get_connection() else { return false };
    let count = |connection: &mut redis::Connection, what: &str| {
        let list: Result<Vec<redis::Value>, _> =
            redis::cmd("SENTINEL").arg(what).arg("chaos").query(connection);
        list.map_or(0, |list| list.len())
    };
    count(&mut connection, "replicas") == 2 && count(&mut connection, "sentinels") == 2
}
