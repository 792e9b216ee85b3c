//! The data of the older router is adopted while calls wait for pods.

use std::time::Duration;

use redis::{Commands, cmd};
use serde_json::json;

use crate::{
    malformed_data::{OLDER, run},
    waiting::waiting,
};
use testkit::{
    Router, eventually,
    provider::{PUBLIC_URL, follow_redirect, start_call},
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

fn start_with_queue(server: &RedisServer) -> Router {
    let url = server.url();
    Router::start(&[
        ("REDIS_URL", &url),
        ("PUBLIC_URL", PUBLIC_URL),
        ("HOLD_TIME", "60s"),
        ("HOLD_POLL", "10s"),
        ("TIER_CONFIG", r#"{"gold": 2}"#),
        ("PODS", "a=h:1,b=h:2"),
        ("VOICE_AGENT_BASE_URL", "wss://v"),
        ("LOG_LEVEL", "off"),
    ])
}

#[test]
fn calls_wait_for_the_pods_of_adopted_calls() {
    let server = RedisServer::start(&[]);
    run(&mut server.connection(), &OLDER);
    let router = start_with_queue(&server);
    let first = start_call(&mut router.connect(), "first");
    let second = start_call(&mut router.connect(), "second");
    assert!(first.is_hold() && second.is_hold(), "{first:?} {second:?}");
    assert_eq!(router.release("live").0, 200);
    assert_eq!(follow_redirect(&router, "first", &first).pod().as_deref(), Some("a"));
    assert!(follow_redirect(&router, "second", &second).is_hold());
    for call in ["first", "second", "other"] {
        assert_eq!(router.release(call).0, 200);
    }
}

/// A store without its schema key is adopted like one of the older router.
#[test]
fn waiting_calls_keep_their_turns_when_their_store_is_adopted() {
    let server = RedisServer::start(&[]);
    let router = start_with_queue(&server);
    let mut redis = server.connection();
    router.allocate("served-1");
    let released = router.allocate("served-2")["pod_name"].as_str().unwrap().to_owned();
    let documents: Vec<_> = ["first", "second", "third"]
        .map(|sid| (sid, start_call(&mut router.connect(), sid)))
        .into_iter()
        .collect();
    assert!(documents.iter().all(|(_, document)| document.is_hold()), "{documents:?}");
    assert_eq!(router.release("served-2").0, 200, "handed off to the first");
    let _: () = redis.del("voice:schema").unwrap();
    eventually(5 * SECOND, "the store is adopted", || redis.exists("voice:schema").unwrap());
    eventually(5 * SECOND, "the store is available", || {
        router.connect().get("/ready").json().1["store"] == "up"
    });
    assert_eq!(waiting(&router), 2);
    // A new call is queued behind the waiting calls.
    let newcomer = start_call(&mut router.connect(), "newcomer");
    assert!(newcomer.is_hold(), "{newcomer:?}");
    let pod = follow_redirect(&router, "first", &documents[0].1).pod();
    assert_eq!(pod.as_deref(), Some(released.as_str()), "the pod of its hand-off");
    assert_eq!(router.release("served-1").0, 200);
    assert!(follow_redirect(&router, "third", &documents[2].1).is_hold(), "the second precedes it");
    assert!(follow_redirect(&router, "newcomer", &newcomer).is_hold());
    assert!(follow_redirect(&router, "second", &documents[1].1).pod().is_some(), "it was the next");
    for call in ["first", "second", "third", "newcomer"] {
        assert_eq!(router.release(call).0, 200, "{call}");
    }
}

/// A backup of the older router replaces the store.
#[test]
fn calls_wait_again_after_a_backup_of_the_older_router_is_restored() {
    let server = RedisServer::start(&[]);
    let router = start_with_queue(&server);
    let mut redis = server.connection();
    router.allocate("lost-1");
    router.allocate("lost-2");
    let document = start_call(&mut router.connect(), "waits");
    assert!(document.is_hold(), "{document:?}");
    let mut poll = router.connect();
    let waiter = std::thread::spawn(move || {
        let body = json!({"call_sid": "polls", "wait": "50s"});
        poll.post("/api/v1/allocate", &body).json()
    });
    eventually(5 * SECOND, "both wait", || waiting(&router) == 2);
    // In one step, so that no router finds the store empty.
    let restore: String = OLDER
        .iter()
        .map(|line| {
            let words: Vec<_> = line.split(' ').map(|word| format!("[==[{word}]==]")).collect();
            format!("redis.call({})\n", words.join(", "))
        })
        .collect();
    cmd("EVAL").arg(format!("redis.call('FLUSHALL')\n{restore}")).arg(0).exec(&mut redis).unwrap();
    eventually(5 * SECOND, "the backup is adopted", || redis.exists("voice:schema").unwrap());
    eventually(5 * SECOND, "the store is available", || {
        router.connect().get("/ready").json().1["store"] == "up"
    });
    assert_eq!(router.get("/api/v1/calls/live").1["pod_name"], "a");
    // Its queue entry was lost with the store; it gets a new one.
    let document = follow_redirect(&router, "waits", &document);
    assert!(document.is_hold(), "{document:?}");
    assert_eq!(router.release("live").0, 200);
    assert_eq!(router.release("other").0, 200);
    assert!(follow_redirect(&router, "waits", &document).pod().is_some());
    let (status, answer) = waiter.join().unwrap();
    assert!(matches!(status, 200 | 503), "{status}: {answer}");
    for call in ["waits", "polls"] {
        router.release(call);
    }
    assert_eq!(router.status()["active_calls"], 0);
}
