//! Starting pods of the cluster, and the time that they take to become ready.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::cluster::{PodDetails, PodView, StartingPod};
use fleet::{Step, names::PodName};

#[derive(Debug)]
struct Start {
    name: PodName,
    pin: Option<Step>,
    /// First sight of a new pod; `None` for a pod that was there or ready before.
    since: Option<Instant>,
}

/// Pods that this replica's watch has seen start. Every replica keeps it, so that a new leader
/// knows the pods that are starting.
#[derive(Debug, Default)]
pub(crate) struct PodTracker {
    /// By UID.
    starting: HashMap<String, Start>,
    /// The first list of the view has been read.
    is_listed: bool,
    /// Start-up times since they were last taken, in seconds, with the pods' labels.
    start_ups: Vec<(Option<Step>, f64)>,
}

/// Start-up times that are not taken yet, at most: a follower takes none.
const MAX_START_UPS: usize = 1_000;

/// The start-up time of a pod: from its creation until it became ready, as its object says. The
/// object's times are whole seconds of two clocks, so that the observed time is a lower bound.
fn start_up_time(observed: Duration, details: &PodDetails) -> Duration {
    let seconds = details
        .created
        .zip(details.ready_at)
        .and_then(|(created, ready)| ready.checked_sub(created));
    let stated = seconds.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
    stated.map_or(observed, |stated| stated.max(observed))
}

impl PodTracker {
    /// Compares the view with the last one. Called about once a second.
    pub(crate) fn update(&mut self, view: &PodView) {
        if view.lists().0 == 0 {
            return;
        }
        let now = Instant::now();
        let starting = view.starting();
        let there: HashSet<&String> = starting.iter().map(|pod| &pod.uid).collect();
        let left: Vec<String> =
            self.starting.keys().filter(|uid| !there.contains(uid)).cloned().collect();
        for uid in left {
            let Some(start) = self.starting.remove(&uid) else { continue };
            // A pod that is not ready now was deleted before it was ready.
            let Some(details) = view.ready_details(&start.name, &uid) else { continue };
            if let Some(since) = start.since
                && self.start_ups.len() < MAX_START_UPS
            {
                let time = start_up_time(now - since, &details);
                self.start_ups.push((start.pin, time.as_secs_f64()));
            }
        }
        for StartingPod { name, uid, pin, has_been_ready } in starting {
            let since = (self.is_listed && !has_been_ready).then_some(now);
            self.starting.entry(uid).or_insert(Start { name, pin, since });
        }
        self.is_listed = true;
    }

    /// The labels of the starting pods.
    pub(crate) fn starting(&self) -> impl Iterator<Item = Option<&Step>> {
        self.starting.values().map(|start| start.pin.as_ref())
    }

    /// Takes the start-up times since the last time.
    pub(crate) fn take_start_ups(&mut self) -> Vec<(Option<Step>, f64)> {
        std::mem::take(&mut self.start_ups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_up_time_counts_from_the_creation_of_the_pod() {
        let details = |created, ready_at| PodDetails { created, ready_at, ..PodDetails::default() };
        let time = |observed, details: PodDetails| {
            start_up_time(Duration::from_secs(observed), &details).as_secs()
        };
        assert_eq!(time(5, details(Some(1_000), Some(1_040))), 40, "seen late");
        assert_eq!(time(41, details(Some(1_000), Some(1_040))), 41);
        assert_eq!(time(30, details(Some(1_000), Some(990))), 30, "the node's clock is behind");
        assert_eq!(time(30, details(None, Some(1_040))), 30);
        assert_eq!(time(30, details(Some(1_000), None)), 30);
        assert_eq!(time(30, details(Some(i64::MIN), Some(i64::MAX))), 30);
    }
}
