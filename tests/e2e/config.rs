use std::process::Output;

use smart_router::cli;

use testkit::{WITHOUT_GATEWAY, program};

fn check(settings: &[(&str, &str)]) -> Output {
    program(settings).arg("check-config").output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn check_config_prints_every_variable_with_its_effective_value() {
    let output = check(&[
        ("HTTP_PORT", "8081"),
        ("LEASE_TTL", "90s"),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PUBLIC_URL", ""),
    ]);
    assert!(output.status.success());
    let printed = text(output.stdout);
    let names: Vec<&str> =
        printed.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
    let variables: Vec<String> = cli::variables()
        .iter()
        .map(|arg| arg.get_env().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, variables);
    for line in [
        "HTTP_PORT=8081",
        "HTTP_BIND=127.0.0.1",
        "LEASE_TTL=90s",
        "DRAINING_TTL=6m",
        "KEY_PREFIX=voice:",
        "MEDIA_URL=ws://localhost:8081",
        "VOICE_AGENT_BASE_URL=",
        "CONNECT_TIMEOUT=30s",
        "RETRY_ON_DISCONNECT=2",
        "LEADER_ELECTION_ENABLED=false",
        r#"TIER_CONFIG={"default_chain":["gold"],"tiers":{"gold":{"target":2,"type":"exclusive"}}}"#,
    ] {
        assert!(printed.lines().any(|other| other == line), "{line} is not in\n{printed}");
    }
    let printed = text(check(&[WITHOUT_GATEWAY]).stdout);
    for line in [
        "MEDIA_URL=",
        "VOICE_AGENT_BASE_URL=wss://voice.example.com",
        "CONNECT_TIMEOUT=",
        "RETRY_ON_DISCONNECT=0",
    ] {
        assert!(printed.lines().any(|other| other == line), "{line} is not in\n{printed}");
    }
}

#[test]
fn a_flag_sets_the_same_value_as_its_variable() {
    let output = program(&[("HTTP_PORT", "1")])
        .args(["check-config", "--http-port", "8082", "--lease-ttl=1h"])
        .output()
        .unwrap();
    let printed = text(output.stdout);
    assert!(
        printed.contains("HTTP_PORT=8082\n") && printed.contains("LEASE_TTL=1h\n"),
        "{printed}"
    );
}

/// Settings, and the error that they cause.
const INVALID: [(&[(&str, &str)], &str); 34] = [
    (&[("HTTP_PORT", "80a")], "HTTP_PORT=80a: expected a port"),
    (&[("METRICS_PORT", "70000")], "METRICS_PORT=70000: expected a port"),
    (&[("HTTP_BIND", "nowhere")], "HTTP_BIND=nowhere: expected an IP address"),
    (&[("LEASE_TTL", "15")], "LEASE_TTL=15: expected a duration"),
    (&[("LEASE_TTL", "0s")], "LEASE_TTL=0s: expected"),
    (&[("CLEANUP_INTERVAL", "-1s")], "CLEANUP_INTERVAL=-1s: expected"),
    (&[("LOG_LEVEL", "loud")], "LOG_LEVEL=loud: expected"),
    (&[("LOG_FORMAT", "xml")], "LOG_FORMAT=xml: expected json or console"),
    (
        &[("REDIS_URL", "http://secret@host")],
        "REDIS_URL=(hidden): expected a URL that begins with redis://",
    ),
    (
        &[("VOICE_AGENT_BASE_URL", "http://a")],
        "VOICE_AGENT_BASE_URL=http://a: expected a URL that begins with ws://",
    ),
    (&[("PUBLIC_URL", "router.example.com")], "PUBLIC_URL=router.example.com: expected"),
    (&[("WS_PATH_TEMPLATE", "/a?b")], "WS_PATH_TEMPLATE=/a?b: expected a path"),
    (&[("MEDIA_URL", "https://a")], "MEDIA_URL=https://a: expected a URL that begins with ws://"),
    (
        &[("MEDIA_URL", "wss://a"), WITHOUT_GATEWAY],
        "MEDIA_URL=wss://a: expected either MEDIA_URL or VOICE_AGENT_BASE_URL, not both",
    ),
    (&[("MEDIA_LEASE", "2s")], "MEDIA_LEASE=2s: expected at least 3s"),
    (&[("LEASE_TTL", "999ms")], "LEASE_TTL=999ms: expected at least 1s"),
    (
        &[("MEDIA_MAX_FRAME", "1")],
        "MEDIA_MAX_FRAME=1: expected a whole number from 1024 to 268435456",
    ),
    (&[("MAX_CONNECTIONS", "0")], "MAX_CONNECTIONS=0: expected a whole number of at least 1"),
    (&[("MAX_STREAMS", "0")], "MAX_STREAMS=0: expected a whole number of at least 1"),
    (&[("MEDIA_DRAIN_TIME", "0s")], "MEDIA_DRAIN_TIME=0s: expected off, or a duration"),
    (&[("AGENT_CA_FILE", "a.pem")], "AGENT_CA_FILE=a.pem: expected AGENT_TLS=on"),
    (&[("PODS", "a")], "PODS=a: expected name=host:port"),
    (&[("PODS", "metadata=h")], "PODS=metadata=h: expected"),
    (&[("PODS_FILE", "/nowhere")], "PODS_FILE=/nowhere: expected"),
    (&[("TIER_CONFIG", "{")], "TIER_CONFIG={: expected"),
    (
        &[("TIER_CONFIG", r#"{"gold": -1}"#)],
        r#"TIER_CONFIG={"gold": -1}: expected a tier document; tier "gold": target -1"#,
    ),
    (
        &[("TIER_CONFIG", r#"{"b": {"type": "shared", "max_concurrent": 0}}"#)],
        "max_concurrent 0: expected at least 1",
    ),
    (
        &[("LEADER_ELECTION_RENEW_DEADLINE", "15s")],
        "LEADER_ELECTION_RENEW_DEADLINE=15s: expected less than LEADER_ELECTION_DURATION",
    ),
    (
        &[("LEADER_ELECTION_RETRY_PERIOD", "10s")],
        "LEADER_ELECTION_RETRY_PERIOD=10s: expected less than",
    ),
    (
        &[("LEADER_ELECTION_ENABLED", "perhaps")],
        "LEADER_ELECTION_ENABLED=perhaps: expected true or false",
    ),
    (
        &[("REDIS_URL", "redis://:pass@h"), ("DATA_DIR", "x")],
        "REDIS_URL=redis://***@h: expected either",
    ),
    (&[("KEY_PREFIX", "a b")], "KEY_PREFIX=a b: expected"),
    (&[("PODS", "a=h"), ("PODS_FILE", "x")], "PODS=a=h: expected either PODS or PODS_FILE"),
    (&[("VOICE_AGENT_BASE_URL", "wss://u:secret@h")], "VOICE_AGENT_BASE_URL=wss://***@h: expected"),
];

#[test]
fn an_invalid_value_fails_the_start_with_one_line() {
    for (settings, expected) in INVALID {
        for command in ["check-config", "serve"] {
            let output = program(settings).arg(command).output().unwrap();
            let printed = text(output.stderr);
            assert_eq!(output.status.code(), Some(1), "{settings:?}: {printed}");
            assert!(printed.contains(expected), "{settings:?}: {printed}");
            assert_eq!(printed.lines().count(), 1, "{printed}");
            assert!(!printed.contains("secret") && !printed.contains("pass@"), "{printed}");
        }
    }
}

#[test]
fn ignored_settings_are_warned_about() {
    let output = check(&[(
        "TIER_CONFIG",
        r#"{"tiers": {"gold": {"maximum": 1}}, "default_chain": ["gold", "silver"]}"#,
    )]);
    assert!(output.status.success());
    let printed = text(output.stderr);
    assert!(printed.contains("unknown tier \"silver\" is ignored"), "{printed}");
    assert!(printed.contains("unknown field \"maximum\" is ignored"), "{printed}");
    let printed = text(check(&[("STREAM_STATUS", "on")]).stderr);
    assert!(printed.contains("STREAM_STATUS: the media gateway needs no callbacks"), "{printed}");
}

#[test]
fn passwords_are_hidden() {
    let output = check(&[("REDIS_URL", "redis://user:hunter2@redis.example.com:6379/1")]);
    let printed = text(output.stdout) + &text(output.stderr);
    assert!(
        printed.contains("REDIS_URL=redis://***@redis.example.com:6379/1")
            && !printed.contains("hunter2"),
        "{printed}"
    );
    let help = program(&[("REDIS_URL", "redis://:hunter2@h")]).arg("--help").output().unwrap();
    assert!(!text(help.stdout).contains("hunter2"));
}

#[test]
fn the_settings_reference_matches_the_program() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/settings.md");
    let docs = std::fs::read_to_string(path).unwrap();
    let generated = program(&[]).args(["check-config", "--reference"]).output().unwrap();
    assert_eq!(
        text(generated.stdout),
        docs,
        "run `smart-router check-config --reference > docs/reference/settings.md`"
    );
    let rows: Vec<(String, String)> = docs
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter(|row| row.contains("` | `--"))
        .map(|row| {
            let cells: Vec<&str> = row.split(" | ").collect();
            (cells[0].trim_end_matches('`').to_owned(), cells[3].trim_matches('`').to_owned())
        })
        .collect();
    let settings: Vec<(String, String)> = cli::variables()
        .iter()
        .map(|arg| {
            let default =
                arg.get_default_values().first().map(|value| value.to_str().unwrap().to_owned());
            (arg.get_env().unwrap().to_str().unwrap().to_owned(), default.unwrap_or_default())
        })
        .collect();
    let names =
        |rows: &[(String, String)]| rows.iter().map(|row| row.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&rows), names(&settings));
    for ((name, documented), (_, default)) in rows.iter().zip(&settings) {
        assert!(
            default.is_empty() || documented == default,
            "{name}: {documented} is not {default}"
        );
    }
}

#[test]
fn a_kubernetes_service_variable_is_recognised_as_such() {
    for variable in ["HTTP_PORT", "METRICS_PORT", "VOICE_AGENT_PORT"] {
        let output = check(&[(variable, "tcp://10.96.0.1:9090")]);
        let printed = text(output.stderr);
        assert!(!output.status.success());
        assert_eq!(printed.lines().count(), 1, "{printed}");
        assert!(printed.contains(&format!("{variable}=tcp://10.96.0.1:9090: ")), "{printed}");
        assert!(printed.contains("enableServiceLinks: false"), "{printed}");
    }
}
