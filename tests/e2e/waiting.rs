//! Waiting calls: a bounded queue in the store, ordered by priority and arrival.

use std::{
    collections::{BTreeMap, HashSet},
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::{
    Connection, Router, WITHOUT_GATEWAY,
    clock::WallClock,
    eventually, program,
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

/// For a Redis whose clock is stepped: the time that passes meanwhile does not count.
pub(crate) const SLOW_POLLS: [(&str, &str); 2] = [("HOLD_TIME", "10m"), ("HOLD_POLL", "20s")];

pub(crate) fn start_router(extra: &[(&str, &str)]) -> Router {
    Router::start(&[&SETTINGS, extra].concat())
}

pub(crate) fn each_store(extra: &[(&str, &str)], test: impl Fn(&Router)) {
    testkit::each_store(&[&SETTINGS, extra].concat(), test);
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

    let clock = WallClock::ahead(0);
    let server = RedisServer::with_clock(&clock);
    let router = start_router(&[&SLOW_POLLS[..], &[("REDIS_URL", &server.url())]].concat());
    let mut connection = router.connect();
    router.allocate("CA1");
    let document = start_call(&mut connection, "CA2");
    server.signal("STOP");
    // Longer than three polls; the outage must not end the call.
    for poll in 1..=4 {
        assert!(follow_redirect(&router, "CA2", &document).is_hold());
        clock.set_ahead(20 * poll);
    }
    server.signal("CONT");
    eventually(3 * SECOND, "the circuit breaker closes", || router.get("/api/v1/status").0 == 200);
    router.wait_for_sweep();
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

/// Routers behind a load balancer.
struct Balancer(Vec<SocketAddr>);

impl Balancer {
    /// Sends a request of a call. If its router was killed, it reaches another one.
    fn send<T>(&self, number: usize, request: impl Fn(&mut Connection) -> Option<T>) -> Option<T> {
        let count = self.0.len();
        (0..count)
            .find_map(|other| request(&mut Connection::try_open(self.0[(number + other) % count])?))
    }

    /// The caller: polls until the call has a pod, talks to it, and hangs up. `holders` are the pods
    /// in use.
    fn make_call(
        &self,
        (number, sid): (usize, &str),
        mut document: CallDocument,
        holders: &Mutex<HashSet<String>>,
    ) {
        let form = |path: &str, body: &str| {
            self.send(number, |connection| connection.try_form(path, body))
        };
        while let Some(next) = document.next().map(str::to_owned).filter(|_| document.is_hold()) {
            thread::sleep(Duration::from_millis(150));
            let response = form(&next, &format!("CallSid={sid}")).expect("some router responds");
            document = CallDocument::read(&response.text());
        }
        assert!(document.is_stream(), "{number}: {document:?}");
        let found = self.send(number, |it| it.try_get(&format!("/api/v1/calls/{sid}")));
        let (status, found) = found.expect("some router responds").json();
        assert_eq!(status, 200, "{found}");
        let pod = found["pod_name"].as_str().expect("the call has a pod").to_owned();
        assert!(holders.lock().unwrap().insert(pod.clone()), "{pod} was allocated twice");
        thread::sleep(Duration::from_millis(300));
        holders.lock().unwrap().remove(&pod);
        let completed = format!("CallSid={sid}&CallStatus=completed");
        let ended = self.send(number, |connection| {
            let response = connection.try_form("/api/v1/twilio/call-status", &completed)?;
            (response.status == 200).then_some(())
        });
        assert!(ended.is_some(), "{number} was not ended");
    }
}

/// The calls that Redis has published as handed a pod, in order, once each.
fn handed_calls(messages: &mut redis::PubSub<'_>) -> Vec<String> {
    let mut handed = Vec::new();
    while let Ok(message) = messages.get_message() {
        handed.push(message.get_payload::<String>().unwrap());
    }
    let unique = handed.iter().collect::<HashSet<_>>().len();
    assert_eq!(unique, handed.len(), "a call was handed two pods");
    handed
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
    let balancer = Balancer(routers.iter().map(|router| router.address).collect());
    // Call ids whose order differs from the order of arrival.
    let sids: Vec<String> = (0..100).map(|number| format!("CA{:03}", number * 37 % 100)).collect();
    let hangs_up = |number: usize| number >= 10 && number.is_multiple_of(9);
    let first: Vec<CallDocument> = sids
        .iter()
        .enumerate()
        .map(|(number, sid)| start_call(&mut routers[number % 3].connect(), sid))
        .collect();
    assert_eq!(first.iter().filter(|document| !document.is_hold()).count(), 10);
    // Redis publishes the hand-offs in order.
    let mut listener = server.connection();
    let mut messages = listener.as_pubsub();
    messages.subscribe("voice:handed").unwrap();
    messages.set_read_timeout(Some(SECOND)).unwrap();
    let (served, holders) = (AtomicUsize::new(0), Mutex::new(HashSet::new()));
    thread::scope(|scope| {
        for (number, document) in first.into_iter().enumerate().filter(|(it, _)| !hangs_up(*it)) {
            let (balancer, served, holders, sids) = (&balancer, &served, &holders, &sids);
            scope.spawn(move || {
                balancer.make_call((number, &sids[number]), document, holders);
                served.fetch_add(1, Ordering::Relaxed);
            });
        }
        eventually(10 * SECOND, "some calls are served", || served.load(Ordering::Relaxed) >= 20);
        let mut killed = routers.remove(1);
        killed.child.kill().unwrap();
        killed.child.wait().unwrap();
    });
    let hung_up = (0..100).filter(|number| hangs_up(*number)).count();
    assert_eq!(served.into_inner(), 100 - hung_up, "a waiting call was lost");
    let handed = handed_calls(&mut messages);
    let arrival = |sid: &String| sids.iter().position(|other| other == sid).unwrap();
    assert!(handed.is_sorted_by_key(arrival), "not in order: {handed:?}");
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
