//! Cells with media streams: callers open streams through several gateways to agents that the
//! harness runs as pods. Both sides record what they see.

mod agents;
mod callers;
mod cells;
mod check;
mod faults;
mod messages;
mod record;

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use telephony::Provider;
use tokio::runtime::Runtime;

pub(crate) use self::cells::CELLS;
use self::{agents::AgentPod, callers::Caller, faults::StreamFault, record::Recorder};
use super::{
    cell::{Broken, Cell},
    heartbeat::Heartbeat,
    history::{Event, Violation},
    http,
    router_process::RouterProcess,
    store::{Backend, BackendKind},
};
use testkit::{dice::Dice, free_port, provider::PUBLIC_URL, proxy::FaultProxy};

const GATEWAYS: usize = 3;
/// Maximum time until all streams have ended after the last fault.
const MAX_END_TIME: Duration = Duration::from_secs(40);

/// Callers, pods and the fault of a cell with streams.
pub(crate) struct Scenario {
    pub pods: usize,
    pub callers: usize,
    /// Shortest and longest call (ms).
    pub call_ms: (u64, u64),
    /// The same for a share of the calls (percent).
    pub long_ms: (u64, u64),
    pub long_share: usize,
    /// Calls begin with a webhook, and come back if their gateway dies.
    pub has_webhooks: bool,
    /// Every stream is opened a second time.
    pub opens_twice: bool,
    /// Callers stop reading and writing for this long (ms), and echoes are large.
    pub provider_pause_ms: Option<(u64, u64)>,
    /// Maximum time after the last fault until all pods are free.
    pub recovery_time: Duration,
    pub fault: fn(&StreamFault),
}

/// A router as a media gateway.
pub(crate) struct Gateway {
    pub process: RouterProcess,
    pub redis_proxy: FaultProxy,
    /// Callers use only gateways without a fault.
    pub is_usable: AtomicBool,
    /// Open streams of callers.
    pub streams: AtomicUsize,
}

/// The deployment of a run.
pub(crate) struct World {
    pub recorder: Arc<Recorder>,
    pub gateways: Vec<Gateway>,
    pub agents: Vec<Arc<AgentPod>>,
    pub store: Backend,
    pub scenario: &'static Scenario,
    pub is_finished: AtomicBool,
    calls: AtomicUsize,
}

impl World {
    fn new_call(&self) -> String {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let provider = Provider::ALL[number % Provider::ALL.len()];
        format!("call-{number}-{}", provider.as_str())
    }

    /// The number of streams that callers have at a gateway.
    fn open_streams(&self, gateway: usize) -> usize {
        self.gateways[gateway].streams.load(Ordering::Relaxed)
    }

    fn usable_gateways(&self) -> Vec<usize> {
        let is_usable = |number: &usize| self.gateways[*number].is_usable.load(Ordering::Relaxed);
        (0..GATEWAYS).filter(is_usable).collect()
    }

    /// Starts agents, Redis and gateways, and waits until they know all pods.
    fn start(
        cell: &'static Cell,
        scenario: &'static Scenario,
        seed: u64,
        broken: Option<Broken>,
        runtime: &Runtime,
    ) -> Result<Self, String> {
        let (recorder, store) =
            (Arc::new(Recorder::new()), Backend::start(BackendKind::Plain, true));
        let start = |number| AgentPod::start(number, recorder.clone(), seed);
        let agents: Vec<_> =
            (0..scenario.pods).map(|number| runtime.block_on(start(number))).collect();
        for agent in &agents {
            let is_large = scenario.provider_pause_ms.is_some();
            agent.behaviour.has_large_echoes.store(is_large, Ordering::Relaxed);
        }
        let pods: Vec<_> = agents.iter().map(|it| format!("{}={}", it.name, it.address)).collect();
        let gateways = (0..GATEWAYS)
            .map(|number| gateway(number, cell, broken, &store, pods.join(",")))
            .collect();
        let world = Self {
            recorder,
            gateways,
            agents,
            store,
            scenario,
            is_finished: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
        };
        world.gateways.iter().for_each(|gateway| gateway.process.start());
        let is_up = |gateway: &Gateway| {
            gateway.process.is_alive()
                && gateway.process.is_ready()
                && world.free_pods(gateway) == Some(scenario.pods as u64)
        };
        if wait_for(Duration::from_secs(60), || world.gateways.iter().all(is_up)) {
            Ok(world)
        } else {
            Err("the gateways did not become ready".into())
        }
    }

    fn free_pods(&self, gateway: &Gateway) -> Option<u64> {
        let answer = http::get(gateway.process.address, "/api/v1/status").ok()?;
        let status: serde_json::Value = serde_json::from_str(&answer.body).ok()?;
        status["pools"]["gold"]["available"].as_u64()
    }
}

fn wait_for(time: Duration, holds: impl Fn() -> bool) -> bool {
    let until = Instant::now() + time;
    while !holds() {
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}

fn gateway(
    number: usize,
    cell: &'static Cell,
    broken: Option<Broken>,
    store: &Backend,
    pods: String,
) -> Gateway {
    let (redis_proxy, port) = (FaultProxy::to(store.port()), free_port());
    let mut settings: Vec<(String, String)> = [
        ("TIER_CONFIG", json!({"gold": 99}).to_string()),
        ("PODS", pods),
        ("PUBLIC_URL", PUBLIC_URL.into()),
        ("REDIS_URL", format!("redis://127.0.0.1:{}", redis_proxy.port())),
        ("HTTP_BIND", "127.0.0.1".into()),
        ("HTTP_PORT", port.to_string()),
        ("METRICS_PORT", port.to_string()),
        ("POD_NAME", format!("gateway-{number}")),
        ("LOG_LEVEL", "off".into()),
        ("RETRY_ON_DISCONNECT", "9".into()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let mut more = cell.settings.to_vec();
    if let Some(Broken::Settings(broken)) = broken {
        more.extend(broken);
    }
    for (name, value) in more {
        settings.retain(|(other, _)| other != name);
        settings.push((name.into(), value.into()));
    }
    let broken = broken.map(|broken| (cell.name, broken));
    let process = RouterProcess::new(port, settings, broken);
    let (is_usable, streams) = (AtomicBool::new(true), AtomicUsize::new(0));
    Gateway { process, redis_proxy, is_usable, streams }
}

/// Runs a cell with streams. Returns the violations and the history.
pub(crate) fn run(
    cell: &'static Cell,
    scenario: &'static Scenario,
    seed: u64,
    broken: Option<Broken>,
) -> Result<(Vec<Violation>, Vec<Event>), String> {
    let heartbeat = Heartbeat::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let world = Arc::new(World::start(cell, scenario, seed, broken, &runtime)?);
    let mut callers: Vec<_> = (0..scenario.callers)
        .map(|number| {
            let dice = Dice(seed.wrapping_mul(1_000_003).wrapping_add(number as u64));
            runtime.spawn(Caller { world: world.clone(), dice, call_ms: None }.run())
        })
        .collect();
    let fault = StreamFault {
        world: &world,
        runtime: &runtime,
        dice: RefCell::new(Dice(seed ^ 0xFA17)),
        calls: RefCell::default(),
    };
    let done = catch_unwind(AssertUnwindSafe(|| (scenario.fault)(&fault)));
    fault.heal();
    callers.extend(fault.calls.take());
    let healed_at = Instant::now();
    world.is_finished.store(true, Ordering::Relaxed);
    let ended = runtime.block_on(async {
        tokio::time::timeout(MAX_END_TIME, futures_util::future::join_all(callers)).await
    });
    if let Err(panic) = done {
        resume_unwind(panic);
    }
    let mut violations = Vec::new();
    if ended.is_err() {
        violations.push(check::violation("S2", "", "a stream does not end".into()));
    }
    wait_for(Duration::from_secs(6), || !world.recorder.has_open_agent_streams());
    violations.extend(check::histories(&world.recorder));
    violations.extend(check::free_pods(&world, healed_at));
    world.recorder.write_history();
    let events = world.recorder.history.events();
    if let Some(stall) = heartbeat.longest_stall()
        && !violations.is_empty()
    {
        return Err(format!("the machine stalled for {stall:?}: {}", violations[0].message));
    }
    if let Some(path) = std::env::var_os("CHAOS_HISTORY") {
        let text: String = events.iter().map(|event| format!("{event}\n")).collect();
        std::fs::write(path, text).map_err(|error| error.to_string())?;
    }
    Ok((violations, events))
}
