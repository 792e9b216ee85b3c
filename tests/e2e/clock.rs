//! Wall clocks that are stepped, under a router and under Redis.

use std::{process::Stdio, sync::Arc, time::Duration};

use fleet::{
    Allocate, Edit, Hold, RefusalReason, Release, Renew,
    tiers::{DocumentSource, Tiers},
};
use serde_json::{Value, json};
use store::{Redis, Store};

use testkit::{
    Router, WITHOUT_GATEWAY,
    clock::WallClock,
    eventually, free_port,
    provider::{CallDocument, PUBLIC_URL, follow_redirect, start_call},
    redis::{RedisServer, WRITER, ready_pod, store_config, unix_millis},
    scratch,
};

const HOUR: i64 = 3_600;
const HOUR_MS: u64 = 3_600_000;
const LEASE: u64 = 60_000;
/// Generous bound for deadlines of one to three seconds, for an overloaded machine.
const TIMEOUT: Duration = Duration::from_secs(20);

fn start(clock: &WallClock, settings: &[(&str, &str)]) -> Router {
    let shim = clock.settings();
    let mut all: Vec<(&str, &str)> =
        shim.iter().map(|(name, value)| (*name, value.as_str())).collect();
    all.extend([("TIER_CONFIG", r#"{"gold": 3}"#), ("LOG_LEVEL", "off")]);
    all.extend(settings);
    Router::start(&all)
}

fn seconds_from_now(unix_seconds: &Value) -> i64 {
    unix_seconds.as_i64().unwrap() - (unix_millis() / 1_000) as i64
}

fn is_live(router: &Router, call: &str) -> bool {
    router.get(&format!("/api/v1/calls/{call}")).0 == 200
}

fn is_draining(router: &Router, pod: &str) -> bool {
    router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"] == true
}

#[test]
fn leases_and_drains_expire_after_the_clock_is_set_back() {
    let clock = WallClock::ahead(HOUR);
    let router = start(&clock, &[("LEASE_TTL", "2s"), ("DRAINING_TTL", "2s"), WITHOUT_GATEWAY]);
    router.allocate("CA1");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": "voice-agent-2"})).0, 200);
    clock.set_ahead(0);
    eventually(TIMEOUT, "the lease expires", || !is_live(&router, "CA1"));
    eventually(TIMEOUT, "the drain expires", || !is_draining(&router, "voice-agent-2"));
}

#[test]
fn the_rate_limit_recovers_after_the_clock_is_set_back() {
    let clock = WallClock::ahead(HOUR);
    let router = start(&clock, &[("TIER_CONFIG", r#"{"gold": 300}"#)]);
    router.put("/api/v1/merchants/acme", r#"{"max_rate": 1}"#);
    let mut number = 0;
    let mut allocate = || {
        number += 1;
        let body = json!({"call_sid": format!("CA{number}"), "merchant_id": "acme"});
        router.post("/api/v1/allocate", body).0 == 200
    };
    assert!(allocate());
    clock.set_ahead(0);
    eventually(TIMEOUT, "the merchant may start its next call", &mut allocate);
    eventually(TIMEOUT, "the merchant may start another call", &mut allocate);
}

#[test]
fn the_hold_time_expires_after_the_clock_is_set_back() {
    let clock = WallClock::ahead(HOUR);
    let router = start(
        &clock,
        &[
            ("PUBLIC_URL", PUBLIC_URL),
            ("HOLD_TIME", "2s"),
            ("HOLD_POLL", "1s"),
            ("TIER_CONFIG", r#"{"gold": 1}"#),
        ],
    );
    router.allocate("CA1");
    let mut document = start_call(&mut router.connect(), "CA2");
    assert!(document.is_hold());
    clock.set_ahead(0);
    eventually(TIMEOUT, "the hold time expires", || {
        document = follow_redirect(&router, "CA2", &document);
        matches!(document, CallDocument::HangUp(_))
    });
}

#[test]
fn a_clock_set_forward_ends_nothing_early() {
    let clock = WallClock::ahead(0);
    let router = start(&clock, &[("LEASE_TTL", "1m"), ("DRAINING_TTL", "1m"), WITHOUT_GATEWAY]);
    router.allocate("CA1");
    router.post("/api/v1/drain", json!({"pod_name": "voice-agent-2"}));
    clock.set_ahead(HOUR);
    let mut lease = 0;
    eventually(TIMEOUT, "times follow the wall clock", || {
        let (status, call) = router.get("/api/v1/calls/CA1");
        assert_eq!(status, 200, "{call}");
        assert!(is_draining(&router, "voice-agent-2"));
        lease = seconds_from_now(&call["lease_expires_at"]);
        lease > HOUR
    });
    assert!(lease <= HOUR + 60, "{lease}");
    let pod = router.get("/api/v1/pod/voice-agent-2").1;
    let drain = seconds_from_now(&pod["draining_until"]);
    assert!((HOUR..=HOUR + 60).contains(&drain), "{pod}");
}

#[test]
fn deadlines_are_moved_by_a_restart_after_the_clock_is_set_back() {
    let directory = scratch();
    let clock = WallClock::ahead(HOUR);
    let settings = [
        ("DATA_DIR", directory.to_str().unwrap()),
        ("LEASE_TTL", "6s"),
        ("DRAINING_TTL", "6s"),
        WITHOUT_GATEWAY,
        ("EVENTS", "off"),
    ];
    let router = start(&clock, &settings);
    router.allocate("CA1");
    // A renewal is the only change that contains a deadline but no timestamp.
    assert_eq!(router.post("/api/v1/renew", json!({"call_sid": "CA1"})).0, 200);
    router.post("/api/v1/drain", json!({"pod_name": "voice-agent-2"}));
    router.signal("KILL");
    clock.set_ahead(0);
    let router = router.kill_and_restart();
    let (status, call) = router.get("/api/v1/calls/CA1");
    if status == 200 {
        let left = seconds_from_now(&call["lease_expires_at"]);
        assert!(left <= 6, "a lease of 6 s ends in {left} s");
    }
    eventually(TIMEOUT, "the lease expires", || !is_live(&router, "CA1"));
    eventually(TIMEOUT, "the drain expires", || !is_draining(&router, "voice-agent-2"));
}

#[test]
fn event_ids_stay_ordered_when_the_clock_is_set_back() {
    let directory = scratch();
    let clock = WallClock::ahead(HOUR);
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let mut settings: Vec<(&str, String)> = clock.settings().to_vec();
    settings.extend([
        ("HTTP_PORT", api),
        ("METRICS_PORT", metrics),
        ("DATA_DIR", directory.to_str().unwrap().to_owned()),
        ("LOG_LEVEL", "off".to_owned()),
    ]);
    let settings: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut router = Router::start_with(&settings, Stdio::null());
    router.allocate("before");
    clock.set_ahead(0);
    let events = |router: &Router| -> Vec<Value> {
        let response = router.get("/api/v1/events?limit=500").1;
        response["events"].as_array().unwrap().clone()
    };
    eventually(TIMEOUT, "new events have the new wall-clock time", || {
        router.release("after");
        router.allocate("after");
        let latest = events(&router)[0]["at"].as_i64().unwrap();
        (latest - unix_millis() as i64).abs() < 5_000
    });
    for is_restarted in [false, true] {
        if is_restarted {
            router = router.kill_and_restart();
            router.allocate("later");
        }
        let listed = events(&router);
        let calls: Vec<&str> =
            listed.iter().rev().filter_map(|event| event["call_sid"].as_str()).collect();
        assert_eq!(calls[..2], ["before", "after"], "events are in causal order");
        let ids: Vec<(u64, u64)> = listed.iter().map(id).collect();
        assert!(ids.is_sorted_by(|a, b| a > b), "ids increase: {ids:?}");
        let latest = listed[0]["at"].as_i64().unwrap();
        assert!((latest - unix_millis() as i64).abs() < 10_000, "{}", listed[0]);
    }
}

fn id(event: &Value) -> (u64, u64) {
    let (at, number) = event["id"].as_str().unwrap().split_once('-').unwrap();
    (at.parse().unwrap(), number.parse().unwrap())
}

#[test]
fn calls_are_served_while_the_clock_of_redis_is_stepped() {
    let clock = WallClock::ahead(0);
    let server = RedisServer::with_clock(&clock);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 5}"#),
        ("LEASE_TTL", "3s"),
        WITHOUT_GATEWAY,
        ("LOG_LEVEL", "off"),
    ]);
    router.allocate("CA1");
    for (number, ahead) in [-HOUR, HOUR, 0].into_iter().enumerate() {
        clock.set_ahead(ahead);
        router.allocate(&format!("step-{number}"));
        router.allocate(&format!("next-{number}"));
        eventually(TIMEOUT, "all leases expire", || router.status()["active_calls"] == 0);
    }
}

/// A Redis with a frozen clock, a store with pods in one exclusive tier, and the time.
async fn redis_with_frozen_clock(pods: usize) -> (RedisServer, Arc<Redis>, u64) {
    let now = unix_millis();
    let server = RedisServer::with_frozen_clock(now);
    let tiers = Tiers::parse(r#"{"gold": 9}"#, DocumentSource::Settings).unwrap().0;
    let mut config = store_config(&server, tiers);
    config.ttls.lease = LEASE;
    let store = Redis::start(config).unwrap();
    store.wait_until_available(Duration::from_secs(5)).await.unwrap();
    for pod in 0..pods {
        let name = format!("p{pod}").parse().unwrap();
        store.observe_pod(&name, &ready_pod(), WRITER).await.unwrap().unwrap();
    }
    (server, store, now)
}

fn request(call: &str, merchant: Option<&str>) -> Allocate {
    let merchant = merchant.map(|id| id.parse().unwrap());
    Allocate::new(call.parse().unwrap(), merchant, LEASE)
}

#[tokio::test]
async fn the_rate_limit_ignores_calls_from_before_a_backward_clock_step() {
    let (server, store, now) = redis_with_frozen_clock(5).await;
    let acme = "acme".parse().unwrap();
    store.set_merchant(&acme, Some(r#"{"max_rate": 2}"#), Edit::ANY).await.unwrap().unwrap();
    let allocate = async |call: &str| {
        store
            .allocate(&request(call, Some("acme")))
            .await
            .unwrap()
            .map_err(|refusal| refusal.reason)
    };
    assert!(allocate("A1").await.is_ok());
    assert!(allocate("A2").await.is_ok());
    assert!(allocate("A3").await.is_err());
    server.set_time(now - HOUR_MS);
    assert!(allocate("B1").await.is_ok());
    assert!(allocate("B2").await.is_ok());
    assert!(allocate("B3").await.is_err(), "two in the second after the step");
    server.set_time(now - HOUR_MS + 1_000);
    assert!(allocate("C1").await.is_ok());
    store.close().await;
}

const HOLD: Hold =
    Hold { time: 30_000, poll_timeout: 15_000, max_waiting: 9, max_waiting_per_merchant: 9 };

#[tokio::test]
async fn the_hold_time_restarts_after_the_redis_clock_is_set_back() {
    let (server, store, now) = redis_with_frozen_clock(1).await;
    assert!(store.allocate(&request("busy", None)).await.unwrap().is_ok());
    let until = async |call: &str| {
        let request = Allocate { hold: Some(HOLD), ..request(call, None) };
        match store.allocate(&request).await.unwrap().unwrap_err().reason {
            RefusalReason::Waiting { until, .. } => until,
            reason => panic!("{reason:?}"),
        }
    };
    assert_eq!(until("polling").await, now + 30_000);
    assert_eq!(until("silent").await, now + 30_000);
    store.sweep(1).await.unwrap();
    let then = now - HOUR_MS;
    server.set_time(then);
    assert_eq!(until("polling").await, then + 30_000, "the hold time restarts");
    assert_eq!(store.sweep(1).await.unwrap().max_count(), 0);
    for seconds in [10, 20, 29] {
        server.set_time(then + seconds * 1_000);
        assert_eq!(until("polling").await, then + 30_000);
        assert_eq!(store.sweep(9).await.unwrap().max_count(), 0);
    }
    server.set_time(then + 30_000);
    let swept = store.sweep(9).await.unwrap();
    let abandoned: Vec<&str> = swept.abandoned.iter().map(|it| it.call.as_str()).collect();
    assert_eq!(abandoned, ["silent"], "a call that does not poll loses its queue entry");
    let last = Allocate { hold: Some(HOLD), ..request("polling", None) };
    let reason = store.allocate(&last).await.unwrap().unwrap_err().reason;
    assert_eq!(reason, RefusalReason::HoldExpired { waited: 30_000 });
    store.close().await;
}

#[tokio::test]
async fn leases_restart_after_the_redis_clock_is_set_back() {
    let (server, store, now) = redis_with_frozen_clock(4).await;
    for call in ["early", "late", "never", "done"] {
        store.allocate(&request(call, None)).await.unwrap().unwrap();
    }
    let waits = Allocate { hold: Some(HOLD), ..request("handed", None) };
    store.allocate(&waits).await.unwrap().unwrap_err();
    store.release(&Release::new("done".parse().unwrap(), None)).await.unwrap().unwrap();
    store.sweep(1).await.unwrap();
    let then = now - HOUR_MS;
    let renew = async |call: &str| {
        let request = Renew { calls: vec![call.parse().unwrap()], pod: None, lease_ttl: LEASE };
        store.renew(&request).await.unwrap().until
    };
    server.set_time(then);
    assert_eq!(renew("early").await, then + LEASE, "renewed before any sweep");
    server.set_time(then + 1_000);
    for _ in 0..9 {
        assert_eq!(store.sweep(1).await.unwrap().max_count(), 0, "no lease expires early");
    }
    server.set_time(then + 20_000);
    assert_eq!(renew("late").await, then + 20_000 + LEASE);
    let ended = async || {
        let swept = store.sweep(9).await.unwrap();
        let mut ended: Vec<String> = swept.expired.iter().map(|it| it.call.to_string()).collect();
        ended.sort();
        ended
    };
    for (ms, expected) in [
        (LEASE, vec!["early"]),
        (1_000 + LEASE, vec!["handed", "never"]),
        (20_000 + LEASE, vec!["late"]),
    ] {
        server.set_time(then + ms - 1);
        assert!(ended().await.is_empty());
        server.set_time(then + ms);
        assert_eq!(ended().await, expected);
    }
    store.close().await;
}

#[tokio::test]
async fn leases_restart_if_the_redis_clock_is_set_back_before_a_sweep() {
    let (server, store, now) = redis_with_frozen_clock(1).await;
    store.allocate(&request("early", None)).await.unwrap().unwrap();
    let then = now - HOUR_MS;
    server.set_time(then);
    for _ in 0..2 {
        assert_eq!(store.sweep(9).await.unwrap().max_count(), 0, "no lease expires early");
    }
    server.set_time(then + LEASE);
    assert_eq!(store.sweep(9).await.unwrap().expired.len(), 1);
    store.close().await;
}

#[tokio::test]
async fn quarantines_end_when_the_redis_clock_is_set_back() {
    let (server, store, now) = redis_with_frozen_clock(5).await;
    let mut now = now;
    let quarantined = async || {
        let pods = store.pods().await.unwrap();
        pods.iter().any(|pod| pod.quarantined_until.is_some())
    };
    let mut number = 0;
    while !quarantined().await {
        number += 1;
        assert!(number < 100, "no pod is in quarantine");
        let call = format!("C{number}");
        let request = Allocate { provisional: true, lease_ttl: 10, ..request(&call, None) };
        store.allocate(&request).await.unwrap().unwrap();
        now += 11;
        server.set_time(now);
        store.sweep(100).await.unwrap();
    }
    server.set_time(now - HOUR_MS);
    assert_eq!(store.sweep(100).await.unwrap().restored.len(), 1);
    assert!(!quarantined().await);
    store.close().await;
}

#[tokio::test]
async fn a_backward_step_of_the_redis_clock_is_detected_by_the_next_reply() {
    let (server, store, now) = redis_with_frozen_clock(0).await;
    store.status().await.unwrap();
    assert!(store.now() >= now);
    server.set_time(now - HOUR_MS);
    store.status().await.unwrap();
    // The router adds the time elapsed on its monotonic clock.
    let ahead = store.now() as i64 - ((now - HOUR_MS) as i64);
    assert!((0..60_000).contains(&ahead), "{ahead} ms ahead of Redis");
    store.close().await;
}
