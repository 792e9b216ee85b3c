//! Waiting calls: a bounded queue in the store, ordered by priority and arrival.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{
    Connection, Router, WITHOUT_GATEWAY, eventually, program,
    provider::{CallDocument, PUBLIC_URL, follow_redirect, pod_of, request_document, start_call},
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

pub(crate) fn start_router(extra: &[(&str, &str)]) -> Router {
    let mut settings = SETTINGS.to_vec();
    settings.extend(extra);
    Router::start(&settings)
}

/// Runs a test on the embedded store and on Redis.
pub(crate) fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    test(&start_router(extra));
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut extra = extra.to_vec();
    extra.push(("REDIS_URL", &url));
    test(&start_router(&extra));
}

pub(crate) fn waiting(router: &Router) -> u64 {
    router.status()["waiting"].as_u64().unwrap()
}

/// Between the expected response time and the long waits here: a faster response did not wait.
pub(crate) const MAX_RESPONSE_TIME: Duration = Duration::from_secs(8);

/// Sends a long poll. Returns status, body and duration.
pub(crate) fn poll(
    mut connection: Connection,
    sid: &str,
    wait: &str,
) -> (u16, serde_json::Value, Duration) {
    let started = Instant::now();
    let body = json!({"call_sid": sid, "wait": wait});
    let (status, response) = connection.post("/api/v1/allocate", &body).json();
    (status, response, started.elapsed())
}

#[test]
fn a_waiting_call_gets_the_next_free_pod() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        assert!(start_call(&mut connection, "CA1").is_stream());
        let first = request_document(
            &mut connection,
            "CA2",
            "/api/v1/twilio/allocate?merchant_id=m1&flow=v1",
        );
        let CallDocument::Hold { redirect, played } = &first else { panic!("{first:?}") };
        assert!(played.contains("<Say>All agents are busy. Please stay on the line.</Say>"));
        assert!(
            redirect.contains("&merchant_id=m1&flow=v1&template=order-confirmation"),
            "{redirect}"
        );
        assert_eq!(waiting(router), 1);
        let (status, found) = router.get("/api/v1/calls/CA2");
        assert_eq!((status, &found["is_waiting"]), (200, &json!(true)), "{found}");
        assert_eq!(found["merchant_id"], "m1");
        let second = follow_redirect(router, "CA2", &first);
        let CallDocument::Hold { played, .. } = &second else { panic!("{second:?}") };
        assert_eq!(played, r#"<Pause length="1"/>"#);

        assert_eq!(router.release("CA1").0, 200);
        // The pod is handed off to CA2; a later call does not get it.
        assert_eq!(waiting(router), 0);
        assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA3"})).0, 503);
        assert_eq!(router.get("/api/v1/calls/CA2").1["is_waiting"], true);
        let third = follow_redirect(router, "CA2", &second);
        assert!(third.is_stream(), "{third:?}");
        assert_eq!(router.get("/api/v1/calls/CA2").1["is_waiting"], false);
        let metrics = connection.get("/metrics").text();
        assert!(metrics.contains("smart_router_wait_seconds_count{result=\"served\"} 1"));
        eventually(5 * SECOND, "the gauge is refreshed", || {
            connection.get("/metrics").text().contains("smart_router_waiting_calls 0")
        });
        assert_eq!(router.release("CA2").0, 200);
    });
}

#[test]
fn requests_that_cannot_or_do_not_wait_are_refused_at_once() {
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
            let (status, response) = router.post("/api/v1/allocate", body);
            assert_eq!((status, &response["details"]["reason"]), (503, &json!("no_pods")));
        }
        let (status, response) =
            router.post("/api/v1/allocate", json!({"call_sid": "CA2", "wait": "soon"}));
        assert_eq!(status, 400, "{response}");
        assert_eq!(waiting(router), 0);
        let plivo = connection.form("/api/v1/plivo/allocate", "CallUUID=CA4").text();
        assert!(plivo.contains("<Speak>") && plivo.contains("</Redirect>"), "{plivo}");
        let plivo = connection.form("/api/v1/plivo/allocate", "CallUUID=CA4");
        assert!(plivo.text().contains(r#"<Wait length="1"/>"#));
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn the_queue_is_ordered_by_priority_then_by_arrival() {
    each_store(&[], |router| {
        assert_eq!(router.put("/api/v1/merchants/vip", r#"{"priority": 5}"#).0, 200);
        let mut connection = router.connect();
        router.allocate("CA0");
        let mut documents = BTreeMap::new();
        for (sid, merchant) in [("CA1", ""), ("CA2", ""), ("CA3", "?merchant_id=vip")] {
            let path = format!("/api/v1/twilio/allocate{merchant}");
            documents.insert(sid, request_document(&mut connection, sid, &path));
        }
        let mut holder = "CA0";
        for next in ["CA3", "CA1", "CA2"] {
            assert_eq!(router.release(holder).0, 200);
            for (sid, last) in &mut documents {
                if last.is_hold() {
                    *last = follow_redirect(router, sid, last);
                    assert_eq!(
                        last.is_stream(),
                        *sid == next,
                        "{sid} polled, the next in line is {next}"
                    );
                }
            }
            holder = next;
        }
        assert_eq!(router.release(holder).0, 200);
    });
}

#[test]
fn a_call_that_stops_polling_loses_its_queue_entry_and_pod() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        router.allocate("CA1");
        for sid in ["CA2", "CA3"] {
            assert!(start_call(&mut connection, sid).is_hold());
        }
        // CA2 never accepts its hand-off; CA3 keeps polling.
        assert_eq!(router.release("CA1").0, 200);
        let mut document = start_call(&mut connection, "CA3");
        let started = Instant::now();
        while document.is_hold() {
            assert!(started.elapsed() < 30 * SECOND, "the pod is not handed to CA3");
            thread::sleep(SECOND / 4);
            document = follow_redirect(router, "CA3", &document);
        }
        assert!(document.is_stream(), "{document:?}");
        assert!(started.elapsed() > 2 * SECOND, "a call may miss three polls");
        // A waiting call without a hand-off loses its queue entry, too.
        assert!(start_call(&mut connection, "CA4").is_hold());
        eventually(6 * SECOND, "the queue entry expires", || waiting(router) == 0);
        let metrics = connection.get("/metrics").text();
        assert!(metrics.contains("smart_router_abandoned_total 2"), "{metrics}");
        assert_eq!(router.release("CA3").0, 200);
    });
}

#[test]
fn a_waiting_call_is_refused_after_the_hold_time() {
    each_store(&[("HOLD_TIME", "2s"), ("BUSY_ACTION", "reject")], |router| {
        let mut connection = router.connect();
        router.allocate("CA1");
        let mut document = start_call(&mut connection, "CA2");
        thread::scope(|scope| {
            let waits = scope.spawn(|| poll(router.connect(), "CA3", "15s"));
            let started = Instant::now();
            while document.is_hold() {
                thread::sleep(SECOND / 4);
                document = follow_redirect(router, "CA2", &document);
            }
            // The call was answered, so it cannot be rejected as busy.
            assert_eq!(document, CallDocument::HangUp(BUSY.into()));
            assert!(started.elapsed() >= SECOND, "HOLD_TIME is two seconds");
            let (status, response, elapsed) = waits.join().unwrap();
            assert_eq!((status, &response["details"]["reason"]), (503, &json!("time_over")));
            assert!((2 * SECOND..MAX_RESPONSE_TIME).contains(&elapsed), "{elapsed:?}");
        });
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn the_queue_is_bounded_and_limits_count_waiting_calls() {
    each_store(&[("HOLD_MAX", "3"), ("HOLD_MAX_PER_MERCHANT", "1")], |router| {
        let mut connection = router.connect();
        router.allocate("CA0");
        let mut request = |sid: &str, merchant: &str| {
            request_document(
                &mut connection,
                sid,
                &format!("/api/v1/twilio/allocate?merchant_id={merchant}"),
            )
        };
        assert!(request("CA1", "m1").is_hold());
        assert_eq!(
            request("CA2", "m1"),
            CallDocument::HangUp(BUSY.into()),
            "one waiting call per merchant"
        );
        assert_eq!(router.put("/api/v1/merchants/m2", r#"{"max_calls": 0}"#).0, 200);
        assert_eq!(
            request("CA3", "m2"),
            CallDocument::HangUp(BUSY.into()),
            "the merchant is at its limit"
        );
        assert!(request("CA4", "").is_hold() && request("CA5", "").is_hold());
        assert_eq!(request("CA6", ""), CallDocument::HangUp(BUSY.into()), "the queue is full");
        assert!(request("CA1", "m1").is_hold(), "a queued call keeps its entry");
        let body = json!({"call_sid": "CA7", "wait": "1s"});
        let (_, response) = router.post("/api/v1/allocate", body);
        assert_eq!(response["details"]["reason"], "queue_full", "{response}");
        // A waiting call counts towards max_calls.
        assert_eq!(router.put("/api/v1/merchants/m1", r#"{"max_calls": 1}"#).0, 200);
        assert_eq!(router.release("CA4").1, json!({"success": true, "was_waiting": true}));
        let body = json!({"call_sid": "CA8", "merchant_id": "m1", "wait": "1s"});
        let (_, response) = router.post("/api/v1/allocate", body);
        assert_eq!(response["details"]["reason"], "max_calls", "{response}");
        for sid in ["CA1", "CA5"] {
            let completed = format!("CallSid={sid}&CallStatus=completed");
            assert_eq!(router.connect().form("/api/v1/twilio/call-status", &completed).status, 200);
        }
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA0").0, 200);
    });
}

#[test]
fn queue_entries_survive_a_restart_and_an_outage() {
    let directory = scratch();
    let router = start_router(&[("DATA_DIR", directory.to_str().unwrap())]);
    let mut connection = router.connect();
    router.allocate("CA1");
    let document = start_call(&mut connection, "CA2");
    let router = router.kill_and_restart();
    assert_eq!(waiting(&router), 1);
    assert_eq!(router.release("CA1").0, 200);
    let router = router.kill_and_restart();
    assert!(follow_redirect(&router, "CA2", &document).is_stream());
    assert_eq!(router.release("CA2").0, 200);

    let server = RedisServer::start(&[]);
    let router = start_router(&[("REDIS_URL", &server.url())]);
    let mut connection = router.connect();
    router.allocate("CA1");
    let document = start_call(&mut connection, "CA2");
    server.signal("STOP");
    // Longer than three polls; the outage must not end the call.
    for _ in 0..4 {
        assert!(follow_redirect(&router, "CA2", &document).is_hold());
        thread::sleep(SECOND);
    }
    server.signal("CONT");
    eventually(3 * SECOND, "the circuit breaker closes", || router.get("/api/v1/status").0 == 200);
    assert_eq!(waiting(&router), 1, "the queue entry is kept");
    assert_eq!(router.release("CA1").0, 200);
    assert!(follow_redirect(&router, "CA2", &document).is_stream());
    assert_eq!(router.release("CA2").0, 200);
}

#[test]
fn waiting_requires_public_url() {
    let retries = ("RETRY_ON_DISCONNECT", "2");
    for settings in [&[("HOLD_TIME", "30s")][..], &[retries, WITHOUT_GATEWAY]] {
        let output = program(settings).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains("PUBLIC_URL"), "{error}");
        assert!(error.contains(settings[0].0), "{error}");
    }
}

/// Calls are served in order, once each, and none is lost, although some callers hang up and a
/// router is killed.
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
    let mut routers =
        vec![start_router(&settings), start_router(&settings), start_router(&settings)];
    let addresses: Vec<_> = routers.iter().map(|router| router.address).collect();
    // Call ids whose order differs from the order of arrival.
    let sids: Vec<String> = (0..100).map(|number| format!("CA{:03}", number * 37 % 100)).collect();
    let hangs_up = |number: usize| number >= 10 && number.is_multiple_of(9);
    let first: Vec<CallDocument> = sids
        .iter()
        .enumerate()
        .map(|(number, sid)| start_call(&mut Connection::open(addresses[number % 3]), sid))
        .collect();
    assert_eq!(first.iter().filter(|document| !document.is_hold()).count(), 10);
    // Redis publishes the hand-offs in order.
    let mut listener = server.connection();
    let mut messages = listener.as_pubsub();
    messages.subscribe("voice:handed").unwrap();
    messages.set_read_timeout(Some(SECOND)).unwrap();
    let (served, holders) = (Mutex::new(Vec::new()), Mutex::new(HashSet::new()));
    let try_request = |number: usize, path: &str| {
        // A call whose router was killed reaches another one, as through a load balancer.
        (0..3).find_map(|other| {
            let mut connection = Connection::try_open(addresses[(number + other) % 3])?;
            let body = format!("CallSid={}", sids[number]);
            let response = connection.try_form(path, &body)?;
            Some(CallDocument::read(&response.text()))
        })
    };
    let pod_of = |number: usize| {
        (0..3).find_map(|other| {
            let mut connection = Connection::try_open(addresses[(number + other) % 3])?;
            let (status, found) =
                connection.try_get(&format!("/api/v1/calls/{}", sids[number]))?.json();
            assert_eq!(status, 200, "{found}");
            found["pod_name"].as_str().map(str::to_owned)
        })
    };
    thread::scope(|scope| {
        for (number, document) in first.iter().enumerate().filter(|(number, _)| !hangs_up(*number))
        {
            let (served, holders, sids, addresses) = (&served, &holders, &sids, &addresses);
            let (try_request, pod_of) = (&try_request, &pod_of);
            scope.spawn(move || {
                let mut document = document.clone();
                while let Some(next) =
                    document.next().map(str::to_owned).filter(|_| document.is_hold())
                {
                    thread::sleep(Duration::from_millis(150));
                    document = try_request(number, &next).expect("some router responds");
                }
                assert!(document.is_stream(), "{number}: {document:?}");
                let pod = pod_of(number).expect("the call has a pod");
                assert!(holders.lock().unwrap().insert(pod.clone()), "{pod} was allocated twice");
                served.lock().unwrap().push(number);
                thread::sleep(Duration::from_millis(300));
                holders.lock().unwrap().remove(&pod);
                let completed = format!("CallSid={}&CallStatus=completed", sids[number]);
                let end = |other: usize| {
                    let mut it = Connection::try_open(addresses[(number + other) % 3])?;
                    it.try_form("/api/v1/twilio/call-status", &completed)
                };
                let is_ended = (0..3).filter_map(end).any(|response| response.status == 200);
                assert!(is_ended, "{number} was not ended");
            });
        }
        eventually(10 * SECOND, "some calls are served", || served.lock().unwrap().len() >= 20);
        let mut killed = routers.remove(1);
        killed.child.kill().unwrap();
        killed.child.wait().unwrap();
    });
    let served = served.into_inner().unwrap();
    let hung_up = (0..100).filter(|number| hangs_up(*number)).count();
    assert_eq!(served.len(), 100 - hung_up, "a waiting call was lost");
    let mut handed = Vec::new();
    while let Ok(message) = messages.get_message() {
        handed.push(message.get_payload::<String>().unwrap());
    }
    let arrival = |sid: &String| sids.iter().position(|other| other == sid).unwrap();
    assert!(handed.is_sorted_by_key(arrival), "not in order: {handed:?}");
    assert_eq!(
        handed.iter().collect::<HashSet<_>>().len(),
        handed.len(),
        "a call was handed two pods"
    );
    let stayed = (10..100).filter(|number| !hangs_up(*number)).map(|number| &sids[number]);
    stayed.for_each(|sid| assert!(handed.contains(sid), "{sid} was never handed a pod"));
    eventually(10 * SECOND, "no call waits or is active", || {
        let status = routers[0].status();
        status["waiting"] == 0 && status["active_calls"] == 0
    });
}

#[test]
fn a_call_past_its_hold_time_does_not_wait_again() {
    each_store(&[], |router| {
        router.allocate("CA1");
        // The queue entry is gone and waiting_since is older than HOLD_TIME.
        let document = request_document(
            &mut router.connect(),
            "CA2",
            "/api/v1/twilio/allocate?waiting_since=1",
        );
        assert_eq!(document, CallDocument::HangUp(BUSY.into()));
        assert_eq!(waiting(router), 0);
        assert_eq!(router.release("CA1").0, 200);
    });
}

#[test]
fn a_waiting_call_is_not_connected_to_a_draining_pod() {
    each_store(&[], |router| {
        let mut connection = router.connect();
        assert!(start_call(&mut connection, "CA1").is_stream());
        let pod = pod_of(router, "CA1").unwrap();
        let first = start_call(&mut connection, "CA2");
        assert_eq!(router.release("CA1").0, 200);
        assert_eq!(
            router.get("/api/v1/calls/CA2").1["pod_name"],
            pod.as_str(),
            "the pod was handed off"
        );
        assert_eq!(router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
        let second = follow_redirect(router, "CA2", &first);
        assert!(second.is_hold(), "{second:?}");
        assert_eq!(router.post("/api/v1/undrain", json!({"pod_name": pod})).0, 200);
        assert!(follow_redirect(router, "CA2", &second).is_stream());
        assert_eq!(pod_of(router, "CA2"), Some(pod));
        assert_eq!(router.release("CA2").0, 200);
    });
}
