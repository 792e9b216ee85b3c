//! Event logs in Redis, written by tests.

use crate::redis::{RedisServer, unix_millis};

/// Replaces the event log. Each event has an age (ms); the oldest comes first.
pub fn rewrite_log(server: &RedisServer, events: impl IntoIterator<Item = (u64, &'static str)>) {
    let now = unix_millis();
    let mut log = ::redis::pipe();
    log.del("voice:events").ignore();
    for (age, event) in events {
        let (kind, text) = event.split_once(' ').unwrap();
        log.cmd("XADD").arg("voice:events").arg(format!("{}-*", now - age));
        log.arg(kind).arg(text).ignore();
    }
    let () = log.query(&mut server.connection()).unwrap();
}

/// Writes an event log of the last five minutes with ten calls per second.
pub fn ten_calls_a_second(server: &RedisServer) {
    let ages = (1..3_000).rev().map(|number| number * 100);
    rewrite_log(server, ages.map(|age| (age, "allocated CA1 voice-agent-0 pool:gold  ")));
}
