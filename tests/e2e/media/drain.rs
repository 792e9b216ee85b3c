//! The shutdown of a process with open streams.

use super::*;
use testkit::{Connection, cluster, kube::FakeKube, redis::RedisServer};

/// Longer than any test: only an event ends the drain.
const UNLIMITED: (&str, &str) = ("MEDIA_DRAIN_TIME", "1h");

/// Waits until the listener of the streams is closed: the router only drains from here on.
fn await_drain(router: &Router) {
    eventually(Duration::from_secs(3), "the listener is closed", || {
        Connection::try_open(router.address).is_none()
    });
}

fn ready(address: SocketAddr) -> (u16, Value) {
    Connection::open(address).get("/ready").json()
}

/// End of the lease of the only gateway (unix ms).
fn gateway_lease(redis: &RedisServer) -> u64 {
    let mut values: Vec<String> =
        redis::cmd("HVALS").arg("voice:gateways").query(&mut redis.connection()).unwrap();
    let value = values.pop().expect("the gateway has a lease");
    value.split(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_stopping_router_relays_its_streams_until_they_end() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let settings = [
        ("REDIS_URL", url.as_str()),
        UNLIMITED,
        ("MEDIA_LEASE", "9s"),
        ("HTTP_READ_TIMEOUT", "10m"),
    ];
    let (mut router, server) = router_with_agent(&settings).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    assert_eq!(router.metric("smart_router_media_draining"), 0);
    let path = path_of(&stream_url(&router, "CA1")).to_owned();
    // A handshake that begins before the signal and is complete after it.
    let mut late = TcpStream::connect(router.address).await.unwrap();
    late.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n").as_bytes()).await.unwrap();
    router.signal("TERM");
    eventually(Duration::from_secs(3), "the router is not ready", || {
        ready(router.metrics).0 == 503
    });
    late.write_all(format!("{UPGRADE}\r\n").as_bytes()).await.unwrap();
    assert!(read_head(&mut late).await.starts_with("HTTP/1.1 503 "));
    assert_eq!(refusals(&router, "stopping"), 1);
    await_drain(&router);
    assert_eq!(Connection::open(router.metrics).get("/health").status, 200);
    let (status, body) = ready(router.metrics);
    assert_eq!(status, 503);
    assert_eq!(body["status"], "stopping");
    assert_eq!(body["draining_streams"], 1);
    assert_eq!(router.metric("smart_router_media_draining"), 1);
    echo(&mut provider, &mut agent, "during the drain").await;
    // Heartbeats go on, so that the sweeps of another replica do not end the call.
    let other = Router::start(&[
        ("REDIS_URL", &url),
        ("PODS", &format!("agent-0={}", server.address)),
        ("TIER_CONFIG", r#"{"gold": 1}"#),
    ]);
    let drained_at = gateway_lease(&redis);
    eventually(Duration::from_secs(10), "heartbeats extend the lease", || {
        gateway_lease(&redis) > drained_at + 3_000
    });
    assert!(call(&other, "CA1")["stream"]["gateway"].is_string());
    echo(&mut provider, &mut agent, "after a heartbeat").await;
    hang_up(provider, agent).await;
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
    expect_free(&other, 1);
}

#[tokio::test]
async fn a_released_call_ends_during_the_drain() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let (mut router, server) = router_with_agent(&[("REDIS_URL", &url), UNLIMITED]).await;
    let pods = format!("agent-0={}", server.address);
    let other =
        Router::start(&[("REDIS_URL", &url), ("PODS", &pods), ("TIER_CONFIG", r#"{"gold": 1}"#)]);
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    router.signal("TERM");
    await_drain(&router);
    assert_eq!(other.release("CA1").0, 200);
    assert_eq!(close_code(&mut provider).await, Some(1000));
    assert_eq!(close_code(&mut agent).await, Some(1000));
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
    expect_free(&other, 1);
}

#[tokio::test]
async fn a_stream_that_outlives_the_drain_is_closed_with_1012() {
    let (mut router, server) = router_with_agent(&[("MEDIA_DRAIN_TIME", "1s")]).await;
    let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
    router.signal("TERM");
    assert_eq!(close_code(&mut provider).await, Some(1012));
    assert_eq!(close_code(&mut agent).await, Some(1012));
    drop((provider, agent));
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[tokio::test]
async fn a_second_signal_closes_the_streams_at_once() {
    for signal in ["TERM", "INT"] {
        let (mut router, server) = router_with_agent(&[UNLIMITED]).await;
        let (mut provider, mut agent) = open_stream(&router, &server, "CA1").await;
        router.signal(signal);
        await_drain(&router);
        echo(&mut provider, &mut agent, "during the drain").await;
        router.signal(signal);
        assert_eq!(close_code(&mut provider).await, Some(1012));
        assert_eq!(close_code(&mut agent).await, Some(1012));
        drop((provider, agent));
        assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0), "a graceful shutdown");
    }
}

#[tokio::test]
async fn a_third_signal_stops_without_a_graceful_shutdown() {
    let patient = [UNLIMITED, ("HTTP_SHUTDOWN_TIMEOUT", "10m"), ("HTTP_READ_TIMEOUT", "10m")];
    let (mut router, server) = router_with_agent(&patient).await;
    let (mut provider, agent) = open_stream(&router, &server, "CA1").await;
    // A request that never ends delays the shutdown.
    let mut request = TcpStream::connect(router.address).await.unwrap();
    let head = "POST /api/v1/allocate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n\
        Content-Length: 100\r\nExpect: 100-continue\r\n\r\n";
    request.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut request).await.starts_with("HTTP/1.1 100 "));
    router.signal("TERM");
    await_drain(&router);
    router.signal("TERM");
    assert_eq!(close_code(&mut provider).await, Some(1012));
    drop(agent);
    eventually(Duration::from_secs(3), "the stream has ended", || {
        ready(router.metrics).1["draining_streams"] == 0
    });
    assert!(router.child.try_wait().unwrap().is_none(), "the request delays the shutdown");
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(1));
}

#[tokio::test]
async fn a_router_without_streams_stops_at_once() {
    let (mut router, server) = router_with_agent(&[UNLIMITED]).await;
    let (provider, agent) = open_stream(&router, &server, "CA1").await;
    hang_up(provider, agent).await;
    expect_free(&router, 1);
    router.signal("TERM");
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[tokio::test]
async fn probes_stay_reachable_on_a_port_that_they_share_with_the_api() {
    let port = testkit::free_port().to_string();
    let settings = [("HTTP_PORT", port.as_str()), ("METRICS_PORT", &port), UNLIMITED];
    let (mut router, server) = router_with_agent(&settings).await;
    let (provider, agent) = open_stream(&router, &server, "CA1").await;
    router.signal("TERM");
    eventually(Duration::from_secs(3), "only probes are served", || {
        let status = |path| {
            let mut connection = Connection::try_open(router.address)?;
            connection.try_get(path).map(|response| response.status)
        };
        status("/api/v1/status") == Some(404) && status("/ready") == Some(503)
    });
    assert_eq!(router.metric("smart_router_media_draining"), 1);
    hang_up(provider, agent).await;
    assert_eq!(router.wait_for_exit(Duration::from_secs(3)), Some(0));
}

#[test]
fn a_draining_leader_gives_up_its_lease() {
    // The fake cluster has a runtime of its own, which may not end inside another one.
    let (kube, redis) = (FakeKube::start(), RedisServer::start(&[]));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(drain_leader(&kube, &redis));
}

async fn drain_leader(kube: &FakeKube, redis: &RedisServer) {
    let server = AgentServer::start().await;
    kube.add("voice-agent-0");
    let (url, port) = (redis.url(), server.address.port().to_string());
    let settings = [
        ("REDIS_URL", url.as_str()),
        ("VOICE_AGENT_BASE_URL", ""),
        ("VOICE_AGENT_PORT", &port),
        // Only a released Lease gets another holder during the test.
        ("LEADER_ELECTION_DURATION", "1h"),
        UNLIMITED,
    ];
    let is_leader = |router: &Router| router.status()["is_leader"] == true;
    let mut leaving = cluster::router(kube, &settings);
    eventually(Duration::from_secs(5), "it leads", || {
        is_leader(&leaving) && cluster::available(&leaving) == 1
    });
    let staying = cluster::router(kube, &settings);
    let (mut provider, mut agent) = open_stream(&leaving, &server, "CA1").await;
    leaving.signal("TERM");
    eventually(Duration::from_secs(5), "the other replica leads", || is_leader(&staying));
    echo(&mut provider, &mut agent, "during the drain").await;
    hang_up(provider, agent).await;
    assert_eq!(leaving.wait_for_exit(Duration::from_secs(3)), Some(0));
    expect_free(&staying, 1);
}
