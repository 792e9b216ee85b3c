//! Streams in mid-call that wait for a pod, where calls may wait.

use super::{
    failover::{CLEAR, CONNECTED, MEDIA, START, begun_stream, talk},
    *,
};
use serde_json::json;

#[tokio::test]
async fn a_call_in_mid_stream_waits_for_a_free_pod_where_calls_may_wait() {
    let extra = [("HOLD_TIME", "30s"), ("HOLD_POLL", "1s"), ("PUBLIC_URL", "http://localhost")];
    let (router, agents, mut provider, first, agent) = begun_stream(2, &extra).await;
    let other = router.allocate("CA2");
    let drained = format!("agent-{first}");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": drained})).0, 200);
    drop(agent);
    eventually(TIMEOUT, "the call waits", || router.status()["waiting"] == 1);
    // A provider without an agent still gets answers to its pings.
    provider.send(Message::Ping("are you there".into())).await.unwrap();
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    assert_eq!(next(&mut provider).await, Message::Pong("are you there".into()));
    send(&mut provider, MEDIA).await;
    assert_eq!(router.release("CA2").0, 200);
    let server = agents.server(&other["pod_name"]);
    let (mut agent, request) = server.stream().await;
    assert_eq!(request.headers()["x-pod-attempt"], "2");
    for message in [CONNECTED, START] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    talk(&mut provider, &mut agent).await;
}

#[tokio::test]
async fn a_provider_that_hangs_up_during_a_failover_frees_the_call() {
    // A queue entry without polls would last for three times HOLD_POLL.
    let extra = [("HOLD_TIME", "200s"), ("HOLD_POLL", "60s"), ("PUBLIC_URL", "http://localhost")];
    let (router, _agents, mut provider, first, agent) = begun_stream(2, &extra).await;
    router.allocate("CA2");
    let drained = format!("agent-{first}");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": drained})).0, 200);
    drop(agent);
    eventually(TIMEOUT, "the call waits", || router.status()["waiting"] == 1);
    provider.close(None).await.unwrap();
    let left = std::time::Instant::now();
    eventually(TIMEOUT, "the call is gone", || router.status()["waiting"] == 0);
    assert!(left.elapsed() < Duration::from_secs(120), "it leaves the queue itself");
    assert_eq!(router.status()["active_calls"], 1);
}

#[tokio::test]
async fn a_waiting_stream_whose_call_is_released_is_closed() {
    let extra = [("HOLD_TIME", "60s"), ("HOLD_POLL", "1s"), ("PUBLIC_URL", "http://localhost")];
    let (router, _agents, mut provider, first, agent) = begun_stream(2, &extra).await;
    router.allocate("CA2");
    let drained = format!("agent-{first}");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": drained})).0, 200);
    drop(agent);
    eventually(TIMEOUT, "the call waits", || router.status()["waiting"] == 1);
    assert_eq!(router.release("CA1").0, 200);
    assert_eq!(close_code(&mut provider).await, Some(1000));
    eventually(TIMEOUT, "the queue is empty", || router.status()["waiting"] == 0);
}

#[tokio::test]
async fn pods_that_cannot_be_reached_are_tried_for_the_hold_time() {
    let extra = [("HOLD_TIME", "60s"), ("HOLD_POLL", "1s"), ("PUBLIC_URL", "http://localhost")];
    let (router, mut agents, mut provider, first, agent) = begun_stream(2, &extra).await;
    let other = router.allocate("CA2");
    // The pod counts as in service, although its agent is gone.
    let gone = agents.0.swap_remove(first);
    drop((agent, gone));
    // More than within the five seconds of a router without a hold time.
    eventually(TIMEOUT, "many connections fail", || {
        router.metric("smart_router_pod_connect_duration_seconds_count{result=\"error\"}") > 20
    });
    assert_eq!(router.release("CA2").0, 200);
    let (mut agent, request) = agents.0[0].stream().await;
    assert_eq!(request.headers()["x-pod-attempt"], "2");
    for message in [CONNECTED, START] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    talk(&mut provider, &mut agent).await;
    assert_eq!(call(&router, "CA1")["pod_name"], other["pod_name"]);
}
