//! Custom values of a call: to its agent through the gateway, and in the documents of webhooks.

use serde_json::json;

use super::*;
use testkit::program;

/// The custom values that an agent got.
fn received(request: &Request) -> Vec<(String, String)> {
    let text = |value: &[u8]| String::from_utf8(value.to_vec()).unwrap();
    let headers = request.headers().iter();
    let mut values: Vec<_> = headers
        .filter_map(|(name, value)| {
            let name = name.as_str().strip_prefix("x-param-")?;
            Some((name.to_owned(), text(value.as_bytes())))
        })
        .collect();
    values.sort();
    values
}

fn expected() -> Vec<(String, String)> {
    [("name", "J%C3%BCrgen%20&%20Co"), ("order-id", "17")].map(|(a, b)| (a.into(), b.into())).into()
}

#[tokio::test]
async fn parameters_of_json_callers_reach_every_agent_of_the_call() {
    let servers = [AgentServer::start().await, AgentServer::start().await];
    let pods = format!("agent-0={},agent-1={}", servers[0].address, servers[1].address);
    let router = Router::start(&[("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 2}"#)]);
    let body = json!({"call_sid": "CA1", "parameters": {"Name": "Jürgen & Co", "order-id": "17"}});
    let (status, answer) = router.post("/api/v1/allocate", body.clone());
    assert_eq!(status, 200, "{answer}");
    let (_, again) = router.post("/api/v1/allocate", body);
    assert_eq!(again["was_existing"], true);
    let first = usize::from(answer["pod_name"] == "agent-1");
    let url = again["ws_url"].as_str().unwrap();
    let path = path_of(url).rsplit_once("/agent/").unwrap().1;
    let (mut provider, (agent, request)) = tokio::join!(dial(url), servers[first].stream());
    assert_eq!(received(&request), expected());
    assert_eq!(request.uri().path(), format!("/agent/{path}"));
    send(&mut provider, r#"{"event":"start","start":{"callSid":"CA1"},"streamSid":"MZ1"}"#).await;
    // The pod is lost in mid-call; the next agent gets the same values.
    drop(agent);
    let (_agent, request) = servers[1 - first].stream().await;
    assert_eq!(received(&request), expected());
    assert_eq!(request.headers()["x-pod-attempt"], "2");
}

#[tokio::test]
async fn parameters_of_a_webhook_reach_the_agent_and_the_next_document() {
    let (router, server) = router_with_agent(&[("PUBLIC_URL", "https://router.example.com")]).await;
    let query = "param.Name=J%C3%BCrgen+%26+Co&param.order-id=17&template=hello";
    let document = |path: &str| {
        let answer = router.connect().form(&format!("{path}?{query}"), "CallSid=CA1");
        assert_eq!(answer.status, 200);
        answer.text()
    };
    let first = document("/api/v1/twilio/allocate");
    assert_eq!(first.matches("<Parameter ").count(), 2, "{first}");
    assert!(first.contains(r#"<Parameter name="Name" value="Jürgen &amp; Co"/>"#), "{first}");
    let next = "&amp;template=hello&amp;param.Name=J%C3%BCrgen%20%26%20Co&amp;param.order-id=17<";
    assert!(first.contains(next), "{first}");
    let again = document("/api/v1/twilio/allocate");
    let stream_url = |text: &str| {
        let url = text.split("url=\"").nth(1).unwrap().split('"').next().unwrap();
        url.replace("wss://router.example.com", &format!("ws://{}", router.address))
    };
    let values = |url: &str| url.split('.').nth(3).map(str::to_owned);
    assert_eq!(values(&stream_url(&first)), values(&stream_url(&again)), "a repeated webhook");
    let url = stream_url(&again);
    let (_provider, (_agent, request)) = tokio::join!(dial(&url), server.stream());
    assert_eq!(received(&request), expected());
}

#[tokio::test]
async fn parameters_in_a_token_cannot_be_changed_or_added() {
    let (router, server) = router_with_agent(&[]).await;
    let body = json!({"call_sid": "CA1", "parameters": {"role": "guest"}});
    let url = router.post("/api/v1/allocate", body).1["ws_url"].as_str().unwrap().to_owned();
    let own = data_encoding::BASE64URL_NOPAD.encode(b"role=guest");
    let forged = data_encoding::BASE64URL_NOPAD.encode(b"role=admin");
    assert!(url.contains(&own), "{url}");
    let upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Param-Role: admin\r\n";
    for changed in [url.replace(&own, &forged), url.replace(&format!(".{own}"), "")] {
        assert_eq!(raw_handshake(&router, path_of(&changed), upgrade).await.0, 403, "{changed}");
    }
    assert!(server.is_untouched().await);
    let (_, (_agent, request)) =
        tokio::join!(raw_handshake(&router, path_of(&url), upgrade), server.stream());
    assert_eq!(received(&request), [("role".to_owned(), "guest".to_owned())]);
}

#[tokio::test]
async fn invalid_parameters_are_refused_without_a_pod() {
    let (router, server) = router_with_agent(&[]).await;
    let long = "v".repeat(257);
    for parameters in [
        json!({"call_sid": "forged"}),
        json!({"a b": "1"}),
        json!({"a": "line\nbreak"}),
        json!({"a": long}),
        json!({"a": 1}),
        json!(["a"]),
        json!({"a": "1", "A": "2"}),
    ] {
        let body = json!({"call_sid": "CA1", "parameters": parameters});
        let (status, answer) = router.post("/api/v1/allocate", body);
        assert_eq!(status, 400, "{answer}");
    }
    let answer = router.connect().form("/api/v1/twilio/allocate?param.a%20b=1", "CallSid=CA1");
    assert!(answer.text().contains("<Hangup/>"), "{}", answer.text());
    assert_eq!(router.status()["active_calls"], 0);
    let url = format!("http://{}", router.address);
    let run = |option: &'static str| {
        let mut command = program(&[]);
        command.args(["call", "--router", &url, "--talk", "100ms", "--param", option]);
        tokio::task::spawn_blocking(move || command.output().unwrap())
    };
    assert_eq!(run("no-value").await.unwrap().status.code(), Some(1));
    let (_output, (_agent, request)) = tokio::join!(run("language=de"), async {
        let (mut agent, request) = server.stream().await;
        agent.close(None).await.unwrap();
        (agent, request)
    });
    assert_eq!(received(&request), [("language".to_owned(), "de".to_owned())]);
}
