//! The manifests we ship: every one is what the API server would take, and says
//! nothing that the program does not understand.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
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
use serde_json::Value;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

/// All documents of all manifests, each with its file.
fn documents() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for directory in ["base", "monitoring", "example", "nginx"] {
        for entry in fs::read_dir(deploy().join(directory)).unwrap() {
            let path = entry.unwrap().path();
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
