//! Paces upkeep, so that calls do not notice it: pauses between its steps bound its share of the
//! store's time.

use std::time::{Duration, Instant};

/// Pause after a step, as a multiple of its duration. A step that waited behind calls took longer,
/// so that a busy store gets longer pauses.
const PAUSE_FACTOR: u32 = 9;
/// Bounds the duration of upkeep on a slow connection.
const MAX_PAUSE: Duration = Duration::from_millis(30);

/// The pace of one task.
#[derive(Default)]
pub struct Pace {
    last_step: Option<Duration>,
}

impl Pace {
    /// Runs a step of bounded work, after the pause that follows from the previous one.
    pub async fn step<T>(&mut self, step: impl Future<Output = T>) -> T {
        if let Some(took) = self.last_step {
            tokio::time::sleep((PAUSE_FACTOR * took).min(MAX_PAUSE)).await;
        }
        let started = Instant::now();
        let outcome = step.await;
        self.last_step = Some(started.elapsed());
        outcome
    }
}
