//! A small world in full: two routers, two leaders, two pods of an exclusive tier and
//! three calls, and everything that can happen to them in any order, within bounds.
//!
//! Time is left out: a lease ends, or an answer is too late, whenever it likes.

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
use crate::simulation::Sabotage;

const CALLS: usize = 3;
const PODS: usize = 2;
/// Allocations that routers begin: one for each call, and a second for the first.
const ATTEMPTS: usize = 4;
/// The pod that the operator drains.
const DRAINED: u8 = 1;

/// How much may go wrong on one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    /// So many of the calls are made.
    pub calls: u8,
    /// Messages lost, and answers too late.
    pub faults: u8,
    pub duplicates: u8,
    /// Leases that end.
    pub leases: u8,
    pub drains: bool,
    /// The cluster changes, and with it the leader.
    pub leaders: bool,
}

/// What was found.
pub(crate) struct Search {
    pub states: u64,
    pub stores: usize,
    pub depth: u32,
    /// What was broken, and the shortest way there.
    pub violation: Option<String>,
}

/// 128 bits of a state, in one pass (FNV-1a over its parts). Two states that share
/// them are as good as impossible.
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

/// Visits every state there is, the nearest first.
pub(crate) fn search(bounds: Bounds, sabotage: Option<Sabotage>) -> Search {
    let mut stores = Stores::new(sabotage);
    let first = State::first(bounds);
    let mut seen = HashSet::from([Fingerprint::of(&first)]);
    // How each state was reached.
    let mut ways: Vec<(u32, Option<Action>)> = vec![(0, None)];
    let mut next = VecDeque::from([(0, 0, first)]);
    let mut depth = 0;
    while let Some((index, steps, state)) = next.pop_front() {
        depth = steps;
        for action in actions(&state, &stores) {
            let outcome = apply(&state, action, &mut stores, sabotage);
            let broken = match &outcome {
                Ok(state) => state.violation(|call| stores.pod_of(state.store, call)),
                Err(broken) => Some(broken.clone()),
            };
            if let Some(broken) = broken {
                let path = path(&ways, index, action);
                let violation = Some(format!("{broken}\n{path}"));
                return Search {
                    states: ways.len() as u64,
                    stores: stores.len(),
                    depth,
                    violation,
                };
            }
            let state = outcome.expect("it was not broken");
            if seen.insert(Fingerprint::of(&state)) {
                next.push_back((ways.len() as u32, steps + 1, state));
                ways.push((index, Some(action)));
            }
        }
    }
    Search { states: ways.len() as u64, stores: stores.len(), depth, violation: None }
}

fn path(ways: &[(u32, Option<Action>)], mut index: u32, last: Action) -> String {
    let mut actions = vec![last];
    while let (before, Some(action)) = ways[index as usize] {
        actions.push(action);
        index = before;
    }
    let mut text = String::new();
    for (number, action) in actions.iter().rev().enumerate() {
        let _ = writeln!(text, "  {:>3}  {action:?}", number + 1);
    }
    text
}
