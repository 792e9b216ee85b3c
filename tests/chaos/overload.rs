//! More requests than the store can take.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    callers::{Caller, USUAL},
    deployment::Deployment,
    history::{Event, Outcome, What},
    http,
};
use testkit::{dice::Dice, free_port, proxy::Proxy, redis::RedisServer};

/// What the store takes of each router, per second.
const CAP: u32 = 100;
/// Who asks, and how often each: ten times as much as three routers can do. They are so few that
/// none waits long for a machine that has other work.
const ASKING: usize = 100;
const INTERVAL: Duration = Duration::from_millis(33);
const TIME: Duration = Duration::from_secs(3);

pub(crate) fn flood(deployment: &Deployment, is_plain: bool) {
    deployment.history.fault("too many requests");
    for seat in &deployment.seats {
        seat.to_redis.set(|faults| faults.cap = Some(CAP));
    }
    thread::scope(|scope| {
        for number in 0..ASKING {
            let mut caller = Caller {
                deployment,
                style: USUAL,
                dice: Dice(number as u64),
                is_plain,
                is_unsure: false,
            };
            scope.spawn(move || {
                let began = Instant::now();
                thread::sleep(INTERVAL * number as u32 / ASKING as u32);
                while began.elapsed() < TIME {
                    let asked = Instant::now();
                    let call = deployment.new_call();
                    if let Outcome::Given { pod } = caller.ask(&call, false) {
                        caller.release(&call, &pod);
                    }
                    thread::sleep(INTERVAL.saturating_sub(asked.elapsed()));
                }
            });
        }
    });
    // Those who have a pod and say so keep it, however many want one.
    let lapsed = lapsed(deployment);
    let wrong = (!lapsed.is_empty()).then(|| format!("their leases ended: {lapsed:?}"));
    let what = What::Other { what: "agents who renew".into(), router: None, wrong };
    deployment.history.note(deployment.history.now(), what);
}

/// Calls whose leases have ended although their agents renewed them.
fn lapsed(deployment: &Deployment) -> Vec<String> {
    let Some(mut redis) = deployment.store().connection() else { return Vec::new() };
    let told: Vec<(String, Vec<String>)> =
        redis::cmd("XRANGE").arg("voice:events").arg("-").arg("+").query(&mut redis).unwrap();
    let is_renewed = |call: &str| {
        let is_that =
            |event: &Event| matches!(&event.what, What::Renew { call: other, .. } if other == call);
        deployment.history.events().iter().any(is_that)
    };
    let ended = told.iter().filter(|(_, it)| it[0] == "ended" && it[1].contains(" lease "));
    let calls = ended.filter_map(|(_, it)| it[1].split(' ').next().map(str::to_owned));
    calls.filter(|call| is_renewed(call)).collect()
}

/// What the store takes in the long test, and how many calls come; each is two requests.
const STORE: u32 = 1_000;
const CALLS: u32 = 5_000;

/// Ten times what the store takes, for so long, and what came of it: figures, and whether
/// they are in order.
pub(crate) fn measure(seconds: u64) -> bool {
    let redis = RedisServer::start(&[]);
    let proxy = Proxy::to(redis.port);
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
    while !http::get(address, "/ready").is_ok_and(|answer| answer.status == 200) {
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
    let calm = load(port, 200, 3);
    let before = memory(&router);
    proxy.set(|faults| faults.cap = Some(STORE));
    let flood = thread::spawn(move || load(port, CALLS, seconds));
    let mut most = before;
    while !flood.is_finished() {
        most = most.max(memory(&router));
        thread::sleep(Duration::from_millis(200));
    }
    let flood = flood.join().unwrap();
    proxy.heal();
    let after = load(port, 200, 3);
    let _ = router.kill();
    let _ = router.wait();
    println!("{} s of {} requests/s to a store that takes {STORE}/s", seconds, 2 * CALLS);
    println!(
        "| | calls given a pod | p50 / p99 / max ms | refused | p50 / p99 / max ms | other errors |\n| --- | --- | --- | --- | --- | --- |"
    );
    let (calm, flood, after) =
        (show("before", &calm), show("overload", &flood), show("after", &after));
    println!("memory: {before} MB before, {most} MB at most");
    let wrong = [
        ("the store is not made use of", flood.given < u64::from(STORE) * seconds / 4),
        ("who is given a pod waits too long", flood.wait > 500.0),
        ("refusals come late", flood.refusal > 500.0),
        ("memory grows", most > before + 64),
        ("it goes wrong without overload, too", calm.errors + calm.refused > 0),
        ("it is not over when it is over", after.errors + after.refused > 0),
    ];
    for (what, _) in wrong.iter().filter(|(_, is_wrong)| *is_wrong) {
        println!("WRONG: {what}");
    }
    wrong.iter().all(|(_, is_wrong)| !is_wrong)
}

/// What a load came to.
struct Figures {
    given: u64,
    /// The 99th percentiles (ms).
    wait: f64,
    refusal: f64,
    refused: u64,
    /// Neither given nor refused, or two pods for one call.
    errors: u64,
}

fn show(name: &str, report: &Value) -> Figures {
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
    Figures {
        given: count("allocate"),
        wait: report["allocate"]["p99"].as_f64().unwrap(),
        refusal: report["refused"]["p99"].as_f64().unwrap(),
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
