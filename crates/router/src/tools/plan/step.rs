//! The policy as a filter: one observation per line in, one decision per line out.

use std::io::{BufRead, Write};

use fleet::{
    capacity::{Bounds, Observation, Policy, Prescale, Settings},
    tiers::InboundReserve,
};
use serde::Deserialize;
use serde_json::Value;

/// The latest time of an observation, in seconds since the epoch.
const MAX_TIME: f64 = 1e12;
/// The largest count that the policy takes as it is.
const MAX_COUNT: f64 = 1e8;
/// The longest duration and start-up time, in seconds.
const MAX_SECONDS: f64 = 1e9;

/// An observation as an external simulator writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    t: f64,
    arrivals: f64,
    live: f64,
    #[serde(default)]
    waiting: f64,
    #[serde(default)]
    dial_slots: f64,
    #[serde(default)]
    refusals: f64,
    ready: f64,
    #[serde(default)]
    starting: f64,
    #[serde(default)]
    start_ups: Vec<f64>,
    #[serde(default)]
    durations: Vec<f64>,
    #[serde(default)]
    gap: bool,
    #[serde(default)]
    min: f64,
    max: Option<f64>,
    /// Slots, or a share such as `"20%"`.
    #[serde(default)]
    inbound_reserve: Value,
    /// Pods of the largest prescale order in force.
    prescale: Option<f64>,
}

fn read(text: &str) -> Result<(Observation, Bounds), String> {
    let line: Line = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !(0.0..=MAX_TIME).contains(&line.t) {
        return Err(format!("t is {}; expected Unix seconds", line.t));
    }
    let count = |name: &str, number: f64| {
        let is_count = (0.0..=MAX_COUNT).contains(&number) && number.fract() == 0.0;
        let expected =
            || format!("{name} is {number}; expected a whole number from 0 to {MAX_COUNT}");
        is_count.then_some(number as u64).ok_or_else(expected)
    };
    let times = |name: &str, times: Vec<f64>| match times
        .iter()
        .find(|time| !(0.0..=MAX_SECONDS).contains(*time))
    {
        Some(time) => Err(format!("{name} has {time}; expected seconds from 0 to {MAX_SECONDS}")),
        None => Ok(times),
    };
    let optional =
        |name: &str, number: Option<f64>| number.map(|number| count(name, number)).transpose();
    let order = |pods| Prescale { pods, until: u64::MAX };
    let bounds = Bounds {
        min: count("min", line.min)?,
        max: optional("max", line.max)?.unwrap_or(u64::MAX),
        inbound_reserve: inbound_reserve(&line.inbound_reserve)?,
        prescale: optional("prescale", line.prescale)?.map(order).into_iter().collect(),
    };
    let observation = Observation {
        at: (line.t * 1_000.0).round() as u64,
        arrivals: count("arrivals", line.arrivals)?,
        live: count("live", line.live)?,
        waiting: count("waiting", line.waiting)?,
        dial_slots: count("dial_slots", line.dial_slots)?,
        refusals: count("refusals", line.refusals)?,
        ready: count("ready", line.ready)?,
        starting: count("starting", line.starting)?,
        start_ups: times("start_ups", line.start_ups)?,
        durations: times("durations", line.durations)?,
        gap: line.gap,
    };
    Ok((observation, bounds))
}

fn inbound_reserve(value: &Value) -> Result<InboundReserve, String> {
    let text = match value {
        Value::Null => return Ok(InboundReserve::default()),
        Value::String(text) if text.ends_with('%') => text.clone(),
        Value::String(_) => String::new(),
        number => number.to_string(),
    };
    let expected = "expected a whole number, or a share from \"0%\" to \"99%\"";
    text.parse().map_err(|()| format!("inbound_reserve is {value}; {expected}"))
}

/// Answers each line of `input` with a line on `output`, flushed, until the input ends. An
/// invalid line is an error that names it.
pub(crate) fn run(
    settings: Settings,
    input: impl BufRead,
    mut output: impl Write,
) -> Result<(), StepError> {
    let mut policy = Policy::new(settings);
    for (index, text) in input.lines().enumerate() {
        let invalid = |reason| StepError::Line { line: index + 1, reason };
        let text = text.map_err(|error| invalid(error.to_string()))?;
        let (observation, bounds) = read(&text).map_err(invalid)?;
        policy.settings.bounds = bounds;
        let desired = policy.step(&observation).desired;
        writeln!(output, "{{\"desired\": {desired}}}").map_err(StepError::Output)?;
        output.flush().map_err(StepError::Output)?;
    }
    Ok(())
}

/// A filter that ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error("line {line}: {reason}")]
    Line { line: usize, reason: String },
    #[error("cannot write: {0}")]
    Output(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        r#"{"t": 1000, "arrivals": 1, "live": 2, "waiting": 0, "ready": 3, "starting": 0}"#;

    fn filter(text: &str) -> (Result<(), String>, String) {
        let mut output = Vec::new();
        let done = run(Settings::default(), text.as_bytes(), &mut output);
        (done.map_err(|error| error.to_string()), String::from_utf8(output).unwrap())
    }

    #[test]
    fn each_line_is_answered_by_one_line() {
        let (done, output) = filter(&format!("{LINE}\n{LINE}\n"));
        assert_eq!(done, Ok(()));
        assert_eq!(output.lines().count(), 2);
        let decision: Value = serde_json::from_str(output.lines().next().unwrap()).unwrap();
        assert!(decision["desired"].as_u64().unwrap() >= 2, "{output}");
    }

    #[test]
    fn an_invalid_line_is_named_after_the_answers_before_it() {
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"t": -1, "arrivals": 0, "live": 0, "ready": 0}"#,
            r#"{"t": 1, "arrivals": -1, "live": 0, "ready": 0}"#,
            r#"{"t": 1, "arrivals": 1.5, "live": 0, "ready": 0}"#,
            r#"{"t": 1, "arrivals": 1e12, "live": 0, "ready": 0}"#,
            r#"{"t": 1, "arrivals": 0, "live": 100000001, "ready": 0}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "raedy": 1}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "start_ups": [-3]}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "durations": [5, 1e300]}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "min": -1}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "max": 1.5}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "prescale": "4"}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "inbound_reserve": -1}"#,
            r#"{"t": 1, "arrivals": 0, "live": 0, "ready": 0, "inbound_reserve": "100%"}"#,
        ] {
            let (done, output) = filter(&format!("{LINE}\n{bad}\n"));
            assert!(done.unwrap_err().starts_with("line 2: "), "{bad}");
            assert_eq!(output.lines().count(), 1);
        }
    }

    #[test]
    fn the_bounds_of_a_line_hold_for_its_decision() {
        let line = |fields: &str| {
            format!(r#"{{"t": 1000, "arrivals": 0, "live": 20, "ready": 20{fields}}}"#) + "\n"
        };
        let lines = [
            r#", "min": 70"#,
            r#", "min": 70, "max": 60"#,
            r#", "prescale": 90"#,
            r#", "inbound_reserve": 60"#,
            r#", "inbound_reserve": "80%""#,
            "",
        ];
        let text = lines.map(line).concat();
        let (done, output) = filter(&text);
        assert_eq!(done, Ok(()));
        let desired: Vec<&str> = output.lines().collect();
        let expected = [70, 60, 90, 80, 100].map(|number| format!("{{\"desired\": {number}}}"));
        assert_eq!(desired[..5], expected);
        assert!(!expected.contains(&desired[5].to_owned()), "{output}");
    }
}
