//! Retry on disconnect without the media gateway: a call whose stream broke reconnects to another
//! pod.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{
    Router, WITHOUT_GATEWAY, eventually,
    kube::FakeKube,
    provider::{CallDocument, PUBLIC_URL, follow_redirect, pod_of, start_call},
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
/// Maximum number of tries per response: the router waits one second for the agent's release, and asks the
/// store every 100 ms.
const MAX_TRIES: u64 = 11;
const LOST: &str = "The connection to the agent was lost. Please call again.";
const SETTINGS: [(&str, &str); 6] = [
    ("PUBLIC_URL", PUBLIC_URL),
    ("RETRY_ON_DISCONNECT", "2"),
    ("STREAM_STATUS", "on"),
    WITHOUT_GATEWAY,
    ("TIER_CONFIG", r#"{"gold": 2}"#),
    ("LOG_LEVEL", "off"),
];

fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    testkit::each_store(&[&SETTINGS, extra].concat(), test);
}

fn send_callback(router: &Router, path: &str, sid: &str, event: &str) {
    let response = router.connect().form(path, &format!("CallSid={sid}&{event}"));
    assert_eq!(response.status, 200, "{}", response.text());
}

fn send_stream_stopped(router: &Router, sid: &str, pod: &str, pod_attempt: u32) {
    let path = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt={pod_attempt}");
    send_callback(router, &path, sid, "StreamEvent=stream-stopped");
}

fn release(router: &Router, sid: &str, pod: &str) -> u16 {
    router.post("/api/v1/release", json!({"call_sid": sid, "pod_name": pod})).0
}

/// The number of allocations that the store has answered.
fn answered_tries(router: &Router) -> u64 {
    router.metric(r#"smart_router_store_duration_seconds_count{operation="allocate"}"#)
}

/// The number of allocations that have failed because of the store.
fn failed_tries(router: &Router) -> u64 {
    router.metric(r#"smart_router_allocations_total{source_pool="",result="storage_error"}"#)
}

#[test]
fn a_call_whose_pod_died_reconnects_to_another_pod() {
    each_store(&[], |router| {
        let first = start_call(&mut router.connect(), "CA1");
        let dead = first.pod().unwrap();
        let next = first.next().unwrap();
        assert!(next.starts_with("/api/v1/twilio/after-stream?pod_name="), "{next}");
        assert!(next.contains("&attempt=1&flow=v2&template=order-confirmation"), "{next}");
        let started = Instant::now();
        let second = follow_redirect(router, "CA1", &first);
        let pod = second.pod().unwrap();
        assert!(started.elapsed() >= SECOND, "the router did not wait for a release of the agent");
        assert_ne!(pod, dead);
        assert_eq!(pod_of(router, "CA1"), Some(pod.clone()));
        let (_, found) = router.get("/api/v1/calls/CA1");
        assert_eq!(found["attempt"], 2, "{found}");
        assert_eq!(router.get(&format!("/api/v1/pod/{dead}")).1["calls"], json!([]));
        // A repeated request returns the same pod.
        assert_eq!(follow_redirect(router, "CA1", &first).pod(), Some(pod.clone()));
        // Late callbacks of the first pod attempt do not end the second.
        send_stream_stopped(router, "CA1", &dead, 1);
        send_stream_stopped(router, "CA1", &pod, 1);
        assert!(pod_of(router, "CA1").is_some());
        let metrics = router.connect().get("/metrics").text();
        assert!(metrics.contains("smart_router_rescued_total{source_pool=\"pool:gold\"} 1"));
        assert_eq!(release(router, "CA1", &pod), 200);
    });
}

#[test]
fn a_call_that_ended_properly_is_not_reconnected() {
    each_store(&[], |router| {
        let hang_up = CallDocument::HangUp(String::new());
        // Released before the stream ended.
        let document = start_call(&mut router.connect(), "CA1");
        assert_eq!(release(router, "CA1", &document.pod().unwrap()), 200);
        let before = answered_tries(router);
        assert_eq!(follow_redirect(router, "CA1", &document), hang_up);
        assert_eq!(answered_tries(router) - before, 1, "a released call needs no wait");
        // Released while the reconnect request waits.
        let document = start_call(&mut router.connect(), "CA2");
        let before = answered_tries(router);
        thread::scope(|scope| {
            scope.spawn(|| {
                eventually(SECOND, "the reconnect request waits", || {
                    answered_tries(router) > before + 1
                });
                assert_eq!(release(router, "CA2", &document.pod().unwrap()), 200);
            });
            assert_eq!(follow_redirect(router, "CA2", &document), hang_up);
        });
        // A release after the stream-stopped callback still ends the call.
        let document = start_call(&mut router.connect(), "CA3");
        let pod = document.pod().unwrap();
        send_stream_stopped(router, "CA3", &pod, 1);
        assert_eq!(pod_of(router, "CA3"), None);
        let before = answered_tries(router);
        thread::scope(|scope| {
            scope.spawn(|| {
                eventually(SECOND, "the reconnect request waits", || {
                    answered_tries(router) > before + 1
                });
                assert_eq!(release(router, "CA3", &pod), 404);
            });
            assert_eq!(follow_redirect(router, "CA3", &document), hang_up);
        });
        // The provider reports that the caller hung up.
        let document = start_call(&mut router.connect(), "CA4");
        send_callback(router, "/api/v1/twilio/call-status", "CA4", "CallStatus=completed");
        assert_eq!(follow_redirect(router, "CA4", &document), hang_up);
        assert_eq!(router.status()["active_calls"], 0);
    });
}

#[test]
fn a_call_reconnects_after_a_stream_stopped_callback() {
    each_store(&[], |router| {
        let document = start_call(&mut router.connect(), "CA1");
        send_stream_stopped(router, "CA1", &document.pod().unwrap(), 1);
        let second = follow_redirect(router, "CA1", &document);
        assert!(second.pod().is_some() && second.pod() != document.pod(), "{second:?}");
        assert_eq!(release(router, "CA1", &second.pod().unwrap()), 200);
    });
}

#[test]
fn reconnects_are_limited_and_may_reuse_the_only_pod() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        let mut document = start_call(&mut router.connect(), "CA1");
        let pod = document.pod();
        for pod_attempt in [2, 3] {
            document = follow_redirect(router, "CA1", &document);
            assert_eq!(document.pod(), pod, "it is the only pod");
            assert_eq!(router.get("/api/v1/calls/CA1").1["attempt"], pod_attempt);
            // A late callback of the previous pod attempt.
            send_stream_stopped(router, "CA1", pod.as_deref().unwrap(), pod_attempt - 1);
            assert_eq!(pod_of(router, "CA1"), pod);
        }
        assert_eq!(follow_redirect(router, "CA1", &document), CallDocument::HangUp(LOST.into()));
        assert_eq!(pod_of(router, "CA1"), None, "its pod is released");
        assert!(router.connect().get("/metrics").text().contains("smart_router_lost_total 1"));
    });
}

#[test]
fn a_reconnecting_call_may_wait_and_keeps_its_queue_position() {
    let hold = [("HOLD_TIME", "30s"), ("HOLD_POLL", "1s"), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    each_store(&hold, |router| {
        let document = start_call(&mut router.connect(), "CA1");
        let pod = document.pod().unwrap();
        assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
        let other = start_call(&mut router.connect(), "CA2");
        let held = follow_redirect(router, "CA1", &document);
        assert!(other.is_hold() && held.is_hold(), "{held:?}");
        // It keeps its position ahead of the other call.
        assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": pod})).0, 200);
        let second = follow_redirect(router, "CA1", &held);
        assert!(second.next().unwrap().contains("attempt=2"), "{second:?}");
        assert_eq!(release(router, "CA1", &pod), 200);
        assert!(follow_redirect(router, "CA2", &other).pod().is_some());
        assert_eq!(release(router, "CA2", &pod), 200);
    });
}

#[test]
fn a_pod_with_early_failures_is_quarantined() {
    let tiers = [("TIER_CONFIG", r#"{"gold": 5}"#), ("RETRY_ON_DISCONNECT", "5")];
    each_store(&tiers, |router| {
        for number in 0..4 {
            router.allocate(&format!("busy-{number}"));
        }
        let mut document = start_call(&mut router.connect(), "CA1");
        let bad = document.pod().unwrap();
        for _ in 0..2 {
            document = follow_redirect(router, "CA1", &document);
            assert_eq!(document.pod().as_ref(), Some(&bad));
        }
        assert!(
            follow_redirect(router, "CA1", &document).pod().is_none(),
            "three failures in a row quarantine the pod"
        );
        let (_, found) = router.get(&format!("/api/v1/pod/{bad}"));
        assert_eq!(found["is_quarantined"], true, "{found}");
        let pool = &router.status()["pools"]["gold"];
        assert_eq!((&pool["quarantined"], &pool["available"]), (&json!(1), &json!(0)), "{pool}");
        eventually(5 * SECOND, "the gauge is refreshed", || {
            let metrics = router.connect().get("/metrics").text();
            metrics.contains("smart_router_pool_quarantined_pods{tier=\"gold\"} 1")
        });
        // At most a fifth of the pods is quarantined: the next failing pod stays in service.
        let (_, freed) = router.release("busy-0");
        let second_bad = freed["pod_name"].as_str().unwrap().to_owned();
        let mut document = start_call(&mut router.connect(), "CA2");
        for _ in 0..4 {
            assert_eq!(document.pod().as_ref(), Some(&second_bad));
            document = follow_redirect(router, "CA2", &document);
        }
        let pod = document.pod().expect("the pod is not quarantined");
        assert_eq!(release(router, "CA2", &pod), 200);
        // An operator ends the quarantine.
        let (_, undrained) = router.post("/api/v1/undrain", json!({"pod_name": bad}));
        assert_eq!(undrained["was_quarantined"], true, "{undrained}");
        assert_eq!(router.get(&format!("/api/v1/pod/{bad}")).1["is_quarantined"], false);
        for number in 1..4 {
            assert_eq!(router.release(&format!("busy-{number}")).0, 200);
        }
    });
}

#[test]
fn a_call_of_a_replaced_pod_reconnects() {
    let kube = FakeKube::start();
    ["a", "b", "c"].iter().for_each(|pod| kube.add(pod));
    let cluster = [
        ("KUBECONFIG", kube.config.to_str().unwrap()),
        ("HTTP_BIND", "127.0.0.1"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
    ];
    each_store(&cluster, |router| {
        eventually(10 * SECOND, "the pods are known", || {
            router.status()["pools"]["gold"]["available"] == 3
        });
        let document = start_call(&mut router.connect(), "CA1");
        // Another pod with the same name.
        let pod = document.pod().unwrap();
        kube.delete(&pod);
        kube.add(&pod);
        eventually(5 * SECOND, "the calls of the old pod end", || pod_of(router, "CA1").is_none());
        let second = follow_redirect(router, "CA1", &document);
        assert!(second.pod().is_some() && second.pod() != document.pod(), "{second:?}");
        assert_eq!(release(router, "CA1", &second.pod().unwrap()), 200);
    });
}

#[test]
fn a_release_after_the_lease_expired_prevents_a_reconnect() {
    let short = [("LEASE_TTL", "2s"), ("CONNECT_TIMEOUT", "1s")];
    each_store(&short, |router| {
        let hang_up = CallDocument::HangUp(String::new());
        // The provisional call expires; then its agent releases it.
        let document = start_call(&mut router.connect(), "CA1");
        let pod = document.pod().unwrap();
        eventually(5 * SECOND, "the provisional call ends", || pod_of(router, "CA1").is_none());
        assert_eq!(release(router, "CA1", &pod), 404);
        assert_eq!(follow_redirect(router, "CA1", &document), hang_up);
        // The provider reports the end; a late stream start does not revive the call.
        let document = start_call(&mut router.connect(), "CA2");
        let pod = document.pod().unwrap();
        eventually(5 * SECOND, "the provisional call ends", || pod_of(router, "CA2").is_none());
        let started = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt=1");
        let other = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt=7");
        send_callback(router, &other, "CA2", "StreamEvent=stream-started");
        assert_eq!(pod_of(router, "CA2"), None, "the start belongs to another pod attempt");
        send_callback(router, "/api/v1/twilio/call-status", "CA2", "CallStatus=completed");
        send_callback(router, &started, "CA2", "StreamEvent=stream-started");
        assert_eq!(pod_of(router, "CA2"), None);
        assert_eq!(follow_redirect(router, "CA2", &document), hang_up);
    });
}

#[test]
fn after_stream_honours_limits_and_cannot_quarantine_a_pod() {
    let tiers = [("TIER_CONFIG", r#"{"gold": 5}"#)];
    each_store(&tiers, |router| {
        assert_eq!(router.put("/api/v1/merchants/none", r#"{"max_calls": 0}"#).0, 200);
        let mut connection = router.connect();
        let path = "/api/v1/twilio/after-stream?pod_name=voice-agent-0&merchant_id=none&attempt";
        let request = |connection: &mut _, sid: &str, path: &str| {
            testkit::provider::request_document(connection, sid, path)
        };
        assert!(request(&mut connection, "CA1", &format!("{path}=1")).pod().is_none());
        for pod_attempt in ["0", "-1", "101", "4294967295", "99999999999", "x"] {
            let document = request(&mut connection, "CA1", &format!("{path}={pod_attempt}"));
            assert!(
                matches!(document, CallDocument::HangUp(ref words) if words.contains("not valid"))
            );
        }
        let document = start_call(&mut connection, "CA2");
        let pod = document.pod().unwrap();
        send_stream_stopped(router, "CA2", &pod, 1);
        for _ in 0..4 {
            request(
                &mut connection,
                "CA2",
                &format!("/api/v1/twilio/after-stream?pod_name={pod}&attempt=9"),
            );
        }
        let (_, found) = router.get(&format!("/api/v1/pod/{pod}"));
        assert_eq!(found["is_quarantined"], false, "{found}");
    });
    // Without RETRY_ON_DISCONNECT the call is hung up.
    for no_retries in [WITHOUT_GATEWAY, ("RETRY_ON_DISCONNECT", "0")] {
        let router = Router::start(&[no_retries, ("LOG_LEVEL", "off")]);
        let document = testkit::provider::request_document(
            &mut router.connect(),
            "CA1",
            "/api/v1/twilio/after-stream?pod_name=a&attempt=1",
        );
        assert_eq!(document, CallDocument::HangUp(String::new()));
    }
}

#[test]
fn a_reconnect_during_an_outage_is_held_and_repeated() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut settings = SETTINGS.to_vec();
    settings.extend([("REDIS_URL", url.as_str()), ("HOLD_TIME", "30s"), ("HOLD_POLL", "1s")]);
    let router = Router::start(&settings);
    let document = start_call(&mut router.connect(), "CA1");
    let pod = document.pod().unwrap();
    server.signal("STOP");
    assert_eq!(release(&router, "CA1", &pod), 503);
    let held = follow_redirect(&router, "CA1", &document);
    assert!(held.next().unwrap().contains("/after-stream?pod_name="), "{held:?}");
    assert!(held.next().unwrap().contains("&attempt=1&waiting_since="), "{held:?}");
    server.signal("CONT");
    eventually(3 * SECOND, "the circuit breaker closes", || router.get("/api/v1/status").0 == 200);
    assert_eq!(
        follow_redirect(&router, "CA1", &held),
        CallDocument::HangUp(String::new()),
        "the call was released"
    );
}

/// I8: every webhook gets a response within two seconds, whenever Redis stalls. Besides the second
/// for the agent's release, it may take one timeout of the store, which is shorter than a second.
#[test]
fn a_reconnect_waits_for_one_timeout_of_the_store_while_redis_stalls() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[&SETTINGS[..], &[("REDIS_URL", &url)]].concat());
    let mut stats = server.connection();
    let mut function_calls = move || -> usize {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut stats).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    };
    // Redis stalls after this number of function calls; in the last case it does not.
    for stall_after in [1, 4, 7, 9, 10, 11, usize::MAX] {
        let sid = format!("CA{stall_after}");
        let document = start_call(&mut router.connect(), &sid);
        let (answered, failed) = (answered_tries(&router), failed_tries(&router));
        thread::scope(|scope| {
            let response = scope.spawn(|| follow_redirect(&router, &sid, &document));
            let limit = function_calls().saturating_add(stall_after);
            while !response.is_finished() && function_calls() < limit {
                thread::sleep(Duration::from_millis(5));
            }
            server.signal("STOP");
            let _ = response.join().unwrap();
        });
        let failed = failed_tries(&router) - failed;
        let tries = answered_tries(&router) - answered + failed;
        server.signal("CONT");
        assert!(failed <= 1, "stalled after {stall_after} function calls: {failed} timeouts");
        assert!(tries <= MAX_TRIES, "stalled after {stall_after} function calls: {tries} tries");
        eventually(10 * SECOND, "the circuit breaker closes", || {
            router.get("/api/v1/status").0 == 200
        });
        router.release(&sid);
    }
}
