//! Known values of distributions, durations and start-up times.

use crate::capacity::{
    distribution::{Mixture, Moments, normal_quantile, normal_tail},
    durations::Durations,
    profile::{Profile, Shape},
    start_up::{PodCounts, StartUps},
};

fn close(value: f64, expected: f64, error: f64) {
    assert!((value - expected).abs() <= error, "{value} instead of {expected}");
}

#[test]
fn normal_tails_and_quantiles_match_tables() {
    close(normal_tail(0.0), 0.5, 1e-6);
    close(normal_tail(1.96), 0.024_998, 1e-6);
    close(normal_tail(-1.0), 0.841_345, 1e-6);
    close(normal_quantile(0.001), 3.090_232, 1e-3);
    close(normal_quantile(0.05), 1.644_854, 1e-4);
}

#[test]
fn tails_of_small_numbers_are_exact() {
    // Poisson(3): P(X >= 6) = 0.083918.
    close(Moments::arrivals(3.0, 0.0).at_least(6.0), 0.083_918, 1e-5);
    // Binomial(10, 0.5): P(X >= 8) = 56 / 1024.
    close(Moments::binomial(10.0, 0.5).at_least(8.0), 56.0 / 1024.0, 1e-9);
    // Negative binomial with mean 2 and shape 2: P(X >= 5) = 7/64.
    close(Moments::arrivals(2.0, 0.5).at_least(5.0), 7.0 / 64.0, 1e-9);
    assert_eq!(Moments::default().at_least(1.0), 0.0);
    assert_eq!(Moments::default().at_least(0.0), 1.0);
}

#[test]
fn tails_of_large_numbers_are_close() {
    // Poisson(100): P(X >= 130) = 0.0022825, P(X >= 120) = 0.0282.
    close(Moments::arrivals(100.0, 0.0).at_least(130.0), 0.002_28, 2e-4);
    close(Moments::arrivals(100.0, 0.0).at_least(120.0), 0.028_2, 5e-4);
}

#[test]
fn a_mixture_covers_its_larger_part() {
    let mut mixture = Mixture::default();
    mixture.add(0.5, Moments::arrivals(10.0, 0.0));
    mixture.add(0.5, Moments::arrivals(100.0, 0.0));
    close(mixture.mean(), 55.0, 1e-9);
    let capacity = mixture.capacity(0.001);
    assert!((128.0..=133.0).contains(&capacity), "{capacity}");
    assert_eq!(Mixture::default().capacity(0.001), 1.0);
}

#[test]
fn the_mean_duration_is_learned_from_counts() {
    let mut durations = Durations::default();
    for _ in 0..1_000 {
        durations.observe_counts(100.0, 5.0, 5.0);
    }
    close(durations.mean(), 100.0, 2.0);
    close(durations.survival(60.0).of_live(100.0), (-1.0_f64).exp(), 0.02);
}

#[test]
fn recorded_durations_change_the_survival_of_live_calls() {
    let mut durations = Durations::default();
    for _ in 0..2_000 {
        durations.observe_counts(100.0, 10.0, 10.0);
        durations.observe_durations(&[100.0]);
    }
    // Calls of one length: after half of it, half of the live calls remain.
    close(durations.survival(50.0).of_live(50.0), 0.5, 0.05);
}

#[test]
fn start_up_times_are_learned_from_counts() {
    let mut starts = StartUps::default();
    let mut before = PodCounts::default();
    for round in 0..40 {
        for (offset, ready, starting) in [(0, 0, 2), (90, 2, 0)] {
            let now = PodCounts { ready: round * 2 + ready, starting };
            let at = (round * 1_000 + offset) as f64;
            starts.observe_counts((before, now), at, 60.0, true);
            before = now;
        }
    }
    close(starts.seconds(60.0), 90.0, 1e-9);
    assert_eq!(StartUps::default().seconds(45.0), 45.0);
}

#[test]
fn measured_start_up_times_replace_the_assumed_one() {
    let mut starts = StartUps::default();
    starts.observe_times(&[20.0, 25.0]);
    assert_eq!(starts.seconds(60.0), 60.0, "two samples say little");
    starts.observe_times(&[22.0, 30.0]);
    assert_eq!(starts.seconds(60.0), 30.0);
}

/// Observes pods that start every 1,000 s, and are ready after 60 s, beside one that never is.
fn start_beside_a_failed_pod(starts: &mut StartUps) {
    let mut before = PodCounts { ready: 0, starting: 1 };
    starts.observe_counts((PodCounts::default(), before), 0.0, 60.0, true);
    for round in 1..12 {
        for (offset, ready, starting) in [(0, round - 1, 2), (60, round, 1)] {
            let now = PodCounts { ready, starting };
            starts.observe_counts((before, now), (round * 1_000 + offset) as f64, 60.0, true);
            before = now;
        }
    }
}

#[test]
fn a_late_pod_gives_its_age_to_no_other() {
    let mut starts = StartUps::default();
    start_beside_a_failed_pod(&mut starts);
    close(starts.seconds(60.0), 60.0, 1.0);
    assert_eq!(starts.late(11_060.0, 60.0), 1);
}

#[test]
fn counts_are_not_learned_from_once_times_were_measured() {
    let mut starts = StartUps::default();
    starts.observe_times(&[20.0; 4]);
    start_beside_a_failed_pod(&mut starts);
    close(starts.seconds(60.0), 20.0, 1e-9);
}

#[test]
fn slow_starts_are_learned_although_their_pods_are_late() {
    let mut starts = StartUps::default();
    let mut before = PodCounts::default();
    for round in 0..20 {
        for (offset, ready, starting) in [(0, round, 1), (400, round + 1, 0)] {
            let now = PodCounts { ready, starting };
            let at = (round * 1_000 + offset) as f64;
            starts.observe_counts((before, now), at, starts.seconds(60.0), true);
            before = now;
        }
    }
    close(starts.seconds(60.0), 400.0, 1.0);
}

#[test]
fn a_clock_step_makes_no_starting_pod_late() {
    let mut starts = StartUps::default();
    let (none, one) = (PodCounts::default(), PodCounts { ready: 0, starting: 1 });
    starts.observe_counts((none, one), 1_000.0, 60.0, true);
    for (elapsed, at) in [(2_000.0, 3_000.0), (-2_900.0, 100.0)] {
        starts.skip(elapsed);
        starts.observe_counts((one, one), at, 60.0, false);
        assert_eq!((starts.late(at, 60.0), starts.allowed(at, 60.0)), (0, None));
    }
    starts.observe_counts((one, one), 500.0, 60.0, true);
    assert_eq!(starts.late(500.0, 60.0), 1);
}

#[test]
fn a_stuck_pool_tries_one_more_pod_after_pauses_that_double() {
    let mut starts = StartUps::default();
    let pods = |ready, starting| PodCounts { ready, starting };
    starts.observe_counts((pods(9, 0), pods(9, 3)), 0.0, 60.0, true);
    assert_eq!(starts.allowed(0.0, 60.0), None);
    starts.observe_counts((pods(9, 3), pods(9, 3)), 400.0, 60.0, true);
    let allowed = |at| starts.allowed(at, 60.0);
    assert_eq!((allowed(400.0), allowed(699.0), allowed(700.0)), (Some(4), Some(4), Some(5)));
    assert_eq!((allowed(1_299.0), allowed(1_300.0), allowed(2_500.0)), (Some(5), Some(6), Some(7)));
    starts.observe_counts((pods(9, 3), pods(10, 3)), 3_000.0, 60.0, true);
    assert_eq!(starts.allowed(3_000.0, 60.0), None, "another pod became ready");
    assert_eq!(starts.late(3_000.0, 60.0), 3);
}

#[test]
fn the_profile_keeps_the_edge_of_an_opening_sharp() {
    let mut profile = Profile::default();
    for slot in 0..24 {
        let calls = if slot < 12 { 0.0 } else { 90.0 };
        profile.observe(f64::from(slot) * 300.0, f64::from(slot + 1) * 300.0, calls);
    }
    profile.finish();
    assert_eq!(profile.rate(Shape::Day, 3_599.0), Some(0.0));
    close(profile.rate(Shape::Day, 3_601.0).unwrap(), 0.3, 1e-6);
    close(profile.rate(Shape::Week, 3_601.0).unwrap(), 0.3, 1e-6);
    assert_eq!(profile.rate(Shape::Day, 20_000.0), None);
    close(profile.rate(Shape::Day, 86_400.0 + 3_601.0).unwrap(), 0.3, 1e-6);
    assert_eq!(profile.rate(Shape::Week, 86_400.0 + 3_601.0), None);
}
