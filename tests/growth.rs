//! What scripts cost Redis must not grow with pods or calls: in commands, which Redis
//! counts, and in its own time by orders of magnitude.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use fleet::{
    Allocate, CallQuery, Edit, Hold, Release,
    names::{CallSid, PodName},
    tiers::{DocumentSource, Tiers},
};
use futures_util::future::join_all;
use store::{Functions, Redis, RedisConfig, Store, StoreError};

use testkit::redis::{RedisServer, WRITER, ready_pod, store_config};

const FEW: usize = 50;
const MANY: usize = 50_000;
const MOST: usize = 100_000;
const CALLS: usize = 100_000;
const AT_ONCE: usize = 200;
const ROUNDS: usize = 60;
/// What grows with the pods or the calls grows a hundredfold and more here: this much is noise,
/// even on a machine with other work.
const LINEAR: f64 = 5.0;
/// So many commands more depend on what state a pod is in, not on how many there are.
const FEW_MORE: f64 = 10.0;
/// As many commands a script may run before it lets others have their turn.
const STEP: f64 = 2_000.0;

/// What a script costs Redis: the commands it runs, which are the same on every machine, and
/// the time they take (µs), which shows what a command does with a large key.
#[derive(Debug, Clone, Copy)]
struct Cost {
    commands: f64,
    time: f64,
}

struct GrowingStore {
    server: RedisServer,
    store: Arc<Redis>,
    next: usize,
    /// Calls that have pods, and calls that wait, in the order in which they came.
    live: VecDeque<CallSid>,
    waiting: VecDeque<CallSid>,
}

/// Asks until there is an answer: where the machine has other work, the store sheds load, and
/// Redis may not answer in time.
async fn let_in<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> T {
    for _ in 0..10_000 {
        match ask().await {
            Err(StoreError::Busy | StoreError::Unavailable(_)) => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            answer => return answer.unwrap(),
        }
    }
    panic!("the store does not answer");
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
        let_in(async || self.store.apply_tiers(tiers, Edit::ANY).await).await.unwrap();
    }

    async fn fill(&self, from: usize, to: usize) {
        let facts = ready_pod();
        let names: Vec<PodName> =
            (from..to).map(|number| format!("voice-agent-{number}").parse().unwrap()).collect();
        for some in names.chunks(AT_ONCE) {
            let told = some
                .iter()
                .map(|name| let_in(async || self.store.observe_pod(name, &facts, WRITER).await));
            for observed in join_all(told).await {
                observed.unwrap();
            }
        }
    }

    async fn allocate(&mut self, count: usize, lease_ttl: u64) -> Vec<CallSid> {
        let numbers = self.next..self.next + count;
        self.next += count;
        let calls: Vec<CallSid> =
            numbers.map(|number| format!("CA{number:032}").parse().unwrap()).collect();
        for some in calls.chunks(AT_ONCE) {
            let requests: Vec<Allocate> =
                some.iter().map(|call| Allocate::new(call.clone(), None, lease_ttl)).collect();
            let asked =
                requests.iter().map(|request| let_in(async || self.store.allocate(request).await));
            for given in join_all(asked).await {
                given.unwrap();
            }
        }
        calls
    }

    async fn release(&self, calls: Vec<CallSid>) {
        let requests: Vec<Release> =
            calls.into_iter().map(|call| Release::new(call, None)).collect();
        for some in requests.chunks(AT_ONCE) {
            let asked =
                some.iter().map(|request| let_in(async || self.store.release(request).await));
            // (a release that is shed is kept and done later; asked again, it is not found)
            join_all(asked).await;
        }
    }

    /// What a script call has cost on average since the last reset.
    fn cost(&self) -> Cost {
        let info: String =
            redis::cmd("INFO").arg("commandstats").query(&mut self.server.connection()).unwrap();
        let (mut scripts, mut commands, mut time) = (0.0, 0.0, 0.0);
        for line in info.lines().filter_map(|line| line.strip_prefix("cmdstat_")) {
            let (name, stats) = line.split_once(':').unwrap();
            let field = |name: &str| -> f64 {
                let mut fields = stats.split(',').filter_map(|field| field.split_once('='));
                fields.find(|(other, _)| *other == name).unwrap().1.parse().unwrap()
            };
            match name {
                "fcall" => (scripts, time) = (field("calls"), field("usec")),
                "info" | "config|resetstat" => {}
                _ => commands += field("calls"),
            }
        }
        Cost { commands: commands / scripts, time: time / scripts }
    }

    fn reset(&self) {
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.server.connection()).unwrap();
    }

    /// The cost of one allocation, of so many at once.
    async fn allocation(&mut self) -> Cost {
        self.reset();
        let calls = self.allocate(AT_ONCE, 900_000).await;
        let cost = self.cost();
        self.release(calls).await;
        cost
    }

    fn new_calls(&mut self, count: usize) -> Vec<CallSid> {
        let numbers = self.next..self.next + count;
        self.next += count;
        numbers.map(|number| format!("CA{number:032}").parse().unwrap()).collect()
    }

    /// Calls ask; how many of them have a pod.
    async fn ask(&self, calls: &[CallSid]) -> usize {
        let hold = Hold {
            time: 900_000,
            poll_timeout: 900_000,
            max_waiting: 100_000,
            max_waiting_per_merchant: 100_000,
        };
        let mut given = 0;
        for some in calls.chunks(AT_ONCE) {
            let requests: Vec<Allocate> = some
                .iter()
                .map(|call| Allocate {
                    hold: Some(hold),
                    ..Allocate::new(call.clone(), None, 900_000)
                })
                .collect();
            let asked =
                requests.iter().map(|request| let_in(async || self.store.allocate(request).await));
            given += join_all(asked).await.into_iter().filter(Result::is_ok).count();
        }
        given
    }

    /// So many calls wait, and all pods are taken.
    async fn let_wait(&mut self, pods: usize, waiting: usize) {
        let live = self.new_calls(pods);
        assert_eq!(self.ask(&live).await, pods);
        self.live.extend(live);
        let calls = self.new_calls(waiting);
        for call in &calls {
            // One after the other: the order is what counts.
            assert_eq!(self.ask(std::slice::from_ref(call)).await, 0);
        }
        self.waiting.extend(calls);
    }

    /// The cost of one release. Where calls wait, each hands its pod to the first of
    /// them, and another takes its place at the end.
    async fn handing_over(&mut self) -> Cost {
        let over: Vec<CallSid> = self.live.drain(..AT_ONCE).collect();
        self.reset();
        self.release(over).await;
        let cost = self.cost();
        let waited = !self.waiting.is_empty();
        let count = AT_ONCE.min(self.waiting.len());
        let mut served: Vec<CallSid> = self.waiting.drain(..count).collect();
        if !waited {
            served = self.new_calls(AT_ONCE);
        }
        assert_eq!(self.ask(&served).await, served.len(), "in order, or not at all");
        self.live.extend(served);
        if waited {
            for call in self.new_calls(AT_ONCE) {
                assert_eq!(self.ask(std::slice::from_ref(&call)).await, 0);
                self.waiting.push_back(call);
            }
        }
        cost
    }

    /// The cost of a sweep that ends one dead call, of several after each other: a single
    /// one would measure how long Redis had slept.
    async fn sweep(&mut self) -> Cost {
        const DEAD: usize = 40;
        self.allocate(DEAD, 1).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
        self.reset();
        for _ in 0..DEAD {
            assert_eq!(let_in(async || self.store.sweep(1).await).await.expired.len(), 1);
        }
        self.cost()
    }

    /// Turns some pages of the list of calls: of all, and of those of a pool that has none,
    /// for which each page looks at as many as it may.
    async fn list_calls(&self) {
        let mut query = CallQuery { limit: 50, ..CallQuery::default() };
        for pool in [None, Some("nowhere".parse().unwrap())] {
            (query.pool, query.after) = (pool, None);
            for _ in 0..3 {
                let page = let_in(async || self.store.calls(&query).await).await;
                query.after = Some(page.next.expect("there are more"));
            }
        }
    }

    /// The cost of a step of what goes through all pods or calls.
    async fn step(&self, what: &str, walk: impl Future<Output = ()>) {
        self.reset();
        walk.await;
        let Cost { commands, time } = self.cost();
        println!("{what}: {commands:.0} commands a step, {time:.0} µs");
        assert!(commands <= STEP, "{what} runs {commands} commands at once");
    }
}

/// Measures both in turn, many times, so that whatever else the machine does falls
/// on both; the lower quartile of each counts.
async fn flat(
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
    does_not_grow(what, costs.map(lower_quartiles));
}

fn does_not_grow(what: &str, [small, large]: [Cost; 2]) {
    println!(
        "{what}: {:.2} and {:.2} commands, {:.1} and {:.1} µs, {:.2}×",
        small.commands,
        large.commands,
        small.time,
        large.time,
        large.time / small.time
    );
    assert!(large.commands <= small.commands + FEW_MORE, "{what}: {small:?} grew to {large:?}");
    assert!(large.time <= small.time * LINEAR, "{what}: {small:?} grew to {large:?}");
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
    let pods = 2 * AT_ONCE;
    let mut stores = [
        GrowingStore::new(pods).await,
        GrowingStore::new(pods).await,
        GrowingStore::new(pods).await,
    ];
    let exclusive = Tiers::parse(r#"{"gold": 1}"#, DocumentSource::Settings).unwrap().0;
    for (store, waiting) in stores.iter_mut().zip([0, AT_ONCE, 10_000]) {
        store.apply(&exclusive).await;
        store.let_wait(pods, waiting).await;
    }
    let mut costs = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..30 {
        for (store, costs) in stores.iter_mut().zip(&mut costs) {
            costs.push(store.handing_over().await);
        }
    }
    let [nobody, few, many] = costs.map(lower_quartiles);
    println!("release, nobody waits: {nobody:?}");
    does_not_grow("release, 200 and 10,000 calls wait", [few, many]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_cost_the_same_with_fifty_pods_and_fifty_thousand() {
    let (mut few, mut many) = (GrowingStore::new(FEW).await, GrowingStore::new(MANY).await);
    let mut busy = GrowingStore::new(MANY).await;
    for strategy in ["spread", "pack"] {
        few.apply(&tiers(strategy)).await;
        many.apply(&tiers(strategy)).await;
        let what = format!("allocate, {strategy}, {FEW} and {MANY} pods");
        flat(&what, &mut few, &mut many, GrowingStore::allocation).await;
    }
    many.apply(&tiers("spread")).await;
    busy.allocate(CALLS, 900_000).await;
    let what = format!("allocate, 0 and {CALLS} live calls");
    flat(&what, &mut many, &mut busy, GrowingStore::allocation).await;
    let what = "sweep of one dead call, few of everything and many";
    flat(what, &mut few, &mut busy, GrowingStore::sweep).await;
    busy.fill(MANY, MOST).await;
    let store = &busy.store;
    let audit = async {
        let_in(async || store.audit().await).await;
    };
    busy.step("audit", audit).await;
    busy.step("status", async { drop(let_in(async || store.status().await).await) }).await;
    busy.step("pods", async { drop(let_in(async || store.pods().await).await) }).await;
    busy.step("calls", busy.list_calls()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_is_one_command_more_for_an_allocation() {
    let mut silent = GrowingStore::with_functions(FEW, Functions::with_event_limit(0)).await;
    let mut telling = GrowingStore::with_functions(FEW, Functions::with_event_limit(20_000)).await;
    // A log that is full is trimmed at every turn.
    for _ in 0..60 {
        telling.allocation().await;
    }
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        costs[0].push(silent.allocation().await);
        costs[1].push(telling.allocation().await);
    }
    let [silent, telling] = costs.map(lower_quartiles);
    println!("allocate without events {silent:?}, with {telling:?}");
    assert!(telling.commands <= silent.commands + 1.0, "{silent:?} became {telling:?}");
}
