//! Requests that only look must not take the store away from calls.

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

use testkit::{Connection, Router, eventually, proxy::Proxy, raw, redis::RedisServer};

/// More than the port of the metrics has room for; there, as many as it has.
const CLIENTS: usize = 120;
const LOOKING: usize = 60;
/// Readings for other purposes at the start of a router.
const OTHERS: usize = 10;

/// A Redis that records every command, so that function calls can be counted by name.
fn recording_redis() -> RedisServer {
    RedisServer::start(&["--slowlog-log-slower-than", "0", "--slowlog-max-len", "1000000"])
}

/// How often a function of ours ran since the log was last reset.
fn runs(server: &RedisServer, function: &str) -> usize {
    let entries: Vec<redis::Value> =
        redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut server.connection()).unwrap();
    let name = format!("smart_router_{function}_");
    let is_it = |entry: &&redis::Value| format!("{entry:?}").contains(&name);
    entries.iter().filter(is_it).count()
}

fn reset(server: &RedisServer) {
    redis::cmd("SLOWLOG").arg("RESET").exec(&mut server.connection()).unwrap();
}

/// What came of requests that many clients sent at the same time.
struct Flood {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<thread::JoinHandle<()>>,
    began: Instant,
}

impl Flood {
    /// Clients that ask for a path, each again as soon as it is answered.
    fn of(clients: usize, address: SocketAddr, path: &'static str) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let client = |_| {
            let (stop, answered) = (stop.clone(), answered.clone());
            thread::spawn(move || {
                let mut connection = Connection::open(address);
                while !stop.load(Ordering::Relaxed) {
                    // (a store on a busy machine may be late)
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

    /// How many requests were answered, in what time.
    fn end(self) -> (usize, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().unwrap();
        }
        (self.answered.load(Ordering::Relaxed), self.began.elapsed())
    }
}

/// Allocates and releases while others ask; every call must have its pod.
fn calls_go_on(router: &Router, flood: &Flood, least: usize) {
    let mut number = 0;
    while number < 12 || flood.answered() < least {
        let call = format!("CA{number}");
        // A machine with other work may be late; the call has its pod when it asks again.
        eventually(Duration::from_secs(2), "the call has a pod", || {
            let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": call}));
            assert!(matches!(status, 200 | 503), "{status}: {answer}");
            status == 200
        });
        eventually(Duration::from_secs(2), "the call is over", || {
            matches!(router.release(&call).0, 200 | 404)
        });
        number += 1;
    }
}

#[test]
fn metrics_cost_the_store_one_reading_a_second_however_many_ask() {
    let server = recording_redis();
    let proxy = Proxy::to(server.port);
    proxy.set_latency(Duration::from_millis(2));
    let url = format!("redis://{}", proxy.address);
    let router = Router::start(&[("REDIS_URL", &url), ("RATE_LIMIT", "off")]);
    for (clients, address) in [(LOOKING, router.metrics), (CLIENTS, router.address)] {
        reset(&server);
        let flood = Flood::of(clients, address, "/metrics");
        calls_go_on(&router, &flood, 1_000);
        let (answered, time) = flood.end();
        let (readings, allowed) = (runs(&server, "status"), OTHERS + time.as_secs() as usize);
        assert!(readings <= allowed, "{readings} readings for {answered} requests in {time:?}");
        let pages = runs(&server, "pool_load");
        assert!(pages <= 3 * allowed, "{pages} pages of three pools in {time:?}");
    }
}

#[test]
fn requests_for_the_status_share_readings() {
    let server = recording_redis();
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url)]);
    for (path, function) in [("/api/v1/status", "status"), ("/api/v1/pods", "pods")] {
        reset(&server);
        let flood = Flood::of(CLIENTS, router.address, path);
        calls_go_on(&router, &flood, 1_000);
        let (answered, time) = flood.end();
        let readings = runs(&server, function);
        assert!(readings * 5 < answered, "{path}: {readings} for {answered} in {time:?}");
    }
    // What was done before a request is in its answer.
    for number in 0..5 {
        router.allocate(&format!("CB{number}"));
        assert_eq!(router.status()["active_calls"], number + 1);
    }
}

#[test]
fn a_metrics_client_that_hangs_up_starts_no_reading_of_its_own() {
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
    let (readings, time) = (runs(&server, "status"), began.elapsed());
    assert!(readings <= OTHERS + time.as_secs() as usize, "{readings} readings in {time:?}");
}

#[test]
fn the_gauges_say_how_old_they_are() {
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
    eventually(Duration::from_secs(5), "the gauge follows", || {
        gauge("smart_router_active_calls") == Some(1.0)
    });
    // A store that is out has no gauges: an old value would be wrong.
    server.signal("STOP");
    eventually(Duration::from_secs(5), "the gauges are gone", || {
        gauge("smart_router_active_calls").is_none()
    });
    server.signal("CONT");
    eventually(Duration::from_secs(5), "the gauges are back", || {
        gauge("smart_router_active_calls") == Some(1.0)
    });
}

const SECOND: Duration = Duration::from_secs(1);

/// Opens a stream and expects that it begins.
fn stream(router: &Router, path: &str, token: Option<&str>) -> Connection {
    let mut stream = ask_for_stream(router, path, token);
    stream.read_until("HTTP/1.1 200", 5 * SECOND);
    stream
}

fn ask_for_stream(router: &Router, path: &str, token: Option<&str>) -> Connection {
    let mut stream = router.connect();
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut head = vec![("accept", "text/event-stream")];
    head.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
    stream.write(&raw::head("GET", path, &head, 0));
    stream
}

/// Asks for a stream and expects to be told that there are too many.
fn is_refused(router: &Router, path: &str, token: Option<&str>) -> bool {
    let mut stream = ask_for_stream(router, path, token);
    let answer = stream.read_until("\r\n\r\n", 5 * SECOND);
    if answer.starts_with("HTTP/1.1 200") {
        return false;
    }
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: "), "{answer}");
    assert!(answer.contains("content-type: application/json"), "{answer}");
    stream.read_until("{\"error\":\"", SECOND);
    true
}

#[test]
fn open_streams_are_bounded_and_one_that_ends_makes_room() {
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
    // Everything else goes on.
    assert_eq!(router.get("/api/v1/events").0, 200, "a page is no stream");
    router.allocate("CA1");
    drop(streams.pop());
    eventually(10 * SECOND, "there is room", || !is_refused(&router, paths[0], token));
}

#[test]
fn one_source_without_a_token_cannot_take_every_stream() {
    let router = Router::start(&[("TRUSTED_PROXIES", "127.0.0.1"), ("LOG_LEVEL", "error")]);
    let _streams: Vec<Connection> =
        (0..50).map(|_| stream(&router, "/api/v1/live", None)).collect();
    assert!(is_refused(&router, "/api/v1/events", None));
    let mut other = router.connect();
    let head = [("accept", "text/event-stream"), ("x-forwarded-for", "192.0.2.7")];
    other.write(&raw::head("GET", "/api/v1/live", &head, 0));
    other.read_until("HTTP/1.1 200", 5 * SECOND);
    let (status, _) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
    assert_eq!(status, 200);
}
