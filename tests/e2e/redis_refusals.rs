//! A Redis that answers and refuses. A refusal that only an operator can end is an outage:
//! nothing is lost, and nothing is given twice.

use std::time::Duration;

use redis::{Connection as Redis, cmd};
use serde_json::{Value, json};

use testkit::{
    Connection, Router, eventually,
    provider::{Heard, PUBLIC_URL, call},
    redis::RedisServer,
};

/// One kind of refusal: the code of the error, how it begins and how it ends.
struct Refusal {
    code: &'static str,
    begin: &'static [&'static str],
    end: &'static [&'static str],
}

const REFUSALS: [Refusal; 6] = [
    Refusal {
        code: "NOPERM",
        begin: &["ACL SETUSER router -fcall"],
        end: &["ACL SETUSER router +fcall"],
    },
    // A command inside of the functions: Redis 7.0 answers with the code ERR.
    Refusal {
        code: "NOPERM",
        begin: &["ACL SETUSER router -zadd -zrem"],
        end: &["ACL SETUSER router +zadd +zrem"],
    },
    Refusal {
        code: "WRONGPASS",
        begin: &["ACL SETUSER router resetpass >other", "CLIENT KILL USER router"],
        end: &["ACL SETUSER router resetpass >pw"],
    },
    Refusal {
        code: "MISCONF",
        begin: &["CONFIG SET save 3600,1", "BGSAVE"],
        end: &["CONFIG SET save ,"],
    },
    Refusal { code: "READONLY", begin: &["REPLICAOF 127.0.0.1 1"], end: &["REPLICAOF NO ONE"] },
    Refusal {
        code: "NOREPLICAS",
        begin: &["CONFIG SET min-replicas-to-write 1"],
        end: &["CONFIG SET min-replicas-to-write 0"],
    },
];

/// Runs commands; a comma stands for a space within an argument.
fn run(redis: &mut Redis, lines: &[&str]) {
    for line in lines {
        let mut words = line.split(' ').map(|word| word.replace(',', " "));
        let mut command = cmd(&words.next().unwrap());
        words.for_each(|word| {
            command.arg(word.trim_end());
        });
        command.exec(redis).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

/// A router that has its own Redis user, and calls that wait for their streams.
fn with_user(server: &RedisServer) -> Router {
    let acl = "ACL SETUSER router on >pw ~voice:* &voice:handed +@all";
    run(&mut server.connection(), &[acl]);
    let url = server.url().replace("redis://", "redis://router:pw@");
    Router::start(&[
        ("REDIS_URL", &url),
        ("PUBLIC_URL", PUBLIC_URL),
        ("CONNECT_TIMEOUT", "2s"),
        ("CLEANUP_INTERVAL", "1s"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("LOG_LEVEL", "off"),
    ])
}

fn stream_started(connection: &mut Connection, call: &str, pod: &str) -> u16 {
    let path = format!("/api/v1/twilio/stream-status?pod_name={pod}");
    let body = format!("CallSid={call}&StreamEvent=stream-started&StreamSid=MZ1");
    connection.form(&path, &body).status
}

fn ready(router: &Router) -> (u16, Value) {
    router.connect().get("/ready").json()
}

#[test]
fn what_a_refusing_redis_could_not_take_is_done_when_it_is_mended() {
    for Refusal { code, begin, end } in REFUSALS {
        let server = RedisServer::start(&[]);
        let router = with_user(&server);
        let (mut redis, mut connection) = (server.connection(), router.connect());
        router.allocate("released");
        let confirmed = call(&mut connection, "confirmed").pod().unwrap();
        if code == "MISCONF" {
            server.lose_directory();
        }
        run(&mut redis, begin);
        eventually(Duration::from_secs(5), "the snapshot has failed", || {
            let info: String = cmd("INFO").arg("persistence").query(&mut redis).unwrap();
            code != "MISCONF" || info.contains("rdb_last_bgsave_status:err")
        });
        let refused = || router.post("/api/v1/allocate", json!({"call_sid": "new"}));
        assert_eq!(refused().0, 503, "{code}");
        assert_eq!(router.release("released").0, 503, "{code}");
        // The callback is answered as in an outage; the start of the stream is kept.
        stream_started(&mut connection, "confirmed", &confirmed);
        let heard = call(&mut connection, "hung-up");
        assert!(matches!(heard, Heard::HangUp(_)), "{code}: {heard:?}");
        let down = json!({"status": "ready", "store": "down", "reason": code});
        assert_eq!(ready(&router), (200, down));
        // The stream may take two seconds to start; the start that was kept counts after that.
        std::thread::sleep(Duration::from_millis(2_100));
        run(&mut redis, end);
        let up = json!({"status": "ready", "store": "up"});
        eventually(Duration::from_secs(10), code, || ready(&router) == (200, up.clone()));
        eventually(Duration::from_secs(5), "the release is applied", || {
            router.get("/api/v1/calls/released").0 == 404
        });
        let found = router.get("/api/v1/calls/confirmed");
        assert_eq!((found.0, &found.1["is_confirmed"]), (200, &json!(true)), "{code}: {found:?}");
        assert_eq!(found.1["pod_name"], confirmed.as_str());
        assert_eq!(router.get("/api/v1/calls/new").0, 404, "{code}: a refused call has a pod");
        assert_eq!(router.status()["active_calls"], 1, "{code}");
        assert_eq!(router.release("confirmed").0, 200);
    }
}

#[test]
fn a_full_redis_takes_releases_confirmations_and_leaving_pods() {
    let server = RedisServer::start(&[]);
    let router = with_user(&server);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    router.allocate("released");
    let confirmed = call(&mut connection, "confirmed").pod().unwrap();
    run(&mut redis, &["CONFIG SET maxmemory 1"]);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "new"})).0, 503);
    assert_eq!(router.release("released").0, 200);
    assert_eq!(stream_started(&mut connection, "confirmed", &confirmed), 200);
    assert_eq!(router.get("/api/v1/calls/confirmed").1["is_confirmed"], true);
    assert_eq!(router.post("/api/v1/renew", json!({"call_sid": "confirmed"})).0, 200);
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": confirmed})).0, 200);
    assert_eq!(ready(&router).1["store"], "up");
    assert_eq!(router.release("confirmed").0, 200);
    run(&mut redis, &["CONFIG SET maxmemory 0"]);
    router.allocate("new");
    assert_eq!(router.release("new").0, 200);
}

#[test]
fn a_deferred_write_that_redis_never_takes_does_not_block_recovery() {
    let server = RedisServer::start(&[]);
    let router = with_user(&server);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    let pod = call(&mut connection, "spoiled").pod().unwrap();
    let other = call(&mut connection, "confirmed").pod().unwrap();
    router.allocate("released");
    run(&mut redis, &["DEL voice:call:spoiled", "LPUSH voice:call:spoiled x"]);
    run(&mut redis, &["CLIENT PAUSE 1500 ALL"]);
    stream_started(&mut connection, "spoiled", &pod);
    stream_started(&mut connection, "confirmed", &other);
    assert_eq!(router.release("released").0, 503);
    eventually(Duration::from_secs(10), "the store is in use again", || {
        ready(&router).1["store"] == "up"
    });
    assert_eq!(router.get("/api/v1/calls/released").0, 404);
    assert_eq!(router.get("/api/v1/calls/confirmed").1["is_confirmed"], true);
    run(&mut redis, &["DEL voice:call:spoiled"]);
    assert_eq!(router.release("confirmed").0, 200);
    eventually(Duration::from_secs(5), "the audit ends the call without a record", || {
        router.status()["pools"]["gold"]["available"] == 3
    });
}

/// The number of a metric's line that begins so; 0 without one.
fn metric(router: &Router, line: &str) -> u64 {
    let metrics = router.connect().get("/metrics").text();
    let number = metrics.lines().find_map(|it| it.strip_prefix(line));
    number.map_or(0, |number| number.trim().parse().unwrap())
}

#[test]
fn a_command_denied_inside_the_functions_is_one_steady_outage() {
    for denied in ["zadd", "xadd", "hmget"] {
        let server = RedisServer::start(&[]);
        let router = with_user(&server);
        let mut redis = server.connection();
        run(&mut redis, &[&format!("ACL SETUSER router -{denied}")]);
        let down = (200, json!({"status": "ready", "store": "down", "reason": "NOPERM"}));
        // The first operation that needs the command finds out; a call may be given before.
        let mut given = false;
        eventually(Duration::from_secs(5), denied, || {
            given |= router.post("/api/v1/allocate", json!({"call_sid": "new"})).0 == 200;
            ready(&router) == down
        });
        let probes = || metric(&router, r#"smart_router_store_errors_total{operation="begin"} "#);
        let before = probes();
        eventually(Duration::from_secs(5), "probe after probe fails", || {
            assert_eq!(ready(&router), down, "{denied}: in use without its permissions");
            probes() >= before + 5
        });
        run(&mut redis, &[&format!("ACL SETUSER router +{denied}")]);
        let up = (200, json!({"status": "ready", "store": "up"}));
        eventually(Duration::from_secs(10), denied, || ready(&router) == up);
        let found = router.get("/api/v1/calls/new").0;
        assert_eq!(found == 200, given, "{denied}: told otherwise");
        router.allocate("new");
        assert_eq!(router.release("new").0, 200);
    }
}

#[test]
fn a_denied_command_replaces_no_view_and_gives_no_second_pod() {
    let server = RedisServer::start(&[]);
    let router = with_user(&server);
    let mut redis = server.connection();
    let pod = router.allocate("known")["pod_name"].clone();
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
    let count = |redis: &mut Redis, command: &str, key: &str| -> u64 {
        cmd(command).arg(key).query(redis).unwrap()
    };
    let events = count(&mut redis, "XLEN", "voice:events");
    assert!(events > 0);
    run(&mut redis, &["ACL SETUSER router -zadd -xadd -zrangebyscore"]);
    let (status, answer) = router.post("/api/v1/drain", json!({"pod_name": "voice-agent-1"}));
    assert_eq!(status, 503, "{answer}");
    assert_eq!(count(&mut redis, "ZCARD", "voice:draining"), 1, "the index of drains is gone");
    assert_eq!(count(&mut redis, "XLEN", "voice:events"), events, "the events are gone");
    run(&mut redis, &["ACL SETUSER router +zadd +xadd +zrangebyscore"]);
    let up = (200, json!({"status": "ready", "store": "up"}));
    eventually(Duration::from_secs(10), "the store is in use", || ready(&router) == up);
    assert_eq!(router.allocate("known")["pod_name"], pod);
    assert_eq!(router.release("known").0, 200);
}

#[test]
fn a_status_that_cannot_be_read_is_an_error() {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    run(&mut redis, &["ACL SETUSER router on >pw ~* &* +@all"]);
    let url = server.url().replace("redis://", "redis://router:pw@");
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", r#"{"gold": 2}"#)]);
    router.allocate("CA1");
    run(&mut redis, &["ACL SETUSER router -sscan"]);
    eventually(Duration::from_secs(10), "the status is refused", || {
        let (status, answer) = router.get("/api/v1/status");
        assert!(status == 503 || answer["pools"]["gold"]["active_calls"] == 1, "{answer}");
        status == 503
    });
    run(&mut redis, &["ACL SETUSER router +sscan"]);
    eventually(Duration::from_secs(10), "it can be read again", || {
        router.get("/api/v1/status").0 == 200
    });
}
