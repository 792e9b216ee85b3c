//! Several routers on one Redis.

use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use crate::support::{Connection, Router, eventually, redis::RedisServer, scratch};

const TIERS: &str = r#"{"tiers": {"gold": {"target": 20}, "basic": {"type": "shared", "target": 5, "max_concurrent": 3},
    "acme": {"target": 3}}, "default_chain": ["gold", "basic"]}"#;

fn replicas(server: &RedisServer, count: usize, tiers: &str) -> Vec<Router> {
    let url = server.url();
    (0..count).map(|_| Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", tiers)])).collect()
}

#[test]
fn fifty_requests_for_one_call_through_three_routers_get_one_pod() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, r#"{"gold": 300}"#);
    let barrier = Barrier::new(50);
    let answers = Mutex::new(HashMap::<usize, HashSet<String>>::new());
    thread::scope(|scope| {
        for client in 0..50 {
            let (routers, barrier, answers) = (&routers, &barrier, &answers);
            scope.spawn(move || {
                let mut connection = routers[client % 3].connect();
                for round in 0..200 {
                    barrier.wait();
                    let (status, answer) = connection
                        .post("/api/v1/allocate", &json!({"call_sid": format!("CA{round}")}))
                        .json();
                    assert_eq!(status, 200, "{answer}");
                    let pod = answer["pod_name"].as_str().unwrap().to_owned();
                    answers.lock().unwrap().entry(round).or_default().insert(pod);
                }
            });
        }
    });
    let answers = answers.into_inner().unwrap();
    assert_eq!(answers.len(), 200);
    assert!(answers.values().all(|pods| pods.len() == 1), "a call got two pods");
    assert_eq!(
        answers.values().flatten().collect::<HashSet<_>>().len(),
        200,
        "a pod got two calls"
    );
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
    for round in 0..500 {
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

/// What clients know about pods: who is on which, and which must not be given.
#[derive(Default)]
struct History {
    calls: HashMap<String, HashSet<String>>,
    drained: HashSet<String>,
    violations: Vec<String>,
}

#[test]
fn clients_that_allocate_release_and_drain_for_seconds_find_the_invariants_kept() {
    let seconds = std::env::var("LOAD_SECONDS").map_or(8, |text| text.parse().unwrap());
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
        ("VOICE_AGENT_BASE_URL", "wss://v.example.com"),
    ];
    let routers: Vec<Router> = (0..3).map(|_| Router::start(&settings)).collect();
    routers[0].put("/api/v1/merchants/shop", r#"{"pool": "acme", "fallback": ["basic"]}"#);
    let (history, done, overlapping) =
        (Mutex::new(History::default()), AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for client in 0..64 {
            let (routers, history, done, overlapping) = (&routers, &history, &done, &overlapping);
            scope.spawn(move || {
                let mut connection = routers[client % 3].connect();
                for number in 0.. {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    let merchant = if client % 4 == 0 { "shop" } else { "" };
                    let call = format!("CA-{client}-{number}");
                    let before = history.lock().unwrap().drained.clone();
                    let (status, answer) = connection
                        .post(
                            "/api/v1/allocate",
                            &json!({"call_sid": call, "merchant_id": merchant}),
                        )
                        .json();
                    if status != 200 {
                        assert_eq!(status, 503, "{answer}");
                        thread::sleep(Duration::from_millis(2));
                        continue;
                    }
                    let (pod, pool) = (
                        answer["pod_name"].as_str().unwrap(),
                        answer["source_pool"].as_str().unwrap(),
                    );
                    {
                        let mut history = history.lock().unwrap();
                        if before.contains(pod) && history.drained.contains(pod) {
                            history
                                .violations
                                .push(format!("I5: {call} on {pod}, which was drained"));
                        }
                        let on = history.calls.entry(pod.to_owned()).or_default();
                        on.insert(call.clone());
                        let (count, cap) = (on.len(), if pool == "pool:basic" { 3 } else { 1 });
                        if count > cap {
                            let on = on.clone();
                            history.violations.push(format!("I1, I3: {on:?} on {pod} of {pool}"));
                        }
                        overlapping.fetch_max(
                            history.calls.values().map(HashSet::len).sum(),
                            Ordering::Relaxed,
                        );
                    }
                    thread::sleep(Duration::from_millis(5 + (number % 5) * 10));
                    // First forget, then release: nobody may be blamed for what is already over.
                    history.lock().unwrap().calls.get_mut(pod).unwrap().remove(&call);
                    let (status, answer) =
                        connection.post("/api/v1/release", &json!({"call_sid": call})).json();
                    if status != 200 {
                        history
                            .lock()
                            .unwrap()
                            .violations
                            .push(format!("I6, I7: {call} on {pod}: {answer}"));
                    }
                }
            });
        }
        let (routers, history, done, file, list) = (&routers, &history, &done, &file, &list);
        scope.spawn(move || {
            let mut connection = routers[1].connect();
            let started = Instant::now();
            for number in 0.. {
                // Four pods come and go all the while.
                if number % 60 == 0 {
                    fs::write(file, list(if number % 120 == 0 { 0..24 } else { 0..28 })).unwrap();
                }
                let pod = format!("voice-agent-{}", number % 24);
                assert_eq!(connection.post("/api/v1/drain", &json!({"pod_name": pod})).status, 200);
                history.lock().unwrap().drained.insert(pod.clone());
                thread::sleep(Duration::from_millis(20));
                history.lock().unwrap().drained.remove(&pod);
                assert_eq!(
                    connection.post("/api/v1/undrain", &json!({"pod_name": pod})).status,
                    200
                );
                if started.elapsed() > Duration::from_secs(seconds) {
                    fs::write(file, list(0..28)).unwrap();
                    done.store(true, Ordering::Relaxed);
                    return;
                }
            }
        });
    });
    let history = history.into_inner().unwrap();
    assert_eq!(history.violations, Vec::<String>::new());
    assert!(overlapping.into_inner() > 20, "calls must overlap, or this proves nothing");
    eventually(Duration::from_secs(5), "every pod is back in its pool", || {
        let status = routers[2].status();
        let pools = ["pools", "merchants"].map(|group| status[group].as_object().unwrap().values());
        let free: u64 =
            pools.into_iter().flatten().map(|pool| pool["available"].as_u64().unwrap()).sum();
        status["active_calls"] == 0 && free == 28
    });
}

#[test]
fn the_documented_keys_hold_what_is_documented() {
    let server = RedisServer::start(&[]);
    let router = &replicas(
        &server,
        1,
        r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
    )[0];
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
    let now = crate::support::redis::unix_millis() / 1_000;
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
fn another_prefix_is_used_for_every_key() {
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
    // The first of each loads its script.
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
    let monitor = std::process::Command::new("redis-cli")
        .args(["-p", &server.port.to_string(), "monitor"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(300));
    assert_eq!(run("CA2"), [200; 5]);
    thread::sleep(Duration::from_millis(300));
    let pid = monitor.id().to_string();
    std::process::Command::new("kill").arg(&pid).status().unwrap();
    let text = String::from_utf8(monitor.wait_with_output().unwrap().stdout).unwrap();
    let commands: Vec<&str> =
        text.lines().filter(|line| line.contains("] \"") && !line.contains(" lua] ")).collect();
    // A sweep of the router's own may fall in between.
    let ours: Vec<&&str> = commands
        .iter()
        .filter(|line| line.contains("CA2") || line.contains("voice-agent-0"))
        .collect();
    assert_eq!(ours.len(), 5, "{commands:#?}");
    assert!(ours.iter().all(|line| line.contains("\"EVALSHA\"")), "{commands:#?}");
    assert!(commands.iter().all(|line| line.contains("\"EVALSHA\"")), "{commands:#?}");
}

#[test]
fn scripts_that_redis_has_forgotten_are_brought_again_unseen() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    router.allocate("CA1");
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).unwrap();
    assert_eq!(router.release("CA1").0, 200);
    router.allocate("CA2");
}

#[test]
fn a_full_redis_refuses_calls_and_still_releases() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    router.allocate("CA1");
    let mut plain = server.connection();
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg("1").exec(&mut plain).unwrap();
    let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
    assert_eq!(status, 500, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("OOM"), "{answer}");
    assert_eq!(router.release("CA1").0, 200);
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": "voice-agent-0"})).0, 200);
    redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg("0").exec(&mut plain).unwrap();
    assert_eq!(router.get("/api/v1/calls/CA2").0, 404, "nothing half-written");
    router.allocate("CA2");
}

#[test]
fn a_key_of_the_wrong_type_is_named_and_nothing_is_half_written() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, TIERS)[0];
    let mut plain = server.connection();
    let _: () = plain.set("voice:calls", "oops").unwrap();
    let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
    assert_eq!(status, 500);
    assert!(answer["error"].as_str().unwrap().contains("WRONGTYPE"), "{answer}");
    assert!(!plain.exists::<_, bool>("voice:call:CA1").unwrap());
    let _: () = plain.del("voice:calls").unwrap();
    router.allocate("CA1");
    let _: () = plain.del("voice:call:CA9").unwrap();
    let _: () = plain.set("voice:call:CA9", "oops").unwrap();
    let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA9"}));
    assert_eq!(status, 500);
    assert!(answer["error"].as_str().unwrap().contains("voice:call:CA9"), "{answer}");
}

#[test]
fn what_people_do_by_hand_is_honoured_or_repaired() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("CLEANUP_INTERVAL", "500ms"),
    ]);
    let mut plain = server.connection();
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    // A busy pod added to the view is refused when drawn, and taken out again.
    let _: () = plain.sadd("voice:pool:gold:available", &pod).unwrap();
    let _: () = plain.sadd("voice:pool:gold:available", "nobody").unwrap();
    let others: HashSet<String> = ["CA2", "CA3"]
        .map(|call| router.allocate(call)["pod_name"].as_str().unwrap().to_owned())
        .into();
    assert!(!others.contains(&pod));
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA4"})).0, 503);
    eventually(Duration::from_secs(3), "the view is repaired", || {
        plain.scard::<_, usize>("voice:pool:gold:available").unwrap() == 0
    });
    // A deleted record is a call that is over.
    let _: () = plain.del("voice:call:CA1").unwrap();
    eventually(Duration::from_secs(3), "the pod is free", || {
        plain.sismember("voice:pool:gold:available", &pod).unwrap()
    });
    assert_eq!(router.status()["active_calls"], 2);
    // A draining mark is a drain.
    let _: () = plain.set_ex(format!("voice:pod:draining:{pod}"), "true", 600).unwrap();
    let (status, refusal) = router.post("/api/v1/allocate", json!({"call_sid": "CA5"}));
    assert_eq!(status, 503, "{refusal}");
    eventually(Duration::from_secs(3), "the drain is known", || {
        plain.zscore::<_, _, Option<f64>>("voice:draining", &pod).unwrap().is_some()
    });
    router.post("/api/v1/undrain", json!({"pod_name": pod}));
    router.allocate("CA5");
    router.release("CA5");
    // A view of the wrong type is replaced.
    let _: () = plain.set("voice:pool:gold:available", "oops").unwrap();
    eventually(Duration::from_secs(3), "the view is a set again", || {
        plain.sismember("voice:pool:gold:available", &pod).unwrap_or(false)
    });
}

#[test]
fn a_tier_document_changed_by_hand_is_followed_and_a_bad_one_is_not() {
    let server = RedisServer::start(&[]);
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    let mut plain = server.connection();
    router.allocate("CA1");
    let _: () = plain
        .set(
            "voice:tier:config",
            r#"{"tiers": {"gold": {"type": "shared", "target": 3, "max_concurrent": 2}}}"#,
        )
        .unwrap();
    eventually(Duration::from_secs(15), "gold is shared", || {
        router.status()["pools"]["gold"]["type"] == "shared"
    });
    eventually(Duration::from_secs(5), "its pods are placed", || {
        router.status()["pools"]["gold"]["free_slots"] == 5
    });
    let kind: String =
        redis::cmd("TYPE").arg("voice:pool:gold:available").query(&mut plain).unwrap();
    assert_eq!(kind, "zset");
    let _: () = plain.set("voice:tier:config", "{nonsense").unwrap();
    thread::sleep(Duration::from_secs(11));
    assert_eq!(router.status()["pools"]["gold"]["type"], "shared");
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn redis_wins_over_tier_config_at_the_start() {
    let server = RedisServer::start(&[]);
    let _: () = server
        .connection()
        .set("voice:tier:config", r#"{"tiers": {"silver": {"target": 2}}}"#)
        .unwrap();
    let router = &replicas(&server, 1, r#"{"gold": 3}"#)[0];
    assert_eq!(router.allocate("CA1")["source_pool"], "pool:silver");
}

#[test]
fn what_the_older_router_left_is_taken_over() {
    let server = RedisServer::start(&[]);
    let mut plain = server.connection();
    let lines = [
        "SADD voice:pool:gold:assigned a b e",
        "SADD voice:pool:basic:assigned c",
        "SADD voice:merchant:acme:assigned d",
        "SADD voice:pool:gold:available b",
        "ZADD voice:pool:basic:available 2 c",
        "SADD voice:merchant:acme:pods d",
        "SET voice:pod:tier:a gold",
        "SET voice:pod:tier:b gold",
        "SET voice:pod:tier:c basic",
        "SET voice:pod:tier:d merchant:acme",
        "SET voice:pod:tier:e gold",
        "SET voice:pod:draining:e true EX 300",
        r#"HSET voice:pod:metadata a {"tier":"gold","name":"a"} b {"tier":"gold","name":"b"} c {"tier":"basic","name":"c"} d {"tier":"merchant:acme","name":"d"} e {"tier":"gold","name":"e"}"#,
        "HSET voice:pod:a status allocated allocated_call_sid live allocated_at 1739280000 source_pool pool:gold",
        "HSET voice:call:live pod_name a source_pool pool:gold merchant_id shop allocated_at 1739280000",
        "SET voice:lease:a live EX 500",
        "HSET voice:call:stale pod_name b source_pool pool:gold merchant_id shop allocated_at 1739280000",
        "HSET voice:call:s1 pod_name c source_pool pool:basic merchant_id shop allocated_at 1739280000",
        "HSET voice:call:s2 pod_name c source_pool pool:basic merchant_id shop allocated_at 1739280000",
        "SET voice:lease:c s2 EX 500",
        "HSET voice:call:locked _lock 1",
    ];
    for line in lines {
        let mut words = line.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        for word in words {
            command.arg(word);
        }
        command.exec(&mut plain).unwrap();
    }
    let tiers = r#"{"tiers": {"gold": {"target": 3}, "basic": {"type": "shared", "target": 1, "max_concurrent": 3}, "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#;
    let url = server.url();
    let pods = "a=10.0.0.1:8000,b=10.0.0.2:8000,c=10.0.0.3:8000,d=10.0.0.4:8000,e=10.0.0.5:8000";
    let router = Router::start(&[
        ("REDIS_URL", &url),
        ("TIER_CONFIG", tiers),
        ("PODS", pods),
        ("VOICE_AGENT_BASE_URL", "wss://v.example.com"),
    ]);
    let status = router.status();
    assert_eq!(status["active_calls"], 3, "{status}");
    assert_eq!(router.get("/api/v1/calls/live").1["pod_name"], "a");
    assert_eq!(router.get("/api/v1/calls/stale").0, 404);
    assert_eq!(router.get("/api/v1/calls/locked").0, 404);
    assert_eq!(router.get("/api/v1/pod/e").1["is_draining"], true);
    assert_eq!(router.get("/api/v1/pod/a").1["tier"], "gold");
    assert_eq!(router.allocate("CA1")["pod_name"], "b", "the only gold pod that is free");
    assert_eq!(router.allocate("CA2")["pod_name"], "c", "one slot is left there");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
    for call in ["live", "s1", "s2"] {
        assert_eq!(router.release(call).0, 200, "{call}");
    }
    assert_eq!(plain.get::<_, String>("voice:schema").unwrap(), "1");
}

#[test]
fn a_layout_from_the_future_is_refused() {
    let server = RedisServer::start(&[]);
    let _: () = server.connection().set("voice:schema", "2").unwrap();
    let output = crate::support::program(&[
        ("REDIS_URL", &server.url()),
        ("HTTP_PORT", "0"),
        ("METRICS_PORT", "0"),
        ("LOG_LEVEL", "off"),
    ])
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("use a newer release") && text.lines().count() == 1, "{text}");
}

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

fn outage_under_load(kind: Outage) {
    let outage = std::env::var("OUTAGE_SECONDS").map_or(6, |text| text.parse().unwrap());
    let mut server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 200}"#);
    let (done, slowest) = (AtomicBool::new(false), Mutex::new(Duration::ZERO));
    let (held, refused) =
        (Mutex::new(HashMap::<String, String>::new()), Mutex::new(HashSet::<String>::new()));
    thread::scope(|scope| {
        for client in 0..16 {
            let (routers, done, slowest, held, refused) =
                (&routers, &done, &slowest, &held, &refused);
            scope.spawn(move || {
                let mut connection = routers[client % 2].connect();
                for number in (0..100_000).take_while(|_| !done.load(Ordering::Relaxed)) {
                    let call = format!("CA-{client}-{number}");
                    let started = Instant::now();
                    let (status, answer) =
                        connection.post("/api/v1/allocate", &json!({"call_sid": call})).json();
                    let took = started.elapsed();
                    let mut worst = slowest.lock().unwrap();
                    *worst = took.max(*worst);
                    drop(worst);
                    match status {
                        200 => {
                            let pod = answer["pod_name"].as_str().unwrap().to_owned();
                            let other = held.lock().unwrap().insert(pod.clone(), call.clone());
                            // Calls from before a wipe are forgotten, and their pods given anew.
                            let twice = other.filter(|_| kind == Outage::StandsStill);
                            assert_eq!(twice, None, "{pod} was given to {call}, too");
                            thread::sleep(Duration::from_millis(5));
                            held.lock().unwrap().remove(&pod);
                            let released = connection
                                .post("/api/v1/release", &json!({"call_sid": call}))
                                .status;
                            // A wiped Redis knows nothing of calls that nobody renewed.
                            let forgotten =
                                kind == Outage::DiesAndComesBackEmpty && released == 404;
                            assert!(forgotten || matches!(released, 200 | 503), "{released}");
                        }
                        503 => drop(refused.lock().unwrap().insert(call)),
                        other => panic!("{other}: {answer}"),
                    }
                    thread::sleep(Duration::from_millis(2));
                }
            });
        }
        thread::sleep(Duration::from_secs(1));
        match kind {
            Outage::StandsStill => server.signal("STOP"),
            Outage::DiesAndComesBackEmpty => server.kill(),
        }
        thread::sleep(Duration::from_secs(outage));
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
        thread::sleep(Duration::from_secs(1));
        done.store(true, Ordering::Relaxed);
    });
    assert!(*slowest.lock().unwrap() < Duration::from_secs(1), "{slowest:?}");
    let refused = refused.into_inner().unwrap();
    assert!(refused.len() > 100, "the outage was not felt: {}", refused.len());
    routers[1].release("back");
    let mut connection = routers[0].connect();
    eventually(Duration::from_secs(3), "ended calls are released", || {
        connection.get("/api/v1/status").json().1["active_calls"] == 0
    });
    for call in &refused {
        assert_eq!(
            connection.get(&format!("/api/v1/calls/{call}")).status,
            404,
            "{call} was refused and holds a pod"
        );
    }
    assert_eq!(routers[0].status()["pools"]["gold"]["available"], 200);
}

#[test]
fn a_redis_that_comes_back_empty_is_filled_again_within_seconds() {
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
    let port = crate::support::free_port();
    let (api, metrics) =
        (crate::support::free_port().to_string(), crate::support::free_port().to_string());
    let url = format!("redis://127.0.0.1:{port}");
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("HTTP_PORT", &api),
        ("METRICS_PORT", &metrics),
        ("LOG_LEVEL", "off"),
    ];
    let mut child =
        crate::support::program(&settings).stdout(std::process::Stdio::null()).spawn().unwrap();
    let address = format!("127.0.0.1:{api}").parse().unwrap();
    eventually(Duration::from_secs(5), "the router answers", || {
        Connection::try_open(address)
            .is_some_and(|mut connection| connection.get("/health").status == 200)
    });
    let mut connection = Connection::open(address);
    assert_eq!(
        connection.get("/ready").json(),
        (503, json!({"status": "starting", "store": "down"}))
    );
    assert_eq!(connection.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status, 503);
    let _server = RedisServer::start_on(port);
    eventually(Duration::from_secs(5), "ready", || connection.get("/ready").status == 200);
    assert_eq!(connection.post("/api/v1/allocate", &json!({"call_sid": "CA1"})).status, 200);
    child.kill().unwrap();
    child.wait().unwrap();
}
