use std::{collections::HashSet, sync::Barrier, thread};

use serde_json::json;

use testkit::Router;

#[test]
fn the_default_chain_is_gold_then_standard_then_basic() {
    let router = Router::start(&[]);
    let pools = ["pool:gold", "pool:standard", "pool:basic", "pool:basic", "pool:basic"];
    for (number, pool) in pools.iter().enumerate() {
        assert_eq!(router.allocate(&format!("CA{number}"))["source_pool"], *pool);
    }
    let response = router.connect().post("/api/v1/allocate", &json!({"call_sid": "CA9"}));
    assert_eq!(response.header("retry-after"), Some("1"));
    let (status, refusal) = response.json();
    assert_eq!(status, 503);
    assert_eq!(refusal["error"], "no pods available");
    let full = |step: &str| json!({"step": step, "reason": "at_capacity"});
    assert_eq!(refusal["details"]["chain"], json!([full("gold"), full("standard"), full("basic")]));
    assert_eq!(router.status()["active_calls"], 5);
}

#[test]
fn the_allocate_response_has_the_documented_fields() {
    let router = Router::start(&[("VOICE_AGENT_BASE_URL", "wss://voice.example.com/")]);
    let (status, response) = router.post(
        "/api/v1/allocate",
        json!({"call_sid": "CA1", "merchant_id": "9shines", "provider": "plivo", "flow": "v1", "template": "hello", "new": 1}),
    );
    assert_eq!(status, 200);
    let expected = json!({
        "success": true,
        "pod_name": "voice-agent-0",
        "ws_url": "wss://voice.example.com/ws/pod/voice-agent-0/agent/voice/breeze-buddy/plivo/callback/hello",
        "source_pool": "pool:gold",
        "was_existing": false,
    });
    assert_eq!(response, expected);
}

#[test]
fn a_repeated_call_keeps_its_pod_and_gets_a_fresh_url() {
    let router = Router::start(&[]);
    let first = router.allocate("CA1");
    let (status, again) = router.post(
        "/api/v1/allocate",
        json!({"call_sid": "CA1", "template": "other", "merchant_id": ""}),
    );
    assert_eq!((status, &again["was_existing"]), (200, &json!(true)));
    assert_eq!(again["pod_name"], first["pod_name"]);
    assert!(again["ws_url"].as_str().unwrap().ends_with("/twilio/callback/other/v2"));
    assert_eq!(router.status()["active_calls"], 1);
}

#[test]
fn fifty_simultaneous_requests_for_one_call_get_one_pod() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 100}"#)]);
    for round in 0..20 {
        let barrier = Barrier::new(50);
        let pods: HashSet<String> = thread::scope(|scope| {
            let request = || {
                let mut connection = router.connect();
                barrier.wait();
                let (_, response) = connection
                    .post("/api/v1/allocate", &json!({"call_sid": format!("CA{round}")}))
                    .json();
                response["pod_name"].as_str().unwrap().to_owned()
            };
            let requests: Vec<_> = (0..50).map(|_| scope.spawn(request)).collect();
            requests.into_iter().map(|request| request.join().unwrap()).collect()
        });
        assert_eq!(pods.len(), 1, "round {round}: {pods:?}");
    }
    assert_eq!(router.status()["active_calls"], 20);
}

#[test]
fn only_the_merchant_itself_uses_its_dedicated_pool() {
    let tiers =
        r#"{"tiers": {"gold": {"target": 1}, "acme": {"target": 1}}, "default_chain": ["gold"]}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers)]);
    assert_eq!(
        router.put("/api/v1/merchants/shop", r#"{"pool": "acme", "fallback": ["gold"]}"#).0,
        200
    );
    assert_eq!(router.allocate("CA1")["source_pool"], "pool:gold");
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
    let (_, own) =
        router.post("/api/v1/allocate", json!({"call_sid": "CA3", "merchant_id": "shop"}));
    assert_eq!(own["source_pool"], "merchant:acme");
    assert_eq!(router.status()["merchants"]["acme"]["active_calls"], 1);

    assert_eq!(router.put("/api/v1/merchants/shop", r#"{"pool": 7}"#).0, 400);
    assert_eq!(router.put("/api/v1/merchants/shop", r#"{"fallback": ["acme"]}"#).0, 200);
    router.release("CA3");
    let (_, by_name) =
        router.post("/api/v1/allocate", json!({"call_sid": "CA4", "merchant_id": "shop"}));
    assert_eq!(by_name["source_pool"], "merchant:acme");
}

#[test]
fn a_call_lookup_shows_the_pod_and_the_skipped_steps() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    router.allocate("CA2");
    let (status, call) = router.get("/api/v1/calls/CA2");
    assert_eq!(status, 200);
    assert_eq!(call["pod_name"], "voice-agent-1");
    assert_eq!(call["source_pool"], "pool:standard");
    assert_eq!(call["tried"], json!([{"step": "gold", "reason": "at_capacity"}]));
    assert!(call["allocated_at"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(router.get("/api/v1/calls/CA9").0, 404);
}

#[test]
fn a_tier_change_takes_effect_at_once_and_keeps_live_calls() {
    let router = Router::start(&[]);
    router.allocate("CA1");
    let tiers = r#"{"tiers": {"silver": {"target": 2}, "basic": {"type": "shared", "target": 1}}, "default_chain": ["silver", "basic"]}"#;
    assert_eq!(router.put("/api/v1/tiers", tiers).0, 200);
    let status = router.status();
    assert_eq!(status["pools"]["gold"]["type"], "removed");
    assert_eq!(status["pools"]["gold"]["active_calls"], 1);
    assert_eq!(status["pools"]["silver"]["available"], 1);
    let (_, released) = router.release("CA1");
    assert_eq!(released["released_to_pool"], "pool:silver");
    assert_eq!(router.status()["pools"]["gold"], json!(null));
    assert_eq!(router.put("/api/v1/tiers", r#"{"silver": -1}"#).0, 400);
    assert_eq!(router.get("/api/v1/tiers").1["tiers"]["silver"]["target"], 2);
}
