//! Authentication, roles, rate limits and cross-site requests.

use std::{io::Read, process::Stdio, time::Duration};

use serde_json::json;

use testkit::{Connection, Router, WITHOUT_GATEWAY, eventually, free_port, program, scratch};

const TOKENS: &str = "agent:agent-token,agent:agent-token-2,viewer:viewer-token,admin:admin-token";

/// Every route of the API that is not a webhook, with the role it requires.
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
fn each_role_has_its_routes_and_admin_has_all() {
    let router = Router::start(&[("API_TOKENS", TOKENS), ("LOG_LEVEL", "error")]);
    let mut connection = router.connect();
    let before = router.status();
    for (route, (method, path, _, needed)) in ROUTES.into_iter().enumerate() {
        for token in
            [None, Some(""), Some("agent"), Some("agent-token-"), Some("agent:agent-token")]
        {
            assert_eq!(send(&mut connection, token, route), 401, "{method} {path} {token:?}");
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
    assert_eq!(router.status(), before, "refused requests change nothing");
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
    assert_eq!(send(&mut connection, Some("agent-token-2"), 0), 200, "a role may have two tokens");
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn refusals_name_the_required_role_and_probes_need_no_token() {
    let router = Router::start(&[("API_TOKENS", TOKENS), ("LOG_LEVEL", "error")]);
    let mut connection = router.connect();
    for path in ["/health", "/ready", "/metrics", "/api/v1/health", "/api/v1/metrics"] {
        assert_eq!(connection.get(path).status, 200, "{path}");
    }
    let response = connection.get("/api/v1/status");
    assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    assert_eq!(response.json(), (401, json!({"error": "a valid bearer token is required"})));
    let response = connection.get("/api/v1/whoami");
    assert_eq!((response.status, response.header("www-authenticate")), (401, Some("Bearer")));
    for path in ["/", "/openapi.json"] {
        assert_eq!(connection.get(path).status, 200, "{path}");
    }
    for header in ["Basic YWdlbnQ6dG9rZW4=", "Bearer", "bearer  ", "viewer-token"] {
        let response = connection.send("GET", "/api/v1/status", &[("authorization", header)], b"");
        assert_eq!(response.status, 401, "{header}");
    }
    let response =
        connection.send("GET", "/api/v1/status", &[("authorization", "bearer viewer-token")], b"");
    assert_eq!(response.status, 200);
    connection.token = Some("viewer-token".into());
    let (status, response) =
        connection.post("/api/v1/drain", &json!({"pod_name": "voice-agent-0"})).json();
    assert_eq!(status, 403);
    assert_eq!(response["error"], "a token with role agent is required; this one has role viewer");
    // Webhooks are authenticated by signatures, not by tokens.
    connection.token = None;
    assert_eq!(connection.form("/api/v1/twilio/allocate", "CallSid=CA1").status, 200);
}

#[test]
fn admin_bind_serves_everything_except_webhooks() {
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
fn a_changed_file_of_api_tokens_is_reloaded() {
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
    eventually(Duration::from_secs(4), "the new token is accepted", || status("three") == 200);
    assert_eq!((status("one"), status("two")), (401, 401));
    std::fs::write(&path, "root:four").unwrap();
    log.wait_for("the file is unusable", 0);
    assert_eq!(
        (status("three"), status("four")),
        (200, 401),
        "an invalid file keeps the last tokens"
    );
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(5));
}

#[test]
fn the_access_log_names_the_token_and_contains_no_secret() {
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
    line(&["\"status\":403", "forged", "/api/v1/twilio/allocate", "x-twilio-signature is missing"]);
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
fn an_unauthenticated_api_is_warned_about_at_the_start() {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let mut router = Router::start_with(
        &[("HTTP_PORT", &api), ("METRICS_PORT", &metrics), ("LOG_LEVEL", "warn")],
        Stdio::piped(),
    );
    router.signal("TERM");
    let mut text = String::new();
    router.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    router.wait_for_exit(Duration::from_secs(5));
    assert!(
        text.contains(
            "the API needs no authentication and is open to every client: set API_TOKENS"
        ),
        "{text}"
    );
    assert!(text.contains("twilio, plivo, exotel, signalwire, telnyx, vonage, jambonz"), "{text}");
}

#[test]
fn invalid_secrets_fail_the_start_and_are_not_printed() {
    let missing = scratch().join("none");
    let missing = missing.to_str().unwrap();
    let public = ("PUBLIC_URL", "https://r.example");
    let bad: [(&[(&str, &str)], &str); 9] = [
        (
            &[("TWILIO_AUTH_TOKEN", "hush")],
            "PUBLIC_URL=: expected the URL under which providers reach this router, because TWILIO_AUTH_TOKEN is set",
        ),
        (
            &[("STREAM_STATUS", "on"), WITHOUT_GATEWAY],
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
        (&[("API_TOKENS", "owner:hush")], "entry 1 has an unknown role"),
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
fn a_named_pipe_as_watched_file_does_not_block_the_router() {
    let path = scratch().join("tokens");
    std::fs::write(&path, "admin:one").unwrap();
    let (mut router, log) = Router::start_logged(&[("API_TOKENS_FILE", path.to_str().unwrap())]);
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    log.wait_for("the file is unusable", 0);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "admin:two").unwrap();
    eventually(Duration::from_secs(4), "the new token is accepted", || {
        let mut connection = router.connect();
        connection.token = Some("two".into());
        connection.get("/api/v1/status").status == 200
    });
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(5));
}

#[test]
fn unauthenticated_requests_are_rate_limited_per_source() {
    let router = Router::start(&[
        ("API_TOKENS", TOKENS),
        ("EXOTEL_AUTH_TOKEN", "exotel-secret"),
        ("RATE_LIMIT", "5"),
        ("TRUSTED_PROXIES", "127.0.0.0/8"),
        ("LOG_LEVEL", "error"),
    ]);
    let get = |path: &str, from: &str| {
        let headers = [("x-forwarded-for", from)];
        router.connect().send("GET", path, &headers, b"")
    };
    // Returns the status of the first response, then repeats the request until it is limited.
    let exhaust = |path: &str, from: &str| {
        let first = get(path, from).status;
        let limited = (0..10_000).map(|_| get(path, from)).find(|response| response.status == 429);
        let response = limited.unwrap_or_else(|| panic!("{path} is not limited"));
        assert_eq!(response.header("retry-after"), Some("1"));
        assert!(response.text().contains("too many requests"), "{}", response.text());
        first
    };
    assert_eq!(exhaust("/api/v1/status", "192.0.2.1"), 401);
    // Each source has its own limit.
    let forged = "/api/v1/exotel/allocate?CallSid=EX1&auth_token=guess";
    assert_eq!(exhaust(forged, "192.0.2.2"), 403);
    assert_eq!(exhaust("/", "192.0.2.3"), 200);
    assert_eq!(exhaust("/page/page.js", "192.0.2.4"), 200);
    assert_eq!(exhaust("/nowhere", "192.0.2.5"), 404);
    assert_eq!(exhaust("/api/v1/whoami", "192.0.2.6"), 401);
    // Authenticated requests and probes are not limited.
    let genuine = "/api/v1/exotel/allocate?CallSid=EX1&auth_token=exotel-secret";
    for from in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        assert_eq!(get(genuine, from).status, 200);
        assert_eq!(get("/ready", from).status, 200);
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
fn cross_site_requests_change_nothing() {
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
    // The router's own page and clients that are not browsers.
    assert_eq!(drain(&[("origin", "https://router"), ("sec-fetch-site", "same-origin")]), 200);
    assert_eq!(drain(&[]), 200);
}

#[test]
fn a_revoked_token_ends_its_event_streams() {
    let file = scratch().join("tokens");
    std::fs::write(&file, "viewer:revoked,admin:admin-token").unwrap();
    let router = Router::start(&[("API_TOKENS_FILE", file.to_str().unwrap())]);
    let open = |path: &str| {
        let mut stream = std::net::TcpStream::connect(router.address).unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\naccept: text/event-stream\r\nauthorization: Bearer revoked\r\n\r\n"
        );
        std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut buffer = [0; 256];
        let count = stream.read(&mut buffer).unwrap();
        assert!(buffer[..count].starts_with(b"HTTP/1.1 200"), "{path}");
        stream
    };
    let mut streams = [open("/api/v1/live"), open("/api/v1/events")];
    std::fs::write(&file, "admin:admin-token").unwrap();
    let mut connection = router.connect();
    connection.token = Some("revoked".into());
    eventually(Duration::from_secs(5), "the token is rejected", || {
        connection.get("/api/v1/status").status == 401
    });
    connection.token = Some("admin-token".into());
    connection.post("/api/v1/allocate", &json!({"call_sid": "CA-hidden"}));
    for stream in &mut streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("CA-hidden"), "{rest}");
    }
    connection.post("/api/v1/release", &json!({"call_sid": "CA-hidden"}));
}
