//! What a merchant may have at most.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use testkit::replicas;
use testkit::{Router, redis::RedisServer};

const TIERS: &str = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 200}}"#;

fn allocate(router: &Router, call: &str, merchant: &str) -> (u16, Value) {
    router.post("/api/v1/allocate", json!({"call_sid": call, "merchant_id": merchant}))
}

fn limit(router: &Router, merchant: &str, document: &str) {
    assert_eq!(router.put(&format!("/api/v1/merchants/{merchant}"), document).0, 200);
}

/// The same for both stores.
fn each_store(test: impl Fn(&Router)) {
    test(&Router::start(&[("TIER_CONFIG", TIERS), ("LOG_LEVEL", "error")]));
    let server = RedisServer::start(&[]);
    test(&replicas(&server, 1, TIERS)[0]);
}

#[test]
fn a_merchant_has_no_more_calls_than_it_may() {
    each_store(|router| {
        limit(router, "acme", r#"{"max_calls": 2}"#);
        assert_eq!(allocate(router, "A1", "acme").0, 200);
        assert_eq!(allocate(router, "A2", "acme").0, 200);
        let (status, answer) = allocate(router, "A3", "acme");
        assert_eq!((status, &answer["details"]), (503, &json!({"reason": "max_calls"})));
        assert_eq!(allocate(router, "B1", "other").0, 200, "others are not concerned");
        assert_eq!(allocate(router, "A1", "acme").1["was_existing"], true, "nor who is there");
        assert_eq!(router.release("A1").0, 200);
        assert_eq!(allocate(router, "A3", "acme").0, 200);
        // A change counts from the next call on.
        limit(router, "acme", r#"{"max_calls": 3}"#);
        assert_eq!(allocate(router, "A4", "acme").0, 200);
        limit(router, "acme", r#"{"max_calls": 0}"#);
        assert_eq!(allocate(router, "A5", "acme").0, 503);
        let metrics = router.connect().get("/metrics").text();
        assert!(
            metrics.contains("smart_router_limited_total{reason=\"max_calls\"} 2"),
            "{metrics}"
        );
        for call in ["A2", "A3", "A4", "B1"] {
            assert_eq!(router.release(call).0, 200);
        }
        let (status, answer) = router.put("/api/v1/merchants/acme", r#"{"max_calls": -1}"#);
        assert_eq!(status, 400);
        assert!(answer["error"].as_str().unwrap().contains("max_calls"), "{answer}");
    });
}

#[test]
fn a_merchant_has_no_more_calls_in_a_second_than_it_may() {
    each_store(|router| {
        limit(router, "acme", r#"{"max_rate": 5}"#);
        let (started, mut given) = (Instant::now(), Vec::new());
        let mut number = 0;
        // Five at once, and five more each time a second has passed.
        while given.len() < 15 {
            assert!(started.elapsed() < Duration::from_secs(20), "{given:?}");
            number += 1;
            let asked = started.elapsed();
            match allocate(router, &format!("A{number}"), "acme") {
                (200, _) => given.push((asked, started.elapsed())),
                (status, answer) => {
                    assert_eq!((status, &answer["details"]["reason"]), (503, &json!("max_rate")));
                }
            }
        }
        for window in given.windows(6) {
            // (the store gave them in between, by whole milliseconds)
            let apart = window[5].1 - window[0].0;
            assert!(apart > Duration::from_millis(998), "six within {apart:?}");
        }
        let calls = router.status()["active_calls"].as_u64().unwrap();
        assert_eq!(calls, 15, "who was refused holds nothing");
    });
}

#[test]
fn replicas_do_not_exceed_a_limit_together() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, TIERS);
    limit(&routers[0], "acme", r#"{"max_calls": 10}"#);
    for round in 0..10 {
        let barrier = Barrier::new(40);
        let given: Vec<String> = thread::scope(|scope| {
            let clients: Vec<_> = (0..40)
                .map(|client| {
                    let (routers, barrier) = (&routers, &barrier);
                    scope.spawn(move || {
                        let call = format!("A{round}-{client}");
                        let mut connection = routers[client % 3].connect();
                        let body = json!({"call_sid": call, "merchant_id": "acme"});
                        barrier.wait();
                        (connection.post("/api/v1/allocate", &body).status == 200).then_some(call)
                    })
                })
                .collect();
            clients.into_iter().filter_map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(given.len(), 10);
        for call in given {
            assert_eq!(routers[1].release(&call).0, 200);
        }
    }
}

#[test]
fn a_limit_outlives_what_people_delete_by_hand() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router =
        Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", TIERS), ("LOG_LEVEL", "off")]);
    limit(&router, "acme", r#"{"max_calls": 1}"#);
    assert_eq!(allocate(&router, "A1", "acme").0, 200);
    let mut plain = server.connection();
    // A call that nobody has ended, of which nothing else is left.
    redis::cmd("ZADD")
        .arg("voice:merchant:acme:calls")
        .arg(1)
        .arg("ghost")
        .exec(&mut plain)
        .unwrap();
    assert_eq!(allocate(&router, "A2", "acme").0, 503);
    assert_eq!(router.release("A1").0, 200);
    assert_eq!(allocate(&router, "A2", "acme").0, 200, "the ghost does not count");
    redis::cmd("DEL").arg("voice:merchant:acme:calls").exec(&mut plain).unwrap();
    redis::cmd("SET").arg("voice:merchant:acme:calls").arg("junk").exec(&mut plain).unwrap();
    assert_eq!(allocate(&router, "A3", "acme").0, 200, "junk is replaced");
    assert_eq!(router.release("A2").0, 200);
    assert_eq!(router.release("A3").0, 200);
}

#[test]
fn busy_is_said_before_the_call_is_answered_where_that_is_wanted() {
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("BUSY_ACTION", "reject"),
        ("LOG_LEVEL", "error"),
    ]);
    router.allocate("CA1");
    let mut connection = router.connect();
    for provider in ["twilio", "signalwire", "telnyx"] {
        let text = connection.form(&format!("/api/v1/{provider}/allocate"), "CallSid=CA2").text();
        assert!(text.ends_with(r#"<Response><Reject reason="busy"/></Response>"#), "{text}");
    }
    let text = connection.form("/api/v1/plivo/allocate", "CallUUID=CA2").text();
    assert!(text.ends_with(r#"<Response><Hangup reason="busy"/></Response>"#), "{text}");
    let answer = connection.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA2"})).json().1;
    assert_eq!((&answer[0]["verb"], &answer[0]["status"]), (&json!("sip:decline"), &json!(486)));
    let answer = connection.get("/api/v1/vonage/allocate?uuid=CA2").json().1;
    assert_eq!(answer[0]["action"], "talk");
    assert_eq!(connection.get("/api/v1/exotel/allocate?CallSid=CA2").status, 503);
}
