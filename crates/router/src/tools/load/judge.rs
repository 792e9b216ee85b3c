//! Watches, while the load runs, that no pod carries more calls than it may and
//! that no call has two pods. It knows only what the router answered.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use serde_json::Value;

use super::wire::{Connection, Target};
use fleet::tiers::{Kind, Origin, Tiers};

/// What must not happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// A pod has more calls than it may.
    Overbooked { pod: String, cap: usize, calls: Vec<String> },
    /// A call that asked again was given another pod.
    TwoPods { call: String, pods: [String; 2] },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overbooked { pod, cap, calls } => {
                write!(f, "{pod} may carry {cap} and was given to {}", calls.join(", "))
            }
            Self::TwoPods { call, pods: [one, other] } => {
                write!(f, "{call} has {one} and was given {other}")
            }
        }
    }
}

/// Violations that are kept in words; the rest is counted.
const KEPT: usize = 20;

pub(super) struct Judge {
    target: Target,
    tiers: Option<Tiers>,
    pods: Mutex<HashMap<String, Pod>>,
    violations: Mutex<Vec<Violation>>,
    violated: AtomicU64,
    repeats: AtomicU64,
    held: AtomicUsize,
    /// The most calls that had a pod at the same time.
    overlap: AtomicUsize,
}

#[derive(Default)]
struct Pod {
    calls: Vec<String>,
    /// How many it may carry; asked when it first has more than one.
    cap: Option<usize>,
}

impl Judge {
    pub(super) async fn new(target: &Target) -> anyhow::Result<Self> {
        let mut connection = Connection::new(target);
        let tiers = match connection.get("/api/v1/tiers").await {
            Ok((200, text)) => Tiers::parse(text, Origin::Settings).ok().map(|(tiers, _)| tiers),
            Ok(_) => None,
            Err(failure) => {
                anyhow::bail!("no router answers at http://{}: {}", target.host, failure.kind())
            }
        };
        Ok(Self {
            target: target.clone(),
            tiers,
            pods: Mutex::default(),
            violations: Mutex::default(),
            violated: AtomicU64::new(0),
            repeats: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            overlap: AtomicUsize::new(0),
        })
    }

    /// A call was given a pod.
    pub(super) async fn begins(&self, name: &str, call: &str) {
        let held = self.held.fetch_add(1, Ordering::Relaxed) + 1;
        self.overlap.fetch_max(held, Ordering::Relaxed);
        let (count, cap) = {
            let mut pods = self.pods();
            if !pods.contains_key(name) {
                pods.insert(name.to_owned(), Pod::default());
            }
            let pod = pods.get_mut(name).expect("just put there");
            pod.calls.push(call.to_owned());
            (pod.calls.len(), pod.cap)
        };
        if count <= cap.unwrap_or(1) {
            return;
        }
        // What it carries now may be what only its tier allows.
        let cap = match cap {
            Some(cap) => cap,
            None => self.ask_for_cap(name).await.unwrap_or(1),
        };
        let calls = {
            let mut pods = self.pods();
            let Some(pod) = pods.get_mut(name) else { return };
            pod.cap = Some(cap);
            pod.calls.clone()
        };
        if count > cap {
            self.violation(Violation::Overbooked { pod: name.to_owned(), cap, calls });
        }
    }

    /// A call is about to give its pod back: from now on it may be another's.
    pub(super) fn ends(&self, name: &str, call: &str) {
        self.held.fetch_sub(1, Ordering::Relaxed);
        if let Some(pod) = self.pods().get_mut(name) {
            pod.calls.retain(|other| other != call);
        }
    }

    /// A call that has a pod asked again.
    pub(super) fn again(&self, call: &str, before: &str, now: &str) {
        self.repeats.fetch_add(1, Ordering::Relaxed);
        if before != now {
            let pods = [before.to_owned(), now.to_owned()];
            self.violation(Violation::TwoPods { call: call.to_owned(), pods });
        }
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    pub(super) fn overlap(&self) -> usize {
        self.overlap.load(Ordering::Relaxed)
    }

    pub(super) fn repeats(&self) -> u64 {
        self.repeats.load(Ordering::Relaxed)
    }

    /// How many there were, and the first of them.
    pub(super) fn violations(&self) -> (u64, Vec<Violation>) {
        let kept = self.violations.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (self.violated.load(Ordering::Relaxed), kept)
    }

    /// How many calls the pod's tier lets it carry.
    async fn ask_for_cap(&self, pod: &str) -> Option<usize> {
        let mut connection = Connection::new(&self.target);
        let (status, text) = connection.get(&format!("/api/v1/pod/{pod}")).await.ok()?;
        let found: Value = serde_json::from_str(text).ok().filter(|_| status == 200)?;
        let pool = found["tier"].as_str()?.parse().ok()?;
        match self.tiers.as_ref()?.kind(&pool)? {
            Kind::Shared { max_concurrent, .. } => Some(max_concurrent as usize),
            Kind::Exclusive | Kind::Dedicated => Some(1),
        }
    }

    fn violation(&self, violation: Violation) {
        self.violated.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(violation);
        }
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<String, Pod>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
