//! `smart-router load`: generates load and checks the router's invariants.

use std::{
    fmt::{self, Write},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;

use super::{
    print,
    router_client::{Failed, no_answer},
};
use crate::{
    human_duration::HumanDuration,
    tools::load::{self, Arrivals, Format, Latency, LoadFailure, Plan, Report, Target},
};
use telephony::Secret;

/// Exit code when requests failed.
const REQUESTS_FAILED: u8 = 6;

#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    /// URL of the router to load
    #[arg(
        long,
        env = "SMART_ROUTER_URL",
        value_name = "URL",
        default_value = "http://localhost:8080"
    )]
    router: String,
    /// API token, if the router requires one
    #[arg(long, env = "SMART_ROUTER_TOKEN", value_name = "TOKEN")]
    token: Option<Secret>,
    /// Format of requests: json, or the name of a provider (unsigned webhooks)
    #[arg(long, value_name = "FORMAT", default_value = "json")]
    format: Format,
    /// Merchant of the calls
    #[arg(long, value_name = "ID")]
    merchant: Option<String>,
    /// Number of connections. Default: 64; with --rate 256
    #[arg(
        short,
        long,
        value_name = "1..10000",
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    connections: Option<u32>,
    /// Arrival rate in calls per second (open loop). Default: each connection begins a call when
    /// its last one has ended (closed loop)
    #[arg(long, value_name = "NUMBER", value_parser = rate)]
    rate: Option<f64>,
    /// Duration of a call. Default: release at once
    #[arg(long, value_name = "DURATION")]
    hold: Option<HumanDuration>,
    /// Duration of the load
    #[arg(short, long, value_name = "DURATION", default_value = "10s")]
    duration: HumanDuration,
    /// Stop after this many calls, if earlier
    #[arg(long, value_name = "NUMBER")]
    calls: Option<u64>,
    /// Repeat every n-th allocate request and check that it gets the same pod; 0 for none
    #[arg(long, value_name = "NUMBER", default_value = "100")]
    repeat: u64,
    /// Print the result as JSON, without progress
    #[arg(long)]
    json: bool,
    /// Confirm that you may load a target that is not on this machine
    #[arg(long)]
    i_own_this_target: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    let sane = number.filter(|number| *number > 0.0 && *number <= 1_000_000.0);
    sane.ok_or_else(|| "a number above 0, at most 1000000".into())
}

pub(super) async fn load(args: LoadArgs) -> anyhow::Result<()> {
    let target = Target::parse(&args.router, args.token.clone())
        .await
        .map_err(|error| anyhow::anyhow!("{}: {error}", args.router))?;
    if !target.is_loopback() && !args.i_own_this_target {
        bail!(
            "{} is not on this machine; confirm with --i-own-this-target that you may load it",
            args.router
        );
    }
    let connections = args.connections.unwrap_or(if args.rate.is_some() { 256 } else { 64 });
    let plan = Plan {
        target,
        format: args.format,
        merchant: args.merchant.clone(),
        arrivals: args.rate.map_or(Arrivals::Closed, |per_second| Arrivals::Open { per_second }),
        connections: connections as usize,
        hold: args.hold.map_or(Duration::ZERO, |hold| hold.0),
        duration: args.duration.0,
        calls: args.calls,
        repeat: args.repeat,
    };
    let report = load::run(plan, |progress| {
        if !args.json {
            eprintln!(
                "{:>4.0} s  {:>8.0} requests/s  {} errors",
                progress.elapsed.as_secs_f64(),
                progress.per_second(),
                progress.errors
            );
        }
    })
    .await
    .map_err(no_answer)?;
    let verdict = report.verdict(connections as usize);
    let mut text = String::new();
    if args.json {
        text = serde_json::to_string(&report).context("cannot write the report")? + "\n";
    } else {
        describe(&mut text, &report)?;
        if let Ok(checked) = verdict {
            writeln!(text, "checked: {checked}")?;
        }
    }
    print(&text)?;
    match verdict {
        Ok(_) => Ok(()),
        Err(LoadFailure::Check(text)) => bail!(text),
        Err(LoadFailure::Requests(text)) => Err(Failed { code: REQUESTS_FAILED, text }.into()),
    }
}

fn describe(out: &mut String, report: &Report) -> fmt::Result {
    writeln!(
        out,
        "{} calls in {:.1} s, {:.0} requests/s, at most {} at the same time, {} repeated",
        report.calls, report.seconds, report.requests_per_second, report.overlap, report.repeated
    )?;
    writeln!(out, "ms           p50      p90      p99    p99.9      max")?;
    let rows = [
        ("allocate", &report.allocate),
        ("refused", &report.refused),
        ("release", &report.release),
    ];
    for (name, latency) in rows.into_iter().filter(|(_, latency)| latency.count > 0) {
        let Latency { p50, p90, p99, p999, max, .. } = latency;
        writeln!(out, "{name:<8} {p50:>7.2}  {p90:>7.2}  {p99:>7.2}  {p999:>7.2}  {max:>7.2}")?;
    }
    for (kind, count) in &report.errors {
        writeln!(out, "{count} × {kind}")?;
    }
    Ok(())
}
