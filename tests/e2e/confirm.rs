//! Provisional calls without the media gateway: a stream start confirms the call, and
//! CONNECT_TIMEOUT ends it otherwise.

use std::time::Duration;

use serde_json::json;

use testkit::{
    Connection, Router, WITHOUT_GATEWAY, clock::WallClock, eventually, provider::pod_of,
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
const SETTINGS: [(&str, &str); 6] = [
    ("PUBLIC_URL", "https://r.example"),
    ("CONNECT_TIMEOUT", "1s"),
    WITHOUT_GATEWAY,
    ("TIER_CONFIG", r#"{"gold": 1}"#),
    ("LEASE_TTL", "30s"),
    ("LOG_LEVEL", "off"),
];
const TWO_PODS: [(&str, &str); 1] = [("TIER_CONFIG", r#"{"gold": 2}"#)];

fn start(extra: &[(&str, &str)]) -> Router {
    Router::start(&[&SETTINGS, extra].concat())
}

fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    testkit::each_store(&[&SETTINGS, extra].concat(), test);
}

/// Requests a pod through the Twilio webhook. Returns whether the call got one.
fn allocate(connection: &mut Connection, call: &str) -> bool {
    let response = connection.form("/api/v1/twilio/allocate", &format!("CallSid={call}"));
    let text = response.text();
    let has_pod = text.contains("<Stream url=");
    assert_eq!(has_pod, text.contains("stream-status?pod_name=voice-agent-"), "{text}");
    has_pod
}

/// Sends an event of the stream to the pod.
fn send_stream_event_of(connection: &mut Connection, call: &str, pod: &str, event: &str) {
    let path = format!("/api/v1/twilio/stream-status?pod_name={pod}");
    let body = format!("CallSid={call}&StreamEvent={event}&StreamSid=MZ1");
    assert_eq!(connection.form(&path, &body).status, 200);
}

/// Sends an event of the stream to the only pod.
fn send_stream_event(connection: &mut Connection, call: &str, event: &str) {
    send_stream_event_of(connection, call, "voice-agent-0", event);
}

/// Waits for the end of a provisional call that is allocated now: the sweep ends calls in the order
/// of their deadlines, so an older provisional call ends before it.
fn wait_for_end_of_later_call(router: &Router, connection: &mut Connection) {
    assert!(allocate(connection, "later"));
    eventually(4 * SECOND, "the later call ends", || !is_live(router, "later"));
}

fn is_live(router: &Router, call: &str) -> bool {
    router.get(&format!("/api/v1/calls/{call}")).0 == 200
}

#[test]
fn a_call_whose_stream_never_starts_ends_after_connect_timeout() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        assert!(allocate(&mut connection, "CA1"));
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], false);
        assert!(!allocate(&mut connection, "CA2"), "the pod is in use");
        eventually(4 * SECOND, "the provisional call ends", || !is_live(router, "CA1"));
        assert!(allocate(&mut connection, "CA2"));
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
fn a_started_stream_confirms_its_call() {
    each_store(&TWO_PODS, |router| {
        let mut connection = router.connect();
        assert!(allocate(&mut connection, "CA1"));
        let pod = pod_of(router, "CA1").unwrap();
        for _ in 0..3 {
            send_stream_event_of(&mut connection, "CA1", &pod, "stream-started");
        }
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        wait_for_end_of_later_call(router, &mut connection);
        assert!(is_live(router, "CA1"));
        send_stream_event_of(&mut connection, "CA1", &pod, "stream-stopped");
        assert!(!is_live(router, "CA1"));
    });
}

#[test]
fn a_renewal_by_the_pod_confirms_the_call() {
    each_store(&TWO_PODS, |router| {
        let mut connection = router.connect();
        assert!(allocate(&mut connection, "CA1"));
        let renew = json!({"pod_name": pod_of(router, "CA1"), "call_sids": ["CA1"]});
        assert_eq!(router.post("/api/v1/renew", renew).1["renewed"], 1);
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        wait_for_end_of_later_call(router, &mut connection);
        assert!(is_live(router, "CA1"));
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn calls_without_stream_callbacks_are_confirmed_at_once() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        let requests: [&dyn Fn(&mut Connection) -> u16; 4] = [
            &|it| it.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status,
            &|it| it.get("/api/v1/exotel/allocate?CallSid=CA1").status,
            &|it| it.get("/api/v1/vonage/allocate?uuid=CA1").status,
            &|it| it.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA1"})).status,
        ];
        for request in requests {
            assert_eq!(request(&mut connection), 200);
            assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
            assert_eq!(router.release("CA1").0, 200);
        }
    });
}

#[test]
fn a_late_stream_start_reclaims_the_pod_if_it_is_free() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        assert!(allocate(&mut connection, "CA1"));
        eventually(4 * SECOND, "the provisional call ends", || !is_live(router, "CA1"));
        send_stream_event(&mut connection, "CA1", "stream-started");
        assert_eq!(router.get("/api/v1/calls/CA1").1["is_confirmed"], true);
        assert!(!allocate(&mut connection, "CA2"), "the pod is in use again");
        send_stream_event(&mut connection, "CA1", "stream-stopped");
        // An ended call is not started again.
        send_stream_event(&mut connection, "CA1", "stream-started");
        assert!(!is_live(router, "CA1"));
        // A late start does not take a pod from another call.
        assert!(allocate(&mut connection, "CA3"));
        eventually(4 * SECOND, "the provisional call ends", || !is_live(router, "CA3"));
        router.allocate("CA4");
        send_stream_event(&mut connection, "CA3", "stream-started");
        assert!(!is_live(router, "CA3") && is_live(router, "CA4"));
        assert_eq!(router.release("CA4").0, 200);
    });
}

#[test]
fn stream_starts_during_an_outage_are_deferred() {
    let clock = WallClock::ahead(0);
    let server = RedisServer::with_clock(&clock);
    let times = [("CONNECT_TIMEOUT", "1m"), ("LEASE_TTL", "15m")];
    let router = start(&[&TWO_PODS[..], &times, &[("REDIS_URL", &server.url())]].concat());
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
    // Longer than CONNECT_TIMEOUT.
    clock.set_ahead(70);
    server.signal("CONT");
    eventually(3 * SECOND, "the deferred confirmation is flushed", || {
        router.get("/api/v1/calls/CA1").1["is_confirmed"] == true
    });
    // Recovery extends the other provisional call by one CONNECT_TIMEOUT.
    router.wait_for_sweep();
    assert!(is_live(&router, "CA2"));
    clock.set_ahead(140);
    eventually(4 * SECOND, "the provisional call ends", || !is_live(&router, "CA2"));
    assert!(is_live(&router, "CA1"));
    assert_eq!(router.release("CA1").0, 200);
}
