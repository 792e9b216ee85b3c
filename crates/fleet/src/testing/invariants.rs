//! Invariant checker for a state read from any store; docs/reliability.md lists the invariants.

use std::collections::{BTreeMap, BTreeSet};

pub use super::outbound_invariants::{OutboundState, ReservationState};
use crate::{CallLookup, CallQuery, Fleet, PodStatus, tiers::TierKind};

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: &'static str,
    pub message: String,
    /// The pod or the call concerned.
    pub subject: String,
}

/// A snapshot of pods, pools and calls.
#[derive(Debug, Default)]
pub struct State {
    pub pods: BTreeMap<String, PodState>,
    /// Keyed by the form of `source_pool`: `pool:gold`, `merchant:acme`.
    pub pools: BTreeMap<String, PoolState>,
    /// The pod of each live call.
    pub calls: BTreeMap<String, String>,
    /// The stream of each attached call.
    pub streams: BTreeMap<String, StreamState>,
    /// The calls of each gateway, and whether they were released.
    pub gateways: BTreeMap<String, BTreeMap<String, bool>>,
    pub outbound: OutboundState,
}

#[derive(Debug, Default)]
pub struct StreamState {
    pub gateway: String,
    /// The call was released.
    pub is_ending: bool,
}

#[derive(Debug, Default)]
pub struct PodState {
    pub is_serving: bool,
    pub calls: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub struct PoolState {
    /// `None` for a tier that is not in the table.
    pub kind: Option<TierKind>,
    pub assigned: BTreeSet<String>,
    /// The availability index: pods with their live calls; 0 for exclusive pods.
    pub available: BTreeMap<String, usize>,
}

impl State {
    /// The state of a fleet, read through its queries.
    pub fn of(fleet: &Fleet) -> Self {
        let mut state = Self::default();
        for pool in fleet.status().pools {
            let available = fleet.available(&pool.pool).into_iter();
            let available = available.chain(fleet.at_risk(&pool.pool));
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
        let all = fleet.calls(&CallQuery { limit: usize::MAX, ..CallQuery::default() });
        for found in all.calls {
            if let CallLookup::Live(call) = found {
                state.calls.insert(call.call.to_string(), call.pod.to_string());
                let stream = call.stream.map(|stream| StreamState {
                    gateway: stream.gateway.to_string(),
                    is_ending: stream.ending.is_some(),
                });
                state.streams.extend(stream.map(|stream| (call.call.to_string(), stream)));
            }
        }
        for gateway in fleet.gateways() {
            let calls = gateway.calls.into_iter();
            let calls = calls.map(|(call, is_ending)| (call.to_string(), is_ending)).collect();
            state.gateways.insert(gateway.gateway.to_string(), calls);
        }
        state.outbound = OutboundState::of(fleet);
        state
    }

    /// The violated invariants, except [`State::overloads`]: a new tier table may lower the cap of
    /// a pod below its number of calls.
    pub fn violations(&self) -> Vec<Violation> {
        let mut found = self.call_violations();
        found.extend(self.pool_violations());
        found.extend(self.stream_violations());
        found.extend(self.free_pod_violations());
        found.extend(self.outbound.violations());
        for (name, pool) in &self.pools {
            found.extend(self.index_violations(name, pool));
        }
        found
    }

    /// I1, I3: pods with more calls than their cap.
    pub fn overloads(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for pool in self.pools.values() {
            let cap = pool.kind.map_or(usize::MAX, |kind| kind.cap() as usize);
            for name in &pool.assigned {
                let calls = self.pods.get(name).map_or(0, |pod| pod.calls.len());
                if calls > cap {
                    let message = format!("{name} has {calls} calls, more than its cap of {cap}");
                    let invariant = if cap == 1 { "I1" } else { "I3" };
                    found.push(Violation { invariant, message, subject: name.clone() });
                }
            }
        }
        found
    }

    /// I2, I6: every live call is on exactly one pod, and pods have no other calls.
    fn call_violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut report = |invariant, call: &String, message| {
            found.push(Violation { invariant, message, subject: call.clone() });
        };
        let mut on: BTreeMap<&String, &String> = BTreeMap::new();
        for (name, pod) in &self.pods {
            for call in &pod.calls {
                if let Some(other) = on.insert(call, name) {
                    report("I2", call, format!("{call} is on {other} and on {name}"));
                }
                if self.calls.get(call) != Some(name) {
                    let known = self.calls.get(call);
                    report("I6", call, format!("{name} lists {call}, which is live on {known:?}"));
                }
            }
        }
        for (call, pod) in self.calls.iter().filter(|(call, _)| !on.contains_key(call)) {
            report("I6", call, format!("{call} is live on {pod}, which does not list it"));
        }
        found
    }

    /// I12: a call is listed by the gateway of its stream and by no other, and gateways list no
    /// calls without a stream.
    fn stream_violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut report = |call: &String, message| {
            found.push(Violation { invariant: "I12", message, subject: call.clone() });
        };
        for (call, stream) in &self.streams {
            let StreamState { gateway, is_ending } = stream;
            let listed = self.gateways.get(gateway).and_then(|calls| calls.get(call));
            if listed != Some(is_ending) {
                let message =
                    format!("{call}: released {is_ending}, listed by {gateway} as {listed:?}");
                report(call, message);
            }
        }
        for (gateway, calls) in &self.gateways {
            let is_elsewhere = |call: &&String| {
                self.streams.get(*call).is_none_or(|stream| stream.gateway != *gateway)
            };
            for call in calls.keys().filter(is_elsewhere) {
                report(call, format!("{gateway} lists {call}, whose stream it does not relay"));
            }
        }
        found
    }

    /// I13: the pod of an attached call lists the call, and the availability index counts it.
    fn free_pod_violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        for call in self.streams.keys() {
            let name = self.calls.get(call);
            let pod = name.and_then(|name| self.pods.get(name));
            let Some((name, pod)) = name.zip(pod).filter(|(_, pod)| pod.calls.contains(call))
            else {
                let message = format!("{call} has a stream, and {name:?} does not list it");
                found.push(Violation { invariant: "I13", message, subject: call.clone() });
                continue;
            };
            let attached = pod.calls.iter().filter(|call| self.streams.contains_key(*call)).count();
            let indexed = self.pools.values().filter_map(|pool| pool.available.get(name));
            for counted in indexed.filter(|counted| **counted < attached) {
                let message = format!("{name} has {attached} streams, and its index has {counted}");
                found.push(Violation { invariant: "I13", message, subject: name.clone() });
            }
        }
        found
    }

    /// I11: a pod in service is in exactly one pool, and pools contain only existing pods.
    fn pool_violations(&self) -> Vec<Violation> {
        let mut pools_of: BTreeMap<&String, Vec<&String>> = BTreeMap::new();
        for (pool, shown) in &self.pools {
            for pod in shown.assigned.iter().chain(shown.available.keys()) {
                let pools = pools_of.entry(pod).or_default();
                if pools.last() != Some(&pool) {
                    pools.push(pool);
                }
            }
        }
        let violation =
            |pod: &String, message| Violation { invariant: "I11", message, subject: pod.clone() };
        let mut found = Vec::new();
        for (pod, pools) in &pools_of {
            if !self.pods.contains_key(*pod) {
                found.push(violation(pod, format!("{pod} is in {pools:?} but does not exist")));
            } else if pools.len() > 1 {
                found.push(violation(pod, format!("{pod} is in several pools: {pools:?}")));
            }
        }
        for (name, pod) in &self.pods {
            if pod.is_serving && !pools_of.contains_key(name) {
                found.push(violation(name, format!("{name} is in service but in no pool")));
            }
        }
        found
    }

    /// I3, I11: the availability index of a pool lists its pods in service that take calls.
    fn index_violations(&self, pool: &str, shown: &PoolState) -> Vec<Violation> {
        let is_shared = matches!(shown.kind, Some(TierKind::Shared { .. }));
        let available = |name: &String| {
            let pod = self.pods.get(name).filter(|pod| pod.is_serving)?;
            let is_available = shown.kind.is_some() && (is_shared || pod.calls.is_empty());
            is_available.then(|| (name.clone(), pod.calls.len()))
        };
        let expected: BTreeMap<String, usize> =
            shown.assigned.iter().filter_map(available).collect();
        let names: BTreeSet<&String> = expected.keys().chain(shown.available.keys()).collect();
        let differs = |name: &&&String| expected.get(**name) != shown.available.get(**name);
        let violation = |name: &&String| {
            let (indexed, due) = (shown.available.get(*name), expected.get(*name));
            let message = format!("{name} in {pool}: indexed calls {indexed:?}, expected {due:?}");
            Violation { invariant: "I3, I11", message, subject: name.to_string() }
        };
        names.iter().filter(differs).map(violation).collect()
    }
}

/// Whether a pod is in service.
fn is_serving(pod: &PodStatus) -> bool {
    pod.facts.ready && !pod.is_leaving() && pod.quarantined_until.is_none()
}
