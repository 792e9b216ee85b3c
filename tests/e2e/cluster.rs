//! Pods of a cluster: what each of their states means.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{
    Router,
    cluster::{TIMES, available, router},
    eventually, free_port,
    kube::Kube,
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

/// A cluster with pods, and a router that knows them.
fn with_pods(count: u64) -> (Kube, Router) {
    let kube = Kube::start();
    for number in 0..count {
        kube.add(&format!("voice-agent-{number}"));
    }
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "all pods are known", || available(&router) == count);
    (kube, router)
}

fn set_ready(kube: &Kube, name: &str, ready: &str) {
    kube.update(name, |pod| pod["status"]["conditions"][0]["status"] = json!(ready));
}

#[test]
fn a_pod_that_becomes_ready_can_be_allocated() {
    let (kube, router) = with_pods(0);
    let mut connection = router.connect();
    for round in 0..5 {
        let name = format!("voice-agent-{round}");
        kube.add_with(&name, |pod| pod["status"]["conditions"][0]["status"] = json!("False"));
        let about = format!("/api/v1/pod/{name}");
        eventually(SECOND, "it is known", || router.get(&about).1["is_ready"] == false);
        let call = json!({"call_sid": format!("CA{round}")});
        assert_eq!(connection.post("/api/v1/allocate", &call).status, 503, "it is not ready yet");
        set_ready(&kube, &name, "True");
        // By the watch: the next list is a minute away.
        eventually(SECOND, "it is given", || {
            connection.post("/api/v1/allocate", &call).status == 200
        });
    }
}

#[test]
fn a_terminating_pod_gets_no_call_and_keeps_those_it_has() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.terminate("voice-agent-0");
    eventually(SECOND, "it leaves", || {
        router.get("/api/v1/pod/voice-agent-0").1["is_terminating"] == true
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(router.release("CA1").1["was_draining"], true);
    assert_eq!(available(&router), 0);
    let undrained = router.post("/api/v1/undrain", json!({"pod_name": "voice-agent-0"})).1;
    assert_eq!(undrained["is_terminating"], true, "no undrain lifts it");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
}

#[test]
fn a_pod_that_is_not_ready_gets_no_call_and_keeps_those_it_has() {
    let (kube, router) = with_pods(2);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    set_ready(&kube, &pod, "False");
    eventually(SECOND, "it is out", || router.status()["pools"]["gold"]["not_ready"] == 1);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    set_ready(&kube, &pod, "True");
    eventually(SECOND, "it is back", || router.status()["pools"]["gold"]["not_ready"] == 0);
    assert_eq!(available(&router), 1, "its call is still there");
}

#[test]
fn a_restarted_agent_has_lost_its_calls_and_a_restarted_sidecar_none() {
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
    eventually(SECOND, "its call is over", || router.get("/api/v1/calls/CA1").0 == 404);
    assert_eq!(available(&router), 1);
}

#[test]
fn another_container_may_be_named_as_the_agents() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("AGENT_CONTAINER", "sidecar")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    kube.update("voice-agent-0", |pod| {
        pod["status"]["containerStatuses"][1]["restartCount"] = json!(1);
    });
    eventually(SECOND, "its call is over", || router.get("/api/v1/calls/CA1").0 == 404);
}

#[test]
fn a_pod_replaced_under_its_name_has_lost_its_calls() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.faults(|faults| faults.mute = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-0");
    kube.faults(|faults| faults.mute = false);
    kube.add("voice-agent-1");
    eventually(2 * SECOND, "its call is over", || router.get("/api/v1/calls/CA1").0 == 404);
    assert_eq!(available(&router), 2);
}

#[test]
fn a_deleted_pod_is_forgotten_with_its_calls() {
    let (kube, router) = with_pods(2);
    let pod = router.allocate("CA1")["pod_name"].as_str().unwrap().to_owned();
    kube.delete(&pod);
    eventually(SECOND, "the pod is forgotten", || {
        router.get(&format!("/api/v1/pod/{pod}")).0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
    assert_eq!(available(&router), 1);
}

#[test]
fn a_pod_that_has_run_to_its_end_is_forgotten() {
    let (kube, router) = with_pods(1);
    router.allocate("CA1");
    kube.update("voice-agent-0", |pod| pod["status"]["phase"] = json!("Failed"));
    eventually(SECOND, "the pod is forgotten", || router.get("/api/v1/pod/voice-agent-0").0 == 404);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[test]
fn objects_that_make_no_sense_are_passed_over() {
    let kube = Kube::start();
    kube.add_with("bad-status", |pod| pod["status"] = json!("broken"));
    kube.add_with("no-metadata", |pod| pod["metadata"] = Value::Null);
    kube.add_with("no-uid", |pod| pod["metadata"]["uid"] = Value::Null);
    kube.add("voice-agent-0");
    let router = router(&kube, &[("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the good one is known", || available(&router) == 1);
    kube.add_with("bad-later", |pod| pod["spec"]["containers"] = json!("broken"));
    kube.faults(|faults| faults.garbage = true);
    kube.add("voice-agent-1");
    eventually(2 * SECOND, "the next good one is known", || available(&router) == 2);
}

#[test]
fn other_pods_are_none_of_our_business() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    kube.add_with("database-0", |pod| pod["metadata"]["labels"]["app"] = json!("database"));
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "ours is known", || available(&router) == 1);
    assert_eq!(router.get("/api/v1/pod/database-0").0, 404);
}

#[test]
fn labels_put_pods_where_they_belong() {
    let kube = Kube::start();
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
    eventually(5 * SECOND, "all are known", || !tier("d").is_null());
    assert_eq!((tier("a"), tier("b")), (json!("basic"), json!("merchant:acme")));
    assert_eq!((tier("c"), tier("d")), (json!("gold"), json!("basic")));
}

#[test]
fn a_watch_that_breaks_goes_on_where_it_was() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    // Nothing else makes it list again: no comparison, and no lease that is lost.
    let alone = [("LEADER_ELECTION_ENABLED", "false"), ("RECONCILE_INTERVAL", "1h")];
    let router = router(&kube, &alone);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    let lists = kube.lists();
    // What it tells may come late, too.
    kube.faults(|faults| faults.delay = Duration::from_millis(300));
    for number in 1..4 {
        kube.drop_watches();
        kube.add(&format!("voice-agent-{number}"));
        eventually(2 * SECOND, "the new pod is known", || available(&router) == number + 1);
    }
    assert_eq!(kube.lists(), lists, "nothing had to be listed again");
}

#[test]
fn a_watch_from_too_long_ago_begins_anew() {
    let (kube, router) = with_pods(2);
    kube.faults(|faults| faults.mute = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-2");
    kube.add("voice-agent-3");
    kube.compact();
    kube.faults(|faults| faults.mute = false);
    kube.drop_watches();
    eventually(3 * SECOND, "what was missed is made good", || available(&router) == 3);
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").0, 404);
}

#[test]
fn a_server_that_fails_is_asked_again() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    for code in [429, 500, 503] {
        kube.faults(|faults| faults.answer = Some((code, 2)));
        let router = router(&kube, &[("LOG_LEVEL", "off")]);
        eventually(10 * SECOND, "the pod is known", || available(&router) == 1);
    }
}

#[test]
fn events_that_never_come_are_noticed_by_the_next_comparison() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    kube.add("voice-agent-1");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "1s")]);
    eventually(5 * SECOND, "both are known", || available(&router) == 2);
    router.allocate("CA1");
    router.allocate("CA2");
    kube.faults(|faults| faults.mute = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-2");
    kube.terminate("voice-agent-1");
    eventually(3 * SECOND, "the ghost is gone with its call", || {
        router.get("/api/v1/pod/voice-agent-0").0 == 404
    });
    eventually(3 * SECOND, "the new one is there", || available(&router) == 1);
    assert_eq!(router.status()["active_calls"], 1);
    assert_eq!(router.get("/api/v1/pod/voice-agent-1").1["is_terminating"], true);
}

#[test]
fn five_hundred_pods_that_come_at_once_are_counted_right() {
    let kube = Kube::start();
    let tiers = r#"{"tiers": {"gold": {"target": 120}, "silver": {"target": 200},
        "basic": {"type": "shared", "target": 50}, "acme": {"target": 30}}, "default_chain": ["gold", "silver", "basic"]}"#;
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = router(&kube, &[("TIER_CONFIG", tiers), ("REDIS_URL", &url)]);
    for number in 0..500 {
        kube.add(&format!("voice-agent-{number}"));
    }
    // (a store that 500 pods come to at once may be too busy for a status)
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
    eventually(10 * SECOND, "all are known", || assigned().iter().sum::<u64>() == 500);
    assert_eq!(assigned(), [120, 200, 150, 30]);
}

#[test]
fn a_wiped_redis_is_filled_from_the_cluster_at_once() {
    let kube = Kube::start();
    (0..20).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = router(&kube, &[("REDIS_URL", &url)]);
    eventually(5 * SECOND, "all are known", || available(&router) == 20);
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    eventually(5 * SECOND, "all are known again", || {
        let (status, answer) = router.get("/api/v1/status");
        status == 200 && answer["pools"]["gold"]["available"] == 20
    });
}

#[test]
fn idle_pods_move_to_where_they_are_missing() {
    let kube = Kube::start();
    let tiers = r#"{"tiers": {"gold": {"target": 2}, "silver": {"target": 1}}, "default_chain": ["gold", "silver"]}"#;
    (0..4).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let router = router(&kube, &[("TIER_CONFIG", tiers)]);
    let assigned = |tier: &str| router.status()["pools"][tier]["assigned"].as_u64().unwrap();
    eventually(5 * SECOND, "all are known", || assigned("gold") + assigned("silver") == 4);
    kube.delete("voice-agent-0");
    kube.delete("voice-agent-1");
    kube.add("voice-agent-9");
    eventually(5 * SECOND, "gold is full before silver", || {
        assigned("gold") == 2 && assigned("silver") == 1
    });
}

#[test]
fn a_pod_that_cannot_be_read_for_a_while_keeps_its_calls() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "500ms"), ("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    router.allocate("CA1");
    let mut good = Value::Null;
    kube.update("voice-agent-0", |pod| {
        good = pod["status"].take();
        pod["status"] = json!("broken");
    });
    let compared_again = || {
        let lists = kube.lists();
        eventually(2 * SECOND, "it is compared again", || kube.lists() > lists + 2);
    };
    compared_again();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    kube.update("voice-agent-0", |pod| pod["status"] = good.take());
    compared_again();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(available(&router), 0);
}

#[test]
fn a_status_without_a_count_of_restarts_ends_no_call() {
    let kube = Kube::start();
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
fn a_pod_that_was_replaced_and_deleted_unseen_is_no_ghost() {
    let (kube, router) = with_pods(2);
    router.allocate("CA1");
    router.allocate("CA2");
    kube.faults(|faults| faults.mute = true);
    kube.delete("voice-agent-0");
    kube.add("voice-agent-0");
    kube.delete("voice-agent-0");
    // Another stays as a corpse.
    kube.delete("voice-agent-1");
    kube.add_with("voice-agent-1", |pod| pod["status"]["phase"] = json!("Failed"));
    kube.faults(|faults| faults.mute = false);
    kube.add("voice-agent-2");
    eventually(2 * SECOND, "both are gone with their calls", || {
        router.get("/api/v1/pod/voice-agent-0").0 == 404
            && router.get("/api/v1/pod/voice-agent-1").0 == 404
    });
    assert_eq!(router.status()["active_calls"], 0);
    assert_eq!(available(&router), 1);
}

#[test]
fn a_watch_that_is_refused_as_too_old_begins_anew() {
    let (kube, router) = with_pods(1);
    kube.faults(|faults| (faults.mute, faults.expire) = (true, true));
    kube.add("voice-agent-1");
    kube.compact();
    kube.faults(|faults| faults.mute = false);
    kube.drop_watches();
    eventually(3 * SECOND, "what was missed is made good", || available(&router) == 2);
}

#[test]
fn pods_are_followed_while_all_are_listed_again() {
    let kube = Kube::start();
    (0..3).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let router = router(&kube, &[("RECONCILE_INTERVAL", "1s")]);
    eventually(5 * SECOND, "all are known", || available(&router) == 3);
    let lists = kube.lists();
    kube.faults(|faults| faults.hold_lists = true);
    eventually(2 * SECOND, "a list is being read", || kube.lists() > lists);
    router.allocate("CA1");
    let pod = router.get("/api/v1/calls/CA1").1["pod_name"].as_str().unwrap().to_owned();
    let others: Vec<String> =
        (0..3).map(|number| format!("voice-agent-{number}")).filter(|it| *it != pod).collect();
    kube.terminate(&others[0]);
    kube.delete(&others[1]);
    kube.add(&others[1]);
    kube.add("voice-agent-3");
    let about = |pod: &str| router.get(&format!("/api/v1/pod/{pod}")).1;
    eventually(SECOND, "the watch is still followed", || {
        about(&others[0])["is_terminating"] == true && about("voice-agent-3")["is_ready"] == true
    });
    assert_eq!(available(&router), 2);
    let busy = router.allocate("CA2")["pod_name"].as_str().unwrap().to_owned();
    // And what the list says, which is older, changes nothing of it, until the next is read.
    let lists = kube.lists();
    kube.faults(|faults| faults.hold_lists = false);
    eventually(3 * SECOND, "the next list is read", || {
        assert_eq!(router.get("/api/v1/calls/CA2").1["pod_name"], busy);
        assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], pod);
        assert_eq!(router.get(&format!("/api/v1/pod/{}", others[0])).1["is_terminating"], true);
        kube.lists() > lists + 1
    });
    assert_eq!(available(&router), 1);
}

#[test]
fn pods_are_followed_while_lists_fail() {
    let kube = Kube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[("RECONCILE_INTERVAL", "500ms"), ("LOG_LEVEL", "off")]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    kube.faults(|faults| faults.fail_lists = true);
    eventually(3 * SECOND, "lists fail", || kube.failed_lists() > 2);
    // Only the watch can tell of them.
    for number in 1..6u64 {
        kube.add(&format!("voice-agent-{number}"));
        eventually(SECOND, "the new pod is known", || available(&router) == number + 1);
    }
    kube.faults(|faults| (faults.fail_lists, faults.mute) = (false, true));
    kube.add("voice-agent-9");
    eventually(5 * SECOND, "lists are read again", || available(&router) == 7);
}

/// The changes of each comparison, as the router logs them.
fn comparisons(log: &str) -> Vec<u64> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["message"] == "compared with the cluster").then(|| line["changes"].as_u64().unwrap())
    };
    log.lines().filter_map(line).collect()
}

#[test]
fn thousands_of_pods_are_compared_until_nothing_is_left_to_do() {
    let kube = Kube::start();
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
    let done = || {
        let changes = comparisons(&std::fs::read_to_string(&path).unwrap());
        changes.ends_with(&[0, 0]).then_some(changes)
    };
    eventually(40 * SECOND, "nothing is left to do", || {
        done().is_some_and(|changes| changes.iter().any(|changes| *changes > 0))
    });
    let changes = done().unwrap();
    assert_eq!(changes.iter().sum::<u64>(), 3_000, "{changes:?}");
    assert_eq!(router.status()["pools"]["gold"]["assigned"], 1_000);
}
