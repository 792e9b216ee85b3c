//! Overload: more requests than the capacity of the store.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    callers::{Caller, DEFAULT_WORKLOAD},
    deployment::Deployment,
    history::{Action, Event, Outcome},
    http,
};
use testkit::{dice::Dice, free_port, proxy::FaultProxy, redis::RedisServer};

/// Redis commands per second for each router.
const ROUTER_CAPACITY: u32 = 100;
/// Clients and their request interval: ten times the capacity of three routers. More clients
/// would be delayed by the scheduler of a busy machine.
const CLIENTS: usize = 100;
const REQUEST_INTERVAL: Duration = Duration::from_millis(33);
const FLOOD_TIME: Duration = Duration::from_secs(3);

pub(crate) fn flood(deployment: &Deployment, is_baseline: bool) {
    deployment.history.fault("too many requests");
    for router in &deployment.routers {
        router
            .redis_proxy
            .set_faults(|faults| faults.max_commands_per_second = Some(ROUTER_CAPACITY));
    }
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let mut caller = Caller {
                deployment,
                workload: DEFAULT_WORKLOAD,
                dice: Dice(number as u64),
                is_baseline,
                may_be_allocated: false,
            };
            scope.spawn(move || {
                let began = Instant::now();
                thread::sleep(REQUEST_INTERVAL * number as u32 / CLIENTS as u32);
                while began.elapsed() < FLOOD_TIME {
                    let sent_at = Instant::now();
                    let call = deployment.new_call();
                    if let Outcome::Allocated { pod } = caller.request_pod(&call, false) {
                        caller.release(&call, &pod);
                    }
                    thread::sleep(REQUEST_INTERVAL.saturating_sub(sent_at.elapsed()));
                }
            });
        }
    });
    // Renewals must succeed under overload.
    let expired = expired_leases(deployment);
    let error = (!expired.is_empty()).then(|| format!("expired leases: {expired:?}"));
    let action = Action::Probe { name: "renewals".into(), router: None, error };
    deployment.history.record(deployment.history.now(), action);
}

/// Renewed calls with an expired lease.
fn expired_leases(deployment: &Deployment) -> Vec<String> {
    let Some(mut redis) = deployment.store().connection() else { return Vec::new() };
    let events: Vec<(String, Vec<String>)> =
        redis::cmd("XRANGE").arg("voice:events").arg("-").arg("+").query(&mut redis).unwrap();
    let is_renewed = |call: &str| {
        let is_renewal = |event: &Event| matches!(&event.action, Action::Renew { call: other, .. } if other == call);
        deployment.history.events().iter().any(is_renewal)
    };
    let ended = events.iter().filter(|(_, it)| it[0] == "ended" && it[1].contains(" lease "));
    let calls = ended.filter_map(|(_, it)| it[1].split(' ').next().map(str::to_owned));
    calls.filter(|call| is_renewed(call)).collect()
}

/// Commands per second of the store, and calls per second of the load generator; a call is two
/// requests.
const STORE_CAPACITY: u32 = 1_000;
const CALL_RATE: u32 = 5_000;

/// Measures a load of ten times the store's capacity. Prints the results and returns whether
/// they are within their limits.
pub(crate) fn measure(seconds: u64) -> bool {
    let redis = RedisServer::start(&[]);
    let proxy = FaultProxy::to(redis.port);
    let port = free_port();
    let pods: Vec<String> = (0..500).map(|number| format!("pod-{number}=127.0.0.1:9")).collect();
    let settings = [
        ("HTTP_PORT", port.to_string()),
        ("METRICS_PORT", port.to_string()),
        ("HTTP_BIND", "127.0.0.1".into()),
        ("REDIS_URL", format!("redis://127.0.0.1:{}", proxy.port())),
        ("PODS", pods.join(",")),
        ("TIER_CONFIG", r#"{"gold": 500}"#.into()),
        ("VOICE_AGENT_BASE_URL", "wss://voice.example.com".into()),
        ("LOG_LEVEL", "error".into()),
    ];
    let mut router = Command::new(testkit::program_path());
    router.env_clear().envs(settings).stdout(Stdio::null());
    let mut router = router.spawn().expect("a router starts");
    let address = ([127, 0, 0, 1], port).into();
    let until = Instant::now() + Duration::from_secs(10);
    while !http::get(address, "/ready").is_ok_and(|response| response.status == 200) {
        assert!(Instant::now() < until, "the router is not ready");
        thread::sleep(Duration::from_millis(50));
    }
    let memory = |router: &Child| {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", router.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
        line.split_whitespace()
            .next()
            .and_then(|kilobytes| kilobytes.parse::<u64>().ok())
            .unwrap_or(0)
            >> 10
    };
    let normal = load(port, 200, 3);
    let before = memory(&router);
    proxy.set_faults(|faults| faults.max_commands_per_second = Some(STORE_CAPACITY));
    let flood = thread::spawn(move || load(port, CALL_RATE, seconds));
    let mut peak = before;
    while !flood.is_finished() {
        peak = peak.max(memory(&router));
        thread::sleep(Duration::from_millis(200));
    }
    let flood = flood.join().unwrap();
    proxy.heal();
    let after = load(port, 200, 3);
    let _ = router.kill();
    let _ = router.wait();
    println!(
        "{} s of {} requests/s to a store with a capacity of {STORE_CAPACITY}/s",
        seconds,
        2 * CALL_RATE
    );
    println!(
        "| | allocated calls | p50 / p99 / max ms | refused | p50 / p99 / max ms | other errors |\n| --- | --- | --- | --- | --- | --- |"
    );
    let (normal, flood, after) =
        (summarize("before", &normal), summarize("overload", &flood), summarize("after", &after));
    println!("memory: {before} MB before, {peak} MB at most");
    let problems = [
        (
            "the store capacity is not used",
            flood.allocated < u64::from(STORE_CAPACITY) * seconds / 4,
        ),
        ("successful allocations take too long", flood.allocate_p99 > 500.0),
        ("refusals take too long", flood.refuse_p99 > 500.0),
        ("memory grows", peak > before + 64),
        ("requests fail before the overload", normal.errors + normal.refused > 0),
        ("requests fail after the overload", after.errors + after.refused > 0),
    ];
    for (problem, _) in problems.iter().filter(|(_, is_problem)| *is_problem) {
        println!("FAILED: {problem}");
    }
    problems.iter().all(|(_, is_problem)| !is_problem)
}

struct LoadSummary {
    allocated: u64,
    /// The 99th percentiles (ms).
    allocate_p99: f64,
    refuse_p99: f64,
    refused: u64,
    /// Neither allocated nor refused, or two pods for one call.
    errors: u64,
}

fn summarize(name: &str, report: &Value) -> LoadSummary {
    let times = |what: &str| {
        let [p50, p99, max] =
            ["p50", "p99", "max"].map(|field| report[what][field].as_f64().unwrap());
        format!("{p50:.1} / {p99:.1} / {max:.1}")
    };
    let count = |what: &str| report[what]["count"].as_u64().unwrap();
    let errors = report["errors"].as_object().unwrap().iter();
    let errors: Vec<_> = errors.filter(|(kind, _)| !kind.ends_with(": refused")).collect();
    let shown: Vec<String> =
        errors.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
    println!(
        "| {name} | {} | {} | {} | {} | {} |",
        count("allocate"),
        times("allocate"),
        count("refused"),
        times("refused"),
        shown.join(", ")
    );
    LoadSummary {
        allocated: count("allocate"),
        allocate_p99: report["allocate"]["p99"].as_f64().unwrap(),
        refuse_p99: report["refused"]["p99"].as_f64().unwrap(),
        refused: count("refused"),
        errors: errors.iter().map(|(_, count)| count.as_u64().unwrap()).sum::<u64>()
            + report["violations"].as_u64().unwrap(),
    }
}

fn load(port: u16, rate: u32, seconds: u64) -> Value {
    let mut command = Command::new(testkit::program_path());
    command.args(["load", "--json", "--connections", "256"]);
    command.args(["--router", &format!("http://127.0.0.1:{port}"), "--rate", &rate.to_string()]);
    let output = command.args(["--duration", &format!("{seconds}s")]).output().expect("load runs");
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", String::from_utf8_lossy(&output.stderr)))
}
