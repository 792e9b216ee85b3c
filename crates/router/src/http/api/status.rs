//! `GET /status`: status of all pools.

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
    tiers::{Strategy, TierKind},
};

/// Status of a pool.
#[derive(Serialize, ToSchema)]
#[schema(as = PoolStatus)]
pub(super) struct PoolStatusJson {
    active_calls: usize,
    assigned: usize,
    /// Pods in the index of available pods; includes full shared pods.
    available: usize,
    /// Draining or terminating pods.
    draining: usize,
    free_slots: usize,
    /// Calls per pod; shared pools only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    max_concurrent: Option<u32>,
    not_ready: usize,
    quarantined: usize,
    /// Shared pools only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    #[schema(value_type = Option<schemas::Strategy>)]
    strategy: Option<Strategy>,
    /// Wanted number of pods.
    target: u32,
    /// `exclusive`, `shared`, `dedicated`, or `removed` for a removed tier that still has busy
    /// pods.
    r#type: &'static str,
    /// Waiting calls that may use this pool.
    waiting: usize,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Status {
    active_calls: usize,
    is_leader: bool,
    /// Leader according to the Lease; absent without a Lease or if it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    leader: Option<String>,
    /// Dedicated pools by merchant id.
    merchants: BTreeMap<String, PoolStatusJson>,
    /// Pools by tier name.
    pools: BTreeMap<String, PoolStatusJson>,
    status: &'static str,
    waiting: usize,
}

pub(crate) fn endpoint() -> Endpoint {
    let gold = PoolStatusJson {
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
    Endpoint::new(Group::Router, "Get the status of all pools")
        .responds(Status {
            active_calls: 1,
            is_leader: true,
            leader: Some("smart-router-0".into()),
            merchants: BTreeMap::new(),
            pools: BTreeMap::from([("gold".into(), gold)]),
            status: "up",
            waiting: 0,
        })
        .uses_store()
}

pub(crate) async fn status(State(context): Shared) -> Result<Json<Status>, ApiError> {
    let status = context.snapshots.status().await?;
    let (mut pools, mut merchants) = (BTreeMap::new(), BTreeMap::new());
    for pool in &status.pools {
        match &pool.pool {
            Pool::Tier(tier) => pools.insert(tier.to_string(), pool_status_json(pool)),
            Pool::Merchant(id) => merchants.insert(id.to_string(), pool_status_json(pool)),
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

pub(super) fn pool_status_json(pool: &PoolStatus) -> PoolStatusJson {
    let kind = match pool.kind {
        Some(TierKind::Exclusive) => "exclusive",
        Some(TierKind::Shared { .. }) => "shared",
        Some(TierKind::Dedicated) => "dedicated",
        None => "removed",
    };
    let (max_concurrent, strategy) = match pool.kind {
        Some(TierKind::Shared { max_concurrent, strategy }) => {
            (Some(max_concurrent), Some(strategy))
        }
        _ => (None, None),
    };
    PoolStatusJson {
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
