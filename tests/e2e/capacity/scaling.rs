//! Scaling of workloads: the leader follows the load, and no call is cut.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{Router, cluster::router, eventually, kube::FakeKube, redis::RedisServer};

const DEPLOYMENTS: &str = "deployments";
const STATEFUL_SETS: &str = "statefulsets";
const START_UP: Duration = Duration::from_millis(300);
/// The usual time of a few decisions, which are 5 s apart.
const DECISIONS: Duration = Duration::from_secs(20);

fn tiers(gold: Value) -> String {
    json!({"tiers": {"gold": gold}}).to_string()
}

fn scaled_router(kube: &FakeKube, tiers: &str, mode: &str, extra: &[(&str, &str)]) -> Router {
    let mut settings = vec![("TIER_CONFIG", tiers), ("SCALING", mode)];
    settings.extend(extra);
    router(kube, &settings)
}

fn gold(router: &Router) -> Value {
    router.get("/api/v1/capacity").1["pools"]["gold"].clone()
}

fn in_service(router: &Router) -> u64 {
    let pool = &router.status()["pools"]["gold"];
    let number = |field: &str| pool[field].as_u64().unwrap_or(0);
    number("assigned") - number("draining") - number("not_ready") - number("quarantined")
}

/// Sets the bounds of the tier. The policy knows no history of these short tests, so that the
/// bounds stand for the forecasts of a longer time.
fn set_bounds(router: &Router, tier: &Value, min: u64, max: u64) {
    let mut tier = tier.clone();
    (tier["min"], tier["max"]) = (json!(min), json!(max));
    let (status, answer) = router.put("/api/v1/tiers", &tiers(tier));
    assert_eq!(status, 200, "{answer}");
}

fn events(router: &Router, kind: &str) -> Vec<Value> {
    let (_, answer) = router.get(&format!("/api/v1/events?event={kind}&limit=1000"));
    let events = answer["events"].as_array().cloned().unwrap_or_default();
    events.into_iter().filter(|event| event["event"] == kind).collect()
}

/// Calls that ended because their pod was removed.
fn cut_calls(router: &Router) -> Vec<Value> {
    let is_cut = |event: &Value| event["detail"].as_str().unwrap_or("").starts_with("pod_gone");
    events(router, "ended").into_iter().filter(is_cut).collect()
}

/// Load rises and falls; one long call stays. The workload follows both ways, no call is refused
/// and none is cut.
fn the_workload_follows_the_load(plural: &'static str, tier: Value, calls_per_pod: u64) {
    let kube = FakeKube::start();
    kube.add_workload(plural, "gold", 2);
    let _controllers = kube.run_controllers(START_UP);
    let router = scaled_router(&kube, &tiers(tier.clone()), "on", &[]);
    eventually(DECISIONS, "the first pods serve", || in_service(&router) == 2);
    let calls: Vec<String> = (0..6 * calls_per_pod).map(|it| format!("CA{it}")).collect();
    let (early, late) = calls.split_at(2 * calls_per_pod as usize);
    early.iter().for_each(|call| drop(router.allocate(call)));
    set_bounds(&router, &tier, 6, 6);
    eventually(DECISIONS, "the workload grows", || in_service(&router) == 6);
    late.iter().for_each(|call| drop(router.allocate(call)));
    // The policy asks for 2 pods; the others leave service and keep their calls.
    set_bounds(&router, &tier, 2, 2);
    eventually(DECISIONS, "surplus pods leave service", || {
        gold(&router)["scaling"]["surplus"] == 4 && in_service(&router) == 2
    });
    assert_eq!(kube.replicas(plural, "gold"), 6, "{}", gold(&router));
    // On the lowest surplus ordinal of a StatefulSet, which blocks none of the others.
    let long = &late[0];
    let short = calls.iter().filter(|call| *call != long);
    short.for_each(|call| assert_eq!(router.release(call).0, 200));
    let long_pod = router.get(&format!("/api/v1/calls/{long}")).1["pod_name"].clone();
    eventually(DECISIONS, "the workload shrinks", || kube.replicas(plural, "gold") < 6);
    assert_eq!(router.get(&format!("/api/v1/calls/{long}")).1["pod_name"], long_pod);
    assert_eq!(router.release(long).0, 200, "the long call is still live");
    eventually(DECISIONS, "the last surplus pods go", || {
        kube.replicas(plural, "gold") == 2 && in_service(&router) == 2
    });
    assert_eq!(cut_calls(&router), [Value::Null; 0]);
    assert_eq!(events(&router, "refused"), [Value::Null; 0]);
    let scaled = events(&router, "scaled");
    assert!(scaled.len() >= 2, "{scaled:?}");
    let workload = format!("{}/gold", plural.trim_end_matches('s'));
    assert!(scaled[0]["detail"].as_str().unwrap().starts_with(&workload), "{scaled:?}");
}

#[test]
fn a_deployment_follows_the_load_and_no_call_is_cut() {
    let tier = json!({"workload": "deployment/gold", "min": 2, "max": 2});
    the_workload_follows_the_load(DEPLOYMENTS, tier, 1);
}

#[test]
fn a_stateful_set_follows_the_load_and_no_call_is_cut() {
    let tier = json!({"workload": "statefulset/gold", "min": 2, "max": 2});
    the_workload_follows_the_load(STATEFUL_SETS, tier, 1);
}

#[test]
fn a_shared_tier_that_spreads_calls_follows_the_load() {
    let tier = json!({"type": "shared", "max_concurrent": 3, "strategy": "spread",
        "workload": "deployment/gold", "min": 2, "max": 2});
    the_workload_follows_the_load(DEPLOYMENTS, tier, 3);
}

/// Seconds until the drain of a pod ends.
fn drained_for(router: &Router, pod: &str) -> u64 {
    let (_, pod) = router.get(&format!("/api/v1/pod/{pod}"));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    pod["draining_until"].as_u64().unwrap_or(0).saturating_sub(now)
}

/// The leader goes, and the workload acts on its last number late.
fn surplus_pods_stay_out_while_a_number_removes_them(plural: &'static str, mode: &str) {
    let mut kube = FakeKube::start();
    kube.add_workload(plural, "gold", 3);
    let controllers = kube.run_controllers(START_UP);
    let workload = format!("{}/gold", plural.trim_end_matches('s'));
    let tier = json!({"workload": workload, "min": 3, "max": 3});
    let router = scaled_router(&kube, &tiers(tier.clone()), mode, &[]);
    eventually(DECISIONS, "the pods serve", || in_service(&router) == 3);
    (0..3).for_each(|call| drop(router.allocate(&format!("CA{call}"))));
    set_bounds(&router, &tier, 1, 1);
    eventually(DECISIONS, "surplus pods leave service", || in_service(&router) == 1);
    let (_, pods) = router.get("/api/v1/pods");
    let names =
        pods["pods"].as_array().unwrap().iter().map(|pod| pod["pod_name"].as_str().unwrap());
    let surplus: Vec<&str> = names.filter(|pod| drained_for(&router, pod) > 0).collect();
    assert_eq!(surplus.len(), 2, "{pods}");
    // With calls they are removed by no number: they return soon if no leader follows.
    assert!(surplus.iter().all(|pod| drained_for(&router, pod) <= 60), "{pods}");
    drop(controllers);
    (0..3).for_each(|call| drop(router.release(&format!("CA{call}"))));
    eventually(DECISIONS, "the number falls", || match mode {
        "on" => kube.replicas(plural, "gold") == 1,
        _ => gold(&router)["desired"] == 1,
    });
    kube.stop();
    assert!(surplus.iter().all(|pod| drained_for(&router, pod) > 1_800), "{pods}");
    eventually(DECISIONS * 2, "no decision is reported", || {
        router.get("/api/v1/capacity").0 == 503
    });
    let metrics = router.connect_as_admin().get("/metrics").text();
    assert!(!metrics.contains("smart_router_desired_pods{"), "{metrics}");
    assert_eq!(in_service(&router), 1);
}

#[test]
fn surplus_pods_of_a_deployment_stay_out_while_a_number_removes_them() {
    surplus_pods_stay_out_while_a_number_removes_them(DEPLOYMENTS, "on");
}

#[test]
fn surplus_pods_of_a_stateful_set_stay_out_while_a_number_removes_them() {
    surplus_pods_stay_out_while_a_number_removes_them(STATEFUL_SETS, "external");
}

#[test]
fn surplus_pods_return_after_their_tier_lost_its_workload() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 3);
    let _controllers = kube.run_controllers(START_UP);
    let tier = json!({"workload": "deployment/gold", "min": 3, "max": 3});
    let router = scaled_router(&kube, &tiers(tier.clone()), "on", &[]);
    eventually(DECISIONS, "the pods serve", || in_service(&router) == 3);
    (0..3).for_each(|call| drop(router.allocate(&format!("CA{call}"))));
    set_bounds(&router, &tier, 1, 1);
    eventually(DECISIONS, "surplus pods leave service", || in_service(&router) == 1);
    let (status, answer) = router.put("/api/v1/tiers", &tiers(json!({"target": 3})));
    assert_eq!(status, 200, "{answer}");
    eventually(DECISIONS, "the pods return", || in_service(&router) == 3);
}

#[test]
fn pods_of_a_former_workload_leave_the_tier() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "old", 2);
    kube.add_workload(DEPLOYMENTS, "new", 3);
    let _controllers = kube.run_controllers(START_UP);
    let tiers = |workload: &str| {
        json!({"tiers": {"gold": {"workload": workload}, "basic": {}}, "default_chain": ["gold", "basic"]})
            .to_string()
    };
    let extra = [("RECONCILE_INTERVAL", "1s")];
    let router = scaled_router(&kube, &tiers("deployment/old"), "off", &extra);
    let assigned = |pool: &str| router.status()["pools"][pool]["assigned"].clone();
    eventually(DECISIONS, "the pods are assigned", || {
        assigned("gold") == 2 && assigned("basic") == 3
    });
    let pod = router.allocate("CA1")["pod_name"].clone();
    assert!(pod.as_str().unwrap().starts_with("old"), "{pod}");
    let (status, answer) = router.put("/api/v1/tiers", &tiers("deployment/new"));
    assert_eq!(status, 200, "{answer}");
    eventually(DECISIONS, "the busy pod of the former workload stays", || {
        assigned("gold") == 4 && assigned("basic") == 1
    });
    assert_eq!(router.release("CA1").0, 200);
    eventually(DECISIONS, "it leaves after its call", || {
        assigned("gold") == 3 && assigned("basic") == 2
    });
}

#[test]
fn surplus_pods_return_when_demand_rises_again() {
    let kube = FakeKube::start();
    kube.add_workload(STATEFUL_SETS, "gold", 4);
    let _controllers = kube.run_controllers(START_UP);
    let tier = json!({"workload": "statefulset/gold", "min": 4, "max": 4});
    let router = scaled_router(&kube, &tiers(tier.clone()), "on", &[]);
    eventually(DECISIONS, "the pods serve", || in_service(&router) == 4);
    (0..4).for_each(|call| drop(router.allocate(&format!("CA{call}"))));
    set_bounds(&router, &tier, 1, 1);
    eventually(DECISIONS, "surplus pods leave service", || in_service(&router) == 1);
    // An operator's drain stays, whatever the scaler decides.
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": "gold-3"})).0, 200);
    set_bounds(&router, &tier, 3, 3);
    eventually(DECISIONS, "the other pods return", || in_service(&router) == 3);
    let (_, drained) = router.get("/api/v1/pod/gold-3");
    assert_eq!(drained["is_draining"], true, "{drained}");
    assert_eq!(cut_calls(&router), [Value::Null; 0]);
}

#[test]
fn a_dry_run_reports_changes_and_writes_nothing() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 2);
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold", "min": 5, "max": 5}));
    let router = scaled_router(&kube, &tiers, "dry-run", &[]);
    eventually(DECISIONS, "the change is reported", || {
        events(&router, "scaled").iter().any(|event| {
            event["detail"] == "deployment/gold 2 5 min dry_run" && event["pool"] == "pool:gold"
        })
    });
    assert_eq!(kube.scale_writes(), []);
    assert_eq!(kube.replicas(DEPLOYMENTS, "gold"), 2);
    assert_eq!(gold(&router)["scaling"]["mode"], "dry-run");
}

#[test]
fn a_dry_run_reports_another_autoscaler() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 2);
    kube.add_autoscaler("keda-hpa-gold", "Deployment", "gold");
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold"}));
    let router = scaled_router(&kube, &tiers, "dry-run", &[]);
    eventually(DECISIONS, "the conflict is reported", || {
        let conflict = &gold(&router)["scaling"]["conflict"];
        conflict.as_str().unwrap_or("").contains("keda-hpa-gold")
    });
    kube.set_replicas(DEPLOYMENTS, "gold", 4);
    kube.remove("horizontalpodautoscalers", "default", "keda-hpa-gold");
    eventually(DECISIONS * 2, "no conflict is left", || {
        let scaling = &gold(&router)["scaling"];
        scaling["replicas"] == 4 && scaling["conflict"].is_null()
    });
    assert_eq!(kube.scale_writes(), []);
}

#[test]
fn another_autoscaler_of_the_workload_is_reported_and_left_alone() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 2);
    kube.add_autoscaler("keda-hpa-gold", "Deployment", "gold");
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold", "min": 4, "max": 4}));
    let router = scaled_router(&kube, &tiers, "on", &[]);
    let reported = || gold(&router)["scaling"]["conflict"].as_str().unwrap_or("").to_owned();
    eventually(DECISIONS, "the conflict is reported", || {
        reported().contains("keda-hpa-gold of the ScaledObject gold")
    });
    assert_eq!(kube.scale_writes(), []);
    let metrics = router.connect_as_admin().get("/metrics").text();
    assert!(metrics.contains("smart_router_scaling_blocked{pool=\"gold\"} 1"), "{metrics}");
    kube.remove("horizontalpodautoscalers", "default", "keda-hpa-gold");
    eventually(DECISIONS * 2, "the router scales", || kube.replicas(DEPLOYMENTS, "gold") == 4);
}

#[test]
fn a_workload_that_cannot_be_scaled_is_reported() {
    let kube = FakeKube::start();
    let tiers = tiers(json!({"workload": "statefulset/gold", "min": 3, "max": 3}));
    let router = scaled_router(&kube, &tiers, "on", &[]);
    let reported = |text: &str| {
        let text = text.to_owned();
        eventually(DECISIONS, &format!("{text} is reported"), || {
            gold(&router)["scaling"]["error"].as_str().unwrap_or("").contains(&text)
        });
    };
    reported("not found");
    kube.faults(|faults| faults.forbidden_paths.push("/scale".into()));
    kube.add_workload(STATEFUL_SETS, "gold", 1);
    reported("needs a Role that allows get on statefulsets/scale (apps)");
    kube.faults(|faults| {
        faults.forbidden_paths.clear();
        faults.scale_error = Some((422, "spec.replicas: exceeded quota".into()));
    });
    reported("exceeded quota");
    kube.faults(|faults| faults.scale_error = None);
    eventually(DECISIONS, "the router scales", || kube.replicas(STATEFUL_SETS, "gold") == 3);
    eventually(DECISIONS, "the error is gone", || gold(&router)["scaling"]["error"].is_null());
}

#[test]
fn replicas_that_a_person_changes_are_left_alone() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 1);
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold", "min": 3, "max": 3}));
    let router = scaled_router(&kube, &tiers, "on", &[]);
    eventually(DECISIONS, "the router scales", || kube.replicas(DEPLOYMENTS, "gold") == 3);
    kube.set_replicas(DEPLOYMENTS, "gold", 5);
    let conflict = || gold(&router)["scaling"]["conflict"].as_str().unwrap_or("").to_owned();
    eventually(DECISIONS, "the change is reported", || conflict().contains("from 3 to 5"));
    kube.set_replicas(DEPLOYMENTS, "gold", 0);
    eventually(DECISIONS, "the pause is reported", || conflict().contains("paused"));
    assert_eq!(kube.scale_writes().len(), 1, "the router has not written again");
}

#[test]
fn replicas_that_a_person_changes_before_the_first_write_are_left_alone() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 3);
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold", "min": 3, "max": 3}));
    let router = scaled_router(&kube, &tiers, "on", &[]);
    eventually(DECISIONS, "the pods serve", || {
        in_service(&router) == 3 && gold(&router)["scaling"]["replicas"] == 3
    });
    // Each step reads the replicas once.
    let reads = kube.scale_reads();
    eventually(DECISIONS, "a step found the desired number", || kube.scale_reads() > reads + 2);
    kube.set_replicas(DEPLOYMENTS, "gold", 5);
    eventually(DECISIONS, "the change is reported", || {
        let conflict = &gold(&router)["scaling"]["conflict"];
        conflict.as_str().unwrap_or("").contains("from 3 to 5")
    });
    assert_eq!(kube.scale_writes(), []);
    assert_eq!(kube.replicas(DEPLOYMENTS, "gold"), 5);
}

#[test]
fn another_leader_continues_to_scale_down() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add_workload(DEPLOYMENTS, "gold", 5);
    let _controllers = kube.run_controllers(START_UP);
    let tiers = tiers(json!({"workload": "deployment/gold", "min": 1, "max": 1}));
    let url = server.url();
    let redis = [("REDIS_URL", url.as_str())];
    let first = scaled_router(&kube, &tiers, "on", &redis);
    eventually(DECISIONS, "the pods serve", || in_service(&first) >= 1);
    let call = first.allocate("CA1");
    eventually(DECISIONS, "pods leave service", || {
        events(&first, "drained")
            .iter()
            .any(|event| event["detail"].as_str().unwrap_or("").ends_with("surplus"))
    });
    let second = scaled_router(&kube, &tiers, "on", &redis);
    drop(first);
    eventually(DECISIONS * 2, "the workload shrinks", || kube.replicas(DEPLOYMENTS, "gold") <= 2);
    assert_eq!(cut_calls(&second), [Value::Null; 0]);
    assert_eq!(second.get("/api/v1/calls/CA1").1["pod_name"], call["pod_name"]);
    assert_eq!(second.release("CA1").0, 200);
}

/// The time in which a forecast follows: the assumed start-up time of the first minutes is 60 s.
const FORECASTS: Duration = Duration::from_secs(240);

/// No bounds: the forecast alone moves the workload. Calls arrive, stay and end.
#[test]
fn the_forecast_alone_scales_a_workload_up_and_down() {
    const CALLS: u64 = 20;
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 1);
    let _controllers = kube.run_controllers(START_UP);
    let router = scaled_router(&kube, &tiers(json!({"workload": "deployment/gold"})), "on", &[]);
    eventually(DECISIONS, "the first pod serves", || in_service(&router) == 1);
    let replicas = || kube.replicas(DEPLOYMENTS, "gold");
    for call in 0..CALLS {
        // A call arrives once the policy had the time to start a pod for it.
        eventually(FORECASTS, "a pod is warm", || in_service(&router) > call);
        router.allocate(&format!("CA{call}"));
    }
    eventually(FORECASTS, "the workload exceeds the calls", || {
        replicas() > CALLS && gold(&router)["reason"] == "forecast"
    });
    let most = replicas();
    for call in 1..CALLS {
        assert_eq!(router.release(&format!("CA{call}")).0, 200);
    }
    eventually(FORECASTS, "the workload shrinks", || replicas() < most.min(CALLS));
    assert_eq!(cut_calls(&router), [Value::Null; 0]);
    assert_eq!(events(&router, "refused"), [Value::Null; 0]);
    assert_eq!(router.release("CA0").0, 200, "the first call is still live");
}

/// Acts as an external autoscaler: sets the replicas to the published number.
fn follow_published(kube: &FakeKube, router: &Router) -> u64 {
    let published = gold(router)["desired"].as_u64();
    if let Some(number) = published {
        kube.set_replicas(DEPLOYMENTS, "gold", number);
    }
    published.unwrap_or(0)
}

#[test]
fn an_external_autoscaler_that_follows_the_published_number_cuts_no_call() {
    let kube = FakeKube::start();
    kube.add_workload(DEPLOYMENTS, "gold", 2);
    kube.add_autoscaler("keda-hpa-gold", "Deployment", "gold");
    let _controllers = kube.run_controllers(START_UP);
    let tier = json!({"workload": "deployment/gold", "min": 2, "max": 2});
    let router = scaled_router(&kube, &tiers(tier.clone()), "external", &[]);
    eventually(DECISIONS, "the first pods serve", || in_service(&router) == 2);
    set_bounds(&router, &tier, 6, 6);
    eventually(DECISIONS, "the workload grows", || {
        follow_published(&kube, &router) == 6 && in_service(&router) == 6
    });
    let calls: Vec<String> = (0..6).map(|call| format!("CA{call}")).collect();
    calls.iter().for_each(|call| drop(router.allocate(call)));
    set_bounds(&router, &tier, 2, 2);
    eventually(DECISIONS, "surplus pods leave service", || {
        assert_eq!(follow_published(&kube, &router), 6, "all pods have calls");
        in_service(&router) == 2
    });
    for call in &calls {
        assert_eq!(router.release(call).0, 200, "{call} is still live");
    }
    eventually(DECISIONS, "the workload shrinks", || {
        follow_published(&kube, &router) == 2 && in_service(&router) == 2
    });
    assert_eq!(cut_calls(&router), [Value::Null; 0]);
    assert_eq!(kube.scale_writes(), [], "the router writes no replicas");
    assert!(gold(&router)["scaling"]["conflict"].is_null(), "{}", gold(&router));
}
