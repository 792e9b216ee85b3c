//! Load on a router, and a judge of what it does under it.

mod judge;
mod report;
mod wire;

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
    judge::Judge,
    report::Counts,
    wire::{Connection, Failure, Given},
};
pub use self::{
    judge::Violation,
    report::{Flaw, Latency, Report, Tally},
    wire::{Format, Target},
};

/// How calls arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Each connection begins a call when its last one is over.
    Closed,
    /// So many calls a second, whether the router keeps up or not. A call that has
    /// to wait for a connection has waited.
    Open { per_second: f64 },
}

/// What to do.
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
    /// Stop after so many calls, if that is sooner.
    pub calls: Option<u64>,
    /// One call in so many asks twice; 0 for none.
    pub repeat: u64,
}

/// What a worker does next.
enum Job {
    /// A call arrives, or was due to at that time.
    Begin(Instant),
    End(Held),
}

/// A call that has a pod.
struct Held {
    call: String,
    pod: String,
}

/// Work for all workers, in the order in which it is due.
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

    /// The next job, or nothing once there will be none.
    async fn next(&self) -> Option<Job> {
        self.count.acquire().await.ok()?.forget();
        self.lock().pop_front()
    }
}

struct Run {
    plan: Plan,
    judge: Judge,
    counts: Counts,
    jobs: Jobs,
    /// Ends of calls that are still to come.
    ends: Mutex<BinaryHeap<Reverse<Due>>>,
    begun: AtomicU64,
    /// Arrivals whose allocation is not answered yet.
    beginning: AtomicU64,
    /// Told apart from the calls of other runs by this.
    tag: u32,
    started: Instant,
}

struct Due(Instant, Held);

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

/// Runs a plan to its end. `progress` hears once a second how it goes.
pub async fn run(plan: Plan, progress: impl Fn(&Tally)) -> anyhow::Result<Report> {
    let judge = Judge::new(&plan.target).await?;
    let run = Arc::new(Run {
        judge,
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
            Arrivals::Closed => workers.spawn(async move { run.calls_in_a_row().await }),
            Arrivals::Open { .. } => workers.spawn(async move { run.work().await }),
        };
    }
    if let Arrivals::Open { per_second } = run.plan.arrivals {
        let run = run.clone();
        // A thread of its own sleeps to the tenth of a millisecond; a runtime to one.
        std::thread::Builder::new()
            .name("arrivals".into())
            .spawn(move || run.arrive(per_second))?;
    }
    let mut before = Tally::default();
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.tick().await;
    loop {
        tokio::select! {
            done = workers.join_next() => match done {
                None => break,
                Some(done) => done?,
            },
            _ = ticks.tick() => {
                let now = run.counts.tally(run.started.elapsed());
                progress(&now.since(&before));
                before = now;
            }
        }
    }
    Ok(run.counts.report(run.started.elapsed(), &run.judge))
}

impl Run {
    fn is_over(&self) -> bool {
        self.started.elapsed() >= self.plan.duration
            || self.plan.calls.is_some_and(|most| self.begun.load(Ordering::Relaxed) >= most)
    }

    /// The number and the id of a new call.
    fn new_call(&self) -> (u64, String) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number, format!("CAload{:08x}{number:010}", self.tag))
    }

    /// One connection of a closed loop.
    async fn calls_in_a_row(&self) {
        let mut connection = Connection::new(&self.plan.target);
        while !self.is_over() {
            let Some(held) = self.begin(&mut connection, Instant::now()).await else {
                continue;
            };
            if !self.plan.hold.is_zero() {
                tokio::time::sleep(self.plan.hold).await;
            }
            self.end(&mut connection, held).await;
        }
    }

    /// One connection of an open loop: takes whatever is due.
    async fn work(&self) {
        let mut connection = Connection::new(&self.plan.target);
        while let Some(job) = self.jobs.next().await {
            match job {
                Job::Begin(due) => {
                    if let Some(held) = self.begin(&mut connection, due).await {
                        self.ends().push(Reverse(Due(Instant::now() + self.plan.hold, held)));
                    }
                    self.beginning.fetch_sub(1, Ordering::SeqCst);
                }
                Job::End(held) => self.end(&mut connection, held).await,
            }
        }
    }

    fn ends(&self) -> MutexGuard<'_, BinaryHeap<Reverse<Due>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets calls arrive and end when they should.
    fn arrive(&self, per_second: f64) {
        let mut next = 0u64;
        while !self.is_over() {
            let due = self.started + Duration::from_secs_f64(next as f64 / per_second);
            if due <= Instant::now() {
                next += 1;
                self.beginning.fetch_add(1, Ordering::SeqCst);
                self.jobs.push(Job::Begin(due));
                continue;
            }
            self.end_what_is_due();
            let pause = due.saturating_duration_since(Instant::now());
            std::thread::sleep(pause.min(Duration::from_millis(1)));
        }
        // What has begun is brought to its end.
        let patience = Instant::now() + self.plan.hold + Duration::from_secs(10);
        let is_open = || self.beginning.load(Ordering::SeqCst) > 0 || self.judge.held() > 0;
        while is_open() && Instant::now() < patience {
            self.end_what_is_due();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.jobs.count.close();
    }

    fn end_what_is_due(&self) {
        let now = Instant::now();
        let mut ends = self.ends();
        while ends.peek().is_some_and(|Reverse(Due(at, _))| *at <= now) {
            if let Some(Reverse(Due(_, held))) = ends.pop() {
                self.jobs.push(Job::End(held));
            }
        }
    }

    async fn begin(&self, connection: &mut Connection, due: Instant) -> Option<Held> {
        let (plan, (number, call)) = (&self.plan, self.new_call());
        let asked = connection.allocate(plan.format, &call, plan.merchant.as_deref()).await;
        let given = match asked {
            Ok(given) => given,
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
        let Given { pod } = given;
        self.judge.begins(&pod, &call).await;
        if plan.repeat > 0 && number.is_multiple_of(plan.repeat) {
            match connection.allocate(plan.format, &call, plan.merchant.as_deref()).await {
                Ok(again) => self.judge.again(&call, &pod, &again.pod),
                Err(failure) => self.counts.failed("repeat", &failure),
            }
        }
        Some(Held { call, pod })
    }

    async fn end(&self, connection: &mut Connection, held: Held) {
        // From here on the pod may be another's.
        self.judge.ends(&held.pod, &held.call);
        let asked = Instant::now();
        match connection.release(self.plan.format, &held.call).await {
            Ok(()) => self.counts.released(asked.elapsed()),
            Err(failure) => self.counts.failed("release", &failure),
        }
    }
}
