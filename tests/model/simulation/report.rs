//! Many runs, and what is said of them.

use std::{fmt::Write, time::Instant};

use super::{Failover, Outcome, Sabotage, Settings, Simulation, Violation};

const STEPS_OF_A_WORLD: u64 = 15_000;
/// So many other seeds are tried for a shorter history.
const OTHERS: u64 = 200;
/// So many lines of a history are shown.
const SHOWN: usize = 60;

/// What became of many runs.
#[derive(Default)]
pub(crate) struct Sum {
    pub steps: u64,
    pub runs: u64,
    pub calls: u64,
    pub holdings: u64,
    pub failovers: u64,
    pub lost_writes: u64,
    pub violations: u64,
    /// Pods that certainly had more calls than they may.
    pub double_bookings: u64,
}

impl Sum {
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

/// Lives through runs until so many steps are done. The first violation ends it,
/// with a history that shows it.
pub(crate) fn runs_without_violation(seed: u64, steps: u64, failover: Option<Failover>) -> Sum {
    let started = Instant::now();
    let mut sum = Sum::default();
    while sum.steps < steps {
        let seed = seed.wrapping_add(sum.runs);
        let settings = Settings { failover, ..Settings::new(seed, STEPS_OF_A_WORLD) };
        let outcome = Simulation::live(settings, false);
        sum.add(&outcome);
        if let Some(violation) = outcome.violations.first() {
            panic!("{}", shortest(settings, violation));
        }
    }
    let speed = (sum.steps as f64 / started.elapsed().as_secs_f64()) as u64;
    let (steps, runs, speed) = (commas(sum.steps), commas(sum.runs), commas(speed));
    let (calls, holdings) = (commas(sum.calls), commas(sum.holdings));
    println!("simulation: {steps} steps, {runs} runs, 0 violations");
    println!(
        "  {calls} calls, {holdings} certain of their pod, {speed} steps/s, first seed {seed}"
    );
    sum
}

/// Counts what goes wrong when failovers lose writes.
pub(crate) fn runs_with_losses(seed: u64, runs: u64, failover: Failover) -> Sum {
    let mut sum = Sum::default();
    for simulation in 0..runs {
        let settings = Settings {
            failover: Some(failover),
            stops_early: false,
            ..Settings::new(seed.wrapping_add(simulation), STEPS_OF_A_WORLD)
        };
        sum.add(&Simulation::live(settings, false));
    }
    let per = |count: u64| sum.double_bookings as f64 / count.max(1) as f64;
    println!(
        "failover, last {} writes lost: {} failovers, {} writes lost, {} double bookings: {:.4} per failover, {:.4} per lost write ({} violations of all kinds)",
        failover.most,
        commas(sum.failovers),
        commas(sum.lost_writes),
        commas(sum.double_bookings),
        per(sum.failovers),
        per(sum.lost_writes),
        commas(sum.violations),
    );
    sum
}

/// The first violation that a sabotage leads to, in so many runs.
pub(crate) fn caught(sabotage: Sabotage, runs: u64) -> Option<(Settings, Violation)> {
    (0..runs).find_map(|seed| {
        let sabotage = Some(sabotage);
        let settings = Settings { sabotage, ..Settings::new(seed, STEPS_OF_A_WORLD) };
        let outcome = Simulation::live(settings, false);
        Some((settings, outcome.violations.into_iter().next()?))
    })
}

/// The shortest history that can be found of the same kind of violation.
pub(crate) fn shortest(settings: Settings, violation: &Violation) -> String {
    let (mut best, mut shown) = (settings, violation.clone());
    for other in 0..OTHERS {
        let seed = settings.seed.wrapping_add(1_000_000 + other);
        let shorter = Settings { seed, steps: shown.step.saturating_sub(1), ..settings };
        let outcome = Simulation::live(shorter, false);
        let same =
            |it: &&Violation| it.invariant == violation.invariant && it.step <= shorter.steps;
        if let Some(same) = outcome.violations.iter().find(same) {
            (best, shown) = (shorter, same.clone());
        }
    }
    let history = Simulation::live(Settings { steps: shown.step, ..best }, true).history;
    let concerns = |line: &&super::Line| {
        let of_pod = line.pod.is_some() && line.pod == shown.pod;
        let of_call = line.call.is_some() && line.call == shown.call;
        of_pod || of_call || line.pod.is_none() && line.call.is_none()
    };
    let lines: Vec<_> = history.iter().filter(concerns).collect();
    let mut text = format!(
        "{}: {}\nseed {} ({} first), {} steps\n",
        shown.invariant, shown.what, best.seed, settings.seed, shown.step
    );
    for line in &lines[lines.len().saturating_sub(SHOWN)..] {
        let _ = writeln!(text, "  {:>7} ms  {}", line.at, line.text);
    }
    text
}
