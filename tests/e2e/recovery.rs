//! Recovery after an outage, with many calls and milliseconds of latency to Redis.

use std::{thread, time::Duration};

use serde_json::json;

use testkit::{
    Router, eventually,
    provider::{CallDocument, PUBLIC_URL, start_call},
    proxy::FaultProxy,
    redis::RedisServer,
};

const CALLS: usize = 1_000;
const BUSY_PODS: usize = 3;

/// A Redis with a round-trip time of three milliseconds.
fn distant_redis() -> (RedisServer, FaultProxy, String) {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    proxy.set_latency(Duration::from_micros(1_500));
    let url = format!("redis://{}", proxy.address);
    (server, proxy, url)
}

/// Starts calls `c0`, `c1`, … through the Twilio webhook over eight connections. A call that is
/// refused because the machine is overloaded is repeated.
fn start_calls(router: &Router, count: usize) {
    thread::scope(|scope| {
        for client in 0..8 {
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in (client..count).step_by(8) {
                    let sid = format!("c{number}");
                    while matches!(start_call(&mut connection, &sid), CallDocument::HangUp(_)) {}
                }
            });
        }
    });
}

/// Stalls Redis for longer than the request timeout, so that the circuit breaker opens.
fn stall(server: &RedisServer, router: &Router) {
    let mut redis = server.connection();
    redis::cmd("CLIENT").arg(("PAUSE", 1_500, "ALL")).exec(&mut redis).unwrap();
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "stalled"})).0, 503);
}

fn is_store_up(router: &Router) -> bool {
    router.connect().get("/ready").json().1["store"] == "up"
}

#[test]
fn recovery_ends_with_a_thousand_waiting_calls() {
    let (server, _proxy, url) = distant_redis();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("PUBLIC_URL", PUBLIC_URL),
        ("HOLD_TIME", "5m"),
        ("HOLD_POLL", "1m"),
        ("HOLD_MAX", "2000"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("LOG_LEVEL", "off"),
    ];
    let mut router = Router::start(&settings);
    (0..BUSY_PODS).for_each(|number| drop(router.allocate(&format!("busy{number}"))));
    start_calls(&router, CALLS);
    assert_eq!(router.status()["waiting"], CALLS);
    stall(&server, &router);
    eventually(Duration::from_secs(20), "the circuit breaker closes", || is_store_up(&router));
    assert_eq!(router.status()["waiting"], CALLS, "every call keeps its queue entry");
    // A second replica recovers over the same calls.
    let second = Router::start(&settings);
    assert_eq!(second.status()["waiting"], CALLS);
    assert_eq!(second.release("busy0").0, 200);
    assert_eq!(second.status()["waiting"], CALLS - 1, "the free pod is handed to a waiting call");
    drop(second);
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(20)), Some(0));
}

#[test]
fn recovery_ends_with_a_thousand_provisional_calls() {
    let (server, _proxy, url) = distant_redis();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("PUBLIC_URL", PUBLIC_URL),
        ("CONNECT_TIMEOUT", "1m"),
        ("TIER_CONFIG", r#"{"gold": 1001}"#),
        ("LOG_LEVEL", "off"),
    ];
    let mut router = Router::start(&settings);
    start_calls(&router, CALLS);
    stall(&server, &router);
    eventually(Duration::from_secs(20), "the circuit breaker closes", || is_store_up(&router));
    assert_eq!(router.status()["active_calls"], CALLS);
    let second = Router::start(&settings);
    assert_eq!(second.status()["active_calls"], CALLS);
    drop(second);
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(20)), Some(0));
}
