//! Several routers on one Redis.

use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use testkit::{Router, WITHOUT_GATEWAY, eventually, redis::RedisServer, replicas, scratch};

pub(crate) const TIERS: &str = r#"{"tiers": {"gold": {"target": 20}, "basic": {"type": "shared", "target": 5, "max_concurrent": 3},
    "acme": {"target": 3}}, "default_chain": ["gold", "basic"]}"#;

#[test]
fn fifty_requests_for_one_call_through_three_routers_get_one_pod() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, r#"{"gold": 300}"#);
    let barrier = Barrier::new(50);
    let answers = Mutex::new(HashMap::<usize, HashSet<String>>::new());
    // A client that panics would leave the others at the barrier.
    let refused = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for client in 0..50 {
            let (routers, barrier, answers, refused) = (&routers, &barrier, &answers, &refused);
            scope.spawn(move || {
                let mut connection = routers[client % 3].connect();
                for round in 0..60 {
                    barrier.wait();
                    let (status, answer) = connection
                        .post("/api/v1/allocate", &json!({"call_sid": format!("CA{round}")}))
                        .json();
                    match answer["pod_name"].as_str() {
                        Some(pod) if status == 200 => {
                            let mut answers = answers.lock().unwrap();
                            answers.entry(round).or_default().insert(pod.to_owned());
                        }
                        _ => refused.lock().unwrap().push((status, answer)),
                    }
                }
            });
        }
    });
    let (answers, refused) = (answers.into_inner().unwrap(), refused.into_inner().unwrap());
    assert_eq!(refused, []);
    assert_eq!(answers.len(), 60);
    assert!(answers.values().all(|pods| pods.len() == 1), "a call got two pods");
    assert_eq!(answers.values().flatten().collect::<HashSet<_>>().len(), 60, "a pod got two calls");
}

#[test]
fn two_releases_and_two_waiting_calls_never_put_two_calls_on_a_pod() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, r#"{"gold": 1}"#);
    let barrier = Barrier::new(4);
    let ask = |client: usize, path: &str, call: String| {
        let mut connection = routers[client % 3].connect();
        barrier.wait();
        connection.post(path, &json!({"call_sid": call})).status
    };
    for round in 0..150 {
        let call = format!("CA{round}");
        routers[0].allocate(&call);
        let (released, allocated) = thread::scope(|scope| {
            let releases = [0, 1].map(|client| {
                let (ask, call) = (&ask, call.clone());
                scope.spawn(move || ask(client, "/api/v1/release", call))
            });
            let waiting = [1, 2].map(|client| {
                let ask = &ask;
                scope.spawn(move || ask(client, "/api/v1/allocate", format!("w{client}-{round}")))
            });
            (releases.map(|it| it.join().unwrap()), waiting.map(|it| it.join().unwrap()))
        });
        assert_eq!(released.iter().filter(|status| **status == 200).count(), 1, "{released:?}");
        assert!(
            allocated.iter().filter(|status| **status == 200).count() <= 1,
            "two live calls on one pod"
        );
        routers[0].release(&format!("w1-{round}"));
        routers[0].release(&format!("w2-{round}"));
    }
}

/// Calls and drains as clients observe them.
#[derive(Default)]
struct History {
    calls: HashMap<String, HashSet<String>>,
    drained: HashSet<String>,
    violations: Vec<String>,
    /// The largest number of live calls.
    max_live: usize,
}

/// Load of clients and an operator.
#[derive(Default)]
struct Load {
    history: Mutex<History>,
    done: AtomicBool,
}

impl Load {
    /// Allocates and releases until the test is done.
    fn call(&self, router: &Router, client: usize) {
        let mut connection = router.connect();
        let merchant = if client.is_multiple_of(4) { "shop" } else { "" };
        for number in (0..10_000).take_while(|_| !self.done.load(Ordering::Relaxed)) {
            let call = format!("CA-{client}-{number}");
            let before = self.history.lock().unwrap().drained.clone();
            let body = json!({"call_sid": call, "merchant_id": merchant});
            let (status, answer) = connection.post("/api/v1/allocate", &body).json();
            if status != 200 {
                assert_eq!(status, 503, "{answer}");
                thread::sleep(Duration::from_millis(2));
                continue;
            }
            let pod = answer["pod_name"].as_str().unwrap();
            self.record_allocation(&call, pod, answer["source_pool"].as_str().unwrap(), &before);
            thread::sleep(Duration::from_millis(5 + (number % 5) * 10));
            // Removed before the release: after it another call may have the pod.
            self.history.lock().unwrap().calls.get_mut(pod).unwrap().remove(&call);
            let (status, answer) =
                connection.post("/api/v1/release", &json!({"call_sid": call})).json();
            if status != 200 {
                let what = format!("I6, I7: {call} on {pod}: {answer}");
                self.history.lock().unwrap().violations.push(what);
            }
        }
    }

    /// Records an allocation. `before` has the pods that were draining before the request.
    fn record_allocation(&self, call: &str, pod: &str, pool: &str, before: &HashSet<String>) {
        let mut history = self.history.lock().unwrap();
        if before.contains(pod) && history.drained.contains(pod) {
            history.violations.push(format!("I5: {call} on the draining pod {pod}"));
        }
        let calls = history.calls.entry(pod.to_owned()).or_default();
        calls.insert(call.to_owned());
        let cap = if pool == "pool:basic" { 3 } else { 1 };
        if calls.len() > cap {
            let calls = calls.clone();
            history.violations.push(format!("I1, I3: {calls:?} on {pod} of {pool}"));
        }
        let live = history.calls.values().map(HashSet::len).sum();
        history.max_live = history.max_live.max(live);
    }

    /// Drains a pod for a short time.
    fn drain(&self, router: &Router, pod: &str) {
        let body = json!({"pod_name": pod});
        assert_eq!(router.post("/api/v1/drain", body.clone()).0, 200);
        self.history.lock().unwrap().drained.insert(pod.to_owned());
        thread::sleep(Duration::from_millis(20));
        self.history.lock().unwrap().drained.remove(pod);
        assert_eq!(router.post("/api/v1/undrain", body).0, 200);
    }
}

#[test]
fn the_invariants_hold_under_allocations_releases_and_drains() {
    let seconds = std::env::var("LOAD_SECONDS").map_or(4, |text| text.parse().unwrap());
    let server = RedisServer::start(&[]);
    let (file, url) = (scratch().join("pods"), server.url());
    let list = |pods: std::ops::Range<usize>| {
        pods.map(|pod| format!("voice-agent-{pod}=h:{}\n", 1 + pod)).collect::<String>()
    };
    fs::write(&file, list(0..28)).unwrap();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", TIERS),
        ("PODS_FILE", file.to_str().unwrap()),
        WITHOUT_GATEWAY,
    ];
    let routers: Vec<Router> = (0..3).map(|_| Router::start(&settings)).collect();
    routers[0].put("/api/v1/merchants/shop", r#"{"pool": "acme", "fallback": ["basic"]}"#);
    let load = Load::default();
    thread::scope(|scope| {
        for client in 0..64 {
            let (load, router) = (&load, &routers[client % 3]);
            scope.spawn(move || load.call(router, client));
        }
        let started = Instant::now();
        for number in 0.. {
            // Four pods are removed and added repeatedly.
            if number % 60 == 0 {
                fs::write(&file, list(if number % 120 == 0 { 0..24 } else { 0..28 })).unwrap();
            }
            load.drain(&routers[1], &format!("voice-agent-{}", number % 24));
            if started.elapsed() > Duration::from_secs(seconds) {
                break;
            }
        }
        fs::write(&file, list(0..28)).unwrap();
        load.done.store(true, Ordering::Relaxed);
    });
    let history = load.history.into_inner().unwrap();
    assert_eq!(history.violations, Vec::<String>::new());
    assert!(history.max_live > 20, "the load must have concurrent calls");
    eventually(Duration::from_secs(5), "every pod is back in its pool", || {
        let status = routers[2].status();
        let pools = ["pools", "merchants"].map(|group| status[group].as_object().unwrap().values());
        let free: u64 =
            pools.into_iter().flatten().map(|pool| pool["available"].as_u64().unwrap()).sum();
        status["active_calls"] == 0 && free == 28
    });
}

#[test]
fn the_documented_keys_have_the_documented_content() {
    let server = RedisServer::start(&[]);
    let (url, tiers) = (
        server.url(),
        r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
    );
    // Without the gateway, a call is confirmed at once and has a full lease.
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", tiers), WITHOUT_GATEWAY]);
    router.put("/api/v1/merchants/shop", r#"{"pool": "acme"}"#);
    let mut plain = server.connection();
    let mut kind = |key: &str| redis::cmd("TYPE").arg(key).query::<String>(&mut plain).unwrap();
    for (key, expected) in [
        ("voice:pool:gold:available", "set"),
        ("voice:pool:gold:assigned", "set"),
        ("voice:pool:basic:available", "zset"),
        ("voice:merchant:acme:pods", "set"),
        ("voice:merchant:acme:assigned", "set"),
        ("voice:pod:tier:voice-agent-0", "string"),
        ("voice:pod:voice-agent-0", "hash"),
        ("voice:pod:metadata", "hash"),
        ("voice:merchant:config", "hash"),
        ("voice:tier:config", "string"),
        ("voice:schema", "string"),
        ("voice:pools", "set"),
        ("voice:tiers", "hash"),
    ] {
        assert_eq!(kind(key), expected, "{key}");
    }
    let (_, answer) =
        router.post("/api/v1/allocate", json!({"call_sid": "CA1", "merchant_id": "shop"}));
    let pod = answer["pod_name"].as_str().unwrap();
    let now = testkit::redis::unix_millis() / 1_000;
    let call: HashMap<String, String> = plain.hgetall("voice:call:CA1").unwrap();
    assert_eq!(
        (&call["pod_name"][..], &call["source_pool"][..], &call["merchant_id"][..]),
        (pod, "merchant:acme", "shop")
    );
    let at: u64 = call["allocated_at"].parse().unwrap();
    assert!((now - 2..=now).contains(&at), "unix seconds: {at}");
    let status: HashMap<String, String> = plain.hgetall(format!("voice:pod:{pod}")).unwrap();
    assert_eq!(
        (&status["status"][..], &status["allocated_call_sid"][..], &status["source_pool"][..]),
        ("allocated", "CA1", "merchant:acme")
    );
    assert_eq!(status["allocated_at"], call["allocated_at"]);
    assert_eq!(plain.get::<_, String>(format!("voice:lease:{pod}")).unwrap(), "CA1");
    assert_eq!(plain.get::<_, String>(format!("voice:pod:tier:{pod}")).unwrap(), "merchant:acme");
    let metadata: String = plain.hget("voice:pod:metadata", pod).unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&metadata).unwrap(),
        json!({"tier": "merchant:acme", "name": pod})
    );
    router.post("/api/v1/drain", json!({"pod_name": pod}));
    for (key, at_least) in [
        ("voice:call:CA1".to_owned(), 3_600),
        (format!("voice:lease:{pod}"), 900),
        (format!("voice:pod:draining:{pod}"), 360),
    ] {
        let ttl: u64 = plain.ttl(&key).unwrap();
        assert!((at_least - 1..=at_least + 60).contains(&ttl), "{key}: {ttl}");
    }
    assert_eq!(plain.get::<_, String>(format!("voice:pod:draining:{pod}")).unwrap(), "true");
    router.release("CA1");
    assert!(
        !plain.exists::<_, bool>("voice:call:CA1").unwrap()
            && !plain.exists::<_, bool>(format!("voice:lease:{pod}")).unwrap()
    );
    let status: HashMap<String, String> = plain.hgetall(format!("voice:pod:{pod}")).unwrap();
    assert_eq!(
        (&status["status"][..], &status["allocated_call_sid"][..], &status["allocated_at"][..]),
        ("draining", "", "")
    );
    assert!(status["released_at"].parse::<u64>().unwrap() >= at);
}

#[test]
fn all_keys_have_the_configured_prefix() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &url), ("KEY_PREFIX", "{v2}x:")]);
    router.put("/api/v1/merchants/shop", r#"{"pool": "acme"}"#);
    router.allocate("CA1");
    router.post("/api/v1/drain", json!({"pod_name": "voice-agent-1"}));
    let keys: Vec<String> = server.connection().keys("*").unwrap();
    assert!(keys.len() > 10 && keys.iter().all(|key| key.starts_with("{v2}x:")), "{keys:?}");
}

#[test]
fn one_operation_is_one_command() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    router.put(
        "/api/v1/merchants/shop",
        r#"{"pool": "none", "fallback": ["a", "b", "merchant:c", "acme", "gold"]}"#,
    );
    // The first run loads the library.
    let run = |call: &str| {
        let call_of = |extra: Value| {
            let mut body = json!({"call_sid": call});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            body
        };
        vec![
            router.post("/api/v1/allocate", call_of(json!({"merchant_id": "shop"}))).0,
            router.post("/api/v1/renew", call_of(json!({}))).0,
            router.post("/api/v1/release", call_of(json!({}))).0,
            router.post("/api/v1/drain", json!({"pod_name": "voice-agent-0"})).0,
            router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-0"})).0,
        ]
    };
    assert_eq!(run("CA1"), [200; 5]);
    // The first audit precedes the first decisions on capacity; the next ones follow 5 s later.
    eventually(Duration::from_secs(20), "the start is over", || {
        router.get("/api/v1/capacity").0 == 200
    });
    // A file: a pipe that is not read would stop the monitor.
    let path = scratch().join("monitor");
    let mut monitor = std::process::Command::new("redis-cli")
        .args(["-p", &server.port.to_string(), "monitor"])
        .stdout(fs::File::create(&path).unwrap())
        .spawn()
        .unwrap();
    let read = || String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
    eventually(Duration::from_secs(5), "the monitor runs", || read().starts_with("OK"));
    assert_eq!(run("CA2"), [200; 5]);
    eventually(Duration::from_secs(5), "the last command is shown", || {
        read().lines().any(|line| line.contains("_undrain_") && line.contains("voice-agent-0"))
    });
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    let text = read();
    let commands: Vec<&str> =
        text.lines().filter(|line| line.contains("] \"") && !line.contains(" lua] ")).collect();
    // Sweeps of the router may be in between.
    let ours: Vec<&&str> = commands
        .iter()
        .filter(|line| line.contains("CA2") || line.contains("voice-agent-0"))
        .collect();
    assert_eq!(ours.len(), 5, "{commands:#?}");
    assert!(ours.iter().all(|line| line.contains("\"FCALL\"")), "{commands:#?}");
    // Reads of the audit and of the capacity policy may be in between.
    let is_background = |line: &&&str| {
        ["\"SMEMBERS\"", "SCAN\"", "\"XRANGE\""].iter().any(|command| line.contains(command))
    };
    let others = commands.iter().filter(|line| !is_background(line));
    assert!(others.clone().all(|line| line.contains("\"FCALL\"")), "{commands:#?}");
}

#[test]
fn a_full_redis_refuses_new_calls_and_accepts_releases() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    router.allocate("CA1");
    let mut plain = server.connection();
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg("1").exec(&mut plain).unwrap();
    let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("OOM"), "{answer}");
    assert_eq!(router.allocate("CA1")["was_existing"], true);
    assert_eq!(router.release("CA1").0, 200);
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": "voice-agent-0"})).0, 200);
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg("0").exec(&mut plain).unwrap();
    assert_eq!(router.get("/api/v1/calls/CA2").0, 404, "the refused call has no record");
    router.allocate("CA2");
}
