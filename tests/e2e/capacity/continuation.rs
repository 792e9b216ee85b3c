//! A restarted store, or another replica, continues with the learned state.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use serde_json::Value;

use super::*;
use testkit::{Log, Router, eventually, program_path, redis::RedisServer, scratch};

const TIERS: &str = r#"{"gold": 6}"#;

/// A decision is saved after it is published.
const SAVED: Duration = Duration::from_secs(5);

/// The decisions of the program as a filter, for the observations of routers.
fn replay(decided: &[Decision]) -> Vec<u64> {
    let mut filter = Command::new(program_path())
        .args(["plan", "--step"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: String = decided.iter().map(|decision| format!("{}\n", decision.line)).collect();
    filter.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = filter.wait_with_output().unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).unwrap();
    output
        .lines()
        .map(|line| number(&serde_json::from_str::<Value>(line).unwrap(), "desired"))
        .collect()
}

fn assert_replayed(decided: &[Decision]) {
    let desired: Vec<u64> = decided.iter().map(|decision| decision.desired).collect();
    assert_eq!(replay(decided), desired, "{decided:#?}");
}

fn arrivals(decided: &[Decision]) -> u64 {
    let arrivals =
        |it: &Decision| number(&serde_json::from_str::<Value>(&it.line).unwrap(), "arrivals");
    decided.iter().map(arrivals).sum()
}

fn call(router: &Router, numbers: std::ops::Range<usize>) {
    for number in numbers {
        router.allocate(&format!("CA{number}"));
    }
}

#[test]
fn a_restarted_embedded_store_continues_with_the_same_decisions() {
    let directory = scratch();
    let settings = [
        ("DATA_DIR", directory.to_str().unwrap()),
        ("TIER_CONFIG", TIERS),
        ("LOG_LEVEL", "debug"),
        ("LOG_FORMAT", "json"),
    ];
    let (router, first) = Router::start_logged(&settings);
    wait_for_decisions(&first, "gold", 1);
    call(&router, 0..4);
    router.release("CA0");
    eventually(STEPS, "the calls are counted", || arrivals(&decisions(&first, "gold")) == 4);
    drop(router);
    let before = decisions(&first, "gold");
    let (router, second) = Router::start_logged(&settings);
    call(&router, 4..6);
    wait_for_decisions(&second, "gold", 2);
    drop(router);
    let after = decisions(&second, "gold");
    assert!(second.text().contains("\"continued\":1"), "{}", second.text());
    assert_eq!(arrivals(&after), 2, "{after:#?}");
    assert_replayed(&[before, after.clone()].concat());
    // Without the state before, the decisions differ.
    assert_ne!(replay(&after)[0], after[0].desired);
}

/// Two replicas on one Redis, with their logs, the one that takes the decisions first.
fn replicas(server: &RedisServer) -> [(Router, Log); 2] {
    let url = server.url();
    let start = || {
        Router::start_logged(&[
            ("REDIS_URL", &url),
            ("TIER_CONFIG", TIERS),
            ("LOG_LEVEL", "debug"),
            ("LOG_FORMAT", "json"),
        ])
    };
    let first = start();
    wait_for_decisions(&first.1, "gold", 1);
    [first, start()]
}

#[test]
fn another_replica_follows_and_then_continues_after_a_shutdown() {
    let server = RedisServer::start(&[]);
    let [(first, first_log), (second, second_log)] = replicas(&server);
    // Calls through both replicas are counted once.
    call(&first, 0..2);
    call(&second, 2..4);
    eventually(STEPS, "all calls are counted", || arrivals(&decisions(&first_log, "gold")) == 4);
    let shown = wait_for(&second, "gold", "the other replica shows them", |it| it["live"] == 4);
    assert!(number(&shown, "desired") >= 4, "{shown}");
    assert_eq!(decisions(&second_log, "gold"), [], "only one replica decides");
    drop(first);
    wait_for_decisions(&second_log, "gold", 2);
    call(&second, 4..5);
    eventually(STEPS, "the next call is counted", || {
        arrivals(&decisions(&second_log, "gold")) == 1
    });
    drop(second);
    let both = [decisions(&first_log, "gold"), decisions(&second_log, "gold")].concat();
    assert_replayed(&both);
}

#[test]
fn the_calls_after_the_last_save_of_a_killed_router_are_counted() {
    let server = RedisServer::start(&[]);
    let [(mut first, first_log), (second, second_log)] = replicas(&server);
    call(&first, 0..3);
    eventually(STEPS, "the calls are counted", || arrivals(&decisions(&first_log, "gold")) == 3);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    call(&second, 3..5);
    // The state was saved with the first decision, before the calls.
    wait_for_decisions(&second_log, "gold", 1);
    eventually(STEPS, "all calls since the save are counted", || {
        arrivals(&decisions(&second_log, "gold")) == 5
    });
    let line: Value = serde_json::from_str(&decisions(&second_log, "gold")[0].line).unwrap();
    assert_eq!((&line["live"], &line["gap"]), (&5.into(), &false.into()), "{line}");
}

#[test]
fn a_state_that_cannot_be_used_is_replaced() {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    let set = |redis: &mut redis::Connection, value: &str| {
        let mut set = redis::cmd("SET");
        set.arg("voice:capacity:state:pool:gold").arg(value).exec(redis).unwrap();
    };
    set(&mut redis, r#"{"version": 1, "cursor": "0-0", "idle": [], "state": {"profile": {}}}"#);
    let url = server.url();
    let (router, log) = Router::start_logged(&[("REDIS_URL", &url), ("TIER_CONFIG", TIERS)]);
    wait_for(&router, "gold", "decisions are taken", |_| true);
    log.wait_for("cannot be used; starting anew", 0);
    eventually(SAVED, "the state is replaced", || {
        let saved: String =
            redis::cmd("GET").arg("voice:capacity:state:pool:gold").query(&mut redis).unwrap();
        saved.contains("estimates")
    });
    drop(router);
    // A key of another type is replaced as well.
    redis::cmd("DEL").arg("voice:capacity:state:pool:gold").exec(&mut redis).unwrap();
    redis::cmd("LPUSH").arg("voice:capacity:state:pool:gold").arg("x").exec(&mut redis).unwrap();
    redis::cmd("DEL").arg("voice:capacity").exec(&mut redis).unwrap();
    redis::cmd("LPUSH").arg("voice:capacity").arg("x").exec(&mut redis).unwrap();
    let router = Router::start(&[("REDIS_URL", &url), ("TIER_CONFIG", TIERS)]);
    wait_for(&router, "gold", "decisions are taken again", |_| true);
    eventually(SAVED, "the key is replaced", || {
        let kind: String =
            redis::cmd("TYPE").arg("voice:capacity:state:pool:gold").query(&mut redis).unwrap();
        kind == "string"
    });
}
