//! Agents that misbehave. Each costs a bounded time, and the call and its pod are free again.

use super::*;

/// The status of a handshake while the agent does `work` with its connection.
async fn status_with<F>(router: &Router, server: &AgentServer, call: &str, work: F) -> u16
where
    F: AsyncFnOnce(TcpStream),
{
    let url = stream_url(router, call);
    let agent = async { work(server.accept().await).await };
    let provider = raw_handshake(router, path_of(&url), UPGRADE);
    let (_, (status, _)) = tokio::join!(agent, provider);
    status
}

/// Calls of one pod, whose agent answers each handshake with the next of these texts.
async fn expect_no_stream(answers: &[&str]) {
    let (router, server) = router_with_agent(&[]).await;
    for (number, answer) in answers.iter().enumerate() {
        let status = status_with(&router, &server, &format!("CA{number}"), async |mut stream| {
            read_head(&mut stream).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        })
        .await;
        assert_eq!(status, 502, "{answer:?}");
        eventually(Duration::from_secs(3), "the call has ended", || {
            router.status()["active_calls"] == 0
        });
        // Failures in a row quarantine a pod; the only one of its pool never is.
    }
}

#[tokio::test]
async fn an_agent_that_answers_no_handshake_gets_no_stream() {
    let answers = [
        "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: AAAA\r\n\r\n",
        "220 mail.example.com ESMTP\r\n\r\n",
        "\0\0\0\0garbage\r\n\r\n",
        "",
    ];
    // Two routers at the same time: each bad answer takes the 5 s for which a gateway tries an agent.
    let (first, second) = answers.split_at(4);
    tokio::join!(expect_no_stream(first), expect_no_stream(second));
}

#[tokio::test]
async fn an_agent_that_says_nothing_or_floods_the_handshake_is_given_up() {
    let (router, server) = router_with_agent(&[]).await;
    let silent = status_with(&router, &server, "CA1", async |mut stream| {
        // Reads until the gateway gives up.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
    })
    .await;
    assert_eq!(silent, 502);
    let flooding = status_with(&router, &server, "CA2", async |mut stream| {
        let line = format!("X: {}\r\n", "y".repeat(1_000));
        let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\n").await;
        while stream.write_all(line.as_bytes()).await.is_ok() {}
    })
    .await;
    assert_eq!(flooding, 502);
    expect_free(&router, 1);
}

#[tokio::test]
async fn a_pod_that_refuses_connections_ends_the_call_and_counts_a_failure() {
    let (router, server) = router_with_agent(&[]).await;
    drop(server);
    let url = stream_url(&router, "CA1");
    let (status, _) = raw_handshake(&router, path_of(&url), UPGRADE).await;
    assert_eq!(status, 502);
    expect_free(&router, 1);
    let (_, timeline) = router.get("/api/v1/calls/CA1?events=true");
    assert!(timeline.to_string().contains("unreachable"), "{timeline}");
}

#[tokio::test]
async fn an_agent_that_sends_garbage_or_dies_closes_the_stream_with_1011() {
    let (router, server) = router_with_agent(&[("RETRY_ON_DISCONNECT", "0")]).await;
    for (number, bytes) in [
        &[0xff, 0xff, 0xff, 0xff][..],
        // A masked frame of a server.
        &[0x81, 0x81, 1, 2, 3, 4, 5],
        // Half a frame, then the end of the connection.
        &[0x82, 0x7e, 0x10, 0x00, 1, 2, 3],
        &[],
    ]
    .into_iter()
    .enumerate()
    {
        let (mut provider, agent) = open_stream(&router, &server, &format!("CA{number}")).await;
        let mut raw = agent.into_inner();
        raw.write_all(bytes).await.unwrap();
        drop(raw);
        assert_eq!(close_code(&mut provider).await, Some(1011), "{bytes:?}");
        expect_free(&router, 1);
    }
}

#[tokio::test]
async fn an_agent_that_floods_a_provider_that_reads_nothing_is_pushed_back() {
    let (router, server) = router_with_agent(&[("MEDIA_IDLE_TIMEOUT", "2s")]).await;
    let (provider, mut agent) = open_stream(&router, &server, "CA1").await;
    let frame = Message::binary(vec![0u8; 8_192]);
    let mut sent = 0u64;
    let flood = async {
        while agent.feed(frame.clone()).await.is_ok() && agent.flush().await.is_ok() {
            sent += 8_192;
        }
    };
    // The sockets' buffers fill, then the gateway stops reading: the agent is held up until the
    // provider counts as gone.
    timeout(TIMEOUT, flood).await.expect("the stream ends");
    assert!(sent < 64 << 20, "{sent} bytes were taken for a provider that reads nothing");
    drop(provider);
    expect_free(&router, 1);
}
