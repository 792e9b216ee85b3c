//! The line to Redis: one multiplexed connection, found again when it is lost;
//! one retry; and a circuit breaker that answers at once while Redis is out.

use std::{
    collections::HashMap,
    io,
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{
    Arg, Cmd, FromRedisValue, RedisError, Value,
    aio::{MultiplexedConnection, PubSub},
};
use tokio::{sync::Notify, time::timeout_at};

use super::{
    address::Address,
    gate::{Claim, Gate},
    reply::Reply,
    scripts::{LIBRARIES, Library, Script, VERSION},
};
use crate::{
    domain::Millis,
    metrics::StoreMetrics,
    store::StoreError,
    traces::{self, StoreCall},
};

/// All that a request may take, both tries and the way to a new connection.
pub const BUDGET: Duration = Duration::from_millis(750);
/// Who has answered within this time (ms) is there.
const LATELY: u64 = 200;
/// For so long the truest word about Redis's clock counts.
const CLOCK_WINDOW: Duration = Duration::from_secs(2);
/// What the first try may take of it.
const FIRST_TRY: Duration = Duration::from_millis(400);

/// Whether a script may still do its work after its caller has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeliness {
    /// Only as long as its caller waits.
    InTime,
    /// At any time: what it does is right whenever it happens.
    Whenever,
}

/// What became of a script.
pub enum Failure {
    /// It did not run.
    NotRun(StoreError),
    /// Nobody knows whether it ran.
    Unknown(StoreError),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotRun(error) | Failure::Unknown(error) => error,
        }
    }
}

/// A connection, with a number that tells it from its successors.
#[derive(Clone)]
struct Line {
    number: u64,
    connection: MultiplexedConnection,
}

pub struct Link {
    address: Address,
    library: Library,
    /// Of all keys; it tells a cluster where they belong, too.
    prefix: String,
    current: RwLock<Option<Line>>,
    lines: AtomicU64,
    /// Held while a connection is made; when that last failed.
    connecting: tokio::sync::Mutex<Option<Instant>>,
    /// Where a cluster said the keys are.
    moved: Mutex<Option<(String, u16)>>,
    started: Instant,
    /// Redis's clock minus ours (ms), as far as we know: answers take their time, so that the
    /// largest difference lately is the truest.
    offset: AtomicI64,
    /// Since when, and what it has been at most.
    lately: Mutex<(Instant, i64)>,
    is_open: AtomicBool,
    gate: Gate,
    /// When Redis last answered, on our clock (ms).
    heard: AtomicU64,
    /// Told when the circuit opens, or something is left to do.
    pub opened: Notify,
    pub metrics: StoreMetrics,
}

impl Link {
    pub fn new(address: Address, library: Library, prefix: &str, metrics: StoreMetrics) -> Self {
        metrics.circuit_open.set(1);
        Self {
            address,
            library,
            prefix: prefix.into(),
            current: RwLock::new(None),
            lines: AtomicU64::new(0),
            connecting: tokio::sync::Mutex::new(None),
            moved: Mutex::new(None),
            started: Instant::now(),
            offset: AtomicI64::new(0),
            lately: Mutex::new((Instant::now(), i64::MIN)),
            // Nothing is known of Redis yet.
            is_open: AtomicBool::new(true),
            gate: Gate::new(),
            heard: AtomicU64::new(0),
            opened: Notify::new(),
            metrics,
        }
    }

    pub fn is_up(&self) -> bool {
        !self.is_open.load(Ordering::Relaxed)
    }

    /// Lets requests through again.
    pub fn close_circuit(&self) {
        self.is_open.store(false, Ordering::Relaxed);
        self.metrics.circuit_open.set(0);
    }

    pub fn open_circuit(&self) {
        if !self.is_open.swap(true, Ordering::Relaxed) {
            self.metrics.circuit_open.set(1);
            tracing::error!("Redis does not answer; refusing at once until it does");
        }
        self.opened.notify_one();
    }

    /// Runs a script for a request: at once refused while the circuit is open.
    pub async fn run(
        &self,
        script: &Script,
        args: &[&str],
        timeliness: Timeliness,
    ) -> Result<Reply, Failure> {
        if !self.is_up() {
            self.traced(script.name).fail("unavailable");
            let error = StoreError::Unavailable("Redis is out".into());
            return Err(Failure::NotRun(error));
        }
        let Some(inside) = self.gate.enter(Claim::of(script)) else {
            self.metrics.failed(script.name);
            self.traced(script.name).fail("busy");
            return Err(Failure::NotRun(StoreError::Busy));
        };
        let outcome = self.attempt(script, args, timeliness).await;
        inside.done(outcome.is_ok());
        if let Err(
            Failure::Unknown(StoreError::Unavailable(_))
            | Failure::NotRun(StoreError::Unavailable(_)),
        ) = &outcome
        {
            self.open_circuit();
        }
        outcome
    }

    /// Runs a plain command of an observer: refused like its scripts.
    pub async fn observe<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, StoreError> {
        let inside = self.gate.enter(Claim::Observes).ok_or(StoreError::Busy)?;
        let outcome = self.command(command).await;
        inside.done(outcome.is_ok());
        outcome.map_err(|error| unavailable(&error))
    }

    /// How much Redis may be asked at once.
    pub fn bound(&self) -> usize {
        self.gate.bound()
    }

    /// Runs a script whatever the circuit says.
    pub async fn attempt(
        &self,
        script: &Script,
        args: &[&str],
        timeliness: Timeliness,
    ) -> Result<Reply, Failure> {
        let started = Instant::now();
        let mut call = self.traced(script.name);
        let outcome = self.try_twice(script, args, timeliness, started).await;
        match &outcome {
            Ok(_) => self.metrics.observe(script.name, started.elapsed()),
            Err(Failure::NotRun(error) | Failure::Unknown(error)) => {
                self.metrics.failed(script.name);
                call.fail(error.kind());
            }
        }
        outcome
    }

    /// Begins the span of a call.
    fn traced(&self, operation: &str) -> StoreCall {
        traces::store_call("redis", operation, self.address.place())
    }

    async fn try_twice(
        &self,
        script: &Script,
        args: &[&str],
        timeliness: Timeliness,
        started: Instant,
    ) -> Result<Reply, Failure> {
        let mut may_have_run = false;
        let mut last = StoreError::Unavailable("no answer in time".into());
        for limit in [FIRST_TRY, BUDGET] {
            let deadline = tokio::time::Instant::from_std(started + limit);
            let mut line = match timeout_at(deadline, self.line()).await {
                Ok(Ok(line)) => line,
                Ok(Err(error)) => {
                    last = unavailable(&error);
                    continue;
                }
                Err(_) => continue,
            };
            let not_after = match timeliness {
                Timeliness::Whenever => 0,
                Timeliness::InTime => self.redis_time(started + limit),
            };
            let sent =
                timeout_at(deadline, self.send(&mut line.connection, script, args, not_after))
                    .await;
            let error = match sent {
                Ok(Ok(value)) => {
                    let reply = Reply::new(value).map_err(|error| failure(true, error))?;
                    self.note_time(reply.time);
                    if reply.word != "late" {
                        return Ok(reply);
                    }
                    // Its clock is not where we thought; now we know where it is.
                    last = StoreError::Unavailable("the request came too late to Redis".into());
                    continue;
                }
                Ok(Err(error)) => error,
                Err(_) => io::Error::from(io::ErrorKind::TimedOut).into(),
            };
            last = unavailable(&error);
            match error.code() {
                Some(code) if is_elsewhere(code) => self.redirect(&line, &error),
                Some(_) => {
                    return Err(failure(may_have_run, StoreError::Failed(error.to_string())));
                }
                None => {
                    may_have_run = true;
                    let is_busy = error.is_timeout() && self.is_heard();
                    if !is_busy {
                        self.forget(&line);
                    }
                    if timeliness == Timeliness::InTime {
                        // What may still be on its way is waited out, on a line that is gone,
                        // too: coming later, it could undo what was done since.
                        tokio::time::sleep_until(deadline).await;
                    }
                    if is_busy {
                        // It is there, and has too much to do; a second try is more of it.
                        last = StoreError::Busy;
                        break;
                    }
                }
            }
        }
        Err(failure(may_have_run, last))
    }

    async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        script: &Script,
        args: &[&str],
        not_after: Millis,
    ) -> Result<Value, RedisError> {
        let mut call = redis::cmd("FCALL");
        call.arg(&script.function).arg(1).arg(&self.prefix).arg(not_after).arg(args);
        match call.query_async(connection).await {
            Err(error) if is_not_loaded(&error) => {
                self.load(connection).await?;
                call.query_async(connection).await
            }
            outcome => outcome,
        }
    }

    /// Gives Redis our library.
    async fn load(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let mut load = redis::cmd("FUNCTION");
        load.arg("LOAD").arg(&self.library.code);
        match load.exec_async(connection).await {
            // Another router was faster.
            Err(error) if error.detail().is_some_and(|it| it.contains("already exists")) => Ok(()),
            // No function of ours runs until there is room: as good as no Redis.
            Err(error) if error.code() == Some("OOM") => {
                Err(io::Error::other("Redis is full and takes no functions").into())
            }
            outcome => outcome,
        }
    }

    /// Takes the libraries of other versions out of Redis. A router that still runs
    /// one of them loads it again, which a full Redis would refuse: it must take ours.
    pub async fn tidy_libraries(&self) -> Result<(), RedisError> {
        let mut load = redis::cmd("FUNCTION");
        load.arg("LOAD").arg("REPLACE").arg(&self.library.code);
        self.command::<()>(&load).await?;
        let mut list = redis::cmd("FUNCTION");
        list.arg("LIST").arg("LIBRARYNAME").arg(format!("{LIBRARIES}*"));
        let libraries: Vec<HashMap<String, Value>> = self.command(&list).await?;
        for library in libraries {
            let name = library.get("library_name").map(String::from_redis_value_ref);
            if let Some(Ok(name)) = name
                && name != self.library.name
                && is_version(name.strip_prefix(LIBRARIES))
            {
                let mut delete = redis::cmd("FUNCTION");
                self.command::<()>(delete.arg("DELETE").arg(name)).await?;
            }
        }
        Ok(())
    }

    /// Runs a plain command. One that fails for want of a connection takes it
    /// along, so that the next finds Redis where it is by then.
    pub async fn command<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        let name = match command.args_iter().next() {
            Some(Arg::Simple(name)) => std::str::from_utf8(name).unwrap_or_default(),
            _ => "",
        };
        let mut call = self.traced(name);
        let outcome = self.send_command(command).await;
        if outcome.is_err() {
            call.fail("unavailable");
        }
        outcome
    }

    async fn send_command<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        let mut line = self.line().await?;
        let outcome = command.query_async(&mut line.connection).await;
        if let Err(error) = &outcome
            && error.code().is_none_or(is_elsewhere)
        {
            self.redirect(&line, error);
        }
        outcome
    }

    /// The connection there is, or a new one; whoever comes while it is made waits
    /// for the same.
    async fn line(&self) -> Result<Line, RedisError> {
        if let Some(line) = self.current() {
            return Ok(line);
        }
        let asked = Instant::now();
        let mut failed = self.connecting.lock().await;
        if let Some(line) = self.current() {
            return Ok(line);
        }
        if failed.is_some_and(|failed| failed > asked) {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        let connection = self.connect().await;
        *failed = connection.is_err().then(Instant::now);
        let connection = connection?;
        let line = Line { number: self.lines.fetch_add(1, Ordering::Relaxed), connection };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(line.clone());
        Ok(line)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let moved = self.moved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut connection = self.address.connect(moved).await?;
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
        self.begin_time(seconds * 1_000 + micros / 1_000);
        Ok(connection)
    }

    /// A connection of its own, for messages.
    pub async fn subscription(&self) -> Result<PubSub, RedisError> {
        self.address.subscription().await
    }

    fn current(&self) -> Option<Line> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets go of a connection that is of no use, unless another has taken its
    /// place already.
    fn forget(&self, line: &Line) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|other| other.number == line.number);
    }

    /// This is not, or no longer, where we can write.
    fn redirect(&self, line: &Line, error: &RedisError) {
        self.forget(line);
        let place = error.redirect_node().and_then(|(place, _)| place.rsplit_once(':'));
        if let Some((host, port)) = place
            && let Ok(port) = port.parse()
        {
            *self.moved.lock().unwrap_or_else(PoisonError::into_inner) = Some((host.into(), port));
        }
    }

    /// Whether Redis has answered anything lately.
    fn is_heard(&self) -> bool {
        let heard = self.heard.load(Ordering::Relaxed);
        self.started.elapsed().as_millis() as u64 - heard < LATELY
    }

    fn note_time(&self, redis: Millis) {
        let ours = self.started.elapsed().as_millis() as i64;
        self.heard.store(ours as u64, Ordering::Relaxed);
        let offset = redis as i64 - ours;
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, most) = &mut *lately;
        *most = offset.max(*most);
        if since.elapsed() > CLOCK_WINDOW {
            // A clock may have been set back.
            self.offset.store(*most, Ordering::Relaxed);
            (*since, *most) = (Instant::now(), offset);
        } else {
            self.offset.fetch_max(*most, Ordering::Relaxed);
        }
    }

    /// The same on a new connection: what was known may have been another's clock.
    fn begin_time(&self, redis: Millis) {
        let ours = self.started.elapsed().as_millis() as i64;
        self.heard.store(ours as u64, Ordering::Relaxed);
        let offset = redis as i64 - ours;
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        *lately = (Instant::now(), offset);
        self.offset.store(offset, Ordering::Relaxed);
    }

    /// What Redis's clock shows, if we have ever heard of it.
    pub fn time(&self) -> Option<Millis> {
        let has_heard = self.offset.load(Ordering::Relaxed) > 0;
        has_heard.then(|| self.redis_time(Instant::now()))
    }

    /// What Redis's clock will show at a moment of ours.
    fn redis_time(&self, at: Instant) -> Millis {
        let ours = at.duration_since(self.started).as_millis() as i64;
        u64::try_from(ours + self.offset.load(Ordering::Relaxed)).unwrap_or(0)
    }
}

fn failure(may_have_run: bool, error: StoreError) -> Failure {
    if may_have_run { Failure::Unknown(error) } else { Failure::NotRun(error) }
}

/// Whether a library is a version of ours, and not another's of a similar name.
fn is_version(name: Option<&str>) -> bool {
    name.is_some_and(|it| it.len() == VERSION && it.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Whether Redis does not have our library.
fn is_not_loaded(error: &RedisError) -> bool {
    error.code() == Some("ERR")
        && error.detail().is_some_and(|detail| detail.contains("Function not found"))
}

/// Errors of a server that is not, or not yet, the one to ask.
fn is_elsewhere(code: &str) -> bool {
    matches!(
        code,
        "READONLY"
            | "MOVED"
            | "ASK"
            | "LOADING"
            | "MASTERDOWN"
            | "CLUSTERDOWN"
            | "TRYAGAIN"
            | "NOREPLICAS"
            | "BUSY"
            | "MISCONF"
    )
}

fn unavailable(error: &RedisError) -> StoreError {
    StoreError::Unavailable(error.to_string())
}
