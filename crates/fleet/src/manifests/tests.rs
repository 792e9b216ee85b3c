//! Objects that agree, contradict each other, or are invalid.

use super::*;

fn object(name: &str, created: i64, spec: Value) -> Manifest {
    Manifest { name: name.into(), generation: 1, created, spec }
}

fn fold(objects: &[Manifest]) -> FoldedTiers {
    fold_tiers(objects, "the objects")
}

fn refusal(folded: &FoldedTiers, name: &str) -> (&'static str, String) {
    let refused = folded.objects[name].clone().unwrap_err();
    (refused.reason, refused.message)
}

#[test]
fn objects_become_one_table_with_the_chain_in_order_of_position() {
    let folded = fold(&[
        object(
            "basic",
            3,
            json!({"type": "shared", "target": 4, "maxConcurrent": 3, "strategy": "pack", "chainPosition": 20}),
        ),
        object("gold", 2, json!({"target": 2, "chainPosition": 10})),
        object("acme-tier", 1, json!({"tier": "Acme_1", "target": 1})),
    ]);
    let expected = r#"{"tiers": {"gold": {"target": 2}, "Acme_1": {"target": 1},
        "basic": {"type": "shared", "target": 4, "max_concurrent": 3, "strategy": "pack"}},
        "default_chain": ["gold", "basic"]}"#;
    let expected = Tiers::parse(expected, DocumentSource::Settings).unwrap().0;
    assert_eq!(folded.table, Some(expected.with_owner(Some("the objects"))));
    assert!(folded.objects.values().all(Result::is_ok));
}

#[test]
fn without_positions_the_chain_is_automatic_and_without_objects_there_is_no_table() {
    let folded = fold(&[object("b", 1, json!({"type": "shared"})), object("a", 2, json!({}))]);
    let chain: Vec<String> =
        folded.table.unwrap().default_chain().iter().map(|step| step.to_string()).collect();
    assert_eq!(chain, ["a", "b"]);
    assert_eq!(fold(&[]), FoldedTiers::default());
}

#[test]
fn contradictions_refuse_the_younger_object_and_the_whole_table() {
    let same_tier =
        fold(&[object("new", 9, json!({"tier": "gold"})), object("gold", 5, json!({}))]);
    assert_eq!(same_tier.table, None);
    assert!(same_tier.objects["gold"].is_ok());
    let (reason, message) = refusal(&same_tier, "new");
    assert_eq!(reason, "Conflict");
    assert!(message.contains("already defined by the VoiceTier gold"), "{message}");
    let same_position = fold(&[
        object("b", 5, json!({"chainPosition": 1})),
        object("a", 5, json!({"chainPosition": 1})),
    ]);
    assert_eq!(same_position.table, None);
    assert!(same_position.objects["a"].is_ok(), "of the same age, by name");
    assert!(refusal(&same_position, "b").1.contains("chainPosition 1 is already used"));
    let same_workload = fold(&[
        object("b", 6, json!({"workload": "deployment/agents"})),
        object("a", 5, json!({"workload": "deployment/agents"})),
        object("c", 7, json!({"workload": "statefulset/agents"})),
    ]);
    assert_eq!(same_workload.table, None);
    assert!(same_workload.objects["a"].is_ok() && same_workload.objects["c"].is_ok());
    let (reason, message) = refusal(&same_workload, "b");
    assert_eq!(reason, "Conflict");
    assert!(message.contains("deployment/agents is already used by the VoiceTier a"), "{message}");
}

#[test]
fn an_unchanged_tier_is_in_force_beside_a_refused_one() {
    let gold = object("gold", 1, json!({"target": 2, "chainPosition": 10}));
    let basic = object("basic", 2, json!({"type": "shared", "chainPosition": 20}));
    let acme = object("acme", 3, json!({"target": 1}));
    let bad = object("bad", 9, json!({"target": -1}));
    let all = [gold, basic, acme, bad];
    let table = fold(&all[..3]).table.unwrap();
    let in_force = |objects: &[Manifest]| -> Vec<String> {
        let folded = fold(objects);
        let accepted =
            folded.objects.iter().filter_map(|(name, it)| Some((name, it.as_ref().ok()?)));
        let current = accepted.filter(|(_, it)| folded.is_in_force(it, &table));
        current.map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(in_force(&all), ["acme", "basic", "gold"]);
    for (changed, spec) in [
        ("gold", json!({"target": 3, "chainPosition": 10})),
        ("gold", json!({"target": 2})),
        ("acme", json!({"target": 1, "chainPosition": 30})),
        ("acme", json!({"type": "shared", "target": 1})),
        ("acme", json!({"target": 1, "workload": "deployment/acme"})),
        ("basic", json!({"type": "shared", "chainPosition": 20, "min": 1})),
    ] {
        let mut objects = all.clone();
        objects.iter_mut().find(|it| it.name == changed).unwrap().spec = spec.clone();
        let found = in_force(&objects);
        assert_eq!(found.len(), 2, "{changed} {spec}: {found:?}");
        assert!(!found.iter().any(|name| name == changed), "{changed} {spec}: {found:?}");
    }
    let mut swapped = all;
    swapped[0].spec["chainPosition"] = json!(30);
    assert_eq!(in_force(&swapped), ["acme"], "another order is not in force");
}

#[test]
fn an_invalid_object_refuses_the_table_in_words() {
    for (spec, word) in [
        (json!({"type": "shared", "maxConcurrent": 0}), "at least 1"),
        (json!({"type": "golden"}), "golden"),
        (json!({"target": -1}), "target -1"),
        (json!({"target": 1.5}), "whole number"),
        (json!({"maxConcurrent": 3}), "shared only"),
        (json!({"strategy": "pack"}), "shared only"),
        (json!({"chainPosition": -1}), "chainPosition -1"),
        (json!({"chainPosition": "first"}), "chainPosition"),
        (json!({"tier": "go ld"}), "go ld"),
        (json!({"tier": 7}), "spec.tier 7"),
        (json!({"targets": 3}), "spec.targets: unknown field"),
        (json!(null), "expected an object"),
        (json!("gold"), "expected an object"),
    ] {
        let folded = fold(&[object("good", 1, json!({})), object("bad", 2, spec.clone())]);
        assert_eq!(folded.table, None, "{spec}");
        assert!(folded.objects["good"].is_ok());
        let (reason, message) = refusal(&folded, "bad");
        assert_eq!(reason, "Invalid");
        assert!(message.contains(word), "{spec}: {message}");
    }
}

fn tiers() -> Tiers {
    Tiers::parse(r#"{"gold": 1}"#, DocumentSource::Settings).unwrap().0
}

#[test]
fn a_merchant_object_becomes_a_document_that_names_its_owner() {
    let spec = json!({"merchant": "ACME_1", "pool": "acme", "fallback": ["gold"], "maxCalls": 5, "maxRate": 2, "priority": -1, "dedicatedOnly": false});
    let folded = fold_merchants(&[object("acme", 1, spec)], "voice", &tiers());
    let merchant = folded["acme"].clone().unwrap();
    let document: Value = serde_json::from_str(&merchant.document).unwrap();
    let expected = json!({"pool": "acme", "fallback": ["gold"], "max_calls": 5, "max_rate": 2, "priority": -1, "dedicated_only": false, "managed_by": "VoiceMerchant voice/acme"});
    assert_eq!((merchant.id.as_str(), document), ("ACME_1", expected));
    assert_eq!(owner_of(&merchant.document), Some("VoiceMerchant voice/acme".into()));
    assert_eq!(owner_of(r#"{"pool": "a"}"#), None);
    assert_eq!(owner_of(r#"{"managed_by": 7}"#), None);
    assert_eq!(owner_of("managed_by"), None);
}

#[test]
fn a_refused_merchant_does_not_affect_the_others() {
    let objects = [
        object("good", 1, json!({"maxCalls": 1})),
        object("unknown", 2, json!({"fallback": ["silver"]})),
        object("deaf", 3, json!({"dedicatedOnly": true})),
        object("typo", 4, json!({"maxcalls": 1})),
        object("again", 5, json!({"merchant": "good"})),
        object("of-refused", 6, json!({"merchant": "typo"})),
        object("limits", 7, json!({"maxCalls": -1})),
    ];
    let folded = fold_merchants(&objects, "voice", &tiers());
    let refused = |name: &str| folded[name].clone().unwrap_err();
    assert!(folded["good"].is_ok());
    assert_eq!(refused("unknown").reason, "UnknownTier");
    assert!(refused("unknown").message.contains("silver"));
    assert!(refused("deaf").message.contains("without a pool"));
    assert!(refused("typo").message.contains("spec.maxcalls"));
    assert!(refused("again").message.contains("already defined by the VoiceMerchant good"));
    assert_eq!(refused("of-refused").reason, "Conflict", "the last good state of typo stays");
    assert!(refused("limits").message.contains("max_calls -1"));
}
