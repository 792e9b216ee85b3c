use quick_xml::{Reader, events::Event};
use serde_json::json;

use testkit::{HttpResponse, Router};

/// Returns the element names of an XML document; fails unless it is well-formed.
fn elements(response: &HttpResponse) -> Vec<String> {
    assert_eq!(response.status, 200);
    assert!(response.header("content-type").unwrap().starts_with("text/xml"));
    let text = response.text();
    let mut reader = Reader::from_str(&text);
    let (mut names, mut depth) = (Vec::new(), 0);
    loop {
        match reader.read_event().unwrap_or_else(|error| panic!("{error}: {text}")) {
            Event::Start(start) => {
                depth += 1;
                names.push(start.name().as_ref().to_string());
            }
            Event::Empty(empty) => names.push(empty.name().as_ref().to_string()),
            Event::End(_) => depth -= 1,
            Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(depth, 0, "{text}");
    names
}

const TWILIO_HANGUP: [&str; 3] = ["Response", "Say", "Hangup"];
const PLIVO_HANGUP: [&str; 3] = ["Response", "Speak", "Hangup"];

#[test]
fn the_twilio_webhook_returns_a_stream_for_post_and_get() {
    let router = Router::start(&[("VOICE_AGENT_BASE_URL", "wss://voice.example.com")]);
    let path = "/api/v1/twilio/allocate?merchant_id=acme&flow=v2&template=hello";
    let response =
        router.connect().form(path, "AccountSid=AC1&CallSid=CA1&From=%2B14158675310&New=1");
    assert_eq!(elements(&response), ["Response", "Connect", "Stream"]);
    assert!(response.text().contains(
        r#"<Stream url="wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/twilio/callback/hello/v2"/>"#
    ));
    assert_eq!(router.get("/api/v1/calls/CA1").1["merchant_id"], "acme");
    let again = router.connect().get("/api/v1/twilio/allocate?CallSid=CA1&template=hello");
    assert_eq!(again.text(), response.text());
}

#[test]
fn the_plivo_webhook_returns_a_stream() {
    let router = Router::start(&[]);
    let response = router.connect().form("/api/v1/plivo/allocate", "CallUUID=b1b1d7a4-1f5c&From=1");
    assert_eq!(elements(&response), ["Response", "Stream"]);
    assert!(response.text().contains("/plivo/callback/order-confirmation/v2</Stream>"));
}

#[test]
fn the_exotel_webhook_accepts_query_form_and_json() {
    let router = Router::start(&[]);
    let path = "/api/v1/exotel/allocate";
    let mut connection = router.connect();
    let answers = [
        connection.get(&format!("{path}?CallSid=CA1&CallFrom=1")),
        connection.form(path, "CallSid=CA1"),
        connection.post(path, &json!({"CallSid": "CA1", "Direction": "incoming"})),
        connection.send("POST", path, &[], br#"{"CallSid": "CA1"}"#),
    ];
    for response in answers {
        let (status, body) = response.json();
        assert_eq!((status, body.as_object().unwrap().len()), (200, 1), "{body}");
        let url = body["url"].as_str().unwrap();
        let base = format!("ws://localhost:{}/media/CA1/", router.address.port());
        let path = "/agent/voice/breeze-buddy/exotel/callback/template/v2";
        let token = url.strip_prefix(&base).and_then(|rest| rest.strip_suffix(path));
        assert!(token.is_some_and(|token| !token.is_empty() && !token.contains('/')), "{url}");
    }
    let (status, body) = connection.get(path).json();
    assert_eq!(status, 400);
    assert!(body["error"].as_str().unwrap().contains("CallSid is missing: in the Exotel flow"));
}

#[test]
fn a_full_fleet_is_answered_with_a_message_and_a_hangup() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    router.allocate("CA1");
    let mut connection = router.connect();
    assert_eq!(elements(&connection.form("/api/v1/twilio/allocate", "CallSid=CA2")), TWILIO_HANGUP);
    assert_eq!(elements(&connection.form("/api/v1/plivo/allocate", "CallUUID=CA2")), PLIVO_HANGUP);
    let (status, body) = connection.get("/api/v1/exotel/allocate?CallSid=CA2").json();
    assert_eq!((status, &body["details"]["chain"][0]["reason"]), (503, &json!("at_capacity")));
}

#[test]
fn invalid_webhooks_get_a_hangup_document_and_change_nothing() {
    let router = Router::start(&[]);
    let before = router.status();
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let long = format!("CallSid={}", "A".repeat(129));
    let huge = format!("CallSid=CA1&x={}", "y".repeat(70_000));
    type Headers<'a> = &'a [(&'a str, &'a str)];
    let bad: [(&str, Headers, &[u8]); 12] = [
        ("", &form, b""),
        ("", &form, b"CallSid="),
        ("", &form, b"Callsid=CA1"),
        ("", &form, b"CallSid=%3C/Say%3E%3CDial%3E1%3C/Dial%3E"),
        ("", &form, b"CallSid=%FF%FE"),
        ("", &form, b"CallSid=\xff"),
        ("", &form, long.as_bytes()),
        ("", &form, huge.as_bytes()),
        ("?merchant_id=a%22b", &form, b"CallSid=CA1"),
        ("?template=..", &form, b"CallSid=CA1"),
        ("?flow=a/b", &form, b"CallSid=CA1"),
        ("", &[("content-type", "application/octet-stream")], b"CallSid=CA1"),
    ];
    for (query, headers, body) in bad {
        for (provider, hangup) in [("twilio", TWILIO_HANGUP), ("plivo", PLIVO_HANGUP)] {
            let body = String::from_utf8_lossy(body)
                .replace("CallSid", if provider == "plivo" { "CallUUID" } else { "CallSid" });
            let path = format!("/api/v1/{provider}/allocate{query}");
            let response = router.connect().send("POST", &path, headers, body.as_bytes());
            assert_eq!(elements(&response), hangup, "{path} {body:.80}");
        }
        let path = format!("/api/v1/exotel/allocate{query}");
        let status = router.connect().send("POST", &path, headers, body).status;
        assert!((400..500).contains(&status), "{path}: {status}");
    }
    assert_eq!(router.status(), before);
}
