//! Disk faults under `DATA_DIR`: full, read-only, stalled, removed.

use std::{
    collections::HashMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use serde_json::json;

use crate::journal::allocate_until_exit;
use testkit::{
    Connection, Router,
    disk::{Disk, EIO, ENOSPC, EROFS},
    eventually, free_port, program, scratch,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_smart-router");

const TIMEOUT: Duration = Duration::from_secs(20);

type Settings = Vec<(&'static str, String)>;

fn settings(data: &Path, more: &[(&'static str, String)]) -> Settings {
    let mut settings = vec![
        ("HTTP_PORT", free_port().to_string()),
        ("METRICS_PORT", free_port().to_string()),
        ("LOG_LEVEL", "off".to_owned()),
        ("DATA_DIR", data.to_str().unwrap().to_owned()),
    ];
    settings.extend(more.iter().cloned());
    settings
}

fn borrowed(settings: &Settings) -> Vec<(&str, &str)> {
    settings.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

fn start(settings: &Settings) -> Router {
    let settings = borrowed(settings);
    let mut command = program(&settings);
    Router::start_command(command.stdout(Stdio::null()).stderr(Stdio::piped()), &settings)
}

/// The program in a shell with a file size limit; writes beyond it fail.
fn limited(settings: &Settings, blocks: u32) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("trap '' XFSZ; ulimit -f {blocks}; exec {PROGRAM}"));
    command.env_clear().envs(borrowed(settings)).stdout(Stdio::null());
    command
}

fn stderr(router: &mut Router) -> String {
    let mut text = String::new();
    router.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Waits until the router exits with code 74 and asserts that one line names the cause.
fn assert_exit_74(router: &mut Router, data: &Path, cause: &str) {
    assert_eq!(router.wait_for_exit(TIMEOUT), Some(74));
    let text = stderr(router);
    assert_eq!(text.lines().count(), 1, "{text}");
    let data = format!("DATA_DIR={}: ", data.display());
    assert!(text.contains(&data) && text.contains(cause), "{text}");
}

fn files(directory: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).unwrap());
    let mut files: Vec<_> = entries.map(read).collect();
    files.sort();
    files
}

#[test]
fn a_start_on_a_full_or_read_only_disk_fails_with_one_line() {
    let data = scratch().join("data");
    start(&settings(&data, &[])).allocate("CA1");
    let before = files(&data);
    let disk = Disk::create();
    let faulty = settings(&data, &disk.settings());
    let refused = |mut command: Command, cause: &str| {
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let prefix = format!("smart-router: DATA_DIR={}: ", data.display());
        assert!(text.starts_with(&prefix) && text.contains(cause), "{text}");
        assert_eq!(files(&data), before, "existing files are unchanged");
    };
    refused(limited(&faulty, 0), "File too large");
    for (call, errno, cause) in [
        ("create", EROFS, "Read-only file system"),
        ("create", ENOSPC, "No space left on device"),
        ("write", ENOSPC, "No space left on device"),
    ] {
        disk.fail(call, errno);
        refused(program(&borrowed(&faulty)), cause);
    }
    disk.heal();
    assert_eq!(start(&faulty).get("/api/v1/calls/CA1").0, 200);
}

#[test]
fn a_full_disk_stops_the_router_and_loses_no_acknowledged_call() {
    let data = scratch().join("data");
    let settings = settings(&data, &[("TIER_CONFIG", r#"{"gold": 1000}"#.to_owned())]);
    // Space for the pods and for some of the calls.
    let mut command = limited(&settings, 1_000);
    let mut router = Router::start_command(command.stderr(Stdio::piped()), &borrowed(&settings));
    let (next, acknowledged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let known: HashMap<String, String> = thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| allocate_until_exit(&router, &next, &acknowledged)))
            .collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert!((1..1_000).contains(&known.len()), "the limit is too high or too low: {}", known.len());
    assert_exit_74(&mut router, &data, "File too large");
    let router = router.kill_and_restart();
    let mut connection = router.connect();
    for (call, pod) in &known {
        let (status, found) = connection.get(&format!("/api/v1/calls/{call}")).json();
        assert_eq!((status, found["pod_name"].as_str()), (200, Some(pod.as_str())), "{call}");
    }
}

#[test]
fn a_failed_write_stops_the_router_before_it_responds() {
    for (call, errno, cause) in [
        ("write", EROFS, "Read-only file system"),
        ("write", ENOSPC, "No space left on device"),
        ("sync", EIO, "Input/output error"),
    ] {
        let (data, disk) = (scratch().join("data"), Disk::create());
        let mut router = start(&settings(&data, &disk.settings()));
        router.allocate("CA1");
        await_capacity_state(&data);
        disk.fail(call, errno);
        assert!(
            try_allocate(&mut router.connect(), "CA2").is_none(),
            "a response before the write was synced"
        );
        assert_exit_74(&mut router, &data, cause);
        disk.heal();
        // A failed sync leaves the record in the journal. If background work of the router syncs
        // first, the router exits before it writes the record.
        let is_written = fs::read_to_string(data.join("journal")).unwrap().contains("CA2");
        assert!(!(is_written && call == "write"), "the write did not fail");
        let router = router.kill_and_restart();
        assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
        assert_eq!(router.get("/api/v1/calls/CA2").0, if is_written { 200 } else { 404 });
    }
}

/// Waits until the first state of the capacity policy is in the journal. The next one comes a
/// minute later; until then only requests write to the disk.
fn await_capacity_state(data: &Path) {
    eventually(TIMEOUT, "the journal has the capacity state", || {
        fs::read_to_string(data.join("journal")).unwrap().contains("capacity_state")
    });
}

/// Sends an allocate request. Returns the status, or `None` if the router exits first.
fn try_allocate(connection: &mut Connection, call: &str) -> Option<u16> {
    let response = connection.try_post("/api/v1/allocate", &json!({"call_sid": call}));
    response.map(|response| response.status)
}

#[test]
fn a_full_disk_at_compaction_stops_the_router_without_loss() {
    let (data, disk) = (scratch().join("data"), Disk::create());
    let mut router = start(&settings(&data, &disk.settings()));
    router.allocate("CA1");
    disk.fail("create", ENOSPC);
    let mut connection = router.connect();
    // Documents of 4 KB, until the journal reaches 4 MiB and is compacted.
    let mut last = 0;
    for number in 1..2_000 {
        let document = json!({"note": format!("{number:04}{}", "x".repeat(3_900))});
        let path = "/api/v1/merchants/shop";
        match connection.try_put(path, &document) {
            Some(response) => assert_eq!(response.status, 200),
            None => break,
        }
        last = number;
    }
    assert!((1_000..1_999).contains(&last), "no compaction after {last}");
    assert_exit_74(&mut router, &data, "No space left on device");
    disk.heal();
    let router = router.kill_and_restart();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    let note = router.get("/api/v1/merchants/shop").1["note"].as_str().unwrap()[..4].to_owned();
    assert_eq!(note.parse::<i32>().unwrap(), last);
}

#[test]
fn a_removed_data_directory_stops_the_router() {
    let remove = |data: &Path| fs::remove_dir_all(data).unwrap();
    let rename = |data: &Path| fs::rename(data, data.with_extension("old")).unwrap();
    for (move_away, is_restored) in [(remove as fn(&Path), false), (rename, true)] {
        let data = scratch().join("data");
        let mut router = start(&settings(&data, &[]));
        router.allocate("CA1");
        move_away(&data);
        let mut connection = router.connect();
        assert!(
            try_allocate(&mut connection, "CA2").is_none(),
            "a response that a restart would lose"
        );
        assert_exit_74(&mut router, &data, "journal");
        if is_restored {
            fs::rename(data.with_extension("old"), &data).unwrap();
        }
        let router = router.kill_and_restart();
        assert_eq!(router.get("/api/v1/calls/CA1").0, if is_restored { 200 } else { 404 });
    }
}

fn lines(data: &Path) -> Vec<String> {
    fs::read_to_string(data.join("journal")).unwrap().lines().map(str::to_owned).collect()
}

fn longest_line(data: &Path) -> usize {
    lines(data).iter().map(String::len).max().unwrap()
}

fn refusals(data: &Path) -> usize {
    lines(data).iter().map(|line| line.matches(r#""kind":"refused""#).count()).sum()
}

/// Sends requests that are refused: `per_client` from each of several clients.
fn send_refused(router: &Router, clients: usize, per_client: usize, answered: &AtomicUsize) {
    thread::scope(|scope| {
        for client in 0..clients {
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in 0..per_client {
                    let body = json!({"call_sid": format!("refused-{client}-{number}")});
                    assert_eq!(connection.post("/api/v1/allocate", &body).status, 503);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
}

#[test]
fn refusals_are_journalled_in_lines_of_bounded_length() {
    let data = scratch().join("data");
    let tiers = ("TIER_CONFIG", r#"{"gold": 1}"#.to_owned());
    let router = start(&settings(&data, &[tiers]));
    router.allocate("CA1");
    send_refused(&router, 4, 1_500, &AtomicUsize::new(0));
    // No other change triggers a write.
    eventually(TIMEOUT, "all refusals are in the journal", || refusals(&data) == 6_000);
    assert!(longest_line(&data) < 512 << 10, "{}", longest_line(&data));
    let router = router.kill_and_restart();
    let latest = router.get("/api/v1/events?limit=3").1;
    assert_eq!(latest["events"][2]["event"], "refused", "{latest}");
}

#[test]
fn a_slow_disk_puts_backpressure_on_refusals() {
    let (data, disk) = (scratch().join("data"), Disk::create());
    let mut more: Settings = disk.settings().to_vec();
    more.push(("TIER_CONFIG", r#"{"gold": 1}"#.to_owned()));
    let router = start(&settings(&data, &more));
    router.allocate("CA1");
    await_capacity_state(&data);
    disk.stall("sync");
    let answered = AtomicUsize::new(0);
    thread::scope(|scope| {
        let clients = scope.spawn(|| send_refused(&router, 4, 1_000, &answered));
        eventually(TIMEOUT, "refusals get responses without the disk", || {
            answered.load(Ordering::Relaxed) >= 1_000
        });
        // A thousand refusals may be pending, besides those in the first sync.
        let mut before = 0;
        eventually(TIMEOUT, "further refusals wait", || {
            thread::sleep(Duration::from_millis(200));
            let now = answered.load(Ordering::Relaxed);
            std::mem::replace(&mut before, now) == now
        });
        assert!(before < 3_000, "{before} refusals are in memory only");
        disk.heal();
        clients.join().unwrap();
    });
    eventually(TIMEOUT, "all refusals are in the journal", || refusals(&data) == 4_000);
    assert!(longest_line(&data) < 512 << 10, "{}", longest_line(&data));
}

/// Allocates and releases calls until the router stops. Returns the calls acknowledged as
/// allocated with their pods, and those acknowledged as released.
fn churn_until_stop(router: &Router, client: usize) -> (HashMap<String, String>, Vec<String>) {
    let (mut live, mut ended) = (HashMap::new(), Vec::new());
    let mut connection = router.connect();
    for number in 0.. {
        let call = format!("CA-{client}-{number}");
        let body = json!({"call_sid": call});
        let Some(response) = connection.try_post("/api/v1/allocate", &body) else { break };
        if response.status != 200 {
            continue;
        }
        let pod = response.json().1["pod_name"].as_str().unwrap().to_owned();
        if number % 4 == 0 {
            live.insert(call, pod);
            continue;
        }
        match connection.try_post("/api/v1/release", &body) {
            Some(response) if response.status == 200 => ended.push(call),
            Some(_) => {}
            None => break,
        }
    }
    (live, ended)
}

#[test]
fn a_graceful_shutdown_under_load_loses_no_write() {
    let data = scratch().join("data");
    let settings = settings(&data, &[("TIER_CONFIG", r#"{"gold": 5000}"#.to_owned())]);
    let mut router = start(&settings);
    let (mut live, mut ended) = (HashMap::new(), Vec::new());
    thread::scope(|scope| {
        let router = &router;
        let clients: Vec<_> =
            (0..16).map(|client| scope.spawn(move || churn_until_stop(router, client))).collect();
        eventually(TIMEOUT, "calls are active", || {
            router.status()["active_calls"].as_u64().unwrap() > 100
        });
        router.signal("TERM");
        for client in clients {
            let (some_live, some_ended) = client.join().unwrap();
            live.extend(some_live);
            ended.extend(some_ended);
        }
    });
    assert_eq!(router.wait_for_exit(TIMEOUT), Some(0));
    assert_eq!(stderr(&mut router), "");
    let router = router.kill_and_restart();
    let mut connection = router.connect();
    for (call, pod) in &live {
        let (status, found) = connection.get(&format!("/api/v1/calls/{call}")).json();
        assert_eq!((status, found["pod_name"].as_str()), (200, Some(pod.as_str())), "{call}");
    }
    for call in &ended {
        assert_eq!(connection.get(&format!("/api/v1/calls/{call}")).status, 404, "{call}");
    }
}
