//! Diallers that wait for reservations are demand of the pool that refuses them.

use serde_json::json;

use super::*;
use testkit::{Connection, http::request_head, redis::RedisServer, replicas};

/// Longer than a report takes to expire and another router to take the decisions, on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(20);
const TIERS: &str = r#"{"gold": {"target": 2, "max": 300}}"#;
const NUMBER: &str = "+14155550100";
/// Dials of a long poll.
const COUNT: usize = 20;

/// Starts a long poll for the dials of a merchant.
fn wait_for_reservations(router: &Router, merchant: &str) -> Connection {
    let mut connection = router.connect();
    let body = json!({"merchant_id": merchant, "number": NUMBER, "count": COUNT, "wait": "60s"});
    let body = body.to_string();
    let json = [("content-type", "application/json")];
    connection.write(&request_head("POST", "/api/v1/reservations", &json, body.len()));
    connection.write(body.as_bytes());
    connection
}

/// Reserves the two pods of the pool, so that the next dials wait.
fn take_all_slots(router: &Router) {
    let mut granted = 0;
    eventually(PATIENCE, "both pods are reserved", || {
        let body = json!({"merchant_id": "busy", "count": 2 - granted});
        let (status, answer) = router.post("/api/v1/reservations", body);
        granted += if status == 200 { answer["reservations"].as_array().unwrap().len() } else { 0 };
        granted == 2
    });
}

fn wait_for_dials(router: &Router, waiting: u64) -> Value {
    let mut found = Value::Null;
    eventually(PATIENCE, &format!("{waiting} dials wait"), || {
        found = pool(router, "gold").unwrap_or_default();
        found["waiting_dials"] == waiting
    });
    found
}

/// Diallers at the routers raise the desired pods for as long as they wait.
fn waiting_diallers_count(routers: &[Router]) {
    let router = &routers[0];
    take_all_slots(router);
    let before = wait_for_dials(router, 0);
    assert!(number(&before, "desired") < 20, "{before}");
    let diallers: Vec<Connection> =
        (0..10).map(|it| wait_for_reservations(&routers[it % routers.len()], "acme")).collect();
    let found = wait_for_dials(router, 200);
    // Two slots are held, and each waiting dial of an unknown merchant counts as answered.
    assert_eq!((number(&found, "dial_slots"), &found["reason"]), (202, &json!("reserve")));
    assert!((202..=300).contains(&number(&found, "desired")), "{found}");
    assert_eq!((number(&found, "live"), number(&found, "waiting")), (0, 0), "{found}");
    drop(diallers);
    let found = wait_for_dials(router, 0);
    assert!(number(&found, "desired") < 20, "{found}");
}

#[test]
fn waiting_diallers_raise_the_desired_pods() {
    waiting_diallers_count(&[Router::start(&[("TIER_CONFIG", TIERS)])]);
}

#[test]
fn waiting_diallers_of_all_replicas_count() {
    let server = RedisServer::start(&[]);
    waiting_diallers_count(&replicas(&server, 2, TIERS));
}

#[test]
fn the_diallers_of_a_killed_replica_stop_counting() {
    let server = RedisServer::start(&[]);
    let mut routers = replicas(&server, 2, TIERS);
    take_all_slots(&routers[0]);
    let _staying: Vec<Connection> =
        (0..2).map(|_| wait_for_reservations(&routers[0], "acme")).collect();
    let _killed: Vec<Connection> =
        (0..3).map(|_| wait_for_reservations(&routers[1], "acme")).collect();
    wait_for_dials(&routers[0], 100);
    let killed = routers.pop().unwrap().kill_and_restart();
    wait_for_dials(&routers[0], 40);
    wait_for_dials(&killed, 40);
}

#[test]
fn malformed_reports_count_as_none_and_are_replaced() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, TIERS);
    let mut redis = server.connection();
    let mut edit = |words: &[&str]| {
        let words = [&["DEL", "voice:waiting_dials"][..], words];
        words.iter().for_each(|it| redis::cmd(it[0]).arg(&it[1..]).exec(&mut redis).unwrap());
    };
    take_all_slots(&routers[0]);
    wait_for_dials(&routers[0], 0);
    let _dialler = wait_for_reservations(&routers[0], "acme");
    wait_for_dials(&routers[0], 20);
    let far = "99999999999999 acme - 7";
    for wrong in [
        &["SET", "voice:waiting_dials", "x"][..],
        &["LPUSH", "voice:waiting_dials", "x"],
        &["HSET", "voice:waiting_dials", "r1", "x", "r2", far, "r3", ""],
    ] {
        edit(wrong);
        eventually(PATIENCE, "the router's report is alone", || {
            let mut redis = server.connection();
            let known = redis::cmd("HKEYS").arg("voice:waiting_dials").query(&mut redis);
            known.is_ok_and(|routers: Vec<String>| routers.len() == 1 && routers[0].len() > 2)
        });
        wait_for_dials(&routers[0], 20);
    }
}

#[test]
fn an_absurd_report_asks_for_no_more_than_max() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, TIERS);
    let mut redis = server.connection();
    let mut found = Value::Null;
    eventually(PATIENCE, "the report counts", || {
        let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut redis).unwrap();
        let report = format!("{} acme - x acme - 99999999999999999999", (seconds + 5) * 1_000);
        let key = "voice:waiting_dials";
        redis::cmd("HSET").arg(key).arg("r1").arg(report).exec(&mut redis).unwrap();
        found = pool(&routers[0], "gold").unwrap_or_default();
        found["waiting_dials"] == 100_000
    });
    assert_eq!((number(&found, "desired"), &found["reason"]), (300, &json!("max")));
}

#[test]
fn dials_beyond_other_limits_need_no_pod() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let settings = [("TIER_CONFIG", TIERS), ("REDIS_URL", url.as_str())];
    for router in [Router::start(&settings[..1]), Router::start(&settings)] {
        let (status, answer) = router.put("/api/v1/merchants/acme", r#"{"max_calls": 30}"#);
        assert_eq!(status, 200, "{answer}");
        let limit = r#"{"max_lines": 7}"#;
        let (status, answer) = router.put(&format!("/api/v1/numbers/{NUMBER}"), limit);
        assert_eq!(status, 200, "{answer}");
        take_all_slots(&router);
        let diallers: Vec<Connection> =
            (0..3).map(|_| wait_for_reservations(&router, "acme")).collect();
        wait_for_dials(&router, 7);
        let limit = r#"{"max_lines": 1000}"#;
        assert_eq!(router.put(&format!("/api/v1/numbers/{NUMBER}"), limit).0, 200);
        wait_for_dials(&router, 30);
        drop(diallers);
    }
}
