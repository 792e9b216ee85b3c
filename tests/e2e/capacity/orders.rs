//! Prescale orders, bounds of tiers, metrics and commands.

use serde_json::json;

use super::*;
use testkit::{Router, program, redis::RedisServer, scratch};

const TIERS: &str =
    r#"{"gold": {"target": 2, "max": 50}, "basic": {"type": "shared", "target": 1}}"#;

fn order(router: &Router, body: Value) -> Value {
    let (status, answer) = router.post("/api/v1/prescale", body);
    assert_eq!(status, 200, "{answer}");
    answer["order"].clone()
}

fn orders(router: &Router) -> Vec<Value> {
    let (status, answer) = router.get("/api/v1/prescale");
    assert_eq!(status, 200, "{answer}");
    answer["orders"].as_array().unwrap().clone()
}

fn delete(router: &Router, id: &str) -> (u16, Value) {
    let path = format!("/api/v1/prescale/{id}");
    router.connect_as_admin().send("DELETE", &path, &[], b"").json()
}

#[test]
fn a_prescale_order_raises_the_decision_until_it_is_deleted() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let start = || Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", TIERS)]);
    let (first, second) = (start(), start());
    let placed = order(&second, json!({"pool": "gold", "pods": 40, "for": "2h"}));
    let id = placed["id"].as_str().unwrap();
    assert_eq!((&placed["pool"], &placed["pods"]), (&json!("gold"), &json!(40)));
    for router in [&first, &second] {
        let gold = wait_for(router, "gold", "the order is in force", |it| it["desired"] == 40);
        assert_eq!((&gold["reason"], &gold["policy"]), (&json!("prescale"), &json!(40)));
    }
    assert_ne!(pool(&first, "basic").unwrap()["reason"], "prescale");
    assert_eq!(orders(&first), std::slice::from_ref(&placed));
    let (_, events) = first.get("/api/v1/events?event=prescale_set");
    let detail = events["events"][0]["detail"].as_str().unwrap();
    assert!(detail.starts_with("40 "), "{events}");
    assert_eq!(delete(&first, id).0, 200);
    assert_eq!(orders(&second), [json!(null); 0]);
    wait_for(&first, "gold", "the order is gone", |it| it["reason"] != "prescale");
    assert_eq!(delete(&first, id).0, 404);
    // An order above the upper bound.
    let body = json!({"pool": "gold", "pods": 60, "until": "2999-01-01T00:00:00Z"});
    assert_eq!(first.post("/api/v1/prescale", body).0, 400, "more than a year");
    let (_, answer) =
        first.post("/api/v1/prescale", json!({"pool": "gold", "pods": 60, "for": "1h"}));
    assert!(answer["warnings"][0].as_str().unwrap().contains("max of gold is 50"), "{answer}");
    let gold = wait_for(&second, "gold", "the upper bound holds", |it| it["reason"] == "max");
    assert_eq!(gold["desired"], 50);
}

#[test]
fn prescale_orders_survive_a_restart_of_the_embedded_store_and_expire() {
    let directory = scratch();
    let settings = [("DATA_DIR", directory.to_str().unwrap()), ("TIER_CONFIG", TIERS)];
    let router = Router::start(&settings);
    let kept = order(&router, json!({"pool": "gold", "pods": 30, "for": "1h"}));
    order(&router, json!({"pool": "basic", "pods": 30, "for": "300ms"}));
    let router = router.kill_and_restart();
    wait_for(&router, "gold", "the order is in force", |it| it["reason"] == "prescale");
    eventually(SECOND, "the short order has expired", || orders(&router) == [kept.clone()]);
}

#[test]
fn the_number_of_prescale_orders_is_limited() {
    let router = Router::start(&[]);
    let body = json!({"pool": "gold", "pods": 1, "for": "1h"});
    for _ in 0..100 {
        order(&router, body.clone());
    }
    let (status, answer) = router.post("/api/v1/prescale", body);
    assert_eq!(status, 409, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("100 prescale orders"), "{answer}");
    assert_eq!(orders(&router).len(), 100);
}

#[test]
fn bounds_of_tiers_limit_the_decisions_and_survive_in_both_stores() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let directory = scratch();
    for store in [("REDIS_URL", url.as_str()), ("DATA_DIR", directory.to_str().unwrap())] {
        let router = Router::start(&[store, ("TIER_CONFIG", r#"{"gold": {"target": 1}}"#)]);
        let document = r#"{"tiers": {"gold": {"target": 1, "min": 17, "max": 19}}}"#;
        let (status, answer) = router.put("/api/v1/tiers", document);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["warnings"], json!([]), "{answer}");
        let gold = wait_for(&router, "gold", "the bounds hold", |it| {
            (17..=19).contains(&number(it, "desired"))
        });
        assert_eq!(gold["calls_per_pod"], 1);
        let bad = r#"{"tiers": {"gold": {"min": 5, "max": 3}}}"#;
        let (status, answer) = router.put("/api/v1/tiers", bad);
        assert_eq!(status, 400);
        assert!(answer["error"].as_str().unwrap().contains("min 5 is above max 3"), "{answer}");
        let router = router.kill_and_restart();
        let (_, tiers) = router.get("/api/v1/tiers");
        assert_eq!(tiers["tiers"]["gold"]["max"], 19, "{tiers}");
    }
}

#[test]
fn metrics_and_commands_show_the_capacity() {
    let router = Router::start(&[("TIER_CONFIG", TIERS)]);
    wait_for(&router, "gold", "decisions are taken", |_| true);
    let metrics = router.connect().get("/metrics").text();
    for name in [
        "smart_router_desired_pods{pool=\"gold\"} ",
        "smart_router_capacity_ready_pods{pool=\"gold\"} 2",
        "smart_router_capacity_pods_not_ready{pool=\"basic\"} 0",
        "smart_router_capacity_at_max{pool=\"gold\"} 0",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    let url = format!("http://{}", router.address);
    let run = |args: &[&str]| {
        let output = program(&[("SMART_ROUTER_URL", &url)]).args(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let (code, text, _) = run(&["capacity"]);
    assert!(code == 0 && text.contains("DESIRED") && text.contains("gold"), "{text}");
    let (code, text, error) = run(&["prescale", "set", "gold", "60", "--for", "4h"]);
    assert_eq!(code, 0, "{error}");
    assert!(text.contains("at least 60 pods in gold for 4h"), "{text}");
    assert!(error.contains("max of gold is 50"), "{error}");
    let (_, text, _) = run(&["prescale"]);
    let id = text.lines().nth(1).unwrap().split_whitespace().next().unwrap();
    let (code, text, _) = run(&["prescale", "delete", id]);
    assert_eq!((code, text), (0, format!("order {id} is deleted\n")));
    assert_eq!(run(&["prescale", "delete", id]).0, 3);
    assert_eq!(run(&["prescale", "set", "nowhere", "1", "--for", "1h"]).0, 3);
    let (code, _, error) = run(&["prescale", "set", "gold", "1"]);
    assert!(code == 2 && error.contains("--for") && error.contains("--until"), "{error}");
    let both = ["prescale", "set", "gold", "1", "--for", "1h", "--until", "2999999999"];
    assert_eq!(run(&both).0, 2);
    let (_, text, _) = run(&["prescale", "set", "gold", "1", "--for", "1s"]);
    assert!(text.ends_with("at least 1 pods in gold for 1s\n"), "{text}");
    assert_eq!(run(&["prescale", "set", "gold", "0", "--for", "1h"]).0, 1);
}

#[test]
fn orders_under_a_key_of_another_type_are_replaced() {
    let server = RedisServer::start(&[]);
    let router = Router::start(&[("REDIS_URL", &server.url())]);
    let mut redis = server.connection();
    redis::cmd("SET").arg("voice:prescale").arg("x").exec(&mut redis).unwrap();
    assert_eq!(router.get("/api/v1/prescale").1["orders"], json!([]));
    let path = "/api/v1/prescale/00000000";
    assert_eq!(router.connect().send("DELETE", path, &[], b"").json().0, 404);
    let body = json!({"pool": "gold", "pods": 4, "for": "1h"});
    let (status, answer) = router.post("/api/v1/prescale", body);
    assert_eq!(status, 200, "{answer}");
    let (_, known) = router.get("/api/v1/prescale");
    assert_eq!(known["orders"], json!([answer["order"]]));
}
