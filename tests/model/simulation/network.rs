//! The ways between clients, routers and the store. Messages come late, overtake each
//! other, get lost, or come twice.
//!
//! One thing does not happen: a request to the store never comes twice by itself, as
//! that way is a TCP connection. The router's second try is what comes twice there.

use fleet::Millis;

use super::Simulation;

/// The longest that one message takes.
const SLOWEST: Millis = 1_500;
/// The longest from a client's request to its last effect: to the router, and as long
/// as that tries.
pub(super) const LONGEST_WAY: Millis = SLOWEST + 750;

/// In a hundred messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weather {
    pub lost: usize,
    pub slow: usize,
    pub twice: usize,
}

impl Simulation {
    /// How long the next message takes; `None` if it is lost.
    pub(crate) fn delay(&mut self) -> Option<Millis> {
        if self.is_calm {
            return Some(self.dice.between(1, 10));
        }
        let Weather { lost, slow, .. } = self.weather;
        if self.dice.percent(lost) {
            return None;
        }
        let is_slow = self.dice.percent(slow);
        Some(if is_slow { self.dice.between(20, SLOWEST) } else { self.dice.between(1, 20) })
    }

    /// When the line on which something was just sent breaks, if it does. What is on its way
    /// arrives all the same.
    pub(crate) fn breaks(&mut self) -> Option<Millis> {
        let chance = if self.is_calm { 0 } else { self.weather.lost };
        self.dice.percent(chance).then(|| self.now + self.dice.between(1, 50))
    }

    /// How often the next message comes.
    pub(crate) fn copies(&mut self) -> usize {
        let chance = if self.is_calm { 0 } else { self.weather.twice };
        1 + usize::from(self.dice.percent(chance))
    }
}
