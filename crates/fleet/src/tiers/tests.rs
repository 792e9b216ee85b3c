use super::*;

fn parse(text: &str) -> Tiers {
    Tiers::parse(text, DocumentSource::Settings).unwrap().0
}

fn chain(tiers: &Tiers) -> Vec<String> {
    tiers.default_chain().iter().map(Step::to_string).collect()
}

fn refusal(text: &str) -> String {
    Tiers::parse(text, DocumentSource::Settings).unwrap_err().to_string()
}

#[test]
fn all_three_document_shapes_are_parsed() {
    let full = parse(
        r#"{"tiers": {"gold": {"type": "exclusive", "target": 1},
            "basic": {"type": "shared", "target": 1, "max_concurrent": 3}},
            "default_chain": ["basic", "gold"]}"#,
    );
    assert_eq!(chain(&full), ["basic", "gold"]);
    let map = parse(r#"{"gold": {"target": 2}, "basic": {"type": "shared"}}"#);
    assert_eq!(chain(&map), ["gold", "basic"]);
    let basic = map.get(&"basic".parse().unwrap()).unwrap();
    assert_eq!(basic.kind, TierKind::Shared { max_concurrent: 5, strategy: Strategy::Spread });
    let counts = parse(r#"{"gold": 10.0, "standard": 20}"#);
    assert_eq!(counts.get(&"gold".parse().unwrap()).unwrap().target, 10);
    assert_eq!(counts.total_target(), 30);
    assert_eq!(chain(&parse(r#"{"tiers": 5}"#)), ["tiers"]);
}

#[test]
fn an_exclusive_tier_outside_the_chain_is_a_merchant_pool() {
    let tiers = parse(
        r#"{"tiers": {"gold": {}, "acme": {"target": 2}, "basic": {"type": "shared"}}, "default_chain": ["gold"]}"#,
    );
    assert_eq!(tiers.pool(&"acme".parse().unwrap()).unwrap().to_string(), "merchant:acme");
    assert_eq!(tiers.pool(&"basic".parse().unwrap()).unwrap().to_string(), "pool:basic");
    assert_eq!(tiers.target(&"merchant:acme".parse().unwrap()), 2);
    assert_eq!(tiers.kind(&"pool:acme".parse().unwrap()), None);
    let defines = |pool: &str| tiers.defines(&pool.parse().unwrap());
    assert!(defines("gold") && defines("basic") && defines("merchant:acme"));
    assert!(!defines("acme") && !defines("merchant:gold") && !defines("merchant:other"));
}

#[test]
fn unknown_fields_are_ignored_with_a_warning() {
    let known = r#""type": "shared", "target": 1, "max_concurrent": 3, "strategy": "pack""#;
    let warnings = |text: &str| Tiers::parse(text, DocumentSource::Settings).unwrap().1;
    assert_eq!(warnings(&format!(r#"{{"gold": {{{known}}}}}"#)), [""; 0]);
    let given = warnings(&format!(r#"{{"gold": {{{known}, "colour": 7}}}}"#));
    assert!(given.len() == 1 && given[0].contains("\"colour\""), "{given:?}");
}

#[test]
fn unknown_chain_steps_are_dropped_with_a_warning() {
    let text = r#"{"tiers": {"b": {}, "a": {}}, "default_chain": ["x", "b", "b"]}"#;
    let (tiers, warnings) = Tiers::parse(text, DocumentSource::Settings).unwrap();
    assert_eq!((chain(&tiers), warnings.len()), (vec!["b".to_string()], 2));
    let text = r#"{"tiers": {"b": {}, "a": {}}, "default_chain": ["x"]}"#;
    let (tiers, warnings) = Tiers::parse(text, DocumentSource::Settings).unwrap();
    assert_eq!((chain(&tiers), warnings.len()), (vec!["a".to_string(), "b".to_string()], 2));
}

#[test]
fn a_zero_cap_is_an_error_in_settings_and_a_default_in_the_store() {
    let text = r#"{"basic": {"type": "shared", "max_concurrent": 0}}"#;
    assert!(refusal(text).contains("expected at least 1"));
    let text = r#"{"basic": {"type": "shared", "max_concurrent": -3}}"#;
    let tiers = Tiers::parse(text, DocumentSource::Store).unwrap().0;
    assert!(matches!(
        tiers.kind(&"basic".parse().unwrap()),
        Some(TierKind::Shared { max_concurrent: 5, .. })
    ));
}

#[test]
fn invalid_documents_are_refused_with_the_reason() {
    for (text, reason) in [
        ("", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("{}", "at least one tier"),
        (r#"{"tiers": {}}"#, "at least one tier"),
        (r#"{"gold": -1}"#, "target -1"),
        (r#"{"gold": 1.5}"#, "whole number"),
        (r#"{"gold": {"target": -1}}"#, "target -1"),
        (r#"{"gold": {"type": "silver"}}"#, "\"silver\""),
        (r#"{"gold": {"type": 7}}"#, "type 7"),
        (r#"{"gold": {"type": "shared", "strategy": "heap"}}"#, "\"heap\""),
        (r#"{"go ld": 1}"#, "tier \"go ld\""),
        (r#"{"tiers": {"a": {}}, "default_chain": "a"}"#, "default_chain"),
        (r#"{"a": {}, "b": 3}"#, "expected an object"),
        (r#"{"a": {"workload": "daemonset/a"}}"#, "\"deployment/NAME\""),
        (r#"{"a": {"workload": 7}}"#, "workload 7"),
        (
            r#"{"a": {"workload": "deployment/x"}, "b": {"workload": "deployment/x"}}"#,
            "a and b name the same workload deployment/x",
        ),
    ] {
        let refused = refusal(text);
        assert!(refused.contains(reason), "{text}: {refused}");
    }
}

#[test]
fn a_table_round_trips_through_json() {
    let tiers = parse(
        r#"{"tiers": {"gold": {"target": 1, "workload": "statefulset/gold"}, "acme": {"target": 2},
            "basic": {"type": "shared", "max_concurrent": 3, "strategy": "pack"}}, "default_chain": ["gold", "basic"]}"#,
    );
    assert_eq!(Tiers::try_from(Value::from(tiers.clone())).unwrap(), tiers);
    let managed = tiers.with_owner(Some("objects"));
    assert_eq!(Tiers::try_from(Value::from(managed.clone())).unwrap(), managed);
    let text = Value::from(managed).to_string();
    assert_eq!(parse(&text).managed_by(), None, "a request cannot name an owner");
}

#[test]
fn a_tier_with_a_workload_ignores_its_target() {
    let tiers = parse(
        r#"{"tiers": {"gold": {"target": 5, "workload": "statefulset/gold"},
            "acme": {"target": 2, "workload": "statefulset/acme"},
            "basic": {"type": "shared", "workload": "statefulset/basic"},
            "iron": {"workload": "deployment/iron"}}, "default_chain": ["gold", "basic", "iron"]}"#,
    );
    let pool = |text: &str| text.parse::<Pool>().unwrap();
    assert_eq!(tiers.target(&pool("gold")), 0);
    assert_eq!(tiers.workload(&pool("gold")).unwrap().to_string(), "statefulset/gold");
    assert_eq!(tiers.workload(&pool("iron")).unwrap().to_string(), "deployment/iron");
    assert_eq!(tiers.workload(&pool("acme")), None, "the tier is a merchant pool");
    let ordered = ["gold", "merchant:acme", "basic", "iron", "merchant:other"]
        .map(|text| tiers.prefers_low_ordinals(&pool(text)));
    assert_eq!(ordered, [true, true, false, false, false]);
}
