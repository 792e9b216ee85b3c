//! Clients allocate pods, renew and release them, in any order; an operator drains pods.

use fleet::Millis;

use super::{
    LEASE, Simulation,
    events::Event,
    requests::{Op, Reply},
    router::Requester,
};

/// The next action of a client.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ClientAction {
    Allocate { router: usize },
    Renew,
    Find,
    HangUp,
    Release,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Client {
    is_merchant: bool,
    /// A gateway relays its stream; agents of other calls renew and release themselves.
    has_stream: bool,
    /// The pod of the last allocation.
    pod: Option<usize>,
    has_hung_up: bool,
    /// The client has crashed and sends nothing any more.
    is_silent: bool,
    allocate_requests: u8,
    release_requests: u8,
}

impl Simulation {
    pub(crate) fn new_call(&mut self) {
        if self.is_fault_free {
            return;
        }
        let pause = self.dice.between(1, 2 * self.call_interval);
        self.at(self.now + pause, Event::NewCall);
        let call = self.clients.len() as u32;
        let is_merchant = self.dice.percent(25);
        let has_stream = self.dice.percent(40);
        self.clients.push(Client { is_merchant, has_stream, ..Client::default() });
        let router = self.dice.roll(self.routers.len());
        self.client_acts(call, ClientAction::Allocate { router });
        if self.dice.percent(15) {
            // A repeat of the request through another router.
            let other = (router + 1) % self.routers.len();
            let later = self.dice.between(0, 40);
            self.schedule_client(call, later, ClientAction::Allocate { router: other });
        }
        if self.dice.percent(3) {
            let later = self.dice.between(0, 300);
            self.schedule_client(call, later, ClientAction::HangUp);
        }
    }

    fn schedule_client(&mut self, call: u32, later: Millis, action: ClientAction) {
        self.at(self.now + later, Event::ClientActs { call, action });
    }

    pub(crate) fn client_acts(&mut self, call: u32, action: ClientAction) {
        let client = self.clients[call as usize].clone();
        if client.is_silent
            || self.is_fault_free && !matches!(action, ClientAction::Release | ClientAction::HangUp)
        {
            return;
        }
        match action {
            ClientAction::Allocate { router } => {
                self.clients[call as usize].allocate_requests += 1;
                let op = Op::Allocate { call, is_merchant: client.is_merchant, request_id: 0 };
                self.client_sends(router, op);
            }
            ClientAction::Renew => {
                if let Some(pod) = client.pod.filter(|_| !client.has_hung_up && !client.has_stream)
                {
                    let router = self.dice.roll(self.routers.len());
                    self.client_sends(router, Op::Renew { call, pod });
                    self.schedule_client(call, LEASE / 3, ClientAction::Renew);
                }
            }
            ClientAction::Find => {
                let router = self.dice.roll(self.routers.len());
                self.client_sends(router, Op::Find { call });
            }
            ClientAction::HangUp => {
                self.clients[call as usize].has_hung_up = true;
                if client.has_stream && client.pod.is_some() {
                    return self.close_streams(call);
                }
                self.client_acts(call, ClientAction::Release);
                if self.dice.percent(15) {
                    self.client_acts(call, ClientAction::Release);
                }
                if self.dice.percent(15) {
                    let later = self.dice.between(500, 12_000);
                    self.schedule_client(call, later, ClientAction::Release);
                }
            }
            ClientAction::Release => {
                self.clients[call as usize].release_requests += 1;
                self.checker.release_sent(call, self.now);
                let pod = client.pod.filter(|_| self.dice.percent(70));
                let router = self.dice.roll(self.routers.len());
                self.client_sends(router, Op::Release { call, pod, request_id: None });
            }
        }
    }

    /// Sends a request to a router. Providers may send it twice.
    fn client_sends(&mut self, router: usize, op: Op) {
        self.log(op.pod(), op.call(), || format!("client: to r{router}: {op:?}"));
        let requester = Requester::Client { sent: self.now };
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay() {
                self.at(
                    self.now + delay,
                    Event::RequestArrives { router, requester, op: op.clone() },
                );
            }
        }
    }

    pub(crate) fn client_receives(&mut self, sent: Millis, op: Op, reply: Option<Reply>) {
        let Some(call) = op.call() else { return };
        self.log(op.pod(), Some(call), || format!("client: response to {op:?}: {reply:?}"));
        self.checker.client_receives(sent, &op, reply.as_ref(), self.now);
        if let (
            Op::Allocate { .. },
            Some(Reply::Allocated { pod, is_shared: false, is_new: true }),
        ) = (&op, &reply)
        {
            self.check_allocated(call, *pod, sent);
        }
        match (&op, reply) {
            (Op::Allocate { .. }, Some(Reply::Allocated { pod, is_new, .. })) => {
                self.begin_call(call, pod, is_new);
            }
            (Op::Allocate { .. }, None) => {
                if self.clients[call as usize].allocate_requests < 3 && self.dice.percent(40) {
                    let router = self.dice.roll(self.routers.len());
                    self.schedule_client(call, 50, ClientAction::Allocate { router });
                } else {
                    let later = self.dice.between(600, 2_000);
                    self.schedule_client(call, later, ClientAction::Find);
                }
            }
            (Op::Release { .. }, None) if self.clients[call as usize].release_requests < 6 => {
                self.schedule_client(call, 300, ClientAction::Release);
            }
            (Op::Release { .. }, Some(_)) if self.dice.percent(50) => {
                let later = self.dice.between(1, 1_500);
                self.schedule_client(call, later, ClientAction::Find);
            }
            _ => {}
        }
    }

    pub(super) fn has_hung_up(&self, call: u32) -> bool {
        self.clients[call as usize].has_hung_up
    }

    fn begin_call(&mut self, call: u32, pod: usize, is_new: bool) {
        let client = &mut self.clients[call as usize];
        if client.has_hung_up {
            return;
        }
        let before = client.pod;
        if before.is_none() || is_new {
            client.pod = Some(pod);
        }
        if before.is_some() {
            return;
        }
        let has_stream = client.has_stream;
        client.is_silent = !has_stream && self.dice.percent(4);
        if has_stream {
            // Some providers open their stream twice.
            for _ in 0..1 + usize::from(self.dice.percent(15)) {
                let later = self.dice.between(1, 100);
                let router = self.dice.roll(self.routers.len());
                self.at(self.now + later, Event::StreamOpens { router, call });
            }
        }
        let duration = match self.dice.roll(4) {
            0 => self.dice.between(1, 300),
            1 | 2 => self.dice.between(100, LEASE),
            _ => self.dice.between(LEASE, 3 * LEASE),
        };
        // Some clients never renew.
        if self.dice.percent(90) {
            let first = self.dice.between(1, LEASE / 3);
            self.schedule_client(call, first, ClientAction::Renew);
        }
        for _ in 0..2 {
            let later = self.dice.between(1, duration);
            self.schedule_client(call, later, ClientAction::Find);
        }
        self.schedule_client(call, duration, ClientAction::HangUp);
    }

    pub(crate) fn operator_acts(&mut self) {
        if self.is_fault_free {
            return;
        }
        let pause = self.dice.between(100, 3_000);
        self.at(self.now + pause, Event::OperatorActs);
        let pod = self.dice.roll(self.cluster.slots.len());
        let router = self.dice.roll(self.routers.len());
        let op = if self.dice.percent(60) {
            Op::Drain { pod, ttl: self.dice.between(300, super::MAX_DRAIN) }
        } else {
            self.checker.undrain_sent(pod, self.now);
            Op::Undrain { pod }
        };
        self.log(Some(pod), None, || format!("operator: to r{router}: {op:?}"));
        let requester = Requester::Operator { sent: self.now };
        if let Some(delay) = self.delay() {
            self.at(self.now + delay, Event::RequestArrives { router, requester, op });
        }
    }

    pub(crate) fn operator_receives(&mut self, sent: Millis, op: Op, reply: Option<Reply>) {
        if let (Op::Drain { pod, .. }, Some(Reply::Drained { until })) = (&op, reply) {
            self.log(Some(*pod), None, || format!("operator: p{pod} drains until {until}"));
            self.checker.drained(*pod, sent, until, self.now);
        }
    }
}
