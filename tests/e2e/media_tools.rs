//! `smart-router call` and `smart-router load --media` with the simulated agents, through the media
//! gateway and without it, and with agents that misbehave.

use std::{
    net::SocketAddr,
    process::{Output, Stdio},
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::broadcast,
};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, accept_async, connect_async,
    tungstenite::{
        Error, Message,
        client::IntoClientRequest,
        http::Request,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use testkit::{
    Connection, Process, Router, certificates::Authority, eventually, free_port, program,
};

const PROVIDERS: [&str; 7] =
    ["twilio", "plivo", "exotel", "signalwire", "telnyx", "vonage", "jambonz"];
/// Bound for a message of an agent; generous for an overloaded machine.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Starts a router: with the gateway, or with URLs that lead to its simulated agents.
type Start = fn(&[(&str, &str)]) -> Router;
const STARTS: [Start; 2] = [Router::start, Router::start_without_gateway];

fn run(url: &str, args: &[&str]) -> Output {
    program(&[]).args(args).args(["--router", url]).output().unwrap()
}

/// Runs the program while this task serves its peer.
async fn run_beside(url: &str, args: Vec<&'static str>) -> Output {
    let url = url.to_owned();
    tokio::task::spawn_blocking(move || run(&url, &args)).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn parsed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

#[test]
fn the_call_command_speaks_the_messages_of_every_provider() {
    for start in STARTS {
        let router = start(&[("TIER_CONFIG", r#"{"gold": 1}"#)]);
        let url = format!("http://{}", router.address);
        for provider in PROVIDERS {
            let output = run(&url, &["call", "--talk", "200ms", "--provider", provider]);
            let printed = text(&output.stdout);
            assert!(output.status.success(), "{provider}: {printed}{}", text(&output.stderr));
            let frames = if provider == "exotel" { 2 } else { 10 };
            for part in [
                &format!("   {frames} frames sent and echoed, the slowest in "),
                &format!("/{provider}/callback/"),
                "voice-agent-0 is free again",
            ] {
                assert!(printed.contains(part), "{provider}: {part} is not in\n{printed}");
            }
        }
    }
    let unknown = run("http://127.0.0.1:1", &["call", "--provider", "skype"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("expected twilio, plivo, exotel"), "{unknown:?}");
}

#[test]
fn the_call_command_connects_without_an_allocation() {
    let secret = "connect-secret-0123456789";
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#), ("CONNECT_SECRET", secret)]);
    let url = format!("http://{}", router.address);
    for provider in PROVIDERS {
        let args = ["call", "--connect", "--connect-secret", secret, "--talk", "200ms"];
        let output =
            run(&url, &[&args[..], &["--provider", provider, "--merchant", "acme"]].concat());
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{provider}: {printed}{}", text(&output.stderr));
        assert!(printed.contains("voice-agent-0 is free again"), "{provider}: {printed}");
        assert!(!printed.contains(secret), "{printed}");
    }
    let output = run(&url, &["call", "--connect", "--connect-secret", "not-the-secret-0123"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("refused the stream"), "{output:?}");
}

#[test]
fn the_load_generator_checks_streams_of_every_provider() {
    for start in STARTS {
        let router = start(&[("TIER_CONFIG", r#"{"gold": 4}"#)]);
        for provider in PROVIDERS {
            for choice in ["--provider", "--format"] {
                check_load(&router, choice, provider);
            }
        }
    }
}

/// Runs three calls, and expects each frame to come back to its call.
fn check_load(router: &Router, choice: &str, provider: &str) {
    let calls = ["load", "--media", "--json", "-c", "3", "--calls", "3", "--hold", "300ms"];
    let url = format!("http://{}", router.address);
    let output = run(&url, &[&calls[..], &[choice, provider]].concat());
    assert!(output.status.success(), "{provider}: {}", text(&output.stderr));
    let report = parsed(&output);
    let media = &report["media"];
    let streams = media["streams"].as_u64().unwrap();
    let frames = streams * if provider == "exotel" { 3 } else { 15 };
    assert!(streams >= 3, "{provider}: {report}");
    assert_eq!(media["provider"], provider);
    let expected = json!({"sent": frames, "echoed": frames, "lost": 0, "out_of_order": 0,
        "duplicated": 0, "foreign": 0});
    assert_eq!(media["frames"], expected, "{provider}: {report}");
    assert_eq!(media["round_trip"]["count"], frames, "{provider}");
    assert_eq!(media["gap"]["count"], frames - streams, "{provider}");
    assert_eq!(media["connect"]["count"], streams, "{provider}");
    assert_eq!(report["release"]["count"], 0, "the end of the stream releases the call");
    eventually(Duration::from_secs(3), "every call is released", || {
        router.status()["active_calls"] == 0
    });
}

#[test]
fn streams_of_an_open_loop_run_to_their_end() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 20}"#)]);
    let url = format!("http://{}", router.address);
    let output =
        run(&url, &["load", "--media", "--rate", "20", "--calls", "10", "--hold", "200ms"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(
        printed.contains("10 streams (twilio), 100 frames sent, 100 echoed, 0 lost"),
        "{printed}"
    );
    for row in ["connect ", "round trip ", "gap "] {
        assert!(printed.lines().any(|line| line.starts_with(row)), "{row}: {printed}");
    }
    let without = run(&url, &["load", "--provider", "plivo"]);
    assert_eq!(without.status.code(), Some(2), "--provider needs --media");
}

#[test]
fn streams_use_tls() {
    let (authority, port) = (Authority::create(), free_port().to_string());
    let (ca, own) = (authority.file(), authority.sign("router"));
    let settings = [
        ("HTTP_PORT", &port[..]),
        ("METRICS_PORT", &free_port().to_string()),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("TLS_CERT_FILE", &own.file),
        ("TLS_KEY_FILE", &own.key),
    ];
    let router = program(&settings).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let _router = Process(router);
    let url = format!("https://localhost:{port}");
    eventually(Duration::from_secs(10), "the router is ready", || {
        run(&url, &["status", "--ca-file", &ca]).status.success()
    });
    let load = ["load", "--media", "-c", "2", "--calls", "2", "--hold", "200ms", "--ca-file", &ca];
    let output = run(&url, &load);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.contains("20 frames sent, 20 echoed"), "{printed}");
}

/// A router that allocates a new pod to each call, whose stream has the given URL.
async fn router_for(stream: SocketAddr) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut pods = 0;
        while let Ok((connection, _)) = listener.accept().await {
            pods += 1;
            tokio::spawn(answer(connection, format!("p-{pods}"), stream));
        }
    });
    url
}

async fn answer(mut connection: TcpStream, pod: String, stream: SocketAddr) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = connection.read(&mut buffer).await {
        let body = match text(&buffer[..count]).split_whitespace().nth(1) {
            Some("/api/v1/tiers") => json!({"tiers": {"gold": {"target": 9}}}),
            _ => json!({"success": true, "pod_name": pod, "ws_url": format!("ws://{stream}/a")}),
        };
        let body = body.to_string();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        let _ = connection.write_all((head + &body).as_bytes()).await;
    }
}

/// How an agent misbehaves.
#[derive(Clone, Copy)]
enum Fault {
    LoseFifth,
    SwapPairs,
    Repeat,
    Close,
    /// Send the audio of each stream to all of them.
    Mix,
}

/// Serves streams with binary audio. Returns the address.
async fn agent_with(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (mixer, _) = broadcast::channel(1_000);
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(misbehave(connection, fault, mixer.clone()));
        }
    });
    address
}

async fn misbehave(
    connection: TcpStream,
    fault: Fault,
    mixer: broadcast::Sender<Message>,
) -> Option<()> {
    let mut socket = accept_async(connection).await.ok()?;
    let (mut count, mut held, mut mixed) = (0, None, mixer.subscribe());
    loop {
        let message = tokio::select! {
            message = socket.next() => message?.ok()?,
            message = mixed.recv() => {
                socket.send(message.ok()?).await.ok()?;
                continue;
            }
        };
        if !message.is_binary() {
            continue;
        }
        count += 1;
        let replies = match (fault, count) {
            (Fault::LoseFifth, 5) => vec![],
            (Fault::SwapPairs, _) => match held.take() {
                Some(earlier) => vec![message, earlier],
                None => {
                    held = Some(message);
                    continue;
                }
            },
            (Fault::Repeat, _) => vec![message.clone(), message],
            (Fault::Close, 5) => {
                let frame = CloseFrame { code: CloseCode::Error, reason: "fault".into() };
                return socket.close(Some(frame)).await.ok();
            }
            (Fault::Mix, _) => {
                mixer.send(message).ok()?;
                vec![]
            }
            _ => vec![message],
        };
        for reply in replies {
            socket.send(reply).await.ok()?;
        }
    }
}

/// Runs two calls on an agent with a fault.
async fn load_on(fault: Fault, hold: &'static str) -> (Option<i32>, Value, String) {
    let url = router_for(agent_with(fault).await).await;
    let output = load(&url, hold).await;
    (output.status.code(), parsed(&output), text(&output.stderr))
}

async fn load(url: &str, hold: &'static str) -> Output {
    let calls = ["load", "--media", "-c", "2", "--calls", "2", "--repeat", "0", "--json"];
    let args = [&calls[..], &["--provider", "vonage", "--hold", hold]].concat();
    run_beside(url, args).await
}

#[tokio::test]
async fn lost_frames_fail_the_load_run() {
    let (code, report, stderr) = load_on(Fault::LoseFifth, "200ms").await;
    assert_eq!(code, Some(6), "{stderr}");
    assert_eq!(report["media"]["frames"]["lost"], 2, "{report}");
    assert!(stderr.contains("2 of 20 frames did not come back"), "{stderr}");
}

#[tokio::test]
async fn frames_out_of_order_or_repeated_are_violations() {
    let (code, report, stderr) = load_on(Fault::SwapPairs, "200ms").await;
    assert_eq!(code, Some(1), "{stderr}");
    assert_eq!(report["media"]["frames"]["out_of_order"], 10, "{report}");
    assert!(stderr.contains("10 frames came back out of order"), "{stderr}");
    let (code, report, stderr) = load_on(Fault::Repeat, "200ms").await;
    assert_eq!(code, Some(1), "{stderr}");
    assert!(report["media"]["frames"]["duplicated"].as_u64() > Some(0), "{report}");
}

#[tokio::test]
async fn a_frame_of_another_call_is_a_violation() {
    let (code, report, stderr) = load_on(Fault::Mix, "2s").await;
    assert_eq!(code, Some(1), "{stderr}");
    assert!(report["media"]["frames"]["foreign"].as_u64() > Some(0), "{report}");
    assert!(stderr.contains("came back from another call"), "{stderr}");
}

#[tokio::test]
async fn streams_that_do_not_open_or_break_are_failures_with_their_status() {
    let (code, report, stderr) = load_on(Fault::Close, "200ms").await;
    assert_eq!(
        (code, &report["errors"]["stream: closed with 1011"]),
        (Some(6), &json!(2)),
        "{stderr}"
    );

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = connection.read(&mut request).await;
            let refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n";
            let _ = connection.write_all(refusal).await;
        }
    });
    let url = router_for(refusing).await;
    let output = load(&url, "200ms").await;
    let report = parsed(&output);
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    assert_eq!(report["errors"], json!({"stream: status 403": 2}), "{report}");
    assert_eq!(report["release"]["count"], 2, "a call without a stream is ended");
    let call = run_beside(&url, vec!["call", "--talk", "200ms"]).await;
    assert_eq!(call.status.code(), Some(1));
    assert!(text(&call.stderr).contains("refused the stream: status 403"), "{call:?}");
}

/// Starts `smart-router agent` without a router.
fn lone_agent() -> (Process, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    let settings = [
        ("POD_NAME", "voice-agent-0"),
        ("SMART_ROUTER_URL", &nowhere[..]),
        ("AGENT_BIND", &address.to_string()),
    ];
    let mut agent = program(&settings);
    let agent = agent.args(["agent", "--renew", "10ms"]).stderr(Stdio::null()).spawn().unwrap();
    let agent = Process(agent);
    eventually(Duration::from_secs(10), "the agent listens", || {
        Connection::try_open(address).is_some()
    });
    (agent, address)
}

fn gateway_request(address: SocketAddr) -> Request<()> {
    let mut request = format!("ws://{address}/agent").into_client_request().unwrap();
    request.headers_mut().insert("X-Call-Sid", "CA1".parse().unwrap());
    request
}

async fn exchange(socket: &mut Socket, message: &str) -> Message {
    socket.send(Message::text(message)).await.unwrap();
    tokio::time::timeout(MESSAGE_TIMEOUT, socket.next()).await.unwrap().unwrap().unwrap()
}

#[tokio::test]
async fn an_agent_behind_the_gateway_needs_no_router() {
    let (_agent, address) = lone_agent();
    match connect_async(format!("ws://{address}/agent")).await {
        Err(Error::Http(response)) => assert_eq!(response.status(), 503, "without the gateway"),
        other => panic!("{other:?}"),
    }
    let (mut socket, _) = connect_async(gateway_request(address)).await.unwrap();
    assert_eq!(exchange(&mut socket, "hello?").await, Message::text("hello?"));
    let start = r#"{"event":"start","start":{"callSid":"CA1"},"streamSid":"MZ1"}"#;
    let media = r#"{"event":"media","media":{"payload":"AAAA"},"streamSid":"MZ1"}"#;
    let played = r#"{"event":"media","streamSid":"MZ1","media":{"payload":"AAAA"}}"#;
    socket.send(Message::text(start)).await.unwrap();
    assert_eq!(exchange(&mut socket, media).await, Message::text(played));
    match exchange(&mut socket, r#"{"event":"stop"}"#).await {
        Message::Close(Some(frame)) => assert_eq!(frame.code, CloseCode::Normal),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_agent_accepts_the_subprotocol_of_jambonz() {
    let (_agent, address) = lone_agent();
    let mut request = gateway_request(address);
    let offers = "other, audio.jambonz.org".parse().unwrap();
    request.headers_mut().insert("Sec-WebSocket-Protocol", offers);
    let (mut socket, response) = connect_async(request).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "audio.jambonz.org");
    let audio = Message::binary(vec![7; 320]);
    socket.send(audio.clone()).await.unwrap();
    let echo = tokio::time::timeout(MESSAGE_TIMEOUT, socket.next()).await.unwrap();
    assert_eq!(echo.unwrap().unwrap(), audio);
    socket.close(None).await.unwrap();
    let closed = tokio::time::timeout(MESSAGE_TIMEOUT, socket.next()).await.unwrap();
    assert!(matches!(closed, Some(Ok(Message::Close(_)))), "{closed:?}");
}
