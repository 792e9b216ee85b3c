//! Waiting calls in a Redis with manual edits, a memory limit, or missing permissions.

use crate::waiting::{SECOND, SLOW_POLLS, start_router, waiting};
use testkit::{
    clock::WallClock,
    eventually,
    provider::{follow_redirect, request_document, start_call},
    redis::RedisServer,
};

#[test]
fn waiting_calls_survive_manual_deletions() {
    let server = RedisServer::start(&[]);
    let router = start_router(&[("REDIS_URL", &server.url()), ("HOLD_MAX_PER_MERCHANT", "1")]);
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let document = start_call(&mut connection, "CA2");
    redis::cmd("DEL").arg("voice:queue:gold").exec(&mut redis).unwrap();
    assert_eq!(router.release("CA1").0, 200);
    let document = follow_redirect(&router, "CA2", &document);
    assert!(follow_redirect(&router, "CA2", &document).is_stream(), "its queue entry is restored");
    // Deleting its record ends a waiting call.
    let path = "/api/v1/twilio/allocate?merchant_id=m1";
    assert!(request_document(&mut connection, "CA3", path).is_hold());
    redis::cmd("DEL").arg("voice:call:CA3").exec(&mut redis).unwrap();
    eventually(6 * SECOND, "no call waits", || router.status()["pools"]["gold"]["waiting"] == 0);
    let overdue = -120_000;
    redis::cmd("ZINCRBY")
        .arg(("voice:merchant:m1:waiting", overdue, "CA3"))
        .exec(&mut redis)
        .unwrap();
    assert!(
        request_document(&mut connection, "CA4", path).is_hold(),
        "the merchant is below its limit again"
    );
    assert_eq!(router.release("CA4").0, 200);
    // A call whose only pool was removed starts over.
    assert!(start_call(&mut connection, "CA5").is_hold());
    assert_eq!(router.put("/api/v1/tiers", r#"{"silver": 1}"#).0, 200);
    assert_eq!(router.release("CA2").0, 200);
    assert!(start_call(&mut connection, "CA5").is_stream(), "it starts over with the new tiers");
    assert_eq!(router.release("CA5").0, 200);
}

#[test]
fn a_full_redis_keeps_queue_entries_and_hand_offs() {
    let clock = WallClock::ahead(0);
    let server = RedisServer::with_clock(&clock);
    let router = start_router(&[&SLOW_POLLS[..], &[("REDIS_URL", &server.url())]].concat());
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let mut document = start_call(&mut connection, "CA2");
    redis::cmd("CONFIG").arg(("SET", "maxmemory", "1")).exec(&mut redis).unwrap();
    for poll in 1..=5 {
        clock.set_ahead(20 * poll);
        document = follow_redirect(&router, "CA2", &document);
        assert!(document.is_hold(), "{document:?}");
    }
    router.wait_for_sweep();
    assert_eq!(waiting(&router), 1, "every poll has extended its deadline");
    assert_eq!(router.release("CA1").0, 200);
    assert!(follow_redirect(&router, "CA2", &document).is_stream());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn hand_offs_work_without_the_permission_to_publish() {
    let server = RedisServer::start(&[]);
    let acl = ("SETUSER", "router", "on", ">pw", "~voice:*", "+@all", "resetchannels");
    redis::cmd("ACL").arg(acl).exec(&mut server.connection()).unwrap();
    let url = server.url().replace("redis://", "redis://router:pw@");
    let router = start_router(&[("REDIS_URL", &url)]);
    router.allocate("CA1");
    let document = start_call(&mut router.connect(), "CA2");
    assert_eq!(router.release("CA1").0, 200);
    assert!(follow_redirect(&router, "CA2", &document).is_stream());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn malformed_records_affect_no_other_call() {
    let server = RedisServer::start(&[]);
    let router = start_router(&[("REDIS_URL", &server.url())]);
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let malformed = start_call(&mut connection, "CA2");
    let intact = start_call(&mut connection, "CA3");
    let malformed_fields = ("voice:call:CA2", "score", "x", "since", "y");
    redis::cmd("HSET").arg(malformed_fields).exec(&mut redis).unwrap();
    assert!(follow_redirect(&router, "CA2", &malformed).is_hold(), "it starts over");
    redis::cmd("HSET").arg(malformed_fields).exec(&mut redis).unwrap();
    assert_eq!(router.release("CA1").0, 200);
    assert!(follow_redirect(&router, "CA3", &intact).is_stream());
    assert_eq!(router.release("CA3").0, 200);
    assert!(start_call(&mut connection, "CA2").is_stream());
    assert_eq!(router.release("CA2").0, 200);
}
