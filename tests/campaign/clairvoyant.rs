//! The clairvoyant dialler, for comparison: it knows the dials that will be answered, and holds a
//! slot only for them, from the dial on.

use std::collections::HashSet;

use fleet::{Millis, tiers::InboundReserve};

use crate::simulation::{Campaign, Capacity, Number, Refused};

pub(crate) struct Clairvoyant {
    free: u64,
    reserve: u64,
    /// Outstanding dials that will be answered.
    held: HashSet<Number>,
}

impl Clairvoyant {
    pub(crate) fn new(campaign: Campaign) -> Self {
        let reserve = InboundReserve::Share(campaign.inbound_reserve).of_slots(campaign.pods);
        Self { free: campaign.pods, reserve, held: HashSet::new() }
    }

    fn unheld(&self) -> u64 {
        self.free - self.held.len() as u64
    }
}

impl Capacity for Clairvoyant {
    fn reserve(&mut self, dial: Number, is_answered: bool, _: Millis) -> Result<(), Refused> {
        if self.unheld() <= self.reserve {
            return Err(Refused { retry_after: None });
        }
        if is_answered {
            self.held.insert(dial);
        }
        Ok(())
    }

    fn answer(&mut self, dial: Number, _: Millis) -> bool {
        assert!(self.held.remove(&dial), "dial {dial} has no slot");
        self.free -= 1;
        true
    }

    fn end_dial(&mut self, _: Number, _: Millis) {}

    fn accept_inbound(&mut self, _: Number, _: Millis) -> bool {
        let is_served = self.unheld() > 0;
        self.free -= u64::from(is_served);
        is_served
    }

    fn end_call(&mut self, _: Number, _: Millis) {
        self.free += 1;
    }

    fn sweep(&mut self, _: Millis) {}
}
