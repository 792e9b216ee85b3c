//! Tests of a stream with two agents.

use super::*;

#[tokio::test]
async fn the_longest_gap_of_the_agents_contains_the_failover() {
    const PAUSE: Duration = Duration::from_millis(50);
    let (mut provider, ours) = pair().await;
    let handle = Arc::new(StreamHandle::default());
    let mut relay = Relay::new(ours, &[], Limits::default(), handle.clone(), Arc::new(NoGaps));
    for _ in 0..2 {
        let (mut to_agent, mut agent) = pair().await;
        let talk = async {
            agent.write_all(&server_frame(Opcode::Binary, b"hello")).await.unwrap();
            let (opcode, _) = read(&mut provider, Sender::Server).await;
            assert_eq!(opcode, Opcode::Binary);
            drop(agent);
        };
        let (end, ()) = tokio::join!(relay.run(&mut to_agent, Vec::new(), PING), talk);
        assert_eq!(end, StreamEnd::AgentLost(Loss::Eof));
        relay.leave_agent();
        assert_eq!(relay.hold(tokio::time::sleep(PAUSE)).await, Ok(()));
        relay.replay_opening();
    }
    let figures = handle.agent.read();
    assert_eq!(figures.frames, 2);
    assert!(figures.longest_gap >= PAUSE, "{figures:?}");
}

#[tokio::test]
async fn the_silence_of_an_agent_counts_from_its_connection() {
    let silence = Duration::from_millis(300);
    let limits = Limits { agent_timeout: silence, ..Limits::default() };
    let (provider, ours) = pair().await;
    let mut relay = Relay::new(ours, &[], limits, Arc::default(), Arc::new(NoGaps));
    assert_eq!(relay.hold(tokio::time::sleep(silence)).await, Ok(()));
    let (mut to_agent, agent) = pair().await;
    let connected_at = std::time::Instant::now();
    let end = timeout(LIMIT, relay.run(&mut to_agent, Vec::new(), PING)).await.unwrap();
    assert_eq!(end, StreamEnd::AgentLost(Loss::Timeout));
    assert!(connected_at.elapsed() >= silence);
    drop((provider, agent));
}
