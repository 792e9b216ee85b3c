//! Clients ask for pods, hold them, renew and release, in good order and in bad; an
//! operator drains pods.

use fleet::Millis;

use super::{
    LEASE, Simulation,
    events::Event,
    requests::{Answer, Op},
    router::Asker,
};

/// What a client does next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Turn {
    /// Asks (again), through a router.
    Asks {
        router: usize,
    },
    Renews,
    LooksUp,
    HangsUp,
    Releases,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Client {
    is_merchant: bool,
    /// The pod that it was given last.
    pod: Option<usize>,
    has_hung_up: bool,
    /// Says nothing any more: it has vanished.
    is_mute: bool,
    asked: u8,
    released: u8,
}

impl Simulation {
    pub(crate) fn call_begins(&mut self) {
        if self.is_calm {
            return;
        }
        let pause = self.dice.between(1, 2 * self.pace);
        self.at(self.now + pause, Event::CallBegins);
        let call = self.clients.len() as u32;
        let is_merchant = self.dice.percent(25);
        self.clients.push(Client { is_merchant, ..Client::default() });
        let router = self.dice.roll(self.routers.len());
        self.client_turns(call, Turn::Asks { router });
        if self.dice.percent(15) {
            // The same call by another router, at once or soon.
            let other = (router + 1) % self.routers.len();
            let later = self.dice.between(0, 40);
            self.client_later(call, later, Turn::Asks { router: other });
        }
        if self.dice.percent(3) {
            let later = self.dice.between(0, 300);
            self.client_later(call, later, Turn::HangsUp);
        }
    }

    fn client_later(&mut self, call: u32, later: Millis, turn: Turn) {
        self.at(self.now + later, Event::ClientTurns { call, turn });
    }

    pub(crate) fn client_turns(&mut self, call: u32, turn: Turn) {
        let client = self.clients[call as usize].clone();
        if client.is_mute || self.is_calm && !matches!(turn, Turn::Releases | Turn::HangsUp) {
            return;
        }
        match turn {
            Turn::Asks { router } => {
                self.clients[call as usize].asked += 1;
                let op = Op::Allocate { call, is_merchant: client.is_merchant, attempt: 0 };
                self.client_says(router, op);
            }
            Turn::Renews => {
                if let Some(pod) = client.pod.filter(|_| !client.has_hung_up) {
                    let router = self.dice.roll(self.routers.len());
                    self.client_says(router, Op::Renew { call, pod });
                    self.client_later(call, LEASE / 3, Turn::Renews);
                }
            }
            Turn::LooksUp => {
                let router = self.dice.roll(self.routers.len());
                self.client_says(router, Op::Find { call });
            }
            Turn::HangsUp => {
                self.clients[call as usize].has_hung_up = true;
                self.client_turns(call, Turn::Releases);
                if self.dice.percent(15) {
                    self.client_turns(call, Turn::Releases);
                }
                if self.dice.percent(15) {
                    let later = self.dice.between(500, 12_000);
                    self.client_later(call, later, Turn::Releases);
                }
            }
            Turn::Releases => {
                self.clients[call as usize].released += 1;
                self.promises.release_sent(call, self.now);
                let pod = client.pod.filter(|_| self.dice.percent(70));
                let router = self.dice.roll(self.routers.len());
                self.client_says(router, Op::Release { call, pod, stems_from: None });
            }
        }
    }

    /// A request on its way to a router. Providers repeat what they say.
    fn client_says(&mut self, router: usize, op: Op) {
        self.note(op.pod(), op.call(), || format!("client: to r{router}: {op:?}"));
        let asker = Asker::Client { sent: self.now };
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay() {
                self.at(self.now + delay, Event::Asked { router, asker, op: op.clone() });
            }
        }
    }

    pub(crate) fn client_hears(&mut self, sent: Millis, op: Op, answer: Option<Answer>) {
        let Some(call) = op.call() else { return };
        self.note(op.pod(), Some(call), || format!("client: heard of {op:?}: {answer:?}"));
        self.promises.client_hears(sent, &op, answer.as_ref(), self.now);
        match (&op, answer) {
            (Op::Allocate { .. }, Some(Answer::Given { pod, is_new, .. })) => {
                self.connected(call, pod, is_new);
            }
            (Op::Allocate { .. }, None) => {
                if self.clients[call as usize].asked < 3 && self.dice.percent(40) {
                    let router = self.dice.roll(self.routers.len());
                    self.client_later(call, 50, Turn::Asks { router });
                } else {
                    let later = self.dice.between(600, 2_000);
                    self.client_later(call, later, Turn::LooksUp);
                }
            }
            (Op::Release { .. }, None) if self.clients[call as usize].released < 6 => {
                self.client_later(call, 300, Turn::Releases);
            }
            (Op::Release { .. }, Some(_)) if self.dice.percent(50) => {
                let later = self.dice.between(1, 1_500);
                self.client_later(call, later, Turn::LooksUp);
            }
            _ => {}
        }
    }

    fn connected(&mut self, call: u32, pod: usize, is_new: bool) {
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
        client.is_mute = self.dice.percent(4);
        let lasts = match self.dice.roll(4) {
            0 => self.dice.between(1, 300),
            1 | 2 => self.dice.between(100, LEASE),
            _ => self.dice.between(LEASE, 3 * LEASE),
        };
        // Some forget to renew.
        if self.dice.percent(90) {
            let first = self.dice.between(1, LEASE / 3);
            self.client_later(call, first, Turn::Renews);
        }
        for _ in 0..2 {
            let later = self.dice.between(1, lasts);
            self.client_later(call, later, Turn::LooksUp);
        }
        self.client_later(call, lasts, Turn::HangsUp);
    }

    pub(crate) fn operator_turns(&mut self) {
        if self.is_calm {
            return;
        }
        let pause = self.dice.between(100, 3_000);
        self.at(self.now + pause, Event::OperatorTurns);
        let pod = self.dice.roll(self.cluster.slots.len());
        let router = self.dice.roll(self.routers.len());
        let op = if self.dice.percent(60) {
            Op::Drain { pod, ttl: self.dice.between(300, super::LONGEST_DRAIN) }
        } else {
            self.promises.undrain_sent(pod, self.now);
            Op::Undrain { pod }
        };
        self.note(Some(pod), None, || format!("operator: to r{router}: {op:?}"));
        let asker = Asker::Operator { sent: self.now };
        if let Some(delay) = self.delay() {
            self.at(self.now + delay, Event::Asked { router, asker, op });
        }
    }

    pub(crate) fn operator_hears(&mut self, sent: Millis, op: Op, answer: Option<Answer>) {
        if let (Op::Drain { pod, .. }, Some(Answer::Drained { until })) = (&op, answer) {
            self.note(Some(*pod), None, || format!("operator: p{pod} drains until {until}"));
            self.promises.drained(*pod, sent, until, self.now);
        }
    }
}
