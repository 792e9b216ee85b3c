//! The definitions of VoiceTier and VoiceMerchant, compared with the rules of the router.

use std::{collections::BTreeSet, fs};

use fleet::{
    manifests::{MERCHANT_FIELDS, Manifest, TIER_FIELDS, fold_merchants, fold_tiers},
    rules::{MAX_MERCHANT_CALLS, MAX_MERCHANT_RATE, MAX_PRIORITY, MAX_STEPS},
};
use serde_json::{Value, json};

use crate::render::deploy;

fn parse(text: &str) -> Vec<Value> {
    let documents = text.split("\n---\n");
    documents.map(|text| serde_saphyr::from_str(text).expect("YAML")).collect()
}

/// The schema of the spec of a definition.
fn spec(file: &str) -> Value {
    let text = fs::read_to_string(deploy().join("crds").join(file)).unwrap();
    let definition = parse(&text).remove(0);
    let version = &definition["spec"]["versions"][0];
    assert!(version["subresources"]["status"].is_object(), "the status is a subresource");
    version["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

fn fields(spec: &Value) -> BTreeSet<&str> {
    spec["properties"].as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn the_definitions_have_the_fields_and_bounds_of_the_router() {
    let tier = spec("voicetiers.yaml");
    assert_eq!(fields(&tier), TIER_FIELDS.into());
    let merchant = spec("voicemerchants.yaml");
    let mut expected: BTreeSet<&str> = MERCHANT_FIELDS.map(|(field, _)| field).into();
    expected.insert("merchant");
    assert_eq!(fields(&merchant), expected);
    let bound = |field: &str, name: &str| merchant["properties"][field][name].clone();
    assert_eq!(bound("fallback", "maxItems"), json!(MAX_STEPS));
    assert_eq!(bound("maxCalls", "maximum"), json!(MAX_MERCHANT_CALLS));
    assert_eq!(bound("maxRate", "maximum"), json!(MAX_MERCHANT_RATE));
    let priorities = (bound("priority", "minimum"), bound("priority", "maximum"));
    assert_eq!(priorities, (json!(-MAX_PRIORITY), json!(MAX_PRIORITY)));
    assert_eq!(tier["properties"]["maxConcurrent"]["minimum"], 1);
}

/// The rules of a schema, in the order of the fields.
fn rules(schema: &Value) -> Vec<&str> {
    let rules = schema["x-kubernetes-validations"].as_array();
    rules.into_iter().flatten().map(|it| it["rule"].as_str().unwrap()).collect()
}

/// The router refuses these objects, too; the API server names the cause at once.
#[test]
fn the_definitions_refuse_what_the_router_refuses() {
    let tier = spec("voicetiers.yaml");
    let bounds = "!has(self.min) || !has(self.max) || self.min <= self.max";
    assert!(rules(&tier).contains(&bounds), "{:?}", rules(&tier));
    let merchant = spec("voicemerchants.yaml");
    let exclusive = rules(&merchant).iter().any(|it| it.contains("size(self.fallback) == 0"));
    assert!(exclusive, "dedicatedOnly with a fallback: {:?}", rules(&merchant));
    let properties = &merchant["properties"];
    assert_eq!(rules(&properties["pool"]), ["self != '.' && self != '..'"]);
    let item = &properties["fallback"]["items"];
    assert_eq!(rules(item), ["!self.matches('^(merchant:)?[.]{1,2}$')"]);
}

#[test]
fn the_objects_of_the_guide_are_accepted() {
    let guide = deploy().join("../docs/guides/declarative-configuration.md");
    let guide = fs::read_to_string(guide).unwrap();
    let text = guide.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let of_kind = |kind: &str| -> Vec<Manifest> {
        let objects = parse(text).into_iter().filter(|object| object["kind"] == kind);
        let manifest = |object: Value| Manifest {
            name: object["metadata"]["name"].as_str().unwrap().into(),
            generation: 1,
            created: 0,
            spec: object["spec"].clone(),
        };
        objects.map(manifest).collect()
    };
    let tiers = fold_tiers(&of_kind("VoiceTier"), "the guide").table.expect("a tier table");
    assert_eq!(tiers.iter().count(), 2);
    let merchants = fold_merchants(&of_kind("VoiceMerchant"), "voice", &tiers);
    assert!(merchants.len() == 1 && merchants.values().all(Result::is_ok), "{merchants:?}");
}
