//! The stream of a call in the API, the live feed, the commands, the log and the metrics.

use super::*;
use serde_json::json;
use testkit::{Log, program, redis::unix_millis, scratch};

const START: &str = r#"{"event":"start","streamSid":"MZ1","start":{"callSid":"CA1"}}"#;

/// As [`router_with_agent`], with a log for the test to read.
async fn logged_router_with_agent(settings: &[(&str, &str)]) -> (Router, Log, AgentServer) {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let mut all = vec![("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    all.extend(settings);
    let (router, log) = Router::start_logged(&all);
    (router, log, server)
}

/// Sends a text from the provider and back from the agent.
async fn exchange(provider: &mut Provider, agent: &mut Agent, text: &str) {
    send(provider, text).await;
    let message = next(agent).await;
    agent.send(message).await.unwrap();
    assert_eq!(next(provider).await, Message::text(text));
}

/// Runs a command against the router. Returns its output.
fn run(router: &Router, args: &[&str]) -> String {
    let url = format!("http://{}", router.address);
    let output = program(&[("SMART_ROUTER_URL", &url)]).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The events of an ended call: kind and detail.
fn timeline(router: &Router, call: &str) -> Vec<(String, String)> {
    let path = format!("/api/v1/calls/{call}");
    let mut details = Value::Null;
    eventually(Duration::from_secs(5), "the call has ended", || {
        let (status, answer) = router.get(&path);
        details = answer["details"].clone();
        status == 404
    });
    let text = |event: &Value, field: &str| event[field].as_str().unwrap_or_default().to_owned();
    let events = details["events"].as_array().unwrap().iter();
    events.map(|event| (text(event, "event"), text(event, "detail"))).collect()
}

#[tokio::test]
async fn a_call_shows_its_stream_with_its_figures() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    assert_eq!(call(&router, "CA1")["stream"], Value::Null);
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    for text in [r#"{"event":"connected","protocol":"Call"}"#, START, "audio"] {
        exchange(&mut provider, &mut agent, text).await;
    }
    let found = call(&router, "CA1");
    let stream = &found["stream"];
    assert!(stream["gateway"].as_str().is_some_and(|id| id.contains('-')), "{stream}");
    assert_eq!(stream["stream"].as_str().map(str::len), Some(16), "{stream}");
    assert_eq!(stream["is_ending"], false);
    let age = unix_millis() / 1_000 - stream["since"].as_u64().unwrap();
    assert!(age < 600, "{stream}");
    assert_eq!(stream["figures"]["provider"], "twilio");
    for side in ["from_provider", "from_agent"] {
        let side = &stream["figures"][side];
        assert_eq!(side["frames"], 3, "{stream}");
        assert!(side["bytes"].as_u64().unwrap() > START.len() as u64, "{stream}");
        assert!(side["longest_gap_ms"].is_u64(), "{stream}");
    }
    let attached = &found["events"][1];
    assert_eq!(attached["event"], "attached");
    assert_eq!(attached["detail"], stream["gateway"]);
    let (_, list) = router.get("/api/v1/calls");
    assert_eq!(list["calls"][0]["stream"], *stream);
    let printed = run(&router, &["calls", "CA1"]);
    let gateway = stream["gateway"].as_str().unwrap();
    assert!(
        printed.contains(&format!("relayed by {gateway}: twilio sent 3 frames (")),
        "{printed}"
    );
    assert!(printed.contains(&format!("its stream opened through {gateway}")), "{printed}");
}

#[tokio::test]
async fn the_live_feed_counts_the_streams_of_the_router() {
    let (router, server) = router_with_agent(&[]).await;
    let mut live = router.connect();
    live.open_stream("/api/v1/live");
    live.read_until("\"streams\":0,", Duration::from_secs(3));
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    live.read_until("\"streams\":1,", Duration::from_secs(3));
    assert!(run(&router, &["top"]).contains("1 live calls, 0 waiting, 1 streams here"));
    provider.close(None).await.unwrap();
    close_code(&mut agent).await;
    drop(agent);
    live.read_until("\"streams\":0,", Duration::from_secs(3));
    let direct = Router::start(&[("VOICE_AGENT_BASE_URL", "wss://voice.example.com")]);
    let mut live = direct.connect();
    live.open_stream("/api/v1/live");
    live.read_until("\"streams\":null,", Duration::from_secs(3));
}

#[tokio::test]
async fn a_released_call_is_ending_until_its_agent_has_closed() {
    // The agent neither reads nor closes, for longer than the test takes.
    let settings = [("WRAP_UP_TIME", "10m"), ("LOG_LEVEL", "info")];
    let (router, log, server) = logged_router_with_agent(&settings).await;
    let (mut provider, agent) = open_stream(&router, &server, "CA1").await;
    let agent = agent.into_inner();
    let printed = run(&router, &["release", "CA1"]);
    assert_eq!(printed, "CA1 is ending: its stream is being closed\n");
    let found = call(&router, "CA1");
    assert_eq!(found["stream"]["is_ending"], true, "{found}");
    let last = found["events"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["event"], &last["detail"]), (&json!("ending"), &json!("agent")));
    let printed = run(&router, &["calls", "CA1"]);
    assert!(printed.contains("\nending: its stream is being closed; stream for"), "{printed}");
    assert!(printed.contains("its stream is being closed: released by the agent"), "{printed}");
    // Repeats, and the provider's callback, are successes; the pod stays busy.
    let (status, answer) = router.release("CA1");
    let expected = json!({
        "success": true, "pod_name": "agent-0", "released_to_pool": "pool:gold",
        "was_draining": false, "ending": true,
    });
    assert_eq!((status, answer), (200, expected));
    let ended = "CallSid=CA1&CallStatus=completed";
    assert_eq!(router.connect().form("/api/v1/twilio/call-status", ended).status, 200);
    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA2"})).0, 503);
    log.wait_for("\"outcome\":\"ending\"", 2);
    drop(agent);
    assert_eq!(close_code(&mut provider).await, Some(1000));
    expect_free(&router, 1);
    let events = timeline(&router, "CA1");
    let kinds: Vec<&str> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["allocated", "attached", "ending", "ended"]);
    assert!(events[3].1.starts_with("agent "), "the first cause counts: {events:?}");
    let releases = |result: &str| {
        let labels = format!("{{source_pool=\"pool:gold\",result=\"{result}\"}}");
        router.metric(&format!("smart_router_releases_total{labels}"))
    };
    assert_eq!((releases("ending"), releases("success")), (3, 1));
    let ended = "smart_router_call_duration_seconds_count{source_pool=\"pool:gold\"}";
    assert_eq!(router.metric(ended), 1, "a call that is ending has not ended yet");
}

#[tokio::test]
async fn a_call_without_a_stream_is_reported_as_unattached() {
    let (router, log, _server) = logged_router_with_agent(&[("CONNECT_TIMEOUT", "1s")]).await;
    router.allocate("CA1");
    let events = timeline(&router, "CA1");
    assert!(events[1].1.starts_with("unattached "), "{events:?}");
    log.wait_for("no stream of the call reached the media gateway in time", 0);
    let labels = "{source_pool=\"pool:gold\"}";
    assert_eq!(router.metric(&format!("smart_router_unconfirmed_total{labels}")), 1);
    assert_eq!(router.metric(&format!("smart_router_leases_expired_total{labels}")), 0);
    assert!(run(&router, &["calls", "CA1"]).contains("no stream came in time, after "));
}

#[tokio::test]
async fn a_call_whose_gateway_was_lost_is_reported() {
    let (data, server) = (scratch(), AgentServer::start().await);
    let pods = format!("agent-0={}", server.address);
    let settings = [
        ("PODS", pods.as_str()),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
        ("DATA_DIR", data.to_str().unwrap()),
        ("MEDIA_LEASE", "3s"),
    ];
    let mut killed = Router::start(&settings);
    let (_provider, _agent) = open_stream(&killed, &server, "CA1").await;
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    let (router, log) = Router::start_logged(&settings);
    let events = timeline(&router, "CA1");
    assert!(events[2].1.starts_with("gateway "), "{events:?}");
    log.wait_for("the media gateway of the stream sends no heartbeats", 0);
    let lost = "smart_router_gateway_leases_expired_total{source_pool=\"pool:gold\"}";
    assert_eq!(router.metric(lost), 1);
    assert!(run(&router, &["calls", "CA1"]).contains("its gateway stopped or was lost, after "));
}
