//! The cost of the Redis functions must not grow with pods or calls: neither in commands nor, by
//! orders of magnitude, in time.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use fleet::{
    Allocate, CallQuery, Edit, Hold, Release, ReservationQuery, Reserve,
    names::{CallSid, PodName, ReservationId},
    tiers::{DocumentSource, Tiers},
};
use futures_util::future::join_all;
use store::{Functions, OutboundStore, Redis, RedisConfig, Store, StoreError};

use testkit::redis::{RedisServer, WRITER, ready_pod, store_config};

const FEW_PODS: usize = 50;
const MANY_PODS: usize = 50_000;
const MAX_PODS: usize = 100_000;
const MANY_CALLS: usize = 100_000;
const CONCURRENCY: usize = 200;
const ROUNDS: usize = 60;
/// Largest factor in the time that Redis measures: a command that reads a whole key counts as one
/// command, and only its time shows it. Linear growth would be at least a hundredfold here; this
/// much may be noise of a busy machine.
const MAX_TIME_FACTOR: f64 = 5.0;
/// Additional commands that depend on the states of pods, not on their number.
const MAX_EXTRA_COMMANDS: f64 = 10.0;
/// Most commands of one step, which blocks Redis.
const MAX_STEP_COMMANDS: f64 = 2_000.0;

/// Average cost of a function: its commands, which are the same on every machine, and their time
/// (µs), which shows the cost of a command on a large key.
#[derive(Debug, Clone, Copy)]
struct Cost {
    commands: f64,
    time: f64,
}

struct GrowingStore {
    server: RedisServer,
    store: Arc<Redis>,
    next: usize,
    /// Live and waiting calls in order of arrival.
    live: VecDeque<CallSid>,
    waiting: VecDeque<CallSid>,
}

/// Retries an operation that the store sheds or that times out on a busy machine.
async fn retry<T>(operation: impl AsyncFn() -> Result<T, StoreError>) -> T {
    for _ in 0..10_000 {
        match operation().await {
            Err(StoreError::Busy | StoreError::Unavailable(_)) => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            answer => return answer.unwrap(),
        }
    }
    panic!("the store does not accept the operation");
}

fn tiers(strategy: &str) -> Tiers {
    let text = format!(
        r#"{{"basic": {{"type": "shared", "target": 1, "max_concurrent": 200, "strategy": "{strategy}"}}}}"#
    );
    Tiers::parse(&text, DocumentSource::Settings).unwrap().0
}

impl GrowingStore {
    async fn new(pods: usize) -> Self {
        Self::with_functions(pods, Functions::default()).await
    }

    async fn with_functions(pods: usize, functions: Functions) -> Self {
        let server = RedisServer::start(&[]);
        let config = RedisConfig { functions, ..store_config(&server, tiers("spread")) };
        let store = Redis::start(config).unwrap();
        store.wait_until_available(Duration::from_secs(5)).await.unwrap();
        let (live, waiting) = Default::default();
        let store = Self { server, store, next: 0, live, waiting };
        store.fill(0, pods).await;
        store
    }

    async fn apply(&self, tiers: &Tiers) {
        retry(async || self.store.apply_tiers(tiers, Edit::ANY).await).await.unwrap();
    }

    async fn fill(&self, from: usize, to: usize) {
        let facts = ready_pod();
        let names: Vec<PodName> =
            (from..to).map(|number| format!("voice-agent-{number}").parse().unwrap()).collect();
        for batch in names.chunks(CONCURRENCY) {
            let writes = batch
                .iter()
                .map(|name| retry(async || self.store.observe_pod(name, &facts, WRITER).await));
            for observed in join_all(writes).await {
                observed.unwrap();
            }
        }
    }

    async fn allocate(&mut self, count: usize, lease_ttl: u64) -> Vec<CallSid> {
        let numbers = self.next..self.next + count;
        self.next += count;
        let calls: Vec<CallSid> =
            numbers.map(|number| format!("CA{number:032}").parse().unwrap()).collect();
        for batch in calls.chunks(CONCURRENCY) {
            let requests: Vec<Allocate> =
                batch.iter().map(|call| Allocate::new(call.clone(), None, lease_ttl)).collect();
            let replies =
                requests.iter().map(|request| retry(async || self.store.allocate(request).await));
            for given in join_all(replies).await {
                given.unwrap();
            }
        }
        calls
    }

    async fn release(&self, calls: Vec<CallSid>) {
        let requests: Vec<Release> =
            calls.into_iter().map(|call| Release::new(call, None)).collect();
        for batch in requests.chunks(CONCURRENCY) {
            let replies =
                batch.iter().map(|request| retry(async || self.store.release(request).await));
            // A release that is shed is deferred; its retry may find no call.
            join_all(replies).await;
        }
    }

    /// The average cost of a function since the last reset.
    fn cost(&self) -> Cost {
        let info: String =
            redis::cmd("INFO").arg("commandstats").query(&mut self.server.connection()).unwrap();
        let (mut functions, mut commands, mut time) = (0.0, 0.0, 0.0);
        for line in info.lines().filter_map(|line| line.strip_prefix("cmdstat_")) {
            let (name, stats) = line.split_once(':').unwrap();
            let field = |name: &str| -> f64 {
                let mut fields = stats.split(',').filter_map(|field| field.split_once('='));
                fields.find(|(other, _)| *other == name).unwrap().1.parse().unwrap()
            };
            match name {
                "fcall" => (functions, time) = (field("calls"), field("usec")),
                "info" | "config|resetstat" => {}
                _ => commands += field("calls"),
            }
        }
        Cost { commands: commands / functions, time: time / functions }
    }

    fn reset(&self) {
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.server.connection()).unwrap();
    }

    /// The cost of an allocation, as the average of a batch.
    async fn allocation_cost(&mut self) -> Cost {
        self.reset();
        let calls = self.allocate(CONCURRENCY, 900_000).await;
        let cost = self.cost();
        self.release(calls).await;
        cost
    }

    fn new_calls(&mut self, count: usize) -> Vec<CallSid> {
        let numbers = self.next..self.next + count;
        self.next += count;
        numbers.map(|number| format!("CA{number:032}").parse().unwrap()).collect()
    }

    /// Requests pods, with a hold time. Returns the number of calls with a pod.
    async fn request_pods(&self, calls: &[CallSid]) -> usize {
        let hold = Hold {
            time: 900_000,
            poll_timeout: 900_000,
            max_waiting: 100_000,
            max_waiting_per_merchant: 100_000,
        };
        let mut given = 0;
        for batch in calls.chunks(CONCURRENCY) {
            let requests: Vec<Allocate> = batch
                .iter()
                .map(|call| Allocate {
                    hold: Some(hold),
                    ..Allocate::new(call.clone(), None, 900_000)
                })
                .collect();
            let replies =
                requests.iter().map(|request| retry(async || self.store.allocate(request).await));
            given += join_all(replies).await.into_iter().filter(Result::is_ok).count();
        }
        given
    }

    /// Allocates all pods and fills the queue.
    async fn fill_queue(&mut self, pods: usize, waiting: usize) {
        let live = self.new_calls(pods);
        assert_eq!(self.request_pods(&live).await, pods);
        self.live.extend(live);
        let calls = self.new_calls(waiting);
        for call in &calls {
            // One after the other, for a defined order.
            assert_eq!(self.request_pods(std::slice::from_ref(call)).await, 0);
        }
        self.waiting.extend(calls);
    }

    /// The cost of a release. If calls wait, each release hands its pod off to the first of them, and
    /// another call is queued.
    async fn release_cost(&mut self) -> Cost {
        let released: Vec<CallSid> = self.live.drain(..CONCURRENCY).collect();
        self.reset();
        self.release(released).await;
        let cost = self.cost();
        let has_queue = !self.waiting.is_empty();
        let count = CONCURRENCY.min(self.waiting.len());
        let mut served: Vec<CallSid> = self.waiting.drain(..count).collect();
        if !has_queue {
            served = self.new_calls(CONCURRENCY);
        }
        assert_eq!(self.request_pods(&served).await, served.len(), "calls are served in order");
        self.live.extend(served);
        if has_queue {
            for call in self.new_calls(CONCURRENCY) {
                assert_eq!(self.request_pods(std::slice::from_ref(&call)).await, 0);
                self.waiting.push_back(call);
            }
        }
        cost
    }

    /// Reserves capacity for dials, one per request. Returns the ids.
    async fn reserve(&mut self, count: usize) -> Vec<ReservationId> {
        let numbers = self.next..self.next + count;
        self.next += count;
        let requests: Vec<Reserve> = numbers.map(dial).collect();
        for batch in requests.chunks(CONCURRENCY) {
            let replies =
                batch.iter().map(|request| retry(async || self.store.reserve(request).await));
            for reserved in join_all(replies).await {
                assert_eq!(reserved.granted.len(), 1, "{:?}", reserved.limit);
            }
        }
        requests.into_iter().flat_map(|request| request.ids).collect()
    }

    async fn give_back(&self, ids: Vec<ReservationId>) {
        for batch in ids.chunks(CONCURRENCY) {
            let replies = batch.iter().map(|id| retry(async || self.store.give_back(id).await));
            join_all(replies).await;
        }
    }

    /// The cost of a grant, as the average of a batch.
    async fn grant_cost(&mut self) -> Cost {
        self.reset();
        let ids = self.reserve(CONCURRENCY).await;
        let cost = self.cost();
        self.give_back(ids).await;
        cost
    }

    /// The cost of the end of a reservation, as the average of a batch.
    async fn give_back_cost(&mut self) -> Cost {
        let ids = self.reserve(CONCURRENCY).await;
        self.reset();
        self.give_back(ids).await;
        self.cost()
    }

    /// The cost of a sweep that ends one call, as the average of several: a single one would measure
    /// the wake-up of Redis.
    async fn sweep_cost(&mut self) -> Cost {
        const EXPIRED: usize = 40;
        self.allocate(EXPIRED, 1).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
        self.reset();
        for _ in 0..EXPIRED {
            assert_eq!(retry(async || self.store.sweep(1).await).await.expired.len(), 1);
        }
        self.cost()
    }

    /// Reads pages of calls: of all calls, and of a pool without calls, for which each page scans as
    /// many entries as it may.
    async fn list_calls(&self) {
        let mut query = CallQuery { limit: 50, ..CallQuery::default() };
        for pool in [None, Some("nowhere".parse().unwrap())] {
            (query.pool, query.after) = (pool, None);
            for _ in 0..3 {
                let page = retry(async || self.store.calls(&query).await).await;
                query.after = Some(page.next.expect("another page follows"));
            }
        }
    }

    /// Checks the cost of a step of an operation over all pods or calls.
    async fn check_step(&self, what: &str, operation: impl Future<Output = ()>) {
        self.reset();
        operation.await;
        let Cost { commands, time } = self.cost();
        println!("{what}: {commands:.0} commands per step, {time:.0} µs");
        assert!(commands <= MAX_STEP_COMMANDS, "{what} runs {commands} commands per step");
    }
}

/// A request for one reservation, with a number and a merchant.
fn dial(number: usize) -> Reserve {
    Reserve {
        ids: vec![format!("R{number:016x}").parse().unwrap()],
        merchant: "acme".parse().unwrap(),
        number: Some("+14155550100".parse().unwrap()),
        accounts: vec!["twilio".parse().unwrap()],
        ttl: 900_000,
        miss_target: 10_000,
    }
}

/// Compares the lower quartiles of alternating measurements, so that other load of the machine
/// affects both stores.
async fn check_constant(
    what: &str,
    small: &mut GrowingStore,
    large: &mut GrowingStore,
    measure: impl AsyncFn(&mut GrowingStore) -> Cost,
) {
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        costs[0].push(measure(small).await);
        costs[1].push(measure(large).await);
    }
    assert_constant(what, costs.map(lower_quartiles));
}

fn assert_constant(what: &str, [small, large]: [Cost; 2]) {
    println!(
        "{what}: {:.2} and {:.2} commands, {:.1} and {:.1} µs, {:.2}×",
        small.commands,
        large.commands,
        small.time,
        large.time,
        large.time / small.time
    );
    assert!(
        large.commands <= small.commands + MAX_EXTRA_COMMANDS,
        "{what}: {small:?} grew to {large:?}"
    );
    assert!(large.time <= small.time * MAX_TIME_FACTOR, "{what}: {small:?} grew to {large:?}");
}

fn lower_quartiles(costs: Vec<Cost>) -> Cost {
    let quartile = |of: fn(&Cost) -> f64| {
        let mut all: Vec<f64> = costs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 4]
    };
    Cost { commands: quartile(|cost| cost.commands), time: quartile(|cost| cost.time) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_costs_the_same_with_ten_thousand_calls_waiting() {
    let pods = 2 * CONCURRENCY;
    let mut stores = [
        GrowingStore::new(pods).await,
        GrowingStore::new(pods).await,
        GrowingStore::new(pods).await,
    ];
    let exclusive = Tiers::parse(r#"{"gold": 1}"#, DocumentSource::Settings).unwrap().0;
    for (store, waiting) in stores.iter_mut().zip([0, CONCURRENCY, 10_000]) {
        store.apply(&exclusive).await;
        store.fill_queue(pods, waiting).await;
    }
    let mut costs = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..30 {
        for (store, costs) in stores.iter_mut().zip(&mut costs) {
            costs.push(store.release_cost().await);
        }
    }
    let [none, few, many] = costs.map(lower_quartiles);
    println!("release, no call waits: {none:?}");
    assert_constant("release, 200 and 10,000 calls wait", [few, many]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dials_cost_the_same_with_ten_and_ten_thousand_reservations() {
    let (mut few, mut many) = (GrowingStore::new(400).await, GrowingStore::new(400).await);
    for (store, reservations) in [(&mut few, 10), (&mut many, 10_000)] {
        let number = "+14155550100".parse().unwrap();
        retry(async || store.store.set_number(&number, Some(1_000_000), "").await).await;
        store.reserve(reservations).await;
    }
    check_constant("grant", &mut few, &mut many, GrowingStore::grant_cost).await;
    check_constant("give back", &mut few, &mut many, GrowingStore::give_back_cost).await;
    let what = "allocate while slots are held";
    check_constant(what, &mut few, &mut many, GrowingStore::allocation_cost).await;
    let store = &many.store;
    let audit = async {
        retry(async || store.audit().await).await;
    };
    many.check_step("audit", audit).await;
    let list = ReservationQuery { limit: 50, ..ReservationQuery::default() };
    let read = async { drop(retry(async || store.reservations(&list).await).await) };
    many.check_step("reservations", read).await;
    many.check_step("sweep", async { drop(retry(async || store.sweep(100).await).await) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_are_read_in_small_steps() {
    const NUMBERS: usize = 50_000;
    let store = GrowingStore::new(1).await;
    let mut limits = redis::cmd("HSET");
    limits.arg("voice:numbers");
    for number in 0..NUMBERS {
        limits.arg(format!("+1{number:010}")).arg(20);
    }
    limits.exec(&mut store.server.connection()).unwrap();
    let read = async {
        let numbers = retry(async || store.store.numbers().await).await;
        assert_eq!(numbers.len(), NUMBERS);
    };
    store.check_step("numbers", read).await;
    let status = async { drop(retry(async || store.store.outbound().await).await) };
    store.check_step("outbound", status).await;
    store.reset();
    let number = "+10000000001".parse().unwrap();
    let found = retry(async || store.store.number(&number).await).await;
    assert_eq!(found.map(|it| it.max_lines), Some(20));
    let info: String =
        redis::cmd("INFO").arg("commandstats").query(&mut store.server.connection()).unwrap();
    assert!(info.contains("cmdstat_hget:calls=1,") && !info.contains("cmdstat_hgetall"), "{info}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn functions_cost_the_same_with_fifty_and_fifty_thousand_pods() {
    let (mut few, mut many) =
        (GrowingStore::new(FEW_PODS).await, GrowingStore::new(MANY_PODS).await);
    let mut busy = GrowingStore::new(MANY_PODS).await;
    for strategy in ["spread", "pack"] {
        few.apply(&tiers(strategy)).await;
        many.apply(&tiers(strategy)).await;
        let what = format!("allocate, {strategy}, {FEW_PODS} and {MANY_PODS} pods");
        check_constant(&what, &mut few, &mut many, GrowingStore::allocation_cost).await;
    }
    many.apply(&tiers("spread")).await;
    busy.allocate(MANY_CALLS, 900_000).await;
    let what = format!("allocate, 0 and {MANY_CALLS} live calls");
    check_constant(&what, &mut many, &mut busy, GrowingStore::allocation_cost).await;
    let what = "sweep of one expired call, in a small and a large store";
    check_constant(what, &mut few, &mut busy, GrowingStore::sweep_cost).await;
    busy.fill(MANY_PODS, MAX_PODS).await;
    let store = &busy.store;
    let audit = async {
        retry(async || store.audit().await).await;
    };
    busy.check_step("audit", audit).await;
    busy.check_step("status", async { drop(retry(async || store.status().await).await) }).await;
    busy.check_step("pods", async { drop(retry(async || store.pods().await).await) }).await;
    busy.check_step("calls", busy.list_calls()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_event_of_an_allocation_costs_one_command() {
    let mut without_events =
        GrowingStore::with_functions(FEW_PODS, Functions::with_event_limit(0)).await;
    let mut with_events =
        GrowingStore::with_functions(FEW_PODS, Functions::with_event_limit(20_000)).await;
    // A full log is trimmed by each event.
    for _ in 0..60 {
        with_events.allocation_cost().await;
    }
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        costs[0].push(without_events.allocation_cost().await);
        costs[1].push(with_events.allocation_cost().await);
    }
    let [without_events, with_events] = costs.map(lower_quartiles);
    println!("allocate without events {without_events:?}, with {with_events:?}");
    assert!(
        with_events.commands <= without_events.commands + 1.0,
        "{without_events:?} became {with_events:?}"
    );
}
