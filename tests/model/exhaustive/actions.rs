//! The possible actions in a state of the small model, and their effect.

use store::retry::{self, Deadline, Retry};

use super::{
    ALLOCATIONS, CALLS, DRAINED, PODS,
    state::{CALL_OF, Drain, PodState, Released, Request, Sender, Stage, State},
    store::{Op, Reply, Stores},
};
use crate::simulation::InjectedDefect;

#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    /// A router starts an allocation.
    Allocate {
        allocation: u8,
    },
    /// The store executes a request, and the reply arrives. An allocation takes the preferred pod if
    /// it is free.
    Deliver {
        request: Request,
        preferred: u8,
    },
    /// The store executes a request, and the reply is lost or late.
    LoseReply {
        request: Request,
        preferred: u8,
    },
    /// A request is lost or late.
    LoseRequest {
        request: Request,
    },
    Duplicate {
        request: Request,
    },
    Release {
        call: u8,
    },
    EndLease {
        call: u8,
    },
    Drain,
    Undrain,
    ChangePod {
        pod: u8,
        to: PodState,
    },
    Elect,
    /// A leader writes a pod whose state differs from the one that it last wrote.
    Write {
        leader: u8,
        pod: u8,
    },
    /// A leader starts again with its epoch.
    Restart {
        leader: u8,
    },
}

/// All possible actions.
pub(super) fn actions(state: &State, stores: &Stores) -> Vec<Action> {
    let mut actions = Vec::new();
    for allocation in 0..ALLOCATIONS as u8 {
        // Symmetry: the last two calls are interchangeable, and so are the routers.
        let before = [None, Some(0), None, Some(2)][allocation as usize];
        let is_next =
            before.is_none_or(|it: usize| state.allocations[it].stage != Stage::NotStarted);
        let is_started = state.allocations[allocation as usize].stage != Stage::NotStarted;
        if !is_started && is_next && CALL_OF[allocation as usize] < state.left.calls {
            actions.push(Action::Allocate { allocation });
        }
    }
    for (index, request) in state.requests.iter().enumerate() {
        let request = *request;
        if index > 0 && state.requests[index - 1] == request {
            continue;
        }
        let choices = if matches!(request.op, Op::Allocate { .. }) { PODS as u8 } else { 1 };
        for preferred in 0..choices {
            actions.push(Action::Deliver { request, preferred });
            if state.left.faults > 0 {
                actions.push(Action::LoseReply { request, preferred });
            }
        }
        if state.left.faults > 0 {
            actions.push(Action::LoseRequest { request });
        }
        let has_no_deadline = matches!(request.op, Op::Release { .. });
        if has_no_deadline && state.left.duplicates > 0 {
            actions.push(Action::Duplicate { request });
        }
    }
    for call in 0..CALLS {
        let is_started =
            allocations_of(call as u8).any(|it| state.allocations[it].stage != Stage::NotStarted);
        if is_started && state.calls[call].released == Released::No {
            actions.push(Action::Release { call: call as u8 });
        }
        if stores.pod_of(state.store, call).is_some() && state.left.leases > 0 {
            actions.push(Action::EndLease { call: call as u8 });
        }
    }
    if state.left.drains {
        match state.drain {
            Drain::No => actions.push(Action::Drain),
            Drain::Sent | Drain::UndrainSent => {}
            Drain::Acknowledged => actions.push(Action::Undrain),
        }
    }
    if state.left.leaders {
        leader_actions(state, &mut actions);
    }
    actions
}

/// The allocations of a call.
fn allocations_of(call: u8) -> impl Iterator<Item = usize> {
    (0..ALLOCATIONS).filter(move |allocation| CALL_OF[*allocation] == call)
}

fn leader_actions(state: &State, actions: &mut Vec<Action>) {
    // Only the first pod changes.
    let next: &[PodState] = match state.cluster[0] {
        PodState::Ready { uid: 0 } => {
            &[PodState::Terminating { uid: 0 }, PodState::Ready { uid: 1 }]
        }
        PodState::Terminating { uid: 0 } => {
            &[PodState::Ready { uid: 1 }, PodState::Gone { uid: 0 }]
        }
        _ => &[],
    };
    actions.extend(next.iter().map(|to| Action::ChangePod { pod: 0, to: *to }));
    if state.leaders[1].epoch == 0 && state.epoch < 2 {
        actions.push(Action::Elect);
    }
    for leader in 0..2 {
        let it = &state.leaders[leader];
        let leader = leader as u8;
        if it.epoch == 0 {
            continue;
        }
        if it.is_busy {
            continue;
        }
        if !it.has_begun {
            actions.push(Action::Restart { leader });
            continue;
        }
        for pod in 0..PODS {
            let (is, was) = (state.cluster[pod], it.written[pod]);
            let is_gone = matches!(is, PodState::Gone { .. });
            let was_gone = was.is_none_or(|it| matches!(it, PodState::Gone { .. }));
            if was != Some(is) && !(is_gone && was_gone) {
                actions.push(Action::Write { leader, pod: pod as u8 });
            }
        }
    }
}

/// Applies an action. Returns the next state, or the violated invariant.
pub(super) fn apply(
    state: &State,
    action: Action,
    stores: &mut Stores,
    defect: Option<InjectedDefect>,
) -> Result<State, String> {
    let mut next = state.clone();
    match action {
        Action::Allocate { allocation } => allocate(&mut next, allocation),
        Action::Deliver { request, preferred } => deliver(&mut next, request, preferred, stores)?,
        Action::LoseReply { request, preferred } => {
            next.left.faults -= 1;
            next.remove(request);
            next.store = stores.step(next.store, request.op, preferred).0;
            time_out(&mut next, request.from);
        }
        Action::LoseRequest { request } => {
            next.left.faults -= 1;
            // A request that is late for its router has missed its deadline at the store.
            let may_arrive_later = defect == Some(InjectedDefect::LateFirstTry)
                && matches!(
                    request.from,
                    Sender::Allocation { try_number: 1, .. } | Sender::Leader { .. }
                );
            if !may_arrive_later {
                next.remove(request);
            }
            time_out(&mut next, request.from);
        }
        Action::Duplicate { request } => {
            next.left.duplicates -= 1;
            next.send(request.from, request.op);
        }
        Action::Release { call } => release(&mut next, call),
        Action::EndLease { call } => {
            next.calls[call as usize].has_lease = false;
            next.left.leases -= 1;
            next.store = stores.step(next.store, Op::Expire { call }, 0).0;
        }
        Action::Drain => {
            next.drain = Drain::Sent;
            next.send(Sender::Operator, Op::Drain { pod: DRAINED });
        }
        Action::Undrain => {
            next.drain = Drain::UndrainSent;
            next.allocations.iter_mut().for_each(|it| it.leaving &= !(1 << DRAINED));
            next.send(Sender::Operator, Op::Undrain { pod: DRAINED });
        }
        Action::ChangePod { pod, to } => {
            next.cluster[pod as usize] = to;
            if !matches!(to, PodState::Terminating { .. }) {
                next.agent_ends(pod as usize);
            }
        }
        Action::Elect => {
            next.leaders[1].epoch = 2;
            send_epoch(&mut next, 1);
        }
        Action::Restart { leader } => send_epoch(&mut next, leader),
        Action::Write { leader, pod } => write(&mut next, leader, pod, defect),
    }
    next.simplify();
    Ok(next)
}

/// A router starts an allocation.
fn allocate(state: &mut State, allocation: u8) {
    let (sound, leaving, call) = (state.known, state.leaving(), CALL_OF[allocation as usize]);
    state.calls[call as usize].is_settled = false;
    let it = &mut state.allocations[allocation as usize];
    (it.stage, it.sound, it.leaving) = (Stage::Pending { try_number: 1 }, sound, leaving);
    let sender = Sender::Allocation { allocation, try_number: 1 };
    state.send(sender, Op::Allocate { call, allocation });
}

/// A client releases its call.
fn release(state: &mut State, call: u8) {
    let pod = state.held(call as usize).next();
    let is_pending = |it: usize| matches!(state.allocations[it].stage, Stage::Pending { .. });
    let has_pending = allocations_of(call).any(is_pending);
    let it = &mut state.calls[call as usize];
    (it.released, it.is_settled) = (Released::Sent, !has_pending);
    state.send(Sender::Client { call }, Op::Release { call, pod, compensates: None });
}

/// The store executes a request, and its sender receives the reply.
fn deliver(
    state: &mut State,
    request: Request,
    preferred: u8,
    stores: &mut Stores,
) -> Result<(), String> {
    let Request { from, op } = request;
    state.remove(request);
    let (store, reply) = stores.step(state.store, op, preferred);
    state.store = store;
    receive(state, from, op, reply)?;
    if let (Sender::Leader { leader, .. }, Op::Epoch { .. }) = (from, op)
        && state.leaders[leader as usize].has_begun
    {
        // The leader lists the pods and compares them with those of the store.
        let has = |pod| stores.pod(store, pod);
        state.leaders[leader as usize].written = std::array::from_fn(has);
    }
    Ok(())
}

/// The action of the retry protocol after `tries` tries without a reply.
fn after_lost_tries(tries: u8) -> retry::Action {
    let (mut retry, mut action) = Retry::start(Deadline::Enforced);
    for _ in 0..tries {
        retry.on(retry::Event::NoReply { is_overloaded: false });
        action = retry.on(retry::Event::Waited);
    }
    action
}

/// The reply to a request is lost.
fn time_out(state: &mut State, sender: Sender) {
    match sender {
        Sender::Allocation { allocation, try_number } => {
            let call = CALL_OF[allocation as usize];
            let stage = &mut state.allocations[allocation as usize].stage;
            if *stage != (Stage::Pending { try_number }) {
                return;
            }
            if let retry::Action::GiveUp { .. } = after_lost_tries(try_number) {
                *stage = Stage::Finished;
                let op = Op::Release { call, pod: None, compensates: Some(allocation) };
                state.send(Sender::Compensation { allocation }, op);
            } else {
                let try_number = try_number + 1;
                *stage = Stage::Pending { try_number };
                let sender = Sender::Allocation { allocation, try_number };
                state.send(sender, Op::Allocate { call, allocation });
            }
        }
        Sender::Leader { leader, .. } => {
            let it = &mut state.leaders[leader as usize];
            (it.has_begun, it.is_busy, it.written) = (false, false, [None; PODS]);
        }
        Sender::Compensation { .. } | Sender::Client { .. } | Sender::Operator => {}
    }
}

/// A leader sends its epoch before any other write.
fn send_epoch(state: &mut State, leader: u8) {
    let epoch = state.leaders[leader as usize].epoch;
    state.leaders[leader as usize].is_busy = true;
    let is_replaced = epoch < state.epoch;
    state.send(Sender::Leader { leader, is_replaced }, Op::Epoch { epoch });
}

fn write(state: &mut State, leader: u8, pod: u8, defect: Option<InjectedDefect>) {
    let epoch = state.leaders[leader as usize].epoch;
    let is_replaced = epoch < state.epoch;
    let epoch = Some(epoch).filter(|_| defect != Some(InjectedDefect::NoFencing));
    let op = match state.cluster[pod as usize] {
        PodState::Ready { uid } => Op::Observe { pod, uid, is_terminating: false, epoch },
        PodState::Terminating { uid } => Op::Observe { pod, uid, is_terminating: true, epoch },
        PodState::Gone { uid } => Op::Remove { pod, uid, epoch },
    };
    state.leaders[leader as usize].is_busy = true;
    state.send(Sender::Leader { leader, is_replaced }, op);
}

fn receive(state: &mut State, sender: Sender, op: Op, reply: Reply) -> Result<(), String> {
    match sender {
        Sender::Allocation { allocation, try_number } => {
            let it = &mut state.allocations[allocation as usize];
            if it.stage != (Stage::Pending { try_number }) {
                return Ok(());
            }
            match reply {
                Reply::Allocated { pod } => {
                    let is_only = allocations_of(CALL_OF[allocation as usize]).count() == 1;
                    if is_only && it.leaving & 1 << pod != 0 {
                        return Err(format!("I5: p{pod} accepts no new calls, but was allocated"));
                    }
                    it.stage = Stage::Allocated { pod };
                }
                Reply::FreePod { pod } => {
                    let call = CALL_OF[allocation as usize];
                    state.send(sender, Op::WriteCall { call, allocation, pod });
                }
                _ => it.stage = Stage::Finished,
            }
        }
        Sender::Client { call } => state.calls[call as usize].released = Released::Acknowledged,
        Sender::Operator => {
            if reply == Reply::Drained {
                state.drain = Drain::Acknowledged;
            }
        }
        Sender::Compensation { .. } => {}
        Sender::Leader { leader, is_replaced } => {
            leader_receives(state, leader, is_replaced, op, reply)?
        }
    }
    Ok(())
}

fn leader_receives(
    state: &mut State,
    leader: u8,
    is_replaced: bool,
    op: Op,
    reply: Reply,
) -> Result<(), String> {
    let cluster = state.cluster;
    let it = &mut state.leaders[leader as usize];
    it.is_busy = false;
    if reply == Reply::Fenced {
        (it.epoch, it.has_begun) = (0, false);
        it.written = [None; PODS];
        return Ok(());
    }
    if is_replaced && reply == Reply::Accepted {
        return Err(format!("I9: epoch {} was superseded, but wrote {op:?}", it.epoch));
    }
    state.epoch = state.epoch.max(it.epoch);
    match op {
        Op::Epoch { .. } => it.has_begun = true,
        Op::Observe { pod, uid, is_terminating, .. } => {
            let (pod, bit) = (pod as usize, 1 << pod);
            let observed = if is_terminating {
                PodState::Terminating { uid }
            } else {
                PodState::Ready { uid }
            };
            it.written[pod] = Some(observed);
            let is_current = match cluster[pod] {
                PodState::Ready { uid: now } | PodState::Terminating { uid: now } => now == uid,
                PodState::Gone { .. } => false,
            };
            if is_current {
                state.known |= bit;
                state.terminating |= if is_terminating { bit } else { 0 };
            }
        }
        Op::Remove { pod, uid, .. } => it.written[pod as usize] = Some(PodState::Gone { uid }),
        _ => {}
    }
    Ok(())
}
