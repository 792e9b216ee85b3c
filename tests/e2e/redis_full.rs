//! A Redis that has reached `maxmemory`: operations that add records are refused, others work.

use std::{fs, time::Duration};

use redis::{Commands, Connection as Redis, cmd};
use serde_json::{Value, json};

use testkit::cluster::TIMES;
use testkit::{
    Router, WITHOUT_GATEWAY, eventually,
    kube::FakeKube,
    provider::{CallDocument, PUBLIC_URL, follow_redirect, start_call},
    redis::RedisServer,
    scratch,
};

const SECOND: Duration = Duration::from_secs(1);

fn fill(redis: &mut Redis) {
    cmd("CONFIG").arg("SET").arg("maxmemory").arg("1").exec(redis).unwrap();
    let refused = cmd("SET").arg("more").arg("x").exec(redis).unwrap_err();
    assert_eq!(refused.code(), Some("OOM"));
}

fn make_room(redis: &mut Redis) {
    cmd("CONFIG").arg("SET").arg("maxmemory").arg("0").exec(redis).unwrap();
}

fn start(server: &RedisServer, extra: &[(&str, &str)]) -> Router {
    let url = server.url();
    let mut settings = vec![
        ("REDIS_URL", url.as_str()),
        ("PUBLIC_URL", PUBLIC_URL),
        ("HOLD_TIME", "60s"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("CLEANUP_INTERVAL", "100ms"),
        ("LOG_LEVEL", "off"),
    ];
    settings.extend(extra);
    Router::start(&settings)
}

fn delete(router: &Router, path: &str) -> u16 {
    router.connect().send("DELETE", path, &[], b"").status
}

/// Asserts that the response is a JSON error that names OOM.
fn assert_refused((status, response): (u16, Value)) {
    assert_eq!(status, 503, "{response}");
    assert!(response["error"].as_str().unwrap().contains("OOM"), "{response}");
}

#[test]
fn a_full_redis_serves_known_calls_and_refuses_new_ones() {
    let server = RedisServer::start(&[]);
    let router = start(&server, &[WITHOUT_GATEWAY]);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    router.allocate("known");
    let streamed = start_call(&mut connection, "streamed").pod().unwrap();
    router.allocate("third");
    let waits = start_call(&mut connection, "waits");
    assert!(waits.is_hold(), "{waits:?}");
    fill(&mut redis);

    assert_refused(router.post("/api/v1/allocate", json!({"call_sid": "new"})));
    assert_refused(router.post("/api/v1/allocate", json!({"call_sid": "new", "wait": "1s"})));
    let document = start_call(&mut connection, "new");
    assert!(matches!(document, CallDocument::HangUp(_)), "{document:?}");
    assert_eq!(router.get("/api/v1/calls/new").0, 404);

    assert_eq!(router.allocate("known")["was_existing"], true);
    let path = format!("/api/v1/twilio/stream-status?pod_name={streamed}");
    let body = "CallSid=streamed&StreamEvent=stream-started&StreamSid=MZ1";
    assert_eq!(connection.form(&path, body).status, 200);
    assert_eq!(router.get("/api/v1/calls/streamed").1["is_confirmed"], true);
    assert_eq!(router.post("/api/v1/renew", json!({"call_sid": "known"})).0, 200);
    let waits = follow_redirect(&router, "waits", &waits);
    assert!(waits.is_hold(), "{waits:?}");
    assert_eq!(router.release("known").0, 200);
    assert!(
        follow_redirect(&router, "waits", &waits).pod().is_some(),
        "the free pod was handed to it"
    );
    let body = "CallSid=streamed&CallStatus=completed";
    assert_eq!(connection.form("/api/v1/twilio/call-status", body).status, 200);
    assert_eq!(router.get("/api/v1/calls/streamed").0, 404);
    assert_eq!(connection.get("/ready").json().1["store"], "up");
    make_room(&mut redis);
    for call in ["waits", "third"] {
        assert_eq!(router.release(call).0, 200, "{call}");
    }
    eventually(5 * SECOND, "all pods are free", || {
        router.status()["pools"]["gold"]["available"] == 3
    });
}

#[test]
fn a_full_redis_ends_calls_whose_streams_ended() {
    let server = RedisServer::start(&[]);
    let settings = [("RETRY_ON_DISCONNECT", "2"), ("STREAM_STATUS", "on"), WITHOUT_GATEWAY];
    let router = start(&server, &settings);
    let (mut redis, mut connection) = (server.connection(), router.connect());
    let ended = start_call(&mut connection, "ended");
    let broken = start_call(&mut connection, "broken");
    fill(&mut redis);
    let pod = ended.pod();
    assert_eq!(
        router.post("/api/v1/release", json!({"call_sid": "ended", "pod_name": pod})).0,
        200
    );
    assert_eq!(
        follow_redirect(&router, "ended", &ended),
        CallDocument::HangUp(String::new()),
        "the call had ended"
    );
    // The pod of the broken call is free at once; the call is held for a new pod.
    let held = follow_redirect(&router, "broken", &broken);
    assert!(held.is_hold(), "{held:?}");
    assert_eq!(router.status()["pools"]["gold"]["available"], 3);
    let held = follow_redirect(&router, "broken", &held);
    assert!(held.is_hold(), "{held:?}");
    make_room(&mut redis);
    assert!(follow_redirect(&router, "broken", &held).pod().is_some());
    assert_eq!(router.release("broken").0, 200);
}

#[test]
fn a_full_redis_refuses_merchant_writes_and_allows_deletes() {
    let server = RedisServer::start(&[]);
    let router = start(&server, &[]);
    let mut redis = server.connection();
    assert_eq!(router.put("/api/v1/merchants/m1", r#"{"max_calls": 1}"#).0, 200);
    let before = router.get("/api/v1/merchants/m1");
    fill(&mut redis);
    assert_refused(router.put("/api/v1/merchants/m1", r#"{"max_calls": 2}"#));
    assert_refused(router.put("/api/v1/merchants/m2", r#"{"max_calls": 2}"#));
    assert_eq!(router.get("/api/v1/merchants/m1"), before);
    assert_eq!(router.get("/api/v1/merchants/m2").0, 404);
    assert_eq!(delete(&router, "/api/v1/merchants/m1"), 200);
    assert_eq!(router.get("/api/v1/merchants/m1").0, 404);
    make_room(&mut redis);
}

#[test]
fn a_full_redis_accepts_drains_tier_changes_and_pod_moves() {
    let server = RedisServer::start(&[]);
    let router = start(&server, &[]);
    let mut redis = server.connection();
    fill(&mut redis);
    let pod = json!({"pod_name": "voice-agent-0"});
    assert_eq!(router.post("/api/v1/drain", pod.clone()).0, 200);
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], true);
    assert_eq!(router.post("/api/v1/undrain", pod).0, 200);
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], false);
    let (status, response) = router.put("/api/v1/tiers", r#"{"gold": 1, "silver": 2}"#);
    assert_eq!(status, 200, "{response}");
    eventually(5 * SECOND, "pods are moved to the new tier", || {
        router.status()["pools"]["silver"]["available"] == 2
    });
    make_room(&mut redis);
}

#[test]
fn a_full_redis_allows_sweeps_audits_and_pod_changes() {
    let server = RedisServer::start(&[]);
    let pods = scratch().join("pods");
    fs::write(&pods, "a=h:1\nb=h:2\n").unwrap();
    let settings = [
        ("PODS_FILE", pods.to_str().unwrap()),
        WITHOUT_GATEWAY,
        ("CONNECT_TIMEOUT", "2s"),
        ("RECONCILE_INTERVAL", "300ms"),
    ];
    let router = start(&server, &settings);
    let mut redis = server.connection();
    let unconfirmed = start_call(&mut router.connect(), "unconfirmed").pod().unwrap();
    fill(&mut redis);
    let _: i64 = redis.srem("voice:pool:gold:assigned", &unconfirmed).unwrap();
    eventually(5 * SECOND, "the audit repairs the index", || {
        redis.sismember("voice:pool:gold:assigned", &unconfirmed).unwrap()
    });
    eventually(10 * SECOND, "the sweep ends a call whose stream never started", || {
        router.get("/api/v1/calls/unconfirmed").0 == 404
    });
    fs::write(&pods, "b=h:2\nc=h:3\n").unwrap();
    eventually(5 * SECOND, "one pod is added, one removed", || {
        router.get("/api/v1/pod/c").0 == 200 && router.get("/api/v1/pod/a").0 == 404
    });
    make_room(&mut redis);
}

#[test]
fn a_leader_takes_over_in_a_full_redis() {
    let (server, kube) = (RedisServer::start(&[]), FakeKube::start());
    kube.add("voice-agent-7");
    let url = server.url();
    let mut settings = vec![
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        WITHOUT_GATEWAY,
        ("KUBECONFIG", kube.config.to_str().unwrap()),
        ("LOG_LEVEL", "off"),
    ];
    settings.extend(TIMES);
    let first = Router::start(&settings);
    eventually(10 * SECOND, "the pod is known", || first.get("/api/v1/pod/voice-agent-7").0 == 200);
    let mut redis = server.connection();
    let epoch: u64 = redis.get("voice:leader:epoch").unwrap();
    fill(&mut redis);
    drop(first);
    let second = Router::start(&settings);
    kube.add("voice-agent-8");
    eventually(10 * SECOND, "the new leader writes a pod", || {
        second.get("/api/v1/pod/voice-agent-8").0 == 200
    });
    assert!(redis.get::<_, u64>("voice:leader:epoch").unwrap() > epoch);
    make_room(&mut redis);
}
