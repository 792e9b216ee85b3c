//! Declarative configuration: VoiceTier and VoiceMerchant objects.

use std::time::Duration;

use serde_json::{Value, json};

use testkit::{
    Router,
    cluster::{available, logged_router, router},
    eventually,
    kube::{FakeKube, NAMESPACE},
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
const TIERS: &str = "/api/v1/tiers";
const ACME: &str = "/api/v1/merchants/acme";

fn condition(kube: &FakeKube, plural: &str, name: &str, kind: &str) -> Value {
    let object = kube.custom(plural, NAMESPACE, name);
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|it| it["type"] == kind).unwrap_or_default()
}

fn is(kube: &FakeKube, plural: &str, name: &str, kind: &str, status: &str) -> bool {
    condition(kube, plural, name, kind)["status"] == status
}

fn tier(kube: &FakeKube, name: &str, spec: Value) {
    kube.apply("voicetiers", NAMESPACE, name, spec);
}

fn merchant(kube: &FakeKube, name: &str, spec: Value) {
    kube.apply("voicemerchants", NAMESPACE, name, spec);
}

/// A cluster with the resources and two tiers in force, and a router.
fn managed() -> (FakeKube, Router) {
    let kube = FakeKube::start();
    kube.install_crds(true);
    kube.add("voice-agent-0");
    tier(&kube, "gold", json!({"target": 2, "chainPosition": 10}));
    tier(&kube, "basic", json!({"type": "shared", "maxConcurrent": 3, "chainPosition": 20}));
    let router = router(&kube, &[]);
    eventually(10 * SECOND, "the table of the objects is in force", || {
        router.get(TIERS).1["default_chain"] == json!(["gold", "basic"])
    });
    eventually(10 * SECOND, "the status is written", || {
        ["gold", "basic"].iter().all(|name| is(&kube, "voicetiers", name, "Programmed", "True"))
    });
    (kube, router)
}

#[test]
fn objects_manage_the_tier_table_and_the_api_refuses_to_change_it() {
    let (kube, router) = managed();
    let (_, document) = router.get(TIERS);
    assert_eq!(document["managed_by"], "the VoiceTier objects of the namespace default");
    assert_eq!(document["tiers"]["basic"]["max_concurrent"], 3);
    let (status, answer) = router.put(TIERS, r#"{"silver": 1}"#);
    assert_eq!(status, 409, "{answer}");
    let error = answer["error"].as_str().unwrap();
    assert!(error.contains("VoiceTier objects of the namespace default"), "{error}");
    let (status, _) = router.put(&format!("{TIERS}?dry_run=true"), r#"{"silver": 1}"#);
    assert_eq!(status, 200, "a dry run changes nothing");
    // Counts follow the fleet; they do not change the generation.
    router.allocate("CA1");
    eventually(20 * SECOND, "the status counts pods and calls", || {
        let status = &kube.custom("voicetiers", NAMESPACE, "gold")["status"];
        (&status["pods"], &status["calls"]) == (&json!(1), &json!(1))
    });
    let gold = kube.custom("voicetiers", NAMESPACE, "gold");
    assert_eq!(gold["metadata"]["generation"], 1);
    assert_eq!(gold["status"]["observedGeneration"], 1);
    assert_eq!(gold["status"]["conditions"][0]["observedGeneration"], 1);
}

#[test]
fn contradictions_are_named_in_the_status_and_the_last_table_stays() {
    let (kube, router) = managed();
    let (_, before) = router.get(TIERS);
    // Of two objects of the same second, the first by name counts.
    tier(&kube, "gold-again", json!({"tier": "gold"}));
    tier(&kube, "basic", json!({"type": "shared", "maxConcurrent": 0, "chainPosition": 20}));
    tier(&kube, "iron", json!({"target": 1, "chainPosition": 30}));
    eventually(10 * SECOND, "both are refused", || {
        ["gold-again", "basic"]
            .iter()
            .all(|name| is(&kube, "voicetiers", name, "Accepted", "False"))
    });
    let again = condition(&kube, "voicetiers", "gold-again", "Accepted");
    assert_eq!(again["reason"], "Conflict");
    assert!(again["message"].as_str().unwrap().contains("the VoiceTier gold"), "{again}");
    let again = condition(&kube, "voicetiers", "gold-again", "Programmed");
    assert_eq!(again["message"], "the object has no effect", "it never was in force");
    let basic = condition(&kube, "voicetiers", "basic", "Accepted");
    assert!(basic["message"].as_str().unwrap().contains("at least 1"), "{basic}");
    assert_eq!(basic["observedGeneration"], 2);
    let basic = condition(&kube, "voicetiers", "basic", "Programmed");
    assert_eq!(basic["message"], "the last accepted state stays in force");
    eventually(10 * SECOND, "the new tier names the refused ones", || {
        let iron = condition(&kube, "voicetiers", "iron", "Programmed");
        let names_refused = |message: &str| {
            message.contains("2 VoiceTiers are not accepted, such as basic, gold-again")
        };
        iron["message"].as_str().is_some_and(names_refused)
    });
    let gold = condition(&kube, "voicetiers", "gold", "Programmed");
    assert_eq!(gold["status"], "True", "it is in force as before: {gold}");
    assert_eq!(router.metric("smart_router_manifests_refused"), 2, "not those that wait");
    assert_eq!(router.get(TIERS).1, before, "the last good table stays");
    // A repaired table takes effect in one step.
    kube.remove("voicetiers", NAMESPACE, "gold-again");
    tier(&kube, "basic", json!({"type": "shared", "maxConcurrent": 7, "chainPosition": 20}));
    eventually(10 * SECOND, "the repaired table is in force", || {
        router.get(TIERS).1["tiers"]["basic"]["max_concurrent"] == 7
    });
    eventually(10 * SECOND, "the status says so", || {
        is(&kube, "voicetiers", "basic", "Accepted", "True")
    });
}

#[test]
fn two_tiers_of_one_workload_are_a_conflict_and_the_leader_goes_on() {
    let (kube, router) = managed();
    tier(&kube, "iron", json!({"workload": "deployment/agents", "chainPosition": 30}));
    eventually(10 * SECOND, "the first is in force", || {
        is(&kube, "voicetiers", "iron", "Programmed", "True")
    });
    tier(&kube, "tin", json!({"workload": "deployment/agents", "chainPosition": 40}));
    eventually(10 * SECOND, "the second is refused", || {
        is(&kube, "voicetiers", "tin", "Accepted", "False")
    });
    let tin = condition(&kube, "voicetiers", "tin", "Accepted");
    assert_eq!(tin["reason"], "Conflict");
    let message = tin["message"].as_str().unwrap();
    assert!(message.contains("the workload deployment/agents is already used by"), "{message}");
    assert!(message.contains("the VoiceTier iron"), "{message}");
    tier(&kube, "tin", json!({"workload": "deployment/others", "chainPosition": 40}));
    eventually(10 * SECOND, "the repaired table is in force", || {
        router.get(TIERS).1["default_chain"] == json!(["gold", "basic", "iron", "tin"])
    });
}

#[test]
fn an_object_whose_pool_has_no_pods_is_not_ready() {
    let (kube, router) = managed();
    tier(&kube, "iron", json!({"workload": "deployment/nowhere", "chainPosition": 30}));
    merchant(&kube, "acme", json!({"pool": "acme", "fallback": ["merchant:ghost", "gold"]}));
    merchant(&kube, "limits", json!({"maxCalls": 3}));
    let reason = |plural: &str, name: &str| {
        let ready = condition(&kube, plural, name, "Ready");
        (ready["reason"].clone(), ready["message"].as_str().unwrap_or_default().to_owned())
    };
    for (plural, name, expected, named) in [
        ("voicetiers", "gold", "Ready", "pods"),
        ("voicetiers", "basic", "NoPods", "no pod"),
        ("voicetiers", "iron", "NoPods", "deployment/nowhere"),
        ("voicemerchants", "acme", "UnknownPool", "merchant:acme, merchant:ghost"),
        ("voicemerchants", "limits", "Ready", "pods"),
    ] {
        eventually(20 * SECOND, name, || {
            let (reason, message) = reason(plural, name);
            reason == expected && message.contains(named)
        });
    }
    let acme = kube.custom("voicemerchants", NAMESPACE, "acme");
    assert_eq!(acme["status"]["pods"], 0);
    assert!(is(&kube, "voicemerchants", "acme", "Programmed", "True"));
    for pod in ["acme", "ghost"] {
        kube.add_with(&format!("{pod}-0"), |object| {
            object["metadata"]["labels"]["smart-router/merchant"] = json!(pod);
        });
    }
    eventually(20 * SECOND, "the merchant is ready", || {
        is(&kube, "voicemerchants", "acme", "Ready", "True")
    });
    assert_eq!(router.status()["merchants"]["acme"]["available"], 1);
}

#[test]
fn a_missing_permission_for_the_status_is_in_the_log() {
    let kube = FakeKube::start();
    kube.install_crds(true);
    kube.add("voice-agent-0");
    kube.faults(|faults| faults.forbidden_path = Some("/status"));
    tier(&kube, "gold", json!({}));
    let (_router, log) = logged_router(&kube, &[]);
    log.wait_for("cannot write the status of objects", 0);
    assert!(log.text().contains("voicetiers is forbidden"), "{}", log.text());
}

#[test]
fn without_objects_the_last_table_stays_and_the_api_may_change_it() {
    let (kube, router) = managed();
    for name in ["gold", "basic"] {
        kube.remove("voicetiers", NAMESPACE, name);
    }
    eventually(10 * SECOND, "the table has no owner", || {
        router.get(TIERS).1["managed_by"].is_null()
    });
    let (_, document) = router.get(TIERS);
    assert_eq!(document["default_chain"], json!(["gold", "basic"]), "no tier is lost on the way");
    assert_eq!(router.put(TIERS, r#"{"gold": 1}"#).0, 200);
    // Objects of another namespace have no effect.
    kube.apply("voicetiers", "tenant", "evil", json!({"target": 9}));
    tier(&kube, "silver", json!({}));
    eventually(10 * SECOND, "an object manages the table again", || {
        router.get(TIERS).1["default_chain"] == json!(["silver"])
    });
    assert!(kube.custom("voicetiers", "tenant", "evil")["status"].is_null());
}

#[test]
fn a_merchant_object_owns_its_document_until_it_is_deleted() {
    let (kube, router) = managed();
    assert_eq!(router.put("/api/v1/merchants/other", r#"{"max_calls": 1}"#).0, 200);
    merchant(&kube, "acme", json!({"fallback": ["gold"], "maxCalls": 5}));
    merchant(&kube, "lost", json!({"fallback": ["silver"]}));
    eventually(10 * SECOND, "the document is in force", || router.get(ACME).1["max_calls"] == 5);
    assert_eq!(router.get(ACME).1["managed_by"], "VoiceMerchant default/acme");
    eventually(10 * SECOND, "the status is written", || {
        is(&kube, "voicemerchants", "acme", "Programmed", "True")
            && is(&kube, "voicemerchants", "lost", "Accepted", "False")
    });
    let lost = condition(&kube, "voicemerchants", "lost", "Accepted");
    assert_eq!(lost["reason"], "UnknownTier");
    let (status, answer) = router.put(ACME, r#"{"max_calls": 9}"#);
    assert_eq!(status, 409, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("VoiceMerchant default/acme"), "{answer}");
    assert_eq!(router.connect().send("DELETE", ACME, &[], b"").status, 409);
    let forged = r#"{"max_calls": 9, "managed_by": "me"}"#;
    assert_eq!(router.put("/api/v1/merchants/other", forged).0, 400);
    // An invalid change keeps the last document, a valid one of the tier table repairs another.
    merchant(&kube, "acme", json!({"fallback": ["gold"], "maxCalls": -5}));
    tier(&kube, "silver", json!({"chainPosition": 30}));
    eventually(15 * SECOND, "the other merchant is accepted", || {
        is(&kube, "voicemerchants", "lost", "Accepted", "True")
            && is(&kube, "voicemerchants", "acme", "Accepted", "False")
    });
    assert_eq!(router.get(ACME).1["max_calls"], 5);
    kube.remove("voicemerchants", NAMESPACE, "acme");
    eventually(10 * SECOND, "the document is deleted", || router.get(ACME).0 == 404);
    assert_eq!(router.get("/api/v1/merchants/other").1, json!({"max_calls": 1}));
}

#[test]
fn resources_are_discovered_later_and_released_when_they_are_removed() {
    let kube = FakeKube::start();
    kube.add("voice-agent-0");
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    assert_eq!(router.put(TIERS, r#"{"gold": 1}"#).0, 200, "nothing manages the tiers");
    kube.install_crds(true);
    tier(&kube, "gold", json!({"target": 5}));
    merchant(&kube, "acme", json!({"maxCalls": 5}));
    eventually(30 * SECOND, "the objects are found", || {
        router.get(TIERS).1["tiers"]["gold"]["target"] == 5 && router.get(ACME).0 == 200
    });
    kube.install_crds(false);
    kube.drop_watches();
    eventually(30 * SECOND, "the tiers have no owner", || {
        router.get(TIERS).1["managed_by"].is_null()
    });
    assert_eq!(router.put(TIERS, r#"{"gold": 1}"#).0, 200);
}

#[test]
fn a_role_without_the_resources_is_named_and_the_rest_works() {
    let kube = FakeKube::start();
    kube.install_crds(true);
    kube.add("voice-agent-0");
    tier(&kube, "silver", json!({}));
    kube.faults(|faults| faults.forbidden_path = Some("voicetiers"));
    let router = router(&kube, &[]);
    eventually(5 * SECOND, "the pod is known", || available(&router) == 1);
    let expected = "a Role that allows list and watch on voicetiers (voice.smart-router.io)";
    eventually(20 * SECOND, "the page names the missing rule", || {
        crate::namespaces::warnings(&router).iter().any(|warning| warning.contains(expected))
    });
    kube.faults(|faults| faults.forbidden_path = None);
    eventually(30 * SECOND, "the object is applied", || {
        router.get(TIERS).1["default_chain"] == json!(["silver"])
    });
    eventually(5 * SECOND, "the page is clear", || {
        !crate::namespaces::warnings(&router).iter().any(|warning| warning.contains("voicetiers"))
    });
}

#[test]
fn every_replica_refuses_what_an_object_manages_and_manifests_off_is_the_way_out() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.install_crds(true);
    kube.add("voice-agent-0");
    tier(&kube, "gold", json!({"target": 3}));
    let url = server.url();
    let settings = [("REDIS_URL", url.as_str())];
    let (first, other) = (router(&kube, &settings), router(&kube, &settings));
    for replica in [&first, &other] {
        eventually(10 * SECOND, "the table is in force", || {
            replica.get(TIERS).1["tiers"]["gold"]["target"] == 3
        });
        assert_eq!(replica.put(TIERS, r#"{"gold": 1}"#).0, 409);
    }
    // A change by hand in the store is undone.
    redis::cmd("HSET")
        .arg(&["voice:tiers", "gold", "exclusive 1 spread 8"])
        .exec(&mut server.connection())
        .unwrap();
    eventually(25 * SECOND, "the leader restores the table", || {
        first.get(TIERS).1["tiers"]["gold"]["target"] == 3
    });
    drop((first, other));
    let off = router(&kube, &[("REDIS_URL", url.as_str()), ("MANIFESTS", "off")]);
    assert_eq!(off.put(TIERS, r#"{"gold": 1}"#).0, 200, "the operator turned objects off");
    assert!(off.get(TIERS).1["managed_by"].is_null());
}
