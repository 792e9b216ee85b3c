//! Capacity: decisions of the policy, learned states and prescale orders.

use super::{
    Redis, keys,
    operations::{STATUS_COLUMNS, unexpected},
    reply::{FunctionReply, parse},
    tier_table,
};
use crate::{CapacityStore, PoolPods, Reply, StoreError};
use fleet::{
    CapacityRecord, CapacityRefused, CapacityUpdate, PodWriter, PrescaleOrder, TooManyOrders,
    names::{OrderId, Pool},
    tiers::Tiers,
};

impl CapacityStore for Redis {
    fn update_capacity<'a>(
        &'a self,
        update: &'a CapacityUpdate,
        writer: PodWriter<'a>,
    ) -> Reply<'a, Result<Vec<PrescaleOrder>, CapacityRefused>> {
        Box::pin(async move {
            let origin = writer.origin.to_string();
            let [epoch, lease, states] =
                [writer.epoch, update.lease, update.states.len() as u64].map(|it| it.to_string());
            let pairs = update.states.iter().chain(&update.events);
            let pairs: Vec<(String, &str)> =
                pairs.map(|(pool, text)| (pool.to_string(), text.as_str())).collect();
            let mut args =
                vec![origin.as_str(), &epoch, &update.holder, &lease, &update.decisions, &states];
            args.extend(pairs.iter().flat_map(|(pool, text)| [pool.as_str(), text]));
            let mut reply = self.run(&self.functions().update_capacity, &args).await?;
            if let Some(refused) = self.write_refused(&mut reply, writer.epoch)? {
                return Ok(Err(refused.into()));
            }
            match reply.word.as_str() {
                "updated" => Ok(Ok(orders(&mut reply)?)),
                "held" => Ok(Err(CapacityRefused::Held { holder: reply.text()? })),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn capacity(&self) -> Reply<'_, CapacityRecord> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().capacity, &[]).await?;
            Ok(CapacityRecord {
                holder: reply.text()?,
                epoch: reply.number()?,
                until: reply.number()?,
                decisions: reply.text()?,
                orders: orders(&mut reply)?,
            })
        })
    }

    fn capacity_state<'a>(&'a self, pool: &'a Pool) -> Reply<'a, Option<String>> {
        Box::pin(async move {
            let key = format!("{}{pool}", self.key(keys::CAPACITY_STATE));
            // A key of another type is replaced by the next save.
            let state = self.query_unless_wrong_type(redis::cmd("GET").arg(&key)).await?;
            Ok(state.flatten())
        })
    }

    fn prescale<'a>(
        &'a self,
        order: &'a PrescaleOrder,
        by: &'a str,
    ) -> Reply<'a, Result<(), TooManyOrders>> {
        Box::pin(async move {
            let PrescaleOrder { id, pool, pods, until } = order;
            let (pool, pods, until) = (pool.to_string(), pods.to_string(), until.to_string());
            let args = [id.as_str(), &pool, &pods, &until, by];
            let reply = self.run(&self.functions().prescale, &args).await?;
            match reply.word.as_str() {
                "ordered" => Ok(Ok(())),
                "too_many" => Ok(Err(TooManyOrders)),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn delete_prescale<'a>(&'a self, id: &'a OrderId, by: &'a str) -> Reply<'a, bool> {
        Box::pin(async move {
            let reply = self.run(&self.functions().delete_prescale, &[id.as_str(), by]).await?;
            match reply.word.as_str() {
                "deleted" => Ok(true),
                "not_there" => Ok(false),
                _ => Err(unexpected(&reply)),
            }
        })
    }

    fn pool_pods(&self) -> Reply<'_, (Tiers, Vec<PoolPods>)> {
        Box::pin(async move {
            let mut reply = self.run(&self.functions().status, &[]).await?;
            reply.number()?;
            reply.number()?;
            let (table, rows) = (reply.texts()?, reply.texts()?);
            let tiers = tier_table::read(&table, &reply.texts()?)?;
            let mut pools = Vec::new();
            for row in rows.chunks_exact(STATUS_COLUMNS) {
                // Skip an invalid name, which only a manual edit can have written.
                let Ok(pool) = row[0].parse::<Pool>() else { continue };
                let mut numbers = [0_usize; 5];
                for (number, text) in numbers.iter_mut().zip(&row[1..6]) {
                    *number = parse(text)?;
                }
                let [assigned, available, leaving, not_ready, quarantined] = numbers;
                let ready = assigned.saturating_sub(leaving + not_ready + quarantined);
                if assigned > 0 || tiers.defines(&pool) {
                    pools.push(PoolPods { pool, ready, not_ready, available });
                }
            }
            for (name, _) in tiers.iter() {
                let pool = tiers.pool(name).expect("each tier has a pool");
                if pools.iter().all(|known| known.pool != pool) {
                    pools.push(PoolPods { pool, ready: 0, not_ready: 0, available: 0 });
                }
            }
            pools.sort_by(|a, b| a.pool.cmp(&b.pool));
            Ok((tiers, pools))
        })
    }
}

/// Parses orders: id, pool, pods and end of each, by expiry. Skips one with an invalid name, which
/// only a manual edit can have written.
fn orders(reply: &mut FunctionReply) -> Result<Vec<PrescaleOrder>, StoreError> {
    let texts = reply.texts()?;
    let read = |row: &[String]| {
        let (id, pool) = (row[0].parse().ok()?, row[1].parse().ok()?);
        Some(PrescaleOrder { id, pool, pods: row[2].parse().ok()?, until: row[3].parse().ok()? })
    };
    let mut orders: Vec<PrescaleOrder> = texts.chunks_exact(4).filter_map(read).collect();
    orders.sort_by(|a, b| (a.until, &a.id).cmp(&(b.until, &b.id)));
    Ok(orders)
}
