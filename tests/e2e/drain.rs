use std::{
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use testkit::{Router, eventually, redis::RedisServer, replicas};

fn drain(router: &Router, body: Value) -> (u16, Value) {
    router.post("/api/v1/drain", body)
}

#[test]
fn a_drained_pod_gets_no_call_until_it_is_undrained() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let (status, response) = drain(&router, json!({"pod_name": "voice-agent-0"}));
    assert_eq!(status, 200);
    assert_eq!(
        (&response["success"], &response["pod_name"]),
        (&json!(true), &json!("voice-agent-0"))
    );
    assert_eq!((&response["has_active_call"], &response["drained"]), (&json!(false), &json!(true)));
    let (status, refusal) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
    assert_eq!((status, &refusal["details"]["chain"][0]["reason"]), (503, &json!("all_draining")));
    let (status, response) = router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-0"}));
    assert_eq!((status, &response["was_draining"]), (200, &json!(true)));
    router.allocate("CA1");
    let metrics = router.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_drains_total 1"));
    assert!(
        metrics.contains(r#"smart_router_refusals_total{tier="gold",reason="all_draining"} 1"#),
        "{metrics}"
    );
}

#[test]
fn a_draining_pod_stays_unavailable_after_its_last_call() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    let (_, response) = drain(&router, json!({"pod_name": "voice-agent-0"}));
    assert_eq!(response["has_active_call"], true);
    assert_eq!(
        response["message"],
        "Pod voice-agent-0 is draining with active call in progress. Will complete when call ends."
    );
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], true);
    let (status, released) = router.release("CA1");
    assert_eq!(
        (status, &released["was_draining"], &released["released_to_pool"]),
        (200, &json!(true), &json!("pool:gold"))
    );
    assert_eq!(router.status()["pools"]["gold"]["available"], 0);
}

#[test]
fn a_shared_pod_returns_from_its_drain_with_its_true_score() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers), ("DRAINING_TTL", "1s")]);
    router.allocate("CA1");
    drain(&router, json!({"pod_name": "voice-agent-0"}));
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
    eventually(Duration::from_secs(4), "the drain ends", || {
        router.status()["pools"]["basic"]["available"] == 1
    });
    router.allocate("CA2");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
}

#[test]
fn a_waiting_drain_responds_when_the_last_call_ends() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| drain(&router, json!({"pod_name": "voice-agent-0", "wait": "10m"})));
        let is_draining = || router.get("/api/v1/pod/voice-agent-0").1["is_draining"] == true;
        eventually(Duration::from_secs(3), "the drain begins", is_draining);
        thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished());
        router.release("CA1");
        let (status, response) = waiting.join().unwrap();
        assert_eq!(
            (status, &response["drained"], &response["active_calls"]),
            (200, &json!(true), &json!(0))
        );
    });
}

#[test]
fn a_waiting_drain_reports_a_timeout_and_drains_that_long() {
    let router = Router::start(&[("DRAINING_TTL", "100ms")]);
    router.allocate("CA1");
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let wait = json!({"pod_name": "voice-agent-0", "wait": "2500ms"});
    let (status, response) = drain(&router, wait);
    assert_eq!(
        (status, &response["drained"], &response["active_calls"]),
        (200, &json!(false), &json!(1))
    );
    assert!(response["draining_until"].as_u64().unwrap() >= began + 2, "{response}");
    let metrics = router.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_drains_unfinished_total 1"), "{metrics}");
}

#[test]
fn a_waiting_drain_ends_when_the_pod_is_undrained() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| drain(&router, json!({"pod_name": "voice-agent-0", "wait": "20s"})));
        let is_draining = || router.get("/api/v1/pod/voice-agent-0").1["is_draining"] == true;
        eventually(Duration::from_secs(3), "the drain begins", is_draining);
        router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-0"}));
        let (_, response) = waiting.join().unwrap();
        assert_eq!((&response["drained"], &response["active_calls"]), (&json!(false), &json!(1)));
    });
}

#[test]
fn a_waiting_drain_gets_503_when_the_router_shuts_down() {
    let mut router = Router::start(&[("HTTP_SHUTDOWN_TIMEOUT", "10m")]);
    router.allocate("CA1");
    let mut connection = router.connect();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            connection
                .post("/api/v1/drain", &json!({"pod_name": "voice-agent-0", "wait": "10m"}))
                .json()
        });
        let is_draining = || router.get("/api/v1/pod/voice-agent-0").1["is_draining"] == true;
        eventually(Duration::from_secs(3), "the drain begins", is_draining);
        router.signal("TERM");
        let (status, response) = waiting.join().unwrap();
        // The client retries at another router, since calls remain and the wait is not over.
        assert_eq!(status, 503, "{response}");
        assert!(response["error"].as_str().unwrap().contains("shutting down"), "{response}");
    });
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn draining_an_unknown_pod_is_an_error() {
    let router = Router::start(&[]);
    assert_eq!(
        drain(&router, json!({"pod_name": "voice-agent-9"})),
        (404, json!({"error": "pod not found"}))
    );
    assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-9"})).0, 404);
    assert_eq!(drain(&router, json!({"pod_name": "voice-agent-0", "wait": "soon"})).0, 400);
    assert_eq!(drain(&router, json!({"pod_name": "voice-agent-0", "wait": "99h"})).0, 400);
    assert_eq!(router.status()["pools"]["gold"]["draining"], 0);
}

/// Returns how many times a router has read a single pod from its store.
fn pod_reads(router: &Router) -> u64 {
    let metrics = router.connect().get("/metrics").text();
    let name = r#"smart_router_store_duration_seconds_count{operation="pod"} "#;
    let count = metrics.lines().find_map(|line| line.strip_prefix(name));
    count.map_or(0, |count| count.parse().unwrap())
}

#[test]
fn a_waiting_drain_is_notified_by_another_replica_and_does_not_poll() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 3}"#);
    for call in ["release", "undrain"] {
        let pod = routers[0].allocate(call)["pod_name"].as_str().unwrap().to_owned();
        let before = pod_reads(&routers[0]);
        thread::scope(|scope| {
            let body = json!({"pod_name": pod, "wait": "10m"});
            let waiting = scope.spawn(|| drain(&routers[0], body));
            eventually(Duration::from_secs(3), "the drain waits", || {
                pod_reads(&routers[0]) > before
            });
            let reads = pod_reads(&routers[0]);
            // A polling drain would read the pod several times.
            thread::sleep(Duration::from_millis(400));
            assert_eq!(pod_reads(&routers[0]), reads);
            let ended = std::time::Instant::now();
            match call {
                "release" => drop(routers[1].release(call)),
                _ => drop(routers[1].post("/api/v1/undrain", json!({"pod_name": pod}))),
            }
            let (status, response) = waiting.join().unwrap();
            assert_eq!((status, &response["drained"]), (200, &json!(call == "release")));
            // A drain that misses the notification reads its pod after ten seconds.
            assert!(ended.elapsed() < Duration::from_secs(8), "{:?}", ended.elapsed());
        });
    }
    routers[0].release("undrain");
}
