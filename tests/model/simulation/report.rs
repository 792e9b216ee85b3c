//! Runs of the simulation, and their summary.

use std::{fmt::Write, time::Instant};

use super::{Failover, InjectedDefect, Outcome, Settings, Simulation, Violation};

const STEPS_PER_RUN: u64 = 15_000;
/// Other seeds that are tried to find a shorter history.
const SHORTENING_RUNS: u64 = 200;
/// Entries of a history that are shown.
const MAX_LOG_ENTRIES: usize = 60;

/// The totals of several runs.
#[derive(Default)]
pub(crate) struct Summary {
    pub steps: u64,
    pub runs: u64,
    pub calls: u64,
    pub holdings: u64,
    pub failovers: u64,
    pub lost_writes: u64,
    pub violations: u64,
    /// Pods that certainly had more calls than their capacity.
    pub double_bookings: u64,
}

impl Summary {
    fn add(&mut self, outcome: &Outcome) {
        let is_double = |it: &&Violation| matches!(it.invariant, "I1" | "I3");
        self.steps += outcome.steps;
        self.runs += 1;
        self.calls += outcome.calls;
        self.holdings += outcome.holdings;
        self.failovers += outcome.failovers;
        self.lost_writes += outcome.lost_writes;
        self.violations += outcome.violations.len() as u64;
        self.double_bookings += outcome.violations.iter().filter(is_double).count() as u64;
    }
}

/// A whole number with commas.
pub(crate) fn commas(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Runs the simulation for `steps` steps. Panics with a history at the first violation.
pub(crate) fn expect_no_violation(seed: u64, steps: u64, failover: Option<Failover>) -> Summary {
    let started = Instant::now();
    let mut summary = Summary::default();
    while summary.steps < steps {
        let seed = seed.wrapping_add(summary.runs);
        let settings = Settings { failover, ..Settings::new(seed, STEPS_PER_RUN) };
        let outcome = Simulation::run(settings, false);
        summary.add(&outcome);
        if let Some(violation) = outcome.violations.first() {
            panic!("{}", shortest_history(settings, violation));
        }
    }
    let speed = (summary.steps as f64 / started.elapsed().as_secs_f64()) as u64;
    let (steps, runs, speed) = (commas(summary.steps), commas(summary.runs), commas(speed));
    let (calls, holdings) = (commas(summary.calls), commas(summary.holdings));
    println!("simulation: {steps} steps, {runs} runs, 0 violations");
    println!(
        "  {calls} calls, {holdings} certain of their pod, {speed} steps/s, first seed {seed}"
    );
    summary
}

/// Counts violations when failovers lose writes.
pub(crate) fn count_violations(seed: u64, runs: u64, failover: Failover) -> Summary {
    let mut summary = Summary::default();
    for simulation in 0..runs {
        let settings = Settings {
            failover: Some(failover),
            stops_at_violation: false,
            ..Settings::new(seed.wrapping_add(simulation), STEPS_PER_RUN)
        };
        summary.add(&Simulation::run(settings, false));
    }
    let per = |count: u64| summary.double_bookings as f64 / count.max(1) as f64;
    println!(
        "failover, last {} writes lost: {} failovers, {} writes lost, {} double bookings: {:.4} per failover, {:.4} per lost write ({} violations of all kinds)",
        failover.max_lost,
        commas(summary.failovers),
        commas(summary.lost_writes),
        commas(summary.double_bookings),
        per(summary.failovers),
        per(summary.lost_writes),
        commas(summary.violations),
    );
    summary
}

/// The first violation of a simulation with a defect within `runs` runs.
pub(crate) fn find_violation(defect: InjectedDefect, runs: u64) -> Option<(Settings, Violation)> {
    (0..runs).find_map(|seed| {
        let defect = Some(defect);
        let settings = Settings { defect, ..Settings::new(seed, STEPS_PER_RUN) };
        let outcome = Simulation::run(settings, false);
        Some((settings, outcome.violations.into_iter().next()?))
    })
}

/// The shortest history found with a violation of the same invariant.
pub(crate) fn shortest_history(settings: Settings, violation: &Violation) -> String {
    let (mut best, mut shown) = (settings, violation.clone());
    for other in 0..SHORTENING_RUNS {
        let seed = settings.seed.wrapping_add(1_000_000 + other);
        let shorter = Settings { seed, steps: shown.step.saturating_sub(1), ..settings };
        let outcome = Simulation::run(shorter, false);
        let same =
            |it: &&Violation| it.invariant == violation.invariant && it.step <= shorter.steps;
        if let Some(same) = outcome.violations.iter().find(same) {
            (best, shown) = (shorter, same.clone());
        }
    }
    let history = Simulation::run(Settings { steps: shown.step, ..best }, true).history;
    let concerns = |entry: &&super::LogEntry| {
        let of_pod = entry.pod.is_some() && entry.pod == shown.pod;
        let of_call = entry.call.is_some() && entry.call == shown.call;
        of_pod || of_call || entry.pod.is_none() && entry.call.is_none()
    };
    let entries: Vec<_> = history.iter().filter(concerns).collect();
    let mut text = format!(
        "{}: {}\nseed {} ({} first), {} steps\n",
        shown.invariant, shown.message, best.seed, settings.seed, shown.step
    );
    for entry in &entries[entries.len().saturating_sub(MAX_LOG_ENTRIES)..] {
        let _ = writeln!(text, "  {:>7} ms  {}", entry.at, entry.text);
    }
    text
}
