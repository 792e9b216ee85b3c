//! `smart-router load`: generates load and checks the router's invariants.

use std::{
    fmt::{self, Write},
    path::PathBuf,
    sync::Arc,
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
    open_files,
    tls::Trust,
    tools::{
        load::{
            self, Arrivals, AudioReport, Format, Latency, LoadFailure, MediaReport, Plan, Progress,
            Report, Target,
        },
        provider_stream::{Clip, Dialer, MediaFormat},
    },
};
use telephony::Secret;

/// Exit code when requests failed.
const REQUESTS_FAILED: u8 = 6;
/// Duration of a call with audio.
const MEDIA_HOLD: Duration = Duration::from_secs(5);

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
    /// Certificate authority to trust for https:// and wss://, besides the system's (PEM)
    #[arg(long, env = "SMART_ROUTER_CA_FILE", value_name = "PATH")]
    ca_file: Option<PathBuf>,
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
    /// Duration of a call. Default: release at once; with --media 5s, with --audio that of the
    /// longest file
    #[arg(long, value_name = "DURATION")]
    hold: Option<HumanDuration>,
    /// Open the stream of each call, send audio at the provider's rate, and check its echo: no
    /// frame lost, out of order or from another call. The agents must echo
    #[arg(long)]
    media: bool,
    /// Provider whose media messages the streams use: twilio, plivo, exotel, signalwire, telnyx,
    /// vonage or jambonz. Default: that of --format, else twilio
    #[arg(long, value_name = "NAME", requires = "media")]
    provider: Option<MediaFormat>,
    /// Send this audio (WAV) instead of marked frames, and compare the agents' audio with it: the
    /// correlation of the waveforms must be 0.95. For agents that decode and encode audio. May be
    /// repeated: calls take the files in turn
    #[arg(long, value_name = "FILE", requires = "media")]
    audio: Vec<PathBuf>,
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

impl LoadArgs {
    fn connections(&self) -> usize {
        self.connections.unwrap_or(if self.rate.is_some() { 256 } else { 64 }) as usize
    }

    /// The format of the streams; `None` without streams.
    fn media(&self) -> Option<MediaFormat> {
        let of_requests = match self.format {
            Format::Provider(provider) => provider.into(),
            Format::Json => MediaFormat::default(),
        };
        self.media.then(|| self.provider.unwrap_or(of_requests))
    }

    async fn plan(&self) -> anyhow::Result<Plan> {
        let uses_tls = self.media || self.router.starts_with("https://");
        let trust = Trust { authority: self.ca_file.clone(), identity: None };
        let tls =
            uses_tls.then(|| trust.client_config()).transpose().map_err(anyhow::Error::msg)?;
        let dialer = Dialer::new(tls, !self.i_own_this_target);
        let target = Target::parse(&self.router, self.token.clone(), dialer)
            .await
            .map_err(|error| anyhow::anyhow!("{}: {error}", self.router))?;
        if !target.is_loopback() && !self.i_own_this_target {
            bail!(
                "{} is not on this machine; confirm with --i-own-this-target that you may load it",
                self.router
            );
        }
        let media = self.media();
        let read = |path: &PathBuf| Clip::read(path, media.unwrap_or_default()).map(Arc::new);
        let clips = self.audio.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
        let longest = clips.iter().map(|clip| clip.duration()).max();
        let usual = if media.is_some() { MEDIA_HOLD } else { Duration::ZERO };
        let hold = longest.unwrap_or(usual);
        let open = |per_second| Arrivals::Open { per_second };
        Ok(Plan {
            target,
            format: self.format,
            merchant: self.merchant.clone(),
            arrivals: self.rate.map_or(Arrivals::Closed, open),
            connections: self.connections(),
            hold: self.hold.map_or(hold, |hold| hold.0),
            media,
            clips,
            duration: self.duration.0,
            calls: self.calls,
            repeat: self.repeat,
        })
    }
}

fn print_progress(progress: &Progress, has_media: bool) {
    let media = match has_media {
        true => {
            format!(
                "  {:>6} streams  {:>8.0} frames/s",
                progress.streams,
                progress.frames_per_second()
            )
        }
        false => String::new(),
    };
    eprintln!(
        "{:>4.0} s  {:>8.0} requests/s{media}  {} errors",
        progress.elapsed.as_secs_f64(),
        progress.per_second(),
        progress.errors
    );
}

pub(super) async fn load(args: LoadArgs) -> anyhow::Result<()> {
    open_files::raise_limit();
    let plan = args.plan().await?;
    let connections = args.connections();
    let report = load::run(plan, |progress| {
        if !args.json {
            print_progress(progress, args.media);
        }
    })
    .await
    .map_err(no_answer)?;
    let verdict = report.verdict(connections);
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
    if let Some(media) = &report.media {
        describe_streams(out, media)?;
    }
    writeln!(out, "ms             p50      p90      p99    p99.9      max")?;
    let mut rows = vec![
        ("allocate", &report.allocate),
        ("refused", &report.refused),
        ("release", &report.release),
    ];
    if let Some(media) = &report.media {
        let more =
            [("connect", &media.connect), ("round trip", &media.round_trip), ("gap", &media.gap)];
        rows.extend(more);
    }
    for (name, latency) in rows.into_iter().filter(|(_, latency)| latency.count > 0) {
        let Latency { p50, p90, p99, p999, max, .. } = latency;
        writeln!(out, "{name:<10} {p50:>7.2}  {p90:>7.2}  {p99:>7.2}  {p999:>7.2}  {max:>7.2}")?;
    }
    for (kind, count) in &report.errors {
        writeln!(out, "{count} × {kind}")?;
    }
    Ok(())
}

fn describe_streams(out: &mut String, media: &MediaReport) -> fmt::Result {
    let frames = &media.frames;
    match media.audio {
        Some(AudioReport { compared, differing, lowest_correlation }) => writeln!(
            out,
            "{} streams ({}), {compared} compared, {differing} with another audio, lowest correlation {:.3}",
            media.streams,
            media.provider,
            lowest_correlation.unwrap_or_default()
        ),
        None => writeln!(
            out,
            "{} streams ({}), {} frames sent, {} echoed, {} lost, {} out of order, {} duplicated, {} from another call",
            media.streams,
            media.provider,
            frames.sent,
            frames.echoed,
            frames.lost,
            frames.out_of_order,
            frames.duplicated,
            frames.foreign
        ),
    }
}
