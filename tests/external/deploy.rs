//! The shipped manifests: the API server would accept each, and they set only known settings.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use clap::Arg;
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, StatefulSet},
        autoscaling::v2::HorizontalPodAutoscaler,
        core::v1::{ConfigMap, Container, PodSpec, Service, ServiceAccount},
        networking::v1::{Ingress, NetworkPolicy},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding},
        scheduling::v1::PriorityClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    serde::{Serialize, de::DeserializeOwned},
};
use serde_json::{Value, json};
use testkit::scratch;

use crate::render::{deploy, everything, kustomize};

/// The only object of a kind that a directory renders to.
fn manifest<T: DeserializeOwned>(directory: &str, kind: &str) -> T {
    find(directory, kind, |_| true)
}

fn base<T: DeserializeOwned>(kind: &str) -> T {
    manifest("base", kind)
}

/// The object of a kind with this name.
fn named<T: DeserializeOwned>(directory: &str, kind: &str, name: &str) -> T {
    find(directory, kind, |object| object["metadata"]["name"] == name)
}

fn find<T: DeserializeOwned>(directory: &str, kind: &str, which: impl Fn(&Value) -> bool) -> T {
    let objects = kustomize(directory).into_iter();
    let mut found: Vec<Value> =
        objects.filter(|object| object["kind"] == kind && which(object)).collect();
    assert_eq!(found.len(), 1, "{directory}: {kind}");
    serde_json::from_value(found.remove(0)).unwrap()
}

/// The directories of routers and media processes, each with the name of its Deployment.
const PROCESSES: [(&str, &str); 2] = [("base", "smart-router"), ("media", "smart-router-media")];

fn pod_spec(directory: &str, name: &str) -> PodSpec {
    let deployment: Deployment = named(directory, "Deployment", name);
    deployment.spec.unwrap().template.spec.unwrap()
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
    for (path, document) in everything() {
        let result = match document["kind"].as_str().unwrap() {
            "Deployment" => has_known_fields::<Deployment>(&document),
            "StatefulSet" => has_known_fields::<StatefulSet>(&document),
            "Service" => has_known_fields::<Service>(&document),
            "ServiceAccount" => has_known_fields::<ServiceAccount>(&document),
            "ConfigMap" => has_known_fields::<ConfigMap>(&document),
            "Role" => has_known_fields::<Role>(&document),
            "RoleBinding" => has_known_fields::<RoleBinding>(&document),
            "ClusterRole" => has_known_fields::<ClusterRole>(&document),
            "ClusterRoleBinding" => has_known_fields::<ClusterRoleBinding>(&document),
            "CustomResourceDefinition" => has_known_fields::<CustomResourceDefinition>(&document),
            "HorizontalPodAutoscaler" => has_known_fields::<HorizontalPodAutoscaler>(&document),
            "PodDisruptionBudget" => has_known_fields::<PodDisruptionBudget>(&document),
            "PriorityClass" => has_known_fields::<PriorityClass>(&document),
            "NetworkPolicy" => has_known_fields::<NetworkPolicy>(&document),
            "Ingress" => has_known_fields::<Ingress>(&document),
            // These are not built-in types of Kubernetes; schemas.rs checks them.
            "ServiceMonitor" | "PrometheusRule" | "Gateway" | "HTTPRoute" => Ok(()),
            "ScaledObject" => keda_reads_the_capacity(&document),
            "TriggerAuthentication" => Ok(()),
            other => Err(format!("{other} is not expected here")),
        };
        result.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// KEDA makes the published number the replicas, and authenticates.
fn keda_reads_the_capacity(document: &Value) -> Result<(), String> {
    let trigger = &document["spec"]["triggers"][0];
    let metadata = &trigger["metadata"];
    let is_number = trigger["metricType"] == "AverageValue" && metadata["targetValue"] == "1";
    let url = metadata["url"].as_str().unwrap_or_default();
    let is_read =
        url.ends_with("/api/v1/capacity") && metadata["valueLocation"] == "pools.gold.desired";
    let has_token = metadata["authMode"] == "bearer" && trigger["authenticationRef"].is_object();
    (is_number && is_read && has_token).then_some(()).ok_or_else(|| trigger.to_string())
}

/// Scaling is off in `base`, whose Role allows no writes of workloads.
#[test]
fn scaling_has_roles_of_its_own() {
    let rules = |directory: &str, name: &str| {
        let role: Role = named(directory, "Role", name);
        let rules = role.rules.unwrap().into_iter();
        let text = |rule: PolicyRule| format!("{:?} {:?}", rule.resources.unwrap(), rule.verbs);
        rules.map(text).collect::<Vec<_>>()
    };
    for directory in ["autoscaling/direct", "autoscaling/keda", "autoscaling/hpa"] {
        assert_eq!(rules(directory, "smart-router-marks"), [r#"["pods"] ["patch"]"#]);
    }
    assert_eq!(
        rules("autoscaling/direct", "smart-router-scaling"),
        [
            r#"["deployments/scale", "statefulsets/scale"] ["get", "update"]"#,
            r#"["statefulsets"] ["get"]"#,
            r#"["horizontalpodautoscalers"] ["list"]"#,
        ]
    );
    assert!(!settings("base").contains_key("SCALING"));
}

#[test]
fn manifests_set_only_known_environment_variables() {
    let known: BTreeSet<String> = smart_router::cli::variables()
        .iter()
        .filter_map(Arg::get_env)
        .map(|name| name.to_str().unwrap().to_owned())
        .collect();
    let mut names: BTreeSet<String> = settings("base").into_keys().collect();
    names.extend(settings("media").into_keys());
    names.extend(settings("nginx").into_keys());
    for (directory, name) in PROCESSES {
        let spec = pod_spec(directory, name);
        let variables = spec.containers[0].env.iter().flatten();
        names.extend(variables.map(|variable| variable.name.clone()));
    }
    for name in names {
        assert!(known.contains(&name), "{name} is not a setting of the program");
    }
}

/// The settings of a directory.
fn settings(directory: &str) -> BTreeMap<String, String> {
    find::<ConfigMap>(directory, "ConfigMap", |object| object["data"]["REDIS_URL"].is_string())
        .data
        .unwrap()
}

/// The output of `check-config` for the settings of a router, with a Secret at its place.
fn check_config(settings: &BTreeMap<String, String>) -> String {
    run_check_config(settings, &[], &[("PODS", "a=h:1")])
}

fn run_check_config(
    settings: &BTreeMap<String, String>,
    arguments: &[&str],
    more: &[(&str, &str)],
) -> String {
    let secrets = scratch();
    fs::write(secrets.join("API_TOKENS"), "admin:0123456789abcdef").unwrap();
    fs::write(secrets.join("TWILIO_AUTH_TOKEN"), "0123456789abcdef").unwrap();
    let secrets = secrets.to_str().unwrap();
    let settings = settings
        .iter()
        .map(|(name, value)| (name, value.replace("/etc/smart-router/secrets", secrets)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
    let variables = more.iter().copied();
    command.env_clear().arg("check-config").args(arguments).envs(settings).envs(variables);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn streams_go_through_the_gateway_unless_nginx_is_applied() {
    let lines = |text: &str, line: &str| text.lines().any(|it| it == line);
    let shown = check_config(&settings("base"));
    assert!(lines(&shown, "MEDIA_URL=wss://voice.example.com"), "{shown}");
    assert!(lines(&shown, "VOICE_AGENT_BASE_URL="), "{shown}");
    let shown = check_config(&settings("nginx"));
    assert!(lines(&shown, "MEDIA_URL="), "{shown}");
    assert!(lines(&shown, "VOICE_AGENT_BASE_URL=wss://voice.example.com"), "{shown}");
    assert!(lines(&shown, "STREAM_STATUS=on"), "{shown}");
}

/// Kubernetes sets the first variable in every pod, and the manifest mounts no token.
#[test]
fn media_processes_start_with_the_settings_of_their_overlay() {
    let in_cluster = [
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
        // The manifest does not mount this key.
        ("API_TOKENS_FILE", ""),
    ];
    let shown = run_check_config(&settings("media"), &["--media"], &in_cluster);
    assert!(shown.lines().any(|it| it == "MEDIA_URL=wss://media.example.com"), "{shown}");
    let spec = pod_spec("media", "smart-router-media");
    assert_eq!(spec.automount_service_account_token, Some(false));
    let container = &spec.containers[0];
    assert_eq!(container.args.as_deref().unwrap(), ["media"]);
    let variables = json!(container.env);
    assert_eq!(variables[1], json!({"name": "API_TOKENS_FILE", "value": ""}));
    let secret = json!(spec.volumes)[0]["secret"]["items"].clone();
    assert_eq!(secret, json!([{"key": "TWILIO_AUTH_TOKEN", "path": "TWILIO_AUTH_TOKEN"}]));
    let settings = container.env_from.as_ref().unwrap()[0].config_map_ref.as_ref().unwrap();
    let shared: ConfigMap = manifest("media", "ConfigMap");
    assert_eq!(Some(&settings.name), shared.metadata.name.as_ref(), "that of the routers");
    let ingress: Ingress = named("media/example", "Ingress", "smart-router-media");
    let host = ingress.spec.unwrap().rules.unwrap();
    assert_eq!(host[0].host.as_deref(), Some("media.example.com"));
}

#[test]
fn services_and_budgets_select_the_pods_of_their_deployment() {
    for (directory, name) in PROCESSES {
        let deployment = named::<Deployment>(directory, "Deployment", name).spec.unwrap();
        let labels = deployment.template.metadata.unwrap().labels;
        let service = named::<Service>(directory, "Service", name).spec.unwrap();
        let kind = "PodDisruptionBudget";
        let budget = named::<PodDisruptionBudget>(directory, kind, name).spec.unwrap();
        let policy = named::<NetworkPolicy>(directory, "NetworkPolicy", name).spec.unwrap();
        assert_eq!(service.selector, labels, "{directory}");
        assert_eq!(budget.selector.unwrap().match_labels, labels, "{directory}");
        assert_eq!(policy.pod_selector.unwrap().match_labels, labels, "{directory}");
    }
}

#[test]
fn the_network_policies_let_gateways_reach_the_agents() {
    let settings = settings("base");
    let (label, value) = settings["POD_LABEL_SELECTOR"].split_once('=').unwrap();
    for agents in ["example", "agents"] {
        let agents: NetworkPolicy = named(agents, "NetworkPolicy", "voice-agent");
        let admitted = serde_json::to_string(&agents.spec.unwrap().ingress).unwrap();
        for (directory, name) in PROCESSES {
            let policy: NetworkPolicy = named(directory, "NetworkPolicy", name);
            let egress = policy.spec.unwrap().egress.unwrap();
            let policy = serde_json::to_string(&egress).unwrap();
            assert!(policy.contains(&format!(r#"{{"{label}":"{value}"}}"#)), "{policy}");
            let port = &settings["VOICE_AGENT_PORT"];
            assert!(policy.contains(&format!(r#"{{"port":{port}}}"#)), "{policy}");
            let deployment = named::<Deployment>(directory, "Deployment", name).spec.unwrap();
            let labels = deployment.template.metadata.unwrap().labels.unwrap();
            assert!(admitted.contains(&format!(r#""{}""#, labels["app"])), "{admitted}");
        }
    }
}

#[test]
fn media_processes_accept_streams_from_anywhere_and_need_no_api_server() {
    let policy =
        named::<NetworkPolicy>("media", "NetworkPolicy", "smart-router-media").spec.unwrap();
    let ingress = json!(policy.ingress.unwrap());
    assert_eq!(ingress[0], json!({"ports": [{"port": "http"}]}), "from anywhere");
    let egress = policy.egress.unwrap();
    let ports = egress.iter().flat_map(|rule| rule.ports.iter().flatten());
    let ports: BTreeSet<String> = ports.map(|port| json!(port.port).to_string()).collect();
    assert_eq!(ports, ["53", "8000", "6379", "26379"].map(str::to_owned).into());
}

/// The seconds of a duration in the output of `check-config`.
fn seconds(shown: &str, setting: &str) -> i64 {
    let value = shown.lines().find_map(|it| it.strip_prefix(setting)?.strip_prefix('='));
    let value = value.unwrap();
    let (number, unit) = value.split_at(value.len() - 1);
    let number: i64 = number.parse().unwrap();
    number * [("s", 1), ("m", 60), ("h", 3600)].iter().find(|it| it.0 == unit).unwrap().1
}

/// A stopping process pauses, finishes its requests while it drains its streams, and closes the
/// rest of them.
#[test]
fn processes_have_time_to_drain_and_close_their_streams() {
    const CLOSE_STREAMS: i64 = 10;
    for (directory, name) in PROCESSES {
        let spec = pod_spec(directory, name);
        let lifecycle = spec.containers[0].lifecycle.as_ref().unwrap();
        let pause = lifecycle.pre_stop.as_ref().unwrap().sleep.as_ref().unwrap().seconds;
        let shown = check_config(&settings(directory));
        let (requests, drain) =
            (seconds(&shown, "HTTP_SHUTDOWN_TIMEOUT"), seconds(&shown, "MEDIA_DRAIN_TIME"));
        let grace = spec.termination_grace_period_seconds.unwrap();
        assert!(grace > pause + requests.max(drain) + CLOSE_STREAMS, "{directory}: {grace}");
    }
}

/// The pods of all workloads, each with its source and name.
pub(crate) fn pod_specs() -> Vec<(String, PodSpec)> {
    let pods = everything().into_iter().filter_map(|(path, object)| {
        let spec = object["spec"]["template"]["spec"].clone();
        let name = format!("{path}: {} {}", object["kind"], object["metadata"]["name"]);
        spec.is_object().then(|| (name, serde_json::from_value(spec).unwrap()))
    });
    let pods: Vec<(String, PodSpec)> = pods.collect();
    assert!(pods.len() >= 12, "{}", pods.len());
    pods
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
            (texts(&["voicetiers", "voicemerchants"]), texts(&["list", "watch"])),
            (texts(&["voicetiers/status", "voicemerchants/status"]), texts(&["patch"])),
            (texts(&["events"]), texts(&["create", "patch"])),
        ]
    );
    let nodes: ClusterRole = base("ClusterRole");
    let [rule] = &nodes.rules.unwrap()[..] else { panic!("one rule") };
    assert_eq!(
        (&rule.resources, &rule.verbs),
        (&Some(texts(&["nodes"])), &texts(&["list", "watch"]))
    );
    let deployment: Deployment = base("Deployment");
    assert_eq!(deployment.spec.unwrap().replicas, Some(3));
    for (directory, name) in PROCESSES {
        let spec = pod_spec(directory, name);
        assert_eq!(spec.security_context.unwrap().run_as_non_root, Some(true));
        assert!(spec.affinity.unwrap().pod_anti_affinity.is_some());
        let spread = spec.topology_spread_constraints.unwrap();
        assert_eq!(spread[0].topology_key, "topology.kubernetes.io/zone");
        let class: PriorityClass = base("PriorityClass");
        assert_eq!(spec.priority_class_name, class.metadata.name);
        let container: &Container = &spec.containers[0];
        let security = container.security_context.clone().unwrap();
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.allow_privilege_escalation, Some(false));
        assert_eq!(security.capabilities.unwrap().drop.unwrap(), ["ALL"]);
        assert!(container.resources.is_some());
    }
}

/// The port of streams closes when a drain begins.
#[test]
fn probes_use_the_port_that_stays_open_during_a_drain() {
    for (directory, name) in PROCESSES {
        let spec = pod_spec(directory, name);
        let container = &spec.containers[0];
        let probes =
            [&container.startup_probe, &container.liveness_probe, &container.readiness_probe];
        for probe in probes {
            let request = probe.as_ref().unwrap().http_get.as_ref().unwrap();
            assert_eq!(json!(request.port), "metrics", "{directory}");
        }
    }
}

#[test]
fn the_termination_grace_period_exceeds_the_drain_wait() {
    let agents: StatefulSet = named("example", "StatefulSet", "voice-agent");
    let agents = agents.spec.unwrap().template.spec.unwrap();
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
    let agents: StatefulSet = named("nginx/example", "StatefulSet", "voice-agent");
    let spec = agents.spec.unwrap().template.spec.unwrap();
    let delay = spec.containers[0].readiness_probe.as_ref().unwrap().initial_delay_seconds;
    let delay = i64::from(delay.unwrap());
    assert!(delay >= 30 + valid, "{delay}");
}

#[test]
fn service_links_do_not_become_settings() {
    for (name, spec) in pod_specs() {
        assert_eq!(spec.enable_service_links, Some(false), "{name}");
    }
}

/// Agents as a Deployment need nothing of the router: no hook, no token, no name.
#[test]
fn agents_of_a_deployment_have_no_hook() {
    let spec = pod_spec("agents", "voice-agent");
    let agent = &spec.containers[0];
    assert!(agent.lifecycle.is_none());
    let names: Vec<&str> = agent.env.iter().flatten().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["POD_NAME"]);
    let statefulset: StatefulSet = named("example", "StatefulSet", "voice-agent");
    let grace = spec.termination_grace_period_seconds;
    let other = statefulset.spec.unwrap().template.spec.unwrap();
    assert_eq!(grace, other.termination_grace_period_seconds, "calls end in the same time");
}

/// A ConfigMap with changed settings has another name, so that the Deployment changes.
#[test]
fn changed_settings_change_the_name_of_the_config_map() {
    let name = |directory: &str| -> String {
        let found: ConfigMap =
            find(directory, "ConfigMap", |object| object["data"]["REDIS_URL"].is_string());
        found.metadata.name.unwrap()
    };
    for (directory, deployment) in PROCESSES {
        let spec = pod_spec(directory, deployment);
        let used = spec.containers[0].env_from.as_ref().unwrap()[0].config_map_ref.as_ref();
        assert_eq!(used.unwrap().name, name(directory));
    }
    assert_ne!(name("base"), name("media"), "MEDIA_URL differs");
}
