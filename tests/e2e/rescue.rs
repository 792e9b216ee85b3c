//! A stream that breaks is not the end of the call.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{
    Router, eventually,
    kube::Kube,
    provider::{Heard, PUBLIC_URL, again, call},
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
/// Less than a call waits that comes back before its agent has said anything: an answer that
/// comes sooner did not wait.
const GRACE: Duration = Duration::from_millis(1_500);
const LOST: &str = "The connection to the agent was lost. Please call again.";
const SETTINGS: [(&str, &str); 5] = [
    ("PUBLIC_URL", PUBLIC_URL),
    ("RETRY_ON_DISCONNECT", "2"),
    ("STREAM_STATUS", "on"),
    ("TIER_CONFIG", r#"{"gold": 2}"#),
    ("LOG_LEVEL", "off"),
];

/// The same for both stores.
fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    let mut settings = SETTINGS.to_vec();
    settings.extend(extra);
    test(&Router::start(&settings));
    let server = RedisServer::start(&[]);
    let url = server.url();
    settings.push(("REDIS_URL", &url));
    test(&Router::start(&settings));
}

fn tell(router: &Router, path: &str, sid: &str, told: &str) {
    let answer = router.connect().form(path, &format!("CallSid={sid}&{told}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn stopped(router: &Router, sid: &str, pod: &str, attempt: u32) {
    let path = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt={attempt}");
    tell(router, &path, sid, "StreamEvent=stream-stopped");
}

fn pod_of(router: &Router, sid: &str) -> Option<String> {
    let (status, found) = router.get(&format!("/api/v1/calls/{sid}"));
    (status == 200).then(|| found["pod_name"].as_str().unwrap().to_owned())
}

fn release(router: &Router, sid: &str, pod: &str) -> u16 {
    router.post("/api/v1/release", json!({"call_sid": sid, "pod_name": pod})).0
}

#[test]
fn a_call_whose_pod_died_is_given_another() {
    each_store(&[], |router| {
        let first = call(&mut router.connect(), "CA1");
        let dead = first.pod().unwrap();
        let after = first.next().unwrap();
        assert!(after.starts_with("/api/v1/twilio/after-stream?pod_name="), "{after}");
        assert!(after.contains("&attempt=1&flow=v2&template=order-confirmation"), "{after}");
        let started = Instant::now();
        let second = again(router, "CA1", &first);
        let pod = second.pod().unwrap();
        assert!(started.elapsed() >= SECOND, "it was not waited for its agent's word");
        assert_ne!(pod, dead);
        assert_eq!(pod_of(router, "CA1"), Some(pod.clone()));
        let (_, shown) = router.get("/api/v1/calls/CA1");
        assert_eq!(shown["attempt"], 2, "{shown}");
        assert_eq!(router.get(&format!("/api/v1/pod/{dead}")).1["calls"], json!([]));
        // Said twice, it is still the same call on the same pod.
        assert_eq!(again(router, "CA1", &first).pod(), Some(pod.clone()));
        // What is said late of the first attempt does not end the second.
        stopped(router, "CA1", &dead, 1);
        stopped(router, "CA1", &pod, 1);
        assert!(pod_of(router, "CA1").is_some());
        let metrics = router.connect().get("/metrics").text();
        assert!(metrics.contains("smart_router_rescued_total{source_pool=\"pool:gold\"} 1"));
        assert_eq!(release(router, "CA1", &pod), 200);
    });
}

#[test]
fn a_call_that_its_agent_or_the_provider_ended_is_hung_up_on() {
    each_store(&[], |router| {
        let over = Heard::HangUp(String::new());
        // Released before the stream was gone.
        let is_prompt = |number| {
            let sid = format!("CA1-{number}");
            let heard = call(&mut router.connect(), &sid);
            assert_eq!(release(router, &sid, &heard.pod().unwrap()), 200);
            let started = Instant::now();
            assert_eq!(again(router, &sid, &heard), over);
            started.elapsed() < GRACE
        };
        // (a busy machine may be late; the wait for an agent's word is there each time)
        assert!((0..5).any(is_prompt), "there is nothing to wait for");
        // Released while the call is already back.
        let heard = call(&mut router.connect(), "CA2");
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SECOND / 4);
                assert_eq!(release(router, "CA2", &heard.pod().unwrap()), 200);
            });
            assert_eq!(again(router, "CA2", &heard), over);
        });
        // The stream's end was told first: the agent's word still counts.
        let heard = call(&mut router.connect(), "CA3");
        let pod = heard.pod().unwrap();
        stopped(router, "CA3", &pod, 1);
        assert_eq!(pod_of(router, "CA3"), None);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SECOND / 4);
                assert_eq!(release(router, "CA3", &pod), 404);
            });
            assert_eq!(again(router, "CA3", &heard), over);
        });
        // The caller hung up.
        let heard = call(&mut router.connect(), "CA4");
        tell(router, "/api/v1/twilio/call-status", "CA4", "CallStatus=completed");
        assert_eq!(again(router, "CA4", &heard), over);
        assert_eq!(router.status()["active_calls"], 0);
    });
}

#[test]
fn a_stream_that_broke_and_was_told_so_is_rescued_too() {
    each_store(&[], |router| {
        let heard = call(&mut router.connect(), "CA1");
        stopped(router, "CA1", &heard.pod().unwrap(), 1);
        let second = again(router, "CA1", &heard);
        assert!(second.pod().is_some() && second.pod() != heard.pod(), "{second:?}");
        assert_eq!(release(router, "CA1", &second.pod().unwrap()), 200);
    });
}

#[test]
fn not_for_ever_and_not_elsewhere_if_there_is_nothing_else() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        let mut heard = call(&mut router.connect(), "CA1");
        let pod = heard.pod();
        for attempt in [2, 3] {
            heard = again(router, "CA1", &heard);
            assert_eq!(heard.pod(), pod, "the only one there is");
            assert_eq!(router.get("/api/v1/calls/CA1").1["attempt"], attempt);
            // Late news of the attempts before.
            stopped(router, "CA1", pod.as_deref().unwrap(), attempt - 1);
            assert_eq!(pod_of(router, "CA1"), pod);
        }
        assert_eq!(again(router, "CA1", &heard), Heard::HangUp(LOST.into()));
        assert_eq!(pod_of(router, "CA1"), None, "its pod is free");
        assert!(router.connect().get("/metrics").text().contains("smart_router_lost_total 1"));
    });
}

#[test]
fn a_rescued_call_may_have_to_wait() {
    let hold = [("HOLD_TIME", "30s"), ("HOLD_POLL", "1s"), ("TIER_CONFIG", r#"{"gold": 1}"#)];
    each_store(&hold, |router| {
        let heard = call(&mut router.connect(), "CA1");
        let pod = heard.pod().unwrap();
        assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
        let other = call(&mut router.connect(), "CA2");
        let held = again(router, "CA1", &heard);
        assert!(other.waits() && held.waits(), "{held:?}");
        // It came before the other, whatever happened since.
        assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": pod})).0, 200);
        let second = again(router, "CA1", &held);
        assert!(second.next().unwrap().contains("attempt=2"), "{second:?}");
        assert_eq!(release(router, "CA1", &pod), 200);
        assert!(again(router, "CA2", &other).pod().is_some());
        assert_eq!(release(router, "CA2", &pod), 200);
    });
}

#[test]
fn a_pod_on_which_calls_break_is_left_alone_for_a_while() {
    let tiers = [("TIER_CONFIG", r#"{"gold": 5}"#), ("RETRY_ON_DISCONNECT", "5")];
    each_store(&tiers, |router| {
        for number in 0..4 {
            router.allocate(&format!("busy-{number}"));
        }
        let mut heard = call(&mut router.connect(), "CA1");
        let bad = heard.pod().unwrap();
        for _ in 0..2 {
            heard = again(router, "CA1", &heard);
            assert_eq!(heard.pod().as_ref(), Some(&bad));
        }
        assert!(again(router, "CA1", &heard).pod().is_none(), "three in a row are enough");
        let (_, shown) = router.get(&format!("/api/v1/pod/{bad}"));
        assert_eq!(shown["is_quarantined"], true, "{shown}");
        let pool = &router.status()["pools"]["gold"];
        assert_eq!((&pool["quarantined"], &pool["available"]), (&json!(1), &json!(0)), "{pool}");
        eventually(5 * SECOND, "the gauge follows", || {
            let metrics = router.connect().get("/metrics").text();
            metrics.contains("smart_router_pool_quarantined_pods{tier=\"gold\"} 1")
        });
        // No more than a fifth: the next that fails goes on.
        let (_, freed) = router.release("busy-0");
        let worse = freed["pod_name"].as_str().unwrap().to_owned();
        let mut heard = call(&mut router.connect(), "CA2");
        for _ in 0..4 {
            assert_eq!(heard.pod().as_ref(), Some(&worse));
            heard = again(router, "CA2", &heard);
        }
        let pod = heard.pod().expect("it is not in quarantine");
        assert_eq!(release(router, "CA2", &pod), 200);
        // By hand.
        let (_, undrained) = router.post("/api/v1/undrain", json!({"pod_name": bad}));
        assert_eq!(undrained["was_quarantined"], true, "{undrained}");
        assert_eq!(router.get(&format!("/api/v1/pod/{bad}")).1["is_quarantined"], false);
        for number in 1..4 {
            assert_eq!(router.release(&format!("busy-{number}")).0, 200);
        }
    });
}

#[test]
fn a_pod_that_was_replaced_needs_no_explanation() {
    let kube = Kube::start();
    ["a", "b", "c"].iter().for_each(|pod| kube.add(pod));
    let cluster = [
        ("KUBECONFIG", kube.config.to_str().unwrap()),
        ("HTTP_BIND", "127.0.0.1"),
        ("VOICE_AGENT_BASE_URL", "ws://agents"),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
    ];
    each_store(&cluster, |router| {
        eventually(10 * SECOND, "the pods are known", || {
            router.status()["pools"]["gold"]["available"] == 3
        });
        let heard = call(&mut router.connect(), "CA1");
        // Another pod under the same name.
        let pod = heard.pod().unwrap();
        kube.delete(&pod);
        kube.add(&pod);
        eventually(5 * SECOND, "its agent is gone", || pod_of(router, "CA1").is_none());
        let second = again(router, "CA1", &heard);
        assert!(second.pod().is_some() && second.pod() != heard.pod(), "{second:?}");
        assert_eq!(release(router, "CA1", &second.pod().unwrap()), 200);
    });
}

#[test]
fn what_is_said_after_a_lease_ended_counts_as_well() {
    let short = [("LEASE_TTL", "2s"), ("CONNECT_TIMEOUT", "1s")];
    each_store(&short, |router| {
        let over = Heard::HangUp(String::new());
        // Its stream never started, as far as we know; its agent says that it is over.
        let heard = call(&mut router.connect(), "CA1");
        let pod = heard.pod().unwrap();
        eventually(5 * SECOND, "its time is over", || pod_of(router, "CA1").is_none());
        assert_eq!(release(router, "CA1", &pod), 404);
        assert_eq!(again(router, "CA1", &heard), over);
        // The provider says so, and news of its start are old.
        let heard = call(&mut router.connect(), "CA2");
        let pod = heard.pod().unwrap();
        eventually(5 * SECOND, "its time is over", || pod_of(router, "CA2").is_none());
        let started = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt=1");
        let other = format!("/api/v1/twilio/stream-status?pod_name={pod}&attempt=7");
        tell(router, &other, "CA2", "StreamEvent=stream-started");
        assert_eq!(pod_of(router, "CA2"), None, "another attempt's");
        tell(router, "/api/v1/twilio/call-status", "CA2", "CallStatus=completed");
        tell(router, &started, "CA2", "StreamEvent=stream-started");
        assert_eq!(pod_of(router, "CA2"), None);
        assert_eq!(again(router, "CA2", &heard), over);
    });
}

#[test]
fn after_stream_is_no_way_around_limits_and_no_way_to_blame_a_pod() {
    let tiers = [("TIER_CONFIG", r#"{"gold": 5}"#)];
    each_store(&tiers, |router| {
        assert_eq!(router.put("/api/v1/merchants/none", r#"{"max_calls": 0}"#).0, 200);
        let mut connection = router.connect();
        let path = "/api/v1/twilio/after-stream?pod_name=voice-agent-0&merchant_id=none&attempt";
        let ask = |connection: &mut _, sid: &str, path: &str| {
            testkit::provider::ask(connection, sid, path)
        };
        assert!(ask(&mut connection, "CA1", &format!("{path}=1")).pod().is_none());
        for attempt in ["0", "-1", "101", "4294967295", "99999999999", "x"] {
            let heard = ask(&mut connection, "CA1", &format!("{path}={attempt}"));
            assert!(matches!(heard, Heard::HangUp(ref words) if words.contains("not valid")));
        }
        let heard = call(&mut connection, "CA2");
        let pod = heard.pod().unwrap();
        stopped(router, "CA2", &pod, 1);
        for _ in 0..4 {
            ask(
                &mut connection,
                "CA2",
                &format!("/api/v1/twilio/after-stream?pod_name={pod}&attempt=9"),
            );
        }
        let (_, shown) = router.get(&format!("/api/v1/pod/{pod}"));
        assert_eq!(shown["is_quarantined"], false, "{shown}");
    });
    // Where nobody is rescued, nobody is.
    let router = Router::start(&[("LOG_LEVEL", "off")]);
    let heard = testkit::provider::ask(
        &mut router.connect(),
        "CA1",
        "/api/v1/twilio/after-stream?pod_name=a&attempt=1",
    );
    assert_eq!(heard, Heard::HangUp(String::new()));
}

#[test]
fn a_call_that_comes_back_while_redis_is_out_comes_back_again() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut settings = SETTINGS.to_vec();
    settings.extend([("REDIS_URL", url.as_str()), ("HOLD_TIME", "30s"), ("HOLD_POLL", "1s")]);
    let router = Router::start(&settings);
    let heard = call(&mut router.connect(), "CA1");
    let pod = heard.pod().unwrap();
    server.signal("STOP");
    assert_eq!(release(&router, "CA1", &pod), 503);
    let held = again(&router, "CA1", &heard);
    assert!(held.next().unwrap().contains("/after-stream?pod_name="), "{held:?}");
    assert!(held.next().unwrap().contains("&attempt=1&waiting_since="), "{held:?}");
    server.signal("CONT");
    eventually(3 * SECOND, "service is back", || router.get("/api/v1/status").0 == 200);
    assert_eq!(again(&router, "CA1", &held), Heard::HangUp(String::new()), "it was released");
}

/// I8: every webhook is answered within two seconds, whenever Redis stalls.
#[test]
fn a_call_that_comes_back_is_answered_in_time_while_redis_stalls() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut settings = SETTINGS.to_vec();
    settings.push(("REDIS_URL", url.as_str()));
    let router = Router::start(&settings);
    let mut stats = server.connection();
    let mut asked = move || -> usize {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut stats).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls="));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    };
    let mut calls = 0;
    let mut answered_in = |looks: usize| {
        calls += 1;
        let sid = format!("CA{calls}");
        let heard = call(&mut router.connect(), &sid);
        let started = Instant::now();
        let took = thread::scope(|scope| {
            let answer = scope.spawn(|| again(&router, &sid, &heard));
            let before = asked();
            while !answer.is_finished() && asked() < before.saturating_add(looks) {
                thread::sleep(Duration::from_millis(5));
            }
            server.signal("STOP");
            let _ = answer.join().unwrap();
            started.elapsed()
        });
        server.signal("CONT");
        eventually(10 * SECOND, "service is back", || router.get("/api/v1/status").0 == 200);
        router.release(&sid);
        took
    };
    // Redis stalls after so many looks at the call; the last time it does not.
    for looks in [1, 4, 7, 9, 10, 11, usize::MAX] {
        // A busy machine adds time of its own: what the router waits for, it waits for each time.
        let in_time = (0..5).any(|_| answered_in(looks) < 2 * SECOND);
        assert!(in_time, "when Redis stalls after {looks} looks");
    }
}
