//! A Redis that replies with errors. An error that only an operator can end is an outage: no
//! write is lost and no pod is allocated twice.

use std::time::Duration;

use redis::{Connection as Redis, cmd};
use serde_json::{Value, json};

use testkit::{
    Connection, Router, WITHOUT_GATEWAY,
    clock::WallClock,
    eventually,
    provider::{CallDocument, PUBLIC_URL, start_call},
    redis::RedisServer,
};

/// One kind of refusal: the error code, and the commands that begin and end it.
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
    // A command inside the functions: Redis 7.0 replies with the code ERR.
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

/// Runs commands; a comma represents a space within an argument.
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

/// Starts a router with its own Redis user and a CONNECT_TIMEOUT, without the media gateway.
fn with_user(server: &RedisServer) -> Router {
    let acl = "ACL SETUSER router on >pw ~voice:* &voice:handed +@all";
    run(&mut server.connection(), &[acl]);
    let url = server.url().replace("redis://", "redis://router:pw@");
    Router::start(&[
        ("REDIS_URL", &url),
        ("PUBLIC_URL", PUBLIC_URL),
        ("CONNECT_TIMEOUT", "1m"),
        WITHOUT_GATEWAY,
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

/// The number of probes that Redis has refused.
fn failed_probes(router: &Router) -> u64 {
    router.metric(r#"smart_router_store_errors_total{operation="begin"}"#)
}

#[test]
fn writes_refused_by_redis_are_applied_when_it_accepts_again() {
    for Refusal { code, begin, end } in REFUSALS {
        let clock = WallClock::ahead(0);
        let server = RedisServer::with_clock(&clock);
        let router = with_user(&server);
        let (mut redis, mut connection) = (server.connection(), router.connect());
        router.allocate("released");
        let confirmed = start_call(&mut connection, "confirmed").pod().unwrap();
        if code == "MISCONF" {
            server.remove_directory();
        }
        run(&mut redis, begin);
        eventually(Duration::from_secs(5), "the snapshot has failed", || {
            let info: String = cmd("INFO").arg("persistence").query(&mut redis).unwrap();
            code != "MISCONF" || info.contains("rdb_last_bgsave_status:err")
        });
        let refused = || router.post("/api/v1/allocate", json!({"call_sid": "new"}));
        assert_eq!(refused().0, 503, "{code}");
        assert_eq!(router.release("released").0, 503, "{code}");
        // The callback is acknowledged as in an outage; the confirmation is deferred.
        stream_started(&mut connection, "confirmed", &confirmed);
        let document = start_call(&mut connection, "hung-up");
        assert!(matches!(document, CallDocument::HangUp(_)), "{code}: {document:?}");
        let down = json!({"status": "ready", "store": "down", "reason": code});
        assert_eq!(ready(&router), (200, down));
        // CONNECT_TIMEOUT passes during the refusal; the deferred confirmation must still count.
        clock.set_ahead(70);
        let before = failed_probes(&router);
        eventually(Duration::from_secs(5), "the store is probed", || {
            failed_probes(&router) >= before + 2
        });
        run(&mut redis, end);
        let up = json!({"status": "ready", "store": "up"});
        eventually(Duration::from_secs(10), code, || ready(&router) == (200, up.clone()));
        eventually(Duration::from_secs(5), "the release is applied", || {
            router.get("/api/v1/calls/released").0 == 404
        });
        let found = router.get("/api/v1/calls/confirmed");
        assert_eq!((found.0, &found.1["is_confirmed"]), (200, &json!(true)), "{code}: {found:?}");
        assert_eq!(found.1["pod_name"], confirmed.as_str());
        assert_eq!(router.get("/api/v1/calls/new").0, 404, "{code}: a refused call got a pod");
        assert_eq!(router.status()["active_calls"], 1, "{code}");
        assert_eq!(router.release("confirmed").0, 200);
    }
}

#[test]
fn a_full_redis_accepts_releases_confirmations_and_drains() {
    let server = RedisServer::start(&[]);
    let router = with_user(&server);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    router.allocate("released");
    let confirmed = start_call(&mut connection, "confirmed").pod().unwrap();
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
fn a_deferred_write_that_never_succeeds_does_not_block_recovery() {
    let server = RedisServer::start(&[]);
    let router = with_user(&server);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    let pod = start_call(&mut connection, "spoiled").pod().unwrap();
    let other = start_call(&mut connection, "confirmed").pod().unwrap();
    router.allocate("released");
    run(&mut redis, &["DEL voice:call:spoiled", "LPUSH voice:call:spoiled x"]);
    run(&mut redis, &["CLIENT PAUSE 1500 ALL"]);
    stream_started(&mut connection, "spoiled", &pod);
    stream_started(&mut connection, "confirmed", &other);
    assert_eq!(router.release("released").0, 503);
    eventually(Duration::from_secs(10), "the circuit breaker closes", || {
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

#[test]
fn a_command_denied_inside_the_functions_is_one_outage() {
    for denied in ["zadd", "xadd", "hmget"] {
        let server = RedisServer::start(&[]);
        let router = with_user(&server);
        let mut redis = server.connection();
        run(&mut redis, &[&format!("ACL SETUSER router -{denied}")]);
        let down = (200, json!({"status": "ready", "store": "down", "reason": "NOPERM"}));
        // The outage begins with the first operation that needs the command; a call may be
        // allocated before.
        let mut was_allocated = false;
        eventually(Duration::from_secs(5), denied, || {
            was_allocated |= router.post("/api/v1/allocate", json!({"call_sid": "new"})).0 == 200;
            ready(&router) == down
        });
        let before = failed_probes(&router);
        eventually(Duration::from_secs(5), "repeated probes fail", || {
            assert_eq!(ready(&router), down, "{denied}: the store is used without its permissions");
            failed_probes(&router) >= before + 5
        });
        run(&mut redis, &[&format!("ACL SETUSER router +{denied}")]);
        let up = (200, json!({"status": "ready", "store": "up"}));
        eventually(Duration::from_secs(10), denied, || ready(&router) == up);
        let found = router.get("/api/v1/calls/new").0;
        assert_eq!(found == 200, was_allocated, "{denied}: the response was wrong");
        router.allocate("new");
        assert_eq!(router.release("new").0, 200);
    }
}

#[test]
fn a_denied_command_loses_no_index_and_allocates_no_second_pod() {
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
    let (status, response) = router.post("/api/v1/drain", json!({"pod_name": "voice-agent-1"}));
    assert_eq!(status, 503, "{response}");
    assert_eq!(count(&mut redis, "ZCARD", "voice:draining"), 1, "the index of drains was replaced");
    assert_eq!(count(&mut redis, "XLEN", "voice:events"), events, "the event log was replaced");
    run(&mut redis, &["ACL SETUSER router +zadd +xadd +zrangebyscore"]);
    let up = (200, json!({"status": "ready", "store": "up"}));
    eventually(Duration::from_secs(10), "the circuit breaker closes", || ready(&router) == up);
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
    run(&mut redis, &["ACL SETUSER router -scard"]);
    eventually(Duration::from_secs(10), "the status is refused", || {
        let (status, response) = router.get("/api/v1/status");
        assert!(status == 503 || response["pools"]["gold"]["active_calls"] == 1, "{response}");
        status == 503
    });
    run(&mut redis, &["ACL SETUSER router +scard"]);
    eventually(Duration::from_secs(10), "the status can be read", || {
        router.get("/api/v1/status").0 == 200
    });
}
