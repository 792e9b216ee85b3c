//! A load generator that checks the router's invariants.

mod http_client;
mod invariants;
mod media;
mod report;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{sync::Semaphore, task::JoinSet};
use tokio_util::task::TaskTracker;

use self::{
    http_client::{Allocate, Connection, Failure},
    invariants::InvariantChecker,
    media::MediaCounts,
    report::Counts,
};
pub use self::{
    http_client::{Format, Target},
    invariants::Violation,
    media::{AudioReport, Frames, MediaReport},
    report::{Latency, LoadFailure, Progress, Report},
};
use crate::tools::provider_stream::{Clip, MediaFormat};

/// Pause after a refusal if calls have streams: calls are long, and a caller does not redial at
/// once.
const REDIAL_PAUSE: Duration = Duration::from_millis(100);

/// How calls arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Closed loop: each connection begins a call when its last one has ended.
    Closed,
    /// Open loop: calls arrive at this rate whether the router keeps up or not. Latency includes
    /// the wait for a connection.
    Open { per_second: f64 },
}

/// Parameters of a load.
#[derive(Debug, Clone)]
pub struct Plan {
    pub target: Target,
    pub format: Format,
    pub merchant: Option<String>,
    pub arrivals: Arrivals,
    pub connections: usize,
    /// How long a call keeps its pod.
    pub hold: Duration,
    /// Open a stream for each call, in this format, and send audio while the call lasts.
    pub media: Option<MediaFormat>,
    /// Audio to send instead of marked frames. Calls take them in turn: with different clips,
    /// audio that reaches another call is noticed.
    pub clips: Vec<Arc<Clip>>,
    pub duration: Duration,
    /// Stop after this many calls, if earlier.
    pub calls: Option<u64>,
    /// Repeat every n-th allocate request; 0 for none.
    pub repeat: u64,
}

/// A unit of work.
enum Job {
    /// Begin a call that was due at this time.
    Begin(Instant),
    End(ActiveCall),
}

/// A call with a pod.
struct ActiveCall {
    number: u64,
    call: String,
    /// `None` if it could not be looked up.
    pod: Option<String>,
    ws_url: Option<String>,
}

/// Work for all workers, in order of due time.
struct Jobs {
    ready: Mutex<VecDeque<Job>>,
    count: Semaphore,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        self.lock().push_back(job);
        self.count.add_permits(1);
    }

    /// Returns the next job; `None` after the end of the load.
    async fn next(&self) -> Option<Job> {
        self.count.acquire().await.ok()?.forget();
        self.lock().pop_front()
    }
}

struct Run {
    plan: Plan,
    invariants: InvariantChecker,
    counts: Counts,
    media: MediaCounts,
    /// Streams of an open loop. In a closed loop each worker is one stream.
    streams: TaskTracker,
    jobs: Jobs,
    /// Scheduled ends of calls.
    ends: Mutex<BinaryHeap<Reverse<Due>>>,
    begun: AtomicU64,
    /// Arrivals whose allocation is not answered yet.
    beginning: AtomicU64,
    /// Distinguishes the calls of this run from those of others.
    tag: u32,
    started: Instant,
}

struct Due(Instant, ActiveCall);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

/// Runs a plan to its end; calls `progress` once a second.
pub async fn run(plan: Plan, progress: impl Fn(&Progress)) -> anyhow::Result<Report> {
    let invariants = InvariantChecker::new(&plan.target).await?;
    let run = Arc::new(Run {
        invariants,
        counts: Counts::default(),
        media: MediaCounts::default(),
        streams: TaskTracker::new(),
        jobs: Jobs { ready: Mutex::default(), count: Semaphore::new(0) },
        ends: Mutex::default(),
        begun: AtomicU64::new(0),
        beginning: AtomicU64::new(0),
        tag: crate::random_u32(),
        started: Instant::now(),
        plan,
    });
    let mut workers = JoinSet::new();
    for _ in 0..run.plan.connections {
        let run = run.clone();
        match run.plan.arrivals {
            Arrivals::Closed => workers.spawn(async move { run.run_closed_loop().await }),
            Arrivals::Open { .. } => workers.spawn(async move { run.run_open_loop().await }),
        };
    }
    if let Arrivals::Open { per_second } = run.plan.arrivals {
        let run = run.clone();
        // A thread sleeps with a precision of 0.1 ms; the runtime's timer with 1 ms.
        std::thread::Builder::new()
            .name("arrivals".into())
            .spawn(move || run.schedule_arrivals(per_second))?;
    }
    run.await_end(workers, progress).await?;
    let mut report = run.counts.report(run.started.elapsed(), &run.invariants);
    report.media =
        run.plan.media.map(|format| run.media.report(format, !run.plan.clips.is_empty()));
    Ok(report)
}

impl Run {
    /// Waits for all workers and streams; calls `progress` once a second.
    async fn await_end(
        &self,
        mut workers: JoinSet<()>,
        progress: impl Fn(&Progress),
    ) -> anyhow::Result<()> {
        let mut before = Progress::default();
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.tick().await;
        loop {
            tokio::select! {
                done = workers.join_next(), if !workers.is_empty() => {
                    if let Some(done) = done {
                        done?;
                    }
                    if workers.is_empty() {
                        self.streams.close();
                    }
                }
                () = self.streams.wait() => return Ok(()),
                _ = ticks.tick() => {
                    let mut now = self.counts.progress(self.started.elapsed());
                    (now.streams, now.frames) = self.media.progress();
                    progress(&now.since(&before));
                    before = now;
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        self.started.elapsed() >= self.plan.duration
            || self.plan.calls.is_some_and(|most| self.begun.load(Ordering::Relaxed) >= most)
    }

    /// Returns the number and the id of a new call.
    fn new_call(&self) -> (u64, String) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number, format!("CAload{:08x}{number:010}", self.tag))
    }

    /// Drives one connection of a closed loop.
    async fn run_closed_loop(&self) {
        let mut connection = Connection::new(&self.plan.target);
        while !self.is_over() {
            let Some(active) = self.begin(&mut connection, Instant::now()).await else {
                continue;
            };
            if let Some(format) = self.plan.media {
                // The router closes idle connections.
                connection.close();
                self.stream(active, format).await;
                continue;
            }
            if !self.plan.hold.is_zero() {
                tokio::time::sleep(self.plan.hold).await;
            }
            self.end(&mut connection, active).await;
        }
    }

    /// Drives one connection of an open loop: takes the jobs that are due.
    async fn run_open_loop(self: &Arc<Self>) {
        let mut connection = Connection::new(&self.plan.target);
        while let Some(job) = self.jobs.next().await {
            match job {
                Job::Begin(due) => {
                    match (self.begin(&mut connection, due).await, self.plan.media) {
                        (Some(active), Some(format)) => {
                            let run = self.clone();
                            self.streams.spawn(async move { run.stream(active, format).await });
                        }
                        (Some(active), None) => {
                            let end = Instant::now() + self.plan.hold;
                            self.ends().push(Reverse(Due(end, active)));
                        }
                        (None, _) => {}
                    }
                    self.beginning.fetch_sub(1, Ordering::SeqCst);
                }
                Job::End(active) => self.end(&mut connection, active).await,
            }
        }
    }

    fn ends(&self) -> MutexGuard<'_, BinaryHeap<Reverse<Due>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Schedules the beginnings and ends of calls.
    fn schedule_arrivals(&self, per_second: f64) {
        let mut next = 0u64;
        while !self.is_over() {
            let due = self.started + Duration::from_secs_f64(next as f64 / per_second);
            if due <= Instant::now() {
                next += 1;
                self.beginning.fetch_add(1, Ordering::SeqCst);
                self.jobs.push(Job::Begin(due));
                continue;
            }
            self.schedule_due_ends();
            let pause = due.saturating_duration_since(Instant::now());
            std::thread::sleep(pause.min(Duration::from_millis(1)));
        }
        // Calls that have begun are released.
        let deadline = Instant::now() + self.plan.hold + Duration::from_secs(10);
        let is_open = || self.beginning.load(Ordering::SeqCst) > 0 || self.invariants.active() > 0;
        while is_open() && Instant::now() < deadline {
            self.schedule_due_ends();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.jobs.count.close();
    }

    fn schedule_due_ends(&self) {
        let now = Instant::now();
        let mut ends = self.ends();
        while ends.peek().is_some_and(|Reverse(Due(at, _))| *at <= now) {
            if let Some(Reverse(Due(_, active))) = ends.pop() {
                self.jobs.push(Job::End(active));
            }
        }
    }

    async fn begin(&self, connection: &mut Connection, due: Instant) -> Option<ActiveCall> {
        let (plan, (number, call)) = (&self.plan, self.new_call());
        let merchant = plan.merchant.as_deref();
        let request = Allocate { format: plan.format, call: &call, merchant, media: plan.media };
        let allocation = match connection.allocate(request).await {
            Ok(allocation) => allocation,
            Err(failure) => {
                self.counts.failed("allocate", &failure);
                if matches!(failure, Failure::Refused) {
                    self.counts.refused(due.elapsed());
                    if plan.media.is_some() {
                        tokio::time::sleep(REDIAL_PAUSE).await;
                    }
                }
                if matches!(failure, Failure::NoConnection(_)) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                return None;
            }
        };
        self.counts.allocated(due.elapsed());
        let pod = self.pod(connection, &call, allocation.pod).await;
        self.invariants.record_allocation(pod.as_deref(), &call).await;
        if plan.repeat > 0 && number.is_multiple_of(plan.repeat) {
            match connection.allocate(request).await {
                Ok(repeat) => {
                    let again = self.pod(connection, &call, repeat.pod).await;
                    if let (Some(pod), Some(again)) = (&pod, again) {
                        self.invariants.record_repeat(&call, pod, &again);
                    }
                }
                Err(failure) => self.counts.failed("repeat", &failure),
            }
        }
        Some(ActiveCall { number, call, pod, ws_url: allocation.ws_url })
    }

    /// Returns the pod of a call. Documents of webhooks with the URL of the gateway do not name it;
    /// it is then looked up.
    async fn pod(
        &self,
        connection: &mut Connection,
        call: &str,
        named: Option<String>,
    ) -> Option<String> {
        if named.is_some() {
            return named;
        }
        connection.pod_of(call).await.unwrap_or_else(|failure| {
            self.counts.failed("look-up", &failure);
            None
        })
    }

    async fn end(&self, connection: &mut Connection, active: ActiveCall) {
        // From here on the pod may get another call.
        self.invariants.record_release(active.pod.as_deref(), &active.call);
        let started = Instant::now();
        match connection.release(self.plan.format, &active.call).await {
            Ok(()) => self.counts.released(started.elapsed()),
            Err(failure) => self.counts.failed("release", &failure),
        }
    }

    /// Releases a call whose stream did not open, as a provider's callback does. The gateway may
    /// have ended the call before.
    async fn end_without_stream(&self, active: ActiveCall) {
        self.invariants.record_release(active.pod.as_deref(), &active.call);
        let started = Instant::now();
        let mut connection = Connection::new(&self.plan.target);
        match connection.release(self.plan.format, &active.call).await {
            Ok(()) => self.counts.released(started.elapsed()),
            Err(Failure::Status(404)) => {}
            Err(failure) => self.counts.failed("release", &failure),
        }
    }

    /// Opens the stream of a call, talks for the duration of the call, and hangs up. The end of
    /// the stream releases the call.
    async fn stream(&self, active: ActiveCall, format: MediaFormat) {
        let (url, dialer) =
            (active.ws_url.as_deref().unwrap_or_default(), &self.plan.target.dialer);
        let mut stream = match self.media.open(dialer, url, format, &active.call).await {
            Ok(stream) => stream,
            Err(error) => {
                self.counts.failed("stream", &error.into());
                return self.end_without_stream(active).await;
            }
        };
        // Streams that open together do not send together.
        let frame = format.frame_duration();
        let offset = frame * (active.number % 20) as u32 / 20;
        let clips = &self.plan.clips;
        let talked = match clips.get(active.number as usize % clips.len().max(1)) {
            Some(clip) => self.media.play(&mut stream, clip, self.plan.hold, offset).await,
            None => self.media.talk(&mut stream, self.plan.hold, offset).await,
        };
        self.invariants.record_release(active.pod.as_deref(), &active.call);
        let ended = match talked {
            Ok(()) => stream.hang_up().await,
            Err(error) => Err(error),
        };
        self.media.closed();
        if let Err(error) = ended {
            self.counts.failed("stream", &error.into());
        }
    }
}
