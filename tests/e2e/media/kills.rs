//! Agents that are killed in mid-call, again and again, under live calls in every format.

use std::{
    collections::{BTreeMap, HashMap},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use redis::Commands;
use telephony::Provider as Dialect;
use testkit::{
    dice::Dice,
    echo_agent::{AgentProcess, run_agent_process},
    redis::RedisServer,
};

use super::{
    conversations::{check_intact, expect_invariants, open_conversation},
    *,
};

/// `KILLS` replaces the numbers of calls and kills: `KILLS=50,200`.
const DEFAULT_SIZE: [usize; 2] = [20, 30];
/// Kills at a time.
const KILLERS: usize = 3;
/// `RETRY_ON_DISCONNECT`: losses that a call survives.
const RETRIES: u32 = 9;
/// Length of a call in milliseconds, unless the run ends it.
const CALL_LENGTH: [u64; 2] = [2_000, 12_000];

/// The body of the agents: the tests start this program again as child processes.
#[test]
#[ignore = "runs as a child process of other tests"]
fn agent_process() {
    run_agent_process();
}

fn agent_command() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "media::kills::agent_process", "--ignored", "--nocapture"]);
    command.stderr(Stdio::inherit());
    command
}

fn size() -> [usize; 2] {
    let Ok(text) = std::env::var("KILLS") else { return DEFAULT_SIZE };
    let numbers: Vec<usize> = text.split(',').filter_map(|part| part.parse().ok()).collect();
    numbers.try_into().expect("KILLS=calls,kills")
}

/// A call in progress.
#[derive(Debug, Clone, Copy)]
struct LiveCall {
    /// Pods that it has lost.
    losses: u32,
    /// Its agent was killed, and no audio of the next one has arrived. Its provider waits.
    is_interrupted: bool,
    /// When the latest frame was sent that has come back.
    latest_echo: Instant,
}

struct Run {
    routers: Vec<Router>,
    agents: Vec<Mutex<AgentProcess>>,
    calls: Mutex<HashMap<String, LiveCall>>,
    /// Reasons of calls that ended before their provider hung up, and frames out of place.
    failures: Mutex<Vec<String>>,
    /// Kills to go.
    left: AtomicUsize,
    is_over: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics with the lock")
}

impl Run {
    /// Calls one after the other until the run is over. Each goes to a router at random.
    async fn place_calls(self: Arc<Self>, line: usize) {
        let mut dice = Dice(line as u64 + 1);
        for number in 0.. {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let dialect = Dialect::ALL[(line + number) % Dialect::ALL.len()];
            let [shortest, longest] = CALL_LENGTH;
            let length = Duration::from_millis(dice.between(shortest, longest));
            let router = dice.roll(self.routers.len());
            let call = format!("CA-{line}-{number}-{dialect}");
            if let Err(error) = self.converse(router, &call, dialect, length).await {
                lock(&self.failures).push(format!("{call}: {error}"));
            }
            lock(&self.calls).remove(&call);
        }
    }

    /// One call, which its provider ends.
    async fn converse(
        &self,
        router: usize,
        call: &str,
        dialect: Dialect,
        length: Duration,
    ) -> Result<(), String> {
        let url = stream_url(&self.routers[router], call);
        let gateway = self.routers[(router + 1) % self.routers.len()].address;
        let mut stream = open_conversation(gateway, &url, dialect, call).await?;
        let live = LiveCall { losses: 0, is_interrupted: false, latest_echo: Instant::now() };
        lock(&self.calls).insert(call.to_owned(), live);
        let observe = |echo: smart_router::tools::provider_stream::Echo| {
            let sent = Instant::now() - echo.round_trip;
            if let Some(live) = lock(&self.calls).get_mut(call) {
                live.latest_echo = live.latest_echo.max(sent);
            }
        };
        tokio::select! {
            ended = stream.talk(2 * TIMEOUT, Duration::ZERO, observe) => {
                ended.map_err(|error| error.to_string())?;
            }
            () = self.end(call, length) => {}
        }
        stream.hang_up().await.map_err(|error| format!("at its end: {error}"))?;
        check_intact(stream.echoes())
    }

    /// Waits for the end of a call, after its length or at the end of the run.
    async fn end(&self, call: &str, length: Duration) {
        let ends = Instant::now() + length;
        loop {
            if Instant::now() > ends || self.is_over.load(Ordering::SeqCst) {
                let mut calls = lock(&self.calls);
                let is_interrupted = calls.get(call).is_some_and(|live| live.is_interrupted);
                if !is_interrupted || self.is_over.load(Ordering::SeqCst) {
                    calls.remove(call);
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills agents in mid-call until enough have been killed.
    fn kill_agents(&self, redis: &RedisServer, seed: u64) {
        let (mut dice, mut connection) = (Dice(seed), redis.connection());
        let next = |left: usize| left.checked_sub(1);
        while self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok() {
            let (call, gone) = self.kill_one(&mut dice, &mut connection);
            eventually(Duration::from_secs(10), "the call goes on", || {
                let has_violations = !self.violations().is_empty();
                match lock(&self.calls).get_mut(&call) {
                    _ if has_violations => true,
                    Some(live) if live.latest_echo <= gone => false,
                    Some(live) => {
                        live.is_interrupted = false;
                        true
                    }
                    // The call has failed.
                    None => true,
                }
            });
            expect_invariants(&mut connection, self.agents.len());
            if !lock(&self.failures).is_empty() || !self.violations().is_empty() {
                return;
            }
        }
    }

    /// Kills the agent of a random call and starts it again. Returns the call, and when the agent
    /// was gone.
    fn kill_one(&self, dice: &mut Dice, redis: &mut redis::Connection) -> (String, Instant) {
        let mut found = None;
        eventually(Duration::from_secs(10), "a call is in progress", || {
            let number = dice.roll(self.agents.len());
            let mut agent = lock(&self.agents[number]);
            let Some(call) = agent.log().call.clone() else { return false };
            match lock(&self.calls).get_mut(&call) {
                // The call must have the chance to survive.
                Some(live) if live.losses < RETRIES && !live.is_interrupted => {
                    (live.losses, live.is_interrupted) = (live.losses + 1, true);
                }
                _ => return false,
            }
            let pod: String = redis.hget(format!("voice:call:{call}"), "pod_name").unwrap();
            assert_eq!(pod, format!("agent-{number}"), "I14: {call} is connected to its own pod");
            let (_, gone) = agent.kill();
            agent.restart();
            found = Some((call, gone));
            true
        });
        found.expect("a call was found")
    }

    /// Violations that the agents have observed.
    fn violations(&self) -> Vec<String> {
        let agents = self.agents.iter();
        agents.flat_map(|agent| lock(agent).log().violations.clone()).collect()
    }

    /// Every agent of a call got the opening messages, and its number in the conversation.
    fn assert_openings(&self, kills: usize) {
        let mut attempts: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for agent in &self.agents {
            for opening in &lock(agent).log().openings {
                attempts.entry(opening.call.clone()).or_default().push(opening.pod_attempt);
            }
        }
        for (call, of_call) in &mut attempts {
            of_call.sort_unstable();
            assert!(of_call.iter().copied().eq(1..=of_call.len() as u32), "{call}: {of_call:?}");
        }
        let next: usize = attempts.values().map(|of_call| of_call.len() - 1).sum();
        assert_eq!(next, kills, "one next agent per kill");
    }
}

/// Two gateways on one Redis. Pods beyond the number of calls replace those that are quarantined,
/// which may be one in five.
fn start(redis: &RedisServer, calls: usize, kills: usize) -> Arc<Run> {
    let count = calls * 5 / 4 + 8;
    let agents: Vec<AgentProcess> =
        (0..count).map(|_| AgentProcess::start(agent_command)).collect();
    let pods: Vec<String> = agents
        .iter()
        .enumerate()
        .map(|(number, agent)| format!("agent-{number}={}", agent.address))
        .collect();
    let settings = [
        ("REDIS_URL", &*redis.url()),
        ("PODS", &pods.join(",")),
        ("TIER_CONFIG", &format!(r#"{{"gold": {count}}}"#)),
        ("RETRY_ON_DISCONNECT", &RETRIES.to_string()),
        ("LOG_LEVEL", "error"),
    ];
    let routers = vec![Router::start(&settings), Router::start(&settings)];
    Arc::new(Run {
        routers,
        agents: agents.into_iter().map(Mutex::new).collect(),
        calls: Mutex::default(),
        failures: Mutex::default(),
        left: AtomicUsize::new(kills),
        is_over: AtomicBool::new(false),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_survive_the_kills_of_their_agents() {
    let ([calls, kills], redis) = (size(), Arc::new(RedisServer::start(&[])));
    let run = start(&redis, calls, kills);
    let lines: Vec<_> =
        (0..calls).map(|line| tokio::spawn(run.clone().place_calls(line))).collect();
    let killers = (0..KILLERS).map(|seed| {
        let (run, redis) = (run.clone(), redis.clone());
        tokio::task::spawn_blocking(move || run.kill_agents(&redis, seed as u64 + 1))
    });
    let killers = futures_util::future::join_all(killers).await;
    run.is_over.store(true, Ordering::SeqCst);
    for line in lines {
        line.await.expect("the calls of a line end");
    }
    assert_eq!(run.violations(), Vec::<String>::new());
    assert_eq!(*lock(&run.failures), Vec::<String>::new());
    assert!(killers.iter().all(Result::is_ok), "every killed call went on");
    run.assert_openings(kills);
    eventually(Duration::from_secs(10), "no call is left", || {
        run.routers[0].status()["active_calls"] == 0
    });
    expect_invariants(&mut redis.connection(), run.agents.len());
    for router in &run.routers {
        assert_eq!(router.metric("smart_router_pod_conflicts_total"), 0);
    }
}
