//! Status callbacks of providers.

use serde_json::json;

use testkit::{HttpResponse, Router, WITHOUT_GATEWAY};

fn available(router: &Router) -> u64 {
    router.status()["pools"]["gold"]["available"].as_u64().unwrap()
}

fn one_pod() -> Router {
    Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)])
}

fn assert_acknowledged(response: &HttpResponse) {
    assert_eq!(response.status, 200);
    assert_eq!(response.text(), r#"<?xml version="1.0" encoding="UTF-8"?><Response></Response>"#);
}

#[test]
fn status_callbacks_of_every_provider_release_the_call() {
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
    for (number, (path, field, event)) in ends.into_iter().enumerate() {
        for is_get in [false, true] {
            let call = format!("CA{number}-{is_get}");
            router.allocate(&call);
            let params = format!("{field}={call}&{event}&Unknown=1");
            let response = match is_get {
                true => connection.get(&format!("/api/v1/{path}?{params}")),
                false => connection.form(&format!("/api/v1/{path}"), &params),
            };
            assert_eq!(response.status, 200, "{path} {}", response.text());
            assert_eq!(available(&router), 1, "{path} {params}");
        }
    }
}

#[test]
fn repeated_late_and_foreign_callbacks_change_nothing() {
    let router = one_pod();
    let mut connection = router.connect();
    router.allocate("CA1");
    let completed = "CallSid=CA1&CallStatus=completed";
    assert_acknowledged(&connection.form("/api/v1/twilio/call-status", completed));
    // The pod now serves another call.
    router.allocate("CA2");
    for _ in 0..3 {
        assert_acknowledged(&connection.form("/api/v1/twilio/call-status", completed));
        let stopped = "CallSid=CA1&StreamEvent=stream-stopped";
        assert_acknowledged(&connection.form("/api/v1/twilio/stream-status", stopped));
    }
    assert_acknowledged(
        &connection.form("/api/v1/twilio/call-status", "CallSid=CA9&CallStatus=completed"),
    );
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    // Statuses of a call in progress release nothing.
    for status in ["CallStatus=ringing", "CallStatus=in-progress", "CallStatus=something-new"] {
        let params = format!("CallSid=CA2&{status}");
        assert_acknowledged(&connection.form("/api/v1/twilio/call-status", &params));
    }
    let started = "CallSid=CA2&StreamEvent=stream-started";
    assert_acknowledged(&connection.form("/api/v1/twilio/stream-status", started));
    // The end of a stream to a pod that the call has left.
    let elsewhere = "/api/v1/twilio/stream-status?pod_name=voice-agent-7";
    assert_acknowledged(&connection.form(elsewhere, "CallSid=CA2&StreamEvent=stream-stopped"));
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    let here = "/api/v1/twilio/stream-status?pod_name=voice-agent-0";
    assert_acknowledged(&connection.form(here, "CallSid=CA2&StreamEvent=stream-stopped"));
    assert_eq!(available(&router), 1);
    assert_eq!(router.release("CA2").0, 404, "the callback already released the call");
}

#[test]
fn invalid_callbacks_are_rejected() {
    let router = one_pod();
    router.allocate("CA1");
    let mut connection = router.connect();
    let response = connection.form("/api/v1/twilio/call-status", "CallSid=CA1");
    assert!(response.text().contains("<Hangup/>"), "{}", response.text());
    let response = connection.get("/api/v1/exotel/call-status?CallSid=CA1");
    assert_eq!(response.status, 400);
    let response = connection.get("/api/v1/exotel/call-status?Status=completed");
    assert_eq!(response.status, 400);
    let response = connection
        .form("/api/v1/twilio/stream-status?pod_name=A", "CallSid=CA1&StreamEvent=stream-stopped");
    assert!(response.text().contains("<Hangup/>"));
    assert_eq!(connection.get("/api/v1/unknown/call-status").status, 404);
    assert_eq!(
        connection
            .send("HEAD", "/api/v1/twilio/call-status?CallSid=CA1&CallStatus=completed", &[], b"")
            .status,
        405
    );
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn stream_status_adds_the_callback_url_to_documents() {
    let router = Router::start(&[
        ("PUBLIC_URL", "https://router.example.com/voice/"),
        ("STREAM_STATUS", "on"),
        WITHOUT_GATEWAY,
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
    let response = connection.post("/api/v1/jambonz/allocate", &json!({"call_sid": "CA3"}));
    assert_eq!(response.json().1[0]["actionHook"], url("jambonz"));
    let response = connection.get("/api/v1/exotel/allocate?CallSid=CA4").json().1;
    assert_eq!(response.as_object().unwrap().len(), 1, "{response}");

    // The end of the stream releases the call if the agent does not.
    let path = "/api/v1/twilio/stream-status?pod_name=voice-agent-0";
    assert_acknowledged(&connection.form(path, "CallSid=CA1&StreamEvent=stream-stopped"));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[test]
fn a_callback_body_may_be_a_form_or_json() {
    let router = one_pod();
    let mut connection = router.connect();
    for _ in 0..2 {
        router.allocate("CA1");
        let body = json!({"CallSid": "CA1", "CallStatus": "completed", "x": {"y": []}});
        assert_acknowledged(&connection.post("/api/v1/twilio/call-status", &body));
        assert_eq!(available(&router), 1);
        router.allocate("CA1");
        assert_acknowledged(
            &connection.form("/api/v1/twilio/call-status", "CallSid=CA1&CallStatus=busy"),
        );
        assert_eq!(available(&router), 1);
    }
}

#[test]
fn exotel_callbacks_may_be_multipart_or_json() {
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
    let body =
        json!({"CallSid": "CA2", "Stream": {"Status": "completed", "DisconnectedBy": "user"}});
    assert_eq!(connection.post("/api/v1/exotel/stream-status", &body).status, 200);
    assert_eq!(available(&router), 1);
    let broken = connection.send("POST", path, &headers, b"--C\r\n");
    assert_eq!(broken.status, 400);
    let response = connection.get("/api/v1/exotel/allocate?CallSid=").json().1;
    assert!(response["error"].as_str().unwrap().contains("CallSid is missing"), "{response}");
}
