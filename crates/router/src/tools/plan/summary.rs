//! The table and the pictures of `docs/capacity.md`.

use std::{fmt::Write, path::Path};

use anyhow::Context;
use fleet::capacity::Zone;
use jiff::tz::TimeZone;

use super::{
    chart::{Chart, chart},
    policies::Comparison,
    simulate::PoolModel,
    synthetic::{Kind, Synthetic},
};

/// Lines between which the table stands in the page.
const BEGIN: &str = "<!-- table: smart-router plan --synthetic --write docs/capacity.md -->";
const END: &str = "<!-- end of the table -->";
const SEED: u64 = 1;
const DAYS: usize = 14;
const TARGET: f64 = 0.999;

/// Peaks and start-up times of the table, in calls and seconds.
const SCALES: [(f64, u64); 4] = [(20.0, 60), (200.0, 60), (200.0, 180), (2_000.0, 60)];

fn comparison(cold_start: u64) -> Comparison {
    let model = PoolModel::new(cold_start * 1_000, 1);
    Comparison { model, target: TARGET, zone: Zone::default() }
}

/// Simulates all synthetic traces; `progress` is called with each finished row.
pub(crate) fn table(mut progress: impl FnMut(&str)) -> String {
    let mut text = format!(
        "Each cell: pod-hours per call-hour, share of calls without a warm pod. {DAYS} days, seed {SEED}, target 99.9 %, mean call 180 s.\n\n\
         | trace | peak calls | start-up | forecast | fixed peak | 70 % utilisation | buffer tuned in hindsight | clairvoyant |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    );
    for (peak, cold_start) in SCALES {
        for kind in Kind::ALL {
            let calls = Synthetic { kind, peak, days: DAYS, seed: SEED }.calls();
            let results = comparison(cold_start).run(&calls);
            let mut row = format!("| {} | {peak} | {cold_start} s |", kind.name());
            for result in &results {
                let outcome = &result.outcome;
                let _ = write!(
                    row,
                    " {:.2}, {:.2} % |",
                    outcome.pod_hours_per_call_hour().unwrap_or(0.0),
                    100.0 * outcome.miss_share()
                );
            }
            progress(&row);
            text += &row;
            text.push('\n');
        }
    }
    text
}

/// A picture of a part of a simulation.
struct Picture {
    name: &'static str,
    title: &'static str,
    kind: Kind,
    /// Hours from the start of the trace's first day; a picture of bursts shows the first one.
    hours: (u64, u64),
}

const PICTURES: [Picture; 4] = [
    Picture {
        name: "normal-day",
        title: "A normal day: the second Wednesday",
        kind: Kind::Office,
        hours: (9 * 24 + 6, 9 * 24 + 22),
    },
    Picture { name: "burst", title: "A burst", kind: Kind::Bursts, hours: (0, 0) },
    Picture {
        name: "campaign",
        title: "A campaign from 14:00 to 16:00",
        kind: Kind::Campaign,
        hours: (2 * 24 + 12, 2 * 24 + 18),
    },
    Picture {
        name: "after-a-holiday",
        title: "A holiday on Friday, and a heavy Monday",
        kind: Kind::Holiday,
        hours: (4 * 24, 8 * 24),
    },
];

/// Writes the table into a Markdown page, and the pictures into a directory beside it that has
/// the page's name.
pub(crate) fn write(page: &Path, progress: impl FnMut(&str)) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let (before, rest) = text.split_once(BEGIN).with_context(|| format!("no line {BEGIN}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("no line {END}"))?;
    let directory = page.with_extension("");
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    for (name, picture) in pictures() {
        let path = directory.join(format!("{name}.svg"));
        std::fs::write(&path, picture).with_context(|| path.display().to_string())?;
    }
    let table = table(progress);
    std::fs::write(page, format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
        .with_context(|| page.display().to_string())
}

fn pictures() -> Vec<(&'static str, String)> {
    let draw = |picture: &Picture| {
        let trace = Synthetic { kind: picture.kind, peak: 200.0, days: DAYS, seed: SEED };
        let calls = trace.calls();
        let outcome = comparison(60).forecast(&calls);
        let midnight = calls[0].start / 86_400_000 * 86_400_000;
        let (from, to) = match trace.first_burst() {
            Some(burst) => (burst - 1_800_000, burst + 5_400_000),
            None => {
                (midnight + picture.hours.0 * 3_600_000, midnight + picture.hours.1 * 3_600_000)
            }
        };
        let part = Chart { title: picture.title, zone: TimeZone::UTC, from, to };
        (picture.name, chart(&outcome.samples, &part))
    };
    PICTURES.iter().map(draw).collect()
}
