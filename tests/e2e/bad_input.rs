use std::{thread, time::Duration};

use serde_json::{Value, json};

use testkit::{Connection, Router, raw::head};

const JSON: (&str, &str) = ("content-type", "application/json");

/// Sends a body and expects a JSON error of one of the given statuses.
fn refused(
    router: &Router,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    expected: u16,
) -> Value {
    let (status, answer) = router.connect().send("POST", path, headers, body).json();
    assert_eq!(status, expected, "{path} {:.100}: {answer}", String::from_utf8_lossy(body));
    assert!(answer["error"].as_str().is_some_and(|error| !error.is_empty()), "{answer}");
    answer
}

#[test]
fn ill_formed_names_are_refused_by_name_and_change_nothing() {
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
            let answer = refused(&router, path, &[JSON], body.as_bytes(), 400);
            assert_eq!(answer["details"]["field"], "call_sid", "{answer}");
        }
    }
    let long = "a".repeat(64);
    for pod in ["", "A", "a.b", "a_b", "-a", "a-", "a b", "metadata", "../a", "a:b", &long] {
        for path in ["/api/v1/drain", "/api/v1/undrain"] {
            refused(&router, path, &[JSON], json!({"pod_name": pod}).to_string().as_bytes(), 400);
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
        let answer = refused(&router, "/api/v1/allocate", &[JSON], body.as_bytes(), 400);
        assert_eq!(answer["details"]["field"], field, "{answer}");
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
fn bodies_that_are_not_the_json_expected_are_refused() {
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
            refused(&router, path, &[JSON], body.as_bytes(), 400);
        }
        refused(&router, path, &[JSON], b"{\"call_sid\": \"\xff\xfe\"}", 400);
        refused(
            &router,
            path,
            &[("content-type", "application/x-www-form-urlencoded")],
            b"call_sid=CA1",
            400,
        );
        let large = json!({"call_sid": "CA1", "x": "y".repeat(70_000)}).to_string();
        let answer = router.connect().send("POST", path, &[JSON], large.as_bytes());
        assert_eq!((answer.status, answer.header("connection")), (413, Some("close")));
    }
    refused(&router, "/api/v1/renew", &[JSON], br#"{"call_sids": ["CA1"]}"#, 400);
    refused(
        &router,
        "/api/v1/renew",
        &[JSON],
        br#"{"call_sid": "CA1", "call_sids": ["CA1"], "pod_name": "a"}"#,
        400,
    );
    assert_eq!(router.status(), before);
}

#[test]
fn ten_megabytes_get_an_answer_or_a_closed_connection() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    connection.write(&head("POST", "/api/v1/allocate", &[JSON], 10 << 20));
    let some = vec![b' '; 64 << 10];
    let sent = (0..160).take_while(|_| connection.try_write(&some)).count();
    if sent == 160 {
        assert_eq!(connection.answer().map_or(413, |answer| answer.status), 413);
    }
    assert_eq!(router.status()["active_calls"], 0);
}

/// Sends a byte now and then for as long as they are taken; how many were. A limit on the time
/// between two bytes would never be reached.
fn drip(connection: &mut Connection, bytes: impl Iterator<Item = u8>) -> usize {
    let taken = bytes.take(300).take_while(|byte| {
        thread::sleep(Duration::from_millis(100));
        connection.try_write(&[*byte])
    });
    let count = taken.count();
    assert!(count < 300, "nobody minds that the request never ends");
    count
}

#[test]
fn a_body_that_drips_is_cut_off_with_an_answer() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    for (path, expected) in [
        ("/api/v1/allocate", 408),
        ("/api/v1/twilio/allocate", 200),
        ("/api/v1/exotel/allocate", 408),
    ] {
        let mut connection = router.connect();
        connection.write(&head("POST", path, &[JSON], 1_000));
        let count = drip(&mut connection, [b' '].into_iter().cycle());
        let answer = connection.answer().unwrap();
        assert_eq!(answer.status, expected, "{path} after {count} bytes");
        assert_eq!(answer.header("connection"), Some("close"));
    }
    assert_eq!(router.status()["active_calls"], 0);
}

#[test]
fn a_head_that_drips_is_cut_off() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    let mut connection = router.connect();
    let head = b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ".iter().copied();
    drip(&mut connection, head.chain([b'a'].into_iter().cycle()));
    assert!(connection.answer().is_none_or(|answer| answer.status == 408));
}

#[test]
fn what_is_not_http_is_answered_or_closed() {
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
            connection.answer().is_none_or(|answer| (400..500).contains(&answer.status)),
            "{garbage:?}"
        );
    }
    let many = "x-a: 1\r\n".repeat(5_000);
    let mut connection = Connection::open(router.address);
    connection.try_write(format!("GET /health HTTP/1.1\r\nhost: a\r\n{many}\r\n").as_bytes());
    assert!(connection.answer().is_none_or(|answer| answer.status == 431));
}
