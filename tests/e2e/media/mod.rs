//! The media gateway: streams between a provider and an agent that the tests control.

mod admission;
mod agents;
mod bad_agents;
mod calls;
mod connect;
mod connect_access;
mod conversations;
mod drain;
mod failover;
mod failover_waiting;
mod frames;
mod inspection;
mod kills;
mod outages;
mod parameters;
mod role;
mod rollout;
mod scale;
mod upkeep;

use std::{net::SocketAddr, time::Duration};

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, accept_hdr_async, connect_async,
    tungstenite::{
        Message,
        handshake::server::{Request, Response},
    },
};

use testkit::{Router, eventually};

/// Bound for anything that a test awaits; generous for an overloaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The provider's side of a stream.
type Provider = WebSocketStream<MaybeTlsStream<TcpStream>>;
/// The agent's side of a stream.
type Agent = WebSocketStream<TcpStream>;

/// A server of agents under the control of a test.
struct AgentServer {
    listener: TcpListener,
    address: SocketAddr,
}

impl AgentServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    /// Accepts a connection without a handshake.
    async fn accept(&self) -> TcpStream {
        timeout(TIMEOUT, self.listener.accept()).await.expect("the gateway connects").unwrap().0
    }

    /// Accepts a stream. Returns the request as well.
    async fn stream(&self) -> (Agent, Request) {
        let mut seen = None;
        let socket = self.accept().await;
        #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
        let accept = |request: &Request, response: Response| {
            seen = Some(request.clone());
            Ok(response)
        };
        let agent = accept_hdr_async(socket, accept).await.unwrap();
        (agent, seen.unwrap())
    }

    /// Whether no connection waits.
    async fn is_untouched(&self) -> bool {
        timeout(Duration::from_millis(100), self.listener.accept()).await.is_err()
    }
}

/// A router with one exclusive pod at the test's server, and the server.
async fn router_with_agent(settings: &[(&str, &str)]) -> (Router, AgentServer) {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let mut all = vec![("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    all.extend(settings);
    (Router::start(&all), server)
}

/// The stream URL of a new call.
fn stream_url(router: &Router, call: &str) -> String {
    router.allocate(call)["ws_url"].as_str().unwrap().to_owned()
}

/// The path of a stream URL.
fn path_of(url: &str) -> &str {
    let (_, rest) = url.split_once("://").unwrap();
    &rest[rest.find('/').unwrap()..]
}

async fn dial(url: &str) -> Provider {
    connect_async(url).await.expect("the gateway accepts the stream").0
}

/// A stream of a new call: both of its sides.
async fn open_stream(router: &Router, server: &AgentServer, call: &str) -> (Provider, Agent) {
    let url = stream_url(router, call);
    let (provider, (agent, _)) = tokio::join!(dial(&url), server.stream());
    (provider, agent)
}

async fn next<S>(socket: &mut WebSocketStream<S>) -> Message
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let message = timeout(TIMEOUT, socket.next()).await.expect("a message arrives");
    message.expect("the stream is open").expect("the stream is intact")
}

/// The code of the next close frame; other messages are skipped.
async fn close_code<S>(socket: &mut WebSocketStream<S>) -> Option<u16>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    loop {
        match timeout(TIMEOUT, socket.next()).await.expect("the stream ends") {
            Some(Ok(Message::Close(frame))) => {
                return Some(frame.map_or(1005, |it| it.code.into()));
            }
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return None,
        }
    }
}

/// A handshake as raw text. Returns the status and the connection.
async fn raw_handshake(router: &Router, path: &str, headers: &str) -> (u16, TcpStream) {
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await;
    let status = head.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, stream)
}

/// Reads until the end of an HTTP head, or of the connection.
async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        match timeout(TIMEOUT, stream.read(&mut byte)).await.expect("a response arrives") {
            Ok(1) => head.push(byte[0]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

const UPGRADE: &str = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

fn refusals(router: &Router, reason: &str) -> u64 {
    router.metric(&format!("smart_router_stream_refusals_total{{reason=\"{reason}\"}}"))
}

fn expect_free(router: &Router, pods: u64) {
    eventually(Duration::from_secs(3), "the pods are free", || {
        router.status()["pools"]["gold"]["available"] == pods
    });
    assert_eq!(router.status()["active_calls"], 0);
}

fn call(router: &Router, call: &str) -> Value {
    let (status, answer) = router.get(&format!("/api/v1/calls/{call}"));
    assert_eq!(status, 200, "{answer}");
    answer
}

async fn send(socket: &mut Provider, text: &str) {
    socket.send(Message::text(text)).await.unwrap();
}

/// Sends a message in both directions.
async fn echo(provider: &mut Provider, agent: &mut Agent, text: &str) {
    send(provider, text).await;
    assert_eq!(next(agent).await, Message::text(text));
    agent.send(Message::text(text)).await.unwrap();
    assert_eq!(next(provider).await, Message::text(text));
}

/// Ends a stream as its provider. Neither side is cut.
async fn hang_up(mut provider: Provider, mut agent: Agent) {
    provider.close(None).await.unwrap();
    assert_eq!(close_code(&mut agent).await, Some(1005));
    // The next read of the agent sends its answer to the close.
    let (_, answer) = tokio::join!(agent.next(), close_code(&mut provider));
    assert_eq!(answer, Some(1005));
}
