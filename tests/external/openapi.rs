//! The OpenAPI document, checked by a validator and by schemathesis, which sends valid and
//! invalid requests to all operations.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{Router, run_external_check, scratch};

/// A program that `./test.sh` has installed.
fn checker(program: &str) -> PathBuf {
    Path::new(testkit::ROOT).join("target/checkers/venv/bin").join(program)
}

/// A router with ample capacity and short drains.
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

/// Runs schemathesis on all paths except `/live`, an endless stream with its own tests.
/// `/events` streams only on request and is tested with pages here.
fn run_schemathesis(router: &Router, more: &[&str]) {
    let checks = Path::new(testkit::ROOT).join("tests/checkers");
    run_external_check(
        Command::new(checker("schemathesis"))
            .arg("--config-file")
            .arg(checks.join("schemathesis.toml"))
            .arg("run")
            .arg(format!("http://{}/openapi.json", router.address))
            .args(["--checks", "all", "--mode", "all", "--seed", "1", "--max-examples", "10"])
            .args(["--generation-database", "none", "--request-timeout", "10", "--no-color"])
            .args(["--continue-on-failure", "--exclude-path", "/api/v1/live"])
            .args(more)
            .current_dir(scratch())
            .env("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
            .env("PYTHONPATH", checks)
            .env("PYTHONDONTWRITEBYTECODE", "1"),
    );
}

#[test]
fn the_document_is_valid_openapi_and_its_examples_match() {
    let router = router(&[]);
    run_external_check(
        Command::new(checker("python"))
            .arg("tests/checkers/openapi.py")
            .arg(format!("http://{}/openapi.json", router.address)),
    );
}

/// One provider of each response format: XML, JSON errors, and lists of actions.
#[test]
fn schemathesis_finds_no_deviation() {
    run_schemathesis(&router(&[("PROVIDERS", "twilio,exotel,vonage")]), &[]);
}

#[test]
fn schemathesis_finds_no_deviation_with_authentication() {
    let secrets = [
        ("PROVIDERS", "twilio,exotel"),
        ("PUBLIC_URL", "https://router.example.com"),
        ("API_TOKENS", "viewer:v,agent:a,admin:secret"),
        ("TWILIO_AUTH_TOKEN", "token"),
        ("EXOTEL_AUTH_TOKEN", "token"),
        // The rate limiter has its own tests.
        ("RATE_LIMIT", "off"),
    ];
    run_schemathesis(&router(&secrets), &["--header", "Authorization: Bearer secret"]);
}
