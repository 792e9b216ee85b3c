//! Failover: the provider's stream goes on when its pod cannot be reached or is lost.

use super::*;
use serde_json::json;
use testkit::{proxy::FaultProxy, redis::RedisServer};

pub(super) const CONNECTED: &str = r#"{"event":"connected","protocol":"Call","version":"1.0.0"}"#;
pub(super) const START: &str = r#"{"event":"start","streamSid":"MZ1","start":{"callSid":"CA1"}}"#;
pub(super) const CLEAR: &str = r#"{"event":"clear","streamSid":"MZ1"}"#;
pub(super) const MEDIA: &str = r#"{"event":"media","media":{"payload":"AAAA"}}"#;

/// Agents that the test controls, one per exclusive pod.
pub(super) struct Agents(pub(super) Vec<AgentServer>);

impl Agents {
    pub(super) async fn start(count: usize) -> Self {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(AgentServer::start().await);
        }
        Self(servers)
    }

    pub(super) fn pods(&self) -> String {
        let pods = self.0.iter().enumerate();
        let pods = pods.map(|(number, it)| format!("agent-{number}={}", it.address));
        pods.collect::<Vec<_>>().join(",")
    }

    /// The next stream of any pod: the number of the pod, its side, and the request.
    pub(super) async fn stream(&self) -> (usize, Agent, Request) {
        let streams = self.0.iter().enumerate();
        let streams = streams.map(|(number, server)| {
            Box::pin(async move {
                let (agent, request) = server.stream().await;
                (number, agent, request)
            })
        });
        futures_util::future::select_all(streams).await.0
    }

    pub(super) fn server(&self, pod: &Value) -> &AgentServer {
        let number: usize = pod.as_str().unwrap()["agent-".len()..].parse().unwrap();
        &self.0[number]
    }
}

pub(super) fn settings<'a>(pods: &'a str, extra: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut all = vec![("PODS", pods), ("TIER_CONFIG", r#"{"gold": 9}"#)];
    all.extend(extra);
    all
}

/// A router with exclusive pods, and a stream of call `CA1` that has begun.
pub(super) async fn begun_stream(
    count: usize,
    extra: &[(&str, &str)],
) -> (Router, Agents, Provider, usize, Agent) {
    let agents = Agents::start(count).await;
    let pods = agents.pods();
    let router = Router::start(&settings(&pods, extra));
    // With PUBLIC_URL, the stream URL has another host.
    let url = stream_url(&router, "CA1");
    let url = format!("ws://{}{}", router.address, path_of(&url));
    let (mut provider, (number, mut agent, request)) = tokio::join!(dial(&url), agents.stream());
    assert_eq!(request.headers()["x-pod-attempt"], "1");
    for message in [CONNECTED, START] {
        send(&mut provider, message).await;
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    (router, agents, provider, number, agent)
}

/// The next agent of a stream in mid-call begins like the first.
async fn next_agent(agents: &Agents, ordinal: &str) -> (usize, Agent) {
    let (number, mut agent, request) = agents.stream().await;
    assert_eq!(request.headers()["x-pod-attempt"], ordinal);
    assert_eq!(request.headers()["x-call-sid"], "CA1");
    for message in [CONNECTED, START] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    (number, agent)
}

/// Both directions of a stream carry messages.
pub(super) async fn talk(provider: &mut Provider, agent: &mut Agent) {
    send(provider, MEDIA).await;
    // On a slow machine the gateway has pinged the agent meanwhile.
    let received = loop {
        match next(agent).await {
            Message::Ping(_) => {}
            message => break message,
        }
    };
    assert_eq!(received, Message::text(MEDIA));
    agent.send(Message::text("answer")).await.unwrap();
    assert_eq!(next(provider).await, Message::text("answer"));
}

#[tokio::test]
async fn a_call_goes_on_with_another_pod_when_its_pod_is_lost() {
    let (router, agents, mut provider, first, mut agent) = begun_stream(2, &[]).await;
    talk(&mut provider, &mut agent).await;
    drop(agent);
    let (second, mut agent) = next_agent(&agents, "2").await;
    assert_ne!(first, second);
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    talk(&mut provider, &mut agent).await;
    let found = call(&router, "CA1");
    assert_eq!(found["pod_name"], format!("agent-{second}"));
    let (_, timeline) = router.get("/api/v1/calls/CA1?events=true");
    let events = timeline["events"].as_array().unwrap();
    let moved = events.iter().find(|event| event["event"] == "failed_over").unwrap();
    assert_eq!(moved["detail"], format!("pod_lost agent-{first}"));
    assert_eq!(router.metric("smart_router_failover_gap_seconds_count{cause=\"pod_lost\"}"), 1);
    agent.close(None).await.unwrap();
    assert_eq!(close_code(&mut provider).await, Some(1005));
    expect_free(&router, 2);
}

#[tokio::test]
async fn close_codes_of_a_lost_agent_do_not_reach_the_provider() {
    for code in [1001u16, 1011, 1012, 1013] {
        let (_router, agents, mut provider, _, mut agent) = begun_stream(2, &[]).await;
        let frame = tokio_tungstenite::tungstenite::protocol::CloseFrame {
            code: code.into(),
            reason: "".into(),
        };
        agent.close(Some(frame)).await.unwrap();
        let (_, mut agent) = next_agent(&agents, "2").await;
        assert_eq!(next(&mut provider).await, Message::text(CLEAR), "{code}");
        talk(&mut provider, &mut agent).await;
    }
}

#[tokio::test]
async fn a_pod_that_cannot_be_reached_is_replaced_without_a_retry() {
    let agents = Agents::start(1).await;
    // Two ports without a listener, one that accepts and says nothing.
    let silent = AgentServer::start().await;
    let dead = [testkit::free_port(), testkit::free_port()];
    let pods = format!(
        "{},dead-0=127.0.0.1:{},dead-1=127.0.0.1:{},silent=127.0.0.1:{}",
        agents.pods(),
        dead[0],
        dead[1],
        silent.address.port()
    );
    let router = Router::start(&settings(&pods, &[("RETRY_ON_DISCONNECT", "0")]));
    // The living pod is taken last.
    for number in 0..4 {
        let name = format!("CA{number}");
        let url = stream_url(&router, &name);
        if call(&router, &name)["pod_name"] == "agent-0" {
            router.release(&name);
            continue;
        }
        let (mut provider, (_, mut agent, request)) = tokio::join!(dial(&url), agents.stream());
        assert_eq!(request.headers()["x-pod-attempt"], "1", "no conversation has begun");
        talk(&mut provider, &mut agent).await;
        agent.close(None).await.unwrap();
        close_code(&mut provider).await;
        expect_free(&router, 4);
    }
}

#[tokio::test]
async fn a_stream_without_any_pod_to_connect_is_refused() {
    let pods = format!(
        "dead-0=127.0.0.1:{},dead-1=127.0.0.1:{}",
        testkit::free_port(),
        testkit::free_port()
    );
    let router = Router::start(&settings(&pods, &[]));
    let url = stream_url(&router, "CA1");
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 502);
    expect_free(&router, 2);
}

#[tokio::test]
async fn a_lost_pod_without_another_one_closes_with_1013() {
    let (router, agents, mut provider, number, agent) = begun_stream(1, &[]).await;
    // The only pod does not come back.
    let pod = format!("agent-{number}");
    assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
    drop(agent);
    assert_eq!(close_code(&mut provider).await, Some(1013));
    assert!(agents.0[0].is_untouched().await);
    let (_, timeline) = router.get("/api/v1/calls/CA1?events=true");
    assert!(timeline.to_string().contains("pod_lost"), "{timeline}");
}

#[tokio::test]
async fn a_pod_that_restarts_gets_its_call_again_if_it_is_the_only_one() {
    let (_router, agents, mut provider, _, agent) = begun_stream(1, &[]).await;
    drop(agent);
    let (_, mut agent) = next_agent(&agents, "2").await;
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    talk(&mut provider, &mut agent).await;
}

#[tokio::test]
async fn a_call_that_has_lost_too_many_pods_is_closed() {
    let extra = [("RETRY_ON_DISCONNECT", "1")];
    let (router, agents, mut provider, _, agent) = begun_stream(3, &extra).await;
    drop(agent);
    let (_, agent) = next_agent(&agents, "2").await;
    drop(agent);
    assert_eq!(close_code(&mut provider).await, Some(1011));
    expect_free(&router, 3);
    assert_eq!(router.metric("smart_router_failovers_failed_total{cause=\"pod_lost\"}"), 1);
}

#[tokio::test]
async fn an_open_message_of_a_lost_agent_is_finished() {
    let (_router, agents, mut provider, _, mut agent) = begun_stream(2, &[]).await;
    // A first fragment, and half of the next frame.
    agent.get_mut().write_all(b"\x01\x05first\x00\x20half").await.unwrap();
    agent.get_mut().flush().await.unwrap();
    drop(agent);
    assert_eq!(next(&mut provider).await, Message::text("first"));
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    let (_, mut agent) = next_agent(&agents, "2").await;
    talk(&mut provider, &mut agent).await;
}

#[tokio::test]
async fn the_next_agent_begins_with_a_whole_message() {
    let (_router, agents, mut provider, _, mut agent) = begun_stream(2, &[]).await;
    // A fragment of a message, masked with zeros, reaches the first agent; the rest follows later.
    let MaybeTlsStream::Plain(socket) = provider.get_mut() else { unreachable!("plain") };
    socket.write_all(b"\x01\x83\0\0\0\0one").await.unwrap();
    let mut head = [0; 9];
    agent.get_mut().read_exact(&mut head).await.unwrap();
    drop(agent);
    let (_, mut agent) = next_agent(&agents, "2").await;
    let MaybeTlsStream::Plain(socket) = provider.get_mut() else { unreachable!("plain") };
    socket.write_all(b"\x80\x83\0\0\0\0two").await.unwrap();
    assert_eq!(next(&mut provider).await, Message::text(CLEAR));
    talk(&mut provider, &mut agent).await;
}

#[tokio::test]
async fn an_agent_that_dies_inside_a_large_frame_ends_the_stream() {
    let (router, agents, mut provider, _, mut agent) = begun_stream(2, &[]).await;
    let mut frame = b"\x82\x7f\0\0\0\0\0\x01\0\0".to_vec();
    frame.resize(40_000, 7);
    agent.get_mut().write_all(&frame).await.unwrap();
    agent.get_mut().flush().await.unwrap();
    eventually(TIMEOUT, "the frame is relayed", || {
        router.metric("smart_router_media_frames_total{from=\"agent\"}") > 0
    });
    drop(agent);
    assert_eq!(close_code(&mut provider).await, None, "half a frame cannot be closed properly");
    expect_free(&router, 2);
    for server in &agents.0 {
        assert!(server.is_untouched().await);
    }
}

#[tokio::test]
async fn the_agents_of_one_stream_have_one_subprotocol() {
    let agents = Agents::start(2).await;
    let pods = agents.pods();
    let router = Router::start(&settings(&pods, &[]));
    let url = stream_url(&router, "CA1");
    let headers = format!("{UPGRADE}Sec-WebSocket-Protocol: audio.jambonz.org, other\r\n");
    let accept = async |server: &AgentServer, answer: &str| {
        let mut socket = server.accept().await;
        let head = read_head(&mut socket).await;
        let key = head.lines().find_map(|line| line.strip_prefix("Sec-WebSocket-Key: ")).unwrap();
        let accept = media::handshake::accept_key(key.trim());
        let response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {accept}\r\n{answer}\r\n"
        );
        socket.write_all(response.as_bytes()).await.unwrap();
        (socket, head)
    };
    let chosen = "Sec-WebSocket-Protocol: audio.jambonz.org\r\n";
    let first = agents.server(&call(&router, "CA1")["pod_name"]);
    let ((status, _provider), (agent, _)) =
        tokio::join!(raw_handshake(&router, path_of(&url), &headers), accept(first, chosen));
    assert_eq!(status, 101);
    drop(agent);
    let other = agents.0.iter().find(|server| server.address != first.address).unwrap();
    // The second agent chooses none: the first is asked again.
    let (_agent, head) = accept(other, "").await;
    assert!(head.contains("Sec-WebSocket-Protocol: audio.jambonz.org\r\n"), "{head}");
    let (_agent, _) = accept(first, chosen).await;
    eventually(TIMEOUT, "the stream goes on", || {
        router.metric("smart_router_failover_gap_seconds_count{cause=\"pod_lost\"}") == 1
    });
}

/// Two routers on one Redis with exclusive pods.
struct TwoRouters {
    routers: Vec<Router>,
    agents: Agents,
    _redis: RedisServer,
}

async fn two_routers(count: usize, extra: &[(&str, &str)]) -> TwoRouters {
    let (agents, redis) = (Agents::start(count).await, RedisServer::start(&[]));
    let (pods, url) = (agents.pods(), redis.url());
    let mut all = settings(&pods, &[("REDIS_URL", &url)]);
    all.extend(extra);
    let routers = vec![Router::start(&all), Router::start(&all)];
    TwoRouters { routers, agents, _redis: redis }
}

#[tokio::test]
async fn a_call_whose_gateway_is_killed_returns_to_its_pod() {
    let extra = [("PUBLIC_URL", testkit::provider::PUBLIC_URL), ("MEDIA_LEASE", "5s")];
    let TwoRouters { routers, agents, .. } = &mut two_routers(2, &extra).await;
    let (mut gateway, router) = (routers.remove(0), routers.remove(0));
    let document = testkit::provider::start_call(&mut router.connect(), "CA1");
    let pod = call(&router, "CA1")["pod_name"].clone();
    let url = format!("ws://{}{}", gateway.address, document.stream_path());
    let server = agents.server(&pod);
    let (_provider, (agent, _)) = tokio::join!(dial(&url), server.stream());
    let lost = call(&router, "CA1")["stream"]["gateway"].clone();
    gateway.signal("KILL");
    gateway.wait_for_exit(TIMEOUT);
    drop(agent);
    // The provider goes on with its document, long before the lease of the gateway ends.
    let returned = testkit::provider::follow_redirect(&router, "CA1", &document);
    assert_eq!(call(&router, "CA1")["pod_name"], pod, "the pod has not failed");
    let url = format!("ws://{}{}", router.address, returned.stream_path());
    let (mut provider, (mut agent, request)) = tokio::join!(dial(&url), server.stream());
    assert_eq!(request.headers()["x-pod-attempt"], "2");
    talk(&mut provider, &mut agent).await;
    assert_ne!(call(&router, "CA1")["stream"]["gateway"], lost);
    let (_, pod) = router.get(&format!("/api/v1/pod/{}", pod.as_str().unwrap()));
    assert_eq!(pod["failures"].as_u64().unwrap_or(0), 0, "{pod}");
}

#[tokio::test]
async fn a_call_that_ended_normally_is_hung_up_after_its_stream() {
    let extra = [("PUBLIC_URL", testkit::provider::PUBLIC_URL), ("WRAP_UP_TIME", "20s")];
    let TwoRouters { routers, agents, .. } = &two_routers(2, &extra).await;
    for is_agent_first in [true, false] {
        let name = format!("CA{is_agent_first}");
        let document = testkit::provider::start_call(&mut routers[0].connect(), &name);
        let server = agents.server(&call(&routers[0], &name)["pod_name"]);
        let url = format!("ws://{}{}", routers[1].address, document.stream_path());
        let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
        if is_agent_first {
            agent.close(None).await.unwrap();
        } else {
            // The agent takes its time: the provider asks while it finishes.
            provider.close(None).await.unwrap();
            assert_eq!(close_code(&mut agent).await, Some(1005));
        }
        let followed = testkit::provider::follow_redirect(&routers[0], &name, &document);
        assert_eq!(followed.stream_path(), "", "{is_agent_first}");
    }
}

#[tokio::test]
async fn a_pod_that_was_given_twice_keeps_its_first_stream() {
    let (agents, redis) = (Agents::start(2).await, RedisServer::start(&[]));
    let proxy = FaultProxy::to(redis.port);
    let (pods, direct) = (agents.pods(), redis.url());
    let through_proxy = format!("redis://127.0.0.1:{}", proxy.port());
    let start = |url: &str| {
        let extra = [
            ("REDIS_URL", url),
            ("MEDIA_LEASE", "3s"),
            // The provider says nothing until the conflict arises, however slow the machine is.
            ("MEDIA_IDLE_TIMEOUT", "10m"),
            ("LOG_LEVEL", "off"),
        ];
        Router::start(&settings(&pods, &extra))
    };
    let (cut_off, router) = (start(&through_proxy), start(&direct));
    let url = stream_url(&cut_off, "CA1");
    let pod = call(&router, "CA1")["pod_name"].clone();
    let server = agents.server(&pod);
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    proxy.stall_all();
    eventually(TIMEOUT, "the call of the lost gateway ends", || {
        router.status()["active_calls"] == 0
    });
    // The store gives the pod to another call.
    let mut other = None;
    for number in 2..50 {
        let name = format!("CA{number}");
        let url = stream_url(&router, &name);
        if call(&router, &name)["pod_name"] == pod {
            other = Some((name, url));
            break;
        }
        router.release(&name);
    }
    let (name, url) = other.expect("the pod counts as free");
    let (mut other, (mut other_agent, _)) = tokio::join!(dial(&url), server.stream());
    for message in [CONNECTED, START] {
        send(&mut other, message).await;
        assert_eq!(next(&mut other_agent).await, Message::text(message));
    }
    // The gateway that was cut off has relayed all the time, and keeps the pod.
    talk(&mut provider, &mut agent).await;
    proxy.heal();
    let (number, mut moved, request) = agents.stream().await;
    assert_ne!(Value::from(format!("agent-{number}")), pod);
    assert_eq!(request.headers()["x-call-sid"].to_str().unwrap(), name);
    assert_eq!(request.headers()["x-pod-attempt"], "2");
    drop(other_agent);
    // Media before the opening is replayed would be dropped.
    for message in [CONNECTED, START] {
        assert_eq!(next(&mut moved).await, Message::text(message));
    }
    assert_eq!(next(&mut other).await, Message::text(CLEAR));
    talk(&mut other, &mut moved).await;
    talk(&mut provider, &mut agent).await;
    assert_eq!(call(&router, "CA1")["pod_name"], pod);
    // The other gateway may learn of the conflict before the reply to this one.
    eventually(TIMEOUT, "the conflict is counted", || {
        cut_off.metric("smart_router_pod_conflicts_total") == 1
    });
    eventually(TIMEOUT, "the conflict is over", || {
        call(&router, &name)["pod_name"] == format!("agent-{number}")
    });
}

#[tokio::test]
async fn a_provider_that_hangs_up_while_the_store_moves_its_call_frees_the_pod() {
    let (agents, redis) = (Agents::start(2).await, RedisServer::start(&[]));
    let proxy = FaultProxy::to(redis.port);
    let (pods, url) = (agents.pods(), format!("redis://127.0.0.1:{}", proxy.port()));
    let router = Router::start(&settings(&pods, &[("REDIS_URL", &url)]));
    let url = stream_url(&router, "CA1");
    let (mut provider, (_, agent, _)) = tokio::join!(dial(&url), agents.stream());
    // The provider goes between the request to the store and its reply.
    proxy.set_latency(Duration::from_millis(150));
    drop(agent);
    tokio::time::sleep(Duration::from_millis(50)).await;
    provider.close(None).await.unwrap();
    drop(provider);
    tokio::time::sleep(Duration::from_millis(100)).await;
    proxy.set_latency(Duration::ZERO);
    expect_free(&router, 2);
    assert_eq!(router.status()["active_calls"], 0);
}
