//! Checks during a load that no pod has more calls than its capacity and that no call has two
//! pods, by the router's responses alone.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use serde_json::Value;

use super::http_client::{Connection, Target};
use fleet::tiers::{DocumentSource, TierKind, Tiers};

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// A pod has more calls than its capacity.
    Overbooked { pod: String, cap: usize, calls: Vec<String> },
    /// A repeated allocate request got another pod.
    TwoPods { call: String, pods: [String; 2] },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overbooked { pod, cap, calls } => {
                write!(f, "{pod} has capacity {cap} and was allocated to {}", calls.join(", "))
            }
            Self::TwoPods { call, pods: [one, other] } => {
                write!(f, "{call} has {one} and was allocated {other}")
            }
        }
    }
}

/// Violations with details; the rest is only counted.
const MAX_DETAILED: usize = 20;

pub(super) struct InvariantChecker {
    target: Target,
    tiers: Option<Tiers>,
    pods: Mutex<HashMap<String, Pod>>,
    violations: Mutex<Vec<Violation>>,
    violation_count: AtomicU64,
    repeats: AtomicU64,
    active: AtomicUsize,
    /// Maximum number of calls that had a pod at the same time.
    overlap: AtomicUsize,
}

#[derive(Default)]
struct Pod {
    calls: Vec<String>,
    /// Capacity; read when the pod first has more than one call.
    cap: Option<usize>,
}

impl InvariantChecker {
    pub(super) async fn new(target: &Target) -> anyhow::Result<Self> {
        let mut connection = Connection::new(target);
        let tiers = match connection.get("/api/v1/tiers").await {
            Ok((200, text)) => {
                Tiers::parse(text, DocumentSource::Settings).ok().map(|(tiers, _)| tiers)
            }
            Ok(_) => None,
            Err(failure) => {
                anyhow::bail!("no router answers at {target}: {}", failure.kind())
            }
        };
        Ok(Self {
            target: target.clone(),
            tiers,
            pods: Mutex::default(),
            violations: Mutex::default(),
            violation_count: AtomicU64::new(0),
            repeats: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            overlap: AtomicUsize::new(0),
        })
    }

    /// Records the allocation of a pod to a call. The pod is `None` if it is unknown.
    pub(super) async fn record_allocation(&self, pod: Option<&str>, call: &str) {
        let active = self.active.fetch_add(1, Ordering::Relaxed) + 1;
        self.overlap.fetch_max(active, Ordering::Relaxed);
        let Some(name) = pod else { return };
        let (count, cap) = {
            let mut pods = self.pods();
            if !pods.contains_key(name) {
                pods.insert(name.to_owned(), Pod::default());
            }
            let pod = pods.get_mut(name).expect("just inserted");
            pod.calls.push(call.to_owned());
            (pod.calls.len(), pod.cap)
        };
        if count <= cap.unwrap_or(1) {
            return;
        }
        // The pod of a shared tier may have several calls.
        let cap = match cap {
            Some(cap) => cap,
            None => self.read_capacity(name).await.unwrap_or(1),
        };
        let calls = {
            let mut pods = self.pods();
            let Some(pod) = pods.get_mut(name) else { return };
            pod.cap = Some(cap);
            pod.calls.clone()
        };
        if count > cap {
            self.record_violation(Violation::Overbooked { pod: name.to_owned(), cap, calls });
        }
    }

    /// Records that a call is about to be released: its pod may get another call from now on.
    pub(super) fn record_release(&self, pod: Option<&str>, call: &str) {
        self.active.fetch_sub(1, Ordering::Relaxed);
        let Some(name) = pod else { return };
        if let Some(pod) = self.pods().get_mut(name) {
            pod.calls.retain(|other| other != call);
        }
    }

    /// Records a repeated allocate request.
    pub(super) fn record_repeat(&self, call: &str, before: &str, now: &str) {
        self.repeats.fetch_add(1, Ordering::Relaxed);
        if before != now {
            let pods = [before.to_owned(), now.to_owned()];
            self.record_violation(Violation::TwoPods { call: call.to_owned(), pods });
        }
    }

    pub(super) fn active(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    pub(super) fn overlap(&self) -> usize {
        self.overlap.load(Ordering::Relaxed)
    }

    pub(super) fn repeats(&self) -> u64 {
        self.repeats.load(Ordering::Relaxed)
    }

    /// Returns the number of violations, and the first of them.
    pub(super) fn violations(&self) -> (u64, Vec<Violation>) {
        let first = self.violations.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (self.violation_count.load(Ordering::Relaxed), first)
    }

    /// Reads the capacity of a pod by its tier.
    async fn read_capacity(&self, pod: &str) -> Option<usize> {
        let mut connection = Connection::new(&self.target);
        let (status, text) = connection.get(&format!("/api/v1/pod/{pod}")).await.ok()?;
        let found: Value = serde_json::from_str(text).ok().filter(|_| status == 200)?;
        let pool = found["tier"].as_str()?.parse().ok()?;
        match self.tiers.as_ref()?.kind(&pool)? {
            TierKind::Shared { max_concurrent, .. } => Some(max_concurrent as usize),
            TierKind::Exclusive | TierKind::Dedicated => Some(1),
        }
    }

    fn record_violation(&self, violation: Violation) {
        self.violation_count.fetch_add(1, Ordering::Relaxed);
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        if violations.len() < MAX_DETAILED {
            violations.push(violation);
        }
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<String, Pod>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
