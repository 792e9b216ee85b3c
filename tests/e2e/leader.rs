//! Leader election: one leader, fencing, failover and rolling updates.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    process::Stdio,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use testkit::cluster::{TIMES, available, router};
use testkit::{
    Connection, Router,
    clock::WallClock,
    eventually, free_port,
    kube::FakeKube,
    redis::{RedisServer, unix_millis},
    scratch,
};

const SECOND: Duration = Duration::from_secs(1);

fn is_leader(router: &Router) -> bool {
    router.status()["is_leader"] == true
}

fn only_leader(routers: &[&Router]) -> Option<usize> {
    let leading: Vec<usize> = (0..routers.len()).filter(|at| is_leader(routers[*at])).collect();
    match leading[..] {
        [one] => Some(one),
        _ => None,
    }
}

/// Starts routers on one Redis in one cluster.
fn replicas(kube: &FakeKube, server: &RedisServer, count: usize) -> Vec<Router> {
    replicas_with(kube, server, count, &[])
}

fn replicas_with(
    kube: &FakeKube,
    server: &RedisServer,
    count: usize,
    extra: &[(&str, &str)],
) -> Vec<Router> {
    let url = server.url();
    (0..count)
        .map(|number| {
            let name = format!("router-{number}");
            let own = [("REDIS_URL", url.as_str()), ("POD_NAME", &name), ("LOG_LEVEL", "off")];
            router(kube, &[&own, extra].concat())
        })
        .collect()
}

#[test]
fn another_replica_leads_when_the_leader_dies() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add("voice-agent-0");
    let mut routers = replicas(&kube, &server, 3);
    for round in 1..3u64 {
        let all: Vec<&Router> = routers.iter().collect();
        eventually(6 * SECOND, "one replica leads", || only_leader(&all).is_some());
        let leader = only_leader(&all).unwrap();
        let (holder, epoch) = kube.lease_holder().unwrap();
        assert!(holder.starts_with("router-") && holder.contains('_'), "{holder}");
        let metrics = all[leader].connect().get("/metrics").text();
        assert!(metrics.contains(&format!("smart_router_leader_epoch {epoch}")), "{metrics}");
        assert!(metrics.contains("smart_router_leader_status 1"));
        kube.add(&format!("voice-agent-{round}"));
        let calls = &all[(leader + 1) % all.len()];
        eventually(2 * SECOND, "every replica sees the new pod", || available(calls) == round + 1);
        let mut dead = routers.remove(leader);
        dead.child.kill().unwrap();
        dead.child.wait().unwrap();
        let rest: Vec<&Router> = routers.iter().collect();
        let died = Instant::now();
        eventually(6 * SECOND, "another replica leads", || only_leader(&rest).is_some());
        assert!(died.elapsed() > SECOND, "it leads before the Lease has expired");
        assert!(kube.lease_holder().unwrap().1 > epoch, "a new term has a larger epoch");
    }
}

#[test]
fn the_leader_refills_a_store_that_a_follower_recovered() {
    let (kube, mut server) = (FakeKube::start(), RedisServer::start(&[]));
    for number in 0..3 {
        kube.add(&format!("voice-agent-{number}"));
    }
    let routers = replicas(&kube, &server, 2);
    let all: Vec<&Router> = routers.iter().collect();
    eventually(5 * SECOND, "one replica leads", || only_leader(&all).is_some());
    let leader = only_leader(&all).unwrap();
    let other = all[1 - leader];
    eventually(5 * SECOND, "all pods are known", || available(other) == 3);
    server.restart_empty();
    // A request makes the follower recover the store, mostly before the leader accesses it. On a busy
    // machine the leader may have written the pods by then.
    eventually(2 * SECOND, "the store is recovered", || {
        let (status, response) = other.post("/api/v1/allocate", json!({"call_sid": "CA1"}));
        status == 200 || response["error"] == "no pods available"
    });
    other.release("CA1");
    eventually(5 * SECOND, "the leader writes the pods", || available(other) == 3);
}

#[test]
fn a_leader_that_shuts_down_releases_its_lease() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let lease = [("LEADER_ELECTION_DURATION", "10m")];
    let mut routers = replicas_with(&kube, &server, 2, &lease);
    let all: Vec<&Router> = routers.iter().collect();
    eventually(5 * SECOND, "one replica leads", || only_leader(&all).is_some());
    let leader = only_leader(&all).unwrap();
    let mut leaving = routers.remove(leader);
    leaving.signal("TERM");
    eventually(3 * SECOND, "the other replica leads", || is_leader(&routers[0]));
    assert_eq!(leaving.wait_for_exit(10 * SECOND), Some(0));
}

#[test]
fn a_paused_leader_is_fenced_when_it_resumes() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    for number in 0..30 {
        kube.add(&format!("voice-agent-{number}"));
    }
    let routers = replicas(&kube, &server, 2);
    let all: Vec<&Router> = routers.iter().collect();
    eventually(5 * SECOND, "one replica leads", || only_leader(&all).is_some());
    let old = only_leader(&all).unwrap();
    let (paused, other) = (all[old], all[1 - old]);
    eventually(5 * SECOND, "all pods are known", || available(other) == 30);
    // The leader is paused while it writes.
    thread::scope(|scope| {
        scope.spawn(|| (30..60).for_each(|number| kube.add(&format!("voice-agent-{number}"))));
        thread::sleep(Duration::from_millis(5));
        paused.signal("STOP");
    });
    eventually(8 * SECOND, "the other replica leads", || is_leader(other));
    eventually(3 * SECOND, "all pods are known", || available(other) == 60);
    // The state that the paused leader knows becomes stale.
    for number in 0..10 {
        kube.delete(&format!("voice-agent-{number}"));
        kube.terminate(&format!("voice-agent-{}", number + 10));
    }
    eventually(2 * SECOND, "the pools are updated", || available(other) == 40);
    let epoch = kube.lease_holder().unwrap().1;
    paused.signal("CONT");
    eventually(3 * SECOND, "it notices the loss of the Lease", || !is_leader(paused));
    let until = Instant::now() + 2 * SECOND;
    while Instant::now() < until {
        assert_eq!(available(other), 40, "the fenced leader wrote pods");
        assert!(is_leader(other) && !is_leader(paused));
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(kube.lease_holder().unwrap().1, epoch);
}

#[test]
fn leader_election_tolerates_clock_skew_of_minutes() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let url = server.url();
    let clocks = [unix_millis() - 300_000, unix_millis() + 300_000].map(WallClock::frozen);
    let start = |clock: &WallClock| {
        let clock = clock.settings();
        let mut settings = vec![("REDIS_URL", url.as_str()), ("LOG_LEVEL", "off")];
        settings.extend(clock.iter().map(|(name, value)| (*name, value.as_str())));
        router(&kube, &settings)
    };
    let routers = clocks.each_ref().map(start);
    let all: Vec<&Router> = routers.iter().collect();
    eventually(5 * SECOND, "one replica leads", || only_leader(&all).is_some());
    let (leader, (_, epoch)) = (only_leader(&all).unwrap(), kube.lease_holder().unwrap());
    let until = Instant::now() + 7 * SECOND;
    while Instant::now() < until {
        assert_eq!(kube.lease_holder().unwrap().1, epoch, "the Lease changed hands");
        thread::sleep(Duration::from_millis(100));
    }
    eventually(SECOND, "there is one leader", || only_leader(&all) == Some(leader));
    all[leader].signal("STOP");
    eventually(6 * SECOND, "the other replica takes over", || is_leader(all[1 - leader]));
    all[leader].signal("CONT");
    eventually(3 * SECOND, "the new leader stays", || only_leader(&all) == Some(1 - leader));
}

#[test]
fn a_deleted_lease_is_recreated_with_a_larger_epoch() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let routers = replicas(&kube, &server, 2);
    let all: Vec<&Router> = routers.iter().collect();
    kube.add("voice-agent-0");
    eventually(5 * SECOND, "one replica leads", || {
        only_leader(&all).is_some() && available(all[0]) == 1
    });
    for round in 1..4u64 {
        let epoch = kube.lease_holder().unwrap().1;
        kube.delete_lease();
        eventually(6 * SECOND, "the Lease is recreated", || {
            kube.lease_holder().is_some_and(|(holder, terms)| !holder.is_empty() && terms > epoch)
        });
        eventually(6 * SECOND, "one replica leads", || only_leader(&all).is_some());
        kube.add(&format!("voice-agent-{round}"));
        eventually(4 * SECOND, "the leader writes the new pod", || available(all[0]) == round + 1);
    }
}

#[test]
fn calls_are_served_while_the_api_server_is_down() {
    let mut kube = FakeKube::start();
    for number in 0..5 {
        kube.add(&format!("voice-agent-{number}"));
    }
    let server = RedisServer::start(&[]);
    let routers = replicas(&kube, &server, 2);
    let all: Vec<&Router> = routers.iter().collect();
    eventually(5 * SECOND, "all pods are known", || available(all[0]) == 5);
    kube.stop();
    let until = Instant::now() + seconds("CLUSTER_GONE_SECONDS", 6);
    let mut number = 0;
    while Instant::now() < until {
        number += 1;
        let call = format!("CA{number}");
        let router = all[number % 2];
        router.allocate(&call);
        assert_eq!(router.release(&call).0, 200);
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        all.iter().filter(|router| is_leader(router)).count(),
        0,
        "no replica may lead without the API server"
    );
    kube.restart();
    kube.add("voice-agent-5");
    eventually(6 * SECOND, "one replica leads", || only_leader(&all).is_some());
    eventually(6 * SECOND, "the missed pod is written", || available(all[0]) == 6);
}

fn seconds(variable: &str, default: u64) -> Duration {
    let value = std::env::var(variable).ok().map(|text| text.parse().expect("seconds"));
    Duration::from_secs(value.unwrap_or(default))
}

#[test]
fn missing_permissions_are_logged_and_calls_are_served() {
    for (path, rule) in [
        (
            "leases",
            "get, create and update on leases (coordination.k8s.io) in the namespace default",
        ),
        ("pods", "list and watch on pods in the namespace default"),
    ] {
        let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
        kube.add("voice-agent-0");
        let url = server.url();
        // A replica with all permissions registers a pod.
        let good = router(&kube, &[("REDIS_URL", &url)]);
        eventually(5 * SECOND, "the pod is known", || available(&good) == 1);
        drop(good);
        kube.faults(|faults| faults.forbidden_path = Some(path));
        let (api, metrics) = (free_port().to_string(), free_port().to_string());
        let config = kube.config.to_str().unwrap();
        let mut settings = vec![
            ("KUBECONFIG", config),
            ("VOICE_AGENT_BASE_URL", "wss://v"),
            ("HTTP_BIND", "127.0.0.1"),
            ("HTTP_PORT", &api),
            ("METRICS_PORT", &metrics),
            ("REDIS_URL", &url),
        ];
        settings.extend(TIMES);
        let path = scratch().join("log");
        let log = std::fs::File::create(&path).unwrap();
        let restricted = Router::start_with(&settings, log.into());
        restricted.allocate("CA1");
        eventually(20 * SECOND, "the log names the permission", || {
            std::fs::read_to_string(&path).unwrap().contains(rule)
        });
        assert_eq!(restricted.release("CA1").0, 200);
    }
}

#[test]
fn without_an_election_every_replica_leads() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    kube.add("voice-agent-0");
    let url = server.url();
    let settings = [("REDIS_URL", url.as_str()), ("LEADER_ELECTION_ENABLED", "false")];
    let routers = [router(&kube, &settings), router(&kube, &settings)];
    eventually(5 * SECOND, "both lead", || routers.iter().all(is_leader));
    eventually(5 * SECOND, "the pod is known", || available(&routers[0]) == 1);
    assert!(kube.lease_holder().is_none());
}

/// Twenty busy pods are replaced one after the other, like a StatefulSet does, under load. No
/// call ends early, and none is allocated to a drained pod.
#[test]
fn a_rolling_update_of_the_agents_ends_no_call() {
    const PODS: usize = 20;
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    for number in 0..PODS {
        kube.add(&format!("voice-agent-{number}"));
    }
    let routers = replicas(&kube, &server, 3);
    eventually(5 * SECOND, "all pods are known", || available(&routers[0]) == PODS as u64);
    let done = AtomicBool::new(false);
    // Drained pods, and the call on each pod.
    let leaving: Mutex<HashSet<String>> = Mutex::default();
    let on: Mutex<HashMap<String, String>> = Mutex::default();
    let served = Mutex::new(0);
    thread::scope(|scope| {
        for client in 0..12 {
            let (done, leaving, on, served, routers) = (&done, &leaving, &on, &served, &routers);
            scope.spawn(move || {
                let mut connection: Connection = routers[client % 3].connect();
                let mut number = 0;
                while !done.load(Ordering::Relaxed) {
                    number += 1;
                    let call = format!("CA{client}-{number}");
                    let drained: HashSet<String> = leaving.lock().unwrap().clone();
                    let (status, response) =
                        connection.post("/api/v1/allocate", &json!({"call_sid": call})).json();
                    if status == 503 {
                        thread::sleep(Duration::from_millis(5));
                        continue;
                    }
                    assert_eq!(status, 200, "{response}");
                    let pod = response["pod_name"].as_str().unwrap().to_owned();
                    assert!(
                        !drained.contains(&pod),
                        "{call} was allocated to {pod}, which is drained"
                    );
                    let before = on.lock().unwrap().insert(pod.clone(), call.clone());
                    assert_eq!(before, None, "{pod} has two calls");
                    thread::sleep(Duration::from_millis(20 + (number * 37 % 150)));
                    on.lock().unwrap().remove(&pod);
                    let (status, response) = connection
                        .post("/api/v1/release", &json!({"call_sid": call, "pod_name": pod}))
                        .json();
                    assert_eq!(status, 200, "{call} on {pod} ended early: {response}");
                    *served.lock().unwrap() += 1;
                }
            });
        }
        scope.spawn(|| {
            let mut connection = routers[0].connect();
            for number in (0..PODS).rev() {
                let pod = format!("voice-agent-{number}");
                // Kubernetes deletes a pod and runs its preStop hook at about the same time.
                kube.terminate(&pod);
                let drain = json!({"pod_name": pod, "wait": "20s"});
                let (status, response) = connection.post("/api/v1/drain", &drain).json();
                assert_eq!((status, &response["drained"]), (200, &json!(true)), "{response}");
                leaving.lock().unwrap().insert(pod.clone());
                thread::sleep(Duration::from_millis(10));
                assert_eq!(on.lock().unwrap().get(&pod), None, "{pod} still has a call");
                kube.delete(&pod);
                leaving.lock().unwrap().remove(&pod);
                kube.add_with(&pod, |pod| {
                    pod["status"]["conditions"][0]["status"] = json!("False")
                });
                thread::sleep(Duration::from_millis(30));
                kube.update(&pod, |pod| pod["status"]["conditions"][0]["status"] = json!("True"));
            }
            thread::sleep(Duration::from_millis(300));
            done.store(true, Ordering::Relaxed);
        });
    });
    let served = served.into_inner().unwrap();
    println!("{served} calls during the update");
    assert!(served > 100, "only {served} calls");
    eventually(3 * SECOND, "all pods are free", || available(&routers[0]) == PODS as u64);
}

/// Three routers are replaced one after the other under load. Clients learn of a removed router
/// with a delay, like load balancers do, and lose no request.
#[test]
fn a_rolling_update_of_the_router_loses_no_request() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    for number in 0..16 {
        kube.add(&format!("voice-agent-{number}"));
    }
    let mut routers = replicas(&kube, &server, 3);
    eventually(5 * SECOND, "all pods are known", || available(&routers[0]) == 16);
    let rotation = Mutex::new(routers.iter().map(|router| router.address).collect::<Vec<_>>());
    let (done, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|client| {
                let (done, served, rotation) = (&done, &served, &rotation);
                scope.spawn(move || {
                    let mut number = 0usize;
                    let mut open: HashMap<SocketAddr, Connection> = HashMap::new();
                    let mut post = |path: &str, body: serde_json::Value| {
                        number += 1;
                        let all = rotation.lock().unwrap().clone();
                        let address = all[(client + number) % all.len()];
                        let connection =
                            open.entry(address).or_insert_with(|| Connection::open(address));
                        let response = connection.post(path, &body);
                        if response.header("connection") == Some("close") {
                            open.remove(&address);
                        }
                        response.status
                    };
                    let mut calls = 0;
                    while !done.load(Ordering::Relaxed) {
                        calls += 1;
                        let call = format!("CA{client}-{calls}");
                        assert_eq!(post("/api/v1/allocate", json!({"call_sid": call})), 200);
                        thread::sleep(Duration::from_millis(5));
                        assert_eq!(post("/api/v1/release", json!({"call_sid": call})), 200);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for _ in 0..3 {
            let url = server.url();
            let fresh = router(&kube, &[("REDIS_URL", &url), ("LOG_LEVEL", "off")]);
            rotation.lock().unwrap().push(fresh.address);
            routers.push(fresh);
            let mut old = routers.remove(0);
            let before = served.load(Ordering::Relaxed);
            eventually(10 * SECOND, "calls are served by all routers", || {
                served.load(Ordering::Relaxed) >= before + 200
            });
            old.signal("TERM");
            thread::sleep(Duration::from_millis(100));
            rotation.lock().unwrap().retain(|address| *address != old.address);
            assert_eq!(old.wait_for_exit(10 * SECOND), Some(0));
        }
        done.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
}

#[test]
fn a_malformed_epoch_does_not_stop_the_leader() {
    let (kube, server) = (FakeKube::start(), RedisServer::start(&[]));
    let routers = replicas(&kube, &server, 2);
    let all: Vec<&Router> = routers.iter().collect();
    let mut plain = server.connection();
    eventually(5 * SECOND, "one replica leads", || only_leader(&all).is_some());
    let mut pods = 0;
    for epoch in ["2147483646", "3000000000", "abc", "-5"] {
        redis::cmd("SET").arg("voice:leader:epoch").arg(epoch).exec(&mut plain).unwrap();
        pods += 1;
        kube.add(&format!("voice-agent-{pods}"));
        eventually(6 * SECOND, "the leader writes the new pod", || available(all[0]) == pods);
    }
    redis::cmd("DEL").arg("voice:leader:epoch").exec(&mut plain).unwrap();
    redis::cmd("LPUSH").arg("voice:leader:epoch").arg("x").exec(&mut plain).unwrap();
    kube.add("voice-agent-9");
    eventually(6 * SECOND, "the leader writes the new pod", || available(all[0]) == pods + 1);
    assert_eq!(all.iter().filter(|router| is_leader(router)).count(), 1);
}

#[test]
fn the_drain_command_waits_for_the_calls_of_its_pod() {
    let router = Router::start(&[("TIER_CONFIG", r#"{"gold": 1}"#), ("LOG_LEVEL", "error")]);
    router.allocate("CA1");
    let url = format!("http://{}", router.address);
    let drain = |wait: &str| {
        let settings = [("POD_NAME", "voice-agent-0"), ("SMART_ROUTER_URL", url.as_str())];
        let mut command = testkit::program(&settings);
        command.args(["drain", "--wait", wait]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let started = Instant::now();
    assert_eq!(drain("500ms").wait().unwrap().code(), Some(5), "a call is active");
    assert!(started.elapsed() >= SECOND / 2);
    let mut waiting = drain("20s");
    // A sleep, since an exit that must not happen has no event.
    thread::sleep(Duration::from_millis(300));
    assert!(waiting.try_wait().unwrap().is_none(), "the call is still active");
    assert_eq!(router.release("CA1").0, 200);
    assert!(waiting.wait().unwrap().success());
    let mut unknown = testkit::program(&[("POD_NAME", "unknown"), ("SMART_ROUTER_URL", &url)]);
    assert!(!unknown.arg("drain").output().unwrap().status.success());
}
