//! Rendered objects against the schemas of Kubernetes, the Gateway API, the Prometheus operator and
//! KEDA.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    agent_stacks::{node, python},
    render::everything,
};

/// Versions of Kubernetes: the oldest that the manifests support, and the newest with a schema.
const VERSIONS: [&str; 2] = ["1.30.0", "1.37.0"];

/// Runs a checker with the objects as its input; returns its errors.
fn run(mut command: Command, objects: &[Value]) -> Result<(), String> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let input = serde_json::to_vec(objects).unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn check(objects: &[Value]) -> Result<(), String> {
    let is_custom = |object: &Value| {
        let group = object["apiVersion"].as_str().unwrap();
        ["gateway.", "monitoring.", "keda."].iter().any(|it| group.starts_with(it))
    };
    let (custom, built_in): (Vec<Value>, Vec<Value>) = objects.iter().cloned().partition(is_custom);
    for version in VERSIONS {
        let mut command = python("kubernetes_schemas.py");
        command.arg(version);
        run(command, &built_in).map_err(|error| format!("Kubernetes {version}: {error}"))?;
    }
    run(node("custom_resources.mjs"), &custom)
}

#[test]
fn every_object_matches_the_schemas_of_kubernetes() {
    let objects = everything();
    let (sources, objects): (Vec<String>, Vec<Value>) = objects.into_iter().unzip();
    assert!(objects.len() > 70, "{}", objects.len());
    check(&objects).unwrap_or_else(|error| panic!("{error}\n{sources:?}"));
}

/// The checkers themselves: each finds a wrong object.
#[test]
fn the_schemas_refuse_wrong_objects() {
    let service = |spec: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": spec});
    let route = |kind: &str| {
        json!({
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": "a"},
            "spec": {"rules": [{"matches": [{"path": {"type": kind, "value": "/"}}]}]},
        })
    };
    assert_eq!(check(&[service(json!({"clusterIP": "None"})), route("PathPrefix")]), Ok(()));
    for (wrong, expected) in [
        (service(json!({"clusterIp": "None"})), "clusterIp"),
        (service(json!({"ports": [{"port": "http"}]})), "ports.0.port"),
        (route("Prefix"), "path/type"),
    ] {
        let error = check(&[wrong]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
