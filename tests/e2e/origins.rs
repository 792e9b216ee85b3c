//! A store belongs to one origin of pods: a router never overwrites the pods of another origin.

use std::{
    io::Read,
    net::SocketAddr,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use redis::{Connection as Redis, cmd};
use serde_json::{Value, json};

use testkit::cluster::TIMES;
use testkit::{
    Connection, Process, Router, eventually, free_port, kube::FakeKube, program, redis::RedisServer,
};

const TIERS: &str = r#"{"gold": 2}"#;

/// Returns the settings of a router whose pods come from an origin.
fn settings<'a>(origin: &str, kube: &'a FakeKube, url: &'a str) -> Vec<(&'static str, &'a str)> {
    let mut settings = vec![
        ("REDIS_URL", url),
        ("TIER_CONFIG", TIERS),
        ("HTTP_BIND", "127.0.0.1"),
        ("RECONCILE_INTERVAL", "300ms"),
        ("LOG_LEVEL", "off"),
    ];
    if origin != "simulated" {
        settings.push(("VOICE_AGENT_BASE_URL", "wss://voice.example.com"));
    }
    match origin {
        "list" => settings.push(("PODS", "a=h:1,b=h:2")),
        "kubernetes/default" => {
            settings.push(("KUBECONFIG", kube.config.to_str().unwrap()));
            settings.extend(TIMES);
        }
        _ => {}
    }
    settings
}

/// Starts a router that must exit by itself. Returns its exit status and stderr.
fn run_to_exit(settings: &[(&str, &str)]) -> (ExitStatus, String) {
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let mut all = vec![("HTTP_PORT", ports[0].as_str()), ("METRICS_PORT", &ports[1])];
    all.extend(settings);
    let mut process = Process(program(&all).stderr(Stdio::piped()).spawn().unwrap());
    let mut status = None;
    eventually(Duration::from_secs(10), "the router exits", || {
        status = process.0.try_wait().unwrap();
        status.is_some()
    });
    let mut printed = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    (status.unwrap(), printed)
}

fn pods(router: &Router) -> Vec<String> {
    let (_, response) = router.get("/api/v1/pods");
    let pods = response["pods"].as_array().unwrap().iter();
    pods.map(|pod| format!("{} {}", pod["pod_name"], pod["state"])).collect()
}

#[test]
fn a_router_of_another_origin_refuses_to_start() {
    let kube = FakeKube::start();
    kube.add("voice-agent-7");
    kube.add("voice-agent-8");
    let origins = ["simulated", "list", "kubernetes/default"];
    for owner in origins {
        let server = RedisServer::start(&[]);
        let url = server.url();
        let router = Router::start(&settings(owner, &kube, &url));
        eventually(Duration::from_secs(10), "two pods are available", || {
            router.status()["pools"]["gold"]["available"] == 2
        });
        router.allocate("CA1");
        let before = pods(&router);
        for other in origins.into_iter().filter(|other| *other != owner) {
            let (status, printed) = run_to_exit(&settings(other, &kube, &url));
            assert!(!status.success(), "{other} started over {owner}");
            assert!(printed.contains(&format!("the pods of origin {owner}")), "{printed}");
            assert!(printed.contains(&format!("this router's pods is {other}")), "{printed}");
            assert_eq!(pods(&router), before, "{other} changed the pods of {owner}");
        }
        // A second router of the same origin starts.
        let second = Router::start(&settings(owner, &kube, &url));
        assert_eq!(pods(&second), before);
        assert_eq!(second.get("/api/v1/calls/CA1").0, 200);
        assert_eq!(second.release("CA1").0, 200);
    }
}

/// Returns pending calls with their deadlines, tiers and libraries: everything that a recovery
/// may write.
fn pending(redis: &mut Redis) -> Vec<redis::Value> {
    let mut read = |words: &str| {
        let mut words = words.split(' ');
        let mut command = cmd(words.next().unwrap());
        for word in words {
            command.arg(word);
        }
        command.query(redis).unwrap()
    };
    [
        "ZRANGE voice:calls 0 -1 WITHSCORES",
        "ZRANGE voice:waiting 0 -1 WITHSCORES",
        "HGETALL voice:tiers",
        "GET voice:tier:config",
        "FUNCTION LIST",
    ]
    .map(&mut read)
    .to_vec()
}

#[test]
fn a_refused_router_writes_nothing() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut production = settings("list", &kube, &url);
    let waits = [("CONNECT_TIMEOUT", "60s"), ("HOLD_TIME", "60s"), ("PUBLIC_URL", "https://r")];
    production.extend(waits);
    let router = Router::start(&production);
    for call in ["CA1", "CA2", "CA3"] {
        let form = format!("CallSid={call}");
        assert_eq!(router.connect().form("/api/v1/twilio/allocate", &form).status, 200);
    }
    let mut redis = server.connection();
    let other_version = "#!lua name=smart_router_0123456789ab\n\
        redis.register_function('other_version', function() return 1 end)";
    cmd("FUNCTION").arg("LOAD").arg(other_version).exec(&mut redis).unwrap();
    let before = pending(&mut redis);
    for other in ["simulated", "kubernetes/default"] {
        let mut other = settings(other, &kube, &url);
        other.retain(|(name, _)| *name != "TIER_CONFIG");
        other.extend([
            ("CONNECT_TIMEOUT", "1h"),
            ("HOLD_TIME", "50m"),
            ("PUBLIC_URL", "https://s"),
        ]);
        assert!(!run_to_exit(&other).0.success());
        assert_eq!(pending(&mut redis), before, "{other:?}");
    }
    for call in ["CA1", "CA2", "CA3"] {
        router.release(call);
    }
}

/// Starts a router without waiting for it to be ready.
fn launch(settings: &[(&str, &str)]) -> (Process, SocketAddr) {
    let ports = [free_port(), free_port()];
    let texts = ports.map(|port| port.to_string());
    let mut all = vec![("HTTP_PORT", texts[0].as_str()), ("METRICS_PORT", &texts[1])];
    all.extend(settings);
    (Process(program(&all).spawn().unwrap()), SocketAddr::from(([127, 0, 0, 1], ports[0])))
}

/// Waits until the router is out of service because of the origin and reports it.
fn assert_out_of_service(address: SocketAddr, owner: &str) {
    let get =
        |connection: &mut Connection, path: &str| connection.try_get(path).map(|it| it.json());
    let mut ready = (0, Value::Null);
    eventually(Duration::from_secs(20), "/ready reports the origin", || {
        let response = Connection::try_open(address).and_then(|mut it| get(&mut it, "/ready"));
        ready = response.unwrap_or_default();
        ready.0 == 503
            && ready.1["reason"].as_str().is_some_and(|reason| reason.contains("voice:origin"))
    });
    assert!(ready.1["reason"].as_str().unwrap().contains(owner), "{}", ready.1);
    let call = json!({"call_sid": "CA9"});
    let (status, response) = Connection::open(address).post("/api/v1/allocate", &call).json();
    assert_eq!(status, 503, "{response}");
    assert!(response["error"].as_str().unwrap().contains("voice:origin"), "{response}");
}

#[test]
fn a_router_that_finds_another_origin_later_serves_no_calls() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&settings("list", &kube, &url));
    server.signal("STOP");
    // It starts without its store and reads the origin when Redis replies.
    let (_process, address) = launch(&settings("simulated", &kube, &url));
    eventually(Duration::from_secs(10), "/ready responds", || {
        Connection::try_open(address).and_then(|mut it| it.try_get("/ready")).is_some()
    });
    server.signal("CONT");
    assert_out_of_service(address, "list");
    eventually(Duration::from_secs(10), "the first router serves calls", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA1"})).0 == 200
    });
    assert_eq!(pods(&router).len(), 2);
}

#[test]
fn simulated_agents_claim_only_an_empty_store() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&settings("list", &kube, &url));
    let before = pods(&router);
    drop(router);
    // A store written by an earlier version.
    let keys = ["voice:origin", "voice:leader:epoch", "voice:pod_list"];
    cmd("DEL").arg(&keys).exec(&mut server.connection()).unwrap();
    let (_, printed) = run_to_exit(&settings("simulated", &kube, &url));
    assert!(printed.contains("the pods of origin unknown"), "{printed}");
    let router = Router::start(&settings("list", &kube, &url));
    assert_eq!(pods(&router), before);
}

#[test]
fn force_pod_origin_replaces_the_pods_of_another_origin() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut before = Router::start(&settings("simulated", &kube, &url));
    let mut forced = settings("list", &kube, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    let router = Router::start(&forced);
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
    // The router of the previous origin reports it and serves no more calls.
    eventually(Duration::from_secs(20), "the metric reports it", || {
        let metrics = before.connect().get("/metrics").text();
        metrics.contains("smart_router_pods_refused 1")
    });
    assert_out_of_service(before.address, "list");
    before.signal("TERM");
    before.wait_for_exit(Duration::from_secs(10));
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
}

#[test]
fn a_store_written_by_a_leader_accepts_no_other_origin() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    cmd("SET").arg("voice:leader:epoch").arg(5).exec(&mut server.connection()).unwrap();
    for other in ["simulated", "list"] {
        let (_, printed) = run_to_exit(&settings(other, &kube, &server.url()));
        assert!(printed.contains("the pods of origin kubernetes "), "{printed}");
    }
    let url = server.url();
    drop(Router::start(&settings("kubernetes/default", &kube, &url)));
}

#[test]
fn a_second_cluster_is_another_origin() {
    let (kube, other) = (FakeKube::start(), FakeKube::start());
    kube.add("voice-agent-7");
    other.add("voice-agent-8");
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut redis = server.connection();
    // The first cluster takes over an origin recorded by an earlier version, without a UID.
    cmd("SET").arg("voice:origin").arg("kubernetes/default").exec(&mut redis).unwrap();
    let mut router = Router::start(&settings("kubernetes/default", &kube, &url));
    eventually(Duration::from_secs(10), "the router has a pod", || pods(&router).len() == 1);
    router.allocate("CA1");
    let recorded: String = cmd("GET").arg("voice:origin").query(&mut redis).unwrap();
    assert_eq!(recorded, format!("kubernetes/default/{}", kube.namespace_uid()));
    let (status, printed) = run_to_exit(&settings("kubernetes/default", &other, &url));
    assert!(!status.success());
    assert!(printed.contains(&recorded), "{printed}");
    assert!(printed.contains(&other.namespace_uid()), "{printed}");
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(pods(&router), [r#""voice-agent-7" "busy""#]);
    let mut forced = settings("kubernetes/default", &other, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    let forced = Router::start(&forced);
    eventually(Duration::from_secs(10), "the pod of the other cluster is replaced", || {
        pods(&forced) == [r#""voice-agent-8" "available""#]
    });
    assert_out_of_service(router.address, &other.namespace_uid());
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(10));
}

#[test]
fn calls_are_served_before_the_cluster_can_be_identified() {
    let mut kube = FakeKube::start();
    kube.add("voice-agent-7");
    let server = RedisServer::start(&[]);
    let url = server.url();
    let first = Router::start(&settings("kubernetes/default", &kube, &url));
    eventually(Duration::from_secs(10), "the router has a pod", || pods(&first).len() == 1);
    drop(first);
    kube.stop();
    let router = Router::start(&settings("kubernetes/default", &kube, &url));
    router.allocate("CA1");
    kube.add("voice-agent-8");
    kube.restart();
    eventually(Duration::from_secs(20), "the router writes pods", || pods(&router).len() == 2);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn a_role_that_forbids_the_namespace_is_reported_at_the_start() {
    let kube = FakeKube::start();
    kube.faults(|faults| faults.forbidden_path = Some("namespaces/default"));
    let (status, printed) =
        run_to_exit(&settings("kubernetes/default", &kube, "redis://127.0.0.1:1"));
    assert_eq!(status.code(), Some(1), "{printed}");
    assert!(printed.contains("get on namespaces"), "{printed}");
}

#[test]
fn a_lost_origin_is_recorded_again() {
    let kube = FakeKube::start();
    kube.add("voice-agent-7");
    for origin in ["simulated", "list", "kubernetes/default"] {
        let server = RedisServer::start(&[]);
        let url = server.url();
        let router = Router::start(&settings(origin, &kube, &url));
        eventually(Duration::from_secs(10), "the router has pods", || !pods(&router).is_empty());
        let mut redis = server.connection();
        let recorded = |redis: &mut Redis| cmd("GET").arg("voice:origin").query(redis).ok();
        let before: Option<String> = recorded(&mut redis);
        assert!(before.as_ref().is_some_and(|text| text.starts_with(origin)), "{before:?}");
        // An epoch as if a second list had raised it.
        cmd("SETNX").arg("voice:leader:epoch").arg(1).exec(&mut redis).unwrap();
        // In one step, so that the router does not record the origin in between.
        let mut replace = redis::pipe();
        replace.atomic().del("voice:origin").hset("voice:origin", "a", "b");
        replace.exec(&mut redis).unwrap();
        eventually(Duration::from_secs(20), "the origin is recorded", || {
            recorded(&mut redis) == before
        });
        let metrics = router.connect().get("/metrics").text();
        assert!(metrics.contains("smart_router_pods_refused 0"), "{origin}: {metrics}");
        cmd("DEL").arg("voice:origin").exec(&mut redis).unwrap();
        drop(Router::start(&settings(origin, &kube, &url)));
    }
}

#[test]
fn a_malformed_origin_is_reported_with_its_value() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut router = Router::start(&settings("list", &kube, &url));
    cmd("SET").arg("voice:origin").arg("foo bar").exec(&mut server.connection()).unwrap();
    assert_out_of_service(router.address, "foo bar");
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(10));
    let (_, printed) = run_to_exit(&settings("list", &kube, &url));
    assert!(printed.contains("the pods of origin foo bar (voice:origin)"), "{printed}");
    let mut forced = settings("list", &kube, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    drop(Router::start(&forced));
    let origin: String = cmd("GET").arg("voice:origin").query(&mut server.connection()).unwrap();
    assert_eq!(origin, "list");
}

#[test]
fn a_router_in_a_pod_without_a_service_account_token_fails() {
    let (status, printed) = run_to_exit(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
    assert_eq!(status.code(), Some(1), "{printed}");
    assert!(printed.contains("automountServiceAccountToken"), "{printed}");
}

#[test]
fn differing_pod_lists_are_reported_and_end_no_call() {
    let kube = FakeKube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let first = Router::start(&settings("list", &kube, &url));
    let call = first.allocate("CA1");
    let second_call = first.allocate("CA2");
    let on_a = if call["pod_name"] == "a" { "CA1" } else { "CA2" };
    assert_ne!(call["pod_name"], second_call["pod_name"]);
    // Another address for `a`, and one more pod.
    let mut other = settings("list", &kube, &url);
    other.retain(|(name, _)| *name != "PODS");
    other.push(("PODS", "a=h:9,b=h:2,c=h:3"));
    let second = Router::start(&other);
    eventually(Duration::from_secs(20), "the first router reports the difference", || {
        let metrics = first.connect().get("/metrics").text();
        metrics.contains("smart_router_pods_refused 1")
    });
    for call in ["CA1", "CA2"] {
        assert_eq!(first.get(&format!("/api/v1/calls/{call}")).0, 200, "{call} was ended");
    }
    assert_eq!(pods(&second), [r#""a" "terminating""#, r#""b" "busy""#, r#""c" "available""#]);
    assert_eq!(
        second.get("/api/v1/pod/a").1["address"],
        "h:1",
        "the old pod stays until its call ends"
    );
    // The end of its last call replaces the old pod by the new one.
    assert_eq!(second.release(on_a).0, 200);
    eventually(Duration::from_secs(10), "the pod of the newer list is added", || {
        let pod = second.get("/api/v1/pod/a").1;
        pod["address"] == "h:9" && pod["is_terminating"] == false
    });
    let metrics = second.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_pods_refused 0"), "{metrics}");
    for call in ["CA1", "CA2"].into_iter().filter(|call| *call != on_a) {
        assert_eq!(second.release(call).0, 200);
    }
}
