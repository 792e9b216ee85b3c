//! `smart-router media`: a process that serves only the streams of routers on the same Redis.

use super::*;
use testkit::{Connection, program, redis::RedisServer};

/// A router and media processes on one Redis, with exclusive pods at the test's server.
struct Split {
    router: Router,
    server: AgentServer,
    /// Dropped last: the router checks its status before it stops.
    redis: RedisServer,
}

impl Split {
    async fn start(pods: usize) -> Self {
        let redis = RedisServer::start(&[]);
        let server = AgentServer::start().await;
        let router = start_router(&redis, &server, pods);
        Self { router, server, redis }
    }

    fn media(&self, settings: &[(&str, &str)]) -> Router {
        let url = self.redis.url();
        let mut all = vec![("REDIS_URL", url.as_str())];
        all.extend(settings);
        Router::start_media(&all)
    }

    /// A stream of a new call at a media process.
    async fn open_stream(&self, media: &Router, call: &str) -> (Provider, Agent) {
        let url = stream_url(&self.router, call);
        let url = format!("ws://{}{}", media.address, path_of(&url));
        let (provider, (agent, _)) = tokio::join!(dial(&url), self.server.stream());
        (provider, agent)
    }

    /// The keys that only routers write.
    fn facts(&self) -> Vec<Option<String>> {
        let mut connection = self.redis.connection();
        let mut read = |command: &str, key: &str| -> Option<String> {
            let value: redis::Value = redis::cmd(command).arg(key).query(&mut connection).unwrap();
            Some(format!("{value:?}"))
        };
        vec![
            read("GET", "voice:tier:config"),
            read("HGETALL", "voice:tiers"),
            read("GET", "voice:origin"),
            read("HGETALL", "voice:pod:agent-0"),
        ]
    }
}

fn start_router(redis: &RedisServer, server: &AgentServer, pods: usize) -> Router {
    let list: Vec<String> =
        (0..pods).map(|number| format!("agent-{number}={}", server.address)).collect();
    Router::start(&[
        ("REDIS_URL", &redis.url()),
        ("PODS", &list.join(",")),
        ("TIER_CONFIG", &format!(r#"{{"gold": {pods}}}"#)),
    ])
}

#[tokio::test]
async fn a_media_process_serves_the_streams_of_a_router() {
    let split = Split::start(1).await;
    let media = split.media(&[("POD_NAME", "media-1")]);
    let (mut provider, mut agent) = split.open_stream(&media, "CA1").await;
    echo(&mut provider, &mut agent, "audio").await;
    let stream = &call(&split.router, "CA1")["stream"];
    assert!(stream["gateway"].as_str().unwrap().starts_with("media-1-"), "{stream}");
    hang_up(provider, agent).await;
    expect_free(&split.router, 1);
    // A release at the router reaches the stream of the media process.
    let (mut provider, _agent) = split.open_stream(&media, "CA2").await;
    assert_eq!(split.router.release("CA2").1["ending"], true);
    assert_eq!(close_code(&mut provider).await, Some(1000));
}

#[tokio::test]
async fn a_media_process_has_no_api() {
    let split = Split::start(1).await;
    let media = split.media(&[]);
    let status = |address, path| Connection::open(address).get(path).status;
    for path in ["/", "/api/v1/status", "/api/v1/twilio/allocate?CallSid=CA1", "/metrics"] {
        assert_eq!(status(media.address, path), 404, "{path}");
    }
    let body = serde_json::json!({"call_sid": "CA1"});
    assert_eq!(media.post("/api/v1/allocate", body).0, 404);
    for path in ["/health", "/ready", "/openapi.json"] {
        assert_eq!(status(media.address, path), 200, "{path}");
        assert_eq!(status(media.metrics, path), 200, "{path}");
    }
    assert_eq!(status(media.metrics, "/metrics"), 200);
    let leads = |process: &Router| process.metric("smart_router_leader_status");
    assert_eq!((leads(&split.router), leads(&media)), (1, 0));
}

#[tokio::test]
async fn a_media_process_with_other_settings_leaves_the_store_alone() {
    let split = Split::start(1).await;
    let before = split.facts();
    // None of these may have an effect on the store, or prevent the start.
    let media = split.media(&[
        ("TIER_CONFIG", r#"{"silver": 7}"#),
        ("PODS", "other=127.0.0.1:1"),
        ("FORCE_POD_ORIGIN", "on"),
        ("HOLD_TIME", "10s"),
        ("TWILIO_AUTH_TOKEN", "secret"),
        ("CONNECT_TIMEOUT", "1s"),
        // A router would need a service account token.
        ("KUBERNETES_SERVICE_HOST", "127.0.0.1"),
    ]);
    let (mut provider, mut agent) = split.open_stream(&media, "CA1").await;
    echo(&mut provider, &mut agent, "audio").await;
    assert_eq!(split.facts()[..3], before[..3]);
    hang_up(provider, agent).await;
    expect_free(&split.router, 1);
    assert_eq!(split.facts()[..3], before[..3]);
    assert_eq!(split.router.status()["pools"].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn a_media_process_waits_until_a_router_has_set_the_store_up() {
    let redis = RedisServer::start(&[]);
    let (api, metrics) = (testkit::free_port(), testkit::free_port());
    let mut command = program(&[
        ("REDIS_URL", &redis.url()),
        ("HTTP_PORT", &api.to_string()),
        ("METRICS_PORT", &metrics.to_string()),
        ("LOG_LEVEL", "off"),
    ]);
    let _media = testkit::Process::start(command.arg("media"));
    let address = SocketAddr::from(([127, 0, 0, 1], metrics));
    let ready = || {
        let mut connection = Connection::try_open(address)?;
        connection.try_get("/ready").map(|response| response.json())
    };
    eventually(Duration::from_secs(3), "the media process waits", || {
        ready().is_some_and(|(status, body)| {
            status == 503 && body["reason"].as_str().is_some_and(|it| it.contains("set the store"))
        })
    });
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut redis.connection()).unwrap();
    assert_eq!(keys, [""; 0]);
    let server = AgentServer::start().await;
    let router = start_router(&redis, &server, 1);
    eventually(Duration::from_secs(3), "the media process is ready", || {
        ready().is_some_and(|(status, _)| status == 200)
    });
    expect_free(&router, 1);
}

#[tokio::test]
async fn the_streams_of_a_media_process_survive_a_wiped_redis() {
    let split = Split::start(1).await;
    let media = split.media(&[]);
    let (mut provider, mut agent) = split.open_stream(&media, "CA1").await;
    redis::cmd("FLUSHALL").exec(&mut split.redis.connection()).unwrap();
    eventually(Duration::from_secs(10), "the stream is attached again", || {
        split.router.get("/api/v1/calls/CA1").1["stream"]["gateway"].is_string()
    });
    echo(&mut provider, &mut agent, "audio").await;
    hang_up(provider, agent).await;
    expect_free(&split.router, 1);
}

#[tokio::test]
async fn a_stopping_media_process_does_not_cut_streams() {
    let split = Split::start(3).await;
    let drain = ("MEDIA_DRAIN_TIME", "1h");
    let (mut leaving, staying) = (split.media(&[drain]), split.media(&[drain]));
    let (mut provider, mut agent) = split.open_stream(&leaving, "CA1").await;
    let (mut other_provider, mut other_agent) = split.open_stream(&staying, "CA2").await;
    leaving.signal("TERM");
    eventually(Duration::from_secs(3), "no new streams", || {
        Connection::try_open(leaving.address).is_none()
    });
    let ready = |router: &Router| Connection::open(router.metrics).get("/ready").status;
    assert_eq!((ready(&leaving), ready(&staying)), (503, 200));
    echo(&mut provider, &mut agent, "on the leaving one").await;
    echo(&mut other_provider, &mut other_agent, "on the other").await;
    let (late_provider, late_agent) = split.open_stream(&staying, "CA3").await;
    hang_up(provider, agent).await;
    assert_eq!(leaving.wait_for_exit(Duration::from_secs(3)), Some(0));
    echo(&mut other_provider, &mut other_agent, "still").await;
    hang_up(other_provider, other_agent).await;
    hang_up(late_provider, late_agent).await;
    expect_free(&split.router, 3);
}

#[test]
fn a_media_process_needs_the_redis_of_the_routers() {
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[], "smart-router: REDIS_URL=: expected the Redis of the routers"),
        (&[("DATA_DIR", "/tmp")], "smart-router: REDIS_URL=: expected the Redis of the routers"),
        (
            &[("REDIS_URL", "redis://localhost"), testkit::WITHOUT_GATEWAY],
            "smart-router: VOICE_AGENT_BASE_URL=wss://voice.example.com: expected it to be unset",
        ),
    ];
    for (settings, expected) in cases {
        for arguments in [&["media"][..], &["check-config", "--media"]] {
            let output = program(settings).args(arguments).output().unwrap();
            assert_eq!(output.status.code(), Some(1));
            let printed = String::from_utf8(output.stderr).unwrap();
            assert!(printed.starts_with(expected), "{printed}");
            assert_eq!(printed.lines().count(), 1, "{printed}");
        }
    }
}
