//! Routers: pass requests on to the store, try at most twice, and take back what may
//! have happened without anybody being told.

use std::collections::BTreeMap;

use fleet::Millis;

use super::{
    Sabotage, Simulation,
    events::{Event, Ticket},
    requests::{Answer, Op},
};

/// As in `store/redis/link.rs`.
const FIRST_TRY: Millis = 400;
const BUDGET: Millis = 750;

/// Who asks, and what has to be known when the answer comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Asker {
    /// When it sent its request.
    Client {
        sent: Millis,
    },
    Operator {
        sent: Millis,
    },
    /// Its epoch, and whether that was known to be replaced when it wrote.
    Leader {
        leader: usize,
        epoch: u64,
        is_replaced: bool,
    },
    /// The router itself pays a debt.
    Debt,
}

struct Open {
    asker: Asker,
    op: Op,
    started: Millis,
    number: u8,
    may_have_run: bool,
}

#[derive(Default)]
pub(super) struct Router {
    life: u32,
    last_request: u64,
    open: BTreeMap<u64, Open>,
    /// When each is due.
    debts: Vec<(Millis, Op)>,
}

impl Simulation {
    /// A router takes a request on.
    pub(crate) fn ask(&mut self, router: usize, asker: Asker, mut op: Op) {
        self.attempts += 1;
        if let Op::Allocate { call, attempt, .. } = &mut op {
            *attempt = self.attempts;
            self.promises.allocate_opens(*call);
        }
        let it = &mut self.routers[router];
        it.last_request += 1;
        let (request, life) = (it.last_request, it.life);
        let open = Open { asker, op, started: self.now, number: 1, may_have_run: false };
        let may_hang_up =
            matches!((&open.asker, &open.op), (Asker::Client { .. }, Op::Allocate { .. }));
        it.open.insert(request, open);
        let to = Ticket { router, life, request, number: 1 };
        if may_hang_up && let Some(at) = self.breaks() {
            self.at(at, Event::HangsUp { to });
        }
        self.try_once(to);
    }

    /// A caller does not wait any longer. What it asked for is on its way.
    pub(crate) fn hangs_up(&mut self, to: Ticket) {
        let router = &mut self.routers[to.router];
        if router.life != to.life {
            return;
        }
        let Some(Open { asker, op, started, .. }) = router.open.remove(&to.request) else { return };
        let Op::Allocate { call, attempt, .. } = op else { return };
        self.at(self.now, Event::Heard { asker, op, answer: None });
        self.promises.allocate_closes(call, started + BUDGET);
        let is_hasty = self.settings.sabotage == Some(Sabotage::HastyDoubts);
        let due = self.now + if is_hasty { 0 } else { BUDGET };
        self.note(None, Some(call), || format!("r{}: c{call} hangs up", to.router));
        let debt = Op::Release { call, pod: None, stems_from: Some(attempt) };
        self.routers[to.router].debts.push((due, debt));
    }

    fn try_once(&mut self, to: Ticket) {
        let Some(open) = self.routers[to.router].open.get_mut(&to.request) else { return };
        open.number = to.number;
        let limit = open.started + if to.number == 1 { FIRST_TRY } else { BUDGET };
        let mut op = open.op.clone();
        let mut not_after = Some(limit).filter(|_| !op.is_timeless());
        match self.settings.sabotage {
            Some(Sabotage::LateTries) if not_after.is_some() => {
                not_after = Some(open.started + BUDGET);
            }
            Some(Sabotage::FreshAttempts) if to.number > 1 => {
                self.attempts += 1;
                if let Op::Allocate { attempt, .. } = &mut op {
                    *attempt = self.attempts;
                    open.op = op.clone();
                }
            }
            _ => {}
        }
        self.note(op.pod(), op.call(), || format!("r{}: try {} of {op:?}", to.router, to.number));
        // A line that breaks ends a try at once only where nothing has to be waited out.
        let hastes = op.is_timeless() || self.settings.sabotage == Some(Sabotage::HastyTries);
        let breaks = if hastes { self.breaks() } else { None };
        self.at(breaks.map_or(limit, |at| at.min(limit)), Event::TryEnds { to });
        let is_twice = self.settings.sabotage == Some(Sabotage::ExecutedTwice);
        if let Some(delay) = self.delay() {
            let op = op.clone();
            self.at(self.now + delay, Event::Executed { to, op, not_after });
        }
        if is_twice && let Some(delay) = self.delay() {
            self.at(self.now + delay * 2, Event::Executed { to, op, not_after: None });
        }
    }

    /// A request reaches the store.
    pub(crate) fn executed(&mut self, to: Ticket, op: Op, not_after: Option<Millis>) {
        let lag = self.dice.between(1, 30);
        let (answer, leaves) = if not_after.is_some_and(|limit| self.now >= limit) {
            (Answer::Late, self.now)
        } else if let (Op::Allocate { call, .. }, Some(Sabotage::TwoSteps)) =
            (&op, self.settings.sabotage)
            && let Some((pod, pool)) = self.store.peek(*call)
        {
            let pause = self.dice.between(1, 30);
            let call = *call;
            return self.at(self.now + pause, Event::SecondHalf { to, call, pod, pool });
        } else {
            self.store.execute(&op, self.now, lag)
        };
        self.note(op.pod(), op.call(), || format!("store: {op:?}: {answer:?}"));
        let generation = self.store.generation;
        self.at(leaves, Event::Leaves { to, answer, generation });
    }

    /// An answer leaves the store. It may be lost, and it may come twice.
    pub(crate) fn leaves(&mut self, to: Ticket, answer: Answer, generation: u32) {
        if generation != self.store.generation {
            return;
        }
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay() {
                self.at(self.now + delay, Event::Answered { to, answer: answer.clone() });
            }
        }
    }

    pub(crate) fn answered(&mut self, to: Ticket, answer: Answer) {
        let router = &mut self.routers[to.router];
        // The connection of a try that is over is closed.
        let is_current = |open: &&mut Open| open.number == to.number && router.life == to.life;
        let Some(open) = router.open.get_mut(&to.request).filter(is_current) else { return };
        if answer != Answer::Late {
            return self.close(to, Some(answer));
        }
        if to.number == 1 {
            self.try_once(Ticket { number: 2, ..to });
        } else if open.may_have_run {
            self.close(to, None);
        } else {
            // It did not run, and will not.
            open.op = without_doubt(open.op.clone());
            self.close(to, None);
        }
    }

    pub(crate) fn try_ends(&mut self, to: Ticket) {
        let router = &mut self.routers[to.router];
        let is_current = |open: &&mut Open| open.number == to.number && router.life == to.life;
        let Some(open) = router.open.get_mut(&to.request).filter(is_current) else { return };
        open.may_have_run = true;
        // (where a line breaks, there may not be another)
        let is_cut_off = self.now < open.started + FIRST_TRY && self.dice.percent(50);
        match to.number {
            1 if !is_cut_off => self.try_once(Ticket { number: 2, ..to }),
            _ => self.close(to, None),
        }
    }

    /// A request is over, with an answer or without.
    fn close(&mut self, to: Ticket, answer: Option<Answer>) {
        let Some(Open { asker, op, .. }) = self.routers[to.router].open.remove(&to.request) else {
            return;
        };
        if let Op::Allocate { call, .. } = &op {
            self.promises.allocate_closes(*call, self.now);
        }
        if answer.is_none() {
            self.note(op.pod(), op.call(), || format!("r{}: gave up {op:?}", to.router));
            let debt = match &op {
                Op::Allocate { attempt: 0, .. } => None,
                Op::Allocate { call, attempt, .. } => {
                    Some(Op::Release { call: *call, pod: None, stems_from: Some(*attempt) })
                }
                Op::Release { .. } => Some(op.clone()),
                _ => None,
            };
            let due = self.now;
            self.routers[to.router].debts.extend(debt.map(|debt| (due, debt)));
        }
        match asker {
            Asker::Debt => {
                if let (Op::Release { call, stems_from: Some(_), .. }, Some(_)) = (&op, &answer) {
                    self.promises.taken_back(*call, self.now);
                }
            }
            // It lives in the same process.
            Asker::Leader { .. } => self.heard(asker, op, answer),
            Asker::Client { .. } | Asker::Operator { .. } => {
                for _ in 0..self.copies() {
                    if let Some(delay) = self.delay() {
                        let (op, answer) = (op.clone(), answer.clone());
                        self.at(self.now + delay, Event::Heard { asker, op, answer });
                    }
                }
            }
        }
    }

    pub(crate) fn debts_due(&mut self, router: usize) {
        let debts = &mut self.routers[router].debts;
        for (_, debt) in debts.extract_if(.., |(due, _)| *due <= self.now).collect::<Vec<_>>() {
            self.ask(router, Asker::Debt, debt);
        }
        self.at(self.now + 200, Event::DebtsDue { router });
    }

    /// Everything that a router had under way is forgotten; what it sent is on its way.
    pub(crate) fn router_dies(&mut self, router: usize) {
        let it = &mut self.routers[router];
        it.life += 1;
        it.debts.clear();
        let open = std::mem::take(&mut it.open);
        self.note(None, None, || format!("r{router}: died"));
        for open in open.into_values() {
            match (open.op, open.asker) {
                (Op::Allocate { call, .. }, _) => {
                    self.promises.allocate_closes(call, open.started + BUDGET);
                }
                (_, Asker::Leader { leader, .. }) => self.leaders[leader].restart(),
                _ => {}
            }
        }
    }
}

/// An allocation of which it is clear that it did not happen.
fn without_doubt(op: Op) -> Op {
    match op {
        Op::Allocate { call, is_merchant, .. } => Op::Allocate { call, is_merchant, attempt: 0 },
        other => other,
    }
}
