//! Capacity in a cluster: the leader decides, and pods start.

use serde_json::json;

use super::*;
use testkit::{cluster::router, kube::FakeKube, redis::RedisServer};

fn not_ready(pod: &mut Value) {
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
}

fn ready(pod: &mut Value) {
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
}

#[test]
fn the_leader_decides_and_the_next_one_continues() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add("voice-agent-0");
    let url = server.url();
    let start = |name: &str| router(&kube, &[("REDIS_URL", &url), ("POD_NAME", name)]);
    let mut routers = vec![start("router-0"), start("router-1")];
    let decider = |router: &Router| capacity(router).map(|it| it["router"].clone());
    let is_leader = |router: &Router| router.status()["is_leader"] == true;
    for (round, expected) in [(0, 2), (1, 1)] {
        eventually(STEPS, "the leader decides, and all replicas show it", || {
            let leader = routers.iter().position(is_leader);
            let names: Vec<_> = routers.iter().map(decider).collect();
            leader.is_some() && names.iter().all(|it| *it == names[0] && it.is_some())
        });
        assert_eq!(routers.len(), expected);
        let leader = routers.iter().position(is_leader).unwrap();
        let name = decider(&routers[leader]).unwrap();
        assert!(name.as_str().unwrap().starts_with("router-"), "{name}");
        if round == 0 {
            let mut dead = routers.remove(leader);
            dead.child.kill().unwrap();
            dead.child.wait().unwrap();
            eventually(STEPS, "the other replica decides", || {
                decider(&routers[0]).is_some_and(|next| next != name)
            });
        }
    }
}

#[test]
fn starting_pods_are_counted_and_their_start_up_times_learned() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    let (tiers, gold) = (r#"{"gold": {"target": 9}, "basic": {"target": 9}}"#, "smart-router/tier");
    kube.add_with("voice-agent-0", |pod| pod["metadata"]["labels"][gold] = json!("gold"));
    let router = router(&kube, &[("REDIS_URL", &url), ("TIER_CONFIG", tiers)]);
    let before = wait_for(&router, "gold", "decisions are taken", |it| it["ready"] == 1);
    assert_eq!((&before["starting"], &before["start_up"]), (&json!(0), &json!(60.0)));
    let names: Vec<String> = (1..8).map(|number| format!("voice-agent-{number}")).collect();
    for name in &names {
        kube.add_with(name, |pod| {
            pod["metadata"]["labels"][gold] = json!("gold");
            not_ready(pod);
        });
    }
    wait_for(&router, "gold", "the pods are starting", |it| it["starting"] == 7);
    assert_eq!(pool(&router, "basic").unwrap()["starting"], 0);
    for name in &names {
        kube.update(name, ready);
    }
    // Seven short times outnumber the assumed one by then; a restart of a pod is no start-up.
    let after = wait_for(&router, "gold", "the pods are ready", |it| it["ready"] == 8);
    assert_eq!(after["starting"], 0);
    for number in 8..48 {
        let name = format!("voice-agent-{number}");
        kube.add_with(&name, |pod| {
            pod["metadata"]["labels"][gold] = json!("gold");
            not_ready(pod);
        });
    }
    wait_for(&router, "gold", "more pods are starting", |it| it["starting"] == 40);
    (8..48).for_each(|number| kube.update(&format!("voice-agent-{number}"), ready));
    wait_for(&router, "gold", "start-up times are learned", |it| {
        it["start_up"].as_f64().unwrap() < 59.0
    });
}

#[test]
fn pods_that_never_become_ready_are_reported_and_stop_the_scale_up() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    for number in 0..3 {
        kube.add_with(&format!("voice-agent-{number}"), not_ready);
    }
    let start = || router(&kube, &[("REDIS_URL", &url)]);
    let first = start();
    wait_for(&first, "gold", "decisions are taken", |it| it["starting"] == 3);
    drop(first);
    // The next router continues from a state in which the pods have been starting for long.
    let (mut redis, key) = (server.connection(), "voice:capacity:state:pool:gold");
    let saved: String = redis::cmd("GET").arg(key).query(&mut redis).unwrap();
    let mut saved: Value = serde_json::from_str(&saved).unwrap();
    let starting = &mut saved["state"]["start_ups"]["starting"];
    assert_eq!(starting[0][1], 3, "{starting}");
    starting[0][0] = json!(starting[0][0].as_f64().unwrap() - 400.0);
    redis::cmd("SET").arg(key).arg(saved.to_string()).exec(&mut redis).unwrap();
    let router = start();
    let stuck =
        wait_for(&router, "gold", "the pool is stuck", |it| it["reason"] == "pods_not_ready");
    assert_eq!((&stuck["starting"], &stuck["desired"]), (&json!(3), &json!(4)), "{stuck}");
    let metrics = router.connect().get("/metrics").text();
    assert!(metrics.contains("smart_router_capacity_pods_not_ready{pool=\"gold\"} 1"), "{metrics}");
    kube.update("voice-agent-0", ready);
    wait_for(&router, "gold", "a pod became ready", |it| it["reason"] != "pods_not_ready");
}
