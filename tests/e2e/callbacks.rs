//! The ends of calls, as providers tell them.

use serde_json::json;

use testkit::{Answer, Router};

fn available(router: &Router) -> u64 {
    router.status()["pools"]["gold"]["available"].as_u64().unwrap()
}

fn one_pod() -> Router {
    Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)])
}

fn is_noted(answer: &Answer) {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.text(), r#"<?xml version="1.0" encoding="UTF-8"?><Response></Response>"#);
}

#[test]
fn a_call_that_is_over_gives_its_pod_back_whoever_says_it() {
    let router = one_pod();
    let mut connection = router.connect();
    let ends: [(&str, &str, &str); 12] = [
        ("twilio/call-status", "CallSid", "CallStatus=completed"),
        ("twilio/call-status", "CallSid", "CallStatus=no-answer"),
        ("twilio/stream-status", "CallSid", "StreamEvent=stream-stopped&StreamSid=MZ1"),
        ("twilio/stream-status", "CallSid", "StreamEvent=stream-error"),
        ("plivo/call-status", "CallUUID", "HangupCause=NORMAL_CLEARING&Duration=3"),
        ("plivo/stream-status", "CallUUID", "Event=DroppedStream"),
        ("exotel/call-status", "CallSid", "Status=completed&EventType=terminal"),
        ("exotel/stream-status", "CallSid", "Stream%5BStatus%5D=completed"),
        ("signalwire/call-status", "CallSid", "CallStatus=canceled"),
        ("telnyx/call-status", "CallSid", "CallStatus=completed"),
        ("vonage/call-status", "uuid", "status=completed"),
        ("jambonz/call-status", "call_sid", "call_status=failed"),
    ];
    for (number, (path, field, told)) in ends.into_iter().enumerate() {
        for is_get in [false, true] {
            let call = format!("CA{number}-{is_get}");
            router.allocate(&call);
            let params = format!("{field}={call}&{told}&Unknown=1");
            let answer = match is_get {
                true => connection.get(&format!("/api/v1/{path}?{params}")),
                false => connection.form(&format!("/api/v1/{path}"), &params),
            };
            assert_eq!(answer.status, 200, "{path} {}", answer.text());
            assert_eq!(available(&router), 1, "{path} {params}");
        }
    }
}

#[test]
fn what_is_said_twice_late_or_of_others_changes_nothing() {
    let router = one_pod();
    let mut connection = router.connect();
    router.allocate("CA1");
    let over = "CallSid=CA1&CallStatus=completed";
    is_noted(&connection.form("/api/v1/twilio/call-status", over));
    // The pod serves another call by now.
    router.allocate("CA2");
    for _ in 0..3 {
        is_noted(&connection.form("/api/v1/twilio/call-status", over));
        let stopped = "CallSid=CA1&StreamEvent=stream-stopped";
        is_noted(&connection.form("/api/v1/twilio/stream-status", stopped));
    }
    is_noted(&connection.form("/api/v1/twilio/call-status", "CallSid=CA9&CallStatus=completed"));
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    // Calls that go on are left alone.
    for told in ["CallStatus=ringing", "CallStatus=in-progress", "CallStatus=something-new"] {
        let params = format!("CallSid=CA2&{told}");
        is_noted(&connection.form("/api/v1/twilio/call-status", &params));
    }
    let started = "CallSid=CA2&StreamEvent=stream-started";
    is_noted(&connection.form("/api/v1/twilio/stream-status", started));
    // A stream to a pod the call is no longer on.
    let elsewhere = "/api/v1/twilio/stream-status?pod_name=voice-agent-7";
    is_noted(&connection.form(elsewhere, "CallSid=CA2&StreamEvent=stream-stopped"));
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    let here = "/api/v1/twilio/stream-status?pod_name=voice-agent-0";
    is_noted(&connection.form(here, "CallSid=CA2&StreamEvent=stream-stopped"));
    assert_eq!(available(&router), 1);
    assert_eq!(router.release("CA2").0, 404, "the agent comes second");
}

#[test]
fn callbacks_that_say_nothing_are_told_so() {
    let router = one_pod();
    router.allocate("CA1");
    let mut connection = router.connect();
    let answer = connection.form("/api/v1/twilio/call-status", "CallSid=CA1");
    assert!(answer.text().contains("<Hangup/>"), "{}", answer.text());
    let answer = connection.get("/api/v1/exotel/call-status?CallSid=CA1");
    assert_eq!(answer.status, 400);
    let answer = connection.get("/api/v1/exotel/call-status?Status=completed");
    assert_eq!(answer.status, 400);
    let answer = connection
        .form("/api/v1/twilio/stream-status?pod_name=A", "CallSid=CA1&StreamEvent=stream-stopped");
    assert!(answer.text().contains("<Hangup/>"));
    assert_eq!(connection.get("/api/v1/nobody/call-status").status, 404);
    assert_eq!(
        connection
            .send("HEAD", "/api/v1/twilio/call-status?CallSid=CA1&CallStatus=completed", &[], b"")
            .status,
        405
    );
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn documents_name_our_callback_where_it_is_wanted() {
    let router = Router::start(&[
        ("PUBLIC_URL", "https://router.example.com/voice/"),
        ("STREAM_STATUS", "on"),
        ("TIER_CONFIG", r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 10}}"#),
    ]);
    let url = |provider: &str| {
        format!(
            "https://router.example.com/voice/api/v1/{provider}/stream-status?pod_name=voice-agent-0"
        )
    };
    let mut connection = router.connect();
    for provider in ["twilio", "signalwire", "telnyx"] {
        let text = connection.form(&format!("/api/v1/{provider}/allocate"), "CallSid=CA1").text();
        let wanted = format!("statusCallback=\"{}\" statusCallbackMethod=\"POST\"", url(provider));
        assert!(text.contains(&wanted), "{text}");
    }
    let text = connection.form("/api/v1/plivo/allocate", "CallUUID=CA2").text();
    let wanted = format!("statusCallbackUrl=\"{}\" statusCallbackMethod=\"POST\"", url("plivo"));
    assert!(text.contains(&wanted), "{text}");
    let answer = connection.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA3"}));
    assert_eq!(answer.json().1[0]["actionHook"], url("jambonz"));
    let answer = connection.get("/api/v1/exotel/allocate?CallSid=CA4").json().1;
    assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");

    // The agent forgets to release; the stream's end does it.
    let path = "/api/v1/twilio/stream-status?pod_name=voice-agent-0";
    is_noted(&connection.form(path, "CallSid=CA1&StreamEvent=stream-stopped"));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[test]
fn a_body_may_be_a_form_or_json_as_the_provider_likes() {
    let router = one_pod();
    let mut connection = router.connect();
    for _ in 0..2 {
        router.allocate("CA1");
        let told = json!({"CallSid": "CA1", "CallStatus": "completed", "x": {"y": []}});
        is_noted(&connection.post("/api/v1/twilio/call-status", &told));
        assert_eq!(available(&router), 1);
        router.allocate("CA1");
        is_noted(&connection.form("/api/v1/twilio/call-status", "CallSid=CA1&CallStatus=busy"));
        assert_eq!(available(&router), 1);
    }
}

#[test]
fn exotel_tells_of_ends_in_parts_and_in_json() {
    let router = one_pod();
    router.allocate("CA1");
    let parts = "--B\r\nContent-Disposition: form-data; name=\"CallSid\"\r\n\r\nCA1\r\n--B\r\n\
        Content-Disposition: form-data; name=\"Status\"\r\n\r\ncompleted\r\n--B--\r\n";
    let headers = [("content-type", "multipart/form-data; boundary=B")];
    let mut connection = router.connect();
    let path = "/api/v1/exotel/call-status";
    assert_eq!(connection.send("POST", path, &headers, parts.as_bytes()).status, 200);
    assert_eq!(available(&router), 1);
    router.allocate("CA2");
    let told =
        json!({"CallSid": "CA2", "Stream": {"Status": "completed", "DisconnectedBy": "user"}});
    assert_eq!(connection.post("/api/v1/exotel/stream-status", &told).status, 200);
    assert_eq!(available(&router), 1);
    let broken = connection.send("POST", path, &headers, b"--C\r\n");
    assert_eq!(broken.status, 400);
    let answer = connection.get("/api/v1/exotel/allocate?CallSid=").json().1;
    assert!(answer["error"].as_str().unwrap().contains("CallSid is missing"), "{answer}");
}
