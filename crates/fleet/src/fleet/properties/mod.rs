//! Property tests: random operations on a small fleet. An oracle that knows only the results that
//! callers received checks every step; the indexes are checked against the facts.

mod allocations;
mod indexes;
mod oracle;
mod outbound;
mod streams;

use proptest::prelude::*;

use self::{allocations::allocate, indexes::check_indexes, oracle::Oracle};
use super::*;
use crate::testing::{
    dice::Dice,
    invariants::State,
    operations::{Operation, Writer, table},
};

const CASES: u32 = 400;
const STEPS: usize = 300;
const MAX_PRINTED_OPERATIONS: usize = 20;
/// Shorter than a run, so that each run also covers the time after it.
const REREGISTRATION_WINDOW: Millis = 12_000;

/// Seeds of operations. A step without a seed is skipped, so that proptest can shrink a failing
/// run.
fn seeds() -> impl Strategy<Value = Vec<Option<u64>>> {
    prop::collection::vec(prop::option::weighted(0.999, any::<u64>().no_shrink()), STEPS)
}

/// The operations of a run; printed when a short run fails.
#[derive(Default)]
struct OperationLog(Vec<String>);

impl Drop for OperationLog {
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.len() <= MAX_PRINTED_OPERATIONS {
            println!("operations: {:#?}", self.0);
        }
    }
}

fn run(seeds: Vec<Option<u64>>) {
    let mut now = 1_000_000;
    let trusting_until = now + REREGISTRATION_WINDOW;
    let mut fleet = Fleet::new(table(0), trusting_until);
    fleet.enable_change_log();
    let mut journal = vec![
        Change::Began { trusting_until },
        Change::Tiers { tiers: table(0), by: String::new() },
    ];
    let (mut oracle, mut log) = (Oracle::default(), OperationLog::default());
    for seed in seeds.into_iter().flatten() {
        let mut dice = Dice(seed);
        if dice.roll(48) == 0 {
            let by = dice.between(0, 18_000) as i64 - 9_000;
            log.0.push(format!("{now} shift by {by}"));
            fleet.shift(by);
            oracle.shift(by);
            now = now.saturating_add_signed(by);
        } else {
            let operation = dice.operation(&mut fleet, now);
            log.0.push(format!("{now} {operation:?}"));
            step(&mut fleet, &mut oracle, &mut now, operation);
        }
        journal.extend(fleet.take_changes());
        oracle.observe_handoffs(&mut fleet, now);
        oracle.check_state(&fleet);
        assert_eq!(State::of(&fleet).violations(), []);
        check_indexes(&fleet);
    }
    let mut replayed = Fleet::new(table(3), 0);
    journal.into_iter().for_each(|change| replayed.apply(change));
    assert_eq!(State::of(&replayed).violations(), []);
    check_indexes(&replayed);
    assert_eq!(sorted_facts(&fleet), sorted_facts(&replayed), "the replayed journal differs");
    let mut compacted = Fleet::new(table(3), 0);
    fleet.facts().into_iter().for_each(|change| compacted.apply(change));
    assert_eq!(sorted_facts(&fleet), sorted_facts(&compacted), "the compacted journal differs");
}

fn sorted_facts(fleet: &Fleet) -> Vec<String> {
    // The time of the last claim of a list is not a fact.
    let fact = |change| match change {
        Change::List { digest, .. } => Change::List { digest, at: 0 },
        fact => fact,
    };
    let facts = fleet.facts().into_iter().map(fact);
    let mut facts: Vec<String> =
        facts.map(|change| serde_json::to_string(&change).unwrap()).collect();
    facts.sort();
    facts
}

fn step(fleet: &mut Fleet, oracle: &mut Oracle, now: &mut Millis, operation: Operation) {
    match operation {
        Operation::Allocate(request) => allocate(fleet, oracle, *now, &request),
        Operation::Release(request) => release(fleet, oracle, *now, &request),
        Operation::Renew(request) => renew(fleet, oracle, *now, &request),
        Operation::Confirm(request) => confirm(fleet, oracle, *now, &request),
        Operation::ExtendPending { time } => {
            fleet.extend_pending(time, *now);
            oracle.extend_pending(*now + time);
        }
        Operation::Attach(request) => streams::attach(fleet, oracle, *now, &request),
        Operation::Failover(request) => streams::failover(fleet, oracle, *now, &request),
        Operation::Detach(request) => streams::detach(fleet, oracle, *now, &request),
        Operation::Heartbeat { gateway, relayed } => {
            streams::heartbeat(fleet, oracle, *now, &gateway, &relayed);
        }
        Operation::Drain { pod, ttl } => {
            if let Ok(drained) = fleet.drain(&pod, ttl, *now) {
                assert_eq!(drained.active_calls, oracle.calls_on(&pod));
                let before = oracle.drains.insert(pod, drained.until);
                assert!(
                    before.is_none_or(|before| before <= drained.until),
                    "a drain was shortened"
                );
            }
        }
        Operation::Undrain { pod } => {
            if let Ok(undrained) = fleet.undrain(&pod) {
                assert_eq!(oracle.drains.remove(&pod).is_some(), undrained.was_draining);
            }
        }
        Operation::Sweep { limit } => sweep(fleet, oracle, *now, limit),
        Operation::Audit => {
            let names = fleet.pod_names();
            assert_eq!(fleet.audit(&names).repaired, 0, "an index differed from the facts");
        }
        Operation::Advance { time } => *now += time,
        Operation::Tiers { tiers, expected } => {
            let is_known = expected.as_ref().is_none_or(|known| *known == fleet.tiers);
            let is_done = is_known || tiers == fleet.tiers;
            let edit = Edit { expected: expected.as_ref(), by: "" };
            assert_eq!(fleet.apply_tiers(&tiers, edit).is_ok(), is_done);
        }
        Operation::Merchant { id, document, expected } => {
            let present = fleet.merchant(&id).map(str::to_owned);
            let is_known = expected.is_none_or(|known| known == present.as_deref().unwrap_or(""));
            let is_done = is_known || document == present.as_deref();
            let edit = Edit { expected, by: "" };
            assert_eq!(fleet.set_merchant(&id, document, edit).is_ok(), is_done);
        }
        Operation::Capacity { update, writer } => {
            let before = fleet.capacity(*now);
            let outcome = fleet.update_capacity(&update, writer.get(), *now);
            let refused = match &outcome {
                Err(CapacityRefused::Write(refused)) => Some(refused),
                _ => None,
            };
            oracle.check_write(&writer, refused);
            match outcome {
                Ok(_) => assert_eq!(fleet.capacity(*now).holder, update.holder),
                Err(_) => assert_eq!(fleet.capacity(*now), before, "a refused update"),
            }
        }
        Operation::Prescale(order) => {
            assert_eq!(fleet.prescale(&order, "", *now), Ok(()));
            let orders = fleet.capacity(*now).orders;
            assert_eq!(orders.contains(&order), order.until > *now);
        }
        Operation::DeletePrescale { id } => {
            let known = fleet.capacity(*now).orders.iter().any(|order| order.id == id);
            assert_eq!(fleet.delete_prescale(&id, "", *now), known);
        }
        Operation::Outbound(operation) => outbound::step(fleet, oracle, *now, &operation),
        pods => write_pods(fleet, oracle, *now, pods),
    }
}

fn release(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Release) {
    let pod_attempt = fleet.call(&request.call).map(|call| call.pod_attempt);
    let is_match = |pod: &&PodName| {
        request.pod.as_ref().is_none_or(|named| named == *pod)
            && (request.pod_attempt.is_none() || request.pod_attempt == pod_attempt)
    };
    let released_pod = oracle.calls.get(&request.call).filter(is_match);
    let waited = oracle.waiting.contains_key(&request.call) && request.pod.is_none()
        || oracle.handed.contains_key(&request.call) && released_pod.is_some();
    let is_attached = released_pod.is_some() && oracle.streams.contains_key(&request.call);
    match fleet.release(request, now) {
        Ok(released) => {
            assert_eq!(Some(&released.pod), released_pod, "I6");
            assert_eq!(released.is_ending, is_attached, "I13");
        }
        Err(NotReleased::NotFound) => assert!(released_pod.is_none() && !waited, "I6"),
        Err(NotReleased::WasWaiting { .. }) => assert!(waited, "the call did not wait"),
        Err(NotReleased::WasDialed) => {
            assert!(released_pod.is_none() && !waited, "I6");
            oracle.outbound.end_dial(&request.call);
        }
    }
    if is_attached {
        oracle.end_stream(&request.call, request.cause);
    } else if released_pod.is_some() {
        oracle.remove(&request.call);
    }
    if waited {
        oracle.waiting.remove(&request.call);
    }
}

fn renew(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Renew) {
    let renewed = fleet.renew(request, now);
    for call in request.calls.iter().filter(|call| !renewed.unknown.contains(call)) {
        oracle.confirm(call, now + request.lease_ttl);
    }
    for call in renewed.registered {
        let pod = request.pod.clone().unwrap();
        let pool = fleet.pods[&pod].pool.as_ref();
        let cap = pool.and_then(|pool| fleet.tiers.kind(pool)).map_or(1, |kind| kind.cap());
        assert!(oracle.calls_on(&pod) < cap as usize, "I1, I3: registered beyond the cap");
        assert!(!oracle.calls.contains_key(&call), "I2: registered a live call");
        assert!(!oracle.ended.contains(&call), "an ended call was registered");
        oracle.waiting.remove(&call);
        oracle.insert(call, pod, now + request.lease_ttl);
    }
}

fn confirm(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, request: &Confirm) {
    let until = now + request.lease_ttl;
    match fleet.confirm(request, now) {
        Confirmed::Live => {
            assert_eq!(oracle.calls.get(&request.call), Some(&request.pod), "I7");
            if oracle.provisional.contains(&request.call) {
                oracle.confirm(&request.call, until);
            }
        }
        Confirmed::Reallocated { pool } => {
            assert!(oracle.ended.contains(&request.call), "the call was not over");
            oracle.check_allocation(&request.pod, &pool, fleet, now);
            oracle.waiting.remove(&request.call);
            oracle.insert(request.call.clone(), request.pod.clone(), until);
        }
        Confirmed::Unknown => {
            let pod_attempt = fleet.call(&request.call).map(|call| call.pod_attempt);
            let is_same_attempt =
                request.pod_attempt.is_none() || request.pod_attempt == pod_attempt;
            let live = oracle.calls.get(&request.call).filter(|_| is_same_attempt);
            assert_ne!(live, Some(&request.pod), "I7");
        }
    }
}

fn sweep(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, limit: usize) {
    let swept = streams::sweep(fleet, oracle, now, limit);
    for abandoned in &swept.abandoned {
        assert!(oracle.waiting.remove(&abandoned.call).is_some(), "the call did not wait");
    }
    for id in &swept.reservations {
        assert!(oracle.outbound.end(id).until <= now, "a reservation ended early");
    }
    for name in swept.undrained {
        assert!(oracle.drains.remove(&name).unwrap() <= now, "I5: a drain ended early");
    }
}

/// Writes of pods.
fn write_pods(fleet: &mut Fleet, oracle: &mut Oracle, now: Millis, operation: Operation) {
    match operation {
        Operation::Observe { pod, facts, writer } => {
            let outcome = fleet.observe_pod(&pod, &facts, writer.get(), now);
            oracle.check_write(&writer, outcome.as_ref().err());
            let Ok(observed) = outcome else { return };
            oracle.end(&observed.ended);
            let before = oracle.pods.insert(pod.clone(), facts.clone());
            if before.is_some_and(|before| before.uid != facts.uid) {
                oracle.drains.remove(&pod);
                let remaining = oracle.calls.iter().filter(|(_, on)| **on == pod);
                let remaining = remaining.filter(|(call, _)| !oracle.handed.contains_key(*call));
                assert_eq!(remaining.count(), 0, "a replaced pod kept calls");
            }
        }
        Operation::Remove { pod, uid, mode, writer } => {
            let outcome = fleet.remove_pod(&pod, &uid, mode, writer.get(), now);
            oracle.check_write(&writer, outcome.as_ref().err());
            if let Ok(Removed::Gone { ended }) = outcome {
                assert!(ended.is_empty() || mode == RemovalMode::Immediate, "a call was ended");
                oracle.end(&ended);
                oracle.drains.remove(&pod);
                oracle.pods.remove(&pod);
            }
        }
        Operation::Move { pod, uid, to, writer } => {
            let is_busy = oracle.calls_on(&pod) > 0 || oracle.drains.contains_key(&pod);
            let outcome = fleet.move_pod(&pod, &uid, &to, writer.get());
            let refused = match &outcome {
                Err(MoveRefused::Write(refused)) => Some(refused),
                _ => None,
            };
            oracle.check_write(&writer, refused);
            assert!(outcome.is_err() || !is_busy, "moved a busy or draining pod");
        }
        Operation::Surplus { pod, uid, ttl, writer } => {
            let before = fleet.pod(&pod).filter(|pod| pod.facts.uid == uid);
            let is_requested = |pod: &PodStatus| pod.draining_until.is_some() && !pod.is_surplus;
            let outcome = fleet.set_surplus(&pod, &uid, ttl, writer.get(), now);
            oracle.check_write(&writer, outcome.as_ref().err());
            let after = fleet.pod(&pod);
            match outcome {
                Err(_) | Ok(Surplus::NotOurs | Surplus::NotFound) => {
                    assert!(before.is_none() || before == after, "a refused change had an effect")
                }
                Ok(Surplus::Drained { .. } | Surplus::Returned) => {
                    assert!(!before.as_ref().is_some_and(is_requested), "ended a requested drain");
                    let until = after.as_ref().and_then(|pod| pod.draining_until);
                    assert_eq!(until.is_some(), ttl.is_some());
                    assert_eq!(after.is_some_and(|pod| pod.is_surplus), ttl.is_some());
                    match until {
                        Some(until) => drop(oracle.drains.insert(pod, until)),
                        None => drop(oracle.drains.remove(&pod)),
                    }
                }
            }
        }
        Operation::Claim(claim) => oracle.check_claim(&claim, fleet.claim_pods(&claim, now)),
        other => unreachable!("{other:?} writes no pods"),
    }
}

/// The number of cases; `mutants.sh` lowers it.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(CASES)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Runs `CASES` × `STEPS` operations, 120,000 by default.
    #[test]
    fn every_operation_preserves_the_invariants(seeds in seeds()) {
        run(seeds);
    }
}
