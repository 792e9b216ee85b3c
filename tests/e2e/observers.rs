//! Read-only requests must not starve calls of the store.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{Connection, Router, eventually, http, proxy::FaultProxy, redis::RedisServer};

/// More clients than the connection limit of the metrics port.
const API_CLIENTS: usize = 120;
/// As many clients as the metrics port accepts.
const METRICS_CLIENTS: usize = 60;
/// The clients and an unoptimised router compete with all other tests for the cores.
const SERVED: Duration = Duration::from_secs(10);
/// Store reads for other purposes at the start of a router.
const STARTUP_READS: usize = 10;

/// A Redis that logs every command, so that function calls can be counted by name.
fn recording_redis() -> RedisServer {
    RedisServer::start(&["--slowlog-log-slower-than", "0", "--slowlog-max-len", "1000000"])
}

/// Returns how many times a function of the router ran since the last reset of the slow log.
fn count_runs(server: &RedisServer, function: &str) -> usize {
    let entries: Vec<redis::Value> =
        redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut server.connection()).unwrap();
    let name = format!("smart_router_{function}_");
    let matches = |entry: &&redis::Value| format!("{entry:?}").contains(&name);
    entries.iter().filter(matches).count()
}

fn reset(server: &RedisServer) {
    redis::cmd("SLOWLOG").arg("RESET").exec(&mut server.connection()).unwrap();
}

/// Concurrent clients that repeat one request, and the number of successful responses.
struct Flood {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<thread::JoinHandle<()>>,
    began: Instant,
}

impl Flood {
    /// Starts clients that request a path in a closed loop.
    fn of(clients: usize, address: SocketAddr, path: &'static str) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let client = |_| {
            let (stop, answered) = (stop.clone(), answered.clone());
            thread::spawn(move || {
                let mut connection = Connection::open(address);
                while !stop.load(Ordering::Relaxed) {
                    // On an overloaded machine the store may miss its deadline.
                    let status = connection.get(path).status;
                    assert!(matches!(status, 200 | 503), "{path}: {status}");
                    answered.fetch_add(usize::from(status == 200), Ordering::Relaxed);
                }
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { stop, answered, clients, began: Instant::now() }
    }

    fn answered(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    /// Stops the clients. Returns the number of successful responses and the elapsed time.
    fn end(self) -> (usize, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
        (self.answered.load(Ordering::Relaxed), self.began.elapsed())
    }
}

/// Allocates and releases calls during a flood, until it has at least `min_responses`. Every
/// call must get a pod.
fn serve_calls_during(router: &Router, flood: &Flood, min_responses: usize) {
    let mut number = 0;
    while number < 12 || flood.answered() < min_responses {
        let call = format!("CA{number}");
        // On an overloaded machine a request may time out and succeed when repeated.
        eventually(SERVED, "the call has a pod", || {
            let (status, response) = router.post("/api/v1/allocate", json!({"call_sid": call}));
            assert!(matches!(status, 200 | 503), "{status}: {response}");
            status == 200
        });
        eventually(SERVED, "the call is released", || matches!(router.release(&call).0, 200 | 404));
        number += 1;
    }
}

#[test]
fn concurrent_scrapes_share_one_store_read_per_second() {
    let server = recording_redis();
    let proxy = FaultProxy::to(server.port);
    proxy.set_latency(Duration::from_millis(2));
    let url = format!("redis://{}", proxy.address);
    let router = Router::start(&[("REDIS_URL", &url), ("RATE_LIMIT", "off")]);
    for (clients, address) in [(METRICS_CLIENTS, router.metrics), (API_CLIENTS, router.address)] {
        reset(&server);
        let flood = Flood::of(clients, address, "/metrics");
        serve_calls_during(&router, &flood, 1_000);
        let (answered, time) = flood.end();
        let (reads, allowed) =
            (count_runs(&server, "status"), STARTUP_READS + time.as_secs() as usize);
        assert!(reads <= allowed, "{reads} reads for {answered} requests in {time:?}");
        // The indexes tell the calls of each pool, so that no pods are counted one by one.
        assert_eq!(count_runs(&server, "pool_load"), 0);
    }
}

#[test]
fn concurrent_status_requests_share_store_reads() {
    let server = recording_redis();
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url)]);
    for (path, function) in [("/api/v1/status", "status"), ("/api/v1/pods", "pods")] {
        reset(&server);
        let flood = Flood::of(API_CLIENTS, router.address, path);
        serve_calls_during(&router, &flood, 1_000);
        let (answered, time) = flood.end();
        let reads = count_runs(&server, function);
        assert!(reads * 5 < answered, "{path}: {reads} for {answered} in {time:?}");
    }
    // A response reflects every change that was acknowledged before its request.
    for number in 0..5 {
        router.allocate(&format!("CB{number}"));
        assert_eq!(router.status()["active_calls"], number + 1);
    }
}

#[test]
fn disconnected_scrapes_cause_no_extra_store_reads() {
    let server = recording_redis();
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url), ("RATE_LIMIT", "off")]);
    reset(&server);
    let began = Instant::now();
    for _ in 0..300 {
        let mut connection = Connection::open(router.metrics);
        connection.write(b"GET /metrics HTTP/1.1\r\nhost: r\r\n\r\n");
    }
    assert_eq!(Connection::open(router.metrics).get("/metrics").status, 200);
    let (reads, time) = (count_runs(&server, "status"), began.elapsed());
    assert!(reads <= STARTUP_READS + time.as_secs() as usize, "{reads} reads in {time:?}");
}

#[test]
fn gauges_carry_the_time_of_their_store_read() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url)]);
    let gauge = |name: &str| -> Option<f64> {
        let text = router.connect().get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.map(|value| value.parse().unwrap())
    };
    let read_at = gauge("smart_router_store_read_timestamp_seconds").expect("a time");
    let now = testkit::redis::unix_millis() as f64 / 1_000.0;
    assert!((now - 60.0..=now).contains(&read_at), "{read_at} of {now}");
    router.allocate("CA1");
    eventually(Duration::from_secs(5), "the gauge is refreshed", || {
        gauge("smart_router_active_calls") == Some(1.0)
    });
    // Gauges are omitted during an outage, since a stale value would be wrong.
    server.signal("STOP");
    eventually(Duration::from_secs(5), "the gauges are omitted", || {
        gauge("smart_router_active_calls").is_none()
    });
    server.signal("CONT");
    eventually(Duration::from_secs(5), "the gauges are back", || {
        gauge("smart_router_active_calls") == Some(1.0)
    });
}

const SECOND: Duration = Duration::from_secs(1);

/// Opens an event stream and expects status 200.
fn stream(router: &Router, path: &str, token: Option<&str>) -> Connection {
    let mut stream = request_stream(router, path, token);
    stream.read_until("HTTP/1.1 200", 5 * SECOND);
    stream
}

fn request_stream(router: &Router, path: &str, token: Option<&str>) -> Connection {
    let mut stream = router.connect();
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut head = vec![("accept", "text/event-stream")];
    head.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
    stream.write(&http::request_head("GET", path, &head, 0));
    stream
}

/// Requests an event stream. Returns whether it is refused, which must be by 503 and JSON.
fn is_refused(router: &Router, path: &str, token: Option<&str>) -> bool {
    let mut stream = request_stream(router, path, token);
    let response = stream.read_until("\r\n\r\n", 5 * SECOND);
    if response.starts_with("HTTP/1.1 200") {
        return false;
    }
    assert!(
        response.starts_with("HTTP/1.1 503") && response.contains("retry-after: "),
        "{response}"
    );
    assert!(response.contains("content-type: application/json"), "{response}");
    stream.read_until("{\"error\":\"", SECOND);
    true
}

#[test]
fn open_streams_are_limited_and_a_closed_one_frees_a_slot() {
    let tokens = "viewer:v,admin:a";
    let router = Router::start(&[("API_TOKENS", tokens), ("LOG_LEVEL", "error")]);
    let paths = ["/api/v1/live", "/api/v1/events"];
    let token = Some("v");
    let mut streams: Vec<Connection> =
        (0..200).map(|number| stream(&router, paths[number % 2], token)).collect();
    for path in paths {
        assert!(is_refused(&router, path, token), "{path}");
    }
    let metrics = router.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_open_streams 200"), "{metrics}");
    assert!(metrics.contains("smart_router_denied_total{reason=\"too_many_streams\"} 2"));
    // Other requests are not affected.
    assert_eq!(router.get("/api/v1/events").0, 200, "a page of events is no stream");
    router.allocate("CA1");
    drop(streams.pop());
    eventually(10 * SECOND, "a stream is accepted again", || !is_refused(&router, paths[0], token));
}

#[test]
fn one_unauthenticated_source_cannot_use_up_all_streams() {
    let router = Router::start(&[("TRUSTED_PROXIES", "127.0.0.1"), ("LOG_LEVEL", "error")]);
    let _streams: Vec<Connection> =
        (0..50).map(|_| stream(&router, "/api/v1/live", None)).collect();
    assert!(is_refused(&router, "/api/v1/events", None));
    let mut other = router.connect();
    let head = [("accept", "text/event-stream"), ("x-forwarded-for", "192.0.2.7")];
    other.write(&http::request_head("GET", "/api/v1/live", &head, 0));
    other.read_until("HTTP/1.1 200", 5 * SECOND);
    let (status, _) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
    assert_eq!(status, 200);
}
