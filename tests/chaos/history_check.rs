//! Checks a history against the router's invariants.

use std::{collections::BTreeMap, time::Duration};

use super::{
    history::{Action, Event, Outcome, ReplyStatus, Violation},
    http::Failure,
};

/// Maximum response time for callers.
pub(crate) const MAX_RESPONSE_TIME: Duration = Duration::from_secs(2);

/// Maximum time until the store has a new pod, if its registration was not observed.
const MAX_REGISTRATION_TIME: Duration = Duration::from_secs(1);

pub(crate) struct HistoryCheck<'a> {
    pub events: &'a [Event],
    pub lease: Duration,
    pub draining: Duration,
    pub cap: fn(&str) -> usize,
    /// Times when a router was paused or down.
    pub pauses: Vec<(usize, Duration, Duration)>,
    pub max_response_time: Duration,
}

/// A time in which a call certainly has a pod: from the response to the first possible end.
#[derive(Debug, Clone)]
struct Assignment<'a> {
    call: &'a str,
    pod: &'a str,
    from: Duration,
    to: Duration,
}

impl<'a> HistoryCheck<'a> {
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let assignments = self.assignments();
        let mut found = self.over_capacity(&assignments);
        found.extend(self.calls_with_two_pods(&assignments));
        found.extend(self.allocations_out_of_service());
        found.extend(self.failed_renewals(&assignments));
        found.extend(self.wrong_lookups(&assignments));
        found.extend(self.invalid_responses());
        found
    }

    fn about_call(&self, call: &'a str) -> impl Iterator<Item = &'a Event> {
        self.events.iter().filter(move |event| match &event.action {
            Action::Allocate { call: other, .. }
            | Action::Release { call: other, .. }
            | Action::Renew { call: other, .. } => other == call,
            _ => false,
        })
    }

    /// One assignment for every response with a pod.
    fn assignments(&self) -> Vec<Assignment<'a>> {
        let mut calls: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in self.events {
            if let Action::Allocate { call, .. }
            | Action::Release { call, .. }
            | Action::Renew { call, .. } = &event.action
            {
                calls.entry(call).or_default().push(event);
            }
        }
        let mut assignments = Vec::new();
        for (call, events) in calls {
            for allocated in &events {
                // A successful renewal proves that the call is live.
                let (Action::Allocate { outcome: Outcome::Allocated { pod }, .. }
                | Action::Renew { pod: Some(pod), status: ReplyStatus::Success, .. }) =
                    &allocated.action
                else {
                    continue;
                };
                // A pod that was removed before the allocation serves no call.
                if self.is_removed(pod, allocated.began)
                    || self.is_unknown_replacement(pod, allocated.began)
                {
                    continue;
                }
                let from = allocated.ended;
                let mut renewed_at = allocated.began;
                for event in &events {
                    if matches!(event.action, Action::Renew { status: ReplyStatus::Success, .. })
                        && (allocated.began..renewed_at + self.lease).contains(&event.began)
                    {
                        renewed_at = renewed_at.max(event.began);
                    }
                }
                let ends = self.events.iter().filter(|event| match &event.action {
                    Action::Release { call: other, .. } => other == call,
                    Action::PodRemoved { pod: other } => other == pod,
                    Action::StoreLost => true,
                    _ => false,
                });
                // A release that was sent before the response arrived may end the call, too.
                let end = ends.map(|event| event.began).filter(|at| *at >= allocated.began).min();
                let to = (renewed_at + self.lease).min(end.unwrap_or(Duration::MAX));
                if from < to {
                    assignments.push(Assignment { call, pod, from, to });
                }
            }
        }
        assignments
    }

    /// Whether a pod does not exist at a time.
    fn is_removed(&self, pod: &str, at: Duration) -> bool {
        let last = self.events.iter().rev().find(|event| {
            event.began <= at
                && matches!(&event.action, Action::PodRemoved { pod: other } | Action::PodAdded { pod: other } if other == pod)
        });
        last.is_some_and(|event| matches!(event.action, Action::PodRemoved { .. }))
    }

    /// Whether a pod has replaced another of the same name and the store may not know yet:
    /// requests may still refer to the old pod.
    fn is_unknown_replacement(&self, pod: &str, at: Duration) -> bool {
        let was_before = self.events.iter().any(|event| {
            event.began <= at
                && matches!(&event.action, Action::PodRemoved { pod: other } if other == pod)
        });
        let came = |event: &&Event| {
            event.began <= at
                && matches!(&event.action, Action::PodAdded { pod: other } if other == pod)
        };
        let Some(came) = self.events.iter().filter(came).map(|event| event.began).max() else {
            return false;
        };
        let known = self.events.iter().find(|event| {
            event.began >= came
                && matches!(&event.action, Action::PodStored { pod: other } if other == pod)
        });
        was_before && at < known.map_or(came + MAX_REGISTRATION_TIME, |event| event.began)
    }

    /// I1, I3: more calls on a pod than its capacity.
    fn over_capacity(&self, assignments: &[Assignment]) -> Vec<Violation> {
        let mut found = Vec::new();
        for assignment in assignments {
            let mut concurrent: Vec<&str> = assignments
                .iter()
                .filter(|other| {
                    other.pod == assignment.pod
                        && other.from <= assignment.from
                        && assignment.from < other.to
                })
                .map(|other| other.call)
                .collect();
            concurrent.sort_unstable();
            concurrent.dedup();
            let cap = (self.cap)(assignment.pod);
            if concurrent.len() > cap {
                let mut subjects = vec![assignment.pod.to_owned()];
                subjects.extend(concurrent.iter().map(|call| call.to_string()));
                found.push(Violation {
                    invariant: if cap == 1 { "I1" } else { "I3" },
                    message: format!(
                        "{} has {} calls at once: {}",
                        assignment.pod,
                        concurrent.len(),
                        concurrent.join(", ")
                    ),
                    subjects,
                });
            }
        }
        found
    }

    /// I2: one call with two pods.
    fn calls_with_two_pods(&self, assignments: &[Assignment]) -> Vec<Violation> {
        let mut found = Vec::new();
        for (at, one) in assignments.iter().enumerate() {
            for other in &assignments[at + 1..] {
                if one.call == other.call
                    && one.pod != other.pod
                    && other.from < one.to
                    && one.from < other.to
                {
                    found.push(Violation {
                        invariant: "I2",
                        message: format!(
                            "{} has two pods: {} and {}",
                            one.call, one.pod, other.pod
                        ),
                        subjects: vec![one.call.to_owned()],
                    });
                }
            }
        }
        found
    }

    /// I5: a new call on a pod that is drained or out of service.
    fn allocations_out_of_service(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for drain in self.events {
            let (Action::Drain { pod, status: ReplyStatus::Success }
            | Action::PodOutOfService { pod }) = &drain.action
            else {
                continue;
            };
            if self.is_unknown_replacement(pod, drain.began) {
                continue;
            }
            let is_drain = matches!(drain.action, Action::Drain { .. });
            let undrained = self.events.iter().filter(|event| match &event.action {
                Action::Undrain { pod: other } if is_drain => other == pod,
                Action::PodInService { pod: other } if !is_drain => other == pod,
                Action::PodRemoved { pod: other } | Action::PodAdded { pod: other } => other == pod,
                Action::StoreLost => true,
                _ => false,
            });
            let end = undrained.map(|event| event.began).filter(|at| *at >= drain.began).min();
            let longest = if is_drain { drain.began + self.draining } else { Duration::MAX };
            let end = end.unwrap_or(Duration::MAX).min(longest);
            for event in self.events {
                let Action::Allocate { call, outcome: Outcome::Allocated { pod: other }, .. } =
                    &event.action
                else {
                    continue;
                };
                let first = self.about_call(call).map(|event| event.began).min();
                if other == pod
                    && event.ended < end
                    && first.is_some_and(|first| first > drain.ended)
                {
                    found.push(Violation {
                        invariant: "I5",
                        message: format!("{call} is allocated on {pod}, which is out of service"),
                        subjects: vec![pod.clone(), call.clone()],
                    });
                }
            }
        }
        found
    }

    /// I6, I7: live calls that a lookup does not find, and released calls that it finds.
    fn wrong_lookups(&self, assignments: &[Assignment]) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let Action::Lookup { call, found: at } = &event.action else { continue };
            let assignment = assignments.iter().find(|assignment| {
                assignment.call == call
                    && assignment.from < event.began
                    && event.ended < assignment.to
            });
            let released = self.events.iter().any(|other| {
                matches!(&other.action, Action::Release { call: other, status: ReplyStatus::Success } if other == call)
                    && other.ended < event.began
            });
            let wrong = match (assignment, at) {
                (Some(assignment), None) => {
                    Some(("I7", format!("{call} on {} is not found", assignment.pod)))
                }
                (Some(assignment), Some(pod)) if pod != assignment.pod => Some((
                    "I2",
                    format!("{call} was allocated on {} and is on {pod}", assignment.pod),
                )),
                (None, Some(pod)) if released => {
                    Some(("I6", format!("{call} was released and is on {pod}")))
                }
                _ => None,
            };
            if let Some((invariant, message)) = wrong {
                found.push(Violation { invariant, message, subjects: vec![call.clone()] });
            }
        }
        found
    }

    /// I7: renewals of live calls that return 404.
    fn failed_renewals(&self, assignments: &[Assignment]) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let Action::Renew { call, pod, status: ReplyStatus::NotFound } = &event.action else {
                continue;
            };
            let is_live = |assignment: &&Assignment| {
                let is_same_pod = pod.as_ref().is_none_or(|pod| pod == assignment.pod);
                is_same_pod
                    && assignment.call == call
                    && assignment.from < event.began
                    && event.ended < assignment.to
            };
            if let Some(assignment) = assignments.iter().find(is_live) {
                let message = format!("{call} on {} can't be renewed", assignment.pod);
                found.push(Violation { invariant: "I7", message, subjects: vec![call.clone()] });
            }
        }
        found
    }

    /// Whether the router was paused or down during a request.
    fn was_paused(&self, event: &Event) -> bool {
        let (Action::Allocate { router, .. } | Action::Probe { router: Some(router), .. }) =
            &event.action
        else {
            return false;
        };
        self.pauses
            .iter()
            .any(|(other, from, to)| other == router && event.began < *to && *from < event.ended)
    }

    /// I8: late and malformed responses.
    fn invalid_responses(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let (subject, outcome) = match &event.action {
                Action::Allocate { call, outcome, .. } => (call.clone(), outcome.clone()),
                Action::Probe { name, error, .. } => {
                    let outcome = error.clone().map_or(Outcome::Refused(0), Outcome::Malformed);
                    (name.clone(), outcome)
                }
                _ => continue,
            };
            let duration = event.ended - event.began;
            let wrong = match outcome {
                Outcome::Malformed(text) if !self.was_paused(event) => Some(text),
                Outcome::Malformed(_) => None,
                Outcome::Failed(Failure::Unreplicated) => None,
                Outcome::Failed(failure) if !self.was_paused(event) => Some(format!("{failure:?}")),
                Outcome::Failed(_) => None,
                _ if duration > self.max_response_time && !self.was_paused(event) => {
                    Some(format!("answered after {} ms", duration.as_millis()))
                }
                _ => None,
            };
            if let Some(wrong) = wrong {
                let message = format!("{subject}: {wrong}");
                found.push(Violation { invariant: "I8", message, subjects: vec![subject] });
            }
        }
        found
    }
}
