//! The level `restricted` of the Pod Security Standards, for every pod of `deploy/`.

use k8s_openapi::api::core::v1::{Container, PodSpec, SecurityContext};
use serde_json::{Value, json};

use crate::deploy::pod_specs;

/// Volumes that the level allows.
const VOLUMES: [&str; 8] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

fn check_container(pod: &PodSpec, container: &Container) -> Result<(), String> {
    let name = &container.name;
    let of_pod = pod.security_context.clone().unwrap_or_default();
    let context: SecurityContext = container.security_context.clone().unwrap_or_default();
    let require = |holds: bool, rule: &str| {
        if holds { Ok(()) } else { Err(format!("container {name}: {rule}")) }
    };
    require(context.privileged != Some(true), "privileged")?;
    require(context.allow_privilege_escalation == Some(false), "allowPrivilegeEscalation")?;
    let non_root = context.run_as_non_root.or(of_pod.run_as_non_root);
    require(non_root == Some(true), "runAsNonRoot")?;
    let user = context.run_as_user.or(of_pod.run_as_user);
    require(user != Some(0), "runAsUser")?;
    let seccomp = context.seccomp_profile.or(of_pod.seccomp_profile);
    let seccomp = seccomp.map(|profile| profile.type_);
    let confined = ["RuntimeDefault", "Localhost"];
    require(seccomp.is_some_and(|it| confined.contains(&it.as_str())), "seccompProfile")?;
    let capabilities = context.capabilities.unwrap_or_default();
    let dropped = capabilities.drop.unwrap_or_default();
    require(dropped.iter().any(|it| it == "ALL"), "capabilities.drop")?;
    let added = capabilities.add.unwrap_or_default();
    require(added.iter().all(|it| it == "NET_BIND_SERVICE"), "capabilities.add")?;
    require(context.proc_mount.is_none_or(|it| it == "Default"), "procMount")?;
    let ports = container.ports.iter().flatten();
    require(ports.map(|port| port.host_port).all(|it| it.is_none_or(|it| it == 0)), "hostPort")?;
    let probes = [&container.liveness_probe, &container.readiness_probe, &container.startup_probe];
    let hosts =
        probes.into_iter().flatten().filter_map(|probe| probe.http_get.as_ref()?.host.as_ref());
    require(hosts.count() == 0, "probe.httpGet.host")
}

fn is_restricted(pod: &PodSpec) -> Result<(), String> {
    for (set, rule) in
        [(pod.host_network, "hostNetwork"), (pod.host_pid, "hostPID"), (pod.host_ipc, "hostIPC")]
    {
        if set == Some(true) {
            return Err(rule.into());
        }
    }
    let sysctls = pod.security_context.as_ref().and_then(|it| it.sysctls.clone());
    if sysctls.is_some_and(|it| !it.is_empty()) {
        return Err("sysctls".into());
    }
    for volume in pod.volumes.iter().flatten() {
        let Value::Object(fields) = json!(volume) else { unreachable!("a volume is an object") };
        let source = fields.keys().find(|key| *key != "name").map(String::as_str);
        if !source.is_none_or(|source| VOLUMES.contains(&source)) {
            return Err(format!("volume {}: {}", volume.name, source.unwrap_or_default()));
        }
    }
    let initial = pod.init_containers.iter().flatten();
    pod.containers.iter().chain(initial).try_for_each(|it| check_container(pod, it))
}

#[test]
fn every_pod_passes_the_level_restricted() {
    for (name, pod) in pod_specs() {
        is_restricted(&pod).unwrap_or_else(|rule| panic!("{name}: {rule}"));
    }
}

/// Pods also limit their memory, request resources, and cannot write to their image. Only the
/// routers use the Kubernetes API.
#[test]
fn every_pod_has_resources_probes_and_no_needless_token() {
    for (name, pod) in pod_specs() {
        for container in &pod.containers {
            let resources = container.resources.clone().unwrap_or_default();
            assert!(resources.requests.unwrap_or_default().contains_key("cpu"), "{name}");
            assert!(resources.limits.unwrap_or_default().contains_key("memory"), "{name}");
            assert!(container.readiness_probe.is_some(), "{name}");
            let context = container.security_context.clone().unwrap();
            assert_eq!(context.read_only_root_filesystem, Some(true), "{name}");
        }
        let is_router = pod.service_account_name.as_deref() == Some("smart-router");
        assert!(is_router || pod.automount_service_account_token == Some(false), "{name}");
    }
}

/// The check itself finds each violation.
#[test]
fn the_check_finds_each_violation() {
    let sound = || -> Value {
        let (_, pod) = pod_specs().remove(0);
        assert_eq!(is_restricted(&pod), Ok(()));
        json!(pod)
    };
    let cases = [
        ("/hostNetwork", json!(true), "hostNetwork"),
        ("/securityContext/runAsNonRoot", json!(false), "runAsNonRoot"),
        ("/securityContext/runAsUser", json!(0), "runAsUser"),
        ("/securityContext/seccompProfile/type", json!("Unconfined"), "seccompProfile"),
        ("/containers/0/securityContext/allowPrivilegeEscalation", json!(true), "Escalation"),
        ("/containers/0/securityContext/capabilities/drop", json!([]), "capabilities.drop"),
        ("/containers/0/securityContext/capabilities/add", json!(["SYS_ADMIN"]), "add"),
        ("/containers/0/securityContext/privileged", json!(true), "privileged"),
        ("/containers/0/ports/0/hostPort", json!(80), "hostPort"),
        ("/volumes", json!([{"name": "a", "hostPath": {"path": "/"}}]), "volume a: hostPath"),
    ];
    for (path, value, expected) in cases {
        let mut pod = sound();
        let (parent, field) = path.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[field] = value;
        let pod: PodSpec = serde_json::from_value(pod).unwrap();
        let rule = is_restricted(&pod).unwrap_err();
        assert!(rule.contains(expected), "{path}: {rule}");
    }
}
