//! The policies that a simulation compares.

use std::{cmp::Reverse, collections::BinaryHeap};

use fleet::capacity::{Observation, Policy, Settings, Zone};

use super::simulate::{Call, Outcome, PoolModel, simulate};

/// A policy's name and its result on a trace.
#[derive(Debug, Clone)]
pub(crate) struct PolicyResult {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

/// A simulation of all policies.
#[derive(Debug, Clone)]
pub(crate) struct Comparison {
    pub(crate) model: PoolModel,
    /// Share of calls that must find a warm pod.
    pub(crate) target: f64,
    pub(crate) zone: Zone,
}

impl Comparison {
    /// Runs all policies; the forecast policy is the first.
    pub(crate) fn run(&self, calls: &[Call]) -> Vec<PolicyResult> {
        let present = calls_at_arrivals(calls);
        // Only the samples of the forecast are shown; those of a year take 300 MB.
        let result = |name: &str, outcome: Outcome| {
            let outcome = Outcome { samples: Vec::new(), ..outcome };
            PolicyResult { name: name.into(), outcome }
        };
        let (peak, fixed) = self.fixed_peak(calls, &present);
        let fixed = result(&format!("fixed peak ({peak} pods)"), fixed);
        let (buffer, buffered) = self.tuned_buffer(calls, &present);
        let buffered = result(&format!("buffer of {buffer}, tuned in hindsight"), buffered);
        vec![
            PolicyResult { name: "forecast".into(), outcome: self.forecast(calls) },
            fixed,
            result("70 % utilisation", self.utilisation(calls)),
            buffered,
            result("clairvoyant", self.clairvoyant(calls)),
        ]
    }

    /// The capacity policy of the router, from an empty state.
    pub(super) fn forecast(&self, calls: &[Call]) -> Outcome {
        let mut policy = Policy::new(Settings {
            target: self.target,
            start_up: self.model.cold_start as f64 / 1_000.0,
            calls_per_pod: self.model.calls_per_pod,
            zone: self.zone.clone(),
            ..Settings::default()
        });
        simulate(calls, self.model, &mut |seen: &Observation| policy.step(seen).desired)
    }

    /// The smallest constant number of pods with which the target's share of arrivals finds a pod,
    /// if none of the calls before them waited.
    fn fixed_peak(&self, calls: &[Call], present: &[u32]) -> (u64, Outcome) {
        let mut sorted = present.to_vec();
        sorted.sort_unstable();
        let rank = (sorted.len() as f64 * self.target).ceil() as usize;
        let most = sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0);
        let pods = self.pods(u64::from(most) + 1);
        let model = PoolModel { warm: pods, ..self.model };
        (pods, simulate(calls, model, &mut |_: &Observation| pods))
    }

    fn utilisation(&self, calls: &[Call]) -> Outcome {
        simulate(calls, self.model, &mut |seen: &Observation| {
            self.pods(((seen.live + seen.waiting) as f64 / 0.7).ceil() as u64)
        })
    }

    fn tuned_buffer(&self, calls: &[Call], present: &[u32]) -> (u64, Outcome) {
        let run = |buffer: u64| {
            simulate(calls, self.model, &mut |seen: &Observation| {
                self.pods(seen.live + seen.waiting + buffer)
            })
        };
        let top = u64::from(present.iter().copied().max().unwrap_or(0)) + 1;
        let (mut low, mut high) = (0, top);
        let mut best = None;
        while high - low > 1 {
            let middle = low.midpoint(high);
            let outcome = run(middle);
            if outcome.miss_share() <= 1.0 - self.target {
                high = middle;
                best = Some(outcome);
            } else {
                low = middle;
            }
        }
        (high, best.unwrap_or_else(|| run(high)))
    }

    /// The fewest pod-hours without a miss, with knowledge of the future: each pod starts just in
    /// time, and idles only where that is cheaper than a new start.
    fn clairvoyant(&self, calls: &[Call]) -> Outcome {
        let mut outcome = Outcome { calls: calls.len() as u64, ..Outcome::default() };
        let slots = self.model.calls_per_pod;
        // The end of the last busy time of each pod, and the start of the present one.
        let mut idle_since: Vec<u64> = Vec::new();
        let mut pods = 0;
        let mut live = 0_u64;
        let mut millis = 0_u128;
        for (at, begins) in changes(calls) {
            live = if begins { live + 1 } else { live - 1 };
            let needed = self.pods(live);
            if needed > pods {
                // The pod that became idle last has the shortest gap.
                let gap = idle_since.pop().map(|since| at - since);
                millis += u128::from(
                    gap.map_or(self.model.cold_start, |gap| gap.min(self.model.cold_start)),
                );
            } else if needed < pods {
                idle_since.push(at);
            }
            pods = needed;
            debug_assert!(live <= pods * slots);
        }
        millis += busy_millis(calls, slots);
        outcome.pod_hours = millis as f64 / 3_600_000.0;
        outcome.call_hours = calls.iter().map(|call| call.duration as f64).sum::<f64>() / 3.6e6;
        outcome
    }

    fn pods(&self, calls: u64) -> u64 {
        calls.div_ceil(self.model.calls_per_pod)
    }
}

/// Starts and ends of calls in order of time; ends come first.
fn changes(calls: &[Call]) -> Vec<(u64, bool)> {
    let mut changes: Vec<(u64, bool)> = calls
        .iter()
        .flat_map(|call| [(call.start, true), (call.start + call.duration, false)])
        .collect();
    changes.sort_unstable();
    // A call of no length begins and ends: its end must not precede its start.
    let mut live = 0_u64;
    for index in 0..changes.len() {
        if changes[index].1 {
            live += 1;
        } else if live == 0 {
            let start = changes[index..].iter().position(|change| change.1).unwrap_or(0);
            changes.swap(index, index + start);
            live += 1;
        } else {
            live -= 1;
        }
    }
    changes
}

/// Time that pods are busy if calls share as few of them as possible.
fn busy_millis(calls: &[Call], slots: u64) -> u128 {
    let (mut live, mut before, mut sum) = (0_u64, 0, 0_u128);
    for (at, begins) in changes(calls) {
        sum += u128::from(at - before) * u128::from(live.div_ceil(slots));
        live = if begins { live + 1 } else { live - 1 };
        before = at;
    }
    sum
}

/// The number of calls that each call meets, if none waits.
fn calls_at_arrivals(calls: &[Call]) -> Vec<u32> {
    let mut ends: BinaryHeap<Reverse<u64>> = BinaryHeap::new();
    calls
        .iter()
        .map(|call| {
            while ends.peek().is_some_and(|end| end.0 <= call.start) {
                ends.pop();
            }
            let met = ends.len() as u32;
            ends.push(Reverse(call.start + call.duration));
            met
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::plan::synthetic::{Kind, Synthetic};

    fn comparison(cold_start: u64) -> Comparison {
        let model = PoolModel::new(cold_start, 1);
        Comparison { model, target: 0.999, zone: Zone::default() }
    }

    fn call(start: u64, duration: u64) -> Call {
        Call { start, duration }
    }

    #[test]
    fn the_clairvoyant_policy_idles_only_where_a_start_costs_more() {
        let hours = |calls: &[Call]| comparison(60_000).clairvoyant(calls).pod_hours * 3_600_000.0;
        // One start and the call.
        assert_eq!(hours(&[call(0, 100_000)]).round(), 160_000.0);
        // A gap of 20 s is cheaper than a start, a gap of 200 s is not.
        assert_eq!(hours(&[call(0, 10_000), call(30_000, 10_000)]).round(), 100_000.0);
        assert_eq!(hours(&[call(0, 10_000), call(210_000, 10_000)]).round(), 140_000.0);
        // Two calls at the same time are two starts; a call of no length is none.
        assert_eq!(hours(&[call(0, 10_000), call(5_000, 10_000)]).round(), 140_000.0);
        assert_eq!(hours(&[call(0, 0), call(5_000, 0)]).round(), 65_000.0);
    }

    #[test]
    fn calls_meet_the_calls_that_are_live() {
        let calls = [call(0, 10), call(5, 10), call(10, 1), call(20, 1)];
        assert_eq!(calls_at_arrivals(&calls), [0, 1, 1, 0]);
    }

    #[test]
    fn the_forecast_meets_the_target_with_fewer_pods_than_the_others() {
        let calls = Synthetic { kind: Kind::Office, peak: 60.0, days: 4, seed: 3 }.calls();
        let results = comparison(60_000).run(&calls);
        let cost = |index: usize| results[index].outcome.pod_hours_per_call_hour().unwrap();
        // The first opening is unknown: its calls are most of the misses of these days.
        assert!(results[0].outcome.miss_share() < 0.003, "{}", results[0].outcome.miss_share());
        assert!(results[1].outcome.miss_share() <= 0.001 && cost(0) < cost(1));
        assert!(results[2].outcome.miss_share() > 0.003);
        assert!(results[3].outcome.miss_share() <= 0.001 && cost(0) < cost(3));
        assert!(results[4].outcome.misses == 0 && cost(4) < cost(0));
    }
}
