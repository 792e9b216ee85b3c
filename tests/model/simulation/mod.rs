//! A simulator of routers, leaders, clients and a cluster around one store: a single
//! thread, one seed, no clock.
//!
//! What it claims: as long as the store loses no write, nobody is ever told anything
//! that breaks an invariant, whatever the network and the cluster do. A failover that
//! loses acknowledged writes can book a pod twice; how often is counted. One that
//! loses only what was not acknowledged can't. (Redis's `min-replicas-to-write` comes
//! close to that: it stops writes once no replica has answered for a while, and does
//! not wait for one at each write.)

mod clients;
mod cluster;
mod events;
mod leaders;
mod network;
mod promises;
pub(crate) mod report;
mod requests;
mod router;
mod store;

use fleet::Millis;
use testkit::{dice::Dice, invariants::State};

use self::{
    clients::Client,
    cluster::Cluster,
    events::{Agenda, Event},
    leaders::Leader,
    network::Weather,
    promises::Promises,
    requests::{Answer, Op},
    router::{Asker, Router},
    store::Store,
};
pub(crate) use promises::Violation;

const LEASE: Millis = 3_000;
const LONGEST_DRAIN: Millis = 8_000;
/// Calls that a pod of the shared tier may carry.
const CAP: usize = 3;
const PODS: usize = 6;

/// What is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// Leaders write with whatever epoch the store has.
    AnyEpoch,
    /// A release ends whatever call its pod has.
    ReleaseByPod,
    /// Requests reach the store twice, at any time.
    ExecutedTwice,
    /// A router's second try is another attempt.
    FreshAttempts,
    /// What is taken back is not compared with the attempt it stems from.
    DoubtsWithoutAttempt,
    /// What somebody asked for who hung up is taken back at once, and may come after that.
    HastyDoubts,
    /// A try whose line breaks is not waited out.
    HastyTries,
    /// What its agent has renewed is taken back all the same.
    DoubtsDespiteRenewal,
    /// An allocation reads first and writes later.
    TwoSteps,
    /// A router's first try may be executed while its second is under way.
    LateTries,
}

/// When the store acknowledges a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    AtOnce,
    /// Only after a replica has it.
    WhenReplicated,
}

/// The store is replaced by its replica every now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failover {
    pub acknowledged: Acknowledged,
    /// So many of the last writes are lost, if they are acknowledged at once.
    pub most: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub seed: u64,
    /// So many events, and then calm.
    pub steps: u64,
    pub sabotage: Option<Sabotage>,
    pub failover: Option<Failover>,
    /// Ends with the first violation.
    pub stops_early: bool,
}

impl Settings {
    pub(crate) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps, sabotage: None, failover: None, stops_early: true }
    }
}

/// What happened, as far as it concerns a pod or a call.
pub(crate) struct Line {
    pub at: Millis,
    pub pod: Option<usize>,
    pub call: Option<u32>,
    pub text: String,
}

/// The result of a run.
pub(crate) struct Outcome {
    pub steps: u64,
    pub calls: u64,
    pub holdings: u64,
    pub failovers: u64,
    pub lost_writes: u64,
    pub violations: Vec<Violation>,
    pub history: Vec<Line>,
}

pub(crate) struct Simulation {
    settings: Settings,
    now: Millis,
    dice: Dice,
    agenda: Agenda,
    weather: Weather,
    /// Milliseconds between calls.
    pace: Millis,
    /// Nothing goes wrong any more, and nobody asks for anything.
    is_calm: bool,
    store: Store,
    routers: Vec<Router>,
    attempts: u64,
    leaders: Vec<Leader>,
    /// Who has the lease, and with which epoch.
    holder: usize,
    epoch: u64,
    cluster: Cluster,
    clients: Vec<Client>,
    promises: Promises,
    failovers: u64,
    history: Option<Vec<Line>>,
}

impl Simulation {
    /// Runs a simulation to its end, with a history if that is wanted.
    pub(crate) fn live(settings: Settings, has_history: bool) -> Outcome {
        let mut dice = Dice(settings.seed);
        let weather = Weather { lost: dice.roll(8), slow: dice.roll(16), twice: dice.roll(10) };
        let mut simulation = Self {
            pace: dice.between(20, 300),
            weather,
            settings,
            now: 1_000_000,
            agenda: Agenda::default(),
            is_calm: false,
            store: Store::new(PODS, settings.failover, settings.sabotage),
            routers: (0..2 + dice.roll(2)).map(|_| Router::default()).collect(),
            attempts: 0,
            leaders: vec![Leader::default(), Leader::default()],
            holder: 0,
            epoch: 0,
            cluster: Cluster::new(PODS),
            clients: Vec::new(),
            promises: Promises::new(PODS),
            failovers: 0,
            history: has_history.then(Vec::new),
            dice,
        };
        simulation.begin();
        let until = |simulation: &Self| {
            let is_broken = settings.stops_early && !simulation.promises.violations.is_empty();
            simulation.promises.step < settings.steps && !is_broken
        };
        simulation.run(until);
        if simulation.promises.violations.is_empty() {
            simulation.count_pods();
        }
        simulation.outcome()
    }

    fn begin(&mut self) {
        for pod in 0..PODS {
            self.tell_leaders(pod);
            let later = self.dice.between(1_000, 6_000);
            self.at(self.now + later, Event::ClusterTurns { pod });
        }
        for router in 0..self.routers.len() {
            self.at(self.now + 100, Event::DebtsDue { router });
        }
        let first = [Event::Election, Event::CallBegins, Event::OperatorTurns, Event::Sweeps];
        first.into_iter().for_each(|event| self.at(self.now, event));
        self.at(self.now + 777, Event::Audits);
        self.at(self.now + 9_999, Event::RouterDies { router: 0 });
        if self.settings.failover.is_some() {
            self.at(self.now + 7_000, Event::FailsOver);
        }
    }

    fn run(&mut self, goes_on: impl Fn(&Self) -> bool) {
        while goes_on(self)
            && let Some((at, event)) = self.agenda.next()
        {
            self.promises.step += 1;
            self.now = at;
            self.happens(event);
        }
    }

    fn at(&mut self, at: Millis, event: Event) {
        self.agenda.add(at, event);
    }

    fn note(&mut self, pod: Option<usize>, call: Option<u32>, text: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(Line { at: self.now - 1_000_000, pod, call, text: text() });
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Asked { router, asker, op } => self.ask(router, asker, op),
            Event::HangsUp { to } => self.hangs_up(to),
            Event::Executed { to, op, not_after } => self.executed(to, op, not_after),
            Event::SecondHalf { to, call, pod, pool } => {
                let answer = self.store.poke(call, pod, pool, self.now);
                self.leaves(to, answer, self.store.generation);
            }
            Event::Leaves { to, answer, generation } => self.leaves(to, answer, generation),
            Event::Answered { to, answer } => self.answered(to, answer),
            Event::TryEnds { to } => self.try_ends(to),
            Event::Heard { asker, op, answer } => self.heard(asker, op, answer),
            Event::DebtsDue { router } => self.debts_due(router),
            Event::RouterDies { router } => {
                let pause = self.dice.between(5_000, 60_000);
                let next = self.dice.roll(self.routers.len());
                self.at(self.now + pause, Event::RouterDies { router: next });
                if !self.is_calm {
                    self.router_dies(router);
                }
            }
            Event::Sweeps => {
                let lag = self.dice.between(1, 30);
                self.store.sweep(self.now, lag);
                self.at(self.now + 250, Event::Sweeps);
            }
            Event::Audits => {
                self.views_follow_from_facts();
                self.at(self.now + 777, Event::Audits);
            }
            Event::FailsOver => self.fails_over(),
            Event::CallBegins => self.call_begins(),
            Event::ClientTurns { call, turn } => self.client_turns(call, turn),
            Event::OperatorTurns => self.operator_turns(),
            Event::ClusterTurns { pod } => self.cluster_turns(pod),
            Event::Watch { leader, pod, slot } => self.watch(leader, pod, slot),
            Event::LeaderTurns { leader } => self.leader_turns(leader),
            Event::LeaderStops { leader, epoch } => self.leader_stops(leader, epoch),
            Event::Election => self.election(),
        }
    }

    fn heard(&mut self, asker: Asker, op: Op, answer: Option<Answer>) {
        match asker {
            Asker::Client { sent } => self.client_hears(sent, op, answer),
            Asker::Operator { sent } => self.operator_hears(sent, op, answer),
            Asker::Leader { .. } => self.leader_hears(asker, op, answer),
            Asker::Debt => {}
        }
    }

    fn fails_over(&mut self) {
        let Some(failover) = self.settings.failover.filter(|_| !self.is_calm) else { return };
        let lost = self.store.fail_over(failover, self.now);
        self.failovers += 1;
        self.note(None, None, || format!("store: failed over, {lost} writes lost"));
        let pause = self.dice.between(3_000, 12_000);
        self.at(self.now + pause, Event::FailsOver);
    }

    /// Derives the views again: nothing may be out of line.
    fn views_follow_from_facts(&mut self) {
        let repaired = self.store.audit();
        if repaired > 0 {
            self.promises.broken("I11", None, None, format!("an audit repaired {repaired} pods"));
        }
        let state = State::of(self.store.fleet());
        for found in state.violations().into_iter().chain(state.overloads()) {
            self.promises.broken(found.invariant, None, None, found.what);
        }
    }

    /// Lets all faults end, waits, and asks for every pod there is.
    fn count_pods(&mut self) {
        self.is_calm = true;
        self.cluster.recover();
        (0..PODS).for_each(|pod| self.tell_leaders(pod));
        let end = self.now + LEASE + LONGEST_DRAIN + 20_000;
        self.run(|simulation| simulation.now < end);
        self.views_follow_from_facts();
        let mut given = [(0, false); PODS];
        for call in 0..(PODS * CAP + 1) as u32 {
            let call = self.clients.len() as u32 + call;
            let op = Op::Allocate { call, is_merchant: true, attempt: u64::MAX };
            if let (Answer::Given { pod, is_shared, .. }, _) = self.store.execute(&op, self.now, 1)
            {
                given[pod] = (given[pod].0 + 1, is_shared);
            }
        }
        self.promises.census(&given);
    }

    fn outcome(self) -> Outcome {
        Outcome {
            steps: self.promises.step,
            calls: self.clients.len() as u64,
            holdings: self.promises.holdings,
            failovers: self.failovers,
            lost_writes: self.store.lost,
            violations: self.promises.violations,
            history: self.history.unwrap_or_default(),
        }
    }
}
