//! Pods of a Kubernetes cluster: their states, the watch and reconciliation.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{
    Router,
    cluster::{TIMES, available, router},
    eventually, free_port,
    kube::FakeKube,
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

/// Starts a cluster with pods and a router that knows them.
fn with_pods(count: u64) -> (FakeKube, Router) {
    let kube = FakeKube::start();
    for number in 0..count {
        kube.add(&format!("voice-agent-{number}"));
    }
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == count);
    (kube, router)
}

fn set_ready(kube: &FakeKube, name: &str, ready: &str) {
    kube.update(name, |pod| pod["status"]["conditions"][0]["status"] = json!(ready));
}

#[test]
fn a_pod_that_becomes_ready_can_be_allocated() {
    let (kube, router) = with_pods(0);
    let mut connection = router.connect();
    for round in 0..5 {
        let name = format!("voice-agent-{round}");
        kube.add_with(&name, |pod| pod["status"]["conditions"][0]["status"] = json!("False"));
        let path = format!("/api/v1/pod/{name}");
        eventually(SECOND, "the pod is known", || router.get(&path).1["is_ready"] == false);
        let call = json!({"call_sid": format!("CA{round}")});
        assert_eq!(
            connection.post("/api/v1/allocate", &call).status,
            503,
            "the pod is not ready yet"
        );
        set_ready(&kube, &name, "True");
        // The watch reports it: the next list is a minute away.
        eventually(SECOND, "the pod is allocated", || {
            connection.post("/api/v1/allocate", &call).status == 200
        });
    }
}

#[test]
fn a_terminating_pod_gets_no_new_call_and_keeps_its_calls() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.terminate("voice-agent-0");
    eventually(SECOND, "the pod is terminating", || {
        router.get("/api/v1/pod/voice-agent-0").1["is_terminating"] == true
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(router.release("CA1").1["was_draining"], true);
    assert_eq!(available(&router), 0);
    let undrained = router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-0"})).1;
    assert_eq!(undrained["is_terminating"], true, "undrain does not clear is_terminating");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
}

#[test]
fn a_pod_that_is_not_ready_gets_no_new_call_and_keeps_its_calls() {
    let (kube, router) = with_pods(2);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    set_ready(&kube, &pod, "False");
    eventually(SECOND, "the pod is not ready", || {
        router.status()["pools"]["gold"]["not_ready"] == 1
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    set_ready(&kube, &pod, "True");
    eventually(SECOND, "the pod is ready", || router.status()["pools"]["gold"]["not_ready"] == 0);
    assert_eq!(available(&router), 1, "its call is still live");
}

#[test]
fn a_restarted_agent_loses_its_calls_a_restarted_sidecar_none() {
    let (kube, router) = with_pods(1);
    let restarts = |container: usize, count: u64| {
        kube.update("voice-agent-0", |pod| {
            pod["status"]["containerStatuses"][container]["restartCount"] = json!(count);
        });
    };
    router.allocate("CA1");
    restarts(1, 3);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    restarts(0, 1);
    eventually(SECOND, "its call ends", || router.get("/api/v1/calls/CA1").0 == 404);
    assert_eq!(available(&router), 1);
}

#[test]
fn agent_container_selects_the_container_of_the_agent() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("AGENT_CONTAINER", "sidecar")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    kube.update("voice-agent-0", |pod| {
        pod["status"]["containerStatuses"][1]["restartCount"] = json!(1);
    });
    eventually(SECOND, "its call ends", || router.get("/api/v1/calls/CA1").0 == 404);
}

#[test]
fn a_pod_replaced_under_the_same_name_loses_its_calls() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.faults(|faults| faults.withhold_events = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-0");
    kube.faults(|faults| faults.withhold_events = false);
    kube.add("voice-agent-1");
    eventually(2 * SECOND, "its call ends", || router.get("/api/v1/calls/CA1").0 == 404);
    assert_eq!(available(&router), 2);
}

#[test]
fn a_deleted_pod_is_removed_with_its_calls() {
    let (kube, router) = with_pods(2);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    kube.delete(&pod);
    eventually(SECOND, "the pod is removed", || router.get(&format!("/api/v1/pod/{pod}")).0 == 404);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
    assert_eq!(available(&router), 1);
}

#[test]
fn a_failed_pod_is_removed_with_its_calls() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.update("voice-agent-0", |pod| pod["status"]["phase"] = json!("Failed"));
    eventually(SECOND, "the pod is removed", || router.get("/api/v1/pod/voice-agent-0").0 == 404);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[test]
fn malformed_pod_objects_are_skipped() {
    let kube = FakeKube::start();
    kube.add_with("bad-status", |pod| pod["status"] = json!("broken"));
    kube.add_with("no-metadata", |pod| pod["metadata"] = Value::Null);
    kube.add_with("no-uid", |pod| pod["metadata"]["uid"] = Value::Null);
    kube.add("voice-agent-0");
    let router = router(&kube, &[("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the valid pod is known", || available(&router) == 1);
    kube.add_with("bad-later", |pod| pod["spec"]["containers"] = json!("broken"));
    kube.faults(|faults| faults.malformed_events = true);
    kube.add("voice-agent-1");
    eventually(2 * SECOND, "the next valid pod is known", || available(&router) == 2);
}

#[test]
fn pods_outside_the_selector_are_ignored() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    kube.add_with("database-0", |pod| pod["metadata"]["labels"]["app"] = json!("database"));
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the matching pod is known", || available(&router) == 1);
    assert_eq!(router.get("/api/v1/pod/database-0").0, 404);
}

#[test]
fn labels_assign_pods_to_tiers_and_merchants() {
    let kube = FakeKube::start();
    let tiers = r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1}}, "default_chain": ["gold", "basic"]}"#;
    let label = |name: &str, label: &str, value: &str| {
        kube.add_with(name, |pod| pod["metadata"]["labels"][label] = json!(value));
    };
    label("a", "smart-router/tier", "basic");
    label("b", "smart-router/merchant", "acme");
    label("c", "smart-router/tier", "nowhere");
    kube.add("d");
    let router = router(&kube, &[("TIER_CONFIG", tiers), ("LOG_LEVEL", "off")]);
    let tier = |pod: &str| router.get(&format!("/api/v1/pod/{pod}")).1["tier"].clone();
    eventually(5 * SECOND, "all pods are known", || !tier("d").is_null());
    assert_eq!((tier("a"), tier("b")), (json!("basic"), json!("merchant:acme")));
    assert_eq!((tier("c"), tier("d")), (json!("gold"), json!("basic")));
}

#[test]
fn a_broken_watch_resumes_without_a_list() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    // Nothing else causes a list: no reconciliation and no lost Lease.
    let settings = [("LEADER_ELECTION_ENABLED", "false"), ("RECONCILE_INTERVAL", "1h")];
    let router = router(&kube, &settings);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    let lists = kube.lists();
    // Events may also be delayed.
    kube.faults(|faults| faults.event_delay = Duration::from_millis(300));
    for number in 1..4 {
        kube.drop_watches();
        kube.add(&format!("voice-agent-{number}"));
        eventually(2 * SECOND, "the new pod is known", || available(&router) == number + 1);
    }
    assert_eq!(kube.lists(), lists, "the watch resumed without a list");
}

#[test]
fn a_watch_with_an_expired_version_lists_again() {
    let (kube, router) = with_pods(2);
    kube.faults(|faults| faults.withhold_events = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-2");
    kube.add("voice-agent-3");
    kube.compact();
    kube.faults(|faults| faults.withhold_events = false);
    kube.drop_watches();
    eventually(3 * SECOND, "the missed changes are applied", || available(&router) == 3);
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").0, 404);
}

#[test]
fn failed_requests_to_the_api_server_are_retried() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    for code in [429, 500, 503] {
        kube.faults(|faults| faults.error_responses = Some((code, 2)));
        let router = router(&kube, &[("LOG_LEVEL", "off")]);
        eventually(10 * SECOND, "the pod is known", || available(&router) == 1);
    }
}

#[test]
fn reconciliation_finds_changes_without_watch_events() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    kube.add("voice-agent-1");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "1s")]);
    eventually(5 * SECOND, "both pods are known", || available(&router) == 2);
    router.allocate("CA1");
    router.allocate("CA2");
    kube.faults(|faults| faults.withhold_events = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-2");
    kube.terminate("voice-agent-1");
    eventually(3 * SECOND, "the deleted pod and its call are removed", || {
        router.get("/api/v1/pod/voice-agent-0").0 == 404
    });
    eventually(3 * SECOND, "the new pod is available", || available(&router) == 1);
    assert_eq!(router.status()["active_calls"], 1);
    assert_eq!(router.get("/api/v1/pod/voice-agent-1").1["is_terminating"], true);
}

#[test]
fn five_hundred_pods_added_at_once_fill_the_tiers_exactly() {
    let kube = FakeKube::start();
    let tiers = r#"{"tiers": {"gold": {"target": 120}, "silver": {"target": 200},
        "basic": {"type": "shared", "target": 50}, "acme": {"target": 30}}, "default_chain": ["gold", "silver", "basic"]}"#;
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = router(&kube, &[("TIER_CONFIG", tiers), ("REDIS_URL", &url)]);
    for number in 0..500 {
        kube.add(&format!("voice-agent-{number}"));
    }
    // The store may be too busy for a status while 500 pods are added.
    let assigned = || {
        let status = router.get("/api/v1/status").1;
        let count = |group: &str, name: &str| status[group][name]["assigned"].as_u64().unwrap_or(0);
        [
            count("pools", "gold"),
            count("pools", "silver"),
            count("pools", "basic"),
            count("merchants", "acme"),
        ]
    };
    eventually(10 * SECOND, "all pods are known", || assigned().iter().sum::<u64>() == 500);
    assert_eq!(assigned(), [120, 200, 150, 30]);
}

#[test]
fn a_wiped_redis_is_refilled_from_the_cluster_at_once() {
    let kube = FakeKube::start();
    (0..20).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = router(&kube, &[("REDIS_URL", &url)]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == 20);
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    eventually(5 * SECOND, "all pods are known again", || {
        let (status, response) = router.get("/api/v1/status");
        status == 200 && response["pools"]["gold"]["available"] == 20
    });
}

#[test]
fn idle_pods_move_to_the_tier_below_its_target() {
    let kube = FakeKube::start();
    let tiers = r#"{"tiers": {"gold": {"target": 2}, "silver": {"target": 1}}, "default_chain": ["gold", "silver"]}"#;
    (0..4).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let router = router(&kube, &[("TIER_CONFIG", tiers)]);
    let assigned = |tier: &str| router.status()["pools"][tier]["assigned"].as_u64().unwrap();
    eventually(5 * SECOND, "all pods are known", || assigned("gold") + assigned("silver") == 4);
    kube.delete("voice-agent-0");
    kube.delete("voice-agent-1");
    kube.add("voice-agent-9");
    eventually(5 * SECOND, "gold is full before silver", || {
        assigned("gold") == 2 && assigned("silver") == 1
    });
}

#[test]
fn a_pod_with_a_temporarily_malformed_status_keeps_its_calls() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "500ms"), ("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    let mut good = Value::Null;
    kube.update("voice-agent-0", |pod| {
        good = pod["status"].take();
        pod["status"] = json!("broken");
    });
    let wait_for_reconciliation = || {
        let lists = kube.lists();
        eventually(2 * SECOND, "the pods are reconciled", || kube.lists() > lists + 2);
    };
    wait_for_reconciliation();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    kube.update("voice-agent-0", |pod| pod["status"] = good.take());
    wait_for_reconciliation();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(available(&router), 0);
}

#[test]
fn a_status_without_a_restart_count_ends_no_call() {
    let kube = FakeKube::start();
    kube.add_with("voice-agent-0", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"] = json!(2);
    });
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    let mut statuses = Value::Null;
    kube.update("voice-agent-0", |pod| statuses = pod["status"]["containerStatuses"].take());
    std::thread::sleep(Duration::from_millis(300));
    kube.update("voice-agent-0", |pod| pod["status"]["containerStatuses"] = statuses.take());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn a_pod_replaced_and_deleted_between_events_is_removed() {
    let (kube, router) = with_pods(2);
    router.allocate("CA1");
    router.allocate("CA2");
    kube.faults(|faults| faults.withhold_events = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-0");
    kube.delete("voice-agent-0");
    // The other pod is replaced by a failed one.
    kube.delete("voice-agent-1");
    kube.add_with("voice-agent-1", |pod| pod["status"]["phase"] = json!("Failed"));
    kube.faults(|faults| faults.withhold_events = false);
    kube.add("voice-agent-2");
    eventually(2 * SECOND, "both pods and their calls are removed", || {
        router.get("/api/v1/pod/voice-agent-0").0 == 404
            && router.get("/api/v1/pod/voice-agent-1").0 == 404
    });
    assert_eq!(router.status()["active_calls"], 0);
    assert_eq!(available(&router), 1);
}

#[test]
fn a_watch_rejected_as_expired_lists_again() {
    let (kube, router) = with_pods(1);
    kube.faults(|faults| (faults.withhold_events, faults.expire_with_status) = (true, true));
    kube.add("voice-agent-1");
    kube.compact();
    kube.faults(|faults| faults.withhold_events = false);
    kube.drop_watches();
    eventually(3 * SECOND, "the missed changes are applied", || available(&router) == 2);
}

#[test]
fn the_watch_is_processed_while_a_list_is_read() {
    let kube = FakeKube::start();
    (0..3).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let router = router(&kube, &[("RECONCILE_INTERVAL", "1s")]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == 3);
    let lists = kube.lists();
    kube.faults(|faults| faults.stall_lists = true);
    eventually(2 * SECOND, "a list is being read", || kube.lists() > lists);
    router.allocate("CA1");
    let pod = router.get("/api/v1/calls/CA1").1["pod_name"].as_str().unwrap().to_owned();
    let others: Vec<String> =
        (0..3).map(|number| format!("voice-agent-{number}")).filter(|it| *it != pod).collect();
    kube.terminate(&others[0]);
    kube.delete(&others[1]);
    kube.add(&others[1]);
    kube.add("voice-agent-3");
    let pod_info = |pod: &str| router.get(&format!("/api/v1/pod/{pod}")).1;
    eventually(SECOND, "watch events are applied", || {
        pod_info(&others[0])["is_terminating"] == true
            && pod_info("voice-agent-3")["is_ready"] == true
    });
    assert_eq!(available(&router), 2);
    let busy = router.allocate("CA2")["pod_name"].as_str().unwrap().to_owned();
    // The older list does not undo newer watch events.
    let lists = kube.lists();
    kube.faults(|faults| faults.stall_lists = false);
    eventually(3 * SECOND, "the next list is read", || {
        assert_eq!(router.get("/api/v1/calls/CA2").1["pod_name"], busy);
        assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod);
        assert_eq!(router.get(&format!("/api/v1/pod/{}", others[0])).1["is_terminating"], true);
        kube.lists() > lists + 1
    });
    assert_eq!(available(&router), 1);
}

#[test]
fn the_watch_is_processed_while_lists_fail() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "500ms"), ("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    kube.faults(|faults| faults.fail_lists = true);
    eventually(3 * SECOND, "lists fail", || kube.failed_lists() > 2);
    // Only the watch reports them.
    for number in 1..6u64 {
        kube.add(&format!("voice-agent-{number}"));
        eventually(SECOND, "the new pod is known", || available(&router) == number + 1);
    }
    kube.faults(|faults| (faults.fail_lists, faults.withhold_events) = (false, true));
    kube.add("voice-agent-9");
    eventually(5 * SECOND, "lists succeed again", || available(&router) == 7);
}

/// Returns the number of changes of each reconciliation, from the log.
fn reconciliations(log: &str) -> Vec<u64> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["message"] == "reconciled the store with the cluster")
            .then(|| line["changes"].as_u64().unwrap())
    };
    log.lines().filter_map(line).collect()
}

#[test]
fn reconciling_thousands_of_pods_converges() {
    let kube = FakeKube::start();
    (0..3_000).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let server = RedisServer::start(&[]);
    let (url, api, metrics) = (server.url(), free_port().to_string(), free_port().to_string());
    let config = kube.config.to_str().unwrap();
    let mut settings = vec![
        ("KUBECONFIG", config),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        (
            "TIER_CONFIG",
            r#"{"basic": {"type": "shared", "target": 2000}, "gold": {"target": 1000}}"#,
        ),
        ("HTTP_BIND", "127.0.0.1"),
        ("HTTP_PORT", &api),
        ("METRICS_PORT", &metrics),
        ("REDIS_URL", &url),
        ("RECONCILE_INTERVAL", "2s"),
        ("LOG_LEVEL", "debug"),
        ("LOG_FORMAT", "json"),
    ];
    settings.extend(TIMES);
    let path = testkit::scratch().join("log");
    let log = std::fs::File::create(&path).unwrap();
    let router = Router::start_with(&settings, log.into());
    let converged = || {
        let changes = reconciliations(&std::fs::read_to_string(&path).unwrap());
        changes.ends_with(&[0, 0]).then_some(changes)
    };
    eventually(40 * SECOND, "reconciliation converges", || {
        converged().is_some_and(|changes| changes.iter().any(|changes| *changes > 0))
    });
    let changes = converged().unwrap();
    assert_eq!(changes.iter().sum::<u64>(), 3_000, "{changes:?}");
    assert_eq!(router.status()["pools"]["gold"]["assigned"], 1_000);
}
