use std::{thread, time::Duration};

use serde_json::{Value, json};

use testkit::{Connection, Router, http::request_head};

const JSON: (&str, &str) = ("content-type", "application/json");

/// Sends a body and expects a JSON error with the given status.
fn expect_error(
    router: &Router,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    expected: u16,
) -> Value {
    let (status, response) = router.connect().send("POST", path, headers, body).json();
    assert_eq!(status, expected, "{path} {:.100}: {response}", String::from_utf8_lossy(body));
    assert!(response["error"].as_str().is_some_and(|error| !error.is_empty()), "{response}");
    response
}

#[test]
fn invalid_names_are_rejected_with_their_field() {
    let router = Router::start(&[]);
    let before = router.status();
    let long = "A".repeat(129);
    let calls = [
        "",
        " ",
        "a b",
        "a\n",
        "a\0",
        "<script>",
        "a/b",
        "../x",
        "é",
        "a\"b",
        "voice:call:*",
        &long,
    ];
    for call in calls {
        for path in ["/api/v1/allocate", "/api/v1/release", "/api/v1/renew"] {
            let body = json!({"call_sid": call}).to_string();
            let response = expect_error(&router, path, &[JSON], body.as_bytes(), 400);
            assert_eq!(response["details"]["field"], "call_sid", "{response}");
        }
    }
    let long = "a".repeat(64);
    for pod in ["", "A", "a.b", "a_b", "-a", "a-", "a b", "metadata", "../a", "a:b", &long] {
        for path in ["/api/v1/drain", "/api/v1/undrain"] {
            expect_error(
                &router,
                path,
                &[JSON],
                json!({"pod_name": pod}).to_string().as_bytes(),
                400,
            );
        }
    }
    let long = "m".repeat(65);
    for (field, value) in [
        ("merchant_id", "a b"),
        ("merchant_id", "a:b"),
        ("merchant_id", &long),
        ("template", ".."),
        ("template", "a/b"),
        ("template", "<x/>"),
        ("flow", "v 2"),
        ("flow", "%2f"),
        ("provider", "a/b"),
        ("provider", ".."),
    ] {
        let body = json!({"call_sid": "CA1", field: value}).to_string();
        let response = expect_error(&router, "/api/v1/allocate", &[JSON], body.as_bytes(), 400);
        assert_eq!(response["details"]["field"], field, "{response}");
    }
    for path in [
        "/api/v1/pod/metadata",
        "/api/v1/pod/A",
        "/api/v1/pod/a%00b",
        "/api/v1/pod/%ff",
        "/api/v1/calls/a%20b",
        "/api/v1/merchants/a%2fb",
    ] {
        assert_eq!(router.get(path).0, 400, "{path}");
    }
    assert_eq!(router.status(), before);
}

#[test]
fn bodies_that_are_not_the_expected_json_are_rejected() {
    let router = Router::start(&[]);
    let before = router.status();
    for path in
        ["/api/v1/allocate", "/api/v1/release", "/api/v1/renew", "/api/v1/drain", "/api/v1/undrain"]
    {
        for body in [
            "",
            "{",
            "[]",
            "7",
            "null",
            "\"CA1\"",
            r#"{"call_sid": 7, "pod_name": 7}"#,
            r#"{"call_sid": ["CA1"], "pod_name": {}}"#,
        ] {
            expect_error(&router, path, &[JSON], body.as_bytes(), 400);
        }
        expect_error(&router, path, &[JSON], b"{\"call_sid\": \"\xff\xfe\"}", 400);
        expect_error(
            &router,
            path,
            &[("content-type", "application/x-www-form-urlencoded")],
            b"call_sid=CA1",
            400,
        );
        let large = json!({"call_sid": "CA1", "x": "y".repeat(70_000)}).to_string();
        let response = router.connect().send("POST", path, &[JSON], large.as_bytes());
        assert_eq!((response.status, response.header("connection")), (413, Some("close")));
    }
    expect_error(&router, "/api/v1/renew", &[JSON], br#"{"call_sids": ["CA1"]}"#, 400);
    expect_error(
        &router,
        "/api/v1/renew",
        &[JSON],
        br#"{"call_sid": "CA1", "call_sids": ["CA1"], "pod_name": "a"}"#,
        400,
    );
    assert_eq!(router.status(), before);
}

#[test]
fn a_ten_megabyte_body_gets_413_or_a_closed_connection() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    connection.write(&request_head("POST", "/api/v1/allocate", &[JSON], 10 << 20));
    let chunk = vec![b' '; 64 << 10];
    let sent = (0..160).take_while(|_| connection.try_write(&chunk)).count();
    if sent == 160 {
        assert_eq!(connection.read_response().map_or(413, |response| response.status), 413);
    }
    assert_eq!(router.status()["active_calls"], 0);
}

/// Sends a byte every 100 ms until the connection is closed, and returns their number. A timeout
/// between two bytes would never fire.
fn send_slowly(connection: &mut Connection, bytes: impl Iterator<Item = u8>) -> usize {
    let sent = bytes.take(300).take_while(|byte| {
        thread::sleep(Duration::from_millis(100));
        connection.try_write(&[*byte])
    });
    let count = sent.count();
    assert!(count < 300, "the read timeout never fired");
    count
}

#[test]
fn a_slow_loris_body_is_ended_with_a_response() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    for (path, expected) in [
        ("/api/v1/allocate", 408),
        ("/api/v1/twilio/allocate", 200),
        ("/api/v1/exotel/allocate", 408),
    ] {
        let mut connection = router.connect();
        connection.write(&request_head("POST", path, &[JSON], 1_000));
        let count = send_slowly(&mut connection, [b' '].into_iter().cycle());
        let response = connection.read_response().unwrap();
        assert_eq!(response.status, expected, "{path} after {count} bytes");
        assert_eq!(response.header("connection"), Some("close"));
    }
    assert_eq!(router.status()["active_calls"], 0);
}

#[test]
fn a_slow_loris_head_is_ended() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    let mut connection = router.connect();
    let head = b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ".iter().copied();
    send_slowly(&mut connection, head.chain([b'a'].into_iter().cycle()));
    assert!(connection.read_response().is_none_or(|response| response.status == 408));
}

#[test]
fn malformed_http_gets_an_error_or_a_closed_connection() {
    let router = Router::start(&[]);
    for garbage in [
        "\r\n\r\n\r\n\r\n garbage\r\n\r\n",
        "GET\r\n\r\n",
        "POST /api/v1/allocate HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}",
    ] {
        let mut connection = Connection::open(router.address);
        connection.write(garbage.as_bytes());
        connection.write(b"\r\n\r\n");
        assert!(
            connection.read_response().is_none_or(|response| (400..500).contains(&response.status)),
            "{garbage:?}"
        );
    }
    let many = "x-a: 1\r\n".repeat(5_000);
    let mut connection = Connection::open(router.address);
    connection.try_write(format!("GET /health HTTP/1.1\r\nhost: a\r\n{many}\r\n").as_bytes());
    assert!(connection.read_response().is_none_or(|response| response.status == 431));
}
