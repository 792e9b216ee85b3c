//! Traces of calls from CSV files.

use std::fmt;

use jiff::{
    Timestamp,
    civil::DateTime,
    tz::{AmbiguousOffset, TimeZone},
};

use super::{simulate::Call, synthetic::Random};

/// The longest call, in seconds.
pub(crate) const MAX_DURATION: f64 = 86_400.0;
/// The most calls of one row of counts, and of a trace.
const MAX_ROW: f64 = 10_000_000.0;
const MAX_CALLS: usize = 50_000_000;
/// The latest time: the year 2200, in seconds since the epoch.
const MAX_TIME: f64 = 7_258_118_400.0;
/// The longest time between two rows, in seconds.
const MAX_GAP: f64 = 31.0 * 86_400.0;
/// The longest trace, in days: the simulation makes a decision for every 5 s of it.
const MAX_DAYS: f64 = 366.0;
/// A time without rows of counts that counts as closed; missing rows within a day are an error.
const CLOSED: f64 = 4.0 * 3_600.0;

/// An invalid trace: its line, from 1, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TraceError {
    pub(crate) line: usize,
    pub(crate) reason: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for TraceError {}

fn error<T>(line: usize, reason: impl Into<String>) -> Result<T, TraceError> {
    Err(TraceError { line, reason: reason.into() })
}

/// The meaning of a trace that its file does not have.
#[derive(Debug, Clone)]
pub(crate) struct TraceOptions {
    /// Mean duration of calls, for counts.
    pub(crate) duration: Option<f64>,
    /// Time zone of times without an offset.
    pub(crate) zone: TimeZone,
    /// Seed of arrivals and durations that counts do not have.
    pub(crate) seed: u64,
}

/// Reads a trace as [`parse`] does, from bytes.
pub(crate) fn read(bytes: &[u8], options: &TraceOptions) -> Result<(Vec<Call>, usize), TraceError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => parse(text, options),
        Err(invalid) => {
            let before = &bytes[..invalid.valid_up_to()];
            let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
            error(line, "bytes that are not UTF-8; expected text in UTF-8")
        }
    }
}

/// Reads `start,duration` rows, or `time,calls` counts, sorted by time. Returns the calls and the
/// number of closed times in the counts.
pub(super) fn parse(text: &str, options: &TraceOptions) -> Result<(Vec<Call>, usize), TraceError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut rows = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let Some((line, header)) = rows.find(|(_, header)| !header.is_empty()) else {
        return error(1, "the file is empty; expected the header start,duration or time,calls");
    };
    let columns: Vec<String> = header.split(',').map(|name| cell(name).to_lowercase()).collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let has_durations = match columns[..] {
        ["start", "duration"] => true,
        ["time", "calls"] => false,
        _ => {
            let expected = "expected start,duration or time,calls";
            return error(line, format!("header {header:?}; {expected}"));
        }
    };
    if has_durations && options.duration.is_some() {
        return error(line, "the rows have durations; omit --duration, which is for time,calls");
    }
    let rows: Vec<Row> = rows
        .filter(|(_, line)| !line.is_empty())
        .map(|(number, line)| Row::parse(number, line, &options.zone))
        .collect::<Result<_, _>>()?;
    check_order(&rows)?;
    let calls = match has_durations {
        true => (calls(&rows)?, 0),
        false => counts(&rows, options)?,
    };
    match calls.0.is_empty() {
        true => error(rows.last().map_or(1, |row| row.line), "the trace has no calls"),
        false => Ok(calls),
    }
}

fn cell(text: &str) -> &str {
    text.trim().trim_matches('"').trim()
}

struct Row {
    line: usize,
    /// Seconds since the epoch.
    at: f64,
    value: f64,
    /// A local time that occurs twice, because clocks go back.
    is_ambiguous: bool,
}

impl Row {
    fn parse(line: usize, text: &str, zone: &TimeZone) -> Result<Self, TraceError> {
        let cells: Vec<&str> = text.split(',').map(cell).collect();
        let [at, value] = cells[..] else {
            return error(line, format!("{} columns; expected 2", cells.len()));
        };
        let (seconds, is_ambiguous) =
            time(at, zone).map_err(|reason| TraceError { line, reason })?;
        if !(0.0..=MAX_TIME).contains(&seconds) {
            return error(line, format!("time {at}; expected a time from 1970 to 2200"));
        }
        match value.parse::<f64>() {
            Ok(value) if value.is_finite() && value >= 0.0 => {
                Ok(Self { line, at: seconds, value, is_ambiguous })
            }
            _ => error(line, format!("{value:?}; expected a number of 0 or more")),
        }
    }
}

/// Parses seconds since the epoch, a time with an offset, or a local time of the zone. Returns
/// also whether a local time is ambiguous.
fn time(text: &str, zone: &TimeZone) -> Result<(f64, bool), String> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Ok((seconds, false));
    }
    if let Ok(stamp) = text.parse::<Timestamp>() {
        return Ok((stamp.as_millisecond() as f64 / 1_000.0, false));
    }
    let expected = || {
        format!(
            "time {text:?}; expected Unix seconds, 2025-01-31T09:00:00+01:00, or a local time of --time-zone"
        )
    };
    // A time with a zone that is no offset must not pass as a local time.
    if text.contains(['[', ']']) || text.ends_with(|end: char| end.is_alphabetic()) {
        return Err(expected());
    }
    let local: DateTime = text.parse().map_err(|_| expected())?;
    let zoned = zone.to_ambiguous_zoned(local);
    if matches!(zoned.offset(), AmbiguousOffset::Gap { .. }) {
        return Err(format!("time {text:?} never occurs: clocks go forward over it"));
    }
    let is_ambiguous = zoned.is_ambiguous();
    let stamp = zoned.compatible().map_err(|_| expected())?.timestamp();
    Ok((stamp.as_millisecond() as f64 / 1_000.0, is_ambiguous))
}

/// The reason of an error about the interval between two rows in the hour of a clock change.
const CLOCK_CHANGE: &str = "clocks go back in this hour, and its local times occur twice; \
     write times with an offset, such as 2025-10-26T02:00:00+01:00";

fn check_order(rows: &[Row]) -> Result<(), TraceError> {
    for pair in rows.windows(2) {
        let gap = pair[1].at - pair[0].at;
        if gap < 0.0 && pair[1].is_ambiguous {
            return error(pair[1].line, CLOCK_CHANGE);
        }
        if gap < 0.0 {
            return error(pair[1].line, "the time is before that of the row above; sort the rows");
        }
        if gap > MAX_GAP {
            let days = (gap / 86_400.0) as u64;
            return error(pair[1].line, format!("a gap of {days} days after the row above"));
        }
    }
    let end = rows.first().map_or(0.0, |first| first.at) + MAX_DAYS * 86_400.0;
    if let Some(beyond) = rows.iter().find(|row| row.at > end) {
        return error(beyond.line, format!("more than {MAX_DAYS} days after the first row"));
    }
    Ok(())
}

fn calls(rows: &[Row]) -> Result<Vec<Call>, TraceError> {
    let call = |row: &Row| match row.value <= MAX_DURATION {
        true => Ok(Call {
            start: (row.at * 1_000.0).round() as u64,
            duration: (row.value * 1_000.0).round() as u64,
        }),
        false => error(row.line, format!("a duration of {} s; expected at most 24 h", row.value)),
    };
    rows.iter().map(call).collect()
}

/// Draws the calls of counts: arrivals anywhere in their interval, exponential durations.
fn counts(rows: &[Row], options: &TraceOptions) -> Result<(Vec<Call>, usize), TraceError> {
    let Some(duration) = options.duration else {
        return error(1, "counts have no durations; add --duration, the mean of a call");
    };
    let [first, second, ..] = rows else {
        return error(rows.len() + 1, "counts need two rows or more");
    };
    let interval = second.at - first.at;
    if interval <= 0.0 || interval > CLOSED {
        return error(second.line, "the first two rows must be at most 4 h apart, and not equal");
    }
    let mut closed = 0;
    for pair in rows.windows(2) {
        let gap = pair[1].at - pair[0].at;
        match (gap - interval).abs() < 0.5 {
            true => {}
            false if gap >= CLOSED => closed += 1,
            false if pair.iter().any(|row| row.is_ambiguous) => {
                return error(pair[1].line, CLOCK_CHANGE);
            }
            false => {
                return error(
                    pair[1].line,
                    format!(
                        "{gap} s after the row above; expected {interval} s (rows are missing or repeated)"
                    ),
                );
            }
        }
    }
    let mut random = Random::new(options.seed);
    let mut calls = Vec::new();
    for row in rows {
        if row.value > MAX_ROW || row.value.fract() != 0.0 {
            let expected = format!("expected a whole number of at most {MAX_ROW}");
            return error(row.line, format!("{} calls; {expected}", row.value));
        }
        if calls.len() + row.value as usize > MAX_CALLS {
            return error(row.line, format!("more than {MAX_CALLS} calls"));
        }
        for _ in 0..row.value as u64 {
            let start = row.at + random.uniform() * interval;
            let length = random.exponential(duration).min(MAX_DURATION);
            calls.push(Call {
                start: (start * 1_000.0) as u64,
                duration: (length * 1_000.0).max(1.0) as u64,
            });
        }
    }
    calls.sort_unstable_by_key(|call| call.start);
    Ok((calls, closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The duration is for counts only.
    fn options(text: &str) -> TraceOptions {
        let duration = text.starts_with("time,calls").then_some(180.0);
        TraceOptions { duration, zone: TimeZone::UTC, seed: 1 }
    }

    fn failing_line(text: &str) -> usize {
        parse(text, &options(text)).unwrap_err().line
    }

    #[test]
    fn rows_with_durations_take_no_mean_duration() {
        let with_duration = TraceOptions { duration: Some(180.0), ..options("") };
        let failed = parse("\nstart,duration\n1,2\n", &with_duration).unwrap_err();
        assert_eq!(failed.line, 2);
        assert!(failed.reason.contains("omit --duration"), "{failed}");
    }

    #[test]
    fn a_trace_of_calls_is_read_in_all_time_formats() {
        let text = "start,duration\r\n1736146800,12.5\n2025-01-06T08:00:00+01:00,1\n\"2025-01-06 07:00:01\",3\n";
        let (calls, closed) = parse(text, &options(text)).unwrap();
        let expected =
            [(1_736_146_800_000, 12_500), (1_736_146_800_000, 1_000), (1_736_146_801_000, 3_000)];
        assert_eq!(
            calls.iter().map(|call| (call.start, call.duration)).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(closed, 0);
    }

    #[test]
    fn counts_become_calls_within_their_interval() {
        let text = "time,calls\n0,2\n300,0\n600,3\n86400,1\n";
        let (calls, closed) = parse(text, &options(text)).unwrap();
        assert_eq!((calls.len(), closed), (6, 1));
        assert!(calls[1].start < 300_000 && (600_000..900_000).contains(&calls[4].start));
        assert!(calls.is_sorted_by_key(|call| call.start));
    }

    #[test]
    fn local_times_of_a_clock_change_are_explained() {
        let zone = jiff::tz::TimeZoneDatabase::bundled().get("Europe/Berlin").unwrap();
        let options = |text: &str| TraceOptions { zone: zone.clone(), ..options(text) };
        let parse = |text: &str| parse(text, &options(text));
        let hours = ["01:30", "02:00", "02:30", "02:00", "02:30", "03:00"];
        let rows = hours.map(|hour| format!("2025-10-26T{hour}:00,1\n")).concat();
        for header in ["time,calls", "start,duration"] {
            let failed = parse(&format!("{header}\n{rows}")).unwrap_err();
            assert_eq!((failed.line, failed.reason.as_str()), (5, CLOCK_CHANGE));
        }
        let once = ["01:30", "02:00", "02:30", "03:00"];
        let rows = once.map(|hour| format!("2025-10-26T{hour}:00,1\n")).concat();
        let failed = parse(&format!("time,calls\n{rows}")).unwrap_err();
        assert_eq!((failed.line, failed.reason.as_str()), (5, CLOCK_CHANGE));
        let offsets = ["01:30:00+02:00", "02:00:00+02:00", "02:30:00+02:00", "02:00:00+01:00"];
        let rows = offsets.map(|time| format!("2025-10-26T{time},1\n")).concat();
        assert!(parse(&format!("time,calls\n{rows}")).is_ok());
    }

    #[test]
    fn a_local_time_that_never_occurs_is_an_error_of_its_line() {
        let zone = jiff::tz::TimeZoneDatabase::bundled().get("Europe/Berlin").unwrap();
        for header in ["start,duration", "time,calls"] {
            let rows = ["01:30", "02:00"].map(|time| format!("2025-03-30T{time}:00,1\n")).concat();
            let text = format!("{header}\n{rows}");
            let options = TraceOptions { zone: zone.clone(), ..options(&text) };
            let failed = parse(&text, &options).unwrap_err();
            assert_eq!(failed.line, 3);
            assert!(failed.reason.contains("never occurs"), "{failed}");
        }
    }

    #[test]
    fn bytes_that_are_not_text_are_an_error_of_their_line() {
        let failed = read(b"start,duration\n1,2\n2,\xff\n", &options("")).unwrap_err();
        assert_eq!(failed.line, 3);
    }

    #[test]
    fn empty_lines_may_precede_the_header() {
        assert_eq!(parse("\n \nstart,duration\n1,2\n", &options("")).unwrap().0.len(), 1);
        assert_eq!(failing_line("\n\nstart,duration\n1,-2\n"), 4);
    }

    #[test]
    fn a_trace_longer_than_a_year_is_an_error_of_its_first_line_beyond() {
        let rows = |count| {
            let rows = (0..count).map(|row| format!("{},60\n", row * 30 * 86_400));
            format!("start,duration\n{}", rows.collect::<String>())
        };
        assert!(parse(&rows(13), &options("")).is_ok());
        assert_eq!(failing_line(&rows(400)), 15);
    }

    #[test]
    fn an_error_names_the_line() {
        assert_eq!(failing_line(""), 1);
        assert_eq!(failing_line("a,b\n1,2\n"), 1);
        assert_eq!(failing_line("start;duration\n1;2\n"), 1);
        assert_eq!(failing_line("\n# calls\nstart,duration\n1,2\n"), 2);
        assert_eq!(failing_line("start,duration\n"), 1);
        assert_eq!(failing_line("start,duration\n1,2\n0,2\n"), 3);
        assert_eq!(failing_line("start,duration\n1,-2\n"), 2);
        assert_eq!(failing_line("start,duration\n1,nan\n"), 2);
        assert_eq!(failing_line("start,duration\n1,1e9\n"), 2);
        assert_eq!(failing_line("start,duration\n-1,2\n"), 2);
        assert_eq!(failing_line("start,duration\n1,2\n1e300,2\n"), 3);
        assert_eq!(failing_line("start,duration\n1,2\n\n1,2,3\n"), 4);
        assert_eq!(failing_line("start,duration\n2025-01-06T08:00:00 CET,2\n"), 2);
        assert_eq!(failing_line("start,duration\n1,2\n9999999,2\n"), 3);
        assert_eq!(failing_line("time,calls\n0,2\n300,1\n900,3\n"), 4);
        assert_eq!(failing_line("time,calls\n0,2\n300,1\n300,3\n"), 4);
        assert_eq!(failing_line("time,calls\n0,2\n300,1.5\n"), 3);
        assert_eq!(failing_line("time,calls\n0,2\n300,1e12\n"), 3);
        assert_eq!(failing_line("time,calls\n0,2\n"), 2);
        assert_eq!(failing_line("time,calls\n0,0\n300,0\n"), 3);
    }
}
