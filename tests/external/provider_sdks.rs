//! Checks with the providers' SDKs: requests that they sign are accepted, altered ones are
//! refused, and the router's documents equal those that they build.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{Router, redis::unix_millis, run_external_check};

/// The directory where `./test.sh` installs the SDKs.
fn checkers_directory() -> PathBuf {
    Path::new(testkit::ROOT).join("target/checkers")
}

fn router() -> Router {
    Router::start(&[
        ("PUBLIC_URL", "https://router.example.com"),
        ("STREAM_STATUS", "on"),
        ("RETRY_ON_DISCONNECT", "1"),
        ("HOLD_TIME", "1m"),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
        ("TWILIO_AUTH_TOKEN", "old-token,new-token"),
        ("PLIVO_AUTH_TOKEN", "plivo-token"),
        ("SIGNALWIRE_AUTH_TOKEN", "signalwire-key"),
        // The public key for a seed of 32 bytes 7.
        ("TELNYX_PUBLIC_KEY", "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw="),
        ("VONAGE_SIGNATURE_SECRET", "vonage-secret"),
        ("LOG_LEVEL", "error"),
        ("RATE_LIMIT", "off"),
    ])
}

#[test]
fn the_router_agrees_with_the_sdks_of_twilio_and_plivo() {
    let router = router();
    // The calls of this merchant wait, because its pool has no pods.
    let empty = r#"{"pool": "empty", "dedicated_only": true}"#;
    assert_eq!(router.put("/api/v1/merchants/empty", empty).0, 200);
    run_external_check(
        Command::new(checkers_directory().join("venv/bin/python"))
            .arg("tests/checkers/provider_sdks.py")
            .arg(router.address.to_string())
            .arg((unix_millis() % 100_000).to_string()),
    );
    let status = router.status();
    assert_eq!(status["active_calls"], 0, "status callbacks ended every call");
    assert_eq!(status["waiting"], 0, "{status}");
}

#[test]
fn the_router_agrees_with_the_sdks_of_telnyx_vonage_and_signalwire() {
    let router = router();
    run_external_check(
        Command::new("node")
            .arg("tests/checkers/provider_sdks.mjs")
            .arg(router.address.to_string())
            .arg((unix_millis() % 100_000).to_string())
            .env("CHECKERS", checkers_directory().join("node_modules")),
    );
}
