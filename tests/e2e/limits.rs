//! Limits of a merchant: concurrent calls and calls per second.

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

fn configure(router: &Router, merchant: &str, document: &str) {
    assert_eq!(router.put(&format!("/api/v1/merchants/{merchant}"), document).0, 200);
}

fn each_store(test: impl Fn(&Router)) {
    testkit::each_store(&[("TIER_CONFIG", TIERS), ("LOG_LEVEL", "error")], test);
}

#[test]
fn max_calls_limits_the_concurrent_calls_of_a_merchant() {
    each_store(|router| {
        configure(router, "acme", r#"{"max_calls": 2}"#);
        assert_eq!(allocate(router, "A1", "acme").0, 200);
        assert_eq!(allocate(router, "A2", "acme").0, 200);
        let (status, response) = allocate(router, "A3", "acme");
        assert_eq!((status, &response["details"]), (503, &json!({"reason": "max_calls"})));
        assert_eq!(allocate(router, "B1", "other").0, 200, "other merchants are not limited");
        assert_eq!(
            allocate(router, "A1", "acme").1["was_existing"],
            true,
            "a repeated request is not limited"
        );
        assert_eq!(router.release("A1").0, 200);
        assert_eq!(allocate(router, "A3", "acme").0, 200);
        // A changed limit applies from the next call on.
        configure(router, "acme", r#"{"max_calls": 3}"#);
        assert_eq!(allocate(router, "A4", "acme").0, 200);
        configure(router, "acme", r#"{"max_calls": 0}"#);
        assert_eq!(allocate(router, "A5", "acme").0, 503);
        let metrics = router.connect().get("/metrics").text();
        assert!(
            metrics.contains("smart_router_limited_total{reason=\"max_calls\"} 2"),
            "{metrics}"
        );
        for call in ["A2", "A3", "A4", "B1"] {
            assert_eq!(router.release(call).0, 200);
        }
        let (status, response) = router.put("/api/v1/merchants/acme", r#"{"max_calls": -1}"#);
        assert_eq!(status, 400);
        assert!(response["error"].as_str().unwrap().contains("max_calls"), "{response}");
    });
}

#[test]
fn max_rate_limits_the_calls_of_a_merchant_per_second() {
    each_store(|router| {
        configure(router, "acme", r#"{"max_rate": 5}"#);
        let (started, mut admitted) = (Instant::now(), Vec::new());
        let mut number = 0;
        // Five at once, then five more in each second.
        while admitted.len() < 15 {
            assert!(started.elapsed() < Duration::from_secs(20), "{admitted:?}");
            number += 1;
            let sent = started.elapsed();
            match allocate(router, &format!("A{number}"), "acme") {
                (200, _) => admitted.push((sent, started.elapsed())),
                (status, response) => {
                    assert_eq!((status, &response["details"]["reason"]), (503, &json!("max_rate")));
                }
            }
        }
        for window in admitted.windows(6) {
            // The store admits a call between request and response, with millisecond precision.
            let elapsed = window[5].1 - window[0].0;
            assert!(elapsed > Duration::from_millis(998), "six within {elapsed:?}");
        }
        let calls = router.status()["active_calls"].as_u64().unwrap();
        assert_eq!(calls, 15, "refused calls hold no pod");
    });
}

#[test]
fn replicas_share_the_limit_of_a_merchant() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, TIERS);
    configure(&routers[0], "acme", r#"{"max_calls": 10}"#);
    for round in 0..10 {
        let barrier = Barrier::new(40);
        let admitted: Vec<String> = thread::scope(|scope| {
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
        assert_eq!(admitted.len(), 10);
        for call in admitted {
            assert_eq!(routers[1].release(&call).0, 200);
        }
    }
}

#[test]
fn a_limit_survives_manual_edits_of_its_index() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router =
        Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", TIERS), ("LOG_LEVEL", "off")]);
    configure(&router, "acme", r#"{"max_calls": 1}"#);
    assert_eq!(allocate(&router, "A1", "acme").0, 200);
    let mut plain = server.connection();
    // An index entry without a call record.
    redis::cmd("ZADD")
        .arg("voice:merchant:acme:calls")
        .arg(1)
        .arg("stale")
        .exec(&mut plain)
        .unwrap();
    assert_eq!(allocate(&router, "A2", "acme").0, 503);
    assert_eq!(router.release("A1").0, 200);
    assert_eq!(allocate(&router, "A2", "acme").0, 200, "the stale entry does not count");
    redis::cmd("DEL").arg("voice:merchant:acme:calls").exec(&mut plain).unwrap();
    redis::cmd("SET").arg("voice:merchant:acme:calls").arg("junk").exec(&mut plain).unwrap();
    assert_eq!(allocate(&router, "A3", "acme").0, 200, "a key of the wrong type is replaced");
    assert_eq!(router.release("A2").0, 200);
    assert_eq!(router.release("A3").0, 200);
}

#[test]
fn busy_action_reject_declines_before_the_call_is_answered() {
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
    let response =
        connection.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA2"})).json().1;
    assert_eq!(
        (&response[0]["verb"], &response[0]["status"]),
        (&json!("sip:decline"), &json!(486))
    );
    let response = connection.get("/api/v1/vonage/allocate?uuid=CA2").json().1;
    assert_eq!(response[0]["action"], "talk");
    assert_eq!(connection.get("/api/v1/exotel/allocate?CallSid=CA2").status, 503);
}
