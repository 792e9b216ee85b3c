//! Fault injection under load with real routers and a real Redis, and a check of the history of
//! every call. See docs/reliability.md and `./chaos.sh --help`.

mod broken;
mod callers;
mod cell;
mod cells;
mod deployment;
mod diallers;
mod faults;
mod final_check;
mod heartbeat;
mod history;
mod history_check;
mod http;
mod many_calls;
mod operators;
mod overload;
mod report;
mod router_process;
mod run;
mod store;
mod streams;

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

use self::{cell::Cell, report::Summary, run::Build};

/// Inject faults under load and check that no call is lost and no pod is allocated twice.
#[derive(Parser)]
#[command(name = "chaos.sh")]
struct Args {
    /// Seed of the random numbers; run n of a cell uses seed + n
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of runs of each cell
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Run only these cells; `list` prints all cells, `mix` is a random mix of faults
    #[arg(long)]
    cell: Vec<String>,
    /// Skip cells whose name begins with this text
    #[arg(long)]
    without: Vec<String>,
    /// Run random mixes of faults for this many minutes instead
    #[arg(long)]
    minutes: Option<u64>,
    /// Number of parallel runs
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Skip the broken builds
    #[arg(long)]
    sound_only: bool,
    /// Add the results to docs/reliability.md
    #[arg(long)]
    write: bool,
    /// Measure a load of ten times the store's capacity for this many seconds instead
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
    broken::check_edits();
    if args.cell.iter().any(|name| name == "list") {
        for Cell { name, description, broken_description, .. } in cell::all() {
            println!("{name:<26} {description}\n{:<26}   broken build: {broken_description}", "");
        }
        return ExitCode::SUCCESS;
    }
    let is_known = |name: &str| name == report::MIX || cell::all().any(|cell| cell.name == name);
    if let Some(unknown) = args.cell.iter().find(|name| !is_known(name)) {
        eprintln!("chaos.sh: unknown cell {unknown:?}; --cell list prints all cells");
        return ExitCode::FAILURE;
    }
    if let Some(seconds) = args.overload {
        let is_ok = overload::measure(seconds);
        return if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let summary = Mutex::new(Summary::default());
    match args.minutes {
        Some(minutes) => run_mixes(&args, Duration::from_secs(60 * minutes), &summary),
        None => {
            run_cells(&args, &summary);
            if args.cell.iter().any(|name| name == report::MIX) {
                let seeds: Vec<u64> = (0..args.runs).map(|number| args.seed + number).collect();
                in_parallel(args.jobs, &seeds, |seed| run_mix(*seed, &summary));
            }
        }
    }
    let summary = summary.into_inner().unwrap();
    if args.write {
        summary.write();
    }
    print!("\n{}", summary.table());
    println!("{}", summary.last_line());
    if summary.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs `each` for all pieces of work, `jobs` at a time.
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

fn run_cells(args: &Args, summary: &Mutex<Summary>) {
    let is_chosen = |cell: &&Cell| {
        let is_named = args.cell.is_empty() || args.cell.iter().any(|name| name == cell.name);
        is_named && !args.without.iter().any(|start| cell.name.starts_with(start.as_str()))
    };
    let chosen = || cell::all().filter(is_chosen);
    let mut work: Vec<(&'static Cell, u64, Build)> = Vec::new();
    for number in 0..args.runs {
        work.extend(chosen().map(|cell| (cell, args.seed + number, Build::Sound)));
    }
    if !args.sound_only {
        work.extend(chosen().map(|cell| (cell, args.seed, Build::Broken)));
    }
    in_parallel(args.jobs, &work, |(cell, seed, build)| match build {
        Build::Sound => {
            let mut result = run::run(cell, *seed, Build::Sound);
            result.print(cell.name, *seed);
            // A run whose fault did not take effect proves nothing; it is repeated twice.
            for _ in 0..2 {
                if result.error.is_some() {
                    result = run::run(cell, *seed, Build::Sound);
                    result.print(cell.name, *seed);
                }
            }
            summary.lock().unwrap().add_run(cell.name, &result);
        }
        Build::Broken => {
            // A fault may miss its moment, so a broken build gets ten runs.
            let caught = (0..10).find_map(|number| {
                let result = run::run(cell, seed + number, Build::Broken);
                if let Some(error) = &result.error {
                    println!("{} (broken): could not be run: {error}", cell.name);
                }
                let first = result.violations.first()?.message.clone();
                let mut broken: Vec<&str> =
                    result.violations.iter().map(|violation| violation.invariant).collect();
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
            summary.lock().unwrap().add_broken_build(cell.name, caught.map(|(broken, _)| broken));
        }
    });
}

fn run_mix(seed: u64, summary: &Mutex<Summary>) {
    let result = run::mix(seed);
    result.print(report::MIX, seed);
    summary.lock().unwrap().add_run(report::MIX, &result);
}

fn run_mixes(args: &Args, time: Duration, summary: &Mutex<Summary>) {
    let until = Instant::now() + time;
    let seeds = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| {
                while Instant::now() < until {
                    let seed = args.seed + seeds.fetch_add(1, Ordering::Relaxed) as u64;
                    run_mix(seed, summary);
                }
            });
        }
    });
}
