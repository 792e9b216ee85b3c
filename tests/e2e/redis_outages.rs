//! Outages of Redis: unreachable, stalled, or restarted empty.

use std::{
    collections::{HashMap, HashSet},
    io::Write,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::replicas;
use testkit::{Connection, Router, eventually, proxy::FaultProxy, redis::RedisServer};

#[derive(Clone, Copy, PartialEq)]
enum Outage {
    Stalled,
    RestartedEmpty,
}

#[test]
fn a_stalled_redis_under_load_loses_no_pod_and_no_release() {
    outage_under_load(Outage::Stalled);
}

#[test]
fn a_redis_that_restarts_empty_under_load_loses_no_pod() {
    outage_under_load(Outage::RestartedEmpty);
}

const CLIENTS: usize = 8;

/// Clients that allocate and release during an outage, and their results.
struct Clients {
    kind: Outage,
    done: AtomicBool,
    allocations: [AtomicUsize; CLIENTS],
    refusals: [AtomicUsize; CLIENTS],
    /// The call on each pod.
    held: Mutex<HashMap<String, String>>,
    refused: Mutex<HashSet<String>>,
}

impl Clients {
    fn new(kind: Outage) -> Self {
        let counts = || [const { AtomicUsize::new(0) }; CLIENTS];
        let (held, refused) = (Mutex::default(), Mutex::default());
        let done = AtomicBool::new(false);
        Self { kind, done, allocations: counts(), refusals: counts(), held, refused }
    }

    /// Allocates and releases calls until the test ends.
    fn run(&self, router: &Router, client: usize) {
        let mut connection = router.connect();
        for number in (0..100_000).take_while(|_| !self.done.load(Ordering::Relaxed)) {
            let call = format!("CA-{client}-{number}");
            let (status, response) =
                connection.post("/api/v1/allocate", &json!({"call_sid": call})).json();
            match status {
                200 => {
                    self.allocations[client].fetch_add(1, Ordering::Relaxed);
                    let pod = response["pod_name"].as_str().unwrap().to_owned();
                    let other = self.held.lock().unwrap().insert(pod.clone(), call.clone());
                    // A wipe loses the calls, so their pods may be allocated again.
                    let duplicate = other.filter(|_| self.kind == Outage::Stalled);
                    assert_eq!(duplicate, None, "{pod} was also allocated to {call}");
                    thread::sleep(Duration::from_millis(5));
                    self.held.lock().unwrap().remove(&pod);
                    let released =
                        connection.post("/api/v1/release", &json!({"call_sid": call})).status;
                    // A wiped Redis does not know calls that were not renewed since.
                    let is_lost = self.kind == Outage::RestartedEmpty && released == 404;
                    assert!(is_lost || matches!(released, 200 | 503), "{released}");
                }
                503 => {
                    self.refusals[client].fetch_add(1, Ordering::Relaxed);
                    self.refused.lock().unwrap().insert(call);
                }
                other => panic!("{other}: {response}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Resets the counts and waits until each has reached `min`.
    fn wait_for_each(counts: &[AtomicUsize], min: usize, what: &str) {
        counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        eventually(Duration::from_secs(10), what, || {
            counts.iter().all(|count| count.load(Ordering::Relaxed) >= min)
        });
    }
}

fn outage_under_load(kind: Outage) {
    let mut server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 200}"#);
    let clients = Clients::new(kind);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (clients, router) = (&clients, &routers[client % 2]);
            scope.spawn(move || clients.run(router, client));
        }
        Clients::wait_for_each(&clients.allocations, 5, "all clients are served");
        match kind {
            Outage::Stalled => server.signal("STOP"),
            Outage::RestartedEmpty => server.kill(),
        }
        // Responses arrive during the outage; clients do not wait for its end.
        Clients::wait_for_each(&clients.refusals, 20, "all clients are refused");
        let twilio = routers[0].connect().form("/api/v1/twilio/allocate", "CallSid=CA-t");
        assert!(twilio.status == 200 && twilio.text().contains("<Hangup/>"));
        assert_eq!(routers[0].connect().get("/ready").status, 200);
        match kind {
            Outage::Stalled => server.signal("CONT"),
            Outage::RestartedEmpty => server.restart_empty(),
        }
        eventually(Duration::from_secs(2), "the circuit breaker closes", || {
            let (status, _) = routers[1].post("/api/v1/allocate", json!({"call_sid": "back"}));
            status == 200
        });
        Clients::wait_for_each(&clients.allocations, 5, "all clients are served again");
        clients.done.store(true, Ordering::Relaxed);
    });
    routers[1].release("back");
    let mut connection = routers[0].connect();
    eventually(Duration::from_secs(3), "ended calls are released", || {
        connection.get("/api/v1/status").json().1["active_calls"] == 0
    });
    for call in clients.refused.into_inner().unwrap() {
        let status = connection.get(&format!("/api/v1/calls/{call}")).status;
        assert_eq!(status, 404, "{call} was refused but holds a pod");
    }
    assert_eq!(routers[0].status()["pools"]["gold"]["available"], 200);
}

#[test]
fn an_empty_redis_is_refilled_from_the_router() {
    let mut server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 10}"#),
        ("LEASE_TTL", "30s"),
    ]);
    router.put("/api/v1/tiers", r#"{"gold": 5, "iron": 5}"#);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    server.restart_empty();
    let started = Instant::now();
    eventually(Duration::from_secs(5), "the renewal registers the call", || {
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]})).1["registered"]
            == json!(["CA1"])
    });
    eventually(Duration::from_secs(5), "all pods are registered", || {
        router.status()["pools"]["iron"]["assigned"] == 5
    });
    println!("refilled after {:?}", started.elapsed());
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod.as_str());
    assert_eq!(
        router.status()["pools"]["gold"]["assigned"],
        5,
        "the current tiers, not those of the start"
    );
}

#[test]
fn a_router_starts_without_redis_and_serves_when_it_is_up() {
    let port = testkit::free_port();
    let (api, metrics) = (testkit::free_port().to_string(), testkit::free_port().to_string());
    let url = format!("redis://127.0.0.1:{port}");
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("HTTP_PORT", &api),
        ("METRICS_PORT", &metrics),
        ("LOG_LEVEL", "off"),
    ];
    let mut child =
        testkit::program(&settings).stdout(std::process::Stdio::null()).spawn().unwrap();
    let address = format!("127.0.0.1:{api}").parse().unwrap();
    eventually(Duration::from_secs(5), "the router responds", || {
        Connection::try_open(address)
            .is_some_and(|mut connection| connection.get("/health").status == 200)
    });
    let mut connection = Connection::open(address);
    assert_eq!(
        connection.get("/ready").json(),
        (503, json!({"status": "starting", "store": "down", "reason": "unreachable"}))
    );
    assert_eq!(connection.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status, 503);
    let _server = RedisServer::start_on(port);
    eventually(Duration::from_secs(5), "ready", || connection.get("/ready").status == 200);
    assert_eq!(connection.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status, 200);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A router whose connection to Redis goes through a proxy.
fn start_behind(proxy: &FaultProxy, tiers: &str) -> Router {
    let url = format!("redis://{}", proxy.address);
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", tiers)]);
    // The first allocation may have to read the key of stream tokens: a request before its own,
    // which faults would hit instead.
    eventually(Duration::from_secs(5), "the router serves", || {
        router.post("/api/v1/allocate", json!({"call_sid": "first"})).0 == 200
    });
    eventually(Duration::from_secs(5), "the first call has ended", || {
        router.release("first").0 == 404
    });
    router
}

#[test]
fn only_a_new_allocation_with_a_lost_reply_is_compensated() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let router = start_behind(&proxy, r#"{"gold": 3}"#);
    router.allocate("known");
    proxy.drop_replies(true);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "lost"})).0, 503);
    proxy.drop_replies(false);
    eventually(Duration::from_secs(3), "the circuit breaker closes", || {
        router.get("/api/v1/calls/known").0 == 200
    });
    eventually(Duration::from_secs(3), "the allocation is compensated", || {
        router.status()["pools"]["gold"]["available"] == 2
    });
    assert_eq!(router.get("/api/v1/calls/lost").0, 404);

    proxy.drop_replies(true);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "known"})).0, 503);
    proxy.drop_replies(false);
    eventually(Duration::from_secs(3), "the circuit breaker closes", || {
        router.get("/api/v1/calls/other").0 == 404
    });
    // A sleep, since a release that must not happen has no event.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/known").0, 200, "the repeated call is still live");
}

#[test]
fn concurrent_requests_with_lost_replies_are_compensated() {
    let server = RedisServer::start(&[]);
    let proxies = [FaultProxy::to(server.port), FaultProxy::to(server.port)];
    let routers = proxies.each_ref().map(|proxy| start_behind(proxy, r#"{"gold": 3}"#));
    proxies.iter().for_each(|proxy| proxy.drop_replies(true));
    thread::scope(|scope| {
        for router in &routers {
            scope.spawn(|| {
                assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "lost"})).0, 503)
            });
        }
    });
    proxies.iter().for_each(|proxy| proxy.drop_replies(false));
    eventually(Duration::from_secs(3), "the circuit breaker closes", || {
        routers.iter().all(|router| router.get("/api/v1/calls/other").0 == 404)
    });
    eventually(Duration::from_secs(3), "the allocation is compensated", || {
        routers[0].status()["pools"]["gold"]["available"] == 3
    });
}

#[test]
fn an_allocation_of_a_disconnected_client_is_compensated() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    server.signal("STOP");
    let client = send_allocate(router, "CA1");
    thread::sleep(Duration::from_millis(50));
    drop(client);
    thread::sleep(Duration::from_millis(50));
    server.signal("CONT");
    eventually(Duration::from_secs(2), "the allocation is compensated", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0 == 200
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

/// A request still in transit on a broken connection may arrive after later requests on a new one.
#[test]
fn a_request_delayed_on_a_broken_connection_is_compensated() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let router = start_behind(&proxy, r#"{"gold": 1}"#);
    let other = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    let was_allocated = |call: &str| {
        other.get(&format!("/api/v1/calls/{call}")).1.to_string().contains("allocated")
    };
    let pause = || thread::sleep(Duration::from_millis(30));
    // On an overloaded machine the request may arrive after its deadline and be ignored.
    let late = (0..5).map(|number| format!("late-{number}")).find(|call| {
        proxy.stall_requests(true);
        let client = send_allocate(&router, call);
        pause();
        proxy.refuse_connections(true);
        proxy.refuse_connections(false);
        pause();
        drop(client);
        // The router opens another connection in this time.
        thread::sleep(Duration::from_millis(200));
        proxy.stall_requests(false);
        pause();
        was_allocated(call)
    });
    let late = late.expect("one of the requests was executed");
    eventually(Duration::from_secs(3), "the allocation is compensated", || {
        other.status()["pools"]["gold"]["available"] == 1
    });
    assert_eq!(router.get(&format!("/api/v1/calls/{late}")).0, 404);
}

/// Sends an allocate request without waiting for the response.
fn send_allocate(router: &Router, call: &str) -> std::net::TcpStream {
    let mut stream = std::net::TcpStream::connect(router.address).unwrap();
    let body = json!({"call_sid": call}).to_string();
    let head = "POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

/// Like the test before, but the retry succeeds and the call ends before the first request
/// arrives.
#[test]
fn a_delayed_request_does_not_revive_an_ended_call() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let router = start_behind(&proxy, r#"{"gold": 1}"#);
    for number in 0..3 {
        let call = format!("CA{number}");
        proxy.stall_requests(true);
        let response = thread::scope(|scope| {
            let request =
                scope.spawn(|| router.post("/api/v1/allocate", json!({"call_sid": call})).0);
            thread::sleep(Duration::from_millis(30));
            proxy.refuse_connections(true);
            proxy.refuse_connections(false);
            request.join().unwrap()
        });
        assert_eq!(response, 200);
        assert_eq!(router.release(&call).0, 200);
        proxy.stall_requests(false);
        thread::sleep(Duration::from_millis(200));
        assert_eq!(router.get(&format!("/api/v1/calls/{call}")).1["details"]["state"], "ended");
    }
}

#[test]
fn a_deferred_release_does_not_end_a_later_call_of_the_same_id() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let delayed = start_behind(&proxy, r#"{"gold": 1}"#);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    proxy.drop_replies(true);
    assert_eq!(delayed.release("CA1").0, 503, "the release is deferred");
    router.allocate("CA1");
    proxy.drop_replies(false);
    eventually(Duration::from_secs(5), "the deferred release is flushed", || {
        delayed.get("/api/v1/status").0 == 200
    });
    // A sleep, since a release that must not happen has no event.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200, "the later call is still live");
    assert_eq!(delayed.release("CA1").0, 200);
}

#[test]
fn a_full_redis_applies_deferred_releases_after_an_outage() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    router.allocate("CA1");
    router.allocate("CA2");
    redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory")
        .arg("1")
        .exec(&mut server.connection())
        .unwrap();
    server.signal("STOP");
    assert_eq!(router.release("CA1").0, 503);
    server.signal("CONT");
    eventually(Duration::from_secs(3), "the deferred release is flushed", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn a_thousand_deferred_releases_do_not_delay_recovery() {
    let server = RedisServer::start(&[]);
    let router = &replicas(
        &server,
        1,
        r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 10000}}"#,
    )[0];
    for call in 0..1_000 {
        router.allocate(&format!("CA{call}"));
    }
    server.signal("STOP");
    let mut connection = router.connect();
    for call in 0..1_000 {
        assert_eq!(
            connection.post("/api/v1/release", &json!({"call_sid": format!("CA{call}")})).status,
            503
        );
    }
    server.signal("CONT");
    eventually(
        Duration::from_secs(2),
        "all releases are flushed and the circuit breaker closes",
        || {
            let (status, response) = connection.get("/api/v1/status").json();
            status == 200 && response["active_calls"] == 0
        },
    );
}

#[test]
fn a_renewal_right_after_a_wipe_does_not_report_unknown() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    let pod = router.allocate("CA1")["pod_name"].clone();
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    let (status, response) =
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]}));
    // The router may have detected the wipe and recovered before the request.
    assert!(status == 503 || response["registered"] == json!(["CA1"]), "{status}: {response}");
    eventually(Duration::from_secs(3), "the call is known again", || {
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]})).1["renewed"]
            == 1
    });
}
