//! The media gateway with agents on the usual WebSocket stacks. The agents have no code for the
//! router: they renew nothing and release nothing. The tests act as Twilio.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest, handshake::client::Response},
};

use testkit::{Process, Router, eventually, free_port};

const SECOND: Duration = Duration::from_secs(1);
/// Bound for anything that a test awaits; generous for an overloaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);
const SUBPROTOCOL: &str = "audio.jambonz.org";

/// A file that `./test.sh` has installed.
pub(crate) fn checkers(path: &str) -> PathBuf {
    Path::new(testkit::ROOT).join("target/checkers").join(path)
}

/// A script of `tests/checkers` for Node.
pub(crate) fn node(script: &str) -> Command {
    let mut command = Command::new("node");
    command.arg(format!("tests/checkers/{script}")).current_dir(testkit::ROOT);
    command.env("CHECKERS", checkers("node_modules"));
    command
}

pub(crate) fn python(script: &str) -> Command {
    let mut command = Command::new(checkers("venv/bin/python"));
    command.arg(format!("tests/checkers/{script}")).current_dir(testkit::ROOT);
    command
}

pub(crate) fn is_listening(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// The commands of the agents, by stack.
fn stacks() -> [(&'static str, Command); 3] {
    [
        ("websockets", python("agent_websockets.py")),
        ("fastapi and uvicorn", python("agent_fastapi.py")),
        ("ws", node("agent_ws.mjs")),
    ]
}

/// A router with one agent, which serves one call at a time.
struct Setup {
    stack: &'static str,
    agent: Process,
    router: Router,
}

/// A setup for each stack.
fn setups() -> impl Iterator<Item = Setup> {
    stacks().into_iter().map(|(stack, mut command)| {
        let port = free_port();
        let agent = Process::start(command.arg(port.to_string()));
        eventually(10 * SECOND, "the agent listens", || is_listening(port));
        let router = Router::start(&[
            ("PODS", &format!("agent=127.0.0.1:{port}")),
            ("TIER_CONFIG", r#"{"gold": 1}"#),
            ("WRAP_UP_TIME", "1s"),
            ("LOG_LEVEL", "error"),
        ]);
        Setup { stack, agent, router }
    })
}

impl Setup {
    /// The URL in the document that Twilio's webhook gets.
    fn stream_url(&self, call: &str) -> String {
        let answer =
            self.router.connect().form("/api/v1/twilio/allocate", &format!("CallSid={call}"));
        assert_eq!(answer.status, 200, "{}: {}", self.stack, answer.text());
        let document = answer.text();
        document.split("url=\"").nth(1).unwrap().split('"').next().unwrap().to_owned()
    }

    /// Opens the stream of a new call and sends the opening messages.
    async fn dial(&self, call: &str) -> Provider {
        Provider::dial(&self.stream_url(call), call).await
    }

    /// Waits until the slot is free; `usual` as for [`eventually`].
    fn expect_free(&self, usual: Duration) {
        eventually(usual, &format!("the slot of {} is free", self.stack), || {
            self.router.status()["pools"]["gold"]["available"] == 1
        });
    }

    /// The cause with which a call ended: the first word of the event's detail.
    fn end_cause(&self, call: &str) -> String {
        let (_, page) = self.router.get(&format!("/api/v1/events?call={call}&event=ended"));
        let detail = page["events"][0]["detail"].as_str();
        detail.unwrap_or_default().split(' ').next().unwrap().to_owned()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.agent.0.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

/// Twilio's side of a stream.
struct Provider {
    socket: WebSocketStream<MaybeTlsStream<tokio::net::TcpStream>>,
    response: Response,
    /// Path and headers of the request, as the agent reports them.
    request: Value,
}

impl Provider {
    async fn dial(url: &str, call: &str) -> Self {
        let mut request = url.into_client_request().unwrap();
        for (name, value) in [
            ("sec-websocket-protocol", SUBPROTOCOL),
            ("sec-websocket-extensions", "permessage-deflate; client_max_window_bits"),
            ("x-call-sid", "forged"),
            ("x-forwarded-host", "forged.example.com"),
        ] {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        let (socket, response) = connect_async(request).await.expect("the stream opens");
        let mut provider = Self { socket, response, request: Value::Null };
        provider.request = serde_json::from_str(&provider.receive_text().await).unwrap();
        let start = json!({"callSid": call, "streamSid": "MZ1", "tracks": ["inbound"]});
        provider.send(&json!({"event": "connected", "protocol": "Call", "version": "1.0.0"})).await;
        provider.send(&json!({"event": "start", "streamSid": "MZ1", "start": start})).await;
        provider
    }

    async fn send(&mut self, message: &Value) {
        self.socket.send(Message::text(message.to_string())).await.unwrap();
    }

    /// Ends the stream as Twilio does when the caller hangs up.
    async fn hang_up(&mut self) {
        self.send(&json!({"event": "stop", "streamSid": "MZ1", "stop": {}})).await;
        self.socket.close(None).await.unwrap();
    }

    async fn receive(&mut self) -> Message {
        let message = timeout(TIMEOUT, self.socket.next()).await.expect("a message arrives");
        message.expect("the stream is open").expect("the stream is intact")
    }

    async fn receive_text(&mut self) -> String {
        self.receive().await.into_text().unwrap().as_str().to_owned()
    }

    /// The code of the close frame that follows. After the loss of a pod the audio that was not
    /// played yet is cleared, unless the close comes first.
    async fn receive_close(&mut self) -> u16 {
        let mut message = self.receive().await;
        if message.to_text().is_ok_and(|text| text.contains(r#""event":"clear""#)) {
            message = self.receive().await;
        }
        match message {
            Message::Close(frame) => frame.map_or(1005, |frame| frame.code.into()),
            other => panic!("not a close: {other}"),
        }
    }

    /// The values of a header of the agent's request.
    fn agent_header(&self, name: &str) -> Vec<&str> {
        let headers = self.request["headers"].as_array().unwrap().iter();
        let pairs = headers.map(|pair| (pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
        pairs.filter(|pair| pair.0.eq_ignore_ascii_case(name)).map(|pair| pair.1).collect()
    }
}

#[tokio::test]
async fn agents_of_every_stack_serve_calls_without_code_for_the_router() {
    for setup in setups() {
        for round in 0..2 {
            let call = format!("CA{round}");
            let mut provider = setup.dial(&call).await;
            assert_eq!(setup.router.status()["active_calls"], 1, "{}", setup.stack);
            for chunk in 0..50 {
                let media = json!({"event": "media", "media": {"payload": "//8=", "chunk": chunk}});
                provider.send(&media).await;
                assert_eq!(provider.receive_text().await, media.to_string(), "{}", setup.stack);
            }
            let audio = Message::binary(vec![0xff; 640]);
            provider.socket.send(audio.clone()).await.unwrap();
            assert_eq!(provider.receive().await, audio, "{}", setup.stack);
            provider.hang_up().await;
            setup.expect_free(SECOND);
            assert_eq!(setup.end_cause(&call), "provider", "{}", setup.stack);
        }
    }
}

#[tokio::test]
async fn agents_see_their_call_and_path_and_nothing_of_the_token() {
    for setup in setups() {
        let stack = setup.stack;
        let url = setup.stream_url("CA1");
        let mut provider = Provider::dial(&format!("{url}?language=de"), "CA1").await;
        // {MEDIA_URL}/media/{call_sid}/{token}{path}
        let (_, behind_call) = url.split_once("/media/CA1/").unwrap();
        let (token, path) = behind_call.split_once('/').unwrap();
        assert_eq!(provider.request["path"], format!("/{path}?language=de"), "{stack}");
        assert_eq!(provider.agent_header("x-call-sid"), ["CA1"], "{stack}");
        assert_eq!(provider.agent_header("x-pod-attempt"), ["1"], "{stack}");
        assert_eq!(provider.agent_header("x-forwarded-for"), ["127.0.0.1"], "{stack}");
        let request = provider.request.to_string();
        assert!(!request.contains("forged") && !request.contains(token), "{stack}: {request}");
        // The subprotocol is negotiated between the ends; compression is offered to neither.
        assert_eq!(provider.response.headers()["sec-websocket-protocol"], SUBPROTOCOL, "{stack}");
        assert!(!provider.response.headers().contains_key("sec-websocket-extensions"), "{stack}");
        assert!(provider.agent_header("sec-websocket-extensions").is_empty(), "{stack}");
        provider.hang_up().await;
        setup.expect_free(SECOND);
    }
}

#[tokio::test]
async fn an_agent_that_closes_normally_ends_the_call() {
    for setup in setups() {
        let mut provider = setup.dial("CA1").await;
        provider.send(&json!({"event": "dtmf", "streamSid": "MZ1", "dtmf": {"digit": "1"}})).await;
        assert_eq!(provider.receive_close().await, 1000, "{}", setup.stack);
        setup.expect_free(SECOND);
        assert_eq!(setup.end_cause("CA1"), "agent", "{}", setup.stack);
    }
}

#[tokio::test]
async fn the_slot_of_a_silent_agent_is_free_after_the_wrap_up_time() {
    for setup in setups() {
        let mut provider = setup.dial("CA1").await;
        // A stopped process neither reads nor answers a close, and its connection stays open.
        setup.signal("-STOP");
        let hung_up = Instant::now();
        provider.hang_up().await;
        drop(provider);
        // WRAP_UP_TIME and a second.
        setup.expect_free(2 * SECOND);
        println!("{}: the slot was free after {:?}", setup.stack, hung_up.elapsed());
        assert_eq!(setup.end_cause("CA1"), "provider", "{}", setup.stack);
    }
}

#[tokio::test]
async fn an_agent_that_shuts_down_counts_as_a_lost_pod() {
    for setup in setups() {
        let mut provider = setup.dial("CA1").await;
        // `websockets` and this agent on `ws` close with 1001, uvicorn with 1012.
        setup.signal("-TERM");
        // There is no other pod.
        assert_eq!(provider.receive_close().await, 1013, "{}", setup.stack);
        setup.expect_free(SECOND);
        assert_eq!(setup.end_cause("CA1"), "pod_lost", "{}", setup.stack);
    }
}

#[tokio::test]
async fn an_agent_that_crashes_counts_as_a_lost_pod() {
    for setup in setups() {
        let mut provider = setup.dial("CA1").await;
        setup.signal("-KILL");
        // There is no other pod.
        assert_eq!(provider.receive_close().await, 1013, "{}", setup.stack);
        setup.expect_free(SECOND);
        assert_eq!(setup.end_cause("CA1"), "pod_lost", "{}", setup.stack);
    }
}
