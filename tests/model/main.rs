//! The rules of the fleet under everything that can happen around it: by chance, many
//! times over (`simulation`), and in full, in a small world (`exhaustive`).

mod common;
mod exhaustive;
mod simulation;

use std::time::Instant;

use self::{
    exhaustive::{Bounds, search},
    simulation::{
        Acknowledged, Failover, Sabotage,
        report::{caught, commas, runs_with_losses, runs_without_violation, shortest},
    },
};

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

fn seed() -> u64 {
    number("SIMULATION_SEED").unwrap_or(1)
}

#[test]
fn no_invariant_breaks_while_no_write_is_lost() {
    runs_without_violation(seed(), 300_000, None);
}

/// `SIMULATION_STEPS=50000000 cargo test --release --test model long -- --nocapture`
#[test]
fn no_invariant_breaks_in_a_long_run() {
    let Some(steps) = number("SIMULATION_STEPS") else { return };
    runs_without_violation(seed(), steps, None);
    let failover = Failover { acknowledged: Acknowledged::WhenReplicated, most: 0 };
    runs_without_violation(seed(), steps / 2, Some(failover));
    for most in [1, 5, 20] {
        let failover = Failover { acknowledged: Acknowledged::AtOnce, most };
        runs_with_losses(seed(), steps / 60_000, failover);
    }
    // Too rare for every run.
    let (settings, violation) = caught(Sabotage::DoubtsDespiteRenewal, 2_000).expect("not caught");
    println!("DoubtsDespiteRenewal, after {} runs: {}", settings.seed + 1, violation.what);
}

#[test]
fn a_failover_that_loses_only_what_was_not_acknowledged_breaks_nothing() {
    let failover = Failover { acknowledged: Acknowledged::WhenReplicated, most: 0 };
    let sum = runs_without_violation(seed(), 100_000, Some(failover));
    assert!(sum.failovers > 10 && sum.lost_writes > 0, "nothing was lost at all");
}

#[test]
fn a_failover_that_loses_acknowledged_writes_can_book_a_pod_twice() {
    let sums = [1, 5, 20].map(|most| {
        let failover = Failover { acknowledged: Acknowledged::AtOnce, most };
        runs_with_losses(seed(), 4, failover)
    });
    assert!(sums.iter().any(|sum| sum.double_bookings > 0), "no double booking was seen");
}

#[test]
fn every_sabotage_is_caught() {
    let sabotages = [
        Sabotage::AnyEpoch,
        Sabotage::ReleaseByPod,
        Sabotage::ExecutedTwice,
        Sabotage::FreshAttempts,
        Sabotage::DoubtsWithoutAttempt,
        Sabotage::HastyDoubts,
        Sabotage::HastyTries,
        Sabotage::TwoSteps,
        Sabotage::LateTries,
    ];
    for sabotage in sabotages {
        let (settings, violation) =
            caught(sabotage, 400).unwrap_or_else(|| panic!("{sabotage:?} was not caught"));
        println!("{sabotage:?}, after {} runs: {}", settings.seed + 1, violation.what);
        if std::env::var("SIMULATION_HISTORIES").is_ok() {
            println!("{}", shortest(settings, &violation));
        }
    }
}

/// Three worlds: the calls, with a drain, with the leaders. All at once is for a longer
/// run.
const SMALL: [Bounds; 3] = [
    Bounds { calls: 3, faults: 1, duplicates: 0, leases: 1, drains: false, leaders: false },
    Bounds { calls: 2, faults: 2, duplicates: 1, leases: 0, drains: true, leaders: false },
    Bounds { calls: 1, faults: 2, duplicates: 0, leases: 1, drains: false, leaders: true },
];

fn visit(bounds: Bounds) {
    let started = Instant::now();
    let found = search(bounds, None);
    if let Some(violation) = found.violation {
        panic!("{violation}");
    }
    println!("exhaustive: {} states, depth {}, 0 violations", commas(found.states), found.depth);
    println!("  {} states of the store, {:.1?}, {bounds:?}", found.stores, started.elapsed());
}

#[test]
fn no_order_of_events_in_a_small_world_breaks_an_invariant() {
    SMALL.into_iter().for_each(visit);
}

/// Calls, faults, duplicates, leases, drains and leaders:
/// `EXHAUSTIVE=2,1,1,1,1,1 cargo test --release --test model larger -- --nocapture`
#[test]
fn no_order_of_events_in_a_larger_world_breaks_an_invariant() {
    let Ok(text) = std::env::var("EXHAUSTIVE") else { return };
    let numbers: Vec<u8> = text.split(',').map(|it| it.parse().expect("a number")).collect();
    let [calls, faults, duplicates, leases, drains, leaders] = numbers[..] else {
        panic!("expected six numbers, got {text:?}")
    };
    let (drains, leaders) = (drains > 0, leaders > 0);
    visit(Bounds { calls, faults, duplicates, leases, drains, leaders });
}

#[test]
fn every_sabotage_of_the_small_world_is_caught() {
    let sabotages = [
        (Sabotage::AnyEpoch, 2),
        (Sabotage::ReleaseByPod, 0),
        (Sabotage::DoubtsWithoutAttempt, 1),
        (Sabotage::TwoSteps, 0),
        (Sabotage::LateTries, 1),
    ];
    for (sabotage, world) in sabotages {
        let found = search(SMALL[world], Some(sabotage));
        let violation = found.violation.unwrap_or_else(|| panic!("{sabotage:?} was not caught"));
        println!("{sabotage:?}, after {} states: {violation}", commas(found.states));
    }
}
