//! Status callbacks and response documents.

use data_encoding::BASE64;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[test]
fn every_provider_gets_a_hang_up_document_in_its_format() {
    for provider in Provider::ALL {
        let dialect = provider.dialect();
        let (hang_up, acknowledgement) = (dialect.silent_hang_up(), dialect.acknowledgement());
        assert_eq!(hang_up.content_type, acknowledgement.content_type, "{provider}");
        let is_json = serde_json::from_str::<Value>(&hang_up.body).is_ok();
        assert_eq!(is_json, hang_up.content_type == "application/json", "{provider}");
    }
}

#[test]
fn callbacks_of_every_provider_report_ended_calls_and_streams() {
    fn ended(provider: Provider, is_stream: bool, params: &[(&str, &str)]) -> Option<bool> {
        let headers = HeaderMap::new();
        let target = format!("/x?{}", form(params));
        let webhook = Webhook {
            is_get: true,
            public_url: "",
            target: &target,
            headers: &headers,
            body: &[],
            body_format: BodyFormat::Form,
            received_at: 0,
            query: Params::default(),
            body_params: Params::default(),
            coverage: Coverage::Everything,
            fingerprint: None,
        };
        let (webhook, dialect) = (webhook.read().unwrap(), provider.dialect());
        if is_stream { dialect.stream_ended(&webhook) } else { dialect.call_ended(&webhook) }
    }
    use Provider::{Exotel, Jambonz, Plivo, SignalWire, Telnyx, Twilio, Vonage};
    for provider in [Twilio, SignalWire, Telnyx] {
        for over in ["completed", "busy", "failed", "no-answer", "canceled"] {
            assert_eq!(ended(provider, false, &[("CallStatus", over)]), Some(true), "{over}");
        }
        for lasts in ["ringing", "in-progress", "queued", "initiated", "answered"] {
            assert_eq!(ended(provider, false, &[("CallStatus", lasts)]), Some(false), "{lasts}");
        }
        let event = |event| ended(provider, true, &[("StreamEvent", event)]);
        assert_eq!(event("stream-started"), Some(false));
        assert_eq!(event("stream-stopped"), Some(true));
        assert_eq!(event("stream-error"), Some(true));
    }
    assert_eq!(ended(Plivo, false, &[("HangupCause", "NORMAL_CLEARING")]), Some(true));
    assert_eq!(ended(Plivo, false, &[("CallStatus", "in-progress")]), Some(false));
    for (event, over) in [
        ("StartStream", false),
        ("StopStream", true),
        ("DroppedStream", true),
        ("stopped", true),
        ("PlayedStream", false),
    ] {
        assert_eq!(ended(Plivo, true, &[("Event", event)]), Some(over), "{event}");
    }
    assert_eq!(ended(Exotel, false, &[("Status", "completed")]), Some(true));
    assert_eq!(ended(Exotel, false, &[("EventType", "terminal"), ("Status", "x")]), Some(true));
    assert_eq!(
        ended(Exotel, false, &[("EventType", "answered"), ("Status", "in-progress")]),
        Some(false)
    );
    assert_eq!(ended(Exotel, true, &[("Stream[Status]", "completed")]), Some(true));
    assert_eq!(ended(Exotel, true, &[("Stream", r#"{"Status": "failed"}"#)]), Some(true));
    assert_eq!(ended(Exotel, true, &[("Stream", r#"{"DisconnectedBy": "user"}"#)]), Some(true));
    assert_eq!(ended(Exotel, true, &[("EventType", "stream-start")]), Some(false));
    assert_eq!(ended(Vonage, false, &[("status", "completed")]), Some(true));
    assert_eq!(ended(Vonage, false, &[("status", "answered")]), Some(false));
    assert_eq!(ended(Vonage, true, &[("status", "disconnected")]), Some(true));
    assert_eq!(ended(Jambonz, false, &[("call_status", "no-answer")]), Some(true));
    assert_eq!(ended(Jambonz, false, &[("call_status", "in-progress")]), Some(false));
    assert_eq!(ended(Jambonz, true, &[]), Some(true));
    assert_eq!(ended(Jambonz, true, &[("call_status", "trying")]), Some(false));
    for provider in Provider::ALL {
        assert_eq!(ended(provider, false, &[]), None, "{provider}");
    }
}

#[test]
fn documents_carry_the_trace_context_where_the_format_allows_it() {
    let call = "c1".parse().unwrap();
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let untraced = Stream {
        url: "wss://a/b",
        call: &call,
        status_url: None,
        after_stream_url: None,
        traceparent: None,
        parameters: &Parameters::NONE,
    };
    let traced = Stream { traceparent: Some(traceparent), ..untraced };
    for (provider, expected) in [
        (Provider::Twilio, Some(r#"<Parameter name="traceparent" value="{}"/></Stream>"#)),
        (Provider::SignalWire, Some(r#"<Parameter name="traceparent" value="{}"/></Stream>"#)),
        (Provider::Telnyx, Some(r#"<Parameter name="traceparent" value="{}"/></Stream>"#)),
        (Provider::Vonage, Some(r#""headers":{"call_sid":"c1","traceparent":"{}"}"#)),
        (Provider::Jambonz, Some(r#""metadata":{"traceparent":"{}"}"#)),
        (Provider::Plivo, None),
        (Provider::Exotel, None),
    ] {
        let body = |stream: &Stream<'_>| provider.dialect().connect(stream).body;
        assert!(!body(&untraced).contains("traceparent"), "{provider}");
        match expected {
            Some(expected) => {
                let expected = expected.replace("{}", traceparent);
                assert!(body(&traced).contains(&expected), "{provider}: {}", body(&traced));
            }
            None => assert_eq!(body(&traced), body(&untraced), "{provider}"),
        }
    }
}

#[test]
fn documents_carry_parameters_in_the_way_of_their_provider() {
    let call = "c1".parse().unwrap();
    let parameters = Parameters::new([("name", "\"A\" & <B> ü"), ("order", "17")]).unwrap();
    let stream = Stream {
        url: "wss://a/b",
        call: &call,
        status_url: None,
        after_stream_url: None,
        traceparent: Some("00-1-2-01"),
        parameters: &parameters,
    };
    let xml = concat!(
        r#"<Parameter name="name" value="&quot;A&quot; &amp; &lt;B&gt; ü"/>"#,
        r#"<Parameter name="order" value="17"/><Parameter name="traceparent" value="00-1-2-01"/>"#
    );
    let json = r#""name":"\"A\" & <B> ü","order":"17","traceparent":"00-1-2-01"}"#;
    for (provider, expected) in [
        (Provider::Twilio, xml),
        (Provider::SignalWire, xml),
        (Provider::Telnyx, xml),
        (Provider::Vonage, &format!(r#""headers":{{"call_sid":"c1",{json}"#)),
        (Provider::Jambonz, &format!(r#""metadata":{{{json}"#)),
        (Provider::Plivo, r#" extraHeaders="order=17">"#),
        (Provider::Exotel, r#"{"url":"wss://a/b"}"#),
    ] {
        let body = provider.dialect().connect(&stream).body;
        assert!(body.contains(expected), "{provider}: {expected} is not in {body}");
    }
}

#[test]
fn signalwire_telnyx_vonage_and_jambonz_get_their_own_documents() {
    let call = "c1".parse().unwrap();
    let stream = Stream {
        url: "wss://a/b",
        call: &call,
        status_url: None,
        after_stream_url: None,
        traceparent: None,
        parameters: &Parameters::NONE,
    };
    let body = |provider: Provider| provider.dialect().connect(&stream).body;
    assert_eq!(body(Provider::SignalWire), body(Provider::Twilio));
    assert_eq!(
        body(Provider::Telnyx),
        r#"<?xml version="1.0" encoding="UTF-8"?><Response><Connect><Stream url="wss://a/b" bidirectionalMode="rtp" bidirectionalCodec="PCMU"/></Connect></Response>"#
    );
    assert_eq!(
        serde_json::from_str::<Value>(&body(Provider::Vonage)).unwrap(),
        json!([{"action": "connect", "endpoint": [{"type": "websocket", "uri": "wss://a/b",
            "content-type": "audio/l16;rate=16000", "headers": {"call_sid": "c1"}}]}])
    );
    assert_eq!(
        serde_json::from_str::<Value>(&body(Provider::Jambonz)).unwrap(),
        json!([{"verb": "listen", "url": "wss://a/b", "sampleRate": 8000,
            "bidirectionalAudio": {"enabled": true, "streaming": true, "sampleRate": 8000}}])
    );
}

/// Whether a document is valid JSON or balanced XML.
fn well_formed(document: &Document) -> bool {
    if document.content_type == "application/json" {
        return serde_json::from_str::<Value>(&document.body).is_ok();
    }
    let mut reader = quick_xml::Reader::from_str(&document.body);
    reader.config_mut().check_end_names = true;
    let (mut depth, mut elements) = (0, 0);
    loop {
        match reader.read_event() {
            Ok(quick_xml::events::Event::Eof) => return depth == 0 && elements > 0,
            Ok(quick_xml::events::Event::Start(_)) => (depth, elements) = (depth + 1, elements + 1),
            Ok(quick_xml::events::Event::End(_)) => depth -= 1,
            Ok(quick_xml::events::Event::Empty(_)) => elements += 1,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

proptest! {
    /// Any input yields a well-formed document or an error, without a panic, and no unsigned
    /// request is verified.
    #[test]
    fn any_request_yields_a_well_formed_document_or_an_error(
        index in 0..Provider::ALL.len(),
        is_get: bool,
        is_json: bool,
        query in "\\PC{0,40}|([a-zA-Z_]{1,8}=[^#]{0,8}&?){0,4}",
        body in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..80),
            "(CallSid|CallUUID|uuid|call_sid|merchant_id|flow|template|Stream)=.{0,20}".prop_map(String::into_bytes),
            r#"\{"(CallSid|call_sid|uuid)": ?("\PC{0,20}"|[0-9]{1,20}|null|\[\])\}"#.prop_map(String::into_bytes),
        ],
        header in "[ -~]{0,60}",
        sentence in "\\PC{0,60}",
    ) {
        let provider = Provider::ALL[index];
        let mut request = TestRequest::new(provider, &format!("/api/v1/x?{query}"), "k");
        if provider == Provider::Telnyx {
            request.keys = BASE64.encode(&[9; 32]);
        }
        (request.is_get, request.is_json, request.body) = (is_get, is_json, body);
        for name in ["x-twilio-signature", "x-signalwire-signature", "x-plivo-signature-v3",
            "x-plivo-signature-v3-nonce", "telnyx-signature-ed25519", "authorization", "jambonz-signature"] {
            request = request.with(name, header.clone());
        }
        request = request.with("telnyx-timestamp", NOW.to_string());
        prop_assert!(!request.is_verified());

        let headers = HeaderMap::new();
        let webhook = Webhook {
            is_get: request.is_get, public_url: BASE, target: &request.target, headers: &headers,
            body: &request.body,
            body_format: if request.is_json { BodyFormat::Json } else { BodyFormat::Form },
            received_at: NOW,
            query: Params::default(), body_params: Params::default(),
         coverage: Coverage::Everything,
            fingerprint: None };
        if let Ok(webhook) = webhook.read() {
            provider.dialect().call_ended(&webhook);
            provider.dialect().stream_ended(&webhook);
            if let Ok(call_request) = CallRequest::from_webhook(provider, &webhook) {
                let urls = WsUrls { base: "wss://a".into(), path: DEFAULT_WS_PATH.parse().unwrap() };
                let url = urls.url(&"pod-1".parse().unwrap(), &call_request);
                let target = Some(request.target.as_str());
                let stream =
                    Stream { url: &url, call: &call_request.call, status_url: target, after_stream_url: target, traceparent: None, parameters: &call_request.parameters };
                prop_assert!(well_formed(&provider.dialect().connect(&stream)));
                let hold = HoldOptions {
                    sentence: Some(&sentence), audio: target, pause_seconds: 5, url: &request.target,
                };
                let held = provider.dialect().hold(&hold);
                prop_assert!(held.as_ref().is_none_or(well_formed));
            }
        }
        if let Some(document) = provider.dialect().hang_up(&sentence) {
            prop_assert!(well_formed(&document));
        }
        prop_assert!(well_formed(&provider.dialect().acknowledgement()));
    }
}
