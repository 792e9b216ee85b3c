//! A pool of pods under a trace of calls, driven by a scaler.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use fleet::capacity::Observation;

/// The time that calls may wait after the last one, in milliseconds.
const MAX_WAIT: u64 = 86_400_000;

/// One call: start in milliseconds since the epoch, duration in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) start: u64,
    pub(crate) duration: u64,
}

/// A rule for the number of pods.
pub(super) trait Scaler {
    /// Returns the desired number of ready and starting pods.
    fn desired(&mut self, observation: &Observation) -> u64;
}

impl<F: FnMut(&Observation) -> u64> Scaler for F {
    fn desired(&mut self, observation: &Observation) -> u64 {
        self(observation)
    }
}

/// Properties of the simulated pool, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolModel {
    pub(crate) cold_start: u64,
    /// Time between two decisions.
    pub(crate) interval: u64,
    pub(crate) calls_per_pod: u64,
    /// Pods that are ready at the start of the trace.
    pub(crate) warm: u64,
}

impl PoolModel {
    pub(crate) fn new(cold_start: u64, calls_per_pod: u64) -> Self {
        Self { cold_start, interval: 5_000, calls_per_pod, warm: 0 }
    }
}

/// The pool at one decision, for pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) at: u64,
    pub(crate) calls: u64,
    pub(crate) ready: u64,
    pub(crate) starting: u64,
    pub(crate) desired: u64,
    /// Calls so far that found no warm pod.
    pub(crate) misses: u64,
}

/// The result of a simulation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) calls: u64,
    /// Calls that found no warm pod on arrival.
    pub(crate) misses: u64,
    pub(crate) pod_hours: f64,
    pub(crate) call_hours: f64,
    /// Sum of the waiting times of missed calls, in seconds.
    pub(crate) waited: f64,
    pub(crate) samples: Vec<Sample>,
}

impl Outcome {
    /// `None` if all calls have a duration of 0.
    pub(crate) fn pod_hours_per_call_hour(&self) -> Option<f64> {
        (self.call_hours > 0.0).then(|| self.pod_hours / self.call_hours)
    }

    pub(crate) fn miss_share(&self) -> f64 {
        self.misses as f64 / (self.calls as f64).max(1.0)
    }
}

struct Pool<'a> {
    model: PoolModel,
    calls: &'a [Call],
    next: usize,
    now: u64,
    ends: BinaryHeap<Reverse<u64>>,
    /// Calls that wait for a pod.
    waiting: VecDeque<Call>,
    ready: u64,
    /// Times at which starting pods become ready.
    starting: VecDeque<u64>,
    pod_millis: u128,
    arrivals: u64,
    outcome: Outcome,
}

/// Runs a trace, sorted by start, from the first call to the end of the last one. A call that
/// finds no warm pod is a miss; it waits for the next free one, for a day at most.
pub(super) fn simulate(calls: &[Call], model: PoolModel, scaler: &mut dyn Scaler) -> Outcome {
    let Some(first) = calls.first() else { return Outcome::default() };
    let now = first.start;
    let mut pool = Pool {
        model,
        calls,
        next: 0,
        now,
        ends: BinaryHeap::new(),
        waiting: VecDeque::new(),
        ready: model.warm,
        starting: VecDeque::new(),
        pod_millis: 0,
        arrivals: 0,
        outcome: Outcome::default(),
    };
    let last = calls.iter().map(|call| call.start + call.duration).max().unwrap_or(now);
    // A scaler may never start a pod for the calls that wait.
    let stop = last + MAX_WAIT;
    while pool.now < stop
        && (pool.next < calls.len() || !pool.ends.is_empty() || !pool.waiting.is_empty())
    {
        pool.decide(scaler);
        pool.advance(pool.now + model.interval);
    }
    let mut outcome = pool.outcome;
    outcome.calls = calls.len() as u64;
    outcome.pod_hours = pool.pod_millis as f64 / 3_600_000.0;
    outcome.call_hours = calls.iter().map(|call| call.duration as f64).sum::<f64>() / 3_600_000.0;
    outcome
}

impl Pool<'_> {
    fn live(&self) -> u64 {
        self.ends.len() as u64
    }

    fn pods(&self) -> u64 {
        self.ready + self.starting.len() as u64
    }

    fn decide(&mut self, scaler: &mut dyn Scaler) {
        let observation = Observation {
            at: self.now,
            arrivals: std::mem::take(&mut self.arrivals),
            live: self.live(),
            waiting: self.waiting.len() as u64,
            ready: self.ready,
            starting: self.starting.len() as u64,
            ..Observation::default()
        };
        let desired = scaler.desired(&observation);
        self.scale(desired);
        self.outcome.samples.push(Sample {
            at: self.now,
            calls: observation.live + observation.waiting,
            ready: self.ready,
            starting: self.starting.len() as u64,
            desired,
            misses: self.outcome.misses,
        });
    }

    /// Starts pods, or removes starting and then idle ones.
    fn scale(&mut self, desired: u64) {
        for _ in self.pods()..desired {
            self.starting.push_back(self.now + self.model.cold_start);
        }
        while self.pods() > desired && self.starting.pop_back().is_some() {}
        let busy = self.live().div_ceil(self.model.calls_per_pod);
        self.ready -= self.pods().saturating_sub(desired).min(self.ready - busy.min(self.ready));
    }

    /// Runs all events before `until`.
    fn advance(&mut self, until: u64) {
        loop {
            let end = self.ends.peek().map_or(u64::MAX, |end| end.0);
            let warm = self.starting.front().copied().unwrap_or(u64::MAX);
            let arrival = self.calls.get(self.next).map_or(u64::MAX, |call| call.start);
            let event = end.min(warm).min(arrival);
            if event >= until {
                break;
            }
            self.pass_to(event);
            if event == end {
                self.ends.pop();
                self.serve_waiting();
            } else if event == warm {
                self.starting.pop_front();
                self.ready += 1;
                self.serve_waiting();
            } else {
                self.arrive();
            }
        }
        self.pass_to(until);
    }

    fn pass_to(&mut self, time: u64) {
        self.pod_millis += u128::from(time - self.now) * u128::from(self.pods());
        self.now = time;
    }

    fn has_slot(&self) -> bool {
        self.live() < self.ready * self.model.calls_per_pod
    }

    fn arrive(&mut self) {
        let call = self.calls[self.next];
        self.next += 1;
        self.arrivals += 1;
        if self.has_slot() && self.waiting.is_empty() {
            self.begin(call);
        } else {
            self.outcome.misses += 1;
            self.waiting.push_back(call);
        }
    }

    fn serve_waiting(&mut self) {
        while self.has_slot() {
            let Some(call) = self.waiting.pop_front() else { return };
            self.outcome.waited += (self.now - call.start) as f64 / 1_000.0;
            self.begin(call);
        }
    }

    fn begin(&mut self, call: Call) {
        self.ends.push(Reverse(self.now + call.duration));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(calls: &[Call], warm: u64, desired: u64) -> Outcome {
        let model = PoolModel { warm, ..PoolModel::new(60_000, 1) };
        simulate(calls, model, &mut |_: &Observation| desired)
    }

    #[test]
    fn a_call_without_a_warm_pod_is_a_miss_and_waits_for_it() {
        let calls = [Call { start: 0, duration: 30_000 }, Call { start: 1_000, duration: 30_000 }];
        let outcome = run(&calls, 0, 2);
        assert_eq!((outcome.calls, outcome.misses), (2, 2));
        assert!((outcome.waited - (60.0 + 59.0)).abs() < 1e-9);
        assert_eq!(run(&calls, 2, 2).misses, 0);
        assert_eq!(run(&calls, 1, 1).misses, 1);
    }

    #[test]
    fn only_idle_pods_are_removed() {
        let calls = [Call { start: 0, duration: 95_000 }];
        let outcome = run(&calls, 3, 0);
        // All pods are idle at the first decision, before the call.
        assert_eq!(outcome.misses, 1);
        let mut decisions = [3, 3].into_iter();
        let model = PoolModel { warm: 3, ..PoolModel::new(60_000, 1) };
        let outcome = simulate(&calls, model, &mut |_: &Observation| decisions.next().unwrap_or(0));
        assert_eq!(outcome.misses, 0);
        assert!((outcome.pod_hours * 3_600.0 - (30.0 + 85.0)).abs() < 5.1, "{outcome:?}");
    }

    #[test]
    fn pods_cost_from_their_start() {
        let calls = [Call { start: 0, duration: 1_000 }, Call { start: 99_000, duration: 1_000 }];
        let outcome = run(&calls, 0, 1);
        assert!((outcome.pod_hours * 3_600.0 - 100.0).abs() <= 5.0);
    }
}
