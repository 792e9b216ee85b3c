//! Who gets in, and who does not.

use std::{io::Read, process::Stdio, time::Duration};

use serde_json::json;

use testkit::{Connection, Router, eventually, free_port, program, scratch};

const TOKENS: &str = "agent:agent-token,agent:agent-token-2,viewer:viewer-token,admin:admin-token";

/// Every route of the API that is not a webhook, and who may use it.
const ROUTES: [(&str, &str, &str, &str); 14] = [
    ("POST", "/api/v1/allocate", r#"{"call_sid": "CA1"}"#, "agent"),
    ("POST", "/api/v1/renew", r#"{"call_sid": "CA1"}"#, "agent"),
    ("GET", "/api/v1/status", "", "viewer"),
    ("GET", "/api/v1/pod/voice-agent-0", "", "viewer"),
    ("GET", "/api/v1/calls/CA1", "", "viewer"),
    ("GET", "/api/v1/tiers", "", "viewer"),
    ("POST", "/api/v1/release", r#"{"call_sid": "CA1"}"#, "agent"),
    ("POST", "/api/v1/drain", r#"{"pod_name": "voice-agent-0"}"#, "agent"),
    ("POST", "/api/v1/undrain", r#"{"pod_name": "voice-agent-0"}"#, "admin"),
    ("PUT", "/api/v1/tiers", r#"{"gold": 2}"#, "admin"),
    ("PUT", "/api/v1/merchants/acme", r#"{"pool": "acme"}"#, "admin"),
    ("GET", "/api/v1/merchants/acme", "", "viewer"),
    ("HEAD", "/api/v1/status", "", "viewer"),
    ("DELETE", "/api/v1/merchants/acme", "", "admin"),
];

fn send(connection: &mut Connection, token: Option<&str>, route: usize) -> u16 {
    let (method, path, body, _) = ROUTES[route];
    connection.token = token.map(str::to_owned);
    connection.send(method, path, &[("content-type", "application/json")], body.as_bytes()).status
}

#[test]
fn each_role_may_do_what_is_its_own_and_an_admin_everything() {
    let router = Router::start(&[("API_TOKENS", TOKENS), ("LOG_LEVEL", "error")]);
    let mut connection = router.connect();
    let before = router.status();
    for (route, (method, path, _, needed)) in ROUTES.into_iter().enumerate() {
        for stranger in
            [None, Some(""), Some("agent"), Some("agent-token-"), Some("agent:agent-token")]
        {
            assert_eq!(send(&mut connection, stranger, route), 401, "{method} {path} {stranger:?}");
        }
        for role in ["agent", "viewer"] {
            if role != needed {
                let token = format!("{role}-token");
                assert_eq!(
                    send(&mut connection, Some(&token), route),
                    403,
                    "{method} {path} {role}"
                );
            }
        }
    }
    assert_eq!(router.status(), before, "nobody who was refused changed anything");
    for (route, (method, path, _, needed)) in ROUTES.into_iter().enumerate() {
        if needed != "admin"
            && method != "PUT"
            && !path.contains("merchants")
            && !path.contains("release")
        {
            let token = format!("{needed}-token");
            assert_eq!(send(&mut connection, Some(&token), route), 200, "{method} {path}");
        }
    }
    for (route, (method, path, ..)) in ROUTES.into_iter().enumerate() {
        let status = send(&mut connection, Some("admin-token"), route);
        assert!((200..300).contains(&status), "{method} {path}: {status}");
    }
    assert_eq!(send(&mut connection, Some("agent-token-2"), 0), 200, "two tokens of a role");
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn refusals_say_what_is_needed_and_probes_need_nothing() {
    let router = Router::start(&[("API_TOKENS", TOKENS), ("LOG_LEVEL", "error")]);
    let mut connection = router.connect();
    for path in ["/health", "/ready", "/metrics", "/api/v1/health", "/api/v1/metrics"] {
        assert_eq!(connection.get(path).status, 200, "{path}");
    }
    let answer = connection.get("/api/v1/status");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    assert_eq!(answer.json(), (401, json!({"error": "a valid bearer token is needed"})));
    let answer = connection.get("/api/v1/whoami");
    assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")));
    for path in ["/", "/openapi.json"] {
        assert_eq!(connection.get(path).status, 200, "{path}");
    }
    for header in ["Basic YWdlbnQ6dG9rZW4=", "Bearer", "bearer  ", "viewer-token"] {
        let answer = connection.send("GET", "/api/v1/status", &[("authorization", header)], b"");
        assert_eq!(answer.status, 401, "{header}");
    }
    let answer =
        connection.send("GET", "/api/v1/status", &[("authorization", "bearer viewer-token")], b"");
    assert_eq!(answer.status, 200);
    connection.token = Some("viewer-token".into());
    let (status, answer) =
        connection.post("/api/v1/drain", &json!({"pod_name": "voice-agent-0"})).json();
    assert_eq!(status, 403);
    assert_eq!(answer["error"], "this needs a token of the role agent; yours is viewer");
    // Webhooks have signatures of their own.
    connection.token = None;
    assert_eq!(connection.form("/api/v1/twilio/allocate", "CallSid=CA1").status, 200);
}

#[test]
fn an_address_of_its_own_takes_everything_but_the_webhooks() {
    let admin = format!("127.0.0.1:{}", free_port());
    let router = Router::start(&[("ADMIN_BIND", &admin)]);
    let (mut public, mut private) = (router.connect(), Connection::open(admin.parse().unwrap()));
    for (method, path, body, _) in ROUTES {
        let json = [("content-type", "application/json")];
        assert_eq!(public.send(method, path, &json, body.as_bytes()).status, 404, "{path}");
    }
    assert_eq!(public.get("/metrics").status, 404);
    for path in ["/health", "/ready"] {
        assert_eq!((public.get(path).status, private.get(path).status), (200, 200));
    }
    assert_eq!(public.form("/api/v1/twilio/allocate", "CallSid=CA1").status, 200);
    assert_eq!(private.form("/api/v1/twilio/allocate", "CallSid=CA2").status, 404);
    assert_eq!(
        private.form("/api/v1/twilio/call-status", "CallSid=CA1&CallStatus=completed").status,
        404
    );
    assert_eq!(private.get("/api/v1/calls/CA1").status, 200);
    assert_eq!(private.get("/metrics").status, 200);
    assert_eq!(
        public.form("/api/v1/twilio/call-status", "CallSid=CA1&CallStatus=completed").status,
        200
    );
    assert_eq!(private.get("/api/v1/calls/CA1").status, 404);
}

#[test]
fn tokens_in_a_file_can_be_changed() {
    let path = scratch().join("tokens");
    std::fs::write(&path, "admin:one\nviewer:two\n").unwrap();
    let (mut router, log) = Router::start_logged(&[("API_TOKENS_FILE", path.to_str().unwrap())]);
    let status = |token: &str| {
        let mut connection = router.connect();
        connection.token = Some(token.into());
        connection.get("/api/v1/status").status
    };
    assert_eq!((status("one"), status("two"), status("three")), (200, 200, 401));
    std::fs::write(&path, "admin:three").unwrap();
    eventually(Duration::from_secs(4), "the new token holds", || status("three") == 200);
    assert_eq!((status("one"), status("two")), (401, 401));
    std::fs::write(&path, "root:four").unwrap();
    log.contains("the file can't be used", 0);
    assert_eq!((status("three"), status("four")), (200, 401), "a bad file changes nothing");
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(5));
}

#[test]
fn the_log_names_who_was_refused_and_who_did_what_and_no_secret() {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let mut router = Router::start_with(
        &[
            ("HTTP_PORT", &api),
            ("METRICS_PORT", &metrics),
            ("LOG_LEVEL", "trace"),
            ("LOG_FORMAT", "json"),
            ("API_TOKENS", TOKENS),
            ("EXOTEL_AUTH_TOKEN", "exotel-secret"),
            ("TWILIO_AUTH_TOKEN", "twilio-secret"),
            ("PUBLIC_URL", "https://r.example"),
        ],
        Stdio::piped(),
    );
    let mut connection = router.connect();
    connection.get("/api/v1/status");
    connection.get("/api/v1/exotel/allocate?auth_token=guessed-secret&CallSid=CA1");
    connection.get("/api/v1/exotel/allocate?auth_token=exotel-secret&CallSid=CA1");
    connection.form("/api/v1/twilio/allocate", "CallSid=CA1");
    connection.token = Some("agent-token-2".into());
    connection.post("/api/v1/drain", &json!({"pod_name": "voice-agent-0"}));
    connection.post("/api/v1/undrain", &json!({"pod_name": "voice-agent-0"}));
    connection.token = Some("mistyped-secret".into());
    connection.get("/api/v1/tiers");
    drop(connection);
    router.signal("TERM");
    let mut log = router.child.stderr.take().unwrap();
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    router.wait_for_exit(Duration::from_secs(5));
    let line = |parts: &[&str]| {
        let found = text.lines().find(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found.is_some(), "{parts:?} in {text}");
    };
    line(&["\"status\":401", "unauthorized", "/api/v1/status", "\"from\":\"127.0.0.1\""]);
    line(&["\"status\":403", "forged", "/api/v1/exotel/allocate", "does not match", "\"from\":"]);
    line(&["\"status\":403", "forged", "/api/v1/twilio/allocate", "it has no x-twilio-signature"]);
    line(&["\"status\":200", "/api/v1/drain", "\"by\":\"agent (token 2)\"", "voice-agent-0"]);
    line(&["\"status\":403", "/api/v1/undrain", "forbidden", "\"by\":\"agent (token 2)\""]);
    line(&[
        "webhooks of these providers are not verified",
        "plivo, signalwire, telnyx, vonage, jambonz",
    ]);
    for secret in ["-secret", "agent-token", "viewer-token", "admin-token"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

#[test]
fn an_open_api_says_so_at_the_start() {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let mut router = Router::start_with(
        &[("HTTP_PORT", &api), ("METRICS_PORT", &metrics), ("LOG_LEVEL", "warn")],
        Stdio::piped(),
    );
    router.signal("TERM");
    let mut text = String::new();
    router.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    router.wait_for_exit(Duration::from_secs(5));
    assert!(text.contains("the API is open to everyone who reaches it: set API_TOKENS"), "{text}");
    assert!(text.contains("twilio, plivo, exotel, signalwire, telnyx, vonage, jambonz"), "{text}");
}

#[test]
fn bad_secrets_stop_the_start_and_are_not_shown() {
    let missing = scratch().join("none");
    let missing = missing.to_str().unwrap();
    let public = ("PUBLIC_URL", "https://r.example");
    let bad: [(&[(&str, &str)], &str); 9] = [
        (
            &[("TWILIO_AUTH_TOKEN", "hush")],
            "PUBLIC_URL=: expected the URL under which providers reach this router, because TWILIO_AUTH_TOKEN is set",
        ),
        (
            &[("STREAM_STATUS", "on")],
            "PUBLIC_URL=: expected the URL under which providers reach this router, because STREAM_STATUS is on",
        ),
        (
            &[public, ("TWILIO_AUTH_TOKEN", "hush"), ("TWILIO_AUTH_TOKEN_FILE", missing)],
            "either TWILIO_AUTH_TOKEN or TWILIO_AUTH_TOKEN_FILE, not both",
        ),
        (&[public, ("PLIVO_AUTH_TOKEN_FILE", missing)], "none: expected a file that can be read"),
        (
            &[public, ("PLIVO_AUTH_TOKEN", " , ")],
            "PLIVO_AUTH_TOKEN=(hidden): expected at least one secret",
        ),
        (
            &[("TELNYX_PUBLIC_KEY", "hush")],
            "TELNYX_PUBLIC_KEY=(hidden): expected public keys of 32 bytes in Base64",
        ),
        (&[("API_TOKENS", "hush")], "API_TOKENS=(hidden): expected role:token entries"),
        (&[("API_TOKENS", "owner:hush")], "entry 1 names no role"),
        (&[("ADMIN_BIND", "8081")], "ADMIN_BIND=8081: expected an IP address and a port"),
    ];
    for (settings, expected) in bad {
        let output = program(settings).arg("check-config").output().unwrap();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && printed.contains(expected), "{printed}");
        assert!(!printed.contains("hush"), "{printed}");
    }
    let settings = [public, ("TWILIO_AUTH_TOKEN", "hush"), ("API_TOKENS", "admin:hush")];
    let output = program(&settings).arg("check-config").output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains("TWILIO_AUTH_TOKEN=(hidden)\n") && !printed.contains("hush"),
        "{printed}"
    );
}

#[test]
fn a_pipe_in_the_place_of_a_file_holds_nothing_up() {
    let path = scratch().join("tokens");
    std::fs::write(&path, "admin:one").unwrap();
    let (mut router, log) = Router::start_logged(&[("API_TOKENS_FILE", path.to_str().unwrap())]);
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    log.contains("the file can't be used", 0);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "admin:two").unwrap();
    eventually(Duration::from_secs(4), "the new token holds", || {
        let mut connection = router.connect();
        connection.token = Some("two".into());
        connection.get("/api/v1/status").status == 200
    });
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(5));
}

#[test]
fn who_is_not_authenticated_may_ask_only_so_often_and_keeps_nobody_else_out() {
    let router = Router::start(&[
        ("API_TOKENS", TOKENS),
        ("EXOTEL_AUTH_TOKEN", "exotel-secret"),
        ("RATE_LIMIT", "5"),
        ("TRUSTED_PROXIES", "127.0.0.0/8"),
        ("LOG_LEVEL", "error"),
    ]);
    let ask = |path: &str, from: &str| {
        let headers = [("x-forwarded-for", from)];
        router.connect().send("GET", path, &headers, b"")
    };
    // What a source is answered first, until it has asked too often.
    let count = |path: &str, from: &str| {
        let first = ask(path, from).status;
        let limited = (0..10_000).map(|_| ask(path, from)).find(|answer| answer.status == 429);
        let answer = limited.unwrap_or_else(|| panic!("{path} is not limited"));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(answer.text().contains("too many requests"), "{}", answer.text());
        first
    };
    assert_eq!(count("/api/v1/status", "192.0.2.1"), 401);
    // Each has what it may for itself.
    let forged = "/api/v1/exotel/allocate?CallSid=EX1&auth_token=guess";
    assert_eq!(count(forged, "192.0.2.2"), 403);
    assert_eq!(count("/", "192.0.2.3"), 200);
    assert_eq!(count("/page/page.js", "192.0.2.4"), 200);
    assert_eq!(count("/nowhere", "192.0.2.5"), 404);
    assert_eq!(count("/api/v1/whoami", "192.0.2.6"), 401);
    // Who says who it is is let in from everywhere, and so are probes.
    let genuine = "/api/v1/exotel/allocate?CallSid=EX1&auth_token=exotel-secret";
    for from in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        assert_eq!(ask(genuine, from).status, 200);
        assert_eq!(ask("/ready", from).status, 200);
        let mut connection = router.connect();
        connection.token = Some("viewer-token".into());
        let headers = [("x-forwarded-for", from)];
        assert_eq!(connection.send("GET", "/api/v1/status", &headers, b"").status, 200);
    }
    assert_eq!(router.release("EX1").0, 200);
    let metrics = router.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_denied_total{reason=\"rate_limited\"}"), "{metrics}");
}

#[test]
fn a_page_of_somebody_else_changes_nothing() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 2}"#)]);
    let body = br#"{"pod_name": "voice-agent-0"}"#;
    let drain = |headers: &[(&str, &str)]| {
        router.connect().send("POST", "/api/v1/drain", headers, body).status
    };
    let host = router.address.to_string();
    let own = format!("http://{host}");
    assert_eq!(drain(&[("origin", "http://evil.example")]), 403);
    assert_eq!(drain(&[("origin", "null")]), 403);
    assert_eq!(drain(&[("origin", &own), ("sec-fetch-site", "cross-site")]), 403);
    assert_eq!(drain(&[("sec-fetch-site", "same-site")]), 403);
    let (_, pod) = router.get("/api/v1/pod/voice-agent-0");
    assert_eq!(pod["is_draining"], false);
    // Its own page, and whoever is no browser.
    assert_eq!(drain(&[("origin", "https://router"), ("sec-fetch-site", "same-origin")]), 200);
    assert_eq!(drain(&[]), 200);
}

#[test]
fn a_token_that_is_taken_away_ends_the_streams_it_opened() {
    let file = scratch().join("tokens");
    std::fs::write(&file, "viewer:looks,admin:admin-token").unwrap();
    let router = Router::start(&[("API_TOKENS_FILE", file.to_str().unwrap())]);
    let open = |path: &str| {
        let mut stream = std::net::TcpStream::connect(router.address).unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\naccept: text/event-stream\r\nauthorization: Bearer looks\r\n\r\n"
        );
        std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut some = [0; 256];
        let count = stream.read(&mut some).unwrap();
        assert!(some[..count].starts_with(b"HTTP/1.1 200"), "{path}");
        stream
    };
    let mut streams = [open("/api/v1/live"), open("/api/v1/events")];
    std::fs::write(&file, "admin:admin-token").unwrap();
    let mut connection = router.connect();
    connection.token = Some("looks".into());
    eventually(Duration::from_secs(5), "the token is gone", || {
        connection.get("/api/v1/status").status == 401
    });
    connection.token = Some("admin-token".into());
    connection.post("/api/v1/allocate", &json!({"call_sid": "CA-unseen"}));
    for stream in &mut streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("CA-unseen"), "{rest}");
    }
    connection.post("/api/v1/release", &json!({"call_sid": "CA-unseen"}));
}
