//! Calls at 50 frames a second, evenly spread over time, whose frames come back from the agents.
//!
//! One thread serves the clients and the agents. The pacer never sleeps, because timers are
//! coarser than the distance between two frames; it yields to the other tasks instead.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::{
    client::{Endpoint, Socket},
    frames::{ECHO_LEN, MediaFrame, opening, read_echo},
};

/// Time between two frames of a call.
const FRAME_INTERVAL: Duration = Duration::from_millis(20);
/// Frames that a late pacer sends before it lets the other tasks run.
const MAX_IN_A_ROW: usize = 8;
/// How long to wait for the last frames.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// Share of a core above which a system counts as saturated.
const SATURATED: f64 = 0.97;
/// Lag of the pacer (p99) from which the generator counts as saturated.
const MAX_LAG: Duration = Duration::from_millis(5);
const PERCENTILE: f64 = 0.99;

/// Opens a stream per path, sends the opening messages and awaits their echo.
pub(crate) async fn open_streams(endpoint: &Endpoint, paths: &[String]) -> io::Result<Vec<Socket>> {
    let mut sockets = Vec::with_capacity(paths.len());
    for (call, path) in paths.iter().enumerate() {
        let mut socket = endpoint.open(path).await?;
        for frame in opening(call) {
            socket.write_all(&frame).await?;
            // Headers of servers have no mask.
            let mut echo = vec![0; frame.len() - 4];
            socket.read_exact(&mut echo).await?;
        }
        sockets.push(socket);
    }
    Ok(sockets)
}

pub(crate) async fn close_streams(sockets: Vec<Socket>) {
    for socket in sockets {
        socket.close().await;
    }
}

/// How long a load lasts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Period {
    pub warm_up: Duration,
    pub measured: Duration,
}

/// The result of a load.
pub(crate) struct Relayed {
    /// Frames through the system, both ways together, in the measured time.
    pub frames: u64,
    /// CPU time of the system in the measured time.
    pub cpu: Duration,
    pub elapsed: Duration,
    /// In nanoseconds.
    round_trips: Histogram<u64>,
    lag: Histogram<u64>,
    lost: u64,
}

impl Relayed {
    pub(crate) fn p99_ms(&self) -> f64 {
        self.round_trips.value_at_quantile(PERCENTILE) as f64 / 1e6
    }

    pub(crate) fn cpu_per_frame(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.frames as f64
    }

    /// Share of its core that the system used.
    pub(crate) fn core_share(&self) -> f64 {
        self.cpu.as_secs_f64() / self.elapsed.as_secs_f64()
    }

    /// Why the figures say nothing about this load.
    pub(crate) fn saturation(&self) -> Option<String> {
        let lag = Duration::from_nanos(self.lag.value_at_quantile(PERCENTILE));
        if self.lost > 0 {
            return Some(format!("{} frames late by over {DRAIN_TIME:?}", self.lost));
        }
        if lag > MAX_LAG {
            return Some(format!("the load generator was {lag:.1?} late (p99)"));
        }
        let share = self.core_share();
        (share > SATURATED).then(|| format!("it used {:.0} % of its core", share * 100.0))
    }
}

struct Call {
    number: usize,
    socket: Socket,
    frame: MediaFrame,
    received: Vec<u8>,
}

struct Recorder {
    started: Instant,
    /// Frames sent in this time count, in nanoseconds since `started`.
    measured: std::ops::Range<u64>,
    round_trips: Histogram<u64>,
    received: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no task panics with the lock")
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 3).expect("valid bounds")
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Runs open streams as calls, and closes them. `cpu_time` is that of the system under test.
pub(crate) async fn relay(
    sockets: Vec<Socket>,
    period: Period,
    cpu_time: impl Fn() -> Duration,
) -> Relayed {
    let started = Instant::now();
    let measured = nanos(period.warm_up)..nanos(period.warm_up + period.measured);
    let recorder = Recorder { started, measured, round_trips: histogram(), received: 0 };
    let recorder = Arc::new(Mutex::new(recorder));
    let (mut calls, mut readers) = (Vec::new(), Vec::new());
    for (number, socket) in sockets.into_iter().enumerate() {
        let frame = MediaFrame::new(number);
        let call = Call { number, socket, frame, received: Vec::with_capacity(4 * ECHO_LEN) };
        let call = Arc::new(Mutex::new(call));
        readers.push(tokio::spawn(read_echoes(call.clone(), recorder.clone())));
        calls.push(call);
    }
    let mut pacer = Pacer { calls: &calls, started, sent: 0, lag: histogram() };
    pacer.run_until(period.warm_up).await;
    let received = || lock(&recorder).received;
    let (begin, frames, cpu) = (Instant::now(), received(), cpu_time());
    pacer.run_until(period.warm_up + period.measured).await;
    let (elapsed, cpu) = (begin.elapsed(), cpu_time() - cpu);
    let frames = 2 * (received() - frames);
    let (sent, lag) = (pacer.sent, pacer.lag);
    let last = Instant::now();
    while received() < sent && last.elapsed() < DRAIN_TIME {
        tokio::task::yield_now().await;
    }
    for reader in readers {
        assert!(
            !reader.is_finished(),
            "a stream ended, or carried a frame that its call did not send"
        );
        reader.abort();
        let _ = reader.await;
    }
    let lost = sent - received();
    for call in calls {
        let call = Arc::into_inner(call).expect("the readers have ended");
        call.into_inner().expect("no task panics with the lock").socket.close().await;
    }
    let round_trips = lock(&recorder).round_trips.clone();
    Relayed { frames, cpu, elapsed, round_trips, lag, lost }
}

struct Pacer<'a> {
    calls: &'a [Arc<Mutex<Call>>],
    started: Instant,
    sent: u64,
    lag: Histogram<u64>,
}

impl Pacer<'_> {
    async fn run_until(&mut self, end: Duration) {
        let (distance, end) = (nanos(FRAME_INTERVAL) / self.calls.len() as u64, nanos(end));
        let mut in_a_row = 0;
        loop {
            let due = self.sent * distance;
            if due >= end {
                return;
            }
            let now = nanos(self.started.elapsed());
            if now < due || in_a_row == MAX_IN_A_ROW {
                in_a_row = 0;
                tokio::task::yield_now().await;
                continue;
            }
            in_a_row += 1;
            self.lag.saturating_record(now - due);
            let mut call = lock(&self.calls[self.sent as usize % self.calls.len()]);
            call.send(now);
            self.sent += 1;
        }
    }
}

impl Call {
    fn send(&mut self, now: u64) {
        let frame = self.frame.at(now);
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(&mut self.socket).poll_write(&mut context, frame) {
            // The send buffer of a socket has room for minutes of a call.
            Poll::Ready(Ok(written)) => assert_eq!(written, frame.len(), "a stream is blocked"),
            Poll::Ready(Err(error)) => panic!("a stream ended: {error}"),
            Poll::Pending => panic!("a stream is blocked"),
        }
    }

    /// Reads what has arrived. Returns whether the stream is open.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        let mut some = [0; 4 * ECHO_LEN];
        let mut buffer = ReadBuf::new(&mut some);
        match Pin::new(&mut self.socket).poll_read(context, &mut buffer) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(read) => {
                self.received.extend_from_slice(buffer.filled());
                Poll::Ready(read.is_ok() && !buffer.filled().is_empty())
            }
        }
    }
}

async fn read_echoes(call: Arc<Mutex<Call>>, recorder: Arc<Mutex<Recorder>>) {
    while poll_fn(|context| lock(&call).poll_read(context)).await {
        let (mut call, mut recorder) = (lock(&call), lock(&recorder));
        let now = nanos(recorder.started.elapsed());
        let mut frames = call.received.chunks_exact(ECHO_LEN);
        for frame in &mut frames {
            match read_echo(frame) {
                Some((number, sent)) if number == call.number => recorder.record(sent, now),
                _ => return,
            }
        }
        let rest = call.received.len() - frames.remainder().len();
        call.received.drain(..rest);
    }
}

impl Recorder {
    fn record(&mut self, sent: u64, now: u64) {
        self.received += 1;
        if self.measured.contains(&sent) {
            self.round_trips.saturating_record(now.saturating_sub(sent));
        }
    }
}
