//! `smart-router plan`: the number of pods that a demand needs, offline.

use std::{
    fmt::Write as _,
    io::{self, ErrorKind, Read as _},
    path::PathBuf,
    time::Duration,
};

use anyhow::Context;
use clap::{ArgGroup, Args};
use fleet::capacity::{MAX_START_UP, Settings, Zone};
use jiff::tz::{TimeZone, TimeZoneDatabase};
use serde_json::json;

use super::{print, table::table};
use crate::{
    config::capacity_target,
    human_duration::HumanDuration,
    tools::plan::{
        Chart, PoolModel, chart,
        erlang::{self, Demand, MAX_LOAD},
        policies::{Comparison, PolicyResult},
        step::{self, StepError},
        summary,
        trace::{self, TraceOptions},
    },
};

/// Seed of the arrivals and durations that counts do not have.
const SEED: u64 = 1;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("form").required(true).args(["calls_per_hour", "trace", "step", "synthetic"]))]
pub(super) struct PlanArgs {
    /// Print Erlang B and C tables for a constant rate of calls; needs --duration
    #[arg(long, value_name = "NUMBER", value_parser = rate, requires = "duration")]
    calls_per_hour: Option<f64>,
    /// Simulate the capacity policy and others on a trace: CSV with the header start,duration
    /// (seconds) or time,calls (counts; needs --duration). Times are Unix seconds, or
    /// 2025-01-31T09:00:00+01:00. `-` reads standard input
    #[arg(long, value_name = "PATH")]
    trace: Option<PathBuf>,
    /// Run the policy as a filter: each line in is {"t": unix seconds, "arrivals": n, "live": n,
    /// "waiting": n, "ready": n, "starting": n}, each line out {"desired": n}. Bounds of the pool
    /// are the optional fields "min", "max", "inbound_reserve" and "prescale"
    #[arg(long)]
    step: bool,
    /// Simulate synthetic traces and print the table of docs/capacity.md; takes minutes
    #[arg(long)]
    synthetic: bool,
    /// Mean duration of a call, for --calls-per-hour and for counts of --trace
    #[arg(long, value_name = "DURATION", value_parser = call_duration, conflicts_with_all = ["step", "synthetic"])]
    duration: Option<HumanDuration>,
    /// Start-up time of a pod, from its creation to ready
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = start_up)]
    cold_start: HumanDuration,
    /// Share of calls that find a warm pod
    #[arg(long, value_name = "PERCENT", default_value = "99.9%", value_parser = capacity_target)]
    target: f64,
    /// Calls that one pod carries at the same time
    #[arg(long, value_name = "1..1000", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    calls_per_pod: u64,
    /// Cost of a pod per month
    #[arg(long, value_name = "NUMBER", value_parser = cost)]
    pod_cost: Option<f64>,
    /// Time zone of days and weeks, and of times without an offset
    #[arg(long, value_name = "NAME", default_value = "UTC", value_parser = zone_name)]
    time_zone: String,
    /// Print JSON
    #[arg(long, conflicts_with_all = ["step", "synthetic"])]
    json: bool,
    /// Write a chart of the simulated policy (SVG)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["calls_per_hour", "step", "synthetic"])]
    svg: Option<PathBuf>,
    /// Write the table into this Markdown page, and pictures beside it, instead of printing it
    #[arg(long, value_name = "PATH", conflicts_with_all = ["calls_per_hour", "step", "trace"])]
    write: Option<PathBuf>,
}

fn number(text: &str, expected: &str, range: impl Fn(f64) -> bool) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|number| range(*number)).ok_or_else(|| expected.into())
}

fn rate(text: &str) -> Result<f64, String> {
    let range = |number: f64| number > 0.0 && number <= 10_000_000.0;
    number(text, "a number above 0, at most 10000000", range)
}

fn duration(text: &str, longest: Duration) -> Result<HumanDuration, String> {
    let given: Option<HumanDuration> = text.parse().ok();
    given
        .filter(|given| given.0 <= longest)
        .ok_or_else(|| format!("a duration from 1ms to {}", HumanDuration(longest)))
}

fn call_duration(text: &str) -> Result<HumanDuration, String> {
    duration(text, Duration::from_secs_f64(trace::MAX_DURATION))
}

/// The policy does not learn a longer time either.
fn start_up(text: &str) -> Result<HumanDuration, String> {
    duration(text, Duration::from_secs_f64(MAX_START_UP))
}

fn cost(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to 1000000", |number| (0.0..=1_000_000.0).contains(&number))
}

fn zone_name(text: &str) -> Result<String, String> {
    text.parse::<Zone>().map(|_| text.into())
}

impl PlanArgs {
    fn zone(&self) -> anyhow::Result<Zone> {
        self.time_zone.parse().map_err(anyhow::Error::msg)
    }

    fn civil_zone(&self) -> anyhow::Result<TimeZone> {
        match self.time_zone.eq_ignore_ascii_case("utc") {
            true => Ok(TimeZone::UTC),
            false => Ok(TimeZoneDatabase::bundled().get(&self.time_zone)?),
        }
    }

    fn model(&self) -> PoolModel {
        PoolModel::new(self.cold_start.millis(), self.calls_per_pod)
    }
}

pub(super) fn plan(args: &PlanArgs) -> anyhow::Result<()> {
    match (args.calls_per_hour, args.step, args.synthetic) {
        (Some(calls_per_hour), ..) => print_tables(args, calls_per_hour),
        (_, true, _) => filter(args),
        (_, _, true) => synthetic(args),
        _ => simulate_trace(args),
    }
}

/// A row of the Erlang tables.
struct ErlangRow {
    target: f64,
    /// Slots of the pods if a call without one is refused, and the share of such calls.
    refuse: (u64, f64),
    /// Slots if such a call waits, the share of such calls, and the mean wait of all calls.
    hold: (u64, f64, f64),
}

fn erlang_rows(demand: Demand, target: f64, calls_per_pod: u64) -> Vec<ErlangRow> {
    let mut targets = vec![0.95, 0.99, 0.995, 0.999, 0.9999];
    if targets.iter().all(|known| (known - target).abs() > 1e-9) {
        targets.push(target);
        targets.sort_by(f64::total_cmp);
    }
    let row = |target| {
        let load = demand.load();
        // The last pod may have more slots than are needed.
        let slots =
            |miss| erlang::pods_for(load, target, miss).div_ceil(calls_per_pod) * calls_per_pod;
        let (refuse, hold) = (slots(erlang::blocked), slots(erlang::waits));
        ErlangRow {
            target,
            refuse: (refuse, erlang::blocked(load, refuse)),
            hold: (hold, erlang::waits(load, hold), erlang::mean_wait(demand, hold)),
        }
    };
    targets.into_iter().map(row).collect()
}

fn print_tables(args: &PlanArgs, calls_per_hour: f64) -> anyhow::Result<()> {
    let duration = args.duration.map_or(0.0, |duration| duration.0.as_secs_f64());
    let demand = Demand { rate: calls_per_hour / 3_600.0, duration };
    anyhow::ensure!(
        demand.load() <= MAX_LOAD,
        "--calls-per-hour and --duration give {:.0} calls at the same time; expected at most {MAX_LOAD}",
        demand.load()
    );
    let rows = erlang_rows(demand, args.target, args.calls_per_pod);
    let pods = |slots: u64| slots.div_ceil(args.calls_per_pod);
    let warm = erlang::warm_pods(demand, args.cold_start.0.as_secs_f64(), args.target);
    let monthly = |slots: u64| args.pod_cost.map(|cost| cost * pods(slots) as f64);
    if args.json {
        let row = |row: &ErlangRow| {
            json!({
                "target": row.target,
                "without_hold_queue": {"pods": pods(row.refuse.0), "refused": row.refuse.1, "cost": monthly(row.refuse.0)},
                "with_hold_queue": {"pods": pods(row.hold.0), "waiting": row.hold.1, "mean_wait_seconds": row.hold.2, "cost": monthly(row.hold.0)},
            })
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        let value = json!({"calls": demand.load(), "rows": rows, "warm_pods": pods(warm), "warm_cost": monthly(warm)});
        return print(&format!("{value:#}\n"));
    }
    let money = |slots| monthly(slots).map_or_else(|| "-".into(), |cost| format!("{cost:.0}"));
    let share = |share: f64| format!("{:.4}%", 100.0 * share);
    let cells = |row: &ErlangRow| {
        vec![
            percent(row.target),
            pods(row.refuse.0).to_string(),
            share(row.refuse.1),
            money(row.refuse.0),
            pods(row.hold.0).to_string(),
            share(row.hold.1),
            format!("{:.2}s", row.hold.2),
            money(row.hold.0),
        ]
    };
    let titles =
        ["TARGET", "PODS (ERLANG B)", "REFUSED", "COST", "PODS (ERLANG C)", "WAIT", "MEAN", "COST"];
    let rows: Vec<_> = rows.iter().map(cells).collect();
    let mut text = format!(
        "{calls_per_hour} calls per hour of {duration} s: {:.1} calls at the same time on average\n\n{}\n",
        demand.load(),
        table(&titles, &rows)
    );
    writeln!(
        text,
        "Erlang B: without the hold queue, a call without a pod is refused. Erlang C: it waits.\n\
         With pods that start in {} on demand, about {} pods are warm at this load for {}{}.",
        args.cold_start,
        pods(warm),
        percent(args.target),
        monthly(warm).map_or_else(String::new, |cost| format!(" ({cost:.0} a month)")),
    )?;
    print(&text)
}

fn percent(share: f64) -> String {
    let text = format!("{:.3}", 100.0 * share);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

fn filter(args: &PlanArgs) -> anyhow::Result<()> {
    let settings = Settings {
        target: args.target,
        start_up: args.cold_start.0.as_secs_f64(),
        calls_per_pod: args.calls_per_pod,
        zone: args.zone()?,
        ..Settings::default()
    };
    match step::run(settings, io::stdin().lock(), io::stdout().lock()) {
        Err(StepError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        done => done.context("standard input"),
    }
}

fn synthetic(args: &PlanArgs) -> anyhow::Result<()> {
    let progress = |row: &str| eprintln!("{row}");
    match &args.write {
        Some(page) => summary::write(page, progress),
        None => print(&summary::table(progress)),
    }
}

fn simulate_trace(args: &PlanArgs) -> anyhow::Result<()> {
    let path = args.trace.as_deref().context("no trace")?;
    let mut text = Vec::new();
    let read = match path.to_str() {
        Some("-") => io::stdin().read_to_end(&mut text),
        _ => std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut text)),
    };
    let shown = path.display();
    read.with_context(|| shown.to_string())?;
    let zone = args.civil_zone()?;
    let duration = args.duration.map(|duration| duration.0.as_secs_f64());
    let options = TraceOptions { duration, zone: zone.clone(), seed: SEED };
    let (calls, closed) = trace::read(&text, &options).with_context(|| shown.to_string())?;
    if closed > 0 {
        eprintln!("{shown}: {closed} times of 4 h or more without rows; simulated as closed");
    }
    let comparison = Comparison { model: args.model(), target: args.target, zone: args.zone()? };
    let results = comparison.run(&calls);
    if let Some(path) = &args.svg {
        let samples = &results[0].outcome.samples;
        let ends = (samples.first(), samples.last());
        let (from, to) = (ends.0.map_or(0, |first| first.at), ends.1.map_or(0, |last| last.at));
        let title = format!("{shown}, start-up {}", args.cold_start);
        let picture = chart(samples, &Chart { title: &title, zone, from, to });
        std::fs::write(path, picture).with_context(|| path.display().to_string())?;
    }
    print(&describe(args, &results))
}

fn describe(args: &PlanArgs, results: &[PolicyResult]) -> String {
    let forecast = &results[0].outcome;
    let monthly = |result: &PolicyResult| {
        let samples = &forecast.samples;
        let span = samples.last().map_or(0, |last| last.at - samples[0].at).max(1) as f64 / 3.6e6;
        args.pod_cost.map(|cost| cost * result.outcome.pod_hours / span)
    };
    if args.json {
        let policy = |result: &PolicyResult| {
            let outcome = &result.outcome;
            json!({
                "policy": result.name,
                "pod_hours": outcome.pod_hours,
                "pod_hours_per_call_hour": outcome.pod_hours_per_call_hour(),
                "calls_without_warm_pod": outcome.misses,
                "share_without_warm_pod": outcome.miss_share(),
                "cost_per_month": monthly(result),
            })
        };
        let value = json!({
            "calls": forecast.calls,
            "call_hours": forecast.call_hours,
            "target": args.target,
            "cold_start_seconds": args.cold_start.0.as_secs_f64(),
            "seed": SEED,
            "policies": results.iter().map(policy).collect::<Vec<_>>(),
        });
        return format!("{value:#}\n");
    }
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |it| format!("{it:.3}"));
    let row = |result: &PolicyResult| {
        let outcome = &result.outcome;
        let mut cells = vec![
            result.name.clone(),
            ratio(outcome.pod_hours_per_call_hour()),
            format!("{:.4}%", 100.0 * outcome.miss_share()),
            outcome.misses.to_string(),
            format!("{:.0}", outcome.pod_hours),
        ];
        cells.extend(monthly(result).map(|cost| format!("{cost:.0}")));
        cells
    };
    let mut titles =
        vec!["POLICY", "POD-HOURS PER CALL-HOUR", "WITHOUT WARM POD", "CALLS", "POD-HOURS"];
    if args.pod_cost.is_some() {
        titles.push("COST PER MONTH");
    }
    let rows: Vec<_> = results.iter().map(row).collect();
    format!(
        "{} calls, {:.0} call-hours; target {}, start-up {}, seed {SEED}\n\n{}",
        forecast.calls,
        forecast.call_hours,
        percent(args.target),
        args.cold_start,
        table(&titles, &rows)
    )
}
