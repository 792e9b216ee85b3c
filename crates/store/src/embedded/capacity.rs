//! Capacity in the embedded store.

use crate::{CapacityStore, Embedded, PoolPods, Reply};
use fleet::{
    CapacityRecord, CapacityRefused, CapacityUpdate, PodWriter, PrescaleOrder, TooManyOrders,
    names::{OrderId, Pool},
    tiers::Tiers,
};

impl CapacityStore for Embedded {
    fn update_capacity<'a>(
        &'a self,
        update: &'a CapacityUpdate,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Vec<PrescaleOrder>, CapacityRefused>> {
        self.step("update_capacity", move |fleet, now| fleet.update_capacity(update, writer, now))
    }

    fn capacity(&self) -> Reply<'_, CapacityRecord> {
        self.step("capacity", |fleet, now| fleet.capacity(now))
    }

    fn capacity_state<'a>(&'a self, pool: &'a Pool) -> Reply<'a, Option<String>> {
        self.step("capacity_state", |fleet, now| fleet.capacity_state(pool, now))
    }

    fn prescale<'a>(
        &'a self,
        order: &'a PrescaleOrder,
        by: &'a str,
    ) -> Reply<'a, Result<(), TooManyOrders>> {
        self.step("prescale", move |fleet, now| fleet.prescale(order, by, now))
    }

    fn delete_prescale<'a>(&'a self, id: &'a OrderId, by: &'a str) -> Reply<'a, bool> {
        self.step("delete_prescale", move |fleet, now| fleet.delete_prescale(id, by, now))
    }

    fn pool_pods(&self) -> Reply<'_, (Tiers, Vec<PoolPods>)> {
        self.step("pool_pods", |fleet, _| {
            let pools = fleet.pool_pods().into_iter();
            let pods = |(pool, ready, not_ready, available)| PoolPods {
                pool,
                ready,
                not_ready,
                available,
            };
            (fleet.tiers().clone(), pools.map(pods).collect())
        })
    }
}
