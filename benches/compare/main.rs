//! Compares the router with the baselines in one run on one machine: `./bench.sh` or
//! `./bench.sh --quick`

mod plot;
mod results;

use std::{path::PathBuf, process::Command, time::Duration};

use redis::cmd;
use smart_router::tools::{
    load::{Arrivals, Format, Plan, Report, Target, run},
    provider_stream::Dialer,
};

use self::results::{print_head, print_row, ratios, redis_cost, upkeep, write_results};
use testkit::{
    Process,
    baseline::BaselineKind,
    eventually, free_port,
    measurement::{describe_machine, latency_proxy, redis_server, wait_for_port},
    scratch,
};

/// A measured system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    /// The answers name the address of a pod, as those of the baselines do.
    Router,
    /// The router with its media gateway: a call is provisional until its stream attaches.
    Gateway,
    /// The router without upkeep: it neither reconciles nor audits during the run.
    Calm,
    /// The router during upkeep: it reconciles and audits all the time.
    Upkeep,
    /// The router without upkeep while another replica starts on the same Redis.
    Start,
    Embedded,
    Baseline(BaselineKind),
}

impl System {
    fn short_name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Gateway => "gateway",
            Self::Calm => "calm",
            Self::Upkeep => "upkeep",
            Self::Start => "start",
            Self::Embedded => "embedded",
            Self::Baseline(BaselineKind::Pool) => "pool of 10",
            Self::Baseline(BaselineKind::Mux) => "many commands",
            Self::Baseline(BaselineKind::Bare) => "bare handler",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Gateway => "router with media gateway",
            Self::Calm => "router, calm",
            Self::Upkeep => "router, during upkeep",
            Self::Start => "router, while a replica starts",
            Self::Embedded => "router, embedded",
            Self::Baseline(BaselineKind::Pool) => "many commands, pool of 10",
            Self::Baseline(BaselineKind::Mux) => "many commands, one connection",
            Self::Baseline(BaselineKind::Bare) => "bare handler",
        }
    }
}

const ROUTER: System = System::Router;
const POOL: System = System::Baseline(BaselineKind::Pool);
const MUX: System = System::Baseline(BaselineKind::Mux);
const BARE: System = System::Baseline(BaselineKind::Bare);

/// A measured workload.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    exclusive: usize,
    shared: usize,
    connections: usize,
    /// Calls per second of an open loop; `None` is a closed loop.
    rate: Option<f64>,
    merchant: bool,
    /// One-way latency between the router and Redis.
    delay: Duration,
}

const SHARED_CAP: u32 = 200;

impl Case {
    const fn new(name: &'static str, exclusive: usize, shared: usize) -> Self {
        let (connections, delay) = (64, Duration::ZERO);
        Self { name, exclusive, shared, connections, rate: None, merchant: false, delay }
    }

    fn chain(&self) -> String {
        match (self.exclusive, self.shared) {
            (_, 0) => "gold".into(),
            (0, _) if self.name != "fallthrough" => format!("basic:{SHARED_CAP}"),
            _ => format!("gold basic:{SHARED_CAP}"),
        }
    }

    fn tiers(&self) -> String {
        let gold = format!(r#""gold": {{"target": {}}}"#, self.exclusive);
        let basic = format!(
            r#""basic": {{"type": "shared", "target": {}, "max_concurrent": {SHARED_CAP}}}"#,
            self.shared
        );
        let (tiers, chain) = match self.chain().as_str() {
            "gold" => (gold, r#""gold""#),
            chain if chain.starts_with("basic") => (basic, r#""basic""#),
            _ => (format!("{gold}, {basic}"), r#""gold", "basic""#),
        };
        format!(r#"{{"tiers": {{{tiers}}}, "default_chain": [{chain}]}}"#)
    }
}

struct Measurement {
    case: Case,
    system: System,
    report: Report,
    /// Per request (µs), including refused ones.
    router_cpu: f64,
    redis_cpu: f64,
    memory: f64,
}

impl Measurement {
    fn is_better_than(&self, other: &Self) -> bool {
        match self.case.rate {
            None => self.report.requests_per_second > other.report.requests_per_second,
            Some(_) => self.report.allocate.p99 < other.report.allocate.p99,
        }
    }
}

fn fill_pools(port: u16, case: &Case) {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    let mut connection = client.get_connection().unwrap();
    let gold: Vec<String> = (0..case.exclusive).map(|pod| format!("g-{pod}")).collect();
    for chunk in gold.chunks(1000) {
        cmd("SADD").arg("voice:pool:gold:available").arg(chunk).exec(&mut connection).unwrap();
    }
    let basic: Vec<(u32, String)> = (0..case.shared).map(|pod| (0, format!("b-{pod}"))).collect();
    for chunk in basic.chunks(1000) {
        cmd("ZADD").arg("voice:pool:basic:available").arg(chunk).exec(&mut connection).unwrap();
    }
}

/// A list with as many pods as the baselines have in their pools; there are fewer simulated agents.
fn pod_list(case: &Case) -> PathBuf {
    let pods = (0..case.exclusive + case.shared).map(|pod| format!("pod-{pod}=127.0.0.1:9\n"));
    let path = scratch().join("pods");
    std::fs::write(&path, pods.collect::<String>()).unwrap();
    path
}

fn start(case: &Case, system: System, redis: u16) -> (Process, u16) {
    let port = free_port();
    let url = format!("redis://127.0.0.1:{redis}");
    let mut command = match system {
        System::Baseline(kind) => {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let kind = format!("{kind:?}").to_lowercase();
            command.args(["serve", &kind, &port.to_string(), &url, &case.chain()]);
            command
        }
        _ => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
            let port = port.to_string();
            command
                .env_clear()
                .env("HTTP_BIND", "127.0.0.1")
                .env("PODS_FILE", pod_list(case))
                .env("HTTP_PORT", &port)
                .env("METRICS_PORT", &port)
                .env("LOG_FORMAT", "json")
                .env("TIER_CONFIG", case.tiers());
            if system != System::Embedded {
                command.env("REDIS_URL", url);
            }
            if !matches!(system, System::Gateway | System::Embedded) {
                command.env("VOICE_AGENT_BASE_URL", "wss://voice.example.com");
            }
            if let System::Calm | System::Upkeep | System::Start = system {
                let interval = if system == System::Upkeep { "1s" } else { "1h" };
                command.env("RECONCILE_INTERVAL", interval).env("CLEANUP_INTERVAL", interval);
            }
            command
        }
    };
    let process = Process::start(&mut command);
    wait_for_port(port);
    (process, port)
}

/// Waits until the store has all pods of a case.
fn wait_for_pods(case: &Case, connection: &mut redis::Connection) {
    eventually(Duration::from_secs(30), "the store has all pods", || {
        let count = |tier| {
            let key = format!("voice:pool:{tier}:assigned");
            cmd("SCARD").arg(key).query::<usize>(connection).unwrap()
        };
        ["gold", "basic"].map(count).iter().sum::<usize>() == case.exclusive + case.shared
    });
}

/// Time in which an idle router audits 50,000 pods.
const FIRST_AUDIT: Duration = Duration::from_secs(30);

/// A running system with its own Redis server.
struct RunningSystem {
    case: Case,
    system: System,
    process: Process,
    port: u16,
    redis: Process,
    /// Where the system connects to Redis.
    endpoint: u16,
}

impl RunningSystem {
    async fn start(case: Case, system: System) -> Self {
        let (redis, redis_port) = redis_server();
        if matches!(system, System::Baseline(_)) {
            fill_pools(redis_port, &case);
        }
        let endpoint = match case.delay.is_zero() {
            true => redis_port,
            false => latency_proxy(redis_port, case.delay),
        };
        let (process, port) = start(&case, system, endpoint);
        if !matches!(system, System::Embedded | System::Baseline(_)) {
            let client = redis::Client::open(format!("redis://127.0.0.1:{redis_port}")).unwrap();
            let mut connection = client.get_connection().unwrap();
            wait_for_pods(&case, &mut connection);
            // Ends the re-registration window, in which a release does more work.
            cmd("HDEL").arg("voice:tiers").arg(":trusting_until").exec(&mut connection).unwrap();
        }
        // The first audit has to be over: it may take its whole interval.
        match system {
            System::Upkeep => {}
            System::Calm | System::Start => std::thread::sleep(FIRST_AUDIT),
            _ => redis.wait_until_idle(),
        }
        Self { case, system, process, port, redis, endpoint }
    }

    fn set_running(&self, is_running: bool) {
        self.redis.set_running(is_running);
        self.process.set_running(is_running);
    }

    async fn load(&self, seconds: f64) -> Report {
        let Case { merchant, rate, connections, .. } = self.case;
        let arrivals = match rate {
            None => Arrivals::Closed,
            Some(per_second) => Arrivals::Open { per_second },
        };
        let url = format!("http://127.0.0.1:{}", self.port);
        let plan = Plan {
            target: Target::parse(&url, None, Dialer::default()).await.unwrap(),
            format: Format::Json,
            merchant: merchant.then(|| "acme".to_owned()),
            arrivals,
            connections,
            hold: Duration::ZERO,
            media: None,
            clips: Vec::new(),
            duration: Duration::from_secs_f64(seconds),
            calls: None,
            repeat: 0,
        };
        run(plan, |_| {}).await.unwrap()
    }

    async fn measure(&self, seconds: f64) -> Measurement {
        let Self { case, system, .. } = *self;
        let before = (self.process.cpu_time(), self.redis.cpu_time());
        let report = self.load(seconds).await;
        let after = (self.process.cpu_time(), self.redis.cpu_time());
        assert_eq!(report.violations, 0, "{} {}: {:?}", case.name, system.name(), report.shown);
        // A system that cannot keep up with the arrivals runs out of pods; the table shows it.
        let may_fail = case.rate.is_some() || matches!(system, System::Baseline(_));
        assert!(may_fail || report.errors.is_empty(), "{} {:?}", case.name, report.errors);
        let refused: u64 = report.errors.values().sum();
        let requests = (report.allocate.count + report.release.count + refused) as f64;
        let per_request = |used: Duration| used.as_secs_f64() * 1e6 / requests;
        Measurement {
            case,
            system,
            router_cpu: per_request(after.0 - before.0),
            redis_cpu: per_request(after.1 - before.1),
            memory: self.process.memory_mb(),
            report,
        }
    }
}

/// Measures systems in turns, so that other load on the machine affects all of them; the best
/// turn of each counts. The other systems are stopped during a turn.
async fn measure_in_turns(
    case: Case,
    systems: &[System],
    turns: usize,
    seconds: f64,
) -> Vec<Measurement> {
    let mut systems_under_test = Vec::new();
    for system in systems {
        let running = RunningSystem::start(case, *system).await;
        running.set_running(false);
        systems_under_test.push((running, None::<Measurement>));
    }
    for _ in 0..turns {
        for (running, best) in &mut systems_under_test {
            running.set_running(true);
            running.load(0.5).await;
            let measured = running.measure(seconds).await;
            running.set_running(false);
            if best.as_ref().is_none_or(|best| measured.is_better_than(best)) {
                *best = Some(measured);
            }
        }
    }
    let all: Vec<Measurement> =
        systems_under_test.into_iter().filter_map(|(_, best)| best).collect();
    all.iter().for_each(print_row);
    all
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if let ["serve", kind, port, url, chain] =
        args.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        let address = ([127, 0, 0, 1], port.parse().unwrap()).into();
        return runtime.block_on(testkit::baseline::serve(
            kind.parse().unwrap(),
            address,
            url,
            chain,
        ));
    }
    // `cargo bench` adds its own flag.
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    runtime.block_on(compare(has("--quick"), has("--write")));
}

async fn compare(is_quick: bool, write: bool) {
    assert!(!(is_quick && write), "--write needs the full run");
    let (turns, seconds) = if is_quick { (2, 1.5) } else { (3, 2.0) };
    let machine = describe_machine();
    println!("{machine}\n");
    print_head();
    let one = Case { connections: 1, merchant: true, ..Case::new("conn1", 1_000, 0) };
    let exclusive = Case::new("exclusive", 1_000, 0);
    let ratio_cases = [
        (exclusive, vec![ROUTER, System::Gateway, POOL, MUX, BARE]),
        (Case::new("fallthrough", 0, 1_000), vec![ROUTER, POOL]),
        (Case::new("shared5k", 0, 5_000), vec![ROUTER, POOL]),
        (Case::new("shared50k", 0, 50_000), vec![ROUTER, POOL]),
        (one, vec![ROUTER, MUX]),
        (Case { name: "rtt1ms", delay: Duration::from_micros(500), ..one }, vec![ROUTER, MUX]),
    ];
    // Enough pods for the calls that accumulate during a stall of the machine.
    let at =
        |name, rate: f64| Case { rate: Some(rate), connections: 256, ..Case::new(name, 5_000, 0) };
    let more_cases = [
        (exclusive, vec![System::Embedded]),
        (Case::new("shared50", 0, 50), vec![ROUTER, POOL]),
        (Case::new("shared500", 0, 500), vec![ROUTER, POOL]),
        (Case { name: "16 connections", connections: 16, ..exclusive }, vec![ROUTER, POOL, BARE]),
        (Case { name: "256 connections", connections: 256, ..exclusive }, vec![ROUTER, POOL, BARE]),
        (at("250 calls/s", 250.0), vec![ROUTER, POOL, BARE]),
        (at("1,000 calls/s", 1_000.0), vec![ROUTER, POOL, BARE]),
        (at("2,000 calls/s", 2_000.0), vec![ROUTER, POOL, BARE]),
        (at("4,000 calls/s", 4_000.0), vec![ROUTER, POOL, BARE]),
        (at("8,000 calls/s", 8_000.0), vec![ROUTER, BARE]),
        (at("12,000 calls/s", 12_000.0), vec![ROUTER, BARE]),
    ];
    let upkeep_case = Case::new("upkeep50k", 0, 50_000);
    let mut all = Vec::new();
    let cases = ratio_cases.into_iter().chain(more_cases.into_iter().filter(|_| !is_quick));
    for (case, systems) in cases {
        all.extend(measure_in_turns(case, &systems, turns, seconds).await);
    }
    let upkeep_seconds = if is_quick { 6.0 } else { 20.0 };
    for system in [System::Calm, System::Upkeep, System::Start] {
        // Not in turns: upkeep cannot be stopped without an outage.
        let running = RunningSystem::start(upkeep_case, system).await;
        running.load(0.5).await;
        let replica =
            (system == System::Start).then(|| start(&upkeep_case, ROUTER, running.endpoint));
        all.push(running.measure(upkeep_seconds).await);
        print_row(all.last().expect("measured"));
        drop(replica);
    }
    if write {
        write_results(&machine, &all);
    }
    println!("\n{}\n{}\n{}", redis_cost(&all), upkeep(&all), ratios(&all));
}
