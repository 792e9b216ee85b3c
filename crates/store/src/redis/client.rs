//! The line to Redis: one multiplexed connection, found again when it is lost;
//! one retry; and a circuit breaker that answers at once while Redis is out.

use std::{
    collections::HashMap,
    io,
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
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
    clock::RedisClock,
    concurrency_limit::{Gate, Priority},
    errors::{Class, classify, is_not_loaded, reason, store_error},
    functions::{LIBRARIES, Library, Script, VERSION},
    reply::Reply,
};
use crate::{StoreError, StoreMetrics};
use fleet::Millis;
use spans::{self, StoreCall};

/// All that a request may take, both tries and the way to a new connection.
pub(super) const BUDGET: Duration = Duration::from_millis(750);
/// What the first try may take of it.
const FIRST_TRY: Duration = Duration::from_millis(400);

/// Whether a script may still do its work after its caller has given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timeliness {
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

pub(super) struct Link {
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
    pub clock: RedisClock,
    is_open: AtomicBool,
    /// Why Redis was last out of use, in a word.
    reason: Mutex<String>,
    gate: Gate,
    /// Told when the circuit opens, or something is left to do.
    pub opened: Notify,
    pub metrics: StoreMetrics,
}

impl Link {
    pub(super) fn new(
        address: Address,
        library: Library,
        prefix: &str,
        metrics: StoreMetrics,
    ) -> Self {
        metrics.circuit_open.set(1);
        Self {
            address,
            library,
            prefix: prefix.into(),
            current: RwLock::new(None),
            lines: AtomicU64::new(0),
            connecting: tokio::sync::Mutex::new(None),
            moved: Mutex::new(None),
            clock: RedisClock::new(),
            // Nothing is known of Redis yet.
            is_open: AtomicBool::new(true),
            reason: Mutex::new("unreachable".into()),
            gate: Gate::new(),
            opened: Notify::new(),
            metrics,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        !self.is_open.load(Ordering::Relaxed)
    }

    /// Lets requests through again.
    pub(super) fn close_circuit(&self) {
        self.is_open.store(false, Ordering::Relaxed);
        self.metrics.circuit_open.set(0);
    }

    pub(super) fn open_circuit(&self) {
        if !self.is_open.swap(true, Ordering::Relaxed) {
            self.metrics.circuit_open.set(1);
            tracing::error!(
                reason = self.reason(),
                "Redis cannot be used; the circuit breaker refuses requests until it can"
            );
        }
        self.opened.notify_one();
    }

    /// Remembers why Redis can't be used, for probes and the page.
    pub(super) fn note_reason(&self, reason: impl Into<String>) {
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason.into();
    }

    fn note_outage(&self, error: &RedisError) {
        self.note_reason(reason(error));
    }

    /// Why Redis can't be used, or could not last.
    pub(super) fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The answer to requests while the circuit is open.
    pub(super) fn out(&self) -> StoreError {
        StoreError::Unavailable(format!("Redis is out ({})", self.reason()))
    }

    /// Runs a script for a request: at once refused while the circuit is open.
    pub(super) async fn run(
        &self,
        script: &Script,
        args: &[&str],
        timeliness: Timeliness,
    ) -> Result<Reply, Failure> {
        if !self.is_up() {
            self.traced(script.name).fail("unavailable");
            return Err(Failure::NotRun(self.out()));
        }
        let Some(inside) = self.gate.enter(Priority::of(script)) else {
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
    pub(super) async fn observe<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, StoreError> {
        let inside = self.gate.enter(Priority::Observer).ok_or(StoreError::Busy)?;
        let outcome = self.command(command).await;
        inside.done(outcome.is_ok());
        outcome.map_err(|error| store_error(&error))
    }

    /// How much Redis may be asked at once.
    pub(super) fn bound(&self) -> usize {
        self.gate.bound()
    }

    /// Runs a script whatever the circuit says.
    pub(super) async fn attempt(
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
        spans::store_call("redis", operation, self.address.place())
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
                    last = StoreError::Unavailable(error.to_string());
                    continue;
                }
                Err(_) => continue,
            };
            let not_after = match timeliness {
                Timeliness::Whenever => 0,
                Timeliness::InTime => self.clock.at(started + limit),
            };
            let sent =
                timeout_at(deadline, self.send(&mut line.connection, script, args, not_after))
                    .await;
            let error = match sent {
                Ok(Ok(value)) => {
                    let reply = Reply::new(value).map_err(|error| failure(true, error))?;
                    self.clock.note(reply.time);
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
            last = store_error(&error);
            match classify(&error) {
                Class::Elsewhere => {
                    self.note_outage(&error);
                    self.redirect(&line, &error);
                }
                Class::Denied => {
                    // A command inside of the function may be denied after others have run.
                    self.note_outage(&error);
                    return Err(Failure::Unknown(last));
                }
                Class::Full | Class::Final => return Err(failure(may_have_run, last)),
                Class::Io => {
                    self.note_outage(&error);
                    may_have_run = true;
                    let is_busy = error.is_timeout() && self.clock.is_heard();
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
    pub(super) async fn tidy_libraries(&self) -> Result<(), RedisError> {
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
    pub(super) async fn command<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
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
            && let class @ (Class::Io | Class::Elsewhere | Class::Denied) = classify(error)
        {
            self.note_outage(error);
            if class != Class::Denied {
                self.redirect(&line, error);
            }
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
        let connection = connection.inspect_err(|error| self.note_outage(error))?;
        let line = Line { number: self.lines.fetch_add(1, Ordering::Relaxed), connection };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(line.clone());
        Ok(line)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let moved = self.moved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut connection = self.address.connect(moved).await?;
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
        self.clock.begin(seconds * 1_000 + micros / 1_000);
        Ok(connection)
    }

    /// A connection of its own, for messages.
    pub(super) async fn subscription(&self) -> Result<PubSub, RedisError> {
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
}

fn failure(may_have_run: bool, error: StoreError) -> Failure {
    if may_have_run { Failure::Unknown(error) } else { Failure::NotRun(error) }
}

/// Whether a library is a version of ours, and not another's of a similar name.
fn is_version(name: Option<&str>) -> bool {
    name.is_some_and(|it| it.len() == VERSION && it.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
