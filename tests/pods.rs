use std::{fs, time::Duration};

use serde_json::json;

use crate::support::{Router, eventually, scratch};

const BASE: (&str, &str) = ("VOICE_AGENT_BASE_URL", "wss://voice.example.com");

#[test]
fn listed_pods_fill_the_tiers_in_order() {
    let tiers = r#"{"tiers": {"gold": {"target": 1}, "basic": {"type": "shared", "target": 1}}, "default_chain": ["gold", "basic"]}"#;
    let router = Router::start(&[
        BASE,
        ("PODS", "a=10.0.0.1:9000,b=10.0.0.2,c=10.0.0.3"),
        ("TIER_CONFIG", tiers),
    ]);
    let status = router.status();
    assert_eq!(status["pools"]["gold"]["assigned"], 1);
    assert_eq!(status["pools"]["basic"]["assigned"], 2);
    assert_eq!(router.get("/api/v1/pod/a").1["address"], "10.0.0.1:9000");
    assert_eq!(router.get("/api/v1/pod/b").1["address"], "10.0.0.2:8000");
    assert_eq!(
        router.allocate("CA1")["ws_url"],
        "wss://voice.example.com/ws/pod/a/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
    );
    assert_eq!(router.get("/ws/pod/a/agent").0, 404, "only simulated agents live here");
}

#[test]
fn a_file_of_pods_is_followed_and_a_leaving_pod_keeps_its_call() {
    let directory = scratch();
    let file = directory.join("pods");
    fs::write(&file, "a=h:1\n").unwrap();
    let path = file.to_str().unwrap();
    let router = Router::start(&[BASE, ("PODS_FILE", path), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    router.allocate("CA1");

    fs::write(&file, "b=h:2 # the next one\n").unwrap();
    eventually(Duration::from_secs(4), "b joins", || router.get("/api/v1/pod/b").0 == 200);
    eventually(Duration::from_secs(4), "a leaves", || {
        router.get("/api/v1/pod/a").1["is_terminating"] == true
    });
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], "a");
    assert_eq!(router.allocate("CA2")["pod_name"], "b");
    router.post("/api/v1/undrain", json!({"pod_name": "a"}));
    assert_eq!(
        router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0,
        503,
        "undrain does not lift it"
    );

    assert_eq!(router.release("CA1").1["was_draining"], true);
    eventually(Duration::from_secs(4), "a is forgotten", || router.get("/api/v1/pod/a").0 == 404);

    fs::write(&file, "b=h:2\nnonsense\n").unwrap();
    std::thread::sleep(Duration::from_millis(1_500));
    assert_eq!(router.get("/api/v1/pod/b").0, 200, "a bad list changes nothing");
}

#[test]
fn pods_move_to_the_tiers_that_miss_them() {
    let router = Router::start(&[
        BASE,
        ("PODS", "a=h,b=h,c=h,d=h"),
        ("TIER_CONFIG", r#"{"gold": 1, "iron": 3}"#),
        ("RECONCILE_INTERVAL", "1s"),
    ]);
    router.put("/api/v1/tiers", r#"{"gold": 3, "iron": 1}"#);
    eventually(Duration::from_secs(4), "gold has three", || {
        router.status()["pools"]["gold"]["assigned"] == 3
    });
    assert_eq!(router.status()["pools"]["iron"]["assigned"], 1);
}
