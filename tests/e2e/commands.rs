//! The commands that look at a running router and change it.

use std::{
    io::Write,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;

use testkit::{Router, eventually, free_port, program};

const PROGRAM: &str = env!("CARGO_BIN_EXE_smart-router");

const TIERS: &str = r#"{"gold": {"type": "exclusive", "target": 2}, "basic": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;

/// Runs a command against a router: how it exits, what it prints, what it complains of.
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
fn a_fleet_can_be_looked_at() {
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
    assert!(text.contains("3 live calls, 0 waiting; this router leads"), "{text}");
    let (_, text, _) = run(&url, &["pods", "--state", "busy"]);
    assert_eq!(text.lines().count(), 4, "{text}");
    let (_, text, _) = run(&url, &["pods", "--pool", "gold", "--json"]);
    let pods: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(pods.as_array().unwrap().len(), 2);
    let (code, _, error) = run(&url, &["pods", "--pool", "plaid"]);
    assert_eq!((code, error.contains("there is no pool plaid")), (3, true), "{error}");
    let (code, text, _) = run(&url, &["calls", "--pool", "gold", "--merchant", "acme"]);
    assert_eq!((code, text.lines().count()), (0, 1), "{text}");
    let (_, text, _) = run(&url, &["calls"]);
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.contains("gold=at_capacity"), "the path of a call: {text}");
    let (_, story, _) = run(&url, &["calls", "CA3"]);
    assert!(story.starts_with("CA3 is live\n") && story.contains("allocated"), "{story}");
    let (_, text, _) = run(&url, &["events", "--event", "allocated", "--json"]);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["call_sid"], "CA3");
}

#[test]
fn a_fleet_can_be_changed() {
    let (router, url) = router();
    let given = router.allocate("CA1");
    let pod = given["pod_name"].as_str().unwrap();
    assert_eq!(run(&url, &["drain", "nobody"]).0, 3);
    assert_eq!(run("http://127.0.0.1:1", &["drain", pod]).0, 4);
    let (code, text, _) = run(&url, &["drain", pod]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"], true);
    assert_eq!(run(&url, &["undrain", pod]).0, 0);
    assert_eq!(router.get(&format!("/api/v1/pod/{pod}")).1["is_draining"], false);
    let (code, text, _) = run(&url, &["release", "CA1"]);
    assert_eq!((code, text), (0, format!("CA1 has given {pod} back to pool:gold\n")));
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
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), text + &String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = with_input(&["merchants", "set", "acme", "-"], r#"{"max_calls": 2}"#);
    assert_eq!((code, text.as_str()), (0, "acme is set\n"));
    assert!(run(&url, &["merchants"]).1.contains(r#"{"max_calls":2}"#));
    let (_, answer) = router.put("/api/v1/merchants/acme", r#"{"pool": "mispelt"}"#);
    let warning = "the pool merchant:mispelt has no pods yet";
    assert_eq!(answer["warnings"], serde_json::json!([warning]), "{answer}");
    for (document, doubt) in [
        (r#"{"falback": ["gold"]}"#, "falback"),
        (r#"{"dedicated_only": true}"#, "refuses every call"),
        (r#"{"fallback": ["merchant:nobody"]}"#, "merchant:nobody has no pods"),
    ] {
        let (_, answer) = router.put("/api/v1/merchants/acme", document);
        assert!(answer["warnings"][0].as_str().unwrap().contains(doubt), "{answer}");
    }
    router.put("/api/v1/merchants/acme", r#"{"fallback": ["gold"]}"#);
    let without = r#"{"basic": {"type": "shared", "target": 3, "max_concurrent": 2}}"#;
    let (_, answer) = router.put("/api/v1/tiers?dry_run", without);
    assert!(answer["warnings"].to_string().contains("such as acme"), "{answer}");
    let (code, text) = with_input(&["merchants", "set", "acme", "-"], r#"{"fallback": ["no"]}"#);
    assert_eq!(code, 1);
    assert!(text.contains("there is no tier no"), "{text}");
    assert_eq!(run(&url, &["merchants", "delete", "acme"]).0, 0);
    assert_eq!(run(&url, &["merchants", "get", "acme"]).0, 3);
    let next = TIERS.replace("gold", "silver");
    let (code, text) = with_input(&["tiers", "set", "-", "--dry-run"], &next);
    assert_eq!(code, 0);
    assert!(text.contains("silver  at once"), "{text}");
    assert_eq!(with_input(&["tiers", "set", "-"], &next).0, 0);
    let tiers = run(&url, &["tiers"]).1;
    assert!(tiers.starts_with("TIER ") && tiers.contains("silver"), "{tiers}");
    // What every command says to machines.
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
fn who_cannot_be_asked_is_said_so() {
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
    assert!(code == 0 && text.contains("_smart__router"), "shells complete our commands");
}

#[test]
fn events_are_followed() {
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
    eventually(Duration::from_secs(5), "a call is told of", || {
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
fn top_prints_once_and_plainly_where_there_is_no_screen() {
    let (router, url) = router();
    router.allocate("CA-seen");
    let mut child = program(&[("SMART_ROUTER_URL", &url), ("TERM", "xterm")])
        .arg("top")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ended = None;
    eventually(Duration::from_secs(5), "it ends", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    let text = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert!(ended.unwrap().success() && !text.contains('\x1b'), "{text:?}");
    for part in ["1 live calls", "gold ", "CA-seen"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let terminal = Terminal::start(&format!("TERM=dumb {PROGRAM} top --router {url}"));
    terminal.comes_to_show("over 0");
    assert!(terminal.shows().contains("1 live calls"), "{}", terminal.shows());
}

#[test]
fn the_log_is_coloured_only_where_that_is_wanted() {
    for (setting, is_coloured) in [("", true), ("NO_COLOR=1", false), ("TERM=dumb", false)] {
        let bind = format!("127.0.0.1:{}", free_port());
        let command = format!("{setting} {PROGRAM} agent --pod-name a --bind {bind}");
        let terminal = Terminal::start(&command);
        terminal.comes_to_show("agent listens");
        let shown = terminal.tmux(&["capture-pane", "-p", "-e"]);
        assert_eq!(shown.contains("\x1b["), is_coloured, "{setting}: {shown:?}");
    }
}

#[test]
fn a_command_that_gets_no_answer_exits_with_4() {
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
fn a_reader_that_has_enough_is_no_error() {
    let (_router, url) = router();
    for command in ["call --talk 100ms", "load -d 1s -c 2 --hold 5ms", "check-config", "status"] {
        // (what is printed after the reader has gone fails)
        let script = format!("{{ {PROGRAM} {command}; echo $? >&2; }} | true");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env_clear().env("SMART_ROUTER_URL", &url);
        let output = shell.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.ends_with("0\n") && !text.contains("panicked"), "{command}: {text}");
    }
}

/// A terminal of its own, with a program in it.
struct Terminal(String);

impl Terminal {
    fn start(command: &str) -> Self {
        let terminal = Self(format!("smart-router-{}", free_port()));
        // (a shell without anybody's settings)
        let shell = format!("{command}; echo over $?; exec cat");
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "24", &shell]);
        terminal
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux").args(["-L", &self.0]).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What can be seen.
    fn shows(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn comes_to_show(&self, what: &str) {
        eventually(Duration::from_secs(5), what, || self.shows().contains(what));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.0, "kill-server"]).output();
    }
}

#[test]
fn top_fills_a_terminal_follows_and_gives_it_back() {
    let (router, url) = router();
    let terminal = Terminal::start(&format!("{PROGRAM} top --router {url}"));
    terminal.comes_to_show("0 live calls");
    assert!(terminal.shows().lines().any(|line| line.starts_with("gold ")), "{}", terminal.shows());
    router.allocate("CA-seen");
    terminal.comes_to_show("1 live calls");
    terminal.comes_to_show("CA-seen");
    terminal.tmux(&["resize-window", "-x", "60", "-y", "10"]);
    router.allocate("CA-next");
    terminal.comes_to_show("2 live calls");
    assert!(terminal.shows().lines().all(|line| line.chars().count() <= 60));
    // The router goes and comes back.
    let router = router.kill_and_restart();
    terminal.comes_to_show("the router does not answer");
    terminal.comes_to_show("0 live calls");
    assert!(!terminal.shows().contains("does not answer"), "{}", terminal.shows());
    terminal.tmux(&["send-keys", "C-c"]);
    terminal.comes_to_show("over 0");
    let state = terminal.tmux(&["display-message", "-p", "#{alternate_on} #{cursor_flag}"]);
    assert_eq!(state.trim(), "0 1", "the screen and the cursor are as before");
    drop(router);
    // Nobody there at the start is told at once.
    let terminal = Terminal::start(&format!("{PROGRAM} top --router {url}"));
    terminal.comes_to_show("over 4");
}
