//! Calls that wait in a Redis that people, limits and permissions have a hand in.

use std::thread;

use crate::waiting::{SECOND, waiting, with};
use testkit::{
    eventually,
    provider::{again, ask, call},
    redis::RedisServer,
};

#[test]
fn what_people_delete_by_hand_does_not_strand_those_who_wait() {
    let server = RedisServer::start(&[]);
    let router = with(&[("REDIS_URL", &server.url()), ("HOLD_MAX_PER_MERCHANT", "1")]);
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let heard = call(&mut connection, "CA2");
    redis::cmd("DEL").arg("voice:queue:gold").exec(&mut redis).unwrap();
    assert_eq!(router.release("CA1").0, 200);
    let heard = again(&router, "CA2", &heard);
    assert!(again(&router, "CA2", &heard).pod().is_some(), "its place is found again");
    // A record that is gone takes its place along.
    let path = "/api/v1/twilio/allocate?merchant_id=m1";
    assert!(ask(&mut connection, "CA3", path).waits());
    redis::cmd("DEL").arg("voice:call:CA3").exec(&mut redis).unwrap();
    eventually(6 * SECOND, "nobody waits", || router.status()["pools"]["gold"]["waiting"] == 0);
    let overdue = -120_000;
    redis::cmd("ZINCRBY")
        .arg(("voice:merchant:m1:waiting", overdue, "CA3"))
        .exec(&mut redis)
        .unwrap();
    assert!(ask(&mut connection, "CA4", path).waits(), "the merchant may wait again");
    assert_eq!(router.release("CA4").0, 200);
    // A pool that is no more is nobody's hope.
    assert!(call(&mut connection, "CA5").waits());
    assert_eq!(router.put("/api/v1/tiers", r#"{"silver": 1}"#).0, 200);
    assert_eq!(router.release("CA2").0, 200);
    assert!(call(&mut connection, "CA5").pod().is_some(), "it begins again, with the new tiers");
    assert_eq!(router.release("CA5").0, 200);
}

#[test]
fn a_full_redis_keeps_places_and_gives_what_was_handed() {
    let server = RedisServer::start(&[]);
    let router = with(&[("REDIS_URL", &server.url())]);
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let mut heard = call(&mut connection, "CA2");
    redis::cmd("CONFIG").arg(("SET", "maxmemory", "1")).exec(&mut redis).unwrap();
    for _ in 0..5 {
        thread::sleep(SECOND);
        heard = again(&router, "CA2", &heard);
        assert!(heard.waits(), "{heard:?}");
    }
    assert_eq!(waiting(&router), 1, "it has asked all the time");
    assert_eq!(router.release("CA1").0, 200);
    assert!(again(&router, "CA2", &heard).pod().is_some());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn who_may_not_publish_still_hands_pods_over() {
    let server = RedisServer::start(&[]);
    let acl = ("SETUSER", "router", "on", ">pw", "~voice:*", "+@all", "resetchannels");
    redis::cmd("ACL").arg(acl).exec(&mut server.connection()).unwrap();
    let url = server.url().replace("redis://", "redis://router:pw@");
    let router = with(&[("REDIS_URL", &url)]);
    router.allocate("CA1");
    let heard = call(&mut router.connect(), "CA2");
    assert_eq!(router.release("CA1").0, 200);
    assert!(again(&router, "CA2", &heard).pod().is_some());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn records_that_make_no_sense_harm_nobody_else() {
    let server = RedisServer::start(&[]);
    let router = with(&[("REDIS_URL", &server.url())]);
    let (mut connection, mut redis) = (router.connect(), server.connection());
    router.allocate("CA1");
    let odd = call(&mut connection, "CA2");
    let fine = call(&mut connection, "CA3");
    let spoil = ("voice:call:CA2", "score", "x", "since", "y");
    redis::cmd("HSET").arg(spoil).exec(&mut redis).unwrap();
    assert!(again(&router, "CA2", &odd).waits(), "it begins again");
    redis::cmd("HSET").arg(spoil).exec(&mut redis).unwrap();
    assert_eq!(router.release("CA1").0, 200);
    assert!(again(&router, "CA3", &fine).pod().is_some());
    assert_eq!(router.release("CA3").0, 200);
    assert!(call(&mut connection, "CA2").pod().is_some());
    assert_eq!(router.release("CA2").0, 200);
}
