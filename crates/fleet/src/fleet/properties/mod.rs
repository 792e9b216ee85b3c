//! Random operations on a small fleet. A witness that knows only what callers were told judges
//! every step; the state and its indexes are checked against the facts.

mod allocations;
mod indexes;
mod witness;

use proptest::prelude::*;

use self::{allocations::allocate, indexes::indexes_follow_from_facts, witness::Witness};
use super::*;
use crate::testing::{
    dice::Dice,
    invariants::State,
    operations::{Operation, Writer, table},
};

const CASES: u32 = 400;
const STEPS: usize = 300;
/// The fleet believes pods about calls for a part of each run.
const TRUST: Millis = 12_000;

/// Seeds of operations. Without a seed a step is left out: so a failing run is made smaller.
fn seeds() -> impl Strategy<Value = Vec<Option<u64>>> {
    prop::collection::vec(prop::option::weighted(0.999, any::<u64>().no_shrink()), STEPS)
}

/// The operations of a run that fails, once it is small enough to read.
#[derive(Default)]
struct Story(Vec<String>);

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.len() <= 20 {
            println!("after {:#?}", self.0);
        }
    }
}

fn live(seeds: Vec<Option<u64>>) {
    let mut now = 1_000_000;
    let trusting_until = now + TRUST;
    let mut fleet = Fleet::new(table(0), trusting_until);
    fleet.keep_changes();
    let mut journal = vec![
        Change::Began { trusting_until },
        Change::Tiers { tiers: table(0), by: String::new() },
    ];
    let (mut witness, mut story) = (Witness::default(), Story::default());
    for seed in seeds.into_iter().flatten() {
        let mut dice = Dice(seed);
        if dice.roll(48) == 0 {
            let by = dice.between(0, 18_000) as i64 - 9_000;
            story.0.push(format!("{now} shift by {by}"));
            fleet.shift(by);
            witness.shift(by);
            now = now.saturating_add_signed(by);
        } else {
            let operation = dice.operation(&mut fleet, now);
            story.0.push(format!("{now} {operation:?}"));
            step(&mut fleet, &mut witness, &mut now, operation);
        }
        journal.extend(fleet.take_changes());
        witness.hear(&mut fleet, now);
        witness.agrees(&fleet);
        assert_eq!(State::of(&fleet).violations(), []);
        indexes_follow_from_facts(&fleet);
    }
    let mut replayed = Fleet::new(table(3), 0);
    journal.into_iter().for_each(|change| replayed.replay(change));
    assert_eq!(State::of(&replayed).violations(), []);
    indexes_follow_from_facts(&replayed);
    assert_eq!(sorted_facts(&fleet), sorted_facts(&replayed), "the journal tells another story");
    let mut compacted = Fleet::new(table(3), 0);
    fleet.facts().into_iter().for_each(|change| compacted.replay(change));
    assert_eq!(
        sorted_facts(&fleet),
        sorted_facts(&compacted),
        "the compacted journal tells another story"
    );
}

fn sorted_facts(fleet: &Fleet) -> Vec<String> {
    // When a list was last followed is no fact.
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

fn step(fleet: &mut Fleet, witness: &mut Witness, now: &mut Millis, operation: Operation) {
    match operation {
        Operation::Allocate(request) => allocate(fleet, witness, *now, &request),
        Operation::Release(request) => release(fleet, witness, *now, &request),
        Operation::Renew(request) => renew(fleet, witness, *now, &request),
        Operation::Confirm(request) => confirm(fleet, witness, *now, &request),
        Operation::ExtendPending { time } => {
            fleet.spare(time, *now);
            witness.extend_pending(*now + time);
        }
        Operation::Drain { pod, ttl } => {
            if let Ok(drained) = fleet.drain(&pod, ttl, *now) {
                assert_eq!(drained.active_calls, witness.calls_on(&pod));
                let before = witness.drains.insert(pod, drained.until);
                assert!(before.is_none_or(|before| before <= drained.until), "a drain is shorter");
            }
        }
        Operation::Undrain { pod } => {
            if let Ok(undrained) = fleet.undrain(&pod) {
                assert_eq!(witness.drains.remove(&pod).is_some(), undrained.was_draining);
            }
        }
        Operation::Sweep { most } => sweep(fleet, witness, *now, most),
        Operation::Audit => {
            let names = fleet.pod_names();
            assert_eq!(fleet.audit(&names).repaired, 0, "a view was out of line");
        }
        Operation::Wait { time } => *now += time,
        Operation::Tiers { tiers, instead_of } => {
            let is_known = instead_of.as_ref().is_none_or(|known| *known == fleet.tiers);
            let is_done = is_known || tiers == fleet.tiers;
            let edit = Edit { instead_of: instead_of.as_ref(), by: "" };
            assert_eq!(fleet.apply_tiers(&tiers, edit).is_ok(), is_done);
        }
        Operation::Merchant { id, document, instead_of } => {
            let present = fleet.merchant(&id).map(str::to_owned);
            let is_known = instead_of.is_none_or(|known| known == present.as_deref().unwrap_or(""));
            let is_done = is_known || document == present.as_deref();
            let edit = Edit { instead_of, by: "" };
            assert_eq!(fleet.set_merchant(&id, document, edit).is_ok(), is_done);
        }
        pods => write_pods(fleet, witness, *now, pods),
    }
}

fn release(fleet: &mut Fleet, witness: &mut Witness, now: Millis, request: &Release) {
    let attempt = fleet.call(&request.call).map(|call| call.attempt);
    let is_theirs = |pod: &&PodName| {
        request.pod.as_ref().is_none_or(|named| named == *pod)
            && (request.attempt.is_none() || request.attempt == attempt)
    };
    let theirs = witness.calls.get(&request.call).filter(is_theirs);
    let waited = witness.waiting.contains_key(&request.call) && request.pod.is_none()
        || witness.handed.contains_key(&request.call) && theirs.is_some();
    match fleet.release(request, now) {
        Ok(released) => assert_eq!(Some(&released.pod), theirs, "I6"),
        Err(NotReleased::NotFound) => assert!(theirs.is_none() && !waited, "I6"),
        Err(NotReleased::Waited { .. }) => assert!(waited, "it did not wait"),
    }
    if theirs.is_some() {
        witness.forget(&request.call);
    }
    if waited {
        witness.waiting.remove(&request.call);
    }
}

fn renew(fleet: &mut Fleet, witness: &mut Witness, now: Millis, request: &Renew) {
    let renewed = fleet.renew(request, now);
    for call in request.calls.iter().filter(|call| !renewed.unknown.contains(call)) {
        witness.is_sure(call, now + request.lease_ttl);
    }
    for call in renewed.adopted {
        let pod = request.pod.clone().unwrap();
        let tier = fleet.pods[&pod].tier.as_ref();
        let cap = tier.and_then(|tier| fleet.tiers.kind(tier)).map_or(1, |kind| kind.cap());
        assert!(witness.calls_on(&pod) < cap as usize, "I1, I3: adopted beyond the cap");
        assert!(!witness.calls.contains_key(&call), "I2: adopted a live call");
        assert!(!witness.over.contains(&call), "an ended call came back");
        witness.waiting.remove(&call);
        witness.begin(call, pod, now + request.lease_ttl);
    }
}

fn confirm(fleet: &mut Fleet, witness: &mut Witness, now: Millis, request: &Confirm) {
    let until = now + request.lease_ttl;
    match fleet.confirm(request, now) {
        Confirmed::Sure => {
            assert_eq!(witness.calls.get(&request.call), Some(&request.pod), "I7");
            if witness.provisional.contains(&request.call) {
                witness.is_sure(&request.call, until);
            }
        }
        Confirmed::Retaken { pool } => {
            assert!(witness.over.contains(&request.call), "it was not over");
            witness.check(&request.pod, &pool, fleet, now);
            witness.waiting.remove(&request.call);
            witness.begin(request.call.clone(), request.pod.clone(), until);
        }
        Confirmed::Unknown => {
            let attempt = fleet.call(&request.call).map(|call| call.attempt);
            let is_that = request.attempt.is_none() || request.attempt == attempt;
            let live = witness.calls.get(&request.call).filter(|_| is_that);
            assert_ne!(live, Some(&request.pod), "I7");
        }
    }
}

fn sweep(fleet: &mut Fleet, witness: &mut Witness, now: Millis, most: usize) {
    let due = witness.leases.values().filter(|until| **until <= now).count();
    let swept = fleet.sweep(most, now);
    assert_eq!(swept.expired.len(), due.min(most), "leases end when they should, and not before");
    for ended in &swept.expired {
        assert!(witness.leases[&ended.call] <= now, "I7: a lease ended early");
    }
    witness.end(&swept.expired);
    for gone in &swept.abandoned {
        assert!(witness.waiting.remove(&gone.call).is_some(), "it did not wait");
    }
    for name in swept.undrained {
        assert!(witness.drains.remove(&name).unwrap() <= now, "I5: a drain ended early");
    }
}

/// What a source of pods does.
fn write_pods(fleet: &mut Fleet, witness: &mut Witness, now: Millis, operation: Operation) {
    match operation {
        Operation::Observe { pod, facts, writer } => {
            let outcome = fleet.observe_pod(&pod, &facts, writer.get(), now);
            witness.wrote(&writer, outcome.as_ref().err());
            let Ok(observed) = outcome else { return };
            witness.end(&observed.ended);
            let before = witness.seen.insert(pod.clone(), facts.clone());
            if before.is_some_and(|before| before.uid != facts.uid) {
                witness.drains.remove(&pod);
                let kept = witness.calls.iter().filter(|(_, on)| **on == pod);
                let kept = kept.filter(|(call, _)| !witness.handed.contains_key(*call));
                assert_eq!(kept.count(), 0, "a replaced pod kept calls");
            }
        }
        Operation::Remove { pod, uid, departure, writer } => {
            let outcome = fleet.remove_pod(&pod, &uid, departure, writer.get(), now);
            witness.wrote(&writer, outcome.as_ref().err());
            if let Ok(Removed::Gone { ended }) = outcome {
                assert!(ended.is_empty() || departure == Departure::Now, "a call was cut");
                witness.end(&ended);
                witness.drains.remove(&pod);
                witness.seen.remove(&pod);
            }
        }
        Operation::Move { pod, uid, to, writer } => {
            let is_busy = witness.calls_on(&pod) > 0 || witness.drains.contains_key(&pod);
            let outcome = fleet.move_pod(&pod, &uid, &to, writer.get());
            let refused = match &outcome {
                Err(MoveRefused::Write(refused)) => Some(refused),
                _ => None,
            };
            witness.wrote(&writer, refused);
            assert!(outcome.is_err() || !is_busy, "moved a busy or draining pod");
        }
        Operation::Claim(claim) => witness.claimed(&claim, fleet.claim_pods(&claim, now)),
        other => unreachable!("{other:?} writes no pods"),
    }
}

/// `mutants.sh` asks for fewer.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|asked| asked.parse().ok()).unwrap_or(CASES)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// `CASES` × `STEPS` operations: 120,000 in a normal run.
    #[test]
    fn every_step_of_a_random_life_keeps_the_invariants(seeds in seeds()) {
        live(seeds);
    }
}
