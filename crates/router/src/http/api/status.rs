//! `GET /status`: how all pools stand.

use crate::http::openapi::schemas;
use std::collections::BTreeMap;

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::{
    ApiError, Shared,
    openapi::{Endpoint, Group},
};
use fleet::{
    PoolStatus,
    names::Pool,
    tiers::{Kind, Strategy},
};

/// How a pool stands.
#[derive(Serialize, ToSchema)]
#[schema(as = PoolStatus)]
pub struct Described {
    active_calls: usize,
    assigned: usize,
    /// Pods in the available view; a full shared pod counts.
    available: usize,
    /// Draining or terminating.
    draining: usize,
    free_slots: usize,
    /// Of shared pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    max_concurrent: Option<u32>,
    not_ready: usize,
    quarantined: usize,
    /// Of shared pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::Strategy>)]
    strategy: Option<Strategy>,
    /// How many pods it wants.
    target: u32,
    /// `exclusive`, `shared`, `dedicated`, or `removed` for a tier that is gone but still has
    /// busy pods.
    r#type: &'static str,
    /// Calls that wait and may use it.
    waiting: usize,
}

#[derive(Serialize, ToSchema)]
pub struct Status {
    active_calls: usize,
    is_leader: bool,
    /// Which router leads, as the Lease says; without one, or if it can't be read, this is left
    /// out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    leader: Option<String>,
    /// The pools of merchants, by their ids.
    merchants: BTreeMap<String, Described>,
    /// The pools of tiers, by their names.
    pools: BTreeMap<String, Described>,
    status: &'static str,
    waiting: usize,
}

pub fn described() -> Endpoint {
    let gold = Described {
        active_calls: 1,
        assigned: 2,
        available: 1,
        draining: 0,
        free_slots: 1,
        max_concurrent: None,
        not_ready: 0,
        quarantined: 0,
        strategy: None,
        target: 2,
        r#type: "exclusive",
        waiting: 0,
    };
    Endpoint::new(Group::Router, "How all pools stand")
        .gives(Status {
            active_calls: 1,
            is_leader: true,
            leader: Some("smart-router-0".into()),
            merchants: BTreeMap::new(),
            pools: BTreeMap::from([("gold".into(), gold)]),
            status: "up",
            waiting: 0,
        })
        .asks_store()
}

pub async fn status(State(context): Shared) -> Result<Json<Status>, ApiError> {
    let status = context.snapshots.status().await?;
    let (mut pools, mut merchants) = (BTreeMap::new(), BTreeMap::new());
    for pool in &status.pools {
        match &pool.pool {
            Pool::Tier(tier) => pools.insert(tier.to_string(), describe(pool)),
            Pool::Merchant(id) => merchants.insert(id.to_string(), describe(pool)),
        };
    }
    Ok(Json(Status {
        active_calls: status.active_calls,
        is_leader: context.metrics.leader.get() == 1,
        leader: context.lifecycle.leader(),
        merchants,
        pools,
        status: "up",
        waiting: status.waiting,
    }))
}

pub fn describe(pool: &PoolStatus) -> Described {
    let kind = match pool.kind {
        Some(Kind::Exclusive) => "exclusive",
        Some(Kind::Shared { .. }) => "shared",
        Some(Kind::Dedicated) => "dedicated",
        None => "removed",
    };
    let (max_concurrent, strategy) = match pool.kind {
        Some(Kind::Shared { max_concurrent, strategy }) => (Some(max_concurrent), Some(strategy)),
        _ => (None, None),
    };
    Described {
        active_calls: pool.active_calls,
        assigned: pool.assigned,
        available: pool.available,
        draining: pool.draining,
        free_slots: pool.free_slots,
        max_concurrent,
        not_ready: pool.not_ready,
        quarantined: pool.quarantined,
        strategy,
        target: pool.target,
        r#type: kind,
        waiting: pool.waiting,
    }
}
