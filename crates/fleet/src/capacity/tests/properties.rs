//! Properties over random observations.

use proptest::prelude::*;

use super::*;
use crate::capacity::{Bounds, State};

fn observations() -> impl Strategy<Value = Vec<Observation>> {
    let counts = prop_oneof![0..50_u64, 0..20_000_u64, Just(u64::MAX)];
    let step = prop_oneof![8 => 1_000..60_000_i64, 1 => -10_000_000..10_000_000_i64];
    let one = (step, prop::collection::vec(counts, 7), prop::option::of(-10.0..1e9_f64));
    prop::collection::vec(one, 1..80).prop_map(|steps| {
        let mut at = (MONDAY * 1_000) as i64;
        let observe = |(step, counts, time): (i64, Vec<u64>, Option<f64>)| {
            at += step;
            Observation {
                at: at as u64,
                arrivals: counts[0],
                live: counts[1],
                waiting: counts[2],
                refusals: counts[3],
                ready: counts[4],
                starting: counts[5],
                dial_slots: counts[6],
                start_ups: time.into_iter().collect(),
                durations: time.into_iter().collect(),
                gap: counts[0] % 7 == 3,
            }
        };
        steps.into_iter().map(observe).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_observations_give_a_number_within_the_bounds(
        observations in observations(),
        min in 0..100_u64,
        max in 100..50_000_u64,
        calls_per_pod in 1..50_u64,
    ) {
        let bounds = Bounds { min, max, ..Bounds::default() };
        let mut policy = Policy::new(Settings { bounds, calls_per_pod, ..Settings::default() });
        for observation in &observations {
            let decision = policy.step(observation);
            prop_assert!(decision.desired <= max);
            prop_assert!(decision.expected_calls.is_finite() && decision.start_up > 0.0);
        }
    }

    #[test]
    fn a_stored_state_continues_with_the_same_decisions(
        observations in observations(),
        stored_at in 0..80_usize,
    ) {
        let mut policy = Policy::new(Settings::default());
        let mut resumed = Policy::new(Settings::default());
        for (index, observation) in observations.iter().enumerate() {
            if index == stored_at {
                let text = serde_json::to_string(policy.state()).unwrap();
                let state: State = serde_json::from_str(&text).unwrap();
                resumed = Policy::resume(Settings::default(), state);
            }
            let expected = policy.step(observation);
            if index < stored_at {
                resumed.step(observation);
            } else {
                prop_assert_eq!(resumed.step(observation), expected);
            }
        }
    }
}
