//! Capacity and the bounds of tiers: operations, reads and mutations.

use fleet::names::Pool;
use store::CapacityStore;
use testkit::operations::Operation;

use crate::compare::Pair;

impl Pair {
    pub(super) async fn run_capacity(&mut self, operation: &Operation) -> Result<(), String> {
        let (store, fleet, now) = (self.store.clone(), &mut self.fleet, self.now);
        let what = format!("{operation:?}");
        let failed = |error: store::StoreError| format!("the store failed: {error}");
        match operation {
            Operation::Capacity { update, writer } => {
                let redis = store.update_capacity(update, writer.get()).await.map_err(failed)?;
                same!(what, redis, fleet.update_capacity(update, writer.get(), now));
            }
            Operation::Prescale(order) => {
                let redis = store.prescale(order, "admin (token 2)").await.map_err(failed)?;
                same!(what, redis, fleet.prescale(order, "admin (token 2)", now));
            }
            Operation::DeletePrescale { id } => {
                let redis = store.delete_prescale(id, "admin (token 2)").await.map_err(failed)?;
                same!(what, redis, fleet.delete_prescale(id, "admin (token 2)", now));
            }
            other => return Err(format!("unexpected operation {other:?}")),
        }
        Ok(())
    }

    pub(super) async fn capacity_agrees(&mut self) -> Result<(), String> {
        let failed = |error: store::StoreError| error.to_string();
        let record = self.store.capacity().await.map_err(failed)?;
        same!("capacity", record, self.fleet.capacity(self.now));
        for pool in ["gold", "basic", "merchant:acme"] {
            let pool: Pool = pool.parse().unwrap();
            let state = self.store.capacity_state(&pool).await.map_err(failed)?;
            same!(format!("state of {pool}"), state, self.fleet.capacity_state(&pool, self.now));
        }
        let (tiers, pools) = self.store.pool_pods().await.map_err(failed)?;
        same!("tiers", tiers, *self.fleet.tiers());
        let pools: Vec<_> =
            pools.into_iter().map(|it| (it.pool, it.ready, it.not_ready, it.available)).collect();
        same!("pods of pools", pools, self.fleet.pool_pods());
        Ok(())
    }
}

/// Broken builds: description, text of the library, replacement.
pub(super) const CAPACITY_MUTATIONS: [(&str, &str, &str); 9] = [
    (
        "two routers take the capacity decisions",
        "lead.epoch >= tonumber(epoch) and is_leased then",
        "lead.epoch >= tonumber(epoch) and false then",
    ),
    (
        "a new leader waits for the capacity lease of the last one",
        "lead.holder ~= holder and lead.epoch >= tonumber(epoch) and",
        "lead.holder ~= holder and",
    ),
    (
        "a replaced leader takes capacity decisions",
        "  local refused = fence(origin, epoch)\n  if refused then return refused end\n  local lead",
        "  local lead",
    ),
    (
        "a capacity state is saved under another pool",
        "run('SET', K.capacity_state .. ARGV[i], ARGV[i + 1]",
        "run('SET', K.capacity_state .. ARGV[FIRST_STATE], ARGV[i + 1]",
    ),
    (
        "expired prescale orders stay in force",
        "if order and order.ends > now then",
        "if order then",
    ),
    (
        "an expired prescale order is deleted with an event",
        "  if not order or order.ends <= now then return {'not_there', now} end\n",
        "  if not order then return {'not_there', now} end\n",
    ),
    ("a deleted prescale order stays", "  run('HDEL', K.prescale, id)\n", ""),
    (
        "changed bounds of a tier do not take effect",
        "is_same = is_same and bounds[name] == text end",
        "is_same = is_same and true end",
    ),
    (
        "removed bounds of a tier stay",
        "is_same = is_same and new_bounds[name] ~= nil end",
        "is_same = is_same and true end",
    ),
];
