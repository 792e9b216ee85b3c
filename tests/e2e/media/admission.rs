//! URLs, tokens and handshakes.

use super::*;

/// A path with one part of its token or its rest replaced.
fn changed(path: &str, from: &str, to: &str) -> String {
    assert!(path.contains(from), "{path} contains {from}");
    path.replacen(from, to, 1)
}

#[tokio::test]
async fn invalid_tokens_are_refused_before_a_pod_is_contacted() {
    let (router, server) = router_with_agent(&[("RATE_LIMIT", "off")]).await;
    let url = stream_url(&router, "CA1");
    let path = path_of(&url).to_owned();
    let token = path.split('/').nth(3).unwrap().to_owned();
    let (attempt, rest) = token.split_once('.').unwrap();
    let (expiry, mac) = rest.split_once('.').unwrap();
    let other = stream_url_of_another_router().await;
    let cases = [
        ("malformed_token", "/media/CA1".to_owned()),
        ("malformed_token", "/media/CA1/".to_owned()),
        ("malformed_token", "/media/".to_owned()),
        ("malformed_token", changed(&path, &token, "x")),
        ("malformed_token", changed(&path, &token, &"1".repeat(60_000))),
        ("wrong_token", changed(&path, mac, "AAAAAAAAAAAAAAAAAAAAAA")),
        ("malformed_token", changed(&path, mac, &mac[..21])),
        ("wrong_token", changed(&path, mac, &mac[..20])),
        ("wrong_token", changed(&path, "CA1", "CA2")),
        ("wrong_token", changed(&path, &token, &format!("9.{expiry}.{mac}"))),
        ("wrong_token", changed(&path, &token, &format!("{attempt}.9999999999.{mac}"))),
        ("wrong_token", changed(&path, "order-confirmation", "other")),
        ("wrong_token", format!("{path}/more")),
        ("wrong_token", changed(&path, "/agent/", "/%61gent/")),
        ("wrong_token", changed(&path, &token, other.split('/').nth(3).unwrap())),
    ];
    for (reason, path) in &cases {
        let before = refusals(&router, reason);
        let (status, mut stream) = raw_handshake(&router, path, UPGRADE).await;
        let shown = &path[..path.len().min(120)];
        assert_eq!(status, 403, "{shown}");
        stream.shutdown().await.unwrap();
        let mut body = Vec::new();
        stream.read_to_end(&mut body).await.unwrap();
        assert_eq!(body, b"", "no body: {shown}");
        assert_eq!(refusals(&router, reason), before + 1, "{shown}");
    }
    assert!(server.is_untouched().await);
    assert_eq!(call(&router, "CA1")["stream"], Value::Null);
    // Nothing has changed: the right token still opens the stream.
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    send(&mut provider, "hello").await;
    assert_eq!(next(&mut agent).await, Message::text("hello"));
}

/// The path of a stream of the same call at a router with another key.
async fn stream_url_of_another_router() -> String {
    let (other, _server) = router_with_agent(&[]).await;
    path_of(&stream_url(&other, "CA1")).to_owned()
}

#[tokio::test]
async fn a_token_opens_one_stream_at_a_time_and_of_its_own_attempt() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 403);
    assert_eq!(refusals(&router, "already_attached"), 1);
    assert!(server.is_untouched().await);
    send(&mut provider, "still open").await;
    assert_eq!(next(&mut agent).await, Message::text("still open"));
    provider.close(None).await.unwrap();
    assert_eq!(close_code(&mut agent).await, Some(1005));
    drop(agent);
    expect_free(&router, 1);
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 403, "the call is over");
    assert_eq!(refusals(&router, "unknown_call"), 1);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn requests_that_are_no_websocket_handshake_are_refused() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for headers in [
        String::new(),
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n".into(),
        UPGRADE.replace("13", "8"),
        UPGRADE.replace("websocket", "h2c"),
        UPGRADE.replace("Connection: Upgrade", "Connection: close"),
        UPGRADE.replace(key, "Sec-WebSocket-Key: short\r\n"),
    ] {
        let (status, _) = raw_handshake(&router, path_of(&url), &headers).await;
        assert_eq!(status, 426, "{headers}");
    }
    let mut connection = router.connect();
    let post = connection.send("POST", path_of(&url), &[("upgrade", "websocket")], b"");
    assert_eq!(post.status, 426);
    assert_eq!(post.header("sec-websocket-version"), Some("13"));
    assert_eq!(refusals(&router, "not_websocket"), 7);
    assert!(server.is_untouched().await);
    assert_eq!(call(&router, "CA1")["is_confirmed"], false, "the call still awaits its stream");
}

#[tokio::test]
async fn a_dripping_or_giant_head_is_cut_off() {
    let (router, server) = router_with_agent(&[("HTTP_READ_TIMEOUT", "500ms")]).await;
    let url = stream_url(&router, "CA1");
    let mut dripping = TcpStream::connect(router.address).await.unwrap();
    let request = format!("GET {} HTTP/1.1\r\nHost: t\r\n{UPGRADE}\r\n", path_of(&url));
    let mut is_cut = false;
    for byte in request.as_bytes() {
        is_cut = dripping.write_all(&[*byte]).await.is_err();
        if is_cut {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(is_cut || read_head(&mut dripping).await.is_empty(), "the connection is closed");
    let giant = format!("X-Big: {}\r\n{UPGRADE}", "a".repeat(1 << 20));
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    let request = format!("GET {} HTTP/1.1\r\nHost: t\r\n{giant}\r\n", path_of(&url));
    let _ = stream.write_all(request.as_bytes()).await;
    let head = read_head(&mut stream).await;
    assert!(head.is_empty() || head.starts_with("HTTP/1.1 4"), "{head}");
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn floods_of_wrong_tokens_are_limited() {
    let (router, _server) = router_with_agent(&[("RATE_LIMIT", "5")]).await;
    let mut statuses = Vec::new();
    for _ in 0..40 {
        statuses.push(raw_handshake(&router, "/media/CA1/0.1.x/", UPGRADE).await.0);
    }
    assert!(statuses.contains(&403) && statuses.contains(&429), "{statuses:?}");
    // A valid token is not limited.
    let url = stream_url(&router, "CA1");
    let (status, _) = raw_handshake(&router, path_of(&url), "").await;
    assert_eq!(status, 426);
}

#[tokio::test]
async fn the_agent_sees_path_query_and_headers_but_no_token() {
    let (router, server) = router_with_agent(&[("MEDIA_SECRET", "0123456789abcdef")]).await;
    let body = serde_json::json!({"call_sid": "CA1", "merchant_id": "acme", "template": "hello"});
    let (_, answer) = router.post("/api/v1/allocate", body);
    let url = format!("{}?mode=test&x=%20y", answer["ws_url"].as_str().unwrap());
    let token = url.split('/').nth(5).unwrap().to_owned();
    let headers = format!(
        "{UPGRADE}X-Call-Sid: forged\r\nX-Merchant-Id: forged\r\nX-Other: forged\r\n\
         Sec-WebSocket-Protocol: a, audio.jambonz.org\r\nCookie: secret\r\n\
         Sec-WebSocket-Extensions: permessage-deflate\r\n"
    );
    let agent = async {
        let mut stream = server.accept().await;
        let head = read_head(&mut stream).await;
        let key = head.lines().find_map(|line| line.strip_prefix("Sec-WebSocket-Key: ")).unwrap();
        let accept = tokio_tungstenite::tungstenite::handshake::derive_accept_key(key.as_bytes());
        let response = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: audio.jambonz.org\r\n\r\n"
        );
        stream.write_all(response.as_bytes()).await.unwrap();
        (stream, head)
    };
    let provider = async {
        let mut stream = TcpStream::connect(router.address).await.unwrap();
        let request = format!("GET {} HTTP/1.1\r\nHost: t\r\n{headers}\r\n", path_of(&url));
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        (stream, head)
    };
    let ((_agent, seen), (_provider, answer)) = tokio::join!(agent, provider);
    assert!(
        seen.starts_with(
            "GET /agent/voice/breeze-buddy/twilio/callback/hello/v2?mode=test&x=%20y HTTP/1.1\r\n"
        ),
        "{seen}"
    );
    for expected in [
        "X-Call-Sid: CA1\r\n",
        "X-Merchant-Id: acme\r\n",
        "X-Pod-Attempt: 1\r\n",
        "X-Forwarded-For: 127.0.0.1\r\n",
        "Sec-WebSocket-Protocol: a, audio.jambonz.org\r\n",
    ] {
        assert!(seen.contains(expected), "{expected} in {seen}");
    }
    for forbidden in [token.as_str(), "forged", "secret", "permessage-deflate"] {
        assert!(!seen.contains(forbidden), "{forbidden} in {seen}");
    }
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    let answer = answer.to_ascii_lowercase();
    assert!(answer.contains("sec-websocket-protocol: audio.jambonz.org\r\n"), "{answer}");
    assert!(!answer.contains("permessage-deflate"), "{answer}");
}

#[tokio::test]
async fn tokens_appear_in_no_log() {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let settings = [("PODS", pods.as_str()), ("LOG_LEVEL", "trace")];
    let (router, log) = Router::start_logged(&settings);
    let url = stream_url(&router, "CA1");
    let token = url.split('/').nth(5).unwrap().to_owned();
    let (mut provider, (mut agent, _)) = tokio::join!(dial(&url), server.stream());
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 403);
    provider.close(None).await.unwrap();
    close_code(&mut agent).await;
    drop(agent);
    eventually(Duration::from_secs(3), "the stream is logged", || {
        log.text().contains("\"stream\"")
    });
    let text = log.text();
    let mac = token.rsplit('.').next().unwrap();
    assert!(!text.contains(mac), "{text}");
    let (_, events) = router.get("/api/v1/calls/CA1?events=true");
    assert!(!events.to_string().contains(mac), "{events}");
}

#[tokio::test]
async fn keys_are_rotated_without_refusing_streams() {
    let server = AgentServer::start().await;
    let pods = format!("agent-0={}", server.address);
    let file = testkit::scratch().join("secret");
    std::fs::write(&file, "first-secret-of-16").unwrap();
    let path = file.display().to_string();
    let router = Router::start(&[("PODS", &pods), ("MEDIA_SECRET_FILE", &path)]);
    let url = stream_url(&router, "CA1");
    std::fs::write(&file, "other-secret-of-16,first-secret-of-16").unwrap();
    eventually(Duration::from_secs(3), "the new key signs", || {
        stream_url(&router, "CA1").split('/').nth(5) != url.split('/').nth(5)
    });
    let (_provider, (_agent, _)) = tokio::join!(dial(&url), server.stream());
}
