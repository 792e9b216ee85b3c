//! Random operations on a Redis store and on the fleet model: all replies, events and indexes must
//! agree.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use fleet::{
    CallLookup, CallQuery, Event, EventKind, Fleet, Millis, PodFacts, PodStatus,
    names::{CallSid, PodName},
    rules::CALL_HISTORY_TTL,
};
use store::{Functions, Redis, RedisConfig, Store, Ttls};

use testkit::{
    dice::Dice,
    operations::{
        LEASE_TTL, Operation, OutboundOperation, REREGISTRATION_WINDOW, all_reservation_ids, table,
    },
    redis::{RedisServer, store_config, unix_millis},
};

/// The pod of every call, which includes the pods that an operation has drawn.
pub(crate) async fn chosen(store: &Redis) -> Result<HashMap<CallSid, PodName>, String> {
    let pods = store.pods().await.map_err(|error| error.to_string())?;
    let calls = |pod: PodStatus| {
        let name = pod.name;
        pod.calls.into_iter().map(move |call| (call.call, name.clone()))
    };
    Ok(pods.into_iter().flat_map(calls).collect())
}

pub(crate) fn failed(error: store::StoreError) -> String {
    format!("the store failed: {error}")
}

macro_rules! same {
    ($what:expr, $redis:expr, $fleet:expr) => {{
        let (redis, fleet) = (&$redis, &$fleet);
        if redis != fleet {
            return Err(format!("{}: Redis {redis:?}, the fleet {fleet:?}", $what));
        }
    }};
}

/// The schema of the store during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schema {
    One,
    Two,
    /// Migrated to 2 and set back to 1 in turn.
    Changing,
}

/// A fleet and a Redis store that run the same operations.
pub(crate) struct Pair {
    pub(crate) server: RedisServer,
    pub(crate) store: Arc<Redis>,
    pub(crate) fleet: Fleet,
    pub(crate) plain: redis::Connection,
    pub(crate) now: u64,
    pub(crate) unswept: u32,
    /// The first event that was not compared yet, as a bound of XRANGE.
    pub(crate) next_event: String,
    pub(crate) schema: Schema,
    /// Records may have the field names of the other schema.
    pub(crate) has_mixed_records: bool,
    /// No reservation is granted, and observed pods are in service: the usual case of an allocation
    /// needs a store without reservations and pods whose facts are all defaults.
    pub(crate) is_inbound_only: bool,
}

impl Pair {
    pub(crate) async fn new(functions: Functions, schema: Schema) -> Self {
        let now = unix_millis();
        let server = RedisServer::with_frozen_clock(now);
        let mut plain = server.connection();
        let trusting_until = now + REREGISTRATION_WINDOW;
        if schema != Schema::Two {
            let mut begin = redis::pipe();
            begin.set("voice:schema", 1).set("voice:migration", "held");
            begin.hset("voice:tiers", ":trusting_until", trusting_until);
            begin.exec(&mut plain).unwrap();
        }
        let ttls = Ttls {
            lease: REREGISTRATION_WINDOW,
            draining: LEASE_TTL,
            call_info: LEASE_TTL,
            connect: None,
            poll_timeout: None,
        };
        let config = RedisConfig {
            ttls,
            functions,
            migration_quiet_period: Duration::from_millis(40),
            ..store_config(&server, table(0))
        };
        let store = Redis::start(config).unwrap();
        store.wait_until_available(Duration::from_secs(5)).await.unwrap();
        assert_eq!(store.outage(), None);
        let mut fleet = Fleet::new(table(0), trusting_until);
        fleet.enable_events();
        let (unswept, next_event, has_mixed_records) = (0, "-".into(), false);
        let mut pair = Self {
            server,
            store,
            fleet,
            plain,
            now,
            unswept,
            next_event,
            schema,
            has_mixed_records,
            is_inbound_only: false,
        };
        // The first event is that of the tiers, with which the fleet was created.
        pair.take_events().unwrap();
        pair
    }

    /// Runs one operation on both sides. Returns its description.
    async fn step(&mut self, dice: &mut Dice) -> Result<String, String> {
        let mut operation = dice.operation(&mut self.fleet, self.now);
        if let (Operation::Observe { facts, .. }, true) = (&mut operation, self.is_inbound_only) {
            *facts = PodFacts {
                ready: true,
                terminating: false,
                at_risk: false,
                pin: None,
                ..facts.clone()
            };
        }
        match &operation {
            Operation::Observe { .. } | Operation::Remove { .. } | Operation::Move { .. } => {
                self.write_pod(&operation).await?;
            }
            Operation::Advance { time } => self.advance(*time).await?,
            Operation::Outbound(OutboundOperation::Reserve(_)) if self.is_inbound_only => {}
            // Redis places the pods of a new table one by one. While slots are held, the pod that
            // opens a pool to waiting calls depends on that order.
            Operation::Tiers { .. } if self.has_held_slots_and_waiting_calls() => {}
            _ => self.run(&operation).await?,
        }
        Ok(format!("{operation:?}"))
    }

    /// Begins or ends a time without reservations, in turns with an exclusive and a shared first
    /// tier; gives the outstanding reservations back.
    async fn set_inbound_only(&mut self, turn: usize) -> Result<(), String> {
        self.is_inbound_only = turn % 2 == 1;
        if !self.is_inbound_only {
            return Ok(());
        }
        for id in all_reservation_ids() {
            self.run(&Operation::Outbound(OutboundOperation::GiveBack { id })).await?;
            self.events_agree()?;
        }
        // Pods of a new table that free slots for waiting calls have no defined order.
        if self.fleet.status().waiting > 0 {
            return Ok(());
        }
        let tiers = table([EXCLUSIVE_FIRST, SHARED_FIRST][turn / 2 % 2]);
        self.run(&Operation::Tiers { tiers, expected: None }).await
    }

    fn has_held_slots_and_waiting_calls(&self) -> bool {
        self.fleet.outbound_status().reservations > 0 && self.fleet.status().waiting > 0
    }

    /// Advances the clock, with sweeps often enough that no key expires before its deadline is
    /// swept.
    async fn advance(&mut self, time: Millis) -> Result<(), String> {
        self.now += time;
        self.server.set_time(self.now);
        self.unswept += 1;
        if self.unswept.is_multiple_of(8) {
            let swept = self.store.sweep(100).await.map_err(failed)?;
            self.fleet.prefer(chosen(&self.store).await?);
            same!("sweep of all", swept, self.fleet.sweep(100, self.now));
        }
        Ok(())
    }

    /// Advances the clock to shortly before the end of the call history, so that the following
    /// operations cross it. In steps, with a sweep before keys expire.
    async fn advance_to_end_of_history(&mut self, dice: &mut Dice) -> Result<(), String> {
        const STEP: Millis = 15_000;
        let steps = CALL_HISTORY_TTL / STEP - dice.roll(3) as Millis;
        for _ in 0..steps {
            self.now += STEP;
            self.server.set_time(self.now);
            let swept = self.store.sweep(100).await.map_err(failed)?;
            self.fleet.prefer(chosen(&self.store).await?);
            same!("sweep", swept, self.fleet.sweep(100, self.now));
            self.events_agree()?;
        }
        Ok(())
    }

    /// Reads the events that were not compared yet.
    fn take_events(&mut self) -> Result<Vec<Event>, String> {
        let mut range = redis::cmd("XRANGE");
        let entries: Vec<(String, Vec<String>)> = range
            .arg("voice:events")
            .arg(&self.next_event)
            .arg("+")
            .query(&mut self.plain)
            .map_err(|error| error.to_string())?;
        if let Some((last, _)) = entries.last() {
            self.next_event = format!("({last}");
        }
        let read = |(_, fields): &(String, Vec<String>)| Event::read(&fields[0], &fields[1]);
        let malformed = |entry| format!("malformed event: {entry:?}");
        entries.iter().map(|entry| read(entry).ok_or_else(|| malformed(entry))).collect()
    }

    /// Compares the events. An operation on all pods has no defined order.
    pub(crate) fn events_agree(&mut self) -> Result<(), String> {
        let mut redis = self.take_events()?;
        let mut fleet = self.fleet.take_events();
        if redis.iter().filter(|event| event.kind == EventKind::Moved).count() > 1 {
            redis.sort();
            fleet.sort();
        }
        same!("events", redis, fleet);
        Ok(())
    }

    async fn indexes_agree(&mut self) -> Result<(), String> {
        let status = self.store.status().await.map_err(|error| error.to_string())?;
        same!("status", status, self.fleet.status());
        let pods = self.store.pods().await.map_err(|error| error.to_string())?;
        same!("pods", pods, self.fleet.pods());
        Ok(())
    }

    /// Compares all calls and the pages of queries.
    async fn calls_agree(&mut self) -> Result<(), String> {
        for number in 0..14 {
            let call: CallSid = format!("c{number}").parse().unwrap();
            let found = self.store.call(&call).await.map_err(|error| error.to_string())?;
            same!(format!("call {call}"), found, self.fleet.find(&call));
        }
        for number in (0..12).filter(|it| it % 4 == self.now as usize % 4) {
            let query = CallQuery {
                waiting: number % 3 == 0,
                pool: (number % 4 == 1).then(|| "pool:gold".parse().unwrap()),
                merchant: (number % 2 == 1).then(|| "m1".parse().unwrap()),
                pod: (number > 9).then(|| "p-1".parse().unwrap()),
                after: None,
                limit: 1 + number % 5,
            };
            let ours = self.fleet.calls(&CallQuery { limit: usize::MAX, ..query.clone() });
            same!(format!("{query:?}"), self.all_calls(query.clone()).await?, ours.calls);
        }
        let merchants = self.store.merchants(None, 100).await.map_err(|it| it.to_string())?;
        same!("merchants", merchants, self.fleet.merchants(None, 100));
        self.capacity_agrees().await?;
        self.outbound_agrees().await?;
        Ok(())
    }

    /// All pages of a query.
    async fn all_calls(&self, mut query: CallQuery) -> Result<Vec<CallLookup>, String> {
        let mut all = Vec::new();
        loop {
            let page = self.store.calls(&query).await.map_err(|error| error.to_string())?;
            if page.calls.len() > query.limit {
                return Err(format!("a page exceeds its limit: {query:?}"));
            }
            all.extend(page.calls);
            if page.next.is_none() {
                return Ok(all);
            }
            query.after = page.next;
        }
    }
}

/// Runs operations on a new pair. Returns the first disagreement, with the operations before it. A
/// run in which Redis did not reply in time, on a busy machine, is repeated.
pub(crate) async fn compare(
    seed: u64,
    operations: usize,
    functions: impl Fn() -> Functions,
    schema: Schema,
) -> Result<(), String> {
    for _ in 0..5 {
        match compare_once(seed, operations, functions(), schema).await {
            Err(error) if TIMEOUTS.iter().any(|it| error.contains(it)) => {
                println!("repeating the run: {error}")
            }
            outcome => return outcome,
        }
    }
    Err(format!("seed {seed}: Redis does not reply in time"))
}

/// Parts of the errors of a store that does not reply in time.
pub(crate) const TIMEOUTS: [&str; 2] = ["the store is unavailable", "the store is overloaded"];

/// A request that takes this long may have run twice: the reply of its first try was late. The
/// second reply of a release or a detach, for example, differs from the first.
const FIRST_TRY: Duration = Duration::from_millis(300);
/// Operations between two ends of the call history.
const HISTORY_INTERVAL: usize = 2_000;
/// Operations between two changes of the schema.
const SCHEMA_INTERVAL: usize = 300;
/// Tables whose default chain begins with an exclusive and with a shared tier.
const EXCLUSIVE_FIRST: usize = 0;
const SHARED_FIRST: usize = 2;
/// Operations with reservations, and then without.
const OUTBOUND_INTERVAL: usize = 250;
/// Operations with records of one schema, and then with records of both.
const MIXED_INTERVAL: usize = 100;

async fn compare_once(
    seed: u64,
    operations: usize,
    functions: Functions,
    schema: Schema,
) -> Result<(), String> {
    let mut dice = Dice(seed);
    let mut pair = Pair::new(functions, schema).await;
    let mut history = Vec::new();
    for number in 0..operations {
        if schema == Schema::Changing && number % SCHEMA_INTERVAL == SCHEMA_INTERVAL / 2 {
            pair.change_schema().await;
        }
        pair.mix_records(number, MIXED_INTERVAL);
        if number % OUTBOUND_INTERVAL == 0 {
            pair.set_inbound_only(number / OUTBOUND_INTERVAL).await?;
        }
        let mut was_repeated = false;
        let stepped = match number % HISTORY_INTERVAL {
            number if number + 1 == HISTORY_INTERVAL => {
                pair.advance_to_end_of_history(&mut dice).await.map(|()| "end of history".into())
            }
            _ => {
                let started = Instant::now();
                let stepped = pair.step(&mut dice).await;
                was_repeated = started.elapsed() >= FIRST_TRY;
                stepped
            }
        };
        let agreed = match stepped.and_then(|done| pair.events_agree().map(|()| done)) {
            Ok(done) => {
                history.push(done);
                match number % 15 {
                    0 => match pair.calls_agree().await.and_then(|()| pair.keys_agree()) {
                        Ok(()) => pair.indexes_agree().await,
                        Err(error) => Err(error),
                    },
                    number if number % 3 == 0 => pair.indexes_agree().await,
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(mut error) = agreed {
            if was_repeated {
                error = format!("{}, a request may have run twice: {error}", TIMEOUTS[1]);
            }
            let tail = history[history.len().saturating_sub(12)..].join("\n  ");
            pair.store.close().await;
            return Err(format!("seed {seed}, operation {number}: {error}\nafter\n  {tail}"));
        }
    }
    pair.store.close().await;
    Ok(())
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_functions_and_the_model_agree() {
    let (seed, operations) =
        (number("DIFFERENTIAL_SEED", unix_millis()), number("DIFFERENTIAL_OPS", 20_000));
    println!("DIFFERENTIAL_SEED={seed} DIFFERENTIAL_OPS={operations}");
    let schemas = [Schema::Two, Schema::One, Schema::Changing, Schema::Two];
    let count = operations as usize / schemas.len();
    let compared = schemas
        .into_iter()
        .zip(seed..)
        .map(|(schema, seed)| tokio::spawn(compare(seed, count, Functions::default, schema)));
    for pair in compared.collect::<Vec<_>>() {
        pair.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
    }
}
