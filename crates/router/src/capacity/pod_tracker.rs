//! Starting pods of the cluster, and the time that they take to become ready.

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use crate::cluster::{PodView, StartingPod};
use fleet::{merchant::Step, names::PodName};

#[derive(Debug)]
struct Start {
    name: PodName,
    pin: Option<Step>,
    /// Creation as this replica's watch saw it; `None` for a pod that was there or ready before.
    since: Option<Instant>,
}

/// Pods that this replica's watch has seen start. Every replica keeps it, so that a new leader
/// knows the pods that are starting.
#[derive(Debug, Default)]
pub struct PodTracker {
    /// By UID.
    starting: HashMap<String, Start>,
    /// The first list of the view has been read.
    is_listed: bool,
    /// Start-up times since they were last taken, in seconds, with the pods' labels.
    start_ups: Vec<(Option<Step>, f64)>,
}

/// Start-up times that are not taken yet, at most: a follower takes none.
const MAX_START_UPS: usize = 1_000;

impl PodTracker {
    /// Compares the view with the last one. Called about once a second.
    pub fn update(&mut self, view: &PodView) {
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
            if let Some(since) = start.since.filter(|_| view.is_ready(&start.name, &uid))
                && self.start_ups.len() < MAX_START_UPS
            {
                self.start_ups.push((start.pin, (now - since).as_secs_f64()));
            }
        }
        for StartingPod { name, uid, pin, has_been_ready } in starting {
            let since = (self.is_listed && !has_been_ready).then_some(now);
            self.starting.entry(uid).or_insert(Start { name, pin, since });
        }
        self.is_listed = true;
    }

    /// The labels of the starting pods.
    pub fn starting(&self) -> impl Iterator<Item = Option<&Step>> {
        self.starting.values().map(|start| start.pin.as_ref())
    }

    /// Takes the start-up times since the last time.
    pub fn take_start_ups(&mut self) -> Vec<(Option<Step>, f64)> {
        std::mem::take(&mut self.start_ups)
    }
}
