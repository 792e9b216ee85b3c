//! Upkeep of streams in the store, beside what else happens to them.

use super::{
    failover::{Agents, settings, talk},
    *,
};
use serde_json::json;
use testkit::{proxy::FaultProxy, redis::RedisServer};

/// A failover that has reached the store, and whose reply is on its way, is no reason to close the
/// stream: the store knows it under its next id.
#[tokio::test]
async fn a_stream_that_is_attached_again_during_a_failover_goes_on() {
    let (agents, redis) = (Agents::start(3).await, RedisServer::start(&[]));
    let proxy = FaultProxy::to(redis.port);
    let (pods, url) = (agents.pods(), format!("redis://127.0.0.1:{}", proxy.port()));
    let extra = [("REDIS_URL", &*url), ("MEDIA_LEASE", "3s"), ("RETRY_ON_DISCONNECT", "9")];
    let router = Router::start(&settings(&pods, &extra));
    let other = stream_url(&router, "CA2");
    let (_other, (_, mut served, _)) = tokio::join!(dial(&other), agents.stream());
    tokio::spawn(async move { while served.next().await.is_some() {} });
    let url = stream_url(&router, "CA1");
    let (mut provider, (_, mut agent, _)) = tokio::join!(dial(&url), agents.stream());
    send(&mut provider, "opening").await;
    assert_eq!(next(&mut agent).await, Message::text("opening"));
    // The gateway relays more streams than the store lists: each heartbeat attaches all again.
    let mut connection = redis.connection();
    let gateway = call(&router, "CA2")["stream"]["gateway"].as_str().unwrap().to_owned();
    let key = format!("voice:gateway:{gateway}");
    // Notifications cause heartbeats without a pause.
    let notifier = tokio::spawn(async move {
        loop {
            let () = redis::cmd("ZREM").arg(&key).arg("CA2").query(&mut connection).unwrap();
            let () = redis::cmd("PUBLISH")
                .arg("voice:ending")
                .arg(&gateway)
                .query(&mut connection)
                .unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    proxy.set_latency(Duration::from_millis(30));
    for number in 0..9 {
        drop(agent);
        (_, agent, _) = agents.stream().await;
        assert_eq!(next(&mut agent).await, Message::text("opening"), "failover {number}");
        talk(&mut provider, &mut agent).await;
        tokio::time::sleep(Duration::from_millis(17 * number)).await;
    }
    notifier.abort();
}

/// The failover reaches the store, and its reply comes too late: the call has to end under either id.
#[tokio::test]
async fn a_provider_that_hangs_up_before_the_reply_to_a_failover_ends_its_call() {
    let (agents, redis) = (Agents::start(3).await, RedisServer::start(&[]));
    let proxy = FaultProxy::to(redis.port);
    let (pods, url) = (agents.pods(), format!("redis://127.0.0.1:{}", proxy.port()));
    let router = Router::start(&settings(&pods, &[("REDIS_URL", &url)]));
    // Another stream, so that the gateway keeps its lease.
    let other = stream_url(&router, "CA2");
    let (_other, (_, mut served, _)) = tokio::join!(dial(&other), agents.stream());
    tokio::spawn(async move { while served.next().await.is_some() {} });
    let url = stream_url(&router, "CA1");
    let (mut provider, (_, agent, _)) = tokio::join!(dial(&url), agents.stream());
    proxy.set_latency(Duration::from_millis(40));
    drop(agent);
    tokio::time::sleep(Duration::from_millis(20)).await;
    provider.close(None).await.unwrap();
    let is_live = || router.get("/api/v1/calls/CA1").1["state"] == "live";
    let end = async {
        while is_live() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, end).await.expect("the call ends");
}

/// A store that has lost its data, and a repeated request of the provider: the call has another pod
/// than its stream.
#[tokio::test]
async fn a_stream_moves_if_its_call_was_allocated_another_pod() {
    let (agents, redis) = (Agents::start(3).await, RedisServer::start(&[]));
    let (pods, url) = (agents.pods(), redis.url());
    let extra = [("REDIS_URL", &*url), ("MEDIA_LEASE", "30s")];
    let router = Router::start(&settings(&pods, &extra));
    let url = stream_url(&router, "CA1");
    let (mut provider, (number, mut agent, _)) = tokio::join!(dial(&url), agents.stream());
    send(&mut provider, "opening").await;
    assert_eq!(next(&mut agent).await, Message::text("opening"));
    // The first agent answers pings: it is not lost.
    tokio::spawn(async move { while agent.next().await.is_some() {} });
    let mut connection = redis.connection();
    let () = redis::cmd("FLUSHALL").query(&mut connection).unwrap();
    let first = format!("agent-{number}");
    eventually(TIMEOUT, "the call has another pod", || {
        let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
        let is_other = status == 200 && answer["pod_name"] != *first;
        if status == 200 && !is_other {
            // Another call takes the pod.
            router.release("CA1");
            router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
        }
        is_other
    });
    let (number, mut moved, _) = agents.stream().await;
    assert_eq!(next(&mut moved).await, Message::text("opening"));
    talk(&mut provider, &mut moved).await;
    assert_eq!(call(&router, "CA1")["pod_name"], format!("agent-{number}"));
}

/// All keys of a Redis with their values.
fn snapshot(connection: &mut redis::Connection) -> Vec<(Vec<u8>, Vec<u8>)> {
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection).unwrap();
    let dump = |key: Vec<u8>| {
        let value = redis::cmd("DUMP").arg(&key).query(connection).unwrap();
        (key, value)
    };
    keys.into_iter().map(dump).collect()
}

/// Sets a Redis back to a snapshot in one step, as a replica that takes over without the last
/// writes. Leases of the snapshot do not expire.
fn set_back(connection: &mut redis::Connection, snapshot: &[(Vec<u8>, Vec<u8>)]) {
    let mut restore = redis::pipe();
    restore.atomic().cmd("FLUSHDB");
    for (key, value) in snapshot {
        restore.cmd("RESTORE").arg(key).arg(0).arg(value);
    }
    restore.exec(connection).unwrap();
}

/// The store has as many streams of the gateway as before, but other ones: the gateway attaches its
/// stream again, and ends the call of a stream that it relays no more.
#[tokio::test]
async fn streams_are_compared_with_a_store_that_lost_writes() {
    let (agents, redis) = (Agents::start(2).await, RedisServer::start(&[]));
    let (pods, url) = (agents.pods(), redis.url());
    let router = Router::start(&settings(&pods, &[("REDIS_URL", &url), ("MEDIA_LEASE", "3s")]));
    let mut connection = redis.connection();
    let url = stream_url(&router, "CA1");
    let (mut ended, (_, agent, _)) = tokio::join!(dial(&url), agents.stream());
    // Long after the start of the store.
    let () = redis::cmd("HDEL")
        .arg("voice:tiers")
        .arg(":trusting_until")
        .query(&mut connection)
        .unwrap();
    let before = snapshot(&mut connection);
    let body = json!({"call_sid": "CA2", "merchant_id": "acme"});
    let (_, allocated) = router.post("/api/v1/allocate", body);
    let url = allocated["ws_url"].as_str().unwrap();
    let (mut provider, (number, mut served, _)) = tokio::join!(dial(url), agents.stream());
    ended.close(None).await.unwrap();
    drop(agent);
    eventually(TIMEOUT, "the first call is over", || router.get("/api/v1/calls/CA1").0 == 404);
    set_back(&mut connection, &before);
    assert_eq!(router.get("/api/v1/calls/CA1").0, 200);
    eventually(TIMEOUT, "the stream is attached again", || {
        let found = router.get("/api/v1/calls/CA2").1;
        found["pod_name"] == format!("agent-{number}") && found["merchant_id"] == "acme"
    });
    eventually(TIMEOUT, "the call without a stream ends", || {
        router.get("/api/v1/calls/CA1").0 == 404
    });
    talk(&mut provider, &mut served).await;
}

/// Shorter than the interval of heartbeats.
#[tokio::test]
async fn a_live_stream_keeps_a_call_with_a_short_lease() {
    let (router, server) = router_with_agent(&[("LEASE_TTL", "1s")]).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    // Longer than the lease and the interval of sweeps.
    for _ in 0..40 {
        echo(&mut provider, &mut agent, "audio").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(router.status()["active_calls"], 1);
    }
    assert!(call(&router, "CA1")["stream"].is_object());
    hang_up(provider, agent).await;
    expect_free(&router, 1);
}
