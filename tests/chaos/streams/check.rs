//! Checks of the histories of callers and agents, and of the pods afterwards.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    World,
    record::{AgentStream, CallEnd, CallerStream, Disturbance, PodReport, Recorder},
};
use crate::{history::Violation, http};

/// An agent may notice the end of a stream this much later than its gateway and the next caller.
const MAX_LAG: Duration = Duration::from_millis(300);

pub(crate) fn violation(invariant: &'static str, subject: &str, message: String) -> Violation {
    Violation { invariant, message, subjects: vec![subject.to_owned()] }
}

/// The end of a stream; streams that are still open have none.
fn end_of(stream: &AgentStream) -> Duration {
    stream.to.unwrap_or(Duration::MAX)
}

/// The time in which two streams were open at once.
fn overlap(one: &AgentStream, other: &AgentStream) -> Option<(Duration, Duration)> {
    let (from, to) = (one.from.max(other.from), end_of(one).min(end_of(other)));
    (from + MAX_LAG < to).then_some((from, to))
}

pub(crate) fn histories(recorder: &Recorder) -> Vec<Violation> {
    let agents = recorder.agent_streams();
    let callers = recorder.callers.lock().unwrap().clone();
    let reports = recorder.reports.lock().unwrap().clone();
    let disturbances = recorder.disturbances.lock().unwrap().clone();
    let check = Check { agents: &agents, callers: &callers, disturbances: &disturbances };
    let mut found = check.deviations();
    found.extend(check.ends());
    found.extend(check.overlaps());
    found.extend(check.returns());
    for report in &reports {
        found.extend(check.report(report));
    }
    found
}

struct Check<'a> {
    agents: &'a [AgentStream],
    callers: &'a [CallerStream],
    disturbances: &'a [Disturbance],
}

impl Check<'_> {
    /// Whether a disturbance with a property contains a time, for a gateway of these calls.
    fn is_disturbed(
        &self,
        calls: &[&str],
        (from, to): (Duration, Duration),
        has: impl Fn(&Disturbance) -> bool,
    ) -> bool {
        let is_at = |gateway: usize| {
            self.callers.iter().any(|it| it.gateway == gateway && calls.contains(&&*it.call))
        };
        self.disturbances
            .iter()
            .any(|it| has(it) && it.from <= from && to <= it.to && it.gateway.is_none_or(is_at))
    }

    /// S1, S3, S4, I12: deviations that callers and agents noticed themselves.
    fn deviations(&self) -> Vec<Violation> {
        let agents = self.agents.iter().map(|it| (&it.call, &it.errors));
        let callers = self.callers.iter().map(|it| (&it.call, &it.errors));
        let mut found = Vec::new();
        for (call, errors) in agents.chain(callers) {
            for (invariant, message) in errors {
                found.push(violation(invariant, call, message.clone()));
            }
        }
        found
    }

    /// S2: streams that were refused or cut.
    fn ends(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for stream in self.callers {
            let is_excused = |it: &Disturbance| match stream.end {
                CallEnd::Refused(_) => it.refuses,
                CallEnd::Cut(_) => it.cuts,
                _ => false,
            };
            let at = match stream.end {
                CallEnd::Ended => continue,
                CallEnd::Refused(_) => (stream.opened, stream.opened),
                _ => (stream.ended, stream.ended),
            };
            if !self.is_disturbed(&[&stream.call], at, is_excused) {
                let CallerStream { call, gateway, end, .. } = stream;
                let message = format!("the stream of {call} at gateway {gateway}: {end:?}");
                found.push(violation("S2", call, message));
            }
        }
        found
    }

    /// I1, I12: a pod with the streams of two calls, and a call with two streams.
    fn overlaps(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for (at, one) in self.agents.iter().enumerate() {
            for other in &self.agents[at + 1..] {
                let Some((from, to)) = overlap(one, other) else { continue };
                let (is_pod, is_call) = (one.pod == other.pod, one.call == other.call);
                let invariant = match (is_pod, is_call) {
                    (_, true) => "I12",
                    (true, false) => "I1",
                    _ => continue,
                };
                let calls = [&*one.call, &*other.call];
                if self.is_disturbed(&calls, (from, to), |it| it.overlaps && !is_call) {
                    continue;
                }
                let message = format!(
                    "{} serves {} and {} serves {} from {} to {} ms",
                    one.pod,
                    one.call,
                    other.pod,
                    other.call,
                    from.as_millis(),
                    to.min(Duration::from_secs(999)).as_millis()
                );
                let subjects = vec![one.pod.clone(), one.call.clone(), other.call.clone()];
                found.push(Violation { invariant, message, subjects });
            }
        }
        found
    }

    /// I13, I14: a router that gives a pod with a stream to another call, or names another pod than
    /// the one of the stream.
    fn report(&self, report: &PodReport) -> Option<Violation> {
        let is_certain =
            |it: &&AgentStream| it.from < report.began && report.ended + MAX_LAG < end_of(it);
        let mut streams = self.agents.iter().filter(is_certain);
        let (invariant, stream) = if report.is_allocation {
            let is_other =
                |it: &&AgentStream| Some(&it.pod) == report.pod.as_ref() && it.call != report.call;
            ("I13", streams.find(is_other)?)
        } else {
            let is_other =
                |it: &&AgentStream| Some(&it.pod) != report.pod.as_ref() && it.call == report.call;
            ("I14", streams.find(is_other)?)
        };
        let calls = [&*report.call, &*stream.call];
        if self.is_disturbed(&calls, (report.began, report.ended), |it| it.overlaps) {
            return None;
        }
        let message = format!(
            "{} is on {:?} by the router, and {} serves {}",
            report.call, report.pod, stream.pod, stream.call
        );
        let subjects = vec![report.call.clone(), stream.pod.clone(), stream.call.clone()];
        Some(Violation { invariant, message, subjects })
    }

    /// S4: a call that comes back gets its pod again.
    fn returns(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for returned in self.callers.iter().filter(|it| it.is_return) {
            let of_call = self.agents.iter().filter(|it| it.call == returned.call);
            let (before, after): (Vec<_>, Vec<_>) =
                of_call.partition(|it| it.from < returned.opened && end_of(it) < returned.ended);
            let (Some(before), Some(after)) = (before.last(), after.first()) else { continue };
            if before.pod != after.pod {
                let call = &returned.call;
                let message =
                    format!("{call} was on {} and came back to {}", before.pod, after.pod);
                found.push(violation("S4", call, message));
            }
        }
        found
    }
}

/// I4, S4: all pods can be allocated, each once, and pods without a fault have no failures.
pub(crate) fn free_pods(world: &World, healed_at: Instant) -> Vec<Violation> {
    let until = healed_at + world.scenario.recovery_time;
    let expected: BTreeSet<String> = world.agents.iter().map(|it| it.name.clone()).collect();
    let faulty = world.recorder.faulty_pods.lock().unwrap().clone();
    let mut found = healthy_pods(world, &faulty);
    for round in 0.. {
        let calls: Vec<String> =
            (0..=world.agents.len()).map(|number| format!("final-{round}-{number}")).collect();
        let pods: Vec<String> = calls.iter().filter_map(|call| allocate(world, call)).collect();
        for call in &calls {
            let body = json!({"call_sid": call});
            let _ = http::post(world.gateways[0].process.address, "/api/v1/release", &body);
        }
        let distinct: BTreeSet<String> = pods.iter().cloned().collect();
        if distinct.len() != pods.len() {
            found.push(violation("I1", "", format!("a pod was allocated twice: {pods:?}")));
            return found;
        }
        let missing: Vec<&String> = expected.difference(&distinct).collect();
        // At most a fifth of a pool is quarantined, after failures.
        let may_be_quarantined = missing.iter().all(|pod| faulty.contains(pod))
            && missing.len() * 5 <= world.agents.len();
        if may_be_quarantined {
            return found;
        }
        if Instant::now() > until {
            found.push(violation("I4", missing[0], format!("{missing:?} cannot be allocated")));
            return found;
        }
        thread::sleep(Duration::from_millis(100));
    }
    found
}

fn allocate(world: &World, call: &str) -> Option<String> {
    let body = json!({"call_sid": call});
    let address = world.gateways[0].process.address;
    let answer = http::post(address, "/api/v1/allocate", &body).ok()?;
    let answer: Value = serde_json::from_str(&answer.body).ok()?;
    answer["pod_name"].as_str().map(str::to_owned)
}

/// S4: no failure is recorded for a pod without a fault.
fn healthy_pods(world: &World, faulty: &[String]) -> Vec<Violation> {
    let failures = |pod: &str| -> u64 {
        let path = format!("/api/v1/pod/{pod}");
        let answer = http::get(world.gateways[0].process.address, &path).ok();
        let pod = answer.and_then(|it| serde_json::from_str::<Value>(&it.body).ok());
        pod.and_then(|pod| pod["failures"].as_u64()).unwrap_or(0)
    };
    let pods = world.agents.iter().map(|agent| &agent.name).filter(|pod| !faulty.contains(pod));
    let pods = pods.map(|pod| (pod, failures(pod))).filter(|(_, failures)| *failures > 0);
    pods.map(|(pod, failures)| violation("S4", pod, format!("{pod} has {failures} failures")))
        .collect()
}
