//! What can happen next in the small world, and what comes of it.

use super::{
    ATTEMPTS, CALLS, DRAINED, PODS,
    state::{CALL_OF, Drain, Released, Request, Seen, Stage, State, Who},
    store::{Answer, Op, Stores},
};
use crate::simulation::Sabotage;

#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    /// A router asks the store for a pod.
    Asks {
        attempt: u8,
    },
    /// The request comes, and the answer is heard. Of two pods that would do, the
    /// favoured one is given.
    Comes {
        request: Request,
        favoured: u8,
    },
    /// The request comes, and the answer is lost or too late.
    Unanswered {
        request: Request,
        favoured: u8,
    },
    /// The request is lost or too late.
    Lost {
        request: Request,
    },
    Twice {
        request: Request,
    },
    Releases {
        call: u8,
    },
    LeaseEnds {
        call: u8,
    },
    Drains,
    Undrains,
    ClusterTurns {
        pod: u8,
        to: Seen,
    },
    Elected,
    /// A leader sees that a pod is not as the store has it, and writes.
    Writes {
        leader: u8,
        pod: u8,
    },
    BeginsAgain {
        leader: u8,
    },
}

/// Everything that can happen next.
pub(super) fn actions(state: &State, stores: &Stores) -> Vec<Action> {
    let mut actions = Vec::new();
    for attempt in 0..ATTEMPTS as u8 {
        // The last two calls are alike, and so are the two routers: they come in order.
        let before = [None, Some(0), None, Some(2)][attempt as usize];
        let is_next = before.is_none_or(|it: usize| state.attempts[it].stage != Stage::NotAsked);
        let is_asked = state.attempts[attempt as usize].stage != Stage::NotAsked;
        if !is_asked && is_next && CALL_OF[attempt as usize] < state.left.calls {
            actions.push(Action::Asks { attempt });
        }
    }
    for (index, request) in state.requests.iter().enumerate() {
        let request = *request;
        if index > 0 && state.requests[index - 1] == request {
            continue;
        }
        let choices = if matches!(request.op, Op::Allocate { .. }) { PODS as u8 } else { 1 };
        for favoured in 0..choices {
            actions.push(Action::Comes { request, favoured });
            if state.left.faults > 0 {
                actions.push(Action::Unanswered { request, favoured });
            }
        }
        if state.left.faults > 0 {
            actions.push(Action::Lost { request });
        }
        let is_timeless = matches!(request.op, Op::Release { .. });
        if is_timeless && state.left.duplicates > 0 {
            actions.push(Action::Twice { request });
        }
    }
    for call in 0..CALLS {
        let is_asked = of_call(call as u8).any(|it| state.attempts[it].stage != Stage::NotAsked);
        if is_asked && state.calls[call].released == Released::No {
            actions.push(Action::Releases { call: call as u8 });
        }
        if stores.pod_of(state.store, call).is_some() && state.left.leases > 0 {
            actions.push(Action::LeaseEnds { call: call as u8 });
        }
    }
    if state.left.drains {
        match state.drain {
            Drain::No => actions.push(Action::Drains),
            Drain::Asked | Drain::Unasked => {}
            Drain::Acknowledged => actions.push(Action::Undrains),
        }
    }
    if state.left.leaders {
        leader_actions(state, &mut actions);
    }
    actions
}

/// The attempts of a call.
fn of_call(call: u8) -> impl Iterator<Item = usize> {
    (0..ATTEMPTS).filter(move |attempt| CALL_OF[*attempt] == call)
}

fn leader_actions(state: &State, actions: &mut Vec<Action>) {
    // Only the first pod changes.
    let next: &[Seen] = match state.cluster[0] {
        Seen::Ready { uid: 0 } => &[Seen::Terminating { uid: 0 }, Seen::Ready { uid: 1 }],
        Seen::Terminating { uid: 0 } => &[Seen::Ready { uid: 1 }, Seen::Gone { uid: 0 }],
        _ => &[],
    };
    actions.extend(next.iter().map(|to| Action::ClusterTurns { pod: 0, to: *to }));
    if state.leaders[1].epoch == 0 && state.epoch < 2 {
        actions.push(Action::Elected);
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
            actions.push(Action::BeginsAgain { leader });
            continue;
        }
        for pod in 0..PODS {
            let (is, was) = (state.cluster[pod], it.written[pod]);
            let is_gone = matches!(is, Seen::Gone { .. });
            let was_gone = was.is_none_or(|it| matches!(it, Seen::Gone { .. }));
            if was != Some(is) && !(is_gone && was_gone) {
                actions.push(Action::Writes { leader, pod: pod as u8 });
            }
        }
    }
}

/// What comes of an action: a state, or what was broken.
pub(super) fn apply(
    state: &State,
    action: Action,
    stores: &mut Stores,
    sabotage: Option<Sabotage>,
) -> Result<State, String> {
    let mut next = state.clone();
    match action {
        Action::Asks { attempt } => {
            let (sound, leaving, call) = (next.known, next.leaving(), CALL_OF[attempt as usize]);
            next.calls[call as usize].is_settled = false;
            let it = &mut next.attempts[attempt as usize];
            (it.stage, it.sound, it.leaving) = (Stage::Waiting { number: 1 }, sound, leaving);
            next.send(Who::Attempt { attempt, number: 1 }, Op::Allocate { call, attempt });
        }
        Action::Comes { request, favoured } => comes(&mut next, request, favoured, stores)?,
        Action::Unanswered { request, favoured } => {
            next.left.faults -= 1;
            next.remove(request);
            next.store = stores.step(next.store, request.op, favoured).0;
            times_out(&mut next, request.from);
        }
        Action::Lost { request } => {
            next.left.faults -= 1;
            // One that is late for its router is late for the store as well.
            let is_kept = sabotage == Some(Sabotage::LateTries)
                && matches!(request.from, Who::Attempt { number: 1, .. } | Who::Leader { .. });
            if !is_kept {
                next.remove(request);
            }
            times_out(&mut next, request.from);
        }
        Action::Twice { request } => {
            next.left.duplicates -= 1;
            next.send(request.from, request.op);
        }
        Action::Releases { call } => {
            let pod = next.held(call as usize).next();
            let is_waiting = |it: usize| matches!(next.attempts[it].stage, Stage::Waiting { .. });
            let is_open = of_call(call).any(is_waiting);
            let it = &mut next.calls[call as usize];
            (it.released, it.is_settled) = (Released::Sent, !is_open);
            next.send(Who::Client { call }, Op::Release { call, pod, stems_from: None });
        }
        Action::LeaseEnds { call } => {
            next.calls[call as usize].has_lease = false;
            next.left.leases -= 1;
            next.store = stores.step(next.store, Op::Expire { call }, 0).0;
        }
        Action::Drains => {
            next.drain = Drain::Asked;
            next.send(Who::Operator, Op::Drain { pod: DRAINED });
        }
        Action::Undrains => {
            next.drain = Drain::Unasked;
            next.attempts.iter_mut().for_each(|it| it.leaving &= !(1 << DRAINED));
            next.send(Who::Operator, Op::Undrain { pod: DRAINED });
        }
        Action::ClusterTurns { pod, to } => {
            next.cluster[pod as usize] = to;
            if !matches!(to, Seen::Terminating { .. }) {
                next.agent_ends(pod as usize);
            }
        }
        Action::Elected => {
            next.leaders[1].epoch = 2;
            begins(&mut next, 1);
        }
        Action::BeginsAgain { leader } => begins(&mut next, leader),
        Action::Writes { leader, pod } => writes(&mut next, leader, pod, sabotage),
    }
    next.simplify();
    Ok(next)
}

/// The store executes a request, and its sender hears the answer.
fn comes(
    state: &mut State,
    request: Request,
    favoured: u8,
    stores: &mut Stores,
) -> Result<(), String> {
    let Request { from, op } = request;
    state.remove(request);
    let (store, answer) = stores.step(state.store, op, favoured);
    state.store = store;
    hears(state, from, op, answer)?;
    if let (Who::Leader { leader, .. }, Op::Epoch { .. }) = (from, op)
        && state.leaders[leader as usize].has_begun
    {
        // It lists the pods, and compares them with the store's.
        let has = |pod| stores.pod(store, pod);
        state.leaders[leader as usize].written = std::array::from_fn(has);
    }
    Ok(())
}

/// The answer to a request is lost.
fn times_out(state: &mut State, who: Who) {
    match who {
        Who::Attempt { attempt, number } => {
            let call = CALL_OF[attempt as usize];
            let stage = &mut state.attempts[attempt as usize].stage;
            if *stage != (Stage::Waiting { number }) {
                return;
            }
            if number == 1 {
                *stage = Stage::Waiting { number: 2 };
                state.send(Who::Attempt { attempt, number: 2 }, Op::Allocate { call, attempt });
            } else {
                *stage = Stage::Over;
                let op = Op::Release { call, pod: None, stems_from: Some(attempt) };
                state.send(Who::Doubt { attempt }, op);
            }
        }
        Who::Leader { leader, .. } => {
            let it = &mut state.leaders[leader as usize];
            (it.has_begun, it.is_busy, it.written) = (false, false, [None; PODS]);
        }
        Who::Doubt { .. } | Who::Client { .. } | Who::Operator => {}
    }
}

/// A leader makes its epoch known before all else.
fn begins(state: &mut State, leader: u8) {
    let epoch = state.leaders[leader as usize].epoch;
    state.leaders[leader as usize].is_busy = true;
    let is_replaced = epoch < state.epoch;
    state.send(Who::Leader { leader, is_replaced }, Op::Epoch { epoch });
}

fn writes(state: &mut State, leader: u8, pod: u8, sabotage: Option<Sabotage>) {
    let epoch = state.leaders[leader as usize].epoch;
    let is_replaced = epoch < state.epoch;
    let epoch = Some(epoch).filter(|_| sabotage != Some(Sabotage::AnyEpoch));
    let op = match state.cluster[pod as usize] {
        Seen::Ready { uid } => Op::Observe { pod, uid, is_terminating: false, epoch },
        Seen::Terminating { uid } => Op::Observe { pod, uid, is_terminating: true, epoch },
        Seen::Gone { uid } => Op::Remove { pod, uid, epoch },
    };
    state.leaders[leader as usize].is_busy = true;
    state.send(Who::Leader { leader, is_replaced }, op);
}

fn hears(state: &mut State, who: Who, op: Op, answer: Answer) -> Result<(), String> {
    match who {
        Who::Attempt { attempt, number } => {
            let it = &mut state.attempts[attempt as usize];
            if it.stage != (Stage::Waiting { number }) {
                return Ok(());
            }
            match answer {
                Answer::Given { pod } => {
                    let is_only = of_call(CALL_OF[attempt as usize]).count() == 1;
                    if is_only && it.leaving & 1 << pod != 0 {
                        return Err(format!("I5: p{pod} takes no new calls, and was given"));
                    }
                    it.stage = Stage::Told { pod };
                }
                Answer::Free { pod } => {
                    let call = CALL_OF[attempt as usize];
                    state.send(who, Op::Take { call, attempt, pod });
                }
                _ => it.stage = Stage::Over,
            }
        }
        Who::Client { call } => state.calls[call as usize].released = Released::Acknowledged,
        Who::Operator => {
            if answer == Answer::Drained {
                state.drain = Drain::Acknowledged;
            }
        }
        Who::Doubt { .. } => {}
        Who::Leader { leader, is_replaced } => {
            leader_hears(state, leader, is_replaced, op, answer)?
        }
    }
    Ok(())
}

fn leader_hears(
    state: &mut State,
    leader: u8,
    is_replaced: bool,
    op: Op,
    answer: Answer,
) -> Result<(), String> {
    let cluster = state.cluster;
    let it = &mut state.leaders[leader as usize];
    it.is_busy = false;
    if answer == Answer::Fenced {
        (it.epoch, it.has_begun) = (0, false);
        it.written = [None; PODS];
        return Ok(());
    }
    if is_replaced && answer == Answer::Taken {
        return Err(format!("I9: epoch {} was replaced, and wrote {op:?}", it.epoch));
    }
    state.epoch = state.epoch.max(it.epoch);
    match op {
        Op::Epoch { .. } => it.has_begun = true,
        Op::Observe { pod, uid, is_terminating, .. } => {
            let (pod, bit) = (pod as usize, 1 << pod);
            let seen = if is_terminating { Seen::Terminating { uid } } else { Seen::Ready { uid } };
            it.written[pod] = Some(seen);
            let is_there = match cluster[pod] {
                Seen::Ready { uid: now } | Seen::Terminating { uid: now } => now == uid,
                Seen::Gone { .. } => false,
            };
            if is_there {
                state.known |= bit;
                state.terminating |= if is_terminating { bit } else { 0 };
            }
        }
        Op::Remove { pod, uid, .. } => it.written[pod as usize] = Some(Seen::Gone { uid }),
        _ => {}
    }
    Ok(())
}
