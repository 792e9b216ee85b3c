//! Echo agents: WebSocket servers that send the audio of their streams back, in any provider's
//! format. Each is one exclusive pod, in this process or in a child process that can be killed.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Command, Stdio},
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async,
    tungstenite::{
        Message,
        handshake::server::{Request, Response},
        http::{HeaderMap, HeaderValue, header::SEC_WEBSOCKET_PROTOCOL},
    },
};

use super::eventually;

/// Beginning of the lines that an agent process prints; a test harness prints others.
const PREFIX: &str = "agent: ";
/// Environment variable with the address of an agent process.
const ADDRESS: &str = "ECHO_AGENT_ADDRESS";

/// An event of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentEvent {
    Listening,
    /// The opening messages of a stream have arrived.
    Began(Opening),
    /// The stream of this call has ended.
    Ended(String),
    /// A message or a stream that the agent must not get.
    Violation(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    pub call: String,
    /// Number of the pod in the conversation, from 1.
    pub pod_attempt: u32,
}

impl fmt::Display for AgentEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening => f.write_str("listening"),
            Self::Began(Opening { call, pod_attempt }) => write!(f, "began {pod_attempt} {call}"),
            Self::Ended(call) => write!(f, "ended {call}"),
            Self::Violation(text) => write!(f, "violation {text}"),
        }
    }
}

impl FromStr for AgentEvent {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let opening = || {
            let (pod_attempt, call) = rest.split_once(' ')?;
            Some(Opening { call: call.to_owned(), pod_attempt: pod_attempt.parse().ok()? })
        };
        match kind {
            "listening" => Ok(Self::Listening),
            "began" => opening().map(Self::Began).ok_or_else(|| line.to_owned()),
            "ended" => Ok(Self::Ended(rest.to_owned())),
            "violation" => Ok(Self::Violation(rest.to_owned())),
            _ => Err(line.to_owned()),
        }
    }
}

/// The events of one agent, across restarts.
#[derive(Debug, Default)]
pub struct AgentLog {
    /// The call whose stream has begun.
    pub call: Option<String>,
    /// Every stream that has begun, in order.
    pub openings: Vec<Opening>,
    pub violations: Vec<String>,
    is_listening: bool,
}

impl AgentLog {
    fn record(&mut self, event: AgentEvent) {
        match event {
            AgentEvent::Listening => self.is_listening = true,
            AgentEvent::Began(opening) => {
                self.call = Some(opening.call.clone());
                self.openings.push(opening);
            }
            AgentEvent::Ended(call) => self.call = self.call.take().filter(|it| *it != call),
            AgentEvent::Violation(text) => self.violations.push(text),
        }
    }
}

type SharedLog = Arc<Mutex<AgentLog>>;

fn lock(log: &SharedLog) -> MutexGuard<'_, AgentLog> {
    log.lock().expect("no thread panics with the lock")
}

/// An agent on the current runtime.
pub struct EchoAgent {
    pub address: SocketAddr,
    log: SharedLog,
}

impl EchoAgent {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, log) = (listener.local_addr().unwrap(), SharedLog::default());
        let recorded = log.clone();
        tokio::spawn(serve(listener, move |event| lock(&recorded).record(event)));
        Self { address, log }
    }

    pub fn log(&self) -> MutexGuard<'_, AgentLog> {
        lock(&self.log)
    }
}

/// An agent in a child process.
pub struct AgentProcess {
    pub address: SocketAddr,
    /// Runs [`run_agent_process`] in a new process.
    command: fn() -> Command,
    child: Child,
    reader: Option<JoinHandle<()>>,
    log: SharedLog,
}

impl AgentProcess {
    /// `command` starts a program that calls [`run_agent_process`].
    pub fn start(command: fn() -> Command) -> Self {
        let (address, log) = (unshared_address(), SharedLog::default());
        let (child, reader) = launch(command, address, &log);
        Self { address, command, child, reader: Some(reader), log }
    }

    pub fn log(&self) -> MutexGuard<'_, AgentLog> {
        lock(&self.log)
    }

    /// Kills the process with SIGKILL. Returns when the signal was sent, and when the process was
    /// gone.
    pub fn kill(&mut self) -> (Instant, Instant) {
        let sent = Instant::now();
        self.child.kill().expect("the agent runs");
        self.child.wait().expect("the agent ends");
        let gone = Instant::now();
        self.reader.take().map(JoinHandle::join).transpose().expect("the reader does not panic");
        let mut log = self.log();
        (log.call, log.is_listening) = (None, false);
        drop(log);
        (sent, gone)
    }

    /// Starts a killed agent again, on its address.
    pub fn restart(&mut self) {
        let (child, reader) = launch(self.command, self.address, &self.log);
        (self.child, self.reader) = (child, Some(reader));
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port of an address that no other process uses: a killed agent gets it again.
fn unshared_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, 0x80 | high, middle, low);
    SocketAddr::from((host, NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Starts an agent process and waits until it listens.
fn launch(
    command: fn() -> Command,
    address: SocketAddr,
    log: &SharedLog,
) -> (Child, JoinHandle<()>) {
    let mut command = command();
    command.env(ADDRESS, address.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the agent starts");
    let lines = BufReader::new(child.stdout.take().expect("its output is piped")).lines();
    let recorded = log.clone();
    let reader = thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            // A killed process may leave half a line.
            let event = line.strip_prefix(PREFIX).and_then(|event| event.parse().ok());
            event.into_iter().for_each(|event| lock(&recorded).record(event));
        }
    });
    eventually(Duration::from_secs(5), "the agent listens", || lock(log).is_listening);
    (child, reader)
}

/// The body of an agent process: serves streams and prints its events until it is killed, or its
/// parent ends.
pub fn run_agent_process() {
    let address: SocketAddr = std::env::var(ADDRESS)
        .expect("only the parent starts this process")
        .parse()
        .expect("the parent gives an address");
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind(address).await.expect("the address is free");
        let print = |event| {
            // One write per line, so that a kill leaves whole lines. The harness may have left the
            // beginning of one.
            let line = format!("\n{PREFIX}{event}\n");
            io::stdout().write_all(line.as_bytes()).expect("the parent reads");
            io::stdout().flush().expect("the parent reads");
        };
        print(AgentEvent::Listening);
        serve(listener, print).await;
    });
}

/// Serves the streams of one exclusive pod.
async fn serve(listener: TcpListener, report: impl Fn(AgentEvent) + Clone + Send + Sync + 'static) {
    let open = Arc::new(AtomicUsize::new(0));
    while let Ok((socket, _)) = listener.accept().await {
        tokio::spawn(serve_stream(socket, open.clone(), report.clone()));
    }
}

/// A header, or an empty text.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

async fn serve_stream(
    socket: TcpStream,
    open: Arc<AtomicUsize>,
    report: impl Fn(AgentEvent) + Send + Sync + 'static,
) {
    let mut opening = Opening { call: String::new(), pod_attempt: 0 };
    #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
    let accept = |request: &Request, mut response: Response| {
        let headers = request.headers();
        opening.call = header(headers, "x-call-sid").to_owned();
        opening.pod_attempt = header(headers, "x-pod-attempt").parse().unwrap_or(0);
        if let Some(offer) = header(headers, "sec-websocket-protocol").split(',').next()
            && let Ok(chosen) = HeaderValue::from_str(offer.trim())
            && !offer.is_empty()
        {
            response.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, chosen);
        }
        Ok(response)
    };
    // A gateway that gives the connection up has not begun a stream.
    let Ok(socket) = accept_hdr_async(socket, accept).await else { return };
    if open.fetch_add(1, Ordering::SeqCst) > 0 {
        report(AgentEvent::Violation(format!("{} is a second stream", opening.call)));
    }
    let mut stream = Stream { opening, has_begun: false };
    let ended = || {
        open.fetch_sub(1, Ordering::SeqCst);
    };
    stream.echo(socket, &report, ended).await;
}

struct Stream {
    opening: Opening,
    /// The opening messages have arrived.
    has_begun: bool,
}

impl Stream {
    /// Echoes audio until the stream ends. Calls `ended` before the answer to a close: the pod is
    /// free as soon as that arrives.
    async fn echo(
        &mut self,
        mut socket: WebSocketStream<TcpStream>,
        report: &(impl Fn(AgentEvent) + Sync),
        ended: impl FnOnce(),
    ) {
        while let Some(Ok(message)) = socket.next().await {
            let is_close = message.is_close();
            match self.react(&message) {
                Ok(Reaction::Echo) if socket.send(message).await.is_err() => break,
                Ok(Reaction::Begin) => report(AgentEvent::Began(self.opening.clone())),
                Ok(_) => {}
                Err(reason) => report(AgentEvent::Violation(reason)),
            }
            if is_close {
                break;
            }
        }
        ended();
        report(AgentEvent::Ended(self.opening.call.clone()));
        while let Some(Ok(_)) = socket.next().await {}
    }

    fn react(&mut self, message: &Message) -> Result<Reaction, String> {
        let call = &self.opening.call;
        match message {
            Message::Binary(_) if self.has_begun => Ok(Reaction::Echo),
            Message::Binary(_) => Err(format!("{call} begins with audio")),
            Message::Text(text) => self.react_to_text(text),
            _ => Ok(Reaction::Ignore),
        }
    }

    fn react_to_text(&mut self, text: &str) -> Result<Reaction, String> {
        let call = &self.opening.call;
        let json: Value = serde_json::from_str(text).map_err(|_| format!("{call}: {text}"))?;
        match (json["event"].as_str(), self.has_begun) {
            (Some("media"), true) => Ok(Reaction::Echo),
            (Some("media"), false) => Err(format!("{call} begins with audio")),
            (Some("start" | "websocket:connected") | None, false) => {
                self.has_begun = true;
                match text.contains(&format!("\"{call}\"")) {
                    true => Ok(Reaction::Begin),
                    false => Err(format!("{call} begins as another call: {text}")),
                }
            }
            (Some("start" | "websocket:connected" | "connected") | None, true) => {
                Err(format!("{call} begins twice: {text}"))
            }
            _ => Ok(Reaction::Ignore),
        }
    }
}

enum Reaction {
    Begin,
    Echo,
    Ignore,
}
