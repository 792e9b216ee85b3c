//! The router and what it is compared with, in one run on one machine:
//! `./bench.sh`, or `./bench.sh --quick`

mod plot;
mod results;

use std::{process::Command, time::Duration};

use redis::cmd;
use smart_router::tools::load::{Arrivals, Format, Plan, Report, Target, run};

use self::results::{print_head, print_row, ratios, redis_cost, write_down};
use testkit::{
    Process,
    baseline::Kind,
    free_port,
    measurement::{delayed, machine, redis_server, wait_for},
};

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Router,
    Embedded,
    Baseline(Kind),
}

impl System {
    fn short_name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Embedded => "embedded",
            Self::Baseline(Kind::Pool) => "pool of 10",
            Self::Baseline(Kind::Mux) => "many commands",
            Self::Baseline(Kind::Bare) => "bare handler",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Embedded => "router, embedded",
            Self::Baseline(Kind::Pool) => "many commands, pool of 10",
            Self::Baseline(Kind::Mux) => "many commands, one connection",
            Self::Baseline(Kind::Bare) => "bare handler",
        }
    }
}

const ROUTER: System = System::Router;
const POOL: System = System::Baseline(Kind::Pool);
const MUX: System = System::Baseline(Kind::Mux);
const BARE: System = System::Baseline(Kind::Bare);

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    exclusive: usize,
    shared: usize,
    connections: usize,
    /// Calls a second; closed loop without.
    rate: Option<f64>,
    merchant: bool,
    /// One way between the router and Redis.
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

struct Measured {
    case: Case,
    system: System,
    report: Report,
    /// Per request (µs), refused ones included.
    router_cpu: f64,
    redis_cpu: f64,
    memory: f64,
}

impl Measured {
    fn is_better_than(&self, other: &Self) -> bool {
        match self.case.rate {
            None => self.report.requests_per_second > other.report.requests_per_second,
            Some(_) => self.report.allocate.p99 < other.report.allocate.p99,
        }
    }
}

fn fill(port: u16, case: &Case) {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    let mut connection = client.get_connection().unwrap();
    let gold: Vec<String> = (0..case.exclusive).map(|pod| format!("g-{pod}")).collect();
    for some in gold.chunks(1000) {
        cmd("SADD").arg("voice:pool:gold:available").arg(some).exec(&mut connection).unwrap();
    }
    let basic: Vec<(u32, String)> = (0..case.shared).map(|pod| (0, format!("b-{pod}"))).collect();
    for some in basic.chunks(1000) {
        cmd("ZADD").arg("voice:pool:basic:available").arg(some).exec(&mut connection).unwrap();
    }
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
        System::Router | System::Embedded => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_smart-router"));
            let port = port.to_string();
            command
                .env_clear()
                .env("HTTP_PORT", &port)
                .env("METRICS_PORT", &port)
                .env("LOG_FORMAT", "json")
                .env("TIER_CONFIG", case.tiers());
            if system == System::Router {
                command.env("REDIS_URL", url);
            }
            command
        }
    };
    let process = Process::start(&mut command);
    wait_for(port);
    (process, port)
}

/// A system that runs, with a Redis of its own.
struct Contender {
    case: Case,
    system: System,
    process: Process,
    port: u16,
    redis: Process,
}

impl Contender {
    async fn start(case: Case, system: System) -> Self {
        let (redis, redis_port) = redis_server();
        if matches!(system, System::Baseline(_)) {
            fill(redis_port, &case);
        }
        let near = match case.delay.is_zero() {
            true => redis_port,
            false => delayed(redis_port, case.delay),
        };
        let (process, port) = start(&case, system, near);
        redis.wait_until_idle();
        if system == System::Router {
            // For a while after an empty start a release does a little more; not so here.
            let client = redis::Client::open(format!("redis://127.0.0.1:{redis_port}")).unwrap();
            let mut connection = client.get_connection().unwrap();
            cmd("HDEL").arg("voice:tiers").arg(":trusting_until").exec(&mut connection).unwrap();
        }
        Self { case, system, process, port, redis }
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
            target: Target::parse(&url, None).await.unwrap(),
            format: Format::Json,
            merchant: merchant.then(|| "acme".to_owned()),
            arrivals,
            connections,
            hold: Duration::ZERO,
            duration: Duration::from_secs_f64(seconds),
            calls: None,
            repeat: 0,
        };
        run(plan, |_| {}).await.unwrap()
    }

    async fn measure(&self, seconds: f64) -> Measured {
        let Self { case, system, .. } = *self;
        let before = (self.process.cpu(), self.redis.cpu());
        let report = self.load(seconds).await;
        let after = (self.process.cpu(), self.redis.cpu());
        assert_eq!(report.violations, 0, "{} {}: {:?}", case.name, system.name(), report.shown);
        // One that can't keep up with arrivals runs out of pods; the table says so.
        let may_fail = case.rate.is_some() || matches!(system, System::Baseline(_));
        assert!(may_fail || report.errors.is_empty(), "{} {:?}", case.name, report.errors);
        let refused: u64 = report.errors.values().sum();
        let requests = (report.allocate.count + report.release.count + refused) as f64;
        let per_request = |used: Duration| used.as_secs_f64() * 1e6 / requests;
        Measured {
            case,
            system,
            router_cpu: per_request(after.0 - before.0),
            redis_cpu: per_request(after.1 - before.1),
            memory: self.process.memory(),
            report,
        }
    }
}

/// Measures systems in turns, so that whatever else the machine does falls on all of
/// them; the best turn of each counts. Each has the machine to itself in its turn.
async fn contest(case: Case, systems: &[System], turns: usize, seconds: f64) -> Vec<Measured> {
    let mut contenders = Vec::new();
    for system in systems {
        let contender = Contender::start(case, *system).await;
        contender.set_running(false);
        contenders.push((contender, None::<Measured>));
    }
    for _ in 0..turns {
        for (contender, best) in &mut contenders {
            contender.set_running(true);
            contender.load(0.5).await;
            let measured = contender.measure(seconds).await;
            contender.set_running(false);
            if best.as_ref().is_none_or(|best| measured.is_better_than(best)) {
                *best = Some(measured);
            }
        }
    }
    let all: Vec<Measured> = contenders.into_iter().filter_map(|(_, best)| best).collect();
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
    // `cargo bench` passes a flag of its own.
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    runtime.block_on(compare(has("--quick"), has("--write")));
}

async fn compare(quick: bool, write: bool) {
    assert!(!(quick && write), "what is written down is the whole run");
    let (turns, seconds) = if quick { (2, 1.5) } else { (3, 2.0) };
    let machine = machine();
    println!("{machine}\n");
    print_head();
    let one = Case { connections: 1, merchant: true, ..Case::new("conn1", 1_000, 0) };
    let exclusive = Case::new("exclusive", 1_000, 0);
    let ratio_cases = [
        (exclusive, vec![ROUTER, POOL, MUX, BARE]),
        (Case::new("fallthrough", 0, 1_000), vec![ROUTER, POOL]),
        (Case::new("shared5k", 0, 5_000), vec![ROUTER, POOL]),
        (Case::new("shared50k", 0, 50_000), vec![ROUTER, POOL]),
        (one, vec![ROUTER, MUX]),
        (Case { name: "rtt1ms", delay: Duration::from_micros(500), ..one }, vec![ROUTER, MUX]),
    ];
    // Enough pods for calls that pile up while a machine does something else.
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
    let mut all = Vec::new();
    let cases = ratio_cases.into_iter().chain(more_cases.into_iter().filter(|_| !quick));
    for (case, systems) in cases {
        all.extend(contest(case, &systems, turns, seconds).await);
    }
    if write {
        write_down(&machine, &all);
    }
    println!("\n{}\n{}", redis_cost(&all), ratios(&all));
}
