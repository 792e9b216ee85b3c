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

use testkit::{
    Connection, Process, Router, eventually, free_port, program, proxy::FaultProxy, scratch,
};

/// Bound for a frame of an agent; generous for an overloaded machine.
const FRAME_TIMEOUT: Duration = Duration::from_secs(30);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn dial(url: &Value) -> Socket {
    connect_async(url.as_str().unwrap()).await.expect("the agent accepts the stream").0
}

fn ws_url(address: SocketAddr, pod: &str) -> String {
    format!(
        "ws://{address}/ws/pod/{pod}/agent/voice/breeze-buddy/twilio/callback/order-confirmation/v2"
    )
}

async fn echo(socket: &mut Socket, frame: &str) {
    socket.send(Message::text(frame)).await.unwrap();
    let received =
        tokio::time::timeout(FRAME_TIMEOUT, socket.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(received, Message::text(frame));
}

#[tokio::test]
async fn closing_the_websocket_releases_the_call() {
    for router in [Router::start(&[]), Router::start_without_gateway(&[])] {
        let response = router.allocate("CA1");
        let mut socket = dial(&response["ws_url"]).await;
        echo(&mut socket, "hello?").await;
        echo(&mut socket, r#"{"event":"media","media":{"payload":"AAAA"}}"#).await;
        assert_eq!(router.status()["pools"]["gold"]["available"], 0);
        socket.close(None).await.unwrap();
        assert!(
            matches!(socket.next().await, Some(Ok(Message::Close(_)))),
            "the agent closes the stream, too"
        );
        eventually(Duration::from_secs(3), "the pod is free", || {
            router.status()["pools"]["gold"]["available"] == 1
        });
        assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
    }
}

#[tokio::test]
async fn a_dropped_websocket_releases_the_call() {
    for router in [Router::start(&[]), Router::start_without_gateway(&[])] {
        let socket = dial(&router.allocate("CA1")["ws_url"]).await;
        drop(socket);
        eventually(Duration::from_secs(3), "the pod is free", || {
            router.status()["active_calls"] == 0
        });
    }
}

#[tokio::test]
async fn the_start_frame_identifies_the_call_on_a_shared_pod() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 3}}"#;
    let router = Router::start_without_gateway(&[("TIER_CONFIG", tiers)]);
    let url = router.allocate("CA1")["ws_url"].clone();
    router.allocate("CA2");
    let mut second = dial(&url).await;
    let start = json!({"event": "start", "start": {"callSid": "CA2"}});
    second.send(Message::text(start.to_string())).await.unwrap();
    echo(&mut second, r#"{"event":"media","media":{}}"#).await;
    second.send(Message::text(r#"{"event":"stop"}"#)).await.unwrap();
    eventually(Duration::from_secs(3), "the second call is released", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    let mut first = dial(&url).await;
    first.close(None).await.unwrap();
    eventually(Duration::from_secs(3), "the first call is released", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
}

#[tokio::test]
async fn an_agent_renews_its_call_while_the_stream_is_open() {
    let router = Router::start_without_gateway(&[
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
    let frame = tokio::time::timeout(FRAME_TIMEOUT, socket.next()).await.unwrap();
    assert!(
        matches!(frame, Some(Ok(Message::Close(_)))),
        "the agent closes the stream of a released call: {frame:?}"
    );
}

#[tokio::test]
async fn a_stream_without_an_allocated_call_is_refused() {
    let router = Router::start_without_gateway(&[]);
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
async fn two_streams_of_one_pod_release_their_own_calls() {
    let tiers = r#"{"basic": {"type": "shared", "target": 1, "max_concurrent": 3}}"#;
    let router = Router::start_without_gateway(&[("TIER_CONFIG", tiers)]);
    let url = router.allocate("CA1")["ws_url"].clone();
    router.allocate("CA2");
    let (mut second, mut first) = (dial(&url).await, dial(&url).await);
    for (socket, call) in [(&mut second, "CA2"), (&mut first, "CA1")] {
        let start = json!({"event": "start", "start": {"callSid": call}});
        socket.send(Message::text(start.to_string())).await.unwrap();
        echo(socket, "hello").await;
    }
    second.close(None).await.unwrap();
    eventually(Duration::from_secs(3), "the second call is released", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
}

#[tokio::test]
async fn a_released_call_is_not_registered_again_by_its_stream() {
    let router = Router::start_without_gateway(&[("LEASE_TTL", "1500ms")]);
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    assert_eq!(router.release("CA1").0, 200);
    let renewal = json!({"pod_name": "voice-agent-0", "call_sids": ["CA1"]});
    assert_eq!(router.post("/api/v1/renew", renewal).1["unknown"], json!(["CA1"]));
    let frame = tokio::time::timeout(FRAME_TIMEOUT, socket.next()).await.unwrap();
    assert!(matches!(frame, Some(Ok(Message::Close(_)))), "{frame:?}");
    assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
}

#[tokio::test]
async fn an_agent_ends_a_stream_whose_client_does_not_read() {
    let router = Router::start_without_gateway(&[]);
    let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
    let frame = Message::binary(vec![0; 60_000]);
    while tokio::time::timeout(Duration::from_millis(500), socket.send(frame.clone()))
        .await
        .is_ok_and(|sent| sent.is_ok())
    {}
    eventually(Duration::from_secs(8), "the agent releases the call", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
}

#[tokio::test]
async fn graceful_shutdown_closes_streams_and_releases_calls() {
    for start in [Router::start, Router::start_without_gateway] {
        let directory = scratch();
        let mut router = start(&[("DATA_DIR", directory.to_str().unwrap())]);
        router.allocate("CA2");
        let mut socket = dial(&router.allocate("CA1")["ws_url"]).await;
        router.signal("TERM");
        let frame = tokio::time::timeout(FRAME_TIMEOUT, socket.next()).await.unwrap();
        assert!(matches!(frame, Some(Ok(Message::Close(_)))), "{frame:?}");
        assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
        let router = router.kill_and_restart();
        assert_eq!(router.get("/api/v1/calls/CA1").0, 404);
        assert_eq!(router.get("/api/v1/calls/CA2").0, 200);
    }
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
    let proxy = FaultProxy::to(router.address.port());
    let settings = [
        ("POD_NAME", "voice-agent-0"),
        ("SMART_ROUTER_URL", &format!("http://{}", proxy.address)),
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
    // The agent assigns the stream to CA1 until the start frame names CA2.
    let mut socket = dial(&json!(format!("ws://127.0.0.1:{port}/agent"))).await;
    echo(&mut socket, "hello?").await;
    proxy.refuse_connections(true);
    let start = json!({"event": "start", "start": {"callSid": "CA2"}});
    socket.send(Message::text(start.to_string())).await.unwrap();
    echo(&mut socket, "still there?").await;
    proxy.refuse_connections(false);
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        echo(&mut socket, "still there?").await;
    }
    socket.send(Message::text(r#"{"event":"stop"}"#)).await.unwrap();
    eventually(Duration::from_secs(5), "CA2 is released", || {
        router.get("/api/v1/calls/CA2").0 == 404
    });
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200, "CA1 is still active");
}

#[test]
fn the_call_command_prints_each_step() {
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
        "1. allocate a pod for call CA1 at",
        "voice-agent-0 from pool:gold",
        "2. connect the stream to ws://",
        "frames sent and echoed",
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
