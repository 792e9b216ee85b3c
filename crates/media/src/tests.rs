//! Tests of the relay between real sockets.

mod handover;
mod held;

use std::{sync::Arc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};

use crate::{
    frame::{Header, Opcode, Sender, apply_mask, close_code, write_close, write_frame},
    relay::{GapSink, Gaps, Limits, Loss, Relay, StreamEnd},
    stats::{Order, StreamHandle},
};

const PING: [u8; 8] = *b"01234567";
const LIMIT: Duration = Duration::from_secs(10);

struct NoGaps;
impl GapSink for NoGaps {
    fn record(&self, _: &Gaps, _: &Gaps) {}
}

/// Both ends of a connection.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, server) = tokio::join!(client, listener.accept());
    (client.unwrap(), server.unwrap().0)
}

/// A relay between a provider and an agent that the test plays.
struct Stream {
    provider: TcpStream,
    agent: TcpStream,
    handle: Arc<StreamHandle>,
    relay: JoinHandle<StreamEnd>,
}

async fn stream(limits: Limits) -> Stream {
    let ((provider, ours), (mut to_agent, agent)) = (pair().await, pair().await);
    let handle = Arc::new(StreamHandle::default());
    let shared = handle.clone();
    let relay = tokio::spawn(async move {
        let mut relay = Relay::new(ours, &[], limits, shared, Arc::new(NoGaps));
        let end = relay.run(&mut to_agent, Vec::new(), PING).await;
        relay.close(end.close_code(), "").await;
        end
    });
    Stream { provider, agent, handle, relay }
}

fn client_frame(opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    write_frame(&mut frame, opcode, payload, Some([1, 2, 3, 4]));
    frame
}

fn server_frame(opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    write_frame(&mut frame, opcode, payload, None);
    frame
}

/// Reads one frame.
async fn read(socket: &mut (impl AsyncRead + Unpin), sender: Sender) -> (Opcode, Vec<u8>) {
    let mut bytes = Vec::new();
    let read = async {
        loop {
            if let Some(header) = Header::parse(&bytes, sender).unwrap()
                && bytes.len() as u64 == header.frame_len()
            {
                let mut payload = bytes[header.payload()].to_vec();
                apply_mask(&mut payload, header.mask.unwrap_or_default());
                return (header.opcode, payload);
            }
            bytes.push(socket.read_u8().await.expect("a frame"));
        }
    };
    timeout(LIMIT, read).await.expect("a frame in time")
}

impl Stream {
    async fn end(self) -> StreamEnd {
        timeout(LIMIT, self.relay).await.expect("the relay ends").unwrap()
    }
}

#[tokio::test]
async fn frames_pass_in_both_directions_as_they_are() {
    let mut stream = stream(Limits::default()).await;
    for text in ["{\"event\":\"start\"}", "{\"event\":\"media\"}"] {
        let frame = client_frame(Opcode::Text, text.as_bytes());
        // In two parts: the agent gets it whole.
        stream.provider.write_all(&frame[..3]).await.unwrap();
        tokio::task::yield_now().await;
        stream.provider.write_all(&frame[3..]).await.unwrap();
        let expected = (Opcode::Text, text.as_bytes().to_vec());
        assert_eq!(read(&mut stream.agent, Sender::Client).await, expected);
    }
    let large = vec![7; 40_000];
    stream.agent.write_all(&server_frame(Opcode::Binary, &large)).await.unwrap();
    assert_eq!(read(&mut stream.provider, Sender::Server).await, (Opcode::Binary, large));
    stream.provider.write_all(&client_frame(Opcode::Ping, b"p")).await.unwrap();
    assert_eq!(read(&mut stream.agent, Sender::Client).await, (Opcode::Ping, b"p".to_vec()));
    stream.agent.write_all(&server_frame(Opcode::Pong, b"p")).await.unwrap();
    assert_eq!(read(&mut stream.provider, Sender::Server).await, (Opcode::Pong, b"p".to_vec()));
    let figures = (stream.handle.provider.read(), stream.handle.agent.read());
    assert_eq!((figures.0.frames, figures.1.frames), (2, 1));
}

#[tokio::test]
async fn the_close_of_a_provider_is_answered_by_the_agent() {
    let mut stream = stream(Limits::default()).await;
    let mut close = Vec::new();
    write_close(&mut close, 1000, "done", Some([4, 3, 2, 1]));
    stream.provider.write_all(&close).await.unwrap();
    let (opcode, payload) = read(&mut stream.agent, Sender::Client).await;
    assert_eq!((opcode, close_code(&payload)), (Opcode::Close, 1000));
    stream.agent.write_all(&server_frame(Opcode::Close, &payload)).await.unwrap();
    let (opcode, payload) = read(&mut stream.provider, Sender::Server).await;
    assert_eq!((opcode, &payload[2..]), (Opcode::Close, &b"done"[..]));
    assert_eq!(stream.end().await, StreamEnd::Provider { code: Some(1000) });
}

#[tokio::test]
async fn a_stop_message_closes_the_agent_and_bounds_its_wrap_up() {
    let limits = Limits { wrap_up: Duration::from_millis(200), ..Limits::default() };
    let mut stream = stream(limits).await;
    for text in [r#"{"event":"start"}"#, r#"{"event":"stop"}"#] {
        stream.provider.write_all(&client_frame(Opcode::Text, text.as_bytes())).await.unwrap();
        assert_eq!(read(&mut stream.agent, Sender::Client).await.1, text.as_bytes());
    }
    let (opcode, payload) = read(&mut stream.agent, Sender::Client).await;
    assert_eq!((opcode, close_code(&payload)), (Opcode::Close, 1000));
    // The agent never closes.
    let (opcode, payload) = read(&mut stream.provider, Sender::Server).await;
    assert_eq!((opcode, close_code(&payload)), (Opcode::Close, 1000));
    assert_eq!(stream.end().await, StreamEnd::Provider { code: None });
}

#[tokio::test]
async fn the_code_of_an_agents_close_decides() {
    for (code, expected) in [
        (1000, StreamEnd::Agent(1000)),
        (1008, StreamEnd::Agent(1008)),
        (4000, StreamEnd::Agent(4000)),
        (1001, StreamEnd::AgentLost(Loss::Code(1001))),
        (1011, StreamEnd::AgentLost(Loss::Code(1011))),
        (1013, StreamEnd::AgentLost(Loss::Code(1013))),
    ] {
        let mut stream = stream(Limits::default()).await;
        let mut close = Vec::new();
        write_close(&mut close, code, "", None);
        stream.agent.write_all(&close).await.unwrap();
        let (opcode, _) = read(&mut stream.provider, Sender::Server).await;
        assert_eq!(opcode, Opcode::Close);
        drop(stream.provider);
        let end = timeout(LIMIT, stream.relay).await.expect("the relay ends").unwrap();
        assert_eq!(end, expected, "{code}");
    }
}

#[tokio::test]
async fn an_agent_that_vanishes_is_lost() {
    let lost = stream(Limits::default()).await;
    drop(lost.agent);
    let end = timeout(LIMIT, lost.relay).await.unwrap().unwrap();
    assert_eq!(end, StreamEnd::AgentLost(Loss::Eof));

    let mut cut = stream(Limits::default()).await;
    cut.agent.write_all(&[0x82, 100, 1, 2]).await.unwrap();
    drop(cut.agent);
    let end = timeout(LIMIT, cut.relay).await.unwrap().unwrap();
    assert_eq!(end, StreamEnd::AgentLost(Loss::InsideFrame));
    // Nothing of the incomplete frame reaches the provider.
    assert_eq!(read(&mut cut.provider, Sender::Server).await.0, Opcode::Close);
}

#[tokio::test]
async fn violations_of_the_provider_end_the_stream() {
    for (bytes, error) in [
        (&[0x81, 0x01, b'a'][..], crate::frame::FrameError::Unmasked),
        (&[0xF1, 0x80], crate::frame::FrameError::ReservedBits),
        (&[0x80, 0x80, 0, 0, 0, 0], crate::frame::FrameError::UnexpectedContinuation),
        (&[0x82, 0xFF, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4], crate::frame::FrameError::TooLarge),
    ] {
        let mut stream = stream(Limits::default()).await;
        stream.provider.write_all(bytes).await.unwrap();
        let (opcode, payload) = read(&mut stream.agent, Sender::Client).await;
        assert_eq!(opcode, Opcode::Close);
        // The agent's answer is not the provider's close.
        stream.agent.write_all(&server_frame(Opcode::Close, &payload)).await.unwrap();
        drop(stream.agent);
        let (opcode, payload) = read(&mut stream.provider, Sender::Server).await;
        assert_eq!((opcode, close_code(&payload)), (Opcode::Close, error.close_code()));
        drop(stream.provider);
        let end = timeout(LIMIT, stream.relay).await.unwrap().unwrap();
        assert_eq!(end, StreamEnd::ProviderViolation(error));
    }
}

#[tokio::test]
async fn pings_keep_a_quiet_agent_and_find_a_dead_one() {
    let ms = Duration::from_millis;
    let limits = Limits { ping_interval: ms(50), agent_timeout: ms(200), ..Limits::default() };
    let mut stream = stream(limits).await;
    for _ in 0..8 {
        let ping = read(&mut stream.agent, Sender::Client).await;
        assert_eq!(ping, (Opcode::Ping, PING.to_vec()));
        stream.agent.write_all(&server_frame(Opcode::Pong, &PING)).await.unwrap();
    }
    assert!(!stream.relay.is_finished());
    // It answers no more; its pongs never reached the provider.
    assert_eq!(read(&mut stream.provider, Sender::Server).await.0, Opcode::Close);
    assert_eq!(stream.end().await, StreamEnd::AgentLost(Loss::Timeout));
}

#[tokio::test]
async fn an_agent_behind_a_provider_that_takes_nothing_is_not_lost() {
    let ms = Duration::from_millis;
    let limits = Limits {
        ping_interval: ms(50),
        agent_timeout: ms(200),
        provider_timeout: ms(1_000),
        ..Limits::default()
    };
    let Stream { provider, mut agent, relay, .. } = stream(limits).await;
    let flood = tokio::spawn(async move {
        let frame = server_frame(Opcode::Binary, &[1; 10_000]);
        while agent.write_all(&frame).await.is_ok() {}
    });
    // The relay cannot read the agent: the provider's side is full.
    let end = timeout(LIMIT, relay).await.unwrap().unwrap();
    assert_eq!(end, StreamEnd::ProviderTimeout);
    drop(provider);
    flood.abort();
}

#[tokio::test]
async fn a_provider_that_takes_nothing_is_given_up() {
    let ms = Duration::from_millis;
    let limits = Limits {
        ping_interval: ms(50),
        agent_timeout: Duration::from_secs(60),
        provider_timeout: ms(300),
        wrap_up: ms(50),
        ..Limits::default()
    };
    let stream = stream(limits).await;
    let Stream { mut provider, mut agent, relay, .. } = stream;
    let flood = tokio::spawn(async move {
        let frame = server_frame(Opcode::Binary, &[1; 10_000]);
        while agent.write_all(&frame).await.is_ok() {}
    });
    // It sends, so that it is not idle.
    let talk = tokio::spawn(async move {
        let frame = client_frame(Opcode::Binary, b"a");
        while provider.write_all(&frame).await.is_ok() {
            tokio::time::sleep(ms(20)).await;
        }
    });
    let end = timeout(LIMIT, relay).await.unwrap().unwrap();
    assert_eq!(end, StreamEnd::ProviderTimeout);
    flood.abort();
    talk.abort();
}

#[tokio::test]
async fn orders_end_both_sides() {
    for (order, code, expected) in
        [(Order::End, 1000, StreamEnd::Released), (Order::Stop, 1012, StreamEnd::Stopping)]
    {
        let mut stream = stream(Limits::default()).await;
        tokio::task::yield_now().await;
        stream.handle.order(order);
        let (opcode, payload) = read(&mut stream.agent, Sender::Client).await;
        assert_eq!((opcode, close_code(&payload)), (Opcode::Close, code));
        stream.agent.write_all(&server_frame(Opcode::Close, &payload)).await.unwrap();
        let (opcode, payload) = read(&mut stream.provider, Sender::Server).await;
        assert_eq!((opcode, close_code(&payload)), (Opcode::Close, code));
        drop(stream.provider);
        assert_eq!(timeout(LIMIT, stream.relay).await.unwrap().unwrap(), expected);
    }
}

/// Longer than a test: no ping is sent.
const NO_PINGS: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_silent_side_is_given_up_at_its_limit_between_two_pings() {
    let (silence, long) = (Duration::from_millis(200), Duration::from_secs(60));
    for (agent_timeout, provider_timeout, expected) in [
        (silence, long, StreamEnd::AgentLost(Loss::Timeout)),
        (long, silence, StreamEnd::ProviderTimeout),
    ] {
        let limits = Limits {
            ping_interval: NO_PINGS,
            agent_timeout,
            provider_timeout,
            wrap_up: Duration::from_millis(50),
            ..Limits::default()
        };
        let Stream { mut provider, mut agent, relay, .. } = stream(limits).await;
        // The limit counts from the last frame.
        let hello = (client_frame(Opcode::Text, b"hello"), server_frame(Opcode::Text, b"hello"));
        provider.write_all(&hello.0).await.unwrap();
        agent.write_all(&hello.1).await.unwrap();
        let end = timeout(LIMIT, relay).await.expect("the relay ends").unwrap();
        assert_eq!(end, expected);
    }
}

#[tokio::test]
async fn an_agent_that_takes_nothing_is_given_up_between_two_pings() {
    let limits = Limits {
        ping_interval: NO_PINGS,
        agent_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let Stream { mut provider, mut agent, relay, .. } = stream(limits).await;
    let flood = tokio::spawn(async move {
        let frame = client_frame(Opcode::Binary, &[1; 10_000]);
        while provider.write_all(&frame).await.is_ok() {}
    });
    // It sends, so that it is not idle.
    let talk = tokio::spawn(async move {
        let frame = server_frame(Opcode::Pong, b"a");
        while agent.write_all(&frame).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let end = timeout(LIMIT, relay).await.expect("the relay ends").unwrap();
    assert_eq!(end, StreamEnd::AgentLost(Loss::Timeout));
    flood.abort();
    talk.abort();
}
