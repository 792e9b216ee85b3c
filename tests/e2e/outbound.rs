//! Outbound calls: reservations, lines of numbers and calls per second of accounts.

use std::{
    collections::BTreeSet,
    sync::{Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use testkit::{
    HttpResponse, Router, each_store, eventually, redis::RedisServer, replicas, scratch,
};

const NUMBER: &str = "+14155550100";
/// Longer than any response here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn reserve(router: &Router, body: Value) -> HttpResponse {
    router.connect().post("/api/v1/reservations", &body)
}

/// Reserves for a merchant. Returns the ids.
fn reserved(router: &Router, count: usize) -> Vec<String> {
    let (status, answer) = reserve(router, json!({"merchant_id": "acme", "count": count})).json();
    assert_eq!(status, 200, "{answer}");
    ids(&answer)
}

fn ids(answer: &Value) -> Vec<String> {
    let granted = answer["reservations"].as_array().unwrap();
    granted.iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect()
}

fn outstanding(router: &Router) -> usize {
    let (status, answer) = router.get("/api/v1/reservations");
    assert_eq!(status, 200, "{answer}");
    answer["reservations"].as_array().unwrap().len()
}

fn delete(router: &Router, path: &str) -> (u16, Value) {
    router.connect_as_admin().send("DELETE", path, &[], b"").json()
}

fn allocate(router: &Router, call: &str, reservation: &str) -> (u16, Value) {
    router.post("/api/v1/allocate", json!({"call_sid": call, "reservation_id": reservation}))
}

#[test]
fn a_reservation_keeps_a_pod_for_the_answer() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        let granted = reserved(router, 1);
        let (_, shown) = router.get(&format!("/api/v1/reservations/{}", granted[0]));
        assert_eq!((&shown["merchant_id"], &shown["pool"]), (&json!("acme"), &json!("pool:gold")));
        let lifetime =
            shown["expires_at"].as_f64().unwrap() - shown["granted_at"].as_f64().unwrap();
        assert_eq!(lifetime, 75.0);
        assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "CA1"})).0, 200);
        let (status, refused) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
        assert_eq!((status, &refused["details"]["chain"][0]["reason"]), (503, &json!("held")));
        let (status, answer) = allocate(router, "CA3", &granted[0]);
        assert_eq!((status, answer.get("warnings")), (200, None), "{answer}");
        let (_, call) = router.get("/api/v1/calls/CA3");
        assert_eq!(call["merchant_id"], "acme", "the merchant of the reservation");
        // A repeat of the same call is no second use.
        let (status, answer) = allocate(router, "CA3", &granted[0]);
        assert_eq!((status, answer.get("warnings")), (200, None), "{answer}");
        assert_eq!(router.get(&format!("/api/v1/reservations/{}", granted[0])).0, 404);
    });
}

#[test]
fn all_slots_of_pods_with_many_are_used() {
    let tiers = r#"{"gold": {"type": "shared", "target": 1, "max_concurrent": 300}}"#;
    each_store(&[("TIER_CONFIG", tiers)], |router| {
        (0..2).for_each(|_| assert_eq!(reserved(router, 100).len(), 100));
        let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
        assert_eq!(status, 200, "100 slots are free and not held: {answer}");
        assert_eq!(reserved(router, 100).len(), 99);
        let (status, answer) = router.post("/api/v1/allocate", json!({"call_sid": "CA2"}));
        assert_eq!((status, &answer["details"]["chain"][0]["reason"]), (503, &json!("held")));
    });
}

#[test]
fn a_call_with_the_name_of_a_reservation_counts_beside_it() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 9}"#)], |router| {
        router.put("/api/v1/merchants/acme", r#"{"max_calls": 2}"#);
        let call = reserved(router, 1).remove(0);
        let body = json!({"call_sid": call, "merchant_id": "acme"});
        assert_eq!(router.post("/api/v1/allocate", body).0, 200);
        let (status, answer) = reserve(router, json!({"merchant_id": "acme"})).json();
        assert_eq!((status, &answer["reason"]), (429, &json!("max_calls")));
        assert_eq!(router.release(&call).0, 200);
        assert_eq!(reserved(router, 2).len(), 1, "the reservation still counts");
    });
}

#[test]
fn a_repeat_of_a_refused_answer_keeps_its_reservation() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        let id = reserved(router, 1).remove(0);
        let pod = || json!({"pod_name": "voice-agent-0"});
        assert_eq!(router.post("/api/v1/drain", pod()).0, 200);
        for attempt in 0..2 {
            let (status, answer) = allocate(router, "CA1", &id);
            let warnings = &answer["details"]["warnings"];
            assert_eq!((status, warnings), (503, &Value::Null), "{attempt}: {answer}");
        }
        assert_eq!(router.post("/api/v1/undrain", pod()).0, 200);
        let (status, answer) = allocate(router, "CA1", &id);
        assert_eq!((status, answer.get("warnings")), (200, None), "{answer}");
        assert_eq!(router.get("/api/v1/calls/CA1").1["merchant_id"], "acme");
        let metrics = router.connect().get("/metrics").text();
        let missed = r#"smart_router_reservations_total{outcome="missed"} 1"#;
        assert!(metrics.contains(missed), "counted once");
    });
}

#[test]
fn a_call_in_progress_is_not_the_dial_of_a_reservation() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        let granted = reserved(router, 2);
        allocate(router, "CA1", &granted[0]);
        let path = format!("/api/v1/reservations/{}/dialed", granted[1]);
        let (status, answer) = router.post(&path, json!({"call_sid": "CA1"}));
        assert_eq!(status, 409, "{answer}");
        assert_eq!(router.post(&path, json!({"call_sid": "CA2"})).0, 200);
    });
}

#[test]
fn a_refused_batch_names_the_limit_and_the_time_to_wait() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        let answer = reserve(router, json!({"merchant_id": "acme", "count": 5}));
        let (status, body) = answer.json();
        assert_eq!((status, ids(&body).len()), (200, 2));
        assert_eq!((&body["refused"], &body["reason"]), (&json!(3), &json!("capacity")));
        let answer = reserve(router, json!({"merchant_id": "acme"}));
        let (status, body) = answer.json();
        assert_eq!((status, &body["reason"]), (429, &json!("capacity")));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(body["reservations"], json!([]));
    });
}

#[test]
fn a_reservation_that_cannot_be_used_warns_and_the_call_goes_on() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 9}"#)], |router| {
        let granted = reserved(router, 2);
        allocate(router, "CA1", &granted[0]);
        let body = json!({"call_sid": "CA3", "merchant_id": "x", "reservation_id": granted[1]});
        let (status, answer) = router.post("/api/v1/allocate", body);
        assert_eq!(status, 200);
        assert!(answer["warnings"][0].as_str().unwrap().contains("another merchant"), "{answer}");
        for named in [granted[0].as_str(), "R0000000000000000", "nonsense"] {
            let (status, answer) = allocate(router, &format!("CA2-{}", &named[1..5]), named);
            assert_eq!(status, 200, "{answer}");
            assert!(answer["warnings"][0].as_str().unwrap().contains("was used"), "{answer}");
        }
        assert_eq!(outstanding(router), 1, "the other merchant's call has not used it");
    });
}

#[test]
fn every_webhook_uses_a_reservation() {
    let webhooks = [
        ("twilio", "CallSid", "CA"),
        ("plivo", "CallUUID", ""),
        ("exotel", "CallSid", ""),
        ("signalwire", "CallSid", ""),
        ("telnyx", "CallSid", ""),
        ("vonage", "uuid", ""),
        ("jambonz", "call_sid", ""),
    ];
    each_store(&[("TIER_CONFIG", r#"{"gold": 20}"#)], |router| {
        let granted = reserved(router, webhooks.len());
        for ((provider, field, prefix), id) in webhooks.iter().zip(&granted) {
            let call = format!("{prefix}{provider}1");
            let path = format!("/api/v1/{provider}/allocate?reservation={id}");
            let answer = router.connect().form(&path, &format!("{field}={call}"));
            assert_eq!((answer.status, answer.header("x-warning")), (200, None), "{provider}");
            assert_eq!(router.get(&format!("/api/v1/reservations/{id}")).0, 404, "{provider}");
            let again = format!("{prefix}{provider}2");
            let answer = router.connect().form(&path, &format!("{field}={again}"));
            assert_eq!(answer.status, 200, "{provider}");
            assert!(answer.header("x-warning").unwrap().contains("was used"), "{provider}");
        }
    });
}

#[test]
fn the_provider_s_callback_ends_a_dial() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        for (number, status) in ["no-answer", "busy", "failed", "canceled"].iter().enumerate() {
            let id = reserved(router, 1).remove(0);
            let call = format!("CA{number}");
            let dialed = format!("/api/v1/reservations/{id}/dialed");
            let (code, answer) = router.post(&dialed, json!({"call_sid": call}));
            assert_eq!((code, &answer["success"]), (200, &json!(true)), "{answer}");
            let form = format!("CallSid={call}&CallStatus={status}");
            let acknowledged = router.connect().form("/api/v1/twilio/call-status", &form);
            assert_eq!(acknowledged.status, 200);
            assert_eq!(outstanding(router), 0, "{status}");
            assert_eq!(router.post(&dialed, json!({"call_sid": call})).0, 404);
        }
        // A callback for a call that was never reserved.
        let form = "CallSid=CA99&CallStatus=busy";
        assert_eq!(router.connect().form("/api/v1/twilio/call-status", form).status, 200);
        let (_, events) = router.get("/api/v1/events?event=reservation_ended");
        let detail = events["events"][0]["detail"].as_str().unwrap();
        assert!(detail.contains(" unanswered "), "{detail}");
    });
}

#[test]
fn a_dial_is_reported_once() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        let granted = reserved(router, 2);
        let path = |number: usize| format!("/api/v1/reservations/{}/dialed", granted[number]);
        let first = router.post(&path(0), json!({"call_sid": "CA1"}));
        assert_eq!(first.0, 200, "{first:?}");
        assert_eq!(router.post(&path(0), json!({"call_sid": "CA1"})), first, "a repeat");
        let (status, answer) = router.post(&path(1), json!({"call_sid": "CA1"}));
        assert_eq!(status, 409, "{answer}");
        assert!(answer["error"].as_str().unwrap().contains(&granted[0]), "{answer}");
        let form = "CallSid=CA1&CallStatus=busy";
        assert_eq!(router.connect().form("/api/v1/twilio/call-status", form).status, 200);
        assert_eq!(router.get(&format!("/api/v1/reservations/{}", granted[0])).0, 404);
        assert_eq!(outstanding(router), 1);
        assert_eq!(router.post(&path(1), json!([])).0, 400);
    });
}

#[test]
fn a_refusal_names_a_reservation_without_effect() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        reserved(router, 1);
        let named = json!({"call_sid": "CA1", "reservation_id": "R0000000000000000"});
        let (status, answer) = router.post("/api/v1/allocate", named);
        let warning = answer["details"]["warnings"][0].as_str().unwrap_or_default();
        assert!(status == 503 && warning.contains("never existed"), "{answer}");
    });
}

#[test]
fn reservations_are_given_back_and_expire() {
    let settings = [("TIER_CONFIG", r#"{"gold": 2}"#), ("RESERVATION_TTL", "1s")];
    each_store(&settings, |router| {
        let granted = reserved(router, 2);
        let path = format!("/api/v1/reservations/{}", granted[0]);
        assert_eq!(delete(router, &path).0, 200);
        assert_eq!(delete(router, &path).0, 404);
        eventually(PATIENCE, "the other one expires", || outstanding(router) == 0);
        assert_eq!(router.get(&format!("/api/v1/reservations/{}", granted[1])).0, 404);
        // The sweep frees its slot, up to a second later.
        eventually(PATIENCE, "both slots are free again", || {
            let (_, answer) = reserve(router, json!({"merchant_id": "acme", "count": 2})).json();
            let granted = ids(&answer);
            granted
                .iter()
                .for_each(|id| drop(delete(router, &format!("/api/v1/reservations/{id}"))));
            granted.len() == 2
        });
    });
}

#[test]
fn lines_of_a_number_are_shared_with_inbound_calls() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 9}"#)], |router| {
        let path = format!("/api/v1/numbers/{NUMBER}");
        assert_eq!(router.put(&path, r#"{"max_lines": 2}"#).0, 200);
        let form = "CallSid=CA1&To=%2B14155550100&From=%2B14155550199";
        assert_eq!(router.connect().form("/api/v1/twilio/allocate", form).status, 200);
        let dial = || json!({"merchant_id": "acme", "number": "14155550100", "count": 2});
        let (_, answer) = reserve(router, dial()).json();
        assert_eq!((ids(&answer).len(), &answer["reason"]), (1, &json!("max_lines")));
        // An inbound call is never refused for lines.
        let form = "CallSid=CA2&To=%2B14155550100";
        assert_eq!(router.connect().form("/api/v1/twilio/allocate", form).status, 200);
        assert_eq!(router.get(&path).1["lines"], 3);
        allocate(router, "CA3", &ids(&answer)[0]);
        for call in ["CA1", "CA2", "CA3"] {
            router.release(call);
        }
        eventually(PATIENCE, "all lines are free", || router.get(&path).1["lines"] == 0);
        assert_eq!(router.put(&path, r#"{"max_lines": 0}"#).0, 200);
        assert_eq!(reserve(router, dial()).status, 429);
        assert_eq!(delete(router, &path).0, 200);
        assert_eq!(delete(router, &path).0, 404);
        assert_eq!(ids(&reserve(router, dial()).json().1).len(), 2);
    });
}

#[test]
fn bad_input_of_diallers_is_refused_in_words() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 9}"#)], |router| {
        for (body, field) in [
            (json!({}), "merchant_id"),
            (json!({"merchant_id": "acme", "count": 101}), "count"),
            (json!({"merchant_id": "acme", "count": 0}), "count"),
            (json!({"merchant_id": "acme", "wait": "61s"}), "wait"),
            (json!({"merchant_id": "acme", "wait": "soon"}), "wait"),
            (json!({"merchant_id": "acme", "number": "+1234567890123456"}), "number"),
            (json!({"merchant_id": "acme", "provider": "other"}), "provider"),
        ] {
            let (status, answer) = reserve(router, body.clone()).json();
            assert_eq!((status, &answer["details"]["field"]), (400, &json!(field)), "{body}");
        }
        for (path, body) in [
            ("/api/v1/numbers/abc", r#"{"max_lines": 1}"#),
            ("/api/v1/numbers/+14155550100", r#"{"max_lines": -1}"#),
            ("/api/v1/numbers/+14155550100", "{}"),
            ("/api/v1/accounts/other", r#"{"max_cps": 1}"#),
            ("/api/v1/accounts/twilio", r#"{"max_cps": 1001}"#),
        ] {
            assert_eq!(router.put(path, body).0, 400, "{path} {body}");
        }
        assert_eq!(router.get("/api/v1/reservations/R1").0, 400);
        assert_eq!(delete(router, "/api/v1/reservations/R0000000000000000").0, 404);
        assert_eq!(outstanding(router), 0);
    });
}

#[test]
fn a_waiting_dialler_gets_the_next_free_pod() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 1}"#)], |router| {
        router.allocate("CA1");
        let started = Barrier::new(2);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut connection = router.connect();
                started.wait();
                let body = json!({"merchant_id": "acme", "wait": "30s"});
                connection.post("/api/v1/reservations", &body).json()
            });
            started.wait();
            router.release("CA1");
            let (status, answer) = waiting.join().unwrap();
            assert_eq!((status, ids(&answer).len()), (200, 1), "{answer}");
        });
        let begun = Instant::now();
        let body = json!({"merchant_id": "acme", "wait": "300ms"});
        let (status, answer) = reserve(router, body).json();
        assert_eq!((status, &answer["reason"]), (429, &json!("capacity")));
        assert!(begun.elapsed() >= Duration::from_millis(300), "it has waited");
    });
}

#[test]
fn two_replicas_use_a_reservation_once() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 60}"#);
    for round in 0..15 {
        let id = reserved(&routers[0], 1).remove(0);
        let (barrier, id) = (Barrier::new(2), id.as_str());
        let warnings: Vec<bool> = thread::scope(|scope| {
            let use_it = |(number, router): (usize, &'_ Router)| {
                let mut connection = router.connect();
                barrier.wait();
                let call = format!("CA{round}-{number}");
                let body = json!({"call_sid": call, "reservation_id": id});
                let (status, answer) = connection.post("/api/v1/allocate", &body).json();
                assert_eq!(status, 200, "{answer}");
                answer.get("warnings").is_some()
            };
            let both: Vec<_> =
                routers.iter().enumerate().map(|it| scope.spawn(move || use_it(it))).collect();
            both.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert_eq!(warnings.iter().filter(|it| **it).count(), 1, "exactly one call used it");
    }
}

#[test]
fn replicas_keep_the_rate_and_the_lines_of_concurrent_diallers() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 3, r#"{"gold": 60}"#);
    assert_eq!(routers[0].put("/api/v1/accounts/twilio", r#"{"max_cps": 20}"#).0, 200);
    assert_eq!(routers[1].put(&format!("/api/v1/numbers/{NUMBER}"), r#"{"max_lines": 30}"#).0, 200);
    let granted = Mutex::new(BTreeSet::new());
    thread::scope(|scope| {
        for router in &routers {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut connection = router.connect();
                    let body = json!({"merchant_id": "acme", "number": NUMBER,
                        "provider": "twilio", "account": "AC1", "count": 3, "wait": "2s"});
                    for _ in 0..8 {
                        let (_, answer) = connection.post("/api/v1/reservations", &body).json();
                        granted.lock().unwrap().extend(ids(&answer));
                    }
                });
            }
        }
    });
    let granted = granted.into_inner().unwrap();
    assert_eq!(granted.len(), 30, "as many as there are lines");
    let (_, list) = routers[2].get("/api/v1/reservations?limit=100");
    let times = list["reservations"].as_array().unwrap().iter();
    let mut times: Vec<i64> =
        times.map(|it| (it["granted_at"].as_f64().unwrap() * 1_000.0).round() as i64).collect();
    times.sort_unstable();
    for window in times.windows(21) {
        assert!(window[20] - window[0] >= 1_000, "more than 20 in a second: {window:?}");
    }
}

#[test]
fn reservations_survive_a_restart() {
    let directory = scratch();
    let path = directory.to_str().unwrap();
    let router = Router::start(&[("DATA_DIR", path), ("TIER_CONFIG", r#"{"gold": 3}"#)]);
    assert_eq!(router.put("/api/v1/numbers/+14155550100", r#"{"max_lines": 1}"#).0, 200);
    let body = json!({"merchant_id": "acme", "number": NUMBER});
    let id = ids(&reserve(&router, body.clone()).json().1).remove(0);
    let router = router.kill_and_restart();
    assert_eq!(router.get(&format!("/api/v1/reservations/{id}")).0, 200);
    let (status, answer) = reserve(&router, body).json();
    assert_eq!((status, &answer["reason"]), (429, &json!("max_lines")));
    assert_eq!(allocate(&router, "CA1", &id).1.get("warnings"), None);
}

#[test]
fn metrics_count_reservations_by_outcome() {
    each_store(&[("TIER_CONFIG", r#"{"gold": 2}"#)], |router| {
        let granted = reserved(router, 2);
        reserve(router, json!({"merchant_id": "acme", "count": 4}));
        allocate(router, "CA1", &granted[0]);
        assert_eq!(router.put("/api/v1/numbers/+14155550199", r#"{"max_lines": 0}"#).0, 200);
        let metrics = router.connect().get("/metrics").text();
        for line in [
            r#"smart_router_reservations_total{outcome="granted"} 2"#,
            r#"smart_router_reservations_total{outcome="answered"} 1"#,
            r#"smart_router_reservations_refused_total{limit="capacity"} 1"#,
            r#"smart_router_pool_held_slots{tier="gold"} 1"#,
            r#"smart_router_pool_answer_rate{tier="gold"} 1"#,
            "smart_router_outstanding_reservations 1",
            // A number without lines is blocked, not full.
            "smart_router_full_numbers 0",
        ] {
            assert!(metrics.contains(line), "{line} is missing");
        }
    });
}
