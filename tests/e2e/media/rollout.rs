//! Rollouts of agents in a cluster under live streams: no stream is cut.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use serde_json::json;

use super::*;
use testkit::{cluster::TIMES, free_port, kube::FakeKube};

const CALLS: usize = 100;
const PODS: usize = 12;

/// Agents at addresses of the loopback network, with one port, as the pods of a cluster.
#[derive(Clone)]
struct Agents {
    port: u16,
    /// Open streams by the last part of the pod's address.
    open: Arc<Mutex<HashMap<u8, usize>>>,
}

impl Agents {
    async fn start(&self, host: u8) {
        let listener =
            TcpListener::bind(SocketAddr::from(([127, 0, 77, host], self.port))).await.unwrap();
        let open = self.open.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let open = open.clone();
                tokio::spawn(async move {
                    *open.lock().unwrap().entry(host).or_default() += 1;
                    if let Ok(mut agent) = tokio_tungstenite::accept_async(socket).await {
                        while let Some(Ok(message)) = agent.next().await {
                            if !message.is_close() && agent.send(message).await.is_err() {
                                break;
                            }
                        }
                    }
                    *open.lock().unwrap().get_mut(&host).unwrap() -= 1;
                });
            }
        });
    }

    fn streams(&self, host: u8) -> usize {
        self.open.lock().unwrap().get(&host).copied().unwrap_or(0)
    }
}

struct Rollout {
    kube: FakeKube,
    agents: Agents,
    /// The last part of the next pod's address.
    next_host: u8,
}

impl Rollout {
    async fn add(&mut self, name: &str) -> u8 {
        let host = self.next_host;
        self.next_host += 1;
        self.agents.start(host).await;
        self.kube.add_with(name, |pod| pod["status"]["podIP"] = json!(format!("127.0.77.{host}")));
        host
    }

    /// Terminates a pod as a rollout does: the agent exits after its last stream.
    async fn retire(&self, name: &str, host: u8) {
        self.kube.terminate(name);
        // A stream that was allocated before may still be on its way to the agent.
        let mut idle = 0;
        while idle < 10 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            idle = if self.agents.streams(host) == 0 { idle + 1 } else { 0 };
        }
        self.kube.delete(name);
    }
}

/// The next message besides pings, which the gateway sends to a stream that is silent for long.
async fn next_frame(provider: &mut Provider) -> Message {
    loop {
        match next(provider).await {
            Message::Ping(_) => {}
            message => return message,
        }
    }
}

/// One caller after another, until the end of the rollout. Counts the calls that were not cut.
async fn call_repeatedly(
    router: Arc<Router>,
    caller: usize,
    is_over: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
) {
    for round in 0.. {
        let call = format!("CA{caller}-{round}");
        let (router, allocated) = (router.clone(), call.clone());
        let url = tokio::task::spawn_blocking(move || stream_url(&router, &allocated));
        let mut provider = dial(&url.await.unwrap()).await;
        for number in 0..20 + caller % 20 {
            let text = format!(r#"{{"event":"media","call":"{call}","number":{number}}}"#);
            send(&mut provider, &text).await;
            assert_eq!(next_frame(&mut provider).await, Message::text(text), "{call} was cut");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        provider.close(None).await.unwrap();
        assert_eq!(close_code(&mut provider).await, Some(1005), "{call} ended otherwise");
        served.fetch_add(1, Ordering::Relaxed);
        if is_over.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// Runs a rollout under live calls.
async fn roll_out(names: [fn(usize) -> String; 2]) {
    let agents = Agents { port: free_port(), open: Arc::default() };
    let mut rollout = Rollout { kube: FakeKube::start(), agents, next_host: 1 };
    let mut old = Vec::new();
    for number in 0..PODS {
        let name = names[0](number);
        let host = rollout.add(&name).await;
        old.push((name, host));
    }
    let (config, port) = (rollout.kube.config.clone(), rollout.agents.port.to_string());
    let tiers = r#"{"basic": {"type": "shared", "target": 12, "max_concurrent": 12}}"#;
    let mut settings = vec![
        ("KUBECONFIG", config.to_str().unwrap()),
        ("VOICE_AGENT_PORT", port.as_str()),
        ("TIER_CONFIG", tiers),
        ("LOG_LEVEL", "error"),
    ];
    settings.extend(TIMES);
    let router = Arc::new(Router::start(&settings));
    let available = |router: &Router| router.status()["pools"]["basic"]["available"].as_u64();
    eventually(TIMEOUT, "all pods are known", || available(&router) == Some(PODS as u64));
    let (is_over, served) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..CALLS {
        let (router, is_over, served) = (router.clone(), is_over.clone(), served.clone());
        callers.spawn(call_repeatedly(router, caller, is_over, served));
    }
    let live = async || {
        while router.status()["active_calls"].as_u64() < Some(CALLS as u64 * 9 / 10) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, live()).await.expect("the calls are live");
    for (number, (name, host)) in old.iter().enumerate() {
        let new = names[1](number);
        if new != *name {
            // A Deployment adds a pod first.
            rollout.add(&new).await;
            rollout.retire(name, *host).await;
        } else {
            // A StatefulSet replaces a pod by another of the same name.
            rollout.retire(name, *host).await;
            rollout.add(&new).await;
        }
    }
    is_over.store(true, Ordering::Relaxed);
    while let Some(done) = callers.join_next().await {
        done.expect("no call was cut");
    }
    assert!(served.load(Ordering::Relaxed) > CALLS, "calls were served during the rollout");
    let old_hosts = old.iter().map(|(_, host)| rollout.agents.streams(*host)).sum::<usize>();
    assert_eq!(old_hosts, 0);
    let metrics = testkit::Connection::open(router.metrics).get("/metrics").text();
    let failovers =
        metrics.lines().filter(|it| it.starts_with("smart_router_failover_gap_seconds_count"));
    let is_none = |line: &str| line.ends_with(" 0");
    assert!(
        failovers.clone().all(is_none),
        "no stream had to move: {:?}",
        failovers.collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_of_a_deployment_cuts_none_of_100_live_calls() {
    roll_out([|number| format!("agent-7d9f-{number}"), |number| format!("agent-58bc-{number}")])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_of_a_stateful_set_cuts_none_of_100_live_calls() {
    let name = |number| format!("agent-{number}");
    roll_out([name, name]).await;
}
