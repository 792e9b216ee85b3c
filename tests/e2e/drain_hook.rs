//! The preStop hook of an agent: `smart-router drain` or curl.

use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use testkit::{Process, Router, eventually, free_port, program, scratch};

const SECOND: Duration = Duration::from_secs(1);

/// Starts `smart-router drain` for voice-agent-0; `log` gets stdout and stderr.
fn drain(url: &str, token: &str, wait: &str, log: &Path) -> Process {
    let settings =
        [("POD_NAME", "voice-agent-0"), ("SMART_ROUTER_URL", url), ("SMART_ROUTER_TOKEN", token)];
    let log = std::fs::File::create(log).unwrap();
    let mut command = program(&settings);
    command.args(["drain", "--wait", wait]).stdout(log.try_clone().unwrap()).stderr(log);
    Process(command.spawn().unwrap())
}

fn read(log: &Path) -> String {
    std::fs::read_to_string(log).unwrap()
}

fn exit_code(process: &mut Process, within: Duration) -> Option<i32> {
    let mut code = None;
    eventually(within, "the command ends", || {
        code = process.0.try_wait().unwrap();
        code.is_some()
    });
    code.unwrap().code()
}

#[test]
fn the_drain_command_retries_a_refused_drain() {
    let tokens = scratch().join("tokens");
    std::fs::write(&tokens, "admin:secret,agent:old").unwrap();
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("API_TOKENS_FILE", tokens.to_str().unwrap()),
        ("LOG_LEVEL", "error"),
    ]);
    let (url, log) = (format!("http://{}", router.address), scratch().join("log"));
    // The router does not accept the token of the hook yet.
    let mut hook = drain(&url, "new", "60s", &log);
    eventually(10 * SECOND, "the drain is refused", || read(&log).contains("401"));
    assert!(hook.0.try_wait().unwrap().is_none(), "the command retries: {}", read(&log));
    std::fs::write(&tokens, "admin:secret,agent:old,agent:new").unwrap();
    assert_eq!(exit_code(&mut hook, 20 * SECOND), Some(0), "{}", read(&log));
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], true);
}

#[test]
fn the_drain_command_retries_until_the_pod_is_known() {
    let pods = scratch().join("pods");
    std::fs::write(&pods, "other-0=127.0.0.1:1\n").unwrap();
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PODS_FILE", pods.to_str().unwrap()),
        ("VOICE_AGENT_BASE_URL", "ws://a"),
        ("HTTP_BIND", "127.0.0.1"),
        ("LOG_LEVEL", "error"),
    ]);
    let (url, log) = (format!("http://{}", router.address), scratch().join("log"));
    let mut hook = drain(&url, "", "60s", &log);
    eventually(10 * SECOND, "the drain is refused", || read(&log).contains("404"));
    assert!(hook.0.try_wait().unwrap().is_none(), "the command retries: {}", read(&log));
    std::fs::write(&pods, "other-0=127.0.0.1:1\nvoice-agent-0=127.0.0.1:2\n").unwrap();
    assert_eq!(exit_code(&mut hook, 20 * SECOND), Some(0), "{}", read(&log));
}

#[test]
fn the_drain_command_fails_at_its_deadline_with_the_cause() {
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("API_TOKENS", "admin:secret"),
        ("LOG_LEVEL", "error"),
    ]);
    let url = format!("http://{}", router.address);
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    let cases = [
        (url.as_str(), "wrong", 1, "SMART_ROUTER_TOKEN"),
        (nowhere.as_str(), "", 4, "no router answers"),
    ];
    for (url, token, code, cause) in cases {
        let log = scratch().join("log");
        let started = std::time::Instant::now();
        let mut hook = drain(url, token, "3s", &log);
        assert_eq!(exit_code(&mut hook, 20 * SECOND), Some(code), "{}", read(&log));
        assert!(started.elapsed() >= 2 * SECOND, "it did not retry: {}", read(&log));
        let log = read(&log);
        let last = log.lines().last().unwrap();
        assert!(last.contains("3s") && last.contains(cause), "{log}");
    }
}

/// Returns the curl command of docs/kubernetes.md for a preStop hook.
fn documented_hook() -> String {
    let docs = Path::new(testkit::ROOT).join("docs/kubernetes.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let blocks = docs.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let mut hooks = blocks.filter(|block| block.contains("/api/v1/drain"));
    let hook = hooks.next().expect("docs/kubernetes.md has a curl hook");
    assert!(hooks.next().is_none(), "docs/kubernetes.md has one curl hook");
    hook.to_owned()
}

/// Runs the documented hook against a router.
fn curl(url: &str, token: &str) -> Process {
    curl_for(url, token, "300")
}

/// Like [`curl`], with another wait in seconds.
fn curl_for(url: &str, token: &str, wait: &str) -> Process {
    let script = documented_hook().replace("http://smart-router", url).replace("300", wait);
    assert!(script.contains(url), "{script}");
    let mut command = Command::new("sh");
    command.args(["-ec", &script]).env("POD_NAME", "voice-agent-0");
    command.env("SMART_ROUTER_TOKEN", token).stdout(Stdio::piped()).stderr(Stdio::piped());
    Process(command.spawn().unwrap())
}

#[test]
fn the_documented_curl_hook_waits_for_the_calls_of_its_pod() {
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("API_TOKENS", "admin:secret,agent:hook"),
        ("LOG_LEVEL", "error"),
    ]);
    router.allocate("CA1");
    let mut hook = curl(&format!("http://{}", router.address), "hook");
    eventually(10 * SECOND, "the pod is draining", || {
        router.get("/api/v1/pod/voice-agent-0").1["is_draining"] == true
    });
    assert!(hook.0.try_wait().unwrap().is_none(), "a call is active");
    assert_eq!(router.release("CA1").0, 200);
    assert_eq!(exit_code(&mut hook, 20 * SECOND), Some(0));
}

#[test]
fn the_documented_curl_hook_fails_when_calls_remain() {
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("API_TOKENS", "admin:secret,agent:hook"),
        ("LOG_LEVEL", "error"),
    ]);
    router.allocate("CA1");
    let mut hook = curl_for(&format!("http://{}", router.address), "hook", "2");
    assert_eq!(exit_code(&mut hook, 20 * SECOND), Some(1));
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], true);
}

#[test]
fn the_documented_curl_hook_retries_when_it_is_refused() {
    let tokens = scratch().join("tokens");
    std::fs::write(&tokens, "admin:secret").unwrap();
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("API_TOKENS_FILE", tokens.to_str().unwrap()),
        ("LOG_LEVEL", "error"),
    ]);
    let denied = || {
        let metrics = router.connect().get("/metrics").text();
        let line = metrics
            .lines()
            .find_map(|line| {
                line.strip_prefix(r#"smart_router_denied_total{reason="unauthorized"} "#)
            })
            .map(str::to_owned);
        line.and_then(|count| count.parse::<u64>().ok()).unwrap_or(0)
    };
    let mut hook = curl(&format!("http://{}", router.address), "hook");
    eventually(20 * SECOND, "two attempts are refused", || denied() >= 2);
    std::fs::write(&tokens, "admin:secret,agent:hook").unwrap();
    let code = exit_code(&mut hook, 20 * SECOND);
    let mut stderr = String::new();
    hook.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(router.get("/api/v1/pod/voice-agent-0").1["is_draining"], true);
}
