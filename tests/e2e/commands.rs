//! Commands that inspect and change a running router.

use std::{
    io::Write,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;

use testkit::{Router, eventually, free_port, program};

const PROGRAM: &str = env!("CARGO_BIN_EXE_smart-router");

const TIERS: &str = r#"{"gold": {"type": "exclusive", "target": 2}, "basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;

/// Runs a command against a router. Returns exit code, stdout and stderr.
fn run(url: &str, args: &[&str]) -> (i32, String, String) {
    let output = program(&[("SMART_ROUTER_URL", url)]).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn router() -> (Router, String) {
    let router = Router::start(&[("TIER_CONFIG", TIERS)]);
    let url = format!("http://{}", router.address);
    (router, url)
}

#[test]
fn commands_show_status_pods_calls_and_events() {
    let (router, url) = router();
    for call in ["CA1", "CA2", "CA3"] {
        router.allocate(call);
    }
    let (code, text, _) = run(&url, &["status"]);
    assert_eq!(code, 0);
    let gold = text.lines().find(|line| line.starts_with("gold")).unwrap();
    assert_eq!(
        gold.split_whitespace().collect::<Vec<_>>()[1..6],
        ["exclusive", "2", "2", "2", "0"]
    );
    assert!(text.contains("3 live calls, 0 waiting; this router is the leader"), "{text}");
    let (_, text, _) = run(&url, &["pods", "--state", "busy"]);
    assert_eq!(text.lines().count(), 4, "{text}");
    let (_, text, _) = run(&url, &["pods", "--pool", "gold", "--json"]);
    let pods: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(pods.as_array().unwrap().len(), 2);
    let (code, _, error) = run(&url, &["pods", "--pool", "plaid"]);
    assert_eq!((code, error.contains("unknown pool plaid")), (3, true), "{error}");
    let (code, text, _) = run(&url, &["calls", "--pool", "gold", "--merchant", "acme"]);
    assert_eq!((code, text.lines().count()), (0, 1), "{text}");
    let (_, text, _) = run(&url, &["calls"]);
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.contains("gold=at_capacity"), "skipped steps are shown: {text}");
    let (_, text, _) = run(&url, &["calls", "CA3"]);
    assert!(text.starts_with("CA3 is live\n") && text.contains("allocated"), "{text}");
    let (_, text, _) = run(&url, &["events", "--event", "allocated", "--json"]);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["call_sid"], "CA3");
}

#[test]
fn commands_change_pods_calls_merchants_and_tiers() {
    let (router, url) = router();
    let response = router.allocate("CA1");
    let pod = response["pod_name"].as_str().unwrap();
    assert_eq!(run(&url, &["drain", "unknown-pod"]).0, 3);
    assert_eq!(run("http://127.0.0.1:1", &["drain", pod]).0, 4);
    let (code, text, _) = run(&url, &["drain", pod]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"], true);
    assert_eq!(run(&url, &["undrain", pod]).0, 0);
    assert_eq!(router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"], false);
    let (code, text, _) = run(&url, &["release", "CA1"]);
    assert_eq!((code, text), (0, format!("CA1 is released; {pod} is back in pool:gold\n")));
    let (code, _, error) = run(&url, &["release", "CA1"]);
    assert_eq!((code, error.as_str()), (3, "smart-router: call not found\n"));
    let (_, text, _) = run(&url, &["calls", "CA1"]);
    assert!(text.starts_with("CA1 is ended\n"), "{text}");

    let with_input = |args: &[&str], input: &str| {
        let mut child = program(&[("SMART_ROUTER_URL", &url)])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A command that does not read its input may end first.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), text + &String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = with_input(&["merchants", "set", "acme", "-"], r#"{"max_calls": 2}"#);
    assert_eq!((code, text.as_str()), (0, "acme is set\n"));
    assert!(run(&url, &["merchants"]).1.contains(r#"{"max_calls":2}"#));
    let (_, response) = router.put("/api/v1/merchants/acme", r#"{"pool": "mispelt"}"#);
    let warning = "the pool merchant:mispelt has no pods yet";
    assert_eq!(response["warnings"], serde_json::json!([warning]), "{response}");
    for (document, warning) in [
        (r#"{"falback": ["gold"]}"#, "falback"),
        (r#"{"dedicated_only": true}"#, "refuses every call"),
        (r#"{"fallback": ["merchant:unknown"]}"#, "merchant:unknown has no pods"),
    ] {
        let (_, response) = router.put("/api/v1/merchants/acme", document);
        assert!(response["warnings"][0].as_str().unwrap().contains(warning), "{response}");
    }
    router.put("/api/v1/merchants/acme", r#"{"fallback": ["gold"]}"#);
    let without = r#"{"basic": {"type": "shared", "target": 3, "max_concurrent": 2}}"#;
    let (_, response) = router.put("/api/v1/tiers?dry_run", without);
    assert!(response["warnings"].to_string().contains("such as acme"), "{response}");
    let (code, text) = with_input(&["merchants", "set", "acme", "-"], r#"{"fallback": ["no"]}"#);
    assert_eq!(code, 1);
    assert!(text.contains("unknown tier no"), "{text}");
    assert_eq!(run(&url, &["merchants", "delete", "acme"]).0, 0);
    assert_eq!(run(&url, &["merchants", "get", "acme"]).0, 3);
    let next = TIERS.replace("gold", "silver");
    let (code, text) = with_input(&["tiers", "set", "-", "--dry-run"], &next);
    assert_eq!(code, 0);
    assert!(text.contains("silver  at once"), "{text}");
    assert_eq!(with_input(&["tiers", "set", "-"], &next).0, 0);
    let tiers = run(&url, &["tiers"]).1;
    assert!(tiers.starts_with("TIER ") && tiers.contains("silver"), "{tiers}");
    // JSON output of the commands.
    for args in [
        &["tiers", "--json"][..],
        &["tiers", "get"],
        &["drain", pod, "--json"],
        &["undrain", pod, "--json"],
        &["tiers", "set", "-", "--dry-run", "--json"],
    ] {
        let (code, text) = with_input(args, &next);
        assert_eq!(code, 0, "{args:?}: {text}");
        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{args:?}: {text}");
    }
    assert_eq!(with_input(&["tiers", "set", "-"], "{").0, 1);
}

#[test]
fn commands_report_a_missing_router_and_a_missing_token() {
    let (code, _, error) = run("http://127.0.0.1:1", &["status"]);
    assert_eq!(code, 4);
    assert!(error.contains("no router answers at http://127.0.0.1:1"), "{error}");
    let router = Router::start(&[("API_TOKENS", "admin:secret")]);
    let url = format!("http://{}", router.address);
    let (code, _, error) = run(&url, &["pods"]);
    assert_eq!(code, 1);
    assert!(error.contains("set SMART_ROUTER_TOKEN"), "{error}");
    assert_eq!(run(&url, &["pods", "--token", "secret"]).0, 0);
    assert_eq!(run(&url, &["pods", "--colour", "red"]).0, 2);
    let (code, text, _) = run(&url, &["completions", "bash"]);
    assert!(code == 0 && text.contains("_smart__router"), "shell completions are printed");
}

#[test]
fn events_follow_prints_new_events() {
    let (router, url) = router();
    let mut child = program(&[("SMART_ROUTER_URL", &url)])
        .args(["events", "--follow", "--event", "allocated"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = {
        use std::io::{BufRead, BufReader};
        let stdout = child.stdout.take().unwrap();
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        lines
    };
    let mut number = 0;
    eventually(Duration::from_secs(5), "an allocation is printed", || {
        number += 1;
        let call = format!("CA{number}");
        router.post("/api/v1/allocate", serde_json::json!({"call_sid": call}));
        router.release(&call);
        std::thread::sleep(Duration::from_millis(100));
        lines.try_iter().any(|line| line.contains("allocated") && line.contains("CA"))
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn top_prints_once_without_a_terminal() {
    let (router, url) = router();
    router.allocate("CA-seen");
    let mut child = program(&[("SMART_ROUTER_URL", &url), ("TERM", "xterm")])
        .arg("top")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ended = None;
    eventually(Duration::from_secs(5), "top exits", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    let text = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert!(ended.unwrap().success() && !text.contains('\x1b'), "{text:?}");
    for part in ["1 live calls", "gold ", "CA-seen"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let terminal = Terminal::start(&format!("TERM=dumb {PROGRAM} top --router {url}"));
    terminal.wait_for("over 0");
    assert!(terminal.text().contains("1 live calls"), "{}", terminal.text());
}

#[test]
fn the_log_is_coloured_only_on_capable_terminals() {
    for (setting, is_coloured) in [("", true), ("NO_COLOR=1", false), ("TERM=dumb", false)] {
        let bind = format!("127.0.0.1:{}", free_port());
        let command = format!("{setting} {PROGRAM} agent --pod-name a --bind {bind}");
        let terminal = Terminal::start(&command);
        terminal.wait_for("the simulated agent is listening");
        let shown = terminal.tmux(&["capture-pane", "-p", "-e"]);
        assert_eq!(shown.contains("\x1b["), is_coloured, "{setting}: {shown:?}");
    }
}

#[test]
fn a_command_without_a_response_exits_with_4() {
    for args in [
        &["status"][..],
        &["calls", "CA1"],
        &["events", "--follow"],
        &["top"],
        &["call"],
        &["load", "-d", "1s"],
    ] {
        let (code, _, error) = run("http://127.0.0.1:1", args);
        assert_eq!(code, 4, "{args:?}: {error}");
        assert!(error.contains("no router answers at http://127.0.0.1:1"), "{args:?}: {error}");
    }
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    let (_router, url) = router();
    for command in ["call --talk 100ms", "load -d 1s -c 2 --hold 5ms", "check-config", "status"] {
        // Writes fail once the reader has exited.
        let script = format!("{{ {PROGRAM} {command}; echo $? >&2; }} | true");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env_clear().env("SMART_ROUTER_URL", &url);
        let output = shell.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.ends_with("0\n") && !text.contains("panicked"), "{command}: {text}");
    }
}

/// A tmux session that runs one command.
struct Terminal(String);

impl Terminal {
    fn start(command: &str) -> Self {
        let terminal = Self(format!("smart-router-{}", free_port()));
        // Without the user's tmux configuration.
        let shell = format!("{command}; echo over $?; exec cat");
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "24", &shell]);
        terminal
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux").args(["-L", &self.0]).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the visible text.
    fn text(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn wait_for(&self, text: &str) {
        eventually(Duration::from_secs(5), text, || self.text().contains(text));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.0, "kill-server"]).output();
    }
}

#[test]
fn top_refreshes_and_restores_the_terminal() {
    let (router, url) = router();
    let terminal = Terminal::start(&format!("{PROGRAM} top --router {url}"));
    terminal.wait_for("0 live calls");
    assert!(terminal.text().lines().any(|line| line.starts_with("gold ")), "{}", terminal.text());
    router.allocate("CA-seen");
    terminal.wait_for("1 live calls");
    terminal.wait_for("CA-seen");
    terminal.tmux(&["resize-window", "-x", "60", "-y", "10"]);
    router.allocate("CA-next");
    terminal.wait_for("2 live calls");
    assert!(terminal.text().lines().all(|line| line.chars().count() <= 60));
    // The router restarts.
    let router = router.kill_and_restart();
    terminal.wait_for("the router does not answer");
    terminal.wait_for("0 live calls");
    assert!(!terminal.text().contains("does not answer"), "{}", terminal.text());
    terminal.tmux(&["send-keys", "C-c"]);
    terminal.wait_for("over 0");
    let state = terminal.tmux(&["display-message", "-p", "#{alternate_on} #{cursor_flag}"]);
    assert_eq!(state.trim(), "0 1", "screen and cursor are restored");
    drop(router);
    // Without a router, top fails at once.
    let terminal = Terminal::start(&format!("{PROGRAM} top --router {url}"));
    terminal.wait_for("over 4");
}
