//! `GET /status`: how all pools stand.

use axum::{Json, extract::State};
use serde_json::{Map, Value, json};

use super::{ApiError, Shared};
use crate::domain::{fleet::PoolStatus, names::Pool, tiers::Kind};

pub async fn status(State(context): Shared) -> Result<Json<Value>, ApiError> {
    let status = context.store.status().await?;
    let mut pools = Map::new();
    let mut merchants = Map::new();
    for pool in &status.pools {
        match &pool.pool {
            Pool::Tier(tier) => pools.insert(tier.to_string(), describe(pool)),
            Pool::Merchant(id) => merchants.insert(id.to_string(), describe(pool)),
        };
    }
    Ok(Json(json!({
        "status": "up",
        "is_leader": context.metrics.leader.get() == 1,
        "active_calls": status.active_calls,
        "waiting": status.waiting,
        "pools": pools,
        "merchants": merchants,
    })))
}

pub fn describe(pool: &PoolStatus) -> Value {
    let kind = match pool.kind {
        Some(Kind::Exclusive) => "exclusive",
        Some(Kind::Shared { .. }) => "shared",
        Some(Kind::Dedicated) => "dedicated",
        None => "removed",
    };
    let mut described = json!({
        "type": kind,
        "target": pool.target,
        "assigned": pool.assigned,
        "available": pool.available,
        "draining": pool.draining,
        "not_ready": pool.not_ready,
        "quarantined": pool.quarantined,
        "active_calls": pool.active_calls,
        "free_slots": pool.free_slots,
        "waiting": pool.waiting,
    });
    if let Some(Kind::Shared { max_concurrent, strategy }) = pool.kind {
        described["max_concurrent"] = json!(max_concurrent);
        described["strategy"] = json!(strategy);
    }
    described
}
