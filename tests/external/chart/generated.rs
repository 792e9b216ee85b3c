//! Generated parts of the chart: the schema of the settings, and the table of values.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use clap::Arg;
use serde_json::{Value, json};

use super::{chart, is_current, schema};
use crate::render::helm;
use testkit::scratch;

/// Settings that other values, the manifests or the Secret determine.
const OWNED: [&str; 15] = [
    "POD_NAME",
    "NAMESPACE",
    "NAMESPACES",
    "PODS",
    "PODS_FILE",
    "DATA_DIR",
    "HTTP_BIND",
    "HTTP_PORT",
    "METRICS_PORT",
    "POD_LABEL_SELECTOR",
    "VOICE_AGENT_PORT",
    "PROVIDERS",
    "TIER_CONFIG",
    "LEADER_ELECTION_LOCK_NAME",
    "OTEL_EXPORTER_OTLP_HEADERS",
];

/// A duration such as 1h30m after its first digit.
const DURATION_REST: &str =
    "[0-9]*(h([0-9]+m)?([0-9]+s)?([0-9]+ms)?|m([0-9]+s)?([0-9]+ms)?|s([0-9]+ms)?|ms)";

/// The schema of a setting, by the name of its values: allowed words, a duration, a range.
fn value_schema(argument: &Arg) -> Value {
    let names = argument.get_value_names().unwrap_or_default();
    let name = names.first().map_or("", |it| it.as_str());
    let possible = argument.get_possible_values();
    let words: Vec<&str> = match possible.as_slice() {
        [] => name.split('|').collect(),
        possible => possible.iter().map(|it| it.get_name()).collect(),
    };
    let is_word = |word: &&str| !word.contains("..") && word.to_lowercase() == **word;
    if name == "on|off" || name == "true|false" {
        let words = ["on", "off", "true", "false", "yes", "no", "1", "0"];
        return json!({"type": "string", "enum": words});
    }
    if words.len() > 1 && words.iter().all(is_word) {
        return json!({"type": "string", "enum": words});
    }
    let is_off = argument.get_default_values().iter().any(|default| default == "off");
    let pattern = match name {
        "DURATION" if is_off => format!("^(off|0|[0-9]{DURATION_REST})$"),
        "DURATION" => format!("^[0-9]{DURATION_REST}$"),
        "off|DURATION" => format!("^(off|[0-9]{DURATION_REST})$"),
        // A fraction.
        "0..1" => return json!({"type": "string"}),
        "PORT" | "NUMBER" => "^[0-9]+$".to_owned(),
        _ => match name.strip_prefix("off|").unwrap_or(name).split_once("..") {
            Some((low, high)) if [low, high].iter().all(|it| it.parse::<u64>().is_ok()) => {
                let off = if name.starts_with("off|") { "off|" } else { "" };
                format!("^({off}[0-9]{{1,{}}})$", high.len())
            }
            _ => return json!({"type": "string"}),
        },
    };
    json!({"type": "string", "pattern": pattern})
}

/// The values that the program documents pass, besides those that the tests of the chart refuse.
#[test]
fn the_schema_accepts_the_default_of_every_setting() {
    let allowed = schema()["properties"]["settings"]["properties"].clone();
    let variables = smart_router::cli::variables();
    let defaults = variables.iter().filter_map(|it| {
        let name = it.get_env()?.to_str()?;
        let default = it.get_default_values().first()?.to_str()?;
        allowed.get(name).map(|_| (name, default))
    });
    let mut settings: BTreeMap<&str, &str> = defaults.collect();
    assert!(settings.len() > 20, "{settings:?}");
    settings.extend([("OTEL_TRACES_SAMPLER_ARG", "0.25"), ("HOLD_TIME", "1m30s")]);
    let values = scratch().join("values.json");
    fs::write(&values, json!({"settings": settings}).to_string()).unwrap();
    let rendered = helm(&["--values", values.to_str().unwrap()]);
    assert!(rendered.is_ok(), "{}", rendered.unwrap_err());
}

#[test]
fn the_schema_has_the_settings_of_the_program() {
    let mut schema = schema();
    let keys = &schema["properties"]["secrets"]["properties"]["keys"]["items"]["enum"];
    let keys: BTreeSet<String> = serde_json::from_value(keys.clone()).unwrap();
    let names = smart_router::cli::variables();
    let names = names.iter().filter_map(Arg::get_env).map(|name| name.to_str().unwrap());
    let (secrets, others): (Vec<&str>, Vec<&str>) =
        names.partition(|name| keys.contains(name.strip_suffix("_FILE").unwrap_or(name)));
    assert_eq!(secrets.len(), 2 * keys.len(), "each secret is a variable or a file");
    let others = others.into_iter().filter(|name| !OWNED.contains(name));
    let arguments = smart_router::cli::variables();
    let argument = |name: &str| arguments.iter().find(|it| it.get_env() == Some(name.as_ref()));
    let settings: BTreeMap<&str, Value> =
        others.map(|name| (name, value_schema(argument(name).unwrap()))).collect();
    schema["properties"]["settings"]["properties"] = json!(settings);
    let generated = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
    is_current(&chart().join("values.schema.json"), &generated);
}

/// Rows of the table of values.
fn rows(path: &str, schema: &Value, default: &Value, found: &mut Vec<String>) {
    let properties = schema["properties"].as_object();
    let is_map = path == "settings";
    match properties {
        Some(properties) if !is_map => {
            for (name, schema) in properties.iter().filter(|(name, _)| *name != "global") {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                rows(&path, schema, &default[name], found);
            }
        }
        _ => {
            let description = schema["description"].as_str().unwrap_or_default();
            assert!(!description.is_empty(), "{path} has no description");
            let default = match default {
                Value::Null => return,
                Value::String(text) if text.is_empty() => "empty".to_owned(),
                Value::String(text) if text.contains('\n') => "three tiers".to_owned(),
                Value::String(text) => format!("`{text}`"),
                other => format!("`{other}`"),
            };
            found.push(format!("| `{path}` | {default} | {description} |"));
        }
    }
}

#[test]
fn the_readme_describes_every_value() {
    let values = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    let mut found = vec!["| value | default | meaning |".to_owned(), "| --- | --- | --- |".into()];
    rows("", &schema(), &values, &mut found);
    let path = chart().join("README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- values -->\n", "<!-- end of values -->");
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    is_current(&path, &format!("{before}{begin}{}\n{end}{after}", found.join("\n")));
}
