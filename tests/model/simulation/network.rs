//! The network between clients, routers and the store. Messages are delayed, reordered, lost or
//! duplicated.
//!
//! A request to the store is never duplicated by the network, because it uses a TCP connection; only
//! the retry of a router sends it twice.

use fleet::Millis;

use store::retry;

use super::{Simulation, router::millis};

/// Delay of the slowest message.
const MAX_MESSAGE_DELAY: Millis = 1_500;
/// Time from sending a client's request to its last effect: the way to the router, and its retries.
pub(super) fn max_request_delay() -> Millis {
    MAX_MESSAGE_DELAY + millis(retry::REQUEST_TIMEOUT)
}

/// Percentage of messages with each fault.
#[derive(Debug, Clone, Copy)]
pub(super) struct NetworkFaults {
    pub lost: usize,
    pub slow: usize,
    pub duplicated: usize,
}

impl Simulation {
    /// The delay of the next message; `None` if it is lost.
    pub(crate) fn delay(&mut self) -> Option<Millis> {
        if self.is_fault_free {
            return Some(self.dice.between(1, 10));
        }
        let NetworkFaults { lost, slow, .. } = self.faults;
        if self.dice.percent(lost) {
            return None;
        }
        let is_slow = self.dice.percent(slow);
        Some(if is_slow {
            self.dice.between(20, MAX_MESSAGE_DELAY)
        } else {
            self.dice.between(1, 20)
        })
    }

    /// The time at which a connection breaks after a request was sent on it, if it does. Messages in
    /// flight still arrive.
    pub(crate) fn connection_break(&mut self) -> Option<Millis> {
        let chance = if self.is_fault_free { 0 } else { self.faults.lost };
        self.dice.percent(chance).then(|| self.now + self.dice.between(1, 50))
    }

    /// The number of copies of the next message that arrive.
    pub(crate) fn copies(&mut self) -> usize {
        let chance = if self.is_fault_free { 0 } else { self.faults.duplicated };
        1 + usize::from(self.dice.percent(chance))
    }
}
