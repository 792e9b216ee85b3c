//! Capacity in the store: learned states of the policy, decisions for all replicas, and prescale
//! orders.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Change, Event, EventKind, Fleet, PodWriter, WriteRefused};
use crate::{
    Millis,
    names::{OrderId, Pool},
    rules::{CAPACITY_STATE_TTL, MAX_CAPACITY_LEASE, MAX_PRESCALE_ORDERS},
};

/// An order for at least this number of pods until a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrescaleOrder {
    pub id: OrderId,
    pub pool: Pool,
    pub pods: u32,
    pub until: Millis,
}

/// The store has as many orders as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyOrders;

/// A write of the router that takes the capacity decisions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapacityUpdate {
    /// The router. Only one at a time takes the decisions of an epoch.
    pub holder: String,
    /// Time for which no other router of the same epoch may take them; 0 gives the right up.
    pub lease: Millis,
    /// The decisions, for the other replicas.
    pub decisions: String,
    /// Learned states to keep.
    pub states: Vec<(Pool, String)>,
    /// Changed decisions: pool, and the detail of the event.
    pub events: Vec<(Pool, String)>,
}

/// The reason why an update was refused without effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapacityRefused {
    #[error(transparent)]
    Write(#[from] WriteRefused),
    /// Another router takes the decisions.
    #[error("{holder} takes the capacity decisions")]
    Held { holder: String },
}

/// The decisions in force, their holder, and the orders that have not expired.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapacityRecord {
    /// Empty before the first update.
    pub holder: String,
    /// The epoch of the holder's last update.
    pub epoch: u64,
    /// End of the holder's lease.
    pub until: Millis,
    pub decisions: String,
    /// By expiry.
    pub orders: Vec<PrescaleOrder>,
}

impl CapacityRecord {
    /// Whether a router of this epoch has to wait for the end of the holder's lease.
    pub fn excludes(&self, router: &str, epoch: u64, now: Millis) -> bool {
        let is_leased = now < self.until && self.until <= now + MAX_CAPACITY_LEASE;
        self.holder != router && self.epoch >= epoch && is_leased
    }
}

/// The router that takes the decisions. Not journaled: an embedded store has one router.
#[derive(Debug, Default)]
pub(super) struct CapacityLead {
    holder: String,
    epoch: u64,
    until: Millis,
    decisions: String,
}

/// The facts about capacity.
#[derive(Debug, Default)]
pub(super) struct CapacityFacts {
    lead: CapacityLead,
    /// Learned states with the time of the update.
    states: BTreeMap<Pool, (Millis, String)>,
    orders: BTreeMap<OrderId, PrescaleOrder>,
}

impl CapacityFacts {
    pub(super) fn set_state(&mut self, pool: Pool, at: Millis, state: String) {
        self.states.insert(pool, (at, state));
        self.states.retain(|_, (saved, _)| *saved + CAPACITY_STATE_TTL > at);
    }

    pub(super) fn set_order(&mut self, order: PrescaleOrder) {
        self.orders.insert(order.id.clone(), order);
    }

    pub(super) fn remove_order(&mut self, id: &OrderId) {
        self.orders.remove(id);
    }

    /// The expiry of an order is a time of day that an operator has named: it does not move with
    /// the clock.
    pub(super) fn shift(&mut self, by: i64) {
        self.lead.until = self.lead.until.saturating_add_signed(by);
        self.states.values_mut().for_each(|(at, _)| *at = at.saturating_add_signed(by));
    }

    pub(super) fn facts(&self) -> impl Iterator<Item = Change> {
        let states = self.states.iter().map(|(pool, (at, state))| Change::CapacityState {
            pool: pool.clone(),
            at: *at,
            state: state.clone(),
        });
        let orders = self.orders.values().cloned();
        states.chain(orders.map(|order| Change::Prescale { order, by: String::new() }))
    }

    pub(super) fn order(&self, id: &OrderId) -> Option<&PrescaleOrder> {
        self.orders.get(id)
    }
}

impl Fleet {
    /// Records decisions and states of the router that takes the decisions. A writer of a higher
    /// epoch replaces another one at once; one of the same epoch waits for the end of the lease.
    pub fn update_capacity(
        &mut self,
        update: &CapacityUpdate,
        writer: PodWriter<'_>,
        now: Millis,
    ) -> Result<Vec<PrescaleOrder>, CapacityRefused> {
        self.fence(writer)?;
        let record = self.capacity(now);
        if record.excludes(&update.holder, writer.epoch, now) {
            return Err(CapacityRefused::Held { holder: record.holder });
        }
        self.capacity.lead = CapacityLead {
            holder: update.holder.clone(),
            epoch: writer.epoch,
            until: now + update.lease.min(MAX_CAPACITY_LEASE),
            decisions: update.decisions.clone(),
        };
        for (pool, state) in &update.states {
            let (pool, state) = (pool.clone(), state.clone());
            self.record(Change::CapacityState { pool, at: now, state });
        }
        for (pool, detail) in &update.events {
            let pool = Some(pool.clone());
            self.record_event(|_| {
                Some(Event { pool, ..Event::new(EventKind::Desired) }.with_detail(detail))
            });
        }
        Ok(self.prescale_orders(now))
    }

    /// The decisions in force, and the orders.
    pub fn capacity(&self, now: Millis) -> CapacityRecord {
        let CapacityLead { holder, epoch, until, decisions } = &self.capacity.lead;
        CapacityRecord {
            holder: holder.clone(),
            epoch: *epoch,
            until: *until,
            decisions: decisions.clone(),
            orders: self.prescale_orders(now),
        }
    }

    /// The learned state of a pool, unless it was last saved too long ago.
    pub fn capacity_state(&self, pool: &Pool, now: Millis) -> Option<String> {
        let (at, state) = self.capacity.states.get(pool)?;
        (*at + CAPACITY_STATE_TTL > now).then(|| state.clone())
    }

    fn prescale_orders(&self, now: Millis) -> Vec<PrescaleOrder> {
        let orders = self.capacity.orders.values().filter(|order| order.until > now);
        let mut orders: Vec<PrescaleOrder> = orders.cloned().collect();
        orders.sort_by(|a, b| (a.until, &a.id).cmp(&(b.until, &b.id)));
        orders
    }

    /// Adds or replaces an order, and removes expired ones.
    pub fn prescale(
        &mut self,
        order: &PrescaleOrder,
        by: &str,
        now: Millis,
    ) -> Result<(), TooManyOrders> {
        let expired: Vec<OrderId> = self
            .capacity
            .orders
            .values()
            .filter(|order| order.until <= now)
            .map(|order| order.id.clone())
            .collect();
        for id in expired {
            self.record(Change::PrescaleExpired { id });
        }
        let is_new = self.capacity.order(&order.id).is_none();
        if is_new && self.capacity.orders.len() >= MAX_PRESCALE_ORDERS {
            return Err(TooManyOrders);
        }
        self.record(Change::Prescale { order: order.clone(), by: by.to_owned() });
        Ok(())
    }

    /// Deletes an order; returns whether it was in force.
    pub fn delete_prescale(&mut self, id: &OrderId, by: &str, now: Millis) -> bool {
        match self.capacity.order(id).map(|order| order.until > now) {
            None => false,
            Some(false) => {
                self.record(Change::PrescaleExpired { id: id.clone() });
                false
            }
            Some(true) => {
                self.record(Change::PrescaleDeleted { id: id.clone(), by: by.to_owned() });
                true
            }
        }
    }
}
