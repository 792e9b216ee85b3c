//! When all is well again: is every pod that is there given out, and no other?

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

/// Within which time after the faults every pod can be given out again.
pub(crate) const SOON: Duration = Duration::from_secs(5);
/// Within which the count of calls is right.
const COUNTED: Duration = Duration::from_secs(10);
/// How long a census may take longer than a lease, round after round.
const GIVE_UP: Duration = Duration::from_secs(60);

/// A call of the census.
struct Asked {
    call: String,
    pod: String,
    /// Its lease can't have begun before.
    at: Instant,
}

pub(crate) fn take(
    deployment: &Deployment,
    cleared: Instant,
    allowed: Duration,
    is_procedure: bool,
) -> Vec<Violation> {
    let mut dice = Dice(7);
    // (nobody may have heard that the drain is over; others are left alone, because it
    // derives their views again)
    for pod in deployment.drained() {
        undrain(deployment, &pod, &mut dice);
    }
    let (mut found, calls) = pods_are_given(deployment, cleared + allowed, is_procedure);
    if !is_procedure {
        found.extend(count_is_right(deployment));
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(deployment, &calls));
    }
    for asked in &calls {
        release(deployment, &asked.call);
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(deployment, &[]));
    }
    found
}

fn release(deployment: &Deployment, call: &str) {
    for number in 0..30 {
        let to = deployment.seats[number % ROUTERS].address;
        let answer = http::post(to, "/api/v1/release", &json!({"call_sid": call}));
        if answer.is_ok_and(|answer| matches!(answer.status, 200 | 404)) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// I4 (and I5, I9 for pods that are not there): what is given when everything is asked
/// for. The calls that have it.
fn pods_are_given(
    deployment: &Deployment,
    until: Instant,
    is_procedure: bool,
) -> (Vec<Violation>, Vec<Asked>) {
    let mut round = 0;
    loop {
        round += 1;
        let began = Instant::now();
        let pods = deployment.pods();
        let pods: Vec<&String> =
            pods.iter().filter(|pod| !is_procedure || !pod.starts_with("acme")).collect();
        let expected: BTreeMap<&str, usize> =
            pods.iter().map(|pod| (pod.as_str(), cap(pod))).collect();
        let calls = ask_for_all(deployment, round, expected.values().sum(), is_procedure);
        // The first leases may have ended before the last call asked: a pod that is given again
        // then is given rightly, and one that is not given may have had no chance.
        let is_within_leases = began.elapsed() < deployment.setting("LEASE_TTL");
        let mut given = BTreeMap::<&str, usize>::new();
        for asked in &calls {
            *given.entry(&asked.pod).or_default() += 1;
        }
        if given == expected {
            return (Vec::new(), calls);
        }
        // More than it may carry is wrong at any time.
        let is_too_many = |(pod, calls): &(&&str, &usize)| **calls > cap(pod);
        let found: Vec<Violation> = given
            .iter()
            .filter(|_| is_within_leases && !is_procedure)
            .filter(is_too_many)
            .map(|(pod, calls)| too_many(pod, *calls))
            .collect();
        if !found.is_empty() {
            return (found, calls);
        }
        let is_over = Instant::now() > until;
        if is_over && (is_within_leases || Instant::now() > until + GIVE_UP) {
            let mut found = nobodys(deployment, &calls);
            found.extend(not_as_expected(&expected, &given));
            return (found, calls);
        }
        for asked in &calls {
            release(deployment, &asked.call);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Asks for one call more than there is room for; those that got a pod.
fn ask_for_all(
    deployment: &Deployment,
    round: usize,
    slots: usize,
    is_procedure: bool,
) -> Vec<Asked> {
    let mut calls = Vec::new();
    for number in 0..=slots {
        let call = format!("census-{round}-{number}");
        let body = if number == 0 && !is_procedure {
            json!({"call_sid": call, "merchant_id": "acme"})
        } else {
            json!({"call_sid": call})
        };
        let at = Instant::now();
        let answer =
            http::post(deployment.seats[number % ROUTERS].address, "/api/v1/allocate", &body);
        let Ok(answer) = answer else { continue };
        let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        if let (200, Some(pod)) = (answer.status, body["pod_name"].as_str()) {
            calls.push(Asked { call, pod: pod.to_owned(), at });
        }
    }
    calls
}

fn too_many(pod: &str, calls: usize) -> Violation {
    Violation {
        invariant: if cap(pod) == 1 { "I1" } else { "I3" },
        what: format!("{pod} is given to {calls} calls, {} at most", cap(pod)),
        subjects: vec![pod.into()],
    }
}

fn not_as_expected(
    expected: &BTreeMap<&str, usize>,
    given: &BTreeMap<&str, usize>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for (pod, cap) in expected {
        let calls = given.get(pod).copied().unwrap_or(0);
        if calls < *cap {
            let what = format!("{pod} is idle and takes {calls} of {cap} calls");
            found.push(Violation { invariant: "I4", what, subjects: vec![pod.to_string()] });
        } else if calls > *cap {
            found.push(too_many(pod, calls));
        }
    }
    for pod in given.keys().filter(|pod| !expected.contains_key(*pod)) {
        let what = format!("{pod} is given, and is not there");
        found.push(Violation { invariant: "I9", what, subjects: vec![pod.to_string()] });
    }
    found
}

/// I4: calls that are live although nobody has them, each with what happened to it.
fn nobodys(deployment: &Deployment, known: &[Asked]) -> Vec<Violation> {
    type Events = Vec<(String, Vec<String>)>;
    let Some(mut redis) = deployment.store().connection() else { return Vec::new() };
    let mut read = redis::pipe();
    read.atomic().zrange("voice:calls", 0, -1);
    read.cmd("XRANGE").arg("voice:events").arg("-").arg("+");
    let (live, told): (Vec<String>, Events) = read.query(&mut redis).unwrap_or_default();
    let of = |call: &String| -> Vec<String> {
        let start = format!("{call} ");
        let is_that = |(_, event): &&(String, Vec<String>)| event[1].starts_with(&start);
        told.iter().filter(is_that).map(|(id, event)| format!("{id} {}", event.join(" "))).collect()
    };
    let violation = |call: &String| Violation {
        invariant: "I4",
        what: format!("{call} is live, and nobody has it: {}", of(call).join("; ")),
        subjects: vec![call.clone()],
    };
    let is_known = |call: &&String| known.iter().any(|asked| asked.call == **call);
    live.iter().filter(|call| !is_known(call)).map(violation).collect()
}

/// I10: every router counts the calls there are. Leases may end meanwhile: a count that has
/// changed is taken again.
fn count_is_right(deployment: &Deployment) -> Option<Violation> {
    let until = Instant::now() + COUNTED;
    let counts = || {
        let count = |seat: &super::deployment::Seat| {
            let text =
                http::get(seat.address, "/metrics").map_or(String::new(), |answer| answer.body);
            let line = text.lines().find(|line| line.starts_with("smart_router_active_calls "));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<usize>().ok())
        };
        deployment.seats.iter().map(count).collect::<Vec<_>>()
    };
    let stored = || deployment.store().connection()?.zcard::<_, usize>("voice:calls").ok();
    loop {
        let before = stored();
        let seen = counts();
        if before.is_some() && before == stored() && seen.iter().all(|count| *count == before) {
            return None;
        }
        if Instant::now() > until {
            let what = format!("{before:?} calls are live, and the routers count {seen:?}");
            return Some(Violation { invariant: "I10", what, subjects: Vec::new() });
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// I3, I11: every pod is in one pool, where its calls say, and nobody else is there.
fn views_are_right(deployment: &Deployment, calls: &[Asked]) -> Vec<Violation> {
    let until = Instant::now() + COUNTED;
    loop {
        let found = wrong_views(deployment, calls);
        if found.is_empty() || Instant::now() > until {
            return found;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn wrong_views(deployment: &Deployment, calls: &[Asked]) -> Vec<Violation> {
    let read = || {
        let mut redis = deployment.store().connection().ok_or("no Redis to look at")?;
        let keys = Snapshot::read(&mut redis, "voice:")?;
        let state = keys.state("voice:", &deployment.tiers())?;
        Ok::<_, String>((keys, state))
    };
    // (a key of the wrong type can't be read)
    let (keys, state) = match read() {
        Ok(read) => read,
        Err(what) => return vec![Violation { invariant: "I11", what, subjects: Vec::new() }],
    };
    let mut found = state.violations();
    found.extend(state.overloads());
    let pods = deployment.pods();
    found.extend(wrong_pods(&keys, &state, &pods));
    let (now, lease) = (Instant::now(), deployment.setting("LEASE_TTL"));
    let is_live = |asked: &Asked| now < asked.at + lease;
    found.extend(wrong_calls(&state, calls, is_live));
    let violation = |it: invariants::Violation| Violation {
        invariant: it.invariant,
        what: it.what,
        subjects: vec![it.subject],
    };
    found.into_iter().map(violation).collect()
}

fn wrong(invariant: &'static str, subject: &str, what: String) -> invariants::Violation {
    invariants::Violation { invariant, what, subject: subject.into() }
}

/// I4, I9, I11: the pods of the store are those that are there, in the pools of their names, in
/// service, and with a lease while they have calls.
fn wrong_pods(keys: &Snapshot, state: &State, pods: &[String]) -> Vec<invariants::Violation> {
    let mut found = Vec::new();
    let listed = state.pools.values().flat_map(|pool| &pool.assigned);
    let ghosts: BTreeSet<&String> =
        state.pods.keys().chain(listed).filter(|pod| !pods.contains(pod)).collect();
    for ghost in ghosts {
        found.push(wrong("I9", ghost, format!("{ghost} is known, and is not there")));
    }
    for pod in pods {
        let tier = pod.split('-').next().unwrap();
        let home = if tier == "acme" { "merchant:acme".into() } else { format!("pool:{tier}") };
        if state.pools.get(&home).is_none_or(|pool| !pool.assigned.contains(pod)) {
            found.push(wrong("I11", pod, format!("{pod} is not assigned to {home}")));
        }
        let Some(shown) = state.pods.get(pod) else {
            found.push(wrong("I4", pod, format!("{pod} is not known")));
            continue;
        };
        if !shown.is_serving {
            found.push(wrong("I4", pod, format!("{pod} is not in service")));
        }
        let calls = shown.calls.len();
        if keys.exists(&format!("voice:lease:{pod}")) != (calls > 0) {
            let what = format!("{pod} has {calls} calls, and its lease is wrong");
            found.push(wrong("I11", pod, what));
        }
    }
    found
}

/// Calls of the census that are elsewhere, and calls that are nobody's. The lease of a call that
/// is not live any more may have ended.
fn wrong_calls(
    state: &State,
    asked: &[Asked],
    is_live: impl Fn(&Asked) -> bool,
) -> Vec<invariants::Violation> {
    let mut found = Vec::new();
    for it in asked.iter().filter(|asked| is_live(asked)) {
        let on = state.calls.get(&it.call);
        if on != Some(&it.pod) {
            let what = format!("{} was given {} and is on {on:?}", it.call, it.pod);
            found.push(wrong("I2", &it.pod, what));
        }
    }
    for call in state.calls.keys().filter(|call| asked.iter().all(|it| it.call != **call)) {
        found.push(wrong("I4", call, format!("{call} is live, and nobody has it")));
    }
    found
}
