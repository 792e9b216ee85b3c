//! The arithmetic against exact distributions.

use super::{AnswerRate, DialSums, held};
use crate::rules::PROBABILITY_UNIT;
use crate::testing::dice::Dice;

/// Returns P(answers > k) of independent dials, for k = 0, 1, …: the exact convolution.
fn exact_tails(probabilities: &[u64]) -> Vec<f64> {
    let mut distribution = vec![1.0];
    for &units in probabilities {
        let p = units as f64 / PROBABILITY_UNIT as f64;
        let mut next = vec![0.0; distribution.len() + 1];
        for (answers, weight) in distribution.iter().enumerate() {
            next[answers] += weight * (1.0 - p);
            next[answers + 1] += weight * p;
        }
        distribution = next;
    }
    let mut tails = vec![0.0; distribution.len()];
    for k in (0..distribution.len() - 1).rev() {
        tails[k] = tails[k + 1] + distribution[k + 1];
    }
    tails
}

fn sums_of(probabilities: &[u64]) -> DialSums {
    let mut sums = DialSums::default();
    probabilities.iter().for_each(|&p| sums.add(p));
    sums
}

/// Returns the held slots and the smallest number that keeps the target.
fn compare(probabilities: &[u64], target: f64) -> (u64, u64) {
    let exact = exact_tails(probabilities).iter().position(|tail| *tail <= target).unwrap();
    (held(sums_of(probabilities), target), exact as u64)
}

const TARGETS: [f64; 6] = [0.0001, 0.001, 0.01, 0.03, 0.1, 0.3];

#[test]
fn equal_probabilities_hold_the_exact_number_of_slots() {
    for p in [1, 30, 307, 512, 717, 1000, 1023] {
        for dials in (1..90).chain([150, 400]) {
            for target in TARGETS {
                let (slots, exact) = compare(&vec![p; dials], target);
                let normal = p * (PROBABILITY_UNIT - p) * dials as u64 > 25 << 20;
                let allowed = if normal { exact..=exact + 1 } else { exact..=exact };
                assert!(
                    allowed.contains(&slots),
                    "{dials} dials of {p}, {target}: {slots}, {exact}"
                );
            }
        }
    }
}

#[test]
fn mixed_probabilities_hold_enough_slots_and_few_more() {
    let mut dice = Dice(7);
    for round in 0..3_000 {
        let kinds: Vec<u64> =
            (0..=dice.roll(3)).map(|_| dice.between(1, PROBABILITY_UNIT)).collect();
        let probabilities: Vec<u64> =
            (0..=dice.roll(120)).map(|_| kinds[dice.roll(kinds.len())]).collect();
        for (target, more) in [(0.0001, 5), (0.001, 3), (0.01, 2), (0.03, 2)] {
            let (slots, exact) = compare(&probabilities, target);
            assert!(
                (exact..=exact + more).contains(&slots),
                "round {round}, {} dials of {kinds:?}, {target}: {slots} instead of {exact}",
                probabilities.len()
            );
        }
    }
}

#[test]
fn a_target_of_zero_holds_a_slot_per_dial() {
    assert_eq!(held(sums_of(&[100; 17]), 0.0), 17);
    assert_eq!(held(DialSums::default(), 0.0), 0);
}

#[test]
fn certain_answers_hold_a_slot_each() {
    assert_eq!(held(sums_of(&[PROBABILITY_UNIT; 12]), 0.01), 12);
    assert_eq!(held(DialSums::default(), 0.01), 0);
}

#[test]
fn one_more_dial_never_lowers_the_held_slots() {
    for p in [30, 307, 512, 717, 1000] {
        let mut sums = DialSums::default();
        let mut before = 0;
        for dials in 1..20_000 {
            sums.add(p);
            let slots = held(sums, 0.01);
            assert!(
                slots >= before && slots <= before + 1,
                "{dials} dials of {p}: {before}, {slots}"
            );
            before = slots;
        }
    }
}

#[test]
fn removed_dials_leave_no_trace_in_the_sums() {
    let mut sums = sums_of(&[1024, 300, 5]);
    sums.remove(300);
    assert_eq!(sums, sums_of(&[5, 1024]));
}

#[test]
fn an_answer_rate_starts_at_one_and_stays_there_while_all_answer() {
    let mut rate = AnswerRate::default();
    for _ in 0..1_000 {
        assert_eq!(rate.probability(), PROBABILITY_UNIT);
        rate.record(true, 3);
    }
}

#[test]
fn an_answer_rate_without_answers_stays_at_its_minimum() {
    let mut rate = AnswerRate::default();
    (0..10_000).for_each(|_| rate.record(false, 0));
    assert_eq!(rate.probability(), 32);
}

/// Records dials of which exactly this share is answered, evenly spread.
fn record_evenly(rate: &mut AnswerRate, dials: u64, percent: u64) {
    (0..dials).for_each(|i| rate.record((i + 1) * percent / 100 > i * percent / 100, 4));
}

#[test]
fn an_answer_rate_follows_a_shift_within_some_tens_of_dials() {
    let share = |rate: &AnswerRate| rate.probability() as f64 / PROBABILITY_UNIT as f64;
    let mut rate = AnswerRate::default();
    record_evenly(&mut rate, 100, 30);
    assert!((0.3..0.42).contains(&share(&rate)), "{}", share(&rate));
    record_evenly(&mut rate, 50, 70);
    assert!((0.6..0.8).contains(&share(&rate)), "{}", share(&rate));
    record_evenly(&mut rate, 60, 30);
    assert!((0.3..0.48).contains(&share(&rate)), "{}", share(&rate));
}

#[test]
fn an_answer_rate_survives_dials_that_end_together() {
    let mut rate = AnswerRate::default();
    let mut outstanding = 500;
    // All were placed at once. The answers come first, then the provider gives up on the others.
    for dial in 0..500 {
        outstanding -= 1;
        rate.record(dial < 150, outstanding);
    }
    assert!(rate.probability() > PROBABILITY_UNIT / 10, "{rate:?}: {}", rate.probability());
}

#[test]
fn more_outstanding_dials_than_ended_ones_raise_the_probability() {
    let mut rate = AnswerRate::default();
    (0..400_u64).for_each(|dial| rate.record(dial.is_multiple_of(4), 100));
    let ended = rate.dials >> 16;
    assert!((100..200).contains(&ended), "{rate:?}");
    let learned = rate.probability();
    assert_eq!(rate.probability_among(ended), learned, "as many as have ended");
    let twice = rate.probability_among(2 * ended) as f64 / PROBABILITY_UNIT as f64;
    assert!((0.6..0.7).contains(&twice), "half of them have ended: {twice}");
    let many = (ended..10_000).map(|outstanding| rate.probability_among(outstanding));
    assert!(many.is_sorted());
    assert_eq!(rate.probability_among(1_000_000), PROBABILITY_UNIT);
}
