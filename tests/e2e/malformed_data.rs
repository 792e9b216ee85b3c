//! Malformed data in Redis: interrupted adoptions, wiped keys, keys and fields with invalid content.

use std::{
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use redis::{Commands, Connection};
use serde_json::json;

use testkit::replicas;
use testkit::{
    Router, WITHOUT_GATEWAY, eventually, free_port, proxy::FaultProxy, redis::RedisServer, scratch,
};

/// Runs commands, one per line, with words separated by spaces. Several are one transaction: a
/// router must not see a key between its deletion and its replacement. A single command is none,
/// because a full Redis does not queue commands.
pub(crate) fn run(redis: &mut Connection, lines: &[&str]) {
    let mut transaction = redis::pipe();
    if lines.len() > 1 {
        transaction.atomic();
    }
    for line in lines {
        let mut words = line.split(' ');
        let command = transaction.cmd(words.next().unwrap());
        words.for_each(|word| {
            command.arg(word);
        });
    }
    transaction.exec(redis).unwrap();
}

pub(crate) const OLDER: [&str; 10] = [
    "SADD voice:pool:gold:assigned a b",
    "SADD voice:pool:gold:available b",
    "SET voice:pod:tier:a gold",
    "SET voice:pod:tier:b gold",
    "HSET voice:pod:metadata a {\"tier\":\"gold\",\"name\":\"a\"} b {\"tier\":\"gold\",\"name\":\"b\"}",
    "HSET voice:pod:a status allocated allocated_call_sid live allocated_at 1739280000 source_pool pool:gold",
    "HSET voice:call:live pod_name a source_pool pool:gold merchant_id shop allocated_at 1739280000",
    "SET voice:lease:a live EX 500",
    // In milliseconds, as some release of the older router wrote it.
    "HSET voice:call:other pod_name b source_pool pool:gold merchant_id shop allocated_at 1739280000000",
    "SET voice:lease:b other EX 500",
];

fn older(server: &RedisServer, extra: &[(&str, &str)]) -> Router {
    let url = server.url();
    let mut settings = vec![
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PODS", "a=h:1,b=h:2"),
        ("VOICE_AGENT_BASE_URL", "wss://v"),
        ("CLEANUP_INTERVAL", "100ms"),
        ("LOG_LEVEL", "error"),
    ];
    settings.extend(extra);
    Router::start(&settings)
}

#[test]
fn an_audit_does_not_touch_data_before_its_adoption() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    run(&mut plain, &OLDER);
    // Another replica was killed during the adoption.
    run(
        &mut plain,
        &[
            "HSET voice:pod:a uid  ready 1",
            "HSET voice:pod:b uid  ready 1",
            "SET voice:adopting 1 PX 2000",
        ],
    );
    let _: () = plain.hset("voice:tiers", "gold", "exclusive 1 spread 2").unwrap();
    let _: () = plain.hset("voice:tiers", ":chain", "gold=exclusive:1:spread").unwrap();
    let router = older(&server, &[]);
    assert_eq!(router.status()["active_calls"], 2);
    for (call, pod) in [("live", "a"), ("other", "b")] {
        assert_eq!(router.get(&format!("/api/v1/calls/{call}")).1["pod_name"], pod);
    }
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "new"})).0, 503);
    assert_eq!(router.release("other").0, 200);
    assert_eq!(router.allocate("new")["pod_name"], "b");
}

#[test]
fn keys_of_the_wrong_type_do_not_prevent_an_adoption() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    run(&mut plain, &OLDER);
    run(
        &mut plain,
        &[
            "HSET voice:call:0 pod_name c source_pool pool:gold",
            "SET voice:pod:tier:c gold",
            "LPUSH voice:lease:c x",
            "SADD voice:pool:gold:assigned d",
            "LPUSH voice:pod:tier:d x",
            "SET voice:pool:basic:assigned x",
            "SET voice:tier:config {not-json",
        ],
    );
    let router = older(&server, &[]);
    assert_eq!(router.get("/api/v1/calls/live").1["pod_name"], "a");
    assert_eq!(router.status()["active_calls"], 2);
    assert_eq!(plain.get::<_, String>("voice:tier:config").unwrap(), "{not-json");
    assert_eq!(router.release("live").0, 200);
}

#[test]
fn a_change_of_tiers_in_a_wiped_redis_is_no_reason_for_an_adoption() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 2}"#)[0];
    let pod = router.allocate("CA1")["pod_name"].clone();
    let mut plain = server.connection();
    run(&mut plain, &["FLUSHALL"]);
    let (status, answer) = router.put("/api/v1/tiers", r#"{"gold": 3}"#);
    assert_eq!(status, 503, "{answer}");
    eventually(Duration::from_secs(3), "the call is registered again", || {
        let renew = json!({"pod_name": pod, "call_sids": ["CA1"]});
        router.post("/api/v1/renew", renew).1["registered"] == json!(["CA1"])
    });
    assert!(plain.hexists::<_, _, bool>("voice:tiers", ":trusting_until").unwrap());
}

#[test]
fn a_record_of_the_wrong_type_does_not_stop_the_sweep() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("LEASE_TTL", "1s"),
        WITHOUT_GATEWAY,
        ("CLEANUP_INTERVAL", "300ms"),
        ("LOG_LEVEL", "off"),
    ]);
    for call in ["CA1", "CA2", "CA3"] {
        router.allocate(call);
    }
    run(&mut server.connection(), &["DEL voice:call:CA1", "SET voice:call:CA1 junk"]);
    eventually(Duration::from_secs(5), "all leases end", || router.status()["active_calls"] == 0);
    eventually(Duration::from_secs(5), "all pods are free", || {
        router.status()["pools"]["gold"]["available"] == 3
    });
}

#[test]
fn a_record_of_the_wrong_type_affects_no_other_call_of_its_pod() {
    let server = RedisServer::start(&[]);
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 9}}"#;
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", tiers),
        ("CLEANUP_INTERVAL", "2s"),
        ("LOG_LEVEL", "error"),
    ]);
    let mut plain = server.connection();
    let pod = router.allocate("A")["pod_name"].as_str().unwrap().to_owned();
    router.allocate("B");
    let calls = format!("voice:pod:calls:{pod}");
    let _: () = plain.zadd(&calls, "B", 9_000_000_000_000u64).unwrap();
    run(&mut plain, &["DEL voice:call:B", "SET voice:call:B junk"]);
    router.allocate("C");
    assert_eq!(router.status()["active_calls"], 3);
    let renew = json!({"pod_name": pod, "call_sids": ["A", "B", "C"]});
    let (status, answer) = router.post("/api/v1/renew", renew);
    assert_eq!((status, &answer["renewed"]), (200, &json!(2)), "{answer}");
    assert_eq!(answer["unknown"][0], "B");
    assert_eq!(router.release("A").0, 200);
    assert_eq!(router.release("C").0, 200);
    let score: u64 = plain.zscore("voice:pool:basic:available", &pod).unwrap();
    assert_eq!(score, 1, "B, until its lease ends");
    run(&mut plain, &["DEL voice:call:B"]);
    eventually(Duration::from_secs(5), "the audit ends B", || router.status()["active_calls"] == 0);
}

#[test]
fn malformed_fields_of_a_record_do_not_fail_its_release() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    let mut plain = server.connection();
    for malformed in ["at 99999999999999", "at abc", "source_pool a/b", "allocated_at x"] {
        router.allocate("CA1");
        run(&mut plain, &[&format!("HSET voice:call:CA1 {malformed}")]);
        assert_eq!(router.allocate("CA1")["was_existing"], true, "{malformed}");
        assert_eq!(router.get("/api/v1/calls/CA1").0, 200, "{malformed}");
        assert_eq!(router.release("CA1").0, 200, "{malformed}");
    }
    router.allocate("CA1");
    run(&mut plain, &["HDEL voice:call:CA1 source_pool at"]);
    assert_eq!(router.allocate("CA1")["was_existing"], true);
    assert_eq!(router.release("CA1").1["released_to_pool"], "pool:gold");
    assert_eq!(router.status()["pools"]["gold"]["available"], 1);
}

#[test]
fn a_read_only_replica_is_an_outage_not_a_lack_of_pods() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    router.allocate("CA1");
    let mut plain = server.connection();
    run(&mut plain, &[&format!("REPLICAOF 127.0.0.1 {}", free_port())]);
    let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
    assert_eq!(status, 503);
    assert!(answer["error"].as_str().unwrap().contains("the store is unavailable"), "{answer}");
    run(&mut plain, &["REPLICAOF NO ONE"]);
    eventually(Duration::from_secs(3), "the store is available", || {
        router.get("/api/v1/calls/CA1").0 == 200
    });
}

#[test]
fn unresponsive_sentinels_are_skipped() {
    let primary = RedisServer::start(&[]);
    let (directory, port) = (scratch(), free_port());
    let file = directory.join("sentinel.conf");
    let settings = format!(
        "port {port}\ndir {}\nsentinel monitor voice 127.0.0.1 {} 1\n",
        directory.display(),
        primary.port
    );
    std::fs::write(&file, settings).unwrap();
    let _sentinel = RedisServer::start_raw(port, &[file.to_str().unwrap(), "--sentinel"]);
    let unresponsive = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports =
        unresponsive.each_ref().map(|unresponsive| unresponsive.local_addr().unwrap().port());
    let url = format!(
        "redis+sentinel://127.0.0.1:{},127.0.0.1:{},127.0.0.1:{},127.0.0.1:{port}/voice",
        ports[0], ports[1], ports[2]
    );
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    router.allocate("CA1");
    thread::sleep(Duration::from_millis(10));
    drop(unresponsive);
}

#[test]
fn corrupted_replies_cause_no_lasting_damage() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let (log, http, metrics) =
        (scratch().join("log"), free_port().to_string(), free_port().to_string());
    let router = Router::start_with(
        &[
            ("HTTP_PORT", &http),
            ("METRICS_PORT", &metrics),
            ("REDIS_URL", url.as_str()),
            ("TIER_CONFIG", r#"{"gold": 2}"#),
            ("PODS", "a=h:1,b=h:2"),
            ("VOICE_AGENT_BASE_URL", "wss://v"),
            ("CLEANUP_INTERVAL", "100ms"),
            ("LOG_LEVEL", "error"),
        ],
        std::fs::File::create(&log).unwrap().into(),
    );
    router.allocate("CA0");
    proxy.corrupt_replies(true);
    let (mut answers, started) = (0, Instant::now());
    // Requests on a broken connection are waited out, which takes time.
    for number in 0.. {
        let time = started.elapsed().as_secs();
        if time >= 2 && answers > 100 || time >= 100 {
            break;
        }
        let call = json!({"call_sid": format!("CA{}", number % 7), "pod_name": "a"});
        for path in ["allocate", "release", "renew", "drain", "undrain"] {
            let answer = router.post(&format!("/api/v1/{path}"), call.clone());
            answers += usize::from(answer.0 == 200);
        }
        for path in ["status", "pod-info/a", "calls/CA1", "tiers"] {
            router.get(&format!("/api/v1/{path}"));
        }
    }
    assert!(answers > 100, "only {answers} replies arrived intact");
    proxy.corrupt_replies(false);
    eventually(Duration::from_secs(5), "it serves calls again", || {
        for number in 0..7 {
            router.post("/api/v1/release", json!({"call_sid": format!("CA{number}")}));
        }
        router.post("/api/v1/undrain", json!({"pod_name": "a"}));
        let given: Vec<u16> = ["x", "y"]
            .map(|call| router.post("/api/v1/allocate", json!({"call_sid": call})).0)
            .into();
        for call in ["x", "y"] {
            router.post("/api/v1/release", json!({"call_sid": call}));
        }
        given == [200, 200]
    });
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("panicked"), "{text}");
}
