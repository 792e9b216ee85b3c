//! Redis gone, standing still, or empty: a normal day.

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
use testkit::{Connection, Router, eventually, proxy::Proxy, redis::RedisServer};

#[derive(Clone, Copy, PartialEq)]
enum Outage {
    StandsStill,
    DiesAndComesBackEmpty,
}

#[test]
fn a_redis_that_stands_still_is_waited_out_without_harm() {
    outage_under_load(Outage::StandsStill);
}

#[test]
fn a_redis_that_dies_and_comes_back_empty_is_waited_out_without_harm() {
    outage_under_load(Outage::DiesAndComesBackEmpty);
}

const CLIENTS: usize = 8;

/// What clients who allocate and release during an outage have seen.
struct Callers {
    kind: Outage,
    done: AtomicBool,
    given: [AtomicUsize; CLIENTS],
    given_up: [AtomicUsize; CLIENTS],
    /// The call that has each pod.
    held: Mutex<HashMap<String, String>>,
    refused: Mutex<HashSet<String>>,
}

impl Callers {
    fn new(kind: Outage) -> Self {
        let counts = || [const { AtomicUsize::new(0) }; CLIENTS];
        let (held, refused) = (Mutex::default(), Mutex::default());
        let done = AtomicBool::new(false);
        Self { kind, done, given: counts(), given_up: counts(), held, refused }
    }

    /// Calls until the test is done.
    fn call(&self, router: &Router, client: usize) {
        let mut connection = router.connect();
        for number in (0..100_000).take_while(|_| !self.done.load(Ordering::Relaxed)) {
            let call = format!("CA-{client}-{number}");
            let (status, answer) =
                connection.post("/api/v1/allocate", &json!({"call_sid": call})).json();
            match status {
                200 => {
                    self.given[client].fetch_add(1, Ordering::Relaxed);
                    let pod = answer["pod_name"].as_str().unwrap().to_owned();
                    let other = self.held.lock().unwrap().insert(pod.clone(), call.clone());
                    // Calls from before a wipe are forgotten, and their pods given anew.
                    let twice = other.filter(|_| self.kind == Outage::StandsStill);
                    assert_eq!(twice, None, "{pod} was given to {call}, too");
                    thread::sleep(Duration::from_millis(5));
                    self.held.lock().unwrap().remove(&pod);
                    let released =
                        connection.post("/api/v1/release", &json!({"call_sid": call})).status;
                    // A wiped Redis knows nothing of calls that nobody renewed.
                    let forgotten = self.kind == Outage::DiesAndComesBackEmpty && released == 404;
                    assert!(forgotten || matches!(released, 200 | 503), "{released}");
                }
                503 => {
                    self.given_up[client].fetch_add(1, Ordering::Relaxed);
                    self.refused.lock().unwrap().insert(call);
                }
                other => panic!("{other}: {answer}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until each client has counted so many from now on.
    fn each(counts: &[AtomicUsize], least: usize, what: &str) {
        counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        eventually(Duration::from_secs(10), what, || {
            counts.iter().all(|count| count.load(Ordering::Relaxed) >= least)
        });
    }
}

fn outage_under_load(kind: Outage) {
    let mut server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 200}"#);
    let callers = Callers::new(kind);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (callers, router) = (&callers, &routers[client % 2]);
            scope.spawn(move || callers.call(router, client));
        }
        Callers::each(&callers.given, 5, "all clients are served");
        match kind {
            Outage::StandsStill => server.signal("STOP"),
            Outage::DiesAndComesBackEmpty => server.kill(),
        }
        // Each answer comes during the outage: the clients do not wait for its end.
        Callers::each(&callers.given_up, 20, "all clients are refused");
        let twilio = routers[0].connect().form("/api/v1/twilio/allocate", "CallSid=CA-t");
        assert!(twilio.status == 200 && twilio.text().contains("<Hangup/>"));
        assert_eq!(routers[0].connect().get("/ready").status, 200);
        match kind {
            Outage::StandsStill => server.signal("CONT"),
            Outage::DiesAndComesBackEmpty => server.replace(),
        }
        eventually(Duration::from_secs(2), "service is back", || {
            let (status, _) = routers[1].post("/api/v1/allocate", json!({"call_sid": "back"}));
            status == 200
        });
        Callers::each(&callers.given, 5, "all clients are served again");
        callers.done.store(true, Ordering::Relaxed);
    });
    routers[1].release("back");
    let mut connection = routers[0].connect();
    eventually(Duration::from_secs(3), "ended calls are released", || {
        connection.get("/api/v1/status").json().1["active_calls"] == 0
    });
    for call in callers.refused.into_inner().unwrap() {
        let status = connection.get(&format!("/api/v1/calls/{call}")).status;
        assert_eq!(status, 404, "{call} was refused and holds a pod");
    }
    assert_eq!(routers[0].status()["pools"]["gold"]["available"], 200);
}

#[test]
fn a_redis_that_comes_back_empty_is_filled_again() {
    let mut server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 10}"#),
        ("LEASE_TTL", "30s"),
    ]);
    router.put("/api/v1/tiers", r#"{"gold": 5, "iron": 5}"#);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    server.replace();
    let started = Instant::now();
    eventually(Duration::from_secs(5), "calls are served again", || {
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]})).1["registered"]
            == json!(["CA1"])
    });
    eventually(Duration::from_secs(5), "all pods are back", || {
        router.status()["pools"]["iron"]["assigned"] == 5
    });
    println!("filled again after {:?}", started.elapsed());
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod.as_str());
    assert_eq!(
        router.status()["pools"]["gold"]["assigned"],
        5,
        "the tiers in force, not those of the start"
    );
}

#[test]
fn a_router_starts_without_its_redis_and_serves_when_it_is_there() {
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
    eventually(Duration::from_secs(5), "the router answers", || {
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

/// A router whose line to Redis goes through a proxy.
fn behind(proxy: &Proxy, tiers: &str) -> Router {
    let url = format!("redis://{}", proxy.address);
    Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", tiers)])
}

#[test]
fn an_allocation_whose_answer_was_lost_is_taken_back_and_a_repeated_one_never() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::to(server.port);
    let router = behind(&proxy, r#"{"gold": 3}"#);
    router.allocate("told");
    proxy.lose_answers(true);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "lost"})).0, 503);
    proxy.lose_answers(false);
    eventually(Duration::from_secs(3), "service is back", || {
        router.get("/api/v1/calls/told").0 == 200
    });
    eventually(Duration::from_secs(3), "the pod is free again", || {
        router.status()["pools"]["gold"]["available"] == 2
    });
    assert_eq!(router.get("/api/v1/calls/lost").0, 404);

    proxy.lose_answers(true);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "told"})).0, 503);
    proxy.lose_answers(false);
    eventually(Duration::from_secs(3), "service is back", || {
        router.get("/api/v1/calls/other").0 == 404
    });
    // (a release that must not come has no event)
    thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/told").0, 200, "its first caller is on the phone");
}

#[test]
fn what_several_asked_for_at_once_is_taken_back_when_none_of_them_has_heard() {
    let server = RedisServer::start(&[]);
    let proxies = [Proxy::to(server.port), Proxy::to(server.port)];
    let routers = proxies.each_ref().map(|proxy| behind(proxy, r#"{"gold": 3}"#));
    proxies.iter().for_each(|proxy| proxy.lose_answers(true));
    thread::scope(|scope| {
        for router in &routers {
            scope.spawn(|| {
                assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "lost"})).0, 503)
            });
        }
    });
    proxies.iter().for_each(|proxy| proxy.lose_answers(false));
    eventually(Duration::from_secs(3), "service is back", || {
        routers.iter().all(|router| router.get("/api/v1/calls/other").0 == 404)
    });
    eventually(Duration::from_secs(3), "the pod is free again", || {
        routers[0].status()["pools"]["gold"]["available"] == 3
    });
}

#[test]
fn what_a_caller_asked_for_who_has_hung_up_is_taken_back() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    server.signal("STOP");
    let impatient = asks(router, "CA1");
    thread::sleep(Duration::from_millis(50));
    drop(impatient);
    thread::sleep(Duration::from_millis(50));
    server.signal("CONT");
    eventually(Duration::from_secs(2), "the pod is free again", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0 == 200
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

/// A request that is still on a line that broke may come after whatever is sent on the next.
#[test]
fn what_comes_to_redis_on_a_line_that_is_gone_is_taken_back_nevertheless() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::to(server.port);
    let router = behind(&proxy, r#"{"gold": 1}"#);
    let other = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    let was_given = |call: &str| {
        other.get(&format!("/api/v1/calls/{call}")).1.to_string().contains("allocated")
    };
    let pause = || thread::sleep(Duration::from_millis(30));
    // (it comes in time only if the machine is not too busy)
    let late = (0..5).map(|number| format!("late-{number}")).find(|call| {
        proxy.hold_requests(true);
        let impatient = asks(&router, call);
        pause();
        proxy.cut(true);
        proxy.cut(false);
        pause();
        drop(impatient);
        // (the router has another line by then)
        thread::sleep(Duration::from_millis(200));
        proxy.hold_requests(false);
        pause();
        was_given(call)
    });
    let late = late.expect("one of them came in time");
    eventually(Duration::from_secs(3), "the pod is free again", || {
        other.status()["pools"]["gold"]["available"] == 1
    });
    assert_eq!(router.get(&format!("/api/v1/calls/{late}")).0, 404);
}

/// Asks for a pod, and does not wait for the answer.
fn asks(router: &Router, call: &str) -> std::net::TcpStream {
    let mut caller = std::net::TcpStream::connect(router.address).unwrap();
    let body = json!({"call_sid": call}).to_string();
    let head = "POST /api/v1/allocate HTTP/1.1\r\nhost: r\r\ncontent-type: application/json";
    write!(caller, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    caller
}

/// The same, but the second try is answered, and the call is over before the first comes.
#[test]
fn what_comes_to_redis_on_a_line_that_is_gone_does_not_bring_a_call_back() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::to(server.port);
    let router = behind(&proxy, r#"{"gold": 1}"#);
    for number in 0..3 {
        let call = format!("CA{number}");
        proxy.hold_requests(true);
        let answer = thread::scope(|scope| {
            let asking =
                scope.spawn(|| router.post("/api/v1/allocate", json!({"call_sid": call})).0);
            thread::sleep(Duration::from_millis(30));
            proxy.cut(true);
            proxy.cut(false);
            asking.join().unwrap()
        });
        assert_eq!(answer, 200);
        assert_eq!(router.release(&call).0, 200);
        proxy.hold_requests(false);
        thread::sleep(Duration::from_millis(200));
        assert_eq!(router.get(&format!("/api/v1/calls/{call}")).1["details"]["state"], "ended");
    }
}

#[test]
fn a_release_that_was_kept_does_not_end_a_later_call_of_the_same_id() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::to(server.port);
    let cut_off = behind(&proxy, r#"{"gold": 1}"#);
    let router = &replicas(&server, 1, r#"{"gold": 1}"#)[0];
    proxy.lose_answers(true);
    assert_eq!(cut_off.release("CA1").0, 503, "kept");
    router.allocate("CA1");
    proxy.lose_answers(false);
    eventually(Duration::from_secs(5), "what was kept is done", || {
        cut_off.get("/api/v1/status").0 == 200
    });
    // (a release that must not come has no event)
    thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200, "it is another call");
    assert_eq!(cut_off.release("CA1").0, 200);
}

#[test]
fn a_full_redis_that_blinks_still_releases() {
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
    eventually(Duration::from_secs(3), "what was kept is done", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn a_thousand_kept_releases_do_not_keep_service_out() {
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
    eventually(Duration::from_secs(2), "all are released and service is back", || {
        let (status, answer) = connection.get("/api/v1/status").json();
        status == 200 && answer["active_calls"] == 0
    });
}

#[test]
fn a_renewal_right_after_a_wipe_is_not_told_that_its_call_is_unknown() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    let pod = router.allocate("CA1")["pod_name"].clone();
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    let (status, answer) =
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]}));
    // (the router may have found out by itself, and filled Redis again)
    assert!(status == 503 || answer["registered"] == json!(["CA1"]), "{status}: {answer}");
    eventually(Duration::from_secs(3), "the call is known again", || {
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1"]})).1["renewed"]
            == 1
    });
}
