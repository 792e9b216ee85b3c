//! What scripts cost Redis must not grow with pods or calls. Measured by Redis
//! itself, in a binary of its own so that no other test runs beside it.

#[allow(dead_code, unused_imports, reason = "other tests need more of it")]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use smart_router::{
    domain::{
        fleet::{Allocate, CallQuery, Edit, Hold, Release},
        names::{CallSid, PodName},
        tiers::{Origin, Tiers},
    },
    store::{Redis, RedisConfig, Scripts, Store},
};

use self::support::redis::{RedisServer, WRITER, ready_pod, store_config};

const FEW: usize = 50;
const MANY: usize = 50_000;
const MOST: usize = 100_000;
const CALLS: usize = 100_000;
const AT_ONCE: usize = 200;
const ROUNDS: usize = 60;
const ALLOWED: f64 = 1.3;
/// No script may hold up Redis for longer (µs).
const SLOW: u64 = 5_000;

struct World {
    server: RedisServer,
    store: Arc<Redis>,
    next: usize,
    /// Calls that have pods, and calls that wait, in the order in which they came.
    live: VecDeque<CallSid>,
    waiting: VecDeque<CallSid>,
}

fn tiers(strategy: &str) -> Tiers {
    let text = format!(
        r#"{{"basic": {{"type": "shared", "target": 1, "max_concurrent": 200, "strategy": "{strategy}"}}}}"#
    );
    Tiers::parse(&text, Origin::Settings).unwrap().0
}

impl World {
    async fn new(pods: usize) -> Self {
        Self::with_scripts(pods, Scripts::default()).await
    }

    async fn with_scripts(pods: usize, scripts: Scripts) -> Self {
        let server = RedisServer::start(&["--slowlog-log-slower-than", &SLOW.to_string()]);
        let config = RedisConfig { scripts, ..store_config(&server, tiers("spread")) };
        let store = Redis::start(config).unwrap();
        store.first_contact(Duration::from_secs(5)).await.unwrap();
        let (live, waiting) = Default::default();
        let world = Self { server, store, next: 0, live, waiting };
        world.fill(0, pods).await;
        world
    }

    async fn fill(&self, from: usize, to: usize) {
        let facts = ready_pod();
        let names: Vec<PodName> =
            (from..to).map(|number| format!("voice-agent-{number}").parse().unwrap()).collect();
        for some in names.chunks(AT_ONCE) {
            for observed in
                join_all(some.iter().map(|name| self.store.observe_pod(name, &facts, WRITER))).await
            {
                observed.unwrap().unwrap();
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
            for given in join_all(requests.iter().map(|request| self.store.allocate(request))).await
            {
                given.unwrap().unwrap();
            }
        }
        calls
    }

    async fn release(&self, calls: Vec<CallSid>) {
        let requests: Vec<Release> =
            calls.into_iter().map(|call| Release::new(call, None)).collect();
        for some in requests.chunks(AT_ONCE) {
            for released in join_all(some.iter().map(|request| self.store.release(request))).await {
                released.unwrap().unwrap();
            }
        }
    }

    /// Redis's own time per script call since the last reset (µs).
    fn script_time(&self) -> f64 {
        let info: String =
            redis::cmd("INFO").arg("commandstats").query(&mut self.server.connection()).unwrap();
        let line = info.lines().find(|line| line.starts_with("cmdstat_fcall:")).unwrap();
        let field = line.split(',').find_map(|field| field.strip_prefix("usec_per_call=")).unwrap();
        field.parse().unwrap()
    }

    fn reset(&self) {
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.server.connection()).unwrap();
    }

    /// Redis's time for one allocation, of so many at once.
    async fn allocation(&mut self) -> f64 {
        self.reset();
        let calls = self.allocate(AT_ONCE, 900_000).await;
        let time = self.script_time();
        self.release(calls).await;
        time
    }

    fn new_calls(&mut self, count: usize) -> Vec<CallSid> {
        let numbers = self.next..self.next + count;
        self.next += count;
        numbers.map(|number| format!("CA{number:032}").parse().unwrap()).collect()
    }

    /// Calls ask; how many of them have a pod.
    async fn ask(&self, calls: &[CallSid]) -> usize {
        let hold =
            Hold { time: 900_000, patience: 900_000, most: 100_000, most_per_merchant: 100_000 };
        let mut given = 0;
        for some in calls.chunks(AT_ONCE) {
            let requests: Vec<Allocate> = some
                .iter()
                .map(|call| Allocate {
                    hold: Some(hold),
                    ..Allocate::new(call.clone(), None, 900_000)
                })
                .collect();
            let answers = join_all(requests.iter().map(|request| self.store.allocate(request)));
            given +=
                answers.await.into_iter().filter(|answer| answer.as_ref().unwrap().is_ok()).count();
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

    /// Redis's time for one release. Where calls wait, each hands its pod to the
    /// first of them, and another takes its place at the end.
    async fn handing_over(&mut self) -> f64 {
        let over: Vec<CallSid> = self.live.drain(..AT_ONCE).collect();
        self.reset();
        self.release(over).await;
        let time = self.script_time();
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
        time
    }

    /// Redis's time for a sweep that ends one dead call, of several after each other:
    /// a single one would measure how long Redis had slept.
    async fn sweep(&mut self) -> f64 {
        const DEAD: usize = 40;
        self.allocate(DEAD, 1).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
        self.reset();
        for _ in 0..DEAD {
            assert_eq!(self.store.sweep(1).await.unwrap().expired.len(), 1);
        }
        self.script_time()
    }

    /// Turns some pages of the list of calls: of all, and of those of a pool that has none,
    /// for which each page looks at as many as it may.
    async fn list_calls(&self) {
        let mut query = CallQuery { most: 50, ..CallQuery::default() };
        for pool in [None, Some("nowhere".parse().unwrap())] {
            (query.pool, query.after) = (pool, None);
            for _ in 0..3 {
                self.reset();
                let page = self.store.calls(&query).await.unwrap();
                println!(
                    "a page of {} calls: {:.0} µs a step",
                    page.calls.len(),
                    self.script_time()
                );
                query.after = Some(page.next.expect("there are more"));
            }
        }
    }

    fn forget_slow_scripts(&self) {
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.server.connection()).unwrap();
    }

    /// The names of the scripts that took too long.
    fn slow_scripts(&self) -> BTreeSet<&'static str> {
        type Entry = (u64, u64, u64, Vec<String>, String, String);
        let log: Vec<Entry> =
            redis::cmd("SLOWLOG").arg("GET").arg(-1).query(&mut self.server.connection()).unwrap();
        let scripts = Scripts::default();
        let names: BTreeMap<&str, &'static str> =
            scripts.all().map(|script| (script.function.as_str(), script.name)).collect();
        log.iter()
            .filter_map(|(_, _, micros, command, ..)| {
                let name = names.get(command.get(1)?.as_str())?;
                println!("{name} took {micros} µs");
                Some(*name)
            })
            .collect()
    }
}

/// Measures both in turn, many times, so that whatever else the machine does falls
/// on both; the lower quartile of each counts.
async fn flat(
    what: &str,
    small: &mut World,
    large: &mut World,
    measure: impl AsyncFn(&mut World) -> f64,
) {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(measure(small).await);
        times[1].push(measure(large).await);
    }
    let [small, large] = lower_quartiles(times);
    println!("{what}: {small:.1} µs and {large:.1} µs, {:.2}×", large / small);
    assert!(large <= small * ALLOWED, "{what}: {small:.1} µs grew to {large:.1} µs");
}

fn lower_quartiles<const N: usize>(times: [Vec<f64>; N]) -> [f64; N] {
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 4]
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_costs_little_more_with_ten_thousand_calls_waiting() {
    let pods = 2 * AT_ONCE;
    let mut worlds = [World::new(pods).await, World::new(pods).await, World::new(pods).await];
    let exclusive = Tiers::parse(r#"{"gold": 1}"#, Origin::Settings).unwrap().0;
    for (world, waiting) in worlds.iter_mut().zip([0, AT_ONCE, 10_000]) {
        world.store.apply_tiers(&exclusive, Edit::ANY).await.unwrap().unwrap();
        world.let_wait(pods, waiting).await;
    }
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..30 {
        for (world, times) in worlds.iter_mut().zip(&mut times) {
            times.push(world.handing_over().await);
        }
    }
    let [nobody, few, many] = lower_quartiles(times);
    println!(
        "release, nobody waits: {nobody:.1} µs; {AT_ONCE} wait: {few:.1} µs; 10000 wait: {many:.1} µs; {:.2}× and {:.2}×",
        many / nobody,
        many / few
    );
    assert!(many <= few * 1.5, "it grows with those who wait");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_cost_the_same_with_fifty_pods_and_fifty_thousand() {
    let (mut few, mut many) = (World::new(FEW).await, World::new(MANY).await);
    let mut busy = World::new(MANY).await;
    for strategy in ["spread", "pack"] {
        few.store.apply_tiers(&tiers(strategy), Edit::ANY).await.unwrap().unwrap();
        many.store.apply_tiers(&tiers(strategy), Edit::ANY).await.unwrap().unwrap();
        let what = format!("allocate, {strategy}, {FEW} and {MANY} pods");
        flat(&what, &mut few, &mut many, World::allocation).await;
    }
    many.store.apply_tiers(&tiers("spread"), Edit::ANY).await.unwrap().unwrap();
    busy.allocate(CALLS, 900_000).await;
    let what = format!("allocate, 0 and {CALLS} live calls");
    flat(&what, &mut many, &mut busy, World::allocation).await;
    let what = "sweep of one dead call, few of everything and many";
    flat(what, &mut few, &mut busy, World::sweep).await;
    busy.fill(MANY, MOST).await;
    // Redis counts the time in which something else had its core: what is slow
    // each time is slow.
    let mut slow = None;
    for _ in 0..3 {
        busy.forget_slow_scripts();
        busy.store.audit().await.unwrap();
        busy.store.status().await.unwrap();
        busy.store.pods().await.unwrap();
        busy.list_calls().await;
        busy.allocation().await;
        let seen = busy.slow_scripts();
        slow = Some(slow.map_or(seen.clone(), |slow: BTreeSet<_>| &slow & &seen));
    }
    assert_eq!(slow, Some(BTreeSet::new()), "scripts above {SLOW} µs with {MOST} pods");
}

/// What the log of events may cost of an allocation.
const EVENTS_ALLOWED: f64 = 1.15;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_cost_little_of_an_allocation() {
    let mut silent = World::with_scripts(FEW, Scripts::keeping(0)).await;
    let mut telling = World::with_scripts(FEW, Scripts::keeping(20_000)).await;
    // A log that is full is trimmed at every turn.
    for _ in 0..60 {
        telling.allocation().await;
    }
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..2 * ROUNDS {
        times[0].push(silent.allocation().await);
        times[1].push(telling.allocation().await);
    }
    let [silent, telling] = lower_quartiles(times);
    let ratio = telling / silent;
    println!("allocate without events {silent:.1} µs, with {telling:.1} µs, {ratio:.2}×");
    assert!(ratio <= EVENTS_ALLOWED, "{silent:.1} µs became {telling:.1} µs");
}
