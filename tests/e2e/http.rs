use std::{
    io::{Read, Write},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{Connection, Router, eventually, free_port, raw::head};

#[test]
fn every_request_has_an_id_and_keeps_the_one_it_brings() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    let given = connection.send("GET", "/health", &[("X-Request-Id", "abc-123")], b"");
    assert_eq!(given.header("x-request-id"), Some("abc-123"));
    let ids: Vec<String> = (0..2)
        .map(|_| connection.get("/nowhere").header("x-request-id").unwrap().to_owned())
        .collect();
    assert_ne!(ids[0], ids[1]);
    let bad = connection.send("GET", "/health", &[("X-Request-Id", &"x".repeat(500))], b"");
    assert!(bad.header("x-request-id").unwrap().len() < 100);
}

#[test]
fn wrong_paths_and_methods_are_told_in_json() {
    let router = Router::start(&[]);
    let mut connection = router.connect();
    assert_eq!(
        connection.get("/api/v1/nothing").json(),
        (404, json!({"error": "there is nothing at /api/v1/nothing"}))
    );
    let wrong = connection.get("/api/v1/allocate");
    assert_eq!(wrong.header("allow"), Some("POST"));
    assert_eq!(wrong.json().0, 405);
    assert_eq!(connection.send("DELETE", "/api/v1/twilio/allocate", &[], b"").json().0, 405);
}

#[test]
fn probes_answer_at_the_root_and_under_the_api() {
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
fn one_port_serves_both_where_they_are_equal() {
    let port = free_port().to_string();
    let router = Router::start(&[("HTTP_PORT", &port), ("METRICS_PORT", &port)]);
    assert_eq!(router.connect().get("/metrics").status, 200);
    assert_eq!(router.get("/api/v1/status").0, 200);
}

#[test]
fn an_idle_connection_may_wait_longer_than_a_slow_request() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "500ms"), ("HTTP_IDLE_TIMEOUT", "3s")]);
    let mut connection = router.connect();
    for _ in 0..2 {
        assert_eq!(connection.get("/health").status, 200);
        // (longer than a request may take)
        thread::sleep(Duration::from_millis(600));
    }
    assert_eq!(connection.get("/health").status, 200);
    assert!(connection.answer().is_none(), "an idle connection is closed in the end");
}

#[test]
fn every_head_in_parts_has_the_whole_read_timeout() {
    let router = Router::start(&[("HTTP_READ_TIMEOUT", "1s")]);
    let mut connection = router.connect();
    let head = head("GET", "/health", &[], 0);
    let (first, rest) = head.split_at(10);
    for _ in 0..2 {
        connection.write(first);
        thread::sleep(Duration::from_millis(50));
        connection.write(rest);
        assert_eq!(connection.answer().unwrap().status, 200);
        // The deadline of this head passes while the connection is idle.
        thread::sleep(Duration::from_millis(1_100));
    }
}

#[test]
fn stopping_says_so_first_and_finishes_requests_in_flight() {
    let mut router =
        Router::start(&[("HTTP_SHUTDOWN_TIMEOUT", "10m"), ("HTTP_READ_TIMEOUT", "10m")]);
    let body = json!({"call_sid": "CA1"}).to_string();
    let mut connection = router.connect();
    connection.write(&head(
        "POST",
        "/api/v1/allocate",
        &[("content-type", "application/json")],
        body.len(),
    ));
    connection.write(&body.as_bytes()[..5]);
    thread::sleep(Duration::from_millis(100));
    router.signal("TERM");
    eventually(Duration::from_secs(1), "unready before the door closes", || {
        let answer = router.connect().get("/ready");
        answer.status == 503 && answer.header("connection") == Some("close")
    });
    eventually(Duration::from_secs(2), "no new connection", || {
        Connection::try_open(router.address).is_none()
    });
    connection.write(&body.as_bytes()[5..]);
    let (status, answer) = connection.answer().unwrap().json();
    assert_eq!((status, &answer["pod_name"]), (200, &json!("voice-agent-0")));
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn clients_that_do_not_read_are_cut_off() {
    let mut router =
        Router::start(&[("HTTP_READ_TIMEOUT", "500ms"), ("HTTP_SHUTDOWN_TIMEOUT", "10m")]);
    let mut connection = router.connect();
    let request = head("GET", "/metrics", &[], 0);
    while connection.try_write_for(&request, Duration::from_secs(2)) {}
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_head_request_takes_no_pod() {
    let router = Router::start(&[]);
    let answer = router.connect().send(
        "HEAD",
        "/api/v1/twilio/allocate?CallSid=CA1",
        &[("connection", "close")],
        b"",
    );
    assert_eq!(answer.status, 405);
    assert_eq!(router.status()["active_calls"], 0);
}

#[test]
fn stopping_does_not_wait_longer_than_allowed() {
    let mut router =
        Router::start(&[("HTTP_SHUTDOWN_TIMEOUT", "500ms"), ("HTTP_READ_TIMEOUT", "10m")]);
    let mut connection = router.connect();
    connection.write(&head("POST", "/api/v1/allocate", &[], 100));
    thread::sleep(Duration::from_millis(100));
    let started = Instant::now();
    router.signal("INT");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
    assert!(started.elapsed() >= Duration::from_millis(400));
}

#[test]
fn a_log_reader_that_sleeps_blocks_nobody() {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let settings =
        [("HTTP_PORT", api.as_str()), ("METRICS_PORT", metrics.as_str()), ("LOG_FORMAT", "json")];
    let mut router = Router::start_with(&settings, Stdio::piped());
    let mut connection = router.connect();
    // Some 300 bytes a line: far more than a pipe holds. A request that waited for the reader
    // would have no answer.
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
    assert!(!text.contains(r#""path":"/ready""#), "probes are debug");
}

#[test]
fn a_burst_of_connections_finds_room_while_the_router_is_busy() {
    let router = Router::start(&[]);
    let pid = router.child.id().to_string();
    let tell = |signal: &str| {
        assert!(
            std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success()
        );
    };
    // As many as the system lets wait at all.
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let burst = allowed.trim().parse::<usize>().unwrap().min(2_000);
    tell("-STOP");
    let patience = Duration::from_millis(500);
    let waiting: Vec<_> = (0..burst)
        .map_while(|_| std::net::TcpStream::connect_timeout(&router.address, patience).ok())
        .collect();
    tell("-CONT");
    assert_eq!(waiting.len(), burst);
}

/// Whether something is sent from now on: reads what is there, and waits for more.
fn is_told(stream: &mut std::net::TcpStream) -> bool {
    let mut buffer = [0; 4096];
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.read(&mut buffer).is_ok_and(|count| count > 0)
}

#[test]
fn who_says_nothing_makes_room_for_others() {
    let router = Router::start(&[("MAX_CONNECTIONS", "20")]);
    let mut looking = std::net::TcpStream::connect(router.address).unwrap();
    write!(looking, "GET /api/v1/live HTTP/1.1\r\nhost: r\r\n\r\n").unwrap();
    assert!(is_told(&mut looking));
    let silent: Vec<_> =
        (0..60).map(|_| std::net::TcpStream::connect(router.address).unwrap()).collect();
    for number in 0..10 {
        assert_eq!(router.connect().get("/ready").status, 200, "{number}");
    }
    // (those that had to go are closed, the last ones are not)
    let is_open = |mut stream: &std::net::TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        !matches!(stream.read(&mut [0]), Ok(0))
    };
    eventually(Duration::from_secs(1), "some are open, and not all", || {
        (5..20).contains(&silent.iter().filter(|stream| is_open(stream)).count())
    });
    assert!(is_told(&mut looking), "who is told something stays");
    let metrics = Connection::open(router.metrics).get("/metrics").text();
    let away = metrics.lines().find(|line| line.contains("connections_turned_away_total "));
    let away: f64 = away.unwrap().split(' ').next_back().unwrap().parse().unwrap();
    assert!(away >= 41.0, "{away}");
}

#[test]
fn who_keeps_us_waiting_keeps_nobody_out() {
    let router = Router::start(&[("MAX_CONNECTIONS", "20"), ("HTTP_READ_TIMEOUT", "30s")]);
    let open = || std::net::TcpStream::connect(router.address).unwrap();
    // A stream that is told something, clients that were answered, and bodies that never come.
    let mut looking = open();
    write!(looking, "GET /api/v1/live HTTP/1.1\r\nhost: r\r\n\r\n").unwrap();
    assert!(is_told(&mut looking));
    let slow: Vec<_> = (0..15)
        .map(|_| {
            let mut stream = open();
            let head = "POST /api/v1/twilio/allocate HTTP/1.1\r\nhost: r\r\n";
            write!(stream, "{head}content-length: 99\r\n\r\na").unwrap();
            stream
        })
        .collect();
    let answered: Vec<_> = (0..10)
        .map(|_| {
            let mut connection = router.connect();
            assert_eq!(connection.get("/ready").status, 200);
            connection
        })
        .collect();
    // Newcomers all at once.
    thread::scope(|scope| {
        for _ in 0..15 {
            scope.spawn(|| assert_eq!(router.connect().get("/ready").status, 200));
        }
    });
    assert!(is_told(&mut looking), "who is told something stays");
    drop((slow, answered));
}
