//! All documented keys with all wrong types, while a router runs and when it starts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use fleet::{
    Allocate, Attach, CallCursor, CallQuery, Claim, Claimant, Confirm, Confirmed, ConnectedStream,
    Detach, Edit, EndCause, Heartbeat, Hold, PodFacts, PodOrigin, PodWriter, Release, Renew,
    tiers::{DocumentSource, Tiers},
};
use redis::{Connection, cmd};
use store::{Redis, RedisConfig, Store, StoreError};

use testkit::{
    Router, eventually,
    redis::{RedisServer, WRITER, ready_pod, store_config},
};

const LEASE: u64 = 60_000;
const TYPES: [(&str, &[&str]); 6] = [
    ("string", &["SET", "x"]),
    ("list", &["LPUSH", "x"]),
    ("set", &["SADD", "x"]),
    ("zset", &["ZADD", "1", "x"]),
    ("hash", &["HSET", "x", "y"]),
    ("stream", &["XADD", "*", "x", "y"]),
];

/// The treatment of a key of the wrong type.
#[derive(Clone, Copy, PartialEq)]
enum Expected {
    /// An index: all operations succeed, and a sweep or an audit replaces it.
    Replaced,
    /// A fact: the errors of operations that need it name the key; all others succeed.
    Reported,
}
use Expected::{Replaced, Reported};

const KEYS: [(&str, &str, Expected); 35] = [
    ("pool:gold:available", "set", Replaced),
    ("pool:basic:available", "zset", Replaced),
    ("pool:gold:assigned", "set", Replaced),
    ("pool:gold:out", "zset", Replaced),
    ("merchant:acme:pods", "set", Replaced),
    ("pod:tier:busy", "string", Reported),
    ("pod:busy", "hash", Reported),
    ("pod:draining:drained", "string", Reported),
    ("lease:busy", "string", Replaced),
    ("pod:metadata", "hash", Replaced),
    ("call:busy", "hash", Reported),
    ("call:waiting", "hash", Reported),
    ("merchant:config", "hash", Reported),
    ("tier:config", "string", Reported),
    ("pod:calls:busy", "zset", Reported),
    ("calls", "zset", Replaced),
    ("draining", "zset", Replaced),
    ("tiers", "hash", Replaced),
    ("pools", "set", Replaced),
    ("merchant:m1:calls", "zset", Replaced),
    ("merchant:m1:rate", "list", Replaced),
    ("waiting", "zset", Replaced),
    ("queue:gold", "zset", Replaced),
    ("merchant:m1:waiting", "zset", Replaced),
    ("tickets", "string", Replaced),
    ("quarantined", "zset", Replaced),
    ("ended", "zset", Replaced),
    ("events", "stream", Replaced),
    ("leader:epoch", "string", Replaced),
    ("origin", "string", Replaced),
    ("clock", "string", Replaced),
    ("pod_list", "hash", Replaced),
    ("gateways", "hash", Replaced),
    ("gateway:g1", "zset", Replaced),
    ("media:secret", "string", Reported),
];

fn name<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn tiers() -> Tiers {
    let text = r#"{"tiers": {"gold": {"target": 5}, "acme": {"target": 1},
        "basic": {"type": "shared", "target": 1, "max_concurrent": 3}}, "default_chain": ["gold", "basic"]}"#;
    Tiers::parse(text, DocumentSource::Settings).unwrap().0
}

async fn start(server: &RedisServer) -> Arc<Redis> {
    let config = store_config(server, tiers());
    let ttls = store::Ttls { connect: Some(30_000), poll_timeout: Some(30_000), ..config.ttls };
    let store = Redis::start(RedisConfig { ttls, ..config }).unwrap();
    store.wait_until_available(Duration::from_secs(5)).await.unwrap();
    store
}

fn waiting_request(call: &str) -> Allocate {
    let hold =
        Hold { time: 60_000, poll_timeout: 30_000, max_waiting: 10, max_waiting_per_merchant: 10 };
    Allocate { hold: Some(hold), ..request(call) }
}

fn request(call: &str) -> Allocate {
    Allocate::new(name(call), Some(name("m1")), LEASE)
}

/// The stream of call `streamed`.
fn attach_request() -> Attach {
    Attach {
        call: name("streamed"),
        pod_attempt: 0,
        gateway: name("g1"),
        gateway_lease: LEASE,
        stream: name("0000000000000001"),
        lease_ttl: LEASE,
        connected: None,
    }
}

fn detach_request(attached: &Attach) -> Detach {
    let Attach { call, stream, .. } = attached.clone();
    Detach { call, stream, cause: EndCause::Provider, failure: Default::default() }
}

/// Adds pods in every pool, call `busy` on pod `busy`, call `other` on pod `other`, call `streamed`
/// with a stream on pod `streamed`, and a waiting call.
async fn fill(store: &Redis) {
    let document = r#"{"max_calls": 100, "max_rate": 1000, "fallback": ["gold"]}"#;
    store.set_merchant(&name("m1"), Some(document), Edit::ANY).await.unwrap().unwrap();
    let join = async |pod: &str| {
        store.observe_pod(&name(pod), &ready_pod(), WRITER).await.unwrap().unwrap();
    };
    join("acme-0").await;
    for pod in ["busy", "other"] {
        join(pod).await;
        assert_eq!(store.allocate(&waiting_request(pod)).await.unwrap().unwrap().pod, name(pod));
    }
    join("streamed").await;
    store.allocate(&request("streamed")).await.unwrap().unwrap();
    store.attach(&attach_request()).await.unwrap().unwrap();
    store.media_secret("secret").await.unwrap();
    join("drained").await;
    store.drain(&name("drained"), 60_000).await.unwrap().unwrap();
    let pinned = PodFacts { pin: Some(name("basic")), ..ready_pod() };
    store.observe_pod(&name("shared"), &pinned, WRITER).await.unwrap().unwrap();
    store.allocate(&waiting_request("waiting")).await.unwrap().unwrap_err();
}

fn set_wrong_type(redis: &mut Connection, key: &str, (_, command): (&str, &[&str])) {
    cmd("DEL").arg(key).exec(redis).unwrap();
    cmd(command[0]).arg(key).arg(&command[1..]).exec(redis).unwrap();
}

fn type_of(redis: &mut Connection, key: &str) -> String {
    cmd("TYPE").arg(key).query(redis).unwrap()
}

/// Runs all operations. Returns the first error.
async fn run_operations(store: &Redis, key: &str) -> Result<(), String> {
    let named = |operation: &'static str| move |error| format!("{operation}: {error}");
    store.sweep(100).await.map_err(named("sweep"))?;
    // A sweep without a tier table starts a recovery.
    let started = Instant::now();
    while store.outage().is_some() && started.elapsed() < Duration::from_secs(5) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    store.audit().await.map_err(named("audit"))?;
    store.status().await.map_err(named("status"))?;
    store.tiers().await.map_err(named("tiers"))?;
    store.pods().await.map_err(named("pods"))?;
    for waiting in [false, true] {
        let query = CallQuery { waiting, limit: 10, ..CallQuery::default() };
        store.calls(&query).await.map_err(named("calls"))?;
    }
    store.events_before(None, 10).await.map_err(named("events"))?;
    store.extend_pending(1_000).await.map_err(named("extend pending calls"))?;
    let renew = Renew { calls: vec![name("other")], pod: None, lease_ttl: LEASE };
    let renewed = store.renew(&renew).await.map_err(named("renew"))?;
    if !renewed.unknown.is_empty() {
        return Err("the other call is unknown".into());
    }
    // The other call ends, and its pod is handed off to the waiting call, which accepts it. If a
    // queue was lost, the first poll restores the entry.
    let released = store.release(&Release::new(name("other"), None)).await;
    released.map_err(named("release"))?.map_err(|_| "the other call has ended".to_owned())?;
    if key != "call:waiting" {
        let polled = store.allocate(&waiting_request("waiting")).await.map_err(named("accept"))?;
        if polled.is_err() {
            let accepted =
                store.allocate(&waiting_request("waiting")).await.map_err(named("accept"))?;
            accepted.map_err(|refusal| format!("the waiting call: {refusal:?}"))?;
        }
    }
    run_stream_operations(store, key).await?;
    // A list of pods is claimed; a new pod takes a new call; the next call waits.
    let by = Claimant::List { digest: "d".into(), is_new: true };
    let claim = Claim { origin: PodOrigin::List, by, force: false };
    store.claim_pods(&claim).await.map_err(named("claim"))?.unwrap();
    let observed =
        store.observe_pod(&name("new"), &ready_pod(), PodWriter { epoch: 1, ..WRITER }).await;
    observed.map_err(named("observe"))?.unwrap();
    let got = store.allocate(&request("new")).await.map_err(named("allocate"))?;
    got.map_err(|refusal| format!("a new call: {refusal:?}"))?;
    let _ = store.allocate(&waiting_request("late")).await.map_err(named("wait"))?;
    store.drain(&name("new"), 1_000).await.map_err(named("drain"))?.unwrap();
    store.undrain(&name("new")).await.map_err(named("undrain"))?.unwrap();
    store.sweep(100).await.map_err(named("sweep"))?;
    store.audit().await.map_err(named("audit"))?;
    Ok(())
}

/// Serves the stream of a call, and registers another one. Returns the first error.
async fn run_stream_operations(store: &Redis, key: &str) -> Result<(), String> {
    let named = |operation: &'static str| move |error| format!("{operation}: {error}");
    let attached = store.attach(&attach_request()).await.map_err(named("attach"))?;
    attached.map_err(|refused| format!("attach: {refused}"))?;
    let heartbeat = store.heartbeat(&name("g1"), LEASE, &[]).await.map_err(named("heartbeat"))?;
    if heartbeat != (Heartbeat { calls: 1, ..Heartbeat::default() }) {
        return Err(format!("{heartbeat:?}"));
    }
    let lost = Attach {
        call: name("lost"),
        stream: name("0000000000000002"),
        connected: Some(ConnectedStream {
            pod: name("shared"),
            age: 0,
            failovers: 0,
            merchant: None,
        }),
        ..attach_request()
    };
    // A rewritten tier table has no re-registration window.
    if key != "tiers" {
        let registered = store.attach(&lost).await.map_err(named("registration"))?;
        registered.map_err(|refused| format!("registration: {refused}"))?;
        store.detach(&detach_request(&lost)).await.map_err(named("detach"))?.unwrap();
    }
    let release = Release::new(name("streamed"), None);
    let released = store.release(&release).await.map_err(named("release of a stream"))?;
    if !released.is_ok_and(|released| released.is_ending) {
        return Err("the call with a stream has ended".into());
    }
    let detached =
        store.detach(&detach_request(&attach_request())).await.map_err(named("detach"))?;
    detached.map_err(|_| "the stream is detached already")?;
    let got = store.allocate(&request("next")).await.map_err(named("allocate"))?;
    got.map_err(|refusal| format!("the call after a stream: {refusal:?}"))?;
    if key != "media:secret" {
        store.media_secret("secret").await.map_err(named("secret"))?;
    }
    Ok(())
}

#[tokio::test]
async fn a_key_of_the_wrong_type_fails_no_other_operation() {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    let mut failures = Vec::new();
    for (key, right, expected) in KEYS {
        for wrong in TYPES.into_iter().filter(|(name, _)| *name != right) {
            let (key, full) = (key, format!("voice:{key}"));
            cmd("FLUSHALL").exec(&mut redis).unwrap();
            let store = start(&server).await;
            fill(&store).await;
            set_wrong_type(&mut redis, &full, wrong);
            let case = format!("{key} as a {}", wrong.0);
            if let Err(error) = run_operations(&store, key).await {
                failures.push(format!("{case}: {error}"));
            }
            let is = type_of(&mut redis, &full);
            if expected == Replaced && is != right && is != "none" {
                failures.push(format!("{case}: still a {is}"));
            }
            store.close().await;
        }
    }
    assert!(failures.is_empty(), "{}\n{} in all", failures.join("\n"), failures.len());
}

/// The live calls, by name.
async fn live_calls(store: &Redis) -> Result<Vec<String>, StoreError> {
    let page = store.calls(&CallQuery { limit: 10, ..CallQuery::default() }).await?;
    let mut calls: Vec<_> =
        page.calls.iter().map(|found| CallCursor::of(found).call.to_string()).collect();
    calls.sort();
    Ok(calls)
}

/// Serves calls without waiting for a sweep or an audit.
async fn serve_calls(store: &Redis) -> Result<(), String> {
    let named = |operation: &'static str| move |error| format!("{operation}: {error}");
    let renew = Renew { calls: vec![name("other")], pod: None, lease_ttl: LEASE };
    let renewed = store.renew(&renew).await.map_err(named("renew"))?;
    if !renewed.unknown.is_empty() {
        return Err("the other call is unknown".into());
    }
    store.call(&name("busy")).await.map_err(named("call"))?.ok_or("busy is unknown")?;
    let confirm =
        Confirm { call: name("new"), pod: name("free-0"), lease_ttl: LEASE, pod_attempt: None };
    let confirmed = store.confirm(&confirm).await.map_err(named("confirm"))?;
    if confirmed != Confirmed::Live {
        return Err(format!("the new call: {confirmed:?}"));
    }
    let got = store.allocate(&request("next")).await.map_err(named("allocate"))?;
    got.map_err(|refusal| format!("the next call: {refusal:?}"))?;
    let released = store.release(&Release::new(name("busy"), None)).await;
    released.map_err(named("release"))?.map_err(|_| "busy has ended")?;
    // A sweep detects the key, and an audit follows at once.
    store.sweep(100).await.map_err(named("sweep"))?;
    let expected = ["new", "next", "other", "streamed"].map(str::to_owned).to_vec();
    let started = Instant::now();
    loop {
        let (calls, pods) = (live_calls(store).await, store.pods().await.map(|pods| pods.len()));
        if calls == Ok(expected.clone()) && pods == Ok(8) {
            return Ok(());
        }
        if started.elapsed() > Duration::from_secs(20) {
            return Err(format!("after the sweep: {calls:?}, {pods:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn calls_are_served_while_an_index_has_the_wrong_type() {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    let mut failures = Vec::new();
    // A recovery rewrites a tier table of the wrong type.
    let derived = |key: &&(&str, &str, Expected)| key.2 == Replaced && key.0 != "tiers";
    for (key, right, _) in KEYS.iter().filter(derived) {
        let wrong = TYPES.into_iter().find(|(name, _)| name != right).unwrap();
        cmd("FLUSHALL").exec(&mut redis).unwrap();
        let store = start(&server).await;
        fill(&store).await;
        let _ = store.release(&Release::new(name("waiting"), None)).await.unwrap();
        let pinned = PodFacts { pin: Some(name("gold")), ..ready_pod() };
        store.observe_pod(&name("free-0"), &pinned, WRITER).await.unwrap().unwrap();
        let new = Allocate { provisional: true, ..request("new") };
        store.allocate(&new).await.unwrap().unwrap();
        store.observe_pod(&name("free-1"), &pinned, WRITER).await.unwrap().unwrap();
        set_wrong_type(&mut redis, &format!("voice:{key}"), wrong);
        if let Err(error) = serve_calls(&store).await {
            failures.push(format!("{key} as a {}: {error}", wrong.0));
        }
        store.close().await;
    }
    assert!(failures.is_empty(), "{}\n{} in all", failures.join("\n"), failures.len());
}

#[tokio::test]
async fn an_error_names_a_merchant_key_of_the_wrong_type() {
    let server = RedisServer::start(&[]);
    let store = start(&server).await;
    set_wrong_type(&mut server.connection(), "voice:merchant:config", TYPES[0]);
    let all = store.merchants(None, 10).await.unwrap_err();
    let one = store.merchant(&name("m1")).await.unwrap_err();
    for error in [all, one] {
        assert!(error.to_string().contains("voice:merchant:config"), "{error}");
    }
    store.close().await;
}

#[test]
fn readiness_shows_the_reason_of_a_failed_recovery() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let router = Router::start(&[("REDIS_URL", &*url), ("LOG_LEVEL", "off")]);
    let mut redis = server.connection();
    set_wrong_type(&mut redis, "voice:schema", TYPES[1]);
    let reason = || router.get("/ready").1["reason"].to_string();
    // An outage ends with a recovery.
    for (rule, word) in [("-fcall", "NOPERM"), ("+fcall", "voice:schema")] {
        cmd("ACL").arg("SETUSER").arg("default").arg(rule).exec(&mut redis).unwrap();
        eventually(Duration::from_secs(10), word, || reason().contains(word));
    }
    cmd("SET").arg("voice:schema").arg(2).exec(&mut redis).unwrap();
    eventually(Duration::from_secs(10), "the store is up", || reason() == "null");
}

#[test]
fn a_router_is_ready_although_the_key_of_a_pod_has_the_wrong_type() {
    let server = RedisServer::start(&[]);
    let settings = [
        ("REDIS_URL", &*server.url()),
        ("PODS", "a=h:1,b=h:2,c=h:3"),
        ("VOICE_AGENT_BASE_URL", "wss://v"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("LOG_LEVEL", "off"),
    ];
    drop(Router::start(&settings));
    let mut redis = server.connection();
    set_wrong_type(&mut redis, "voice:pod:b", TYPES[0]);
    cmd("DEL").arg(&["voice:pod:c", "voice:pod:metadata"]).exec(&mut redis).unwrap();
    let router = Router::start(&settings);
    let given = ["1", "2"].map(|call| router.allocate(call)["pod_name"].clone());
    assert!(given.iter().all(|pod| pod == "a" || pod == "c"), "{given:?}");
}

#[tokio::test]
async fn a_router_starts_with_a_key_of_the_wrong_type() {
    let server = RedisServer::start(&[]);
    let mut redis = server.connection();
    let mut failures = Vec::new();
    for (key, right, _) in KEYS {
        for wrong in TYPES.into_iter().filter(|(name, _)| *name != right) {
            let (key, full) = (key, format!("voice:{key}"));
            cmd("FLUSHALL").exec(&mut redis).unwrap();
            let store = start(&server).await;
            fill(&store).await;
            store.close().await;
            set_wrong_type(&mut redis, &full, wrong);
            let store = start(&server).await;
            let case = format!("{key} as a {}", wrong.0);
            if let Some(reason) = store.outage() {
                failures.push(format!("{case}: not started: {reason}"));
            } else if let Err(error) = run_operations(&store, key).await {
                failures.push(format!("{case}: {error}"));
            }
            store.close().await;
        }
    }
    assert!(failures.is_empty(), "{}\n{} in all", failures.join("\n"), failures.len());
}
