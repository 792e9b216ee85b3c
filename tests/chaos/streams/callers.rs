//! Callers: they allocate a pod, open the stream of the call at any gateway, and talk until they
//! or the agent end the call.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use serde_json::{Value, json};
use telephony::Provider;
use tokio::{
    net::{TcpSocket, TcpStream},
    task::spawn_blocking,
    time::{sleep, sleep_until, timeout},
};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Error, Message, client::IntoClientRequest, http::HeaderValue},
};

use super::{
    World,
    messages::{self, Frame, Request},
    record::{CallEnd, CallerStream, PodReport},
};
use crate::http;
use testkit::{dice::Dice, provider::CallDocument};

type Socket = WebSocketStream<TcpStream>;

/// Maximum time until a frame comes back at the end of a call, over failovers.
const MAX_SILENCE: Duration = Duration::from_secs(10);
/// Maximum time to open a stream: pods are tried for 5 s.
const MAX_OPENING_TIME: Duration = Duration::from_secs(12);

/// An allocated call: the path of its stream, and of the request after it.
struct Allocated {
    path: String,
    after_stream: Option<String>,
}

/// One caller, with its random numbers.
pub(crate) struct Caller {
    pub world: Arc<World>,
    pub dice: Dice,
    /// Shortest and longest call (ms), instead of those of the scenario.
    pub call_ms: Option<(u64, u64)>,
}

impl Caller {
    pub(crate) async fn run(mut self) {
        while !self.world.is_finished.load(Ordering::Relaxed) {
            self.call_once().await;
            let pause = self.dice.between(20, 120);
            sleep(Duration::from_millis(pause)).await;
        }
    }

    pub(crate) async fn call_once(&mut self) {
        let call = self.world.new_call();
        if let Some(allocated) = self.allocate(&call).await {
            self.talk(&call, allocated).await;
        }
    }

    /// A gateway without a fault.
    fn pick_gateway(&mut self) -> usize {
        let usable = self.world.usable_gateways();
        usable[self.dice.roll(usable.len())]
    }

    /// Runs a blocking request to a router.
    async fn request(
        &mut self,
        send: impl FnOnce(std::net::SocketAddr) -> Result<http::Response, http::Failure>
        + Send
        + 'static,
    ) -> Option<http::Response> {
        let number = self.pick_gateway();
        let address = self.world.gateways[number].process.address;
        spawn_blocking(move || send(address)).await.ok()?.ok()
    }

    async fn allocate(&mut self, call: &str) -> Option<Allocated> {
        let began = self.world.recorder.now();
        let has_webhook = self.world.scenario.has_webhooks;
        let (allocated, pod) = if has_webhook {
            let form = format!("CallSid={call}&CallStatus=in-progress");
            let answer = self.request(move |to| http::form(to, "/api/v1/twilio/allocate", &form));
            let document = CallDocument::read(&answer.await.filter(|it| it.status == 200)?.body);
            (allocated(&document)?, self.find(call).await?)
        } else {
            let body = json!({"call_sid": call});
            let answer = self.request(move |to| http::post(to, "/api/v1/allocate", &body)).await;
            let answer = answer.filter(|answer| answer.status == 200)?;
            let answer: Value = serde_json::from_str(&answer.body).ok()?;
            let path = path_of(answer["ws_url"].as_str()?);
            let pod = answer["pod_name"].as_str()?.to_owned();
            (Allocated { path, after_stream: None }, Some(pod))
        };
        self.report(call, pod, began, true);
        Some(allocated)
    }

    fn report(&self, call: &str, pod: Option<String>, began: Duration, is_allocation: bool) {
        let ended = self.world.recorder.now();
        let report = PodReport { call: call.into(), pod, began, ended, is_allocation };
        self.world.recorder.reports.lock().unwrap().push(report);
    }

    /// The pod of a call; `Some(None)` if the router does not know the call.
    async fn find(&mut self, call: &str) -> Option<Option<String>> {
        let path = format!("/api/v1/calls/{call}");
        let answer = self.request(move |to| http::get(to, &path)).await?;
        let found: Value = serde_json::from_str(&answer.body).ok()?;
        match answer.status {
            200 => Some(found["pod_name"].as_str().map(str::to_owned)),
            404 => Some(None),
            _ => None,
        }
    }

    /// Opens the stream of a call and talks. Half of the calls whose gateway dies come back once.
    async fn talk(&mut self, call: &str, mut allocated: Allocated) {
        for is_return in [false, true] {
            let gateway = self.pick_gateway();
            let end = self.carry(call, &allocated.path, gateway, is_return).await;
            let (CallEnd::Cut(_), Some(path)) = (end, allocated.after_stream.clone()) else {
                return;
            };
            // Other callers hang up: the lease of the gateway frees their pods.
            if self.dice.percent(50) {
                return;
            }
            let form = format!("CallSid={call}&CallStatus=in-progress");
            let answer = self.request(move |to| http::form(to, &path, &form)).await;
            let Some(answer) = answer.filter(|answer| answer.status == 200) else { return };
            let document = CallDocument::read(&answer.body);
            let Some(next) = self::allocated(&document) else {
                let now = self.world.recorder.now();
                let message = format!("{call} came back and got {document:?}");
                return self.record(CallerStream {
                    call: call.into(),
                    gateway,
                    opened: now,
                    ended: now,
                    end: CallEnd::Ended,
                    is_return: true,
                    errors: vec![("S4", message)],
                });
            };
            allocated = next;
        }
    }

    fn record(&self, stream: CallerStream) {
        self.world.recorder.callers.lock().unwrap().push(stream);
    }

    async fn carry(&mut self, call: &str, path: &str, gateway: usize, is_return: bool) -> CallEnd {
        let began = self.world.recorder.now();
        let mut stream = CallerStream {
            call: call.into(),
            gateway,
            opened: began,
            ended: began,
            end: CallEnd::Ended,
            is_return,
            errors: Vec::new(),
        };
        match timeout(MAX_OPENING_TIME, self.open(call, path, gateway)).await {
            Ok(Ok(socket)) => {
                stream.opened = self.world.recorder.now();
                let plan = self.plan(call);
                let world = self.world.clone();
                let streams = &world.gateways[gateway].streams;
                streams.fetch_add(1, Ordering::Relaxed);
                let (end, errors) =
                    tokio::join!(plan.run(socket), self.check_meanwhile(call, path));
                streams.fetch_sub(1, Ordering::Relaxed);
                stream.end = end.end;
                stream.errors = end.errors;
                stream.errors.extend(errors);
            }
            Ok(Err(status)) => stream.end = CallEnd::Refused(status),
            Err(_) => stream.end = CallEnd::Refused(None),
        }
        stream.ended = self.world.recorder.now();
        let end = stream.end.clone();
        self.record(stream);
        end
    }

    /// Looks up the pod of an open stream, and may open a second one, which must be refused.
    async fn check_meanwhile(&mut self, call: &str, path: &str) -> Vec<(&'static str, String)> {
        let later = Duration::from_millis(self.dice.between(0, 500));
        if self.world.scenario.opens_twice {
            sleep(later / 4).await;
            let gateway = self.pick_gateway();
            let opened = timeout(MAX_OPENING_TIME, self.open(call, path, gateway)).await;
            if let Ok(Ok(_)) = opened {
                return vec![("I12", format!("{call} has a second stream at gateway {gateway}"))];
            }
        }
        sleep(later).await;
        let began = self.world.recorder.now();
        if let Some(pod) = self.find(call).await {
            self.report(call, pod, began, false);
        }
        Vec::new()
    }

    async fn open(&self, call: &str, path: &str, gateway: usize) -> Result<Socket, Option<u16>> {
        let address = self.world.gateways[gateway].process.address;
        let mut request = format!("ws://{address}{path}").into_client_request().unwrap();
        if let Some(name) = messages::subprotocol(messages::provider_of(call)) {
            let name = HeaderValue::from_static(name);
            request.headers_mut().insert("sec-websocket-protocol", name);
        }
        let socket = TcpSocket::new_v4().map_err(|_| None)?;
        if self.world.scenario.provider_pause_ms.is_some() {
            // A small window, so that a caller that does not read pushes back soon.
            socket.set_recv_buffer_size(8 << 10).map_err(|_| None)?;
        }
        let socket = socket.connect(address).await.map_err(|_| None)?;
        match client_async(request, socket).await {
            Ok((socket, _)) => Ok(socket),
            Err(Error::Http(response)) => Err(Some(response.status().as_u16())),
            Err(_) => Err(None),
        }
    }

    fn plan(&mut self, call: &str) -> Plan {
        let scenario = self.world.scenario;
        let is_long = self.dice.percent(scenario.long_share);
        let usual = if is_long { scenario.long_ms } else { scenario.call_ms };
        let (min, max) = self.call_ms.unwrap_or(usual);
        let lasts = Duration::from_millis(self.dice.between(min, max));
        let pause = scenario.provider_pause_ms.map(|(min, max)| {
            // Gateways look for silent sides every 10 s.
            let from = Duration::from_millis(self.dice.between(8_000, 8_700));
            (from, from + Duration::from_millis(self.dice.between(min, max)))
        });
        Plan { call: call.into(), lasts, is_ended_by_agent: self.dice.percent(40), pause }
    }
}

fn allocated(document: &CallDocument) -> Option<Allocated> {
    if !document.is_stream() {
        return None;
    }
    let after_stream = document.next().map(str::to_owned);
    Some(Allocated { path: document.stream_path().to_owned(), after_stream })
}

fn path_of(url: &str) -> String {
    let (_, rest) = url.split_once("://").expect("a URL");
    rest[rest.find('/').expect("a path")..].to_owned()
}

/// The course of a stream.
struct Plan {
    call: String,
    lasts: Duration,
    is_ended_by_agent: bool,
    /// The caller neither reads nor writes between these times.
    pause: Option<(Duration, Duration)>,
}

struct PlanEnd {
    end: CallEnd,
    errors: Vec<(&'static str, String)>,
}

/// Shared by both directions of a stream.
#[derive(Default)]
struct Progress {
    /// One more than the sequence number of the last echo.
    echoed: AtomicU64,
    /// The agent was asked to end the call, or the caller closes.
    is_ending: AtomicBool,
    is_closed: AtomicBool,
}

impl Plan {
    async fn run(self, socket: Socket) -> PlanEnd {
        let began = tokio::time::Instant::now();
        let (sink, stream) = socket.split();
        let progress = Progress::default();
        let (has_echo, (code, errors)) =
            tokio::join!(self.send(sink, began, &progress), self.receive(stream, began, &progress));
        let end = if !has_echo {
            CallEnd::NoEcho
        } else if progress.is_ending.load(Ordering::Relaxed) {
            CallEnd::Ended
        } else {
            CallEnd::Cut(code)
        };
        PlanEnd { end, errors }
    }

    async fn pause(&self, began: tokio::time::Instant) {
        if let Some((from, to)) = self.pause
            && (from..to).contains(&began.elapsed())
        {
            sleep_until(began + to).await;
        }
    }

    /// Sends until the call is over. Returns whether frames came back until its end.
    async fn send(
        &self,
        mut sink: SplitSink<Socket, Message>,
        began: tokio::time::Instant,
        progress: &Progress,
    ) -> bool {
        let provider = messages::provider_of(&self.call);
        for text in messages::opening(&self.call) {
            let _ = sink.send(Message::text(text)).await;
        }
        let interval = Duration::from_millis(if provider == Provider::Exotel { 100 } else { 20 });
        let mut end_mark = None;
        for sequence in 0.. {
            self.pause(began).await;
            if progress.is_closed.load(Ordering::Relaxed) {
                return true;
            }
            let is_over = began.elapsed() >= self.lasts;
            let mark = *end_mark.get_or_insert(u64::MAX);
            if is_over && mark == u64::MAX {
                end_mark = Some(sequence);
            }
            let is_heard = progress.echoed.load(Ordering::Relaxed) > mark;
            if is_heard && !self.is_ended_by_agent {
                break;
            }
            if began.elapsed() > self.lasts + MAX_SILENCE {
                let _ = sink.close().await;
                return false;
            }
            let is_close = is_heard && self.is_ended_by_agent;
            progress.is_ending.fetch_or(is_close, Ordering::Relaxed);
            let request = if is_close { Request::Close } else { Request::Echo };
            let frame = Frame { call: self.call.clone(), sequence, request };
            if sink.send(frame.message(100)).await.is_err() {
                return true;
            }
            sleep(interval).await;
        }
        progress.is_ending.store(true, Ordering::Relaxed);
        if !messages::is_binary(provider) {
            let _ = sink.send(Message::text(r#"{"event":"stop"}"#)).await;
        }
        let _ = sink.send(Message::Close(None)).await;
        true
    }

    /// Receives until the stream ends. Returns the close code and deviations.
    async fn receive(
        &self,
        mut stream: SplitStream<Socket>,
        began: tokio::time::Instant,
        progress: &Progress,
    ) -> (Option<u16>, Vec<(&'static str, String)>) {
        let (mut code, mut errors) = (None, Vec::new());
        loop {
            self.pause(began).await;
            let Some(Ok(message)) = stream.next().await else { break };
            if let Message::Close(frame) = &message {
                code = Some(frame.as_ref().map_or(1005, |frame| frame.code.into()));
                progress.is_closed.store(true, Ordering::Relaxed);
            }
            let Some(frame) = Frame::read(&message) else { continue };
            let next = progress.echoed.load(Ordering::Relaxed);
            if frame.call != self.call || frame.sequence < next {
                let Frame { call, sequence, .. } = &frame;
                let message = format!("{} got echo {sequence} of {call} after {next}", self.call);
                errors.push(("S1", message));
            }
            progress.echoed.store(frame.sequence + 1, Ordering::Relaxed);
        }
        progress.is_closed.store(true, Ordering::Relaxed);
        (code, errors)
    }
}
