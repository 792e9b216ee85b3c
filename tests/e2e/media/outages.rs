//! Many streams while gateways restart, gateways are killed, and the store is away.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use futures_util::future::join_all;
use serde_json::json;
use smart_router::tools::provider_stream::ProviderStream;
use telephony::Provider as Dialect;
use testkit::{Connection, redis::RedisServer};
use tokio_util::sync::CancellationToken;

use super::{
    conversations::{EchoPods, check_intact, expect_invariants, open_conversation},
    *,
};

/// Opens streams of all formats, spread over the gateways. Returns them by their calls.
async fn open_streams(gateways: &[&Router], count: usize) -> BTreeMap<String, ProviderStream> {
    let mut streams = BTreeMap::new();
    for number in 0..count {
        let (call, gateway) = (format!("CA{number:03}"), gateways[number % gateways.len()]);
        let dialect = Dialect::ALL[number % Dialect::ALL.len()];
        let url = stream_url(gateway, &call);
        let stream = open_conversation(gateway.address, &url, dialect, &call).await;
        streams.insert(call, stream.unwrap());
    }
    streams
}

/// Every stream carries audio, and all of it comes back.
async fn converse(streams: &mut BTreeMap<String, ProviderStream>) {
    let talks = streams.iter_mut().enumerate().map(|(number, (call, stream))| async move {
        // The streams take turns within the round.
        let offset = Duration::from_millis(number as u64 * 4);
        let audio = Duration::from_millis(60);
        let talked = stream.talk(audio, offset, |_| {}).await;
        talked.unwrap_or_else(|error| panic!("{call} was cut: {error}"));
        check_intact(stream.echoes()).unwrap();
        assert_eq!(stream.echoes().lost(), 0, "{call}");
    });
    join_all(talks).await;
}

async fn hang_up_all(streams: BTreeMap<String, ProviderStream>) {
    for (call, mut stream) in streams {
        stream.hang_up().await.unwrap_or_else(|error| panic!("{call}: {error}"));
    }
}

/// The pods of calls.
fn pods_of<'a>(router: &Router, calls: impl Iterator<Item = &'a String>) -> BTreeSet<String> {
    calls.map(|name| call(router, name)["pod_name"].as_str().unwrap().to_owned()).collect()
}

/// Gateways that accept streams, as a load balancer knows them, and the results of the calls.
struct Rollout {
    gateways: Mutex<Vec<SocketAddr>>,
    failures: Mutex<Vec<String>>,
    ended: Mutex<usize>,
    over: CancellationToken,
}

impl Rollout {
    /// Calls one after the other until the rollout is over.
    async fn place_calls(self: Arc<Self>, line: usize) {
        for number in 0.. {
            if self.over.is_cancelled() {
                return;
            }
            let call = format!("CA-{line}-{number}");
            let dialect = Dialect::ALL[(line + number) % Dialect::ALL.len()];
            let length = Duration::from_millis(500 + 500 * ((line + number) % 4) as u64);
            match self.converse(&call, dialect, length).await {
                Ok(()) => *self.ended.lock().unwrap() += 1,
                Err(error) => self.failures.lock().unwrap().push(format!("{call}: {error}")),
            }
        }
    }

    /// A gateway, a different one with each number.
    fn gateway(&self, number: usize) -> SocketAddr {
        let gateways = self.gateways.lock().unwrap();
        gateways[number % gateways.len()]
    }

    /// Opens a stream. A gateway that is about to stop may refuse it: the next one is tried.
    async fn open(&self, call: &str, dialect: Dialect) -> Result<ProviderStream, String> {
        let (started, mut last) = (Instant::now(), String::new());
        let first: usize = call.bytes().map(usize::from).sum();
        for number in first.. {
            let gateway = self.gateway(number);
            let opened = async {
                let allocated = tokio::task::block_in_place(|| {
                    let mut api = Connection::try_open(gateway)?;
                    let response = api.try_post("/api/v1/allocate", &json!({"call_sid": call}))?;
                    (response.status == 200).then(|| response.json().1)
                });
                let answer = allocated.ok_or("no allocation")?;
                let url = answer["ws_url"].as_str().ok_or("no stream URL")?;
                open_conversation(gateway, url, dialect, call).await
            };
            match opened.await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
            if started.elapsed() > TIMEOUT {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(last)
    }

    async fn converse(&self, call: &str, dialect: Dialect, length: Duration) -> Result<(), String> {
        let mut stream = self.open(call, dialect).await?;
        let talked = stream.talk(length, Duration::ZERO, |_| {}).await;
        talked.map_err(|error| format!("cut: {error}"))?;
        check_intact(stream.echoes())?;
        match stream.echoes().lost() {
            0 => stream.hang_up().await.map_err(|error| format!("at its end: {error}")),
            lost => Err(format!("{lost} frames are lost")),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_cuts_no_stream() {
    const LINES: usize = 9;
    let (redis, pods) = (RedisServer::start(&[]), EchoPods::start(LINES * 2 + 3).await);
    let url = redis.url();
    let start = || pods.router(&[("REDIS_URL", &url), ("MEDIA_DRAIN_TIME", "10m")]);
    let mut routers = [start(), start(), start()];
    let rollout = Arc::new(Rollout {
        gateways: Mutex::new(routers.iter().map(|router| router.address).collect()),
        failures: Mutex::default(),
        ended: Mutex::default(),
        over: CancellationToken::new(),
    });
    let lines: Vec<_> =
        (0..LINES).map(|line| tokio::spawn(rollout.clone().place_calls(line))).collect();
    for number in 0..routers.len() {
        let mut leaving = std::mem::replace(&mut routers[number], start());
        // This stream is certainly open at the signal, and until nothing else is.
        let call = format!("CA-drain-{number}");
        let stream_url = stream_url(&leaving, &call);
        let dialect = Dialect::ALL[number];
        let stream = open_conversation(leaving.address, &stream_url, dialect, &call).await;
        let mut streams = BTreeMap::from([(call, stream.unwrap())]);
        *rollout.gateways.lock().unwrap() = routers.iter().map(|it| it.address).collect();
        leaving.signal("TERM");
        eventually(Duration::from_secs(3), "the listener is closed", || {
            Connection::try_open(leaving.address).is_none()
        });
        converse(&mut streams).await;
        assert!(leaving.child.try_wait().unwrap().is_none(), "it relays the stream");
        hang_up_all(streams).await;
        assert_eq!(leaving.wait_for_exit(Duration::from_secs(10)), Some(0));
    }
    rollout.over.cancel();
    for line in lines {
        line.await.unwrap();
    }
    assert_eq!(*rollout.failures.lock().unwrap(), Vec::<String>::new());
    assert!(*rollout.ended.lock().unwrap() >= LINES);
    pods.assert_no_violations();
    expect_free(&routers[0], pods.0.len() as u64);
    expect_invariants(&mut redis.connection(), pods.0.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_of_a_killed_gateway_are_free_and_healthy() {
    const STREAMS: usize = 14;
    const LEASE: Duration = Duration::from_secs(5);
    let (redis, pods) = (RedisServer::start(&[]), EchoPods::start(STREAMS).await);
    let url = redis.url();
    let start = || pods.router(&[("REDIS_URL", &url), ("MEDIA_LEASE", "5s")]);
    let (mut gateway, router) = (start(), start());
    let mut streams = open_streams(&[&gateway], STREAMS).await;
    converse(&mut streams).await;
    gateway.signal("KILL");
    let killed = Instant::now();
    gateway.wait_for_exit(TIMEOUT);
    // Until the lease ends, the pods count as busy: the gateway might be cut off.
    let (_, lease_ends) = gateway_leases(&redis).pop_first().expect("the gateway has a lease");
    let is_free = || router.status()["pools"]["gold"]["available"] == STREAMS as u64;
    eventually(LEASE + Duration::from_secs(2), "the pods are free", || {
        let is_early = redis_time(&redis) < lease_ends;
        is_free() && {
            assert!(!is_early, "the lease has not ended");
            true
        }
    });
    println!("free {:.1} s after the kill, lease {LEASE:?}", killed.elapsed().as_secs_f64());
    for number in 0..STREAMS {
        let (_, pod) = router.get(&format!("/api/v1/pod/agent-{number}"));
        assert_eq!(pod["failures"].as_u64().unwrap_or(0), 0, "{pod}");
    }
    drop(streams);
    let calls: Vec<String> = (0..STREAMS).map(|number| format!("CB{number}")).collect();
    calls.iter().for_each(|call| drop(router.allocate(call)));
    assert_eq!(pods_of(&router, calls.iter()).len(), STREAMS, "every pod serves again");
    pods.assert_no_violations();
}

/// Ends of the leases of the gateways (unix ms).
fn gateway_leases(redis: &RedisServer) -> BTreeMap<String, u64> {
    let all: BTreeMap<String, String> =
        redis::cmd("HGETALL").arg("voice:gateways").query(&mut redis.connection()).unwrap();
    let end = |value: String| value.split(' ').next().unwrap().parse().unwrap();
    all.into_iter().map(|(gateway, value)| (gateway, end(value))).collect()
}

/// Ends of the leases of the calls (unix ms).
fn call_leases(redis: &RedisServer) -> BTreeMap<String, u64> {
    let all: Vec<(String, f64)> = redis::cmd("ZRANGE")
        .arg(&["voice:calls", "0", "-1", "WITHSCORES"])
        .query(&mut redis.connection())
        .unwrap();
    all.into_iter().map(|(call, end)| (call, end as u64)).collect()
}

/// The clock of Redis (unix ms).
fn redis_time(redis: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut redis.connection()).unwrap();
    seconds * 1_000 + micros / 1_000
}

/// An outage with this many streams. `OUTAGE=60` replaces its length in seconds; the lease is
/// then the default of 30 s.
async fn survive_outage(length: Duration, begin: fn(&RedisServer), end: fn(&mut RedisServer)) {
    const STREAMS: usize = 200;
    const SPARE: usize = 20;
    let custom = std::env::var("OUTAGE").ok();
    let custom = custom.map(|text| Duration::from_secs(text.parse().expect("OUTAGE=seconds")));
    let (length, lease) = match custom {
        Some(length) => (length, Duration::from_secs(30)),
        None => (length, Duration::from_secs(5)),
    };
    let mut redis = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let pods = EchoPods::start(STREAMS + SPARE).await;
    let (url, lease_text) = (redis.url(), format!("{}s", lease.as_secs()));
    let settings = [("REDIS_URL", &*url), ("MEDIA_LEASE", &lease_text), ("LOG_LEVEL", "error")];
    let routers = [pods.router(&settings), pods.router(&settings)];
    let mut streams = open_streams(&[&routers[0], &routers[1]], STREAMS).await;
    let busy = pods_of(&routers[0], streams.keys());
    assert_eq!(busy.len(), STREAMS);
    begin(&redis);
    let began = Instant::now();
    while began.elapsed() < length {
        converse(&mut streams).await;
    }
    end(&mut redis);
    println!("Redis was away for {:.1} s", began.elapsed().as_secs_f64());
    // No pod is given twice, beginning with the first moment.
    let mut spare = BTreeSet::new();
    eventually(Duration::from_secs(10), "the spare pods are allocated", || {
        let call = json!({"call_sid": format!("CB{}", spare.len())});
        let (status, answer) = routers[0].post("/api/v1/allocate", call);
        if status == 200 {
            let pod = answer["pod_name"].as_str().unwrap().to_owned();
            assert!(!busy.contains(&pod), "{pod} has a stream and was given to another call");
            spare.insert(pod);
        }
        spare.len() == SPARE
    });
    assert_eq!(routers[1].post("/api/v1/allocate", json!({"call_sid": "CC"})).0, 503);
    // The sweeps that could end calls wrongly come within a lease.
    let back = Instant::now();
    while back.elapsed() < lease + Duration::from_secs(2) {
        converse(&mut streams).await;
    }
    assert_leases(&redis, &streams);
    assert_eq!(pods_of(&routers[1], streams.keys()), busy, "every call is on its pod");
    expect_invariants(&mut redis.connection(), pods.0.len());
    for router in &routers {
        assert_eq!(router.metric("smart_router_pod_conflicts_total"), 0);
    }
    hang_up_all(streams).await;
    for number in 0..SPARE {
        let (status, answer) = routers[0].release(&format!("CB{number}"));
        // A store that is busy with the end of all streams defers a release.
        assert!(matches!(status, 200 | 503), "{status}: {answer}");
    }
    expect_free(&routers[0], (STREAMS + SPARE) as u64);
    pods.assert_no_violations();
}

/// The leases of both gateways and of every call with a stream are in force.
fn assert_leases(redis: &RedisServer, streams: &BTreeMap<String, ProviderStream>) {
    let (now, gateways, calls) = (redis_time(redis), gateway_leases(redis), call_leases(redis));
    assert_eq!(gateways.len(), 2, "{gateways:?}");
    assert!(gateways.values().all(|ends| *ends > now), "{gateways:?} at {now}");
    for call in streams.keys() {
        let ends = calls.get(call).unwrap_or_else(|| panic!("{call} has no lease"));
        assert!(*ends > now, "the lease of {call} has ended");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_survive_a_redis_that_hangs_for_longer_than_the_lease() {
    let length = Duration::from_secs(12);
    survive_outage(length, |redis| redis.signal("STOP"), |redis| redis.signal("CONT")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_survive_a_redis_that_restarts_after_the_lease() {
    // Longer than the lease, and shorter than a gap of sweeps that the store recognises.
    let length = Duration::from_secs(7);
    let restart = |redis: &mut RedisServer| {
        redis.restart(&["--appendonly", "yes", "--appendfsync", "always"]);
    };
    survive_outage(length, |redis| redis.signal("KILL"), restart).await;
}
