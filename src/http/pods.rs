//! `/pods`: all pods and what they do.

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::{ApiError, Shared, calls::pool_filter, query::Query};
use crate::domain::{
    fleet::{PodCall, PodStatus},
    names::{PodName, Pool},
    tiers::{Kind, Tiers},
};

const FILTERS: [&str; 2] = ["pool", "state"];
const STATES: [&str; 6] =
    ["available", "busy", "draining", "not_ready", "terminating", "quarantined"];

/// In a word, what a pod does.
pub fn state(pod: &PodStatus) -> &'static str {
    match pod {
        _ if pod.facts.terminating => "terminating",
        _ if pod.draining_until.is_some() => "draining",
        _ if !pod.facts.ready => "not_ready",
        _ if pod.quarantined_until.is_some() => "quarantined",
        _ if !pod.calls.is_empty() => "busy",
        _ => "available",
    }
}

/// The calls of a pod, as callers see them.
pub fn calls_of(pod: &PodStatus) -> Vec<Value> {
    let shown = |call: &PodCall| {
        json!({
            "call_sid": call.call,
            "allocated_at": call.allocated_at / 1_000,
            "lease_expires_at": call.lease_until / 1_000,
        })
    };
    pod.calls.iter().map(shown).collect()
}

pub fn described(pod: &PodStatus, tiers: &Tiers) -> Value {
    let cap = match pod.pool.as_ref().and_then(|pool| tiers.kind(pool)) {
        Some(Kind::Shared { max_concurrent, .. }) => max_concurrent,
        _ => 1,
    };
    json!({
        "pod_name": pod.name,
        "tier": pod.pool.as_ref().map(Pool::as_tier_value).unwrap_or_default(),
        "state": state(pod),
        "cap": cap,
        "calls": calls_of(pod),
        "draining_until": pod.draining_until.map(|until| until / 1_000),
    })
}

pub async fn list(State(context): Shared, query: Query) -> Result<Json<Value>, ApiError> {
    query.only(&["pool", "state", "limit", "cursor"])?;
    let pool = pool_filter(&query, "pool")?;
    let wanted = query.text("state");
    if wanted.is_some_and(|wanted| !STATES.contains(&wanted)) {
        let expected = STATES.join(", ");
        return Err(ApiError::bad_request(format!("state: expected one of {expected}")));
    }
    let limit = query.limit(100, 1_000)?;
    let after = query.cursor(&FILTERS)?.map(|name| name.parse::<PodName>()).transpose()?;
    let (pods, tiers) = (context.store.pods().await?, context.store.tiers().await?);
    let mut matching = pods.iter().filter(|pod| pool.is_none() || pool == pod.pool).filter(|pod| {
        wanted.is_none_or(|wanted| wanted == state(pod))
            && after.as_ref().is_none_or(|after| pod.name > *after)
    });
    let page: Vec<&PodStatus> = matching.by_ref().take(limit).collect();
    let next = matching
        .next()
        .and_then(|_| page.last())
        .map(|last| query.next(&FILTERS, last.name.as_str()));
    let pods: Vec<Value> = page.iter().map(|pod| described(pod, &tiers)).collect();
    Ok(Json(json!({"pods": pods, "next": next})))
}
