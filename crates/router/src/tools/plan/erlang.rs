//! Erlang's formulas: the number of pods for a constant rate of calls.

use fleet::capacity::normal_quantile;

/// The largest load of the tables, in erlangs; their computation takes seconds.
pub(crate) const MAX_LOAD: f64 = 1e7;

/// A steady demand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    /// Calls per second.
    pub(crate) rate: f64,
    /// Mean duration of a call, in seconds.
    pub(crate) duration: f64,
}

impl Demand {
    /// Mean number of calls at the same time, in erlangs.
    pub(crate) fn load(self) -> f64 {
        self.rate * self.duration
    }
}

/// Erlang B: the share of calls that find all pods busy, if such calls are refused.
pub(crate) fn blocked(load: f64, pods: u64) -> f64 {
    let mut blocked = 1.0;
    for n in 1..=pods {
        blocked = load * blocked / (n as f64 + load * blocked);
    }
    blocked
}

/// Erlang C: the share of calls that find all pods busy, if such calls wait. All calls wait if
/// the pods cannot carry the load.
pub(crate) fn waits(load: f64, pods: u64) -> f64 {
    if load >= pods as f64 {
        return 1.0;
    }
    let blocked = blocked(load, pods);
    blocked / (1.0 - load / pods as f64 * (1.0 - blocked))
}

/// Mean wait of all calls, in seconds; infinite if the pods cannot carry the load.
pub(crate) fn mean_wait(demand: Demand, pods: u64) -> f64 {
    let spare = pods as f64 - demand.load();
    match spare > 0.0 {
        true => waits(demand.load(), pods) * demand.duration / spare,
        false => f64::INFINITY,
    }
}

/// The smallest number of pods at which a call finds one with this probability.
pub(crate) fn pods_for(load: f64, target: f64, miss: fn(f64, u64) -> f64) -> u64 {
    let (mut low, mut high) = (0, (load + 10.0 * load.sqrt()) as u64 + 20);
    while miss(load, high) > 1.0 - target {
        high *= 2;
    }
    while high - low > 1 {
        let middle = low.midpoint(high);
        match miss(load, middle) > 1.0 - target {
            true => low = middle,
            false => high = middle,
        }
    }
    high
}

/// Pods that are warm on average if new ones start on demand: the calls of now forecast those at
/// the end of the start-up time, so the margin covers only the changes in between.
pub(crate) fn warm_pods(demand: Demand, start_up: f64, target: f64) -> u64 {
    let load = demand.load();
    let stays = (-start_up / demand.duration).exp();
    // Live calls that end, and new ones, each with the variance of a Poisson number.
    let variance = load * (1.0 - stays * stays);
    (load + normal_quantile(1.0 - target) * variance.sqrt()).ceil().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_give_published_values() {
        // Tables of Erlang B: 100 erlangs on 117 lines lose about 1 %, on 100 lines 7.6 %.
        assert!((blocked(100.0, 100) - 0.0757).abs() < 1e-4);
        assert!((blocked(100.0, 117) - 0.0098).abs() < 2e-4);
        assert!((blocked(2.0, 2) - 0.4).abs() < 1e-12);
        assert!((waits(2.0, 3) - 4.0 / 9.0).abs() < 1e-12);
        assert!((mean_wait(Demand { rate: 2.0, duration: 1.0 }, 3) - 4.0 / 9.0).abs() < 1e-12);
    }

    #[test]
    fn too_few_pods_make_all_calls_wait_for_ever() {
        assert_eq!(waits(10.0, 10), 1.0);
        assert_eq!(mean_wait(Demand { rate: 10.0, duration: 1.0 }, 10), f64::INFINITY);
    }

    #[test]
    fn one_pod_fewer_misses_the_target() {
        for load in [0.01, 1.0, 60.0, 5_000.0] {
            for miss in [blocked, waits] {
                let pods = pods_for(load, 0.999, miss);
                assert!(miss(load, pods) <= 0.001);
                assert!(pods == 1 || miss(load, pods - 1) > 0.001, "{load} {pods}");
            }
        }
    }
}
