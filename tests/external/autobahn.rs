//! Autobahn's test suite for WebSocket servers, through the media gateway against an echo server.

use std::{process::Command, time::Duration};

use testkit::{Process, Router, eventually, free_port, run_external_check};

use crate::agent_stacks::{checkers, is_listening, node};

/// Every case is a call of its own. The echo server is strict, so that a violation which the
/// gateway lets pass is found as well as one that it commits.
#[test]
fn the_gateway_passes_the_cases_of_autobahn() {
    let port = free_port();
    let _echo = Process::start(node("echo.mjs").arg(port.to_string()));
    eventually(Duration::from_secs(10), "the echo server listens", || is_listening(port));
    let router = Router::start(&[
        ("PODS", &format!("echo=127.0.0.1:{port}")),
        // The slot of a call may be busy for a moment after its stream.
        ("TIER_CONFIG", r#"{"gold": {"type": "shared", "target": 1, "max_concurrent": 10}}"#),
        // The suite sends frames of 16 MiB.
        ("MEDIA_MAX_FRAME", "16777216"),
        ("RATE_LIMIT", "off"),
        ("LOG_LEVEL", "error"),
    ]);
    run_external_check(
        Command::new(checkers("venv/bin/python"))
            .arg("tests/checkers/autobahn_cases.py")
            .arg(format!("http://{}", router.address))
            .env("PYTHONDONTWRITEBYTECODE", "1"),
    );
    eventually(Duration::from_secs(6), "every slot is free", || {
        router.status()["active_calls"] == 0
    });
}
