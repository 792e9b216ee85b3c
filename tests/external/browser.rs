//! The dashboard in a real browser.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio_tungstenite::{
    connect_async,
    tungstenite::{Message, protocol::frame::coding::CloseCode},
};

use testkit::{Router, eventually, kube::FakeKube, redis::RedisServer, run_external_check};
use testkit::{cluster, events::ten_calls_a_second, replicas};

/// A browser check of the dashboard. `./test.sh` installs the browser.
fn browser_check(name: &str, urls: &[String], token: &str) -> Command {
    let directory = Path::new(testkit::ROOT).join("target/checkers");
    let mut command = Command::new("node");
    command.current_dir(testkit::ROOT);
    command.arg("tests/checkers/browser.mjs").arg(name).args(urls).env("CHECKERS", directory);
    if !token.is_empty() {
        command.env("TOKEN", token);
    }
    command
}

fn url(router: &Router) -> String {
    format!("http://{}", router.address)
}

#[test]
fn the_page_shows_a_call_that_another_replica_allocates() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 4}"#);
    run_external_check(&mut browser_check("calls", &[url(&routers[0]), url(&routers[1])], ""));
}

#[test]
fn the_page_shows_the_capacity_and_places_prescale_orders() {
    let tiers = r#"{"gold": {"target": 2}, "basic": {"type": "shared", "target": 1}}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers)]);
    run_external_check(&mut browser_check("capacity", &[url(&router)], ""));
}

#[test]
fn a_new_page_shows_the_last_minutes() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, r#"{"gold": 4}"#);
    ten_calls_a_second(&server);
    run_external_check(&mut browser_check("history", &[url(&routers[0])], ""));
}

#[test]
fn the_latency_charts_include_calls_from_before_the_page() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    run_external_check(&mut browser_check("latencies", &[url(&router)], ""));
}

#[test]
fn a_tile_shows_the_remaining_lease_time() {
    // Until its stream comes, the lease of a call is CONNECT_TIMEOUT.
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#), ("CONNECT_TIMEOUT", "30s")]);
    run_external_check(&mut browser_check("leases", &[url(&router)], ""));
}

/// Opens the stream of a call as the provider and sends audio, which the simulated agent echoes.
/// Returns the code with which the gateway closes the stream.
async fn stream_audio(url: String) -> Option<CloseCode> {
    let (socket, _) = connect_async(url).await.expect("the gateway accepts the stream");
    let (mut sender, mut receiver) = socket.split();
    let opening = [
        json!({"event": "connected", "protocol": "Call"}),
        json!({"event": "start", "streamSid": "MZ1", "start": {"callSid": "CAstream"}}),
    ];
    let audio = json!({"event": "media", "streamSid": "MZ1", "media": {"payload": "fn5+"}});
    let sending = async {
        for message in opening.iter().chain(std::iter::repeat(&audio)) {
            if sender.send(Message::text(message.to_string())).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let receiving = async {
        while let Some(Ok(message)) = receiver.next().await {
            if let Message::Close(frame) = message {
                return frame.map(|frame| frame.code);
            }
        }
        None
    };
    tokio::join!(sending, receiving).1
}

#[tokio::test]
async fn the_page_shows_the_stream_of_a_call_and_ends_it() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    let stream = router.allocate("CAstream")["ws_url"].as_str().unwrap().to_owned();
    let stream = tokio::spawn(stream_audio(stream));
    let mut check = browser_check("stream", &[url(&router)], "");
    tokio::task::spawn_blocking(move || run_external_check(&mut check)).await.unwrap();
    assert_eq!(stream.await.unwrap(), Some(CloseCode::Normal));
}

/// Answers every request as a plain HTTP server.
fn serve_http(listener: TcpListener) {
    for mut connection in listener.incoming().map_while(Result::ok) {
        let mut request = [0; 2048];
        let _ = connection.read(&mut request);
        let _ = connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    }
}

#[tokio::test]
async fn the_page_says_what_was_wrong_with_a_pod() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pods = format!("agent-0={}", listener.local_addr().unwrap());
    thread::spawn(move || serve_http(listener));
    let router = Router::start(&[("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let stream = router.allocate("CAfailed")["ws_url"].as_str().unwrap().to_owned();
    assert!(connect_async(stream).await.is_err());
    let mut check = browser_check("failure", &[url(&router)], "");
    tokio::task::spawn_blocking(move || run_external_check(&mut check)).await.unwrap();
}

#[test]
fn the_page_shows_the_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let redis = server.url();
    let start = |name| cluster::router(&kube, &[("REDIS_URL", &redis), ("POD_NAME", name)]);
    let is_leader = |router: &Router| router.status()["is_leader"] == true;
    let first = start("router-a");
    eventually(Duration::from_secs(5), "the first router leads", || is_leader(&first));
    let other = start("router-b");
    run_external_check(browser_check("leader", &[url(&other)], "").env("LEADER", "router-a"));
}

#[test]
fn changes_need_an_admin_token_and_a_confirmation() {
    let tokens = "viewer:viewer-token,agent:agent-token,admin:admin-token";
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#), ("API_TOKENS", tokens)]);
    run_external_check(&mut browser_check("roles", &[url(&router)], "admin-token"));
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
    run_external_check(&mut browser_check("many", &[url(&router)], ""));
}

#[test]
fn an_open_page_recovers_from_a_restart_of_the_router() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 3}"#)]);
    let mut checker =
        browser_check("restart", &[url(&router)], "").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(checker.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    // The router hangs for a while, and then another process replaces it.
    router.signal("STOP");
    assert_eq!(lines.next().unwrap().unwrap(), "noticed");
    let _router = router.kill_and_restart();
    assert!(checker.wait().unwrap().success());
}

#[test]
fn the_page_shows_the_last_event_of_a_flood() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, r#"{"gold": 4}"#);
    let mut checker =
        browser_check("flood", &[url(&routers[0])], "").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(checker.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let mut redis = server.connection();
    let mut write_events = |calls: &[String]| {
        let mut pipeline = redis::pipe();
        for call in calls {
            let event = format!("{call} voice-agent-0 pool:gold  ");
            pipeline.cmd("XADD").arg("voice:events").arg("MAXLEN").arg("~").arg(20_000);
            pipeline.arg("*").arg("allocated").arg(event).ignore();
        }
        let () = pipeline.query(&mut redis).unwrap();
    };
    let began = Instant::now();
    for number in 0..100 {
        let calls: Vec<String> = (0..500).map(|it| format!("flood-{number}-{it}")).collect();
        write_events(&calls);
        thread::sleep((began + (number + 1) * Duration::from_millis(50)) - Instant::now());
    }
    // The target is 10,000 events per second; a slow machine writes fewer.
    let rate = 50_000.0 / began.elapsed().as_secs_f64();
    write_events(&["CAlast".into()]);
    let written = Instant::now();
    let output: Vec<String> = lines.map(Result::unwrap).collect();
    let delay = written.elapsed();
    assert!(checker.wait().unwrap().success(), "{output:?}");
    println!("{rate:.0} events per second; {output:?}, finished after {delay:?}");
}
