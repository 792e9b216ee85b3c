//! An exhaustive search of a small model: two routers, two leaders, two pods of an exclusive tier,
//! three calls, and all events in any order, within bounds.
//!
//! The model has no time: a lease can end and a reply can be late at any moment.

mod actions;
mod state;
mod store;

use std::{
    collections::{HashSet, VecDeque},
    fmt::Write,
    hash::{Hash, Hasher},
};

use self::{
    actions::{Action, actions, apply},
    state::State,
    store::Stores,
};
use crate::simulation::InjectedDefect;

const CALLS: usize = 3;
const PODS: usize = 2;
/// Allocate requests: one for each call, and a second for the first call.
const ALLOCATIONS: usize = 4;
/// The pod that the operator drains.
const DRAINED: u8 = 1;

/// Bounds on the events of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    /// Number of calls.
    pub calls: u8,
    /// Messages that are lost or late.
    pub faults: u8,
    pub duplicates: u8,
    /// Leases that end.
    pub leases: u8,
    pub drains: bool,
    /// The cluster and the leader change.
    pub leaders: bool,
}

/// The result of a search.
pub(crate) struct Search {
    pub states: u64,
    pub stores: usize,
    pub depth: u32,
    /// The violated invariant, and the shortest path to it.
    pub violation: Option<String>,
}

/// A 128-bit hash of a state, in one pass (FNV-1a over its parts). Collisions are negligible.
struct Fingerprint(u128);

impl Fingerprint {
    fn of(state: &State) -> u128 {
        let mut fingerprint = Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        state.hash(&mut fingerprint);
        fingerprint.0
    }

    fn fold(&mut self, part: u128) {
        self.0 = (self.0 ^ part).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        self.0 ^= self.0 >> 67;
    }
}

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.fold(u128::from(*byte)));
    }

    fn write_u8(&mut self, part: u8) {
        self.fold(u128::from(part));
    }

    fn write_isize(&mut self, part: isize) {
        self.fold(part as u128);
    }

    fn write_usize(&mut self, part: usize) {
        self.fold(part as u128);
    }

    fn finish(&self) -> u64 {
        self.0 as u64
    }
}

/// Visits all reachable states, breadth first.
pub(crate) fn search(bounds: Bounds, defect: Option<InjectedDefect>) -> Search {
    let mut stores = Stores::new(defect);
    let first = State::first(bounds);
    let mut visited = HashSet::from([Fingerprint::of(&first)]);
    // Predecessor and action of each state.
    let mut predecessors: Vec<(u32, Option<Action>)> = vec![(0, None)];
    let mut next = VecDeque::from([(0, 0, first)]);
    let mut depth = 0;
    while let Some((index, steps, state)) = next.pop_front() {
        depth = steps;
        for action in actions(&state, &stores) {
            let outcome = apply(&state, action, &mut stores, defect);
            let violated = match &outcome {
                Ok(state) => state.violation(|call| stores.pod_of(state.store, call)),
                Err(violated) => Some(violated.clone()),
            };
            if let Some(violated) = violated {
                let path = path(&predecessors, index, action);
                let violation = Some(format!("{violated}\n{path}"));
                return Search {
                    states: predecessors.len() as u64,
                    stores: stores.len(),
                    depth,
                    violation,
                };
            }
            let state = outcome.expect("no invariant is violated");
            if visited.insert(Fingerprint::of(&state)) {
                next.push_back((predecessors.len() as u32, steps + 1, state));
                predecessors.push((index, Some(action)));
            }
        }
    }
    Search { states: predecessors.len() as u64, stores: stores.len(), depth, violation: None }
}

fn path(predecessors: &[(u32, Option<Action>)], mut index: u32, last: Action) -> String {
    let mut actions = vec![last];
    while let (before, Some(action)) = predecessors[index as usize] {
        actions.push(action);
        index = before;
    }
    let mut text = String::new();
    for (number, action) in actions.iter().rev().enumerate() {
        let _ = writeln!(text, "  {:>3}  {action:?}", number + 1);
    }
    text
}
