//! Measures the media gateway beside nginx in one run on one machine: `./bench.sh --media` or
//! `./bench.sh --media --quick`. The system under test has one core; the clients and the agents,
//! which are this process, have another.

mod agents;
mod client;
mod failover;
mod frames;
mod load;
mod results;
mod set_up;
mod system;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use testkit::{
    certificates::Authority, echo_agent::run_agent_process,
    measurement::describe_machine_with_nginx,
};

use self::{
    client::{Endpoint, tls_connector},
    frames::MEDIA_LEN,
    load::{Period, Relayed, close_streams, open_streams, relay},
    results::{Figures, Turn, print_head, print_medians, print_turn},
    system::{RunningSystem, Setting, System, Tls},
};

/// Streams that are opened together for the memory measurement, and how often.
const IDLE_STREAMS: usize = 500;
const IDLE_BATCHES: usize = 4;
/// Fewest open files. Clients and agents have two per stream; the gateway derives its limit of
/// streams from this number, beside its connections.
const OPEN_FILES: usize = 16_384;
/// Below this, a saturated machine is not worth measuring.
const MIN_CALLS: usize = 100;

/// Plaintext, or TLS between client and system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    Tls,
}

impl Mode {
    pub(crate) const ALL: [Self; 2] = [Self::Plain, Self::Tls];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Tls => "TLS",
        }
    }

    fn calls(self) -> usize {
        match self {
            Self::Plain => 600,
            Self::Tls => 450,
        }
    }
}

/// Size of a run.
struct Plan {
    turns: usize,
    period: Period,
    /// Streams of the set-up measurement.
    set_ups: [usize; 2],
    /// Agents that are killed.
    kills: usize,
}

impl Plan {
    fn new(is_quick: bool) -> Self {
        let seconds = Duration::from_secs_f64;
        match is_quick {
            true => Self {
                turns: 1,
                period: Period { warm_up: seconds(0.5), measured: seconds(3.0) },
                set_ups: [10_000, 3_000],
                kills: 50,
            },
            false => Self {
                turns: 3,
                period: Period { warm_up: seconds(1.0), measured: seconds(8.0) },
                set_ups: [20_000, 6_000],
                kills: 200,
            },
        }
    }

    fn set_ups(&self, mode: Mode) -> usize {
        self.set_ups[mode as usize]
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args == [failover::AGENT] {
        return run_agent_process();
    }
    let mut is_quick = false;
    for arg in &args {
        match arg.as_str() {
            // `cargo bench` adds its own flag.
            "--bench" => {}
            "--quick" => is_quick = true,
            other => {
                eprintln!("unknown option {other}; see ./bench.sh --help");
                std::process::exit(2);
            }
        }
    }
    let machine = describe_machine_with_nginx();
    let [own_core, core] = two_cores();
    check_open_files();
    pin_this_process(own_core);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let certificate = Authority::create().sign_ecdsa("media");
        let tls = Tls { certificate, connector: tls_connector() };
        let setting = Setting { core, agents: agents::start().await, tls };
        run(&machine, &setting, &Plan::new(is_quick)).await;
    });
}

/// Two cores that this process may use.
fn two_cores() -> [usize; 2] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.expect("the kernel lists cores").trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    });
    let mut cores = ranges.flatten();
    match (cores.next(), cores.next()) {
        (Some(first), Some(second)) => [first, second],
        _ => panic!("this benchmark needs two cores"),
    }
}

fn pin_this_process(core: usize) {
    let (core, pid) = (core.to_string(), std::process::id().to_string());
    let pinned = Command::new("taskset").args(["--cpu-list", "--pid", &core, &pid]).output();
    assert!(pinned.is_ok_and(|it| it.status.success()), "taskset pins this process");
}

fn check_open_files() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = files.and_then(|limits| limits.split_whitespace().next()).unwrap_or("unlimited");
    let is_enough = soft.parse::<usize>().map_or(true, |limit| limit >= OPEN_FILES);
    assert!(is_enough, "{soft} open files: at least {OPEN_FILES} are needed (ulimit -n)");
}

async fn run(machine: &str, setting: &Setting, plan: &Plan) {
    println!("{machine}");
    let mut calls = Vec::new();
    for mode in Mode::ALL {
        calls.push(find_load(setting, mode).await);
    }
    let Period { measured, .. } = plan.period;
    println!(
        "{} calls plain, {} with TLS; {MEDIA_LEN}-byte frames, 50 a second each way, for \
         {measured:?}; alternating turns: {}\n",
        calls[0], calls[1], plan.turns
    );
    print_head();
    let mut turns = Vec::new();
    for turn in 1..=plan.turns {
        for (mode, calls) in Mode::ALL.into_iter().zip(&calls) {
            let direct = direct(setting, *calls, plan.period).await;
            for system in System::ALL {
                let measured = measure(setting, plan, system, mode, *calls, &direct).await;
                print_turn(turn, &measured);
                turns.push(measured);
            }
        }
    }
    let gaps = failover::measure(setting.core, plan.kills).await;
    print_medians(&turns, &gaps);
}

/// The load that both systems carry: the usual one, or less on a slower machine.
async fn find_load(setting: &Setting, mode: Mode) -> usize {
    let mut calls = mode.calls();
    for system in System::ALL {
        while calls > MIN_CALLS
            && let Some(why) = saturation(setting, system, mode, calls).await
        {
            let fewer = calls * 3 / 4;
            let (system, mode) = (system.name(), mode.name());
            println!("{system} with {calls} calls, {mode}: {why}; both systems get {fewer} calls");
            calls = fewer;
        }
    }
    calls
}

/// Why a system cannot carry a load. Other work on the machine may disturb one try.
async fn saturation(setting: &Setting, system: System, mode: Mode, calls: usize) -> Option<String> {
    let period =
        Period { warm_up: Duration::from_millis(500), measured: Duration::from_millis(1500) };
    let mut found = None;
    for _ in 0..2 {
        let mut running = RunningSystem::start(system, setting, mode == Mode::Tls);
        found = load(&mut running, calls, period).await.saturation();
        found.as_ref()?;
    }
    found
}

async fn load(running: &mut RunningSystem, calls: usize, period: Period) -> Relayed {
    let paths = running.paths(calls).await;
    let streams = open_streams(&running.endpoint, &paths).await.expect("streams open");
    relay(streams, period, || running.cpu_time()).await
}

/// The same load without a system between clients and agents.
async fn direct(setting: &Setting, calls: usize, period: Period) -> Relayed {
    let mut streams = Vec::with_capacity(calls);
    for (index, agent) in setting.agents.iter().enumerate() {
        let share = (index..calls).step_by(setting.agents.len());
        let paths: Vec<String> = share.map(|call| format!("/stream/{call}")).collect();
        streams.extend(open_streams(&Endpoint::plain(*agent), &paths).await.expect("streams open"));
    }
    relay(streams, period, || Duration::ZERO).await
}

/// One turn of one system, in a new process.
async fn measure(
    setting: &Setting,
    plan: &Plan,
    system: System,
    mode: Mode,
    calls: usize,
    direct: &Relayed,
) -> Turn {
    let mut running = RunningSystem::start(system, setting, mode == Mode::Tls);
    running.settle().await;
    let [reused_kib, kib] = memory_per_stream(&mut running).await;
    running.settle().await;
    let relayed = load(&mut running, calls, plan.period).await;
    running.settle().await;
    let set_ups = set_ups(&mut running, plan.set_ups(mode)).await;
    let figures = Figures {
        cpu_per_frame: relayed.cpu_per_frame(),
        core_share: relayed.core_share(),
        p99: relayed.p99_ms(),
        direct_p99: direct.p99_ms(),
        added_p99: relayed.p99_ms() - direct.p99_ms(),
        kib,
        reused_kib,
        set_ups: set_ups.per_second,
        set_up_core_share: set_ups.core_share,
        set_up_cpu: set_ups.core_share * 1e6 / set_ups.per_second,
    };
    let failed = (set_ups.failed > 0).then(|| format!("{} set-ups failed", set_ups.failed));
    let remarks = [relayed.saturation(), failed].into_iter().flatten().collect();
    Turn { system, mode, figures, remarks }
}

/// Resident memory per idle stream, in KiB, after as many as in a batch have been opened and
/// closed: of the first batch, and of all. The first figure is low if the allocator has kept the
/// memory of closed streams; the others need new memory.
async fn memory_per_stream(running: &mut RunningSystem) -> [f64; 2] {
    let mut paths = Vec::new();
    for _ in 0..=IDLE_BATCHES {
        paths.push(running.paths(IDLE_STREAMS).await);
    }
    running.settle().await;
    let (mut resident, mut streams) = (Vec::new(), Vec::new());
    for paths in &paths {
        let open = open_streams(&running.endpoint, paths).await.expect("streams open");
        running.settle().await;
        match resident.is_empty() {
            true => close_streams(open).await,
            false => streams.push(open),
        }
        running.settle().await;
        resident.push(running.resident_kib());
    }
    for open in streams {
        close_streams(open).await;
    }
    let per_stream =
        |batches: usize| (resident[batches] - resident[0]) / (batches * IDLE_STREAMS) as f64;
    [1, IDLE_BATCHES].map(per_stream)
}

struct SetUps {
    per_second: f64,
    /// Share of its core that the system used.
    core_share: f64,
    failed: usize,
}

async fn set_ups(running: &mut RunningSystem, count: usize) -> SetUps {
    let paths = running.paths(count).await;
    running.settle().await;
    let (cpu, started) = (running.cpu_time(), Instant::now());
    let failed = set_up::open_and_close(&running.endpoint, paths).await;
    let elapsed = started.elapsed().as_secs_f64();
    let cpu = (running.cpu_time() - cpu).as_secs_f64();
    let per_second = (count - failed) as f64 / elapsed;
    SetUps { per_second, core_share: cpu / elapsed, failed }
}
