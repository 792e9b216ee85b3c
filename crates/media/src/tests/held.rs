//! Tests of a provider that has no agent.

use tokio::{
    io::{DuplexStream, duplex},
    sync::oneshot,
};

use super::*;

/// A relay whose agent is not found until the sender is used or dropped.
struct Held {
    provider: DuplexStream,
    handle: Arc<StreamHandle>,
    found: oneshot::Sender<()>,
    relay: JoinHandle<Result<(), StreamEnd>>,
}

/// `capacity` is what each direction of the provider's connection holds.
fn hold(capacity: usize) -> Held {
    let (provider, ours) = duplex(capacity);
    let handle = Arc::new(StreamHandle::default());
    let shared = handle.clone();
    let (found, agent) = oneshot::channel();
    let relay = tokio::spawn(async move {
        let mut relay = Relay::new(ours, &[], Limits::default(), shared, Arc::new(NoGaps));
        relay.hold(async { drop(agent.await) }).await?;
        relay.replay_opening();
        relay.close(1000, "").await;
        Ok(())
    });
    Held { provider, handle, found, relay }
}

/// Reads until the connection ends.
async fn read_all(socket: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut bytes = Vec::new();
    timeout(LIMIT, socket.read_to_end(&mut bytes)).await.expect("the stream ends").unwrap();
    bytes
}

#[tokio::test]
async fn a_provider_that_pings_and_reads_nothing_takes_no_memory() {
    const PINGS: usize = 2_000;
    let Held { mut provider, handle, found, relay } = hold(1_000);
    for number in 0..PINGS {
        let ping = client_frame(Opcode::Ping, format!("{number:0>100}").as_bytes());
        timeout(LIMIT, provider.write_all(&ping)).await.expect("pings are read").unwrap();
    }
    // The relay has read every ping but those that the connection still holds.
    found.send(()).unwrap();
    let answers = read_all(&mut provider).await;
    relay.await.unwrap().unwrap();
    let count = answers.len() / server_frame(Opcode::Pong, &[0; 100]).len();
    assert!((1..PINGS / 10).contains(&count), "{count} pongs");
    assert_eq!(handle.provider.read().frames, 0, "pings are no media");
}

#[tokio::test]
async fn the_latest_ping_of_a_held_provider_is_answered() {
    let Held { mut provider, found, relay, .. } = hold(1 << 10);
    for number in 0..100 {
        let payload = format!("{number:0>100}").into_bytes();
        provider.write_all(&client_frame(Opcode::Ping, &payload)).await.unwrap();
        assert_eq!(read(&mut provider, Sender::Server).await, (Opcode::Pong, payload));
    }
    drop(found);
    assert_eq!(read(&mut provider, Sender::Server).await.0, Opcode::Close);
    drop(provider);
    relay.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_order_to_end_is_carried_out_after_an_order_to_move() {
    let Held { provider, handle, found, relay } = hold(1_000);
    // The relay has no pod to leave.
    handle.order(Order::Move);
    tokio::task::yield_now().await;
    handle.order(Order::End);
    let ended = timeout(LIMIT, relay).await.expect("the relay ends").unwrap();
    assert_eq!(ended, Err(StreamEnd::Released));
    drop((provider, found));
}
