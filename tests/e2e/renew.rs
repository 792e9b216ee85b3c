use std::time::Duration;

use serde_json::json;

use testkit::{Router, WITHOUT_GATEWAY, eventually, redis::unix_millis};

#[test]
fn a_renewed_call_outlives_its_lease() {
    let router = Router::start(&[("LEASE_TTL", "2s"), WITHOUT_GATEWAY]);
    router.allocate("CA1");
    router.allocate("CA2");
    eventually(Duration::from_secs(5), "the lease of CA2 expires", || {
        let (status, response) = router.post("/api/v1/renew", json!({"call_sid": "CA1"}));
        assert_eq!((status, &response["renewed"]), (200, &json!(1)), "{response}");
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(router.post("/api/v1/renew", json!({"call_sid": "CA2"})).0, 404);
}

#[test]
fn a_repeated_allocation_does_not_renew_the_lease() {
    let router = Router::start(&[WITHOUT_GATEWAY]);
    router.allocate("CA1");
    let before = router.get("/api/v1/calls/CA1").1["lease_expires_at"].clone();
    // The response has a resolution of one second.
    let began = unix_millis() / 1_000;
    eventually(Duration::from_secs(2), "the next second", || unix_millis() / 1_000 > began);
    router.allocate("CA1");
    assert_eq!(router.get("/api/v1/calls/CA1").1["lease_expires_at"], before);
    router.post("/api/v1/renew", json!({"call_sid": "CA1"}));
    assert_ne!(router.get("/api/v1/calls/CA1").1["lease_expires_at"], before);
}

#[test]
fn a_batch_renewal_reports_unknown_calls() {
    let router = Router::start(&[("LEASE_TTL", "2s")]);
    // A router that started empty re-registers unknown calls for one LEASE_TTL.
    eventually(Duration::from_secs(4), "the re-registration window ends", || {
        let renew = json!({"pod_name": "voice-agent-0", "call_sids": ["CA0"]});
        let is_unknown = router.post("/api/v1/renew", renew).1["unknown"] == json!(["CA0"]);
        router.release("CA0");
        is_unknown
    });
    let pod = router.allocate("CA1")["pod_name"].clone();
    router.allocate("CA2");
    let (status, response) =
        router.post("/api/v1/renew", json!({"pod_name": pod, "call_sids": ["CA1", "CA2", "CA9"]}));
    assert_eq!(status, 200);
    assert_eq!((&response["renewed"], &response["unknown"]), (&json!(1), &json!(["CA2", "CA9"])));
    let (status, response) =
        router.post("/api/v1/renew", json!({"pod_name": "unknown-pod", "call_sids": ["CA1"]}));
    assert_eq!((status, &response["unknown"]), (200, &json!(["CA1"])));
}

#[test]
fn a_renewal_registers_an_unknown_call_after_an_empty_start() {
    let router = Router::start(&[]);
    let renew = |calls: &[&str]| {
        router.post("/api/v1/renew", json!({"pod_name": "voice-agent-0", "call_sids": calls})).1
    };
    assert_eq!(renew(&["CA1"])["registered"], json!(["CA1"]));
    assert_eq!(router.get("/api/v1/calls/CA1").1["pod_name"], "voice-agent-0");
    assert_eq!(
        renew(&["CA1", "CA2"])["unknown"],
        json!(["CA2"]),
        "an exclusive pod takes one call"
    );
    assert_eq!(router.allocate("CA3")["source_pool"], "pool:standard");
}
