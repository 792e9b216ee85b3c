//! Manual edits of the keys of outbound calls: wrong types and malformed values.

use std::time::Duration;

use redis::{Connection, cmd};
use serde_json::{Value, json};

use testkit::{Router, eventually, redis::RedisServer};

const NUMBER: &str = "+14155550100";
/// Longer than an audit takes to come round on a busy machine.
const AUDIT_TIME: Duration = Duration::from_secs(20);

fn start(server: &RedisServer) -> Router {
    Router::start(&[
        ("REDIS_URL", &server.url()),
        ("TIER_CONFIG", r#"{"gold": 4}"#),
        ("CLEANUP_INTERVAL", "200ms"),
    ])
}

fn reserve(router: &Router, count: usize) -> (u16, Value) {
    let body = json!({"merchant_id": "m1", "number": NUMBER, "provider": "twilio", "count": count});
    router.post("/api/v1/reservations", body)
}

fn ids(answer: &Value) -> Vec<String> {
    let granted = answer["reservations"].as_array().cloned().unwrap_or_default();
    granted.iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect()
}

fn set_limit(router: &Router, path: &str, body: &str) {
    let (status, answer) = router.put(path, body);
    assert_eq!(status, 200, "{answer}");
}

fn run(redis: &mut Connection, words: &[&str]) {
    cmd(words[0]).arg(&words[1..]).exec(redis).unwrap();
}

#[test]
fn a_malformed_reservation_frees_its_slot_and_its_line() {
    let server = RedisServer::start(&[]);
    let router = start(&server);
    let mut redis = server.connection();
    set_limit(&router, &format!("/api/v1/numbers/{NUMBER}"), r#"{"max_lines": 1}"#);
    for wrong in [&["SET", "x"][..], &["SADD", "x"], &["HSET", "x", "y"]] {
        let mut granted = Vec::new();
        eventually(AUDIT_TIME, "the line and all slots are free", || {
            granted = ids(&reserve(&router, 1).1);
            let status = router.get("/api/v1/reservations").1;
            granted.len() == 1 && status["reservations"].as_array().unwrap().len() == 1
        });
        let key = format!("voice:reservation:{}", granted[0]);
        run(&mut redis, &["DEL", &key]);
        run(&mut redis, &[&[wrong[0], &key], &wrong[1..]].concat());
    }
    eventually(AUDIT_TIME, "no dial is left", || {
        let dials: Vec<String> = cmd("HKEYS").arg("voice:dials").query(&mut redis).unwrap();
        !dials.contains(&"gold".to_owned())
    });
}

#[test]
fn a_malformed_answer_rate_counts_as_none() {
    let server = RedisServer::start(&[]);
    let router = start(&server);
    let mut redis = server.connection();
    for text in ["0 0", "0 100", "1 100", "x", "-1 -1", "99999999999999999999999 1"] {
        run(&mut redis, &["SET", "voice:answer_rate:m1", text]);
        let (status, answer) = reserve(&router, 4);
        let granted = ids(&answer);
        assert_eq!((status, granted.len()), (200, 4), "{text}: {answer}");
        let held: String = cmd("HGET").arg("voice:dials").arg("gold").query(&mut redis).unwrap();
        assert_eq!(held, "4 4 4096 0", "{text}: a new merchant's dials are all answered");
        let dialed = format!("/api/v1/reservations/{}/dialed", granted[0]);
        assert_eq!(router.post(&dialed, json!({"call_sid": "CA1"})).0, 200, "{text}");
        for id in &granted {
            let path = format!("/api/v1/reservations/{id}");
            let ended = router.connect_as_admin().send("DELETE", &path, &[], b"").json();
            assert_eq!(ended.0, 200, "{text}: {}", ended.1);
        }
    }
}

#[test]
fn limits_that_cannot_be_read_refuse_dials_and_no_inbound_call() {
    let server = RedisServer::start(&[]);
    let router = start(&server);
    let mut redis = server.connection();
    let number = format!("/api/v1/numbers/{NUMBER}");
    for (key, field, limit) in
        [("voice:numbers", NUMBER, "max_lines"), ("voice:accounts", "twilio", "max_cps")]
    {
        set_limit(&router, &number, r#"{"max_lines": 20}"#);
        set_limit(&router, "/api/v1/accounts/twilio", r#"{"max_cps": 100}"#);
        run(&mut redis, &["HSET", key, field, "twenty"]);
        let (status, answer) = reserve(&router, 1);
        assert_eq!((status, &answer["reason"]), (429, &json!(limit)), "{key}: {answer}");
        let path = format!("/api/v1/{}/{field}", key.trim_start_matches("voice:"));
        assert_eq!(router.get(&path).1[limit], 0, "{key}: a malformed limit allows no dial");

        // In one step: an audit between the two would find no limits.
        redis::pipe().atomic().del(key).sadd(key, "x").exec(&mut redis).unwrap();
        for _ in 0..3 {
            // The limits are facts: no audit deletes them.
            let (status, answer) = reserve(&router, 1);
            assert_eq!(status, 500, "{key}: {answer}");
            assert!(answer.to_string().contains(key), "{answer}");
            std::thread::sleep(Duration::from_millis(300));
        }
        let body = json!({"call_sid": "CA1", "number": NUMBER});
        let (status, answer) = router.post("/api/v1/allocate", body);
        assert_eq!(status, 200, "{key}: {answer}");
        assert_eq!(router.release("CA1").0, 200);

        run(&mut redis, &["DEL", key]);
        let (status, answer) = reserve(&router, 1);
        assert_eq!(status, 200, "{key}: {answer}");
    }
}

#[test]
fn indexes_of_dials_of_a_wrong_type_are_replaced() {
    let server = RedisServer::start(&[]);
    let router = start(&server);
    let mut redis = server.connection();
    let wrong_types: [(&str, &[&str]); 5] = [
        ("string", &["SET", "x"]),
        ("list", &["LPUSH", "x"]),
        ("set", &["SADD", "x"]),
        ("zset", &["ZADD", "1", "x"]),
        ("hash", &["HSET", "gold", "x"]),
    ];
    let keys = [
        ("voice:reservations", "zset"),
        ("voice:dials", "hash"),
        ("voice:lines:+14155550100", "set"),
        ("voice:last_dials", "hash"),
        ("voice:answer_rate:m1", "string"),
        ("voice:merchant:m1:dials", "zset"),
    ];
    set_limit(&router, &format!("/api/v1/numbers/{NUMBER}"), r#"{"max_lines": 4}"#);
    set_limit(&router, "/api/v1/accounts/twilio", r#"{"max_cps": 1000}"#);
    for (key, expected) in keys {
        for (name, wrong) in wrong_types.into_iter().filter(|(name, _)| *name != expected) {
            let case = format!("{key} as {name}");
            run(&mut redis, &["DEL", key]);
            run(&mut redis, &[&[wrong[0], key], &wrong[1..]].concat());
            let mut granted = Vec::new();
            eventually(AUDIT_TIME, &case, || {
                granted = ids(&reserve(&router, 1).1);
                granted.len() == 1
            });
            let dialed = format!("/api/v1/reservations/{}/dialed", granted[0]);
            let (status, answer) = router.post(&dialed, json!({"call_sid": "CA1"}));
            assert_eq!(status, 200, "{case}: {answer}");
            let body = json!({"call_sid": "CA1", "reservation_id": granted[0]});
            let (status, answer) = router.post("/api/v1/allocate", body);
            assert_eq!(status, 200, "{case}: {answer}");
            assert_eq!(router.release("CA1").0, 200, "{case}");
            assert_eq!(router.get("/api/v1/reservations").0, 200, "{case}");
        }
    }
    eventually(AUDIT_TIME, "all slots and lines are free", || {
        let (_, answer) = router.get("/api/v1/reservations");
        let left = answer["reservations"].as_array().unwrap().len();
        left == 0 && cmd("SCARD").arg("voice:lines:+14155550100").query(&mut redis) == Ok(0)
    });
}
