//! Clients of the older router work without a change.

use serde_json::{Value, json};

use testkit::Router;

const PATHS: [&str; 5] =
    ["/api/v1/allocate", "/api/v1/release", "/api/v1/renew", "/api/v1/drain", "/api/v1/undrain"];

#[test]
fn any_valid_provider_name_fills_the_stream_url() {
    let router = Router::start(&[]);
    let allocate = |provider: Value| {
        let body = json!({"call_sid": "CA1", "provider": provider, "template": "hi",
            "reseller_id": "r1", "merchant_id": "acme", "flow": "v2"});
        router.post("/api/v1/allocate", body)
    };
    for (provider, part) in [
        (json!("vobiz"), "/vobiz/callback/hi/v2"),
        (json!("My_Own.carrier-2"), "/My_Own.carrier-2/callback/hi/v2"),
        (json!("plivo"), "/plivo/callback/hi/v2"),
        (json!(""), "/twilio/callback/hi/v2"),
        (json!(null), "/twilio/callback/hi/v2"),
    ] {
        let (status, answer) = allocate(provider);
        assert_eq!(status, 200, "{answer}");
        let url = answer["ws_url"].as_str().unwrap();
        assert!(url.ends_with(part) && answer["pod_name"].is_string(), "{answer}");
    }
    let long = "p".repeat(65);
    for bad in ["..", "a/b", "a b", "<x>", "é", "a?b", "a%2fb", long.as_str()] {
        let (status, answer) = allocate(json!(bad));
        assert_eq!((status, &answer["details"]["field"]), (400, &json!("provider")), "{answer}");
    }
    // A template that nobody names is the same for a provider that is not known.
    let body = json!({"call_sid": "CA1", "provider": "vobiz"});
    let url = router.post("/api/v1/allocate", body).1["ws_url"].as_str().unwrap().to_owned();
    assert!(url.ends_with("/vobiz/callback/order-confirmation/v2"), "{url}");
    let (status, answer) =
        router.post("/api/v1/release", json!({"call_sid": "CA1", "reason": "completed"}));
    assert_eq!((status, &answer["success"]), (200, &json!(true)), "{answer}");
}

#[test]
fn a_json_body_is_read_whatever_its_content_type_says() {
    let router = Router::start(&[]);
    let types: [&[(&str, &str)]; 6] = [
        &[],
        &[("content-type", "application/json; charset=utf-8")],
        &[("content-type", "text/plain")],
        &[("content-type", "application/x-www-form-urlencoded")],
        &[("content-type", "application/octet-stream")],
        &[("content-type", "é")],
    ];
    for headers in types {
        for (path, body, expected) in [
            ("/api/v1/allocate", r#"{"call_sid": "CA1"}"#, 200),
            ("/api/v1/renew", r#"{"call_sid": "CA1"}"#, 200),
            ("/api/v1/release", r#"{"call_sid": "CA1", "reason": "x"}"#, 200),
            ("/api/v1/release", r#"{"call_sid": "CA1"}"#, 404),
            ("/api/v1/drain", r#"{"pod_name": "voice-agent-0"}"#, 200),
            ("/api/v1/undrain", r#"{"pod_name": "voice-agent-0"}"#, 200),
            ("/api/v1/allocate", "call_sid=CA1", 400),
            ("/api/v1/allocate", "", 400),
        ] {
            let answer = router.connect().send("POST", path, headers, body.as_bytes());
            assert_eq!(answer.status, expected, "{path} {headers:?} {body}: {}", answer.text());
        }
        for (path, body) in [("/api/v1/tiers", r#"{"gold": 3}"#), ("/api/v1/merchants/a", "{}")] {
            let answer = router.connect().send("PUT", path, headers, body.as_bytes());
            assert_eq!(answer.status, 200, "{path} {headers:?}: {}", answer.text());
        }
    }
}

/// A page of another site can make a browser post a form of plain text, without a preflight,
/// whose text is JSON. The browser says where it comes from, and the page cannot prevent it.
#[test]
fn a_form_of_another_site_changes_nothing() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    let before = (router.status(), router.get("/api/v1/calls/CA1").1["lease_expires_at"].clone());
    let bodies: [&[u8]; 3] = [
        br#"{"call_sid": "CA1", "x": "="}"#,
        br#"{"call_sid": "CA2", "pod_name": "voice-agent-1", "x": "="}"#,
        br#"{"pod_name": "voice-agent-1", "x": "="}"#,
    ];
    let origins: [&[(&str, &str)]; 6] = [
        &[("origin", "https://evil.example")],
        &[("origin", "null")],
        &[("origin", "http://router.evil.example")],
        &[("sec-fetch-site", "cross-site"), ("origin", "https://evil.example")],
        &[("sec-fetch-site", "same-site"), ("origin", "http://router")],
        &[("sec-fetch-site", "cross-site")],
    ];
    for headers in origins {
        for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
            let headers = [headers, &[("content-type", kind)]].concat();
            for path in PATHS {
                for body in bodies {
                    let answer = router.connect().send("POST", path, &headers, body);
                    assert_eq!(answer.status, 403, "{path} {headers:?}: {}", answer.text());
                }
            }
            for path in ["/api/v1/tiers", "/api/v1/merchants/a"] {
                let answer = router.connect().send("PUT", path, &headers, br#"{"gold": 9}"#);
                assert_eq!(answer.status, 403, "{path} {headers:?}: {}", answer.text());
            }
        }
    }
    let after = (router.status(), router.get("/api/v1/calls/CA1").1["lease_expires_at"].clone());
    assert_eq!(after, before);
    // Our own page, and clients that are no browsers, go on.
    for headers in [&[("sec-fetch-site", "same-origin")][..], &[("origin", "http://router")]] {
        let answer = router.connect().send("POST", PATHS[0], headers, br#"{"call_sid": "CA1"}"#);
        assert_eq!(answer.status, 200, "{headers:?}");
    }
}
