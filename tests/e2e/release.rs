use std::{sync::Barrier, thread, time::Duration};

use serde_json::json;

use testkit::{Router, WITHOUT_GATEWAY, eventually};

#[test]
fn a_released_call_frees_its_pod_exactly_once() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    let (status, response) = router.release("CA1");
    assert_eq!(status, 200);
    let expected = json!({
        "success": true, "pod_name": "voice-agent-0", "released_to_pool": "pool:gold", "was_draining": false,
    });
    assert_eq!(response, expected);
    assert_eq!(router.status()["pools"]["gold"]["available"], 1);
    let (status, response) = router.release("CA1");
    assert_eq!((status, response), (404, json!({"error": "call not found"})));
}

#[test]
fn a_late_release_never_frees_a_pod_that_serves_another_call() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    router.allocate("CA1");
    router.release("CA1");
    router.allocate("CA2");
    assert_eq!(router.release("CA1").0, 404);
    let (_, pod) = router.get("/api/v1/pod/voice-agent-0");
    assert_eq!(pod["lease_call_sid"], "CA2");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
}

#[test]
fn a_release_from_another_pod_is_rejected() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    let from =
        |pod: &str| router.post("/api/v1/release", json!({"call_sid": "CA1", "pod_name": pod})).0;
    assert_eq!(from("voice-agent-1"), 404);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(from("voice-agent-0"), 200);
}

#[test]
fn two_simultaneous_releases_free_the_pod_for_one_call() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
    for round in 0..100 {
        let call = format!("CA{round}");
        router.allocate(&call);
        let barrier = Barrier::new(4);
        let post = |path: &'static str, call: String| {
            let mut connection = router.connect();
            barrier.wait();
            connection.post(path, &json!({"call_sid": call})).status
        };
        let (released, allocated) = thread::scope(|scope| {
            let releases = [0, 1].map(|_| scope.spawn(|| post("/api/v1/release", call.clone())));
            let allocations = ["a", "b"].map(|name| {
                scope.spawn(move || post("/api/v1/allocate", format!("{name}{round}")))
            });
            (releases.map(|it| it.join().unwrap()), allocations.map(|it| it.join().unwrap()))
        });
        assert_eq!(released.iter().filter(|status| **status == 200).count(), 1, "{released:?}");
        assert!(allocated.iter().filter(|status| **status == 200).count() <= 1, "{allocated:?}");
        router.release(&format!("a{round}"));
        router.release(&format!("b{round}"));
    }
}

#[test]
fn a_call_without_a_release_ends_with_its_lease() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;
    let settings = [("TIER_CONFIG", tiers), ("LEASE_TTL", "1500ms"), WITHOUT_GATEWAY];
    let router = Router::start(&settings);
    router.allocate("CA1");
    router.allocate("CA2");
    eventually(Duration::from_secs(3), "the lease of CA1 expires", || {
        assert_eq!(router.post("/api/v1/renew", json!({"call_sid": "CA2"})).0, 200);
        router.get("/api/v1/calls/CA1").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    assert_eq!(router.status()["pools"]["basic"]["active_calls"], 1);
    assert_eq!(router.release("CA1").0, 404);
    let metrics = router.connect().get("/metrics").text();
    assert!(
        metrics.contains(r#"smart_router_leases_expired_total{source_pool="pool:basic"} 1"#),
        "{metrics}"
    );
    assert!(metrics.contains("smart_router_zombies_recovered_total 1"), "{metrics}");
}
