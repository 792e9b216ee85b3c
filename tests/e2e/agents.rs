use std::{
    net::SocketAddr,
    process::{Command, Stdio},
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Error, Message},
};

use testkit::{Connection, Process, Router, eventually, free_port, program, proxy::Proxy, scratch};

/// How long an agent may take to say something on a machine with other work.
const PATIENCE: Duration = Duration::from_secs(30);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn dial(url: &Value) -> Socket {
    connect_async(url.as_str().unwrap()).await.expect("the agent takes the stream").0
}

fn ws_url(address: SocketAddr, pod: &str) -> String {
    format!(
        "ws://{address}/ws/pod/{pod}/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
    )
}

async fn echo(socket: &mut Socket, frame: &str) {
    socket.send(Message::text(frame)).await.unwrap();
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(heard, Message::text(frame));
}

#[tokio::test]
async fn a_plain_websocket_client_talks_and_hangs_up_and_the_pod_is_free() {
    let router = Router::start(&[]);
    let answer = router.allocate("CA1");
    let mut socket = dial(&answer["ws_url"]).await;
    echo(&mut socket, "hello?").await;
    echo(&mut socket, r#"{"event":"media","media":{"payload":"AAAA"}}"#).await;
    assert_eq!(router.status()["pools"]["gold"]["available"], 0);
    socket.close(None).await.unwrap();
    assert!(
        matches!(socket.next().await, Some(Ok(Message::Close(_)))),
        "the agent answers the close"
    );
    eventually(Duration::from_secs(3), "the pod is free", || {
        router.status()["pools"]["gold"]["available"] == 1
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[tokio::test]
async fn a_client_that_vanishes_has_hung_up() {
    let router = Router::start(&[]);
    let socket = dial(&router.allocate("CA1")["ws_url"]).await;
    drop(socket);
    eventually(Duration::from_secs(3), "the pod is free", || router.status()["active_calls"] == 0);
}

#[tokio::test]
async fn streams_on_a_shared_pod_name_their_calls() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 3}}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers)]);
    let url = router.allocate("CA1")["ws_url"].clone();
    router.allocate("CA2");
    let mut second = dial(&url).await;
    let start = json!({"event": "start", "start": {"callSid": "CA2"}});
    second.send(Message::text(start.to_string())).await.unwrap();
    echo(&mut second, r#"{"event":"media","media":{}}"#).await;
    second.send(Message::text(r#"{"event":"stop"}"#)).await.unwrap();
    eventually(Duration::from_secs(3), "the second call is over", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    let mut first = dial(&url).await;
    first.close(None).await.unwrap();
    eventually(Duration::from_secs(3), "the first call is over", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
}

#[tokio::test]
async fn an_agent_renews_for_as_long_as_the_caller_talks() {
    let router = Router::start(&[
        ("LEASE_TTL", "2s"),
        ("HTTP_READ_TIMEOUT", "500ms"),
        ("HTTP_IDLE_TIMEOUT", "1s"),
    ]);
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    for _ in 0..25 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        echo(&mut socket, "still here").await;
    }
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    router.release("CA1");
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert!(
        matches!(heard, Some(Ok(Message::Close(_)))),
        "the agent hangs up when the call is over: {heard:?}"
    );
}

#[tokio::test]
async fn streams_that_nobody_asked_for_are_refused() {
    let router = Router::start(&[]);
    let refusal = async |url: String| match connect_async(url).await {
        Err(Error::Http(response)) => response.status().as_u16(),
        other => panic!("expected a refusal: {other:?}"),
    };
    assert_eq!(refusal(ws_url(router.address, "voice-agent-0")).await, 409);
    assert_eq!(refusal(ws_url(router.address, "voice-agent-9")).await, 404);
    assert_eq!(refusal(ws_url(router.address, "metadata")).await, 400);
    assert_eq!(router.get("/ws/pod/voice-agent-0/agent").0, 426);
}

#[tokio::test]
async fn two_streams_that_are_mistaken_for_each_other_end_their_own_calls() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 3}}"#;
    let router = Router::start(&[("TIER_CONFIG", tiers)]);
    let url = router.allocate("CA1")["ws_url"].clone();
    router.allocate("CA2");
    let (mut second, mut first) = (dial(&url).await, dial(&url).await);
    for (socket, call) in [(&mut second, "CA2"), (&mut first, "CA1")] {
        let start = json!({"event": "start", "start": {"callSid": call}});
        socket.send(Message::text(start.to_string())).await.unwrap();
        echo(socket, "hello").await;
    }
    second.close(None).await.unwrap();
    eventually(Duration::from_secs(3), "the second call is over", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[tokio::test]
async fn a_released_call_does_not_come_back_while_its_stream_is_open() {
    let router = Router::start(&[("LEASE_TTL", "1500ms")]);
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    assert_eq!(router.release("CA1").0, 200);
    let renewal = json!({"pod_name": "voice-agent-0", "call_sids": ["CA1"]});
    assert_eq!(router.post("/api/v1/renew", renewal).1["unknown"], json!(["CA1"]));
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert!(matches!(heard, Some(Ok(Message::Close(_)))), "{heard:?}");
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[tokio::test]
async fn a_caller_who_never_listens_is_not_on_the_line() {
    let router = Router::start(&[]);
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    let frame = Message::binary(vec![0; 60_000]);
    while tokio::time::timeout(Duration::from_millis(500), socket.send(frame.clone()))
        .await
        .is_ok_and(|sent| sent.is_ok())
    {}
    eventually(Duration::from_secs(8), "the agent gives up", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
}

#[tokio::test]
async fn stopping_the_router_hangs_up_and_releases() {
    let directory = scratch();
    let mut router = Router::start(&[("DATA_DIR", directory.to_str().unwrap())]);
    router.allocate("CA2");
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    router.signal("TERM");
    let heard = tokio::time::timeout(PATIENCE, socket.next()).await.unwrap();
    assert!(matches!(heard, Some(Ok(Message::Close(_)))), "{heard:?}");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
    let router = router.kill_and_restart();
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
    assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
}

#[tokio::test]
async fn an_agent_keeps_its_call_when_a_lookup_fails() {
    let port = free_port();
    let pods = format!("voice-agent-0=127.0.0.1:{port}");
    let router = Router::start(&[
        ("TIER_CONFIG", r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 3}}"#),
        ("PODS", &pods),
        ("VOICE_AGENT_BASE_URL", "ws://127.0.0.1"),
        ("HTTP_BIND", "127.0.0.1"),
    ]);
    let line = Proxy::to(router.address.port());
    let settings = [
        ("POD_NAME", "voice-agent-0"),
        ("SMART_ROUTER_URL", &format!("http://{}", line.address)),
        ("AGENT_BIND", &format!("127.0.0.1:{port}")),
    ];
    let mut agent = program(&settings);
    let agent = agent.args(["agent", "--renew", "100ms"]).stderr(Stdio::null()).spawn().unwrap();
    let _agent = Process(agent);
    eventually(Duration::from_secs(10), "the agent listens", || {
        Connection::try_open(([127, 0, 0, 1], port).into()).is_some()
    });
    router.allocate("CA1");
    router.allocate("CA2");
    // It is taken for the stream of the first, until it names the second.
    let mut socket = dial(&json!(format!("ws://127.0.0.1:{port}/agent"))).await;
    echo(&mut socket, "hello?").await;
    line.cut(true);
    let start = json!({"event": "start", "start": {"callSid": "CA2"}});
    socket.send(Message::text(start.to_string())).await.unwrap();
    echo(&mut socket, "still there?").await;
    line.cut(false);
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        echo(&mut socket, "still there?").await;
    }
    socket.send(Message::text(r#"{"event":"stop"}"#)).await.unwrap();
    eventually(Duration::from_secs(5), "its own call is over", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200, "the other's is not");
}

#[test]
fn the_call_command_tells_each_step() {
    let router = Router::start(&[]);
    let url = format!("http://{}", router.address);
    let call = |args: &[&str]| {
        Command::new(testkit::program_path())
            .env_clear()
            .args(["call", "--talk", "200ms"])
            .args(args)
            .output()
            .unwrap()
    };
    let output = call(&["--router", &url, "--call-sid", "CA1"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for part in [
        "1. call CA1 asks",
        "voice-agent-0 from pool:gold",
        "2. stream to ws://",
        "frames sent and heard back",
        "4. hang up",
        "pool:gold: 1 of 1 available",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!(router.status()["active_calls"], 0);

    let nowhere = call(&["--router", &format!("http://127.0.0.1:{}", free_port())]);
    assert_eq!(nowhere.status.code(), Some(4));
    assert!(String::from_utf8(nowhere.stderr).unwrap().contains("no router answers at"));
    let refused = call(&["--router", &url, "--provider", "a/b"]);
    assert_eq!(refused.status.code(), Some(1));
}
