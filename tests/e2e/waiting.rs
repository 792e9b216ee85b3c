//! Calls that wait for a pod: fair, bounded, in the store.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{
    Connection, Router, eventually, program,
    provider::{Heard, PUBLIC_URL, again, ask, call},
    redis::RedisServer,
    scratch,
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
const BUSY: &str = "All agents are busy. Please try again later.";
const SETTINGS: [(&str, &str); 5] = [
    ("PUBLIC_URL", PUBLIC_URL),
    ("HOLD_TIME", "30s"),
    ("HOLD_POLL", "1s"),
    ("TIER_CONFIG", r#"{"gold": 1}"#),
    ("LOG_LEVEL", "off"),
];

pub(crate) fn with(extra: &[(&str, &str)]) -> Router {
    let mut settings = SETTINGS.to_vec();
    settings.extend(extra);
    Router::start(&settings)
}

/// The same for both stores.
fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    test(&with(extra));
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut extra = extra.to_vec();
    extra.push(("REDIS_URL", &url));
    test(&with(&extra));
}

pub(crate) fn waiting(router: &Router) -> u64 {
    router.status()["waiting"].as_u64().unwrap()
}

/// Far more than a second or two, far less than the longest waits here: an answer within it
/// did not wait for these.
const LONG: Duration = Duration::from_secs(8);

/// A long poll; its answer and how long it took.
fn poll(mut connection: Connection, sid: &str, wait: &str) -> (u16, serde_json::Value, Duration) {
    let started = Instant::now();
    let body = json!({"call_sid": sid, "wait": wait});
    let (status, answer) = connection.post("/api/v1/allocate", &body).json();
    (status, answer, started.elapsed())
}

#[test]
fn a_caller_waits_and_gets_the_next_free_pod() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        assert!(call(&mut connection, "CA1").pod().is_some());
        let first = ask(&mut connection, "CA2", "/api/v1/twilio/allocate?merchant_id=m1&flow=v1");
        let Heard::Hold { then, hears } = &first else { panic!("{first:?}") };
        assert!(hears.contains("<Say>All agents are busy. Please stay on the line.</Say>"));
        assert!(then.contains("&merchant_id=m1&flow=v1&template=order-confirmation"), "{then}");
        assert_eq!(waiting(router), 1);
        let (status, place) = router.get("/api/v1/calls/CA2");
        assert_eq!((status, &place["is_waiting"]), (200, &json!(true)), "{place}");
        assert_eq!(place["merchant_id"], "m1");
        let second = again(router, "CA2", &first);
        let Heard::Hold { hears, .. } = &second else { panic!("{second:?}") };
        assert_eq!(hears, r#"<Pause length="1"/>"#);

        assert_eq!(router.release("CA1").0, 200);
        // It is theirs already: nobody who asks later gets it.
        assert_eq!(waiting(router), 0);
        assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
        assert_eq!(router.get("/api/v1/calls/CA2").1["is_waiting"], true);
        let third = again(router, "CA2", &second);
        assert!(third.pod().is_some(), "{third:?}");
        assert_eq!(router.get("/api/v1/calls/CA2").1["is_waiting"], false);
        let metrics = connection.get("/metrics").text();
        assert!(metrics.contains("smart_router_wait_seconds_count{result=\"served\"} 1"));
        eventually(5 * SECOND, "the gauge follows", || {
            connection.get("/metrics").text().contains("smart_router_waiting_calls 0")
        });
        assert_eq!(router.release("CA2").0, 200);
    });
}

#[test]
fn providers_that_cannot_wait_and_requests_that_do_not_want_to_are_refused_at_once() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        router.allocate("CA1");
        let refused: [(u16, &str); 4] = [
            (503, "/api/v1/exotel/allocate?CallSid=CA2"),
            (200, "/api/v1/vonage/allocate?uuid=CA2"),
            (200, "/api/v1/jambonz/allocate?call_sid=CA2"),
            (200, "/api/v1/plivo/call-status?CallUUID=CA2&CallStatus=in-progress"),
        ];
        for (status, path) in refused {
            assert_eq!(connection.get(path).status, status, "{path}");
        }
        for body in [json!({"call_sid": "CA2"}), json!({"call_sid": "CA2", "wait": "0s"})] {
            let (status, answer) = router.post("/api/v1/allocate", body);
            assert_eq!((status, &answer["details"]["reason"]), (503, &json!("no_pods")));
        }
        let (status, answer) =
            router.post("/api/v1/allocate", json!({"call_sid": "CA2", "wait": "soon"}));
        assert_eq!(status, 400, "{answer}");
        assert_eq!(waiting(router), 0);
        let plivo = connection.form("/api/v1/plivo/allocate", "CallUUID=CA4").text();
        assert!(plivo.contains("<Speak>") && plivo.contains("</Redirect>"), "{plivo}");
        let plivo = connection.form("/api/v1/plivo/allocate", "CallUUID=CA4");
        assert!(plivo.text().contains(r#"<Wait length="1"/>"#));
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn a_long_poll_is_answered_at_once_whichever_replica_frees_the_pod() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    // Long enough that asking from time to time would not do.
    let settings = [("REDIS_URL", url.as_str()), ("HOLD_POLL", "15s")];
    let routers = [with(&settings), with(&settings)];
    routers[0].allocate("CA1");
    thread::scope(|scope| {
        let waits = scope.spawn(|| poll(routers[1].connect(), "CA2", "20s"));
        eventually(5 * SECOND, "it waits", || waiting(&routers[0]) == 1);
        let released = Instant::now();
        assert_eq!(routers[0].release("CA1").0, 200);
        let (status, answer, _) = waits.join().unwrap();
        assert!(released.elapsed() < LONG, "it was not woken");
        assert_eq!((status, &answer["was_existing"]), (200, &json!(false)), "{answer}");
    });
    assert_eq!(routers[1].release("CA2").0, 200);
    // And within one process.
    let router = with(&[("HOLD_POLL", "15s")]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let waits = scope.spawn(|| poll(router.connect(), "CA2", "20s"));
        eventually(5 * SECOND, "it waits", || waiting(&router) == 1);
        let released = Instant::now();
        assert_eq!(router.release("CA1").0, 200);
        assert_eq!(waits.join().unwrap().0, 200);
        assert!(released.elapsed() < LONG, "it was not woken");
    });
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn higher_priorities_come_first_then_who_came_first() {
    each_store(&[], |router| {
        assert_eq!(router.put("/api/v1/merchants/vip", r#"{"priority": 5}"#).0, 200);
        let mut connection = router.connect();
        router.allocate("CA0");
        let mut heard = BTreeMap::new();
        for (sid, merchant) in [("CA1", ""), ("CA2", ""), ("CA3", "?merchant_id=vip")] {
            let path = format!("/api/v1/twilio/allocate{merchant}");
            heard.insert(sid, ask(&mut connection, sid, &path));
        }
        let mut holder = "CA0";
        for next in ["CA3", "CA1", "CA2"] {
            assert_eq!(router.release(holder).0, 200);
            for (sid, last) in &mut heard {
                if last.waits() {
                    *last = again(router, sid, last);
                    assert_eq!(
                        last.pod().is_some(),
                        *sid == next,
                        "{sid}, it is the turn of {next}"
                    );
                }
            }
            holder = next;
        }
        assert_eq!(router.release(holder).0, 200);
    });
}

#[test]
fn who_stops_asking_loses_the_place_and_the_pod() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        router.allocate("CA1");
        for sid in ["CA2", "CA3"] {
            assert!(call(&mut connection, sid).waits());
        }
        // CA2 is handed the pod and never comes; CA3 goes on asking.
        assert_eq!(router.release("CA1").0, 200);
        let mut heard = call(&mut connection, "CA3");
        let started = Instant::now();
        while heard.waits() {
            assert!(started.elapsed() < 30 * SECOND, "the pod is not passed on");
            thread::sleep(SECOND / 4);
            heard = again(router, "CA3", &heard);
        }
        assert!(heard.pod().is_some(), "{heard:?}");
        assert!(started.elapsed() > 2 * SECOND, "three polls is what they have");
        // One that only waits loses its place as well.
        assert!(call(&mut connection, "CA4").waits());
        eventually(6 * SECOND, "the place is free", || waiting(router) == 0);
        let metrics = connection.get("/metrics").text();
        assert!(metrics.contains("smart_router_abandoned_total 2"), "{metrics}");
        assert_eq!(router.release("CA3").0, 200);
    });
}

#[test]
fn when_the_time_is_over_the_refusal_comes() {
    each_store(&[("HOLD_TIME", "2s"), ("BUSY_ACTION", "reject")], |router| {
        let mut connection = router.connect();
        router.allocate("CA1");
        let mut heard = call(&mut connection, "CA2");
        thread::scope(|scope| {
            let waits = scope.spawn(|| poll(router.connect(), "CA3", "15s"));
            let started = Instant::now();
            while heard.waits() {
                thread::sleep(SECOND / 4);
                heard = again(router, "CA2", &heard);
            }
            // It has been answered: it can't be told that the line is busy.
            assert_eq!(heard, Heard::HangUp(BUSY.into()));
            assert!(started.elapsed() >= SECOND, "it had two seconds");
            let (status, answer, took) = waits.join().unwrap();
            assert_eq!((status, &answer["details"]["reason"]), (503, &json!("time_over")));
            assert!((2 * SECOND..LONG).contains(&took), "{took:?}");
        });
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn the_queue_is_bounded_and_limits_count_those_who_wait() {
    each_store(&[("HOLD_MAX", "3"), ("HOLD_MAX_PER_MERCHANT", "1")], |router| {
        let mut connection = router.connect();
        router.allocate("CA0");
        let mut asks = |sid: &str, merchant: &str| {
            ask(&mut connection, sid, &format!("/api/v1/twilio/allocate?merchant_id={merchant}"))
        };
        assert!(asks("CA1", "m1").waits());
        assert_eq!(asks("CA2", "m1"), Heard::HangUp(BUSY.into()), "one of each merchant");
        assert_eq!(router.put("/api/v1/merchants/m2", r#"{"max_calls": 0}"#).0, 200);
        assert_eq!(asks("CA3", "m2"), Heard::HangUp(BUSY.into()), "beyond its limit");
        assert!(asks("CA4", "").waits() && asks("CA5", "").waits());
        assert_eq!(asks("CA6", ""), Heard::HangUp(BUSY.into()), "the queue is full");
        assert!(asks("CA1", "m1").waits(), "who has a place keeps it");
        let body = json!({"call_sid": "CA7", "wait": "1s"});
        let (_, answer) = router.post("/api/v1/allocate", body);
        assert_eq!(answer["details"]["reason"], "queue_full", "{answer}");
        // Waiting counts as one of the merchant's calls.
        assert_eq!(router.put("/api/v1/merchants/m1", r#"{"max_calls": 1}"#).0, 200);
        assert_eq!(router.release("CA4").1, json!({"success": true, "was_waiting": true}));
        let body = json!({"call_sid": "CA8", "merchant_id": "m1", "wait": "1s"});
        let (_, answer) = router.post("/api/v1/allocate", body);
        assert_eq!(answer["details"]["reason"], "max_calls", "{answer}");
        for sid in ["CA1", "CA5"] {
            let over = format!("CallSid={sid}&CallStatus=completed");
            assert_eq!(router.connect().form("/api/v1/twilio/call-status", &over).status, 200);
        }
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA0").0, 200);
    });
}

#[test]
fn places_outlive_a_restart_and_an_outage() {
    let directory = scratch();
    let router = with(&[("DATA_DIR", directory.to_str().unwrap())]);
    let mut connection = router.connect();
    router.allocate("CA1");
    let heard = call(&mut connection, "CA2");
    let router = router.kill_and_restart();
    assert_eq!(waiting(&router), 1);
    assert_eq!(router.release("CA1").0, 200);
    let router = router.kill_and_restart();
    assert!(again(&router, "CA2", &heard).pod().is_some());
    assert_eq!(router.release("CA2").0, 200);

    let server = RedisServer::start(&[]);
    let router = with(&[("REDIS_URL", &server.url())]);
    let mut connection = router.connect();
    router.allocate("CA1");
    let heard = call(&mut connection, "CA2");
    server.signal("STOP");
    // Longer than three polls; and nobody is hung up on for that.
    for _ in 0..4 {
        assert!(again(&router, "CA2", &heard).waits());
        thread::sleep(SECOND);
    }
    server.signal("CONT");
    eventually(3 * SECOND, "service is back", || router.get("/api/v1/status").0 == 200);
    assert_eq!(waiting(&router), 1, "its place is kept");
    assert_eq!(router.release("CA1").0, 200);
    assert!(again(&router, "CA2", &heard).pod().is_some());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn waiting_needs_a_url_to_come_back_to() {
    for variable in [("HOLD_TIME", "30s"), ("RETRY_ON_DISCONNECT", "2")] {
        let output = program(&[variable]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains("PUBLIC_URL"), "{error}");
        assert!(error.contains(variable.0), "{error}");
    }
}

/// A hundred callers, ten pods, three routers: in order, none twice, none
/// forgotten. Some vanish, and a router is killed in the middle.
#[test]
fn a_hundred_calls_share_ten_pods_through_three_routers() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("TIER_CONFIG", r#"{"gold": 10}"#),
        ("HOLD_TIME", "60s"),
        ("HOLD_POLL", "1s"),
    ];
    let mut routers = vec![with(&settings), with(&settings), with(&settings)];
    let addresses: Vec<_> = routers.iter().map(|router| router.address).collect();
    // Names that say nothing of the order.
    let sids: Vec<String> = (0..100).map(|number| format!("CA{:03}", number * 37 % 100)).collect();
    let vanishes = |number: usize| number >= 10 && number.is_multiple_of(9);
    let first: Vec<Heard> = sids
        .iter()
        .enumerate()
        .map(|(number, sid)| call(&mut Connection::open(addresses[number % 3]), sid))
        .collect();
    assert_eq!(first.iter().filter(|heard| !heard.waits()).count(), 10);
    // In what order pods were handed over, as Redis says it.
    let mut listener = server.connection();
    let mut messages = listener.as_pubsub();
    messages.subscribe("voice:handed").unwrap();
    messages.set_read_timeout(Some(SECOND)).unwrap();
    let (served, holders) = (Mutex::new(Vec::new()), Mutex::new(HashSet::new()));
    let try_ask = |number: usize, path: &str| {
        // A caller whose router is gone reaches another, as through a load balancer.
        (0..3).find_map(|other| {
            let mut connection = Connection::try_open(addresses[(number + other) % 3])?;
            let body = format!("CallSid={}", sids[number]);
            let answer = connection.try_form(path, &body)?;
            Some(Heard::read(&answer.text()))
        })
    };
    thread::scope(|scope| {
        for (number, heard) in first.iter().enumerate().filter(|(number, _)| !vanishes(*number)) {
            let (served, holders, sids, addresses) = (&served, &holders, &sids, &addresses);
            let try_ask = &try_ask;
            scope.spawn(move || {
                let mut heard = heard.clone();
                while let Some(next) = heard.next().map(str::to_owned).filter(|_| heard.waits()) {
                    thread::sleep(Duration::from_millis(150));
                    heard = try_ask(number, &next).expect("some router answers");
                }
                let pod = heard.pod().unwrap_or_else(|| panic!("{number}: {heard:?}"));
                assert!(holders.lock().unwrap().insert(pod.clone()), "{pod} was given twice");
                served.lock().unwrap().push(number);
                thread::sleep(Duration::from_millis(300));
                holders.lock().unwrap().remove(&pod);
                let over = format!("CallSid={}&CallStatus=completed", sids[number]);
                let ends = |other: usize| {
                    let mut it = Connection::try_open(addresses[(number + other) % 3])?;
                    it.try_form("/api/v1/twilio/call-status", &over)
                };
                let is_ended = (0..3).filter_map(ends).any(|answer| answer.status == 200);
                assert!(is_ended, "{number} could not end");
            });
        }
        eventually(10 * SECOND, "some are served", || served.lock().unwrap().len() >= 20);
        let mut killed = routers.remove(1);
        killed.child.kill().unwrap();
        killed.child.wait().unwrap();
    });
    let served = served.into_inner().unwrap();
    let vanished = (0..100).filter(|number| vanishes(*number)).count();
    assert_eq!(served.len(), 100 - vanished, "someone was forgotten");
    let mut handed = Vec::new();
    while let Ok(message) = messages.get_message() {
        handed.push(message.get_payload::<String>().unwrap());
    }
    let arrival = |sid: &String| sids.iter().position(|other| other == sid).unwrap();
    assert!(handed.is_sorted_by_key(arrival), "not in order: {handed:?}");
    assert_eq!(handed.iter().collect::<HashSet<_>>().len(), handed.len(), "served twice");
    let stayed = (10..100).filter(|number| !vanishes(*number)).map(|number| &sids[number]);
    stayed.for_each(|sid| assert!(handed.contains(sid), "{sid} was never handed a pod"));
    eventually(10 * SECOND, "nobody waits, nobody has a pod", || {
        let status = routers[0].status();
        status["waiting"] == 0 && status["active_calls"] == 0
    });
}

#[test]
fn two_long_polls_for_one_call_end_together() {
    let router = with(&[("HOLD_TIME", "2s")]);
    router.allocate("CA1");
    thread::scope(|scope| {
        let first = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
        eventually(5 * SECOND, "it waits", || waiting(&router) == 1);
        let second = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
        for waits in [first, second] {
            let (status, answer, took) = waits.join().unwrap();
            assert_eq!(status, 503, "{answer}");
            assert!(took < LONG, "{took:?}");
        }
    });
    assert_eq!(router.release("CA1").0, 200);
}

#[test]
fn a_shorter_wait_ends_before_the_place_does() {
    each_store(&[], |router| {
        router.allocate("CA1");
        thread::scope(|scope| {
            let long = scope.spawn(|| poll(router.connect(), "CA2", "15s"));
            eventually(5 * SECOND, "it waits", || waiting(router) == 1);
            let (status, answer, took) = poll(router.connect(), "CA2", "1s");
            assert_eq!((status, &answer["details"]["reason"]), (503, &json!("time_over")));
            assert!(took < LONG, "{took:?}");
            assert_eq!(waiting(router), 1, "the place is the other request's, too");
            assert_eq!(router.release("CA1").0, 200);
            assert_eq!(long.join().unwrap().0, 200);
        });
        assert_eq!(router.release("CA2").0, 200);
    });
}

#[test]
fn who_has_waited_long_enough_does_not_begin_again() {
    each_store(&[], |router| {
        router.allocate("CA1");
        // Its place is gone, and by its URL its time is over.
        let heard = ask(&mut router.connect(), "CA2", "/api/v1/twilio/allocate?waiting_since=1");
        assert_eq!(heard, Heard::HangUp(BUSY.into()));
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn a_waiting_call_is_not_connected_to_a_pod_that_drains() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        let pod = call(&mut connection, "CA1").pod().unwrap();
        let first = call(&mut connection, "CA2");
        assert_eq!(router.release("CA1").0, 200);
        assert_eq!(
            router.get("/api/v1/calls/CA2").1["pod_name"],
            pod.as_str(),
            "it was handed off"
        );
        assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
        let second = again(router, "CA2", &first);
        assert!(second.waits(), "{second:?}");
        assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": pod})).0, 200);
        assert_eq!(again(router, "CA2", &second).pod(), Some(pod));
        assert_eq!(router.release("CA2").0, 200);
    });
}
