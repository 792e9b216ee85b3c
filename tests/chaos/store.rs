//! The Redis of a run: one server, or several that Sentinels watch.

use std::{
    collections::HashMap,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;

use super::cell::Broken;
use testkit::{clock::WallClock, free_port, proxy::Proxy, redis::RedisServer, scratch};

/// Which Redis a cell has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In memory only.
    Plain,
    /// Keeps what it knows on disk.
    Durable,
    /// Three servers, three Sentinels, the recommended settings.
    Sentinels,
    /// In memory only, with a clock that can be stepped.
    Clocked,
}

const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "everysec"];
/// What Sentinels wait before they take a server for gone (ms). They ask once a second, or
/// as often as this: much less, and one that has just changed over takes the new primary for
/// gone before its first answer.
const DOWN_AFTER: u32 = 2_000;
/// Where what belongs to the Redis itself comes from: its lines can be cut and those of
/// routers be left.
pub(crate) const INSIDE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 9));

pub(crate) struct Backend {
    pub servers: Vec<RedisServer>,
    /// One before each server of several.
    pub proxies: Vec<Proxy>,
    sentinels: Vec<RedisServer>,
    kind: Kind,
    /// The clock of a server that has one of its own.
    pub clock: Option<WallClock>,
}

impl Backend {
    /// `is_sound`: with the settings that we recommend.
    pub(crate) fn start(kind: Kind, is_sound: bool) -> Self {
        let clock = (kind == Kind::Clocked).then(|| WallClock::ahead(0));
        let (servers, proxies, sentinels) = match kind {
            Kind::Clocked => {
                (clock.iter().map(RedisServer::with_clock).collect(), Vec::new(), Vec::new())
            }
            Kind::Plain => (vec![RedisServer::start(&[])], Vec::new(), Vec::new()),
            Kind::Durable => (vec![RedisServer::start(&DURABLE)], Vec::new(), Vec::new()),
            // (how they find each other is not what is tried here)
            Kind::Sentinels => {
                (0..3).find_map(|_| watched(is_sound)).expect("the Sentinels find each other")
            }
        };
        Self { servers, proxies, sentinels, kind, clock }
    }

    /// Where the first server is.
    pub(crate) fn port(&self) -> u16 {
        self.servers[0].port
    }

    /// What a router is told. One that is broken does not ask Sentinels.
    pub(crate) fn url(&self, proxy: u16, broken: Option<Broken>) -> String {
        match (self.kind, broken) {
            (Kind::Sentinels, None) => {
                let sentinels: Vec<String> =
                    self.sentinels.iter().map(|it| format!("127.0.0.1:{}", it.port)).collect();
                format!("redis+sentinel://{}/chaos", sentinels.join(","))
            }
            (Kind::Sentinels, Some(_)) => format!("redis://127.0.0.1:{}", self.proxies[0].port()),
            _ => format!("redis://127.0.0.1:{proxy}"),
        }
    }

    /// Fills the pools as the older router would.
    pub(crate) fn fill(&self, pods: &[String]) {
        let mut redis = self.servers[0].connection();
        for pod in pods {
            let () = match pod.split('-').next().unwrap() {
                "gold" => redis.sadd("voice:pool:gold:available", pod).unwrap(),
                "basic" => redis.zadd("voice:pool:basic:available", pod, 0).unwrap(),
                _ => (),
            };
        }
    }

    /// Kills the server and starts it with what it had on disk, or empty.
    pub(crate) fn restart(&mut self) {
        match self.kind {
            Kind::Durable => self.servers[0].restart(&DURABLE),
            _ => self.servers[0].replace(),
        }
    }

    /// How often Sentinels have made another server the primary.
    pub(crate) fn failovers(&self) -> u64 {
        let epoch = |sentinel: &RedisServer| -> Option<u64> {
            let mut connection = sentinel.client().get_connection().ok()?;
            let about: HashMap<String, String> =
                redis::cmd("SENTINEL").arg("master").arg("chaos").query(&mut connection).ok()?;
            about.get("config-epoch")?.parse().ok()
        };
        self.sentinels.iter().filter_map(epoch).max().unwrap_or(0)
    }

    /// A connection to the first server, which may be asleep.
    pub(crate) fn hurried_connection(&self) -> Option<redis::Connection> {
        let soon = Duration::from_millis(50);
        let connection = self.servers[0].client().get_connection_with_timeout(soon).ok()?;
        connection.set_read_timeout(Some(soon)).ok()?;
        Some(connection)
    }

    /// A connection to the server that is written to.
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
type Watched = (Vec<RedisServer>, Vec<Proxy>, Vec<RedisServer>);

/// Three servers behind proxies, and three Sentinels that watch them.
fn watched(is_sound: bool) -> Option<Watched> {
    let inside = INSIDE.to_string();
    let ports = [free_port(), free_port(), free_port()];
    let proxies: Vec<Proxy> = ports.iter().map(|port| Proxy::to(*port)).collect();
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
            &inside,
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
                "port {port}\nbind 127.0.0.1\nbind-source-addr {inside}\nsentinel announce-ip 127.0.0.1\nsentinel monitor chaos 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds chaos {DOWN_AFTER}\nsentinel failover-timeout chaos 2000\n\
                 sentinel parallel-syncs chaos 2\n",
                proxies[0].port()
            );
            std::fs::write(&file, text).unwrap();
            RedisServer::start_raw(port, &[file.to_str().unwrap(), "--sentinel"])
        })
        .collect::<Vec<_>>();
    let until = Instant::now() + Duration::from_secs(30);
    // Each knows both others and both replicas.
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
    let ask = |connection: &mut redis::Connection, what: &str| {
        let list: Result<Vec<redis::Value>, _> =
            redis::cmd("SENTINEL").arg(what).arg("chaos").query(connection);
        list.map_or(0, |list| list.len())
    };
    ask(&mut connection, "replicas") == 2 && ask(&mut connection, "sentinels") == 2
}
