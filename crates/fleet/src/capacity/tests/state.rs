//! Stored states and the outlook.

use super::*;
use crate::capacity::State;

#[test]
fn a_state_edited_by_hand_is_not_continued() {
    let mut pool = pool();
    pool.run(2 * HOUR, 0.5);
    let saved = serde_json::to_value(pool.policy.state()).unwrap();
    let sane = |value: serde_json::Value| {
        serde_json::from_value::<State>(value).is_ok_and(|state| state.is_sane())
    };
    assert!(sane(saved.clone()));
    for (pointer, bad) in [
        ("/profile/day", serde_json::json!([])),
        ("/profile/week/7/0", serde_json::json!(-1.0)),
        ("/rate/estimates", serde_json::json!([])),
        ("/rate/estimates/3/calls", serde_json::json!(1e300)),
        ("/durations/histogram", serde_json::json!([1.0])),
        ("/durations/ended", serde_json::json!(-5)),
        ("/start_ups/samples", serde_json::json!(vec![1.0; 65])),
        ("/start_ups/starting", serde_json::json!([[0.0, u64::MAX]])),
        ("/start_ups/stuck", serde_json::json!([0.0, u64::MAX])),
        ("/start_ups/last_ready", serde_json::json!(-1.0)),
        ("/rate/typical", serde_json::json!(-1.0)),
        ("/margin/load", serde_json::json!("much")),
        ("/margin/correction", serde_json::json!(40.0)),
        ("/interval", serde_json::json!(null)),
        // The forecast would cover a time without end, five minutes at a time.
        ("/interval", serde_json::json!(1e17)),
        ("/start_ups/samples", serde_json::json!([1e17])),
        ("/rate/comparison", serde_json::json!([0.0, 1e17, 1.0])),
        ("/rate/comparison", serde_json::json!([5.0, 5.0, 1.0])),
        // Logarithms of 0.
        ("/rate/estimates/3/forecast", serde_json::json!([0.0, 1.0])),
        ("/rate/estimates/3/forecast", serde_json::json!([1.0, 0.0])),
        // Sums beyond the largest number.
        ("/last/calls", serde_json::json!(u64::MAX)),
        ("/last/pods/ready", serde_json::json!(u64::MAX)),
    ] {
        let mut edited = saved.clone();
        *edited.pointer_mut(pointer).unwrap() = bad;
        assert!(!sane(edited), "{pointer}");
    }
}

#[test]
fn the_outlook_continues_the_forecast() {
    let mut pool = pool();
    pool.run(6 * HOUR, 0.5);
    let observation = pool.observation();
    let outlook = pool.policy.outlook(&observation, &[60.0, 3_600.0, 7_200.0]);
    let live = pool.live;
    for point in outlook {
        assert!((point.expected_calls - live).abs() < live / 4.0, "{point:?}, {live} live");
        assert!(point.needed as f64 > point.expected_calls, "{point:?}");
    }
}
