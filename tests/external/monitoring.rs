//! Alerts and dashboard: Prometheus accepts them, and they use only metrics that a router exports.

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::Duration};

use serde_json::{Value, json};

use crate::render::deploy;
use testkit::{
    Connection, Router, eventually,
    provider::{PUBLIC_URL, follow_redirect, start_call},
    redis::RedisServer,
    scratch,
};

fn monitoring(file: &str) -> String {
    fs::read_to_string(deploy().join("monitoring").join(file)).unwrap()
}

fn alerts() -> Vec<Value> {
    let rules: Value = serde_saphyr::from_str(&monitoring("alerts.yaml")).unwrap();
    let groups = rules["spec"]["groups"].as_array().unwrap().iter();
    groups.flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

/// The queries of the dashboard, with Grafana's interval variable replaced.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&monitoring("dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries = targets.map(|target| target["expr"].as_str().unwrap());
    queries.map(|query| query.replace("$__rate_interval", "5m")).collect()
}

fn promtool(directory: &Path, args: &[&str]) {
    let output = Command::new("promtool").current_dir(directory).args(args).output();
    let output = output.expect("promtool is installed (Debian's package prometheus)");
    let output_text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output_text));
}

const ALERT_TESTS: [&str; 5] = [
    "alerts_test.yaml",
    "alerts_days_test.yaml",
    "alerts_media_test.yaml",
    "alerts_capacity_test.yaml",
    "alerts_outbound_test.yaml",
];

#[test]
fn every_alert_has_passing_tests() {
    // The rules of the PrometheusRule as a file of rules, by the command of docs/kubernetes.md.
    let directory = scratch();
    let rules = Command::new("sed")
        .args(["-e", "1,/^spec:/d", "-e", "s/^  groups:/groups:/"])
        .arg(deploy().join("monitoring/alerts.yaml"))
        .output()
        .unwrap();
    fs::write(directory.join("alerts.yaml"), rules.stdout).unwrap();
    for file in ALERT_TESTS {
        fs::write(directory.join(file), monitoring(file)).unwrap();
    }
    promtool(&directory, &["check", "rules", "alerts.yaml"]);
    promtool(&directory, &[&["test", "rules"], &ALERT_TESTS[..]].concat());
    let tests = ALERT_TESTS.map(monitoring).concat();
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        assert!(tests.contains(&format!("alertname=\"{name}\"")), "{name} has no test");
    }
}

#[test]
fn every_alert_has_a_section_in_the_runbook() {
    let path = Path::new(testkit::ROOT).join("docs/runbook.md");
    let runbook = fs::read_to_string(path).unwrap();
    let sections: BTreeSet<String> =
        runbook.lines().filter_map(|line| line.strip_prefix("## ")).map(str::to_owned).collect();
    let anchors: BTreeSet<String> = sections.iter().map(|name| name.to_lowercase()).collect();
    let mut names = BTreeSet::new();
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        let annotations = &alert["annotations"];
        assert!(
            annotations["summary"].as_str().is_some_and(|summary| summary.ends_with('.')),
            "{name}"
        );
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        assert_eq!(annotations["runbook"], format!("docs/runbook.md#{}", name.to_lowercase()));
        names.insert(name.to_owned());
    }
    assert_eq!(sections, names);
    for link in runbook.split("](#").skip(1) {
        let anchor = link.split(')').next().unwrap();
        assert!(anchors.contains(anchor), "the runbook has no section {anchor}");
    }
}

#[test]
fn prometheus_parses_every_query_of_the_dashboard() {
    let rules: Vec<Value> = queries()
        .iter()
        .enumerate()
        .map(|(at, query)| json!({"record": format!("query_{at}"), "expr": query}))
        .collect();
    assert!(rules.len() >= 50, "{}", rules.len());
    let directory = scratch();
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(directory.join("dashboard.yaml"), rules.to_string()).unwrap();
    promtool(&directory, &["check", "rules", "dashboard.yaml"]);
}

/// All time series names of routers with and without the media gateway.
fn metric_series() -> BTreeSet<String> {
    let gateway = Router::start(&[("LOG_LEVEL", "off")]);
    exported(&gateway).union(&metric_series_without_gateway()).cloned().collect()
}

/// The router exports series with labels only after their first event, so every counted event is
/// triggered once.
fn metric_series_without_gateway() -> BTreeSet<String> {
    let server = RedisServer::start(&[]);
    let router = Router::start(&[
        ("REDIS_URL", &server.url()),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PUBLIC_URL", PUBLIC_URL),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        ("CONNECT_TIMEOUT", "1s"),
        ("LEASE_TTL", "2s"),
        ("HOLD_TIME", "1s"),
        ("HOLD_POLL", "1s"),
        ("RETRY_ON_DISCONNECT", "1"),
        ("API_TOKENS", "admin:secret"),
        ("LOG_LEVEL", "off"),
    ]);
    let allocate = |body: Value| router.post("/api/v1/allocate", body).0;
    // A stream that never starts, a call that is never released, a refused call, a waiting call,
    // a call over its merchant's limit, and a request without a token.
    assert!(start_call(&mut router.connect(), "T1").pod().is_some());
    router.allocate("J1");
    assert_eq!(allocate(json!({"call_sid": "J2"})), 503);
    allocate(json!({"call_sid": "J3", "wait": "1s"}));
    assert_eq!(router.put("/api/v1/merchants/acme", r#"{"max_calls": 0}"#).0, 200);
    assert_eq!(allocate(json!({"call_sid": "J4", "merchant_id": "acme"})), 503);
    assert_eq!(router.connect().get("/api/v1/status").status, 401);
    // An error in Redis.
    let mut redis = server.connection();
    let key = "voice:call:J5";
    redis::cmd("DEL").arg(key).exec(&mut redis).unwrap();
    redis::cmd("SET").arg(key).arg("junk").exec(&mut redis).unwrap();
    assert_eq!(allocate(json!({"call_sid": "J5", "merchant_id": "acme"})), 500);
    redis::cmd("DEL").arg(key).exec(&mut redis).unwrap();
    eventually(Duration::from_secs(10), "leases end", || router.status()["active_calls"] == 0);
    // A call whose stream disconnects, and a normal call.
    let first = start_call(&mut router.connect(), "T2");
    assert!(follow_redirect(&router, "T2", &first).pod().is_some());
    router.allocate("J6");
    assert_eq!(router.release("J6").0, 200);
    exported(&router)
}

/// The names of the time series that a router exports.
fn exported(router: &Router) -> BTreeSet<String> {
    let text = Connection::open(router.metrics).get("/metrics").text();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types
        .flat_map(|(name, kind)| {
            let endings: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            endings.iter().map(move |ending| format!("{name}{ending}"))
        })
        .collect()
}

#[test]
fn alerts_and_dashboard_use_only_exported_metrics() {
    let series = metric_series();
    let words = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.map(str::to_owned).collect()
    };
    for file in ["alerts.yaml", "dashboard.json"].into_iter().chain(ALERT_TESTS) {
        for word in words(&monitoring(file)) {
            let is_metric = word.starts_with("smart_router_") || word.starts_with("http_");
            assert!(!is_metric || series.contains(&word), "{file}: no router exports {word}");
        }
    }
    let rules = alerts();
    let rules = rules.iter().map(|alert| alert["expr"].as_str().unwrap().to_owned());
    for query in rules.chain(queries()) {
        let words = words(&query);
        assert!(words.contains("up") || !words.is_disjoint(&series), "{query}");
    }
}
