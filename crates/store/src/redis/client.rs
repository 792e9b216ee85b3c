//! The Redis client: one multiplexed connection that is re-established when it breaks, retries,
//! a concurrency limit, and a circuit breaker that refuses requests while Redis is unavailable.

use std::{
    io,
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use redis::{
    Arg, Cmd, FromRedisValue, RedisError, Value,
    aio::{MultiplexedConnection, PubSub},
};
use tokio::{sync::Notify, time::timeout_at};

use super::{
    address::Address,
    clock::RedisClock,
    concurrency_limit::{ConcurrencyLimit, Priority},
    errors::{Class, classify, is_not_loaded, reason, store_error},
    functions::{Function, Library},
    reply::FunctionReply,
    retry::{Action, Deadline, Event, Retry},
};
use crate::{StoreError, StoreMetrics};
use fleet::Millis;
use spans::{self, StoreSpan};

/// A failed run of a Redis function.
pub enum Failure {
    /// It did not run.
    NotRun(StoreError),
    /// It may have run.
    Unknown(StoreError),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotRun(error) | Failure::Unknown(error) => error,
        }
    }
}

/// A connection, with an id that distinguishes it from its successors.
#[derive(Clone)]
struct Connection {
    id: u64,
    multiplexed: MultiplexedConnection,
}

pub(super) struct RedisClient {
    address: Address,
    /// Prefix of all keys; a cluster derives their slot from it.
    prefix: String,
    current: RwLock<Option<Connection>>,
    next_connection_id: AtomicU64,
    /// Held while connecting; the time of the last failure.
    connecting: tokio::sync::Mutex<Option<Instant>>,
    /// Endpoint of the last MOVED reply of a cluster.
    moved: Mutex<Option<(String, u16)>>,
    pub(super) clock: RedisClock,
    is_circuit_open: AtomicBool,
    /// Cause of the last outage, in a word.
    reason: Mutex<String>,
    concurrency_limit: ConcurrencyLimit,
    /// Wakes the maintenance task: the circuit opened, or deferred writes were enqueued.
    pub(super) maintenance_due: Notify,
    pub(super) metrics: StoreMetrics,
}

impl RedisClient {
    pub(super) fn new(address: Address, prefix: &str, metrics: StoreMetrics) -> Self {
        metrics.circuit_open.set(1);
        Self {
            address,
            prefix: prefix.into(),
            current: RwLock::new(None),
            next_connection_id: AtomicU64::new(0),
            connecting: tokio::sync::Mutex::new(None),
            moved: Mutex::new(None),
            clock: RedisClock::new(),
            // Open until the first recovery.
            is_circuit_open: AtomicBool::new(true),
            reason: Mutex::new("unreachable".into()),
            concurrency_limit: ConcurrencyLimit::new(),
            maintenance_due: Notify::new(),
            metrics,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        !self.is_circuit_open.load(Ordering::Relaxed)
    }

    /// Lets requests through.
    pub(super) fn close_circuit(&self) {
        self.is_circuit_open.store(false, Ordering::Relaxed);
        self.metrics.circuit_open.set(0);
    }

    pub(super) fn open_circuit(&self) {
        if !self.is_circuit_open.swap(true, Ordering::Relaxed) {
            self.metrics.circuit_open.set(1);
            tracing::error!(
                reason = self.reason(),
                "Redis cannot be used; the circuit breaker refuses requests until it can"
            );
        }
        self.maintenance_due.notify_one();
    }

    /// Records the cause of an outage, for probes and the dashboard.
    pub(super) fn record_reason(&self, reason: impl Into<String>) {
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason.into();
    }

    fn record_outage(&self, error: &RedisError) {
        self.record_reason(reason(error));
    }

    /// The cause of the current or last outage.
    pub(super) fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The error of requests while the circuit is open.
    pub(super) fn unavailable(&self) -> StoreError {
        StoreError::Unavailable(format!("the circuit breaker is open ({})", self.reason()))
    }

    /// Runs a Redis function for a request. Refuses it while the circuit is open or the concurrency
    /// limit is reached.
    pub(super) async fn run(
        &self,
        function: &Function,
        args: &[&str],
        deadline: Deadline,
    ) -> Result<FunctionReply, Failure> {
        if !self.is_up() {
            self.begin_span(function.name).fail("unavailable");
            return Err(Failure::NotRun(self.unavailable()));
        }
        let Some(permit) = self.concurrency_limit.acquire(Priority::of(function)) else {
            self.metrics.failed(function.name);
            self.begin_span(function.name).fail("busy");
            return Err(Failure::NotRun(StoreError::Busy));
        };
        let outcome = self.run_unchecked(function, args, deadline).await;
        permit.finish(outcome.is_ok());
        if let Err(
            Failure::Unknown(StoreError::Unavailable(_))
            | Failure::NotRun(StoreError::Unavailable(_)),
        ) = &outcome
        {
            self.open_circuit();
        }
        outcome
    }

    /// Runs a plain command of an observer, within the concurrency limit.
    pub(super) async fn observe<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, StoreError> {
        let permit = self.concurrency_limit.acquire(Priority::Observer).ok_or(StoreError::Busy)?;
        let outcome = self.command(command).await;
        permit.finish(outcome.is_ok());
        outcome.map_err(|error| store_error(&error))
    }

    /// The current concurrency limit.
    pub(super) fn concurrency_limit(&self) -> usize {
        self.concurrency_limit.current()
    }

    /// Runs a Redis function regardless of circuit breaker and concurrency limit.
    pub(super) async fn run_unchecked(
        &self,
        function: &Function,
        args: &[&str],
        deadline: Deadline,
    ) -> Result<FunctionReply, Failure> {
        let started = Instant::now();
        let mut span = self.begin_span(function.name);
        let outcome = self.run_with_retry(function, args, deadline, started).await;
        match &outcome {
            Ok(_) => self.metrics.observe(function.name, started.elapsed()),
            Err(Failure::NotRun(error) | Failure::Unknown(error)) => {
                self.metrics.failed(function.name);
                span.fail(error.kind());
            }
        }
        outcome
    }

    fn begin_span(&self, operation: &str) -> StoreSpan {
        spans::store_span("redis", operation, self.address.endpoint())
    }

    /// Drives the retry protocol of one request.
    async fn run_with_retry(
        &self,
        function: &Function,
        args: &[&str],
        deadline: Deadline,
        started: Instant,
    ) -> Result<FunctionReply, Failure> {
        let (mut retry, mut action) = Retry::start(deadline);
        let mut last_error = None;
        loop {
            let event = match action {
                Action::Send { until, not_after } => {
                    let not_after = not_after.map(|not_after| started + not_after);
                    match self.try_once(function, args, started + until, not_after).await {
                        Ok(reply) => return Ok(reply),
                        Err((event, error)) => {
                            last_error = error.or(last_error);
                            event
                        }
                    }
                }
                Action::Wait { until } => {
                    tokio::time::sleep_until((started + until).into()).await;
                    Event::Waited
                }
                Action::GiveUp { may_have_run } => {
                    let timeout = || StoreError::Unavailable("no reply in time".into());
                    let error = last_error.unwrap_or_else(timeout);
                    return Err(match may_have_run {
                        true => Failure::Unknown(error),
                        false => Failure::NotRun(error),
                    });
                }
            };
            action = retry.on(event);
        }
    }

    /// One try of a request. The error is missing if no connection was available in time.
    async fn try_once(
        &self,
        function: &Function,
        args: &[&str],
        until: Instant,
        not_after: Option<Instant>,
    ) -> Result<FunctionReply, (Event, Option<StoreError>)> {
        let mut connection = match timeout_at(until.into(), self.connection()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => {
                let error = StoreError::Unavailable(error.to_string());
                return Err((Event::NotSent, Some(error)));
            }
            Err(_) => return Err((Event::NotSent, None)),
        };
        // After connecting, which synchronizes the clock.
        let not_after = not_after.map_or(0, |not_after| self.clock.at(not_after));
        let sent = self.send(&mut connection.multiplexed, function, args, not_after);
        let error = match timeout_at(until.into(), sent).await {
            Ok(Ok(value)) => {
                let reply = FunctionReply::new(value)
                    .map_err(|error| (Event::FailedMidway, Some(error)))?;
                self.clock.record(reply.time);
                if reply.word != "late" {
                    return Ok(reply);
                }
                // The clock estimate was wrong; this reply has corrected it.
                let error = "Redis received the request after its deadline";
                return Err((Event::Expired, Some(StoreError::Unavailable(error.into()))));
            }
            Ok(Err(error)) => error,
            Err(_) => io::Error::from(io::ErrorKind::TimedOut).into(),
        };
        let class = classify(&error);
        if matches!(class, Class::Redirect | Class::Denied | Class::Io) {
            self.record_outage(&error);
        }
        let event = match class {
            Class::Redirect => {
                self.redirect(&connection, &error);
                Event::Redirected
            }
            // A command inside the function may be denied after others have run.
            Class::Denied => Event::FailedMidway,
            Class::Full | Class::Permanent => Event::Refused,
            Class::Io => {
                let is_overloaded = error.is_timeout() && self.clock.has_recent_reply();
                if is_overloaded {
                    return Err((Event::NoReply { is_overloaded }, Some(StoreError::Busy)));
                }
                self.discard(&connection);
                Event::NoReply { is_overloaded }
            }
        };
        Err((event, Some(store_error(&error))))
    }

    async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        function: &Function,
        args: &[&str],
        not_after: Millis,
    ) -> Result<Value, RedisError> {
        let mut call = redis::cmd("FCALL");
        call.arg(&function.function).arg(1).arg(&self.prefix).arg(not_after).arg(args);
        match call.query_async(connection).await {
            Err(error) if is_not_loaded(&error) => {
                load(connection, &function.library).await?;
                call.query_async(connection).await
            }
            outcome => outcome,
        }
    }

    /// Runs a plain command. Discards a broken connection, so that the next request reconnects.
    pub(super) async fn command<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        let name = match command.args_iter().next() {
            Some(Arg::Simple(name)) => std::str::from_utf8(name).unwrap_or_default(),
            _ => "",
        };
        let mut span = self.begin_span(name);
        let outcome = self.send_command(command).await;
        if outcome.is_err() {
            span.fail("unavailable");
        }
        outcome
    }

    async fn send_command<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        let mut connection = self.connection().await?;
        let outcome = command.query_async(&mut connection.multiplexed).await;
        if let Err(error) = &outcome
            && let class @ (Class::Io | Class::Redirect | Class::Denied) = classify(error)
        {
            self.record_outage(error);
            if class != Class::Denied {
                self.redirect(&connection, error);
            }
        }
        outcome
    }

    /// The current connection, or a new one. Concurrent requests share one connection attempt.
    async fn connection(&self) -> Result<Connection, RedisError> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let requested_at = Instant::now();
        let mut failed = self.connecting.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if failed.is_some_and(|failed| failed > requested_at) {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        let multiplexed = self.connect().await;
        *failed = multiplexed.is_err().then(Instant::now);
        let multiplexed = multiplexed.inspect_err(|error| self.record_outage(error))?;
        let id = self.next_connection_id.fetch_add(1, Ordering::Relaxed);
        let connection = Connection { id, multiplexed };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(connection.clone());
        Ok(connection)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let moved = self.moved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut connection = self.address.connect(moved).await?;
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
        self.clock.reset(seconds * 1_000 + micros / 1_000);
        Ok(connection)
    }

    /// Opens a separate connection for messages.
    pub(super) async fn subscription(&self) -> Result<PubSub, RedisError> {
        self.address.subscription().await
    }

    fn current(&self) -> Option<Connection> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drops a broken connection, unless it was replaced already.
    fn discard(&self, connection: &Connection) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|other| other.id == connection.id);
    }

    /// Leaves a server that does not accept writes, for the endpoint it names, if any.
    fn redirect(&self, connection: &Connection, error: &RedisError) {
        self.discard(connection);
        let endpoint = error.redirect_node().and_then(|(node, _)| node.rsplit_once(':'));
        if let Some((host, port)) = endpoint
            && let Ok(port) = port.parse()
        {
            *self.moved.lock().unwrap_or_else(PoisonError::into_inner) = Some((host.into(), port));
        }
    }
}

/// Loads a function library that Redis does not have.
async fn load(connection: &mut MultiplexedConnection, library: &Library) -> Result<(), RedisError> {
    let mut load = redis::cmd("FUNCTION");
    load.arg("LOAD").arg(&library.code);
    match load.exec_async(connection).await {
        // Another router has loaded it meanwhile.
        Err(error) if error.detail().is_some_and(|it| it.contains("already exists")) => Ok(()),
        // No function runs until memory is freed: an outage.
        Err(error) if error.code() == Some("OOM") => {
            Err(io::Error::other("Redis is out of memory and cannot load the function library")
                .into())
        }
        outcome => outcome,
    }
}
