//! The correction of the margin by calls that found no warm pod.

use super::*;

/// Logarithm of the factor between the planned miss probability and the target.
fn correction(policy: &Policy) -> f64 {
    let state = serde_json::to_value(policy.state()).unwrap();
    state["margin"]["correction"].as_f64().unwrap()
}

/// Steps a pool through `rounds` of two observations, 30 s apart.
fn alternate(policy: &mut Policy, rounds: u64, observations: &[Observation; 2]) {
    for round in 0..rounds {
        for (number, seen) in (0..).zip(observations) {
            let at = (MONDAY + 60 * round + 30 * number) * 1_000;
            policy.step(&Observation { at, ..seen.clone() });
        }
    }
}

#[test]
fn a_pool_that_was_full_until_its_pods_became_ready_widens_the_margin() {
    let mut policy = Policy::new(Settings::default());
    // Pods become ready at the moment of the observation: it never finds the pool full.
    let before = Observation { arrivals: 2, live: 8, ready: 10, ..Observation::default() };
    let after = Observation { arrivals: 3, live: 11, ready: 12, ..Observation::default() };
    alternate(&mut policy, 20, &[before, after]);
    assert!(correction(&policy) < -0.5, "{}", correction(&policy));
}

#[test]
fn each_waiting_call_is_a_miss() {
    let observe = |waiting| {
        let mut policy = Policy::new(Settings::default());
        let idle = Observation { arrivals: 10, live: 10, ready: 40, ..Observation::default() };
        let busy = Observation { arrivals: 10, live: 30, waiting, ready: 30, ..idle.clone() };
        alternate(&mut policy, 1, &[idle, busy]);
        correction(&policy)
    };
    assert!(observe(8) < observe(0) - 0.1, "{} {}", observe(8), observe(0));
}

#[test]
fn the_margin_shrinks_only_after_enough_calls_and_counted_misses() {
    let mut policy = Policy::new(Settings::default());
    let seen = Observation { arrivals: 100, live: 50, ready: 100, ..Observation::default() };
    let missed = Observation { refusals: 1, ..seen.clone() };
    alternate(&mut policy, 600, &[seen.clone(), seen.clone()]);
    assert_eq!(correction(&policy), 0.0, "no miss was ever counted");
    let mut policy = Policy::new(Settings::default());
    alternate(&mut policy, 1, &[seen.clone(), missed]);
    alternate(&mut policy, 100, &[seen.clone(), seen.clone()]);
    assert!(correction(&policy) <= 0.0, "20 misses would have been allowed");
    alternate(&mut policy, 600, &[seen.clone(), seen]);
    assert!(correction(&policy) > 0.3, "{}", correction(&policy));
}
