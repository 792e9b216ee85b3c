//! Agents that cannot serve a stream: the caller is moved to another pod, and the story of the call
//! says what was wrong with which pod.

use tokio_tungstenite::tungstenite::{client::IntoClientRequest, http::HeaderValue};

use super::*;
use testkit::program;

/// How a bad agent treats the handshake.
#[derive(Clone, Copy)]
enum Fault {
    /// Sends this and closes.
    Answer(&'static str),
    /// Closes without an answer.
    Close,
    /// Accepts the WebSocket and drops the connection.
    Drop,
}

const HTTP_OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";

impl Fault {
    async fn serve(self, server: &AgentServer) {
        if let Self::Drop = self {
            drop(server.stream().await);
            return;
        }
        let mut socket = server.accept().await;
        read_head(&mut socket).await;
        if let Self::Answer(text) = self {
            socket.write_all(text.as_bytes()).await.unwrap();
        }
    }
}

/// Events of a call, the oldest first: kind, pod and detail.
fn story(router: &Router, call: &str) -> Vec<[String; 3]> {
    let (_, answer) = router.get(&format!("/api/v1/calls/{call}"));
    let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
    let events = answer["events"].as_array().or(answer["details"]["events"].as_array());
    let events = events.unwrap_or_else(|| panic!("{answer}")).iter();
    let mut story: Vec<_> =
        events.map(|event| ["event", "pod_name", "detail"].map(|name| text(event, name))).collect();
    if story.first().is_some_and(|event| event[0] != "allocated") {
        story.reverse();
    }
    story
}

/// Places a call whose first pod has a fault and whose second one is in order.
async fn check_move(router: &Router, servers: &[AgentServer; 2], call: &str, fault: Fault) {
    let answer = router.allocate(call);
    let first = usize::from(answer["pod_name"] == "agent-1");
    let url = answer["ws_url"].as_str().unwrap();
    let (bad, good) = (&servers[first], &servers[1 - first]);
    let ((mut provider, (mut agent, request)), ()) =
        tokio::join!(async { tokio::join!(dial(url), good.stream()) }, fault.serve(bad));
    assert_eq!(request.headers()["x-call-sid"], call);
    send(&mut provider, "hello?").await;
    assert_eq!(next(&mut agent).await.to_text().unwrap(), "hello?");
    provider.close(None).await.unwrap();
    while agent.next().await.is_some_and(|message| message.is_ok()) {}
    expect_free(router, 2);
}

/// The failure of the first pod in the story of a call that went on with the second.
fn failure(router: &Router, call: &str) -> String {
    let story = story(router, call);
    let kinds: Vec<&str> = story.iter().map(|[kind, ..]| kind.as_str()).collect();
    assert_eq!(kinds, ["allocated", "attached", "pod_failed", "failed_over", "ended"], "{story:?}");
    assert_eq!(story[2][1], story[0][1], "the pod that failed: {story:?}");
    assert_ne!(story[3][1], story[0][1], "the next pod: {story:?}");
    story[2][2].clone()
}

async fn two_agents(settings: &[(&str, &str)]) -> (Router, [AgentServer; 2]) {
    let servers = [AgentServer::start().await, AgentServer::start().await];
    let pods = format!("agent-0={},agent-1={}", servers[0].address, servers[1].address);
    let mut all = vec![("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 2}"#)];
    all.extend(settings);
    (Router::start(&all), servers)
}

#[tokio::test]
async fn the_story_of_a_call_says_what_was_wrong_with_a_pod() {
    for (fault, words) in [
        (Fault::Answer(HTTP_OK), "answered 200 instead of 101 Switching Protocols: it is an HTTP"),
        (
            Fault::Answer(NOT_FOUND),
            "answered 404 instead of 101 Switching Protocols: it has no Web",
        ),
        (Fault::Answer("220 mail.example.com ESMTP\r\n"), "is not HTTP: it is no WebSocket server"),
        (Fault::Close, "closed the connection before it answered the handshake"),
    ] {
        let (router, servers) = two_agents(&[]).await;
        check_move(&router, &servers, "CA1", fault).await;
        let failure = failure(&router, "CA1");
        assert!(failure.contains(words), "{failure}");
        let pod = &story(&router, "CA1")[0][1];
        let (_, page) = router.get(&format!("/api/v1/events?pod={pod}&event=pod_failed"));
        assert_eq!(page["events"][0]["detail"], failure, "the story of the pod");
    }
}

/// Accepts a stream with a subprotocol.
async fn accept_with(
    server: &AgentServer,
    protocol: &'static str,
) -> Result<Agent, tokio_tungstenite::tungstenite::Error> {
    #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
    let accept = |_: &Request, mut response: Response| {
        let choice = HeaderValue::from_static(protocol);
        response.headers_mut().insert("sec-websocket-protocol", choice);
        Ok(response)
    };
    accept_hdr_async(server.accept().await, accept).await
}

#[tokio::test]
async fn an_agent_with_another_subprotocol_is_named_with_the_reason() {
    let (router, servers) = two_agents(&[]).await;
    let answer = router.allocate("CA1");
    let first = usize::from(answer["pod_name"] == "agent-1");
    let mut request = answer["ws_url"].as_str().unwrap().into_client_request().unwrap();
    let offer = HeaderValue::from_static("audio.jambonz.org");
    request.headers_mut().insert("sec-websocket-protocol", offer);
    let (bad, good) = (&servers[first], &servers[1 - first]);
    let (provider, wrong, right) = tokio::join!(
        connect_async(request),
        accept_with(bad, "chat"),
        accept_with(good, "audio.jambonz.org")
    );
    let (mut provider, response) = provider.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "audio.jambonz.org");
    drop(wrong);
    provider.close(None).await.unwrap();
    let mut right = right.unwrap();
    while right.next().await.is_some_and(|message| message.is_ok()) {}
    expect_free(&router, 2);
    let failure = failure(&router, "CA1");
    assert!(failure.contains("chose a subprotocol that the provider did not offer"), "{failure}");
}

#[tokio::test]
async fn an_agent_without_the_subprotocol_of_jambonz_is_named_with_the_remedy() {
    let (router, servers) = two_agents(&[]).await;
    let answer = router.allocate("CA1");
    let first = usize::from(answer["pod_name"] == "agent-1");
    let mut request = answer["ws_url"].as_str().unwrap().into_client_request().unwrap();
    let offer = HeaderValue::from_static("other, audio.jambonz.org");
    request.headers_mut().insert("sec-websocket-protocol", offer);
    let (bad, good) = (&servers[first], &servers[1 - first]);
    // The first agent accepts without a choice.
    let (provider, _without, with) =
        tokio::join!(connect_async(request), bad.stream(), accept_with(good, "audio.jambonz.org"));
    let (mut provider, response) = provider.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "audio.jambonz.org");
    provider.close(None).await.unwrap();
    let mut with = with.unwrap();
    while with.next().await.is_some_and(|message| message.is_ok()) {}
    expect_free(&router, 2);
    let failure = failure(&router, "CA1");
    let remedy = "answer the handshake with Sec-WebSocket-Protocol: audio.jambonz.org";
    assert!(failure.contains(remedy), "{failure}");
}

#[tokio::test]
async fn an_agent_may_ignore_a_subprotocol_that_no_provider_needs() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let headers = format!("{UPGRADE}Sec-WebSocket-Protocol: audio.example.com\r\n");
    let ((status, _provider), (_agent, request)) =
        tokio::join!(raw_handshake(&router, path_of(&url), &headers), server.stream());
    assert_eq!(status, 101);
    assert_eq!(request.headers()["sec-websocket-protocol"], "audio.example.com");
}

#[tokio::test]
async fn an_agent_that_drops_its_stream_at_once_is_named_with_the_reason() {
    let (router, servers) = two_agents(&[]).await;
    check_move(&router, &servers, "CA1", Fault::Drop).await;
    let failure = failure(&router, "CA1");
    assert!(failure.starts_with("the stream was lost: connection "), "{failure}");
}

#[tokio::test]
async fn each_failed_pod_is_named_once_in_one_search() {
    let (router, servers) = two_agents(&[]).await;
    let url = stream_url(&router, "CA1");
    let refuse = |server| async move {
        loop {
            Fault::Answer(HTTP_OK).serve(server).await;
        }
    };
    let refused = tokio::select! {
        refused = connect_async(url.as_str()) => refused,
        () = refuse(&servers[0]) => unreachable!(),
        () = refuse(&servers[1]) => unreachable!(),
    };
    assert!(refused.is_err());
    expect_free(&router, 2);
    let story = story(&router, "CA1");
    for pod in ["agent-0", "agent-1"] {
        let failures = story.iter().filter(|event| event[0] == "pod_failed" && event[1] == pod);
        assert_eq!(failures.count(), 1, "{pod}: {story:?}");
    }
}

#[tokio::test]
async fn a_call_without_another_pod_ends_with_the_reason_in_its_story() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let refuse = async {
        loop {
            Fault::Answer(HTTP_OK).serve(&server).await;
        }
    };
    let refused = tokio::select! {
        refused = connect_async(url.as_str()) => refused,
        () = refuse => unreachable!(),
    };
    assert!(refused.is_err());
    expect_free(&router, 1);
    let story = story(&router, "CA1");
    let is_named = |event: &[String; 3]| {
        event[0] == "pod_failed" && event[1] == "agent-0" && event[2].contains("answered 200")
    };
    // Once, although the pod was tried for seconds, and the stream was not moved elsewhere.
    assert_eq!(story.iter().filter(|event| is_named(event)).count(), 1, "{story:?}");
    let kinds: Vec<&str> = story.iter().map(|[kind, ..]| kind.as_str()).collect();
    assert_eq!(kinds, ["allocated", "attached", "pod_failed", "ended"], "{story:?}");
    let run = program(&[])
        .args(["calls", "CA1", "--router", &format!("http://{}", router.address)])
        .output();
    let printed = String::from_utf8(run.unwrap().stdout).unwrap();
    assert!(printed.contains("the agent answered 200 instead of 101"), "{printed}");
}

/// The address of a host that drops connections: a listener whose backlog is full.
async fn silent_address() -> (SocketAddr, Vec<TcpStream>, TcpListener) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let listener = socket.listen(1).unwrap();
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        waiting.push(connected.unwrap());
    }
    (address, waiting, listener)
}

#[tokio::test]
async fn the_story_of_a_call_tells_a_network_from_an_agent_that_does_not_answer() {
    let (address, _waiting, _listener) = silent_address().await;
    let mute = AgentServer::start().await;
    for (pod, settings, words) in [
        (address, &[][..], "no TCP connection to ADDRESS within 1 s: wrong address, firewall"),
        (mute.address, &[], "the agent did not answer the handshake within 1 s"),
        (mute.address, &[("AGENT_TLS", "on")], "no TLS with ADDRESS within 1 s"),
    ] {
        let pods = format!("agent-0={pod}");
        let mut all = vec![("PODS", pods.as_str()), ("TIER_CONFIG", r#"{"gold": 1}"#)];
        all.extend(settings);
        let router = Router::start(&all);
        let url = stream_url(&router, "CA1");
        let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
        assert_eq!(status, 502);
        let story = story(&router, "CA1");
        let failures: Vec<_> = story.iter().filter(|event| event[0] == "pod_failed").collect();
        let words = words.replace("ADDRESS", &pod.to_string());
        assert!(failures.iter().any(|event| event[2].contains(&words)), "{words}: {failures:?}");
    }
}
