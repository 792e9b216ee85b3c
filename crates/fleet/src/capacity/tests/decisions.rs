//! Decisions under load: without history, steady, rising, falling and daily.

use super::*;
use crate::capacity::Reason;

#[test]
fn the_first_decision_covers_the_live_calls() {
    let observation =
        Observation { at: MONDAY * 1_000, live: 50, ready: 50, ..Observation::default() };
    let decision = Policy::new(Settings::default()).step(&observation);
    assert!((51..100).contains(&decision.desired), "{decision:?}");
}

#[test]
fn the_first_decision_does_not_fall_as_calls_grow() {
    let decide = |live| {
        let seen = Observation { at: MONDAY * 1_000, live, ready: live, ..Observation::default() };
        Policy::new(Settings::default()).step(&seen).desired
    };
    let decisions: Vec<u64> = (0..40).map(decide).collect();
    assert!(decisions.is_sorted(), "{decisions:?}");
    assert!((1..=5).contains(&decisions[0]), "{decisions:?}");
}

#[test]
fn a_burst_of_very_short_calls_needs_few_pods() {
    let mut policy = Policy::new(Settings::default());
    let seen = Observation { at: MONDAY * 1_000, ready: 20, ..Observation::default() };
    policy.step(&seen);
    let burst = Observation {
        at: seen.at + 5_000,
        arrivals: 560,
        durations: vec![0.02; 560],
        ..seen.clone()
    };
    policy.step(&burst);
    for step in 2..100 {
        let decision = policy.step(&Observation { at: seen.at + step * 5_000, ..seen.clone() });
        assert!(decision.expected_calls < 2.0, "{step}: {decision:?}");
        assert!(decision.needed <= 10, "{step}: {decision:?}");
    }
}

#[test]
fn an_idle_pool_without_history_keeps_a_pod_or_two() {
    let mut pool = pool();
    let first = pool.step(0.0).desired;
    assert!((1..=5).contains(&first), "{first}");
    let later = pool.run(HOUR, 0.0).desired;
    assert!((1..=2).contains(&later), "{later}");
}

#[test]
fn the_margin_shrinks_with_the_size_of_the_pool() {
    let margin = |calls: f64| {
        let decision = pool().run(3 * HOUR, calls / DURATION);
        decision.needed as f64 / calls
    };
    let (small, medium, large) = (margin(20.0), margin(200.0), margin(20_000.0));
    assert!(small > 1.2 && small < 2.2, "{small}");
    assert!(medium > 1.08 && medium < 1.35, "{medium}");
    assert!(large > 1.005 && large < 1.15, "{large}");
}

#[test]
fn an_opening_that_was_seen_once_is_warm_the_next_day() {
    let mut pool = pool();
    let mut missed = Vec::new();
    for _ in 0..2 {
        pool.run(7 * HOUR, 0.0);
        pool.missed = 0.0;
        pool.run(HOUR, 0.5);
        missed.push(pool.missed);
        pool.run(6 * HOUR, 0.5);
        pool.run(10 * HOUR, 0.0);
    }
    assert!(missed[0] > 20.0, "nothing was known on the first day: {missed:?}");
    assert!(missed[1] < 3.0, "{missed:?}");
}

#[test]
fn a_closed_pool_loses_its_pods() {
    let mut pool = pool();
    pool.run(6 * HOUR, 0.5);
    let decision = pool.run(4 * HOUR, 0.0);
    assert!(decision.desired <= 2, "{decision:?}");
}

#[test]
fn a_surplus_goes_within_minutes_but_not_at_once() {
    let mut pool = pool();
    pool.run(2 * HOUR, 1.0);
    let before = pool.ready + pool.starting.len() as u64;
    pool.ready += 100;
    let next = pool.step(1.0);
    assert_eq!(next.reason, Reason::Keep);
    assert!(next.desired > before + 50, "{next:?} after {before}");
    let later = pool.run(600, 1.0);
    assert!(later.desired < before + 15, "{later:?} after {before}");
}

#[test]
fn a_lasting_burst_is_covered_after_a_few_start_up_times() {
    let mut pool = pool();
    pool.run(2 * HOUR, 0.5);
    pool.run(5 * 60, 1.5);
    pool.missed = 0.0;
    pool.run(30 * 60, 1.5);
    assert!(pool.missed < 1.0, "{}", pool.missed);
}

#[test]
fn the_first_calls_after_silence_do_not_start_a_multiple_of_their_number() {
    for (quiet, before) in [(0, 0.0), (HOUR, 0.0), (8 * HOUR, 0.0), (3 * DAY, 0.0), (HOUR, 0.01)] {
        let mut pool = pool();
        if quiet > 0 {
            pool.run(quiet, before);
        }
        let rate = 200.0 / DURATION;
        let most = (0..2 * HOUR / STEP).map(|_| pool.step(rate).desired).max();
        assert!(most < Some(300), "{most:?} pods for 200 calls after {quiet} s at {before}/s");
    }
}

#[test]
fn waiting_calls_are_demand() {
    let seen = Observation { at: MONDAY * 1_000, waiting: 40, ..Observation::default() };
    assert!(Policy::new(Settings::default()).step(&seen).desired >= 40);
}

#[test]
fn a_shared_pod_counts_with_all_its_slots() {
    let decide = |calls_per_pod| {
        let settings = Settings { calls_per_pod, ..Settings::default() };
        let seen =
            Observation { at: MONDAY * 1_000, live: 100, ready: 100, ..Observation::default() };
        Policy::new(settings).step(&seen).needed
    };
    assert_eq!(decide(10), decide(1).div_ceil(10));
}

#[test]
fn a_stricter_target_needs_more_pods() {
    let decide = |target| {
        let mut pool = Pool::new(Settings { target, ..Settings::default() });
        pool.run(HOUR, 1.0).needed
    };
    assert!(decide(0.9999) > decide(0.99));
}
