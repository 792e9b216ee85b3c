//! What is read from callbacks, and the documents we answer.

use data_encoding::BASE64;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[test]
fn every_provider_is_told_goodbye_in_its_own_format() {
    for provider in Provider::ALL {
        let dialect = provider.dialect();
        let (goodbye, noted) = (dialect.goodbye(), dialect.noted());
        assert_eq!(goodbye.content_type, noted.content_type, "{provider}");
        let is_json = serde_json::from_str::<Value>(&goodbye.body).is_ok();
        assert_eq!(is_json, goodbye.content_type == "application/json", "{provider}");
    }
}

#[test]
fn every_provider_says_when_a_call_or_a_stream_is_over() {
    fn says(provider: Provider, is_stream: bool, params: &[(&str, &str)]) -> Option<bool> {
        let headers = HeaderMap::new();
        let target = format!("/x?{}", form(params));
        let webhook = Webhook {
            is_get: true,
            public_url: "",
            target: &target,
            headers: &headers,
            body: &[],
            content: Content::Form,
            at: 0,
            query: Params::default(),
            sent: Params::default(),
            covered: Covered::Everything,
            fingerprint: None,
        };
        let (webhook, dialect) = (webhook.read().unwrap(), provider.dialect());
        if is_stream { dialect.stream_is_over(&webhook) } else { dialect.call_is_over(&webhook) }
    }
    use Provider::{Exotel, Jambonz, Plivo, SignalWire, Telnyx, Twilio, Vonage};
    for provider in [Twilio, SignalWire, Telnyx] {
        for over in ["completed", "busy", "failed", "no-answer", "canceled"] {
            assert_eq!(says(provider, false, &[("CallStatus", over)]), Some(true), "{over}");
        }
        for lasts in ["ringing", "in-progress", "queued", "initiated", "answered"] {
            assert_eq!(says(provider, false, &[("CallStatus", lasts)]), Some(false), "{lasts}");
        }
        let event = |event| says(provider, true, &[("StreamEvent", event)]);
        assert_eq!(event("stream-started"), Some(false));
        assert_eq!(event("stream-stopped"), Some(true));
        assert_eq!(event("stream-error"), Some(true));
    }
    assert_eq!(says(Plivo, false, &[("HangupCause", "NORMAL_CLEARING")]), Some(true));
    assert_eq!(says(Plivo, false, &[("CallStatus", "in-progress")]), Some(false));
    for (event, over) in [
        ("StartStream", false),
        ("StopStream", true),
        ("DroppedStream", true),
        ("stopped", true),
        ("PlayedStream", false),
    ] {
        assert_eq!(says(Plivo, true, &[("Event", event)]), Some(over), "{event}");
    }
    assert_eq!(says(Exotel, false, &[("Status", "completed")]), Some(true));
    assert_eq!(says(Exotel, false, &[("EventType", "terminal"), ("Status", "x")]), Some(true));
    assert_eq!(
        says(Exotel, false, &[("EventType", "answered"), ("Status", "in-progress")]),
        Some(false)
    );
    assert_eq!(says(Exotel, true, &[("Stream[Status]", "completed")]), Some(true));
    assert_eq!(says(Exotel, true, &[("Stream", r#"{"Status": "failed"}"#)]), Some(true));
    assert_eq!(says(Exotel, true, &[("Stream", r#"{"DisconnectedBy": "user"}"#)]), Some(true));
    assert_eq!(says(Exotel, true, &[("EventType", "stream-start")]), Some(false));
    assert_eq!(says(Vonage, false, &[("status", "completed")]), Some(true));
    assert_eq!(says(Vonage, false, &[("status", "answered")]), Some(false));
    assert_eq!(says(Vonage, true, &[("status", "disconnected")]), Some(true));
    assert_eq!(says(Jambonz, false, &[("call_status", "no-answer")]), Some(true));
    assert_eq!(says(Jambonz, false, &[("call_status", "in-progress")]), Some(false));
    assert_eq!(says(Jambonz, true, &[]), Some(true));
    assert_eq!(says(Jambonz, true, &[("call_status", "trying")]), Some(false));
    for provider in Provider::ALL {
        assert_eq!(says(provider, false, &[]), None, "{provider}");
    }
}

#[test]
fn a_trace_goes_on_where_a_document_has_a_place_for_it() {
    let call = "c1".parse().unwrap();
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let untraced = Stream {
        url: "wss://a/b",
        call: &call,
        status_url: None,
        after_url: None,
        traceparent: None,
    };
    let traced = Stream { traceparent: Some(traceparent), ..untraced };
    for (provider, place) in [
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
        match place {
            Some(place) => {
                let place = place.replace("{}", traceparent);
                assert!(body(&traced).contains(&place), "{provider}: {}", body(&traced));
            }
            None => assert_eq!(body(&traced), body(&untraced), "{provider}"),
        }
    }
}

#[test]
fn documents_of_the_later_providers_are_theirs() {
    let call = "c1".parse().unwrap();
    let stream = Stream {
        url: "wss://a/b",
        call: &call,
        status_url: None,
        after_url: None,
        traceparent: None,
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

/// Reads a document as its receiver would; what text it says.
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
    /// Whatever a provider sends: a call with a well-formed document, or a clear
    /// refusal with one. Nothing panics, and nothing unsigned is genuine.
    #[test]
    fn any_request_whatsoever_gives_a_well_formed_document_or_an_error(
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
        let mut sent = Sent::new(provider, &format!("/api/v1/x?{query}"), "k");
        if provider == Provider::Telnyx {
            sent.keys = BASE64.encode(&[9; 32]);
        }
        (sent.is_get, sent.is_json, sent.body) = (is_get, is_json, body);
        for name in ["x-twilio-signature", "x-signalwire-signature", "x-plivo-signature-v3",
            "x-plivo-signature-v3-nonce", "telnyx-signature-ed25519", "authorization", "jambonz-signature"] {
            sent = sent.with(name, header.clone());
        }
        sent = sent.with("telnyx-timestamp", NOW.to_string());
        prop_assert!(!sent.is_genuine());

        let headers = HeaderMap::new();
        let webhook = Webhook {
            is_get: sent.is_get, public_url: BASE, target: &sent.target, headers: &headers,
            body: &sent.body, content: if sent.is_json { Content::Json } else { Content::Form }, at: NOW,
            query: Params::default(), sent: Params::default(),
         covered: Covered::Everything,
            fingerprint: None };
        if let Ok(webhook) = webhook.read() {
            provider.dialect().call_is_over(&webhook);
            provider.dialect().stream_is_over(&webhook);
            if let Ok(request) = CallRequest::from_webhook(provider, &webhook) {
                let urls = WsUrls { base: "wss://a".into(), path: DEFAULT_WS_PATH.parse().unwrap() };
                let url = urls.url(&"pod-1".parse().unwrap(), &request);
                let target = Some(sent.target.as_str());
                let stream =
                    Stream { url: &url, call: &request.call, status_url: target, after_url: target, traceparent: None };
                prop_assert!(well_formed(&provider.dialect().connect(&stream)));
                let hold = OnHold {
                    sentence: Some(&sentence), audio: target, pause_seconds: 5, url: &sent.target,
                };
                let held = provider.dialect().hold(&hold);
                prop_assert!(held.as_ref().is_none_or(well_formed));
            }
        }
        if let Some(document) = provider.dialect().hang_up(&sentence) {
            prop_assert!(well_formed(&document));
        }
        prop_assert!(well_formed(&provider.dialect().noted()));
    }
}
