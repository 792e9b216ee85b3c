//! Signed webhooks through the running server.

use std::time::Duration;

use aws_lc_rs::hmac;
use data_encoding::{BASE64, HEXLOWER};
use serde_json::json;

use testkit::{HttpResponse, Router, eventually, scratch};

const PUBLIC: &str = "https://router.example.com";
/// Call ids in the format of the providers.
const CALL: &str = "CA00000000000000000000000000000001";
const OTHER_CALL: &str = "CA00000000000000000000000000000002";
const UUIDS: [&str; 5] = [
    "00000001-1f5c-4f0f-9a3e-0c4a0b6d2e11",
    "00000002-1f5c-4f0f-9a3e-0c4a0b6d2e11",
    "00000003-1f5c-4f0f-9a3e-0c4a0b6d2e11",
    "00000004-1f5c-4f0f-9a3e-0c4a0b6d2e11",
    "00000005-1f5c-4f0f-9a3e-0c4a0b6d2e11",
];
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

pub(crate) fn sha1(key: &str, text: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, key.as_bytes());
    BASE64.encode(hmac::sign(&key, text.as_bytes()).as_ref())
}

pub(crate) fn sha256(key: &str, text: &str) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes());
    hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
}

fn start(extra: &[(&str, &str)]) -> Router {
    let mut settings = vec![
        ("PUBLIC_URL", PUBLIC),
        ("TWILIO_AUTH_TOKEN", "old-token,new-token"),
        ("PLIVO_AUTH_TOKEN", "plivo-token"),
        ("EXOTEL_AUTH_TOKEN", "exotel-secret"),
        ("SIGNALWIRE_AUTH_TOKEN", "signalwire-key"),
        ("TELNYX_PUBLIC_KEY", "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw="),
        ("VONAGE_SIGNATURE_SECRET", "vonage-secret"),
        ("JAMBONZ_WEBHOOK_SECRET", "jambonz-secret"),
        ("RATE_LIMIT", "off"),
        ("LOG_LEVEL", "error"),
    ];
    settings.extend(extra);
    Router::start(&settings)
}

fn twilio(router: &Router, token: &str, call: &str) -> HttpResponse {
    let path = "/api/v1/twilio/allocate?merchant_id=acme";
    let signature = sha1(token, &format!("{PUBLIC}{path}CallSid{call}From+1 2"));
    let body = format!("From=%2B1+2&CallSid={call}");
    router.connect().send(
        "POST",
        path,
        &[FORM, ("x-twilio-signature", &signature)],
        body.as_bytes(),
    )
}

/// Asserts status 403 with an empty body.
fn assert_forbidden(response: &HttpResponse) {
    assert_eq!((response.status, response.text().as_str()), (403, ""), "{response:?}");
}

#[test]
fn signed_webhooks_are_accepted() {
    let router = start(&[]);
    for (token, call) in [("old-token", CALL), ("new-token", OTHER_CALL)] {
        let response = twilio(&router, token, call);
        assert_eq!(response.status, 200);
        assert!(response.text().contains("<Stream url="), "{}", response.text());
    }
    for call in [CALL, OTHER_CALL] {
        assert_eq!(router.release(call).0, 200);
    }
    let path = "/api/v1/plivo/allocate?template=hi";
    let [plivo, signalwire, jambonz, ..] = UUIDS;
    let text = format!("{PUBLIC}{path}.CallUUID{plivo}.nonce");
    let signature = BASE64.encode(&sha256("plivo-token", &text));
    let headers =
        [FORM, ("x-plivo-signature-v3", &signature), ("x-plivo-signature-v3-nonce", "nonce")];
    let body = format!("CallUUID={plivo}");
    let response = router.connect().send("POST", path, &headers, body.as_bytes());
    assert!(response.text().contains("</Stream>"), "{response:?}");
    let path = "/api/v1/exotel/allocate?auth_token=exotel-secret&CallSid=EX1";
    assert_eq!(router.connect().get(path).status, 200);
    let path = "/api/v1/signalwire/allocate";
    let signature = sha1("signalwire-key", &format!("{PUBLIC}{path}CallSid{signalwire}"));
    let headers = [FORM, ("x-signalwire-signature", signature.as_str())];
    let body = format!("CallSid={signalwire}");
    let response = router.connect().send("POST", path, &headers, body.as_bytes());
    assert!(response.text().contains("<Stream url="), "{response:?}");
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let (seconds, body) = (seconds.as_secs(), format!(r#"{{"call_sid":"{jambonz}"}}"#));
    let text = format!("{seconds}.{body}");
    let signature = format!("t={seconds},v1={}", HEXLOWER.encode(&sha256("jambonz-secret", &text)));
    let headers = [("content-type", "application/json"), ("jambonz-signature", signature.as_str())];
    let path = "/api/v1/jambonz/allocate";
    let response = router.connect().send("POST", path, &headers, body.as_bytes());
    assert_eq!(response.json().1[0]["verb"], "listen");
}

#[test]
fn unsigned_webhooks_are_forbidden_and_change_nothing() {
    let router = start(&[]);
    let before = router.status();
    let signature = sha1("old-token", &format!("{PUBLIC}/api/v1/twilio/allocateCallSidCA1"));
    let many: String = (0..10_000).map(|number| format!("p{number}=&")).collect();
    let many = &many[..60_000];
    let huge = "x".repeat(2 << 20);
    let bodies: [&[u8]; 8] = [
        b"CallSid=CA1",
        b"",
        b"{\"CallSid\": \"CA1\"}",
        b"CallSid=%FF",
        b"CallSid=CA1&CallSid=CA2",
        "CallSid=\u{202e}%00%1b".as_bytes(),
        many.as_bytes(),
        huge.as_bytes(),
    ];
    for body in bodies {
        for provider in ["twilio", "plivo", "exotel", "signalwire", "telnyx", "vonage", "jambonz"] {
            for action in ["allocate", "call-status", "stream-status"] {
                let path = format!("/api/v1/{provider}/{action}");
                let wrong = signature.replace('=', "");
                for headers in [
                    &[FORM][..],
                    &[FORM, ("x-twilio-signature", "")],
                    &[FORM, ("x-twilio-signature", "!!not base64!!")],
                    &[FORM, ("x-twilio-signature", &wrong), ("x-plivo-signature-v3", "x")],
                    &[("content-type", "application/json"), ("x-twilio-signature", &signature)],
                    &[("content-type", "image/png"), ("authorization", "Bearer a.b.c")],
                ] {
                    assert_forbidden(&router.connect().send("POST", &path, headers, body));
                }
                assert_forbidden(
                    &router.connect().get(&format!("{path}?CallSid=CA1&CallUUID=CA1&uuid=CA1")),
                );
            }
        }
    }
    // A signature for another URL, and for another body.
    let headers = [FORM, ("x-twilio-signature", signature.as_str())];
    let mut connection = router.connect();
    assert_forbidden(&connection.send(
        "POST",
        "/api/v1/twilio/allocate?merchant_id=x",
        &headers,
        b"CallSid=CA1",
    ));
    assert_forbidden(&connection.send("POST", "/api/v1/twilio/allocate", &headers, b"CallSid=CA2"));
    assert_eq!(router.status(), before);
    let metrics = router.connect_as_admin().get("/metrics").text();
    assert!(metrics.contains("smart_router_denied_total{reason=\"forged\"}"));
}

#[test]
fn a_changed_token_file_is_reloaded() {
    let path = scratch().join("token");
    std::fs::write(&path, "first\n").unwrap();
    let (router, log) = Router::start_logged(&[
        ("PUBLIC_URL", PUBLIC),
        ("TWILIO_AUTH_TOKEN_FILE", path.to_str().unwrap()),
    ]);
    assert_eq!(twilio(&router, "first", CALL).status, 200);
    assert_forbidden(&twilio(&router, "second", CALL));
    std::fs::write(&path, "first,second").unwrap();
    eventually(Duration::from_secs(4), "both tokens are accepted", || {
        twilio(&router, "second", CALL).status == 200
    });
    assert_eq!(twilio(&router, "first", CALL).status, 200);
    std::fs::write(&path, "second").unwrap();
    eventually(Duration::from_secs(4), "the old token is rejected", || {
        twilio(&router, "first", CALL).status == 403
    });
    std::fs::write(&path, "").unwrap();
    log.wait_for("the file is unusable", 0);
    assert_forbidden(&router.connect().form("/api/v1/twilio/allocate", "CallSid=CA9"));
    assert_eq!(twilio(&router, "second", CALL).status, 200, "an empty file keeps the last tokens");
}

#[test]
fn a_signed_form_may_have_ten_thousand_parameters() {
    let router = start(&[]);
    let names: Vec<String> = (0..10_000).map(|number| format!("{number:04}")).collect();
    let body = format!("{}&CallSid={CALL}", names.join("&"));
    assert!(body.len() < 64 << 10, "{}", body.len());
    let path = "/api/v1/twilio/allocate";
    let signature = sha1("new-token", &format!("{PUBLIC}{path}{}CallSid{CALL}", names.concat()));
    let headers = [FORM, ("x-twilio-signature", signature.as_str())];
    let response = router.connect().send("POST", path, &headers, body.as_bytes());
    assert_eq!(response.status, 200);
    assert!(response.text().contains("<Stream"), "{}", response.text());
    assert_eq!(router.get(&format!("/api/v1/calls/{CALL}")).0, 200);
}

#[test]
fn signed_webhooks_with_invalid_names_get_a_hangup() {
    let router = start(&[]);
    let before = router.status();
    let path = "/api/v1/twilio/allocate";
    for (name, encoded) in
        [("商", "%E5%95%86"), ("\u{0}\u{1b}", "%00%1B"), ("</Say>", "%3C%2FSay%3E"), ("", "")]
    {
        let signature = sha1("new-token", &format!("{PUBLIC}{path}CallSid{name}"));
        let headers = [FORM, ("x-twilio-signature", signature.as_str())];
        let body = format!("CallSid={encoded}");
        let response = router.connect().send("POST", path, &headers, body.as_bytes());
        assert_eq!(response.status, 200);
        assert!(response.text().contains("<Hangup/>"), "{}", response.text());
    }
    assert_eq!(router.status(), before);
}

#[test]
fn providers_without_a_secret_accept_unsigned_webhooks() {
    let router = Router::start(&[("LOG_LEVEL", "error")]);
    let response = router
        .connect()
        .post("/api/v1/vonage/call-status", &json!({"uuid": "x", "status": "completed"}));
    assert_eq!(response.status, 200);
    assert_eq!(router.connect().form("/api/v1/telnyx/allocate", "CallSid=T1").status, 200);
    let response = router.connect().get("/api/v1/vonage/allocate?uuid=V1&from=1&to=2");
    assert_eq!(response.json().1[0]["action"], "connect");
}

#[test]
fn unsigned_query_parameters_do_not_end_a_call() {
    let router = start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    let [jambonz, vonage, other, ..] = UUIDS;
    for call in [jambonz, vonage] {
        router.allocate(call);
    }
    let is_live = |call: &str| router.get(&format!("/api/v1/calls/{call}")).0 == 200;
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seconds = seconds.as_secs();
    // The signed allocate request of jambonz, replayed to another URL.
    let body = format!(r#"{{"call_sid":"{jambonz}","call_status":"trying"}}"#);
    let tag = HEXLOWER.encode(&sha256("jambonz-secret", &format!("{seconds}.{body}")));
    let signature = format!("t={seconds},v1={tag}");
    let json = ("content-type", "application/json");
    let headers = [json, ("jambonz-signature", signature.as_str())];
    for path in ["stream-status", "call-status?call_status=completed"] {
        let path = format!("/api/v1/jambonz/{path}");
        assert_eq!(router.connect().send("POST", &path, &headers, body.as_bytes()).status, 200);
        assert!(is_live(jambonz), "{path}");
    }
    // A valid Vonage token that covers neither query nor body.
    let part = |text: String| data_encoding::BASE64URL_NOPAD.encode(text.as_bytes());
    let signed = format!(
        "{}.{}",
        part(r#"{"alg":"HS256"}"#.into()),
        part(format!(r#"{{"iat":{seconds}}}"#))
    );
    let tag = data_encoding::BASE64URL_NOPAD.encode(&sha256("vonage-secret", &signed));
    let bearer = format!("Bearer {signed}.{tag}");
    let headers = [("authorization", bearer.as_str())];
    let mut connection = router.connect();
    let path = format!("/api/v1/vonage/call-status?uuid={vonage}&status=completed");
    assert_forbidden(&connection.send("GET", &path, &headers, b""));
    assert_forbidden(&connection.send("POST", &path, &headers, b""));
    assert!(is_live(vonage));
    let path = format!("/api/v1/vonage/allocate?uuid={other}");
    assert_eq!(connection.send("GET", &path, &headers, b"").status, 200);
    assert!(is_live(other));
}

#[test]
fn disabled_providers_have_no_routes() {
    let router = Router::start(&[("PROVIDERS", "twilio, plivo"), ("LOG_LEVEL", "error")]);
    let mut connection = router.connect();
    assert_eq!(connection.form("/api/v1/twilio/allocate", "CallSid=CA1").status, 200);
    for action in ["allocate", "call-status", "stream-status"] {
        assert_eq!(connection.get(&format!("/api/v1/exotel/{action}?CallSid=CA1")).status, 404);
    }
    let output = testkit::program(&[("PROVIDERS", "unknown")]).output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(
        printed.contains("PROVIDERS=unknown: expected one or more of twilio,plivo"),
        "{printed}"
    );
}
