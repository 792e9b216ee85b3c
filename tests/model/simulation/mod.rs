//! A deterministic simulation of routers, leaders, clients and a cluster around one store: a single
//! thread, one seed, a simulated clock.
//!
//! Claim: as long as the store loses no write, no sequence of responses violates an invariant,
//! whatever faults the network and the cluster have. A failover that loses acknowledged writes can
//! double-book a pod; the simulation counts how often. A failover that loses only unacknowledged
//! writes cannot. (Redis's `min-replicas-to-write` approximates that: it refuses writes once no
//! replica has acknowledged for a while, but does not wait for a replica at each write.)

mod checker;
mod clients;
mod cluster;
mod events;
mod gateways;
mod leaders;
mod network;
pub(crate) mod report;
mod requests;
mod router;
mod store;
mod stream_store;

use fleet::Millis;
use testkit::{dice::Dice, invariants::State};

pub(crate) use self::checker::Violation;
use self::{
    checker::InvariantChecker,
    clients::Client,
    cluster::Cluster,
    events::{Event, EventQueue},
    gateways::Gateway,
    leaders::Leader,
    network::NetworkFaults,
    requests::{Op, Reply},
    router::{Requester, Router},
    store::Store,
};

const LEASE: Millis = 3_000;
const MAX_DRAIN: Millis = 8_000;
/// Capacity of a pod of the shared tier.
const CAP: usize = 3;
const PODS: usize = 6;

/// A defect that is injected to show that the checker finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectedDefect {
    /// Leaders write with the store's current epoch.
    NoFencing,
    /// A release ends any call of its pod.
    ReleaseByPod,
    /// Requests are executed twice, the second time without a deadline.
    DuplicateExecution,
    /// The second try has another request id.
    NewRequestIdOnRetry,
    /// A compensating release ignores its request id.
    CompensateWithoutRequestId,
    /// A compensating release does not wait until its request can no longer arrive.
    CompensateTooEarly,
    /// A try whose connection breaks is not waited out.
    RetryWithoutWait,
    /// A compensating release ends a call that its agent has renewed.
    CompensateRenewedCall,
    /// An allocation is a read and a later write.
    NonAtomicAllocate,
    /// The first try has the deadline of the second.
    LateFirstTry,
    /// A second stream of a call is attached.
    AttachTwice,
    /// Heartbeats do not extend the lease of a gateway.
    HeartbeatWithoutLease,
    /// The reply to a failover names another pod than the store.
    FailoverToOtherPod,
}

/// When the store acknowledges a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    AtOnce,
    /// After replication.
    WhenReplicated,
}

/// Failovers to the replica at random times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failover {
    pub acknowledged: Acknowledged,
    /// Writes that a failover loses, if they are acknowledged at once.
    pub max_lost: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub seed: u64,
    /// Number of events before the faults end.
    pub steps: u64,
    pub defect: Option<InjectedDefect>,
    pub failover: Option<Failover>,
    /// Ends with the first violation.
    pub stops_at_violation: bool,
}

impl Settings {
    pub(crate) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps, defect: None, failover: None, stops_at_violation: true }
    }
}

/// An entry of the history.
pub(crate) struct LogEntry {
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
    pub history: Vec<LogEntry>,
}

pub(crate) struct Simulation {
    settings: Settings,
    now: Millis,
    dice: Dice,
    queue: EventQueue,
    faults: NetworkFaults,
    /// Milliseconds between calls.
    call_interval: Millis,
    /// All faults have ended, and no new calls begin.
    is_fault_free: bool,
    store: Store,
    routers: Vec<Router>,
    gateways: Vec<Gateway>,
    last_stream: u64,
    last_request_id: u64,
    leaders: Vec<Leader>,
    /// The leader that has the lease, and its epoch.
    holder: usize,
    epoch: u64,
    cluster: Cluster,
    clients: Vec<Client>,
    checker: InvariantChecker,
    failovers: u64,
    history: Option<Vec<LogEntry>>,
}

impl Simulation {
    /// Runs a simulation, optionally with a history.
    pub(crate) fn run(settings: Settings, with_history: bool) -> Outcome {
        let mut dice = Dice(settings.seed);
        let faults =
            NetworkFaults { lost: dice.roll(8), slow: dice.roll(16), duplicated: dice.roll(10) };
        let mut simulation = Self {
            call_interval: dice.between(20, 300),
            faults,
            settings,
            now: 1_000_000,
            queue: EventQueue::default(),
            is_fault_free: false,
            store: Store::new(PODS, settings.failover, settings.defect),
            routers: (0..2 + dice.roll(2)).map(|_| Router::default()).collect(),
            gateways: Vec::new(),
            last_stream: 0,
            last_request_id: 0,
            leaders: vec![Leader::default(), Leader::default()],
            holder: 0,
            epoch: 0,
            cluster: Cluster::new(PODS),
            clients: Vec::new(),
            checker: InvariantChecker::new(PODS),
            failovers: 0,
            history: with_history.then(Vec::new),
            dice,
        };
        simulation.schedule_first_events();
        let until = |simulation: &Self| {
            let has_violation =
                settings.stops_at_violation && !simulation.checker.violations.is_empty();
            simulation.checker.step < settings.steps && !has_violation
        };
        simulation.process_events(until);
        if simulation.checker.violations.is_empty() {
            simulation.check_final_capacity();
        }
        simulation.outcome()
    }

    fn schedule_first_events(&mut self) {
        for pod in 0..PODS {
            self.notify_leaders(pod);
            let later = self.dice.between(1_000, 6_000);
            self.at(self.now + later, Event::ClusterChanges { pod });
        }
        self.gateways.resize_with(self.routers.len(), Gateway::default);
        self.at(self.now + 5_000, Event::GatewayCutOff { router: 0 });
        for router in 0..self.routers.len() {
            self.at(self.now + 300, Event::GatewayBeats { router });
            self.at(self.now + 100, Event::FlushDeferred { router });
        }
        let first = [Event::Election, Event::NewCall, Event::OperatorActs, Event::Sweep];
        first.into_iter().for_each(|event| self.at(self.now, event));
        self.at(self.now + 777, Event::Audit);
        self.at(self.now + 9_999, Event::RouterCrashes { router: 0 });
        if self.settings.failover.is_some() {
            self.at(self.now + 7_000, Event::Failover);
        }
    }

    fn process_events(&mut self, continues: impl Fn(&Self) -> bool) {
        while continues(self)
            && let Some((at, event)) = self.queue.next()
        {
            self.checker.step += 1;
            self.now = at;
            self.handle(event);
        }
    }

    fn at(&mut self, at: Millis, event: Event) {
        self.queue.add(at, event);
    }

    fn log(&mut self, pod: Option<usize>, call: Option<u32>, text: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(LogEntry { at: self.now - 1_000_000, pod, call, text: text() });
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::RequestArrives { router, requester, op } => {
                self.start_request(router, requester, op)
            }
            Event::CallerDisconnects { ticket } => self.caller_disconnects(ticket),
            Event::StoreReceives { ticket, op, not_after } => {
                self.store_receives(ticket, op, not_after)
            }
            Event::SecondWrite { ticket, call, pod, pool } => {
                let reply = self.store.write_call(call, pod, pool, self.now);
                self.reply_leaves(ticket, reply, self.store.generation);
            }
            Event::ReplyLeaves { ticket, reply, generation } => {
                self.reply_leaves(ticket, reply, generation)
            }
            Event::ReplyArrives { ticket, reply } => self.reply_arrives(ticket, reply),
            Event::ConnectionBreaks { ticket } => self.connection_breaks(ticket),
            Event::Retry { ticket, event } => self.retry_event(ticket, event),
            Event::ResponseArrives { requester, op, reply } => {
                self.response_arrives(requester, op, reply)
            }
            Event::FlushDeferred { router } => self.flush_deferred(router),
            Event::RouterCrashes { router } => {
                let pause = self.dice.between(5_000, 60_000);
                let next = self.dice.roll(self.routers.len());
                self.at(self.now + pause, Event::RouterCrashes { router: next });
                if !self.is_fault_free {
                    self.router_crashes(router);
                }
            }
            Event::StreamOpens { router, call } => self.stream_opens(router, call),
            Event::GatewayBeats { router } => self.gateway_beats(router),
            Event::GatewayCutOff { router } => self.gateway_cut_off(router),
            Event::Sweep => {
                let lag = self.dice.between(1, 30);
                self.store.sweep(self.now, lag);
                self.at(self.now + 250, Event::Sweep);
            }
            Event::Audit => {
                self.check_store();
                self.at(self.now + 777, Event::Audit);
            }
            Event::Failover => self.fail_over(),
            Event::NewCall => self.new_call(),
            Event::ClientActs { call, action } => self.client_acts(call, action),
            Event::OperatorActs => self.operator_acts(),
            Event::ClusterChanges { pod } => self.cluster_changes(pod),
            Event::PodWatched { leader, pod, slot } => self.receive_watch_event(leader, pod, slot),
            Event::LeaderActs { leader } => self.leader_acts(leader),
            Event::LeaderStops { leader, epoch } => self.leader_stops(leader, epoch),
            Event::Election => self.election(),
        }
    }

    fn response_arrives(&mut self, requester: Requester, op: Op, reply: Option<Reply>) {
        match requester {
            Requester::Client { sent } => self.client_receives(sent, op, reply),
            Requester::Operator { sent } => self.operator_receives(sent, op, reply),
            Requester::Leader { .. } => self.leader_receives(requester, op, reply),
            Requester::Gateway { .. } => self.gateway_receives(requester, op, reply),
            Requester::Router => {}
        }
    }

    fn fail_over(&mut self) {
        let Some(failover) = self.settings.failover.filter(|_| !self.is_fault_free) else { return };
        let lost = self.store.fail_over(failover, self.now);
        self.failovers += 1;
        self.log(None, None, || format!("store: failover, {lost} writes lost"));
        let pause = self.dice.between(3_000, 12_000);
        self.at(self.now + pause, Event::Failover);
    }

    /// Audits the store and checks the invariants of its state.
    fn check_store(&mut self) {
        let repaired = self.store.audit();
        if repaired > 0 {
            self.checker.violated("I11", None, None, format!("an audit repaired {repaired} pods"));
        }
        self.check_streams();
        let state = State::of(self.store.fleet());
        // A stream of a gateway that was cut off has its pod again; the other call leaves it.
        let overloads = state.overloads().into_iter();
        let overloads = overloads.filter(|found| !self.store.has_displaced_call(&found.subject));
        for found in state.violations().into_iter().chain(overloads.collect::<Vec<_>>()) {
            self.checker.violated(found.invariant, None, None, found.message);
        }
    }

    /// Ends all faults, waits until all leases and drains have ended, and allocates all pods.
    fn check_final_capacity(&mut self) {
        self.is_fault_free = true;
        let incarnations = |it: &Self| -> Vec<_> {
            let slots = it.cluster.slots.iter();
            slots.map(|slot| slot.state.map(|state| state.incarnation())).collect()
        };
        let before = incarnations(self);
        self.cluster.recover();
        let after = incarnations(self);
        self.gateways.iter_mut().for_each(|gateway| gateway.cut_off_until = 0);
        (0..PODS).for_each(|pod| self.notify_leaders(pod));
        for pod in (0..PODS).filter(|pod| before[*pod] != after[*pod]) {
            self.agent_ends(pod);
        }
        let end = self.now + LEASE + MAX_DRAIN + 20_000;
        self.process_events(|simulation| simulation.now < end);
        self.check_store();
        let mut allocated = [(0, false); PODS];
        for call in 0..(PODS * CAP + 1) as u32 {
            let call = self.clients.len() as u32 + call;
            let op = Op::Allocate { call, is_merchant: true, request_id: u64::MAX };
            if let (Reply::Allocated { pod, is_shared, .. }, _) =
                self.store.execute(&op, self.now, 1)
            {
                allocated[pod] = (allocated[pod].0 + 1, is_shared);
            }
        }
        self.checker.check_capacity(&allocated);
    }

    fn outcome(self) -> Outcome {
        Outcome {
            steps: self.checker.step,
            calls: self.clients.len() as u64,
            holdings: self.checker.holdings,
            failovers: self.failovers,
            lost_writes: self.store.lost,
            violations: self.checker.violations,
            history: self.history.unwrap_or_default(),
        }
    }
}
