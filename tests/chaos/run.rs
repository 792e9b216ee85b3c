//! One run: a deployment, callers, faults, and the invariant checks.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use super::{
    callers::{Caller, DEFAULT_WORKLOAD, WAIT, Workload},
    cell::{Broken, Cell},
    cells::CELLS,
    deployment::{Deployment, cap},
    diallers,
    faults::FaultContext,
    final_check,
    heartbeat::Heartbeat,
    history::{Event, Violation},
    history_check::{HistoryCheck, MAX_RESPONSE_TIME},
    operators,
    store::BackendKind,
    streams,
};
use testkit::dice::Dice;

/// Invariants with a time limit, which a stall of the machine can violate.
const TIMED_INVARIANTS: [&str; 4] = ["I4", "I8", "I10", "I11"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    Sound,
    Broken,
}

pub(crate) struct RunResult {
    pub violations: Vec<Violation>,
    pub events: Vec<Event>,
    /// The reason why the run could not be completed.
    pub error: Option<String>,
}

impl RunResult {
    /// Prints the violations and the events of the first one's subjects.
    pub(crate) fn print(&self, cell: &str, seed: u64) {
        if let Some(error) = &self.error {
            println!("{cell} seed {seed}: could not be run: {error}");
        }
        let Some(first) = self.violations.first() else { return };
        let mut text = format!(
            "{cell} seed {seed}: {} violations; ./chaos.sh --cell {cell} --seed {seed} --sound-only\n",
            self.violations.len()
        );
        for violation in self.violations.iter().take(5) {
            text += &format!("  {} {}\n", violation.invariant, violation.message);
        }
        text += "  events of the first violation:\n";
        for event in
            self.events.iter().filter(|event| first.subjects.iter().any(|it| event.is_about(it)))
        {
            text += &format!("    {event}\n");
        }
        print!("{text}");
    }
}

pub(crate) fn run(cell: &'static Cell, seed: u64, build: Build) -> RunResult {
    let broken = (build == Build::Broken).then_some(cell.broken);
    let faults: &[fn(&FaultContext)] = &[cell.fault];
    catch_panics(|| match cell.streams {
        Some(scenario) => streams::run(cell, scenario, seed, broken),
        None => run_cell(cell, cell.workload, seed, broken, faults),
    })
}

/// Three random faults in a deployment with drains, churn and bad clients.
pub(crate) fn mix(seed: u64) -> RunResult {
    static MIX: Cell = Cell {
        name: "mix",
        description: "a random mix",
        backend: BackendKind::Durable,
        settings: &[
            ("LEASE_TTL", "3s"),
            ("RECONCILE_INTERVAL", "2s"),
            ("CLEANUP_INTERVAL", "2s"),
            ("HTTP_READ_TIMEOUT", "1s"),
        ],
        workload: Workload {
            drains: true,
            churn: true,
            concurrent: 20,
            repeats: 20,
            early_releases: 10,
            clients: 10,
            ..DEFAULT_WORKLOAD
        },
        recovery_time: Duration::from_secs(8),
        fault: |_| {},
        streams: None,
        broken: Broken::Baseline,
        broken_description: "",
    };
    let mut dice = Dice(seed);
    let candidates: Vec<&Cell> = CELLS
        .iter()
        .filter(|cell| {
            ![BackendKind::Sentinels, BackendKind::AdjustableClock].contains(&cell.backend)
                && !["overload", "watch-reordered", "out-of-memory"].contains(&cell.name)
        })
        .collect();
    let chosen: Vec<&Cell> = (0..3).map(|_| candidates[dice.roll(candidates.len())]).collect();
    let faults: Vec<fn(&FaultContext)> = chosen.iter().map(|cell| cell.fault).collect();
    let workload = chosen.iter().fold(MIX.workload, |workload, cell| workload.and(cell.workload));
    catch_panics(|| run_cell(&MIX, workload, seed, None, &faults))
}

/// Turns a panic into a failed run: a deployment that does not start is neither a violation nor
/// a success.
fn catch_panics(work: impl FnOnce() -> Result<(Vec<Violation>, Vec<Event>), String>) -> RunResult {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok((violations, events))) => RunResult { violations, events, error: None },
        Ok(Err(error)) => {
            RunResult { violations: Vec::new(), events: Vec::new(), error: Some(error) }
        }
        Err(_) => {
            RunResult { violations: Vec::new(), events: Vec::new(), error: Some("a panic".into()) }
        }
    }
}

fn run_cell(
    cell: &'static Cell,
    mut workload: Workload,
    seed: u64,
    broken: Option<Broken>,
    faults: &[fn(&FaultContext)],
) -> Result<(Vec<Violation>, Vec<Event>), String> {
    let heartbeat = Heartbeat::start();
    let deployment = Deployment::start(cell, broken)?;
    let is_baseline = broken.is_some_and(Broken::is_baseline);
    if is_baseline && workload.concurrent < 100 {
        // The baseline fails with any concurrent request; this cell's fault must detect it.
        (workload.concurrent, workload.repeats) = (0, 0);
    }
    let healed_at = run_workload(&deployment, workload, seed, broken, faults);
    let mut violations = final_check::run(&deployment, healed_at, cell.recovery_time, is_baseline);
    if deployment.store().failovers() > 1 {
        return Err("Sentinels failed over again without a fault".into());
    }
    let events = deployment.history.events();
    let check = HistoryCheck {
        events: &events,
        lease: deployment.setting("LEASE_TTL"),
        draining: deployment.setting("DRAINING_TTL"),
        cap,
        pauses: [&deployment.pauses, &deployment.crashes]
            .iter()
            .flat_map(|times| times.lock().unwrap().clone())
            .collect(),
        // Waiting callers get the wait time in addition.
        max_response_time: MAX_RESPONSE_TIME + if workload.waits { WAIT } else { Duration::ZERO },
    };
    violations.extend(check.violations());
    let is_timed = |violation: &Violation| TIMED_INVARIANTS.contains(&violation.invariant);
    if let Some(stall) = heartbeat.longest_stall()
        && !violations.is_empty()
        && violations.iter().all(is_timed)
    {
        return Err(format!("the machine stalled for {stall:?}: {}", violations[0].message));
    }
    if let Some(path) = std::env::var_os("CHAOS_HISTORY") {
        let text: String = events.iter().map(|event| format!("{event}\n")).collect();
        std::fs::write(path, text).map_err(|error| error.to_string())?;
    }
    Ok((violations, events))
}

/// Runs the callers during the faults. Returns when the deployment was healed.
fn run_workload(
    deployment: &Deployment,
    workload: Workload,
    seed: u64,
    broken: Option<Broken>,
    faults: &[fn(&FaultContext)],
) -> Instant {
    let is_baseline = broken.is_some_and(Broken::is_baseline);
    thread::scope(|scope| {
        for number in 0..workload.clients {
            let dice = Dice(seed.wrapping_mul(1_000_003).wrapping_add(number as u64));
            let mut caller =
                Caller { deployment, workload, dice, is_baseline, may_be_allocated: false };
            scope.spawn(move || caller.run());
        }
        if workload.drains && !is_baseline {
            scope.spawn(move || operators::drain_pods(deployment, Dice(seed ^ 0xD12A)));
        }
        if workload.churn && !is_baseline {
            scope.spawn(move || operators::churn(deployment, Dice(seed ^ 0xC4u64)));
        }
        for number in 0..workload.diallers {
            let dice = Dice(seed.wrapping_mul(7_919).wrapping_add(number as u64));
            scope.spawn(move || diallers::dial(deployment, dice));
        }
        scope.spawn(move || operators::record_replacements(deployment));
        let context = FaultContext {
            deployment,
            dice: RefCell::new(Dice(seed ^ 0xFA17)),
            is_broken: broken.is_some(),
            is_only_fault: faults.len() == 1,
        };
        // A fault that panics must not leave the callers running.
        let done =
            catch_unwind(AssertUnwindSafe(|| faults.iter().for_each(|fault| fault(&context))));
        deployment.heal();
        let healed_at = Instant::now();
        thread::sleep(Duration::from_millis(150));
        deployment.is_finished.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
        healed_at
    })
}
