//! A thousand reservations and a thousand waiting diallers, on two replicas behind a slow Redis.

use std::{
    collections::BTreeSet,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use testkit::{
    Connection, Router, clock::WallClock, eventually, http::request_head, proxy::FaultProxy,
    redis::RedisServer,
};

const NUMBER: &str = "+14155550100";
/// As many as there are slots.
const DIALS: usize = 1_000;
const TIERS: &str = r#"{"gold": {"type": "shared", "target": 50, "max_concurrent": 20}}"#;
const LATENCY: Duration = Duration::from_millis(3);
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const WAIT: &str = "60s";

struct Replicas {
    routers: Vec<Router>,
    clock: WallClock,
    server: RedisServer,
}

impl Replicas {
    fn start() -> Self {
        let clock = WallClock::ahead(0);
        let server = RedisServer::with_clock(&clock);
        let proxy = FaultProxy::to(server.port);
        proxy.set_latency(LATENCY);
        let url = format!("redis://127.0.0.1:{}", proxy.port());
        let settings =
            [("REDIS_URL", url.as_str()), ("TIER_CONFIG", TIERS), ("CLEANUP_INTERVAL", "200ms")];
        let routers: Vec<Router> = (0..2).map(|_| Router::start(&settings)).collect();
        for router in &routers {
            eventually(PATIENCE, "all pods are in service", || {
                router.status()["pools"]["gold"]["available"] == 50
            });
        }
        Self { routers, clock, server }
    }

    fn router(&self, number: usize) -> &Router {
        &self.routers[number % self.routers.len()]
    }

    /// Reserves all slots.
    fn reserve_all(&self) -> Vec<String> {
        let mut granted = Vec::new();
        for number in 0..DIALS / 100 {
            let body = json!({"merchant_id": "acme", "number": NUMBER, "count": 100, "wait": WAIT});
            let (status, answer) = self.router(number).post("/api/v1/reservations", body);
            assert_eq!((status, &answer["refused"]), (200, &json!(0)), "{answer}");
            granted.extend(ids(&answer));
        }
        granted
    }

    /// The outstanding reservations and the lines in use.
    fn in_use(&self) -> (u64, u64) {
        let mut redis = self.server.connection();
        let reservations = redis::cmd("ZCARD").arg("voice:reservations").query(&mut redis).unwrap();
        let path = format!("/api/v1/numbers/{NUMBER}");
        let lines = self.routers[0].get(&path).1["lines"].as_u64().unwrap();
        (reservations, lines)
    }
}

/// The Redis functions that were called so far.
fn function_calls(server: &RedisServer) -> f64 {
    let stats: String =
        redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let line = stats.lines().find(|line| line.starts_with("cmdstat_fcall:")).unwrap();
    let (_, calls) = line.split_once("calls=").unwrap();
    calls.split_once(',').unwrap().0.parse().unwrap()
}

fn ids(answer: &Value) -> Vec<String> {
    let granted = answer["reservations"].as_array().unwrap();
    granted.iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect()
}

/// Starts a long poll.
fn wait_for_reservation(router: &Router) -> Connection {
    let mut connection = router.connect();
    write_request(&mut connection);
    connection
}

fn write_request(connection: &mut Connection) {
    let body = json!({"merchant_id": "acme", "number": NUMBER, "wait": WAIT}).to_string();
    let json = [("content-type", "application/json")];
    connection.write(&request_head("POST", "/api/v1/reservations", &json, body.len()));
    connection.write(body.as_bytes());
}

/// Waits for the reservation of a long poll. As a dialler does, it asks again if the router had no
/// reply from Redis in time, on a busy machine.
fn granted_to(mut poll: Connection) -> String {
    let (mut status, mut answer) = poll.read_response().expect("a response").json();
    while status == 503 && answer["error"].as_str().unwrap().contains("unavailable") {
        write_request(&mut poll);
        (status, answer) = poll.read_response().expect("a response").json();
    }
    assert_eq!(status, 200, "{answer}");
    ids(&answer).remove(0)
}

/// Two calls name a reservation at the same moment, one at each replica. Returns the call that used
/// it.
fn use_twice(replicas: &Replicas, id: &str) -> String {
    let barrier = Barrier::new(2);
    let use_it = |number: usize| {
        let (mut connection, call) =
            (replicas.routers[number].connect(), format!("CA{id}-{number}"));
        let body = json!({"call_sid": call, "reservation_id": id});
        barrier.wait();
        let (status, answer) = connection.post("/api/v1/allocate", &body).json();
        // All other slots are held: a call without a reservation is refused.
        let was_used = answer["warnings"].is_null() && answer["details"]["warnings"].is_null();
        assert_eq!(status, if was_used { 200 } else { 503 }, "{answer}");
        was_used.then_some(call)
    };
    let calls: Vec<Option<String>> = thread::scope(|scope| {
        let both = [scope.spawn(|| use_it(0)), scope.spawn(|| use_it(1))];
        both.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let mut used = calls.into_iter().flatten();
    let call = used.next().expect("a call used the reservation");
    assert_eq!(used.next(), None, "the reservation was used twice");
    call
}

#[test]
fn a_thousand_waiting_diallers_get_the_slots_of_a_thousand_reservations() {
    let mut replicas = Replicas::start();
    let number = format!("/api/v1/numbers/{NUMBER}");
    assert_eq!(replicas.routers[0].put(&number, r#"{"max_lines": 1000}"#).0, 200);
    let granted = replicas.reserve_all();
    assert_eq!(replicas.in_use(), (1_000, 1_000));

    let calls: Vec<String> = granted[..20].iter().map(|id| use_twice(&replicas, id)).collect();
    assert_eq!(replicas.in_use(), (980, 1_000), "a call keeps the line of its dial");

    let (started, before) = (Instant::now(), function_calls(&replicas.server));
    let mut polls: Vec<Connection> =
        (0..DIALS / 2).map(|_| wait_for_reservation(&replicas.routers[0])).collect();
    let lost: Vec<Connection> =
        (0..DIALS / 2).map(|_| wait_for_reservation(&replicas.routers[1])).collect();
    let killed = replicas.routers.remove(1);
    replicas.routers.push(killed.kill_and_restart());
    drop(lost);
    polls.extend((0..DIALS / 2).map(|_| wait_for_reservation(&replicas.routers[1])));

    // All reservations expire at once.
    replicas.clock.set_ahead(80);
    for call in &calls {
        assert_eq!(replicas.routers[0].release(call).0, 200);
    }
    let granted: BTreeSet<String> = polls.into_iter().map(granted_to).collect();
    assert_eq!((granted.len(), replicas.in_use()), (DIALS, (1_000, 1_000)));

    // Two requests per grant, and those of few waiting diallers and of the background.
    let calls = function_calls(&replicas.server) - before;
    let most = 2_500.0 + 100.0 * started.elapsed().as_secs_f64();
    assert!(calls < most, "{calls} function calls, at most {most} expected");

    // A limit below the lines in use ends nothing, and nothing is granted beyond it.
    assert_eq!(replicas.routers[1].put(&number, r#"{"max_lines": 10}"#).0, 200);
    let body = json!({"merchant_id": "acme", "number": NUMBER, "count": 100});
    for router in &replicas.routers {
        let (status, answer) = router.post("/api/v1/reservations", body.clone());
        assert_eq!((status, &answer["reason"]), (429, &json!("max_lines")), "{answer}");
    }
    assert_eq!(replicas.in_use(), (1_000, 1_000));
    replicas.clock.set_ahead(160);
    eventually(PATIENCE, "all reservations have expired", || replicas.in_use() == (0, 0));
    let (_, answer) = replicas.routers[0].post("/api/v1/reservations", body);
    assert_eq!((ids(&answer).len(), &answer["reason"]), (10, &json!("max_lines")), "{answer}");
}
