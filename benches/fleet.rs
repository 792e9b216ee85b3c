//! Cost of one fleet operation with 100,000 pods: `cargo bench --bench fleet`

use std::time::Instant;

use fleet::{
    Allocate, Fleet, PodFacts, PodOrigin, PodWriter, Release,
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
}
