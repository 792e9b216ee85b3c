//! `smart-router load`: its report and its invariant checks.

use std::{
    io::{Read, Write},
    net::TcpListener,
    process::Output,
    thread,
    time::Duration,
};

use serde_json::Value;

use testkit::{Router, eventually, program, proxy::FaultProxy};

fn load(url: &str, args: &[&str]) -> Output {
    program(&[]).arg("load").args(["--router", url]).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_load_generator_reports_no_errors_in_any_format() {
    let tiers = r#"{"tiers": {"gold": {"target": 20}, "basic": {"type": "shared", "target": 5, "max_concurrent": 9}}}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers)]);
    let url = format!("http://{}", router.address);
    for format in ["json", "twilio", "plivo", "exotel", "signalwire", "telnyx", "vonage", "jambonz"]
    {
        let calls = ["-d", "1m", "--calls", "100", "-c", "8", "--hold", "5ms"];
        let output = load(&url, &[&calls[..], &["--format", format, "--json"]].concat());
        assert!(output.status.success(), "{format}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["calls"].as_u64().unwrap() >= 100, "{format}: {report}");
        assert!(report["overlap"].as_u64().unwrap() > 1, "{format}: {report}");
        assert_eq!(report["errors"], serde_json::json!({}), "{format}");
        assert_eq!(report["allocate"]["count"], report["release"]["count"], "{format}");
    }
    let output = load(&url, &["--rate", "50", "-d", "2s", "--hold", "50ms", "--repeat", "10"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    let before = |text: &str| -> u64 {
        let (rest, _) = printed.split_once(text).unwrap_or_else(|| panic!("{text}: {printed}"));
        rest.rsplit(' ').next().unwrap().parse().unwrap()
    };
    // A hundred calls are due; an overloaded machine may start some of them too late.
    let (calls, repeated) = (before(" calls in "), before(" repeated"));
    assert!((50..=100).contains(&calls) && repeated == calls.div_ceil(10), "{printed}");
    assert!(printed.contains("checked: no pod exceeded its capacity"), "{printed}");
    assert!(text(&output.stderr).contains("requests/s"), "progress is printed");
    assert_eq!(router.status()["active_calls"], 0, "every allocated call was released");
    let full = load(&url, &["--calls", "100", "--hold", "10s", "-c", "100", "-d", "1s", "--json"]);
    let report: Value = serde_json::from_slice(&full.stdout).unwrap();
    assert!(report["errors"]["allocate: refused"].as_u64().unwrap() > 0, "{report}");
    assert_eq!((full.status.code(), &report["failed"]), (Some(0), &Value::from(0)), "{report}");
}

#[test]
fn failed_requests_fail_the_load_run() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 20}"#)]);
    let proxy = FaultProxy::to(router.address.port());
    let url = format!("http://{}", proxy.address);
    let output = thread::scope(|scope| {
        let loading =
            scope.spawn(|| load(&url, &["-d", "3s", "-c", "4", "--hold", "50ms", "--json"]));
        eventually(Duration::from_secs(3), "calls are active", || {
            router.status()["active_calls"] != 0
        });
        // All open connections break; new ones work.
        proxy.refuse_connections(true);
        proxy.refuse_connections(false);
        loading.join().unwrap()
    });
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let failed = report["failed"].as_u64().unwrap();
    assert!(failed > 0 && report["calls"].as_u64().unwrap() > failed, "{report}");
    let stderr = text(&output.stderr);
    assert!(stderr.contains(&format!("{failed} requests failed: ")), "{stderr}");
    // A missing token counts as a failure, not as a refusal for lack of pods.
    let router = Router::start(&[("API_TOKENS", "admin:secret")]);
    let output = load(&format!("http://{}", router.address), &["-d", "1s", "--calls", "10"]);
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    assert!(text(&output.stderr).contains("allocate: status 401"), "{output:?}");
}

/// A faulty router that allocates the same pod to every call.
fn overcommitting_router() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || {
                let mut stream = stream.unwrap();
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    let request = text(&buffer[..count]);
                    let body = match request.split_whitespace().nth(1) {
                        Some("/api/v1/tiers") => r#"{"tiers": {"gold": {"target": 1}}}"#,
                        Some("/api/v1/pod/p-1") => r#"{"tier": "gold"}"#,
                        _ => r#"{"success":true,"pod_name":"p-1"}"#,
                    };
                    let length = body.len();
                    let _ =
                        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
                }
            });
        }
    });
    url
}

#[test]
fn the_load_generator_detects_a_pod_over_its_capacity() {
    let url = overcommitting_router();
    let output = load(&url, &["-d", "1s", "-c", "4", "--hold", "20ms"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("p-1 has capacity 1 and was allocated to"), "{output:?}");
    let output = load(&url, &["-d", "1s", "-c", "1", "--json"]);
    assert!(output.status.success(), "sequential calls may share the pod");
    let output = load("http://127.0.0.1:1", &["-d", "1s"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output.stderr).contains("connection refused"), "{output:?}");
}

#[test]
fn a_remote_load_target_needs_an_explicit_flag() {
    let output = load("http://192.0.2.1:80", &["-d", "1s"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--i-own-this-target"), "{output:?}");
    for bad in ["ws://localhost", "localhost"] {
        let output = load(bad, &[]);
        assert!(text(&output.stderr).contains("http://"), "{output:?}");
    }
}
