//! The router's description of itself, judged by others: a validator of OpenAPI, and
//! schemathesis, which tries everything that is described, with right and wrong data.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{Router, judged_by, scratch};

/// Where `./test.sh` puts those who judge.
fn judge(program: &str) -> PathBuf {
    Path::new(testkit::ROOT).join("target/judges/venv/bin").join(program)
}

/// Pods enough for whatever is asked; what drains is back soon.
fn router(more: &[(&str, &str)]) -> Router {
    let tiers = r#"{"gold": {"type": "shared", "target": 4, "max_concurrent": 1000000}}"#;
    let settings = [
        ("TIER_CONFIG", tiers),
        ("DRAINING_TTL", "1s"),
        ("LOG_LEVEL", "error"),
        ("PODS", PODS),
        URL,
    ];
    Router::start(&[&settings[..], more].concat())
}

const PODS: &str = "voice-agent-0=h:1,voice-agent-1=h:2,voice-agent-2=h:3,voice-agent-3=h:4";
const URL: (&str, &str) = ("VOICE_AGENT_BASE_URL", "wss://voice.example.com");

/// Lets schemathesis try what is described, but for `/live`, a stream that does not end:
/// tests/events.rs and tests/browser.rs listen to it. `/events` is one only for those who ask
/// for a stream, and is tried as pages here.
fn try_everything(router: &Router, more: &[&str]) {
    let judges = Path::new(testkit::ROOT).join("tests/judges");
    judged_by(
        Command::new(judge("schemathesis"))
            .arg("--config-file")
            .arg(judges.join("schemathesis.toml"))
            .arg("run")
            .arg(format!("http://{}/openapi.json", router.address))
            .args(["--checks", "all", "--mode", "all", "--seed", "1", "--max-examples", "10"])
            .args(["--generation-database", "none", "--request-timeout", "10", "--no-color"])
            .args(["--continue-on-failure", "--exclude-path", "/api/v1/live"])
            .args(more)
            .current_dir(scratch())
            .env("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
            .env("PYTHONPATH", judges)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
    );
}

#[test]
fn the_document_is_openapi_and_its_examples_fit_their_schemas() {
    let router = router(&[]);
    judged_by(
        Command::new(judge("python"))
            .arg("tests/judges/openapi.py")
            .arg(format!("http://{}/openapi.json", router.address)),
    );
}

/// One provider of each kind: XML, errors in JSON, and lists of actions.
#[test]
fn schemathesis_finds_nothing_wrong() {
    try_everything(&router(&[("PROVIDERS", "twilio,exotel,vonage")]), &[]);
}

#[test]
fn schemathesis_finds_nothing_wrong_where_there_are_tokens() {
    let secrets = [
        ("PROVIDERS", "twilio,exotel"),
        ("PUBLIC_URL", "https://router.example.com"),
        ("API_TOKENS", "viewer:v,agent:a,admin:secret"),
        ("TWILIO_AUTH_TOKEN", "token"),
        ("EXOTEL_AUTH_TOKEN", "token"),
        // (tests/access.rs tries it)
        ("RATE_LIMIT", "off"),
    ];
    try_everything(&router(&secrets), &["--header", "Authorization: Bearer secret"]);
}
