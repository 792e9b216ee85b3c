//! Faults under load: real routers, a real Redis, and what became of every call. See
//! docs/reliability.md and `./chaos.sh --help`.

mod broken;
mod callers;
mod cell;
mod cells;
mod census;
mod crowd;
mod deployment;
mod faults;
mod heartbeat;
mod history;
mod history_check;
mod http;
mod operators;
mod overload;
mod report;
mod run;
mod store;

use std::{
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Parser;

use self::{cell::Cell, cells::CELLS, report::Tally, run::Build};

/// Faults under load: nothing lost, nothing given twice.
#[derive(Parser)]
#[command(name = "chaos.sh")]
struct Args {
    /// What the dice begin with; run n of a cell has seed + n
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How often each cell is run
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Only these cells; `list` names them all, `mix` is a random mix
    #[arg(long)]
    cell: Vec<String>,
    /// Leaves out cells whose names begin so
    #[arg(long)]
    without: Vec<String>,
    /// Runs random mixes of faults for so long instead
    #[arg(long)]
    minutes: Option<u64>,
    /// Runs beside each other
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Leaves out the broken builds
    #[arg(long)]
    sound_only: bool,
    /// Adds the results to docs/reliability.md
    #[arg(long)]
    write: bool,
    /// Measures ten times what the store takes for so many seconds instead
    #[arg(long)]
    overload: Option<u64>,
    #[arg(long, hide = true)]
    as_broken_router: Option<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(cell) = &args.as_broken_router {
        broken::serve(cell);
    }
    if args.cell.iter().any(|name| name == "list") {
        for Cell { name, says, broken_says, .. } in &CELLS {
            println!("{name:<26} {says}\n{:<26}   broken build: {broken_says}", "");
        }
        return ExitCode::SUCCESS;
    }
    let is_known = |name: &str| name == report::MIX || CELLS.iter().any(|cell| cell.name == name);
    if let Some(unknown) = args.cell.iter().find(|name| !is_known(name)) {
        eprintln!("chaos.sh: there is no cell {unknown:?}; --cell list names them");
        return ExitCode::FAILURE;
    }
    if let Some(seconds) = args.overload {
        let is_well = overload::measure(seconds);
        return if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let tally = Mutex::new(Tally::default());
    match args.minutes {
        Some(minutes) => mix(&args, Duration::from_secs(60 * minutes), &tally),
        None => {
            all_cells(&args, &tally);
            if args.cell.iter().any(|name| name == report::MIX) {
                let seeds: Vec<u64> = (0..args.runs).map(|number| args.seed + number).collect();
                in_parallel(args.jobs, &seeds, |seed| one_mix(*seed, &tally));
            }
        }
    }
    let tally = tally.into_inner().unwrap();
    if args.write {
        tally.write();
    }
    print!("\n{}", tally.table());
    println!("{}", tally.last_line());
    if tally.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Does pieces of work, some at a time.
fn in_parallel<T: Sync>(jobs: usize, work: &[T], each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(piece) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    each(piece);
                }
            });
        }
    });
}

fn all_cells(args: &Args, tally: &Mutex<Tally>) {
    let is_chosen = |cell: &&Cell| {
        let is_named = args.cell.is_empty() || args.cell.iter().any(|name| name == cell.name);
        is_named && !args.without.iter().any(|start| cell.name.starts_with(start.as_str()))
    };
    let chosen = || CELLS.iter().filter(is_chosen);
    let mut work: Vec<(&'static Cell, u64, Build)> = Vec::new();
    for number in 0..args.runs {
        work.extend(chosen().map(|cell| (cell, args.seed + number, Build::Sound)));
    }
    if !args.sound_only {
        work.extend(chosen().map(|cell| (cell, args.seed, Build::Broken)));
    }
    in_parallel(args.jobs, &work, |(cell, seed, build)| match build {
        Build::Sound => {
            let mut verdict = run::run(cell, *seed, Build::Sound);
            verdict.print(cell.name, *seed);
            // A run whose fault did not happen shows nothing: a busy machine has three tries.
            for _ in 0..2 {
                if verdict.failed.is_some() {
                    verdict = run::run(cell, *seed, Build::Sound);
                    verdict.print(cell.name, *seed);
                }
            }
            tally.lock().unwrap().ran(cell.name, &verdict);
        }
        Build::Broken => {
            // A fault may miss its moment; ten times in a row it does not.
            let caught = (0..10).find_map(|number| {
                let verdict = run::run(cell, seed + number, Build::Broken);
                if let Some(failed) = &verdict.failed {
                    println!("{} (broken): could not be run: {failed}", cell.name);
                }
                let first = verdict.violations.first()?.what.clone();
                let mut broken: Vec<&str> =
                    verdict.violations.iter().map(|violation| violation.invariant).collect();
                broken.sort_unstable();
                broken.dedup();
                Some((broken.join(" "), first))
            });
            println!(
                "{} (broken): {}",
                cell.name,
                caught
                    .as_ref()
                    .map_or("NOT CAUGHT".into(), |(broken, what)| format!("{broken}: {what}"))
            );
            tally.lock().unwrap().broke(cell.name, caught.map(|(broken, _)| broken));
        }
    });
}

fn one_mix(seed: u64, tally: &Mutex<Tally>) {
    let verdict = run::mix(seed);
    verdict.print(report::MIX, seed);
    tally.lock().unwrap().ran(report::MIX, &verdict);
}

fn mix(args: &Args, time: Duration, tally: &Mutex<Tally>) {
    let until = Instant::now() + time;
    let seeds = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| {
                while Instant::now() < until {
                    let seed = args.seed + seeds.fetch_add(1, Ordering::Relaxed) as u64;
                    one_mix(seed, tally);
                }
            });
        }
    });
}
