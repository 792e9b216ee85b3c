//! Clients of the older router work unchanged.

use serde_json::{Value, json};

use testkit::Router;

const PATHS: [&str; 5] =
    ["/api/v1/allocate", "/api/v1/release", "/api/v1/renew", "/api/v1/drain", "/api/v1/undrain"];

#[test]
fn any_valid_provider_name_appears_in_the_stream_url() {
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
        let (status, response) = allocate(provider);
        assert_eq!(status, 200, "{response}");
        let url = response["ws_url"].as_str().unwrap();
        assert!(url.ends_with(part) && response["pod_name"].is_string(), "{response}");
    }
    let long = "p".repeat(65);
    for bad in ["..", "a/b", "a b", "<x>", "é", "a?b", "a%2fb", long.as_str()] {
        let (status, response) = allocate(json!(bad));
        assert_eq!(
            (status, &response["details"]["field"]),
            (400, &json!("provider")),
            "{response}"
        );
    }
    // The default template also applies to an unknown provider.
    let body = json!({"call_sid": "CA1", "provider": "vobiz"});
    let url = router.post("/api/v1/allocate", body).1["ws_url"].as_str().unwrap().to_owned();
    assert!(url.ends_with("/vobiz/callback/order-confirmation/v2"), "{url}");
    let (status, response) =
        router.post("/api/v1/release", json!({"call_sid": "CA1", "reason": "completed"}));
    assert_eq!((status, &response["success"]), (200, &json!(true)), "{response}");
}

#[test]
fn a_json_body_is_parsed_regardless_of_its_content_type() {
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
            let response = router.connect().send("POST", path, headers, body.as_bytes());
            assert_eq!(response.status, expected, "{path} {headers:?} {body}: {}", response.text());
        }
        for (path, body) in [("/api/v1/tiers", r#"{"gold": 3}"#), ("/api/v1/merchants/a", "{}")] {
            let response = router.connect().send("PUT", path, headers, body.as_bytes());
            assert_eq!(response.status, 200, "{path} {headers:?}: {}", response.text());
        }
    }
}

/// A page of another site can make a browser post a plain-text form whose body is valid JSON,
/// without a preflight. The browser adds `Origin` or `Sec-Fetch-Site`, which the page cannot forge.
#[test]
fn a_cross_site_form_post_changes_nothing() {
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
                    let response = router.connect().send("POST", path, &headers, body);
                    assert_eq!(response.status, 403, "{path} {headers:?}: {}", response.text());
                }
            }
            for path in ["/api/v1/tiers", "/api/v1/merchants/a"] {
                let response = router.connect().send("PUT", path, &headers, br#"{"gold": 9}"#);
                assert_eq!(response.status, 403, "{path} {headers:?}: {}", response.text());
            }
        }
    }
    let after = (router.status(), router.get("/api/v1/calls/CA1").1["lease_expires_at"].clone());
    assert_eq!(after, before);
    // The router's own page is allowed.
    for headers in [&[("sec-fetch-site", "same-origin")][..], &[("origin", "http://router")]] {
        let response = router.connect().send("POST", PATHS[0], headers, br#"{"call_sid": "CA1"}"#);
        assert_eq!(response.status, 200, "{headers:?}");
    }
}
