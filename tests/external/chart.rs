//! The Helm chart: the same objects as kustomize, values that are checked and documented, and
//! secrets that the program follows.

mod generated;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};
use testkit::{Connection, Router, eventually, scratch};

use crate::render::{EVERYTHING, deploy, helm, helm_program, helm_release, kustomize};

fn chart() -> PathBuf {
    deploy().join("helm/smart-router")
}

fn name_of(object: &Value) -> String {
    format!("{} {}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap())
}

/// Objects by kind and name. A change of settings restarts the pods through the hash in the name of
/// the ConfigMap (kustomize) or the checksum in an annotation (Helm); both are left out.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let settings = objects.iter().find(|object| object["data"]["REDIS_URL"].is_string());
    let settings = settings.unwrap()["metadata"]["name"].as_str().unwrap().to_owned();
    let plain = settings.strip_suffix(&settings["smart-router".len()..]).unwrap();
    let (hashed, plain) = (format!("\"{settings}\""), format!("\"{plain}\""));
    let mut found = BTreeMap::new();
    for object in objects {
        let mut object: Value = if settings == "smart-router" {
            object
        } else {
            serde_json::from_str(&object.to_string().replace(&hashed, &plain)).unwrap()
        };
        let metadata = &mut object["spec"]["template"]["metadata"];
        if let Some(annotations) = metadata.get_mut("annotations") {
            assert!(annotations.as_object_mut().unwrap().remove("checksum/settings").is_some());
            if annotations.as_object().unwrap().is_empty() {
                metadata.as_object_mut().unwrap().remove("annotations");
            }
        }
        let name = name_of(&object);
        assert!(found.insert(name.clone(), object).is_none(), "{name} is there twice");
    }
    found
}

/// One line per difference.
fn differences(path: &str, kustomize: &Value, chart: &Value, found: &mut Vec<String>) {
    let pairs: Vec<(String, &Value, &Value)> = match (kustomize, chart) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            keys.into_iter()
                .map(|key| (format!("{path}.{key}"), &kustomize[key], &chart[key]))
                .collect()
        }
        (Value::Array(left), Value::Array(right)) => (0..left.len().max(right.len()))
            .map(|at| {
                let left = left.get(at).unwrap_or(&Value::Null);
                (format!("{path}[{at}]"), left, right.get(at).unwrap_or(&Value::Null))
            })
            .collect(),
        _ if kustomize == chart => return,
        _ => {
            found.push(format!("{path}: kustomize has {kustomize}, the chart {chart}"));
            return;
        }
    };
    for (path, left, right) in pairs {
        differences(&path, left, right, found);
    }
}

fn compare(kustomized: Vec<Value>, charted: Vec<Value>) -> Vec<String> {
    let (kustomized, charted) = (by_name(kustomized), by_name(charted));
    let names: BTreeSet<&String> = kustomized.keys().chain(charted.keys()).collect();
    let mut found = Vec::new();
    for name in names {
        match (kustomized.get(name), charted.get(name)) {
            (Some(left), Some(right)) => differences(name, left, right, &mut found),
            (Some(_), None) => found.push(format!("{name}: only kustomize has it")),
            _ => found.push(format!("{name}: only the chart has it")),
        }
    }
    found
}

/// The objects of a directory that lead traffic to the Service.
fn ingress_of(directory: &str, names: &[&str]) -> Vec<Value> {
    let objects = kustomize(directory).into_iter();
    let found: Vec<Value> =
        objects.filter(|object| names.contains(&name_of(object).as_str())).collect();
    assert_eq!(found.len(), names.len(), "{directory}");
    found
}

#[test]
fn chart_and_kustomize_render_the_same_objects() {
    let ingress = ["Ingress smart-router", "NetworkPolicy smart-router-ingress"];
    let media_ingress = [ingress[0], ingress[1], "Ingress smart-router-media"];
    let cases: [(&str, Vec<Value>, &[&str]); 6] = [
        ("base", kustomize("base"), &[]),
        ("media", kustomize("media"), &["--set=media.enabled=true"]),
        (
            "base and monitoring",
            [kustomize("base"), kustomize("monitoring")].concat(),
            &[
                "--set=monitoring.serviceMonitor.enabled=true,monitoring.alerts.enabled=true",
                "--set=monitoring.dashboard.enabled=true",
            ],
        ),
        (
            "base and the Ingress of example",
            [kustomize("base"), ingress_of("example", &ingress)].concat(),
            &["--set=ingress.enabled=true,networkPolicy.ingressNamespace=ingress-nginx"],
        ),
        (
            "media and the Ingresses of media/example",
            [kustomize("media"), ingress_of("media/example", &media_ingress)].concat(),
            &[
                "--set=media.enabled=true,ingress.enabled=true",
                "--set=networkPolicy.ingressNamespace=ingress-nginx",
            ],
        ),
        (
            "base and gateway",
            [kustomize("base"), kustomize("gateway")].concat(),
            &["--set=gateway.enabled=true,networkPolicy.ingressNamespace=envoy-gateway-system"],
        ),
    ];
    for (name, kustomized, arguments) in cases {
        let found = compare(kustomized, helm(arguments).unwrap());
        assert!(
            found.is_empty(),
            "deploy/{name} and deploy/helm/smart-router differ:\n{}",
            found.join("\n")
        );
    }
}

/// The comparison itself: it finds a changed, a missing and an additional value.
#[test]
fn the_comparison_names_each_difference() {
    let charted = |arguments: &[&str]| compare(kustomize("base"), helm(arguments).unwrap());
    assert_eq!(
        charted(&["--set=router.replicas=4"]),
        ["Deployment smart-router.spec.replicas: kustomize has 3, the chart 4"]
    );
    let found = charted(&["--set=settings.HOLD_TIME=1m,priorityClass.create=false"]);
    assert_eq!(
        found,
        [
            r#"ConfigMap smart-router.data.HOLD_TIME: kustomize has null, the chart "1m""#,
            "PriorityClass smart-router: only kustomize has it",
        ]
    );
    let found = charted(&["--set=networkPolicy.apiServerPorts={443}"]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("egress[3].ports[1]"), "{found:?}");
}

#[test]
fn changed_settings_change_the_checksum_of_every_pod() {
    let checksums = |arguments: &[&str]| -> Vec<String> {
        let objects = helm(arguments).unwrap();
        let deployments = objects.iter().filter(|object| object["kind"] == "Deployment");
        deployments
            .map(|it| {
                let annotations = &it["spec"]["template"]["metadata"]["annotations"];
                annotations["checksum/settings"].as_str().unwrap().to_owned()
            })
            .collect()
    };
    let before = checksums(&["--set=media.enabled=true"]);
    assert_eq!(before.len(), 2);
    let changed = checksums(&["--set=media.enabled=true,settings.HOLD_TIME=1m"]);
    assert!(before.iter().zip(&changed).all(|(before, after)| before != after));
    assert_eq!(before, checksums(&["--set=media.enabled=true,router.replicas=5"]));
}

#[test]
fn null_removes_the_defaults_of_all_settings() {
    let objects = helm(&["--set=settings=null"]).unwrap();
    let settings = objects.iter().find(|it| it["kind"] == "ConfigMap").unwrap();
    assert_eq!(settings["data"]["PROVIDERS"], "twilio");
    assert!(settings["data"]["REDIS_URL"].is_null());
}

#[test]
fn a_wrong_value_is_refused_by_name() {
    let cases = [
        ("replicas=3", "Additional property replicas is not allowed"),
        ("router.replicas=0", "router.replicas: Must be greater than or equal to 1"),
        ("router.replicas=many", "router.replicas: Invalid type. Expected: integer"),
        ("settings.MEDIA_ULR=wss://a.b", "settings: Additional property MEDIA_ULR"),
        ("settings.MAX_STREAMS=5000", "settings.MAX_STREAMS: Invalid type. Expected: string"),
        // A YAML `on` is a boolean.
        ("settings.AGENT_TLS=true", "settings.AGENT_TLS: Invalid type. Expected: string"),
        ("settings.HTTP_PORT=80", "settings: Additional property HTTP_PORT"),
        ("settings.API_TOKENS=admin:x", "settings: Additional property API_TOKENS"),
        ("providers={twillio}", "providers.0 must be one of the following: \"twilio\""),
        ("secrets.keys={TWILIO}", "secrets.keys.0 must be one of the following: \"API_TOKENS\""),
        ("host=https://voice.example.com", "host: Does not match pattern"),
        ("image.digest=latest", "image.digest: Does not match pattern"),
        ("agents.port=80000", "agents.port: Must be less than or equal to 65535"),
        ("gateway.namespace=infra", "gateway.namespace: String length"),
        ("priorityClass.name=", "priorityClass.name: String length"),
        ("monitoring.serviceMonitor.interval=1m", "serviceMonitor.interval: Does not match"),
        ("media.resources.limit.memory=1Gi", "media.resources: Additional property limit"),
        ("tierConfig=gold", "tierConfig is not JSON"),
        ("image=null", "(root): image is required"),
        ("settings.NAMESPACES=a", "settings: Additional property NAMESPACES"),
        ("router.resources.limits.memory=lots", "router.resources.limits.memory"),
        ("settings.MEDIA_DRAIN_TIME=10m", "router.terminationGracePeriodSeconds is 330, but"),
        ("router.terminationGracePeriodSeconds=314", "MEDIA_DRAIN_TIME (5m) needs 315"),
        ("settings.LEASE_TTL=5x", "settings.LEASE_TTL: Does not match pattern"),
        ("settings.LOG_LEVEL=loud", "settings.LOG_LEVEL must be one of the following"),
        ("settings.AGENT_TLS=yep", "settings.AGENT_TLS must be one of the following"),
        ("router.replicas=null", "router: replicas is required"),
        ("monitoring.alerts=null", "monitoring: alerts is required"),
        (
            "providers={twilio,plivo}",
            "providers has plivo, but secrets.keys has no PLIVO_AUTH_TOKEN",
        ),
        ("secrets.keys={API_TOKENS}", "providers has twilio, but secrets.keys has no TWILIO"),
    ];
    for (value, expected) in cases {
        match helm(&["--set", value]) {
            Ok(_) => panic!("{value} was accepted"),
            Err(error) => assert!(error.contains(expected), "{value}: {error}"),
        }
    }
}

/// A second validator, besides that of Helm.
#[test]
fn the_schema_is_valid_and_accepts_the_defaults() {
    let output = Command::new(crate::agent_stacks::checkers("venv/bin/python"))
        .arg("tests/checkers/values_schema.py")
        .args([chart().join("values.schema.json"), chart().join("values.yaml")])
        .current_dir(testkit::ROOT)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn helm_lints_the_chart() {
    let output = Command::new(helm_program()).arg("lint").arg("--strict").arg(chart()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn schema() -> Value {
    let text = fs::read_to_string(chart().join("values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// `UPDATE=1` writes generated parts instead of comparing them.
fn is_current(path: &Path, generated: &str) {
    if std::env::var_os("UPDATE").is_some() {
        fs::write(path, generated).unwrap();
    }
    let current = fs::read_to_string(path).unwrap();
    assert!(
        current == generated,
        "{} is not current; run UPDATE=1 cargo test -p smart-router --test external chart::",
        path.display()
    );
}

/// Helm reads only files of the chart, so these are copies of the files of kustomize.
#[test]
fn the_files_of_the_chart_equal_those_of_kustomize() {
    for (copy, source) in [
        ("crds/voicemerchants.yaml", "crds/voicemerchants.yaml"),
        ("crds/voicetiers.yaml", "crds/voicetiers.yaml"),
        ("files/alerts.yaml", "monitoring/alerts.yaml"),
        ("files/dashboard.json", "monitoring/dashboard.json"),
        ("files/rbac.yaml", "base/rbac.yaml"),
    ] {
        is_current(&chart().join(copy), &fs::read_to_string(deploy().join(source)).unwrap());
    }
}

#[test]
fn versions_agree_with_the_program() {
    let chart: Value =
        serde_saphyr::from_str(&fs::read_to_string(chart().join("Chart.yaml")).unwrap()).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(chart["version"], version);
    assert_eq!(chart["appVersion"], version);
    for directory in ["base", "media", "example", "agents"] {
        let file = deploy().join(directory).join("kustomization.yaml");
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(&format!("newTag: \"{version}\"")), "{directory}");
    }
}

#[test]
fn a_release_with_another_name_has_objects_of_its_own() {
    let objects = helm_release("blue", &chart(), EVERYTHING).unwrap();
    for object in &objects {
        let name = object["metadata"]["name"].as_str().unwrap();
        let shared = ["PriorityClass", "Gateway"].contains(&object["kind"].as_str().unwrap());
        assert!(shared || name.starts_with("blue"), "{}", name_of(object));
    }
    let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let lease = &of("Role")["rules"][3]["resourceNames"][0];
    assert_eq!(lease, "blue-leader");
    let settings = objects.iter().find(|it| it["data"]["REDIS_URL"].is_string()).unwrap();
    assert_eq!(settings["data"]["LEADER_ELECTION_LOCK_NAME"], *lease);
}

#[test]
fn objects_of_the_cluster_have_the_namespace_in_their_names() {
    let names = |arguments: &[&str]| -> Vec<String> {
        let objects = helm(arguments).unwrap();
        let of_cluster = objects.iter().filter(|it| it["metadata"]["namespace"].is_null());
        of_cluster.map(name_of).collect()
    };
    let expected =
        ["ClusterRole", "ClusterRoleBinding"].map(|it| format!("{it} smart-router:a:nodes"));
    let found = names(&["--namespace=a", "--set=priorityClass.create=false"]);
    assert_eq!(found, expected, "a release in another namespace has others");
    let none = names(&["--set=rbac.nodes=false,priorityClass.create=false"]);
    assert!(none.is_empty(), "{none:?}");
    let roles = helm(&["--namespace=a"]).unwrap();
    let binding = roles.iter().find(|it| it["kind"] == "ClusterRoleBinding").unwrap();
    assert_eq!(binding["roleRef"]["name"], binding["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["namespace"], "a");
}

#[test]
fn agents_in_another_namespace_are_watched_and_reached_there() {
    let objects = helm(&["--set=agents.namespace=agents,agents.labels.role=voice"]).unwrap();
    let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    for kind in ["Role", "RoleBinding"] {
        assert_eq!(of(kind)["metadata"]["namespace"], "agents");
    }
    assert_eq!(of("RoleBinding")["subjects"][0]["namespace"], "voice");
    let environment = &of("Deployment")["spec"]["template"]["spec"]["containers"][0]["env"];
    let namespace = json!({"name": "NAMESPACE", "value": "agents"});
    assert!(environment.as_array().unwrap().contains(&namespace), "{environment}");
    assert_eq!(of("ConfigMap")["data"]["POD_LABEL_SELECTOR"], "role=voice");
    let to = &of("NetworkPolicy")["spec"]["egress"][1]["to"][0];
    assert_eq!(to["podSelector"]["matchLabels"], json!({"role": "voice"}));
    let namespace = &to["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"];
    assert_eq!(namespace, "agents");
}

#[test]
fn agents_in_several_namespaces_are_watched_and_reached_there() {
    let objects = helm(&["--set=agents.namespaces={voice,a,b}"]).unwrap();
    let of = |kind: &str| -> Vec<&Value> {
        objects.iter().filter(|object| object["kind"] == kind).collect()
    };
    for kind in ["Role", "RoleBinding"] {
        let namespaces = of(kind).into_iter().map(|it| it["metadata"]["namespace"].as_str());
        let namespaces: BTreeSet<&str> = namespaces.flatten().collect();
        assert_eq!(namespaces, ["a", "b", "voice"].into());
    }
    let names = of("RoleBinding").into_iter().map(|it| &it["subjects"][0]["namespace"]);
    assert!(names.into_iter().all(|name| name == "voice"));
    assert_eq!(of("ConfigMap")[0]["data"]["NAMESPACES"], "voice,a,b");
    let to = of("NetworkPolicy")[0]["spec"]["egress"][1]["to"].as_array().unwrap();
    let name =
        |it: &Value| it["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"].clone();
    assert_eq!(to.iter().map(name).collect::<Vec<_>>(), ["voice", "a", "b"]);
}

const PROVIDERS: &str = "twilio,plivo,exotel,signalwire,telnyx,vonage,jambonz";

/// Writes a Secret as the kubelet does: files are links into a directory that is replaced at once.
fn mount(directory: &Path, version: &str, token: &str, keys: &[String]) {
    let data = directory.join(format!("..{version}"));
    fs::create_dir(&data).unwrap();
    for key in keys {
        let value = match key.as_str() {
            "API_TOKENS" => format!("admin:{token}"),
            "TELNYX_PUBLIC_KEY" => "MCowBQYDK2VwAyEA".to_owned() + &"A".repeat(42) + "A=",
            _ => "0123456789abcdef0123456789abcdef".to_owned(),
        };
        fs::write(data.join(key), value).unwrap();
        let link = directory.join(key);
        if fs::symlink_metadata(&link).is_err() {
            symlink(Path::new("..data").join(key), link).unwrap();
        }
    }
    symlink(&data, directory.join("..next")).unwrap();
    fs::rename(directory.join("..next"), directory.join("..data")).unwrap();
}

/// The program with the settings of the chart and its Secret: every secret is read, and a changed
/// token is valid without a restart.
#[test]
fn the_program_follows_the_secrets_of_all_providers() {
    let keys = &schema()["properties"]["secrets"]["properties"]["keys"]["items"]["enum"];
    let keys: Vec<String> = serde_json::from_value(keys.clone()).unwrap();
    let providers = format!("--set=providers={{{PROVIDERS}}}");
    let chosen = format!("--set=secrets.keys={{{}}}", keys.join(","));
    let objects = helm(&[&providers, &chosen]).unwrap();
    let settings = objects.iter().find(|it| it["data"]["REDIS_URL"].is_string()).unwrap();
    let directory = scratch();
    mount(&directory, "first", "first-token-0123456789", &keys);
    let mut settings: BTreeMap<String, String> =
        serde_json::from_value(settings["data"].clone()).unwrap();
    assert_eq!(settings["PROVIDERS"], PROVIDERS);
    settings.remove("REDIS_URL");
    let files = settings.iter_mut().filter(|(name, _)| name.ends_with("_FILE"));
    let replaced = files.map(|(_, path)| {
        *path = path.replace("/etc/smart-router/secrets", directory.to_str().unwrap());
    });
    assert_eq!(replaced.count(), keys.len());
    settings.insert("PODS".into(), "a=127.0.0.1:1".into());
    let settings: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let router = Router::start(&settings);
    let status = |token: &str| {
        let mut connection = Connection::open(router.address);
        connection.token = Some(token.to_owned());
        connection.get("/api/v1/status").status
    };
    assert_eq!(status("first-token-0123456789"), 200);
    assert_eq!(status("second-token-0123456789"), 401);
    mount(&directory, "second", "second-token-0123456789", &keys);
    eventually(Duration::from_secs(20), "the new token is valid", || {
        status("second-token-0123456789") == 200
    });
    assert_eq!(status("first-token-0123456789"), 401);
}

/// The text that `helm install` prints, from a copy of the chart in which it is an object:
/// `helm template` does not print it, and `helm install` needs a cluster.
fn notes(arguments: &[&str]) -> String {
    let copy = scratch().join("smart-router");
    let mut cp = Command::new("cp");
    cp.args(["--recursive", "--dereference"]);
    assert!(cp.arg(chart()).arg(&copy).status().unwrap().success());
    let text = fs::read_to_string(copy.join("templates/NOTES.txt")).unwrap();
    let object = "{{ end }}\nkind: Notes\ntext: {{ include \"notes\" . | quote }}\n";
    fs::write(
        copy.join("templates/notes.yaml"),
        format!("{{{{ define \"notes\" }}}}{text}{object}"),
    )
    .unwrap();
    let objects = helm_release("smart-router", &copy, arguments).unwrap();
    let notes = objects.into_iter().find(|object| object["kind"] == "Notes").unwrap();
    notes["text"].as_str().unwrap().to_owned()
}

#[test]
fn the_notes_warn_about_open_doors_and_closed_ones() {
    let shown = notes(&["--set=ingress.enabled=true,networkPolicy.ingressNamespace=ingress-nginx"]);
    assert!(!shown.contains("WARNING"), "{shown}");
    assert!(shown.contains("the keys API_TOKENS, TWILIO_AUTH_TOKEN;"), "{shown}");
    for (value, expected) in [
        ("secrets.keys={TWILIO_AUTH_TOKEN}", "the API needs no authentication"),
        (
            "providers={twilio,vonage},secrets.unverifiedProviders={vonage}",
            "without VONAGE_SIGNATURE_SECRET in secrets.keys",
        ),
        ("ingress.enabled=true", "Set networkPolicy.ingressNamespace"),
        ("router.replicas=3", "lead voice.example.com to the Service smart-router"),
    ] {
        let shown = notes(&["--set", value]);
        assert!(shown.contains(expected), "{value}: {shown}");
    }
}
