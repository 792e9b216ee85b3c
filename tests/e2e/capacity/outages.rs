//! Outages and wipes of Redis, and steps of its clock.

use serde_json::json;

use super::*;
use testkit::{Router, clock::WallClock, redis::RedisServer};

const TIERS: &str = r#"{"gold": 6}"#;

fn start(server: &RedisServer) -> (Router, Log) {
    Router::start_logged(&[
        ("REDIS_URL", &server.url()),
        ("TIER_CONFIG", TIERS),
        ("LOG_LEVEL", "debug"),
        ("LOG_FORMAT", "json"),
    ])
}

fn observations(log: &Log) -> Vec<Value> {
    let decided = decisions(log, "gold");
    decided.iter().map(|it| serde_json::from_str(&it.line).unwrap()).collect()
}

#[test]
fn a_wiped_redis_is_a_gap_and_returning_calls_are_no_arrivals() {
    let mut server = RedisServer::start(&[]);
    let (router, log) = start(&server);
    wait_for_decisions(&log, "gold", 1);
    for number in 0..4 {
        router.allocate(&format!("CA{number}"));
    }
    let pods: Vec<Value> = (0..4)
        .map(|number| router.get(&format!("/api/v1/calls/CA{number}")).1["pod_name"].clone())
        .collect();
    wait_for(&router, "gold", "the calls are counted", |it| it["live"] == 4);
    let before = pool(&router, "gold").unwrap();
    server.restart_empty();
    eventually(STEPS, "the gap is noticed", || {
        observations(&log).iter().any(|observation| observation["gap"] == true)
    });
    let seen = observations(&log).len();
    // The agents renew their calls, which registers them again.
    for (number, pod) in pods.iter().enumerate() {
        let body = json!({"pod_name": pod, "call_sids": [format!("CA{number}")]});
        eventually(STEPS, "the call is registered again", || {
            let (status, answer) = router.post("/api/v1/renew", body.clone());
            status == 200 && answer["renewed"] == 1
                || answer["registered"] == json!([format!("CA{number}")])
        });
    }
    let after = wait_for(&router, "gold", "the calls are live", |it| it["live"] == 4);
    let arrivals: u64 =
        observations(&log)[seen..].iter().map(|observation| number(observation, "arrivals")).sum();
    assert_eq!(arrivals, 0, "returning calls are not new");
    assert!(number(&after, "desired") <= 2 * number(&before, "desired"), "{before} {after}");
}

#[test]
fn an_outage_of_redis_delays_the_decisions() {
    let mut server = RedisServer::start(&["--appendonly", "yes"]);
    let (router, log) = start(&server);
    wait_for_decisions(&log, "gold", 1);
    router.allocate("CA0");
    wait_for(&router, "gold", "the call is counted", |it| it["live"] == 1);
    server.kill();
    log.wait_for("cannot take or publish capacity decisions", 0);
    let (status, stale) = router.get("/api/v1/capacity");
    assert_eq!(status, 200, "the last decisions are shown for two minutes: {stale}");
    server.restart(&["--appendonly", "yes"]);
    let at = number(&stale, "at");
    eventually(STEPS, "decisions are taken again", || {
        capacity(&router).is_some_and(|it| number(&it, "at") > at)
    });
    router.allocate("CA1");
    wait_for(&router, "gold", "the next call is counted", |it| it["live"] == 2);
    let arrivals = || -> u64 { observations(&log).iter().map(|it| number(it, "arrivals")).sum() };
    // The log is written after the decision is published.
    eventually(STEPS, "both calls are counted", || arrivals() >= 2);
    assert_eq!(arrivals(), 2, "each call is counted once");
}

#[test]
fn steps_of_the_clock_change_no_decision_much() {
    let clock = WallClock::ahead(0);
    let server = RedisServer::with_clock(&clock);
    let (router, log) = start(&server);
    wait_for_decisions(&log, "gold", 1);
    for number in 0..3 {
        router.allocate(&format!("CA{number}"));
    }
    wait_for(&router, "gold", "the calls are counted", |it| it["live"] == 3);
    let before = number(&pool(&router, "gold").unwrap(), "policy");
    for ahead in [7_200, -3_600] {
        let seen = decisions(&log, "gold").len();
        clock.set_ahead(ahead);
        wait_for_decisions(&log, "gold", seen + 3);
        let desired = decisions(&log, "gold").last().unwrap().desired;
        assert!(desired <= 2 * before, "{desired} after {before}");
    }
    // The leases of the calls are shifted with a step, or the calls end: both are counted.
    assert!(capacity(&router).is_some());
}
