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
use crate::support::chance::Dice;

/// Within which time after the faults every pod can be given out again.
pub const SOON: Duration = Duration::from_secs(5);
/// Within which the count of calls is right.
const COUNTED: Duration = Duration::from_secs(10);

pub fn take(
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
        found.extend(count_is_right(world, calls.len()));
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(world, Load::Full));
    }
    for call in &calls {
        release(world, call);
    }
    if found.is_empty() && !is_procedure {
        found.extend(views_are_right(world, Load::Idle));
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
) -> (Vec<Violation>, Vec<String>) {
    let mut round = 0;
    loop {
        round += 1;
        let began = Instant::now();
        let pods = world.pods();
        let pods: Vec<&String> =
            pods.iter().filter(|pod| !is_procedure || !pod.starts_with("acme")).collect();
        let expected: BTreeMap<&str, usize> =
            pods.iter().map(|pod| (pod.as_str(), cap(pod))).collect();
        let (mut given, mut calls) = (BTreeMap::<String, usize>::new(), Vec::new());
        let slots: usize = expected.values().sum();
        // One more than there is.
        for number in 0..=slots {
            let call = format!("census-{round}-{number}");
            let merchant = number == 0 && !is_procedure;
            let body = if merchant {
                json!({"call_sid": call, "merchant_id": "acme"})
            } else {
                json!({"call_sid": call})
            };
            let answer =
                http::post(world.seats[number % ROUTERS].address, "/api/v1/allocate", &body);
            let Ok(answer) = answer else { continue };
            let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
            if let (200, Some(pod)) = (answer.status, body["pod_name"].as_str()) {
                *given.entry(pod.to_owned()).or_default() += 1;
                calls.push(call);
            }
        }
        let is_right = given.len() == expected.len()
            && given.iter().all(|(pod, calls)| expected.get(pod.as_str()) == Some(calls));
        if is_right {
            return (Vec::new(), calls);
        }
        // More than it may carry is wrong at any time.
        let too_many = |(pod, calls): (&String, &usize)| {
            let is_too_many = *calls > cap(pod) && began.elapsed() < world.setting("LEASE_TTL");
            is_too_many.then(|| Violation {
                invariant: if cap(pod) == 1 { "I1" } else { "I3" },
                what: format!("{pod} is given to {calls} calls, {} at most", cap(pod)),
                subjects: vec![pod.clone()],
            })
        };
        let found: Vec<Violation> = given.iter().filter_map(too_many).collect();
        if !found.is_empty() && !is_procedure {
            return (found, calls);
        }
        if Instant::now() > until {
            let mut found = nobodys(world, &calls);
            for (pod, cap) in &expected {
                let calls = given.get(*pod).copied().unwrap_or(0);
                if calls < *cap {
                    let what = format!("{pod} is idle and takes {calls} of {cap} calls");
                    found.push(Violation {
                        invariant: "I4",
                        what,
                        subjects: vec![pod.to_string()],
                    });
                } else if calls > *cap {
                    let what = format!("{pod} is given to {calls} calls, {cap} at most");
                    found.push(Violation {
                        invariant: "I1",
                        what,
                        subjects: vec![pod.to_string()],
                    });
                }
            }
            for pod in given.keys().filter(|pod| !expected.contains_key(pod.as_str())) {
                let what = format!("{pod} is given, and is not there");
                found.push(Violation { invariant: "I9", what, subjects: vec![pod.clone()] });
            }
            return (found, calls);
        }
        for call in &calls {
            release(world, call);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// I4: calls that are live although nobody has them, each with what happened to it.
fn nobodys(world: &World, known: &[String]) -> Vec<Violation> {
    let Some(mut redis) = world.store().connection() else { return Vec::new() };
    let live: Vec<String> = redis.zrange("voice:calls", 0, -1).unwrap_or_default();
    let told: Vec<(String, Vec<String>)> = redis::cmd("XRANGE")
        .arg("voice:events")
        .arg("-")
        .arg("+")
        .query(&mut redis)
        .unwrap_or_default();
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
    live.iter().filter(|call| !known.contains(call)).map(violation).collect()
}

/// I10: every router counts the calls there are.
fn count_is_right(world: &World, calls: usize) -> Option<Violation> {
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
    loop {
        let seen = counts();
        if seen.iter().all(|count| *count == Some(calls)) {
            return None;
        }
        if Instant::now() > until {
            let what = format!("{calls} calls are live, and the routers count {seen:?}");
            return Some(Violation { invariant: "I10", what, subjects: Vec::new() });
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// How many calls there are: as many as there can be, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Full,
    Idle,
}

/// I3, I11: every pod is in one pool, where its calls say, and nobody else is there.
fn views_are_right(world: &World, load: Load) -> Vec<Violation> {
    let until = Instant::now() + Duration::from_secs(3);
    loop {
        let found = wrong_views(world, load);
        if found.is_empty() || Instant::now() > until {
            return found;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn wrong_views(world: &World, load: Load) -> Vec<Violation> {
    let violation =
        |what: String, pod: &str| Violation { invariant: "I11", what, subjects: vec![pod.into()] };
    let Some(mut redis) = world.store().connection() else {
        return vec![violation("no Redis to look at".into(), "")];
    };
    let mut found = Vec::new();
    let pools: Vec<String> = redis.smembers("voice:pools").unwrap_or_default();
    for pod in world.pods() {
        let tier = pod.split('-').next().unwrap();
        let home = if tier == "acme" { "merchant:acme".to_owned() } else { tier.to_owned() };
        let stem = |pool: &str| {
            if pool.starts_with("merchant:") {
                format!("voice:{pool}")
            } else {
                format!("voice:pool:{pool}")
            }
        };
        let holds = |redis: &mut redis::Connection, pool: &str| {
            redis.sismember(format!("{}:assigned", stem(pool)), &pod).unwrap_or(false)
        };
        let homes: Vec<&String> = pools.iter().filter(|pool| holds(&mut redis, pool)).collect();
        if homes != [&home] {
            found.push(violation(format!("{pod} is assigned to {homes:?}"), &pod));
        }
        let due = if load == Load::Full { cap(&pod) } else { 0 };
        let is_placed = match tier {
            "basic" => {
                redis.zscore("voice:pool:basic:available", &pod).unwrap_or(None) == Some(due as f64)
            }
            "acme" => redis.sismember("voice:merchant:acme:pods", &pod) == Ok(due == 0),
            _ => redis.sismember("voice:pool:gold:available", &pod) == Ok(due == 0),
        };
        if !is_placed {
            let what = format!("{pod} has {due} calls and is elsewhere among the available");
            found.push(violation(what, &pod));
        }
        let calls: usize = redis.zcard(format!("voice:pod:calls:{pod}")).unwrap_or(0);
        if calls != due {
            found.push(violation(format!("{pod} has {calls} calls, and {due} are known"), &pod));
        }
        if redis.exists(format!("voice:lease:{pod}")) != Ok(due > 0) {
            found.push(violation(format!("{pod} has {due} calls, and its lease is wrong"), &pod));
        }
    }
    let pods = world.pods();
    for pool in &pools {
        let stem = match pool.strip_prefix("merchant:") {
            Some(_) => format!("voice:{pool}"),
            None => format!("voice:pool:{pool}"),
        };
        let mut there: Vec<String> = redis.smembers(format!("{stem}:assigned")).unwrap_or_default();
        there.extend(
            redis.zrange::<_, Vec<String>>(format!("{stem}:out"), 0, -1).unwrap_or_default(),
        );
        for ghost in there.iter().filter(|pod| !pods.contains(pod)) {
            found.push(violation(format!("{ghost} is in {pool}, and is not there"), ghost));
        }
    }
    let known: usize = redis.zcard("voice:calls").unwrap_or(0);
    let due: usize = pods.iter().map(|pod| if load == Load::Full { cap(pod) } else { 0 }).sum();
    if known != due {
        found.push(violation(format!("{known} calls are known, and there are {due}"), ""));
    }
    found
}
