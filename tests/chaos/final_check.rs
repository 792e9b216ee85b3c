//! The check after all faults have been removed: every existing pod can be allocated, no other
//! pod can, and the indexes are correct.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use super::{
    deployment::{Deployment, ROUTERS, cap},
    history::Violation,
    http,
    operators::undrain,
};
use testkit::{
    dice::Dice,
    invariants::{self, State},
    snapshot::Snapshot,
};

/// Default maximum time after the faults until every pod can be allocated again.
pub(crate) const MAX_RECOVERY_TIME: Duration = Duration::from_secs(5);
/// Maximum time until call counts and indexes are correct.
const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum additional time for rounds that take longer than a lease.
const ROUNDS_TIMEOUT: Duration = Duration::from_secs(60);

struct TestCall {
    id: String,
    pod: String,
    /// Earliest possible start of its lease.
    at: Instant,
}

pub(crate) fn run(
    deployment: &Deployment,
    healed_at: Instant,
    recovery_time: Duration,
    is_baseline: bool,
) -> Vec<Violation> {
    let mut dice = Dice(7);
    // An undrain may have failed. Other pods are not undrained, because that would rebuild their
    // indexes.
    for pod in deployment.drained() {
        undrain(deployment, &pod, &mut dice);
    }
    let (mut found, calls) = check_allocations(deployment, healed_at + recovery_time, is_baseline);
    if !is_baseline {
        found.extend(check_call_count(deployment));
    }
    if found.is_empty() && !is_baseline {
        found.extend(check_indexes(deployment, &calls));
    }
    for call in &calls {
        release(deployment, &call.id);
    }
    if found.is_empty() && !is_baseline {
        found.extend(check_indexes(deployment, &[]));
    }
    found
}

fn release(deployment: &Deployment, call: &str) {
    for number in 0..30 {
        let to = deployment.routers[number % ROUTERS].address;
        let response = http::post(to, "/api/v1/release", &json!({"call_sid": call}));
        if response.is_ok_and(|response| matches!(response.status, 200 | 404)) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// I4 (and I5, I9 for other pods): allocates all capacity and expects exactly the existing pods.
/// Returns the violations and the live calls.
fn check_allocations(
    deployment: &Deployment,
    until: Instant,
    is_baseline: bool,
) -> (Vec<Violation>, Vec<TestCall>) {
    let mut round = 0;
    loop {
        round += 1;
        let began = Instant::now();
        let pods = deployment.pods();
        let pods: Vec<&String> =
            pods.iter().filter(|pod| !is_baseline || !pod.starts_with("acme")).collect();
        let expected: BTreeMap<&str, usize> =
            pods.iter().map(|pod| (pod.as_str(), cap(pod))).collect();
        let calls = allocate_all(deployment, round, expected.values().sum(), is_baseline);
        // If the first leases ended before the last request, a second allocation of a pod is
        // correct and a missing one proves nothing.
        let is_within_leases = began.elapsed() < deployment.setting("LEASE_TTL");
        let mut allocated = BTreeMap::<&str, usize>::new();
        for call in &calls {
            *allocated.entry(&call.pod).or_default() += 1;
        }
        if allocated == expected {
            return (Vec::new(), calls);
        }
        // Exceeding the capacity is a violation in any round.
        let is_over_capacity = |(pod, calls): &(&&str, &usize)| **calls > cap(pod);
        let found: Vec<Violation> = allocated
            .iter()
            .filter(|_| is_within_leases && !is_baseline)
            .filter(is_over_capacity)
            .map(|(pod, calls)| over_capacity(pod, *calls))
            .collect();
        if !found.is_empty() {
            return (found, calls);
        }
        let is_late = Instant::now() > until;
        if is_late && (is_within_leases || Instant::now() > until + ROUNDS_TIMEOUT) {
            let mut found = orphaned_calls(deployment, &calls);
            found.extend(unexpected_allocations(&expected, &allocated));
            return (found, calls);
        }
        for call in &calls {
            release(deployment, &call.id);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Requests one call more than the capacity. Returns the allocated calls.
fn allocate_all(
    deployment: &Deployment,
    round: usize,
    slots: usize,
    is_baseline: bool,
) -> Vec<TestCall> {
    let mut calls = Vec::new();
    for number in 0..=slots {
        let id = format!("check-{round}-{number}");
        let body = if number == 0 && !is_baseline {
            json!({"call_sid": id, "merchant_id": "acme"})
        } else {
            json!({"call_sid": id})
        };
        let at = Instant::now();
        let response =
            http::post(deployment.routers[number % ROUTERS].address, "/api/v1/allocate", &body);
        let Ok(response) = response else { continue };
        let body: Value = serde_json::from_str(&response.body).unwrap_or_default();
        if let (200, Some(pod)) = (response.status, body["pod_name"].as_str()) {
            calls.push(TestCall { id, pod: pod.to_owned(), at });
        }
    }
    calls
}

fn over_capacity(pod: &str, calls: usize) -> Violation {
    Violation {
        invariant: if cap(pod) == 1 { "I1" } else { "I3" },
        message: format!("{pod} has {calls} calls, its capacity is {}", cap(pod)),
        subjects: vec![pod.into()],
    }
}

fn unexpected_allocations(
    expected: &BTreeMap<&str, usize>,
    allocated: &BTreeMap<&str, usize>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for (pod, cap) in expected {
        let calls = allocated.get(pod).copied().unwrap_or(0);
        if calls < *cap {
            let message = format!("{pod} is idle and accepts {calls} of {cap} calls");
            found.push(Violation { invariant: "I4", message, subjects: vec![pod.to_string()] });
        } else if calls > *cap {
            found.push(over_capacity(pod, calls));
        }
    }
    for pod in allocated.keys().filter(|pod| !expected.contains_key(*pod)) {
        let message = format!("{pod} is allocated, but does not exist");
        found.push(Violation { invariant: "I9", message, subjects: vec![pod.to_string()] });
    }
    found
}

/// I4: live calls without an owner, each with its events.
fn orphaned_calls(deployment: &Deployment, known: &[TestCall]) -> Vec<Violation> {
    type Events = Vec<(String, Vec<String>)>;
    let Some(mut redis) = deployment.store().connection() else { return Vec::new() };
    let mut read = redis::pipe();
    read.atomic().zrange("voice:calls", 0, -1);
    read.cmd("XRANGE").arg("voice:events").arg("-").arg("+");
    let (live, events): (Vec<String>, Events) = read.query(&mut redis).unwrap_or_default();
    let events_of = |call: &String| -> Vec<String> {
        let start = format!("{call} ");
        let is_of_call = |(_, event): &&(String, Vec<String>)| event[1].starts_with(&start);
        events
            .iter()
            .filter(is_of_call)
            .map(|(id, event)| format!("{id} {}", event.join(" ")))
            .collect()
    };
    let violation = |call: &String| Violation {
        invariant: "I4",
        message: format!("{call} is live without an owner: {}", events_of(call).join("; ")),
        subjects: vec![call.clone()],
    };
    let is_known = |call: &&String| known.iter().any(|known| known.id == **call);
    live.iter().filter(|call| !is_known(call)).map(violation).collect()
}

/// I10: every router reports the number of live calls. Leases may end between two reads, so a
/// changed number is read again.
fn check_call_count(deployment: &Deployment) -> Option<Violation> {
    let until = Instant::now() + CONVERGENCE_TIMEOUT;
    let counts = || {
        let count = |router: &super::deployment::RouterInstance| {
            let text = http::get(router.address, "/metrics")
                .map_or(String::new(), |response| response.body);
            let line = text.lines().find(|line| line.starts_with("smart_router_active_calls "));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<usize>().ok())
        };
        deployment.routers.iter().map(count).collect::<Vec<_>>()
    };
    let stored = || deployment.store().connection()?.zcard::<_, usize>("voice:calls").ok();
    loop {
        let before = stored();
        let seen = counts();
        if before.is_some() && before == stored() && seen.iter().all(|count| *count == before) {
            return None;
        }
        if Instant::now() > until {
            let message = format!("{before:?} calls are live, but the routers report {seen:?}");
            return Some(Violation { invariant: "I10", message, subjects: Vec::new() });
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// I3, I11: every pod is in exactly one pool, indexed by its calls.
fn check_indexes(deployment: &Deployment, calls: &[TestCall]) -> Vec<Violation> {
    let until = Instant::now() + CONVERGENCE_TIMEOUT;
    loop {
        let found = index_violations(deployment, calls);
        if found.is_empty() || Instant::now() > until {
            return found;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn index_violations(deployment: &Deployment, calls: &[TestCall]) -> Vec<Violation> {
    let read = || {
        let mut redis = deployment.store().connection().ok_or("Redis has no primary")?;
        let keys = Snapshot::read(&mut redis, "voice:")?;
        let state = keys.state("voice:", &deployment.tiers())?;
        Ok::<_, String>((keys, state))
    };
    // A key of the wrong type cannot be read.
    let (keys, state) = match read() {
        Ok(read) => read,
        Err(message) => return vec![Violation { invariant: "I11", message, subjects: Vec::new() }],
    };
    let mut found = state.violations();
    found.extend(state.overloads());
    let pods = deployment.pods();
    found.extend(pod_violations(&keys, &state, &pods));
    let (now, lease) = (Instant::now(), deployment.setting("LEASE_TTL"));
    let is_live = |call: &TestCall| now < call.at + lease;
    found.extend(call_violations(&state, calls, is_live));
    let convert = |it: invariants::Violation| Violation {
        invariant: it.invariant,
        message: it.message,
        subjects: vec![it.subject],
    };
    found.into_iter().map(convert).collect()
}

fn violation(invariant: &'static str, subject: &str, message: String) -> invariants::Violation {
    invariants::Violation { invariant, message, subject: subject.into() }
}

/// I4, I9, I11: the store contains exactly the existing pods, in the pools of their names, in
/// service, and with a lease while they have calls.
fn pod_violations(keys: &Snapshot, state: &State, pods: &[String]) -> Vec<invariants::Violation> {
    let mut found = Vec::new();
    let listed = state.pools.values().flat_map(|pool| &pool.assigned);
    let removed: BTreeSet<&String> =
        state.pods.keys().chain(listed).filter(|pod| !pods.contains(pod)).collect();
    for pod in removed {
        found.push(violation("I9", pod, format!("{pod} is stored, but does not exist")));
    }
    for pod in pods {
        let tier = pod.split('-').next().unwrap();
        let pool = if tier == "acme" { "merchant:acme".into() } else { format!("pool:{tier}") };
        if state.pools.get(&pool).is_none_or(|pool| !pool.assigned.contains(pod)) {
            found.push(violation("I11", pod, format!("{pod} is not assigned to {pool}")));
        }
        let Some(pod_state) = state.pods.get(pod) else {
            found.push(violation("I4", pod, format!("{pod} is not stored")));
            continue;
        };
        if !pod_state.is_serving {
            found.push(violation("I4", pod, format!("{pod} is not in service")));
        }
        let calls = pod_state.calls.len();
        if keys.exists(&format!("voice:lease:{pod}")) != (calls > 0) {
            let message = format!("{pod} has {calls} calls, but its lease key does not match");
            found.push(violation("I11", pod, message));
        }
    }
    found
}

/// Expected calls on another pod, and unexpected calls. `is_live` excludes calls whose lease may
/// have ended.
fn call_violations(
    state: &State,
    expected: &[TestCall],
    is_live: impl Fn(&TestCall) -> bool,
) -> Vec<invariants::Violation> {
    let mut found = Vec::new();
    for it in expected.iter().filter(|call| is_live(call)) {
        let on = state.calls.get(&it.id);
        if on != Some(&it.pod) {
            let message = format!("{} was allocated on {} and is on {on:?}", it.id, it.pod);
            found.push(violation("I2", &it.pod, message));
        }
    }
    for call in state.calls.keys().filter(|call| expected.iter().all(|it| it.id != **call)) {
        found.push(violation("I4", call, format!("{call} is live without an owner")));
    }
    found
}
