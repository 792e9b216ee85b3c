//! `GET /pods`: all pods with their state and calls.

use std::time::Duration;

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use super::calls::pool_filter;
use crate::http::{
    ApiError, Shared,
    openapi::{Endpoint, Group, schemas},
    webhooks::query::Query,
};
use fleet::{
    PodCall, PodStatus,
    names::{CallSid, PodName, Pool},
    tiers::{TierKind, Tiers},
};

const FILTERS: [&str; 2] = ["pool", "state"];
/// Age up to which later pages reuse the read of the first page.
const MAX_PAGE_AGE: Duration = Duration::from_secs(5);
const STATES: [&str; 6] =
    ["available", "busy", "draining", "not_ready", "terminating", "quarantined"];

/// A call on a pod.
#[derive(Serialize, ToSchema)]
pub(super) struct CallOnPod {
    allocated_at: u64,
    #[schema(value_type = schemas::CallSid)]
    call_sid: CallSid,
    lease_expires_at: u64,
}

impl CallOnPod {
    pub(super) fn example() -> Self {
        let call_sid = "CA1".parse().expect("a name");
        Self { allocated_at: 1_763_280_000, call_sid, lease_expires_at: 1_763_280_900 }
    }
}

/// A pod in a list.
#[derive(Serialize, ToSchema)]
pub(super) struct ListedPod {
    calls: Vec<CallOnPod>,
    /// Maximum number of calls.
    cap: u32,
    #[schema(required)]
    draining_until: Option<u64>,
    /// Whether the pod is the last choice: its node is cordoned, or its eviction is announced.
    is_at_risk: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    /// `available`, `busy`, `draining`, `not_ready`, `terminating` or `quarantined`.
    state: &'static str,
    /// `gold`, `merchant:acme`, or empty.
    tier: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Pods {
    /// Cursor of the next page.
    #[schema(required)]
    next: Option<String>,
    pods: Vec<ListedPod>,
}

pub(crate) fn list_endpoint() -> Endpoint {
    let example = ListedPod {
        calls: vec![CallOnPod::example()],
        cap: 1,
        draining_until: None,
        is_at_risk: false,
        pod_name: "voice-agent-0".parse().expect("a name"),
        state: "busy",
        tier: "gold".into(),
    };
    Endpoint::new(Group::Pods, "List pods by name")
        .query_param("pool", schemas::pool_or_empty(), "Only this pool.")
        .query_param("state", schemas::one_of_or_empty(&STATES), "Only this state.")
        .paginated(100, 1_000)
        .responds(Pods { next: None, pods: vec![example] })
        .uses_store()
}

pub(super) fn state(pod: &PodStatus) -> &'static str {
    match pod {
        _ if pod.facts.terminating => "terminating",
        _ if pod.draining_until.is_some() => "draining",
        _ if !pod.facts.ready => "not_ready",
        _ if pod.quarantined_until.is_some() => "quarantined",
        _ if !pod.calls.is_empty() => "busy",
        _ => "available",
    }
}

pub(super) fn calls_of(pod: &PodStatus) -> Vec<CallOnPod> {
    let call_json = |call: &PodCall| CallOnPod {
        allocated_at: call.allocated_at / 1_000,
        call_sid: call.call.clone(),
        lease_expires_at: call.lease_until / 1_000,
    };
    pod.calls.iter().map(call_json).collect()
}

pub(super) fn pod_json(pod: &PodStatus, tiers: &Tiers) -> ListedPod {
    let cap = pod.pool.as_ref().and_then(|pool| tiers.kind(pool)).map_or(1, TierKind::cap);
    ListedPod {
        calls: calls_of(pod),
        cap,
        draining_until: pod.draining_until.map(|until| until / 1_000),
        is_at_risk: pod.facts.at_risk,
        pod_name: pod.name.clone(),
        state: state(pod),
        tier: pod.pool.as_ref().map(Pool::as_tier_value).unwrap_or_default(),
    }
}

pub(crate) async fn list(State(context): Shared, query: Query) -> Result<Json<Pods>, ApiError> {
    query.only(&["pool", "state", "limit", "cursor"])?;
    let pool = pool_filter(&query, "pool")?;
    let wanted = query.text("state");
    if wanted.is_some_and(|wanted| !STATES.contains(&wanted)) {
        let expected = STATES.join(", ");
        return Err(ApiError::bad_request(format!("state: expected one of {expected}")));
    }
    let limit = query.limit(100, 1_000)?;
    let after = query.cursor(&FILTERS)?.map(|name| name.parse::<PodName>()).transpose()?;
    // Pages that are requested in quick succession come from one consistent read.
    let max_age = if after.is_some() { MAX_PAGE_AGE } else { Duration::ZERO };
    let (pods, tiers) =
        (context.snapshots.pods_not_older_than(max_age).await?, context.snapshots.tiers().await?);
    let mut matching = pods.iter().filter(|pod| pool.is_none() || pool == pod.pool).filter(|pod| {
        wanted.is_none_or(|wanted| wanted == state(pod))
            && after.as_ref().is_none_or(|after| pod.name > *after)
    });
    let page: Vec<&PodStatus> = matching.by_ref().take(limit).collect();
    let next = matching
        .next()
        .and_then(|_| page.last())
        .map(|last| query.next(&FILTERS, last.name.as_str()));
    let pods = page.iter().map(|pod| pod_json(pod, &tiers)).collect();
    Ok(Json(Pods { next, pods }))
}
