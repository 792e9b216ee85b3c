//! Disks under `DATA_DIR` that fill up, are read-only, stall or go away.

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

use crate::journal::allocate_until_death;
use testkit::{
    Connection, Router,
    disk::{Disk, EIO, ENOSPC, EROFS},
    eventually, free_port, program, scratch,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_smart-router");

const SOON: Duration = Duration::from_secs(20);

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

/// The program in a shell that limits the size of its files: beyond that, writes fail.
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

/// Waits until a router ends because of its disk, and says so in one line.
fn ends_with_74(router: &mut Router, data: &Path, cause: &str) {
    assert_eq!(router.wait_for_exit(SOON), Some(74));
    let said = stderr(router);
    assert_eq!(said.lines().count(), 1, "{said}");
    let data = format!("DATA_DIR={}: ", data.display());
    assert!(said.contains(&data) && said.contains(cause), "{said}");
}

fn files(directory: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).unwrap());
    let mut files: Vec<_> = entries.map(read).collect();
    files.sort();
    files
}

#[test]
fn a_start_on_a_full_or_read_only_disk_is_refused_in_one_line() {
    let data = scratch().join("data");
    start(&settings(&data, &[])).allocate("CA1");
    let before = files(&data);
    let disk = Disk::create();
    let faulty = settings(&data, &disk.settings());
    let refused = |mut command: Command, cause: &str| {
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let named = format!("smart-router: DATA_DIR={}: ", data.display());
        assert!(said.starts_with(&named) && said.contains(cause), "{said}");
        assert_eq!(files(&data), before, "what was there is untouched");
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
fn a_disk_that_fills_up_stops_the_router_and_loses_no_answered_call() {
    let data = scratch().join("data");
    let settings = settings(&data, &[("TIER_CONFIG", r#"{"gold": 1000}"#.to_owned())]);
    // (room for the pods, and for some of the calls)
    let mut command = limited(&settings, 1_000);
    let mut router = Router::start_command(command.stderr(Stdio::piped()), &borrowed(&settings));
    let (next, acknowledged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let known: HashMap<String, String> = thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| allocate_until_death(&router, &next, &acknowledged)))
            .collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert!((1..1_000).contains(&known.len()), "the limit is too high or too low: {}", known.len());
    ends_with_74(&mut router, &data, "File too large");
    let router = router.kill_and_restart();
    let mut connection = router.connect();
    for (call, pod) in &known {
        let (status, found) = connection.get(&format!("/api/v1/calls/{call}")).json();
        assert_eq!((status, found["pod_name"].as_str()), (200, Some(pod.as_str())), "{call}");
    }
}

#[test]
fn a_write_that_fails_stops_the_router_before_it_answers() {
    for (call, errno, cause) in [
        ("write", EROFS, "Read-only file system"),
        ("write", ENOSPC, "No space left on device"),
        ("sync", EIO, "Input/output error"),
    ] {
        let (data, disk) = (scratch().join("data"), Disk::create());
        let mut router = start(&settings(&data, &disk.settings()));
        router.allocate("CA1");
        disk.fail(call, errno);
        assert!(try_allocate(&mut router.connect(), "CA2").is_none(), "an answer not on disk");
        ends_with_74(&mut router, &data, cause);
        disk.heal();
        let router = router.kill_and_restart();
        assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
        assert_eq!(router.get("/api/v1/calls/CA2").0, if call == "write" { 404 } else { 200 });
    }
}

/// Asks for a pod; the status, unless the router ends first.
fn try_allocate(connection: &mut Connection, call: &str) -> Option<u16> {
    let answer = connection.try_post("/api/v1/allocate", &json!({"call_sid": call}));
    answer.map(|answer| answer.status)
}

#[test]
fn a_disk_that_is_full_at_a_compaction_stops_the_router_and_loses_nothing() {
    let (data, disk) = (scratch().join("data"), Disk::create());
    let mut router = start(&settings(&data, &disk.settings()));
    router.allocate("CA1");
    disk.fail("create", ENOSPC);
    let mut connection = router.connect();
    // Documents of 4 KB, until 4 MiB of them are to be replaced by the last one.
    let mut last = 0;
    for number in 1..2_000 {
        let document = json!({"note": format!("{number:04}{}", "x".repeat(3_900))});
        let path = "/api/v1/merchants/shop";
        match connection.try_put(path, &document) {
            Some(answer) => assert_eq!(answer.status, 200),
            None => break,
        }
        last = number;
    }
    assert!((1_000..1_999).contains(&last), "no compaction after {last}");
    ends_with_74(&mut router, &data, "No space left on device");
    disk.heal();
    let router = router.kill_and_restart();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    let note = router.get("/api/v1/merchants/shop").1["note"].as_str().unwrap()[..4].to_owned();
    assert_eq!(note.parse::<i32>().unwrap(), last);
}

#[test]
fn a_data_directory_that_goes_away_stops_the_router() {
    let remove = |data: &Path| fs::remove_dir_all(data).unwrap();
    let rename = |data: &Path| fs::rename(data, data.with_extension("old")).unwrap();
    for (go_away, is_kept) in [(remove as fn(&Path), false), (rename, true)] {
        let data = scratch().join("data");
        let mut router = start(&settings(&data, &[]));
        router.allocate("CA1");
        go_away(&data);
        let mut connection = router.connect();
        assert!(try_allocate(&mut connection, "CA2").is_none(), "an answer that a restart forgets");
        ends_with_74(&mut router, &data, "journal");
        if is_kept {
            fs::rename(data.with_extension("old"), &data).unwrap();
        }
        let router = router.kill_and_restart();
        assert_eq!(router.get("/api/v1/calls/CA1").0, if is_kept { 200 } else { 404 });
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

/// Calls that are refused, from several clients; how many each has.
fn refuse(router: &Router, clients: usize, each: usize, answered: &AtomicUsize) {
    thread::scope(|scope| {
        for client in 0..clients {
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in 0..each {
                    let body = json!({"call_sid": format!("refused-{client}-{number}")});
                    assert_eq!(connection.post("/api/v1/allocate", &body).status, 503);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
}

#[test]
fn refusals_are_written_as_they_come_in_lines_of_bounded_length() {
    let data = scratch().join("data");
    let tiers = ("TIER_CONFIG", r#"{"gold": 1}"#.to_owned());
    let router = start(&settings(&data, &[tiers]));
    router.allocate("CA1");
    refuse(&router, 4, 1_500, &AtomicUsize::new(0));
    // Nothing else changes meanwhile.
    eventually(SOON, "all refusals are in the journal", || refusals(&data) == 6_000);
    assert!(longest_line(&data) < 512 << 10, "{}", longest_line(&data));
    let router = router.kill_and_restart();
    let latest = router.get("/api/v1/events?limit=3").1;
    assert_eq!(latest["events"][2]["event"], "refused", "{latest}");
}

#[test]
fn refusals_wait_for_a_disk_that_falls_behind() {
    let (data, disk) = (scratch().join("data"), Disk::create());
    let mut more: Settings = disk.settings().to_vec();
    more.push(("TIER_CONFIG", r#"{"gold": 1}"#.to_owned()));
    let router = start(&settings(&data, &more));
    router.allocate("CA1");
    disk.stall("sync");
    let answered = AtomicUsize::new(0);
    thread::scope(|scope| {
        let clients = scope.spawn(|| refuse(&router, 4, 1_000, &answered));
        eventually(SOON, "refusals are answered without the disk", || {
            answered.load(Ordering::Relaxed) >= 1_000
        });
        // A thousand are ahead of the disk, and what the first sync has taken.
        let mut before = 0;
        eventually(SOON, "the next ones wait", || {
            thread::sleep(Duration::from_millis(200));
            let now = answered.load(Ordering::Relaxed);
            std::mem::replace(&mut before, now) == now
        });
        assert!(before < 3_000, "{before} refusals are in memory only");
        disk.heal();
        clients.join().unwrap();
    });
    eventually(SOON, "all refusals are in the journal", || refusals(&data) == 4_000);
    assert!(longest_line(&data) < 512 << 10, "{}", longest_line(&data));
}

/// Allocates and releases calls until the router stops: what is certainly live, by call, and
/// what is certainly over.
fn churn_until_stop(router: &Router, client: usize) -> (HashMap<String, String>, Vec<String>) {
    let (mut live, mut over) = (HashMap::new(), Vec::new());
    let mut connection = router.connect();
    for number in 0.. {
        let call = format!("CA-{client}-{number}");
        let body = json!({"call_sid": call});
        let Some(answer) = connection.try_post("/api/v1/allocate", &body) else { break };
        if answer.status != 200 {
            continue;
        }
        let pod = answer.json().1["pod_name"].as_str().unwrap().to_owned();
        if number % 4 == 0 {
            live.insert(call, pod);
            continue;
        }
        match connection.try_post("/api/v1/release", &body) {
            Some(answer) if answer.status == 200 => over.push(call),
            Some(_) => {}
            None => break,
        }
    }
    (live, over)
}

#[test]
fn a_stop_under_heavy_writes_is_clean_and_loses_nothing() {
    let data = scratch().join("data");
    let settings = settings(&data, &[("TIER_CONFIG", r#"{"gold": 5000}"#.to_owned())]);
    let mut router = start(&settings);
    let (mut live, mut over) = (HashMap::new(), Vec::new());
    thread::scope(|scope| {
        let router = &router;
        let clients: Vec<_> =
            (0..16).map(|client| scope.spawn(move || churn_until_stop(router, client))).collect();
        eventually(SOON, "there are calls", || {
            router.status()["active_calls"].as_u64().unwrap() > 100
        });
        router.signal("TERM");
        for client in clients {
            let (some_live, some_over) = client.join().unwrap();
            live.extend(some_live);
            over.extend(some_over);
        }
    });
    assert_eq!(router.wait_for_exit(SOON), Some(0));
    assert_eq!(stderr(&mut router), "");
    let router = router.kill_and_restart();
    let mut connection = router.connect();
    for (call, pod) in &live {
        let (status, found) = connection.get(&format!("/api/v1/calls/{call}")).json();
        assert_eq!((status, found["pod_name"].as_str()), (200, Some(pod.as_str())), "{call}");
    }
    for call in &over {
        assert_eq!(connection.get(&format!("/api/v1/calls/{call}")).status, 404, "{call}");
    }
}
