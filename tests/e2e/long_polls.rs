//! Long polls of waiting calls.

use std::{thread, time::Instant};

use serde_json::json;

use crate::waiting::{MAX_RESPONSE_TIME, SECOND, each_store, poll, start_router, waiting};
use testkit::{eventually, redis::RedisServer};

#[test]
fn a_long_poll_ends_at_once_when_any_replica_frees_a_pod() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    // Long enough that periodic polling would be too slow.
    let settings = [("REDIS_URL", url.as_str()), ("HOLD_POLL", "15s")];
    let routers = [start_router(&settings), start_router(&settings)];
    routers[0].allocate("CA1");
    thread::scope(|scope| {
        let waits = scope.spawn(|| poll(routers[1].connect(), "CA2", "20s"));
        eventually(5 * SECOND, "the call waits", || waiting(&routers[0]) == 1);
        let released = Instant::now();
        assert_eq!(routers[0].release("CA1").0, 200);
        let (status, response, _) = waits.join().unwrap();
        assert!(released.elapsed() < MAX_RESPONSE_TIME, "the long poll was not notified");
        assert_eq!((status, &response["was_existing"]), (200, &json!(false)), "{response}");
    });
    assert_eq!(routers[1].release("CA2").0, 200);
    // The same within one process.
    let router = start_router(&[("HOLD_POLL", "15s")]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let waits = scope.spawn(|| poll(router.connect(), "CA2", "20s"));
        eventually(5 * SECOND, "the call waits", || waiting(&router) == 1);
        let released = Instant::now();
        assert_eq!(router.release("CA1").0, 200);
        assert_eq!(waits.join().unwrap().0, 200);
        assert!(released.elapsed() < MAX_RESPONSE_TIME, "the long poll was not notified");
    });
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn two_long_polls_for_one_call_end_together() {
    let router = start_router(&[("HOLD_TIME", "2s")]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let first = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
        eventually(5 * SECOND, "the call waits", || waiting(&router) == 1);
        let second = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
        for waits in [first, second] {
            let (status, response, elapsed) = waits.join().unwrap();
            assert_eq!(status, 503, "{response}");
            assert!(elapsed < MAX_RESPONSE_TIME, "{elapsed:?}");
        }
    });
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn a_shorter_wait_ends_before_the_queue_entry() {
    each_store(&[], |router| {
        router.allocate("CA1");
        thread::scope(|scope| {
            let long = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
            eventually(5 * SECOND, "the call waits", || waiting(router) == 1);
            let (status, response, elapsed) = poll(router.connect(), "CA2", "1s");
            assert_eq!((status, &response["details"]["reason"]), (503, &json!("time_over")));
            assert!(elapsed < MAX_RESPONSE_TIME, "{elapsed:?}");
            assert_eq!(waiting(router), 1, "the other request still needs the queue entry");
            assert_eq!(router.release("CA1").0, 200);
            assert_eq!(long.join().unwrap().0, 200);
        });
        assert_eq!(router.release("CA2").0, 200);
    });
}
