//! Random lives of a small fleet. A witness that knows only what callers were
//! told judges every step; the views are derived again the slow way.

mod witness;

use proptest::prelude::*;

use self::witness::{Witness, fullest_with_room, room, views_follow_from_facts};
use super::*;
use crate::tiers::{Kind, Origin, Strategy as Fill};

const LEASE: Millis = 1_000;
const CASES: u32 = 400;
const STEPS: usize = 300;

const TABLES: [&str; 5] = [
    r#"{"tiers": {"gold": {"target": 2}, "basic": {"type": "shared", "target": 2, "max_concurrent": 3},
        "acme": {"target": 1}}, "default_chain": ["gold", "basic"]}"#,
    r#"{"tiers": {"gold": {"type": "shared", "target": 2, "max_concurrent": 2, "strategy": "pack"},
        "basic": {"target": 2}}, "default_chain": ["basic", "gold"]}"#,
    r#"{"basic": {"type": "shared", "target": 9, "max_concurrent": 1}}"#,
    r#"{"gold": 1, "silver": 1, "basic": 1}"#,
    r#"{"tiers": {"gold": {"target": 1}, "basic": {"target": 3},
        "loose": {"type": "shared", "target": 1}}, "default_chain": ["gold"]}"#,
];

const MERCHANTS: [Option<&str>; 8] = [
    None,
    Some(r#"{"pool": "acme"}"#),
    Some(r#"{"pool": "acme", "dedicated_only": true}"#),
    Some(r#"{"fallback": ["nowhere", "merchant:m1", "basic", "loose"]}"#),
    Some(r#"{"fallback": ["acme", "gold"]}"#),
    Some("not a document"),
    Some(r#"{"priority": 2}"#),
    Some(r#"{"priority": -1, "fallback": ["basic", "gold"]}"#),
];

const PINS: [Option<&str>; 4] = [None, Some("basic"), Some("merchant:m1"), Some("nowhere")];

#[derive(Debug, Clone)]
enum Step {
    Allocate {
        call: u8,
        merchant: Option<u8>,
        provisional: bool,
        hold: bool,
        /// Its stream is gone; whether that is final.
        after: Option<bool>,
    },
    Release {
        call: u8,
        pod: Option<u8>,
    },
    Renew {
        calls: Vec<u8>,
        pod: Option<u8>,
    },
    Drain {
        pod: u8,
        ttl: Millis,
    },
    Undrain {
        pod: u8,
    },
    Observe {
        pod: u8,
        uid: u8,
        ready: bool,
        terminating: bool,
        restarts: u32,
        pin: usize,
        epoch: Option<u64>,
    },
    Remove {
        pod: u8,
        uid: u8,
        departure: Departure,
    },
    Move {
        pod: u8,
        uid: u8,
        to: String,
    },
    Tiers {
        table: usize,
    },
    Merchant {
        merchant: u8,
        document: usize,
    },
    Sweep {
        most: usize,
    },
    Audit,
    Wait {
        ms: Millis,
    },
    /// The clock is stepped.
    Shift {
        by: i64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let call = || 0..14u8;
    let pod = || 0..7u8;
    let maybe_pod = || prop::option::weighted(0.3, pod());
    let step = prop_oneof![
        14 => (call(), prop::option::of(0..3u8), prop::bool::weighted(0.3), prop::bool::weighted(0.6),
               prop::option::weighted(0.3, prop::bool::weighted(0.7)))
            .prop_map(|(call, merchant, provisional, hold, after)| {
                Step::Allocate { call, merchant, provisional, hold, after }
            }),
        6 => (call(), maybe_pod()).prop_map(|(call, pod)| Step::Release { call, pod }),
        3 => (prop::collection::vec(call(), 1..4), maybe_pod()).prop_map(|(calls, pod)| Step::Renew { calls, pod }),
        2 => (pod(), 1..1500u64).prop_map(|(pod, ttl)| Step::Drain { pod, ttl }),
        2 => pod().prop_map(|pod| Step::Undrain { pod }),
        8 => (pod(), 0..2u8, prop::bool::weighted(0.8), prop::bool::weighted(0.1), 0..2u32, 0..PINS.len(),
              prop::option::weighted(0.3, 0..3u64))
            .prop_map(|(pod, uid, ready, terminating, restarts, pin, epoch)| Step::Observe {
                pod, uid, ready, terminating, restarts, pin, epoch }),
        1 => (pod(), 0..2u8, prop::sample::select(vec![Departure::Now, Departure::WhenIdle]))
            .prop_map(|(pod, uid, departure)| Step::Remove { pod, uid, departure }),
        1 => (pod(), 0..2u8, prop::sample::select(vec!["gold", "basic", "merchant:acme"]))
            .prop_map(|(pod, uid, to)| Step::Move { pod, uid, to: to.into() }),
        1 => (0..TABLES.len()).prop_map(|table| Step::Tiers { table }),
        1 => (0..3u8, 0..MERCHANTS.len()).prop_map(|(merchant, document)| Step::Merchant { merchant, document }),
        2 => (1..4usize).prop_map(|most| Step::Sweep { most }),
        1 => Just(Step::Audit),
        3 => (1..400u64).prop_map(|ms| Step::Wait { ms }),
        1 => (-900..900i64).prop_map(|by| Step::Shift { by }),
    ];
    prop::collection::vec(step, STEPS)
}

fn table(index: usize) -> Tiers {
    Tiers::parse(TABLES[index], Origin::Settings).unwrap().0
}

fn pod(index: u8) -> PodName {
    format!("p{index}").parse().unwrap()
}

fn call(index: u8) -> CallSid {
    format!("c{index}").parse().unwrap()
}

fn live(steps: Vec<Step>) {
    let mut now = 1_000_000;
    let trusting_until = now + 5 * LEASE;
    let mut fleet = Fleet::new(table(0), trusting_until);
    fleet.keep_changes();
    let mut journal = vec![
        Change::Began { trusting_until },
        Change::Tiers { tiers: table(0), by: String::new() },
    ];
    let mut witness = Witness::default();
    for step in steps {
        step_once(&mut fleet, &mut witness, &mut now, step);
        journal.extend(fleet.take_changes());
        witness.hear(&mut fleet, now);
        witness.agrees(&fleet);
        views_follow_from_facts(&fleet);
    }
    let mut replayed = Fleet::new(table(3), 0);
    journal.into_iter().for_each(|change| replayed.replay(change));
    views_follow_from_facts(&replayed);
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
    let mut facts: Vec<String> =
        fleet.facts().iter().map(|change| serde_json::to_string(change).unwrap()).collect();
    facts.sort();
    facts
}

fn step_once(fleet: &mut Fleet, witness: &mut Witness, now: &mut Millis, step: Step) {
    match step {
        Step::Allocate { call: sid, merchant, provisional, hold, after } => {
            let merchant = merchant.map(|id| format!("m{id}").parse().unwrap());
            let request = allocate(fleet, call(sid), merchant, provisional, hold, after);
            allocate_once(fleet, witness, *now, &request);
        }
        Step::Release { call: sid, pod: on } => {
            let request = Release::new(call(sid), on.map(pod));
            let theirs = witness
                .calls
                .get(&request.call)
                .filter(|live| request.pod.as_ref().is_none_or(|pod| pod == *live));
            let waited = witness.waiting.contains_key(&request.call) && request.pod.is_none()
                || witness.handed.contains_key(&request.call) && theirs.is_some();
            match fleet.release(&request, *now) {
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
        Step::Renew { calls, pod: on } => {
            let request = Renew {
                calls: calls.into_iter().map(call).collect(),
                pod: on.map(pod),
                lease_ttl: LEASE,
            };
            let renewed = fleet.renew(&request, *now);
            for call in request.calls.iter().filter(|call| !renewed.unknown.contains(call)) {
                witness.handed.remove(call);
                if let Some(lease) = witness.leases.get_mut(call) {
                    *lease = *now + LEASE;
                }
            }
            for sid in renewed.adopted {
                let on = request.pod.clone().unwrap();
                let cap =
                    match fleet.pods[&on].tier.as_ref().and_then(|tier| fleet.tiers.kind(tier)) {
                        Some(Kind::Shared { max_concurrent, .. }) => max_concurrent as usize,
                        _ => 1,
                    };
                assert!(witness.calls_on(&on) < cap, "I1, I3: adopted beyond the cap");
                assert!(!witness.calls.contains_key(&sid), "I2: adopted a live call");
                assert!(!witness.over.contains(&sid), "an ended call came back");
                witness.waiting.remove(&sid);
                witness.begin(sid, on, *now);
            }
        }
        Step::Drain { pod: name, ttl } => {
            if let Ok(drained) = fleet.drain(&pod(name), ttl, *now) {
                assert_eq!(drained.active_calls, witness.calls_on(&pod(name)));
                witness.drains.insert(pod(name), drained.until);
            }
        }
        Step::Undrain { pod: name } => {
            if let Ok(undrained) = fleet.undrain(&pod(name)) {
                assert_eq!(witness.drains.remove(&pod(name)).is_some(), undrained.was_draining);
            }
        }
        Step::Observe { pod: name, uid, ready, terminating, restarts, pin, epoch } => {
            let name = pod(name);
            let pin = PINS[pin].map(|pin| pin.parse().unwrap());
            let facts = PodFacts {
                uid: format!("u{uid}"),
                address: "a:1".into(),
                ready,
                terminating,
                restarts,
                pin,
            };
            let epoch = epoch.unwrap_or(fleet.epoch);
            match fleet.observe_pod(&name, &facts, writer(epoch), *now) {
                Ok(observed) => {
                    assert!(epoch >= witness.epoch, "I9");
                    witness.epoch = epoch;
                    witness.end(&observed.ended);
                    let before = witness.seen.insert(name.clone(), facts.clone());
                    if before.is_some_and(|before| before.uid != facts.uid) {
                        witness.drains.remove(&name);
                        let kept = witness.calls.iter().filter(|(_, on)| **on == name);
                        let kept = kept.filter(|(call, _)| !witness.handed.contains_key(*call));
                        assert_eq!(kept.count(), 0, "a replaced pod kept calls");
                    }
                }
                Err(refused) => {
                    assert!(epoch < witness.epoch, "I9");
                    let current = witness.epoch;
                    assert_eq!(refused, WriteRefused::Fenced { epoch, current });
                }
            }
        }
        Step::Remove { pod: name, uid, departure } => {
            let (uid, writer) = (format!("u{uid}"), writer(fleet.epoch));
            if let Ok(Removed::Gone { ended }) =
                fleet.remove_pod(&pod(name), &uid, departure, writer, *now)
            {
                assert!(ended.is_empty() || departure == Departure::Now, "a call was cut");
                witness.end(&ended);
                witness.drains.remove(&pod(name));
                witness.seen.remove(&pod(name));
            }
        }
        Step::Move { pod: name, uid, to } => {
            let busy = witness.calls_on(&pod(name)) > 0 || witness.drains.contains_key(&pod(name));
            let to = to.parse().unwrap();
            let moved = fleet.move_pod(&pod(name), &format!("u{uid}"), &to, writer(fleet.epoch));
            assert!(moved.is_err() || !busy, "moved a busy or draining pod");
        }
        Step::Tiers { table: index } => fleet.apply_tiers(&table(index), Edit::ANY).unwrap(),
        Step::Merchant { merchant, document } => {
            fleet
                .set_merchant(
                    &format!("m{merchant}").parse().unwrap(),
                    MERCHANTS[document],
                    Edit::ANY,
                )
                .unwrap();
        }
        Step::Sweep { most } => {
            let due = witness.leases.values().filter(|until| **until <= *now).count();
            let swept = fleet.sweep(most, *now);
            assert_eq!(
                swept.expired.len(),
                due.min(most),
                "leases end when they should, and not before"
            );
            for ended in &swept.expired {
                assert!(witness.leases[&ended.call] <= *now, "I7: a lease ended early");
            }
            witness.end(&swept.expired);
            for gone in &swept.abandoned {
                assert!(witness.waiting.remove(&gone.call).is_some(), "it did not wait");
            }
            for name in swept.undrained {
                assert!(witness.drains.remove(&name).unwrap() <= *now, "I5: a drain ended early");
            }
        }
        Step::Audit => {
            let names = fleet.pod_names();
            assert_eq!(fleet.audit(&names).repaired, 0, "a view was out of line");
        }
        Step::Wait { ms } => *now += ms,
        Step::Shift { by } => {
            fleet.shift(by);
            let told = witness.leases.values_mut().chain(witness.drains.values_mut());
            told.chain([now]).for_each(|time| *time = time.saturating_add_signed(by));
        }
    }
}

/// What a call would ask, with what it was told of its last attempt.
fn allocate(
    fleet: &Fleet,
    call: CallSid,
    merchant: Option<MerchantId>,
    provisional: bool,
    hold: bool,
    after: Option<bool>,
) -> Allocate {
    let hold = hold.then_some(Hold { time: 900, patience: 500, most: 8, most_per_merchant: 4 });
    let before = fleet.call(&call).map(|it| (it.pod, it.attempt));
    let (pod, attempt) = before.unwrap_or_else(|| (pod(0), 1));
    let after = after.map(|is_final| After { pod, attempt, is_final, retries: 2 });
    Allocate { provisional, returns: true, hold, after, ..Allocate::new(call, merchant, LEASE) }
}

fn writer(epoch: u64) -> PodWriter<'static> {
    PodWriter { origin: &PodOrigin::List, epoch }
}

fn allocate_once(fleet: &mut Fleet, witness: &mut Witness, now: Millis, request: &Allocate) {
    let sid = request.call.clone();
    let packed = fullest_with_room(fleet);
    let is_final = request.after.as_ref().is_some_and(|after| after.is_final);
    let has_lost_service = witness.lost_service(&sid, fleet);
    if has_lost_service {
        witness.requeue(&sid);
    }
    // One whose pools are no more begins again.
    let is_stranded =
        |waiter: &witness::Waiter| waiter.pools.iter().all(|pool| fleet.tiers.kind(pool).is_none());
    if witness.waiting.get(&sid).is_some_and(is_stranded) {
        witness.waiting.remove(&sid);
    }
    let was_handed =
        witness.handed.contains_key(&sid) || has_lost_service && witness.waiting.contains_key(&sid);
    if is_final && !was_handed && witness.calls.contains_key(&sid) {
        witness.forget(&sid);
    }
    match fleet.allocate(request, now) {
        Ok(got) => {
            if has_lost_service {
                // It was handed another pod in the same step.
                witness.hear(fleet, now);
            }
            if let (false, None, None, Some(Kind::Shared { strategy: Fill::Pack, .. })) =
                (got.was_existing, got.waited, &request.after, fleet.tiers.kind(&got.pool))
            {
                assert_eq!(
                    Some(fleet.pods[&got.pod].calls.len() - 1),
                    packed.get(&got.pool).copied()
                );
            }
            if let Some(after) = request.after.as_ref().filter(|after| after.pod == got.pod)
                && !got.was_existing
                && got.waited.is_none()
            {
                let chain = got.tried.iter().filter_map(|tried| fleet.tiers.resolve(&tried.step));
                for pool in chain {
                    assert_eq!(room(fleet, &pool), 0, "back to {}, with room in {pool}", after.pod);
                }
            }
            assert_eq!(got.waited.is_some(), was_handed, "it came for its pod");
            if was_handed {
                witness.handed.remove(&sid);
                assert_eq!(witness.calls.get(&sid), Some(&got.pod), "it was handed another pod");
                witness.leases.insert(sid, now + LEASE);
            } else {
                if got.was_existing && request.provisional {
                    witness.leases.insert(sid.clone(), fleet.calls[&sid].until);
                }
                witness.allocated(sid, &got, fleet, now);
            }
        }
        Err(refusal) => {
            assert!(refusal.why == Why::Unsettled || !witness.calls.contains_key(&sid), "I7");
            let pools = refusal.tried.iter().filter_map(|tried| fleet.tiers.resolve(&tried.step));
            for pool in pools.filter(|_| refusal.why == Why::NoPods && request.hold.is_some()) {
                assert_eq!(room(fleet, &pool), 0, "refused although {pool} has room");
            }
            match refusal.why {
                Why::Waiting { is_new: true, .. } => {
                    witness.waits(sid, fleet);
                }
                Why::TimeOver { .. } => drop(witness.waiting.remove(&sid)),
                _ => {}
            }
        }
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
    fn every_step_of_a_random_life_keeps_the_invariants(steps in steps()) {
        live(steps);
    }
}
