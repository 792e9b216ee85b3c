//! Several namespaces, cordoned nodes, announced evictions, Events and the settle time.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{
    Router,
    cluster::{available, logged_router, router},
    eventually,
    kube::FakeKube,
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
const NAMESPACES: (&str, &str) = ("NAMESPACES", "a,b");

/// The warnings of the dashboard.
pub(crate) fn warnings(router: &Router) -> Vec<String> {
    let mut stream = router.connect();
    stream.open_stream("/api/v1/live");
    stream.read_until("event: state\ndata: ", 3 * SECOND);
    let state: Value = serde_json::from_str(&stream.read_until("\n\n", 3 * SECOND)).unwrap();
    let warnings = state["warnings"].as_array().cloned().unwrap_or_default();
    warnings.iter().map(|it| it["text"].as_str().unwrap().to_owned()).collect()
}

fn pods(router: &Router) -> Vec<Value> {
    router.get("/api/v1/pods").1["pods"].as_array().unwrap().clone()
}

fn set_ip(ip: &'static str) -> impl FnOnce(&mut Value) {
    move |pod| pod["status"]["podIP"] = json!(ip)
}

fn address(router: &Router, pod: &str) -> Value {
    router.get(&format!("/api/v1/pod/{pod}")).1["address"].clone()
}

#[test]
fn pods_of_several_namespaces_serve_together() {
    let kube = FakeKube::start();
    kube.add_in("a", "agent-a", |_| {});
    kube.add_in("b", "agent-b", |_| {});
    kube.add_in("c", "agent-c", |_| {});
    let router = router(&kube, &[NAMESPACES]);
    eventually(5 * SECOND, "the pods of a and b are known", || available(&router) == 2);
    kube.add_in("b", "agent-d", |_| {});
    eventually(2 * SECOND, "the watch of b works", || available(&router) == 3);
    kube.delete_in("a", "agent-a");
    eventually(2 * SECOND, "the watch of a works", || available(&router) == 2);
    assert_eq!(pods(&router).len(), 2);
}

#[test]
fn a_namespace_that_the_role_does_not_cover_is_named_and_the_others_work() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    let settings = [NAMESPACES, ("REDIS_URL", url.as_str())];
    kube.add_in("a", "agent-a", |_| {});
    kube.add_in("b", "agent-b", |_| {});
    let first = router(&kube, &settings);
    eventually(5 * SECOND, "both are known", || available(&first) == 2);
    let calls = ["CA1", "CA2"].map(|call| first.allocate(call)["pod_name"].clone());
    assert!(calls.contains(&json!("agent-b")));
    drop(first);
    kube.faults(|faults| faults.forbidden_paths = vec!["/namespaces/b/pods".into()]);
    kube.add_in("a", "agent-c", |_| {});
    let router = router(&kube, &settings);
    eventually(10 * SECOND, "the other namespace works", || available(&router) == 1);
    eventually(20 * SECOND, "the page names the namespace", || {
        warnings(&router).iter().any(|warning| {
            warning.contains("the pods of the namespace b are not watched")
                && warning.contains("list and watch on pods in the namespace b")
        })
    });
    // The pod of the hidden namespace may exist: it gets no new call and keeps its call.
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    assert_eq!(router.get("/api/v1/pod/agent-b").1["is_terminating"], true);
    kube.faults(|faults| faults.forbidden_paths.clear());
    eventually(20 * SECOND, "the namespace is watched again", || {
        router.get("/api/v1/pod/agent-b").1["is_terminating"] == false
    });
    eventually(5 * SECOND, "the page is clear", || warnings(&router).is_empty());
}

#[test]
fn a_withdrawn_role_hides_the_pods_of_its_namespace() {
    let kube = FakeKube::start();
    kube.add_in("a", "agent-a", |_| {});
    kube.add_in("b", "agent-b", |_| {});
    kube.add_in("b", "agent-c", |_| {});
    let (router, log) = logged_router(&kube, &[NAMESPACES]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == 3);
    let call_of = |number: u32| router.allocate(&format!("CA{number}"))["pod_name"].clone();
    let calls: Vec<Value> = (0..3).map(call_of).collect();
    kube.faults(|faults| faults.forbidden_paths = vec!["/namespaces/b/pods".into()]);
    kube.delete_in("b", "agent-c");
    kube.drop_watches();
    eventually(20 * SECOND, "pods that may be gone get no new calls", || {
        ["agent-b", "agent-c"].iter().all(|pod| router_pod(&router, pod)["is_terminating"] == true)
    });
    assert_eq!(router_pod(&router, "agent-a")["is_terminating"], false);
    assert_eq!((0..3).map(call_of).collect::<Vec<_>>(), calls, "their calls stay");
    let before = kube.forbidden();
    eventually(20 * SECOND, "the router retries", || kube.forbidden() >= before + 4);
    let reports = log.count("cannot watch the pods of the namespace b");
    // One of a transient and one of a lasting 403, and perhaps one of the closed watch.
    assert!((2..=3).contains(&reports), "{}", log.text());
    kube.faults(|faults| faults.forbidden_paths.clear());
    eventually(20 * SECOND, "the pod serves again", || {
        router_pod(&router, "agent-b")["is_terminating"] == false
    });
    eventually(5 * SECOND, "the other pod is gone", || router.get("/api/v1/pod/agent-c").0 == 404);
    eventually(5 * SECOND, "the page does not name the namespace", || {
        !warnings(&router).iter().any(|warning| warning.contains("namespace b"))
    });
}

#[test]
fn without_any_role_the_pods_stay_as_they_were() {
    let kube = FakeKube::start();
    kube.add_in("a", "agent-a", |_| {});
    kube.add_in("b", "agent-b", |_| {});
    let router = router(&kube, &[NAMESPACES]);
    eventually(5 * SECOND, "both are known", || available(&router) == 2);
    kube.faults(|faults| faults.forbidden_path = Some("/pods"));
    kube.drop_watches();
    eventually(20 * SECOND, "the page names both namespaces", || {
        let warnings = warnings(&router);
        ["a", "b"].iter().all(|namespace| {
            let text = format!("the pods of the namespace {namespace} are not watched");
            warnings.iter().any(|warning| warning.contains(&text))
        })
    });
    let before = kube.forbidden();
    eventually(20 * SECOND, "the router retries", || kube.forbidden() >= before + 4);
    assert_eq!(available(&router), 2);
}

#[test]
fn of_two_pods_of_one_name_the_older_is_used() {
    let kube = FakeKube::start();
    let created = |time: &'static str, ip: &'static str| {
        move |pod: &mut Value| {
            pod["metadata"]["creationTimestamp"] = json!(time);
            pod["status"]["podIP"] = json!(ip);
        }
    };
    kube.add_in("b", "agent-0", created("2026-01-01T00:00:00Z", "127.0.0.2"));
    kube.add_in("a", "agent-0", created("2026-01-02T00:00:00Z", "127.0.0.1"));
    let router = router(&kube, &[NAMESPACES]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    assert_eq!(address(&router, "agent-0"), "127.0.0.2:8000");
    eventually(5 * SECOND, "the page names both namespaces", || {
        let expected =
            "the pod agent-0 of the namespace a is ignored: the namespace b has an older";
        warnings(&router).iter().any(|warning| warning.contains(expected))
    });
    let call = router.allocate("CA1");
    kube.add_in("a", "agent-0", created("2026-01-03T00:00:00Z", "127.0.0.3"));
    assert_eq!(router.allocate("CA1")["pod_name"], call["pod_name"], "its call stays");
    kube.delete_in("b", "agent-0");
    eventually(5 * SECOND, "the other pod takes the name", || {
        address(&router, "agent-0") == "127.0.0.3:8000"
    });
    eventually(5 * SECOND, "the page is clear", || warnings(&router).is_empty());
}

#[test]
fn pods_on_cordoned_nodes_and_announced_evictions_are_the_last_choice() {
    let kube = FakeKube::start();
    for (number, node) in [(0, "node-1"), (1, "node-2"), (2, "node-3")] {
        kube.add_with(&format!("agent-{number}"), |pod| pod["spec"]["nodeName"] = json!(node));
    }
    kube.set_unschedulable("node-1", true);
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == 3);
    let is_at_risk = |pod: &str| router.get(&format!("/api/v1/pod/{pod}")).1["is_at_risk"] == true;
    eventually(5 * SECOND, "the cordoned node counts", || is_at_risk("agent-0"));
    kube.set_condition("agent-1", "DisruptionTarget", "True");
    eventually(5 * SECOND, "the eviction counts", || is_at_risk("agent-1"));
    for round in 0..5 {
        let call = format!("CA{round}");
        assert_eq!(router.allocate(&call)["pod_name"], "agent-2");
        router.release(&call);
    }
    kube.set_unschedulable("node-3", true);
    kube.set_unschedulable("node-1", false);
    eventually(5 * SECOND, "the nodes changed", || is_at_risk("agent-2") && !is_at_risk("agent-0"));
    assert_eq!(router.allocate("CA10")["pod_name"], "agent-0");
    router.allocate("CA11");
    router.allocate("CA12");
    assert_eq!(available(&router), 0, "pods at risk serve when there is no other");
}

#[test]
fn without_a_cluster_role_nodes_are_not_heeded_and_the_page_says_so() {
    let kube = FakeKube::start();
    kube.add("agent-0");
    kube.faults(|faults| faults.forbidden_path = Some("/nodes"));
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    eventually(20 * SECOND, "the page says so", || {
        let expected = "list and watch on nodes, by a ClusterRole";
        warnings(&router).iter().any(|warning| warning.contains(expected))
    });
    assert_eq!(router.allocate("CA1")["pod_name"], "agent-0");
}

#[test]
fn problems_disappear_when_the_api_server_is_back() {
    let mut kube = FakeKube::start();
    kube.install_crds(true);
    kube.add("agent-0");
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    kube.stop();
    for watched in ["the pods of the namespace default", "cordoned nodes", "VoiceTier objects"] {
        eventually(15 * SECOND, watched, || {
            warnings(&router).iter().any(|warning| warning.contains(watched))
        });
    }
    assert_eq!(router.allocate("CA1")["pod_name"], "agent-0", "calls are served");
    kube.restart();
    eventually(40 * SECOND, "the page is clear", || warnings(&router).is_empty());
}

#[test]
fn expired_leases_are_reported_as_one_event_of_the_pod() {
    let kube = FakeKube::start();
    kube.add_in("a", "agent-0", |_| {});
    let router = router(&kube, &[NAMESPACES, ("LEASE_TTL", "1s")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    eventually(15 * SECOND, "the Event is written", || !kube.cluster_events().is_empty());
    let event = kube.cluster_events().remove(0);
    assert_eq!((&event["reason"], &event["type"]), (&json!("LeaseExpired"), &json!("Warning")));
    let regarding = &event["regarding"];
    assert_eq!((&regarding["name"], &regarding["namespace"]), (&json!("agent-0"), &json!("a")));
    assert_eq!(event["metadata"]["namespace"], "a");
    router.allocate("CA2");
    eventually(10 * SECOND, "the second lease expired", || router.status()["active_calls"] == 0);
    assert_eq!(kube.cluster_events().len(), 1, "repetitions are counted, not written");
}

#[test]
fn a_missing_permission_for_events_is_in_the_log() {
    let kube = FakeKube::start();
    kube.add("agent-0");
    kube.faults(|faults| faults.forbidden_path = Some("/events"));
    let (router, log) = logged_router(&kube, &[("LEASE_TTL", "1s")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    log.wait_for("cannot write Events about pods", 0);
    assert!(log.text().contains("events is forbidden"), "{}", log.text());
}

#[test]
fn a_pod_gets_calls_only_after_the_settle_time_and_a_restart_keeps_it() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    let settings = [("REDIS_URL", url.as_str()), ("POD_SETTLE_TIME", "3s")];
    kube.add_with("old", |pod| {
        pod["status"]["conditions"][0]["lastTransitionTime"] = json!("2026-01-01T00:00:00Z");
    });
    let first = router(&kube, &settings);
    eventually(5 * SECOND, "a pod that has been ready for long serves", || available(&first) == 1);
    let begun = std::time::Instant::now();
    kube.add_with("new", set_ip("127.0.0.9"));
    eventually(5 * SECOND, "the new pod is known", || {
        router_pod(&first, "new")["is_ready"] == false
    });
    eventually(15 * SECOND, "the new pod serves", || available(&first) == 2);
    // The transition has a precision of one second.
    assert!(begun.elapsed() >= 2 * SECOND, "{:?}", begun.elapsed());
    drop(first);
    // The clock of a node may be far ahead of the router's.
    kube.update("new", |pod| {
        pod["status"]["conditions"][0]["lastTransitionTime"] = json!("2099-01-01T00:00:00Z");
    });
    let second = router(&kube, &settings);
    eventually(5 * SECOND, "the router leads", || kube.lease_holder().is_some());
    for _ in 0..20 {
        assert_eq!(available(&second), 2, "a restart takes no pod out of service");
    }
}

fn router_pod(router: &Router, pod: &str) -> Value {
    router.get(&format!("/api/v1/pod/{pod}")).1
}
