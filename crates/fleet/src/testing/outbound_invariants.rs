//! Invariants of reservations and lines.

use std::collections::{BTreeMap, BTreeSet};

use super::invariants::Violation;
use crate::{Fleet, ReservationQuery, outbound::DialSums};

/// Reservations, lines and the sums of dials.
#[derive(Debug, Default)]
pub struct OutboundState {
    pub reservations: BTreeMap<String, ReservationState>,
    /// The numbers of live and waiting calls that use a line.
    pub call_numbers: BTreeMap<String, String>,
    /// The entries of each number: ids of reservations, and `call:` with the name of a call.
    pub lines: BTreeMap<String, BTreeSet<String>>,
    /// The sums of the outstanding dials, by pool.
    pub sums: BTreeMap<String, DialSums>,
}

#[derive(Debug)]
pub struct ReservationState {
    pub pool: String,
    pub number: Option<String>,
    pub probability: u64,
}

impl OutboundState {
    pub(super) fn of(fleet: &Fleet) -> Self {
        let mut state = Self::default();
        let all = ReservationQuery { limit: usize::MAX, ..ReservationQuery::default() };
        for found in fleet.reservations(&all, 0).reservations {
            let shown = ReservationState {
                pool: found.facts.pool.to_string(),
                number: found.facts.number.map(|number| number.to_string()),
                probability: found.facts.probability,
            };
            state.reservations.insert(found.id.to_string(), shown);
        }
        for (pool, dials) in fleet.outbound_status().pools {
            state.sums.insert(pool.to_string(), dials.sums);
        }
        let numbers = fleet.call_numbers();
        state.call_numbers =
            numbers.iter().map(|(call, number)| (call.to_string(), number.to_string())).collect();
        state.lines = fleet.line_holders();
        state
    }

    /// I15: each line in use belongs to an outstanding reservation or to a call that is not over,
    /// and each of them with a number uses one. I16: the sums of dials are those of the
    /// reservations.
    pub(super) fn violations(&self) -> Vec<Violation> {
        let mut lines: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut sums: BTreeMap<String, DialSums> = BTreeMap::new();
        for (id, reservation) in &self.reservations {
            sums.entry(reservation.pool.clone()).or_default().add(reservation.probability);
            if let Some(number) = &reservation.number {
                lines.entry(number.clone()).or_default().insert(id.clone());
            }
        }
        for (call, number) in &self.call_numbers {
            lines.entry(number.clone()).or_default().insert(format!("call:{call}"));
        }
        let mut found = Vec::new();
        let mut report = |invariant, subject: &String, message| {
            found.push(Violation { invariant, message, subject: subject.clone() });
        };
        let names: BTreeSet<&String> = lines.keys().chain(self.lines.keys()).collect();
        for number in names {
            let (used, expected) = (self.lines.get(number), lines.get(number));
            if used != expected {
                report(
                    "I15",
                    number,
                    format!("lines of {number}: {used:?}, expected {expected:?}"),
                );
            }
        }
        let pools: BTreeSet<&String> = sums.keys().chain(self.sums.keys()).collect();
        for pool in pools {
            let (kept, expected) = (self.sums.get(pool), sums.get(pool));
            if kept != expected {
                report("I16", pool, format!("dials of {pool}: {kept:?}, expected {expected:?}"));
            }
        }
        found
    }
}
