use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use serde_json::json;

use testkit::{
    Connection, Process, Router, eventually, free_port, program, proxy::FaultProxy,
    redis::RedisServer, scratch,
};

const BASE: (&str, &str) = ("VOICE_AGENT_BASE_URL", "wss://voice.example.com");

#[test]
fn listed_pods_fill_the_tiers_in_order() {
    let tiers = r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1}}, "default_chain": ["gold", "basic"]}"#;
    let router = Router::start(&[
        BASE,
        ("PODS", "a=10.0.0.1:9000,b=10.0.0.2,c=10.0.0.3"),
        ("TIER_CONFIG", tiers),
    ]);
    let status = router.status();
    assert_eq!(status["pools"]["gold"]["assigned"], 1);
    assert_eq!(status["pools"]["basic"]["assigned"], 2);
    assert_eq!(router.get("/api/v1/pod/a").1["address"], "10.0.0.1:9000");
    assert_eq!(router.get("/api/v1/pod/b").1["address"], "10.0.0.2:8000");
    assert_eq!(
        router.allocate("CA1")["ws_url"],
        "wss://voice.example.com/ws/pod/a/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
    );
    assert_eq!(
        router.get("/ws/pod/a/agent").0,
        404,
        "only simulated agents are served by the router"
    );
}

#[test]
fn a_pod_removed_from_the_pods_file_keeps_its_call() {
    let directory = scratch();
    let file = directory.join("pods");
    fs::write(&file, "a=h:1\n").unwrap();
    let path = file.to_str().unwrap();
    let settings = [BASE, ("PODS_FILE", path), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    let (router, log) = Router::start_logged(&settings);
    router.allocate("CA1");

    fs::write(&file, "b=h:2 # the next one\n").unwrap();
    eventually(Duration::from_secs(4), "b is added", || router.get("/api/v1/pod/b").0 == 200);
    eventually(Duration::from_secs(4), "a is terminating", || {
        router.get("/api/v1/pod/a").1["is_terminating"] == true
    });
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], "a");
    assert_eq!(router.allocate("CA2")["pod_name"], "b");
    router.post("/api/v1/undrain", json!({"pod_name": "a"}));
    assert_eq!(
        router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0,
        503,
        "undrain does not clear is_terminating"
    );

    assert_eq!(router.release("CA1").1["was_draining"], true);
    eventually(Duration::from_secs(4), "a is removed", || router.get("/api/v1/pod/a").0 == 404);

    fs::write(&file, "b=h:2\nnonsense\n").unwrap();
    log.wait_for("the file is unusable", 0);
    assert_eq!(router.get("/api/v1/pod/b").0, 200, "an invalid list is ignored");
}

#[test]
fn idle_pods_move_to_tiers_below_their_target() {
    let router = Router::start(&[
        BASE,
        ("PODS", "a=h,b=h,c=h,d=h"),
        ("TIER_CONFIG", r#"{"gold": 1, "iron": 3}"#),
    ]);
    router.put("/api/v1/tiers", r#"{"gold": 3, "iron": 1}"#);
    eventually(Duration::from_secs(4), "gold has three", || {
        router.status()["pools"]["gold"]["assigned"] == 3
    });
    assert_eq!(router.status()["pools"]["iron"]["assigned"], 1);
}

#[test]
fn replacing_the_pod_list_under_load_ends_no_call() {
    let directory = scratch();
    let (file, data) = (directory.join("pods"), directory.join("data"));
    let list = |letter: char| {
        (0..1_000).map(|number| format!("{letter}{number}=h:1\n")).collect::<String>()
    };
    fs::write(&file, list('a')).unwrap();
    let router = Router::start(&[
        BASE,
        ("PODS_FILE", file.to_str().unwrap()),
        ("DATA_DIR", data.to_str().unwrap()),
        ("TIER_CONFIG", r#"{"gold": 1000}"#),
    ]);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in 0..8 {
            let (router, done) = (&router, &done);
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in (0..20_000).take_while(|_| !done.load(Ordering::Relaxed)) {
                    let call = json!({"call_sid": format!("CA-{client}-{number}")});
                    assert_eq!(connection.post("/api/v1/allocate", &call).status, 200);
                    thread::sleep(Duration::from_millis(2));
                    let (status, response) = connection.post("/api/v1/release", &call).json();
                    assert_eq!(status, 200, "{call} ended early: {response}");
                }
            });
        }
        for letter in ['b', 'a', 'b'] {
            fs::write(&file, list(letter)).unwrap();
            let last = format!("/api/v1/pod/{letter}999");
            eventually(Duration::from_secs(10), "the new pods are added", || {
                router.get(&last).0 == 200
            });
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_half_written_pods_file_ends_no_call() {
    let directory = scratch();
    let file = directory.join("pods");
    fs::write(&file, "a=10.0.0.13:8000\n").unwrap();
    let router = Router::start(&[
        BASE,
        ("PODS_FILE", file.to_str().unwrap()),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
    ]);
    router.allocate("CA1");
    // The file is read once a second, which cannot be set and has no event: each partial text is
    // seen by at most one read, and at least one text is seen.
    for part in ["a=10.0.0.1", "a=10.0.0.", "a=10.0"] {
        for text in [part, "a=10.0.0.13:8000\n"] {
            fs::write(&file, text).unwrap();
            thread::sleep(Duration::from_millis(600));
        }
    }
    fs::write(&file, "a=10.0.0.13:8000\nb=10.0.0.14:8000\n").unwrap();
    eventually(Duration::from_secs(4), "b is added", || router.get("/api/v1/pod/b").0 == 200);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn the_number_of_simulated_agents_follows_the_tier_targets() {
    let directory = scratch();
    let data = ("DATA_DIR", directory.to_str().unwrap());
    let router = Router::start(&[data]);
    router.put("/api/v1/tiers", r#"{"gold": 5}"#);
    eventually(Duration::from_secs(3), "five agents", || {
        router.status()["pools"]["gold"]["assigned"] == 5
    });
    let router = router.kill_and_restart();
    assert_eq!(router.status()["pools"]["gold"]["available"], 5);
}

/// Reconciling many pods takes seconds, in steps that leave the store to the calls.
#[test]
fn a_router_serves_while_it_reconciles_a_long_list_at_its_start() {
    let server = RedisServer::start(&[]);
    let file = scratch().join("pods");
    let pods: String = (0..10_000).map(|number| format!("p{number}=h:1\n")).collect();
    fs::write(&file, pods).unwrap();
    let settings =
        [BASE, ("PODS_FILE", file.to_str().unwrap()), ("TIER_CONFIG", r#"{"gold": 10000}"#)];
    let first = Router::start(&[&settings[..], &[("REDIS_URL", &server.url())]].concat());
    // With the pauses of upkeep, 200 pages of pods take at least 7 s.
    let proxy = FaultProxy::to(server.port);
    proxy.set_latency(Duration::from_millis(4));
    let (port, url) = (free_port().to_string(), format!("redis://127.0.0.1:{}", proxy.port()));
    let own = [("HTTP_PORT", port.as_str()), ("METRICS_PORT", &port), ("REDIS_URL", &url)];
    let _second = Process::start(&mut program(&[&settings[..], &own].concat()));
    let address = ([127, 0, 0, 1], port.parse().unwrap()).into();
    let get = |path: &str| {
        Connection::try_open(address).and_then(|mut connection| connection.try_get(path))
    };
    eventually(Duration::from_secs(5), "the second router answers", || get("/health").is_some());
    assert_eq!(get("/ready").unwrap().status, 503, "it serves before it has reconciled");
    let allocated = Connection::open(address).post("/api/v1/allocate", &json!({"call_sid": "CA1"}));
    assert_eq!(allocated.status, 200);
    eventually(Duration::from_secs(20), "the second router is ready", || {
        get("/ready").is_some_and(|response| response.status == 200)
    });
    assert_eq!(first.release("CA1").0, 200);
}
