//! `smart-router plan`, as a user runs it.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_smart-router");

/// Runs a plan with standard input. Returns exit code, stdout and stderr.
fn plan(args: &[&str], input: &str) -> (i32, String, String) {
    let mut child = Command::new(PROGRAM)
        .arg("plan")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that ends early does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn plan_prints_erlang_tables_with_cost() {
    let args = ["--calls-per-hour", "1200", "--duration", "3m", "--pod-cost", "148"];
    let (code, text, error) = plan(&args, "");
    assert_eq!(code, 0, "{error}");
    assert!(text.contains("60.0 calls at the same time"), "{text}");
    let row = text.lines().find(|line| line.starts_with("99.9%")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    // 60 erlangs lose 0.1 % or less from 83 lines on.
    assert_eq!((cells[1], cells[3]), ("83", "12284"), "{text}");
    let (_, text, _) = plan(&[&args[..], &["--json"]].concat(), "");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["rows"][3]["without_hold_queue"]["pods"], 83);
    // 17 pods of 4 calls have 68 slots, two more than 95 % need.
    let (_, text, _) = plan(&[&args[..], &["--json", "--calls-per-pod=4"]].concat(), "");
    let value: Value = serde_json::from_str(&text).unwrap();
    let refused = &value["rows"][0]["without_hold_queue"];
    let share = refused["refused"].as_f64().unwrap();
    assert!(refused["pods"] == 17 && (0.03..0.04).contains(&share), "{refused}");
}

#[test]
fn plan_compares_policies_on_a_trace() {
    let mut trace = String::from("time,calls\n");
    for slot in 0..96 {
        trace += &format!("{},{}\n", 1_736_121_600 + slot * 300, 20 + slot % 7);
    }
    let svg = std::env::temp_dir().join(format!("plan-{}.svg", std::process::id()));
    let path = svg.to_str().unwrap();
    let args = ["--trace", "-", "--duration", "3m", "--json", "--svg", path];
    let (code, text, error) = plan(&args, &trace);
    assert_eq!(code, 0, "{error}");
    let value: Value = serde_json::from_str(&text).unwrap();
    let policies = value["policies"].as_array().unwrap();
    assert_eq!(policies.len(), 5);
    assert_eq!(policies[0]["policy"], "forecast");
    assert!(policies[0]["pod_hours_per_call_hour"].as_f64().unwrap() > 1.0);
    assert_eq!(policies[4]["calls_without_warm_pod"], 0);
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    std::fs::remove_file(svg).unwrap();
    let (code, text, _) = plan(&["--trace", "-", "--duration", "3m"], &trace);
    assert!(code == 0 && text.contains("70 % utilisation"), "{text}");
}

#[test]
fn plan_names_the_line_of_an_invalid_trace() {
    let (code, _, error) = plan(&["--trace", "-"], "start,duration\n10,5\n9,5\n");
    assert_eq!((code, error.contains("-: line 3: ")), (1, true), "{error}");
    let (code, _, error) = plan(&["--trace", "-"], "");
    assert_eq!((code, error.contains("line 1: the file is empty")), (1, true), "{error}");
    let (_, _, error) = plan(&["--trace", "-", "--duration", "3m"], "time,calls\n0,1\n60,1e9\n");
    assert!(error.contains("line 3: 1000000000 calls; expected a whole number of at most"));
    let (code, _, error) = plan(&["--trace", "-", "--duration", "3m"], "start,duration\n10,5\n");
    assert_eq!(
        (code, error.contains("line 1: the rows have durations; omit --duration")),
        (1, true),
        "{error}"
    );
    assert_eq!(plan(&["--trace", "/nonexistent.csv"], "").0, 1);
    assert_eq!(plan(&[], "").0, 2);
    assert_eq!(plan(&["--step", "--target", "101%"], "").0, 1);
    assert_eq!(plan(&["--step", "--time-zone", "Mars/Olympus"], "").0, 1);
}

#[test]
fn plan_step_answers_each_line_before_the_next() {
    let mut child = Command::new(PROGRAM)
        .args(["plan", "--step", "--cold-start", "60s"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    for second in 0..20 {
        writeln!(
            input,
            r#"{{"t": {}, "arrivals": 3, "live": 40, "waiting": 0, "ready": 50, "starting": 0}}"#,
            1_736_121_600 + second * 5
        )
        .unwrap();
        let decision: Value = serde_json::from_str(&output.next().unwrap().unwrap()).unwrap();
        assert!(decision["desired"].as_u64().unwrap() >= 40);
    }
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(output.next().is_none());
}

#[test]
fn plan_names_the_flag_of_an_invalid_value() {
    for (args, expected) in [
        (["--step", "--cold-start", "60.0s"], "smart-router: --cold-start=60.0s: expected a "),
        // The policy knows no longer start-up time, and the simulation would not end.
        (["--step", "--cold-start", "61m"], "--cold-start=61m: expected a duration from 1ms to 1h"),
        (["--trace=-", "--duration", "25h"], "--duration=25h: expected a duration from 1ms to 24h"),
        (["--step", "--calls-per-pod", "0"], "expected a whole number from 1 to 1000"),
        (["--step", "--calls-per-pod", "x"], "--calls-per-pod=x: expected a whole number"),
        (["--synthetic", "--svg", "x.svg"], "cannot be used with"),
        (["--trace=-", "--write", "x.md"], "cannot be used with"),
    ] {
        let (code, _, error) = plan(&args, "");
        assert!(code != 0 && error.contains(expected), "{args:?}: {error}");
    }
    let (code, _, error) = plan(&["--calls-per-hour=1e7", "--duration=24h"], "");
    assert!(code == 1 && error.contains("calls at the same time; expected at most"), "{error}");
    let (code, _, _) = plan(&["--calls-per-hour=9", "--duration=3m", "--svg=x.svg"], "");
    assert_eq!(code, 2, "the tables have no chart");
}

#[test]
fn calls_without_duration_have_no_ratio() {
    let (code, text, _) = plan(&["--trace", "-"], "start,duration\n0,0\n60,0\n");
    let fixed_peak = text.lines().find(|line| line.starts_with("fixed peak")).unwrap();
    assert_eq!((code, fixed_peak.split_whitespace().nth(4)), (0, Some("-")), "{text}");
}
