//! The invariants of one state (docs/reliability.md), whichever store it was read from.

use std::collections::{BTreeMap, BTreeSet};

use crate::{CallQuery, Fleet, Found, PodStatus, tiers::Kind};

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: &'static str,
    pub what: String,
    /// The pod or the call that it is about.
    pub subject: String,
}

/// Pods, pools and calls at one moment.
#[derive(Debug, Default)]
pub struct State {
    pub pods: BTreeMap<String, PodState>,
    /// By their names as a `source_pool`: `pool:gold`, `merchant:acme`.
    pub pools: BTreeMap<String, PoolState>,
    /// The pod of each live call.
    pub calls: BTreeMap<String, String>,
}

#[derive(Debug, Default)]
pub struct PodState {
    pub is_serving: bool,
    pub calls: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub struct PoolState {
    /// `None` for a tier that is no more.
    pub kind: Option<Kind>,
    pub assigned: BTreeSet<String>,
    /// Pods that may be given a call, each with its live calls; an exclusive one has none.
    pub available: BTreeMap<String, usize>,
}

impl State {
    /// The state of a fleet, as its queries show it.
    pub fn of(fleet: &Fleet) -> Self {
        let mut state = Self::default();
        for pool in fleet.status().pools {
            let available = fleet.available(&pool.pool).into_iter();
            let available = available.map(|(pod, calls)| (pod.to_string(), calls)).collect();
            let shown = PoolState { kind: pool.kind, assigned: BTreeSet::new(), available };
            state.pools.insert(pool.pool.to_string(), shown);
        }
        for pod in fleet.pods() {
            let name = pod.name.to_string();
            if let Some(pool) = &pod.pool {
                state.pools.entry(pool.to_string()).or_default().assigned.insert(name.clone());
            }
            let calls = pod.calls.iter().map(|call| call.call.to_string()).collect();
            state.pods.insert(name, PodState { is_serving: is_serving(&pod), calls });
        }
        let all = fleet.calls(&CallQuery { most: usize::MAX, ..CallQuery::default() });
        for found in all.calls {
            if let Found::Live(call) = found {
                state.calls.insert(call.call.to_string(), call.pod.to_string());
            }
        }
        state
    }

    /// What is wrong with it. Calls beyond the cap of a pod are not: another tier table may
    /// have come after them ([`State::overloads`]).
    pub fn violations(&self) -> Vec<Violation> {
        let mut found = self.wrong_calls();
        found.extend(self.wrong_homes());
        for (name, pool) in &self.pools {
            found.extend(self.wrong_view(name, pool));
        }
        found
    }

    /// I1, I3: pods with more calls than they may carry.
    pub fn overloads(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for pool in self.pools.values() {
            let cap = pool.kind.map_or(usize::MAX, |kind| kind.cap() as usize);
            for name in &pool.assigned {
                let calls = self.pods.get(name).map_or(0, |pod| pod.calls.len());
                if calls > cap {
                    let what = format!("{name} has {calls} calls, {cap} at most");
                    let invariant = if cap == 1 { "I1" } else { "I3" };
                    found.push(Violation { invariant, what, subject: name.clone() });
                }
            }
        }
        found
    }

    /// I2, I6: every live call is on one pod, and pods have no other calls.
    fn wrong_calls(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut wrong = |invariant, call: &String, what| {
            found.push(Violation { invariant, what, subject: call.clone() });
        };
        let mut on: BTreeMap<&String, &String> = BTreeMap::new();
        for (name, pod) in &self.pods {
            for call in &pod.calls {
                if let Some(other) = on.insert(call, name) {
                    wrong("I2", call, format!("{call} is on {other} and on {name}"));
                }
                if self.calls.get(call) != Some(name) {
                    let known = self.calls.get(call);
                    wrong("I6", call, format!("{name} has {call}, which is live on {known:?}"));
                }
            }
        }
        for (call, pod) in self.calls.iter().filter(|(call, _)| !on.contains_key(call)) {
            wrong("I6", call, format!("{call} is live on {pod}, which does not have it"));
        }
        found
    }

    /// I11: a pod in service is in one pool, and pools have no pods that are not there.
    fn wrong_homes(&self) -> Vec<Violation> {
        let mut homes: BTreeMap<&String, Vec<&String>> = BTreeMap::new();
        for (pool, shown) in &self.pools {
            for pod in shown.assigned.iter().chain(shown.available.keys()) {
                let homes = homes.entry(pod).or_default();
                if homes.last() != Some(&pool) {
                    homes.push(pool);
                }
            }
        }
        let wrong = |pod: &String, what| Violation { invariant: "I11", what, subject: pod.clone() };
        let mut found = Vec::new();
        for (pod, pools) in &homes {
            if !self.pods.contains_key(*pod) {
                found.push(wrong(pod, format!("{pod} is in {pools:?}, and is not there")));
            } else if pools.len() > 1 {
                found.push(wrong(pod, format!("{pod} is in {pools:?}")));
            }
        }
        for (name, pod) in &self.pods {
            if pod.is_serving && !homes.contains_key(name) {
                found.push(wrong(name, format!("{name} is in service and in no pool")));
            }
        }
        found
    }

    /// I3, I11: the available view of a pool has its pods in service that may have room.
    fn wrong_view(&self, pool: &str, shown: &PoolState) -> Vec<Violation> {
        let is_shared = matches!(shown.kind, Some(Kind::Shared { .. }));
        let open = |name: &String| {
            let pod = self.pods.get(name).filter(|pod| pod.is_serving)?;
            let is_open = shown.kind.is_some() && (is_shared || pod.calls.is_empty());
            is_open.then(|| (name.clone(), pod.calls.len()))
        };
        let expected: BTreeMap<String, usize> = shown.assigned.iter().filter_map(open).collect();
        let names: BTreeSet<&String> = expected.keys().chain(shown.available.keys()).collect();
        let differs = |name: &&&String| expected.get(**name) != shown.available.get(**name);
        let wrong = |name: &&String| {
            let (is, due) = (shown.available.get(*name), expected.get(*name));
            let what =
                format!("{name} stands in {pool} with {is:?} calls, and should with {due:?}");
            Violation { invariant: "I3, I11", what, subject: name.to_string() }
        };
        names.iter().filter(differs).map(wrong).collect()
    }
}

/// Whether a pod takes calls, as far as it has room.
fn is_serving(pod: &PodStatus) -> bool {
    pod.facts.ready && !pod.is_leaving() && pod.quarantined_until.is_none()
}
