//! Failover: agents are killed in mid-call, and the gap is measured until the next agent's audio
//! reaches the provider.

use std::{
    fmt,
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde_json::json;
use smart_router::tools::provider_stream::{Dialer, Echo, MediaFormat, ProviderStream};
use telephony::Provider;
use testkit::{dice::Dice, echo_agent::AgentProcess};

use super::{client::Endpoint, system::start_router};

/// The option with which this program is an agent.
pub(crate) const AGENT: &str = "--agent";

const CALLS: usize = 50;
/// A quarter more than calls, because one pod in five may be quarantined, and some that are free.
const PODS: usize = CALLS * 5 / 4 + 8;
/// `RETRY_ON_DISCONNECT`.
const RETRIES: usize = 9;
/// Longest pause between two kills in milliseconds: a kill hits any moment between two frames.
const MAX_PAUSE: u64 = 100;
/// Longest gap that is waited for.
const GAP_TIMEOUT: Duration = Duration::from_secs(30);
/// Longer than any run.
const CALL_LENGTH: Duration = Duration::from_secs(3600);

/// Gaps of the failovers.
pub(crate) struct Gaps(Histogram<u64>);

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |micros: u64| micros as f64 / 1e3;
        write!(
            f,
            "failover: gap p50 {:.0} ms, p99 {:.0} ms, max {:.0} ms ({} kills, {CALLS} calls)",
            ms(self.0.value_at_quantile(0.5)),
            ms(self.0.value_at_quantile(0.99)),
            ms(self.0.max()),
            self.0.len()
        )
    }
}

/// A call in progress.
#[derive(Default)]
struct Call {
    kills: usize,
    /// When its agent was gone; frames that were sent later reach the next one.
    agent_gone: Option<Instant>,
    /// When the first frame of the next agent arrived.
    resumed: Option<Instant>,
}

type SharedCall = Arc<Mutex<Call>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no task panics with the lock")
}

impl Call {
    fn observe(&mut self, echo: Echo) {
        let now = Instant::now();
        let is_next = |gone: Instant| now - echo.round_trip > gone;
        if self.resumed.is_none() && self.agent_gone.is_some_and(is_next) {
            self.resumed = Some(now);
        }
    }
}

fn agent_command() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.arg(AGENT);
    command
}

fn call_name(number: usize) -> String {
    format!("CA{number:032x}")
}

/// Kills agents under live calls.
pub(crate) async fn measure(core: usize, kills: usize) -> Gaps {
    let agents: Vec<_> =
        (0..PODS).map(|_| Arc::new(Mutex::new(AgentProcess::start(agent_command)))).collect();
    let pods = agents.iter().enumerate();
    let pods: Vec<String> =
        pods.map(|(number, agent)| format!("agent-{number}={}", lock(agent).address)).collect();
    let (_gateway, port) = start_router(core, "ws", |command| {
        command
            .env("PODS", pods.join(","))
            .env("TIER_CONFIG", json!({"gold": PODS}).to_string())
            .env("RETRY_ON_DISCONNECT", RETRIES.to_string());
    });
    let mut api = Endpoint::plain(port).json_client().await.expect("the router accepts");
    let mut calls = Vec::new();
    for number in 0..CALLS {
        let name = call_name(number);
        let answer = api.post("/api/v1/allocate", &json!({"call_sid": name})).await;
        let answer = answer.expect("calls are allocated");
        let url = answer["ws_url"].as_str().expect("a stream URL").to_owned();
        let call = SharedCall::default();
        let format = MediaFormat::from(Provider::ALL[number % Provider::ALL.len()]);
        let connection = Dialer::default().connect(&url).await.expect("the gateway accepts");
        let stream = ProviderStream::open(connection, &url, format, &name).await;
        tokio::spawn(talk(stream.expect("streams open"), number, call.clone()));
        calls.push(call);
    }
    let mut gaps = Histogram::new_with_bounds(1, 60_000_000, 3).expect("valid bounds");
    let mut dice = Dice(1);
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_millis(dice.between(0, MAX_PAUSE))).await;
        let gap = kill_one(&agents, &calls, &mut dice).await;
        gaps.saturating_record(gap.as_micros() as u64);
    }
    for agent in &agents {
        let violations = lock(agent).log().violations.clone();
        assert!(violations.is_empty(), "{violations:?}");
    }
    Gaps(gaps)
}

/// Sends and checks the frames of a call until the measurement is over.
async fn talk(mut stream: ProviderStream, number: usize, call: SharedCall) {
    let offset = Duration::from_micros(20_000 / CALLS as u64 * number as u64);
    let ended = stream.talk(CALL_LENGTH, offset, |echo| lock(&call).observe(echo)).await;
    panic!("call {number} ended in mid-call: {ended:?}");
}

/// Kills the agent of a random call, and starts it again when the call goes on. Returns the gap.
async fn kill_one(
    agents: &[Arc<Mutex<AgentProcess>>],
    calls: &[SharedCall],
    dice: &mut Dice,
) -> Duration {
    let (agent, call) = loop {
        let agent = &agents[dice.roll(agents.len())];
        let busy = lock(agent).log().call.clone();
        let number = busy.and_then(|busy| (0..CALLS).find(|number| call_name(*number) == busy));
        if let Some(number) = number
            && lock(&calls[number]).kills < RETRIES
        {
            break (agent.clone(), &calls[number]);
        }
        tokio::task::yield_now().await;
    };
    let victim = agent.clone();
    let killed = tokio::task::spawn_blocking(move || lock(&victim).kill()).await;
    let (sent, gone) = killed.expect("the agent is killed");
    {
        let mut call = lock(call);
        (call.kills, call.agent_gone, call.resumed) = (call.kills + 1, Some(gone), None);
    }
    let resumed = loop {
        if let Some(resumed) = lock(call).resumed {
            break resumed;
        }
        assert!(sent.elapsed() < GAP_TIMEOUT, "a call did not go on");
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    let restarted = tokio::task::spawn_blocking(move || lock(&agent).restart()).await;
    restarted.expect("the agent starts");
    resumed - sent
}
