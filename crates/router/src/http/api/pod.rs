//! `GET /pod/{name}`: one pod with its state and calls.

use crate::http::openapi::schemas;
use axum::{Json, extract::State};
use serde::Serialize;
use serde_json::json;
use utoipa::{PartialSchema, ToSchema};

use super::pods::{CallOnPod, calls_of};
use crate::http::{
    ApiError, Shared,
    openapi::{Endpoint, Group},
    reply::PathName,
};
use fleet::{
    UnknownPod,
    names::{PodName, Pool},
};

#[derive(Serialize, ToSchema)]
pub(crate) struct Pod {
    address: String,
    calls: Vec<CallOnPod>,
    #[schema(required)]
    draining_until: Option<u64>,
    has_active_lease: bool,
    /// Whether the pod is the last choice: its node is cordoned, or its eviction is announced.
    is_at_risk: bool,
    is_draining: bool,
    is_quarantined: bool,
    is_ready: bool,
    is_terminating: bool,
    /// Id of the pod's first call, or empty.
    lease_call_sid: String,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    #[schema(required)]
    quarantined_until: Option<u64>,
    /// `gold`, `merchant:acme`, or empty.
    tier: String,
}

pub(crate) fn endpoint() -> Endpoint {
    let example = Pod {
        address: "10.0.0.7:8000".into(),
        calls: vec![CallOnPod::example()],
        draining_until: None,
        has_active_lease: true,
        is_at_risk: false,
        is_draining: false,
        is_quarantined: false,
        is_ready: true,
        is_terminating: false,
        lease_call_sid: "CA1".into(),
        pod_name: "voice-agent-0".parse().expect("a name"),
        quarantined_until: None,
        tier: "gold".into(),
    };
    Endpoint::new(Group::Pods, "Get a pod")
        .path_param("name", schemas::PodName::schema(), "voice-agent-0")
        .responds(example)
        .error(400, "The pod name is invalid.")
        .error_with(404, "The pod is unknown.", json!({"error": "pod not found"}))
        .uses_store()
}

pub(crate) async fn pod(
    State(context): Shared,
    PathName(name): PathName<PodName>,
) -> Result<Json<Pod>, ApiError> {
    let pod = context.store.pod(&name).await?.ok_or(UnknownPod)?;
    Ok(Json(Pod {
        address: pod.facts.address.to_string(),
        calls: calls_of(&pod),
        draining_until: pod.draining_until.map(|until| until / 1_000),
        has_active_lease: !pod.calls.is_empty(),
        is_at_risk: pod.facts.at_risk,
        is_draining: pod.is_leaving(),
        is_quarantined: pod.quarantined_until.is_some(),
        is_ready: pod.facts.ready,
        is_terminating: pod.facts.terminating,
        lease_call_sid: pod.calls.first().map(|call| call.call.to_string()).unwrap_or_default(),
        pod_name: pod.name,
        quarantined_until: pod.quarantined_until.map(|until| until / 1_000),
        tier: pod.pool.as_ref().map(Pool::as_tier_value).unwrap_or_default(),
    }))
}
