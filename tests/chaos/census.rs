//! When all is well again: is every pod that is there given out, and no other?

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use redis::Commands;
use serde_json::{Value, json};

use super::{
    history::Violation,
    http,
    operators::undrain,
    world::{ROUTERS, World, cap},
};
use testkit::{dice::Dice, snapshot::Snapshot};

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
    world: &World,
    cleared: Instant,
    allowed: Duration,
    is_procedure: bool,
) -> Vec<Violation> {
    let mut dice = Dice(7);
    // (nobody may have heard that the drain is over; others are left alone, because it
    // derives their views again)
    for pod in world.drained() {
        undrain(world, &pod, &mut dice);
    }
    let (mut found, calls) = pods_are_given(world, cleared + allowed, is_procedure);
    if !is_procedure {
        found.extend(count_is_right(world));
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(world, &calls));
    }
    for asked in &calls {
        release(world, &asked.call);
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(world, &[]));
    }
    found
}

fn release(world: &World, call: &str) {
    for number in 0..30 {
        let to = world.seats[number % ROUTERS].address;
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
    world: &World,
    until: Instant,
    is_procedure: bool,
) -> (Vec<Violation>, Vec<Asked>) {
    let mut round = 0;
    loop {
        round += 1;
        let began = Instant::now();
        let pods = world.pods();
        let pods: Vec<&String> =
            pods.iter().filter(|pod| !is_procedure || !pod.starts_with("acme")).collect();
        let expected: BTreeMap<&str, usize> =
            pods.iter().map(|pod| (pod.as_str(), cap(pod))).collect();
        let calls = ask_for_all(world, round, expected.values().sum(), is_procedure);
        // The first leases may have ended before the last call asked: a pod that is given again
        // then is given rightly, and one that is not given may have had no chance.
        let is_within_leases = began.elapsed() < world.setting("LEASE_TTL");
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
            let mut found = nobodys(world, &calls);
            found.extend(not_as_expected(&expected, &given));
            return (found, calls);
        }
        for asked in &calls {
            release(world, &asked.call);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Asks for one call more than there is room for; those that got a pod.
fn ask_for_all(world: &World, round: usize, slots: usize, is_procedure: bool) -> Vec<Asked> {
    let mut calls = Vec::new();
    for number in 0..=slots {
        let call = format!("census-{round}-{number}");
        let body = if number == 0 && !is_procedure {
            json!({"call_sid": call, "merchant_id": "acme"})
        } else {
            json!({"call_sid": call})
        };
        let at = Instant::now();
        let answer = http::post(world.seats[number % ROUTERS].address, "/api/v1/allocate", &body);
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
fn nobodys(world: &World, known: &[Asked]) -> Vec<Violation> {
    type Events = Vec<(String, Vec<String>)>;
    let Some(mut redis) = world.store().connection() else { return Vec::new() };
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
fn count_is_right(world: &World) -> Option<Violation> {
    let until = Instant::now() + COUNTED;
    let counts = || {
        let count = |seat: &super::world::Seat| {
            let text =
                http::get(seat.address, "/metrics").map_or(String::new(), |answer| answer.body);
            let line = text.lines().find(|line| line.starts_with("smart_router_active_calls "));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<usize>().ok())
        };
        world.seats.iter().map(count).collect::<Vec<_>>()
    };
    let stored = || world.store().connection()?.zcard::<_, usize>("voice:calls").ok();
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
fn views_are_right(world: &World, calls: &[Asked]) -> Vec<Violation> {
    let until = Instant::now() + COUNTED;
    loop {
        let found = wrong_views(world, calls);
        if found.is_empty() || Instant::now() > until {
            return found;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn wrong_views(world: &World, calls: &[Asked]) -> Vec<Violation> {
    let read = || {
        let mut redis = world.store().connection().ok_or("no Redis to look at")?;
        Snapshot::read(&mut redis, "voice:")
    };
    let found = read().and_then(|keys| {
        let now = Instant::now();
        let lease = world.setting("LEASE_TTL");
        let live: Vec<&Asked> = calls.iter().filter(|asked| now < asked.at + lease).collect();
        let mut found = wrong_pods(&keys, &world.pods())?;
        found.extend(ghosts(&keys, &world.pods())?);
        found.extend(wrong_calls(&keys, &world.pods(), calls, &live)?);
        Ok(found)
    });
    // (a key of the wrong type can't be read)
    let found = found.unwrap_or_else(|error| vec![(error, String::new())]);
    let violation = |(what, subject)| Violation { invariant: "I11", what, subjects: vec![subject] };
    found.into_iter().map(violation).collect()
}

/// What is wrong, and with what.
type Wrong = Result<Vec<(String, String)>, String>;

/// Where the keys of a pool begin.
fn stem(pool: &str) -> String {
    if pool.starts_with("merchant:") {
        format!("voice:{pool}")
    } else {
        format!("voice:pool:{pool}")
    }
}

/// Pods that are not where their calls say.
fn wrong_pods(keys: &Snapshot, pods: &[String]) -> Wrong {
    let mut found = Vec::new();
    for pod in pods {
        let tier = pod.split('-').next().unwrap();
        let home = if tier == "acme" { "merchant:acme" } else { tier };
        let mut homes = Vec::new();
        for pool in keys.set("voice:pools")? {
            if keys.set(&format!("{}:assigned", stem(&pool)))?.contains(pod) {
                homes.push(pool);
            }
        }
        if homes != [home] {
            found.push((format!("{pod} is assigned to {homes:?}"), pod.clone()));
        }
        let calls = keys.scores(&format!("voice:pod:calls:{pod}"))?.len();
        let is_placed = match tier {
            "basic" => keys.scores("voice:pool:basic:available")?.get(pod) == Some(&(calls as f64)),
            "acme" => keys.set("voice:merchant:acme:pods")?.contains(pod) == (calls == 0),
            _ => keys.set("voice:pool:gold:available")?.contains(pod) == (calls == 0),
        };
        if !is_placed {
            let what = format!("{pod} has {calls} calls and is elsewhere among the available");
            found.push((what, pod.clone()));
        }
        if calls > cap(pod) {
            found.push((format!("{pod} has {calls} calls"), pod.clone()));
        }
        if keys.exists(&format!("voice:lease:{pod}")) != (calls > 0) {
            let what = format!("{pod} has {calls} calls, and its lease is wrong");
            found.push((what, pod.clone()));
        }
    }
    Ok(found)
}

/// Pods in pools that are not there.
fn ghosts(keys: &Snapshot, pods: &[String]) -> Wrong {
    let mut found = Vec::new();
    for pool in keys.set("voice:pools")? {
        let mut there = keys.set(&format!("{}:assigned", stem(&pool)))?;
        there.extend(keys.scores(&format!("{}:out", stem(&pool)))?.into_keys());
        for ghost in there.into_iter().filter(|pod| !pods.contains(pod)) {
            found.push((format!("{ghost} is in {pool}, and is not there"), ghost));
        }
    }
    Ok(found)
}

/// Calls that are on no pod or on another, and calls that are nobody's. Of `asked`, those that
/// are `live` must be there; the lease of another may have ended.
fn wrong_calls(keys: &Snapshot, pods: &[String], asked: &[Asked], live: &[&Asked]) -> Wrong {
    let mut on = BTreeMap::new();
    for pod in pods {
        for call in keys.scores(&format!("voice:pod:calls:{pod}"))?.into_keys() {
            on.insert(call, pod);
        }
    }
    let mut found = Vec::new();
    let known: Vec<String> = keys.scores("voice:calls")?.into_keys().collect();
    if !known.iter().eq(on.keys()) {
        found.push((format!("{known:?} are known, and on pods are {on:?}"), String::new()));
    }
    for Asked { call, pod, .. } in live {
        if on.get(call) != Some(&pod) {
            found.push((
                format!("{call} was given {pod} and is on {:?}", on.get(call)),
                pod.clone(),
            ));
        }
    }
    for call in known.into_iter().filter(|call| asked.iter().all(|asked| asked.call != *call)) {
        found.push((format!("{call} is live, and nobody has it"), call));
    }
    Ok(found)
}
