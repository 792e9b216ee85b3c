//! Allocate at connect: streams that no webhook has announced.

use super::*;
use serde_json::json;
use testkit::{proxy::FaultProxy, redis::RedisServer};
use tokio_tungstenite::tungstenite::{client::IntoClientRequest, http::HeaderValue};

pub(super) const SECRET: &str = "connect-secret-0123456789";
pub(super) const CONNECTED: &str = r#"{"event":"connected","protocol":"Call","version":"1.0.0"}"#;
const MEDIA: &str = r#"{"event":"media","media":{"payload":"AAAA"}}"#;
const PROTOCOL: &str = "sec-websocket-protocol";

/// Opens the stream of a provider, with its subprotocol if it has one.
async fn connect(router: &Router, target: &str) -> Provider {
    let url = format!("ws://{}/connect/{target}", router.address);
    let mut request = url.into_client_request().unwrap();
    if target.starts_with("jambonz") {
        let protocol = HeaderValue::from_static("audio.jambonz.org");
        request.headers_mut().insert(PROTOCOL, protocol);
    }
    connect_async(request).await.expect("the gateway accepts the stream").0
}

/// Opens a stream at `/connect/twilio` and sends its opening.
async fn connect_call(router: &Router, call: &str) -> Provider {
    let mut provider = connect(router, &format!("twilio/{SECRET}")).await;
    for message in [CONNECTED, &start(call)] {
        send(&mut provider, message).await;
    }
    provider
}

pub(super) fn start(call: &str) -> String {
    let start = json!({"callSid": call, "customParameters": {}});
    json!({"event": "start", "streamSid": "MZ1", "start": start}).to_string()
}

/// Accepts a stream as an agent that chooses the subprotocol that it is offered.
pub(super) async fn accept(server: &AgentServer) -> (Agent, Request) {
    let mut seen = None;
    let socket = server.accept().await;
    #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
    let choose = |request: &Request, mut response: Response| {
        if let Some(offer) = request.headers().get(PROTOCOL) {
            response.headers_mut().insert(PROTOCOL, offer.clone());
        }
        seen = Some(request.clone());
        Ok(response)
    };
    let agent = accept_hdr_async(socket, choose).await.unwrap();
    (agent, seen.unwrap())
}

/// The agent of a Twilio call gets its opening; then both directions carry messages.
pub(super) async fn begin(provider: &mut Provider, server: &AgentServer, call: &str) -> Agent {
    let (mut agent, request) = accept(server).await;
    assert_eq!(request.headers()["x-call-sid"], call);
    for message in [CONNECTED, &start(call)] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    talk(provider, &mut agent, Message::text(MEDIA)).await;
    agent
}

async fn talk(provider: &mut Provider, agent: &mut Agent, media: Message) {
    provider.send(media.clone()).await.unwrap();
    assert_eq!(next(agent).await, media);
    agent.send(media.clone()).await.unwrap();
    assert_eq!(next(provider).await, media);
}

/// The calls that exist.
fn calls(router: &Router) -> Vec<Value> {
    let (_, page) = router.get("/api/v1/calls");
    page["calls"].as_array().unwrap().clone()
}

async fn router_with_secret(extra: &[(&str, &str)]) -> (Router, AgentServer) {
    let mut settings = vec![("CONNECT_SECRET", SECRET), ("RATE_LIMIT", "off")];
    settings.extend(extra);
    router_with_agent(&settings).await
}

/// A provider's call: its name, query, opening messages, media, and the id of the call.
type Format = (&'static str, &'static str, Vec<String>, Message, Option<&'static str>);

fn formats() -> Vec<Format> {
    let custom = json!({"merchant_id": "acme", "template": "hello"});
    let (connected, query) = (CONNECTED.to_owned(), "?merchant_id=acme&template=hello");
    let twilio = |call: &str, stream: &str| {
        json!({"event": "start", "streamSid": stream,
            "start": {"callSid": call, "customParameters": custom}})
        .to_string()
    };
    let plivo = json!({"event": "start", "start": {"callId": "p-1", "streamId": "s"}});
    let exotel = json!({"event": "start", "stream_sid": "s",
        "start": {"call_sid": "e-1", "custom_parameters": custom}});
    let telnyx = json!({"event": "start", "stream_id": "s",
        "start": {"call_control_id": "v3:t-1", "custom_parameters": custom}});
    let vonage = json!({"event": "websocket:connected", "content-type": "audio/l16;rate=16000",
        "merchant_id": "acme", "template": "hello"});
    let jambonz = json!({"callSid": "j-1", "sampleRate": 8000, "metadata": custom});
    let (text, binary) = (Message::text(MEDIA), Message::binary(vec![7u8; 640]));
    let (twilio, signalwire) = (twilio("CA1", "MZ1"), twilio("s-1", "0b1c"));
    vec![
        ("twilio", "", vec![connected.clone(), twilio], text.clone(), Some("CA1")),
        ("signalwire", "", vec![connected.clone(), signalwire], text.clone(), Some("s-1")),
        ("plivo", query, vec![plivo.to_string()], text.clone(), Some("p-1")),
        ("exotel", "", vec![connected.clone(), exotel.to_string()], text.clone(), Some("e-1")),
        ("telnyx", "", vec![connected, telnyx.to_string()], text, Some("v3:t-1")),
        ("vonage", "", vec![vonage.to_string()], binary.clone(), None),
        ("jambonz", "", vec![jambonz.to_string()], binary, Some("j-1")),
    ]
}

#[tokio::test]
async fn streams_of_all_providers_get_a_pod_when_they_connect() {
    let (router, server) = router_with_secret(&[]).await;
    for (name, query, opening, media, id) in formats() {
        let mut provider = connect(&router, &format!("{name}/{SECRET}{query}")).await;
        for message in &opening {
            send(&mut provider, message).await;
        }
        let (mut agent, request) = accept(&server).await;
        for message in &opening {
            assert_eq!(next(&mut agent).await, Message::text(message.as_str()), "{name}");
        }
        talk(&mut provider, &mut agent, media).await;
        let path = format!("/agent/voice/breeze-buddy/{name}/callback/hello/v2");
        assert_eq!(request.uri().path_and_query().unwrap().as_str(), path);
        assert_eq!(request.headers()["x-merchant-id"], "acme");
        let live = calls(&router);
        assert_eq!(live.len(), 1, "{name}");
        let sid = live[0]["call_sid"].as_str().unwrap();
        assert_eq!(request.headers()["x-call-sid"], sid);
        match id {
            Some(id) => assert_eq!(sid, id),
            None => assert_eq!(sid.len(), 36, "a generated UUID: {sid}"),
        }
        let found = call(&router, sid);
        assert_eq!(found["merchant_id"], "acme");
        assert_eq!(found["is_confirmed"], true);
        assert_eq!(found["stream"]["figures"]["provider"], name, "{found}");
        provider.close(None).await.unwrap();
        assert_eq!(close_code(&mut agent).await, Some(1005));
        drop(agent);
        expect_free(&router, 1);
    }
}

#[tokio::test]
async fn the_query_and_other_headers_do_not_reach_the_agent() {
    let (router, server) = router_with_secret(&[]).await;
    let target = format!("twilio/{SECRET}?merchant_id=acme&flow=v1&other=x");
    let mut provider = connect(&router, &target).await;
    let own = json!({"callSid": "CA1", "customParameters": {"merchant_id": "not-this-one"}});
    let own = json!({"event": "start", "streamSid": "MZ1", "start": own}).to_string();
    send(&mut provider, &own).await;
    let (mut agent, request) = accept(&server).await;
    assert_eq!(request.uri().query(), None);
    assert_eq!(
        request.uri().path(),
        "/agent/voice/breeze-buddy/twilio/callback/order-confirmation"
    );
    assert_eq!(request.headers()["x-merchant-id"], "acme");
    assert_eq!(next(&mut agent).await, Message::text(own), "parameters stay in the message");
}

#[tokio::test]
async fn a_lost_pod_is_replaced_and_the_next_agent_gets_the_opening() {
    let (router, server) = router_with_secret(&[]).await;
    let mut provider = connect_call(&router, "CA1").await;
    let agent = begin(&mut provider, &server, "CA1").await;
    drop(agent);
    let (mut agent, request) = accept(&server).await;
    assert_eq!(request.headers()["x-pod-attempt"], "2");
    for message in [CONNECTED, &start("CA1")] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    let clear = next(&mut provider).await;
    assert_eq!(clear, Message::text(r#"{"event":"clear","streamSid":"MZ1"}"#));
    talk(&mut provider, &mut agent, Message::text(MEDIA)).await;
}

#[tokio::test]
async fn a_start_that_is_not_one_closes_with_1008() {
    let (router, server) = router_with_secret(&[]).await;
    let huge =
        format!(r#"{{"event":"start","start":{{"callSid":"CA1","x":"{}"}}}}"#, "x".repeat(17_000));
    let messages = [
        Message::text("{"),
        Message::text("hello"),
        Message::text("[]"),
        Message::text(MEDIA),
        Message::text(r#"{"event":"start","start":{}}"#),
        Message::text(r#"{"event":"start","start":{"callId":"CA1"}}"#),
        Message::text(start("not a name")),
        Message::text(start("../CA1")),
        Message::text(huge),
        Message::text("x".repeat(300_000)),
        Message::binary(vec![0u8; 320]),
    ];
    let count = messages.len() as u64;
    for message in messages {
        let shown = message.to_string()[..message.len().min(80)].to_owned();
        let mut provider = connect(&router, &format!("twilio/{SECRET}")).await;
        send(&mut provider, CONNECTED).await;
        provider.send(message).await.unwrap();
        assert_eq!(close_code(&mut provider).await, Some(1008), "{shown}");
    }
    assert_eq!(refusals(&router, "invalid_start"), count);
    assert!(server.is_untouched().await);
    expect_free(&router, 1);
}

#[tokio::test]
async fn a_violation_of_the_protocol_closes_with_1002() {
    let (router, server) = router_with_secret(&[]).await;
    let path = format!("/connect/twilio/{SECRET}");
    let (status, mut stream) = raw_handshake(&router, &path, UPGRADE).await;
    assert_eq!(status, 101);
    // A frame without a mask.
    stream.write_all(b"\x81\x02{}").await.unwrap();
    let mut close = [0; 4];
    timeout(TIMEOUT, stream.read_exact(&mut close)).await.unwrap().unwrap();
    assert_eq!(close, [0x88, 2, 3, 234]);
    eventually(TIMEOUT, "the refusal is counted", || refusals(&router, "invalid_start") == 1);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn a_start_that_never_comes_closes_with_1008() {
    let (router, server) = router_with_secret(&[]).await;
    let mut silent = connect(&router, &format!("twilio/{SECRET}")).await;
    let mut talking = connect(&router, &format!("twilio/{SECRET}")).await;
    send(&mut talking, CONNECTED).await;
    let (silent, talking) = tokio::join!(close_code(&mut silent), close_code(&mut talking));
    assert_eq!((silent, talking), (Some(1008), Some(1008)));
    assert_eq!(refusals(&router, "no_start"), 2);
    assert!(server.is_untouched().await);
    expect_free(&router, 1);
}

#[tokio::test]
async fn the_id_of_a_call_that_exists_is_refused_and_the_call_goes_on() {
    let (router, server) = router_with_secret(&[("TIER_CONFIG", r#"{"gold": 3}"#)]).await;
    let mut provider = connect_call(&router, "CA1").await;
    let mut agent = begin(&mut provider, &server, "CA1").await;
    let before = call(&router, "CA1");
    let mut second = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut second).await, Some(1008));
    assert_eq!(refusals(&router, "call_exists"), 1);
    assert_eq!(call(&router, "CA1")["allocated_at"], before["allocated_at"]);
    talk(&mut provider, &mut agent, Message::text(MEDIA)).await;
    assert!(server.is_untouched().await);
    agent.close(None).await.unwrap();
    close_code(&mut provider).await;
    expect_free(&router, 1);
    // The id is free again: a document may connect the same call once more.
    let mut again = connect_call(&router, "CA1").await;
    begin(&mut again, &server, "CA1").await;
}

#[tokio::test]
async fn a_call_that_a_webhook_has_allocated_is_refused() {
    let two_calls = r#"{"gold": {"type": "shared", "target": 1, "max_concurrent": 2}}"#;
    let (router, server) = router_with_secret(&[("TIER_CONFIG", two_calls)]).await;
    let url = stream_url(&router, "CA1");
    let before = call(&router, "CA1");
    // Leases are shown in seconds: a lease that began now ends later, so that an extension shows.
    eventually(TIMEOUT, "a second passes", || {
        router.allocate("CA2");
        let other = call(&router, "CA2");
        router.release("CA2");
        other["lease_expires_at"] != before["lease_expires_at"]
    });
    let mut other = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut other).await, Some(1008));
    assert_eq!(call(&router, "CA1")["lease_expires_at"], before["lease_expires_at"]);
    assert!(server.is_untouched().await);
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    talk(&mut provider, &mut agent, Message::text(MEDIA)).await;
}

/// Several sockets with the same call id at once: one gets the pod, the others are refused.
async fn race(router: &Router, server: &AgentServer, round: usize) {
    let name = format!("CA{round}");
    let sockets = futures_util::future::join_all((0..4).map(|_| connect_call(router, &name)));
    let mut sockets = sockets.await;
    let (mut agent, _) = accept(server).await;
    for message in [CONNECTED, &start(&name)] {
        assert_eq!(next(&mut agent).await, Message::text(message));
    }
    agent.send(Message::text("hello")).await.unwrap();
    let mut winner = None;
    for mut socket in sockets.drain(..) {
        match next(&mut socket).await {
            Message::Close(frame) => assert_eq!(u16::from(frame.unwrap().code), 1008),
            message => {
                assert_eq!(message, Message::text("hello"));
                assert!(winner.replace(socket).is_none(), "one stream has the pod");
            }
        }
    }
    let mut winner = winner.expect("one stream has the pod");
    assert_eq!(router.status()["active_calls"], 1);
    talk(&mut winner, &mut agent, Message::text(MEDIA)).await;
    assert!(server.is_untouched().await);
    agent.close(None).await.unwrap();
    close_code(&mut winner).await;
    expect_free(router, 3);
}

#[tokio::test]
async fn one_of_several_streams_with_the_same_call_gets_the_pod() {
    let redis = RedisServer::start(&[]);
    for store in [None, Some(redis.url())] {
        let server = AgentServer::start().await;
        let pods: Vec<String> = (0..3).map(|it| format!("agent-{it}={}", server.address)).collect();
        let pods = pods.join(",");
        let mut settings = vec![("CONNECT_SECRET", SECRET), ("PODS", &pods)];
        settings.push(("TIER_CONFIG", r#"{"gold": 3}"#));
        settings.extend(store.as_deref().map(|url| ("REDIS_URL", url)));
        let router = Router::start(&settings);
        for round in 0..5 {
            race(&router, &server, round).await;
        }
    }
}

#[tokio::test]
async fn a_stream_without_a_free_pod_closes_with_1013() {
    let (router, server) = router_with_secret(&[]).await;
    router.allocate("CA0");
    let mut provider = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut provider).await, Some(1013));
    assert_eq!(refusals(&router, "no_pods"), 1);
    assert!(server.is_untouched().await);
    assert_eq!(calls(&router).len(), 1);
}

#[tokio::test]
async fn a_stream_whose_pods_cannot_be_reached_closes_with_1013() {
    let pods = format!("dead=127.0.0.1:{}", testkit::free_port());
    let settings = [("CONNECT_SECRET", SECRET), ("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    let router = Router::start(&settings);
    let mut provider = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut provider).await, Some(1013));
    eventually(TIMEOUT, "the call has ended", || router.status()["active_calls"] == 0);
}

const HOLD: [(&str, &str); 3] =
    [("HOLD_TIME", "30s"), ("HOLD_POLL", "1s"), ("PUBLIC_URL", "http://localhost")];

#[tokio::test]
async fn a_stream_waits_for_a_pod_where_calls_may_wait() {
    let (router, server) = router_with_secret(&HOLD).await;
    router.allocate("CA0");
    let mut provider = connect_call(&router, "CA1").await;
    eventually(TIMEOUT, "the call waits", || router.status()["waiting"] == 1);
    let mut second = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut second).await, Some(1008), "the waiting call exists");
    provider.send(Message::Ping("are you there".into())).await.unwrap();
    assert_eq!(next(&mut provider).await, Message::Pong("are you there".into()));
    assert_eq!(router.status()["waiting"], 1);
    assert_eq!(router.release("CA0").0, 200);
    begin(&mut provider, &server, "CA1").await;
}

#[tokio::test]
async fn a_waiting_stream_that_ends_leaves_the_queue() {
    // The call would lose its queue entry only after three missed polls.
    let mut settings = HOLD.to_vec();
    settings[0..2].copy_from_slice(&[("HOLD_TIME", "10m"), ("HOLD_POLL", "60s")]);
    let (router, server) = router_with_secret(&settings).await;
    router.allocate("CA0");
    let mut provider = connect_call(&router, "CA1").await;
    eventually(TIMEOUT, "the call waits", || router.status()["waiting"] == 1);
    provider.close(None).await.unwrap();
    eventually(Duration::from_secs(3), "the call has left", || router.status()["waiting"] == 0);
    assert_eq!(router.release("CA0").0, 200);
    expect_free(&router, 1);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn a_wait_that_is_over_closes_with_1013() {
    let mut settings = HOLD.to_vec();
    settings[0] = ("HOLD_TIME", "1s");
    let (router, _server) = router_with_secret(&settings).await;
    router.allocate("CA0");
    let mut provider = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut provider).await, Some(1013));
    assert_eq!(router.status()["waiting"], 0);
}

#[tokio::test]
async fn a_provider_that_hangs_up_during_the_allocation_leaves_nothing_behind() {
    let redis = RedisServer::start(&[]);
    let proxy = FaultProxy::to(redis.port);
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    // The sweep is too late to end the call.
    let settings = [("REDIS_URL", url.as_str()), ("CONNECT_TIMEOUT", "10m")];
    let (router, server) = router_with_secret(&settings).await;
    proxy.set_latency(Duration::from_millis(100));
    let mut provider = connect_call(&router, "CA1").await;
    let mut direct = redis.connection();
    eventually(TIMEOUT, "Redis has allocated the call; the router does not know yet", || {
        redis::cmd("EXISTS").arg("voice:call:CA1").query::<bool>(&mut direct).unwrap()
    });
    provider.close(None).await.unwrap();
    proxy.set_latency(Duration::ZERO);
    eventually(Duration::from_secs(5), "the call has ended", || {
        !redis::cmd("EXISTS").arg("voice:call:CA1").query::<bool>(&mut direct).unwrap()
    });
    // Ended by the gateway that allocated it, not by a sweep.
    let (_, timeline) = router.get("/api/v1/calls/CA1?events=true");
    let events = timeline["details"]["events"].as_array().unwrap();
    let ended = events.iter().find(|event| event["event"] == "ended").unwrap();
    assert!(ended["detail"].as_str().unwrap().starts_with("provider "), "{timeline}");
    expect_free(&router, 1);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn an_unavailable_store_closes_with_1013() {
    let redis = RedisServer::start(&[]);
    let proxy = FaultProxy::to(redis.port);
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let (router, server) = router_with_secret(&[("REDIS_URL", &url)]).await;
    proxy.refuse_connections(true);
    proxy.reset_connections();
    let mut provider = connect_call(&router, "CA1").await;
    assert_eq!(close_code(&mut provider).await, Some(1013));
    assert_eq!(refusals(&router, "storage_error"), 1);
    proxy.heal();
    assert!(server.is_untouched().await);
    eventually(Duration::from_secs(5), "the store is back", || {
        router.status()["pools"]["gold"]["available"] == 1
    });
}
