//! `/api/v1/live`, the dashboard's stream: the same on every replica and at any time.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use testkit::{
    Connection, Router, eventually,
    kube::FakeKube,
    program,
    redis::{RedisServer, unix_millis},
};
use testkit::{
    cluster::router,
    events::{rewrite_log, ten_calls_a_second},
    replicas,
};

const SECOND: Duration = Duration::from_secs(1);

/// Opens a live stream.
fn live(router: &Router) -> Connection {
    let mut stream = router.connect();
    stream.open_stream("/api/v1/live");
    stream
}

/// Returns the data of the next message with this event name.
fn next(stream: &mut Connection, name: &str) -> Value {
    stream.read_until(&format!("event: {name}\ndata: "), 3 * SECOND);
    let text = stream.read_until("\n\n", 3 * SECOND);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn warnings(stream: &mut Connection) -> String {
    let state = next(stream, "state");
    let texts = state["warnings"].as_array().unwrap().iter();
    texts.map(|warning| warning["text"].as_str().unwrap()).collect::<Vec<_>>().join("; ")
}

/// Extracts the number of seconds that a warning states.
fn seconds(text: &str, before: &str) -> u64 {
    let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("{before:?}: {text}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn every_replica_knows_how_long_a_pool_has_been_full() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 1}"#);
    let began = Instant::now();
    routers[0].allocate("CA1");
    // A warning appears after 10 s, and a router without live streams reads the store every 5 s;
    // neither can be set. A sleep instead of polling: a stream of the test would make the router
    // read the store.
    thread::sleep(16 * SECOND);
    let texts = routers.iter().map(|router| warnings(&mut live(router)));
    let times: Vec<u64> = texts.map(|text| seconds(&text, "gold has been full for ")).collect();
    let longest = began.elapsed().as_secs() + 1;
    assert!(times.iter().all(|time| (10..=longest).contains(time)), "{times:?}");
    // The duration continues after the first stream is closed.
    eventually(5 * SECOND, "the duration grows", || {
        let again = seconds(&warnings(&mut live(&routers[1])), "gold has been full for ");
        assert!(again >= times[1], "{again} after {}", times[1]);
        again > times[1]
    });
}

#[test]
fn a_router_without_requests_knows_how_long_an_outage_has_lasted() {
    let server = RedisServer::start(&[]);
    let (router, log) =
        Router::start_logged(&[("REDIS_URL", &server.url()), ("LOG_LEVEL", "debug")]);
    server.signal("STOP");
    // Without a live stream, the router reads the store every 5 s. The second failed read ends when
    // the outage has been known for about that long.
    log.wait_for("the dashboard cannot be refreshed from the store", 1);
    let text = warnings(&mut live(&router));
    assert!(seconds(&text, "the store has been unavailable for ") >= 2, "{text}");
    server.signal("CONT");
    eventually(5 * SECOND, "the store is available", || router.get("/api/v1/status").0 == 200);
}

#[test]
fn warnings_count_the_last_ten_minutes_of_the_event_log() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 2, r#"{"gold": 1}"#);
    let refused = "refused CA1    no_pods gold=at_capacity";
    let old = (0..5).map(|number| (650_000 - number, refused));
    let recent = (0..4).map(|number| (550_000 - number, refused));
    let ended = (0..3).map(|number| (540_000 - number, "ended CA2 a   lease 1000"));
    // Enough later events to push the others out of the most recent page.
    let since = (0..4_000).map(|number| (500_000 - number, "joined  a   h:1"));
    rewrite_log(&server, old.chain(recent).chain(ended).chain(since));
    for router in &routers {
        let text = warnings(&mut live(router));
        assert!(text.contains("4 calls found no pod in the last 10 min"), "{text}");
        assert!(text.contains("3 calls ended by lease"), "{text}");
    }
}

#[test]
fn a_new_live_stream_begins_with_recent_event_rates() {
    let server = RedisServer::start(&[]);
    let routers = replicas(&server, 1, r#"{"gold": 1}"#);
    ten_calls_a_second(&server);
    let written = unix_millis();
    let mut first = live(&routers[0]);
    // The first stream opens before the router has read the log, so its history is empty.
    assert_eq!(next(&mut first, "history")["points"].as_array().unwrap().len(), 0);
    let history = next(&mut first, "history");
    let points = history["points"].as_array().unwrap();
    assert_eq!(points.len(), 181);
    let at = |point: &Value| point["at"].as_u64().unwrap();
    // The log ends at the time at which it was written.
    for point in points[..180].iter().filter(|point| at(point) < written) {
        let rate = point["rates"]["allocated"].as_f64().unwrap();
        assert!((9.0..=10.0).contains(&rate), "{point}");
    }
    // A later stream gets the same history and the seconds since.
    eventually(5 * SECOND, "the history grows by two seconds", || {
        let history = next(&mut live(&routers[0]), "history");
        let later = history["points"].as_array().unwrap();
        assert!((175..=185).contains(&later.len()), "{}", later.len());
        assert_eq!(later[10]["rates"]["allocated"], 10.0);
        at(later.last().unwrap()) >= at(points.last().unwrap()) + 2_000
    });
}

#[test]
fn every_replica_names_the_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    let start = |name| router(&kube, &[("REDIS_URL", &url), ("POD_NAME", name)]);
    let mut routers = vec![start("router-a"), start("router-b")];
    let leader = |router: &Router| router.status()["leader"].as_str().map(str::to_owned);
    let agree = |routers: &[Router]| {
        let (holder, _) = kube.lease_holder()?;
        let name = holder.split_once('_')?.0.to_owned();
        routers.iter().all(|router| leader(router).as_ref() == Some(&name)).then_some(name)
    };
    eventually(6 * SECOND, "all replicas name the holder of the Lease", || {
        agree(&routers).is_some()
    });
    let name = agree(&routers).unwrap();
    let is_leader = |router: &Router| router.status()["is_leader"] == true;
    let (leading, other) = if is_leader(&routers[0]) { (0, 1) } else { (1, 0) };
    let status_text = |router: &Router| {
        let address = format!("http://{}", router.address);
        let output = program(&[("SMART_ROUTER_URL", &address)]).arg("status").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(status_text(&routers[other]).contains(&format!("; {name} is the leader")));
    assert!(
        status_text(&routers[leading]).contains(&format!("; this router is the leader ({name})"))
    );
    assert_eq!(next(&mut live(&routers[other]), "state")["leader"]["name"], name.as_str());
    let mut dead = routers.remove(leading);
    dead.child.kill().unwrap();
    dead.child.wait().unwrap();
    eventually(8 * SECOND, "the other replica becomes the leader", || {
        agree(&routers).is_some_and(|now| now != name)
    });
}
