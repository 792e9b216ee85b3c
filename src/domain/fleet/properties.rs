//! Random lives of a small fleet. A witness that knows only what callers were
//! told judges every step; the views are derived again the slow way.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::domain::tiers::{Kind, Origin, Strategy as Fill};

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

const MERCHANTS: [Option<&str>; 6] = [
    None,
    Some(r#"{"pool": "acme"}"#),
    Some(r#"{"pool": "acme", "dedicated_only": true}"#),
    Some(r#"{"fallback": ["nowhere", "merchant:m1", "basic", "loose"]}"#),
    Some(r#"{"fallback": ["acme", "gold"]}"#),
    Some("not a document"),
];

const PINS: [Option<&str>; 4] = [None, Some("basic"), Some("merchant:m1"), Some("nowhere")];

#[derive(Debug, Clone)]
enum Step {
    Allocate {
        call: u8,
        merchant: Option<u8>,
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
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let call = || 0..14u8;
    let pod = || 0..7u8;
    let maybe_pod = || prop::option::weighted(0.3, pod());
    let step = prop_oneof![
        12 => (call(), prop::option::of(0..3u8)).prop_map(|(call, merchant)| Step::Allocate { call, merchant }),
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

/// What the callers of a fleet were told, and nothing else.
#[derive(Default)]
struct Witness {
    calls: BTreeMap<CallSid, PodName>,
    /// Until when each call was promised its pod.
    leases: BTreeMap<CallSid, Millis>,
    /// Calls that ended and did not ask again.
    over: BTreeSet<CallSid>,
    /// Acknowledged drains: none of them may be given a call before this time.
    drains: BTreeMap<PodName, Millis>,
    seen: BTreeMap<PodName, PodFacts>,
}

impl Witness {
    fn calls_on(&self, pod: &PodName) -> usize {
        self.calls.values().filter(|on| *on == pod).count()
    }

    fn end(&mut self, ended: &[EndedCall]) {
        for ended in ended {
            assert_eq!(
                self.forget(&ended.call).as_ref(),
                Some(&ended.pod),
                "ended a call that was not live"
            );
        }
    }

    fn forget(&mut self, call: &CallSid) -> Option<PodName> {
        self.leases.remove(call);
        self.over.insert(call.clone());
        self.calls.remove(call)
    }

    fn begin(&mut self, call: CallSid, pod: PodName, now: Millis) {
        self.over.remove(&call);
        self.leases.insert(call.clone(), now + LEASE);
        self.calls.insert(call, pod);
    }

    fn allocated(&mut self, sid: CallSid, got: &Allocation, fleet: &Fleet, now: Millis) {
        if let Some(before) = self.calls.get(&sid) {
            assert!(
                got.was_existing && got.pod == *before,
                "I2: {sid} has {before} and was given {}",
                got.pod
            );
            return;
        }
        assert!(!got.was_existing, "an ended call came back");
        let seen = &self.seen[&got.pod];
        assert!(seen.ready && !seen.terminating, "I5: {} is not in service", got.pod);
        assert!(
            self.drains.get(&got.pod).is_none_or(|until| *until <= now),
            "I5: {} is draining",
            got.pod
        );
        let others = self.calls_on(&got.pod);
        match fleet.tiers.kind(&got.pool) {
            Some(Kind::Shared { max_concurrent, .. }) => {
                assert!(others < max_concurrent as usize, "I3: beyond the cap")
            }
            Some(_) => assert_eq!(others, 0, "I1: {} already has a call", got.pod),
            None => panic!("{} was drawn from a pool that is no more", got.pod),
        }
        self.begin(sid, got.pod.clone(), now);
    }

    fn agrees(&self, fleet: &Fleet) {
        let live: BTreeMap<CallSid, PodName> =
            fleet.calls.iter().map(|(sid, call)| (sid.clone(), call.pod.clone())).collect();
        assert_eq!(live, self.calls, "I6: the live calls are not those that callers know of");
        for (name, pod) in &fleet.pods {
            let told = self.drains.contains_key(name);
            assert_eq!(pod.draining_until.is_some(), told, "a drain began or ended untold: {name}");
        }
    }
}

/// Every index and view, derived from the facts alone.
fn views_follow_from_facts(fleet: &Fleet) {
    let leases: BTreeSet<_> =
        fleet.calls.iter().map(|(sid, call)| (call.until, sid.clone())).collect();
    assert_eq!(leases, fleet.leases);
    let drains: BTreeSet<_> = fleet
        .pods
        .iter()
        .filter_map(|(name, pod)| Some((pod.draining_until?, name.clone())))
        .collect();
    assert_eq!(drains, fleet.drains);
    for (name, pod) in &fleet.pods {
        let on: BTreeSet<_> =
            fleet.calls.iter().filter(|(_, call)| call.pod == *name).map(|(sid, _)| sid).collect();
        assert_eq!(on, pod.calls.iter().collect(), "the calls of {name}");
        assert_eq!(on.len(), pod.calls.len());
        let homeless = pod.facts.ready && !pod.is_leaving() && pod.tier.is_none();
        assert!(!homeless, "I11: {name} is in service and in no pool");
        let pinned = pod.facts.pin.as_ref().and_then(|step| fleet.tiers.resolve(step));
        if let Some(tier) = pod.tier.as_ref().filter(|_| pod.calls.is_empty()) {
            assert!(
                fleet.tiers.wants(tier) || pinned.as_ref() == Some(tier),
                "I11: {name} idles in {tier}, which is no more"
            );
        }
    }
    for (pool, view) in &fleet.pools {
        let members: Vec<_> =
            fleet.pods.iter().filter(|(_, pod)| pod.tier.as_ref() == Some(pool)).collect();
        let shared = matches!(fleet.tiers.kind(pool), Some(Kind::Shared { .. }));
        let known = fleet.tiers.kind(pool).is_some();
        let open: BTreeSet<(usize, &PodName)> = members
            .iter()
            .filter(|(_, pod)| {
                pod.facts.ready && !pod.facts.terminating && pod.draining_until.is_none()
            })
            .filter(|(_, pod)| known && (shared || pod.calls.is_empty()))
            .map(|(name, pod)| (pod.calls.len(), *name))
            .collect();
        let shown: BTreeSet<(usize, &PodName)> =
            view.open.iter().map(|((calls, _), name)| (*calls, name)).collect();
        assert_eq!(shown, open, "I3, I11: the available view of {pool}");
        assert_eq!(view.open.len(), open.len(), "I11: a pod stands twice in {pool}");
        assert_eq!(view.assigned, members.len());
        assert_eq!(view.calls, members.iter().map(|(_, pod)| pod.calls.len()).sum::<usize>());
        assert_eq!(view.leaving, members.iter().filter(|(_, pod)| pod.is_leaving()).count());
    }
}

fn live(steps: Vec<Step>) {
    let mut now = 1_000_000;
    let trusting_until = now + 5 * LEASE;
    let mut fleet = Fleet::new(table(0), trusting_until);
    fleet.keep_changes();
    let mut journal = vec![Change::Began { trusting_until }, Change::Tiers { tiers: table(0) }];
    let mut witness = Witness::default();
    for step in steps {
        step_once(&mut fleet, &mut witness, &mut now, step);
        journal.extend(fleet.take_changes());
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
        Step::Allocate { call: sid, merchant } => {
            let merchant = merchant.map(|id| format!("m{id}").parse().unwrap());
            let request = Allocate::new(call(sid), merchant, LEASE);
            let packed = fullest_with_room(fleet);
            match fleet.allocate(&request, *now) {
                Ok(got) => {
                    if let (false, Some(Kind::Shared { strategy: Fill::Pack, .. })) =
                        (got.was_existing, fleet.tiers.kind(&got.pool))
                    {
                        assert_eq!(
                            Some(fleet.pods[&got.pod].calls.len() - 1),
                            packed.get(&got.pool).copied()
                        );
                    }
                    witness.allocated(call(sid), &got, fleet, *now);
                }
                Err(refusal) => {
                    assert!(!witness.calls.contains_key(&call(sid)), "I7: a live call was refused");
                    let pools =
                        refusal.tried.iter().filter_map(|tried| fleet.tiers.resolve(&tried.step));
                    for pool in pools {
                        assert_eq!(room(fleet, &pool), 0, "refused although {pool} has room");
                    }
                }
            }
        }
        Step::Release { call: sid, pod: on } => {
            let request = Release::new(call(sid), on.map(pod));
            let theirs = witness
                .calls
                .get(&request.call)
                .filter(|live| request.pod.as_ref().is_none_or(|pod| pod == *live));
            assert_eq!(
                fleet.release(&request, *now).map(|released| released.pod).ok().as_ref(),
                theirs,
                "I6"
            );
            if theirs.is_some() {
                witness.forget(&request.call);
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
            if let Ok(undrained) = fleet.undrain(&pod(name), *now) {
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
            let highest = fleet.epoch;
            match fleet.observe_pod(&name, &facts, epoch, *now) {
                Ok(observed) => {
                    assert!(epoch.is_none_or(|epoch| epoch >= highest), "I9");
                    witness.end(&observed.ended);
                    let before = witness.seen.insert(name.clone(), facts.clone());
                    if before.is_some_and(|before| before.uid != facts.uid) {
                        witness.drains.remove(&name);
                        assert_eq!(witness.calls_on(&name), 0, "a replaced pod kept calls");
                    }
                }
                Err(fenced) => assert!(epoch.unwrap() < fenced.current),
            }
        }
        Step::Remove { pod: name, uid, departure } => {
            if let Ok(Removed::Gone { ended }) =
                fleet.remove_pod(&pod(name), &format!("u{uid}"), departure, None, *now)
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
            let moved = fleet.move_pod(&pod(name), &format!("u{uid}"), &to, None, *now);
            assert!(moved.is_err() || !busy, "moved a busy or draining pod");
        }
        Step::Tiers { table: index } => fleet.apply_tiers(&table(index), None, *now).unwrap(),
        Step::Merchant { merchant, document } => {
            fleet.set_merchant(&format!("m{merchant}").parse().unwrap(), MERCHANTS[document]);
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
            for name in swept.undrained {
                assert!(witness.drains.remove(&name).unwrap() <= *now, "I5: a drain ended early");
            }
        }
        Step::Audit => {
            let names = fleet.pod_names();
            assert_eq!(fleet.audit(&names, *now).repaired, 0, "a view was out of line");
        }
        Step::Wait { ms } => *now += ms,
    }
}

/// How many calls the pods of a pool could take, by the facts.
fn room(fleet: &Fleet, pool: &Pool) -> usize {
    let cap = match fleet.tiers.kind(pool) {
        Some(Kind::Shared { max_concurrent, .. }) => max_concurrent as usize,
        Some(_) => 1,
        None => 0,
    };
    let serving =
        |pod: &&Pod| pod.tier.as_ref() == Some(pool) && pod.facts.ready && !pod.is_leaving();
    fleet.pods.values().filter(serving).map(|pod| cap.saturating_sub(pod.calls.len())).sum()
}

fn fullest_with_room(fleet: &Fleet) -> BTreeMap<Pool, usize> {
    let room = |pool: &Pool, view: &PoolView| match fleet.tiers.kind(pool) {
        Some(Kind::Shared { max_concurrent, .. }) => view
            .open
            .keys()
            .map(|(calls, _)| *calls)
            .filter(|calls| *calls < max_concurrent as usize)
            .max(),
        _ => None,
    };
    fleet.pools.iter().filter_map(|(pool, view)| Some((pool.clone(), room(pool, view)?))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    /// `CASES` × `STEPS` operations: 120,000 in a normal run.
    #[test]
    fn every_step_of_a_random_life_keeps_the_invariants(steps in steps()) {
        live(steps);
    }
}
