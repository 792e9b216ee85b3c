//! Signatures as the providers' SDKs make them, and altered ones.

use data_encoding::{BASE64, BASE64URL_NOPAD, HEXLOWER};
use serde_json::{Value, json};

use super::*;
use crate::signature::{Hash, hmac, sha256_hex};

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

fn twilio_vectors() -> Vec<TestRequest> {
    let read = |vector: &Value| {
        let target = text(vector, "url").strip_prefix(BASE).unwrap();
        let request = TestRequest::new(Provider::Twilio, target, text(vector, "token"))
            .with("x-twilio-signature", text(vector, "sig"));
        match &vector["params"] {
            Value::String(body) => request.json(body),
            Value::Object(params) if params.is_empty() => request.get(),
            _ => request.form(&params_of(vector)),
        }
    };
    vectors(include_str!("vectors/twilio.json")).iter().map(read).collect()
}

fn plivo_vectors() -> Vec<TestRequest> {
    let read = |vector: &Value| {
        let target = text(vector, "url").strip_prefix(BASE).unwrap();
        let request = TestRequest::new(Provider::Plivo, target, text(vector, "token"))
            .with("x-plivo-signature-v3", text(vector, "sig"))
            .with("x-plivo-signature-v3-nonce", text(vector, "nonce"))
            .form(&params_of(vector));
        if text(vector, "method") == "GET" { request.get() } else { request }
    };
    vectors(include_str!("vectors/plivo.json")).iter().map(read).collect()
}

fn telnyx_signed(body: &str, at: u64) -> TestRequest {
    use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let signature = pair.sign(format!("{at}|{body}").as_bytes());
    let mut request = TestRequest::new(
        Provider::Telnyx,
        "/api/v1/telnyx/allocate?merchant_id=acme",
        &BASE64.encode(pair.public_key().as_ref()),
    )
    .with("telnyx-signature-ed25519", BASE64.encode(signature.as_ref()))
    .with("telnyx-timestamp", at.to_string());
    request.body = body.into();
    request
}

fn token_of(claims: &Value, key: &str, head: &Value) -> String {
    let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let signed = format!("{}.{}", part(head), part(claims));
    let tag = hmac(Hash::Sha256, &key.into(), &[signed.as_bytes()]);
    format!("{signed}.{}", BASE64URL_NOPAD.encode(tag.as_ref()))
}

fn vonage_signed(target: &str, claims: &Value) -> TestRequest {
    let token = token_of(claims, "vonage secret", &json!({"alg": "HS256", "typ": "JWT"}));
    TestRequest::new(Provider::Vonage, target, "vonage secret")
        .with("authorization", format!("Bearer {token}"))
}

fn jambonz_signed(body: &str, at: u64) -> TestRequest {
    let tag = hmac(Hash::Sha256, &"js".into(), &[format!("{at}.{body}").as_bytes()]);
    TestRequest::new(Provider::Jambonz, "/api/v1/jambonz/allocate", "js")
        .with("jambonz-signature", format!("t={at},v1={}", HEXLOWER.encode(tag.as_ref())))
        .json(body)
}

/// Correctly signed requests of each provider that signs.
fn signed_requests() -> Vec<TestRequest> {
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
fn requests_signed_by_the_sdks_are_verified() {
    for request in signed_requests() {
        assert!(request.is_verified(), "{:?}: {request:?}", request.verify());
    }
}

/// Replaces one byte by another of the same character class.
fn changed(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] = match bytes[at] {
        b'a'..=b'y' | b'A'..=b'Y' | b'0'..=b'8' => bytes[at] + 1,
        b'z' => b'y',
        b'Z' => b'Y',
        b'9' => b'8',
        // A `+` is a space in a form; `-` is not.
        b'+' => b'-',
        _ => b'x',
    };
    bytes
}

#[test]
fn a_change_of_any_byte_of_url_body_signature_or_key_is_refused() {
    for request in signed_requests() {
        let signs_urls = request.provider.dialect().signs_urls();
        let is_refused = |what: &str, changed: &TestRequest| {
            assert!(!changed.is_verified(), "{what}: {changed:?}");
        };
        for at in 0..request.body.len() {
            let body = changed(&request.body, at);
            is_refused("body", &TestRequest { body, ..request.clone() });
        }
        for at in 0..request.target.len() * usize::from(signs_urls) {
            let target = String::from_utf8(changed(request.target.as_bytes(), at)).unwrap();
            is_refused("target", &TestRequest { target, ..request.clone() });
        }
        for (index, (name, value)) in request.headers.iter().enumerate() {
            for at in 0..value.len() {
                let mut headers = request.headers.clone();
                headers[index].1 = String::from_utf8(changed(value.as_bytes(), at)).unwrap();
                // The name of the authentication scheme is case-insensitive and not signed.
                if *name != "authorization" || at >= "bearer ".len() {
                    is_refused(name, &TestRequest { headers, ..request.clone() });
                }
            }
            for cut in [0, 1, value.len() / 2, value.len() - 1] {
                let mut headers = request.headers.clone();
                headers[index].1.truncate(cut);
                is_refused("cut short", &TestRequest { headers, ..request.clone() });
            }
            let mut headers = request.headers.clone();
            headers.remove(index);
            is_refused("without a header", &TestRequest { headers, ..request.clone() });
        }
        let other = if request.provider == Provider::Telnyx {
            BASE64.encode(&[9; 32])
        } else {
            format!("{}x", request.keys)
        };
        is_refused("another key", &TestRequest { keys: other.clone(), ..request.clone() });
        let both = format!("{other},{}", request.keys);
        assert!(
            TestRequest { keys: both, ..request.clone() }.is_verified(),
            "one of two keys is enough"
        );
        if signs_urls {
            is_refused(
                "another host",
                &TestRequest { base: "https://evil.example".into(), ..request.clone() },
            );
        }
    }
}

#[test]
fn a_changed_query_of_a_vonage_request_is_refused() {
    let request = signed_requests()
        .into_iter()
        .rfind(|request| request.provider == Provider::Vonage)
        .unwrap();
    for (from, to) in [("63f61863", "63f61864"), ("from=1", "from=2"), ("&from=1", "")] {
        let target = request.target.replace(from, to);
        assert!(!TestRequest { target, ..request.clone() }.is_verified(), "{from}");
    }
}

#[test]
fn twilio_may_sign_with_or_without_a_port_and_with_a_newer_hash() {
    let token = Secret::from("t");
    let signed = |hash, url: &str| BASE64.encode(hmac(hash, &token, &[url.as_bytes()]).as_ref());
    let target = "/api/v1/twilio/allocate?CallSid=CA1";
    for (base, signed_base, verified) in [
        (BASE, "https://router.example.com:443", true),
        (BASE, "https://router.example.com:8443", false),
        ("https://router.example.com:8443", "https://router.example.com:8443", true),
        ("https://router.example.com:8443", BASE, true),
        ("http://router.example.com", "http://router.example.com:80", true),
        ("https://router.example.com/prefix", "https://router.example.com/prefix", true),
    ] {
        let url = format!("{signed_base}{target}");
        let mut request = TestRequest::new(Provider::Twilio, target, "t")
            .get()
            .with("x-twilio-signature", signed(Hash::Sha1, &url));
        request.base = base.into();
        assert_eq!(request.is_verified(), verified, "{base} {signed_base}");
    }
    let settings = "x-twilio-webhooks-signature-settings";
    let request = TestRequest::new(Provider::Twilio, target, "t")
        .get()
        .with("x-twilio-signature", signed(Hash::Sha256, &format!("{BASE}{target}")));
    assert!(!request.is_verified());
    assert!(request.clone().with(settings, "key=k,algorithm=HMAC_SHA256").is_verified());
    assert!(!request.clone().with(settings, "key=k").is_verified());
    assert!(!request.with(settings, "algorithm=none").is_verified());
}

#[test]
fn repeated_parameters_count_once_for_twilio_and_each_time_for_plivo() {
    let params = [("b", "2"), ("a", "3"), ("b", "1"), ("b", "2")];
    let tag = hmac(Hash::Sha1, &"t".into(), &[format!("{BASE}/xa3b1b2").as_bytes()]);
    let request = TestRequest::new(Provider::Twilio, "/x", "t")
        .with("x-twilio-signature", BASE64.encode(tag.as_ref()))
        .form(&params);
    assert!(request.is_verified());
    let tag = hmac(Hash::Sha256, &"t".into(), &[format!("{BASE}/x?a3b1b2b2.n").as_bytes()]);
    let request = TestRequest::new(Provider::Plivo, "/x", "t")
        .with("x-plivo-signature-v3-nonce", "n")
        .form(&params);
    let signature = BASE64.encode(tag.as_ref());
    for header in ["x-plivo-signature-v3", "x-plivo-signature-ma-v3"] {
        assert!(request.clone().with(header, &signature).is_verified(), "{header}");
        assert!(request.clone().with(header, format!("AAAA, {signature}")).is_verified());
        assert!(!request.clone().with(header, ",").is_verified());
    }
    let v2 = request.clone().with("x-plivo-signature-v2", &signature);
    assert!(!v2.is_verified(), "V2 does not cover the body");
}

#[test]
fn an_unsigned_body_is_not_trusted() {
    // The signature of a GET does not cover a body.
    let [.., get] = &twilio_vectors()[..] else { panic!() };
    let mut with_body = get.clone();
    with_body.body = b"CallSid=CA666&merchant_id=evil".to_vec();
    let (_, call_request) = with_body.verify().unwrap();
    assert_eq!(call_request.unwrap().call.as_str(), "CA00000000000000000000000000000001");
    // JSON needs its hash in the URL.
    let url = format!("{BASE}/x");
    let tag = hmac(Hash::Sha1, &"t".into(), &[url.as_bytes()]);
    let request = TestRequest::new(Provider::Twilio, "/x", "t")
        .with("x-twilio-signature", BASE64.encode(tag.as_ref()));
    assert!(request.is_verified());
    assert!(!request.json(r#"{"CallSid": "CA1"}"#).is_verified());
    // A signature of the body does not cover a call id in the query.
    let mut request = telnyx_signed("From=1", NOW);
    request.target = "/api/v1/telnyx/allocate?CallSid=CA1".into();
    let (coverage, call_request) = request.verify().unwrap();
    assert_eq!(coverage, Coverage::Body);
    assert!(call_request.is_err());
    for empty in [telnyx_signed("", NOW), jambonz_signed("", NOW)] {
        assert!(!empty.is_verified(), "only the timestamp is signed: {empty:?}");
    }
    let hashless = vonage_signed("/x", &json!({"iat": NOW}));
    assert_eq!(hashless.verify().unwrap().0, Coverage::Nothing);
    assert!(!hashless.json(r#"{"uuid": "1"}"#).is_verified());
}

#[test]
fn a_signed_time_far_from_the_clock_is_refused() {
    for (away, verified) in [(-301, false), (-300, true), (300, true), (301, false)] {
        let at = NOW.checked_add_signed(away).unwrap();
        assert_eq!(telnyx_signed("CallSid=1", at).is_verified(), verified, "{away}");
        assert_eq!(jambonz_signed("{}", at).is_verified(), verified, "{away}");
        assert_eq!(vonage_signed("/x", &json!({"iat": at})).is_verified(), verified, "{away}");
    }
    assert!(!vonage_signed("/x", &json!({"iat": NOW, "exp": NOW - 1})).is_verified());
    assert!(!vonage_signed("/x", &json!({})).is_verified(), "a token without a time");
    assert!(!vonage_signed("/x", &json!({"iat": "now"})).is_verified());
}

#[test]
fn a_token_for_another_algorithm_is_refused() {
    let claims = json!({"iat": NOW});
    for head in [json!({"alg": "none"}), json!({"alg": "HS512"}), json!({}), json!([])] {
        let token = token_of(&claims, "k", &head);
        let request = TestRequest::new(Provider::Vonage, "/x", "k")
            .with("authorization", format!("Bearer {token}"));
        assert!(!request.is_verified(), "{head}");
    }
}

#[test]
fn exotel_is_authenticated_by_a_secret_in_the_query() {
    let request =
        |query: &str| TestRequest::new(Provider::Exotel, &format!("/x?{query}"), "s1,s2").get();
    assert!(request("auth_token=s2&CallSid=1").is_verified());
    for bad in ["", "auth_token=", "auth_token=s", "auth_token=s1%2Cs2", "Auth_Token=s1"] {
        assert!(!request(bad).is_verified(), "{bad}");
    }
    let in_body = TestRequest::new(Provider::Exotel, "/x", "s1").form(&[("auth_token", "s1")]);
    assert!(!in_body.is_verified());
}

#[test]
fn a_fingerprint_identifies_the_signed_text() {
    let sha1 = |text: &str| {
        let tag = hmac(Hash::Sha1, &"t".into(), &[format!("{BASE}{text}").as_bytes()]);
        BASE64.encode(tag.as_ref())
    };
    let request = |params: &[(&str, &str)]| {
        TestRequest::new(Provider::Twilio, "/x", "t")
            .with("x-twilio-signature", sha1("/xCallSidCA9From+1"))
            .form(params)
    };
    // Parameters with other boundaries have the same signed text and count as one request.
    let whole = request(&[("CallSid", "CA9"), ("From", "+1")]).fingerprint();
    assert!(whole.is_some());
    assert_eq!(request(&[("CallSid", "CA9F"), ("rom", "+1")]).fingerprint(), whole);
    assert_eq!(request(&[("C", "allSidCA9From+1")]).fingerprint(), whole);
    // One text has several valid signatures, in any order and next to invalid ones.
    let text = |nonce: &str| format!("{BASE}/x?CallUUID1.{nonce}");
    let signature = |key: &str, nonce: &str| {
        BASE64.encode(hmac(Hash::Sha256, &key.into(), &[text(nonce).as_bytes()]).as_ref())
    };
    let plivo = |nonce: &'static str, signatures: &[String]| {
        let request = TestRequest::new(Provider::Plivo, "/x", "k1,k2").form(&[("CallUUID", "1")]);
        let request = request.with("x-plivo-signature-v3-nonce", nonce);
        request.with("x-plivo-signature-v3", signatures.join(",")).fingerprint()
    };
    let (first, second) = (signature("k1", "n"), signature("k2", "n"));
    let one = plivo("n", std::slice::from_ref(&first));
    assert_eq!(plivo("n", &[second, "AAAA".into(), first]), one);
    assert_ne!(plivo("m", &[signature("k1", "m")]), one, "another nonce");
    // All test vectors differ.
    let all: Vec<Option<Fingerprint>> =
        signed_requests().iter().map(TestRequest::fingerprint).collect();
    let distinct: std::collections::HashSet<_> = all.iter().flatten().collect();
    assert_eq!(distinct.len(), all.iter().flatten().count());
    // A shared secret yields no fingerprint.
    assert_eq!(
        TestRequest::new(Provider::Exotel, "/x?auth_token=s", "s").get().fingerprint(),
        None
    );
}

#[test]
fn call_ids_must_have_the_format_of_their_provider() {
    let sid = "CA0123456789abcdefABCDEF0123456789";
    let uuid = "b1b1d7a4-1f5c-4f0f-9A3E-0c4a0b6d2e11";
    let bare = uuid.replace('-', "");
    for provider in Provider::ALL {
        let matches = |id: &str| provider.dialect().call_format().is_none_or(|it| it.matches(id));
        let expected = match provider {
            Provider::Twilio => (true, false),
            Provider::Exotel | Provider::Telnyx => (true, true),
            _ => (false, true),
        };
        assert_eq!((matches(sid), matches(uuid)), expected, "{provider}");
        assert_eq!(matches(&bare), expected.1, "{provider}");
        let accepts_any = provider.dialect().call_format().is_none();
        for malformed in [
            "",
            "CA",
            "x",
            &sid[..33],
            &uuid[..35],
            &format!("{sid}0"),
            &uuid[1..],
            "b1b1d7a41-f5c-4f0f-9A3E-0c4a0b6d2e11",
            "g1b1d7a4-1f5c-4f0f-9A3E-0c4a0b6d2e11",
        ] {
            assert_eq!(matches(malformed), accepts_any, "{provider} {malformed}");
        }
    }
}
