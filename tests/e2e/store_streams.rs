//! Media streams in Redis: notifications, outages, manual edits, a full Redis.

use std::{sync::Arc, time::Duration};

use fleet::{
    Allocate, Attach, AttachRefused, Attached, CallLookup, CallStatus, ConnectedStream, Detach,
    EndCause, Heartbeat, NotReleased, Release, Swept,
    rules::GATEWAY_LEASE,
    tiers::{DocumentSource, Tiers},
};
use redis::{Commands, Connection};
use store::{Redis, RedisConfig, Store, StoreError};

use crate::malformed_data::run;
use testkit::{
    proxy::FaultProxy,
    redis::{RedisServer, WRITER, ready_pod, store_config, unix_millis},
};

const LEASE: u64 = 600_000;
/// Lease of gateways; shorter than that of a gateway whose entry was lost.
const LEASE_OF_GATEWAY: u64 = 20_000;
const TIMEOUT: Duration = Duration::from_secs(20);

fn name<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn config(server: &RedisServer) -> RedisConfig {
    let tiers = Tiers::parse(r#"{"gold": 2}"#, DocumentSource::Settings).unwrap().0;
    store_config(server, tiers)
}

async fn start(config: RedisConfig) -> Arc<Redis> {
    let store = Redis::start(config).unwrap();
    store.wait_until_available(Duration::from_secs(5)).await.unwrap();
    store
}

/// A store with the pods `a` and `b`.
async fn start_with_pods(server: &RedisServer) -> Arc<Redis> {
    let store = start(config(server)).await;
    add_pods(&store).await;
    store
}

async fn add_pods(store: &Redis) {
    for pod in ["a", "b"] {
        store.observe_pod(&name(pod), &ready_pod(), WRITER).await.unwrap().unwrap();
    }
}

/// A call whose stream comes through a gateway, with a connect timeout of a second.
fn stream_request(call: &str) -> Allocate {
    let request = Allocate::new(name(call), Some(name("m1")), 1_000);
    Allocate { provisional: true, expects_stream: true, may_return: true, ..request }
}

fn attach_request(call: &str, stream: &str) -> Attach {
    Attach {
        call: name(call),
        pod_attempt: 1,
        gateway: name("g1"),
        gateway_lease: LEASE_OF_GATEWAY,
        stream: name(&format!("{stream:0>16}")),
        lease_ttl: LEASE,
        connected: None,
    }
}

fn detach_request(call: &str, stream: &str) -> Detach {
    let stream = name(&format!("{stream:0>16}"));
    Detach { call: name(call), stream, cause: EndCause::Provider, failure: Default::default() }
}

/// Allocates a pod to a call and attaches its stream.
async fn start_stream(store: &Redis, call: &str, stream: &str) -> Attached {
    store.allocate(&stream_request(call)).await.unwrap().unwrap();
    store.attach(&attach_request(call, stream)).await.unwrap().unwrap()
}

async fn find(store: &Redis, call: &str) -> Option<CallStatus> {
    match store.call(&name(call)).await.unwrap()? {
        CallLookup::Live(call) => Some(call),
        CallLookup::Waiting(call) => panic!("{call:?} waits"),
    }
}

async fn heartbeat(store: &Redis) -> Heartbeat {
    store.heartbeat(&name("g1"), LEASE_OF_GATEWAY, &[]).await.unwrap()
}

async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

#[tokio::test]
async fn a_release_notifies_the_gateway_on_another_replica() {
    let server = RedisServer::start(&[]);
    let gateway = start_with_pods(&server).await;
    let other = start(config(&server)).await;
    start_stream(&gateway, "CA1", "1").await;
    // Messages before the subscription are lost; a subscription notifies all listeners.
    let listener = gateway.endings().listen(&name("g1"));
    tokio::time::timeout(TIMEOUT, async {
        loop {
            let notified = listener.notified();
            if !heartbeat(&gateway).await.ending.is_empty() {
                break;
            }
            let release = Release { cause: EndCause::Operator, ..Release::new(name("CA1"), None) };
            assert!(other.release(&release).await.unwrap().unwrap().is_ending);
            notified.await;
        }
    })
    .await
    .expect("the gateway is notified");
    assert_eq!(
        heartbeat(&gateway).await,
        Heartbeat {
            ending: vec![(name("CA1"), EndCause::Operator)],
            calls: 1,
            unknown: Vec::new()
        }
    );
    let released = gateway.detach(&detach_request("CA1", "1")).await.unwrap().unwrap();
    assert!(!released.is_ending);
    assert_eq!(find(&other, "CA1").await, None);
    assert_eq!(
        other.release(&Release::new(name("CA1"), None)).await,
        Ok(Err(NotReleased::NotFound))
    );
    gateway.close().await;
    other.close().await;
}

#[tokio::test]
async fn streams_work_without_the_permission_to_publish() {
    let server = RedisServer::start(&[]);
    let acl = ("SETUSER", "router", "on", ">pw", "~voice:*", "+@all", "resetchannels");
    redis::cmd("ACL").arg(acl).exec(&mut server.connection()).unwrap();
    let url = server.url().replace("redis://", "redis://router:pw@");
    let store = start(RedisConfig { url, ..config(&server) }).await;
    add_pods(&store).await;
    start_stream(&store, "CA1", "1").await;
    assert!(store.release(&Release::new(name("CA1"), None)).await.unwrap().unwrap().is_ending);
    assert_eq!(heartbeat(&store).await.ending, [(name("CA1"), EndCause::Agent)]);
    store.close().await;
}

#[tokio::test]
async fn a_detach_during_an_outage_is_applied_after_it() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let store = start(RedisConfig { url, ..config(&server) }).await;
    add_pods(&store).await;
    start_stream(&store, "CA1", "1").await;
    start_stream(&store, "CA2", "2").await;
    proxy.refuse_connections(true);
    proxy.reset_connections();
    // A stream that was never attached ends no call.
    for detach in [detach_request("CA1", "1"), detach_request("CA2", "9")] {
        let failed = store.detach(&detach).await.unwrap_err();
        assert!(matches!(failed, StoreError::Unavailable(_)), "{failed}");
    }
    proxy.heal();
    wait_until("the deferred detach is applied", async || {
        store.call(&name("CA1")).await == Ok(None)
    })
    .await;
    assert!(find(&store, "CA2").await.unwrap().stream.is_some());
    store.close().await;
}

#[tokio::test]
async fn a_lost_reply_of_an_attach_is_repeated_for_the_same_stream() {
    let server = RedisServer::start(&[]);
    let proxy = FaultProxy::to(server.port);
    let url = format!("redis://{}", proxy.address);
    let store = start(RedisConfig { url, ..config(&server) }).await;
    add_pods(&store).await;
    store.allocate(&stream_request("CA1")).await.unwrap().unwrap();
    proxy.drop_replies(true);
    let failed = store.attach(&attach_request("CA1", "1")).await;
    proxy.heal();
    assert!(failed.is_err(), "{failed:?}");
    wait_until("the store is available", async || store.call(&name("CA1")).await.is_ok()).await;
    let attached = store.attach(&attach_request("CA1", "1")).await.unwrap().unwrap();
    assert_eq!(Some(attached.pod), find(&store, "CA1").await.map(|call| call.pod));
    store.close().await;
}

#[tokio::test]
async fn a_connected_stream_is_attached_again_to_a_wiped_redis() {
    let server = RedisServer::start(&[]);
    let store = start_with_pods(&server).await;
    let attached = start_stream(&store, "CA1", "1").await;
    run(&mut server.connection(), &["FLUSHALL"]);
    let lost = store.heartbeat(&name("g1"), LEASE_OF_GATEWAY, &[]).await;
    assert!(matches!(lost, Err(StoreError::Unavailable(_))), "{lost:?}");
    wait_until("the store is set up", async || store.outage().is_none()).await;
    assert_eq!(heartbeat(&store).await, Heartbeat::default(), "the store has lost the call");
    let connected =
        ConnectedStream { pod: attached.pod.clone(), age: 0, failovers: 0, merchant: None };
    let connected = Attach { connected: Some(connected), ..attach_request("CA1", "1") };
    let unknown_pod = store.attach(&connected).await.unwrap();
    assert_eq!(unknown_pod, Err(AttachRefused::UnknownPod), "the pod is not observed yet");
    add_pods(&store).await;
    let again = store.attach(&connected).await.unwrap().unwrap();
    assert_eq!((again.pod, again.is_reallocated), (attached.pod, true));
    assert_eq!(heartbeat(&store).await.calls, 1);
    store.close().await;
}

#[tokio::test]
async fn a_full_redis_attaches_and_detaches_streams() {
    let server = RedisServer::start(&[]);
    let store = start_with_pods(&server).await;
    let mut plain = server.connection();
    assert_eq!(store.media_secret("first").await.unwrap(), "first");
    store.allocate(&stream_request("CA1")).await.unwrap().unwrap();
    store.allocate(&stream_request("late")).await.unwrap().unwrap();
    let late = ("ZADD voice:calls 1 late", "ZADD voice:pod:calls:b 1 late");
    run(&mut plain, &[late.0, late.1, "CONFIG SET maxmemory 1"]);
    assert_eq!(store.media_secret("second").await.unwrap(), "first");
    assert!(store.attach(&attach_request("CA1", "1")).await.unwrap().is_ok());
    assert_eq!(heartbeat(&store).await.calls, 1);
    let swept = store.sweep(10).await.unwrap();
    assert_eq!(swept.expired[0].cause, EndCause::Unattached);
    // A call that was admitted before gets a pod again.
    let attached = store.attach(&attach_request("late", "2")).await.unwrap().unwrap();
    assert!(attached.is_reallocated);
    assert!(store.release(&Release::new(name("late"), None)).await.unwrap().unwrap().is_ending);
    for (call, stream) in [("CA1", "1"), ("late", "2")] {
        assert!(store.detach(&detach_request(call, stream)).await.unwrap().is_ok(), "{call}");
    }
    run(&mut plain, &["CONFIG SET maxmemory 0"]);
    store.close().await;
}

#[tokio::test]
async fn a_malformed_stream_counts_as_none() {
    let server = RedisServer::start(&[]);
    let store = start_with_pods(&server).await;
    let mut plain = server.connection();
    start_stream(&store, "intact", "9").await;
    for malformed in ["", "x", "g1", "g1 1", "g1 1 x ", "G1 0000000000000001 5 ", "g1  5 agent"] {
        start_stream(&store, "CA1", "1").await;
        let _: usize = plain.hset("voice:call:CA1", "stream", malformed).unwrap();
        assert_eq!(find(&store, "CA1").await.unwrap().stream, None, "{malformed}");
        store.sweep(10).await.unwrap();
        store.audit().await.unwrap();
        let detached = store.detach(&detach_request("CA1", "1")).await.unwrap();
        assert_eq!(detached, Err(NotReleased::NotFound), "{malformed}");
        let again = store.attach(&attach_request("CA1", "2")).await.unwrap();
        assert!(again.is_ok(), "{malformed}: {again:?}");
        let _: usize = plain.hset("voice:call:CA1", "stream", malformed).unwrap();
        let released = store.release(&Release::new(name("CA1"), None)).await.unwrap().unwrap();
        assert!(!released.is_ending, "{malformed}: no gateway would detach it");
        assert_eq!(find(&store, "CA1").await, None);
    }
    // An unknown cause in a well-formed stream is kept.
    let stream = "g1 0000000000000009 5 rain";
    let _: usize = plain.hset("voice:call:intact", "stream", stream).unwrap();
    let _: usize = plain.zadd("voice:calls", "intact", 1).unwrap();
    let swept = store.sweep(10).await.unwrap();
    assert_eq!(swept.expired[0].cause, EndCause::Lease);
    store.close().await;
}

/// The end of the lease of `g1` and its length.
fn lease(redis: &mut Connection) -> (u64, u64) {
    let entry: String = redis.hget("voice:gateways", "g1").unwrap();
    let (until, lease) = entry.split_once(' ').unwrap();
    (until.parse().unwrap(), lease.parse().unwrap())
}

#[tokio::test]
async fn a_malformed_lease_of_a_gateway_begins_again() {
    let now = unix_millis();
    let server = RedisServer::with_frozen_clock(now);
    let store = start_with_pods(&server).await;
    let mut plain = server.connection();
    start_stream(&store, "CA1", "1").await;
    store.sweep(10).await.unwrap();
    for malformed in ["", "x", "5", "-1 5", "1 x", "1e3 5", "99999999999999999999999 5"] {
        let _: usize = plain.hset("voice:gateways", "g1", malformed).unwrap();
        assert_eq!(store.sweep(10).await.unwrap(), Swept::default(), "{malformed}");
        let expected = if malformed.starts_with('9') { 5 } else { GATEWAY_LEASE };
        assert_eq!(lease(&mut plain), (now + expected, expected), "{malformed}");
        assert_eq!(heartbeat(&store).await.calls, 1);
        assert_eq!(lease(&mut plain), (now + LEASE_OF_GATEWAY, LEASE_OF_GATEWAY));
    }
    store.close().await;
}

#[tokio::test]
async fn a_gateway_lease_ends_after_the_clock_is_set_back() {
    let mut now = unix_millis();
    let server = RedisServer::with_frozen_clock(now);
    let store = start_with_pods(&server).await;
    start_stream(&store, "CA1", "1").await;
    store.sweep(10).await.unwrap();
    now -= 3_600_000;
    server.set_time(now);
    let mut ended = Vec::new();
    for _ in 0..=LEASE_OF_GATEWAY / 5_000 {
        assert_eq!(ended, []);
        ended = store.sweep(10).await.unwrap().expired;
        now += 5_000;
        server.set_time(now);
    }
    assert_eq!(ended[0].cause, EndCause::Gateway, "one lease after the step");
    store.close().await;
}

#[tokio::test]
async fn an_audit_restores_the_indexes_of_gateways() {
    let now = unix_millis();
    let server = RedisServer::with_frozen_clock(now);
    let store = start_with_pods(&server).await;
    let mut plain = server.connection();
    start_stream(&store, "CA1", "1").await;
    start_stream(&store, "CA2", "2").await;
    store.release(&Release::new(name("CA2"), None)).await.unwrap().unwrap();
    assert_eq!(store.audit().await.unwrap().repaired, 0);
    let before = heartbeat(&store).await;
    for edit in [
        "DEL voice:gateway:g1",
        "ZREM voice:gateway:g1 CA1",
        "ZADD voice:gateway:g1 1 CA1 0 CA2",
        "SET voice:gateway:g1 x",
    ] {
        run(&mut plain, &[edit]);
        assert!(store.audit().await.unwrap().repaired > 0, "{edit}");
        assert_eq!(heartbeat(&store).await, before, "{edit}");
    }
    for edit in ["DEL voice:gateways", "HDEL voice:gateways g1", "SET voice:gateways x"] {
        run(&mut plain, &[edit]);
        assert!(store.audit().await.unwrap().repaired > 0, "{edit}");
        assert_eq!(lease(&mut plain), (now + GATEWAY_LEASE, GATEWAY_LEASE), "{edit}");
    }
    store.close().await;
}

#[tokio::test]
async fn a_gateway_ends_no_call_of_another_one() {
    let mut now = unix_millis();
    let server = RedisServer::with_frozen_clock(now);
    let store = start_with_pods(&server).await;
    let mut plain = server.connection();
    start_stream(&store, "CA1", "1").await;
    // A router of the previous version has ended CA2, and g2 has a call of the same id now.
    store.allocate(&stream_request("CA2")).await.unwrap().unwrap();
    let other = Attach { gateway: name("g2"), ..attach_request("CA2", "2") };
    store.attach(&other).await.unwrap().unwrap();
    run(&mut plain, &["ZADD voice:gateway:g1 0 CA2 0 gone 1 released"]);
    assert_eq!(heartbeat(&store).await.ending, [], "there is no such call");
    store.sweep(10).await.unwrap();
    let mut ended = Vec::new();
    for _ in 0..LEASE_OF_GATEWAY / 5_000 {
        now += 5_000;
        server.set_time(now);
        store.heartbeat(&name("g2"), LEASE_OF_GATEWAY, &[]).await.unwrap();
        ended.extend(store.sweep(10).await.unwrap().expired);
    }
    let ended: Vec<_> = ended.iter().map(|it| (it.call.as_str(), it.cause)).collect();
    assert_eq!(ended, [("CA1", EndCause::Gateway)]);
    assert!(!plain.exists::<_, bool>("voice:gateway:g1").unwrap());
    assert_eq!(plain.hkeys::<_, Vec<String>>("voice:gateways").unwrap(), ["g2"]);
    store.close().await;
}

#[tokio::test]
async fn replicas_agree_on_the_key_of_stream_tokens() {
    let server = RedisServer::start(&[]);
    let (first, second) = (start(config(&server)).await, start(config(&server)).await);
    let (one, two) = tokio::join!(first.media_secret("one"), second.media_secret("two"));
    assert_eq!(one, two);
    run(&mut server.connection(), &["DEL voice:media:secret", "LPUSH voice:media:secret x"]);
    let error = first.media_secret("three").await.unwrap_err();
    assert!(error.to_string().contains("voice:media:secret"), "{error}");
    first.close().await;
    second.close().await;
}
