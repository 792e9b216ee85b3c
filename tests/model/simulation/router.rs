//! Routers: they pass requests on to the store with the retry protocol of the Redis client, and
//! compensate allocations that may have happened although their callers got no reply.

use std::{collections::BTreeMap, time::Duration};

use fleet::Millis;
use store::retry::{self, Action, Deadline, Retry};

use super::{
    InjectedDefect, Simulation,
    events::{Event, Ticket},
    requests::{Op, Reply},
};

/// The sender of a request, with the context to check the reply.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Requester {
    Client {
        sent: Millis,
    },
    Operator {
        sent: Millis,
    },
    Leader {
        leader: usize,
        epoch: u64,
        /// The epoch was known to be superseded when the leader wrote.
        is_replaced: bool,
    },
    /// The gateway of a router.
    Gateway {
        router: usize,
        incarnation: u32,
        sent: Millis,
    },
    /// A router that flushes a deferred write.
    Router,
}

/// A request that a router has not finished.
struct Pending {
    requester: Requester,
    op: Op,
    started: Millis,
    retry: Retry,
    /// Number of the last action. Replies and timers of earlier actions are ignored: the client has
    /// dropped their connection.
    step: u8,
    tries: u8,
    is_connection_broken: bool,
}

#[derive(Default)]
pub(super) struct Router {
    /// Counts restarts.
    incarnation: u32,
    last_request: u64,
    pending: BTreeMap<u64, Pending>,
    /// Deferred writes, and when each is due.
    deferred: Vec<(Millis, Op)>,
}

pub(super) fn millis(duration: Duration) -> Millis {
    duration.as_millis() as Millis
}

impl Router {
    pub(super) fn incarnation(&self) -> u32 {
        self.incarnation
    }
}

impl Simulation {
    /// A router starts a request.
    pub(crate) fn start_request(&mut self, router: usize, requester: Requester, mut op: Op) {
        self.last_request_id += 1;
        if let Op::Allocate { call, request_id, .. } = &mut op {
            *request_id = self.last_request_id;
            self.checker.allocate_started(*call);
        }
        let may_disconnect =
            matches!((&requester, &op), (Requester::Client { .. }, Op::Allocate { .. }));
        let deadline = if op.has_deadline() { Deadline::Enforced } else { Deadline::None };
        let (retry, action) = Retry::start(deadline);
        let it = &mut self.routers[router];
        it.last_request += 1;
        let (request, incarnation) = (it.last_request, it.incarnation);
        let pending = Pending {
            requester,
            op,
            started: self.now,
            retry,
            step: 0,
            tries: 0,
            is_connection_broken: false,
        };
        it.pending.insert(request, pending);
        let ticket = Ticket { router, incarnation, request, step: 0 };
        if may_disconnect && let Some(at) = self.connection_break() {
            self.at(at, Event::CallerDisconnects { ticket });
        }
        self.perform(ticket, action);
    }

    /// The request of a ticket, unless it is finished or the router has crashed since.
    fn pending(&mut self, ticket: Ticket) -> Option<&mut Pending> {
        let router = &mut self.routers[ticket.router];
        let is_same = router.incarnation == ticket.incarnation;
        router.pending.get_mut(&ticket.request).filter(|_| is_same)
    }

    /// A caller disconnects. Its request is still in flight.
    pub(crate) fn caller_disconnects(&mut self, ticket: Ticket) {
        if self.pending(ticket).is_none() {
            return;
        }
        let router = &mut self.routers[ticket.router];
        let Some(pending) = router.pending.remove(&ticket.request) else { return };
        let Pending { requester, op, started, .. } = pending;
        let Op::Allocate { call, request_id, .. } = op else { return };
        self.at(self.now, Event::ResponseArrives { requester, op, reply: None });
        self.checker.allocate_finished(call, started + millis(retry::REQUEST_TIMEOUT));
        let is_early = self.settings.defect == Some(InjectedDefect::CompensateTooEarly);
        let due = self.now + if is_early { 0 } else { millis(retry::REQUEST_TIMEOUT) };
        self.log(None, Some(call), || format!("r{}: c{call} disconnects", ticket.router));
        let write = Op::Release { call, pod: None, request_id: Some(request_id) };
        self.routers[ticket.router].deferred.push((due, write));
    }

    /// Performs an action of the retry protocol.
    fn perform(&mut self, ticket: Ticket, action: Action) {
        let Some(pending) = self.pending(ticket) else { return };
        pending.step += 1;
        let (step, started) = (pending.step, pending.started);
        let ticket = Ticket { step, ..ticket };
        match action {
            Action::Send { until, not_after } => {
                let not_after = not_after.map(|not_after| started + millis(not_after));
                self.send(ticket, started + millis(until), not_after);
            }
            Action::Wait { until } => {
                let is_skipped = self.settings.defect == Some(InjectedDefect::RetryWithoutWait);
                let until = if is_skipped { self.now } else { started + millis(until) };
                self.at(until, Event::Retry { ticket, event: retry::Event::Waited });
            }
            Action::GiveUp { may_have_run } => self.give_up(ticket, may_have_run),
        }
    }

    /// Sends a request to the store, and schedules the end of the try.
    fn send(&mut self, ticket: Ticket, until: Millis, mut not_after: Option<Millis>) {
        let (router, defect, next_id) =
            (ticket.router, self.settings.defect, self.last_request_id + 1);
        let Some(pending) = self.pending(ticket) else { return };
        pending.tries += 1;
        let (tries, was_broken) = (pending.tries, pending.is_connection_broken);
        match defect {
            Some(InjectedDefect::LateFirstTry) if not_after.is_some() => {
                not_after = Some(pending.started + millis(retry::REQUEST_TIMEOUT));
            }
            Some(InjectedDefect::NewRequestIdOnRetry) if tries > 1 => {
                if let Op::Allocate { request_id, .. } = &mut pending.op {
                    *request_id = next_id;
                }
                self.last_request_id = next_id;
            }
            _ => {}
        }
        let Some(pending) = self.pending(ticket) else { return };
        let op = pending.op.clone();
        if was_broken && self.dice.percent(50) {
            let event = retry::Event::NotSent;
            return self.at(self.now, Event::Retry { ticket, event });
        }
        self.log(op.pod(), op.call(), || format!("r{router}: try {tries} of {op:?}"));
        match self.connection_break().filter(|at| *at < until) {
            Some(at) => self.at(at, Event::ConnectionBreaks { ticket }),
            None => {
                let is_overloaded = self.dice.percent(10);
                let event = retry::Event::NoReply { is_overloaded };
                self.at(until, Event::Retry { ticket, event });
            }
        }
        let is_duplicated = defect == Some(InjectedDefect::DuplicateExecution);
        if self.now < self.gateways[router].cut_off_until {
            return;
        }
        if let Some(delay) = self.delay() {
            let op = op.clone();
            self.at(self.now + delay, Event::StoreReceives { ticket, op, not_after });
        }
        if is_duplicated && let Some(delay) = self.delay() {
            self.at(self.now + delay * 2, Event::StoreReceives { ticket, op, not_after: None });
        }
    }

    /// A request reaches the store.
    pub(crate) fn store_receives(&mut self, ticket: Ticket, op: Op, not_after: Option<Millis>) {
        let lag = self.dice.between(1, 30);
        let (reply, leaves_at) = if not_after.is_some_and(|limit| self.now >= limit) {
            (Reply::Late, self.now)
        } else if let (Op::Allocate { call, .. }, Some(InjectedDefect::NonAtomicAllocate)) =
            (&op, self.settings.defect)
            && let Some((pod, pool)) = self.store.read_free_pod(*call)
        {
            let pause = self.dice.between(1, 30);
            let call = *call;
            return self.at(self.now + pause, Event::SecondWrite { ticket, call, pod, pool });
        } else {
            self.store.execute(&op, self.now, lag)
        };
        self.log(op.pod(), op.call(), || format!("store: {op:?}: {reply:?}"));
        let generation = self.store.generation;
        self.at(leaves_at, Event::ReplyLeaves { ticket, reply, generation });
    }

    /// A reply leaves the store. It may be lost or duplicated.
    pub(crate) fn reply_leaves(&mut self, ticket: Ticket, reply: Reply, generation: u32) {
        if generation != self.store.generation {
            return;
        }
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay() {
                self.at(self.now + delay, Event::ReplyArrives { ticket, reply: reply.clone() });
            }
        }
    }

    pub(crate) fn reply_arrives(&mut self, ticket: Ticket, reply: Reply) {
        if reply == Reply::Late {
            return self.retry_event(ticket, retry::Event::Expired);
        }
        if self.pending(ticket).is_some_and(|pending| pending.step == ticket.step) {
            self.finish(ticket, Some(reply));
        }
    }

    pub(crate) fn connection_breaks(&mut self, ticket: Ticket) {
        if let Some(pending) = self.pending(ticket).filter(|it| it.step == ticket.step) {
            pending.is_connection_broken = true;
            self.retry_event(ticket, retry::Event::NoReply { is_overloaded: false });
        }
    }

    /// Passes an event on to the retry protocol, unless it belongs to an earlier action.
    pub(crate) fn retry_event(&mut self, ticket: Ticket, event: retry::Event) {
        if let Some(pending) = self.pending(ticket).filter(|it| it.step == ticket.step) {
            let action = pending.retry.on(event);
            self.perform(ticket, action);
        }
    }

    /// Refuses a request, and defers the write that it leaves behind.
    fn give_up(&mut self, ticket: Ticket, may_have_run: bool) {
        let Some(pending) = self.pending(ticket) else { return };
        let op = pending.op.clone();
        self.log(op.pod(), op.call(), || format!("r{}: gave up {op:?}", ticket.router));
        let write = match op {
            Op::Allocate { call, request_id, .. } if may_have_run => {
                Some(Op::Release { call, pod: None, request_id: Some(request_id) })
            }
            Op::Release { .. } | Op::Detach { .. } => Some(op),
            _ => None,
        };
        let due = self.now;
        self.routers[ticket.router].deferred.extend(write.map(|write| (due, write)));
        self.finish(ticket, None);
    }

    /// Finishes a request, with a reply of the store or with an error.
    fn finish(&mut self, ticket: Ticket, reply: Option<Reply>) {
        let router = &mut self.routers[ticket.router];
        let Some(pending) = router.pending.remove(&ticket.request) else { return };
        let Pending { requester, op, .. } = pending;
        if let Op::Allocate { call, .. } = &op {
            self.checker.allocate_finished(*call, self.now);
        }
        match requester {
            Requester::Router => {
                if let (Op::Release { call, request_id: Some(_), .. }, Some(_)) = (&op, &reply) {
                    self.checker.compensated(*call, self.now);
                }
            }
            // A leader is part of the router process.
            Requester::Leader { .. } | Requester::Gateway { .. } => {
                self.response_arrives(requester, op, reply);
            }
            Requester::Client { .. } | Requester::Operator { .. } => {
                for _ in 0..self.copies() {
                    if let Some(delay) = self.delay() {
                        let (op, reply) = (op.clone(), reply.clone());
                        self.at(self.now + delay, Event::ResponseArrives { requester, op, reply });
                    }
                }
            }
        }
    }

    pub(crate) fn flush_deferred(&mut self, router: usize) {
        let deferred = &mut self.routers[router].deferred;
        let due: Vec<_> = deferred.extract_if(.., |(due, _)| *due <= self.now).collect();
        for (_, write) in due {
            self.start_request(router, Requester::Router, write);
        }
        self.at(self.now + 200, Event::FlushDeferred { router });
    }

    /// A router loses its pending requests and deferred writes; sent messages stay in flight.
    pub(crate) fn router_crashes(&mut self, router: usize) {
        let it = &mut self.routers[router];
        it.incarnation += 1;
        it.deferred.clear();
        let pending = std::mem::take(&mut it.pending);
        self.log(None, None, || format!("r{router}: crashed"));
        self.gateway_dies(router);
        for pending in pending.into_values() {
            match (pending.op, pending.requester) {
                (Op::Allocate { call, .. }, _) => {
                    let last_effect = pending.started + millis(retry::REQUEST_TIMEOUT);
                    self.checker.allocate_finished(call, last_effect);
                }
                (_, Requester::Leader { leader, .. }) => self.leaders[leader].restart(),
                _ => {}
            }
        }
    }
}
