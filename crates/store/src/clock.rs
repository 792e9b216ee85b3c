//! The clock of the embedded store. It shows the wall clock's time and advances with the
//! monotonic clock, so that a wall clock that is stepped neither stops nor skips time.

use std::time::Instant;

use crate::wall_clock;
use fleet::Millis;

/// Clock differences above this are steps of the wall clock, not the delay between two readings.
const STEP_THRESHOLD: Millis = 1_000;

pub(crate) struct Clock {
    anchor: Instant,
    /// The time at the anchor.
    at: Millis,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { anchor: Instant::now(), at: wall_clock() }
    }

    pub(crate) fn now(&self) -> Millis {
        self.at + self.anchor.elapsed().as_millis() as Millis
    }

    /// Follows the wall clock if it was stepped. Returns by how much (ms).
    pub(crate) fn follow_wall_clock(&mut self) -> Option<i64> {
        // Read between two monotonic readings: a pause of the process is not a step.
        let (before, wall, after) = (self.now(), wall_clock(), self.now());
        let by = if wall > after + STEP_THRESHOLD {
            (wall - after) as i64
        } else if wall + STEP_THRESHOLD < before {
            -((before - wall) as i64)
        } else {
            return None;
        };
        *self = Self { anchor: Instant::now(), at: after.saturating_add_signed(by) };
        Some(by)
    }
}
