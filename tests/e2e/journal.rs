use std::{
    collections::HashMap,
    fs,
    io::Write,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use serde_json::json;

use testkit::{Connection, Router, eventually, free_port, program, scratch};

/// Allocates calls until the router exits. Returns the acknowledged calls and their pods.
pub(crate) fn allocate_until_exit(
    router: &Router,
    next: &AtomicUsize,
    acknowledged: &AtomicUsize,
) -> HashMap<String, String> {
    let mut known = HashMap::new();
    let Some(mut connection) = Connection::try_open(router.address) else {
        return known;
    };
    loop {
        let call = format!("CA{}", next.fetch_add(1, Ordering::Relaxed));
        let body = json!({"call_sid": call});
        let Some(response) = connection.try_post("/api/v1/allocate", &body) else {
            return known;
        };
        let (status, response) = response.json();
        if status != 200 {
            return known;
        }
        known.insert(call, response["pod_name"].as_str().unwrap().to_owned());
        acknowledged.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_kill_loses_no_acknowledged_allocation() {
    let directory = scratch();
    let router = Router::start(&[
        ("DATA_DIR", directory.to_str().unwrap()),
        ("TIER_CONFIG", r#"{"gold": 4000}"#),
    ]);
    let (next, acknowledged) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let known: HashMap<String, String> = thread::scope(|scope| {
        let clients: Vec<_> = (0..32)
            .map(|_| scope.spawn(|| allocate_until_exit(&router, &next, &acknowledged)))
            .collect();
        while acknowledged.load(Ordering::Relaxed) < 1_000 {
            thread::sleep(Duration::from_millis(1));
        }
        router.signal("KILL");
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert!((1_000..4_000).contains(&known.len()), "killed too late: {}", known.len());
    let router = router.kill_and_restart();
    let mut connection = router.connect();
    let mut pods = HashMap::new();
    for (call, pod) in &known {
        let (status, found) = connection.get(&format!("/api/v1/calls/{call}")).json();
        assert_eq!((status, found["pod_name"].as_str()), (200, Some(pod.as_str())), "{call}");
        assert_eq!(pods.insert(pod, call), None, "{pod} serves two calls");
    }
    let live = router.status()["active_calls"].as_u64().unwrap() as usize;
    let requested = next.load(Ordering::Relaxed);
    assert!(
        (known.len()..=requested).contains(&live),
        "{} acknowledged, {live} live, {requested} requested",
        known.len()
    );
}

#[test]
fn acknowledged_changes_survive_a_kill() {
    let directory = scratch();
    let router = Router::start(&[("DATA_DIR", directory.to_str().unwrap())]);
    router.allocate("CA1");
    router.allocate("CA2");
    router.allocate("CA3");
    router.release("CA2");
    router.post("/api/v1/drain", json!({"pod_name": "voice-agent-2"}));
    router.put("/api/v1/merchants/shop", r#"{"fallback": ["basic"]}"#);
    let before = router.status();
    let router = router.kill_and_restart();
    assert_eq!(router.status(), before);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    assert_eq!(router.get("/api/v1/calls/CA2").0, 404);
    assert_eq!(router.get("/api/v1/merchants/shop").1, json!({"fallback": ["basic"]}));
    assert_eq!(router.get("/api/v1/pod/voice-agent-2").1["is_draining"], true);
}

#[test]
fn a_torn_last_record_is_truncated() {
    let directory = scratch();
    let router = Router::start(&[("DATA_DIR", directory.to_str().unwrap())]);
    router.allocate("CA1");
    let journal = directory.join("journal");
    router.signal("STOP");
    fs::OpenOptions::new()
        .append(true)
        .open(&journal)
        .unwrap()
        .write_all(b"0badc0de [{\"is\":\"call\"")
        .unwrap();
    let router = router.kill_and_restart();
    assert_eq!(router.status()["active_calls"], 1);
    let router = router.kill_and_restart();
    assert_eq!(router.status()["active_calls"], 1, "the torn record was removed from the file");
}

fn refused_start(settings: &[(&str, &str)]) -> String {
    let port = free_port().to_string();
    let mut all =
        vec![("HTTP_PORT", port.as_str()), ("METRICS_PORT", port.as_str()), ("LOG_LEVEL", "off")];
    all.extend(settings);
    let output = program(&all).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_second_process_on_the_same_data_directory_is_refused() {
    let directory = scratch();
    let settings = [("DATA_DIR", directory.to_str().unwrap())];
    let router = Router::start(&settings);
    let refusal = refused_start(&settings);
    assert!(
        refusal.contains("DATA_DIR=") && refusal.contains("in use by another process"),
        "{refusal}"
    );
    router.allocate("CA1");
}

#[test]
fn a_damaged_journal_is_refused_and_not_modified() {
    let directory = scratch();
    let settings = [("DATA_DIR", directory.to_str().unwrap())];
    let router = Router::start(&settings);
    router.allocate("CA1");
    router.allocate("CA2");
    drop(router);
    let journal = directory.join("journal");
    let mut bytes = fs::read(&journal).unwrap();
    bytes[60] ^= 1;
    fs::write(&journal, &bytes).unwrap();
    let refusal = refused_start(&settings);
    assert!(refusal.contains("is damaged at byte"), "{refusal}");
    assert_eq!(fs::read(&journal).unwrap(), bytes);
}

#[test]
fn the_journal_is_compacted_while_it_is_in_use() {
    let directory = scratch();
    let router = Router::start(&[
        ("DATA_DIR", directory.to_str().unwrap()),
        ("TIER_CONFIG", r#"{"gold": 64}"#),
    ]);
    router.allocate("keeper");
    let journal = directory.join("journal");
    let is_compacted = AtomicBool::new(false);
    let is_running = || !is_compacted.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for client in 0..2 {
            let (router, is_running) = (&router, &is_running);
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in (0..20_000).take_while(|_| is_running()) {
                    let body = json!({"call_sid": format!("CA-{client}-{number}")});
                    assert_eq!(connection.post("/api/v1/allocate", &body).status, 200);
                    assert_eq!(connection.post("/api/v1/release", &body).status, 200);
                }
            });
        }
        // Documents of 4 KB: a journal of 4 MiB is compacted. Concurrent writes share a sync.
        for client in 0..16 {
            let (router, is_running) = (&router, &is_running);
            scope.spawn(move || {
                let (mut connection, path) =
                    (router.connect(), format!("/api/v1/merchants/m{client}"));
                for number in (0..20_000).take_while(|_| is_running()) {
                    let document = json!({"note": format!("{number}{}", "x".repeat(3_900))});
                    assert_eq!(connection.try_put(&path, &document).unwrap().status, 200);
                }
            });
        }
        let mut largest = 0;
        eventually(Duration::from_secs(20), "the journal becomes shorter", || {
            let size = fs::metadata(&journal).unwrap().len();
            largest = largest.max(size);
            // Setting the flag also stops the client threads.
            let is_too_long = largest > 12 << 20;
            is_compacted.fetch_or(is_too_long || size < largest / 2, Ordering::Relaxed);
            assert!(!is_too_long, "never compacted: {largest}");
            !is_running()
        });
    });
    let router = router.kill_and_restart();
    assert_eq!(router.get("/api/v1/calls/keeper").0, 200);
    assert_eq!(router.status()["active_calls"], 1);
}
