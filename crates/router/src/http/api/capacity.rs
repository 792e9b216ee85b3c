//! `GET /capacity`: the pods that each pool should have.

use std::collections::BTreeMap;

use axum::{Json, extract::State, http::StatusCode};
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use crate::{
    capacity::{CapacitySnapshot, FORECAST_STEP, PoolCapacity, ScalingReport},
    http::{
        ApiError, Shared,
        openapi::{Endpoint, Group, schemas},
    },
};
use fleet::{Millis, capacity::Reason};

#[derive(Serialize, ToSchema)]
#[schema(as = CapacityForecast)]
struct ForecastJson {
    /// In unix seconds.
    at: u64,
    calls: f64,
    pods: u64,
}

/// The capacity of a pool.
#[derive(Serialize, ToSchema)]
#[schema(as = PoolCapacity)]
struct PoolCapacityJson {
    /// Pods that the pool should have. An autoscaler sets its replicas to this number.
    desired: u64,
    /// Slots for outbound dials: held for outstanding ones, or needed by waiting ones.
    dial_slots: u64,
    /// Calls that one pod carries at the same time.
    calls_per_pod: u64,
    /// Calls expected when a pod that starts now is ready.
    expected_calls: f64,
    /// Expected calls and the pods that they need, for the next two hours.
    forecast: Vec<ForecastJson>,
    /// Time in which pods of the pool idled within the last day, in pod-hours.
    idle_pod_hours: f64,
    live: u64,
    /// Pods that the forecast alone asks for.
    needed: u64,
    /// Pods that the policy asks for; `desired` is higher while surplus pods are in service or
    /// have calls.
    policy: u64,
    /// Pods in service, busy or idle.
    ready: u64,
    #[schema(value_type = schemas::CapacityReason)]
    reason: Reason,
    /// The start-up time that the policy plans with, in seconds.
    start_up: f64,
    starting: u64,
    waiting: u64,
    /// Dials that wait for a pod.
    waiting_dials: u64,
    /// The scaling of the tier's workload, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    scaling: Option<ScalingJson>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = PoolScaling)]
struct ScalingJson {
    /// The leader's setting `SCALING`.
    mode: String,
    /// Replicas of the workload, if the leader reads them.
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<u64>,
    /// Pods that are out of service because they are surplus.
    surplus: u64,
    /// An error that keeps the workload from being scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Another writer of the replicas; the router leaves them alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    conflict: Option<String>,
}

impl From<&ScalingReport> for ScalingJson {
    fn from(report: &ScalingReport) -> Self {
        let ScalingReport { mode, replicas, surplus, error, conflict } = report.clone();
        Self { mode, replicas, surplus, error, conflict }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CapacityJson {
    /// Time of the decisions, in unix milliseconds.
    at: Millis,
    /// Pools by tier name; dedicated pools as `merchant:acme`.
    pools: BTreeMap<String, PoolCapacityJson>,
    /// The router that took the decisions.
    router: String,
}

pub(crate) fn endpoint() -> Endpoint {
    let gold = PoolCapacityJson {
        calls_per_pod: 1,
        desired: 12,
        dial_slots: 0,
        expected_calls: 8.4,
        forecast: vec![ForecastJson { at: 1_763_280_300, calls: 8.9, pods: 13 }],
        idle_pod_hours: 31.5,
        live: 7,
        needed: 12,
        policy: 12,
        ready: 10,
        reason: Reason::Forecast,
        start_up: 45.0,
        starting: 2,
        waiting: 0,
        waiting_dials: 0,
        scaling: Some(ScalingJson {
            mode: "on".into(),
            replicas: Some(12),
            surplus: 0,
            error: None,
            conflict: None,
        }),
    };
    Endpoint::new(Group::Pods, "Get the number of pods that each pool should have")
        .responds(CapacityJson {
            at: 1_763_280_000_000,
            pools: BTreeMap::from([("gold".into(), gold)]),
            router: "smart-router-0".into(),
        })
        .error_with(
            503,
            "No router has taken decisions within 15 s, or `EVENTS` is off.",
            json!({"error": "no capacity decisions yet"}),
        )
}

pub(crate) async fn capacity(State(context): Shared) -> Result<Json<CapacityJson>, ApiError> {
    let unavailable = |error: String| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error);
    if !context.capacity.is_on {
        let error = "capacity decisions are off: they are taken from the events, and EVENTS is off";
        return Err(unavailable(error.into()));
    }
    let latest = context.capacity.latest();
    if latest.at == 0 {
        return Err(unavailable("no capacity decisions yet: retry in a few seconds".into()));
    }
    let age = context.store.now().saturating_sub(latest.at);
    if age > latest.max_age().as_millis() as Millis {
        let error = format!("the last capacity decisions are {} s old", age / 1_000);
        return Err(unavailable(error));
    }
    Ok(Json(json_of(&latest)))
}

fn json_of(snapshot: &CapacitySnapshot) -> CapacityJson {
    let pools = snapshot.pools.iter();
    CapacityJson {
        at: snapshot.at,
        pools: pools.map(|(pool, it)| (pool.as_tier_value(), pool_json(it, snapshot.at))).collect(),
        router: snapshot.router.clone(),
    }
}

fn pool_json(pool: &PoolCapacity, at: Millis) -> PoolCapacityJson {
    let point = |(index, (calls, pods)): (usize, &(f64, u64))| ForecastJson {
        at: at / 1_000 + (index as u64 + 1) * FORECAST_STEP,
        calls: *calls,
        pods: *pods,
    };
    PoolCapacityJson {
        calls_per_pod: pool.calls_per_pod,
        desired: pool.published,
        dial_slots: pool.dial_slots,
        expected_calls: pool.expected_calls,
        forecast: pool.forecast.iter().enumerate().map(point).collect(),
        idle_pod_hours: pool.idle_pod_hours,
        live: pool.live,
        needed: pool.needed,
        policy: pool.desired,
        ready: pool.ready,
        reason: pool.reason,
        start_up: pool.start_up,
        starting: pool.starting,
        waiting: pool.waiting,
        waiting_dials: pool.waiting_dials,
        scaling: pool.scaling.as_ref().map(ScalingJson::from),
    }
}
