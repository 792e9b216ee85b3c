use std::{
    io::{Read, Write},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{Connection, Router, eventually, free_port, http::request_head};

#[test]
fn a_request_keeps_its_id_or_gets_a_new_one() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    let response = connection.send("GET", "/health", &[("X-Request-Id", "abc-123")], b"");
    assert_eq!(response.header("x-request-id"), Some("abc-123"));
    let ids: Vec<String> = (0..2)
        .map(|_| connection.get("/nowhere").header("x-request-id").unwrap().to_owned())
        .collect();
    assert_ne!(ids[0], ids[1]);
    let bad = connection.send("GET", "/health", &[("X-Request-Id", &"x".repeat(500))], b"");
    assert!(bad.header("x-request-id").unwrap().len() < 100);
}

#[test]
fn unknown_paths_and_methods_get_a_json_error() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    assert_eq!(
        connection.get("/api/v1/nothing").json(),
        (404, json!({"error": "no such path: /api/v1/nothing"}))
    );
    let wrong = connection.get("/api/v1/allocate");
    assert_eq!(wrong.header("allow"), Some("POST"));
    assert_eq!(wrong.json().0, 405);
    assert_eq!(connection.send("DELETE", "/api/v1/twilio/allocate", &[], b"").json().0, 405);
}

#[test]
fn probes_are_served_at_the_root_and_under_the_api() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    for prefix in ["", "/api/v1"] {
        assert_eq!(
            connection.get(&format!("{prefix}/health")).json(),
            (200, json!({"status": "ok"}))
        );
        assert_eq!(
            connection.get(&format!("{prefix}/ready")).json(),
            (200, json!({"status": "ready", "store": "up"}))
        );
        assert_eq!(connection.get(&format!("{prefix}/metrics")).status, 200);
    }
    let mut metrics = Connection::open(router.metrics);
    assert_eq!(metrics.get("/health").status, 200);
    assert_eq!(metrics.get("/metrics").status, 200);
    assert_eq!(metrics.get("/api/v1/status").status, 404);
}

#[test]
fn api_and_metrics_may_share_a_port() {
    let port = free_port().to_string();
    let router = Router::start(&[("HTTP_PORT", &port), ("METRICS_PORT", &port)]);
    assert_eq!(router.connect().get("/metrics").status, 200);
    assert_eq!(router.get("/api/v1/status").0, 200);
}

/// Waits until the router closes another connection, whose head begins now and stays incomplete.
fn wait_for_read_timeout(router: &Router) {
    let mut stalled = router.connect();
    stalled.write(&request_head("GET", "/health", &[], 0)[..10]);
    assert!(stalled.read_response().is_none_or(|response| response.status == 408));
}

#[test]
fn the_idle_timeout_may_exceed_the_read_timeout() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "500ms"), ("HTTP_IDLE_TIMEOUT", "3s")]);
    let mut connection = router.connect();
    for _ in 0..2 {
        assert_eq!(connection.get("/health").status, 200);
        wait_for_read_timeout(&router);
    }
    assert_eq!(connection.get("/health").status, 200);
    assert!(connection.read_response().is_none(), "the idle timeout closes the connection");
}

#[test]
fn every_split_head_has_the_full_read_timeout() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    let mut connection = router.connect();
    let head = request_head("GET", "/health", &[], 0);
    let (first, rest) = head.split_at(10);
    for _ in 0..2 {
        connection.write(first);
        thread::sleep(Duration::from_millis(50));
        connection.write(rest);
        assert_eq!(connection.read_response().unwrap().status, 200);
        // The deadline of this head passes while the connection is idle.
        wait_for_read_timeout(&router);
    }
}

#[test]
fn graceful_shutdown_completes_requests_in_flight() {
    let mut router =
        Router::start(&[("HTTP_SHUTDOWN_TIMEOUT", "10m"), ("HTTP_READ_TIMEOUT", "10m")]);
    let body = json!({"call_sid": "CA1"}).to_string();
    let mut connection = router.connect();
    connection.write(&request_head(
        "POST",
        "/api/v1/allocate",
        &[("content-type", "application/json")],
        body.len(),
    ));
    connection.write(&body.as_bytes()[..5]);
    thread::sleep(Duration::from_millis(100));
    router.signal("TERM");
    eventually(Duration::from_secs(1), "/ready fails before the listener closes", || {
        let response = router.connect().get("/ready");
        response.status == 503 && response.header("connection") == Some("close")
    });
    eventually(Duration::from_secs(2), "new connections are refused", || {
        Connection::try_open(router.address).is_none()
    });
    connection.write(&body.as_bytes()[5..]);
    let (status, response) = connection.read_response().unwrap().json();
    assert_eq!((status, &response["pod_name"]), (200, &json!("voice-agent-0")));
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let mut router =
        Router::start(&[("HTTP_READ_TIMEOUT", "500ms"), ("HTTP_SHUTDOWN_TIMEOUT", "10m")]);
    let mut connection = router.connect();
    let request = request_head("GET", "/metrics", &[], 0);
    while connection.try_write_for(&request, Duration::from_secs(2)) {}
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_head_request_allocates_no_pod() {
    let router = Router::start(&[]);
    let response = router.connect().send(
        "HEAD",
        "/api/v1/twilio/allocate?CallSid=CA1",
        &[("connection", "close")],
        b"",
    );
    assert_eq!(response.status, 405);
    assert_eq!(router.status()["active_calls"], 0);
}

#[test]
fn shutdown_ends_after_its_grace_period() {
    let mut router =
        Router::start(&[("HTTP_SHUTDOWN_TIMEOUT", "500ms"), ("HTTP_READ_TIMEOUT", "10m")]);
    let mut connection = router.connect();
    connection.write(&request_head("POST", "/api/v1/allocate", &[], 100));
    thread::sleep(Duration::from_millis(100));
    let started = Instant::now();
    router.signal("INT");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
    assert!(started.elapsed() >= Duration::from_millis(400));
}

#[test]
fn a_blocked_log_reader_does_not_block_requests() {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let settings =
        [("HTTP_PORT", api.as_str()), ("METRICS_PORT", metrics.as_str()), ("LOG_FORMAT", "json")];
    let mut router = Router::start_with(&settings, Stdio::piped());
    let mut connection = router.connect();
    // About 300 bytes a line: far more than a pipe buffers. A request that waits for the log
    // reader would get no response.
    for number in 0..3_000 {
        assert_eq!(connection.get(&format!("/api/v1/calls/CA{number}")).status, 404);
    }
    let mut log = router.child.stderr.take().unwrap();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        text
    });
    drop(router);
    let text = reader.join().unwrap();
    for line in text.lines() {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(line["level"].is_string() && line["message"].is_string());
    }
    assert!(
        text.lines().any(|line| line.contains(r#""path":"/api/v1/calls/CA7""#)
            && line.contains(r#""status":404"#))
    );
    assert!(!text.contains(r#""path":"/ready""#), "probes are logged at level debug");
}

#[test]
fn the_listen_backlog_holds_a_burst_of_connections() {
    let router = Router::start(&[]);
    let pid = router.child.id().to_string();
    let send_signal = |signal: &str| {
        assert!(
            std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success()
        );
    };
    // The kernel limits the backlog to somaxconn.
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let burst = allowed.trim().parse::<usize>().unwrap().min(2_000);
    send_signal("-STOP");
    let timeout = Duration::from_millis(500);
    let connected: Vec<_> = (0..burst)
        .map_while(|_| std::net::TcpStream::connect_timeout(&router.address, timeout).ok())
        .collect();
    send_signal("-CONT");
    assert_eq!(connected.len(), burst);
}

/// Discards the data received so far. Returns whether the router sends more.
fn receives_data(stream: &mut std::net::TcpStream) -> bool {
    let mut buffer = [0; 4096];
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.read(&mut buffer).is_ok_and(|count| count > 0)
}

#[test]
fn silent_connections_are_evicted_at_the_connection_limit() {
    let router = Router::start(&[("MAX_CONNECTIONS", "20")]);
    let mut live = std::net::TcpStream::connect(router.address).unwrap();
    write!(live, "GET /api/v1/live HTTP/1.1\r\nhost: r\r\n\r\n").unwrap();
    assert!(receives_data(&mut live));
    let silent: Vec<_> =
        (0..60).map(|_| std::net::TcpStream::connect(router.address).unwrap()).collect();
    for number in 0..10 {
        assert_eq!(router.connect().get("/ready").status, 200, "{number}");
    }
    // Evicted connections are closed; the most recent ones are open.
    let is_open = |mut stream: &std::net::TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        !matches!(stream.read(&mut [0]), Ok(0))
    };
    eventually(Duration::from_secs(1), "some connections are open, others evicted", || {
        (5..20).contains(&silent.iter().filter(|stream| is_open(stream)).count())
    });
    assert!(receives_data(&mut live), "a stream that receives data is not evicted");
    let metrics = Connection::open(router.metrics).get("/metrics").text();
    let evicted = metrics.lines().find(|line| line.contains("connections_turned_away_total "));
    let evicted: f64 = evicted.unwrap().split(' ').next_back().unwrap().parse().unwrap();
    assert!(evicted >= 41.0, "{evicted}");
}

#[test]
fn slow_and_idle_connections_are_evicted_for_new_ones() {
    let router = Router::start(&[("MAX_CONNECTIONS", "20"), ("HTTP_READ_TIMEOUT", "30s")]);
    let open = || std::net::TcpStream::connect(router.address).unwrap();
    // A live stream, idle clients, and clients whose request bodies never arrive.
    let mut live = open();
    write!(live, "GET /api/v1/live HTTP/1.1\r\nhost: r\r\n\r\n").unwrap();
    assert!(receives_data(&mut live));
    let slow: Vec<_> = (0..15)
        .map(|_| {
            let mut stream = open();
            let head = "POST /api/v1/twilio/allocate HTTP/1.1\r\nhost: r\r\n";
            write!(stream, "{head}content-length: 99\r\n\r\na").unwrap();
            stream
        })
        .collect();
    let idle: Vec<_> = (0..10)
        .map(|_| {
            let mut connection = router.connect();
            assert_eq!(connection.get("/ready").status, 200);
            connection
        })
        .collect();
    // Concurrent new connections.
    thread::scope(|scope| {
        for _ in 0..15 {
            scope.spawn(|| assert_eq!(router.connect().get("/ready").status, 200));
        }
    });
    assert!(receives_data(&mut live), "a stream that receives data is not evicted");
    drop((slow, idle));
}

/// A table that grows while calls are served suspends the thread that accepts connections.
#[test]
fn the_table_of_open_files_has_room_from_the_start() {
    let router = Router::start(&[]);
    let read = |file: &str| {
        std::fs::read_to_string(format!("/proc/{}/{file}", router.child.id())).unwrap()
    };
    let field = |text: &str, name: &str, field: usize| -> usize {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().nth(field).unwrap().parse().unwrap()
    };
    let limit = field(&read("limits"), "Max open files", 0);
    assert!(field(&read("status"), "FDSize:", 0) >= limit.min(65_536));
}
