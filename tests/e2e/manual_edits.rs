//! Manual changes in Redis: with redis-cli, in the tier document; and data of the older router.

use std::{collections::HashSet, time::Duration};

use redis::Commands;
use serde_json::json;

use crate::shared_redis::TIERS;
use testkit::replicas;
use testkit::{Router, eventually, redis::RedisServer};

#[test]
fn an_error_names_a_record_of_the_wrong_type_and_nothing_is_written() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    let mut plain = server.connection();
    router.allocate("CA0");
    let free: usize = plain.scard("voice:pool:gold:available").unwrap();
    let _: () = plain.set("voice:call:CA9", "oops").unwrap();
    for path in ["/api/v1/allocate", "/api/v1/release"] {
        let (status, answer) = router.post(path, json!({"call_sid": "CA9"}));
        assert_eq!(status, 500, "{path}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains("voice:call:CA9: WRONGTYPE"), "{path}: {answer}");
    }
    assert_eq!(plain.get::<_, String>("voice:call:CA9").unwrap(), "oops");
    assert_eq!(plain.scard::<_, usize>("voice:pool:gold:available").unwrap(), free);
    assert_eq!(plain.zrange::<_, Vec<String>>("voice:calls", 0, -1).unwrap(), ["CA0"]);
}

#[test]
fn manual_changes_are_applied_or_repaired() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("CLEANUP_INTERVAL", "500ms"),
    ]);
    let mut plain = server.connection();
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    // A busy pod in the index is not allocated, and is removed from it.
    let _: () = plain.sadd("voice:pool:gold:available", &pod).unwrap();
    let _: () = plain.sadd("voice:pool:gold:available", "unknown").unwrap();
    let others: HashSet<String> = ["CA2", "CA3"]
        .map(|call| router.allocate(call)["pod_name"].as_str().unwrap().to_owned())
        .into();
    assert!(!others.contains(&pod));
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA4"})).0, 503);
    eventually(Duration::from_secs(3), "the index is repaired", || {
        plain.scard::<_, usize>("voice:pool:gold:available").unwrap() == 0
    });
    // Deleting its record ends a call.
    let _: () = plain.del("voice:call:CA1").unwrap();
    eventually(Duration::from_secs(3), "the pod is free", || {
        plain.sismember("voice:pool:gold:available", &pod).unwrap()
    });
    assert_eq!(router.status()["active_calls"], 2);
    // Setting a draining mark drains a pod.
    let _: () = plain.set_ex(format!("voice:pod:draining:{pod}"), "true", 600).unwrap();
    let (status, refusal) = router.post("/api/v1/allocate", json!({"call_sid": "CA5"}));
    assert_eq!(status, 503, "{refusal}");
    eventually(Duration::from_secs(3), "the drain is indexed", || {
        plain.zscore::<_, _, Option<f64>>("voice:draining", &pod).unwrap().is_some()
    });
    router.post("/api/v1/undrain", json!({"pod_name": pod}));
    router.allocate("CA5");
    router.release("CA5");
    // An index of the wrong type is replaced.
    let _: () = plain.set("voice:pool:gold:available", "oops").unwrap();
    eventually(Duration::from_secs(3), "the index is a set again", || {
        plain.sismember("voice:pool:gold:available", &pod).unwrap_or(false)
    });
}

#[test]
fn a_changed_tier_document_is_applied_and_a_malformed_one_is_not() {
    let server = RedisServer::start(&[]);
    let settings = [("REDIS_URL", server.url()), ("TIER_CONFIG", r#"{"gold": 3}"#.into())];
    let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
    let (router, log) = Router::start_logged(&settings);
    let mut plain = server.connection();
    router.allocate("CA1");
    let _: () = plain
        .set(
            "voice:tier:config",
            r#"{"tiers": {"gold": {"type": "shared", "target": 3, "max_concurrent": 2}}}"#,
        )
        .unwrap();
    eventually(Duration::from_secs(15), "gold is shared", || {
        router.status()["pools"]["gold"]["type"] == "shared"
    });
    eventually(Duration::from_secs(5), "its pods are placed", || {
        router.status()["pools"]["gold"]["free_slots"] == 5
    });
    let kind: String =
        redis::cmd("TYPE").arg("voice:pool:gold:available").query(&mut plain).unwrap();
    assert_eq!(kind, "zset");
    let _: () = plain.set("voice:tier:config", "{nonsense").unwrap();
    log.wait_for("the tier document in Redis cannot be used", 0);
    assert_eq!(router.status()["pools"]["gold"]["type"], "shared");
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn the_tier_document_in_redis_precedes_tier_config() {
    let server = RedisServer::start(&[]);
    let _: () = server
        .connection()
        .set("voice:tier:config", r#"{"tiers": {"silver": {"target": 2}}}"#)
        .unwrap();
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    assert_eq!(router.allocate("CA1")["source_pool"], "pool:silver");
}

#[test]
fn the_data_of_the_older_router_is_adopted() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    let lines = [
        "SADD voice:pool:gold:assigned a b e",
        "SADD voice:pool:basic:assigned c",
        "SADD voice:merchant:acme:assigned d",
        "SADD voice:pool:gold:available b",
        "ZADD voice:pool:basic:available 2 c",
        "SADD voice:merchant:acme:pods d",
        "SET voice:pod:tier:a gold",
        "SET voice:pod:tier:b gold",
        "SET voice:pod:tier:c basic",
        "SET voice:pod:tier:d merchant:acme",
        "SET voice:pod:tier:e gold",
        "SET voice:pod:draining:e true EX 300",
        r#"HSET voice:pod:metadata a {"tier":"gold","name":"a"} b {"tier":"gold","name":"b"} c {"tier":"basic","name":"c"} d {"tier":"merchant:acme","name":"d"} e {"tier":"gold","name":"e"}"#,
        "HSET voice:pod:a status allocated allocated_call_sid live allocated_at 1739280000 source_pool pool:gold",
        "HSET voice:call:live pod_name a source_pool pool:gold merchant_id shop allocated_at 1739280000",
        "SET voice:lease:a live EX 500",
        "HSET voice:call:stale pod_name b source_pool pool:gold merchant_id shop allocated_at 1739280000",
        "HSET voice:call:s1 pod_name c source_pool pool:basic merchant_id shop allocated_at 1739280000",
        "HSET voice:call:s2 pod_name c source_pool pool:basic merchant_id shop allocated_at 1739280000",
        "SET voice:lease:c s2 EX 500",
        "HSET voice:call:locked _lock 1",
    ];
    for line in lines {
        let mut words = line.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        for word in words {
            command.arg(word);
        }
        command.exec(&mut plain).unwrap();
    }
    let tiers = r#"{"tiers": {"gold": {"target": 3}, "basic": {"type": "shared", "target": 1, "max_concurrent": 3}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#;
    let url = server.url();
    let pods = "a=10.0.0.1:8000,b=10.0.0.2:8000,c=10.0.0.3:8000,d=10.0.0.4:8000,e=10.0.0.5:8000";
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", tiers),
        ("PODS", pods),
        ("VOICE_AGENT_BASE_URL", "wss://v.example.com"),
    ]);
    let status = router.status();
    assert_eq!(status["active_calls"], 3, "{status}");
    assert_eq!(router.get("/api/v1/calls/live").1["pod_name"], "a");
    assert_eq!(router.get("/api/v1/calls/stale").0, 404);
    assert_eq!(router.get("/api/v1/calls/locked").0, 404);
    assert_eq!(router.get("/api/v1/pod/e").1["is_draining"], true);
    assert_eq!(router.get("/api/v1/pod/a").1["tier"], "gold");
    assert_eq!(router.allocate("CA1")["pod_name"], "b", "the only free gold pod");
    assert_eq!(router.allocate("CA2")["pod_name"], "c", "it has one free slot");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
    for call in ["live", "s1", "s2"] {
        assert_eq!(router.release(call).0, 200, "{call}");
    }
    assert_eq!(plain.get::<_, String>("voice:schema").unwrap(), "2");
}

#[test]
fn a_newer_schema_is_refused() {
    let server = RedisServer::start(&[]);
    let _: () = server.connection().set("voice:schema", "3").unwrap();
    let output = testkit::program(&[
        ("REDIS_URL", &server.url()),
        ("HTTP_PORT", "0"),
        ("METRICS_PORT", "0"),
        ("LOG_LEVEL", "off"),
    ])
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("use a newer release") && text.lines().count() == 1, "{text}");
}

#[test]
fn deleted_indexes_are_derived_again() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("CLEANUP_INTERVAL", "500ms"),
    ]);
    let mut plain = server.connection();
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    let _: () = plain.del("voice:pools").unwrap();
    let _: () = plain.del("voice:calls").unwrap();
    eventually(Duration::from_secs(3), "both are derived again", || {
        let status = router.status();
        status["active_calls"] == 1 && status["pools"]["gold"]["assigned"] == 3
    });
    let _: () = plain.del(format!("voice:pod:calls:{pod}")).unwrap();
    eventually(Duration::from_secs(3), "the index of the pod is derived again", || {
        plain.zcard::<_, usize>(format!("voice:pod:calls:{pod}")).unwrap() == 1
    });
    assert!(!plain.sismember::<_, _, bool>("voice:pool:gold:available", &pod).unwrap());
    let _: () = plain.sadd("voice:pools", "no pool").unwrap();
    eventually(Duration::from_secs(3), "the invalid pool name is removed", || {
        plain.scard::<_, usize>("voice:pools").unwrap() == 1
    });
    let _: () = plain.hset("voice:tiers", "gold", "junk").unwrap();
    eventually(Duration::from_secs(13), "the table is rewritten", || {
        plain.hget::<_, _, String>("voice:tiers", "gold").unwrap() != "junk"
    });
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn a_key_of_the_wrong_type_affects_no_other_call_or_pod() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let tiers = r#"{"basic": {"type": "shared", "target": 2, "max_concurrent": 5}}"#;
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", tiers),
        ("CLEANUP_INTERVAL", "500ms"),
    ]);
    let mut plain = server.connection();
    let _: () = plain.lpush("voice:lease:voice-agent-0", "oops").unwrap();
    let _: () = plain.set("voice:draining", "oops").unwrap();
    let _: () = plain.set("voice:pool:basic:assigned", "oops").unwrap();
    router.allocate("CA1");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": "voice-agent-1"})).0, 200);
    assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-1"})).0, 200);
    eventually(Duration::from_secs(3), "the indexes are right again", || {
        let mut kind = |key: &str| redis::cmd("TYPE").arg(key).query::<String>(&mut plain).unwrap();
        kind("voice:pool:basic:assigned") == "set" && kind("voice:lease:voice-agent-0") != "list"
    });
    // The calls of one pod cannot be read: calls go to the other pod.
    let _: () = plain.set("voice:pod:calls:voice-agent-0", "oops").unwrap();
    for call in 0..4 {
        assert_eq!(router.allocate(&format!("CB{call}"))["pod_name"], "voice-agent-1");
    }
    let _: () = plain.sadd("voice:pool:basic:assigned", "unknown").unwrap();
    eventually(Duration::from_secs(3), "the audit continues", || {
        !plain.sismember::<_, _, bool>("voice:pool:basic:assigned", "unknown").unwrap()
    });
    let _: () = plain.del("voice:pod:calls:voice-agent-0").unwrap();
    let pod = router.get("/api/v1/calls/CA1").1["pod_name"].as_str().unwrap().to_owned();
    let calls_key = format!("voice:pod:calls:{pod}");
    eventually(Duration::from_secs(3), "the call is in the index of its pod", || {
        plain.zscore::<_, _, Option<f64>>(&calls_key, "CA1").unwrap().is_some()
    });
}

#[test]
fn a_manually_extended_drain_lasts_longer() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("DRAINING_TTL", "1s"),
    ]);
    for pod in ["voice-agent-0", "voice-agent-1"] {
        assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
    }
    let _: () =
        server.connection().set_ex("voice:pod:draining:voice-agent-0", "true", 600).unwrap();
    let is_draining =
        |pod: &str| router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"] == true;
    eventually(Duration::from_secs(4), "the other drain ends", || !is_draining("voice-agent-1"));
    assert!(is_draining("voice-agent-0"));
    assert_eq!(router.allocate("CA1")["pod_name"], "voice-agent-1");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
}

#[test]
fn a_router_starts_with_a_malformed_tier_document() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    let first = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    for bad in ["string", "hash"] {
        let _: () = plain.del("voice:tier:config").unwrap();
        match bad {
            "string" => plain.set::<_, _, ()>("voice:tier:config", "{oops").unwrap(),
            _ => plain.hset::<_, _, _, ()>("voice:tier:config", "a", "b").unwrap(),
        }
        let second = &replicas(&server, 1, r#"{"silver": 9}"#)[0];
        assert_eq!(
            second.get("/api/v1/tiers").1["tiers"]["gold"]["target"],
            3,
            "the tiers in force stay"
        );
        assert_eq!(first.allocate("CA1")["source_pool"], "pool:gold");
        first.release("CA1");
    }
}

#[test]
fn the_adoption_skips_malformed_data() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    let _: () = plain.sadd("voice:pool:gold:assigned", vec!["a", "Bad_Name", "metadata"]).unwrap();
    let _: () = plain.set("voice:pod:tier:a", "gold").unwrap();
    let _: () = plain.hset("voice:pod:metadata", "a", r#"{"tier":"gold","name":"a"}"#).unwrap();
    let _: () = plain.set("voice:call:weird", "x").unwrap();
    let fields =
        [("pod_name", "a"), ("source_pool", "pool:gold"), ("allocated_at", "2025-01-01T00:00:00Z")];
    let _: () = plain.hset_multiple("voice:call:live", &fields).unwrap();
    let _: () = plain.set_ex("voice:lease:a", "live", 300).unwrap();
    let url = server.url();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("PODS", "a=h:1"),
        ("VOICE_AGENT_BASE_URL", "wss://v"),
    ];
    let router = Router::start(&settings);
    assert_eq!(router.get("/api/v1/calls/live").1["pod_name"], "a");
    assert_eq!(router.status()["active_calls"], 1);
    assert_eq!(plain.get::<_, String>("voice:call:weird").unwrap(), "x");
    assert_eq!(router.release("live").0, 200);
}
