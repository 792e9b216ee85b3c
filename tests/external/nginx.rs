//! A real nginx: with the shipped configuration and agents in separate processes, and as a load
//! balancer in front of media gateways.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Stdio},
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio_tungstenite::{connect_async, tungstenite::Message};

use testkit::{
    Connection, Router, eventually, free_port, nginx::Nginx, program, redis::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

/// An agent process that is killed on drop.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct ProxiedRouter {
    router: Router,
    nginx: Nginx,
    _agents: Vec<Agent>,
}

/// Pods 0 and 1 have agents, the address of pod 2 refuses connections, and that of pod 3 drops
/// all packets.
fn proxied_router() -> ProxiedRouter {
    let agent_port = free_port();
    let address = |number: u8| Ipv4Addr::new(127, 0, 1, number + 1);
    let pods: Vec<(String, Ipv4Addr)> = (0..3u8)
        .map(|number| (format!("voice-agent-{number}"), address(number)))
        .chain([("voice-agent-3".to_owned(), Ipv4Addr::new(192, 0, 2, 1))])
        .collect();
    let (api, metrics) = (free_port(), free_port().to_string());
    let nginx = Nginx::start(api, agent_port, pods.clone());
    let list: Vec<String> =
        pods.iter().map(|(name, address)| format!("{name}={address}:{agent_port}")).collect();
    let router = Router::start(&[
        ("HTTP_PORT", &api.to_string()),
        ("METRICS_PORT", &metrics),
        ("HTTP_BIND", "127.0.0.1"),
        ("PODS", &list.join(",")),
        ("TIER_CONFIG", r#"{"gold": 4}"#),
        ("VOICE_AGENT_BASE_URL", &format!("ws://127.0.0.1:{}", nginx.port)),
        ("LOG_LEVEL", "error"),
    ]);
    let agents = (0..2u8)
        .map(|number| {
            let bind = format!("{}:{agent_port}", address(number));
            let child = program(&[
                ("POD_NAME", &format!("voice-agent-{number}")),
                ("AGENT_BIND", &bind),
                ("SMART_ROUTER_URL", &format!("http://127.0.0.1:{api}")),
            ])
            .arg("agent")
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
            eventually(5 * SECOND, "the agent listens", || {
                std::net::TcpStream::connect(&bind).is_ok()
            });
            Agent(child)
        })
        .collect();
    ProxiedRouter { router, nginx, _agents: agents }
}

fn connect(nginx: &Nginx) -> Connection {
    Connection::open(SocketAddr::from(([127, 0, 0, 1], nginx.port)))
}

#[tokio::test]
async fn webhooks_and_streams_reach_the_router_and_the_pod() {
    let proxied = proxied_router();
    for number in [2, 3] {
        let pod = format!("voice-agent-{number}");
        assert_eq!(proxied.router.post("/api/v1/drain", json!({"pod_name": pod})).0, 200);
    }
    for round in 0..4 {
        // The provider sends the webhook …
        let call = format!("CA{round}");
        let answer =
            connect(&proxied.nginx).form("/api/v1/twilio/allocate", &format!("CallSid={call}"));
        assert_eq!(answer.status, 200);
        let text = answer.text();
        let url = text.split("url=\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(url.contains("/ws/pod/voice-agent-"), "{url}");
        assert_eq!(proxied.router.status()["active_calls"], 1);
        // … and opens the stream of the document.
        let (mut socket, _) = connect_async(url).await.unwrap();
        let start = json!({"event": "start", "streamSid": "MZ1", "start": {"callSid": call}});
        socket.send(Message::Text(start.to_string().into())).await.unwrap();
        for frame in 0..20 {
            let media = json!({"event": "media", "media": {"payload": "//8=", "chunk": frame}});
            socket.send(Message::Text(media.to_string().into())).await.unwrap();
            let echo = socket.next().await.unwrap().unwrap();
            assert_eq!(echo.into_text().unwrap().as_str(), media.to_string());
        }
        socket.send(Message::Binary(vec![0xff; 320].into())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().into_data().len(), 320);
        // The caller hangs up.
        socket.send(Message::Text(json!({"event": "stop"}).to_string().into())).await.unwrap();
        let _ = socket.close(None).await;
        eventually(3 * SECOND, "the pod is free", || proxied.router.status()["active_calls"] == 0);
    }
}

#[test]
fn nginx_forwards_the_api_and_nothing_else() {
    let proxied = proxied_router();
    let mut connection = connect(&proxied.nginx);
    assert_eq!(connection.get("/api/v1/health").status, 200);
    let answer = connection.post("/api/v1/allocate", &json!({"call_sid": "CA1"}));
    assert_eq!(answer.status, 200);
    assert_eq!(connection.post("/api/v1/release", &json!({"call_sid": "CA1"})).status, 200);
    for path in ["/", "/metrics", "/health", "/api/v2/x"] {
        assert_eq!(connect(&proxied.nginx).get(path).status, 404, "{path}");
    }
}

#[test]
fn paths_without_a_valid_pod_name_are_refused() {
    let proxied = proxied_router();
    for path in [
        "/ws/pod/voice-agent-0.evil.example/x",
        "/ws/pod/evil.example/x",
        "/ws/pod/127.0.0.1/x",
        "/ws/pod/voice-agent-0@evil.example/x",
        "/ws/pod/voice-agent-0%2eevil/x",
        "/ws/pod/voice-agent-0:22/x",
        "/ws/pod/voice-agent-/x",
        "/ws/pod/voice-agent-x/x",
        "/ws/pod/database-0/x",
        "/ws/pod//x",
        "/ws/pod/voice-agent-0",
        "/ws/pod/voice-agent-0/../../api/v9",
        "/ws/pod/../pod/evil/x",
        "/ws/pod/voice-agent-9999999999/x",
    ] {
        let status = connect(&proxied.nginx).get(path).status;
        assert!((400..=404).contains(&status), "{path}: {status}");
    }
    // Escaped line breaks stay escaped: a path cannot inject a header.
    let status = connect(&proxied.nginx).get("/ws/pod/voice-agent-0/a%0d%0aX-Evil:%201/b").status;
    assert!((400..500).contains(&status), "{status}");
}

#[test]
fn streams_to_a_down_or_unknown_pod_fail_in_time() {
    let proxied = proxied_router();
    for pod in ["voice-agent-2", "voice-agent-3", "voice-agent-77"] {
        // nginx's default timeout of a minute is longer than that of this connection.
        let status = connect(&proxied.nginx).get(&format!("/ws/pod/{pod}/agent/x")).status;
        assert!(matches!(status, 502 | 504), "{pod}: {status} {}", proxied.nginx.log());
    }
}

/// Webhook and stream of a call may reach different replicas.
#[tokio::test]
async fn streams_pass_through_a_load_balancer_to_any_gateway() {
    let redis = RedisServer::start(&[]);
    let ports = [free_port(), free_port()];
    let balancer = Nginx::relay(0, None, &ports);
    let routers = ports.map(|port| {
        Router::start(&[
            ("REDIS_URL", &redis.url()),
            ("HTTP_PORT", &port.to_string()),
            ("MEDIA_URL", &format!("ws://127.0.0.1:{}", balancer.port)),
            ("TIER_CONFIG", r#"{"gold": 4}"#),
            ("LOG_LEVEL", "error"),
        ])
    });
    let mut gateways = std::collections::BTreeSet::new();
    for round in 0..4 {
        let call = format!("CA{round}");
        // nginx alternates: with a third request per round, streams reach both.
        assert_eq!(connect(&balancer).get("/health").status, 200);
        let allocated = connect(&balancer).post("/api/v1/allocate", &json!({"call_sid": call}));
        let url = allocated.json().1["ws_url"].as_str().unwrap().to_owned();
        let (mut socket, _) = connect_async(&url).await.unwrap();
        socket.send(Message::Text("hello".into())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().into_text().unwrap().as_str(), "hello");
        let shown = routers[0].get(&format!("/api/v1/calls/{call}")).1;
        gateways.insert(shown["stream"]["gateway"].as_str().unwrap().to_owned());
        socket.close(None).await.unwrap();
        eventually(3 * SECOND, "the pod is free", || routers[1].status()["active_calls"] == 0);
    }
    assert_eq!(gateways.len(), 2, "{gateways:?}");
}
