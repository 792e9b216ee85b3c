//! Capacity in the store: decisions of the policy, learned states and prescale orders.

use crate::Reply;
use fleet::{
    CapacityRecord, CapacityRefused, CapacityUpdate, PodWriter, PrescaleOrder, TooManyOrders,
    names::{OrderId, Pool},
    tiers::Tiers,
};

/// The pods of a pool, without its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolPods {
    pub pool: Pool,
    /// Pods in service, busy or idle.
    pub ready: usize,
    /// Pods that were assigned to the pool before and are not ready now.
    pub not_ready: usize,
    /// Pods that can take a call: the idle ones of an exclusive pool.
    pub available: usize,
}

/// The operations of capacity, part of [`crate::Store`].
pub trait CapacityStore {
    /// Records decisions, learned states and events; returns the orders in force.
    fn update_capacity<'a>(
        &'a self,
        update: &'a CapacityUpdate,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Vec<PrescaleOrder>, CapacityRefused>>;
    /// The decisions and the orders in force.
    fn capacity(&self) -> Reply<'_, CapacityRecord>;
    /// The learned state of a pool.
    fn capacity_state<'a>(&'a self, pool: &'a Pool) -> Reply<'a, Option<String>>;
    /// Adds or replaces an order.
    fn prescale<'a>(
        &'a self,
        order: &'a PrescaleOrder,
        by: &'a str,
    ) -> Reply<'a, Result<(), TooManyOrders>>;
    /// Deletes an order; returns whether it was in force.
    fn delete_prescale<'a>(&'a self, id: &'a OrderId, by: &'a str) -> Reply<'a, bool>;
    /// The tiers, and the pods of each pool, in time that does not grow with pods or calls.
    fn pool_pods(&self) -> Reply<'_, (Tiers, Vec<PoolPods>)>;
}
