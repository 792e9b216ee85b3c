//! The manifests we ship: every one is what the API server would take, and says
//! nothing that the program does not understand. The alerts and the dashboard look
//! at nothing that a router does not tell.

use std::{
    collections::BTreeSet,
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
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
        rbac::v1::{Role, RoleBinding},
    },
    serde::{Serialize, de::DeserializeOwned},
};
use serde_json::{Value, json};

use testkit::{
    Connection, Router, eventually,
    provider::{PUBLIC_URL, again, call},
    redis::RedisServer,
    scratch,
};

fn deploy() -> PathBuf {
    Path::new(testkit::ROOT).join("deploy")
}

/// All documents of all manifests, each with its file.
fn documents() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for directory in ["base", "monitoring", "example", "nginx"] {
        for entry in fs::read_dir(deploy().join(directory)).unwrap() {
            let entry = entry.unwrap();
            // Rules and their tests are for Prometheus, not for the API server.
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

/// Keys of a manifest that its type does not know are lost when it is read and
/// written again; there must be none.
fn is_whole<T: DeserializeOwned + Serialize>(document: &Value) -> Result<(), String> {
    let typed: T = serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
    let again = serde_json::to_value(&typed).unwrap();
    fn lost(given: &Value, kept: &Value, path: &str) -> Option<String> {
        match (given, kept) {
            (Value::Object(given), Value::Object(kept)) => given.iter().find_map(|(key, value)| {
                let path = format!("{path}.{key}");
                let empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                match kept.get(key) {
                    Some(kept) => lost(value, kept, &path),
                    None if empty || value.is_null() => None,
                    None => Some(path),
                }
            }),
            (Value::Array(given), Value::Array(kept)) => given
                .iter()
                .zip(kept)
                .enumerate()
                .find_map(|(at, (given, kept))| lost(given, kept, &format!("{path}[{at}]"))),
            _ => None,
        }
    }
    lost(document, &again, "").map_or(Ok(()), |path| Err(format!("{path} is not known")))
}

#[test]
fn every_manifest_is_of_its_kind() {
    let documents = documents();
    assert!(documents.len() >= 18, "{}", documents.len());
    for (path, document) in documents {
        let whole = match document["kind"].as_str().unwrap() {
            "Deployment" => is_whole::<Deployment>(&document),
            "StatefulSet" => is_whole::<StatefulSet>(&document),
            "Service" => is_whole::<Service>(&document),
            "ServiceAccount" => is_whole::<ServiceAccount>(&document),
            "ConfigMap" => is_whole::<ConfigMap>(&document),
            "Role" => is_whole::<Role>(&document),
            "RoleBinding" => is_whole::<RoleBinding>(&document),
            "PodDisruptionBudget" => is_whole::<PodDisruptionBudget>(&document),
            "NetworkPolicy" => is_whole::<NetworkPolicy>(&document),
            // Not types of Kubernetes itself.
            "Kustomization" | "ServiceMonitor" => Ok(()),
            other => Err(format!("{other} is not expected here")),
        };
        whole.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
fn every_variable_is_one_that_the_program_knows() {
    let known: BTreeSet<String> = smart_router::cli::variables()
        .iter()
        .filter_map(Arg::get_env)
        .map(|name| name.to_str().unwrap().to_owned())
        .collect();
    let deployment: Deployment = base("Deployment");
    let spec = deployment.spec.unwrap().template.spec.unwrap();
    let container = &spec.containers[0];
    let config: ConfigMap = base("ConfigMap");
    let config = config.data.unwrap();
    let names = container.env.iter().flatten().map(|variable| &variable.name);
    for name in names.chain(config.keys()) {
        assert!(known.contains(name), "{name} is no setting of the program");
    }
    // And their values are good ones, together.
    let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
    command.env_clear().arg("check-config").envs(&config).env("PODS", "a=h:1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn pod_specs() -> Vec<PodSpec> {
    let deployments = all::<Deployment>("Deployment").into_iter();
    let deployments = deployments.map(|it| it.spec.unwrap().template.spec.unwrap());
    let sets = all::<StatefulSet>("StatefulSet").into_iter();
    deployments.chain(sets.map(|it| it.spec.unwrap().template.spec.unwrap())).collect()
}

#[test]
fn the_router_runs_with_the_least_rights() {
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
fn a_pod_has_more_time_to_end_than_its_drain_may_wait() {
    let agents = pod_specs()
        .into_iter()
        .find(|spec| spec.containers.iter().any(|it| it.name == "agent"))
        .unwrap();
    let hook = serde_json::to_string(&agents.containers).unwrap();
    assert!(hook.contains(r#"["/smart-router","drain","--wait","300s"]"#), "{hook}");
    assert_eq!(agents.containers.len(), 1, "a hook holds up its own container only");
    let grace = agents.termination_grace_period_seconds.unwrap();
    assert!(grace > 310 && grace < 360, "above the wait, below DRAINING_TTL: {grace}");
}

/// CoreDNS keeps an answer for up to 30 s in most clusters, nginx for its own time after that.
#[test]
fn agents_are_ready_once_their_names_lead_to_them() {
    let template = fs::read_to_string(deploy().join("nginx/smart-router.conf.template")).unwrap();
    let valid = template.split("valid=").nth(1).unwrap().split('s').next().unwrap();
    let valid: i32 = valid.parse().unwrap();
    let specs = pod_specs();
    let mut containers = specs.iter().flat_map(|spec| &spec.containers);
    let agent = containers.find(|it| it.name == "agent").unwrap();
    let delay = agent.readiness_probe.as_ref().unwrap().initial_delay_seconds;
    assert!(delay.is_some_and(|delay| delay >= 30 + valid), "{delay:?}");
}

#[test]
fn no_service_of_the_namespace_becomes_a_setting() {
    for spec in pod_specs() {
        let names: Vec<&str> = spec.containers.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(spec.enable_service_links, Some(false), "{names:?}");
    }
}

#[test]
fn kustomize_renders_them() {
    if Command::new("kubectl").arg("version").arg("--client").output().is_err() {
        println!("kubectl is not installed: not rendered");
        return;
    }
    for (directory, kinds) in [("base", 8), ("monitoring", 1), ("example", 4), ("nginx", 3)] {
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

/// What the panels of the dashboard ask, with a length of time as Grafana puts it in.
fn questions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&monitoring("dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let questions = targets.map(|target| target["expr"].as_str().unwrap());
    questions.map(|question| question.replace("$__rate_interval", "5m")).collect()
}

fn promtool(directory: &Path, args: &[&str]) {
    let output = Command::new("promtool").current_dir(directory).args(args).output();
    let output = output.expect("promtool is installed (Debian's package prometheus)");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&said));
}

#[test]
fn every_alert_fires_when_it_should_and_only_then() {
    let directory = deploy().join("monitoring");
    promtool(&directory, &["check", "rules", "alerts.yaml"]);
    promtool(&directory, &["test", "rules", "alerts_test.yaml", "alerts_days_test.yaml"]);
    let tests = monitoring("alerts_test.yaml") + &monitoring("alerts_days_test.yaml");
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        assert!(tests.contains(&format!("alertname=\"{name}\"")), "{name} has no test");
    }
}

#[test]
fn every_alert_has_its_section_in_the_runbook() {
    let path = Path::new(testkit::ROOT).join("docs/runbook.md");
    let runbook = fs::read_to_string(path).unwrap();
    let sections: BTreeSet<String> =
        runbook.lines().filter_map(|line| line.strip_prefix("## ")).map(str::to_owned).collect();
    let anchors: BTreeSet<String> = sections.iter().map(|name| name.to_lowercase()).collect();
    let mut names = BTreeSet::new();
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        let told = &alert["annotations"];
        assert!(told["summary"].as_str().is_some_and(|summary| summary.ends_with('.')), "{name}");
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        assert_eq!(told["runbook"], format!("docs/runbook.md#{}", name.to_lowercase()));
        names.insert(name.to_owned());
    }
    assert_eq!(sections, names);
    for link in runbook.split("](#").skip(1) {
        let anchor = link.split(')').next().unwrap();
        assert!(anchors.contains(anchor), "the runbook has no section {anchor}");
    }
}

#[test]
fn prometheus_understands_every_question_of_the_dashboard() {
    let rules: Vec<Value> = questions()
        .iter()
        .enumerate()
        .map(|(at, question)| json!({"record": format!("question_{at}"), "expr": question}))
        .collect();
    assert!(rules.len() >= 40, "{}", rules.len());
    let directory = scratch();
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(directory.join("dashboard.yaml"), rules.to_string()).unwrap();
    promtool(&directory, &["check", "rules", "dashboard.yaml"]);
}

/// What a router's metrics are called to which everything has happened that is
/// counted: those with labels are not there before.
fn series() -> BTreeSet<String> {
    let server = RedisServer::start(&[]);
    let router = Router::start(&[
        ("REDIS_URL", &server.url()),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PUBLIC_URL", PUBLIC_URL),
        ("CONNECT_TIMEOUT", "1s"),
        ("LEASE_TTL", "2s"),
        ("HOLD_TIME", "1s"),
        ("HOLD_POLL", "1s"),
        ("RETRY_ON_DISCONNECT", "1"),
        ("API_TOKENS", "admin:secret"),
        ("LOG_LEVEL", "off"),
    ]);
    let ask = |body: Value| router.post("/api/v1/allocate", body).0;
    // One whose stream never starts, one that is never released, one too many, one
    // that waits, one beyond a limit, and somebody without a token.
    assert!(call(&mut router.connect(), "T1").pod().is_some());
    router.allocate("J1");
    assert_eq!(ask(json!({"call_sid": "J2"})), 503);
    ask(json!({"call_sid": "J3", "wait": "1s"}));
    assert_eq!(router.put("/api/v1/merchants/acme", r#"{"max_calls": 0}"#).0, 200);
    assert_eq!(ask(json!({"call_sid": "J4", "merchant_id": "acme"})), 503);
    assert_eq!(router.connect().get("/api/v1/status").status, 401);
    // What Redis refuses.
    let mut redis = server.connection();
    let key = "voice:call:J5";
    redis::cmd("DEL").arg(key).exec(&mut redis).unwrap();
    redis::cmd("SET").arg(key).arg("junk").exec(&mut redis).unwrap();
    assert_eq!(ask(json!({"call_sid": "J5", "merchant_id": "acme"})), 500);
    redis::cmd("DEL").arg(key).exec(&mut redis).unwrap();
    eventually(Duration::from_secs(10), "leases end", || router.status()["active_calls"] == 0);
    // One whose stream is gone, and one as it should be.
    let first = call(&mut router.connect(), "T2");
    assert!(again(&router, "T2", &first).pod().is_some());
    router.allocate("J6");
    assert_eq!(router.release("J6").0, 200);

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
fn alerts_and_dashboard_look_at_what_a_router_tells() {
    let series = series();
    let words = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.map(str::to_owned).collect()
    };
    let files = ["alerts.yaml", "alerts_test.yaml", "alerts_days_test.yaml", "dashboard.json"];
    for file in files {
        for word in words(&monitoring(file)) {
            let is_metric = word.starts_with("smart_router_") || word.starts_with("http_");
            assert!(!is_metric || series.contains(&word), "{file}: no router has {word}");
        }
    }
    let rules = alerts();
    let rules = rules.iter().map(|alert| alert["expr"].as_str().unwrap().to_owned());
    for question in rules.chain(questions()) {
        let words = words(&question);
        assert!(words.contains("up") || !words.is_disjoint(&series), "{question}");
    }
}
