//! `GET` and `PUT /tiers`: the tier table.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    etag::{IfMatch, conditional, conflict, etag},
    managed_elsewhere,
};
use crate::http::{
    ApiError, Context, RequestLog, Shared,
    middleware::{auth::Caller, body::JsonBody},
    openapi::{
        Endpoint, Group,
        schemas::{self, TierDocument},
    },
    webhooks::query::Query,
};
use fleet::{
    self, Edit, PodStatus,
    merchant::MerchantConfig,
    names::{PodName, Pool},
    tiers::{DocumentSource, TierKind, Tiers},
};

/// Result of a change of the tiers, or of its dry run.
#[derive(Serialize, ToSchema)]
struct TiersResponse {
    /// Only with `dry_run`: pods that would move.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    moves: Option<Vec<PodMove>>,
    /// Only without `dry_run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    success: Option<bool>,
    #[schema(value_type = TierDocument)]
    tiers: Tiers,
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
struct PodMove {
    #[schema(required)]
    from: Option<String>,
    /// Whether the pod has calls; it then moves when they end.
    is_busy: bool,
    #[schema(value_type = schemas::PodName)]
    pod_name: PodName,
    #[schema(required)]
    to: Option<String>,
}

pub(crate) fn get_endpoint() -> Endpoint {
    Endpoint::new(Group::Settings, "Get the tier document")
        .responds_untyped("application/json", schemas::tier_document(), example())
        .register_schema::<TierDocument>()
        .uses_store()
}

pub(crate) fn put_endpoint() -> Endpoint {
    let tiers = serde_json::from_value(example()).expect("a tier document");
    let endpoint = Endpoint::new(Group::Settings, "Replace the tier document")
        .query_param(
            "dry_run",
            schemas::one_of(&["true", "false", ""]),
            "Validate and list the pods that would move.",
        )
        .json_body::<TierDocument>(example())
        .responds(TiersResponse { moves: None, success: Some(true), tiers, warnings: Vec::new() })
        .uses_store();
    conditional(endpoint).error(
        409,
        "The document has no tier for some pods, objects of the cluster manage it, or another \
         request changed it at the same time.",
    )
}

fn example() -> Value {
    json!({
        "tiers": {
            "gold": {"type": "exclusive", "target": 2},
            "basic": {"type": "shared", "target": 1, "max_concurrent": 5, "strategy": "spread"},
        },
        "default_chain": ["gold", "basic"],
    })
}

pub(crate) async fn get(State(context): Shared) -> Result<Response, ApiError> {
    let tiers = context.snapshots.tiers().await?;
    Ok((etag(&text_of(&tiers)), Json(&*tiers)).into_response())
}

fn text_of(tiers: &Tiers) -> String {
    Value::from(tiers.clone()).to_string()
}

/// Merchants checked for references to removed tiers.
const MAX_MERCHANTS: usize = 1_000;

/// Warning about merchants whose chains reference tiers that the new table does not have.
async fn dangling_merchants(context: &Context, tiers: &Tiers) -> Result<Option<String>, ApiError> {
    let merchants = context.store.merchants(None, MAX_MERCHANTS).await?;
    let is_dangling = |document: &str| {
        MerchantConfig::parse(document).is_ok_and(|it| it.unknown_tier(tiers).is_some())
    };
    let dangling = merchants.iter().filter(|(_, document)| is_dangling(document));
    let names: Vec<&str> = dangling.map(|(id, _)| id.as_str()).collect();
    let shown = names.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    Ok((!names.is_empty()).then(|| {
        format!("{} merchants use tiers that are not in the document, such as {shown}", names.len())
    }))
}

/// Warning about pods with more calls than the new table allows.
fn pods_over_cap(tiers: &Tiers, pods: &[PodStatus]) -> Option<String> {
    let is_over_cap = |pod: &&PodStatus| {
        let cap = pod.pool.as_ref().and_then(|pool| tiers.kind(pool)).map(TierKind::cap);
        cap.is_some_and(|cap| pod.calls.len() > cap as usize)
    };
    let count = pods.iter().filter(is_over_cap).count();
    let pods = if count == 1 { "pod has" } else { "pods have" };
    (count > 0).then(|| {
        format!(
            "{count} {pods} more calls than the new limit; the calls continue, new calls follow \
             when there is room"
        )
    })
}

/// Replaces the tier table, or lists the pods that would move.
pub(crate) async fn put(
    State(context): Shared,
    query: Query,
    if_match: IfMatch,
    caller: Caller,
    JsonBody(body): JsonBody<Value>,
) -> Result<Response, ApiError> {
    query.only(&["dry_run"])?;
    let is_dry_run = query.flag("dry_run")?;
    let (tiers, mut warnings) = Tiers::parse(&body.to_string(), DocumentSource::Settings)
        .map_err(|error| ApiError::bad_request(format!("not a tier document: {error}")))?;
    let current = context.store.tiers().await?;
    if_match.check(Some(&text_of(&current)))?;
    let pods = context.snapshots.pods().await?;
    let moves = fleet::moves(&tiers, &pods);
    let busy = moves.iter().filter(|it| it.is_busy && it.to.is_some()).count();
    if busy > 0 {
        let (pods, their) = if busy == 1 { ("pod moves", "its") } else { ("pods move", "their") };
        warnings.push(format!("{busy} busy {pods} when {their} calls end"));
    }
    warnings.extend(pods_over_cap(&tiers, &pods));
    let stranded: Vec<&str> =
        moves.iter().filter(|it| it.to.is_none()).map(|it| it.pod.as_str()).collect();
    if !stranded.is_empty() {
        let shown = stranded.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        let count = stranded.len();
        let error = format!("the document has no tier for {count} pods, such as {shown}");
        return Err(ApiError::new(StatusCode::CONFLICT, error));
    }
    warnings.extend(dangling_merchants(&context, &tiers).await?);
    if is_dry_run {
        let tier = |pool: &Option<Pool>| pool.as_ref().map(Pool::as_tier_value);
        let moves = moves.iter().map(|it| PodMove {
            from: tier(&it.from),
            is_busy: it.is_busy,
            pod_name: it.pod.clone(),
            to: tier(&it.to),
        });
        let moves = Some(moves.collect());
        return Ok(Json(TiersResponse { moves, success: None, tiers, warnings }).into_response());
    }
    if let Some(owner) = current.managed_by() {
        managed_elsewhere(&context, "the tiers are", owner)?;
    }
    let edit = Edit { expected: Some(&current), by: &caller.to_string() };
    let applied = context.store.apply_tiers(&tiers, edit).await?;
    applied.map_err(|_| conflict(StatusCode::CONFLICT))?;
    context.reconcile_now.notify_one();
    let log = RequestLog { outcome: "tiers_applied", ..RequestLog::default() };
    let etag = etag(&text_of(&tiers));
    Ok(log
        .attach((etag, Json(TiersResponse { moves: None, success: Some(true), tiers, warnings }))))
}
