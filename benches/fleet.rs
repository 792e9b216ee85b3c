//! Cost of one fleet operation with 100,000 pods: `cargo bench --bench fleet`

use std::time::Instant;

use fleet::{
    Allocate, Fleet, PodFacts, PodOrigin, PodWriter, Release,
    capacity::{Observation, Policy, Settings as CapacitySettings},
    names::CallSid,
    tiers::{DocumentSource, Tiers},
};

const WRITER: PodWriter = PodWriter { origin: &PodOrigin::List, epoch: 0 };
const PODS: usize = 100_000;
const CALLS: usize = 50_000;
const ROUNDS: usize = 7;

fn fleet(tiers: &str) -> Fleet {
    let mut fleet = Fleet::new(Tiers::parse(tiers, DocumentSource::Settings).unwrap().0, 0);
    for number in 0..PODS {
        let facts = PodFacts {
            uid: format!("uid-{number}"),
            address: "10.0.0.1:8000".into(),
            ready: true,
            terminating: false,
            at_risk: false,
            restarts: 0,
            pin: None,
        };
        let name = format!("voice-agent-{number}").parse().unwrap();
        fleet.observe_pod(&name, &facts, WRITER, 0).unwrap();
    }
    fleet
}

/// The median over all rounds of the mean time per operation, in nanoseconds.
fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn measure(name: &str, tiers: &str) {
    let mut fleet = fleet(tiers);
    let calls: Vec<CallSid> =
        (0..CALLS).map(|number| format!("CA{:032x}", number * 7_919).parse().unwrap()).collect();
    let (mut allocations, mut releases) = (Vec::new(), Vec::new());
    let mut now = 1_000;
    for _ in 0..ROUNDS {
        let requests: Vec<Allocate> =
            calls.iter().map(|call| Allocate::new(call.clone(), None, 900_000)).collect();
        let started = Instant::now();
        for request in &requests {
            now += 1;
            std::hint::black_box(fleet.allocate(request, now)).unwrap();
        }
        allocations.push(started.elapsed().as_nanos() as f64 / CALLS as f64);
        let requests: Vec<Release> =
            calls.iter().map(|call| Release::new(call.clone(), None)).collect();
        let started = Instant::now();
        for request in &requests {
            now += 1;
            std::hint::black_box(fleet.release(request, now)).unwrap();
        }
        releases.push(started.elapsed().as_nanos() as f64 / CALLS as f64);
    }
    let (allocate, release) = (median(allocations), median(releases));
    println!("{name:<28} allocate {allocate:>6.0} ns   release {release:>6.0} ns");
}

/// The capacity policy at 10,000 pods, after a day of observations.
fn measure_capacity() {
    let mut policy = Policy::new(CapacitySettings::default());
    let mut at = 0;
    let mut run = |steps: u64| {
        let started = Instant::now();
        for step in 0..steps {
            at += 5_000;
            let live = 9_500 + step % 50;
            let durations: Vec<f64> = (0..265).map(|call| f64::from(call) + 40.0).collect();
            let observation = Observation {
                at,
                arrivals: 265,
                live,
                ready: 10_000,
                durations,
                ..Observation::default()
            };
            std::hint::black_box(policy.step(&observation));
        }
        started.elapsed().as_nanos() as f64 / steps as f64
    };
    run(17_280);
    let step = median((0..ROUNDS).map(|_| run(5_000)).collect());
    println!("capacity, 10,000 pods          step {step:>8.0} ns");
    // Once a minute: the forecast of two hours, and the state as text.
    let observation = Observation { at, live: 9_500, ready: 10_000, ..Observation::default() };
    let ahead: Vec<f64> = (1..=24).map(|point| f64::from(point) * 300.0).collect();
    let started = Instant::now();
    std::hint::black_box(policy.outlook(&observation, &ahead));
    let outlook = started.elapsed().as_micros();
    let started = Instant::now();
    let state = serde_json::to_string(policy.state()).unwrap();
    let save = started.elapsed().as_micros();
    println!("  once a minute: forecast {outlook} µs, state {save} µs, {} bytes", state.len());
}

fn main() {
    println!("{PODS} pods, {CALLS} calls, median of {ROUNDS} rounds");
    measure("exclusive", r#"{"gold": 100000}"#);
    let shared = |strategy| {
        format!(
            r#"{{"basic": {{"type": "shared", "target": 1, "max_concurrent": 10, "strategy": "{strategy}"}}}}"#
        )
    };
    measure("shared, spread", &shared("spread"));
    measure("shared, pack", &shared("pack"));
    let behind_full = r#"{"tiers": {"a": {"target": 0}, "b": {"target": 0}, "c": {"type": "shared", "target": 1}}}"#;
    measure("two empty tiers, then shared", behind_full);
    measure_capacity();
}
