//! Charts of simulations as SVG.

use std::fmt::Write;

use jiff::{Timestamp, tz::TimeZone};

use super::simulate::Sample;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 28.0;
/// Points of a line, at most.
const POINTS: usize = 900;

/// A part of a simulation to draw.
#[derive(Debug, Clone)]
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    pub(crate) zone: TimeZone,
    /// First and last time, in milliseconds since the epoch.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// Draws calls, ready pods and desired pods, and marks the times of misses.
pub(crate) fn chart(samples: &[Sample], chart: &Chart<'_>) -> String {
    let shown: Vec<&Sample> =
        samples.iter().filter(|sample| (chart.from..=chart.to).contains(&sample.at)).collect();
    let top = shown.iter().map(|sample| sample.calls.max(sample.ready).max(sample.desired)).max();
    let top = round_up(top.unwrap_or(1).max(1));
    let span = (chart.to - chart.from).max(1) as f64;
    let x = |at: u64| LEFT + (WIDTH - LEFT - RIGHT) * (at - chart.from) as f64 / span;
    let y = |count: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / top as f64;
    let mut svg = String::new();
    frame(&mut svg, chart, top, &x, &y);
    let per_point = shown.len().div_ceil(POINTS).max(1);
    let line = |value: fn(&Sample) -> u64| {
        let points = shown.chunks(per_point).map(|part| {
            let highest = part.iter().map(|sample| value(sample)).max().unwrap_or(0);
            format!("{:.1},{:.1}", x(part[0].at), y(highest as f64))
        });
        points.collect::<Vec<_>>().join(" ")
    };
    let base = y(0.0);
    let ends = (shown.first().map_or(0, |first| first.at), shown.last().map_or(0, |last| last.at));
    if ends.1 > 0 {
        let _ = writeln!(
            svg,
            "<polygon fill=\"#bcd6f0\" points=\"{:.1},{base:.1} {} {:.1},{base:.1}\"/>",
            x(ends.0),
            line(|sample| sample.ready),
            x(ends.1)
        );
    }
    for (colour, value) in [("#1c6dd0", desired as fn(&Sample) -> u64), ("#d0491c", present)] {
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.2\" points=\"{}\"/>",
            line(value)
        );
    }
    for pair in shown.windows(2).filter(|pair| pair[1].misses > pair[0].misses) {
        let at = x(pair[1].at);
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{:.1}\" stroke=\"#000\"/>",
            TOP + 8.0
        );
    }
    svg += "</svg>\n";
    svg
}

fn desired(sample: &Sample) -> u64 {
    sample.desired
}

fn present(sample: &Sample) -> u64 {
    sample.calls
}

/// The next of 10, 20, 50, 100, …
fn round_up(count: u64) -> u64 {
    let mut step = 10;
    loop {
        for factor in [1, 2, 3, 5, 8] {
            if step * factor >= count {
                return step * factor;
            }
        }
        step *= 10;
    }
}

/// The background, the title with its legend, and the axes.
fn frame(
    svg: &mut String,
    chart: &Chart<'_>,
    top: u64,
    x: &dyn Fn(u64) -> f64,
    y: &dyn Fn(f64) -> f64,
) {
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}</text>",
        escaped(chart.title)
    );
    for (place, colour, label) in [
        (560.0, "#d0491c", "calls"),
        (630.0, "#bcd6f0", "ready pods"),
        (730.0, "#1c6dd0", "desired pods"),
        (845.0, "#000", "misses"),
    ] {
        let _ = writeln!(
            svg,
            "<rect x=\"{place}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"20\">{label}</text>",
            place + 17.0
        );
    }
    for part in 0..=4 {
        let count = top as f64 * f64::from(part) / 4.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{2:.1}\" y2=\"{2:.1}\" stroke=\"#ddd\"/><text x=\"{1}\" y=\"{3:.1}\" text-anchor=\"end\">{count}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y(count),
            y(count) + 4.0
        );
    }
    let hours = (chart.to - chart.from) / 3_600_000;
    let step = [1, 2, 6, 24, 168].into_iter().find(|step| hours / step <= 14).unwrap_or(720);
    let format = if step < 24 { "%H:%M" } else { "%b %d" };
    let first = chart.from.div_ceil(3_600_000) * 3_600_000;
    let marks = (first..=chart.to).step_by(3_600_000);
    for at in marks {
        let Ok(stamp) = Timestamp::from_millisecond(at as i64) else { continue };
        let local = stamp.to_zoned(chart.zone.clone());
        let hour = u64::try_from(local.hour()).unwrap_or(0);
        let day = u64::try_from(local.day_of_year()).unwrap_or(0);
        let is_mark = match step {
            ..24 => hour.is_multiple_of(step),
            _ => hour == 0 && day.is_multiple_of(step / 24),
        };
        if is_mark {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                x(at),
                HEIGHT - 9.0,
                local.strftime(format)
            );
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
