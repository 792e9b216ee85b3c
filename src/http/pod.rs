//! `GET /pod/{name}`: a pod and what it does.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{ApiError, Shared, pods::calls_of, reply::Named};
use crate::domain::{
    fleet::UnknownPod,
    names::{PodName, Pool},
};

pub async fn pod(
    State(context): Shared,
    Named(name): Named<PodName>,
) -> Result<Json<Value>, ApiError> {
    let pod = context.store.pod(&name).await?.ok_or(UnknownPod)?;
    Ok(Json(json!({
        "pod_name": pod.name,
        "tier": pod.pool.as_ref().map(Pool::as_tier_value).unwrap_or_default(),
        "address": pod.facts.address,
        "is_ready": pod.facts.ready,
        "is_terminating": pod.facts.terminating,
        "is_draining": pod.is_leaving(),
        "draining_until": pod.draining_until.map(|until| until / 1_000),
        "is_quarantined": pod.quarantined_until.is_some(),
        "quarantined_until": pod.quarantined_until.map(|until| until / 1_000),
        "has_active_lease": !pod.calls.is_empty(),
        "lease_call_sid": pod.calls.first().map(|call| call.call.to_string()).unwrap_or_default(),
        "calls": calls_of(&pod),
    })))
}
