//! A restarted Redis replies `LOADING` until its data is in memory: an outage.

use std::{process::Stdio, time::Duration};

use redis::cmd;
use serde_json::json;

use testkit::{
    Connection, Process, Router, WITHOUT_GATEWAY, eventually, free_port, program,
    provider::{PUBLIC_URL, start_call},
    redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);
/// Keys whose only purpose is to make loading slow: Redis delays each by [`LOAD_DELAY`].
const FILLER_KEYS: usize = 100_000;
const LOAD_DELAY: [&str; 4] =
    ["--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024"];

/// Restarts the server with its data; it keeps loading until `finish_loading`.
fn begin_loading(server: &mut RedisServer) {
    let mut redis = server.connection();
    let fill = "for i = 1, ARGV[1] do redis.call('SET', 'junk:' .. i, i) end";
    cmd("EVAL").arg(fill).arg(0).arg(FILLER_KEYS).exec(&mut redis).unwrap();
    cmd("SAVE").exec(&mut redis).unwrap();
    server.restart_loading(&LOAD_DELAY);
}

fn finish_loading(server: &RedisServer) {
    let mut redis = server.connection();
    let refused = cmd("GET").arg("junk:1").exec(&mut redis).unwrap_err();
    assert_eq!(refused.code(), Some("LOADING"), "Redis is still loading");
    cmd("CONFIG").arg("SET").arg("key-load-delay").arg(0).exec(&mut redis).unwrap();
}

#[test]
fn a_loading_redis_is_an_outage_that_loses_nothing() {
    let mut server = RedisServer::start(&[]);
    let url = server.url();
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("PUBLIC_URL", PUBLIC_URL),
        ("TIER_CONFIG", r#"{"gold": 3}"#),
        ("CONNECT_TIMEOUT", "60s"),
        WITHOUT_GATEWAY,
        ("LOG_LEVEL", "off"),
    ];
    let router = Router::start(&settings);
    let mut connection = router.connect();
    router.allocate("released");
    let confirmed = start_call(&mut connection, "confirmed").pod().unwrap();
    begin_loading(&mut server);

    assert_eq!(router.post("/api/v1/allocate", json!({"call_sid": "new"})).0, 503);
    assert_eq!(router.release("released").0, 503, "the release is deferred");
    let path = format!("/api/v1/twilio/stream-status?pod_name={confirmed}");
    connection.form(&path, "CallSid=confirmed&StreamEvent=stream-started&StreamSid=MZ1");
    let down = (200, json!({"status": "ready", "store": "down", "reason": "LOADING"}));
    eventually(5 * SECOND, "/ready gives the reason", || connection.get("/ready").json() == down);

    // A router that starts during the outage waits for Redis.
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let mut late = vec![("HTTP_PORT", ports[0].as_str()), ("METRICS_PORT", &ports[1])];
    late.extend(settings);
    let _late = Process(program(&late).stdout(Stdio::null()).spawn().unwrap());
    let address = format!("127.0.0.1:{}", ports[0]).parse().unwrap();
    let starting = (503, json!({"status": "starting", "store": "down", "reason": "LOADING"}));
    eventually(5 * SECOND, "the late router waits", || {
        Connection::try_open(address)
            .and_then(|mut connection| connection.try_get("/ready"))
            .is_some_and(|response| response.json() == starting)
    });

    finish_loading(&server);
    let up = (200, json!({"status": "ready", "store": "up"}));
    eventually(10 * SECOND, "the router serves", || connection.get("/ready").json() == up);
    let mut late = Connection::open(address);
    eventually(10 * SECOND, "the late router serves", || late.get("/ready").json() == up);
    assert_eq!(late.get("/api/v1/calls/released").status, 404, "the deferred release was flushed");
    let found = late.get("/api/v1/calls/confirmed").json().1;
    assert_eq!((&found["is_confirmed"], &found["pod_name"]), (&json!(true), &json!(confirmed)));
    assert_eq!(late.get("/api/v1/calls/new").status, 404, "the refused call got no pod");
    assert_eq!(late.post("/api/v1/allocate", &json!({"call_sid": "new"})).status, 200);
    for call in ["new", "confirmed"] {
        assert_eq!(router.release(call).0, 200);
    }
}
