//! Frames of a provider that violate the protocol, and those that pass.

use super::*;

/// A frame with a mask of zeros.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        len @ 0..=125 => frame.push(0x80 | len as u8),
        len @ 126..=65_535 => {
            frame.push(0x80 | 126);
            frame.extend((len as u16).to_be_bytes());
        }
        len => {
            frame.push(0x80 | 127);
            frame.extend((len as u64).to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

/// Opens a stream and sends raw bytes as the provider. Returns the code with which the gateway
/// closes the provider's side.
async fn close_after(router: &Router, server: &AgentServer, call: &str, bytes: &[u8]) -> u16 {
    let url = stream_url(router, call);
    let provider = async {
        let (status, mut stream) = raw_handshake(router, path_of(&url), UPGRADE).await;
        assert_eq!(status, 101);
        stream.write_all(bytes).await.unwrap();
        stream
    };
    let (mut provider, (mut agent, _)) = tokio::join!(provider, server.stream());
    let agent = tokio::spawn(async move { close_code(&mut agent).await });
    let mut answer = Vec::new();
    timeout(TIMEOUT, provider.read_to_end(&mut answer)).await.expect("the stream ends").unwrap();
    agent.await.unwrap();
    assert_eq!(answer[0], 0x88, "a close frame: {answer:?}");
    u16::from_be_bytes([answer[2], answer[3]])
}

#[tokio::test]
async fn violations_close_with_1002_and_large_frames_with_1009() {
    let settings = [("MEDIA_MAX_FRAME", "4096"), ("WRAP_UP_TIME", "1s")];
    let (router, server) = router_with_agent(&settings).await;
    let unmasked = vec![0x81, 0x02, b'h', b'i'];
    let large_ping = frame(0x89, &[0; 126]);
    let fragmented_ping = frame(0x09, b"x");
    let lonely_continuation = frame(0x80, b"x");
    let text_inside_text = [frame(0x01, b"a"), frame(0x01, b"b")].concat();
    let cases: [(&str, Vec<u8>, u16); 10] = [
        ("unmasked", unmasked, 1002),
        ("reserved bit", frame(0xc1, b"x"), 1002),
        ("reserved data opcode", frame(0x83, b"x"), 1002),
        ("reserved control opcode", frame(0x8b, b""), 1002),
        ("ping of 126 bytes", large_ping, 1002),
        ("fragmented ping", fragmented_ping, 1002),
        ("continuation without a message", lonely_continuation, 1002),
        ("message inside a message", text_inside_text, 1002),
        ("frame above the limit", frame(0x82, &[0; 4_097]), 1009),
        ("length above 63 bits", [&[0x82, 0xff], &[0xff; 8][..], &[0; 4]].concat(), 1002),
    ];
    for (name, bytes, code) in cases {
        let call = format!("CA-{}", name.replace(' ', "-"));
        assert_eq!(close_after(&router, &server, &call, &bytes).await, code, "{name}");
        expect_free(&router, 1);
    }
}

#[tokio::test]
async fn messages_pass_unchanged_both_ways() {
    let (router, server) = router_with_agent(&[]).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    let messages = [
        Message::text(r#"{"event":"connected"}"#),
        Message::text(r#"{"event":"start","start":{"callSid":"CA1"}}"#),
        Message::text(""),
        Message::text("ünïcödé 🎧"),
        Message::binary(Vec::new()),
        Message::binary((0..=255).collect::<Vec<u8>>()),
        Message::binary(vec![7; 126]),
        Message::binary(vec![8; 65_536]),
        Message::binary(vec![9; 1 << 20]),
        Message::Ping(vec![1, 2, 3].into()),
        Message::text(r#"{"event":"media","media":{"payload":"AAAA"}}"#),
    ];
    let messages = messages.as_slice();
    let up = async {
        for message in messages {
            provider.send(message.clone()).await.unwrap();
        }
        for message in messages {
            match next(&mut provider).await {
                // tungstenite answers the ping of the agent's side, and the gateway's own.
                Message::Pong(_) => assert_eq!(next(&mut provider).await, *message),
                got => assert_eq!(got, *message),
            }
        }
        provider
    };
    let down = async {
        for message in messages {
            assert_eq!(next(&mut agent).await, *message);
        }
        for message in messages {
            agent.send(message.clone()).await.unwrap();
        }
        agent
    };
    let (_provider, _agent) = tokio::join!(up, down);
}

#[tokio::test]
async fn fragmented_messages_pass_with_control_frames_between_their_fragments() {
    let (router, server) = router_with_agent(&[]).await;
    let url = stream_url(&router, "CA1");
    let bytes =
        [frame(0x01, b"Hel"), frame(0x89, b"ping"), frame(0x00, b"lo, "), frame(0x80, b"you")];
    let provider = async {
        let (_, mut stream) = raw_handshake(&router, path_of(&url), UPGRADE).await;
        // Byte by byte: no read has a whole frame.
        for byte in bytes.concat() {
            stream.write_all(&[byte]).await.unwrap();
            stream.flush().await.unwrap();
        }
        stream
    };
    let (_provider, (mut agent, _)) = tokio::join!(provider, server.stream());
    assert_eq!(next(&mut agent).await, Message::Ping(b"ping".to_vec().into()));
    assert_eq!(next(&mut agent).await, Message::text("Hello, you"));
}
