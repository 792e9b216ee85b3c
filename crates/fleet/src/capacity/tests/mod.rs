//! Tests of the policy, with a small simulated pool.

mod bounds;
mod clock;
mod decisions;
mod misses;
mod numbers;
mod properties;
mod scale_down;
mod short_calls;
mod state;

use super::{Decision, Observation, Policy, Settings};

const HOUR: u64 = 3_600;
const DAY: u64 = 24 * HOUR;
/// A Monday, in seconds since the epoch.
const MONDAY: u64 = 1_736_121_600;

/// A pool with steady arrivals and departures, without randomness: the mean of a real one.
struct Pool {
    policy: Policy,
    /// Seconds since the epoch.
    now: u64,
    live: f64,
    arrivals: f64,
    ready: u64,
    /// Times at which starting pods become ready.
    starting: Vec<u64>,
    pods_start: bool,
    /// Calls that met a full pool.
    missed: f64,
}

const STEP: u64 = 5;
const START_UP: u64 = 60;
const DURATION: f64 = 180.0;

impl Pool {
    fn new(settings: Settings) -> Self {
        Self {
            policy: Policy::new(settings),
            now: MONDAY,
            live: 0.0,
            arrivals: 0.0,
            ready: 0,
            starting: Vec::new(),
            pods_start: true,
            missed: 0.0,
        }
    }

    fn observation(&mut self) -> Observation {
        let arrivals = self.arrivals.floor();
        self.arrivals -= arrivals;
        Observation {
            at: self.now * 1_000,
            arrivals: arrivals as u64,
            live: self.live.round() as u64,
            ready: self.ready,
            starting: self.starting.len() as u64,
            ..Observation::default()
        }
    }

    /// Advances by one step at a rate of calls per second.
    fn step(&mut self, rate: f64) -> Decision {
        let observation = self.observation();
        let decision = self.policy.step(&observation);
        let pods = self.ready + self.starting.len() as u64;
        for _ in pods..decision.desired {
            self.starting.push(self.now + START_UP);
        }
        for _ in decision.desired..pods {
            if self.starting.pop().is_none() && self.ready > observation.live {
                self.ready -= 1;
            }
        }
        self.now += STEP;
        let new = rate * STEP as f64;
        if self.live + new > self.ready as f64 {
            self.missed += (self.live + new - self.ready as f64).min(new);
        }
        self.live += new - self.live * STEP as f64 / DURATION;
        self.arrivals += new;
        if self.pods_start {
            let before = self.starting.len();
            self.starting.retain(|ready_at| *ready_at > self.now);
            self.ready += (before - self.starting.len()) as u64;
        }
        decision
    }

    /// Advances for a time at a rate, and returns the last decision.
    fn run(&mut self, seconds: u64, rate: f64) -> Decision {
        let mut decision = self.step(rate);
        for _ in 1..seconds / STEP {
            decision = self.step(rate);
        }
        decision
    }
}

fn pool() -> Pool {
    Pool::new(Settings::default())
}
