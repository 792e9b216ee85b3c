//! Many streams at once: every frame reaches its own call, in order.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use super::*;
use testkit::redis::RedisServer;

const STREAMS: usize = 1_000;
const FRAMES: usize = 5;

/// The calls that agents have served, with the pod of each.
type Served = Arc<Mutex<Vec<(String, String)>>>;

/// Echoes every stream, and checks that a pod gets the streams of its own calls only.
async fn echo_all(server: AgentServer, pod: String, served: Served) {
    loop {
        let Ok((socket, _)) = server.listener.accept().await else { return };
        let (pod, served) = (pod.clone(), served.clone());
        tokio::spawn(async move {
            #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
            let record = |request: &Request, response: Response| {
                let call = request.headers()["x-call-sid"].to_str().unwrap().to_owned();
                served.lock().unwrap().push((call, pod.clone()));
                Ok(response)
            };
            let Ok(mut agent) = accept_hdr_async(socket, record).await else { return };
            while let Some(Ok(message)) = agent.next().await {
                if message.is_close() || agent.send(message).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// One call: frames with its id and a sequence number must all come back, in order.
async fn converse(url: String, call: String) {
    let mut provider = dial(&url).await;
    for number in 0..FRAMES {
        let text = format!(r#"{{"event":"media","call":"{call}","sequence":{number}}}"#);
        provider.send(Message::text(text)).await.unwrap();
    }
    for number in 0..FRAMES {
        let expected = format!(r#"{{"event":"media","call":"{call}","sequence":{number}}}"#);
        assert_eq!(next(&mut provider).await, Message::text(expected));
    }
    provider.close(None).await.unwrap();
    close_code(&mut provider).await;
}

async fn a_thousand_streams(routers: &[Router], pods: Vec<(String, AgentServer)>) {
    let served = Served::default();
    for (pod, server) in pods {
        tokio::spawn(echo_all(server, pod, served.clone()));
    }
    let mut connections: Vec<_> = routers.iter().map(Router::connect).collect();
    let mut tasks = tokio::task::JoinSet::new();
    let mut pods_of = HashMap::new();
    for number in 0..STREAMS {
        // One replica allocates, the other may carry the stream.
        let call = format!("CA{number:05}");
        let body = serde_json::json!({"call_sid": call});
        let index = number % routers.len();
        let (status, answer) = connections[index].post("/api/v1/allocate", &body).json();
        assert_eq!(status, 200, "{answer}");
        let gateway = &routers[(number / 2) % routers.len()];
        let url =
            format!("ws://{}{}", gateway.address, path_of(answer["ws_url"].as_str().unwrap()));
        pods_of.insert(call.clone(), answer["pod_name"].as_str().unwrap().to_owned());
        tasks.spawn(converse(url, call));
    }
    timeout(2 * TIMEOUT, async {
        while let Some(done) = tasks.join_next().await {
            done.expect("a stream had all of its frames");
        }
    })
    .await
    .expect("all streams end");
    let served = served.lock().unwrap().clone();
    assert_eq!(served.len(), STREAMS);
    for (call, pod) in served {
        assert_eq!(pods_of[&call], pod, "I14: {call} is connected to its own pod");
    }
    eventually(Duration::from_secs(10), "all calls have ended", || {
        routers[0].status()["active_calls"] == 0
    });
}

async fn pods() -> (String, Vec<(String, AgentServer)>) {
    let (mut list, mut servers) = (Vec::new(), Vec::new());
    for number in 0..10 {
        let server = AgentServer::start().await;
        list.push(format!("agent-{number}={}", server.address));
        servers.push((format!("agent-{number}"), server));
    }
    (list.join(","), servers)
}

const TIERS: &str = r#"{"gold": {"type": "shared", "target": 10, "max_concurrent": 100}}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_on_the_embedded_store() {
    let (list, servers) = pods().await;
    let router = Router::start(&[("PODS", list.as_str()), ("TIER_CONFIG", TIERS)]);
    a_thousand_streams(&[router], servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_on_redis_with_two_gateways() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let (list, servers) = pods().await;
    let settings = [("PODS", list.as_str()), ("TIER_CONFIG", TIERS), ("REDIS_URL", &url)];
    let routers = [Router::start(&settings), Router::start(&settings)];
    a_thousand_streams(&routers, servers).await;
}
