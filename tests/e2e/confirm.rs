//! The stream confirms the call: a pod that is never reached is soon free again.

use std::{thread, time::Duration};

use serde_json::json;

use testkit::{Connection, Router, eventually, redis::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const SETTINGS: [(&str, &str); 5] = [
    ("PUBLIC_URL", "https://r.example"),
    ("CONNECT_TIMEOUT", "1s"),
    ("TIER_CONFIG", r#"{"gold": 1}"#),
    ("LEASE_TTL", "30s"),
    ("LOG_LEVEL", "off"),
];

fn with(extra: &[(&str, &str)]) -> Router {
    let mut settings = SETTINGS.to_vec();
    settings.extend(extra);
    Router::start(&settings)
}

/// The same for both stores.
fn each_store(test: impl Fn(&Router)) {
    test(&with(&[]));
    let server = RedisServer::start(&[]);
    test(&with(&[("REDIS_URL", &server.url())]));
}

fn ask(connection: &mut Connection, call: &str) -> bool {
    let answer = connection.form("/api/v1/twilio/allocate", &format!("CallSid={call}"));
    let text = answer.text();
    let has_pod = text.contains("<Stream url=");
    assert_eq!(has_pod, text.contains("stream-status?pod_name=voice-agent-0"), "{text}");
    has_pod
}

fn tell(connection: &mut Connection, call: &str, event: &str) {
    let path = "/api/v1/twilio/stream-status?pod_name=voice-agent-0";
    let body = format!("CallSid={call}&StreamEvent={event}&StreamSid=MZ1");
    assert_eq!(connection.form(path, &body).status, 200);
}

fn is_live(router: &Router, call: &str) -> bool {
    router.get(&format!("/api/v1/calls/{call}")).0 == 200
}

#[test]
fn a_call_whose_stream_never_starts_gives_its_pod_back_soon() {
    each_store(|router| {
        let mut connection = router.connect();
        assert!(ask(&mut connection, "CA1"));
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], false);
        assert!(!ask(&mut connection, "CA2"), "the pod is taken");
        eventually(4 * SECOND, "the pod is free again", || !is_live(router, "CA1"));
        assert!(ask(&mut connection, "CA2"));
        let metrics = connection.get("/metrics").text();
        assert!(
            metrics.contains("smart_router_unconfirmed_total{source_pool=\"pool:gold\"} 1"),
            "{metrics}"
        );
        assert!(!metrics.contains("smart_router_leases_expired_total{"), "{metrics}");
        assert_eq!(router.release("CA2").0, 200);
    });
}

#[test]
fn a_stream_that_starts_keeps_its_pod() {
    each_store(|router| {
        let mut connection = router.connect();
        assert!(ask(&mut connection, "CA1"));
        for _ in 0..3 {
            tell(&mut connection, "CA1", "stream-started");
        }
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        // (its time to start and a sweep; a call that does not end has no event)
        thread::sleep(Duration::from_millis(2_200));
        assert!(is_live(router, "CA1"));
        tell(&mut connection, "CA1", "stream-stopped");
        assert!(!is_live(router, "CA1"));
    });
}

#[test]
fn a_renewal_by_the_pod_counts_as_well() {
    each_store(|router| {
        let mut connection = router.connect();
        assert!(ask(&mut connection, "CA1"));
        let renew = json!({"pod_name": "voice-agent-0", "call_sids": ["CA1"]});
        assert_eq!(router.post("/api/v1/renew", renew).1["renewed"], 1);
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        // (its time to start and a sweep; a call that does not end has no event)
        thread::sleep(Duration::from_millis(2_200));
        assert!(is_live(router, "CA1"));
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn calls_without_such_a_callback_are_sure_at_once() {
    each_store(|router| {
        let mut connection = router.connect();
        let ways: [&dyn Fn(&mut Connection) -> u16; 4] = [
            &|it| it.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status,
            &|it| it.get("/api/v1/exotel/allocate?CallSid=CA1").status,
            &|it| it.get("/api/v1/vonage/allocate?uuid=CA1").status,
            &|it| it.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA1"})).status,
        ];
        for way in ways {
            assert_eq!(way(&mut connection), 200);
            assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
            assert_eq!(router.release("CA1").0, 200);
        }
    });
}

#[test]
fn a_start_that_comes_too_late_takes_the_pod_again_if_it_is_free() {
    each_store(|router| {
        let mut connection = router.connect();
        assert!(ask(&mut connection, "CA1"));
        eventually(4 * SECOND, "its time is over", || !is_live(router, "CA1"));
        tell(&mut connection, "CA1", "stream-started");
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        assert!(!ask(&mut connection, "CA2"), "the pod is taken again");
        tell(&mut connection, "CA1", "stream-stopped");
        // What is over stays over.
        tell(&mut connection, "CA1", "stream-started");
        assert!(!is_live(router, "CA1"));
        // And a pod that has another call is not taken from it.
        assert!(ask(&mut connection, "CA3"));
        eventually(4 * SECOND, "its time is over", || !is_live(router, "CA3"));
        router.allocate("CA4");
        tell(&mut connection, "CA3", "stream-started");
        assert!(!is_live(router, "CA3") && is_live(router, "CA4"));
        assert_eq!(router.release("CA4").0, 200);
    });
}

#[test]
fn starts_that_come_while_redis_is_out_are_not_forgotten() {
    let server = RedisServer::start(&[]);
    let tiers = ("TIER_CONFIG", r#"{"gold": 2}"#);
    let router = with(&[("REDIS_URL", &server.url()), tiers, ("CONNECT_TIMEOUT", "3s")]);
    let mut connection = router.connect();
    for call in ["CA1", "CA2"] {
        assert_eq!(
            connection.form("/api/v1/twilio/allocate", &format!("CallSid={call}")).status,
            200
        );
    }
    let pod = router.get("/api/v1/calls/CA1").1["pod_name"].as_str().unwrap().to_owned();
    server.signal("STOP");
    let path = format!("/api/v1/twilio/stream-status?pod_name={pod}");
    assert_eq!(connection.form(&path, "CallSid=CA1&StreamEvent=stream-started").status, 200);
    // Longer than the calls had.
    thread::sleep(3 * SECOND);
    server.signal("CONT");
    eventually(3 * SECOND, "service is back", || {
        router.get("/api/v1/calls/CA1").1["is_confirmed"] == true
    });
    // The other has its time once more, and not for ever.
    assert!(is_live(&router, "CA2"));
    eventually(4 * SECOND, "its time is over", || !is_live(&router, "CA2"));
    assert!(is_live(&router, "CA1"));
    assert_eq!(router.release("CA1").0, 200);
}
