//! Agents: WebSocket servers, one per pod, that echo frames and record the streams they serve.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async,
    tungstenite::{
        Message,
        handshake::server::{Request as HttpRequest, Response},
        protocol::CloseFrame,
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    messages::{self, Frame, Request},
    record::{AgentStream, Recorder},
};
use testkit::dice::Dice;

const SUBPROTOCOL: &str = "sec-websocket-protocol";

/// How the agent of a pod behaves.
#[derive(Debug, Default)]
pub(crate) struct Behaviour {
    /// It answers handshakes after 900 ms to 3 s.
    pub is_slow: AtomicBool,
    /// It neither reads nor writes until this time of the run (ms).
    pub stalls_until: AtomicU64,
    /// Its echoes are large.
    pub has_large_echoes: AtomicBool,
}

pub(crate) struct AgentPod {
    pub name: String,
    pub address: SocketAddr,
    pub behaviour: Behaviour,
    recorder: Arc<Recorder>,
    /// Ends the listener and all streams.
    running: Mutex<CancellationToken>,
    dice: Mutex<Dice>,
}

impl AgentPod {
    /// Starts a pod on a free port.
    pub(crate) async fn start(number: usize, recorder: Arc<Recorder>, seed: u64) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pod = Arc::new(Self {
            name: format!("pod-{number}"),
            address: listener.local_addr().unwrap(),
            behaviour: Behaviour::default(),
            recorder,
            running: Mutex::default(),
            dice: Mutex::new(Dice(seed ^ number as u64)),
        });
        pod.clone().listen(listener);
        pod
    }

    fn listen(self: Arc<Self>, listener: TcpListener) {
        let token = self.running.lock().unwrap().clone();
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = token.cancelled() => return,
                };
                let Ok((socket, _)) = accepted else { continue };
                tokio::spawn(self.clone().serve(socket, token.clone()));
            }
        });
    }

    /// Ends the listener and all streams without a close frame.
    pub(crate) fn kill(&self) {
        self.running.lock().unwrap().cancel();
    }

    /// Listens on the same port again.
    pub(crate) async fn restart(self: &Arc<Self>) {
        *self.running.lock().unwrap() = CancellationToken::new();
        for _ in 0..100 {
            if let Ok(listener) = TcpListener::bind(self.address).await {
                return self.clone().listen(listener);
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("the port of {} is taken", self.name);
    }

    async fn serve(self: Arc<Self>, socket: TcpStream, token: CancellationToken) {
        let delay = match self.behaviour.is_slow.load(Ordering::Relaxed) {
            true => self.dice.lock().unwrap().between(900, 3_000),
            false => 0,
        };
        sleep(Duration::from_millis(delay)).await;
        let mut request = None;
        #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
        let accept = |http: &HttpRequest, mut response: Response| {
            if let Some(offered) = http.headers().get(SUBPROTOCOL) {
                response.headers_mut().insert(SUBPROTOCOL, offered.clone());
            }
            request = Some(http.clone());
            Ok(response)
        };
        let accepted = tokio::select! {
            accepted = accept_hdr_async(socket, accept) => accepted,
            () = token.cancelled() => return,
        };
        // The gateway has given up.
        let (Ok(mut socket), Some(request)) = (accepted, request) else { return };
        let header = |name: &str| {
            let value = request.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let stream = self.recorder.add_agent_stream(AgentStream {
            pod: self.name.clone(),
            call: header("x-call-sid"),
            ordinal: header("x-pod-attempt").parse().unwrap_or(0),
            from: self.recorder.now(),
            to: None,
            last_frame: None,
            opening: Vec::new(),
            errors: Vec::new(),
        });
        tokio::select! {
            () = self.echo(&mut socket, &stream) => {}
            () = token.cancelled() => {}
        }
        stream.lock().unwrap().to.get_or_insert_with(|| self.recorder.now());
    }

    async fn stall(&self) {
        let until = Duration::from_millis(self.behaviour.stalls_until.load(Ordering::Relaxed));
        sleep(until.saturating_sub(self.recorder.now())).await;
    }

    /// Echoes frames until the stream ends.
    async fn echo(&self, socket: &mut WebSocketStream<TcpStream>, stream: &Mutex<AgentStream>) {
        loop {
            self.stall().await;
            let Some(Ok(message)) = socket.next().await else { return };
            if let Message::Close(_) = message {
                // The reply to the close frame follows with the next read.
                stream.lock().unwrap().to = Some(self.recorder.now());
            }
            let Some(frame) = stream.lock().unwrap().receive(&message) else { continue };
            if frame.request == Request::Close {
                stream.lock().unwrap().to = Some(self.recorder.now());
                let normal = CloseFrame { code: 1000.into(), reason: "".into() };
                if socket.close(Some(normal)).await.is_err() {
                    return;
                }
                continue;
            }
            let has_large_echoes = self.behaviour.has_large_echoes.load(Ordering::Relaxed);
            let padding = match (has_large_echoes, frame.sequence % 3) {
                (false, _) => 0,
                (true, 0) => 60_000,
                (true, _) => 12_000,
            };
            if socket.send(frame.message(padding)).await.is_err() {
                return;
            }
        }
    }
}

impl AgentStream {
    /// Records a message, and checks it against the earlier ones. Returns its frame, if it is one.
    fn receive(&mut self, message: &Message) -> Option<Frame> {
        let Some(frame) = Frame::read(message) else {
            if let (Message::Text(text), None) = (message, self.last_frame) {
                self.opening.push(text.to_string());
            }
            return None;
        };
        if self.last_frame.is_none() && self.opening != messages::opening(&self.call) {
            let message = format!("{} on {} began with {:?}", self.call, self.pod, self.opening);
            self.errors.push(("S3", message));
        }
        let is_late = self.last_frame.is_some_and(|last| frame.sequence <= last);
        if frame.call != self.call || is_late {
            let message = format!(
                "{} on {} got frame {} of {} after {:?}",
                self.call, self.pod, frame.sequence, frame.call, self.last_frame
            );
            self.errors.push(("S1", message));
        }
        self.last_frame = Some(frame.sequence);
        Some(frame)
    }
}
