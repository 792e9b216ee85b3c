//! The shipped manifests: the API server would accept each, and they set only known settings.
//! Alerts and dashboard use only metrics that a router exports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use clap::Arg;
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, StatefulSet},
        core::v1::{ConfigMap, Container, PodSpec, Service, ServiceAccount},
        networking::v1::{Ingress, NetworkPolicy},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{Role, RoleBinding},
    },
    serde::{Serialize, de::DeserializeOwned},
};
use serde_json::{Value, json};

use testkit::{
    Connection, Router, eventually,
    provider::{PUBLIC_URL, follow_redirect, start_call},
    redis::RedisServer,
    scratch,
};

fn deploy() -> PathBuf {
    Path::new(testkit::ROOT).join("deploy")
}

/// All documents of all manifests, each with its file.
fn documents() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for directory in ["base", "monitoring", "example", "nginx", "nginx/example"] {
        for entry in fs::read_dir(deploy().join(directory)).unwrap() {
            let entry = entry.unwrap();
            // Rules and their tests belong to Prometheus, not to the API server.
            if entry.file_name().to_str().unwrap().starts_with("alerts") {
                continue;
            }
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                let text = fs::read_to_string(&path).unwrap();
                let documents: Vec<Value> = serde_saphyr::from_multiple(&text)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                found.extend(documents.into_iter().map(|it| (path.display().to_string(), it)));
            }
        }
    }
    found
}

fn all<T: DeserializeOwned>(kind: &str) -> Vec<T> {
    documents()
        .into_iter()
        .filter(|(_, document)| document["kind"] == kind)
        .map(|(path, document)| {
            serde_json::from_value(document).unwrap_or_else(|error| panic!("{path}: {error}"))
        })
        .collect()
}

fn base<T: DeserializeOwned>(kind: &str) -> T {
    let mut found = documents()
        .into_iter()
        .filter(|(path, document)| path.contains("/base/") && document["kind"] == kind);
    serde_json::from_value(found.next().unwrap().1).unwrap()
}

/// Checks for unknown fields: they are lost when the manifest is parsed and serialized again.
fn has_known_fields<T: DeserializeOwned + Serialize>(document: &Value) -> Result<(), String> {
    let typed: T = serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
    let reserialized = serde_json::to_value(&typed).unwrap();
    fn lost(given: &Value, parsed: &Value, path: &str) -> Option<String> {
        match (given, parsed) {
            (Value::Object(given), Value::Object(parsed)) => {
                given.iter().find_map(|(key, value)| {
                    let path = format!("{path}.{key}");
                    let empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                    match parsed.get(key) {
                        Some(parsed) => lost(value, parsed, &path),
                        None if empty || value.is_null() => None,
                        None => Some(path),
                    }
                })
            }
            (Value::Array(given), Value::Array(parsed)) => given
                .iter()
                .zip(parsed)
                .enumerate()
                .find_map(|(at, (given, parsed))| lost(given, parsed, &format!("{path}[{at}]"))),
            _ => None,
        }
    }
    lost(document, &reserialized, "").map_or(Ok(()), |path| Err(format!("{path} is not known")))
}

#[test]
fn every_manifest_matches_its_kind() {
    let documents = documents();
    assert!(documents.len() >= 23, "{}", documents.len());
    for (path, document) in documents {
        let result = match document["kind"].as_str().unwrap() {
            "Deployment" => has_known_fields::<Deployment>(&document),
            "StatefulSet" => has_known_fields::<StatefulSet>(&document),
            "Service" => has_known_fields::<Service>(&document),
            "ServiceAccount" => has_known_fields::<ServiceAccount>(&document),
            "ConfigMap" => has_known_fields::<ConfigMap>(&document),
            "Role" => has_known_fields::<Role>(&document),
            "RoleBinding" => has_known_fields::<RoleBinding>(&document),
            "PodDisruptionBudget" => has_known_fields::<PodDisruptionBudget>(&document),
            "NetworkPolicy" => has_known_fields::<NetworkPolicy>(&document),
            "Ingress" => has_known_fields::<Ingress>(&document),
            // These are not built-in types of Kubernetes.
            "Kustomization" | "ServiceMonitor" => Ok(()),
            other => Err(format!("{other} is not expected here")),
        };
        result.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
fn manifests_set_only_known_environment_variables() {
    let known: BTreeSet<String> = smart_router::cli::variables()
        .iter()
        .filter_map(Arg::get_env)
        .map(|name| name.to_str().unwrap().to_owned())
        .collect();
    let deployment: Deployment = base("Deployment");
    let spec = deployment.spec.unwrap().template.spec.unwrap();
    let container = &spec.containers[0];
    let names = container.env.iter().flatten().map(|variable| &variable.name);
    let (settings, nginx_settings) = (settings(), nginx_settings());
    for name in names.chain(settings.keys()).chain(nginx_settings.keys()) {
        assert!(known.contains(name), "{name} is not a setting of the program");
    }
}

/// The settings of `deploy/base`.
fn settings() -> BTreeMap<String, String> {
    base::<ConfigMap>("ConfigMap").data.unwrap()
}

/// The settings of `deploy/nginx`: those of the base, with the overlay's patch.
fn nginx_settings() -> BTreeMap<String, String> {
    let patch = patch_of("nginx", "ConfigMap");
    let mut settings = settings();
    for (name, value) in patch["data"].as_object().unwrap() {
        match value.as_str() {
            Some(value) => settings.insert(name.clone(), value.to_owned()),
            None => settings.remove(name),
        };
    }
    settings
}

/// The patch of an overlay for the object of a kind.
fn patch_of(directory: &str, kind: &str) -> Value {
    let overlay = fs::read_to_string(deploy().join(directory).join("kustomization.yaml")).unwrap();
    let overlay: Value = serde_saphyr::from_str(&overlay).unwrap();
    let patches = overlay["patches"].as_array().unwrap().iter();
    let mut patches = patches.map(|patch| -> Value {
        serde_saphyr::from_str(patch["patch"].as_str().unwrap()).unwrap()
    });
    patches.find(|patch| patch["kind"] == kind).unwrap()
}

/// The output of `check-config` for settings.
fn check_config(settings: &BTreeMap<String, String>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
    command.env_clear().arg("check-config").envs(settings).env("PODS", "a=h:1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn streams_go_through_the_gateway_unless_nginx_is_applied() {
    let lines = |text: &str, line: &str| text.lines().any(|it| it == line);
    let shown = check_config(&settings());
    assert!(lines(&shown, "MEDIA_URL=wss://voice.example.com"), "{shown}");
    assert!(lines(&shown, "VOICE_AGENT_BASE_URL="), "{shown}");
    let shown = check_config(&nginx_settings());
    assert!(lines(&shown, "MEDIA_URL="), "{shown}");
    assert!(lines(&shown, "VOICE_AGENT_BASE_URL=wss://voice.example.com"), "{shown}");
    assert!(lines(&shown, "STREAM_STATUS=on"), "{shown}");
}

#[test]
fn the_network_policy_lets_routers_reach_the_agents() {
    let policy: NetworkPolicy = base("NetworkPolicy");
    let egress = policy.spec.unwrap().egress.unwrap();
    let policy = serde_json::to_string(&egress).unwrap();
    let settings = settings();
    let (name, value) = settings["POD_LABEL_SELECTOR"].split_once('=').unwrap();
    assert!(policy.contains(&format!(r#"{{"{name}":"{value}"}}"#)), "{policy}");
    let port = &settings["VOICE_AGENT_PORT"];
    assert!(policy.contains(&format!(r#"{{"port":{port}}}"#)), "{policy}");
}

/// A stopping router pauses, finishes its requests, and closes its streams.
#[test]
fn routers_have_time_to_close_their_streams() {
    const CLOSE_STREAMS: i64 = 10;
    let spec = base::<Deployment>("Deployment").spec.unwrap().template.spec.unwrap();
    let lifecycle = spec.containers[0].lifecycle.as_ref().unwrap();
    let pause = lifecycle.pre_stop.as_ref().unwrap().sleep.as_ref().unwrap().seconds;
    let shown = check_config(&settings());
    let requests = shown.lines().find_map(|it| it.strip_prefix("HTTP_SHUTDOWN_TIMEOUT="));
    let requests: i64 = requests.unwrap().trim_end_matches('s').parse().unwrap();
    let grace = spec.termination_grace_period_seconds.unwrap();
    assert!(grace > pause + requests + CLOSE_STREAMS, "{grace}");
}

fn pod_specs() -> Vec<PodSpec> {
    let deployments = all::<Deployment>("Deployment").into_iter();
    let deployments = deployments.map(|it| it.spec.unwrap().template.spec.unwrap());
    let sets = all::<StatefulSet>("StatefulSet").into_iter();
    deployments.chain(sets.map(|it| it.spec.unwrap().template.spec.unwrap())).collect()
}

#[test]
fn the_router_runs_with_least_privilege() {
    let role: Role = base("Role");
    let rules: Vec<(Vec<String>, Vec<String>)> = role
        .rules
        .unwrap()
        .into_iter()
        .map(|rule| (rule.resources.unwrap_or_default(), rule.verbs))
        .collect();
    let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        rules,
        [
            (texts(&["pods"]), texts(&["list", "watch"])),
            (texts(&["namespaces"]), texts(&["get"])),
            (texts(&["leases"]), texts(&["create"])),
            (texts(&["leases"]), texts(&["get", "update"])),
        ]
    );
    let deployment: Deployment = base("Deployment");
    let spec = deployment.spec.unwrap();
    assert_eq!(spec.replicas, Some(3));
    let spec = spec.template.spec.unwrap();
    assert_eq!(spec.security_context.unwrap().run_as_non_root, Some(true));
    assert!(spec.affinity.unwrap().pod_anti_affinity.is_some());
    let container: &Container = &spec.containers[0];
    let security = container.security_context.clone().unwrap();
    assert_eq!(security.read_only_root_filesystem, Some(true));
    assert_eq!(security.allow_privilege_escalation, Some(false));
    assert_eq!(security.capabilities.unwrap().drop.unwrap(), ["ALL"]);
    assert!(container.resources.is_some() && container.readiness_probe.is_some());
    assert!(container.liveness_probe.is_some() && container.startup_probe.is_some());
}

#[test]
fn the_termination_grace_period_exceeds_the_drain_wait() {
    let agents = pod_specs()
        .into_iter()
        .find(|spec| spec.containers.iter().any(|it| it.name == "agent"))
        .unwrap();
    let hook = serde_json::to_string(&agents.containers).unwrap();
    assert!(hook.contains(r#"["/smart-router","drain","--wait","300s"]"#), "{hook}");
    assert_eq!(agents.containers.len(), 1, "a preStop hook delays only its own container");
    let grace = agents.termination_grace_period_seconds.unwrap();
    assert!(grace > 310 && grace < 360, "above the wait, below DRAINING_TTL: {grace}");
}

/// CoreDNS caches a record for up to 30 s in most clusters, and nginx for its own time after that.
#[test]
fn agents_behind_nginx_become_ready_only_after_dns_caches_expire() {
    let template = fs::read_to_string(deploy().join("nginx/smart-router.conf.template")).unwrap();
    let valid = template.split("valid=").nth(1).unwrap().split('s').next().unwrap();
    let valid: i64 = valid.parse().unwrap();
    let agents = patch_of("nginx/example", "StatefulSet");
    let agent = &agents["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(agent["name"], "agent");
    let delay = agent["readinessProbe"]["initialDelaySeconds"].as_i64().unwrap();
    assert!(delay >= 30 + valid, "{delay}");
}

#[test]
fn service_links_do_not_become_settings() {
    for spec in pod_specs() {
        let names: Vec<&str> = spec.containers.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(spec.enable_service_links, Some(false), "{names:?}");
    }
}

#[test]
fn kustomize_renders_the_manifests() {
    if Command::new("kubectl").arg("version").arg("--client").output().is_err() {
        println!("kubectl is not installed; skipping");
        return;
    }
    for (directory, kinds) in
        [("base", 8), ("monitoring", 1), ("example", 7), ("nginx", 11), ("nginx/example", 5)]
    {
        let output = Command::new("kubectl")
            .arg("kustomize")
            .arg(deploy().join(directory))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found = text.lines().filter(|line| line.starts_with("kind:")).count();
        assert_eq!(found, kinds, "{directory}");
    }
}

fn monitoring(file: &str) -> String {
    fs::read_to_string(deploy().join("monitoring").join(file)).unwrap()
}

fn alerts() -> Vec<Value> {
    let rules: Value = serde_saphyr::from_str(&monitoring("alerts.yaml")).unwrap();
    let groups = rules["groups"].as_array().unwrap().iter();
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

const ALERT_TESTS: [&str; 3] =
    ["alerts_test.yaml", "alerts_days_test.yaml", "alerts_media_test.yaml"];

#[test]
fn every_alert_has_passing_tests() {
    let directory = deploy().join("monitoring");
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
