//! One store, one origin of pods: a router never writes over the pods of another origin.

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
    Connection, Process, Router, eventually, free_port, kube::Kube, program, redis::RedisServer,
};

const TIERS: &str = r#"{"gold": 2}"#;

/// The settings of a router with pods of an origin.
fn settings<'a>(origin: &str, kube: &'a Kube, url: &'a str) -> Vec<(&'static str, &'a str)> {
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

/// Starts a router that is expected to end by itself.
fn refused(settings: &[(&str, &str)]) -> (ExitStatus, String) {
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let mut all = vec![("HTTP_PORT", ports[0].as_str()), ("METRICS_PORT", &ports[1])];
    all.extend(settings);
    let mut process = Process(program(&all).stderr(Stdio::piped()).spawn().unwrap());
    let mut status = None;
    eventually(Duration::from_secs(10), "the router ends", || {
        status = process.0.try_wait().unwrap();
        status.is_some()
    });
    let mut printed = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    (status.unwrap(), printed)
}

fn pods(router: &Router) -> Vec<String> {
    let (_, answer) = router.get("/api/v1/pods");
    let pods = answer["pods"].as_array().unwrap().iter();
    pods.map(|pod| format!("{} {}", pod["pod_name"], pod["state"])).collect()
}

#[test]
fn no_router_starts_over_the_pods_of_another_origin() {
    let kube = Kube::start();
    kube.add("voice-agent-7");
    kube.add("voice-agent-8");
    let origins = ["simulated", "list", "kubernetes/default"];
    for owner in origins {
        let server = RedisServer::start(&[]);
        let url = server.url();
        let router = Router::start(&settings(owner, &kube, &url));
        eventually(Duration::from_secs(10), "two pods are free", || {
            router.status()["pools"]["gold"]["available"] == 2
        });
        router.allocate("CA1");
        let before = pods(&router);
        for other in origins.into_iter().filter(|other| *other != owner) {
            let (status, printed) = refused(&settings(other, &kube, &url));
            assert!(!status.success(), "{other} started over {owner}");
            assert!(printed.contains(&format!("the pods of origin {owner}")), "{printed}");
            assert!(printed.contains(&format!("this router's pods is {other}")), "{printed}");
            assert_eq!(pods(&router), before, "{other} changed the pods of {owner}");
        }
        // One of the same origin joins.
        let second = Router::start(&settings(owner, &kube, &url));
        assert_eq!(pods(&second), before);
        assert_eq!(second.get("/api/v1/calls/CA1").0, 200);
        assert_eq!(second.release("CA1").0, 200);
    }
}

/// Pending calls with their deadlines, tiers and libraries: all that a recovery may write.
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
    let kube = Kube::start();
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
        assert!(!refused(&other).0.success());
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

/// Waits until a router is out of service because of an origin, and checks that it says so.
fn serves_no_call(address: SocketAddr, owner: &str) {
    let ask =
        |connection: &mut Connection, path: &str| connection.try_get(path).map(|it| it.json());
    let mut ready = (0, Value::Null);
    eventually(Duration::from_secs(20), "it reports the origin", || {
        let answer = Connection::try_open(address).and_then(|mut it| ask(&mut it, "/ready"));
        ready = answer.unwrap_or_default();
        ready.0 == 503
            && ready.1["reason"].as_str().is_some_and(|reason| reason.contains("voice:origin"))
    });
    assert!(ready.1["reason"].as_str().unwrap().contains(owner), "{}", ready.1);
    let call = json!({"call_sid": "CA9"});
    let (status, answer) = Connection::open(address).post("/api/v1/allocate", &call).json();
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("voice:origin"), "{answer}");
}

#[test]
fn a_router_that_finds_another_origin_later_serves_no_call() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&settings("list", &kube, &url));
    server.signal("STOP");
    // It starts without its store, and meets the origin when Redis answers.
    let (_process, address) = launch(&settings("simulated", &kube, &url));
    eventually(Duration::from_secs(10), "it answers", || {
        Connection::try_open(address).and_then(|mut it| it.try_get("/ready")).is_some()
    });
    server.signal("CONT");
    serves_no_call(address, "list");
    eventually(Duration::from_secs(10), "the first router serves calls", || {
        router.post("/api/v1/allocate", json!({"call_sid": "CA1"})).0 == 200
    });
    assert_eq!(pods(&router).len(), 2);
}

#[test]
fn simulated_agents_claim_only_an_empty_store() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&settings("list", &kube, &url));
    let before = pods(&router);
    drop(router);
    // As an earlier version left it.
    let keys = ["voice:origin", "voice:leader:epoch", "voice:pod_list"];
    cmd("DEL").arg(&keys).exec(&mut server.connection()).unwrap();
    let (_, printed) = refused(&settings("simulated", &kube, &url));
    assert!(printed.contains("the pods of origin unknown"), "{printed}");
    let router = Router::start(&settings("list", &kube, &url));
    assert_eq!(pods(&router), before);
}

#[test]
fn force_pod_origin_takes_the_pods_over() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut before = Router::start(&settings("simulated", &kube, &url));
    let mut forced = settings("list", &kube, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    let router = Router::start(&forced);
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
    // The router of the origin before reports it, and serves no more calls.
    eventually(Duration::from_secs(20), "it is reported", || {
        let metrics = before.connect().get("/metrics").text();
        metrics.contains("smart_router_pods_refused 1")
    });
    serves_no_call(before.address, "list");
    before.signal("TERM");
    before.wait_for_exit(Duration::from_secs(10));
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
}

#[test]
fn a_store_that_an_earlier_leader_wrote_takes_no_other_pods() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    cmd("SET").arg("voice:leader:epoch").arg(5).exec(&mut server.connection()).unwrap();
    for other in ["simulated", "list"] {
        let (_, printed) = refused(&settings(other, &kube, &server.url()));
        assert!(printed.contains("the pods of origin kubernetes "), "{printed}");
    }
    let url = server.url();
    drop(Router::start(&settings("kubernetes/default", &kube, &url)));
}

#[test]
fn a_second_cluster_does_not_take_the_pods_over() {
    let (kube, other) = (Kube::start(), Kube::start());
    kube.add("voice-agent-7");
    other.add("voice-agent-8");
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut redis = server.connection();
    // The origin as an earlier version recorded it belongs to the first cluster that comes.
    cmd("SET").arg("voice:origin").arg("kubernetes/default").exec(&mut redis).unwrap();
    let mut router = Router::start(&settings("kubernetes/default", &kube, &url));
    eventually(Duration::from_secs(10), "it has a pod", || pods(&router).len() == 1);
    router.allocate("CA1");
    let recorded: String = cmd("GET").arg("voice:origin").query(&mut redis).unwrap();
    assert_eq!(recorded, format!("kubernetes/default/{}", kube.namespace_uid()));
    let (status, printed) = refused(&settings("kubernetes/default", &other, &url));
    assert!(!status.success());
    assert!(printed.contains(&recorded), "{printed}");
    assert!(printed.contains(&other.namespace_uid()), "{printed}");
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(pods(&router), [r#""voice-agent-7" "busy""#]);
    let mut forced = settings("kubernetes/default", &other, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    let forced = Router::start(&forced);
    eventually(Duration::from_secs(10), "its pod replaces the other one", || {
        pods(&forced) == [r#""voice-agent-8" "available""#]
    });
    serves_no_call(router.address, &other.namespace_uid());
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(10));
}

#[test]
fn calls_are_served_before_the_cluster_can_be_identified() {
    let mut kube = Kube::start();
    kube.add("voice-agent-7");
    let server = RedisServer::start(&[]);
    let url = server.url();
    let first = Router::start(&settings("kubernetes/default", &kube, &url));
    eventually(Duration::from_secs(10), "it has a pod", || pods(&first).len() == 1);
    drop(first);
    kube.vanish();
    let router = Router::start(&settings("kubernetes/default", &kube, &url));
    router.allocate("CA1");
    kube.add("voice-agent-8");
    kube.resume();
    eventually(Duration::from_secs(20), "it writes pods", || pods(&router).len() == 2);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn a_role_that_forbids_the_namespace_is_reported_at_the_start() {
    let kube = Kube::start();
    kube.faults(|faults| faults.forbid = Some("namespaces/default"));
    let (status, printed) = refused(&settings("kubernetes/default", &kube, "redis://127.0.0.1:1"));
    assert_eq!(status.code(), Some(1), "{printed}");
    assert!(printed.contains("get on namespaces"), "{printed}");
}

#[test]
fn a_lost_origin_is_recorded_again() {
    let kube = Kube::start();
    kube.add("voice-agent-7");
    for origin in ["simulated", "list", "kubernetes/default"] {
        let server = RedisServer::start(&[]);
        let url = server.url();
        let router = Router::start(&settings(origin, &kube, &url));
        eventually(Duration::from_secs(10), "it has pods", || !pods(&router).is_empty());
        let mut redis = server.connection();
        let recorded = |redis: &mut Redis| cmd("GET").arg("voice:origin").query(redis).ok();
        let before: Option<String> = recorded(&mut redis);
        assert!(before.as_ref().is_some_and(|text| text.starts_with(origin)), "{before:?}");
        // A second list has raised the epoch.
        cmd("SETNX").arg("voice:leader:epoch").arg(1).exec(&mut redis).unwrap();
        cmd("DEL").arg("voice:origin").exec(&mut redis).unwrap();
        cmd("HSET").arg("voice:origin").arg("a").arg("b").exec(&mut redis).unwrap();
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
fn an_origin_that_makes_no_sense_is_named() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut router = Router::start(&settings("list", &kube, &url));
    cmd("SET").arg("voice:origin").arg("foo bar").exec(&mut server.connection()).unwrap();
    serves_no_call(router.address, "foo bar");
    router.signal("TERM");
    router.wait_for_exit(Duration::from_secs(10));
    let (_, printed) = refused(&settings("list", &kube, &url));
    assert!(printed.contains("the pods of origin foo bar (voice:origin)"), "{printed}");
    let mut forced = settings("list", &kube, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    drop(Router::start(&forced));
    let origin: String = cmd("GET").arg("voice:origin").query(&mut server.connection()).unwrap();
    assert_eq!(origin, "list");
}

#[test]
fn a_pod_of_a_cluster_without_a_token_refuses_to_start() {
    let (status, printed) = refused(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
    assert_eq!(status.code(), Some(1), "{printed}");
    assert!(printed.contains("automountServiceAccountToken"), "{printed}");
}

#[test]
fn lists_that_differ_are_reported_and_end_no_call() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let first = Router::start(&settings("list", &kube, &url));
    let call = first.allocate("CA1");
    let second_call = first.allocate("CA2");
    let on_a = if call["pod_name"] == "a" { "CA1" } else { "CA2" };
    assert_ne!(call["pod_name"], second_call["pod_name"]);
    // Another address for `a`, and a pod that the first list does not have.
    let mut other = settings("list", &kube, &url);
    other.retain(|(name, _)| *name != "PODS");
    other.push(("PODS", "a=h:9,b=h:2,c=h:3"));
    let second = Router::start(&other);
    eventually(Duration::from_secs(20), "the first router reports it", || {
        let metrics = first.connect().get("/metrics").text();
        metrics.contains("smart_router_pods_refused 1")
    });
    for call in ["CA1", "CA2"] {
        assert_eq!(first.get(&format!("/api/v1/calls/{call}")).0, 200, "{call} was cut");
    }
    assert_eq!(pods(&second), [r#""a" "terminating""#, r#""b" "busy""#, r#""c" "available""#]);
    assert_eq!(second.get("/api/v1/pod/a").1["address"], "h:1", "the old pod stays for its call");
    // With its last call the old pod goes, and the new one comes.
    assert_eq!(second.release(on_a).0, 200);
    eventually(Duration::from_secs(10), "the pod of the newer list joins", || {
        let pod = second.get("/api/v1/pod/a").1;
        pod["address"] == "h:9" && pod["is_terminating"] == false
    });
    let metrics = second.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_pods_refused 0"), "{metrics}");
    for call in ["CA1", "CA2"].into_iter().filter(|call| *call != on_a) {
        assert_eq!(second.release(call).0, 200);
    }
}
