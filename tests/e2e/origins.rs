//! One store, one origin of pods: a router never writes over the pods of another origin.

use std::{process::Output, time::Duration};

use testkit::cluster::TIMES;
use testkit::{Router, eventually, free_port, kube::Kube, program, redis::RedisServer};

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
fn refused(settings: &[(&str, &str)]) -> Output {
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let mut all = vec![("HTTP_PORT", ports[0].as_str()), ("METRICS_PORT", &ports[1])];
    all.extend(settings);
    program(&all).output().unwrap()
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
            let output = refused(&settings(other, &kube, &url));
            let printed = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success(), "{other} started over {owner}");
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

#[test]
fn force_pod_origin_takes_the_pods_over() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    let url = server.url();
    let before = Router::start(&settings("simulated", &kube, &url));
    let mut forced = settings("list", &kube, &url);
    forced.push(("FORCE_POD_ORIGIN", "on"));
    let router = Router::start(&forced);
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
    // The router of the origin before reports it, and writes nothing any more.
    eventually(Duration::from_secs(20), "it is reported", || {
        let metrics = before.connect().get("/metrics").text();
        metrics.contains("smart_router_pods_refused 1")
    });
    assert_eq!(pods(&router), [r#""a" "available""#, r#""b" "available""#]);
}

#[test]
fn a_store_that_an_earlier_leader_wrote_takes_no_other_pods() {
    let kube = Kube::start();
    let server = RedisServer::start(&[]);
    redis::cmd("SET").arg("voice:leader:epoch").arg(5).exec(&mut server.connection()).unwrap();
    for other in ["simulated", "list"] {
        let output = refused(&settings(other, &kube, &server.url()));
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(printed.contains("the pods of origin kubernetes,"), "{printed}");
    }
    let url = server.url();
    drop(Router::start(&settings("kubernetes/default", &kube, &url)));
}

#[test]
fn a_pod_of_a_cluster_without_a_token_refuses_to_start() {
    let output = refused(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{printed}");
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
