//! The providers' own SDKs judge us: what they sign gets in, what is changed does
//! not, and our documents are the ones they would build.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use testkit::{Router, judged_by, redis::unix_millis};

/// Where `./test.sh` puts the SDKs.
fn judges() -> PathBuf {
    Path::new(testkit::ROOT).join("target/judges")
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
        // The key whose private part is 32 times the byte 7.
        ("TELNYX_PUBLIC_KEY", "6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw="),
        ("VONAGE_SIGNATURE_SECRET", "vonage-secret"),
        ("LOG_LEVEL", "error"),
        ("RATE_LIMIT", "off"),
    ])
}

#[test]
fn the_sdks_of_twilio_and_plivo_agree_with_us() {
    let router = router();
    // Its calls wait: there is no such pod.
    let nobody = r#"{"pool": "nobody", "dedicated_only": true}"#;
    assert_eq!(router.put("/api/v1/merchants/nobody", nobody).0, 200);
    judged_by(
        Command::new(judges().join("venv/bin/python"))
            .arg("tests/judges/judge.py")
            .arg(router.address.to_string())
            .arg((unix_millis() % 100_000).to_string()),
    );
    let status = router.status();
    assert_eq!(status["active_calls"], 0, "every call was ended by its provider");
    assert_eq!(status["waiting"], 0, "{status}");
}

#[test]
fn the_sdks_of_telnyx_vonage_and_signalwire_agree_with_us() {
    let router = router();
    judged_by(
        Command::new("node")
            .arg("tests/judges/judge.mjs")
            .arg(router.address.to_string())
            .arg((unix_millis() % 100_000).to_string())
            .env("JUDGES", judges().join("node_modules")),
    );
}
