//! The migration of the layout in Redis from schema 1 to schema 2, with live calls.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use fleet::{
    Allocate, CallLookup, Confirm, Confirmed, Hold, PreviousPod, Release,
    names::{CallSid, PodName},
    tiers::{DocumentSource, Tiers},
};
use redis::{Commands, Connection};
use store::{Functions, Redis, RedisConfig, Store};
use tokio::task::JoinHandle;

use testkit::{
    proxy::FaultProxy,
    redis::{RedisServer, WRITER, ready_pod, store_config},
};

pub(crate) const QUIET_PERIOD: Duration = Duration::from_millis(400);
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// A store of a Redis, swept like that of a router.
pub(crate) struct Replica {
    pub(crate) store: Arc<Redis>,
    sweeps: JoinHandle<()>,
}

impl Replica {
    pub(crate) async fn start(server: &RedisServer, url: String) -> Self {
        let tiers = Tiers::parse(r#"{"gold": 1}"#, DocumentSource::Settings).unwrap().0;
        let migration_quiet_period = QUIET_PERIOD;
        let config = RedisConfig { url, migration_quiet_period, ..store_config(server, tiers) };
        let store = Redis::start(config).unwrap();
        store.wait_until_available(10 * SECOND).await.unwrap();
        let swept = store.clone();
        let sweeps = tokio::spawn(async move {
            loop {
                let _ = swept.sweep(100).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        Self { store, sweeps }
    }

    pub(crate) async fn stop(self) {
        self.sweeps.abort();
        self.store.close().await;
    }
}

fn name<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

/// A Redis with schema 1, whose migration is held.
pub(crate) fn schema_1() -> (RedisServer, Connection) {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    let _: () = redis.mset(&[("voice:schema", "1"), ("voice:migration", "held")]).unwrap();
    (server, redis)
}

pub(crate) fn release_migration(redis: &mut Connection) {
    let _: () = redis.del("voice:migration").unwrap();
}

pub(crate) fn schema(redis: &mut Connection) -> String {
    redis.get("voice:schema").unwrap()
}

/// Waits without blocking the runtime of the stores.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < 60 * SECOND, "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn until_migrated(redis: &mut Connection) {
    let is_done =
        || redis.get::<_, Option<String>>("voice:migration").unwrap().as_deref() == Some("done");
    until("all records are renamed", is_done).await;
    assert_eq!(schema(redis), "2");
}

pub(crate) async fn add_pods(store: &Redis, pods: usize) {
    for pod in 0..pods {
        let pod: PodName = name(&format!("pod-{pod}"));
        store.observe_pod(&pod, &ready_pod(), WRITER).await.unwrap().unwrap();
    }
}

pub(crate) fn request(call: &str) -> Allocate {
    Allocate { may_return: true, ..Allocate::new(name(call), None, 900_000) }
}

fn waiting_request(call: &str) -> Allocate {
    let hold = Hold {
        time: 600_000,
        poll_timeout: 600_000,
        max_waiting: 10_000,
        max_waiting_per_merchant: 10_000,
    };
    Allocate { hold: Some(hold), ..request(call) }
}

/// A release of one pod attempt.
pub(crate) fn release(call: &str, pod_attempt: u32) -> Release {
    Release { pod_attempt: Some(pod_attempt), ..Release::new(name(call), None) }
}

/// The pod and the pod attempt of a call.
async fn found(store: &Redis, call: &str) -> (PodName, u32) {
    match store.call(&name::<CallSid>(call)).await.unwrap() {
        Some(CallLookup::Live(call)) => (call.pod, call.pod_attempt),
        other => panic!("{call}: {other:?}"),
    }
}

/// The names of all fields of all call records.
pub(crate) fn field_names(redis: &mut Connection) -> BTreeSet<String> {
    let keys: Vec<String> = redis.keys("voice:call:*").unwrap();
    let mut all = redis::pipe();
    for key in &keys {
        all.hkeys(key);
    }
    let names: Vec<Vec<String>> = all.query(redis).unwrap();
    names.into_iter().flatten().collect()
}

fn has_fields(redis: &mut Connection, expected: [&str; 2], renamed: [&str; 2]) {
    let names = field_names(redis);
    assert!(expected.iter().all(|name| names.contains(*name)), "{names:?}");
    assert!(renamed.iter().all(|name| !names.contains(*name)), "{names:?}");
}

const OLD: [&str; 2] = ["attempt", "attempts"];
const NEW: [&str; 2] = ["request_ids", "pod_attempt"];

/// Runs the compensating release of a request.
fn compensate(redis: &mut Connection, function: &str, call: &str, request_id: &str) -> String {
    let mut release = redis::cmd("FCALL");
    release.arg(function).arg(1).arg("voice:").arg(0).arg(call).arg("abandoned").arg("");
    let reply: Vec<redis::Value> = release.arg(request_id).query(redis).unwrap();
    redis::from_redis_value_ref(&reply[0]).unwrap()
}

/// Calls that begin and end on several replicas while the layout changes.
#[derive(Default)]
struct Load {
    is_over: AtomicBool,
    calls: AtomicUsize,
}

impl Load {
    /// Allocates, reconnects and releases calls until the load is over. Every step must succeed,
    /// each on another replica than the one before.
    async fn run(self: Arc<Self>, client: usize, stores: Vec<Arc<Redis>>) {
        for number in client.. {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let store = |step: usize| &stores[(number + step) % stores.len()];
            let call = format!("load-{client}-{number}");
            let provisional = Allocate { provisional: true, ..request(&call) };
            let first = store(0).allocate(&provisional).await.unwrap().unwrap();
            let (confirmed, pod_attempt) = (first.pod.clone(), Some(1));
            let confirm =
                Confirm { call: name(&call), pod: confirmed, lease_ttl: 900_000, pod_attempt };
            assert_eq!(store(1).confirm(&confirm).await.unwrap(), Confirmed::Live, "{call}");
            let previous =
                PreviousPod { pod: first.pod, pod_attempt: 1, is_settled: true, max_retries: 2 };
            let reconnect = Allocate { previous: Some(previous), ..request(&call) };
            let second = store(2).allocate(&reconnect).await.unwrap().unwrap();
            assert_eq!(second.pod_attempt, 2, "{call}");
            store(3).release(&release(&call, 1)).await.unwrap().unwrap_err();
            store(4).release(&release(&call, 2)).await.unwrap().unwrap();
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Calls in all stages: live, provisional, waiting, handed off, with pod attempt 2, with several
/// request ids. Returns the request ids of the last.
async fn fill(store: &Redis, redis: &mut Connection) -> Vec<String> {
    add_pods(store, 6).await;
    store.allocate(&request("live")).await.unwrap().unwrap();
    let provisional = Allocate { provisional: true, ..request("provisional") };
    store.allocate(&provisional).await.unwrap().unwrap();
    let first = store.allocate(&request("second")).await.unwrap().unwrap();
    let previous = PreviousPod { pod: first.pod, pod_attempt: 1, is_settled: true, max_retries: 2 };
    let reconnect = Allocate { previous: Some(previous), ..request("second") };
    assert_eq!(store.allocate(&reconnect).await.unwrap().unwrap().pod_attempt, 2);
    for _ in 0..2 {
        store.allocate(&request("repeated")).await.unwrap().unwrap();
    }
    store.allocate(&request("short")).await.unwrap().unwrap();
    store.allocate(&request("ends")).await.unwrap().unwrap();
    for call in ["handed", "waiting"] {
        store.allocate(&waiting_request(call)).await.unwrap().unwrap_err();
    }
    store.release(&release("ends", 1)).await.unwrap().unwrap();
    let ids: String = redis.hget("voice:call:repeated", "attempt").unwrap();
    ids.split(' ').map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_migrated_under_load_without_losing_a_call() {
    let (server, mut redis) = schema_1();
    let replicas = [
        Replica::start(&server, server.url()).await,
        Replica::start(&server, server.url()).await,
        Replica::start(&server, server.url()).await,
    ];
    let store = replicas[0].store.clone();
    let request_ids = fill(&store, &mut redis).await;
    assert_eq!(request_ids.len(), 2);
    has_fields(&mut redis, OLD, NEW);
    let before = compensate(
        &mut redis,
        &Functions::default().schema_1.release.function,
        "repeated",
        &request_ids[0],
    );
    assert_eq!(before, "not_found", "the second request may have been answered");
    // Pods for the load alone: no call of the fixture waits for them.
    for pod in 0..20 {
        store
            .observe_pod(&name(&format!("load-{pod}")), &ready_pod(), WRITER)
            .await
            .unwrap()
            .unwrap();
    }
    let load = Arc::new(Load::default());
    let stores: Vec<_> = replicas.iter().map(|replica| replica.store.clone()).collect();
    let clients: Vec<_> =
        (0..6).map(|client| tokio::spawn(load.clone().run(client, stores.clone()))).collect();
    until("calls on schema 1", || load.calls.load(Ordering::Relaxed) > 200).await;
    assert_eq!(schema(&mut redis), "1");
    release_migration(&mut redis);
    until_migrated(&mut redis).await;
    let migrated = load.calls.load(Ordering::Relaxed);
    until("calls on schema 2", || load.calls.load(Ordering::Relaxed) > migrated + 200).await;
    load.is_over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    has_fields(&mut redis, NEW, OLD);
    for (call, pod_attempt) in [("live", 1), ("provisional", 1), ("second", 2), ("repeated", 1)] {
        assert_eq!(found(&store, call).await.1, pod_attempt, "{call}");
    }
    let release_function = &Functions::default().schema_2.release.function;
    assert_eq!(compensate(&mut redis, release_function, "repeated", "other"), "not_found");
    assert_eq!(compensate(&mut redis, release_function, "repeated", &request_ids[1]), "released");
    store.release(&release("second", 1)).await.unwrap().unwrap_err();
    for (call, pod_attempt) in [("live", 1), ("provisional", 1), ("second", 2), ("short", 1)] {
        store.release(&release(call, pod_attempt)).await.unwrap().unwrap();
    }
    for call in ["handed", "waiting"] {
        let got = store.allocate(&waiting_request(call)).await.unwrap().unwrap();
        assert_eq!((got.pod_attempt, got.waited.is_some()), (1, true), "{call}");
        store.release(&release(call, 1)).await.unwrap().unwrap();
    }
    assert_eq!(store.status().await.unwrap().active_calls, 0);
    for replica in replicas {
        replica.stop().await;
    }
}

/// Fills a store of schema 1 with live and waiting calls.
async fn fill_many(store: &Redis, calls: usize) {
    add_pods(store, calls).await;
    for call in 0..calls {
        store.allocate(&request(&format!("live-{call}"))).await.unwrap().unwrap();
    }
    for call in 0..calls {
        let waiting = waiting_request(&format!("waiting-{call}"));
        store.allocate(&waiting).await.unwrap().unwrap_err();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_live_and_waiting_calls_are_migrated_over_a_slow_network() {
    let (server, mut redis) = schema_1();
    let local = Replica::start(&server, server.url()).await;
    fill_many(&local.store, 1_000).await;
    local.stop().await;
    let proxy = FaultProxy::to(server.port);
    proxy.set_latency(Duration::from_micros(1_500));
    let remote = Replica::start(&server, format!("redis://{}", proxy.address)).await;
    release_migration(&mut redis);
    let is_migrated = || schema(&mut redis) == "2";
    until("the schema changes", is_migrated).await;
    let started = Instant::now();
    until_migrated(&mut redis).await;
    println!("2,000 records were renamed in {:?} with 3 ms to Redis", started.elapsed());
    has_fields(&mut redis, NEW, OLD);
    let status = remote.store.status().await.unwrap();
    assert_eq!((status.active_calls, status.waiting), (1_000, 1_000));
    remote.store.release(&release("live-7", 1)).await.unwrap().unwrap();
    let got = remote.store.allocate(&waiting_request("waiting-0")).await.unwrap().unwrap();
    assert_eq!(got.pod_attempt, 1);
    remote.stop().await;
}

/// A router of the previous version: the schema-1 functions under the names of that version.
struct PreviousRouter {
    redis: Connection,
    code: String,
    hash: String,
}

impl PreviousRouter {
    fn new(server: &RedisServer) -> Self {
        let library = &Functions::default().schema_1.library;
        let hash = library.name.strip_prefix("smart_router_1_").unwrap().to_owned();
        let code = library.code.replace(&format!("1_{hash}"), &hash).replace("open_store", "begin");
        Self { redis: server.connection(), code, hash }
    }

    /// Runs a function; loads the library if it is missing, as the client does.
    fn run(&mut self, operation: &str, args: &[&str]) -> Result<Vec<redis::Value>, String> {
        let mut call = redis::cmd("FCALL");
        call.arg(format!("smart_router_{operation}_{}", self.hash)).arg(1).arg("voice:").arg(0);
        call.arg(args);
        match call.query(&mut self.redis) {
            Err(error) if error.to_string().contains("Function not found") => {
                let mut load = redis::cmd("FUNCTION");
                load.arg("LOAD").arg(&self.code).exec(&mut self.redis).unwrap();
                call.query(&mut self.redis)
            }
            outcome => outcome,
        }
        .map_err(|error| error.to_string())
    }

    fn sweep(&mut self) -> Result<Vec<redis::Value>, String> {
        self.run("sweep", &["100", "900000"])
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_migration_waits_for_routers_of_the_previous_version() {
    let (server, mut redis) = schema_1();
    release_migration(&mut redis);
    let mut previous = PreviousRouter::new(&server);
    previous.run("begin", &["900000", ""]).unwrap();
    let replica = Replica::start(&server, server.url()).await;
    add_pods(&replica.store, 2).await;
    replica.store.allocate(&request("CA1")).await.unwrap().unwrap();
    let until_quiet = Instant::now() + 4 * QUIET_PERIOD;
    while Instant::now() < until_quiet {
        previous.sweep().unwrap();
        // A restart of the previous router loads its library without the guard.
        if until_quiet - Instant::now() < 2 * QUIET_PERIOD && !previous.code.contains("restarted") {
            previous.code += "-- restarted\n";
            let mut load = redis::cmd("FUNCTION");
            load.arg("LOAD").arg("REPLACE").arg(&previous.code).exec(&mut redis).unwrap();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(schema(&mut redis), "1", "the previous router is in use");
    until_migrated(&mut redis).await;
    // A router that was paused through the migration can do nothing but learn of it.
    assert!(previous.sweep().unwrap_err().contains("MISCONF"));
    let begin = previous.run("begin", &["900000", ""]).unwrap();
    let texts = [&begin[0], &begin[2]].map(|it| redis::from_redis_value_ref::<String>(it).unwrap());
    assert_eq!(texts, ["ready", "2"]);
    replica.store.release(&release("CA1", 1)).await.unwrap().unwrap();
    // Its library stays guarded across restarts of the router.
    replica.stop().await;
    let replica = Replica::start(&server, server.url()).await;
    tokio::time::sleep(QUIET_PERIOD).await;
    assert!(previous.sweep().unwrap_err().contains("MISCONF"));
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_routers_change_to_the_new_schema_and_back() {
    let (server, mut redis) = schema_1();
    let replicas =
        [Replica::start(&server, server.url()).await, Replica::start(&server, server.url()).await];
    add_pods(&replicas[0].store, 4).await;
    replicas[0].store.allocate(&request("CA1")).await.unwrap().unwrap();
    let mut calls = 0;
    // The names under which each replica writes a new record.
    let mut written = async |redis: &mut Connection| {
        let mut names = BTreeSet::new();
        for replica in &replicas {
            calls += 1;
            let call = format!("new-{calls}");
            replica.store.allocate(&request(&call)).await.unwrap().unwrap();
            names.extend(redis.hkeys::<_, Vec<String>>(format!("voice:call:{call}")).unwrap());
            replica.store.release(&release(&call, 1)).await.unwrap().unwrap();
        }
        [OLD, NEW].map(|fields| fields.iter().all(|field| names.contains(*field)))
    };
    for _ in 0..2 {
        assert_eq!(written(&mut redis).await, [true, false]);
        release_migration(&mut redis);
        until_migrated(&mut redis).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(written(&mut redis).await, [false, true]);
        has_fields(&mut redis, NEW, OLD);
        // Back, as documented.
        let _: () = redis.set("voice:migration", "held").unwrap();
        let _: () = redis.set("voice:schema", "1").unwrap();
        let is_renamed = || !field_names(&mut redis).contains("request_ids");
        until("the fields have their old names", is_renamed).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        has_fields(&mut redis, OLD, NEW);
    }
    let previous = PreviousRouter::new(&server).sweep();
    assert!(previous.is_ok(), "the previous version can be used: {previous:?}");
    for replica in replicas {
        assert_eq!(found(&replica.store, "CA1").await.1, 1);
        replica.stop().await;
    }
}
