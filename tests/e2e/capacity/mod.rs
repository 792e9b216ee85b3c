//! Capacity: decisions, their continuation by another router, prescale orders, and scaling of
//! workloads.

mod bad_input;
mod cluster;
mod continuation;
mod dials;
mod orders;
mod outages;
mod scaling;

use std::time::Duration;

use serde_json::Value;

use testkit::{Log, Router, eventually};

const SECOND: Duration = Duration::from_secs(1);
/// Ample for a few steps of the policy.
const STEPS: Duration = Duration::from_secs(20);

/// The capacity of all pools; `None` before the first decisions.
fn capacity(router: &Router) -> Option<Value> {
    let (status, answer) = router.get("/api/v1/capacity");
    assert!(matches!(status, 200 | 503), "{status}: {answer}");
    (status == 200).then_some(answer)
}

fn pool(router: &Router, name: &str) -> Option<Value> {
    capacity(router).map(|all| all["pools"][name].clone()).filter(Value::is_object)
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// Waits until the capacity of a pool fulfils a condition, and returns it.
fn wait_for(router: &Router, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let mut found = Value::Null;
    eventually(STEPS, what, || {
        found = pool(router, name).unwrap_or_default();
        found.is_object() && holds(&found)
    });
    found
}

/// A decision in the log: the observation as a line of `plan --step`, and the desired pods.
#[derive(Debug, Clone, PartialEq)]
struct Decision {
    line: String,
    desired: u64,
}

/// The decisions for a pool in the debug log of a router, in order.
fn decisions(log: &Log, pool: &str) -> Vec<Decision> {
    let text = log.text();
    let lines = text.lines().filter(|line| line.contains("capacity decision"));
    let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .filter(|line| line["pool"] == format!("pool:{pool}"))
        .map(|line| Decision {
            line: line["observation"].as_str().unwrap().to_owned(),
            desired: number(&line, "desired"),
        })
        .collect()
}

fn wait_for_decisions(log: &Log, pool: &str, count: usize) {
    eventually(STEPS, "decisions are logged", || decisions(log, pool).len() >= count);
}
