//! Connections to Redis: passwords, databases, TLS, Sentinel, Redis Cluster.

use std::{fs, process::Command, time::Duration};

use redis::Commands;
use serde_json::json;

use testkit::{
    Router, certificates::Authority, eventually, free_port, redis::RedisServer, scratch,
};

const TIERS: (&str, &str) = ("TIER_CONFIG", r#"{"gold": 3}"#);

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_redis_url_sets_user_password_and_database() {
    let port = free_port();
    let file = scratch().join("redis.conf");
    let users = "user router on >s3cret ~* &* +@all\nuser default off";
    fs::write(&file, format!("port {port}\nsave \"\"\n{users}\n")).unwrap();
    let server = RedisServer::start_raw(port, &[file.to_str().unwrap()]);
    let url = format!("redis://router:s3cret@127.0.0.1:{}/3", server.port);
    let router = Router::start(&[("REDIS_URL", &url), TIERS]);
    router.allocate("CA1");
    let mut plain = redis::Client::open(url).unwrap().get_connection().unwrap();
    assert!(plain.exists::<_, bool>("voice:call:CA1").unwrap(), "the call is in database 3");
    redis::cmd("SELECT").arg(0).exec(&mut plain).unwrap();
    assert!(!plain.exists::<_, bool>("voice:schema").unwrap(), "database 0 is not used");
}

#[test]
fn a_redis_with_a_private_certificate_authority_is_reached_by_tls() {
    let authority = Authority::create();
    let (ca, server) = (authority.file(), authority.sign("redis"));
    let port = free_port();
    let _server = RedisServer::start_raw(
        port,
        &[
            "--port",
            "0",
            "--tls-port",
            &port.to_string(),
            "--save",
            "",
            "--tls-cert-file",
            &server.file,
            "--tls-key-file",
            &server.key,
            "--tls-ca-cert-file",
            &ca,
            "--tls-auth-clients",
            "no",
        ],
    );
    let url = format!("rediss://localhost:{port}");
    let router = Router::start(&[("REDIS_URL", &url), ("REDIS_CA_FILE", &ca), TIERS]);
    router.allocate("CA1");
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn a_sentinel_failover_is_followed_to_the_new_primary() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &primary.port.to_string()]);
    let (directory, port) = (scratch(), free_port());
    let file = directory.join("sentinel.conf");
    let settings = format!(
        "port {port}\ndir {}\nsentinel monitor voice 127.0.0.1 {} 1\nsentinel down-after-milliseconds voice 800\nsentinel failover-timeout voice 3000\n",
        directory.display(),
        primary.port
    );
    fs::write(&file, settings).unwrap();
    let _sentinel = RedisServer::start_raw(port, &[file.to_str().unwrap(), "--sentinel"]);
    let mut plain = primary.connection();
    eventually(Duration::from_secs(10), "the replica is online", || {
        let info: String = redis::cmd("INFO").arg("replication").query(&mut plain).unwrap();
        info.contains("connected_slaves:1") && info.contains("state=online")
    });
    let url = format!("redis+sentinel://127.0.0.1:{port}/voice");
    let router = Router::start(&[("REDIS_URL", &url), TIERS]);
    let pod = router.allocate("CA1")["pod_name"].clone();
    eventually(Duration::from_secs(15), "the Sentinel knows the replica", || {
        let mut sentinel = redis::Client::open(format!("redis://127.0.0.1:{port}"))
            .unwrap()
            .get_connection()
            .unwrap();
        let replicas: redis::Value =
            redis::cmd("SENTINEL").arg("REPLICAS").arg("voice").query(&mut sentinel).unwrap();
        replicas != redis::Value::Array(Vec::new())
    });
    let mut copy = replica.connection();
    eventually(Duration::from_secs(5), "the call is replicated", || {
        redis::cmd("EXISTS").arg("voice:call:CA1").query::<bool>(&mut copy).unwrap()
    });
    drop(primary);
    eventually(Duration::from_secs(20), "calls are served by the new primary", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0 == 200
    });
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod, "the replicated call is known");
    let role: Vec<redis::Value> = redis::cmd("ROLE").query(&mut replica.connection()).unwrap();
    assert_eq!(role[0], redis::Value::BulkString(b"master".to_vec()));
}

/// Sentinel, primary and replica accept only TLS connections and verify client certificates if
/// one is presented.
#[test]
fn a_sentinel_failover_over_tls_is_followed() {
    let authority = Authority::create();
    let (ca, certificate) = (authority.file(), authority.sign("redis"));
    let tls = |port: &str| {
        let pairs = [
            ["port", "0"],
            ["tls-port", port],
            ["tls-cert-file", &certificate.file],
            ["tls-key-file", &certificate.key],
            ["tls-ca-cert-file", &ca],
            ["tls-auth-clients", "optional"],
            ["tls-replication", "yes"],
        ];
        pairs.map(|[name, value]| format!("{name} {value}\n")).concat()
    };
    let start = |settings: String, extra: &[&str]| {
        let (port, directory) = (free_port(), scratch());
        let file = directory.join("redis.conf");
        let text = format!("{}dir {}\n{settings}", tls(&port.to_string()), directory.display());
        fs::write(&file, text).unwrap();
        let mut args = vec![file.to_str().unwrap()];
        args.extend(extra);
        RedisServer::start_raw(port, &args)
    };
    let redis = |server: &RedisServer, command: &str| {
        let mut cli = Command::new("redis-cli");
        cli.args(["-p", &server.port.to_string(), "--tls", "--cacert", &ca]);
        let output = cli.args(command.split(' ')).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let primary = start("save \"\"\n".into(), &[]);
    let replica = start(format!("save \"\"\nreplicaof 127.0.0.1 {}\n", primary.port), &[]);
    eventually(Duration::from_secs(10), "the replica is online", || {
        redis(&primary, "INFO replication").contains("state=online")
    });
    let monitor = format!(
        "sentinel monitor voice 127.0.0.1 {} 1\nsentinel down-after-milliseconds voice 800\nsentinel failover-timeout voice 3000\n",
        primary.port
    );
    let sentinel = start(monitor, &["--sentinel"]);
    eventually(Duration::from_secs(15), "the Sentinel knows the replica", || {
        redis(&sentinel, "SENTINEL REPLICAS voice").contains(&replica.port.to_string())
    });
    let url = format!("rediss+sentinel://localhost:{}/voice", sentinel.port);
    let router = Router::start(&[("REDIS_URL", &url), ("REDIS_CA_FILE", &ca), TIERS]);
    let pod = router.allocate("CA1")["pod_name"].clone();
    eventually(Duration::from_secs(5), "the call is replicated", || {
        redis(&replica, "EXISTS voice:call:CA1").contains('1')
    });
    drop(primary);
    eventually(Duration::from_secs(20), "calls are served by the new primary", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0 == 200
    });
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod);
    assert!(redis(&replica, "ROLE").contains("master"));
    for call in ["CA1", "CA2"] {
        assert_eq!(router.release(call).0, 200);
    }
}

#[test]
fn a_demoted_primary_is_an_outage() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url), TIERS]);
    router.allocate("CA1");
    let mut plain = server.connection();
    let nowhere = free_port().to_string();
    redis::cmd("CONFIG")
        .arg("SET")
        .arg("replica-serve-stale-data")
        .arg("yes")
        .exec(&mut plain)
        .unwrap();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(nowhere).exec(&mut plain).unwrap();
    let (status, response) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
    assert_eq!(status, 503, "{response}");
    assert_eq!(router.release("CA1").0, 503, "the release is deferred");
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut plain).unwrap();
    eventually(Duration::from_secs(3), "the deferred release is flushed", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA2").0, 404);
    router.allocate("CA2");
}

#[test]
fn a_redis_cluster_is_reached_through_any_node() {
    let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let nodes: Vec<RedisServer> = ports
        .iter()
        .map(|port| {
            let (directory, text, bus) = (scratch(), port.to_string(), free_port().to_string());
            RedisServer::start_raw(
                *port,
                &[
                    "--port",
                    &text,
                    "--save",
                    "",
                    "--cluster-enabled",
                    "yes",
                    "--cluster-port",
                    &bus,
                    "--dir",
                    directory.to_str().unwrap(),
                ],
            )
        })
        .collect();
    let addresses: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let mut args = vec!["--cluster", "create"];
    args.extend(addresses.iter().map(String::as_str));
    args.push("--cluster-yes");
    run("redis-cli", &args);
    eventually(Duration::from_secs(20), "the cluster state is ok", || {
        nodes.iter().all(|node| {
            let info: String =
                redis::cmd("CLUSTER").arg("INFO").query(&mut node.connection()).unwrap();
            info.contains("cluster_state:ok")
        })
    });
    let routers: Vec<Router> = nodes
        .iter()
        .map(|node| Router::start(&[("REDIS_URL", &node.url()), ("KEY_PREFIX", "{voice}:"), TIERS]))
        .collect();
    let pod = routers[0].allocate("CA1")["pod_name"].clone();
    for router in &routers {
        let (_, again) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
        assert_eq!(
            (&again["pod_name"], &again["was_existing"]),
            (&pod, &json!(true)),
            "all nodes lead to one store"
        );
    }
    assert_eq!(routers[1].release("CA1").0, 200);
    assert_eq!(routers[2].status()["pools"]["gold"]["available"], 3);
}

#[test]
fn unsafe_redis_settings_are_warned_about() {
    let server = RedisServer::start(&["--maxmemory-policy", "allkeys-lru"]);
    let _replica = RedisServer::start(&["--replicaof", "127.0.0.1", &server.port.to_string()]);
    eventually(Duration::from_secs(10), "the replica is online", || {
        let info: String =
            redis::cmd("INFO").arg("replication").query(&mut server.connection()).unwrap();
        info.contains("connected_slaves:1")
    });
    let (api, metrics, url) = (free_port().to_string(), free_port().to_string(), server.url());
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("HTTP_PORT", &api),
        ("METRICS_PORT", &metrics),
        ("LOG_FORMAT", "json"),
    ];
    let mut router = Router::start_with(&settings, std::process::Stdio::piped());
    let mut log = router.child.stderr.take().unwrap();
    drop(router);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut log, &mut text).unwrap();
    assert!(text.contains("maxmemory-policy noeviction"), "{text}");
    assert!(text.contains("min-replicas-to-write"), "{text}");
}
