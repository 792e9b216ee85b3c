//! A load generator that checks the router's invariants.

mod http_client;
mod invariants;
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

use tokio::sync::Semaphore;

use self::{
    http_client::{Allocation, Connection, Failure},
    invariants::InvariantChecker,
    report::Counts,
};
pub use self::{
    http_client::{Format, Target},
    invariants::Violation,
    report::{Latency, LoadFailure, Progress, Report},
};

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
    call: String,
    pod: String,
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
        jobs: Jobs { ready: Mutex::default(), count: Semaphore::new(0) },
        ends: Mutex::default(),
        begun: AtomicU64::new(0),
        beginning: AtomicU64::new(0),
        tag: crate::random_u32(),
        started: Instant::now(),
        plan,
    });
    let mut workers = tokio::task::JoinSet::new();
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
    let mut before = Progress::default();
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.tick().await;
    loop {
        tokio::select! {
            done = workers.join_next() => match done {
                None => break,
                Some(done) => done?,
            },
            _ = ticks.tick() => {
                let now = run.counts.progress(run.started.elapsed());
                progress(&now.since(&before));
                before = now;
            }
        }
    }
    Ok(run.counts.report(run.started.elapsed(), &run.invariants))
}

impl Run {
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
            if !self.plan.hold.is_zero() {
                tokio::time::sleep(self.plan.hold).await;
            }
            self.end(&mut connection, active).await;
        }
    }

    /// Drives one connection of an open loop: takes the jobs that are due.
    async fn run_open_loop(&self) {
        let mut connection = Connection::new(&self.plan.target);
        while let Some(job) = self.jobs.next().await {
            match job {
                Job::Begin(due) => {
                    if let Some(active) = self.begin(&mut connection, due).await {
                        self.ends().push(Reverse(Due(Instant::now() + self.plan.hold, active)));
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
        let allocation = connection.allocate(plan.format, &call, plan.merchant.as_deref()).await;
        let Allocation { pod } = match allocation {
            Ok(allocation) => allocation,
            Err(failure) => {
                self.counts.failed("allocate", &failure);
                if matches!(failure, Failure::Refused) {
                    self.counts.refused(due.elapsed());
                }
                if matches!(failure, Failure::NoConnection(_)) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                return None;
            }
        };
        self.counts.allocated(due.elapsed());
        self.invariants.record_allocation(&pod, &call).await;
        if plan.repeat > 0 && number.is_multiple_of(plan.repeat) {
            match connection.allocate(plan.format, &call, plan.merchant.as_deref()).await {
                Ok(repeat) => self.invariants.record_repeat(&call, &pod, &repeat.pod),
                Err(failure) => self.counts.failed("repeat", &failure),
            }
        }
        Some(ActiveCall { call, pod })
    }

    async fn end(&self, connection: &mut Connection, active: ActiveCall) {
        // From here on the pod may get another call.
        self.invariants.record_release(&active.pod, &active.call);
        let started = Instant::now();
        match connection.release(self.plan.format, &active.call).await {
            Ok(()) => self.counts.released(started.elapsed()),
            Err(failure) => self.counts.failed("release", &failure),
        }
    }
}
