//! The life of a call with its stream.

use super::*;
use serde_json::json;
use testkit::{proxy::FaultProxy, redis::RedisServer};

#[tokio::test]
async fn a_call_is_provisional_until_its_stream_attaches() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    assert_eq!(call(&router, "CA1")["is_confirmed"], false);
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    assert_eq!(call(&router, "CA1")["is_confirmed"], true);
    send(&mut provider, "hello").await;
    assert_eq!(next(&mut agent).await, Message::text("hello"));
    assert_eq!(router.metric("smart_router_media_frames_total{from=\"provider\"}"), 1);
}

#[tokio::test]
async fn a_call_whose_stream_never_comes_frees_its_pod_without_a_failure() {
    let (router, server) = router_with_agent(&[("CONNECT_TIMEOUT", "1s")]).await;
    // More than the failures that quarantine a pod.
    for number in 0..4 {
        router.allocate(&format!("CA{number}"));
        expect_free(&router, 1);
    }
    let (_, timeline) = router.get("/api/v1/calls/CA0?events=true");
    assert!(timeline.to_string().contains("unattached"), "{timeline}");
    // A late stream gets its pod again.
    let url = stream_url(&router, "CA9");
    expect_free(&router, 1);
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    send(&mut provider, "late").await;
    assert_eq!(next(&mut agent).await, Message::text("late"));
    assert_eq!(call(&router, "CA9")["pod_name"], "agent-0");
}

#[tokio::test]
async fn a_late_stream_whose_pod_is_taken_gets_another_or_none() {
    let servers = [AgentServer::start().await, AgentServer::start().await];
    let pods = format!("agent-0={},agent-1={}", servers[0].address, servers[1].address);
    let settings =
        [("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 2}"#), ("CONNECT_TIMEOUT", "1s")];
    let router = Router::start(&settings);
    let late = stream_url(&router, "late");
    let first = call(&router, "late")["pod_name"].as_str().unwrap().to_owned();
    expect_free(&router, 2);
    // Takes both pods with streams of their own.
    let mut taken = Vec::new();
    let connect = async |name: String| {
        let url = stream_url(&router, &name);
        let pod = call(&router, &name)["pod_name"].as_str().unwrap().to_owned();
        let server = &servers[usize::from(pod == "agent-1")];
        let (provider, (agent, _)) = tokio::join!(dial(&url), server.stream());
        (pod, provider, agent)
    };
    for name in ["a", "b"] {
        taken.push(connect(name.to_owned()).await);
    }
    let (status, _) = raw_handshake(&router, path_of(&late), UPGRADE).await;
    assert_eq!(status, 503, "no pod is free");
    assert_eq!(refusals(&router, "no_pods"), 1);
    // The pod that the late call did not have becomes free.
    let other = taken.iter().position(|(pod, ..)| *pod != first).unwrap();
    let (pod, provider, agent) = taken.remove(other);
    drop((provider, agent));
    eventually(Duration::from_secs(3), "a pod is free", || router.status()["active_calls"] == 1);
    let server = &servers[usize::from(pod == "agent-1")];
    let (_provider, (_agent, _)) = tokio::join!(dial(&late), server.stream());
    assert_eq!(call(&router, "late")["pod_name"], pod.as_str());
}

#[tokio::test]
async fn a_silent_agent_is_free_after_the_wrap_up_time() {
    let (router, server) = router_with_agent(&[("WRAP_UP_TIME", "1s")]).await;
    let url = stream_url(&router, "CA1");
    let (provider, silent) = tokio::join!(dial(&url), async {
        let (agent, _) = server.stream().await;
        // Neither reads nor closes.
        agent.into_inner()
    });
    let mut provider = provider;
    provider.close(None).await.unwrap();
    eventually(Duration::from_secs(2), "the pod is free", || router.status()["active_calls"] == 0);
    drop(silent);
}

#[tokio::test]
async fn a_stop_message_ends_the_call_like_a_close() {
    let (router, server) = router_with_agent(&[]).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    send(&mut provider, r#"{"event":"connected","protocol":"Call"}"#).await;
    send(&mut provider, r#"{"event":"start","streamSid":"MZ1","start":{"callSid":"CA1"}}"#).await;
    send(&mut provider, r#"{"event":"stop","streamSid":"MZ1"}"#).await;
    for _ in 0..3 {
        assert!(next(&mut agent).await.is_text());
    }
    assert_eq!(close_code(&mut agent).await, Some(1000));
    agent.close(None).await.ok();
    drop(agent);
    assert_eq!(close_code(&mut provider).await, Some(1000));
    expect_free(&router, 1);
}

#[tokio::test]
async fn close_codes_of_an_agent_end_the_call_or_count_as_a_lost_pod() {
    use tokio_tungstenite::tungstenite::protocol::{CloseFrame, frame::coding::CloseCode};
    let (router, server) = router_with_agent(&[("RETRY_ON_DISCONNECT", "0")]).await;
    for (code, expected, cause) in [
        (1000, 1000, "agent"),
        (1008, 1008, "agent"),
        (3000, 3000, "agent"),
        (4999, 4999, "agent"),
        (1001, 1011, "pod_lost"),
        (1011, 1011, "pod_lost"),
        (1012, 1011, "pod_lost"),
    ] {
        let name = format!("CA{code}");
        let (mut provider, mut agent) = open_stream(&router, &server, &name).await;
        let frame = CloseFrame { code: CloseCode::from(code), reason: "".into() };
        agent.close(Some(frame)).await.unwrap();
        drop(agent);
        assert_eq!(close_code(&mut provider).await, Some(expected), "{code}");
        drop(provider);
        eventually(Duration::from_secs(3), "the call has ended", || {
            router.status()["active_calls"] == 0
        });
        let (_, timeline) = router.get(&format!("/api/v1/calls/{name}?events=true"));
        assert!(timeline.to_string().contains(&format!("{cause} ")), "{code}: {timeline}");
    }
}

/// Releases an attached call through another replica where there are two.
async fn release_of_an_attached_call(gateway: &Router, other: &Router, server: &AgentServer) {
    let (mut provider, mut agent) = open_stream(gateway, server, "CA1").await;
    let (status, answer) = other.post("/api/v1/release", json!({"call_sid": "CA1"}));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(close_code(&mut agent).await, Some(1000));
    // The pod is busy until its agent has closed.
    assert_eq!(other.status()["pools"]["gold"]["available"], 0);
    agent.close(None).await.ok();
    drop(agent);
    assert_eq!(close_code(&mut provider).await, Some(1000));
    expect_free(other, 1);
}

#[tokio::test]
async fn the_release_of_an_attached_call_closes_both_sides() {
    let (router, server) = router_with_agent(&[]).await;
    release_of_an_attached_call(&router, &router, &server).await;
}

#[tokio::test]
async fn any_replica_releases_an_attached_call() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let (gateway, server) = router_with_agent(&[("REDIS_URL", &url)]).await;
    let pods = format!("agent-0={}", server.address);
    let settings =
        [("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 1}"#), ("REDIS_URL", &url)];
    let other = Router::start(&settings);
    release_of_an_attached_call(&gateway, &other, &server).await;
}

#[tokio::test]
async fn replicas_share_the_key_of_stream_tokens() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let (first, server) = router_with_agent(&[("REDIS_URL", &url)]).await;
    let pods = format!("agent-0={}", server.address);
    let settings =
        [("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 1}"#), ("REDIS_URL", &url)];
    let second = Router::start(&settings);
    let url = stream_url(&first, "CA1");
    let moved = format!("ws://{}{}", second.address, path_of(&url));
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&moved), server.stream());
    send(&mut provider, "hello").await;
    assert_eq!(next(&mut agent).await, Message::text("hello"));
    let gateway = call(&first, "CA1")["stream"]["gateway"].as_str().unwrap().to_owned();
    assert_eq!(call(&second, "CA1")["stream"]["gateway"], gateway.as_str());
    assert_eq!(call(&second, "CA1")["stream"]["figures"]["from_provider"]["frames"], 1);
    eventually(Duration::from_secs(15), "the figures reach the other replica", || {
        call(&first, "CA1")["stream"]["figures"]["from_provider"]["frames"] == 1
    });
}

#[tokio::test]
async fn a_killed_gateway_frees_its_pods_after_its_lease() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let settings = [("REDIS_URL", url.as_str()), ("MEDIA_LEASE", "3s")];
    let (mut gateway, server) = router_with_agent(&settings).await;
    let pods = format!("agent-0={}", server.address);
    let other = Router::start(&[
        ("PODS", pods.as_str()),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("REDIS_URL", &url),
        ("MEDIA_LEASE", "3s"),
    ]);
    let (_provider, _agent) = open_stream(&gateway, &server, "CA1").await;
    gateway.child.kill().unwrap();
    gateway.child.wait().unwrap();
    assert_eq!(other.status()["pools"]["gold"]["available"], 0);
    expect_free(&other, 1);
    let (_, timeline) = other.get("/api/v1/calls/CA1?events=true");
    assert!(timeline.to_string().contains("gateway "), "{timeline}");
}

#[tokio::test]
async fn streams_are_attached_again_after_the_store_was_wiped() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let settings = [("REDIS_URL", url.as_str()), ("MEDIA_LEASE", "3s")];
    let (router, server) = router_with_agent(&settings).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    redis::cmd("FLUSHALL").query::<()>(&mut redis.connection()).unwrap();
    eventually(Duration::from_secs(10), "the call is known again", || {
        router.get("/api/v1/calls/CA1").0 == 200
    });
    assert_eq!(call(&router, "CA1")["pod_name"], "agent-0");
    assert_eq!(router.status()["pools"]["gold"]["available"], 0);
    send(&mut provider, "still here").await;
    assert_eq!(next(&mut agent).await, Message::text("still here"));
    provider.close(None).await.unwrap();
    close_code(&mut agent).await;
    drop(agent);
    expect_free(&router, 1);
}

#[tokio::test]
async fn the_limit_of_streams_refuses_with_503() {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let tiers = r#"{"gold": {"type": "shared", "target": 1, "max_concurrent": 9}}"#;
    let router = Router::start(&[("PODS", &pods), ("TIER_CONFIG", tiers), ("MAX_STREAMS", "2")]);
    let _first = open_stream(&router, &server, "CA1").await;
    let second = open_stream(&router, &server, "CA2").await;
    let url = stream_url(&router, "CA3");
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 503);
    assert_eq!(refusals(&router, "max_streams"), 1);
    drop(second);
    eventually(Duration::from_secs(3), "a stream has ended", || {
        router.status()["active_calls"] == 2
    });
    let (_provider, (_agent, _)) = tokio::join!(dial(&url), server.stream());
}

#[tokio::test]
async fn the_limit_of_streams_holds_for_handshakes_at_the_same_time() {
    const HANDSHAKES: usize = 12;
    let (server, redis) = (AgentServer::start().await, RedisServer::start(&[]));
    let proxy = FaultProxy::to(redis.port);
    let (pods, url) =
        (format!("agent-0={}", server.address), format!("redis://127.0.0.1:{}", proxy.port()));
    let tiers = r#"{"gold": {"type": "shared", "target": 1, "max_concurrent": 20}}"#;
    let settings =
        [("PODS", &*pods), ("TIER_CONFIG", tiers), ("MAX_STREAMS", "3"), ("REDIS_URL", &*url)];
    let router = Router::start(&settings);
    let (_first, _agent) = open_stream(&router, &server, "CA0").await;
    // Refused by the store, after its admission: its slot is free again.
    let taken = stream_url(&router, "CA0");
    for _ in 0..3 {
        let (status, _) = raw_handshake(&router, path_of(&taken), UPGRADE).await;
        assert_eq!(status, 403);
    }
    let urls: Vec<_> =
        (0..HANDSHAKES).map(|number| stream_url(&router, &format!("CB{number}"))).collect();
    // The store answers when all handshakes have begun.
    proxy.set_latency(Duration::from_millis(30));
    let accept = async {
        let mut agents = Vec::new();
        loop {
            agents.push(server.stream().await);
        }
    };
    let handshakes = urls.iter().map(|url| raw_handshake(&router, path_of(url), UPGRADE));
    let answers = tokio::select! {
        answers = futures_util::future::join_all(handshakes) => answers,
        () = accept => unreachable!(),
    };
    let count = |expected| answers.iter().filter(|(status, _)| *status == expected).count();
    assert_eq!((count(101), count(503)), (2, HANDSHAKES - 2));
    assert_eq!(refusals(&router, "max_streams"), HANDSHAKES as u64 - 2);
}

#[tokio::test]
async fn a_client_that_leaves_during_the_handshake_frees_the_pod() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let request = format!("GET {} HTTP/1.1\r\nHost: t\r\n{UPGRADE}\r\n", path_of(&url));
    stream.write_all(request.as_bytes()).await.unwrap();
    let agent = server.accept().await;
    drop(stream);
    drop(agent);
    expect_free(&router, 1);
}
