//! Signatures as the providers' own SDKs make them, and everything near them.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    signature::{Hash, hmac, sha256_hex},
    *,
};

const BASE: &str = "https://router.example.com";
const NOW: u64 = 1_750_000_000;

/// A request in the making.
#[derive(Debug, Clone)]
struct Sent {
    provider: Provider,
    is_get: bool,
    base: String,
    target: String,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    is_json: bool,
    at: u64,
    keys: String,
}

impl Sent {
    fn new(provider: Provider, target: &str, keys: &str) -> Self {
        Self {
            provider,
            is_get: false,
            base: BASE.into(),
            target: target.into(),
            headers: Vec::new(),
            body: Vec::new(),
            is_json: false,
            at: NOW,
            keys: keys.into(),
        }
    }

    fn with(mut self, header: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((header, value.into()));
        self
    }

    fn form(mut self, params: &[(&str, &str)]) -> Self {
        self.body = form(params).into();
        self
    }

    fn json(mut self, body: &str) -> Self {
        (self.body, self.is_json) = (body.into(), true);
        self
    }

    fn get(mut self) -> Self {
        self.is_get = true;
        self
    }

    fn verify(&self) -> Result<(Covered, Result<CallRequest, InvalidName>), String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|it| it.to_string())?;
            headers.insert(HeaderName::from_static(name), value);
        }
        let webhook = Webhook {
            is_get: self.is_get,
            public_url: &self.base,
            target: &self.target,
            headers: &headers,
            body: &self.body,
            content: if self.is_json { Content::Json } else { Content::Form },
            at: self.at,
            query: Params::default(),
            sent: Params::default(),
            covered: Covered::Everything,
        };
        let mut webhook = webhook.read().map_err(|error| error.to_string())?;
        let keys = self.provider.dialect().keys(&self.keys).unwrap();
        let covered =
            self.provider.dialect().verify(&webhook, &keys).map_err(|error| error.to_string())?;
        webhook.covered = covered;
        Ok((covered, CallRequest::from_webhook(self.provider, &webhook)))
    }

    fn is_genuine(&self) -> bool {
        self.verify().is_ok()
    }
}

fn form(params: &[(&str, &str)]) -> String {
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs = params.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}

fn vectors(text: &str) -> Vec<Value> {
    serde_json::from_str(text).unwrap()
}

fn text<'a>(vector: &'a Value, name: &str) -> &'a str {
    vector[name].as_str().unwrap()
}

fn params_of(vector: &Value) -> Vec<(&str, &str)> {
    let params = vector["params"].as_object().unwrap();
    params.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect()
}

fn twilio_vectors() -> Vec<Sent> {
    let read = |vector: &Value| {
        let target = text(vector, "url").strip_prefix(BASE).unwrap();
        let sent = Sent::new(Provider::Twilio, target, text(vector, "token"))
            .with("x-twilio-signature", text(vector, "sig"));
        match &vector["params"] {
            Value::String(body) => sent.json(body),
            Value::Object(params) if params.is_empty() => sent.get(),
            _ => sent.form(&params_of(vector)),
        }
    };
    vectors(include_str!("../../tests/vectors/twilio.json")).iter().map(read).collect()
}

fn plivo_vectors() -> Vec<Sent> {
    let read = |vector: &Value| {
        let target = text(vector, "url").strip_prefix(BASE).unwrap();
        let sent = Sent::new(Provider::Plivo, target, text(vector, "token"))
            .with("x-plivo-signature-v3", text(vector, "sig"))
            .with("x-plivo-signature-v3-nonce", text(vector, "nonce"))
            .form(&params_of(vector));
        if text(vector, "method") == "GET" { sent.get() } else { sent }
    };
    vectors(include_str!("../../tests/vectors/plivo.json")).iter().map(read).collect()
}

fn telnyx_signed(body: &str, at: u64) -> Sent {
    use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let signature = pair.sign(format!("{at}|{body}").as_bytes());
    let mut sent = Sent::new(
        Provider::Telnyx,
        "/api/v1/telnyx/allocate?merchant_id=acme",
        &BASE64.encode(pair.public_key().as_ref()),
    )
    .with("telnyx-signature-ed25519", BASE64.encode(signature.as_ref()))
    .with("telnyx-timestamp", at.to_string());
    sent.body = body.into();
    sent
}

fn token_of(claims: &Value, key: &str, head: &Value) -> String {
    let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let signed = format!("{}.{}", part(head), part(claims));
    let tag = hmac(Hash::Sha256, &key.into(), &[signed.as_bytes()]);
    format!("{signed}.{}", BASE64URL_NOPAD.encode(tag.as_ref()))
}

fn vonage_signed(target: &str, claims: &Value) -> Sent {
    let token = token_of(claims, "vonage secret", &json!({"alg": "HS256", "typ": "JWT"}));
    Sent::new(Provider::Vonage, target, "vonage secret")
        .with("authorization", format!("Bearer {token}"))
}

fn jambonz_signed(body: &str, at: u64) -> Sent {
    let tag = hmac(Hash::Sha256, &"js".into(), &[format!("{at}.{body}").as_bytes()]);
    Sent::new(Provider::Jambonz, "/api/v1/jambonz/allocate", "js")
        .with("jambonz-signature", format!("t={at},v1={}", HEXLOWER.encode(tag.as_ref())))
        .json(body)
}

/// One genuine request of each kind.
fn genuine() -> Vec<Sent> {
    let mut all = twilio_vectors();
    all.extend(plivo_vectors());
    all.push(telnyx_signed("CallSid=v3:abc&From=%2B1", NOW));
    let body = r#"{"uuid":"63f61863","status":"completed"}"#;
    let claims = json!({"iat": NOW, "payload_hash": sha256_hex(body.as_bytes())});
    all.push(vonage_signed("/api/v1/vonage/call-status", &claims).json(body));
    let query = r#"{"from":"1","uuid":"63f61863"}"#;
    let claims = json!({"iat": NOW, "payload_hash": sha256_hex(query.as_bytes())});
    let target = "/api/v1/vonage/allocate?merchant_id=acme&from=1&uuid=63f61863";
    all.push(vonage_signed(target, &claims).get());
    all.push(jambonz_signed(r#"{"call_sid":"abc","call_status":"trying"}"#, NOW));
    all
}

#[test]
fn what_the_sdks_sign_is_genuine() {
    for sent in genuine() {
        assert!(sent.is_genuine(), "{:?}: {sent:?}", sent.verify());
    }
}

/// Changes one byte to another that is still fit for its place.
fn changed(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] = match bytes[at] {
        b'a'..=b'y' | b'A'..=b'Y' | b'0'..=b'8' => bytes[at] + 1,
        b'z' => b'y',
        b'Z' => b'Y',
        b'9' => b'8',
        // A space in a form may be written in two ways.
        b'+' => b'-',
        _ => b'x',
    };
    bytes
}

#[test]
fn with_any_byte_of_url_body_signature_or_key_changed_nothing_is_genuine() {
    for sent in genuine() {
        let signs_urls = sent.provider.dialect().signs_urls();
        let is_refused = |what: &str, changed: &Sent| {
            assert!(!changed.is_genuine(), "{what}: {changed:?}");
        };
        for at in 0..sent.body.len() {
            let body = changed(&sent.body, at);
            is_refused("body", &Sent { body, ..sent.clone() });
        }
        for at in 0..sent.target.len() * usize::from(signs_urls) {
            let target = String::from_utf8(changed(sent.target.as_bytes(), at)).unwrap();
            is_refused("target", &Sent { target, ..sent.clone() });
        }
        for (index, (name, value)) in sent.headers.iter().enumerate() {
            for at in 0..value.len() {
                let mut headers = sent.headers.clone();
                headers[index].1 = String::from_utf8(changed(value.as_bytes(), at)).unwrap();
                // The name of the scheme is not part of a token.
                if *name != "authorization" || at >= "bearer ".len() {
                    is_refused(name, &Sent { headers, ..sent.clone() });
                }
            }
            for cut in [0, 1, value.len() / 2, value.len() - 1] {
                let mut headers = sent.headers.clone();
                headers[index].1.truncate(cut);
                is_refused("cut short", &Sent { headers, ..sent.clone() });
            }
            let mut headers = sent.headers.clone();
            headers.remove(index);
            is_refused("without a header", &Sent { headers, ..sent.clone() });
        }
        let other = if sent.provider == Provider::Telnyx {
            BASE64.encode(&[9; 32])
        } else {
            format!("{}x", sent.keys)
        };
        is_refused("another key", &Sent { keys: other.clone(), ..sent.clone() });
        let both = format!("{other},{}", sent.keys);
        assert!(Sent { keys: both, ..sent.clone() }.is_genuine(), "one of two keys is enough");
        if signs_urls {
            is_refused(
                "another host",
                &Sent { base: "https://evil.example".into(), ..sent.clone() },
            );
        }
    }
}

#[test]
fn a_query_that_vonage_signed_cannot_be_changed() {
    let sent = genuine().into_iter().rfind(|sent| sent.provider == Provider::Vonage).unwrap();
    for (from, to) in [("63f61863", "63f61864"), ("from=1", "from=2"), ("&from=1", "")] {
        let target = sent.target.replace(from, to);
        assert!(!Sent { target, ..sent.clone() }.is_genuine(), "{from}");
    }
}

#[test]
fn twilio_may_sign_with_or_without_a_port_and_with_a_newer_hash() {
    let token = Secret::from("t");
    let signed = |hash, url: &str| BASE64.encode(hmac(hash, &token, &[url.as_bytes()]).as_ref());
    let target = "/api/v1/twilio/allocate?CallSid=CA1";
    for (base, signed_base, genuine) in [
        (BASE, "https://router.example.com:443", true),
        (BASE, "https://router.example.com:8443", false),
        ("https://router.example.com:8443", "https://router.example.com:8443", true),
        ("https://router.example.com:8443", BASE, true),
        ("http://router.example.com", "http://router.example.com:80", true),
        ("https://router.example.com/prefix", "https://router.example.com/prefix", true),
    ] {
        let url = format!("{signed_base}{target}");
        let mut sent = Sent::new(Provider::Twilio, target, "t")
            .get()
            .with("x-twilio-signature", signed(Hash::Sha1, &url));
        sent.base = base.into();
        assert_eq!(sent.is_genuine(), genuine, "{base} {signed_base}");
    }
    let settings = "x-twilio-webhooks-signature-settings";
    let sent = Sent::new(Provider::Twilio, target, "t")
        .get()
        .with("x-twilio-signature", signed(Hash::Sha256, &format!("{BASE}{target}")));
    assert!(!sent.is_genuine());
    assert!(sent.clone().with(settings, "key=k,algorithm=HMAC_SHA256").is_genuine());
    assert!(!sent.clone().with(settings, "key=k").is_genuine());
    assert!(!sent.with(settings, "algorithm=none").is_genuine());
}

#[test]
fn repeated_parameters_count_once_for_twilio_and_each_time_for_plivo() {
    let params = [("b", "2"), ("a", "3"), ("b", "1"), ("b", "2")];
    let tag = hmac(Hash::Sha1, &"t".into(), &[format!("{BASE}/xa3b1b2").as_bytes()]);
    let sent = Sent::new(Provider::Twilio, "/x", "t")
        .with("x-twilio-signature", BASE64.encode(tag.as_ref()))
        .form(&params);
    assert!(sent.is_genuine());
    let tag = hmac(Hash::Sha256, &"t".into(), &[format!("{BASE}/x?a3b1b2b2.n").as_bytes()]);
    let sent =
        Sent::new(Provider::Plivo, "/x", "t").with("x-plivo-signature-v3-nonce", "n").form(&params);
    let signature = BASE64.encode(tag.as_ref());
    for header in ["x-plivo-signature-v3", "x-plivo-signature-ma-v3"] {
        assert!(sent.clone().with(header, &signature).is_genuine(), "{header}");
        assert!(sent.clone().with(header, format!("AAAA, {signature}")).is_genuine());
        assert!(!sent.clone().with(header, ",").is_genuine());
    }
    let v2 = sent.clone().with("x-plivo-signature-v2", &signature);
    assert!(!v2.is_genuine(), "V2 does not cover the body");
}

#[test]
fn a_body_that_nobody_signed_is_not_believed() {
    // A GET's body is not part of what is signed.
    let [.., get] = &twilio_vectors()[..] else { panic!() };
    let mut with_body = get.clone();
    with_body.body = b"CallSid=CA666&merchant_id=evil".to_vec();
    let (_, request) = with_body.verify().unwrap();
    assert_eq!(request.unwrap().call.as_str(), "CA00000000000000000000000000000001");
    // JSON needs its hash in the URL.
    let url = format!("{BASE}/x");
    let tag = hmac(Hash::Sha1, &"t".into(), &[url.as_bytes()]);
    let sent = Sent::new(Provider::Twilio, "/x", "t")
        .with("x-twilio-signature", BASE64.encode(tag.as_ref()));
    assert!(sent.is_genuine());
    assert!(!sent.json(r#"{"CallSid": "CA1"}"#).is_genuine());
    // A signed body does not vouch for a call in the query.
    let mut sent = telnyx_signed("From=1", NOW);
    sent.target = "/api/v1/telnyx/allocate?CallSid=CA1".into();
    let (covered, request) = sent.verify().unwrap();
    assert_eq!(covered, Covered::Body);
    assert!(request.is_err());
    for empty in [telnyx_signed("", NOW), jambonz_signed("", NOW)] {
        assert!(!empty.is_genuine(), "a time alone is signed: {empty:?}");
    }
    let hashless = vonage_signed("/x", &json!({"iat": NOW}));
    assert_eq!(hashless.verify().unwrap().0, Covered::Nothing);
    assert!(!hashless.json(r#"{"uuid": "1"}"#).is_genuine());
}

#[test]
fn what_was_signed_long_ago_or_in_the_future_is_refused() {
    for (away, genuine) in [(-301, false), (-300, true), (300, true), (301, false)] {
        let at = NOW.checked_add_signed(away).unwrap();
        assert_eq!(telnyx_signed("CallSid=1", at).is_genuine(), genuine, "{away}");
        assert_eq!(jambonz_signed("{}", at).is_genuine(), genuine, "{away}");
        assert_eq!(vonage_signed("/x", &json!({"iat": at})).is_genuine(), genuine, "{away}");
    }
    assert!(!vonage_signed("/x", &json!({"iat": NOW, "exp": NOW - 1})).is_genuine());
    assert!(!vonage_signed("/x", &json!({})).is_genuine(), "a token for ever");
    assert!(!vonage_signed("/x", &json!({"iat": "now"})).is_genuine());
}

#[test]
fn a_token_for_another_algorithm_is_refused() {
    let claims = json!({"iat": NOW});
    for head in [json!({"alg": "none"}), json!({"alg": "HS512"}), json!({}), json!([])] {
        let token = token_of(&claims, "k", &head);
        let sent =
            Sent::new(Provider::Vonage, "/x", "k").with("authorization", format!("Bearer {token}"));
        assert!(!sent.is_genuine(), "{head}");
    }
}

#[test]
fn exotel_shares_a_secret_in_the_query() {
    let sent = |query: &str| Sent::new(Provider::Exotel, &format!("/x?{query}"), "s1,s2").get();
    assert!(sent("auth_token=s2&CallSid=1").is_genuine());
    for bad in ["", "auth_token=", "auth_token=s", "auth_token=s1%2Cs2", "Auth_Token=s1"] {
        assert!(!sent(bad).is_genuine(), "{bad}");
    }
    let in_body = Sent::new(Provider::Exotel, "/x", "s1").form(&[("auth_token", "s1")]);
    assert!(!in_body.is_genuine());
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
fn documents_of_the_later_providers_are_theirs() {
    let call = "c1".parse().unwrap();
    let stream = Stream { url: "wss://a/b", call: &call, status_url: None };
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
    assert_eq!(body(Provider::Jambonz), r#"[{"url":"wss://a/b","verb":"listen"}]"#);
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
         covered: Covered::Everything };
        if let Ok(webhook) = webhook.read() {
            provider.dialect().call_is_over(&webhook);
            provider.dialect().stream_is_over(&webhook);
            if let Ok(request) = CallRequest::from_webhook(provider, &webhook) {
                let urls = WsUrls { base: "wss://a".into(), path: DEFAULT_WS_PATH.parse().unwrap() };
                let url = urls.url(&"pod-1".parse().unwrap(), &request);
                let stream = Stream { url: &url, call: &request.call, status_url: Some(&sent.target) };
                prop_assert!(well_formed(&provider.dialect().connect(&stream)));
            }
        }
        if let Some(document) = provider.dialect().hang_up(&sentence) {
            prop_assert!(well_formed(&document));
        }
        prop_assert!(well_formed(&provider.dialect().noted()));
    }
}
