//! Steps of the store's clock, which the capacity policy must not learn from.

use std::time::{Duration, Instant};

use fleet::Millis;

/// Difference from the monotonic clock between two checks that counts as a step.
const TOLERANCE: Duration = Duration::from_secs(5);

/// Compares the store's clock with the monotonic one.
#[derive(Debug, Default)]
pub(crate) struct ClockCheck {
    /// Both clocks at the last check.
    last: Option<(Millis, Instant)>,
}

impl ClockCheck {
    /// Whether the store's clock has stepped since the last check.
    pub(crate) fn has_stepped(&mut self, now: Millis) -> bool {
        let last = self.last.replace((now, Instant::now()));
        last.is_some_and(|(last, since)| is_step(last, now, since.elapsed()))
    }
}

fn is_step(last: Millis, now: Millis, elapsed: Duration) -> bool {
    let expected = Duration::from_millis(last).saturating_add(elapsed);
    expected.abs_diff(Duration::from_millis(now)) > TOLERANCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_difference_from_the_monotonic_clock() {
        for (now, elapsed, expected) in [
            (105_000, 5, false),
            (109_000, 5, false),
            (160_000, 60, false),
            (1_300_000, 5, true),
            (95_000, 5, true),
            (0, 5, true),
        ] {
            assert_eq!(is_step(100_000, now, Duration::from_secs(elapsed)), expected, "{now}");
        }
        let mut clock = ClockCheck::default();
        let steps = [7_000_000, 7_000_000, 9_000_000, 9_000_000].map(|now| clock.has_stepped(now));
        assert_eq!(steps, [false, false, true, false]);
    }
}
