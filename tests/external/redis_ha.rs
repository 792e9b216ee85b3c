//! `deploy/redis-ha` with real servers: its start script and settings, a router, a failover.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::json;
use testkit::{Process, Router, eventually, free_port, scratch};

use crate::render::deploy;

const PASSWORD: &str = "0123456789abcdef";
/// A failover takes the 5 s after which a primary counts as down, and an election.
const FAILOVER: Duration = Duration::from_secs(60);

/// A pod: a Redis and a Sentinel that share a directory.
struct Pod {
    directory: PathBuf,
    port: u16,
    sentinel_port: u16,
    redis: Option<Process>,
    sentinel: Option<Process>,
}

/// The command of a container, with the name of this machine instead of those in the cluster.
fn container(role: &str, directory: &PathBuf, ports: [u16; 3], password: &str) -> Command {
    let config = deploy().join("redis-ha");
    fs::write(directory.join("password"), password).unwrap();
    let mut command = Command::new("sh");
    command.arg(config.join("start.sh")).arg(role).current_dir(directory);
    command.env("SELF", "localhost").env("FIRST", "localhost").env("CONFIG", config);
    command.env("DATA", directory).env("PASSWORD_FILE", directory.join("password"));
    let names = ["PORT", "SENTINEL_PORT", "FIRST_PORT"];
    command.envs(names.into_iter().zip(ports.map(|port| port.to_string())));
    command
}

impl Pod {
    fn new() -> Self {
        let (port, sentinel_port) = (free_port(), free_port());
        Self { directory: scratch(), port, sentinel_port, redis: None, sentinel: None }
    }

    fn start(&mut self, role: &str, first: u16) {
        let ports = [self.port, self.sentinel_port, first];
        let process = Process::start(&mut container(role, &self.directory, ports, PASSWORD));
        match role {
            "redis" => self.redis = Some(process),
            _ => self.sentinel = Some(process),
        }
    }

    fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> redis::RedisResult<T> {
        ask(&format!("redis://:{PASSWORD}@127.0.0.1:{}", self.port), command)
    }

    fn is(&self, role: &str, replicas: usize) -> bool {
        let info: Result<String, _> = self.ask(redis::cmd("INFO").arg("replication"));
        let online = format!("connected_slaves:{replicas}\r\n");
        info.is_ok_and(|it| it.contains(&format!("role:{role}\r\n")) && it.contains(&online))
    }
}

fn ask<T: redis::FromRedisValue>(url: &str, command: &redis::Cmd) -> redis::RedisResult<T> {
    let client = redis::Client::open(url)?;
    let mut connection = client.get_connection_with_timeout(Duration::from_secs(5))?;
    command.query(&mut connection)
}

/// Three pods whose Sentinels have found each other.
fn start() -> [Pod; 3] {
    let mut pods = [Pod::new(), Pod::new(), Pod::new()];
    let first = pods[0].port;
    for pod in &mut pods {
        pod.start("redis", first);
        pod.start("sentinel", first);
    }
    eventually(FAILOVER, "the replicas follow the first Redis", || pods[0].is("master", 2));
    for pod in &pods {
        let url = format!("redis://127.0.0.1:{}", pod.sentinel_port);
        eventually(FAILOVER, "the Sentinels know each other", || {
            let info: Result<String, _> = ask(&url, redis::cmd("INFO").arg("sentinel"));
            info.is_ok_and(|it| it.contains("slaves=2,sentinels=3"))
        });
    }
    pods
}

#[test]
fn calls_survive_a_failover_of_redis() {
    let mut pods = start();
    let anonymous = format!("redis://127.0.0.1:{}", pods[1].port);
    let refused = ask::<String>(&anonymous, &redis::cmd("PING")).unwrap_err();
    assert_eq!(refused.code(), Some("NOAUTH"), "{refused}");

    let sentinels = pods.iter().map(|pod| format!("127.0.0.1:{}", pod.sentinel_port));
    let sentinels = sentinels.collect::<Vec<_>>().join(",");
    let url = format!("redis+sentinel://:{PASSWORD}@{sentinels}/smart-router");
    let pods_setting = ("PODS", "a=127.0.0.1:1,b=127.0.0.1:2");
    let router = Router::start(&[("REDIS_URL", &url), pods_setting, ("LOG_LEVEL", "off")]);
    let first = router.allocate("C1");
    assert_eq!(first["success"], true, "{first}");

    // Sentinels announce the name of the primary, because its address changes with its pod.
    let sentinel = format!("redis://127.0.0.1:{}", pods[1].sentinel_port);
    let primary = redis::cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg("smart-router").clone();
    let primary: Vec<String> = ask(&sentinel, &primary).unwrap();
    assert_eq!(primary, ["localhost".to_owned(), pods[0].port.to_string()]);

    // Redis replies before it replicates.
    eventually(FAILOVER, "the replicas have the call", || {
        let has_call = |pod: &Pod| pod.ask(redis::cmd("EXISTS").arg("voice:call:C1")) == Ok(1);
        pods[1..].iter().all(has_call)
    });
    // The primary is lost; its call is known to the next one.
    let lost = pods[0].port;
    pods[0].redis = None;
    eventually(FAILOVER, "a call gets a pod from the new primary", || {
        router.post("/api/v1/allocate", json!({"call_sid": "C2"})).0 == 200
    });
    assert_eq!(router.allocate("C1")["pod_name"], first["pod_name"], "an idempotent repeat");

    // The former primary comes back, and becomes a replica.
    pods[0].start("redis", lost);
    eventually(FAILOVER, "the former primary is a replica", || pods[0].is("slave", 0));
    let role = fs::read_to_string(pods[0].directory.join("redis.conf")).unwrap();
    assert!(role.lines().any(|line| line.starts_with("replicaof localhost ")), "{role}");

    // The start script keeps the role: without Sentinels, too, it starts as a replica.
    for pod in &mut pods {
        pod.sentinel = None;
    }
    pods[0].redis = None;
    pods[0].start("redis", lost);
    eventually(FAILOVER, "the replica has kept its role", || pods[0].is("slave", 0));

    // A primary without replicas acknowledges no write.
    let primary = pods.iter().position(|pod| pod.is("master", 2) || pod.is("master", 1));
    let primary = primary.unwrap();
    for (at, pod) in pods.iter_mut().enumerate() {
        if at != primary {
            pod.redis = None;
        }
    }
    eventually(FAILOVER, "the primary refuses writes", || {
        let written: Result<(), _> = pods[primary].ask(redis::cmd("SET").arg("key").arg("value"));
        written.is_err_and(|error| error.code() == Some("NOREPLICAS"))
    });
}

/// Quotes or spaces in a password would change the meaning of the settings.
#[test]
fn a_password_with_special_characters_is_refused() {
    for password in ["", "two words", "quote\"", "line\nport 1"] {
        let directory = scratch();
        let mut command = container("redis", &directory, [1, 2, 3], password);
        let output = command.stdout(Stdio::piped()).output().unwrap();
        assert!(!output.status.success());
        let shown = String::from_utf8_lossy(&output.stderr);
        assert!(shown.contains("the password must consist of letters and digits"), "{shown}");
        assert!(!directory.join("redis.conf").exists());
    }
}

/// The router warns at its start about settings that lose writes or keys.
#[test]
fn the_settings_are_those_that_the_router_requires() {
    let settings = fs::read_to_string(deploy().join("redis-ha/redis.conf")).unwrap();
    for required in [
        "appendonly yes",
        "maxmemory-policy noeviction",
        "min-replicas-to-write 1",
        "min-replicas-max-lag 1",
    ] {
        assert!(settings.lines().any(|line| line == required), "{required}");
    }
}
