//! One run: a deployment, callers, a fault, and the judgement.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use super::{
    callers::{Caller, Style, USUAL, WAIT},
    cell::{Broken, Cell},
    cells::CELLS,
    census,
    deployment::{Deployment, cap},
    faults::Scene,
    heartbeat::Heartbeat,
    history::{Event, Violation},
    history_check::{HistoryCheck, IN_TIME},
    operators,
    store::Kind,
};
use testkit::dice::Dice;

/// What is promised within a time, of which a machine that stands still takes its part.
const TIMED: [&str; 4] = ["I4", "I8", "I10", "I11"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    Sound,
    Broken,
}

/// What came of a run.
pub(crate) struct Verdict {
    pub violations: Vec<Violation>,
    pub events: Vec<Event>,
    /// Why it could not be run, if it could not.
    pub failed: Option<String>,
}

impl Verdict {
    /// Says what went wrong, with the story of those it happened to.
    pub(crate) fn print(&self, cell: &str, seed: u64) {
        if let Some(failed) = &self.failed {
            println!("{cell} seed {seed}: could not be run: {failed}");
        }
        let Some(first) = self.violations.first() else { return };
        let mut text = format!(
            "{cell} seed {seed}: {} violations; ./chaos.sh --cell {cell} --seed {seed} --sound-only\n",
            self.violations.len()
        );
        for violation in self.violations.iter().take(5) {
            text += &format!("  {} {}\n", violation.invariant, violation.what);
        }
        text += "  what shows it:\n";
        for event in
            self.events.iter().filter(|event| first.subjects.iter().any(|it| event.is_about(it)))
        {
            text += &format!("    {event}\n");
        }
        print!("{text}");
    }
}

pub(crate) fn run(cell: &'static Cell, seed: u64, build: Build) -> Verdict {
    let broken = (build == Build::Broken).then_some(cell.broken);
    let faults: &[fn(&Scene)] = &[cell.fault];
    guarded(|| scene(cell, cell.style, seed, broken, faults))
}

/// Some faults at a time, in a deployment where everything else happens, too.
pub(crate) fn mix(seed: u64) -> Verdict {
    static MIX: Cell = Cell {
        name: "mix",
        says: "a random mix",
        backend: Kind::Durable,
        settings: &[
            ("LEASE_TTL", "3s"),
            ("RECONCILE_INTERVAL", "2s"),
            ("CLEANUP_INTERVAL", "2s"),
            ("HTTP_READ_TIMEOUT", "1s"),
        ],
        style: Style {
            drains: true,
            churn: true,
            twins: 20,
            replays: 20,
            early: 10,
            clients: 10,
            ..USUAL
        },
        allowed: Duration::from_secs(8),
        fault: |_| {},
        broken: Broken::Procedure,
        broken_says: "",
    };
    let mut dice = Dice(seed);
    let fit: Vec<&Cell> = CELLS
        .iter()
        .filter(|cell| {
            ![Kind::Sentinels, Kind::Clocked].contains(&cell.backend)
                && !["overload", "watch-reordered", "out-of-memory"].contains(&cell.name)
        })
        .collect();
    let chosen: Vec<&Cell> = (0..3).map(|_| fit[dice.roll(fit.len())]).collect();
    let faults: Vec<fn(&Scene)> = chosen.iter().map(|cell| cell.fault).collect();
    let style = chosen.iter().fold(MIX.style, |style, cell| style.and(cell.style));
    guarded(|| scene(&MIX, style, seed, None, &faults))
}

/// A part that does not come up is no violation, but no success either.
fn guarded(work: impl FnOnce() -> Result<(Vec<Violation>, Vec<Event>), String>) -> Verdict {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok((violations, events))) => Verdict { violations, events, failed: None },
        Ok(Err(why)) => Verdict { violations: Vec::new(), events: Vec::new(), failed: Some(why) },
        Err(_) => {
            Verdict { violations: Vec::new(), events: Vec::new(), failed: Some("a panic".into()) }
        }
    }
}

fn scene(
    cell: &'static Cell,
    mut style: Style,
    seed: u64,
    broken: Option<Broken>,
    faults: &[fn(&Scene)],
) -> Result<(Vec<Violation>, Vec<Event>), String> {
    let heartbeat = Heartbeat::start();
    let deployment = Deployment::start(cell, broken)?;
    let is_procedure = broken.is_some_and(Broken::is_procedure);
    if is_procedure && style.twins < 100 {
        // It can't even do that; the fault of this cell shall catch it.
        (style.twins, style.replays) = (0, 0);
    }
    let mut cleared = Instant::now();
    thread::scope(|scope| {
        let deployment = &deployment;
        for number in 0..style.clients {
            let dice = Dice(seed.wrapping_mul(1_000_003).wrapping_add(number as u64));
            let mut caller =
                Caller { deployment, style, dice, is_plain: is_procedure, is_unsure: false };
            scope.spawn(move || caller.run());
        }
        if style.drains && !is_procedure {
            scope.spawn(move || operators::operate(deployment, Dice(seed ^ 0xD12A)));
        }
        if style.churn && !is_procedure {
            scope.spawn(move || operators::churn(deployment, Dice(seed ^ 0xC4u64)));
        }
        scope.spawn(move || operators::watch_names(deployment));
        let scene = Scene {
            deployment,
            dice: RefCell::new(Dice(seed ^ 0xFA17)),
            is_broken: broken.is_some(),
            is_alone: faults.len() == 1,
        };
        // (a fault that panics must not leave the callers running)
        let done = catch_unwind(AssertUnwindSafe(|| faults.iter().for_each(|fault| fault(&scene))));
        deployment.heal();
        cleared = Instant::now();
        thread::sleep(Duration::from_millis(150));
        deployment.is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    let mut violations = census::take(&deployment, cleared, cell.allowed, is_procedure);
    if deployment.store().failovers() > 1 {
        return Err("Sentinels changed over again, though nothing was wrong".into());
    }
    let events = deployment.history.events();
    let check = HistoryCheck {
        events: &events,
        lease: deployment.setting("LEASE_TTL"),
        draining: deployment.setting("DRAINING_TTL"),
        cap,
        pauses: [&deployment.pauses, &deployment.deaths]
            .iter()
            .flat_map(|times| times.lock().unwrap().clone())
            .collect(),
        // (a caller who may wait has that time besides)
        in_time: IN_TIME + if style.waits { WAIT } else { Duration::ZERO },
    };
    violations.extend(check.violations());
    let is_timed = |violation: &Violation| TIMED.contains(&violation.invariant);
    if let Some(stall) = heartbeat.stall()
        && !violations.is_empty()
        && violations.iter().all(is_timed)
    {
        return Err(format!("the machine stood still for {stall:?}: {}", violations[0].what));
    }
    if let Some(wanted) = std::env::var_os("CHAOS_HISTORY") {
        let text: String = events.iter().map(|event| format!("{event}\n")).collect();
        std::fs::write(wanted, text).map_err(|error| error.to_string())?;
    }
    Ok((violations, events))
}
