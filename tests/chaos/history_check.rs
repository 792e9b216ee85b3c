//! Whether what was told can be true, by the invariants of the router.

use std::{collections::BTreeMap, time::Duration};

use super::{
    history::{Event, Outcome, Said, Violation, What},
    http::Failure,
};

/// What every answer to a caller has to be there in.
pub(crate) const IN_TIME: Duration = Duration::from_secs(2);

/// How long the store may take to know a pod that it is never seen to know.
const NOT_TOLD: Duration = Duration::from_secs(1);

pub(crate) struct HistoryCheck<'a> {
    pub events: &'a [Event],
    pub lease: Duration,
    pub draining: Duration,
    pub cap: fn(&str) -> usize,
    /// Which router slept or was dead, from when to when.
    pub pauses: Vec<(usize, Duration, Duration)>,
    /// Within which time there is an answer.
    pub in_time: Duration,
}

/// A time in which a call certainly has a pod: from the answer to what may have ended it.
#[derive(Debug, Clone)]
struct Life<'a> {
    call: &'a str,
    pod: &'a str,
    from: Duration,
    to: Duration,
}

impl<'a> HistoryCheck<'a> {
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let lives = self.lives();
        let mut found = self.too_many(&lives);
        found.extend(self.two_pods(&lives));
        found.extend(self.after_drains());
        found.extend(self.renewals(&lives));
        found.extend(self.look_ups(&lives));
        found.extend(self.answers());
        found
    }

    fn about_call(&self, call: &'a str) -> impl Iterator<Item = &'a Event> {
        self.events.iter().filter(move |event| match &event.what {
            What::Allocate { call: other, .. }
            | What::Release { call: other, .. }
            | What::Renew { call: other, .. } => other == call,
            _ => false,
        })
    }

    /// One for every answer that names a pod.
    fn lives(&self) -> Vec<Life<'a>> {
        let mut calls: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in self.events {
            if let What::Allocate { call, .. }
            | What::Release { call, .. }
            | What::Renew { call, .. } = &event.what
            {
                calls.entry(call).or_default().push(event);
            }
        }
        let mut lives = Vec::new();
        for (call, events) in calls {
            for given in &events {
                // A call that was renewed is there, whatever was before.
                let (What::Allocate { outcome: Outcome::Given { pod }, .. }
                | What::Renew { pod: Some(pod), said: Said::Yes, .. }) = &given.what
                else {
                    continue;
                };
                // One that was gone before it was given serves nobody.
                if self.is_gone(pod, given.began) || self.is_young(pod, given.began) {
                    continue;
                }
                let from = given.ended;
                let mut proof = given.began;
                for event in &events {
                    if matches!(event.what, What::Renew { said: Said::Yes, .. })
                        && (given.began..proof + self.lease).contains(&event.began)
                    {
                        proof = proof.max(event.began);
                    }
                }
                let ends = self.events.iter().filter(|event| match &event.what {
                    What::Release { call: other, .. } => other == call,
                    What::PodGone { pod: other } => other == pod,
                    What::Wiped => true,
                    _ => false,
                });
                // What was sent before the answer came may have ended it, too.
                let end = ends.map(|event| event.began).filter(|at| *at >= given.began).min();
                let to = (proof + self.lease).min(end.unwrap_or(Duration::MAX));
                if from < to {
                    lives.push(Life { call, pod, from, to });
                }
            }
        }
        lives
    }

    /// Whether a pod is not there at a time.
    fn is_gone(&self, pod: &str, at: Duration) -> bool {
        let last = self.events.iter().rev().find(|event| {
            event.began <= at
                && matches!(&event.what, What::PodGone { pod: other } | What::PodCame { pod: other } if other == pod)
        });
        last.is_some_and(|event| matches!(event.what, What::PodGone { .. }))
    }

    /// Whether a pod has taken the place of another of its name, and the leader could not
    /// tell the store yet: what is asked of it may be asked of the other.
    fn is_young(&self, pod: &str, at: Duration) -> bool {
        let was_before = self.events.iter().any(|event| {
            event.began <= at && matches!(&event.what, What::PodGone { pod: other } if other == pod)
        });
        let came = |event: &&Event| {
            event.began <= at && matches!(&event.what, What::PodCame { pod: other } if other == pod)
        };
        let Some(came) = self.events.iter().filter(came).map(|event| event.began).max() else {
            return false;
        };
        let known = self.events.iter().find(|event| {
            event.began >= came
                && matches!(&event.what, What::PodKnown { pod: other } if other == pod)
        });
        was_before && at < known.map_or(came + NOT_TOLD, |event| event.began)
    }

    /// I1, I3: more calls on a pod than it may carry.
    fn too_many(&self, lives: &[Life]) -> Vec<Violation> {
        let mut found = Vec::new();
        for life in lives {
            let mut beside: Vec<&str> = lives
                .iter()
                .filter(|other| {
                    other.pod == life.pod && other.from <= life.from && life.from < other.to
                })
                .map(|other| other.call)
                .collect();
            beside.sort_unstable();
            beside.dedup();
            let cap = (self.cap)(life.pod);
            if beside.len() > cap {
                let mut subjects = vec![life.pod.to_owned()];
                subjects.extend(beside.iter().map(|call| call.to_string()));
                found.push(Violation {
                    invariant: if cap == 1 { "I1" } else { "I3" },
                    what: format!(
                        "{} has {} calls at once: {}",
                        life.pod,
                        beside.len(),
                        beside.join(", ")
                    ),
                    subjects,
                });
            }
        }
        found
    }

    /// I2: one call with two pods.
    fn two_pods(&self, lives: &[Life]) -> Vec<Violation> {
        let mut found = Vec::new();
        for (at, one) in lives.iter().enumerate() {
            for other in &lives[at + 1..] {
                if one.call == other.call
                    && one.pod != other.pod
                    && other.from < one.to
                    && one.from < other.to
                {
                    found.push(Violation {
                        invariant: "I2",
                        what: format!("{} has two pods: {} and {}", one.call, one.pod, other.pod),
                        subjects: vec![one.call.to_owned()],
                    });
                }
            }
        }
        found
    }

    /// I5: a call on a pod that took none any more before the call came.
    fn after_drains(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for drain in self.events {
            let (What::Drain { pod, said: Said::Yes } | What::PodRests { pod }) = &drain.what
            else {
                continue;
            };
            if self.is_young(pod, drain.began) {
                continue;
            }
            let is_drain = matches!(drain.what, What::Drain { .. });
            let undrained = self.events.iter().filter(|event| match &event.what {
                What::Undrain { pod: other } if is_drain => other == pod,
                What::PodServes { pod: other } if !is_drain => other == pod,
                What::PodGone { pod: other } | What::PodCame { pod: other } => other == pod,
                What::Wiped => true,
                _ => false,
            });
            let end = undrained.map(|event| event.began).filter(|at| *at >= drain.began).min();
            let longest = if is_drain { drain.began + self.draining } else { Duration::MAX };
            let end = end.unwrap_or(Duration::MAX).min(longest);
            for event in self.events {
                let What::Allocate { call, outcome: Outcome::Given { pod: other }, .. } =
                    &event.what
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
                        what: format!("{call} is given {pod}, which took no calls"),
                        subjects: vec![pod.clone(), call.clone()],
                    });
                }
            }
        }
        found
    }

    /// I6, I7: calls that are looked up and not found, or found although they are over.
    fn look_ups(&self, lives: &[Life]) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let What::LookUp { call, found: at } = &event.what else { continue };
            let life = lives
                .iter()
                .find(|life| life.call == call && life.from < event.began && event.ended < life.to);
            let released = self.events.iter().any(|other| {
                matches!(&other.what, What::Release { call: other, said: Said::Yes } if other == call)
                    && other.ended < event.began
            });
            let wrong = match (life, at) {
                (Some(life), None) => {
                    Some(("I7", format!("{call} on {} can't be looked up", life.pod)))
                }
                (Some(life), Some(pod)) if pod != life.pod => {
                    Some(("I2", format!("{call} was given {} and is on {pod}", life.pod)))
                }
                (None, Some(pod)) if released => {
                    Some(("I6", format!("{call} was released and is on {pod}")))
                }
                _ => None,
            };
            if let Some((invariant, what)) = wrong {
                found.push(Violation { invariant, what, subjects: vec![call.clone()] });
            }
        }
        found
    }

    /// I7: agents who are told that nobody knows the call they have.
    fn renewals(&self, lives: &[Life]) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let What::Renew { call, pod, said: Said::Unknown } = &event.what else { continue };
            let is_live = |life: &&Life| {
                let is_there = pod.as_ref().is_none_or(|pod| pod == life.pod);
                is_there && life.call == call && life.from < event.began && event.ended < life.to
            };
            if let Some(life) = lives.iter().find(is_live) {
                let what = format!("{call} on {} can't be renewed", life.pod);
                found.push(Violation { invariant: "I7", what, subjects: vec![call.clone()] });
            }
        }
        found
    }

    /// Whether the router that was asked slept, or was dead, meanwhile.
    fn slept(&self, event: &Event) -> bool {
        let (What::Allocate { router, .. } | What::Other { router: Some(router), .. }) =
            &event.what
        else {
            return false;
        };
        self.pauses
            .iter()
            .any(|(other, from, to)| other == router && event.began < *to && *from < event.ended)
    }

    /// I8: answers in time that callers understand.
    fn answers(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for event in self.events {
            let (subject, outcome) = match &event.what {
                What::Allocate { call, outcome, .. } => (call.clone(), outcome.clone()),
                What::Other { what, wrong, .. } => {
                    let outcome = wrong.clone().map_or(Outcome::Refused(0), Outcome::Nonsense);
                    (what.clone(), outcome)
                }
                _ => continue,
            };
            let took = event.ended - event.began;
            let wrong = match outcome {
                Outcome::Nonsense(text) if !self.slept(event) => Some(text),
                Outcome::Nonsense(_) => None,
                Outcome::Failed(Failure::Unheard) => None,
                Outcome::Failed(failure) if !self.slept(event) => Some(format!("{failure:?}")),
                Outcome::Failed(_) => None,
                _ if took > self.in_time && !self.slept(event) => {
                    Some(format!("answered after {} ms", took.as_millis()))
                }
                _ => None,
            };
            if let Some(wrong) = wrong {
                let what = format!("{subject}: {wrong}");
                found.push(Violation { invariant: "I8", what, subjects: vec![subject] });
            }
        }
        found
    }
}
