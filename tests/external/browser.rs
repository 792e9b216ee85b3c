//! The page, in a real browser.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{Router, eventually, judged_by, kube::Kube, redis::RedisServer};
use testkit::{cluster, events::ten_calls_a_second, replicas};

/// Lets the browser judge something. `./test.sh` installs what it needs.
fn judge(what: &str, urls: &[String], token: &str) -> Command {
    let judges = Path::new(testkit::ROOT).join("target/judges");
    let mut command = Command::new("node");
    command.current_dir(testkit::ROOT);
    command.arg("tests/judges/browser.mjs").arg(what).args(urls).env("JUDGES", judges);
    if !token.is_empty() {
        command.env("TOKEN", token);
    }
    command
}

fn url(router: &Router) -> String {
    format!("http://{}", router.address)
}

#[test]
fn a_call_that_another_replica_allocates_comes_to_the_page() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 4}"#);
    judged_by(&mut judge("calls", &[url(&routers[0]), url(&routers[1])], ""));
}

#[test]
fn a_page_opens_with_the_last_minutes() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, r#"{"gold": 4}"#);
    ten_calls_a_second(&server);
    judged_by(&mut judge("history", &[url(&routers[0])], ""));
}

#[test]
fn the_latency_charts_begin_with_calls_from_before_the_page() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    judged_by(&mut judge("latencies", &[url(&router)], ""));
}

#[test]
fn a_tile_says_how_long_its_lease_has_left() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#), ("LEASE_TTL", "30s")]);
    judged_by(&mut judge("leases", &[url(&router)], ""));
}

#[test]
fn the_page_says_which_router_leads() {
    let (kube, server) = (Kube::start(), RedisServer::start(&[]));
    let redis = server.url();
    let start = |name| cluster::router(&kube, &[("REDIS_URL", &redis), ("POD_NAME", name)]);
    let leads = |router: &Router| router.status()["is_leader"] == true;
    let first = start("router-a");
    eventually(Duration::from_secs(5), "it leads", || leads(&first));
    let other = start("router-b");
    judged_by(judge("leader", &[url(&other)], "").env("LEADER", "router-a"));
}

#[test]
fn changes_need_an_admins_token_and_a_second_look() {
    let tokens = "viewer:viewer-token,agent:agent-token,admin:admin-token";
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#), ("API_TOKENS", tokens)]);
    judged_by(&mut judge("roles", &[url(&router)], "admin-token"));
}

#[test]
fn a_thousand_pods_and_five_thousand_calls_are_shown() {
    let pods: Vec<String> = (0..1_000).map(|number| format!("pod-{number}=h:1")).collect();
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"basic": {"type": "shared", "target": 1000, "max_concurrent": 6}}"#),
        ("PODS", &pods.join(",")),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com"),
    ]);
    thread::scope(|scope| {
        for part in 0..4 {
            let router = &router;
            scope.spawn(move || {
                let mut connection = router.connect();
                for number in (part..5_000).step_by(4) {
                    let call = json!({"call_sid": format!("CA{number}")});
                    assert_eq!(connection.post("/api/v1/allocate", &call).status, 200);
                }
            });
        }
    });
    judged_by(&mut judge("many", &[url(&router)], ""));
}

#[test]
fn a_page_that_is_open_while_the_router_restarts_goes_on() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    let mut judging = judge("restart", &[url(&router)], "").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(judging.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    // It says nothing for a while, and then it is another.
    router.signal("STOP");
    assert_eq!(lines.next().unwrap().unwrap(), "noticed");
    let _router = router.kill_and_restart();
    assert!(judging.wait().unwrap().success());
}

#[test]
fn a_flood_of_events_ends_with_the_last_of_them_on_the_page() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, r#"{"gold": 4}"#);
    let mut judging =
        judge("flood", &[url(&routers[0])], "").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(judging.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let mut redis = server.connection();
    let mut tell = |calls: &[String]| {
        let mut told = redis::pipe();
        for call in calls {
            let event = format!("{call} voice-agent-0 pool:gold  ");
            told.cmd("XADD").arg("voice:events").arg("MAXLEN").arg("~").arg(20_000);
            told.arg("*").arg("allocated").arg(event).ignore();
        }
        let () = told.query(&mut redis).unwrap();
    };
    let began = Instant::now();
    for number in 0..100 {
        let calls: Vec<String> = (0..500).map(|it| format!("flood-{number}-{it}")).collect();
        tell(&calls);
        thread::sleep((began + (number + 1) * Duration::from_millis(50)) - Instant::now());
    }
    // (ten thousand a second where the machine can)
    let rate = 50_000.0 / began.elapsed().as_secs_f64();
    tell(&["CAlast".into()]);
    let told = Instant::now();
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    let took = told.elapsed();
    assert!(judging.wait().unwrap().success(), "{said:?}");
    println!("{rate:.0} events a second; {said:?}, over after {took:?}");
}
