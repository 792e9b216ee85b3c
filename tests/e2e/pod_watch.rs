//! Every replica watches the pods of the cluster and acts on them while there is no leader.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use serde_json::{Value, json};

use testkit::cluster::{TIMES, available, router};
use testkit::{Router, eventually, free_port, kube::FakeKube, redis::RedisServer, scratch};

const SECOND: Duration = Duration::from_secs(1);

fn set_app(kube: &FakeKube, pod: &str, app: &str) {
    kube.update(pod, |pod| pod["metadata"]["labels"]["app"] = json!(app));
}

fn is_known(router: &Router, pod: &str) -> bool {
    router.get(&format!("/api/v1/pod/{pod}")).0 == 200
}

#[test]
fn a_pod_relabelled_out_of_the_selector_and_back_is_served_again() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    kube.add("voice-agent-1");
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "both pods are known", || available(&router) == 2);
    let lists = kube.lists();
    for _ in 0..3 {
        set_app(&kube, "voice-agent-0", "debug");
        eventually(5 * SECOND, "the pod is removed", || !is_known(&router, "voice-agent-0"));
        set_app(&kube, "voice-agent-0", "voice-agent");
        eventually(5 * SECOND, "the pod is added again", || is_known(&router, "voice-agent-0"));
    }
    assert_eq!(available(&router), 2);
    assert_eq!(kube.lists(), lists, "the watch suffices, without a list");
}

/// Waits for a leader and returns it with the other replica.
fn leader_and_follower(mut routers: Vec<Router>) -> (Router, Router) {
    let is_leader = |router: &Router| router.status()["is_leader"] == true;
    eventually(10 * SECOND, "one replica leads", || {
        routers.iter().filter(|router| is_leader(router)).count() == 1
    });
    let other = routers.pop().unwrap();
    let first = routers.pop().unwrap();
    if is_leader(&first) { (first, other) } else { (other, first) }
}

fn kill(mut router: Router) {
    router.child.kill().unwrap();
    router.child.wait().unwrap();
}

#[test]
fn calls_get_no_departed_pod_without_a_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    (0..8).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let url = server.url();
    // A Lease that does not expire during the test, so that no other replica becomes leader.
    let times = [("LEADER_ELECTION_DURATION", "10m"), ("LEADER_ELECTION_RENEW_DEADLINE", "9m")];
    let settings = [&[("REDIS_URL", url.as_str())], &times[..]].concat();
    let routers = vec![router(&kube, &settings), router(&kube, &settings)];
    let (leader, other) = leader_and_follower(routers);
    eventually(5 * SECOND, "all pods are known", || available(&other) == 8);
    let ready = |router: &Router| router.metric("smart_router_cluster_ready_pods");
    eventually(5 * SECOND, "the follower watches, too", || ready(&other) == 8);
    kill(leader);
    kube.delete("voice-agent-0");
    kube.terminate("voice-agent-1");
    kube.update("voice-agent-2", |pod| pod["status"]["conditions"][0]["status"] = json!("False"));
    kube.update("voice-agent-3", |pod| pod["status"]["phase"] = json!("Failed"));
    let drained = || other.metric("smart_router_stale_pods_drained_total");
    eventually(5 * SECOND, "departed pods are drained", || drained() >= 3);
    // Calls until no pod is free. This replica drains pods that are not ready only after the
    // leader's last renewal is 2.5 retry periods old, since its own watch may lag.
    let mut round = 0;
    eventually(20 * SECOND, "calls get only pods in service", || {
        round += 1;
        let calls: Vec<String> = (0..9).map(|number| format!("CA{round}-{number}")).collect();
        let pods = calls.iter().filter_map(|call| {
            let (status, response) = other.post("/api/v1/allocate", json!({"call_sid": call}));
            (status == 200).then(|| response["pod_name"].as_str().unwrap().to_owned())
        });
        let pods: BTreeSet<String> = pods.collect();
        let served = pods.len() as u64;
        assert_eq!(other.status()["active_calls"], served, "refused calls hold no pod");
        for pod in ["voice-agent-0", "voice-agent-1", "voice-agent-3"] {
            assert!(!pods.contains(pod), "{pods:?}");
        }
        calls.iter().for_each(|call| drop(other.release(call)));
        pods.iter().all(|pod| pod.ends_with(['4', '5', '6', '7'])) && served == 4
    });
    assert_eq!(drained(), 4, "each pod counts once");
}

#[test]
fn a_call_keeps_its_pod_while_the_pod_terminates_without_a_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    (0..2).for_each(|number| kube.add(&format!("voice-agent-{number}")));
    let url = server.url();
    let times = [("LEADER_ELECTION_DURATION", "10m"), ("LEADER_ELECTION_RENEW_DEADLINE", "9m")];
    let settings = [&[("REDIS_URL", url.as_str())], &times[..]].concat();
    let routers = vec![router(&kube, &settings), router(&kube, &settings)];
    let (leader, other) = leader_and_follower(routers);
    eventually(5 * SECOND, "both pods are known", || available(&other) == 2);
    let allocate = || {
        let response = other.post("/api/v1/allocate", json!({"call_sid": "CA1"})).1;
        response["pod_name"].as_str().unwrap().to_owned()
    };
    let pod = allocate();
    kill(leader);
    kube.terminate(&pod);
    eventually(5 * SECOND, "the pod is drained", || {
        other.metric("smart_router_stale_pods_drained_total") == 1
    });
    assert_eq!(allocate(), pod);
    // Another replica may have just returned this pod, so the allocation must not change.
    kube.delete(&pod);
    eventually(5 * SECOND, "the follower sees the deletion", || {
        other.metric("smart_router_cluster_ready_pods") == 1
    });
    assert_eq!(allocate(), pod);
    other.release("CA1");
}

#[test]
fn indexes_are_audited_without_a_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add("voice-agent-0");
    let url = server.url();
    let settings = [("REDIS_URL", url.as_str()), ("CLEANUP_INTERVAL", "300ms")];
    let routers = vec![router(&kube, &settings), router(&kube, &settings)];
    let (leader, other) = leader_and_follower(routers);
    eventually(5 * SECOND, "the pod is known", || available(&other) == 1);
    kube.faults(|faults| faults.forbidden_path = Some("leases"));
    kill(leader);
    let mut redis = server.connection();
    eventually(20 * SECOND, "the index is repaired", || {
        let pool = "voice:pool:gold:available";
        let is_member: bool =
            redis::cmd("SISMEMBER").arg(pool).arg("voice-agent-0").query(&mut redis).unwrap();
        let () = redis::cmd("DEL").arg(pool).query(&mut redis).unwrap();
        // The key is deleted in every round; one restored key is enough.
        is_member && other.metric("smart_router_zombies_recovered_total") > 0
    });
    kube.faults(|faults| faults.forbidden_path = None);
}

/// Starts a router that logs to the returned file.
fn logged(kube: &FakeKube, extra: &[(&str, &str)]) -> (Router, PathBuf) {
    let (api, metrics) = (free_port().to_string(), free_port().to_string());
    let config = kube.config.to_str().unwrap();
    let mut settings = vec![
        ("KUBECONFIG", config),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        ("HTTP_BIND", "127.0.0.1"),
        ("HTTP_PORT", &api),
        ("METRICS_PORT", &metrics),
    ];
    settings.extend(TIMES);
    settings.extend(extra);
    let path = scratch().join("log");
    let log = std::fs::File::create(&path).unwrap();
    (Router::start_with(&settings, log.into()), path)
}

#[test]
fn a_transient_403_of_the_api_server_is_not_a_missing_role() {
    for path in ["leases", "pods"] {
        let kube = FakeKube::start();
        kube.add("voice-agent-0");
        kube.faults(|faults| faults.forbidden_path = Some(path));
        let (router, log) = logged(&kube, &[]);
        eventually(10 * SECOND, "requests are forbidden", || kube.forbidden() >= 3);
        kube.faults(|faults| faults.forbidden_path = None);
        eventually(10 * SECOND, "the pod is known", || is_known(&router, "voice-agent-0"));
        let log = std::fs::read_to_string(&log).unwrap();
        assert!(log.contains("forbidden"), "{log}");
        assert!(!log.contains("Role"), "{log}");
    }
}

/// Returns whether the live stream reports the cluster as connected.
fn is_connected(router: &Router) -> bool {
    let mut stream = router.connect();
    stream.open_stream("/api/v1/live");
    stream.read_until("event: state\ndata: ", 5 * SECOND);
    let state: Value = serde_json::from_str(&stream.read_until("\n\n", 5 * SECOND)).unwrap();
    state["cluster"]["is_connected"] == true
}

#[test]
fn every_replica_reports_loss_and_return_of_the_cluster() {
    let (mut kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add("voice-agent-0");
    let url = server.url();
    let routers: Vec<_> = (0..3).map(|_| logged(&kube, &[("REDIS_URL", url.as_str())])).collect();
    eventually(10 * SECOND, "one replica leads", || {
        routers.iter().any(|(router, _)| router.status()["is_leader"] == true)
    });
    assert!(routers.iter().all(|(router, _)| is_connected(router)));
    kube.stop();
    for (router, _) in &routers {
        eventually(10 * SECOND, "the live stream reports the loss", || !is_connected(router));
    }
    kube.restart();
    for (router, log) in &routers {
        eventually(10 * SECOND, "the live stream reports the connection", || is_connected(router));
        eventually(10 * SECOND, "the log reports it", || {
            std::fs::read_to_string(log).unwrap().contains("the watch of pods works again")
        });
    }
}
